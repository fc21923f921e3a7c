//! Rows that the broker does not take.

use sqlx::Row;
use tierline::amqp::{Connection, Severity, apply};
use tierline::dead::{Filter, Page, Reason};
use tierline::topology::plan::Plan;
use tierline::{Registry, Topology, backlog};

use super::{MAP, Pay, Relaying, Ship, Shop, ids, ship_all};
use crate::amqp::until;
use crate::worker::Heard;

#[tokio::test(flavor = "multi_thread")]
async fn rows_of_a_full_queue_wait_in_their_order_and_hold_up_no_other_tier() {
    const ROWS: u32 = 1_000;
    const LENGTH: usize = 50;
    let shop = Shop::open().await;
    let sent = ship_all(&shop, 0..ROWS).await;
    let full = MAP.replace(
        "\"classic\"",
        &format!("\"classic\"\nmax_length = {LENGTH}"),
    );
    let relaying = shop.relay(&full).await;
    relaying.heard.until("relayed", LENGTH).await;
    for order in 0..20 {
        shop.rows.publish(Pay { order }).await.unwrap();
        shop.take("shop.critical", 1).await;
    }
    // They are given back: another process may take them.
    until("rows wait", async || {
        let [_, ready, running] = shop.count().await;
        ready > 0 && running <= 1
    })
    .await;
    let attempts: i64 =
        sqlx::query_scalar("SELECT count(*) FROM tierline.ready WHERE properties IS NOT NULL")
            .fetch_one(&shop.pool)
            .await
            .unwrap();
    assert_eq!(attempts, 0, "a row that was refused is as it was");

    let taken = shop.take("shop.bulk", ROWS as usize).await;
    shop.until_no_rows().await;
    relaying.end().await;
    let ids = ids(&taken);
    assert!(ids.values().all(|times| *times == 1));
    assert_eq!(ids.into_keys().collect::<Vec<_>>(), sent);
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_of_a_queue_that_is_gone_wait_until_it_is_back() {
    let shop = Shop::open().await;
    let relaying = shop.relay(MAP).await;
    let channel = shop.channel().await;
    let deleting = channel.queue_delete("shop.bulk".into(), Default::default());
    deleting.await.unwrap();
    shop.rows.publish(Ship { order: 1 }).await.unwrap();
    shop.rows.publish(Pay { order: 1 }).await.unwrap();
    shop.take("shop.critical", 1).await;
    until("the other row waits", async || {
        shop.count().await == [0, 1, 0]
    })
    .await;

    let connection = Connection::open(shop.vhost.amqp_url(), "test")
        .await
        .unwrap();
    let topology = Topology::parse(MAP).unwrap();
    let plan = Plan::new(&topology, connection.version(), true).unwrap();
    apply(&connection, &plan).await.unwrap();
    shop.take("shop.bulk", 1).await;
    shop.until_no_rows().await;
    relaying.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_row_that_can_never_be_published_is_a_dead_letter_with_its_reason() {
    let shop = Shop::open().await;
    let small = MAP.replace(
        "[tiers.critical]",
        "[broker]\nmax_message_size = \"1KiB\"\n[tiers.critical]",
    );
    let small = small.replace("\"order.pay\" = \"critical\"", "");
    shop.rows.publish(Pay { order: 1 }).await.unwrap();
    let large = serde_json::json!({ "order": 2, "note": "x".repeat(2_000) });
    shop.rows.publish_named("order.ship", &large).await.unwrap();
    shop.rows
        .publish(Ship { order: 3 })
        .id("x".repeat(300))
        .await
        .unwrap_err();
    shop.rows.publish(Ship { order: 3 }).await.unwrap();
    // As only a producer without the library can write it.
    let name =
        "UPDATE tierline.ready SET name = repeat('x', 300) WHERE payload = '{\"order\":3}'::bytea";
    shop.execute(name).await;

    let heard = Heard::default();
    let app = shop.app(&small, Registry::new(), &heard).await;
    let relaying = Relaying::begin(app.relay().unwrap(), heard);
    shop.until_no_rows().await;
    let letters = app.dead_letters().unwrap();
    let page = letters
        .list(&Filter::default(), Page::default())
        .await
        .unwrap();
    let mut found: Vec<_> = page
        .letters
        .iter()
        .map(|it| (it.task.clone().unwrap(), it.reason))
        .collect();
    found.sort_by_key(|(task, reason)| (task.clone(), reason.as_str()));
    let ship = || "order.ship".to_owned();
    let expected = [
        ("order.pay".to_owned(), Reason::UnknownTask),
        (ship(), Reason::Undecodable),
        (ship(), Reason::Unpublishable),
    ];
    assert_eq!(found, expected);
    let errors = sqlx::query("SELECT error FROM tierline.dead_letters ORDER BY id");
    let errors = errors.fetch_all(&shop.pool).await.unwrap();
    let errors: Vec<String> = errors.iter().map(|row| row.get("error")).collect();
    let says = |text: &str| errors.iter().any(|error| error.contains(text));
    assert!(says("max_message_size of the map is 1024"), "{errors:?}");
    assert!(
        says("its id or its task has more than 255 bytes"),
        "{errors:?}"
    );
    assert!(says("not mapped to a tier"), "{errors:?}");
    relaying.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_doctor_names_rows_that_nobody_takes_and_is_content_with_a_relay() {
    let shop = Shop::open().await;
    ship_all(&shop, 0..3).await;
    let full = MAP.replace("\"classic\"", "\"classic\"\nmax_length = 1");
    let topology = Topology::parse(&full).unwrap();
    let database = tierline::Database::new(shop.database.url()).unwrap();
    let examine = async || {
        let report = backlog::doctor(&database, &topology, backlog::LONG_TRANSACTION).await;
        report.unwrap()
    };
    let report = examine().await;
    let finding = &report.findings[0];
    assert_eq!(
        (finding.severity, finding.object.as_str()),
        (Severity::Warning, "tier bulk")
    );
    let what = "is on the broker, and 3 tasks wait in Postgres, the oldest for ";
    assert!(finding.what.starts_with(what), "{report}");
    assert!(finding.help.contains("Tierline::relay"), "{report}");
    // Two of them wait on: their queue is full.
    let relaying = shop.relay(&full).await;
    until("nothing is found", async || {
        examine().await.findings.is_empty()
    })
    .await;
    relaying.end().await;
}
