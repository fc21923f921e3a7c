//! What a source asks the database: each statement is a task of its own, on one of the source's connections.

use std::any::Any;
use std::panic::{AssertUnwindSafe, resume_unwind};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, SystemTime};

use futures_util::FutureExt;
use tokio::sync::{mpsc, oneshot};
use uuid::Uuid;

use super::RowSettings;
use super::rows::{PendingDeadLetter, RowToPark};
use crate::Error;
use crate::backlog::{
    Batch, ClaimedFromLanes, ClaimedRow, Lane, LaneClaim, LaneKeys, Later, MadeReady, ParkFrom,
    RunKey, Sweep, Unparked, claim_and_settle, claim_parked, connection, give_back, lock_ready,
    make_ready, mark_begun, park, store_later, unpark,
};
use crate::control::Gating;
use crate::error::DatabaseError;
use crate::postgres::{DedicatedConnection, PgConnection};
use crate::source::Handle;
use crate::source::parked_tasks::lane_of;

/// How long a statement may take.
const LIMIT: Duration = Duration::from_secs(10);

/// The connections of a source, and the statements that are under way on them.
pub(super) struct Statements {
    settings: Arc<RowSettings>,
    tier: Arc<str>,
    idle: Vec<DedicatedConnection>,
    under_way: usize,
    most: usize,
    sender: mpsc::UnboundedSender<Ended>,
    answers: mpsc::UnboundedReceiver<Ended>,
}

/// The end of a statement: its connection and its answer, or what it panicked with.
type Ended = Result<(DedicatedConnection, Answer), Box<dyn Any + Send>>;

/// A statement.
pub(super) enum Statement {
    Claim(Claim),
    /// Marks runs as begun, for handlers that wait for it.
    Begin(Vec<(RunKey, oneshot::Sender<bool>)>),
    Back(Vec<(Handle, RunKey)>),
    Later(Vec<(Handle, Later)>),
    Dead(Vec<PendingDeadLetter>),
    /// Makes scheduled tasks ready that are due.
    MakeReady,
    /// Moves claimed rows to their lanes.
    Park(Vec<RowToPark>, Arc<Gating>),
    /// Moves ready rows that may not run now to their lanes.
    Sweep(Sweep, Arc<Gating>),
    ClaimParked(ParkedClaim),
    /// Makes rows of the lanes of a task ready.
    Unpark {
        task: String,
        keys: LaneKeys,
        quiet: Duration,
    },
    /// Puts rows back that this process holds in the database and does not know of.
    ReleaseUnknown {
        worker: i64,
        known: Vec<i64>,
    },
}

/// Settles and claims rows.
pub(super) struct Claim {
    pub(super) worker: i64,
    /// How long a row may wait.
    pub(super) ttl: Option<Duration>,
    /// Counts the claims of a source.
    pub(super) number: u64,
    /// Rows that are claimed before a lease is lost are lost too.
    pub(super) generation: u64,
    pub(super) batch: Batch,
}

/// Claims rows from lanes.
pub(super) struct ParkedClaim {
    pub(super) worker: i64,
    /// Rows that are claimed before a lease is lost are lost too.
    pub(super) generation: u64,
    pub(super) claims: Vec<LaneClaim>,
    /// How many rows at most take a place of the prefetch window.
    pub(super) rows: usize,
    pub(super) are_suspects: bool,
    pub(super) bytes: usize,
}

/// The answer to a statement.
pub(super) enum Answer {
    Claimed(Claim, Result<Vec<ClaimedRow>, Error>),
    Begun(Result<(), Error>),
    Back(Vec<(Handle, RunKey)>, Result<(), Error>),
    /// With the rows that still were ours.
    Later(Vec<(Handle, Later)>, Result<Vec<Uuid>, Error>),
    Dead(Vec<(PendingDeadLetter, Result<(), Error>)>),
    MadeReady(Result<MadeReady, Error>),
    /// With the lanes that the rows were moved to.
    Parked(Vec<RowToPark>, Result<Vec<Lane>, Error>),
    /// With the lanes that rows were moved to.
    Swept(Result<Vec<Lane>, Error>),
    ClaimedParked(ParkedClaim, Result<ClaimedFromLanes, Error>),
    Unparked(String, LaneKeys, Result<Unparked, Error>),
    Released(Result<u64, Error>),
}

impl Statements {
    pub(super) fn new(settings: &Arc<RowSettings>, tier: &Arc<str>, most: usize) -> Self {
        let (sender, answers) = mpsc::unbounded_channel();
        Self {
            settings: settings.clone(),
            tier: tier.clone(),
            idle: Vec::new(),
            under_way: 0,
            most,
            sender,
            answers,
        }
    }

    /// How many statements are under way.
    pub(super) fn under_way(&self) -> usize {
        self.under_way
    }

    /// Whether another statement can begin.
    pub(super) fn has_room(&self) -> bool {
        self.under_way < self.most
    }

    pub(super) fn begin(&mut self, statement: Statement) {
        let idle = self.idle.pop();
        let mut connection = idle.unwrap_or_else(|| connection(&self.settings.database));
        let (settings, tier) = (self.settings.clone(), self.tier.clone());
        let sender = self.sender.clone();
        self.under_way += 1;
        // It comes to its end even if the source does not wait for it: what it settles is settled.
        let running = AssertUnwindSafe(async move {
            let answer = run(&mut connection, &settings, &tier, statement).await;
            (connection, answer)
        });
        tokio::spawn(async move {
            // Without a receiver the worker has ended.
            let _ = sender.send(running.catch_unwind().await);
        });
    }

    /// # Panics
    /// If a statement has: what it was to settle is not known any more, so the group is made anew.
    pub(super) fn poll_answer(&mut self, cx: &mut Context<'_>) -> Poll<Answer> {
        match self.answers.poll_recv(cx) {
            Poll::Ready(Some(Ok((connection, answer)))) => {
                self.idle.push(connection);
                self.under_way -= 1;
                Poll::Ready(answer)
            }
            Poll::Ready(Some(Err(panic))) => resume_unwind(panic),
            _ => Poll::Pending,
        }
    }
}

async fn run(
    connection: &mut DedicatedConnection,
    settings: &RowSettings,
    tier: &str,
    statement: Statement,
) -> Answer {
    let app = settings.app();
    match statement {
        Statement::Claim(claim) => {
            let claiming = connection.within(LIMIT, "claim tasks", async |connection| {
                let (worker, ttl) = (claim.worker, claim.ttl);
                let keeper = settings.keeper(tier);
                claim_and_settle(connection, app, tier, worker, ttl, keeper, &claim.batch).await
            });
            let claimed = claiming.await;
            Answer::Claimed(claim, claimed)
        }
        Statement::Begin(waiting) => {
            let runs: Vec<RunKey> = waiting.iter().map(|(run, _)| *run).collect();
            let marking = connection.within(LIMIT, "mark tasks as begun", async |connection| {
                mark_begun(connection, &runs).await
            });
            let marked = marking.await;
            for (run, begin) in waiting {
                let is_ours = marked.as_ref().is_ok_and(|ours| ours.contains(&run.id));
                // A handler that was dropped does not mind.
                let _ = begin.send(is_ours);
            }
            Answer::Begun(marked.map(drop))
        }
        Statement::Back(back) => {
            let runs: Vec<RunKey> = back.iter().map(|(_, run)| *run).collect();
            let giving = connection.within(LIMIT, "give tasks back", async |connection| {
                give_back(connection, &runs).await
            });
            let given = giving.await;
            Answer::Back(back, given)
        }
        Statement::Later(later) => {
            let (handles, later): (Vec<Handle>, Vec<Later>) = later.into_iter().unzip();
            let storing = connection.within(LIMIT, "store retries", async |connection| {
                store_later(connection, &later).await
            });
            let stored = storing.await;
            Answer::Later(handles.into_iter().zip(later).collect(), stored)
        }
        Statement::Dead(dead) => {
            let mut stored = Vec::with_capacity(dead.len());
            for dead in dead {
                let (run, received) = (dead.run, dead.received.clone());
                let (message, reason) = (dead.message.as_deref(), dead.reason);
                let failure = dead.failure.clone();
                let storing =
                    settings.store_dead(connection, run, &received, message, reason, failure);
                let is_stored = storing.await.map(drop);
                stored.push((dead, is_stored));
            }
            Answer::Dead(stored)
        }
        Statement::MakeReady => {
            let making = connection.within(LIMIT, "make due tasks ready", async |connection| {
                make_ready(connection, app, tier).await
            });
            Answer::MadeReady(making.await)
        }
        Statement::Park(parked, gating) => {
            let lane = |(_, run, received): &RowToPark| (*run, lane_of(&gating, received));
            let rows: Vec<(RunKey, Lane)> = parked.iter().map(lane).collect();
            let parking = connection.within(LIMIT, "park tasks", async |connection| {
                park(connection, app, tier, ParkFrom::Running, &rows).await
            });
            let result = parking.await;
            let lanes = result.map(|()| rows.into_iter().map(|(_, lane)| lane).collect());
            Answer::Parked(parked, lanes)
        }
        Statement::Sweep(sweep, gating) => {
            let name: Arc<str> = tier.into();
            let sweeping = connection.within(LIMIT, "park ready tasks", async |connection| {
                let mut transaction = connection.begin().await?;
                let rows = lock_ready(&mut transaction, app, tier, &sweep).await?;
                let now = SystemTime::now();
                let place =
                    |row: ClaimedRow| (row.key, lane_of(&gating, &row.into_received(&name, now)));
                let rows: Vec<(RunKey, Lane)> = rows.into_iter().map(place).collect();
                park(&mut transaction, app, tier, ParkFrom::Ready, &rows).await?;
                transaction.commit().await?;
                Ok(rows.into_iter().map(|(_, lane)| lane).collect())
            });
            Answer::Swept(sweeping.await)
        }
        Statement::ClaimParked(claim) => {
            let claiming = connection.within(LIMIT, "claim parked tasks", async |connection| {
                let (worker, bytes) = (claim.worker, claim.bytes);
                let (claims, are_suspects) = (&claim.claims, claim.are_suspects);
                claim_parked(connection, app, tier, worker, claims, are_suspects, bytes).await
            });
            let claimed = claiming.await;
            Answer::ClaimedParked(claim, claimed)
        }
        Statement::Unpark { task, keys, quiet } => {
            let unparking =
                connection.within(LIMIT, "make parked tasks ready", async |connection| {
                    unpark(connection, app, tier, &task, keys, quiet).await
                });
            let unparked = unparking.await;
            Answer::Unparked(task, keys, unparked)
        }
        Statement::ReleaseUnknown { worker, known } => {
            let releasing = connection.within(LIMIT, "release tasks", async |connection| {
                release_unknown(connection, app, worker, tier, &known).await
            });
            Answer::Released(releasing.await)
        }
    }
}

async fn release_unknown(
    connection: &mut PgConnection<'_>,
    app: &str,
    worker: i64,
    tier: &str,
    known: &[i64],
) -> Result<u64, sqlx::Error> {
    let released = sqlx::query(
        "WITH back AS ( \
            DELETE FROM tierline.running WHERE worker = $1 AND NOT token = ANY($3) \
                AND backlog = (SELECT id FROM tierline.backlogs WHERE app = $4 AND tier = $2) RETURNING running.* \
         ) INSERT INTO tierline.ready (id, due_at, rank, is_held, backlog, first_backlog, task, name, properties, payload) \
         SELECT id, due_at, rank, is_held, backlog, first_backlog, task, name, properties, payload FROM back \
         ON CONFLICT (id) DO NOTHING",
    )
    .bind(worker)
    .bind(tier)
    .bind(known)
    .bind(app)
    .execute(connection)
    .await?;
    Ok(released.rows_affected())
}

/// Whether a statement that ended with this error may have been carried out.
pub(super) fn may_be_done(error: &Error) -> bool {
    !matches!(
        error,
        Error::Database(DatabaseError::Unreachable { .. } | DatabaseError::LoginRefused { .. })
    )
}
