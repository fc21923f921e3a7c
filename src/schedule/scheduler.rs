//! The scheduler of one process: stands by, leads, stands by again.

use std::fmt;
use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use futures_util::future::{Either, select};
use tokio::sync::watch;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use super::leader::Leader;
use super::lease::{Answer, Candidate, Clock, Lease, RENEWAL};
use super::line::Line;
use super::state::Origin;
use super::store::Store;
use super::table::Table;
use crate::observe::{Event, Observers};
use crate::postgres::Database;
use crate::task::Publish;
use crate::topology::Topology;
use crate::{Error, TaskId};

/// Who stands by looks at the lease when it is to run out, and a moment later.
const AFTER_THE_END: Duration = Duration::from_millis(20);
/// How long what is under way has to end when the scheduler is told to stop.
const LONGEST_STOP: Duration = Duration::from_secs(10);
/// The pause after the database could not be asked.
const RETRY: Duration = Duration::from_millis(500);

/// Publishes what is due, for as long as this process leads. See [`Tierline::scheduler`].
///
/// [`Tierline::scheduler`]: crate::Tierline::scheduler
#[must_use = "nothing is scheduled until `until` is awaited"]
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

    /// Replaces what runs are published through. Default: the app's own publisher.
    pub fn publisher(mut self, publisher: Arc<dyn Publish>) -> Self {
        self.publisher = publisher;
        self
    }

    /// Brings the schedules of the file into the database, then stands by and leads in turn until
    /// `shutdown`. Broker and database may come and go meanwhile.
    ///
    /// Where the file says of a schedule what it said the last time, everything stays as it is: its
    /// state, a pause, and what was changed at run time. Where the file says something new, that is
    /// in force, and a pause stays. A schedule that the file does not have any more stops, and is
    /// listed as gone.
    ///
    /// # Errors
    /// [`Error::NotMigrated`], and what else the database refuses for good.
    pub async fn until(self, shutdown: impl Future<Output = ()>) -> Result<(), Error> {
        let app = self.topology.app().to_owned();
        // The name alone would be the same in every process.
        let holder = format!("{} {}", self.name, TaskId::random());
        let line = || Line::to(&self.database);
        let mut candidate = Candidate::new(line(), &app, &holder, self.clock.clone());
        let mut leader = Leader {
            table: Table::new(line(), &app),
            publisher: self.publisher.clone(),
            observers: self.observers.clone(),
        };
        let mut shutdown = pin!(shutdown);
        match select(pin!(self.declare()), shutdown.as_mut()).await {
            Either::Left((declared, _)) => declared?,
            Either::Right(_) => return Ok(()),
        }
        let (stop, stopping) = watch::channel(false);
        let ended = {
            let mut campaign = pin!(self.campaign(&mut candidate, &mut leader, stopping));
            match select(campaign.as_mut(), shutdown).await {
                Either::Left((ended, _)) => ended,
                Either::Right(_) => {
                    stop.send_replace(true);
                    timeout(LONGEST_STOP, campaign).await.unwrap_or(Ok(None))
                }
            }
        };
        if let Some(lease) = ended? {
            candidate.give_up(lease.epoch).await;
            self.tell(&lease, false);
        }
        Ok(())
    }

    /// Brings the file's schedules into the database, as soon as that is there.
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
                        tracing::info!(?changed, ?gone, "the file's schedules are in force");
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

    /// Stands by and leads in turn until it is told to stop, and gives the lease that it then holds.
    async fn campaign(
        &self,
        candidate: &mut Candidate,
        leader: &mut Leader,
        mut stopping: watch::Receiver<bool>,
    ) -> Result<Option<Lease>, Error> {
        while !*stopping.borrow() {
            let pause = match candidate.ask().await {
                Ok(Answer::Leads(lease)) => {
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
                Ok(Answer::Follows(rest)) => (rest + AFTER_THE_END).min(RENEWAL),
                Err(error) if error.is_transient() => {
                    tracing::warn!(%error, "the scheduler cannot ask who leads");
                    RETRY
                }
                Err(error) => return Err(error),
            };
            // Told to stop, it need not wait.
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

/// Renews the lease for as long as that succeeds in time.
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
                Ok(Answer::Leads(next)) if next.epoch == lease.epoch => {
                    renewed.send_replace(next);
                    break;
                }
                // Somebody else leads, or did between.
                Ok(_) => return Ok(()),
                Err(error) if error.is_transient() => {
                    tracing::warn!(%error, "the lease of the schedules could not be renewed");
                    attempt = last.min(Instant::now() + RETRY);
                }
                Err(error) => return Err(error),
            }
        }
    }
}

impl fmt::Debug for Scheduler {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Scheduler")
            .field("app", &self.topology.app())
            .finish_non_exhaustive()
    }
}
