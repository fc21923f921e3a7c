//! Looking through the tasks in Postgres, and cancelling them.

use tierline::backlog::{TaskFilter, TaskState};
use tierline::error::{BacklogError, ErrorKind};
use tierline::{Error, Registry, TaskId};

use super::{MAP, Ship, Shop, gated};

#[tokio::test(flavor = "multi_thread")]
async fn tasks_are_listed_page_by_page_in_the_order_in_which_they_will_run() {
    let shop = Shop::open(MAP, Registry::new()).await;
    let mut expected = Vec::new();
    for order in 0..25 {
        let publish = shop
            .app
            .publish(Ship { order })
            .priority(if order < 5 { 1 } else { 7 });
        expected.push((order < 5, publish.await.unwrap().id));
    }
    expected.sort_by_key(|(is_last, _)| *is_last);
    let expected: Vec<TaskId> = expected.into_iter().map(|(_, id)| id).collect();
    let later = shop.app.publish(Ship { order: 99 }).delay("1h").id("later");
    later.await.unwrap();
    let backlog = shop.app.backlog().unwrap();
    let (mut listed, mut start) = (Vec::new(), None);
    let filter = TaskFilter::default().tier("normal");
    loop {
        let page = backlog.list(&filter, start.as_deref(), 7).await.unwrap();
        assert!(page.tasks.len() <= 7);
        listed.extend(page.tasks);
        match page.next {
            Some(next) => start = Some(next),
            None => break,
        }
    }
    let last = listed.pop().unwrap();
    assert_eq!(
        (last.id.as_str(), last.state),
        ("later", TaskState::Scheduled)
    );
    let ids: Vec<TaskId> = listed.iter().map(|task| task.id.clone()).collect();
    assert_eq!(ids, expected);
    assert!(
        listed
            .iter()
            .all(|task| task.state == TaskState::Ready && task.attempt == 1)
    );
    for (filter, count) in [
        (TaskFilter::default().state(TaskState::Scheduled), 1),
        (TaskFilter::default().task("order.ship"), 26),
        (TaskFilter::default().task("other"), 0),
        (TaskFilter::default().due_within("1m"), 25),
        (TaskFilter::default().waiting_for("1h"), 0),
    ] {
        let page = backlog.list(&filter, None, 100).await.unwrap();
        assert_eq!(page.tasks.len(), count, "{filter:?}");
    }
    for (filter, start) in [
        (TaskFilter::default().tier("other"), None),
        (TaskFilter::default().waiting_for("soon"), None),
        (TaskFilter::default(), Some("nonsense")),
    ] {
        let error = backlog.list(&filter, start, 10).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_task_that_waits_can_be_cancelled_and_one_that_runs_cannot() {
    let (registry, open) = gated();
    let map = MAP.replace("prefetch = 4", "prefetch = 1");
    let shop = Shop::open(&map, registry).await;
    let running = shop.app.publish(Ship { order: 1 }).await.unwrap().id;
    shop.app.publish(Ship { order: 2 }).await.unwrap();
    let working = shop.work();
    shop.heard.until("started", 2).await;
    let waiting = shop.app.publish(Ship { order: 3 }).header("who", "Ada");
    let waiting = waiting.await.unwrap().id;
    let named = shop
        .app
        .publish(Ship { order: 4 })
        .id("order-4")
        .delay("1h");
    named.await.unwrap();
    let backlog = shop.app.backlog().unwrap().by("ada").because("a mistake");

    let details = backlog.get(&waiting).await.unwrap();
    assert_eq!(details.payload, br#"{"order":3}"#);
    assert_eq!(details.headers["who"], "Ada");
    let details = backlog.get(&running).await.unwrap();
    assert_eq!(details.summary.state, TaskState::Running);
    assert!(details.summary.worker.is_some());

    let refused = backlog.cancel(&running).await.unwrap_err();
    assert!(
        matches!(refused, Error::Backlog(BacklogError::Refused { .. })),
        "{refused}"
    );
    backlog.cancel(&waiting).await.unwrap();
    backlog.cancel(&TaskId::from("order-4")).await.unwrap();
    let again = backlog.cancel(&waiting).await.unwrap_err();
    assert_eq!(again.kind(), ErrorKind::NotFound);
    for order in 5..10 {
        shop.app.publish(Ship { order }).await.unwrap();
    }
    let all = TaskFilter::default().task("order.ship");
    assert_eq!(backlog.cancel_all(&all).await.unwrap(), 5);
    open.add_permits(100);
    shop.heard.until("done", 2).await;
    working.end().await;
    assert_eq!(shop.rows().await, [0, 0, 0]);
    assert_eq!(shop.heard.count("started"), 2);

    let entries = backlog.audit_log(None, 10).await.unwrap();
    let actions: Vec<_> = entries
        .iter()
        .map(|it| (it.action.as_str(), it.who.as_str()))
        .collect();
    assert_eq!(
        actions,
        [
            ("cancel tasks", "ada"),
            ("cancel task", "ada"),
            ("cancel task", "ada")
        ]
    );
    assert!(entries.iter().all(|it| it.why == "a mistake"));
    assert_eq!(entries[0].before.as_ref().unwrap()["count"], 5);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_task_is_not_cancelled_by_an_id_that_a_task_in_another_state_has_too() {
    let shop = Shop::open(MAP, Registry::new()).await;
    let ready = shop.app.publish(Ship { order: 1 }).id("order-7");
    ready.await.unwrap();
    let scheduled = shop
        .app
        .publish(Ship { order: 2 })
        .id("order-7")
        .delay("1h");
    scheduled.await.unwrap();
    let backlog = shop.app.backlog().unwrap();
    let refused = backlog.cancel(&"order-7".into()).await.unwrap_err();
    let is_refused = matches!(&refused, Error::Backlog(BacklogError::Refused { .. }));
    assert!(is_refused, "{refused}");
    assert_eq!(shop.rows().await, [1, 1, 0]);
    let all = backlog.cancel_all(&TaskFilter::default()).await.unwrap();
    assert_eq!(all, 2);
    assert_eq!(shop.rows().await, [0, 0, 0]);
}
