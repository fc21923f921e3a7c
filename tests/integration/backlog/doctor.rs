//! What the doctor finds in a database, each provoked.

use std::time::Duration;

use sqlx::{Connection, Executor, PgConnection};
use tierline::amqp::{Finding, Report, Severity};
use tierline::backlog::{self, LONG_TRANSACTION};
use tierline::{Registry, Topology};
use tierline_testbed::database;

use super::{MAP, Ship, Shop, shipping};
use crate::amqp::until;

async fn examine(shop: &Shop) -> Report {
    examine_for(shop, MAP, LONG_TRANSACTION).await
}

async fn examine_for(shop: &Shop, map: &str, long_transaction: Duration) -> Report {
    let database = tierline::Database::new(shop.database.url()).unwrap();
    let topology = Topology::parse(map).unwrap();
    let report = backlog::doctor(&database, &topology, long_transaction).await;
    database.close().await;
    report.unwrap()
}

/// The one thing to mend.
fn only(report: &Report) -> &Finding {
    let mut findings = report.findings.iter();
    let mut findings = findings.by_ref().filter(|it| it.severity > Severity::Note);
    let first = findings
        .next()
        .unwrap_or_else(|| panic!("no finding: {report}"));
    assert_eq!(findings.next(), None, "{report}");
    first
}

async fn execute(shop: &Shop, statement: &str) {
    let mut connection = PgConnection::connect(shop.database.url()).await.unwrap();
    let statement = sqlx::AssertSqlSafe(statement.to_owned());
    connection.execute(statement).await.unwrap();
}

async fn shop() -> Shop {
    Shop::open(MAP, Registry::new()).await
}

#[tokio::test]
async fn a_database_with_a_worker_gives_no_finding() {
    let (registry, _) = shipping();
    let shop = Shop::open(MAP, registry).await;
    let working = shop.work();
    let mut report = examine(&shop).await;
    let is_clean = async || {
        report = examine(&shop).await;
        report.findings.is_empty()
    };
    until("nothing is found", is_clean).await;
    assert_eq!(report.not_checked, [] as [&str; 0]);
    working.end().await;
}

#[tokio::test]
async fn what_was_just_applied_is_well_and_an_idle_tier_is_noted() {
    let fresh = database().await;
    let (database, topology) = (
        tierline::Database::new(fresh.url()).unwrap(),
        Topology::parse(MAP).unwrap(),
    );
    let empty = backlog::doctor(&database, &topology, LONG_TRANSACTION).await;
    let empty = empty.unwrap();
    assert_eq!(only(&empty).severity, Severity::Error);
    assert!(only(&empty).what.contains("lacks migrations"), "{empty}");
    let plan = backlog::plan(&database, &topology).await.unwrap();
    assert!(plan.migrations.contains(&"backlog".to_owned()), "{plan}");
    assert_eq!((plan.tiers.len(), plan.tiers[0].number), (1, None));

    let applied = backlog::apply(&database, &topology).await.unwrap();
    assert_eq!(applied.migrations, plan.migrations);
    assert_eq!(applied.new_tiers, ["normal"]);
    let plan = backlog::plan(&database, &topology).await.unwrap();
    assert!(plan.migrations.is_empty() && plan.tiers[0].number.is_some());
    let again = backlog::apply(&database, &topology).await.unwrap();
    assert!(again.migrations.is_empty() && again.new_tiers.is_empty());

    let report = backlog::doctor(&database, &topology, LONG_TRANSACTION).await;
    let report = report.unwrap();
    assert!(report.is_well(), "{report}");
    assert_eq!(report.findings[0].what, "nobody works on it");
}

#[tokio::test]
async fn a_transaction_that_is_held_open_is_named_with_its_pid() {
    let shop = shop().await;
    let mut holder = PgConnection::connect(shop.database.url()).await.unwrap();
    let held = "SET application_name = 'report'; BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT 1";
    holder.execute(held).await.unwrap();
    let pid: i32 = sqlx::query_scalar("SELECT pg_backend_pid()")
        .fetch_one(&mut holder)
        .await
        .unwrap();

    assert!(examine(&shop).await.is_well(), "it is not open for long");
    let report = examine_for(&shop, MAP, Duration::ZERO).await;
    let finding = only(&report);
    assert_eq!(finding.object, format!("session {pid}"));
    for part in ["open for ", "\"idle in transaction\"", "\"report\""] {
        assert!(finding.what.contains(part), "{part}: {report}");
    }
    let end = format!("pg_terminate_backend({pid})");
    assert!(finding.help.contains(&end), "{report}");

    holder.execute("ROLLBACK").await.unwrap();
    assert!(examine_for(&shop, MAP, Duration::ZERO).await.is_well());
}

#[tokio::test]
async fn a_dropped_index_and_one_that_is_invalid_are_named_with_the_way_back() {
    let shop = shop().await;
    execute(&shop, "DROP INDEX tierline.ready_order").await;
    let report = examine(&shop).await;
    assert_eq!(only(&report).object, "index tierline.ready_order");
    let create = only(&report).help.strip_prefix("run ").unwrap();
    execute(&shop, create).await;
    assert!(examine(&shop).await.is_well());

    execute(
        &shop,
        "UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'tierline.scheduled_order'::regclass",
    )
    .await;
    let report = examine(&shop).await;
    assert_eq!(only(&report).object, "index tierline.scheduled_order");
    execute(&shop, only(&report).help.strip_prefix("run ").unwrap()).await;
    assert!(examine(&shop).await.is_well());
}

#[tokio::test]
async fn autovacuum_that_is_off_for_a_table_and_changed_parameters_are_named() {
    let shop = shop().await;
    let disable = "ALTER TABLE tierline.ready SET (autovacuum_enabled = false)";
    execute(&shop, disable).await;
    let report = examine(&shop).await;
    assert_eq!(only(&report).object, "table tierline.ready");
    assert!(only(&report).what.contains("autovacuum is off"), "{report}");
    execute(&shop, only(&report).help.strip_prefix("run ").unwrap()).await;

    let reset = "ALTER TABLE tierline.running RESET (autovacuum_vacuum_scale_factor)";
    execute(&shop, reset).await;
    let report = examine(&shop).await;
    assert_eq!(only(&report).object, "table tierline.running");
    execute(&shop, only(&report).help.strip_prefix("run ").unwrap()).await;
    assert!(examine(&shop).await.is_well());
}

#[tokio::test]
async fn tasks_that_nobody_takes_are_counted_and_workers_end_it() {
    let (registry, _) = shipping();
    let shop = Shop::open(MAP, registry).await;
    for order in 0..3 {
        shop.app.publish(Ship { order }).await.unwrap();
    }
    let report = examine(&shop).await;
    assert_eq!(only(&report).object, "tier normal");
    let what = &only(&report).what;
    assert!(
        what.starts_with("nobody works on it, and 3 tasks wait"),
        "{what}"
    );
    let working = shop.work();
    until("nobody waits", async || examine(&shop).await.is_well()).await;
    working.end().await;
}

#[tokio::test]
async fn tasks_of_a_tier_that_left_the_map_or_moved_to_the_broker_are_named() {
    let shop = shop().await;
    shop.app.publish(Ship { order: 1 }).await.unwrap();
    shop.app
        .publish(Ship { order: 2 })
        .delay("1h")
        .await
        .unwrap();
    let renamed = MAP.replace("normal", "usual");
    let report = examine_for(&shop, &renamed, LONG_TRANSACTION).await;
    assert_eq!(only(&report).object, "tier normal");
    let left = "is no longer in the file, and 2 tasks are still in Postgres";
    assert_eq!(only(&report).what, left);

    let moved = MAP
        .replace("postgres", "quorum")
        .replace("lease = \"2s\"", "");
    let report = examine_for(&shop, &moved, LONG_TRANSACTION).await;
    let what = &only(&report).what;
    let left = "is on the broker, and 1 task waits in Postgres, the oldest for ";
    assert!(
        what.starts_with(left) && what.ends_with("nobody takes them"),
        "{what}"
    );
}

#[tokio::test]
async fn tasks_of_a_dead_worker_that_nobody_took_over_are_named() {
    let shop = shop().await;
    shop.app.publish(Ship { order: 1 }).await.unwrap();
    execute(
        &shop,
        "WITH dead AS ( \
            INSERT INTO tierline.workers (app, name, version, leases, heartbeat_at) \
            VALUES ('shop', 'host-1:77', '1', '{\"normal\": 2}', now() - interval '1 minute') RETURNING id \
         ), taken AS (DELETE FROM tierline.ready RETURNING ready.*) \
         INSERT INTO tierline.running (id, due_at, token, worker, backlog, rank, task, payload) \
         SELECT taken.id, due_at, 1, dead.id, backlog, rank, task, payload FROM taken, dead",
    )
    .await;
    let report = examine(&shop).await;
    let what = &only(&report).what;
    let held = "1 task is still held by worker host-1:77, whose last heartbeat was 1m";
    assert!(what.starts_with(held), "{report}");
}

#[tokio::test]
async fn a_schema_of_a_newer_release_is_noted() {
    let shop = shop().await;
    execute(
        &shop,
        "INSERT INTO tierline.migrations SELECT 9999, 'of next year', now(), true, checksum, 1 \
         FROM tierline.migrations LIMIT 1",
    )
    .await;
    let report = examine(&shop).await;
    assert!(report.is_well(), "{report}");
    let newer = "a newer release has migrated it (migrations 9999)";
    assert!(
        report.findings.iter().any(|it| it.what == newer),
        "{report}"
    );
}

#[tokio::test]
async fn a_user_who_may_not_see_other_sessions_is_told_so() {
    let shop = shop().await;
    let role = format!("looker_{}", std::process::id());
    let prepare = format!(
        "CREATE ROLE {role} LOGIN PASSWORD 'x'; GRANT USAGE ON SCHEMA tierline TO {role}; \
         GRANT SELECT ON ALL TABLES IN SCHEMA tierline TO {role}"
    );
    execute(&shop, &prepare).await;
    let url = shop.database.url();
    let (_, rest) = url.split_once("://").unwrap();
    let host = rest.rsplit_once('@').map_or(rest, |(_, host)| host);
    let database = tierline::Database::new(&format!("postgres://{role}:x@{host}")).unwrap();
    let topology = Topology::parse(MAP).unwrap();
    let report = backlog::doctor(&database, &topology, LONG_TRANSACTION).await;
    database.close().await;
    execute(&shop, &format!("DROP OWNED BY {role}; DROP ROLE {role}")).await;
    let report = report.unwrap();
    assert!(report.is_well(), "{report}");
    let grant = format!("GRANT pg_read_all_stats TO \"{role}\"");
    assert!(report.not_checked[0].contains(&grant), "{report}");
}
