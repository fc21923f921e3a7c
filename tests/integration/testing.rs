//! The helpers for the users' own tests.

#![allow(clippy::unwrap_used)] // a test that cannot go on should stop

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tierline::execute::Verdict;
use tierline::task::{PublishBuilder, Unique};
use tierline::testing::{MOST_RUNS, RecordingPublisher, Tester};
use tierline::{Context, Outcome, Registry, Task, TaskError, TaskOptions, Topology};

#[derive(Serialize, Deserialize)]
struct Book {
    guest: String,
    nights: u32,
}

impl Task for Book {
    const NAME: &'static str = "room.book";
}

#[derive(Serialize, Deserialize, Debug, PartialEq)]
struct Confirm {
    guest: String,
    nights: u32,
}

impl Task for Confirm {
    const NAME: &'static str = "email.confirm";
}

fn book() -> Book {
    Book {
        guest: "Ada".into(),
        nights: 2,
    }
}

fn confirm() -> Confirm {
    Confirm {
        guest: "Ada".into(),
        nights: 2,
    }
}

fn hotel() -> Registry {
    let mut registry = Registry::new();
    registry
        .register::<Book, _>(|book: Book, cx: Context| async move {
            cx.publish(Confirm {
                guest: book.guest,
                nights: book.nights,
            })
            .delay("10m")
            .expires("1h")
            .priority(9)
            .id("confirmation-1")
            .header("floor", "3")
            .await?;
            Ok::<_, TaskError>(())
        })
        .unwrap();
    registry
        .register::<Confirm, _>(|_: Confirm| async {})
        .unwrap();
    registry
}

fn tester() -> Tester {
    Tester::builder().registry(hotel()).build()
}

fn message_of(run: impl FnOnce() + std::panic::UnwindSafe) -> String {
    *std::panic::catch_unwind(run)
        .unwrap_err()
        .downcast::<String>()
        .unwrap()
}

#[tokio::test]
async fn what_a_handler_publishes_is_recorded_with_its_options() {
    let tester = tester();
    tester.run(book()).await;
    let published = tester.published();
    let [only] = &published[..] else {
        panic!("{published:?}")
    };
    assert_eq!(only.payload::<Confirm>(), Some(confirm()));
    assert_eq!(only.delay, Some(Duration::from_secs(600)));
    assert_eq!(only.message.priority, 9);
    assert_eq!(only.message.id.as_str(), "confirmation-1");
    assert_eq!(only.message.headers["floor"], "3");
    let lasts = only
        .message
        .expires_at
        .unwrap()
        .duration_since(only.message.enqueued_at)
        .unwrap();
    assert_eq!(lasts.as_secs(), 3_600);
}

#[tokio::test]
async fn a_follow_up_continues_the_trace() {
    let tester = tester();
    let mut message = tester.message(&book());
    message.traceparent = Some("00-trace-span-01".into());
    tester.run_message(message).await;
    assert_eq!(
        tester.published()[0].message.traceparent.as_deref(),
        Some("00-trace-span-01")
    );
}

#[tokio::test]
async fn an_expected_payload_that_was_published_passes() {
    let tester = tester();
    tester.assert_nothing_published();
    tester.run(book()).await;
    tester.assert_published(&confirm());
}

#[tokio::test]
async fn an_expected_payload_that_was_not_published_shows_the_difference() {
    let tester = tester();
    tester.run(book()).await;
    let message = message_of(std::panic::AssertUnwindSafe(|| {
        tester.assert_published(&Confirm {
            guest: "Ada".into(),
            nights: 3,
        });
    }));
    assert_eq!(
        message,
        "no published `email.confirm` is the expected one\n  \
         expected  {\"guest\":\"Ada\",\"nights\":3}\n  \
         closest   {\"guest\":\"Ada\",\"nights\":2}\n  \
         nights: expected 3, published 2\n\
         published in all: 1 × email.confirm"
    );
}

#[tokio::test]
async fn drain_runs_what_was_published_until_nothing_is_left() {
    let tester = tester();
    tester.run(book()).await;
    let runs = tester.drain().await.unwrap();
    let [only] = &runs[..] else {
        panic!("{runs:?}")
    };
    assert_eq!(
        (only.message.task.as_str(), &only.verdict),
        ("email.confirm", &Verdict::Done)
    );
    assert!(tester.drain().await.unwrap().is_empty());
    tester.assert_published(&confirm());
}

#[tokio::test]
async fn drain_runs_delayed_tasks_in_the_order_in_which_they_fall_due() {
    #[derive(Serialize, Deserialize)]
    struct Start;
    impl Task for Start {
        const NAME: &'static str = "start";
    }
    let mut registry = Registry::new();
    registry
        .register::<Start, _>(|_: Start, cx: Context| async move {
            for (nights, delay) in [(1, "3h"), (2, "1h"), (3, "2h")] {
                cx.publish(Confirm {
                    guest: "Ada".into(),
                    nights,
                })
                .delay(delay)
                .await?;
            }
            Ok::<_, TaskError>(())
        })
        .unwrap();
    registry
        .register::<Confirm, _>(|_: Confirm| async {})
        .unwrap();
    let tester = Tester::builder().registry(registry).build();
    tester.run(Start).await;
    let runs = tester.drain().await.unwrap();
    let nights: Vec<Confirm> = runs
        .iter()
        .map(|run| serde_json::from_slice(&run.message.payload).unwrap())
        .collect();
    assert_eq!(
        nights
            .iter()
            .map(|confirm| confirm.nights)
            .collect::<Vec<_>>(),
        [2, 3, 1]
    );
}

#[tokio::test]
async fn tasks_that_publish_each_other_end_in_an_error_that_names_them() {
    let mut registry = Registry::new();
    registry
        .register::<Book, _>(
            |_: Book, cx: Context| async move { cx.publish(confirm()).await.map(drop) },
        )
        .unwrap();
    registry
        .register::<Confirm, _>(|_: Confirm, cx: Context| async move {
            cx.publish(book()).await.map(drop)
        })
        .unwrap();
    let tester = Tester::builder().registry(registry).build();
    tester.run(book()).await;
    let error = tester.drain().await.unwrap_err().to_string();
    for part in [&MOST_RUNS.to_string(), "room.book", "email.confirm"] {
        assert!(error.contains(part), "{error}");
    }
}

#[tokio::test]
async fn a_task_that_snoozes_for_ever_ends_in_an_error() {
    let mut registry = Registry::new();
    registry
        .register::<Book, _>(|_: Book| async { Outcome::Snooze(Duration::from_secs(60)) })
        .unwrap();
    assert!(
        Tester::builder()
            .registry(registry)
            .build()
            .run_to_end(book())
            .await
            .is_err()
    );
}

#[tokio::test]
async fn a_retry_that_falls_due_after_the_expiry_is_not_run() {
    let mut registry = Registry::new();
    registry
        .register::<Book, _>(|_: Book, cx: Context| async move {
            cx.publish(confirm()).expires("10m").await.map(drop)
        })
        .unwrap();
    let twenty_minutes = Duration::from_secs(1_200);
    let options = TaskOptions::new()
        .backoff(twenty_minutes)
        .backoff_max(twenty_minutes);
    registry
        .register_with::<Confirm, _>(|_: Confirm| async { Err::<(), _>("no") }, options)
        .unwrap();
    let tester = Tester::builder().registry(registry).build();
    tester.run(book()).await;
    let runs = tester.drain().await.unwrap();
    let [first, second] = &runs[..] else {
        panic!("{runs:?}")
    };
    assert!(matches!(first.verdict, Verdict::Retry { .. }), "{first:?}");
    assert!(
        matches!(second.verdict, Verdict::Expired { .. }),
        "{second:?}"
    );
}

#[tokio::test]
async fn a_map_gives_the_tier_and_refuses_what_it_does_not_have() {
    let topology = Topology::parse(
        r#"
        app = "hotel"
        [tiers.high]
        queue = "classic"
        [groups.all]
        tiers = ["high"]
        concurrency = 1
        [tasks]
        "room.book" = { tier = "high", priority = 7 }
        "#,
    )
    .unwrap();
    let tester = Tester::builder()
        .registry(hotel())
        .topology(topology)
        .build();
    let run = tester.run(book()).await;
    assert_eq!(
        (run.message.tier.as_str(), run.message.priority),
        ("high", 7)
    );
    let Verdict::Retry { failure, .. } = run.verdict else {
        panic!("not retried")
    };
    assert!(
        failure.message.contains("`email.confirm`") && failure.message.contains("[tasks]"),
        "{failure}"
    );
}

#[tokio::test]
async fn a_delay_that_cannot_be_read_is_told_where_it_is_awaited() {
    let mut registry = Registry::new();
    registry
        .register::<Book, _>(|_: Book, cx: Context| async move {
            cx.publish(confirm()).delay("10 parsecs").await.map(drop)
        })
        .unwrap();
    let tester = Tester::builder().registry(registry).build();
    let Verdict::Retry { failure, .. } = tester.run(book()).await.verdict else {
        panic!("not retried")
    };
    assert!(failure.message.contains("10 parsecs"), "{failure}");
    tester.assert_nothing_published();
}

#[tokio::test]
async fn a_handler_can_be_called_as_the_function_that_it_is() {
    async fn handler(_: Book, cx: Context) -> Result<u32, TaskError> {
        Ok(cx.attempt())
    }
    let tester = tester();
    let context = tester.context(&tester.message(&book()));
    assert_eq!(handler(book(), context).await.unwrap(), 1);
}

#[tokio::test]
async fn numbers_are_compared_as_they_travel() {
    #[derive(Serialize, Deserialize)]
    struct Measure {
        celsius: f32,
        total: u128,
    }
    impl Task for Measure {
        const NAME: &'static str = "room.measure";
    }
    fn measure() -> Measure {
        Measure {
            celsius: 0.1,
            total: u128::MAX,
        }
    }
    let mut registry = Registry::new();
    registry
        .register::<Book, _>(
            |_: Book, cx: Context| async move { cx.publish(measure()).await.map(drop) },
        )
        .unwrap();
    let tester = Tester::builder().registry(registry).build();
    tester.run(book()).await;
    tester.assert_published(&measure());
}

#[tokio::test]
async fn as_many_runs_as_are_allowed_are_drained() {
    let mut registry = Registry::new();
    registry
        .register::<Book, _>(|_: Book, cx: Context| async move {
            for _ in 0..3 {
                cx.publish(confirm()).await?;
            }
            Ok::<_, TaskError>(())
        })
        .unwrap();
    registry
        .register::<Confirm, _>(|_: Confirm| async {})
        .unwrap();
    let tester = Tester::builder().registry(registry).most_runs(2).build();
    tester.run(book()).await;
    let endless = tester.drain().await.unwrap_err().to_string();
    assert!(endless.contains("after 2 runs"), "{endless}");
}

#[tokio::test]
async fn a_shutdown_is_told_to_what_runs_and_not_to_the_next_process() {
    async fn book(_: Book, cx: Context) -> Outcome {
        let tester = cx.data::<Arc<Deploys>>();
        if tester.0.fetch_add(1, Ordering::Relaxed) > 0 {
            assert!(!cx.is_shutting_down(), "the next process runs");
            return Outcome::Done;
        }
        cx.shutdown_signal().cancelled().await;
        assert!(cx.is_shutting_down() && !cx.is_cancelled());
        Outcome::Snooze(Duration::from_secs(1))
    }
    #[derive(Default)]
    struct Deploys(AtomicU32);
    let mut registry = Registry::new();
    registry.register::<Book, _>(book).unwrap();
    let tester = Tester::builder()
        .registry(registry)
        .data(Arc::new(Deploys::default()))
        .build();
    let deploy = async { tester.begin_shutdown() };
    let (runs, ()) = tokio::join!(tester.run_to_end(self::book()), deploy);
    let verdicts: Vec<_> = runs.unwrap().into_iter().map(|run| run.verdict).collect();
    let after = Duration::from_secs(1);
    assert_eq!(verdicts, [Verdict::Snooze { after }, Verdict::Done]);

    let cx = tester.context(&tester.message(&self::book()));
    assert!(!cx.is_shutting_down());
    tester.begin_shutdown();
    assert!(cx.is_shutting_down());
}

#[tokio::test]
async fn the_keys_of_a_publish_are_recorded() {
    let publisher = Arc::new(RecordingPublisher::new());
    let unique = Unique::key("confirm:ada").until_started();
    let publish = || PublishBuilder::new(publisher.clone(), &confirm());
    publish().unique(unique.clone()).await.unwrap();
    publish().idempotency_key("request-7").await.unwrap();
    let published = publisher.published();
    assert_eq!(published[0].unique, Some(unique));
    assert_eq!(published[1].idempotency_key, Some("request-7".into()));
    let keys = published.iter().map(|it| it.message.key.clone().unwrap());
    let expected = ["confirm:ada (unique)", "request-7 (idempotency)"];
    assert!(keys.map(|it| it.to_string()).eq(expected));
    assert!(publish().unique("").await.is_err());
}
