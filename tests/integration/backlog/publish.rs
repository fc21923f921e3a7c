//! Publishing into tiers in Postgres.

use std::time::Duration;

use futures_util::{StreamExt, stream};
use tierline::error::{ErrorKind, PublishError, TopologyError};
use tierline::task::{PublishRequest, Unique};
use tierline::{Error, Registry, Tierline, Topology};

use super::{MAP, Ship, Shop, shipping};

#[tokio::test(flavor = "multi_thread")]
async fn a_map_in_postgres_alone_needs_no_broker() {
    let (registry, shipped) = shipping();
    let shop = Shop::open(MAP, registry).await;
    let receipt = shop.app.publish(Ship { order: 7 }).await.unwrap();
    assert_eq!(receipt.tier, "normal");
    let health = shop.app.health().await;
    assert!(health.is_ready() && health.broker.is_none(), "{health}");
    let working = shop.work();
    shop.heard.until("done order.ship 1", 1).await;
    working.end().await;
    assert_eq!(shipped.orders(), [7]);
    assert_eq!(shop.rows().await, [0, 0, 0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_map_with_tiers_in_postgres_needs_a_database() {
    let builder = Tierline::builder(Topology::parse(MAP).unwrap());
    let error = builder.connect().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Configuration);
    assert!(
        matches!(&error, Error::Topology(TopologyError::NoDatabase { tiers }) if &**tiers == "normal"),
        "{error}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn tasks_run_by_priority_and_then_in_the_order_in_which_they_were_published() {
    let (registry, shipped) = shipping();
    let map = MAP
        .replace("concurrency = 2", "concurrency = 1")
        .replace("prefetch = 4", "prefetch = 1");
    let shop = Shop::open(&map, registry).await;
    for (order, priority) in [(4, 5), (5, 5), (1, 10), (6, 0), (2, 9), (3, 9)] {
        let publish = shop.app.publish(Ship { order }).priority(priority);
        publish.await.unwrap();
    }
    let many = (7..107).map(|order| {
        let mut request = PublishRequest::new(&Ship { order }).unwrap();
        request.priority = Some(0);
        request
    });
    let outcomes: Vec<_> = shop.app.publish_many(stream::iter(many)).collect().await;
    assert_eq!(outcomes.iter().filter(|it| it.is_ok()).count(), 100);
    let working = shop.work();
    shop.heard.until("done", 106).await;
    working.end().await;
    let shipped = shipped.orders();
    assert_eq!(shipped[..6], [1, 2, 3, 4, 5, 6]);
    assert!(shipped.is_sorted(), "{shipped:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_delay_of_any_length_is_kept() {
    let (registry, shipped) = shipping();
    let shop = Shop::open(MAP, registry).await;
    let working = shop.work();
    let year = Duration::from_secs(400 * 86_400);
    shop.app
        .publish(Ship { order: 3 })
        .delay(year)
        .await
        .unwrap();
    let publish = shop.app.publish(Ship { order: 2 });
    let receipt = publish.delay("300ms").await.unwrap();
    shop.app.publish(Ship { order: 1 }).await.unwrap();
    shop.heard.until("done", 2).await;
    let late = receipt.confirmed_at.elapsed().unwrap();
    assert!(late >= Duration::from_millis(290), "{late:?}");
    working.end().await;
    assert_eq!(shipped.orders(), [1, 2]);
    assert_eq!(shop.rows().await, [1, 0, 0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn ids_headers_and_expiry_travel_with_a_row() {
    let mut registry = Registry::new();
    registry
        .register::<Ship, _>(|_: Ship, cx: tierline::Context| async move {
            assert_eq!((cx.id().as_str(), cx.header("who")), ("a\0b", Some("Ada")));
            assert_eq!((cx.tier(), cx.attempt(), cx.priority()), ("normal", 1, 9));
        })
        .unwrap();
    let shop = Shop::open(MAP, registry).await;
    let publish = shop.app.publish(Ship { order: 1 }).id("a\0b");
    let publish = publish.header("who", "Ada").priority(9).expires("1h");
    assert_eq!(publish.await.unwrap().id.as_str(), "a\0b");
    let publish = shop.app.publish(Ship { order: 2 }).expires("1ms");
    publish.delay("50ms").await.unwrap();
    let working = shop.work();
    shop.heard.until("done", 1).await;
    shop.heard.until("expired", 1).await;
    working.end().await;
    assert_eq!(shop.heard.count("dead"), 0, "{:#?}", shop.heard.lines());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tier_that_is_full_refuses_the_next_task() {
    let map = MAP.replace("lease = \"2s\"", "max_length = 3");
    let shop = Shop::open(&map, Registry::new()).await;
    for order in 0..3 {
        shop.app
            .publish(Ship { order })
            .deadline("30s")
            .await
            .unwrap();
    }
    let refused = shop.app.publish(Ship { order: 3 }).deadline("500ms").await;
    assert!(
        matches!(refused, Err(Error::Publish(PublishError::Refused { .. }))),
        "{refused:?}"
    );
    assert_eq!(shop.rows().await, [0, 3, 0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_payload_that_is_too_large_and_a_priority_that_is_too_high_are_refused_at_once() {
    let map = format!("{MAP}\n[broker]\nmax_message_size = \"1KiB\"");
    let shop = Shop::open(&map, Registry::new()).await;
    let large = serde_json::json!({ "order": "x".repeat(2_000) });
    let refused = shop.app.publish_named("order.ship", &large).await;
    assert!(
        matches!(refused, Err(Error::Publish(PublishError::TooLarge { .. }))),
        "{refused:?}"
    );
    let refused = shop.app.publish(Ship { order: 1 }).priority(11).await;
    assert!(
        matches!(
            refused,
            Err(Error::Publish(PublishError::InvalidPriority { .. }))
        ),
        "{refused:?}"
    );
    assert_eq!(shop.rows().await, [0, 0, 0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tier_that_is_full_refuses_tasks_with_keys() {
    let map = MAP.replace("lease = \"2s\"", "max_length = 1");
    let shop = Shop::open(&map, Registry::new()).await;
    let taken = shop.app.publish(Ship { order: 1 }).unique("one");
    taken.await.unwrap();
    let refused = shop.app.publish(Ship { order: 2 }).unique("two");
    let refused = refused.deadline("500ms").await;
    assert!(
        matches!(refused, Err(Error::Publish(PublishError::Refused { .. }))),
        "{refused:?}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_tier_answers_publishes_that_add_nothing_to_it() {
    let map = MAP.replace("lease = \"2s\"", "max_length = 3");
    let shop = Shop::open(&map, Registry::new()).await;
    let pool = shop.pool().await;
    let app = &shop.app;
    let held = app.publish(Ship { order: 1 }).unique("held").await.unwrap();
    let replaceable = app.publish(Ship { order: 2 }).unique("replaceable");
    let replaceable = replaceable.await.unwrap();
    let charge = || app.publish(Ship { order: 3 }).idempotency_key("charge");
    let charged = charge().await.unwrap();
    for is_within in [false, true] {
        let mut tx = pool.begin().await.unwrap();
        let mut send = async |order, unique: Unique| {
            let publish = app.publish(Ship { order }).unique(unique).deadline("2s");
            match is_within {
                true => publish.within(&mut tx).await,
                false => publish.await,
            }
        };
        let again = send(1, "held".into()).await.unwrap();
        assert!(again.is_duplicate && again.id == held.id);
        let replacing = Unique::key("replaceable").or_replace();
        let replacing = send(2, replacing).await.unwrap();
        assert!(replacing.replaced.is_some(), "{replacing:?}");
        let new = send(4, "new".into()).await;
        assert!(
            matches!(new, Err(Error::Publish(PublishError::Refused { .. }))),
            "{new:?}"
        );
        tx.commit().await.unwrap();
    }
    let repeated = charge().await.unwrap();
    assert!(repeated.is_duplicate && repeated.id == charged.id);
    assert_ne!(replaceable.id, held.id);
    assert_eq!(shop.rows().await, [0, 3, 0]);
}
