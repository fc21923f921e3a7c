//! The history of a tier that keeps its finished tasks.

use tierline::backlog::{self, LONG_TRANSACTION, TaskFilter, TaskState};
use tierline::error::BacklogError;
use tierline::task::TaskEnding;
use tierline::{Error, Outcome, Registry, TaskError, TaskId, TaskOptions, Topology};

use super::{MAP, Ship, Shop, gated, shipping};

fn keeping() -> String {
    MAP.replace("lease = \"2s\"", "lease = \"2s\"\nkeep = \"7d\"")
}

/// Handlers that succeed, discard, fail once, or fail for good, by the number of the order.
fn of_all_kinds() -> Registry {
    let mut registry = Registry::new();
    let handler = async |ship: Ship, cx: tierline::Context| match ship.order {
        1 => Ok(Outcome::Done),
        2 => Ok(Outcome::Discard("the order is withdrawn".to_owned())),
        3 if cx.attempt() == 1 => Err(TaskError::from("the printer is out of paper")),
        3 => Ok(Outcome::Done),
        _ => Err(TaskError::permanent("no such order")),
    };
    let options = TaskOptions::new().retries(1).backoff("10ms");
    let handler = move |ship, cx| handler(ship, cx);
    registry.register_with::<Ship, _>(handler, options).unwrap();
    registry
}

async fn finished(shop: &Shop) -> Vec<(TaskId, Option<TaskEnding>, u32)> {
    let filter = TaskFilter::default().state(TaskState::Finished);
    let backlog = shop.app.backlog().unwrap();
    let (mut found, mut start) = (Vec::new(), None);
    loop {
        let page = backlog.list(&filter, start.as_deref(), 2).await.unwrap();
        let tasks = page.tasks.into_iter();
        found.extend(tasks.map(|task| (task.id, task.ending, task.attempt)));
        match page.next {
            Some(next) => start = Some(next),
            None => return found,
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_ended_is_kept_with_how_it_ended_and_dead_letters_are_not() {
    let shop = Shop::open(&keeping(), of_all_kinds()).await;
    let backlog = shop.app.backlog().unwrap();
    let publish = async |order: u32| shop.app.publish(Ship { order }).await.unwrap().id;
    let late = shop.app.publish(Ship { order: 1 }).expires("1ms");
    let late = late.await.unwrap().id;
    let withdrawn = shop.app.publish(Ship { order: 5 }).delay("1h");
    let withdrawn = withdrawn.await.unwrap().id;
    backlog.cancel(&withdrawn).await.unwrap();
    let (done, discarded) = (publish(1).await, publish(2).await);
    let (retried, dead) = (publish(3).await, publish(4).await);
    let working = shop.work();
    shop.heard.until("done order.ship 2", 1).await;
    shop.heard.until("done order.ship 1", 1).await;
    shop.heard.until("dead", 1).await;
    shop.heard.until("expired", 1).await;
    shop.heard.until("discarded", 1).await;
    working.end().await;

    let mut found = finished(&shop).await;
    let first = found.remove(found.len() - 1);
    assert_eq!(first, (withdrawn, Some(TaskEnding::Cancelled), 1));
    found.sort_by(|a, b| a.0.cmp(&b.0));
    let mut expected = vec![
        (done.clone(), Some(TaskEnding::Done), 1),
        (discarded, Some(TaskEnding::Discarded), 1),
        (retried, Some(TaskEnding::Done), 2),
        (late, Some(TaskEnding::Expired), 1),
    ];
    expected.sort_by(|a, b| a.0.cmp(&b.0));
    assert_eq!(found, expected);
    let all = backlog.list(&TaskFilter::default(), None, 100).await;
    assert_eq!(
        all.unwrap().tasks,
        [],
        "a list without a state is of what waits or runs"
    );

    let one = backlog.get(&done).await.unwrap();
    assert_eq!(one.payload, br#"{"order":1}"#);
    assert_eq!(one.summary.state, TaskState::Finished);
    assert!(one.summary.worker.is_some() && one.summary.finished_at.is_some());
    let gone = backlog.get(&dead).await.unwrap_err();
    assert!(matches!(
        gone,
        Error::Backlog(BacklogError::NotFound { .. })
    ));
    let refused = backlog.cancel(&done).await.unwrap_err();
    assert!(refused.to_string().contains("it has ended"), "{refused}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tier_without_keep_has_no_history() {
    let (registry, _) = shipping();
    let shop = Shop::open(MAP, registry).await;
    shop.app.publish(Ship { order: 1 }).await.unwrap();
    let waits = shop.app.publish(Ship { order: 2 }).delay("1h");
    let waits = waits.await.unwrap().id;
    shop.app.backlog().unwrap().cancel(&waits).await.unwrap();
    let working = shop.work();
    shop.heard.until("done", 1).await;
    working.end().await;
    assert_eq!(finished(&shop).await, []);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_that_another_process_took_over_is_not_kept() {
    let (registry, open) = gated();
    let shop = Shop::open(&keeping(), registry).await;
    shop.app.publish(Ship { order: 1 }).await.unwrap();
    let working = shop.work();
    shop.heard.until("started", 1).await;
    let pool = shop.pool().await;
    let taken = sqlx::query("UPDATE tierline.running SET token = token + 1");
    assert_eq!(taken.execute(&pool).await.unwrap().rows_affected(), 1);
    open.add_permits(1);
    shop.heard.until("done", 1).await;
    working.end().await;
    assert_eq!(finished(&shop).await, []);
    assert_eq!(shop.rows().await, [0, 0, 1]);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_kept_for_long_enough_is_removed_and_the_rest_stays() {
    let (registry, _) = shipping();
    let shop = Shop::open(&keeping(), registry).await;
    for order in 0..3 {
        shop.app.publish(Ship { order }).await.unwrap();
    }
    let working = shop.work();
    shop.heard.until("done", 3).await;
    working.end().await;
    let kept = finished(&shop).await;
    assert_eq!(kept.len(), 3);
    let pool = shop.pool().await;
    let age = "UPDATE tierline.finished SET finished_at = now() - interval '7 days 1 second' \
               WHERE id <> (SELECT id FROM tierline.finished ORDER BY finished_at DESC, id DESC LIMIT 1)";
    sqlx::query(age).execute(&pool).await.unwrap();

    let working = shop.work();
    let is_removed = async || finished(&shop).await.len() == 1;
    crate::amqp::until("two are removed", is_removed).await;
    working.end().await;
    assert_eq!(finished(&shop).await, kept[..1]);

    let database = tierline::Database::new(shop.database.url()).unwrap();
    let without = Topology::parse(MAP).unwrap();
    let report = backlog::doctor(&database, &without, LONG_TRANSACTION).await;
    let report = report.unwrap();
    let kept = "has no keep in the file, and finished tasks of it are still kept";
    assert!(report.findings.iter().any(|it| it.what == kept), "{report}");
}
