//! Publishes that may be repeated.

use tierline::backlog::TaskState;
use tierline::error::{ErrorKind, PublishError};
use tierline::task::{IdempotencyKey, TaskKey};
use tierline::{Error, Registry};
use tokio::time::timeout;

use super::{MAP, Ship, Shop, shipping};
use crate::worker::PATIENCE;

fn map() -> String {
    format!("{MAP}\n\"order.count\" = \"normal\"")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_repeated_publish_gets_the_first_ones_id_whatever_became_of_it() {
    let (registry, shipped) = shipping();
    let shop = Shop::open(&map(), registry).await;
    let publish = || {
        let publish = shop.app.publish(Ship { order: 1 });
        publish.idempotency_key("request-7").deadline("30s")
    };
    let first = publish().await.unwrap();
    assert!(!first.is_duplicate);
    let waiting = publish().await.unwrap();
    let working = shop.work();
    shop.heard.until("done", 1).await;
    working.end().await;
    assert_eq!(shop.rows().await, [0, 0, 0]);
    let done = publish().await.unwrap();
    for again in [waiting, done] {
        assert!(again.is_duplicate && again.id == first.id, "{again:?}");
        assert_eq!(again.tier, "normal");
    }
    assert_eq!(shop.rows().await, [0, 0, 0]);
    assert_eq!(shipped.orders(), [1]);
    // A unique key of the same text is another key.
    let unique = shop.app.publish(Ship { order: 1 }).unique("request-7");
    assert!(!unique.await.unwrap().is_duplicate);
}

#[tokio::test(flavor = "multi_thread")]
async fn another_payload_or_task_under_the_same_key_is_an_error() {
    let shop = Shop::open(&map(), Registry::new()).await;
    let payload = serde_json::json!({ "order": 1, "lines": { "a": 1, "b": 2 } });
    let publish = |task: &str, payload: &serde_json::Value| {
        let publish = shop.app.publish_named(task, payload);
        publish.idempotency_key("request-7").deadline("30s")
    };
    let first = publish("order.ship", &payload).await.unwrap();
    let other = serde_json::json!({ "order": 2 });
    for (task, payload) in [("order.ship", &other), ("order.count", &payload)] {
        let error = publish(task, payload).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Conflict);
        assert!(
            matches!(&error, Error::Publish(PublishError::IdempotencyMismatch { first: id, .. }) if *id == first.id),
            "{error}"
        );
    }
    assert!(publish("order.ship", &payload).await.unwrap().is_duplicate);
    assert_eq!(shop.rows().await, [0, 1, 0]);
    let task = shop.app.backlog().unwrap().get(&first.id).await.unwrap();
    assert_eq!(task.summary.state, TaskState::Ready);
    assert_eq!(task.key, Some(TaskKey::Idempotency("request-7".into())));
}

#[tokio::test(flavor = "multi_thread")]
async fn after_its_window_a_key_is_new_again() {
    let shop = Shop::open(&map(), Registry::new()).await;
    let key = IdempotencyKey::new("request-7").window("300ms");
    let publish = |order| {
        let publish = shop.app.publish(Ship { order });
        publish.idempotency_key(key.clone()).deadline("30s")
    };
    let first = publish(1).await.unwrap();
    let again = async {
        loop {
            // Another payload, which is an error within the window.
            match publish(2).await {
                Ok(receipt) => return receipt,
                Err(Error::Publish(PublishError::IdempotencyMismatch { .. })) => {}
                Err(error) => panic!("{error}"),
            }
        }
    };
    let second = timeout(PATIENCE, again).await.unwrap();
    assert!(!second.is_duplicate && second.id != first.id);
    assert_eq!(shop.rows().await, [0, 2, 0]);
}
