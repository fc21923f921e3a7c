//! Inserts rows for publishers.
//!
//! Each tier has a writer of its own with one connection, so that a flood into one tier does not hold up publishes to
//! another, and rows keep the order in which they were published. Rows with a key have another one, so that those without
//! never wait for a key, and rows whose key was busy a third one, so that those whose key is free do not wait either. Rows
//! that are published at the same time share a statement and its commit: while one statement is under way, the next batch
//! gathers. A publish waits for the commit in any case.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use sqlx::postgres::PgDatabaseError;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot};
use tokio::time::{Instant, sleep_until, timeout_at};
use tokio_util::task::AbortOnDropHandle;

use super::add_backlogs;
use super::commits::CommitWatcher;
use super::insert::insert_rows;
use super::keys::{Inserted, KeyProblem, KeyedInsert, KeyedRow, Wait, insert_keyed};
use super::notify::{NOTIFY_BELOW, notice, notify};
use super::parked::{Lane, park_new};
use super::prepare::TiersKnown;
use super::room::Room;
use super::row::NewRow;
use crate::Error;
use crate::error::DatabaseError;
use crate::postgres::{Database, DedicatedConnection};
use crate::topology::Topology;

/// The largest number of rows, and of bytes, that one statement inserts. A single row may be larger.
pub(super) const BATCH_ROWS: usize = 500;
pub(super) const BATCH_BYTES: usize = 1 << 20;
/// The largest number of rows with keys. Each has a subtransaction, and Postgres keeps 64 of them where it finds them fast.
pub(super) const KEYED_ROWS: usize = 50;
/// How many KiB of rows may wait for a statement, for each tier.
const WAITING_KIB: usize = 16 << 10;
/// How long one statement may take.
const LIMIT: Duration = Duration::from_secs(10);
/// How soon after a notification of a tier the next one follows. A worker that is awake needs none.
const NOTIFY_EVERY: Duration = Duration::from_millis(5);

/// Why a row was not inserted, as far as that is known.
#[derive(Debug, Clone)]
pub(crate) enum InsertFailure {
    /// There was no connection, or the statement was not sent.
    NotSent(Arc<str>),
    /// It may be stored or not.
    Lost(Arc<str>),
    /// The tier has as many rows as it may have.
    Full,
    /// Postgres will never take this row.
    Refused(Arc<str>),
    /// The tables are missing.
    NotMigrated(Arc<str>),
    /// The key of the row is not to be had.
    Key(KeyProblem),
}

impl From<KeyProblem> for InsertFailure {
    fn from(problem: KeyProblem) -> Self {
        match problem {
            KeyProblem::Full => Self::Full,
            problem => Self::Key(problem),
        }
    }
}

/// The writers of each tier. They are started by the first row.
#[derive(Debug)]
pub(crate) struct RowWriters {
    pub(super) database: Database,
    pub(super) app: Arc<str>,
    pub(super) tiers: HashMap<String, WrittenTier>,
    /// The tiers that keep finished tasks.
    pub(super) keeping: Arc<[String]>,
    pub(super) tiers_known: TiersKnown,
    /// Tells workers of rows that a transaction of the caller's inserts, once it has committed.
    pub(super) commits: OnceLock<CommitWatcher>,
    pub(super) may_migrate: bool,
}

#[derive(Debug)]
pub(super) struct WrittenTier {
    /// `None`: the tier has no `max_length`.
    pub(super) room: Option<Arc<Room>>,
    plain: OnceLock<RowWriter>,
    keyed: OnceLock<RowWriter>,
    busy: OnceLock<RowWriter>,
}

#[derive(Debug)]
struct RowWriter {
    sender: mpsc::UnboundedSender<Insert>,
    room: Arc<Semaphore>,
    _connection: AbortOnDropHandle<()>,
}

/// A row on its way, and who waits for it.
#[derive(Debug)]
struct Insert {
    row: Arc<NewRow>,
    progress: Arc<Progress>,
    done: oneshot::Sender<Result<Inserted, InsertFailure>>,
    /// Whether the tier has room for it. Without room, a row with a key may still be a duplicate.
    has_room: bool,
    _room: OwnedSemaphorePermit,
}

/// Whether a row is sent or its publisher has given it up, whichever comes first.
#[derive(Debug, Default)]
struct Progress(AtomicU8);

impl Progress {
    const SENT: u8 = 1;
    const GIVEN_UP: u8 = 2;

    /// Whether the row may be sent.
    fn send(&self) -> bool {
        self.advance_to(Self::SENT)
    }

    /// Whether the row will never be sent.
    fn give_up(&self) -> bool {
        self.advance_to(Self::GIVEN_UP)
    }

    fn advance_to(&self, next: u8) -> bool {
        let order = Ordering::AcqRel;
        let before = self.0.compare_exchange(0, next, order, Ordering::Acquire);
        before.is_ok() || before == Err(next)
    }
}

impl RowWriters {
    /// `may_migrate` says that the tables may be made where they are missing.
    pub(crate) fn new(database: Database, topology: &Topology, may_migrate: bool) -> Self {
        let tiers = topology.tiers().iter().map(|tier| {
            let written = WrittenTier {
                room: tier.max_length.map(|most| Arc::new(Room::new(most))),
                plain: OnceLock::new(),
                keyed: OnceLock::new(),
                busy: OnceLock::new(),
            };
            (tier.name.clone(), written)
        });
        let keeping = topology.tiers_using_postgres();
        let keeping = keeping.filter(|tier| tier.home.keep().is_some());
        Self {
            database,
            app: topology.app().into(),
            tiers: tiers.collect(),
            keeping: keeping.map(|tier| tier.name.clone()).collect(),
            tiers_known: TiersKnown::default(),
            commits: OnceLock::new(),
            may_migrate,
        }
    }

    /// Inserts a row once. `Ok`: it is committed, or another task has its key. `was_busy`: its key was busy before.
    pub(crate) async fn insert(
        &self,
        row: &Arc<NewRow>,
        was_busy: bool,
        deadline: Instant,
    ) -> Result<Inserted, InsertFailure> {
        let unsent = || InsertFailure::NotSent("no statement could be sent in time".into());
        let Some(tier) = self.tiers.get(&row.tier) else {
            return Err(InsertFailure::Refused("its tier is not in the map".into()));
        };
        match timeout_at(deadline, self.prepare()).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => return Err(unsent_because(error)),
            Err(_) => return Err(unsent()),
        }
        let (writer, wait) = match &row.key {
            None => (&tier.plain, Wait::No),
            Some(_) if was_busy => (&tier.busy, Wait::Briefly),
            Some(_) => (&tier.keyed, Wait::No),
        };
        let writer = writer.get_or_init(|| self.open(&row.tier, tier, wait));
        let kib = row.size().div_ceil(1 << 10).clamp(1, WAITING_KIB) as u32;
        let room = timeout_at(deadline, writer.room.clone().acquire_many_owned(kib)).await;
        let Ok(Ok(room)) = room else {
            return Err(unsent());
        };
        let progress = Arc::new(Progress::default());
        let (done, answer) = oneshot::channel();
        let insert = Insert {
            row: row.clone(),
            progress: progress.clone(),
            done,
            has_room: true,
            _room: room,
        };
        if writer.sender.send(insert).is_err() {
            return Err(unsent());
        }
        match timeout_at(deadline, answer).await {
            Ok(Ok(answer)) => answer,
            _ if progress.give_up() => Err(unsent()),
            _ => {
                let why = "the database did not answer in time";
                Err(InsertFailure::Lost(why.into()))
            }
        }
    }

    fn open(&self, name: &str, tier: &WrittenTier, wait: Wait) -> RowWriter {
        let (sender, inserts) = mpsc::unbounded_channel();
        let connection = WriterConnection {
            connection: super::connection(&self.database),
            app: self.app.clone(),
            keeping: self.keeping.clone(),
            tier: name.to_owned(),
            wait,
            is_prepared: false,
            room: tier.room.clone(),
            inserts,
            notify_at: Instant::now(),
            must_notify: false,
            next_due: None,
        };
        RowWriter {
            sender,
            room: Arc::new(Semaphore::new(WAITING_KIB)),
            _connection: AbortOnDropHandle::new(tokio::spawn(connection.run())),
        }
    }
}

/// The connection of a writer.
struct WriterConnection {
    connection: DedicatedConnection,
    app: Arc<str>,
    keeping: Arc<[String]>,
    tier: String,
    /// How long it waits for a key.
    wait: Wait,
    /// Whether the tier is known to the database.
    is_prepared: bool,
    room: Option<Arc<Room>>,
    inserts: mpsc::UnboundedReceiver<Insert>,
    /// When the next notification may follow.
    notify_at: Instant,
    /// Whether ready rows were inserted since the last notification.
    must_notify: bool,
    /// When the first scheduled row falls due that was inserted since, if that is soon.
    next_due: Option<Instant>,
}

impl WriterConnection {
    async fn run(mut self) {
        loop {
            let batch = tokio::select! {
                batch = gather(&mut self.inserts) => batch,
                () = sleep_until(self.notify_at), if self.must_notify || self.next_due.is_some() => Some(Vec::new()),
            };
            let Some(batch) = batch else {
                return;
            };
            if !batch.is_empty() {
                self.insert_batch(batch).await;
            }
            self.notify().await;
        }
    }

    async fn insert_batch(&mut self, batch: Vec<Insert>) {
        let mut batch = batch;
        self.refuse_what_is_full(&mut batch).await;
        let (keyed, plain): (Vec<_>, Vec<_>) = batch
            .into_iter()
            .partition(|insert| insert.row.key.is_some());
        let (parked, plain): (Vec<_>, Vec<_>) = plain
            .into_iter()
            .partition(|insert| insert.row.lane.is_some());
        let (at_once, later): (Vec<_>, Vec<_>) = plain
            .into_iter()
            .partition(|insert| insert.row.after.is_zero());
        for batch in [keyed, parked, at_once, later] {
            self.insert_all(batch).await;
        }
    }

    /// Inserts rows in one statement. If Postgres refuses one of them, each is inserted alone.
    async fn insert_all(&mut self, mut batch: Vec<Insert>) {
        batch.retain(|insert| insert.progress.send());
        if batch.is_empty() {
            return;
        }
        match self.execute(&batch).await {
            Err(InsertFailure::Refused(_)) if batch.len() > 1 => {
                for insert in batch {
                    let alone = vec![insert];
                    let inserted = self.execute(&alone).await;
                    self.answer(alone, inserted);
                }
            }
            inserted => self.answer(batch, inserted),
        }
    }

    /// Tells each publisher what became of its row.
    fn answer(&mut self, batch: Vec<Insert>, inserted: Result<Vec<KeyedInsert>, InsertFailure>) {
        let now = Instant::now();
        let inserted: Vec<Result<Inserted, InsertFailure>> = match inserted {
            Ok(each) => each
                .into_iter()
                .map(|it| it.map_err(InsertFailure::from))
                .collect(),
            Err(failure) => vec![Err(failure); batch.len()],
        };
        for (insert, inserted) in batch.into_iter().zip(inserted) {
            let is_stored = matches!(inserted, Ok(Inserted::New | Inserted::Replaced(_)));
            match insert.row.after {
                _ if !is_stored => {}
                Duration::ZERO => self.must_notify = true,
                // Workers look for scheduled rows every second.
                after if after < NOTIFY_BELOW => {
                    let due = now + after;
                    self.next_due = Some(self.next_due.map_or(due, |other| other.min(due)));
                }
                _ => {}
            }
            // A publisher that has given up does not mind.
            let _ = insert.done.send(inserted);
        }
    }

    /// Inserts rows that all have keys, all have lanes, or are all plain.
    async fn execute(&mut self, batch: &[Insert]) -> Result<Vec<KeyedInsert>, InsertFailure> {
        let of = (&*self.app, self.tier.as_str());
        let rows: Vec<&NewRow> = batch.iter().map(|insert| &*insert.row).collect();
        let keyed = batch.iter();
        let keyed = keyed.filter_map(|insert| KeyedRow::of(&insert.row, insert.has_room));
        let keyed: Vec<KeyedRow<'_>> = keyed.collect();
        let parked = rows.iter();
        let parked = parked.filter_map(|row| Some((*row, row.lane.as_ref()?)));
        let parked: Vec<(&NewRow, &Lane)> = parked.collect();
        let wait = self.wait;
        let keeping: Vec<&str> = self.keeping.iter().map(String::as_str).collect();
        let is_prepared = std::mem::replace(&mut self.is_prepared, true);
        let mut is_tier_unknown = false;
        let inserting = self
            .connection
            .within(LIMIT, "publish", async |connection| {
                if !is_prepared {
                    add_backlogs(connection, of.0, &[of.1]).await?;
                }
                let inserted = match keyed.is_empty() {
                    true if !parked.is_empty() => {
                        let inserted = park_new(connection, of, &parked).await;
                        inserted.map(|_| vec![Ok(Inserted::New); rows.len()])
                    }
                    true => {
                        let inserted = insert_rows(connection, of, &rows).await;
                        inserted.map(|_| vec![Ok(Inserted::New); rows.len()])
                    }
                    false => {
                        let inserted = insert_keyed(connection, of, wait, &keeping, &keyed).await;
                        inserted.map(|answer| answer.inserted)
                    }
                };
                inserted.inspect_err(|error| is_tier_unknown = is_of_unknown_tier(error))
            });
        let inserted = inserting.await.map_err(failure);
        self.is_prepared = inserted.is_ok();
        match is_tier_unknown {
            // It gets its number before the next attempt.
            true => {
                let why = "the database did not know its tier";
                Err(InsertFailure::NotSent(why.into()))
            }
            false => inserted,
        }
    }

    /// Takes the rows out of a batch for which the tier has no room.
    async fn refuse_what_is_full(&mut self, batch: &mut Vec<Insert>) {
        let Some(room) = self.room.clone() else {
            return;
        };
        let mut admitted = Vec::with_capacity(batch.len());
        let mut refused = None;
        for mut insert in batch.drain(..) {
            if insert.row.was_queued {
                admitted.push(insert);
                continue;
            }
            if refused.is_none() {
                refused = self.admit(&room).await.err();
            }
            match &refused {
                None => admitted.push(insert),
                Some(InsertFailure::Full) if insert.row.key.is_some() => {
                    insert.has_room = false;
                    admitted.push(insert);
                }
                Some(failure) => drop(insert.done.send(Err(failure.clone()))),
            }
        }
        *batch = admitted;
    }

    async fn admit(&mut self, room: &Room) -> Result<(), InsertFailure> {
        if let Some(is_admitted) = room.admit() {
            return is_admitted;
        }
        let of = (&*self.app, self.tier.as_str());
        let counting = self
            .connection
            .within(LIMIT, "count a tier's rows", async |connection| {
                room.count(connection, of).await.map(drop)
            });
        counting.await.map_err(unsent_because)?;
        room.admit().unwrap_or(Err(InsertFailure::Full))
    }

    /// Tells workers about new rows.
    async fn notify(&mut self) {
        let now = Instant::now();
        let is_any = self.must_notify || self.next_due.is_some();
        if !is_any || self.notify_at > now {
            return;
        }
        self.notify_at = now + NOTIFY_EVERY;
        let mut notices = Vec::new();
        if std::mem::take(&mut self.must_notify) {
            notices.push(notice(&self.app, &self.tier, Duration::ZERO));
        }
        if let Some(due) = self.next_due.take() {
            let after = due.saturating_duration_since(now);
            // A worker that looks too early finds nothing.
            let after = after + Duration::from_millis(1);
            notices.push(notice(&self.app, &self.tier, after));
        }
        let notifying = self
            .connection
            .within(LIMIT, "notify workers", async |connection| {
                notify(connection, &notices).await
            });
        if let Err(error) = notifying.await {
            tracing::debug!(%error, "cannot notify workers of new tasks; they look every second");
        }
    }
}

/// Waits for a row, and takes with it what else is there. `None`: the app is gone.
async fn gather(inserts: &mut mpsc::UnboundedReceiver<Insert>) -> Option<Vec<Insert>> {
    let first = inserts.recv().await?;
    let mut bytes = first.row.size();
    let most = match first.row.key {
        None => BATCH_ROWS,
        Some(_) => KEYED_ROWS,
    };
    let mut batch = vec![first];
    while batch.len() < most
        && bytes < BATCH_BYTES
        && let Ok(next) = inserts.try_recv()
    {
        bytes += next.row.size();
        batch.push(next);
    }
    Some(batch)
}

/// The failure of something that comes before a row is sent.
pub(super) fn unsent_because(error: Error) -> InsertFailure {
    match failure(error) {
        InsertFailure::Lost(cause) | InsertFailure::Refused(cause) => InsertFailure::NotSent(cause),
        failure => failure,
    }
}

pub(super) fn failure(error: Error) -> InsertFailure {
    let cause = error.to_string().into();
    match error {
        Error::Database(DatabaseError::Failed { .. }) => InsertFailure::Lost(cause),
        Error::Database(DatabaseError::Refused { .. }) => InsertFailure::Refused(cause),
        Error::Database(DatabaseError::NotMigrated { .. }) => InsertFailure::NotMigrated(cause),
        _ => InsertFailure::NotSent(cause),
    }
}

/// Whether an insert failed because its tier has no number: it is newer than the transaction, or the database was restored.
pub(super) fn is_of_unknown_tier(error: &sqlx::Error) -> bool {
    let said = error.as_database_error();
    let said = said.and_then(|said| said.try_downcast_ref::<PgDatabaseError>());
    said.is_some_and(|said| said.code() == "23502" && said.column() == Some("backlog"))
}
