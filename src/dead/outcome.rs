//! How redriven tasks ended: told by workers, read by operators and by the canary.

use std::time::Duration;

use sqlx::PgConnection;
use tokio::sync::mpsc;
use tokio::time::sleep;

use super::RedriveOutcome;
use crate::message::Message;
use crate::observe::Event;
use crate::postgres::{Database, STATEMENT_LIMIT};

/// How many outcomes wait for the database at most; further ones are dropped.
const WAITING: usize = 10_000;
/// How many are written in one statement.
const BATCH: usize = 500;
const PAUSE: Duration = Duration::from_secs(1);

/// Writes how redriven tasks ended into the rows that they came from. Cheap to clone.
///
/// The contract with whoever runs tasks: call [`record`](Self::record) once per message that has
/// [`redriven`](Message::redriven) set, after its outcome is durable (`Done` after the handler
/// succeeded, `Dead` after the dead letter is confirmed …). It takes a microsecond, never waits and
/// never fails: outcomes are written in the background, many at once, and again after the database
/// was away. It is best effort: what waits when the process ends, or exceeds 10,000, is lost. That a
/// redriven task died again is known to the collector too.
#[derive(Debug, Clone)]
pub struct Outcomes {
    sender: mpsc::Sender<Ended>,
}

#[derive(Debug)]
struct Ended {
    row: i64,
    life: i32,
    outcome: RedriveOutcome,
}

impl Outcomes {
    /// Begins to write for `app`, in a background task that ends with the last clone, after what is
    /// waiting was tried once more.
    pub fn start(database: Database, app: &str) -> Self {
        let (sender, receiver) = mpsc::channel(WAITING);
        tokio::spawn(write(database, app.to_owned(), receiver));
        Self { sender }
    }

    /// Notes how a message ended; nothing happens where it was not redriven.
    pub fn record(&self, message: &Message, outcome: RedriveOutcome) {
        if let Some(redriven) = &message.redriven {
            self.note(&redriven.from, message.life, outcome);
        }
    }

    /// Notes how a redriven task ended, if that is what happened.
    pub(crate) fn hear(&self, event: &Event<'_>) {
        let (task, outcome) = match event {
            Event::Done { task, .. } => (task, RedriveOutcome::Done),
            Event::Dead { task, .. } => (task, RedriveOutcome::Dead),
            Event::Discarded { task, .. } => (task, RedriveOutcome::Discarded),
            Event::Expired { task, .. } => (task, RedriveOutcome::Expired),
            _ => return,
        };
        if let Some(from) = task.redriven_from {
            self.note(from, task.life, outcome);
        }
    }

    fn note(&self, from: &str, life: u32, outcome: RedriveOutcome) {
        // Another producer may write anything there.
        let (Ok(row), Ok(life)) = (from.parse(), i32::try_from(life)) else {
            return;
        };
        if self.sender.try_send(Ended { row, life, outcome }).is_err() {
            tracing::warn!(row, %outcome, "the outcome of a redrive was dropped: too many wait");
        }
    }
}

async fn write(database: Database, app: String, mut receiver: mpsc::Receiver<Ended>) {
    let mut batch = Vec::with_capacity(BATCH);
    while receiver.recv_many(&mut batch, BATCH).await > 0 {
        // In one order everywhere, so that two writers never wait for each other.
        batch.sort_by_key(|ended| ended.row);
        let rows: Vec<i64> = batch.iter().map(|ended| ended.row).collect();
        let lives: Vec<i32> = batch.iter().map(|ended| ended.life).collect();
        let outcomes: Vec<&str> = batch.iter().map(|ended| ended.outcome.as_str()).collect();
        loop {
            let marking = async {
                let mut connection = database.pool().acquire().await?;
                mark(&mut connection, &app, &rows, &lives, &outcomes).await
            };
            let tried = "record how redriven tasks ended";
            match database.within(STATEMENT_LIMIT, tried, marking).await {
                Ok(()) => break,
                Err(error) if error.is_transient() && !receiver.is_closed() => {
                    tracing::debug!(%error, "will try again");
                    sleep(PAUSE).await;
                }
                Err(error) => {
                    tracing::warn!(%error, count = rows.len(), "outcomes of redrives are lost");
                    break;
                }
            }
        }
        batch.clear();
    }
}

/// Writes how the next life of each row ended; `lives` are those next lives.
pub(super) async fn mark(
    connection: &mut PgConnection,
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
