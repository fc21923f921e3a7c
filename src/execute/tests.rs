use std::sync::Arc;
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};

use super::*;
use crate::Task;
use crate::task::Handler;
use crate::testing::{RecordingPublisher, Tester};

#[derive(Serialize, Deserialize)]
struct Job;

impl Task for Job {
    const NAME: &'static str = "job";
}

/// An executor of one handler, and a message for it.
fn executor<M>(handler: impl Handler<Job, M>) -> (Executor, Message) {
    let mut registry = Registry::new();
    registry.register::<Job, M>(handler).unwrap();
    let publisher = Arc::new(RecordingPublisher::new());
    let executor = Executor::new(Arc::new(registry), Arc::default(), publisher);
    let tester = Tester::builder().registry(Registry::new()).build();
    (executor, tester.message(&Job))
}

#[tokio::test]
async fn an_expired_message_is_skipped_and_one_that_expires_later_is_run() {
    let now = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000);
    let (executor, mut message) = executor(|_: Job| async {});
    let executor = executor.clock(move || now);
    let late = Duration::from_secs(3);

    message.expires_at = Some(now - late);
    let verdict = executor
        .execute(&message, &Cancellation::new(), &Transactions::default())
        .await;
    assert_eq!(verdict, Verdict::Expired { late });

    message.expires_at = Some(now + late);
    let verdict = executor
        .execute(&message, &Cancellation::new(), &Transactions::default())
        .await;
    assert_eq!(verdict, Verdict::Done);
}

#[tokio::test]
async fn a_shutdown_cancels_the_context() {
    let (executor, message) = executor(|_: Job, cx: Context| async move { cx.cancelled().await });
    let shutdown = Cancellation::new();
    shutdown.cancel();
    assert_eq!(
        executor
            .execute(&message, &shutdown, &Transactions::default())
            .await,
        Verdict::Done
    );
}
