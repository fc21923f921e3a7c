//! Inserts rows for publishers.
//!
//! Each tier has a writer of its own with one connection, so that a flood into one tier does not hold up publishes to
//! another, and rows keep the order in which they were published. Rows that are published at the same time share a
//! statement and its commit: while one statement is under way, the next batch gathers. A publish waits for the commit in
//! any case.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot};
use tokio::time::{Instant, sleep_until, timeout_at};
use tokio_util::task::AbortOnDropHandle;

use super::add_backlogs;
use super::claim::seconds;
use super::notify::notify;
use super::row::NewRow;
use crate::Error;
use crate::error::DatabaseError;
use crate::postgres::{Database, DedicatedConnection, PgConnection};
use crate::topology::Topology;

/// The largest number of rows, and of bytes, that one statement inserts. A single row may be larger.
const BATCH_ROWS: usize = 500;
const BATCH_BYTES: usize = 1 << 20;
/// How many KiB of rows may wait for a statement, for each tier.
const WAITING_KIB: usize = 16 << 10;
/// How long one statement may take.
const LIMIT: Duration = Duration::from_secs(10);
/// How soon after a notification of a tier the next one follows. A worker that is awake needs none.
const NOTIFY_EVERY: Duration = Duration::from_millis(5);
/// Workers are told of scheduled rows that fall due sooner than this.
const NOTIFY_BELOW: Duration = Duration::from_millis(1_500);
/// How often the rows of a full tier are counted at most.
const COUNT_EVERY: Duration = Duration::from_millis(20);
/// A process inserts one of so many parts of a tier's `max_length` before it counts the rows again.
const LENGTH_PARTS: i64 = 200;

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
}

/// A writer for each tier in Postgres. It is started by the first row.
#[derive(Debug)]
pub(crate) struct RowWriters {
    database: Database,
    app: Arc<str>,
    tiers: HashMap<String, WrittenTier>,
}

#[derive(Debug)]
struct WrittenTier {
    max_length: Option<u32>,
    writer: OnceLock<RowWriter>,
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
    done: oneshot::Sender<Result<(), InsertFailure>>,
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
    pub(crate) fn new(database: Database, topology: &Topology) -> Self {
        let tiers = topology.postgres_tiers().map(|tier| {
            let written = WrittenTier {
                max_length: tier.max_length,
                writer: OnceLock::new(),
            };
            (tier.name.clone(), written)
        });
        Self {
            database,
            app: topology.app().into(),
            tiers: tiers.collect(),
        }
    }

    /// Inserts a row once. `Ok`: it is committed.
    pub(crate) async fn insert(
        &self,
        row: &Arc<NewRow>,
        deadline: Instant,
    ) -> Result<(), InsertFailure> {
        let unsent = || InsertFailure::NotSent("no statement could be sent in time".into());
        let Some(tier) = self.tiers.get(&row.tier) else {
            return Err(InsertFailure::Refused("its tier is not in Postgres".into()));
        };
        let writer = tier.writer.get_or_init(|| self.open(&row.tier, tier));
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

    fn open(&self, name: &str, tier: &WrittenTier) -> RowWriter {
        let (sender, inserts) = mpsc::unbounded_channel();
        let connection = WriterConnection {
            connection: super::connection(&self.database),
            app: self.app.clone(),
            tier: name.to_owned(),
            is_prepared: false,
            max_length: tier.max_length.map(i64::from),
            allowance: 0,
            full_until: None,
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
    tier: String,
    /// Whether the tier is known to the database.
    is_prepared: bool,
    max_length: Option<i64>,
    /// How many rows may be inserted before they are counted again.
    allowance: i64,
    /// Until when the tier is taken for full without a count.
    full_until: Option<Instant>,
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
        let (at_once, later): (Vec<_>, Vec<_>) = batch
            .into_iter()
            .partition(|insert| insert.row.after.is_zero());
        for (batch, statement) in [(at_once, INSERT_READY), (later, INSERT_SCHEDULED)] {
            self.insert_all(batch, statement).await;
        }
    }

    /// Inserts rows in one statement. If Postgres refuses one of them, each is inserted alone.
    async fn insert_all(&mut self, mut batch: Vec<Insert>, statement: &'static str) {
        batch.retain(|insert| insert.progress.send());
        if batch.is_empty() {
            return;
        }
        match self.execute(&batch, statement).await {
            Err(InsertFailure::Refused(_)) if batch.len() > 1 => {
                for insert in batch {
                    let alone = [insert];
                    let inserted = self.execute(&alone, statement).await;
                    self.answer(alone, inserted);
                }
            }
            inserted => self.answer(batch, inserted),
        }
    }

    fn answer(
        &mut self,
        batch: impl IntoIterator<Item = Insert>,
        inserted: Result<(), InsertFailure>,
    ) {
        let now = Instant::now();
        for insert in batch {
            match insert.row.after {
                _ if inserted.is_err() => {}
                Duration::ZERO => self.must_notify = true,
                // Workers look for scheduled rows every second.
                after if after < NOTIFY_BELOW => {
                    let due = now + after;
                    self.next_due = Some(self.next_due.map_or(due, |other| other.min(due)));
                }
                _ => {}
            }
            // A publisher that has given up does not mind.
            let _ = insert.done.send(inserted.clone());
        }
    }

    async fn execute(
        &mut self,
        batch: &[Insert],
        statement: &'static str,
    ) -> Result<(), InsertFailure> {
        let of = (&*self.app, self.tier.as_str());
        let rows: Vec<&NewRow> = batch.iter().map(|insert| &*insert.row).collect();
        let is_prepared = std::mem::replace(&mut self.is_prepared, true);
        let inserting = self
            .connection
            .within(LIMIT, "publish", async |connection| {
                if !is_prepared {
                    add_backlogs(connection, of.0, &[of.1]).await?;
                }
                insert_rows(connection, statement, of, &rows).await
            });
        let inserted = inserting.await.map_err(failure);
        self.is_prepared = inserted.is_ok();
        inserted
    }

    /// Takes the rows out of a batch for which the tier has no room.
    async fn refuse_what_is_full(&mut self, batch: &mut Vec<Insert>) {
        let Some(most) = self.max_length else {
            return;
        };
        let mut admitted = Vec::with_capacity(batch.len());
        let mut refused = None;
        for insert in batch.drain(..) {
            if refused.is_none() {
                refused = self.admit(most).await.err();
            }
            match &refused {
                None => admitted.push(insert),
                Some(failure) => drop(insert.done.send(Err(failure.clone()))),
            }
        }
        *batch = admitted;
    }

    async fn admit(&mut self, most: i64) -> Result<(), InsertFailure> {
        if self.full_until.is_some_and(|until| Instant::now() < until) {
            return Err(InsertFailure::Full);
        }
        if self.allowance == 0 {
            let room = most - self.count(most).await?;
            self.allowance = room.clamp(0, (most / LENGTH_PARTS).max(1));
        }
        match self.allowance {
            0 => {
                self.full_until = Some(Instant::now() + COUNT_EVERY);
                Err(InsertFailure::Full)
            }
            _ => {
                self.allowance -= 1;
                Ok(())
            }
        }
    }

    /// How many rows of the tier wait, counted up to the limit.
    async fn count(&mut self, most: i64) -> Result<i64, InsertFailure> {
        let (app, tier) = (&*self.app, self.tier.as_str());
        let counting = async |connection: &mut PgConnection<'_>| {
            sqlx::query_scalar(
                "SELECT count(*) FROM (SELECT FROM tierline.ready WHERE backlog = \
                    (SELECT id FROM tierline.backlogs WHERE app = $1 AND tier = $2) LIMIT $3) AS waiting",
            )
            .bind(app)
            .bind(tier)
            .bind(most)
            .fetch_one(connection)
            .await
        };
        let counted = self
            .connection
            .within(LIMIT, "count a tier's rows", counting);
        counted.await.map_err(|error| match failure(error) {
            // Nothing of the row was sent.
            InsertFailure::Lost(cause) => InsertFailure::NotSent(cause),
            failure => failure,
        })
    }

    /// Tells workers about new rows.
    async fn notify(&mut self) {
        let now = Instant::now();
        let is_any = self.must_notify || self.next_due.is_some();
        if !is_any || self.notify_at > now {
            return;
        }
        self.notify_at = now + NOTIFY_EVERY;
        let mut payloads = Vec::new();
        if std::mem::take(&mut self.must_notify) {
            payloads.push(format!("{} {}", self.app, self.tier));
        }
        if let Some(due) = self.next_due.take() {
            // Rounded up: a worker that looks too early finds nothing.
            let after = due.saturating_duration_since(now).as_millis() + 1;
            payloads.push(format!("{} {} {after}", self.app, self.tier));
        }
        let notifying = self
            .connection
            .within(LIMIT, "notify workers", async |connection| {
                notify(connection, payloads).await
            });
        if let Err(error) = notifying.await {
            tracing::debug!(%error, "cannot notify workers of new tasks; they look every second");
        }
    }
}

const INSERT_READY: &str = "INSERT INTO tierline.ready (id, due_at, backlog, rank, task, name, properties, payload) \
     SELECT id, now() + number * interval '1 microsecond', \
         (SELECT id FROM tierline.backlogs WHERE app = $1 AND tier = $2), rank, task, name, properties, payload \
     FROM unnest($3::uuid[], $4::smallint[], $5::text[], $6::text[], $7::bytea[], $8::bytea[], $9::float8[]) \
         WITH ORDINALITY AS new (id, rank, task, name, properties, payload, after, number) \
     ON CONFLICT (id) DO NOTHING";

const INSERT_SCHEDULED: &str = "INSERT INTO tierline.scheduled (id, due_at, backlog, rank, task, name, properties, payload) \
     SELECT id, now() + make_interval(secs => after), \
         (SELECT id FROM tierline.backlogs WHERE app = $1 AND tier = $2), rank, task, name, properties, payload \
     FROM unnest($3::uuid[], $4::smallint[], $5::text[], $6::text[], $7::bytea[], $8::bytea[], $9::float8[]) \
         AS new (id, rank, task, name, properties, payload, after) \
     ON CONFLICT (id) DO NOTHING";

async fn insert_rows(
    connection: &mut PgConnection<'_>,
    statement: &'static str,
    (app, tier): (&str, &str),
    rows: &[&NewRow],
) -> Result<(), sqlx::Error> {
    fn column<'r, T>(rows: &[&'r NewRow], of: impl Fn(&'r NewRow) -> T) -> Vec<T> {
        rows.iter().map(|row| of(row)).collect()
    }
    sqlx::query(statement)
        .bind(app)
        .bind(tier)
        .bind(column(rows, |row| row.id))
        .bind(column(rows, |row| row.rank))
        .bind(column(rows, |row| row.task.as_str()))
        .bind(column(rows, |row| row.name.as_deref()))
        .bind(column(rows, |row| row.properties.as_deref()))
        .bind(column(rows, |row| row.payload.as_slice()))
        .bind(column(rows, |row| seconds(row.after)))
        .execute(connection)
        .await?;
    Ok(())
}

/// Waits for a row, and takes with it what else is there. `None`: the app is gone.
async fn gather(inserts: &mut mpsc::UnboundedReceiver<Insert>) -> Option<Vec<Insert>> {
    let first = inserts.recv().await?;
    let mut bytes = first.row.size();
    let mut batch = vec![first];
    while batch.len() < BATCH_ROWS
        && bytes < BATCH_BYTES
        && let Ok(next) = inserts.try_recv()
    {
        bytes += next.row.size();
        batch.push(next);
    }
    Some(batch)
}

fn failure(error: Error) -> InsertFailure {
    let cause = error.to_string().into();
    match error {
        Error::Database(DatabaseError::Failed { .. }) => InsertFailure::Lost(cause),
        Error::Database(DatabaseError::Refused { .. }) => InsertFailure::Refused(cause),
        Error::Database(DatabaseError::NotMigrated { .. }) => InsertFailure::NotMigrated(cause),
        _ => InsertFailure::NotSent(cause),
    }
}
