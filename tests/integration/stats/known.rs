//! What statistics say of a system that is well.

use std::time::Duration;

use sqlx::{Connection, PgConnection};
use tierline::stats::{TierHome, TierStats};

use super::{CountOrders, Mail, Ship, Shop, builder, shown, tier};

#[tokio::test]
async fn depths_are_those_of_both_homes() {
    let shop = Shop::open().await;
    shop.publish(3, || Ship::Succeed).await;
    shop.publish(4, || Mail {}).await;
    for _ in 0..2 {
        shop.app.publish(Mail {}).priority(9).await.unwrap();
    }
    shop.app.publish(Mail {}).delay("1h").await.unwrap();
    let stats = shop.stats().await;
    assert_eq!(stats.problems, []);
    let names: Vec<&str> = stats.tiers.iter().map(|tier| tier.tier.as_str()).collect();
    assert_eq!(names, ["urgent", "normal", "mail"]);
    // A classic queue may count a message a moment after its confirm.
    let ships = shop.tier_when("urgent", |it| it.messages == Some(3)).await;
    assert_eq!(
        (ships.home, shown(ships.waiting).as_str()),
        (TierHome::Classic, "3")
    );
    assert_eq!((ships.consumers, ships.processes), (Some(0), Some(0)));
    let mail = tier(&stats, "mail");
    assert_eq!((mail.messages, shown(mail.waiting).as_str()), (None, "6"));
    let by_priority = mail.by_priority.as_ref().unwrap().iter();
    let by_priority: Vec<_> = by_priority
        .map(|it| (it.priority, it.rows.to_string()))
        .collect();
    assert_eq!(by_priority, [(9, "2".to_owned()), (5, "4".to_owned())]);
    assert_eq!(shown(mail.scheduled), "1");
    let oldest = mail.oldest.unwrap();
    assert!(!oldest.is_estimate && oldest.age < Duration::from_secs(60));
    assert_eq!(
        mail.limit.as_ref().unwrap().limit,
        "100/s with bursts of 100"
    );
    assert_eq!(shown(tier(&stats, "normal").waiting), "0");
    shop.app.close().await;
}

#[tokio::test]
async fn a_deep_tier_is_counted_up_to_a_bound_and_rare_priorities_are_still_seen() {
    let shop = Shop::open().await;
    shop.publish(1, || Mail {}).await;
    sqlx::query(
        "INSERT INTO tierline.ready (id, due_at, backlog, rank, task, payload) \
         SELECT gen_random_uuid(), now() - interval '1 hour', backlog, new.rank, task, payload \
         FROM tierline.ready CROSS JOIN (VALUES (-7, 12000), (-3, 50), (0, 500)) AS new (rank, rows) \
         CROSS JOIN LATERAL generate_series(1, new.rows)",
    )
    .execute(&shop.pool().await)
    .await
    .unwrap();
    let stats = shop.stats().await;
    let mail = tier(&stats, "mail");
    assert!(shown(mail.waiting).starts_with("≥ 10,"), "{mail:#?}");
    let by_priority = mail.by_priority.as_ref().unwrap().iter();
    let by_priority: Vec<_> = by_priority
        .map(|it| (it.priority, it.rows.to_string()))
        .collect();
    let expected = [(7, "≥ 10,000"), (5, "1"), (3, "50"), (0, "≥ 100")];
    assert_eq!(
        by_priority,
        expected.map(|(priority, rows)| (priority, rows.to_owned()))
    );
    let hour = Duration::from_secs(3_600);
    assert!((hour..hour * 2).contains(&mail.oldest.unwrap().age));
    shop.app.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rates_waits_and_dead_letters_follow_from_what_has_run() {
    let shop = Shop::open().await;
    shop.publish(20, || Ship::Succeed).await;
    shop.publish(2, || Ship::Die).await;
    shop.publish(5, || Mail {}).await;
    let working = shop.work();
    shop.tier_when("urgent", |it| it.dead.is_some_and(|it| it.dead == 2))
        .await;
    shop.tier_when("mail", |it| shown(it.waiting) == "0").await;
    // What a process has counted is in the database when its worker has ended.
    working.end().await;
    let urgent = shop
        .tier_when("urgent", |it| {
            it.slo.is_some_and(|it| it.met_last_hour.is_some())
        })
        .await;
    assert_eq!(urgent.slo.unwrap().met_last_hour, Some(1.0));
    assert_eq!(urgent.slo.unwrap().budget_left, Some(1.0));
    assert!(urgent.rate_in.unwrap() > 0.0 && urgent.rate_out.unwrap() > 0.0);
    assert!(urgent.wait_p50.unwrap() <= urgent.wait_p99.unwrap());
    let dead = urgent.dead.unwrap();
    assert_eq!(
        (dead.dead, dead.last_five_minutes, dead.last_hour),
        (2, Some(2), Some(2))
    );
    assert_eq!(dead.uncollected, Some(0));
    assert_eq!(urgent.oldest.is_some(), urgent.messages != Some(0));
    shop.app.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_runs_is_in_flight_in_both_homes_and_its_consumers_and_processes_are_known() {
    let shop = Shop::open().await;
    shop.publish(4, || Ship::Wait).await;
    let working = shop.work();
    let urgent = shop.tier_when("urgent", |it| it.running == Some(2)).await;
    assert_eq!((urgent.consumers, urgent.processes), (Some(1), Some(1)));
    // How many are prefetched, the broker says in its management API only.
    assert_eq!(shown(urgent.in_flight), "≥ 2");
    let stats = shop.stats().await;
    let fast = stats.groups.iter().find(|it| it.group == "fast").unwrap();
    assert_eq!((fast.processes, fast.slots), (Some(1), Some(2)));
    assert_eq!(fast.running, Some(2));
    assert_eq!(
        (tier(&stats, "mail").consumers, stats.relays),
        (Some(1), Some(0))
    );
    working.end().await;
    shop.app.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_oldest_message_of_a_queue_is_estimated_and_said_to_be() {
    let shop = Shop::open().await;
    let working = shop.work();
    shop.publish(1, || CountOrders {}).await;
    // The worker has started one, and reports at its end.
    shop.tier_when("normal", |it| it.messages == Some(0)).await;
    working.end().await;
    let pool = shop.pool().await;
    let age = |table: &'static str, columns: &'static str| {
        let statement = format!("UPDATE tierline.{table} SET {columns}");
        let pool = pool.clone();
        async move {
            sqlx::query(sqlx::AssertSqlSafe(statement))
                .execute(&pool)
                .await
                .unwrap()
        }
    };
    let reported = "SELECT count(*) FROM tierline.tier_reports WHERE last_enqueued IS NOT NULL";
    let reports: i64 = sqlx::query_scalar(reported).fetch_one(&pool).await.unwrap();
    assert_eq!(reports, 1, "of the tier that had a task");
    shop.publish(2, || CountOrders {}).await;
    // As if nothing had come in since the worker went: no rollup says when these two did.
    age("rollups", "published = 0").await;
    age(
        "tier_reports",
        "last_enqueued = now() - interval '10 minutes', empty_at = NULL",
    )
    .await;
    let normal = shop.tier_when("normal", |it| it.messages == Some(2)).await;
    let oldest = normal.oldest.unwrap();
    let minutes = |minutes: u64| Duration::from_secs(60 * minutes);
    assert!(
        oldest.is_estimate && (minutes(10)..minutes(12)).contains(&oldest.age),
        "{oldest:?}"
    );
    // The queue was seen empty since.
    age("tier_reports", "empty_at = now() - interval '3 minutes'").await;
    let oldest = tier(&shop.stats().await, "normal").oldest.unwrap();
    assert!((minutes(3)..minutes(5)).contains(&oldest.age), "{oldest:?}");
    shop.app.close().await;
}

#[tokio::test]
async fn pauses_say_who_and_why_and_limits_what() {
    let shop = Shop::open().await;
    let control = shop.app.control().unwrap().by("ada");
    control
        .pause_group("fast")
        .because("the move")
        .await
        .unwrap();
    control
        .pause_tier("urgent")
        .because("the provider is down")
        .await
        .unwrap();
    control.pause_task("mail.send").await.unwrap();
    control.limit_tier("mail").running(2).await.unwrap();
    let stats = shop.stats().await;
    let urgent = tier(&stats, "urgent").paused.clone().unwrap();
    let said = (urgent.of_group, urgent.who.as_str(), urgent.why.as_str());
    assert_eq!(said, (false, "ada", "the provider is down"));
    let normal = tier(&stats, "normal").paused.clone().unwrap();
    assert_eq!((normal.of_group, normal.why.as_str()), (true, "the move"));
    assert_eq!(tier(&stats, "mail").paused, None);
    assert_eq!(
        tier(&stats, "mail").limit.as_ref().unwrap().limit,
        "2 running"
    );
    assert_eq!(stats.paused_tasks, Some(vec!["mail.send".to_owned()]));
    shop.app.close().await;
}

#[tokio::test]
async fn rows_of_a_tier_on_the_broker_that_nobody_takes_wait_for_a_relay() {
    let shop = Shop::open().await;
    let mut connection = PgConnection::connect(shop.database.url()).await.unwrap();
    shop.app
        .publish(CountOrders {})
        .within(&mut connection)
        .await
        .unwrap();
    let stats = shop.stats().await;
    let normal = tier(&stats, "normal");
    assert_eq!(
        (
            shown(normal.waiting).as_str(),
            shown(normal.relay_waiting).as_str()
        ),
        ("1", "1")
    );
    assert_eq!(tier(&stats, "mail").relay_waiting, None);
    shop.app.close().await;
}

#[cfg(feature = "management")]
#[tokio::test]
async fn the_management_api_adds_what_amqp_does_not_say() {
    let shop = Shop::open().await;
    shop.app.publish(Ship::Succeed).delay("10m").await.unwrap();
    let management = tierline_testbed::management_url(shop.vhost.amqp_url());
    let app = super::builder(shop.vhost.amqp_url(), shop.database.url())
        .management(management)
        .connect()
        .await
        .unwrap();
    let deadline = tokio::time::Instant::now() + crate::worker::PATIENCE;
    loop {
        let stats = app.stats().await.unwrap();
        assert_eq!(stats.problems, []);
        // The management API collects its figures every few seconds.
        if tier(&stats, "urgent").delayed_messages == Some(1) {
            break;
        }
        assert!(tokio::time::Instant::now() < deadline, "{stats:#?}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    app.close().await;
    shop.app.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_limit_that_keeps_tasks_from_starting_is_said_to() {
    let shop = Shop::open().await;
    let control = shop.app.control().unwrap();
    control.limit_tier("urgent").running(1).await.unwrap();
    let idle = shop.tier_when("urgent", |it| it.limit.is_some()).await;
    assert_eq!(idle.limit.unwrap().is_saturated, Some(false));
    // A process that starts later knows of the limit at once.
    shop.app.close().await;
    let app = builder(shop.vhost.amqp_url(), shop.database.url());
    let app = app.connect().await.unwrap();
    let shop = Shop { app, ..shop };
    shop.publish(3, || Ship::Wait).await;
    let working = shop.work();
    let is_saturated = |it: &TierStats| {
        let limit = it.limit.as_ref();
        limit.is_some_and(|limit| limit.is_saturated == Some(true))
    };
    shop.tier_when("urgent", is_saturated).await;
    let stats = shop.stats().await;
    assert!(!is_saturated(tier(&stats, "mail")));
    working.end().await;
    shop.app.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn reports_of_processes_that_are_gone_become_one() {
    let shop = Shop::open().await;
    let pool = shop.pool().await;
    sqlx::query(
        "INSERT INTO tierline.tier_reports (app, tier, process, running, last_enqueued, reported_at) \
         SELECT 'shop', 'normal', gen_random_uuid(), 7, now() - gone * interval '1 hour', now() - gone * interval '1 hour' \
         FROM generate_series(1, 5) AS gone",
    )
    .execute(&pool)
    .await
    .unwrap();
    shop.publish(2, || Ship::Succeed).await;
    let before = shop.tier_when("normal", |it| it.messages == Some(0)).await;
    assert_eq!(before.running, Some(0), "what is gone runs nothing");
    let working = shop.work();
    shop.tier_when("urgent", |it| it.messages == Some(0)).await;
    working.end().await;
    let joined: (i64, bool) = sqlx::query_as(
        "SELECT count(*), max(last_enqueued) > now() - interval '2 hours' FROM tierline.tier_reports \
         WHERE tier = 'normal' AND reported_at > now() - interval '1 minute' \
            AND process = '00000000-0000-0000-0000-000000000000'",
    )
    .fetch_one(&pool)
    .await
    .unwrap();
    assert_eq!(joined, (1, true));
    let silent = "SELECT count(*) FROM tierline.tier_reports WHERE reported_at < now() - interval '1 minute'";
    let silent: i64 = sqlx::query_scalar(silent).fetch_one(&pool).await.unwrap();
    assert_eq!(silent, 0);
    shop.app.close().await;
}
