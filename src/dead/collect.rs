//! The collector: consumes the dead-letter queues and writes the log. It acknowledges a message only after
//! its row is committed.

use std::future::{Future, IntoFuture, pending};
use std::pin::pin;
use std::time::Duration;

use futures_util::future::{BoxFuture, select};
use tokio::time::{Instant, MissedTickBehavior, interval};

use super::entry::{DeadLetterQueue, Entry};
use super::housekeeping::{Growth, Housekeeping};
use super::log::{self, Written};
use super::queues::Queues;
use super::subscription::Place;
use crate::Error;
use crate::amqp::{Connection, ReadBudget};
use crate::backoff::Backoff;
use crate::error::DeadLetterError;
use crate::observe::{Event, ObservedConnection, Observers, Purpose};
use crate::postgres::{Database, STATEMENT_LIMIT};
use crate::secret::Secret;
use crate::service::{Service, Termination};
use crate::task::IntoDuration;
use crate::topology::Topology;
use crate::topology::duration::Unreadable;

/// How many rows one statement writes by default.
const BATCH: u16 = 500;
/// How often the collector tries queues that it does not consume from.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// How many bytes of messages may wait for the next batch, in all queues together.
const READ_AHEAD: usize = 4 << 20;
/// How long the last batch may take after a shutdown was requested.
const GRACE: Duration = Duration::from_secs(5);

/// Moves dead letters from their queues into the log while it runs. Get it from
/// [`Tierline::collector`](crate::Tierline::collector).
///
/// It runs [until a future completes](Self::until), [until the process is asked to end](Self::until_terminated),
/// or for ever where it is awaited as it is.
///
/// Any number may run at once, in workers or alone. While the database or the broker is away it waits, and
/// nothing is lost: messages that are not committed stay in their queues.
///
/// A message is identified by its id, task and payload. However often it is delivered, it has one row for
/// each redrive count. A message without an id is never matched to another one, so it gets a second row if
/// a collector is killed between the commit and the acknowledgement.
///
/// Its memory is bounded in bytes: it reads 4 MiB ahead, in all queues together, and writes about as much
/// at once. One message may be larger than that.
///
/// ```no_run
/// # async fn example(app: tierline::Tierline, shutdown: impl Future<Output = ()> + Send + 'static)
/// # -> Result<(), tierline::Error> {
/// app.collector()?
///     .retention("14d")
///     .growth_limit(100, "1m")
///     .until(shutdown)
///     .await?;
/// # Ok(()) }
/// ```
#[must_use = "a collector does nothing until it is awaited"]
#[derive(Debug)]
pub struct Collector {
    pub(super) topology: Topology,
    pub(super) urls: Vec<Secret>,
    pub(super) name: String,
    pub(super) database: Database,
    pub(super) observers: Observers,
    batch: u16,
    housekeeping: Housekeeping,
    unreadable: Unreadable,
}

impl Collector {
    pub(crate) fn new(
        topology: Topology,
        urls: Vec<Secret>,
        name: &str,
        database: Database,
        observers: Observers,
    ) -> Self {
        Self {
            topology,
            urls,
            name: format!("{name} collector"),
            database,
            observers,
            batch: BATCH,
            housekeeping: Housekeeping::default(),
            unreadable: Unreadable::NONE,
        }
    }

    /// The largest number of rows that one statement writes, 1 to 5,000. Default: 500.
    pub fn batch(mut self, rows: u16) -> Self {
        self.batch = rows.clamp(1, 5_000);
        self
    }

    /// How long rows are kept after they died and were logged, such as `"90d"`. Default: 30 days. Rows that
    /// are being redriven stay.
    pub fn retention(mut self, keep: impl IntoDuration) -> Self {
        let place = self.housekeeping.retention.get_or_insert_default();
        self.unreadable.set("retention", keep, place);
        self
    }

    /// Keeps rows for ever.
    pub fn no_retention(mut self) -> Self {
        self.housekeeping.retention = None;
        self
    }

    /// Emits [`Event::DeadLettersGrow`] when more than `count` messages of a tier died within
    /// the last `within`, such as `"10m"`. One of the app's collectors emits it, once in that time.
    /// Default: no limit.
    pub fn growth_limit(self, count: u64, within: impl IntoDuration) -> Self {
        self.growth(None, count, within)
    }

    /// Sets the growth limit of one tier, in place of the general one.
    pub fn tier_growth_limit(self, tier: &str, count: u64, within: impl IntoDuration) -> Self {
        self.growth(Some(tier), count, within)
    }

    fn growth(mut self, tier: Option<&str>, count: u64, within: impl IntoDuration) -> Self {
        let mut growth = Growth {
            tier: tier.map(str::to_owned),
            count,
            within: Duration::ZERO,
        };
        self.unreadable
            .set("growth limit", within, &mut growth.within);
        self.housekeeping.growth.push(growth);
        self
    }

    /// How often the collector deletes old rows and checks growth, at least 10 ms. Default: every 30 s.
    pub fn housekeeping_every(mut self, pause: impl IntoDuration) -> Self {
        let every = &mut self.housekeeping.every;
        self.unreadable.set("housekeeping_every", pause, every);
        *every = (*every).max(Duration::from_millis(10));
        self
    }

    /// Runs until `shutdown` completes. A batch that is being written then has five seconds to finish.
    ///
    /// # Errors
    /// [`Error::InvalidDuration`] and [`DeadLetterError::UnknownTier`] where a setting cannot be used, before anything is
    /// begun. Broker and database may come and go meanwhile.
    pub async fn until(self, shutdown: impl Future<Output = ()>) -> Result<(), Error> {
        self.check()?;
        let collector = Service::new("collector", &self.observers);
        // What hangs is cut off, and stays in its queue.
        let collecting =
            collector.run_until(shutdown, GRACE, |ending| self.collect(Ending(ending)));
        let housekeeper = Service::new("collector housekeeping", &self.observers);
        let sweeping = housekeeper.run(|| {
            self.housekeeping.run(
                self.database.clone(),
                self.topology.clone(),
                self.observers.clone(),
            )
        });
        select(pin!(collecting), pin!(sweeping)).await;
        Ok(())
    }

    /// Runs until the process is asked to end, with SIGTERM or Ctrl-C; on Windows with Ctrl-C.
    ///
    /// # Errors
    /// As [`until`](Self::until); [`Error::NoSignals`] where the system does not pass them on.
    pub async fn until_terminated(self) -> Result<(), Error> {
        let termination = Termination::listen()?;
        self.until(termination.asked(1)).await
    }

    fn check(&self) -> Result<(), Error> {
        self.unreadable.check()?;
        let limited = self.housekeeping.growth.iter();
        for tier in limited.filter_map(|growth| growth.tier.as_deref()) {
            if self.topology.tier(tier).is_none() {
                let known: Vec<_> = self.topology.tiers().iter().map(|it| &*it.name).collect();
                return Err(Error::DeadLetter(DeadLetterError::UnknownTier {
                    tier: tier.into(),
                    known: known.join(", ").into(),
                }));
            }
        }
        Ok(())
    }

    async fn collect(&self, ending: Ending) {
        if self.topology.tiers_using_broker().next().is_none() {
            // Dead letters of tiers in Postgres are in the log already.
            return ending.over().await;
        }
        let (mut pause, mut database_pause) = (Backoff::new(), Backoff::new());
        let mut next = 0;
        let purpose = Purpose::Collect;
        let mut apart = vec![false; DeadLetterQueue::all(&self.topology).len()];
        while !ending.is_over() {
            // Without a database it would hold messages that other collectors could log.
            if let Err(error) = self.ask_database().await {
                self.failed(&error, &mut database_pause);
                ending.unless_over(database_pause.pause()).await;
                continue;
            }
            database_pause = Backoff::new();
            let url = &self.urls[next % self.urls.len()];
            let budget = ReadBudget::new(READ_AHEAD);
            let connection = match Connection::open_within(url.expose(), &self.name, &budget).await
            {
                Ok(connection) => connection,
                Err(error) => {
                    let cause = &error.to_string();
                    self.observers
                        .emit(&Event::ConnectFailed { purpose, cause });
                    next += 1;
                    ending.unless_over(pause.pause()).await;
                    continue;
                }
            };
            let opened = Instant::now();
            let address = &connection.address().to_string();
            let observed = ObservedConnection::opened(&self.observers, purpose, address);
            let place = Place {
                connection: &connection,
                url,
                name: &self.name,
                prefetch: 2 * self.batch,
                budget: &budget,
            };
            let ended = self.collect_from(place, &mut apart, &ending).await;
            let lasted = opened.elapsed();
            connection.close().await;
            if let Err(error) = ended {
                observed.lost(&error.to_string());
                // A frozen node accepts connections and does not answer, so the next node is tried first.
                next += 1;
                ending.unless_over(pause.pause_after(lasted)).await;
            }
        }
    }

    /// Checks that the log can be written to.
    async fn ask_database(&self) -> Result<(), Error> {
        // The newest of the tables and columns that the collector needs.
        let asking = sqlx::query("SELECT raw_properties FROM tierline.dead_letters LIMIT 0")
            .execute(self.database.pool());
        let asking = async { asking.await.map(drop) };
        let tried = "collect dead letters";
        self.database.within(STATEMENT_LIMIT, tried, asking).await
    }

    /// Whether the log may have rows of an earlier release, under other identities. This compares the workers'
    /// clocks, which say when a message died. If a clock is wrong, redelivered messages are looked up
    /// anyway.
    async fn has_earlier(&self) -> bool {
        let asking = sqlx::query_scalar(
            "SELECT EXISTS (SELECT FROM tierline.dead_letters WHERE app = $1 AND died_at < \
             (SELECT installed_on FROM tierline.migrations WHERE version = 2))",
        )
        .bind(self.topology.app())
        .fetch_one(self.database.pool());
        let tried = "look for dead letters of an earlier release";
        let asked = self.database.within(STATEMENT_LIMIT, tried, asking).await;
        asked.unwrap_or_else(|error| {
            tracing::debug!(%error, "looking up every message among the rows of an earlier release");
            true
        })
    }

    fn failed(&self, error: &Error, pause: &mut Backoff) {
        let cause = &error.to_string();
        self.observers.emit(&Event::CollectFailed { cause });
        match pause.is_worth_a_warning() {
            true => tracing::warn!(%error, "cannot log dead letters; they stay in their queues"),
            false => tracing::debug!(%error, "cannot log dead letters; they stay in their queues"),
        }
    }

    /// Collects on one connection. `Ok`: shutdown was requested.
    async fn collect_from(
        &self,
        place: Place<'_>,
        apart: &mut [bool],
        ending: &Ending,
    ) -> Result<(), Error> {
        let mut queues = Queues::new(place, DeadLetterQueue::all(&self.topology), apart);
        let ended = self.collect_from_all(&mut queues, place, ending).await;
        queues.note_loss();
        ended
    }

    async fn collect_from_all(
        &self,
        queues: &mut Queues<'_>,
        place: Place<'_>,
        ending: &Ending,
    ) -> Result<(), Error> {
        let has_earlier = self.has_earlier().await;
        let mut looking = interval(LOOK_EVERY);
        looking.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let gathering = queues.gather(self.batch.into());
            let batch = tokio::select! {
                () = ending.over() => return Ok(()),
                _ = looking.tick() => {
                    if !queues.subscribe() {
                        return Err(lost(place.connection));
                    }
                    continue;
                }
                batch = gathering => batch,
            };
            let (entries, last) = queues.read(&self.topology, batch, has_earlier);
            if entries.is_empty() {
                // Consumers end with their connection.
                if !place.connection.is_open() {
                    return Err(lost(place.connection));
                }
                continue;
            }
            let writing = self.write(&entries, place.connection, ending);
            let Some(written) = queues.meanwhile(writing).await? else {
                return Ok(());
            };
            drop(entries);
            // Before the acknowledgement: what comes again without one is in the log already, and not new.
            for dead in &written.by_broker {
                self.observers.emit(&Event::DeadByBroker {
                    name: &dead.task,
                    tier: &dead.tier,
                    has_expired: dead.has_expired,
                    count: dead.count,
                });
            }
            queues.acknowledge(&last).await?;
            self.observers.emit(&Event::Collected {
                count: written.new,
                repeated: written.repeated,
            });
        }
    }

    /// Writes until it succeeds. The messages stay unacknowledged meanwhile. `None`: shutdown was requested
    /// first.
    ///
    /// # Errors
    /// The connection was lost; the broker requeues the messages for any collector.
    async fn write(
        &self,
        entries: &[Entry],
        connection: &Connection,
        ending: &Ending,
    ) -> Result<Option<Written>, Error> {
        let mut pause = Backoff::new();
        loop {
            match log::write(&self.database, self.topology.app(), entries).await {
                Ok(written) => return Ok(Some(written)),
                Err(error) => self.failed(&error, &mut pause),
            }
            ending.unless_over(pause.pause()).await;
            if ending.is_over() {
                return Ok(None);
            }
            if !connection.is_open() {
                return Err(lost(connection));
            }
        }
    }
}

fn lost(connection: &Connection) -> Error {
    connection.failed("collect dead letters", "the connection was lost")
}

impl IntoFuture for Collector {
    type Output = Result<(), Error>;
    type IntoFuture = BoxFuture<'static, Result<(), Error>>;

    /// Runs for ever: as [`until`](Collector::until) with a shutdown that never comes.
    fn into_future(self) -> Self::IntoFuture {
        Box::pin(self.until(pending()))
    }
}

/// Whether shutdown was requested.
#[derive(Debug, Clone)]
struct Ending(tokio::sync::watch::Receiver<bool>);

impl Ending {
    fn is_over(&self) -> bool {
        *self.0.borrow()
    }

    async fn over(&self) {
        // An error means that the collector itself was dropped.
        let _ = self.0.clone().wait_for(|ended| *ended).await;
    }

    async fn unless_over(&self, work: impl Future<Output = ()>) {
        select(pin!(work), pin!(self.over())).await;
    }
}
