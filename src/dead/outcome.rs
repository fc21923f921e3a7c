//! How redriven tasks ended: workers record it, operators and the canary read it.

use std::time::Duration;

use tokio::sync::{mpsc, oneshot};
use tokio::time::{sleep, timeout};

use super::RedriveOutcome;
use crate::message::Message;
use crate::observe::Event;
use crate::postgres::{Database, PgConnection, STATEMENT_LIMIT};

/// How many outcomes may wait for the database; further ones are dropped.
const WAITING: usize = 10_000;
/// How many outcomes one statement writes.
const BATCH: usize = 500;
const PAUSE: Duration = Duration::from_secs(1);
/// How long the app's end waits for what is not written yet.
const FLUSH_LIMIT: Duration = Duration::from_secs(5);

/// Writes the outcome of redriven tasks into the rows that they were redriven from. Cheap to clone.
///
/// The worker calls [`record`](Self::record) once for each message that has
/// [`redriven`](Message::redriven) set, after its outcome is durable: `Done` after the handler
/// succeeded, `Dead` after the broker confirmed the dead letter, and so on. `record` takes a microsecond,
/// never waits and never fails. A background task writes the outcomes in batches, and tries again while
/// the database is away. This is best effort: outcomes that wait when the process ends, and those beyond
/// 10,000, are lost. The collector also records that a redriven task died again.
#[derive(Debug, Clone)]
pub struct Outcomes {
    sender: mpsc::Sender<Item>,
}

/// What the writer is given.
#[derive(Debug)]
enum Item {
    Outcome(RecordedOutcome),
    /// To be answered when all that came before was tried.
    Flush(oneshot::Sender<()>),
}

#[derive(Debug)]
struct RecordedOutcome {
    row: i64,
    life: i32,
    outcome: RedriveOutcome,
}

impl Outcomes {
    /// Starts the background task that writes for `app`. It ends with the last clone, after it has tried
    /// once more to write the outcomes that wait.
    pub fn start(database: Database, app: &str) -> Self {
        let (sender, receiver) = mpsc::channel(WAITING);
        tokio::spawn(write(database, app.to_owned(), receiver));
        Self { sender }
    }

    /// Records the outcome of a message; does nothing if the message was not redriven.
    pub fn record(&self, message: &Message, outcome: RedriveOutcome) {
        if let Some(redriven) = &message.redriven {
            self.note(&redriven.from, message.life, outcome);
        }
    }

    /// Records the outcome of a redriven task, if the event is one.
    pub(crate) fn handle(&self, event: &Event<'_>) {
        let (task, outcome) = match event {
            Event::Done { task, .. } | Event::AlreadyDone { task } => (task, RedriveOutcome::Done),
            Event::Dead { task, .. } => (task, RedriveOutcome::Dead),
            Event::Discarded { task, .. } => (task, RedriveOutcome::Discarded),
            Event::Expired { task, .. } => (task, RedriveOutcome::Expired),
            _ => return,
        };
        if let Some(from) = task.redriven_from {
            self.note(from, task.life, outcome);
        }
    }

    /// Waits until what was recorded so far is written, five seconds at most.
    pub(crate) async fn flush(&self) {
        let (written, is_written) = oneshot::channel();
        let flushing = async {
            if self.sender.send(Item::Flush(written)).await.is_ok() {
                let _ = is_written.await;
            }
        };
        if timeout(FLUSH_LIMIT, flushing).await.is_err() {
            tracing::warn!(
                limit = ?FLUSH_LIMIT,
                "outcomes of redrives may be lost: the database did not take them in time"
            );
        }
    }

    fn note(&self, from: &str, life: u32, outcome: RedriveOutcome) {
        // Other producers may write any text there.
        let (Ok(row), Ok(life)) = (from.parse(), i32::try_from(life)) else {
            return;
        };
        let outcome_item = Item::Outcome(RecordedOutcome { row, life, outcome });
        if self.sender.try_send(outcome_item).is_err() {
            tracing::warn!(row, %outcome, "dropped the outcome of a redrive: too many wait for the database");
        }
    }
}

async fn write(database: Database, app: String, mut receiver: mpsc::Receiver<Item>) {
    let mut items = Vec::with_capacity(BATCH);
    while receiver.recv_many(&mut items, BATCH).await > 0 {
        let (mut batch, mut flushed) = (Vec::with_capacity(items.len()), Vec::new());
        for item in items.drain(..) {
            match item {
                Item::Outcome(ended) => batch.push(ended),
                Item::Flush(written) => flushed.push(written),
            }
        }
        // In one order everywhere, so that two writers never deadlock.
        batch.sort_by_key(|ended| ended.row);
        let rows: Vec<i64> = batch.iter().map(|ended| ended.row).collect();
        let lives: Vec<i32> = batch.iter().map(|ended| ended.life).collect();
        let outcomes: Vec<&str> = batch.iter().map(|ended| ended.outcome.as_str()).collect();
        while !rows.is_empty() {
            let marking = async {
                let mut connection = database.pool().acquire().await?;
                mark(&mut connection, &app, &rows, &lives, &outcomes).await
            };
            let tried = "record the outcomes of redriven tasks";
            match database.within(STATEMENT_LIMIT, tried, marking).await {
                Ok(()) => break,
                Err(error) if error.is_transient() && !receiver.is_closed() => {
                    tracing::debug!(%error, "cannot record the outcomes of redrives; trying again");
                    sleep(PAUSE).await;
                }
                Err(error) => {
                    tracing::warn!(%error, count = rows.len(), "lost the outcomes of redrives");
                    break;
                }
            }
        }
        for written in flushed {
            // Whoever waits no longer need not know.
            let _ = written.send(());
        }
    }
}

/// Writes the outcome of each row's redrive. `lives` are the redrive counts of the messages that ended.
pub(super) async fn mark(
    connection: &mut PgConnection<'_>,
    app: &str,
    rows: &[i64],
    lives: &[i32],
    outcomes: &[&str],
) -> Result<(), sqlx::Error> {
    sqlx::query(
        "UPDATE tierline.dead_letters AS row SET outcome = ended.outcome, outcome_at = now() \
         FROM UNNEST($2::bigint[], $3::int[], $4::text[]) AS ended (id, life, outcome) \
         WHERE row.id = ended.id AND row.app = $1 AND row.life = ended.life - 1",
    )
    .bind(app)
    .bind(rows)
    .bind(lives)
    .bind(outcomes)
    .execute(connection)
    .await?;
    Ok(())
}
