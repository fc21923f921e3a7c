//! Middleware around handlers, as workers and test helpers alike run it.

#![allow(clippy::unwrap_used)] // a test that cannot go on should stop

use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tierline::execute::Verdict;
use tierline::message::{DeadReason, FailureKind};
use tierline::task::{Attempt, Middleware, Next};
use tierline::testing::{Tester, TesterBuilder};
use tierline::{Outcome, Registry, Task, TaskError, TaskOptions, Topology};

#[derive(Serialize, Deserialize)]
struct Clean {
    room: u32,
}

impl Task for Clean {
    const NAME: &'static str = "hotel.clean";
}

#[derive(Serialize, Deserialize)]
struct Unlock;

impl Task for Unlock {
    const NAME: &'static str = "hotel.unlock";
}

const CLEAN: Clean = Clean { room: 7 };

const MAP: &str = r#"
    app = "hotel"
    [tiers.normal]
    queue = "quorum"
    [tiers.urgent]
    queue = "classic"
    [groups.slow]
    tiers = ["normal"]
    concurrency = 4
    [groups.fast]
    tiers = ["urgent"]
    concurrency = 4
    [tasks]
    "hotel.clean" = "normal"
    "hotel.unlock" = "urgent"
"#;

/// What ran, in order.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<String>>>);

impl Log {
    fn add(&self, line: impl Into<String>) {
        self.0.lock().unwrap().push(line.into());
    }

    fn take(&self) -> Vec<String> {
        std::mem::take(&mut *self.0.lock().unwrap())
    }

    /// A middleware that logs its name before and after the rest.
    fn around(&self, name: &'static str) -> impl Middleware {
        let log = self.clone();
        move |attempt: Attempt, next: Next| {
            let log = log.clone();
            async move {
                log.add(format!("{name}("));
                let outcome = next.run(attempt).await;
                log.add(format!("){name}"));
                outcome
            }
        }
    }
}

/// A tester of the map above whose handlers log that they run.
fn hotel(log: &Log) -> TesterBuilder {
    let (clean, unlock) = (log.clone(), log.clone());
    let mut registry = Registry::new();
    registry
        .register::<Clean, _>(move |task: Clean| {
            clean.add(format!("clean {}", task.room));
            async {}
        })
        .unwrap();
    registry
        .register::<Unlock, _>(move |_: Unlock| {
            unlock.add("unlock");
            async {}
        })
        .unwrap();
    Tester::builder()
        .registry(registry)
        .topology(Topology::parse(MAP).unwrap())
}

/// A tester of one handler.
fn tester_of<M>(
    handler: impl tierline::task::Handler<Clean, M>,
    options: TaskOptions,
) -> TesterBuilder {
    let mut registry = Registry::new();
    registry.register_with(handler, options).unwrap();
    Tester::builder().registry(registry)
}

#[tokio::test]
async fn the_app_is_outermost_then_the_group_then_the_task_and_the_first_added_before_later_ones() {
    let log = Log::default();
    let tester = hotel(&log)
        .task_middleware("hotel.clean", log.around("task"))
        .group_middleware("slow", log.around("group 1"))
        .middleware(log.around("app 1"))
        .group_middleware("slow", log.around("group 2"))
        .middleware(log.around("app 2"))
        .build();
    assert_eq!(tester.run(CLEAN).await.verdict, Verdict::Done);
    let expected =
        "app 1( app 2( group 1( group 2( task( clean 7 )task )group 2 )group 1 )app 2 )app 1";
    assert_eq!(log.take().join(" "), expected);
    assert_eq!(tester.run(Unlock).await.verdict, Verdict::Done);
    assert_eq!(log.take().join(" "), "app 1( app 2( unlock )app 2 )app 1");
}

#[tokio::test]
async fn a_middleware_sees_all_that_is_known_of_the_task_before_the_payload_is_decoded() {
    let log = Log::default();
    let seen = log.clone();
    let tester = hotel(&log)
        .middleware(move |attempt: Attempt, _: Next| {
            let cx = attempt.context();
            let headers: Vec<_> = cx.headers().collect();
            let payload = std::str::from_utf8(attempt.payload()).unwrap();
            seen.add(format!(
                "{} {} {} {} {} {headers:?} {payload}",
                cx.task(),
                cx.id(),
                cx.attempt(),
                cx.tier(),
                cx.priority(),
            ));
            async { Outcome::discard("not allowed") }
        })
        .build();
    let mut message = tester.message(&CLEAN);
    message.payload = b"not JSON".to_vec();
    message.headers.insert("tenant".into(), "ada".into());
    message.attempt = 2;
    message.priority = 3;
    let id = message.id.clone();
    let run = tester.run_message(message).await;
    let reason = "not allowed".to_owned();
    assert_eq!(run.verdict, Verdict::Discarded { reason });
    let line = format!(r#"hotel.clean {id} 2 normal 3 [("tenant", "ada")] not JSON"#);
    assert_eq!(log.take(), [line]);
}

#[tokio::test]
async fn what_cannot_be_decoded_is_an_undecodable_dead_letter_whatever_the_middleware_says() {
    let log = Log::default();
    let with = hotel(&log)
        .middleware(|attempt: Attempt, next: Next| async {
            assert!(matches!(next.run(attempt).await, Outcome::Dead(_)));
            Outcome::Done
        })
        .build();
    let without = hotel(&log).build();
    let mut message = with.message(&CLEAN);
    message.payload = br#"{"floor":3}"#.to_vec();
    let run = with.run_message(message.clone()).await;
    let Verdict::Dead { reason, failure } = &run.verdict else {
        panic!("{run:?}")
    };
    assert_eq!(*reason, DeadReason::Undecodable);
    assert_eq!(failure.kind, FailureKind::NotStarted);
    assert_eq!(run, without.run_message(message).await);
    assert!(log.take().is_empty());
}

#[tokio::test]
async fn a_middleware_can_replace_the_outcome() {
    let tester = tester_of(
        |_: Clean| async { Err::<(), _>("no soap") },
        TaskOptions::new(),
    );
    let minute = Duration::from_secs(60);
    let tester = tester
        .middleware(move |attempt: Attempt, next: Next| async move {
            match next.run(attempt).await {
                Outcome::Retry(error) if error.message() == "no soap" => {
                    Ok(Outcome::Snooze(minute))
                }
                _ => Err(TaskError::permanent("not what the handler said")),
            }
        })
        .build();
    let run = tester.run(CLEAN).await;
    assert_eq!(run.verdict, Verdict::Snooze { after: minute });
}

fn haunted() -> Outcome {
    panic!("haunted")
}

#[tokio::test]
async fn a_panic_in_a_middleware_costs_an_attempt() {
    let log = Log::default();
    let before = hotel(&log).middleware(|_: Attempt, _: Next| std::future::ready(haunted()));
    let after = hotel(&log).middleware(|attempt: Attempt, next: Next| async {
        next.run(attempt).await;
        haunted()
    });
    for builder in [before, after] {
        let run = builder.build().run(CLEAN).await;
        let Verdict::Retry { failure, .. } = &run.verdict else {
            panic!("{run:?}")
        };
        assert_eq!(failure.kind, FailureKind::Panic);
        assert_eq!(failure.message, "it panicked: haunted");
    }
    assert_eq!(log.take(), ["clean 7"]);
}

#[tokio::test(start_paused = true)]
async fn the_limits_of_a_task_hold_for_its_middleware() {
    let options = TaskOptions::new()
        .soft_timeout(Duration::from_secs(5))
        .timeout(Duration::from_secs(10));
    let log = Log::default();
    let told = log.clone();
    let tester = tester_of(|_: Clean| async {}, options)
        .middleware(move |attempt: Attempt, _: Next| {
            let log = told.clone();
            async move {
                let cx = attempt.context();
                cx.cancelled().await;
                log.add(format!("cancelled, {:?} left", cx.time_left()));
                std::future::pending::<()>().await;
            }
        })
        .build();
    let run = tester.run(CLEAN).await;
    let Verdict::Retry { failure, .. } = &run.verdict else {
        panic!("{run:?}")
    };
    assert_eq!(failure.kind, FailureKind::TimedOut);
    assert_eq!(log.take(), ["cancelled, 5s left"]);
}

#[tokio::test(start_paused = true)]
async fn a_middleware_can_give_handlers_a_timeout_of_its_own() {
    let tester = tester_of(|_: Clean| std::future::pending::<()>(), TaskOptions::new());
    let tester = tester
        .middleware(|attempt: Attempt, next: Next| async {
            tokio::time::timeout(Duration::from_secs(1), next.run(attempt)).await
        })
        .build();
    let run = tester.run(CLEAN).await;
    let Verdict::Retry { failure, .. } = &run.verdict else {
        panic!("{run:?}")
    };
    assert_eq!(failure.kind, FailureKind::Error);
}

#[tokio::test]
async fn a_task_that_has_expired_or_has_no_handler_meets_no_middleware() {
    let log = Log::default();
    let tester = hotel(&log).middleware(log.around("app")).build();
    let mut expired = tester.message(&CLEAN);
    expired.expires_at = Some(expired.enqueued_at);
    let run = tester.run_message(expired).await;
    assert!(matches!(run.verdict, Verdict::Expired { .. }), "{run:?}");
    let mut unknown = tester.message(&CLEAN);
    unknown.task = "hotel.paint".into();
    let run = tester.run_message(unknown).await;
    assert!(matches!(run.verdict, Verdict::Dead { .. }), "{run:?}");
    assert!(log.take().is_empty());
}

#[test]
#[should_panic = r#"group "fats": there is none of that name; did you mean "fast"?"#]
fn a_middleware_of_a_group_that_the_map_does_not_have_is_refused() {
    let log = Log::default();
    hotel(&log)
        .group_middleware("fats", log.around("group"))
        .build();
}

#[test]
#[should_panic = r#"task "hotel.claen": there is none of that name; did you mean "hotel.clean"?"#]
fn a_middleware_of_a_task_that_nobody_has_is_refused() {
    let log = Log::default();
    hotel(&log)
        .task_middleware("hotel.claen", log.around("task"))
        .build();
}

#[cfg(feature = "tower")]
mod layers {
    use tierline::task::layer;
    use tokio::sync::Notify;
    use tower::limit::ConcurrencyLimitLayer;
    use tower::load_shed::LoadShedLayer;
    use tower::load_shed::error::Overloaded;
    use tower::timeout::TimeoutLayer;
    use tower::timeout::error::Elapsed;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_layer_that_fails_fails_the_attempt_with_its_error() {
        let log = Log::default();
        let seen = log.clone();
        let tester = tester_of(|_: Clean| std::future::pending::<()>(), TaskOptions::new());
        let tester = tester
            .middleware(move |attempt: Attempt, next: Next| {
                let log = seen.clone();
                async move {
                    let outcome = next.run(attempt).await;
                    if let Outcome::Retry(error) = &outcome
                        && error.as_error().is::<Elapsed>()
                    {
                        log.add("elapsed");
                    }
                    outcome
                }
            })
            .middleware(layer(TimeoutLayer::new(Duration::from_secs(1))))
            .build();
        let run = tester.run(CLEAN).await;
        assert!(matches!(run.verdict, Verdict::Retry { .. }), "{run:?}");
        assert_eq!(log.take(), ["elapsed"]);
    }

    #[tokio::test]
    async fn layers_and_functions_nest_in_the_order_they_were_added() {
        let log = Log::default();
        let tester = hotel(&log)
            .middleware(log.around("outer"))
            .middleware(layer(tower::util::MapRequestLayer::new({
                let log = log.clone();
                move |attempt: Attempt| {
                    log.add("layer");
                    attempt
                }
            })))
            .task_middleware("hotel.clean", log.around("inner"))
            .build();
        assert_eq!(tester.run(CLEAN).await.verdict, Verdict::Done);
        let expected = "outer( layer inner( clean 7 )inner )outer";
        assert_eq!(log.take().join(" "), expected);
    }

    #[tokio::test]
    async fn attempts_share_the_limit_of_a_layer() {
        let (started, end) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
        let log = Log::default();
        let (first, last, ran) = (started.clone(), end.clone(), log.clone());
        let handler = move |_: Clean| {
            let (started, end) = (first.clone(), last.clone());
            ran.add("began");
            async move {
                started.notify_one();
                end.notified().await;
            }
        };
        let limit =
            tower::layer::util::Stack::new(ConcurrencyLimitLayer::new(1), LoadShedLayer::new());
        let tester = tester_of(handler, TaskOptions::new())
            .middleware(|attempt: Attempt, next: Next| async {
                match next.run(attempt).await {
                    Outcome::Retry(error) if error.as_error().is::<Overloaded>() => {
                        Outcome::Snooze(Duration::from_secs(1))
                    }
                    outcome => outcome,
                }
            })
            .middleware(layer(limit))
            .build();
        let second = async {
            started.notified().await;
            let run = tester.run(CLEAN).await;
            end.notify_one();
            run
        };
        let (first, second) = tokio::join!(tester.run(CLEAN), second);
        assert_eq!(first.verdict, Verdict::Done);
        let after = Duration::from_secs(1);
        assert_eq!(second.verdict, Verdict::Snooze { after });
        // The place is free again.
        end.notify_one();
        assert_eq!(tester.run(CLEAN).await.verdict, Verdict::Done);
        assert_eq!(log.take(), ["began", "began"]);
    }
}
