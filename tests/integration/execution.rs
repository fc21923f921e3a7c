//! What becomes of a message, step by step, as workers and test helpers alike see it.

#![allow(clippy::unwrap_used)] // a test that cannot go on should stop

use std::panic::panic_any;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};
use tierline::execute::Verdict;
use tierline::message::{DeadReason, FailureKind};
use tierline::task::blocking;
use tierline::testing::Tester;
use tierline::{Context, Outcome, Registry, Task, TaskError, TaskOptions};

#[derive(Serialize, Deserialize)]
struct Job {
    number: u32,
}

impl Task for Job {
    const NAME: &'static str = "job";
}

const JOB: Job = Job { number: 7 };

fn tester<M>(handler: impl tierline::task::Handler<Job, M>) -> Tester {
    tester_with(handler, TaskOptions::new())
}

fn tester_with<M>(handler: impl tierline::task::Handler<Job, M>, options: TaskOptions) -> Tester {
    let mut registry = Registry::new();
    registry.register_with(handler, options).unwrap();
    Tester::builder().registry(registry).build()
}

fn seconds(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

#[tokio::test]
async fn a_handler_that_returns_ok_is_done() {
    let tester = tester(|job: Job| async move {
        assert_eq!(job.number, 7);
    });
    assert_eq!(tester.run(JOB).await.verdict, Verdict::Done);
}

#[tokio::test]
async fn an_error_is_retried_as_the_policy_says_and_then_dead() {
    let tester = tester(|_: Job| async { Err::<(), _>("the line is busy") });
    let runs = tester.run_to_end(JOB).await.unwrap();
    let verdicts: Vec<_> = runs.iter().map(|run| &run.verdict).collect();
    let [first, second, third, last] = verdicts[..] else {
        panic!("{verdicts:?}")
    };
    assert!(matches!(first, Verdict::Retry { after, .. } if *after == seconds(1)));
    assert!(matches!(second, Verdict::Retry { after, .. } if *after == seconds(2)));
    assert!(matches!(third, Verdict::Retry { after, .. } if *after == seconds(4)));
    let Verdict::Dead {
        reason: DeadReason::RetriesExhausted,
        failure,
    } = last
    else {
        panic!("{last:?}")
    };
    assert_eq!(
        (failure.kind, failure.message.as_str()),
        (FailureKind::Error, "the line is busy")
    );
}

#[tokio::test]
async fn a_retry_keeps_everything_but_the_attempt() {
    let tester = tester(|_: Job| async { Err::<(), _>("no") });
    let runs = tester.run_to_end(JOB).await.unwrap();
    for pair in runs.windows(2) {
        let mut expected = pair[0].message.clone();
        expected.attempt += 1;
        assert_eq!(pair[1].message, expected);
    }
}

#[tokio::test]
async fn a_permanent_error_is_dead_at_once() {
    let tester = tester(|_: Job| async { Err::<(), _>(TaskError::permanent("no such number")) });
    let verdict = tester.run(JOB).await.verdict;
    assert!(
        matches!(
            verdict,
            Verdict::Dead {
                reason: DeadReason::Permanent,
                ..
            }
        ),
        "{verdict:?}"
    );
}

#[tokio::test]
async fn an_error_may_say_when_to_come_back_but_not_how_often() {
    let tester = tester(|_: Job| async {
        Err::<(), _>(TaskError::retry_after(seconds(30), "rate limited"))
    });
    let runs = tester.run_to_end(JOB).await.unwrap();
    assert_eq!(runs.len(), 4);
    assert!(matches!(runs[0].verdict, Verdict::Retry { after, .. } if after == seconds(30)));
    assert!(matches!(
        runs[3].verdict,
        Verdict::Dead {
            reason: DeadReason::RetriesExhausted,
            ..
        }
    ));
}

#[tokio::test]
async fn a_retry_outcome_may_be_marked_permanent_too() {
    let tester = tester(|_: Job| async { Outcome::retry(TaskError::permanent("no")) });
    let verdict = tester.run(JOB).await.verdict;
    assert!(
        matches!(
            verdict,
            Verdict::Dead {
                reason: DeadReason::Permanent,
                ..
            }
        ),
        "{verdict:?}"
    );
}

#[tokio::test]
async fn a_snooze_costs_no_attempt() {
    let asked = AtomicBool::new(false);
    let tester = tester(move |_: Job, cx: Context| {
        let ready = asked.swap(true, Ordering::Relaxed);
        async move {
            assert_eq!(cx.attempt(), 1);
            Ok::<_, TaskError>(if ready {
                Outcome::Done
            } else {
                Outcome::Snooze(seconds(5))
            })
        }
    });
    let runs = tester.run_to_end(JOB).await.unwrap();
    let verdicts: Vec<_> = runs.into_iter().map(|run| run.verdict).collect();
    assert_eq!(
        verdicts,
        [Verdict::Snooze { after: seconds(5) }, Verdict::Done]
    );
}

#[tokio::test]
async fn a_discarded_task_keeps_its_reason() {
    let tester = tester(|_: Job| async { Outcome::discard("the order was cancelled") });
    let verdict = tester.run(JOB).await.verdict;
    assert_eq!(
        verdict,
        Verdict::Discarded {
            reason: "the order was cancelled".into()
        }
    );
}

#[tokio::test]
async fn an_unknown_task_is_parked_with_what_to_do_about_it() {
    let tester = tester(|_: Job| async {});
    let mut message = tester.message(&JOB);
    message.task = "job.of.tomorrow".into();
    let Verdict::Dead {
        reason: DeadReason::UnknownTask,
        failure,
    } = tester.run_message(message).await.verdict
    else {
        panic!("not parked")
    };
    assert!(failure.message.contains("`job.of.tomorrow`") && failure.message.contains("redrive"));
}

#[tokio::test]
async fn a_payload_that_does_not_decode_is_parked_and_never_run() {
    let tester = tester(|_: Job| async {
        if true {
            panic!("it ran")
        }
    });
    for payload in ["", "{", "{\"numbr\": 7}", "[7, 8]", "\u{0}"] {
        let mut message = tester.message(&JOB);
        message.payload = payload.into();
        let verdict = tester.run_message(message).await.verdict;
        assert!(
            matches!(
                verdict,
                Verdict::Dead {
                    reason: DeadReason::Undecodable,
                    ..
                }
            ),
            "{verdict:?}"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn the_soft_limit_cancels_the_context_and_lets_the_handler_end_well() {
    let options = TaskOptions::new()
        .soft_timeout(seconds(10))
        .timeout(seconds(20));
    let tester = tester_with(
        |_: Job, cx: Context| async move {
            cx.cancelled().await;
            assert!(cx.is_cancelled());
            assert!(cx.time_left() <= seconds(10));
            Outcome::discard("saved what there was")
        },
        options,
    );
    let verdict = tester.run(JOB).await.verdict;
    assert!(matches!(verdict, Verdict::Discarded { .. }), "{verdict:?}");
}

#[tokio::test(start_paused = true)]
async fn the_hard_limit_drops_the_handler_and_counts_as_a_failure() {
    struct OnDrop(Arc<AtomicBool>);
    impl Drop for OnDrop {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Relaxed);
        }
    }
    let dropped = Arc::new(AtomicBool::new(false));
    let flag = dropped.clone();
    let tester = tester_with(
        move |_: Job| {
            let on_drop = OnDrop(flag.clone());
            async move {
                let _on_drop = on_drop;
                std::future::pending::<()>().await;
            }
        },
        TaskOptions::new().timeout(seconds(20)),
    );
    let Verdict::Retry { failure, .. } = tester.run(JOB).await.verdict else {
        panic!("not retried")
    };
    assert_eq!(failure.kind, FailureKind::TimedOut);
    assert!(failure.message.contains("20s"), "{failure}");
    assert!(dropped.load(Ordering::Relaxed));
}

#[tokio::test]
async fn a_panic_is_a_failure_with_its_message_wherever_it_happens() {
    async fn says_who(_: Job) -> Result<(), TaskError> {
        panic!("no room {}", 12)
    }
    let before_the_first_await = tester(|job: Job| {
        assert!(job.number != 7, "not seven");
        async {}
    });
    let off_the_async_threads = tester(blocking(|_: Job| -> () { panic!("on a thread") }));
    let without_text = tester(|_: Job| async {
        if true {
            panic_any(12)
        }
    });
    for (tester, message) in [
        (tester(says_who), "no room 12"),
        (before_the_first_await, "not seven"),
        (off_the_async_threads, "on a thread"),
        (without_text, "a value that is not text"),
    ] {
        let Verdict::Retry { failure, .. } = tester.run(JOB).await.verdict else {
            panic!("not retried")
        };
        assert_eq!(failure.kind, FailureKind::Panic);
        assert!(failure.message.contains(message), "{failure}");
    }
}

#[tokio::test(start_paused = true)]
async fn values_that_panic_when_dropped_cost_only_their_own_attempt() {
    #[derive(Serialize, Deserialize)]
    struct Bomb;
    impl Drop for Bomb {
        fn drop(&mut self) {
            panic!("dropped");
        }
    }
    impl Task for Bomb {
        const NAME: &'static str = "bomb";
    }
    let mut registry = Registry::new();
    registry
        .register::<Bomb, _>(|bomb: Bomb| async move {
            std::future::pending::<()>().await;
            drop(bomb);
        })
        .unwrap();
    let tester = Tester::builder().registry(registry).build();
    let mut message = Tester::builder()
        .registry(Registry::new())
        .build()
        .message(&JOB);
    message.task = "bomb".into();
    message.payload = b"null".into();
    let Verdict::Retry { failure, .. } = tester.run_message(message).await.verdict else {
        panic!("not retried")
    };
    assert_eq!(failure.kind, FailureKind::TimedOut);
}

#[tokio::test]
async fn an_error_that_panics_when_it_is_written_costs_only_its_own_attempt() {
    #[derive(Debug)]
    struct Unwritable;
    impl std::fmt::Display for Unwritable {
        fn fmt(&self, _: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            panic!("no words")
        }
    }
    impl std::error::Error for Unwritable {}
    let tester = tester(|_: Job| async { Err::<(), _>(Unwritable) });
    let Verdict::Retry { failure, .. } = tester.run(JOB).await.verdict else {
        panic!("not retried")
    };
    assert_eq!(failure.kind, FailureKind::Panic);
}

#[tokio::test]
async fn limits_and_delays_without_an_end_do_no_harm() {
    let options = TaskOptions::new().timeout(Duration::MAX);
    let forever = tester_with(|_: Job| async { Outcome::Snooze(Duration::MAX) }, options);
    assert_eq!(
        forever.run(JOB).await.verdict,
        Verdict::Snooze {
            after: Duration::MAX
        }
    );
    assert!(forever.run_to_end(JOB).await.is_err());
}

#[tokio::test]
async fn a_blocking_handler_runs_off_the_async_threads() {
    let here = std::thread::current().id();
    let tester = tester(blocking(move |_: Job, cx: Context| {
        assert_eq!(cx.attempt(), 1);
        assert_ne!(std::thread::current().id(), here);
    }));
    assert_eq!(tester.run(JOB).await.verdict, Verdict::Done);
}

#[tokio::test]
async fn the_context_has_the_data_or_says_what_is_missing() {
    let mut registry = Registry::new();
    registry
        .register::<Job, _>(|_: Job, cx: Context| async move {
            assert_eq!(cx.try_data::<Vec<u8>>(), None);
            cx.data::<Mutex<u32>>();
        })
        .unwrap();
    let tester = Tester::builder()
        .registry(registry)
        .data("a value of another type")
        .build();
    let Verdict::Retry { failure, .. } = tester.run(JOB).await.verdict else {
        panic!("not retried")
    };
    for part in ["`job`", "Mutex<u32>", ".data("] {
        assert!(failure.message.contains(part), "{failure}");
    }
}

#[tokio::test]
async fn the_context_tells_what_the_message_says() {
    let tester = tester(|_: Job, cx: Context| async move {
        assert_eq!(
            (cx.task(), cx.id().as_str(), cx.attempt(), cx.tier()),
            ("job", "order-1007", 3, "test")
        );
        assert_eq!(cx.header("guest"), Some("Ada"));
        assert_eq!(cx.enqueued_at(), SystemTime::UNIX_EPOCH);
    });
    let mut message = tester.message(&JOB);
    message.id = "order-1007".into();
    message.attempt = 3;
    message.enqueued_at = SystemTime::UNIX_EPOCH;
    message.headers.insert("guest".into(), "Ada".into());
    assert_eq!(tester.run_message(message).await.verdict, Verdict::Done);
}

#[tokio::test]
async fn the_billionth_attempt_is_classified_like_any_other() {
    let tester = tester_with(
        |_: Job| async { Err::<(), _>("no") },
        TaskOptions::new().retries(u32::MAX).jitter(false),
    );
    let mut message = tester.message(&JOB);
    message.attempt = 1_000_000_000;
    let verdict = tester.run_message(message).await.verdict;
    assert!(
        matches!(verdict, Verdict::Retry { after, .. } if after == seconds(600)),
        "{verdict:?}"
    );
}
