//! The collector: from the dead-letter queues into the log. A message leaves its queue only when
//! its row is committed.

use std::future::{Future, IntoFuture, pending};
use std::pin::{Pin, pin};
use std::time::Duration;

use futures_util::future::{Either, select};
use tokio::time::{Instant, MissedTickBehavior, interval};

use super::entry::{Entry, Source};
use super::housekeeping::{Growth, Housekeeping};
use super::log::{self, Written};
use super::queues::Queues;
use super::subscription::Place;
use crate::Error;
use crate::amqp::{Connection, ReadBudget};
use crate::backoff::Backoff;
use crate::observe::{Event, Observers, Purpose};
use crate::postgres::{Database, STATEMENT_LIMIT};
use crate::secret::Secret;
use crate::task::IntoDuration;
use crate::topology::Topology;

/// How many rows are written in one statement unless told otherwise.
const BATCH: u16 = 500;
/// How often queues that are not consumed from are looked for.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// How many bytes of messages wait for the next batch at most, in all queues together.
const READ_AHEAD: usize = 4 << 20;
/// How long the last batch may take when the collector is told to end.
const GRACE: Duration = Duration::from_secs(5);

/// Takes dead letters from their queues into the log, as long as it runs. Get it from
/// [`Tierline::collector`](crate::Tierline::collector).
///
/// Any number may run at once, in workers or alone. It waits for the database and the broker for as
/// long as they are away, and nothing is lost meanwhile: what is not committed stays in its queue.
///
/// A message is its id, its task and its payload. However often it is delivered, it has one row for
/// each time it was redriven. A message without an id is never taken for another, so it has a second
/// row where a collector is killed between the commit and the acknowledgement.
///
/// Its memory is bounded in bytes, not by the number of messages: it reads 4 MiB ahead, in all queues
/// together, and writes about as much at once. One message may be larger than that.
///
/// ```no_run
/// # async fn example(app: tierline::Tierline, shutdown: impl Future<Output = ()> + Send + 'static)
/// # -> Result<(), tierline::Error> {
/// app.collector()?
///     .retention("14d")?
///     .growth_limit(100, "1m")?
///     .until(shutdown)
///     .await;
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
        }
    }

    /// How many rows are written at once at most, 1 to 5,000. Default: 500.
    pub fn batch(mut self, rows: u16) -> Self {
        self.batch = rows.clamp(1, 5_000);
        self
    }

    /// How long rows are kept, such as `"90d"`, since they died and were logged. Default: 30 days. Rows that
    /// are being redriven stay.
    ///
    /// # Errors
    /// [`Error::InvalidDuration`].
    pub fn retention(mut self, keep: impl IntoDuration) -> Result<Self, Error> {
        self.housekeeping.retention = Some(keep.into_duration()?);
        Ok(self)
    }

    /// Keeps rows for ever.
    pub fn no_retention(mut self) -> Self {
        self.housekeeping.retention = None;
        self
    }

    /// Raises [`Event::DeadLettersGrow`] when more than `count` messages of any one tier died within
    /// the last span of time, such as `"10m"`. One of the app's collectors raises it, once in that span.
    /// Not raised unless set.
    ///
    /// # Errors
    /// [`Error::InvalidDuration`].
    pub fn growth_limit(self, count: u64, within: impl IntoDuration) -> Result<Self, Error> {
        self.growth(None, count, within)
    }

    /// The same for one tier, instead of what holds for all.
    ///
    /// # Errors
    /// [`Error::InvalidDuration`]; [`Error::InvalidFilter`] where there is no such tier.
    pub fn tier_growth_limit(
        self,
        tier: &str,
        count: u64,
        within: impl IntoDuration,
    ) -> Result<Self, Error> {
        if self.topology.tier(tier).is_none() {
            return Err(Error::InvalidFilter {
                problem: format!("there is no tier {tier:?} in the map").into(),
            });
        }
        self.growth(Some(tier), count, within)
    }

    fn growth(
        mut self,
        tier: Option<&str>,
        count: u64,
        within: impl IntoDuration,
    ) -> Result<Self, Error> {
        self.housekeeping.growth.push(Growth {
            tier: tier.map(str::to_owned),
            count,
            within: within.into_duration()?,
        });
        Ok(self)
    }

    /// How often old rows are looked for and growth is watched. Default: every 30 s.
    pub fn housekeeping_every(mut self, pause: Duration) -> Self {
        self.housekeeping.every = pause.max(Duration::from_millis(10));
        self
    }

    /// Runs until `shutdown` completes. What is being written then is finished within five seconds.
    pub async fn until(self, shutdown: impl Future<Output = ()>) {
        let (ended, ending) = tokio::sync::watch::channel(false);
        let working = pin!(self.run(Ending(ending)));
        match select(pin!(shutdown), working).await {
            Either::Left(((), working)) => {
                ended.send_replace(true);
                // It ends at its next step; what hangs is cut off, and stays in its queue.
                let _ = tokio::time::timeout(GRACE, working).await;
            }
            Either::Right(((), _)) => {}
        }
    }

    async fn run(self, ending: Ending) {
        let sweeping = self.housekeeping.run(
            self.database.clone(),
            self.topology.clone(),
            self.observers.clone(),
        );
        let collecting = self.collect(ending);
        select(pin!(collecting), pin!(sweeping)).await;
    }

    async fn collect(&self, ending: Ending) {
        let (mut pause, mut database_pause) = (Backoff::new(), Backoff::new());
        let mut next = 0;
        let purpose = Purpose::Collect;
        let mut apart = vec![false; Source::all(&self.topology).len()];
        while !ending.is_over() {
            // Without a database it would hold messages that others could log.
            if let Err(error) = self.ask_database().await {
                self.failed(&error);
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
            self.observers.emit(&Event::Connected { purpose, address });
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
                let cause = &error.to_string();
                self.observers.emit(&Event::Disconnected { purpose, cause });
                // A node that is frozen takes connections and says nothing: another one comes first.
                next += 1;
                ending.unless_over(pause.pause_after(lasted)).await;
            }
        }
    }

    /// Whether the log can be written to.
    async fn ask_database(&self) -> Result<(), Error> {
        // The newest of the tables and columns that it needs.
        let asking = sqlx::query("SELECT raw_properties FROM tierline.dead_letters LIMIT 0")
            .execute(self.database.pool());
        let asking = async { asking.await.map(drop) };
        let tried = "collect dead letters";
        self.database.within(STATEMENT_LIMIT, tried, asking).await
    }

    /// Whether the log may have rows of an earlier release, under other identities. As far as the clocks
    /// of workers tell, which say when a message died; where one is wrong, messages that are redelivered
    /// are looked for all the same.
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
            tracing::debug!(%error, "they are looked for with every message");
            true
        })
    }

    fn failed(&self, error: &Error) {
        let cause = &error.to_string();
        self.observers.emit(&Event::CollectFailed { cause });
        tracing::warn!(%error, "dead letters stay in their queues for now");
    }

    /// Collects on one connection. `Ok`: it was told to end.
    async fn collect_from(
        &self,
        place: Place<'_>,
        apart: &mut [bool],
        ending: &Ending,
    ) -> Result<(), Error> {
        let mut queues = Queues::new(place, Source::all(&self.topology), apart);
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
            queues.acknowledge(&last).await?;
            self.observers.emit(&Event::Collected {
                count: written.new,
                repeated: written.repeated,
            });
        }
    }

    /// Writes until it succeeds: the messages are held meanwhile, which costs them nothing. `None`:
    /// it was told to end before that.
    ///
    /// # Errors
    /// The connection was lost meanwhile: the messages are in their queues again, for any collector.
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
                Err(error) => self.failed(&error),
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
    type Output = ();
    type IntoFuture = Pin<Box<dyn Future<Output = ()> + Send>>;

    /// Runs for ever.
    fn into_future(self) -> Self::IntoFuture {
        Box::pin(self.until(pending()))
    }
}

/// Whether the collector was told to end.
#[derive(Debug, Clone)]
struct Ending(tokio::sync::watch::Receiver<bool>);

impl Ending {
    fn is_over(&self) -> bool {
        *self.0.borrow()
    }

    async fn over(&self) {
        // An error means that the collector itself is gone.
        let _ = self.0.clone().wait_for(|ended| *ended).await;
    }

    async fn unless_over(&self, work: impl Future<Output = ()>) {
        select(pin!(work), pin!(self.over())).await;
    }
}
