//! The producer: a steady stream of all kinds of tasks.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context, Result};
use tierline::task::{Publish, PublishRequest};
use tierline::{Error, Tierline};
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval};

use crate::ledger::{Fact, Ledger, now};

/// How many publishes are in flight at once.
const LOOPS: u64 = 8;

/// The tasks, in turn. One in eleven fails for good.
const TASKS: [&str; 11] = [
    "urgent", "usual", "urgent", "usual", "flaky", "slow", "usual", "urgent", "doomed", "parent",
    "usual",
];
/// One in this many is delayed by a second.
const DELAYED: u64 = 7;

/// The state that the producer's loops share.
struct Producer {
    publisher: Arc<dyn Publish>,
    ledger: Ledger,
    next: AtomicU64,
}

pub(super) async fn publish(
    app: &Tierline,
    ledger: Ledger,
    rate: u64,
    ended: impl Future<Output = ()>,
) -> Result<()> {
    let producer = Arc::new(Producer {
        publisher: app.publisher(),
        ledger,
        next: AtomicU64::new(0),
    });
    let pause = Duration::from_micros(1_000_000 * LOOPS / rate.max(1));
    let mut loops = JoinSet::new();
    for _ in 0..LOOPS {
        let producer = Arc::clone(&producer);
        loops.spawn(async move { producer.publish_for_ever(pause).await });
    }
    // Publishes in flight then may be confirmed or not; the ledger has no confirm.
    tokio::select! {
        ended = loops.join_next() => ended.context("no loops")??,
        () = ended => Ok(()),
    }
}

impl Producer {
    async fn publish_for_ever(&self, pause: Duration) -> Result<()> {
        let mut ticks = interval(pause);
        // After a standstill the stream continues at its rate: a flood would hide the recovery.
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            let number = self.next.fetch_add(1, Ordering::Relaxed);
            self.publish(number).await?;
        }
    }

    async fn publish(&self, number: u64) -> Result<()> {
        // With the process id: the same number in another process is another task.
        let id = format!("producer.{}.{number}", std::process::id());
        let task = TASKS[(number % TASKS.len() as u64) as usize];
        let mut request = PublishRequest::named(task, b"{}".to_vec());
        request.id = Some(id.as_str().into());
        request.delay = number
            .is_multiple_of(DELAYED)
            .then_some(Duration::from_secs(1));
        let sent = now();
        let fact = match self.publisher.publish(request).await {
            Ok(receipt) => Fact::Confirmed {
                tier: receipt.tier,
                sent,
            },
            Err(error) => Fact::Refused { why: kind(&error) },
        };
        Ok(self.ledger.note(id, fact)?)
    }
}

/// The name of the error's variant.
fn kind(error: &Error) -> String {
    let text = format!("{error:?}");
    let end = text.find(|it: char| !it.is_alphanumeric());
    text[..end.unwrap_or(text.len())].to_owned()
}
