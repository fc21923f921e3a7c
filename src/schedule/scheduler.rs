//! The scheduler of one process: follows and leads in turn.

use std::fmt;
use std::future::{Future, IntoFuture, pending};
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use futures_util::future::{BoxFuture, Either, select};
use tokio::sync::watch;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use super::leader::Leader;
use super::lease::{Candidate, Clock, Lease, LeaseOutcome, RENEWAL};
use super::state::Origin;
use super::store::Store;
use super::table::Table;
use crate::observe::{Event, Observers};
use crate::postgres::{Database, DedicatedConnection};
use crate::service::{Service, Termination};
use crate::task::Publish;
use crate::topology::Topology;
use crate::{Error, TaskId};

/// A follower looks at the lease this long after it expires.
const AFTER_THE_END: Duration = Duration::from_millis(20);
/// How long runs in flight may take to finish after shutdown was requested.
const LONGEST_STOP: Duration = Duration::from_secs(10);
/// The pause after a failed query.
const RETRY: Duration = Duration::from_millis(500);

/// Publishes due runs while this process leads. See [`Tierline::scheduler`].
///
/// It runs [until a future completes](Self::until), [until the process is asked to end](Self::until_terminated),
/// or for ever where it is awaited as it is.
///
/// [`Tierline::scheduler`]: crate::Tierline::scheduler
#[must_use = "a scheduler does nothing until it is awaited"]
pub struct Scheduler {
    topology: Topology,
    database: Database,
    publisher: Arc<dyn Publish>,
    observers: Observers,
    name: String,
    clock: Clock,
}

impl Scheduler {
    pub(crate) fn new(
        topology: Topology,
        database: Database,
        publisher: Arc<dyn Publish>,
        observers: Observers,
        name: &str,
    ) -> Self {
        Self {
            topology,
            database,
            publisher,
            observers,
            name: name.to_owned(),
            clock: Clock::default(),
        }
    }

    /// Replaces the clock that due times are compared with. Default: the database's.
    pub fn clock(mut self, clock: impl Fn() -> SystemTime + Send + Sync + 'static) -> Self {
        self.clock.given = Some(Arc::new(clock));
        self
    }

    /// Replaces the publisher of runs. Default: the app's own.
    pub fn publisher(mut self, publisher: Arc<dyn Publish>) -> Self {
        self.publisher = publisher;
        self
    }

    /// Stores the schedules of the file in the database, then follows and leads in turn until
    /// `shutdown`. It waits whenever the broker or the database is away.
    ///
    /// If the file declares a schedule as it did last time, nothing changes: its state, a pause and changes
    /// made at run time stay. If the file declares it differently, the new declaration takes effect, and a
    /// pause stays. A schedule that is no longer in the file stops, and is listed as gone.
    ///
    /// # Errors
    /// [`DatabaseError::NotMigrated`](crate::error::DatabaseError::NotMigrated), and other permanent errors of the database.
    pub async fn until(self, shutdown: impl Future<Output = ()>) -> Result<(), Error> {
        let service = Service::new("scheduler", &self.observers);
        let ended = service.run_until(shutdown, LONGEST_STOP, |stopping| self.run(stopping));
        ended.await.unwrap_or(Ok(()))
    }

    /// Runs until the process is asked to end, with SIGTERM or Ctrl-C; on Windows with Ctrl-C.
    ///
    /// # Errors
    /// As [`until`](Self::until); [`Error::NoSignals`] where the system does not pass them on.
    pub async fn until_terminated(self) -> Result<(), Error> {
        let termination = Termination::listen()?;
        self.until(termination.asked(1)).await
    }

    async fn run(&self, stopping: watch::Receiver<bool>) -> Result<(), Error> {
        let app = self.topology.app().to_owned();
        // The name alone would be the same in every process. It is another one after a panic as well: what was
        // under way then is fenced off like that of a process that died.
        let holder = format!("{} {}", self.name, TaskId::random());
        let connection = || DedicatedConnection::to(&self.database);
        let mut candidate = Candidate::new(connection(), &app, &holder, self.clock.clone());
        let mut leader = Leader {
            table: Table::new(connection(), &app),
            publisher: self.publisher.clone(),
            observers: self.observers.clone(),
        };
        let mut stopped = stopping.clone();
        let stopped = pin!(stopped.wait_for(|is_stopping| *is_stopping));
        match select(pin!(self.declare()), stopped).await {
            Either::Left((declared, _)) => declared?,
            Either::Right(_) => return Ok(()),
        }
        let ended = self.campaign(&mut candidate, &mut leader, stopping);
        if let Some(lease) = ended.await? {
            candidate.give_up(lease.epoch).await;
            self.tell(&lease, false);
        }
        Ok(())
    }

    /// Stores the file's schedules in the database, as soon as it is available.
    async fn declare(&self) -> Result<(), Error> {
        let store = Store::new(self.database.clone(), self.topology.app());
        loop {
            let declaring = async {
                let now = match &self.clock.given {
                    Some(_) => self.clock.given().unwrap_or_default(),
                    None => store.now().await?,
                };
                let schedules = self.topology.schedules();
                store
                    .declare(schedules, Origin::File, &self.name, now)
                    .await
            };
            match declaring.await {
                Ok(declared) => {
                    if !declared.changed.is_empty() || !declared.gone.is_empty() {
                        let (changed, gone) = (declared.changed, declared.gone);
                        tracing::info!(
                            ?changed,
                            ?gone,
                            "stored the schedules of the topology file"
                        );
                    }
                    return Ok(());
                }
                Err(error) if error.is_transient() => {
                    tracing::warn!(%error, "the scheduler waits for the database");
                    sleep(RETRY).await;
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Follows and leads in turn until shutdown is requested. Returns the lease that it holds then.
    async fn campaign(
        &self,
        candidate: &mut Candidate,
        leader: &mut Leader,
        mut stopping: watch::Receiver<bool>,
    ) -> Result<Option<Lease>, Error> {
        while !*stopping.borrow() {
            let pause = match candidate.ask().await {
                Ok(LeaseOutcome::Leads(lease)) => {
                    self.tell(&lease, true);
                    let (renewed, latest) = watch::channel(lease.clone());
                    let renewing = pin!(renew(candidate, &renewed));
                    let leading = pin!(leader.lead(&latest, &stopping));
                    match select(renewing, leading).await {
                        Either::Left((ended, _)) => {
                            self.tell(&lease, false);
                            ended?;
                        }
                        Either::Right(_) => return Ok(Some(lease)),
                    }
                    Duration::ZERO
                }
                Ok(LeaseOutcome::Follows(rest)) => (rest + AFTER_THE_END).min(RENEWAL),
                Err(error) if error.is_transient() => {
                    tracing::warn!(%error, "the scheduler cannot take or renew its lease");
                    RETRY
                }
                Err(error) => return Err(error),
            };
            // After a shutdown request it need not wait.
            let _ = timeout(pause, stopping.changed()).await;
        }
        Ok(None)
    }

    fn tell(&self, lease: &Lease, leads: bool) {
        let (app, epoch, gap) = (self.topology.app(), lease.epoch, lease.gap);
        match leads {
            true => tracing::info!(app, epoch, ?gap, "this process leads the schedules"),
            false => tracing::info!(app, epoch, "this process no longer leads the schedules"),
        }
        self.observers.emit(&Event::LeaderChanged {
            leads,
            epoch: epoch.unsigned_abs(),
            gap,
        });
    }
}

/// Renews the lease while that succeeds in time.
async fn renew(candidate: &mut Candidate, renewed: &watch::Sender<Lease>) -> Result<(), Error> {
    loop {
        let lease = renewed.borrow().clone();
        let last = lease.ends();
        let mut attempt = last.min(Instant::now() + RENEWAL);
        loop {
            sleep_until(attempt).await;
            if !lease.holds() {
                return Ok(());
            }
            match candidate.ask().await {
                Ok(LeaseOutcome::Leads(next)) if next.epoch == lease.epoch => {
                    renewed.send_replace(next);
                    break;
                }
                // Another process leads, or led in between.
                Ok(_) => return Ok(()),
                Err(error) if error.is_transient() => {
                    tracing::warn!(%error, "cannot renew the scheduler lease");
                    attempt = last.min(Instant::now() + RETRY);
                }
                Err(error) => return Err(error),
            }
        }
    }
}

impl IntoFuture for Scheduler {
    type Output = Result<(), Error>;
    type IntoFuture = BoxFuture<'static, Result<(), Error>>;

    /// Runs for ever: as [`until`](Scheduler::until) with a shutdown that never comes.
    fn into_future(self) -> Self::IntoFuture {
        Box::pin(self.until(pending()))
    }
}

impl fmt::Debug for Scheduler {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Scheduler")
            .field("app", &self.topology.app())
            .finish_non_exhaustive()
    }
}
