//! From the dead-letter queues into the log.

use std::time::{Duration, SystemTime};

use lapin::BasicProperties;
use lapin::options::{BasicGetOptions, BasicRejectOptions};
use lapin::types::{AMQPValue, FieldTable};
use tierline::dead::{Filter, Reason, State};
use tierline_testbed::Postgres;

use super::support::{Letter, MAP, Shop, execute, until};

#[tokio::test]
async fn a_row_tells_all_that_is_known_of_a_death() {
    let shop = Shop::open().await;
    let collecting = shop.collect();
    // Whole milliseconds, as on the wire; and young, for old rows are removed as soon as they are there.
    let since_epoch = SystemTime::UNIX_EPOCH.elapsed().unwrap();
    let an_hour_ago = since_epoch.as_millis() as u64 - 3_600_000;
    let died_at = SystemTime::UNIX_EPOCH + Duration::from_millis(an_hour_ago);
    let letter = Letter {
        died_at,
        ..Letter::default()
    };
    shop.dies("normal", &letter).await;
    let id = shop.logged(1).await[0].id;
    let row = shop.letters.get(id).await.unwrap();
    let summary = &row.summary;
    assert_eq!(summary.message_id.as_deref(), Some("ship-1"));
    assert_eq!(summary.task.as_deref(), Some("order.ship"));
    assert_eq!(summary.tier, "normal");
    assert_eq!(summary.reason, Reason::RetriesExhausted);
    assert_eq!(summary.error.as_deref(), Some("connection refused"));
    assert_eq!(summary.error_type.as_deref(), Some("reqwest::Error"));
    assert_eq!(summary.attempts, 3);
    assert_eq!(summary.died_at, died_at);
    assert_eq!(summary.state, State::Dead);
    let enqueued_at = SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_000);
    assert_eq!(summary.enqueued_at, Some(enqueued_at));
    assert_eq!(row.causes, ["tcp connect"]);
    assert_eq!(row.history.len(), 1);
    assert_eq!(row.worker.as_deref(), Some("host:1"));
    assert_eq!(row.worker_version.as_deref(), Some("1.2.3"));
    assert_eq!(row.payload, br#"{"order":1}"#);
    assert_eq!(row.payload_json.unwrap()["order"], 1);
    assert_eq!(row.headers["tenant"], "ada");
    collecting.stop().await;
    assert_eq!(shop.depth("shop.normal.dlq").await, 0);
}

#[tokio::test]
async fn what_dies_twice_in_one_life_is_one_row_and_the_next_life_another() {
    let shop = Shop::open().await;
    let letter = Letter::default();
    shop.dies("normal", &letter).await;
    shop.dies("normal", &letter).await;
    let next = Letter {
        life: 1,
        ..Letter::default()
    };
    shop.dies("normal", &next).await;
    let collecting = shop.collect();
    until("the queue to be empty", async || {
        let told = shop.happened.lock().unwrap();
        told.iter().any(|event| event.contains("repeated: 1"))
    })
    .await;
    collecting.stop().await;
    let rows = shop.logged(2).await;
    let mut lives: Vec<u32> = rows.iter().map(|row| row.life).collect();
    lives.sort_unstable();
    assert_eq!(lives, [0, 1]);
    assert_eq!(shop.depth("shop.normal.dlq").await, 0);
}

#[tokio::test]
async fn what_the_broker_gave_up_is_logged_with_its_reason() {
    let shop = Shop::open().await;
    let plain = |id: &str| {
        BasicProperties::default()
            .with_type("order.count".into())
            .with_message_id(id.into())
            .with_delivery_mode(2)
    };
    // Waits for longer than its tier allows.
    shop.send("shop.tasks", "small", b"1", plain("late")).await;
    // Rejected after a delay, whose own expiry must not be taken for the reason.
    let mut receipt = shop
        .app
        .publish_named("order.ship", &serde_json::json!(1))
        .id("rejected")
        .delay("100ms");
    receipt = receipt.header("tenant", "ada");
    receipt.await.unwrap();
    until("the delayed message to arrive", async || {
        shop.depth("shop.normal").await == 1
    })
    .await;
    let options = BasicGetOptions::default();
    let got = shop.channel.basic_get("shop.normal".into(), options).await;
    let got = got.unwrap().unwrap();
    let reject = BasicRejectOptions { requeue: false };
    got.delivery.reject(reject).await.unwrap();
    let collecting = shop.collect();
    let mut rows = shop.logged(2).await;
    rows.sort_by_key(|row| row.message_id.clone());
    let told: Vec<_> = rows
        .iter()
        .map(|row| {
            (
                row.message_id.as_deref().unwrap(),
                row.reason,
                row.tier.as_str(),
            )
        })
        .collect();
    assert_eq!(
        told,
        [
            ("late", Reason::Expired, "small"),
            ("rejected", Reason::Rejected, "normal"),
        ]
    );
    assert_eq!(rows[1].attempts, 0);
    collecting.stop().await;
}

#[tokio::test]
async fn a_poisonous_message_is_logged_as_bytes_and_does_not_stall_its_batch() {
    let shop = Shop::open().await;
    let mut nul = FieldTable::default();
    nul.insert("a\0b".into(), AMQPValue::LongString("c\0d".into()));
    nul.insert(
        "tierline-error".into(),
        AMQPValue::LongString("e\0f".into()),
    );
    nul.insert(
        "tierline-reason".into(),
        AMQPValue::LongString("permanent error".into()),
    );
    let plain = BasicProperties::default().with_delivery_mode(2);
    let poison = [
        (&b"\xff\xfe\0"[..], plain.clone()),
        (
            br#"{"a":"\u0000"}"#,
            plain.clone().with_message_id("nul".into()),
        ),
        (
            br#"["\ud800"]"#,
            plain.clone().with_message_id("surrogate".into()),
        ),
        (b"1e999999", plain.clone().with_message_id("number".into())),
        (
            b"1",
            plain
                .clone()
                .with_headers(nul)
                .with_type("t\0".into())
                .with_message_id("i\0".into()),
        ),
        (b"", plain.clone()),
    ];
    for (payload, properties) in &poison {
        shop.send("shop.normal.dlx", "", payload, properties.clone())
            .await;
    }
    for number in 0..50 {
        let id = format!("good-{number}");
        shop.dies(
            "normal",
            &Letter {
                id: &id,
                ..Letter::default()
            },
        )
        .await;
    }
    let collecting = shop.collect();
    let rows = shop.logged(56).await;
    let good = rows
        .iter()
        .filter(|row| row.task.as_deref() == Some("order.ship"));
    assert_eq!(good.count(), 50);
    let mut payloads = Vec::new();
    for row in rows
        .iter()
        .filter(|row| row.task.as_deref() != Some("order.ship"))
    {
        let row = shop.letters.get(row.id).await.unwrap();
        assert!(row.payload_json.is_none() || row.payload == b"1", "{row:?}");
        payloads.push(row.payload);
    }
    payloads.sort();
    let mut expected: Vec<_> = poison.iter().map(|(payload, _)| payload.to_vec()).collect();
    expected.sort();
    assert_eq!(payloads, expected);
    collecting.stop().await;
    assert_eq!(shop.depth("shop.normal.dlq").await, 0);
}

#[tokio::test]
async fn a_message_without_an_id_is_logged_once_however_often_it_is_delivered() {
    let shop = Shop::open().await;
    let mut plain = BasicProperties::default().with_delivery_mode(2);
    plain = plain.with_type("order.ship".into());
    shop.send("shop.normal.dlx", "", b"7", plain).await;
    // Delivered once already: the broker counts it.
    let options = BasicGetOptions::default();
    let got = shop.channel.basic_get("shop.normal.dlq".into(), options);
    let got = got.await.unwrap().unwrap();
    let requeue = BasicRejectOptions { requeue: true };
    got.delivery.reject(requeue).await.unwrap();
    let collecting = shop.collect();
    let rows = shop.logged(1).await;
    assert_eq!(
        (rows[0].message_id.as_deref(), rows[0].reason),
        (None, Reason::Unknown)
    );
    collecting.stop().await;
}

#[tokio::test]
async fn many_collectors_and_a_crash_log_everything_once() {
    let shop = Shop::open().await;
    for number in 0..300 {
        let id = format!("ship-{number}");
        let tier = ["critical", "normal", "small"][number % 3];
        shop.dies(
            tier,
            &Letter {
                id: &id,
                ..Letter::default()
            },
        )
        .await;
    }
    let (crashing, one, other) = (shop.collect(), shop.collect(), shop.collect());
    until("the first rows", async || {
        shop.letters.count(&Filter::default()).await.unwrap() > 0
    })
    .await;
    crashing.abort().await;
    let rows = shop.logged(300).await;
    for tier in ["critical", "normal", "small"] {
        assert_eq!(rows.iter().filter(|row| row.tier == tier).count(), 100);
    }
    one.stop().await;
    other.stop().await;
}

#[tokio::test]
async fn nothing_is_lost_or_logged_twice_while_postgres_comes_and_goes() {
    const COUNT: u64 = 400;
    let postgres = Postgres::start_new().await.unwrap();
    let database = postgres.database().await.unwrap();
    let shop = Shop::on(tierline_testbed::vhost().await, database, MAP).await;
    let mut collecting = shop.collect();
    for number in 0..COUNT {
        if number == COUNT / 4 {
            postgres.stop().await.unwrap();
        }
        if number == COUNT / 2 {
            until("the collector to notice", async || {
                let told = shop.happened.lock().unwrap();
                told.iter().any(|event| event.contains("CollectFailed"))
            })
            .await;
            // Killed with messages in its hands: they are not its own to lose.
            collecting.abort().await;
            collecting = shop.collect();
            postgres.start().await.unwrap();
        }
        if number == COUNT * 3 / 4 {
            postgres.kill().await.unwrap();
        }
        let id = format!("ship-{number}");
        shop.dies(
            "normal",
            &Letter {
                id: &id,
                ..Letter::default()
            },
        )
        .await;
    }
    postgres.start().await.unwrap();
    shop.logged(COUNT).await;
    until("the queue to be empty", async || {
        shop.depth("shop.normal.dlq").await == 0
    })
    .await;
    collecting.stop().await;
    assert_eq!(shop.letters.count(&Filter::default()).await.unwrap(), COUNT);
    assert_eq!(shop.depth("shop.normal.dlq").await, 0);
}

#[tokio::test]
async fn a_queue_that_is_missing_keeps_no_other_from_being_collected() {
    let shop = Shop::open().await;
    shop.vhost.delete_queue("shop.small.dlq").await.unwrap();
    shop.dies("normal", &Letter::default()).await;
    let collecting = shop.collect();
    shop.logged(1).await;
    collecting.stop().await;
}

#[tokio::test]
async fn a_collector_waits_until_the_database_is_prepared() {
    let (vhost, database) = tokio::join!(tierline_testbed::vhost(), tierline_testbed::database());
    let (app, happened) = super::support::connect(&vhost, database.url(), MAP).await;
    let collecting = tokio::spawn(app.collector().unwrap().into_future());
    until("the collector to say so", async || {
        let told = happened.lock().unwrap();
        told.iter().any(|event| event.contains("tierline migrate"))
    })
    .await;
    app.database().unwrap().migrate().await.unwrap();
    until("the collector to connect", async || {
        let told = happened.lock().unwrap();
        told.iter().any(|event| event.contains("purpose: Collect"))
    })
    .await;
    collecting.abort();
}

/// Rows that were logged when they died.
const AGE: &str = "UPDATE tierline.dead_letters SET collected_at = died_at";

#[tokio::test]
async fn old_rows_go_and_growth_is_told() {
    let shop = Shop::open().await;
    let old = SystemTime::now() - Duration::from_secs(40 * 86_400);
    for number in 0..5 {
        let id = format!("old-{number}");
        let letter = Letter {
            id: &id,
            died_at: old,
            ..Letter::default()
        };
        shop.dies("normal", &letter).await;
        let id = format!("new-{number}");
        shop.dies(
            "normal",
            &Letter {
                id: &id,
                ..Letter::default()
            },
        )
        .await;
    }
    let keeping = shop.app.collector().unwrap().no_retention();
    let keeping = tokio::spawn(keeping.into_future());
    shop.logged(10).await;
    keeping.abort();
    // However long ago they say that they died: nobody has seen the rows yet.
    assert_eq!(shop.letters.expire("30d").await.unwrap(), 0);
    execute(&shop, AGE).await;
    let collector = shop.app.collector().unwrap();
    let collector = collector
        .housekeeping_every(Duration::from_millis(20))
        .growth_limit(100, "1h")
        .tier_growth_limit("normal", 4, "1h");
    let sweeping = tokio::spawn(collector.into_future());
    until("the old rows to go", async || {
        shop.letters.count(&Filter::default()).await.unwrap() == 5
    })
    .await;
    until("the growth to be told", async || {
        let told = shop.happened.lock().unwrap();
        let growth = told
            .iter()
            .filter(|event| event.contains("DeadLettersGrow"));
        growth.count() == 1
    })
    .await;
    let counts = shop.letters.by_tier().await.unwrap();
    assert_eq!(counts[1].dead, 5, "{counts:?}");
    sweeping.abort();
}

#[tokio::test]
async fn one_alert_is_raised_for_an_app_however_many_collectors_it_has() {
    let shop = Shop::open().await;
    let collect = |app: &tierline::Tierline| {
        let collector = app.collector().unwrap();
        let collector = collector.housekeeping_every(Duration::from_millis(20));
        let collector = collector.growth_limit(4, "1h");
        tokio::spawn(collector.into_future())
    };
    let alerts = |happened: &std::sync::Mutex<Vec<String>>| {
        let told = happened.lock().unwrap();
        let alerts = told
            .iter()
            .filter(|event| event.contains("DeadLettersGrow"));
        alerts.count()
    };
    let mut apps = Vec::new();
    for _ in 0..3 {
        apps.push(super::support::connect(&shop.vhost, shop.database.url(), MAP).await);
    }
    for number in 0..5 {
        let id = format!("ship-{number}");
        let letter = Letter {
            id: &id,
            ..Letter::default()
        };
        shop.dies("normal", &letter).await;
    }
    // Three at once; and then each alone, for long enough to have looked.
    let at_once: Vec<_> = apps.iter().map(|(app, _)| collect(app)).collect();
    until("an alert", async || {
        apps.iter().any(|(_, happened)| alerts(happened) > 0)
    })
    .await;
    at_once.iter().for_each(tokio::task::JoinHandle::abort);
    for (app, happened) in &apps {
        let alone = collect(app);
        let collected = || {
            let told = happened.lock().unwrap();
            told.iter()
                .filter(|event| event.contains("Collected"))
                .count()
        };
        // It removes old rows and then looks at the growth: the second of two that go, one after the
        // other, goes after a look.
        for number in 0..2 {
            let old = Letter {
                id: &format!("old-{number}"),
                died_at: SystemTime::now() - Duration::from_secs(40 * 86_400),
                ..Letter::default()
            };
            let before = collected();
            shop.dies("normal", &old).await;
            until("the old row to come", async || collected() > before).await;
            execute(&shop, AGE).await;
            until("the old row to go", async || {
                shop.letters.count(&Filter::default()).await.unwrap() == 5
            })
            .await;
        }
        alone.abort();
    }
    let raised: usize = apps.iter().map(|(_, happened)| alerts(happened)).sum();
    assert_eq!(raised, 1);
}
