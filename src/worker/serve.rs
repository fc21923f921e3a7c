//! The worker that an app starts: which groups it serves, and how it ends.

use std::fmt;
use std::future::{Future, IntoFuture, pending};
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::{BoxFuture, join, join4};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

use super::check::{check, check_overrides};
use super::group::Group;
use super::watchdog::Watchdog;
use super::{Phase, Shared, WIND_DOWN};
use crate::Error;
use crate::control::{KnownControls, Limits};
use crate::error::WorkerError;
use crate::execute::Executor;
use crate::message::QUARANTINE_FROM;
use crate::observe::Observers;
#[cfg(feature = "postgres")]
use crate::postgres::Database;
use crate::publish::Publisher;
#[cfg(feature = "postgres")]
use crate::rollup::Recorder;
use crate::secret::Secret;
use crate::service::{Service, Termination};
use crate::source::Suspects;
use crate::source::amqp::{ConsumerSettings, reroute};
#[cfg(feature = "postgres")]
use crate::source::postgres::RowSettings;
use crate::task::{CancelReason, Cancellation, Data, IntoDuration, MiddlewareChains, Registry};
use crate::topology::duration::Unreadable;
use crate::topology::{self, Tier, Topology};

/// How long running tasks have after a shutdown began, unless it is said otherwise. Kubernetes, ECS and
/// Heroku kill a process 30 s after they asked it to end. What comes after the grace period takes up to
/// 2.4 s here, and then the program has connections of its own to close.
const DEFAULT_GRACE: Duration = Duration::from_secs(20);
/// How long dropped tasks may take to be given back.
const GIVE_BACK: Duration = Duration::from_millis(900);
/// How often a worker may die while it runs a task from quarantine, unless the app says otherwise.
pub(crate) const DEFAULT_CRASH_BUDGET: u32 = 3;

/// A worker that is about to begin; see [`Tierline::work`](crate::Tierline::work).
///
/// It runs [until a future completes](Self::until), [until the process is asked to end](Self::until_terminated),
/// or for ever where it is awaited as it is. Collector and scheduler run in the same three ways.
#[must_use = "a worker does nothing until it is awaited"]
pub struct Worker {
    parts: WorkerParts,
    groups: Vec<String>,
    grace: Duration,
    crash_budget: u32,
    hurry: Option<Box<dyn Future<Output = ()> + Send + Unpin>>,
    unreadable: Unreadable,
}

/// What an app gives its workers.
#[derive(Clone)]
pub(crate) struct WorkerParts {
    pub(crate) topology: Topology,
    pub(crate) urls: Vec<Secret>,
    pub(crate) connection_name: String,
    pub(crate) publisher: Publisher,
    #[cfg(feature = "postgres")]
    pub(crate) database: Option<Database>,
    /// How long completion marks are kept.
    #[cfg(feature = "postgres")]
    pub(crate) keep_marks: Duration,
    #[cfg(feature = "postgres")]
    pub(crate) recorder: Option<Recorder>,
    pub(crate) registry: Result<Arc<Registry>, Arc<Error>>,
    pub(crate) middleware: Arc<MiddlewareChains>,
    pub(crate) data: Arc<Data>,
    pub(crate) observers: Observers,
    pub(crate) version: String,
    pub(crate) may_declare: bool,
    pub(crate) abort_when_hung: bool,
    pub(crate) suspects: Arc<Suspects>,
    pub(crate) controls: KnownControls,
    pub(crate) limits: Limits,
    pub(crate) collector: Option<StartCollector>,
}

impl WorkerParts {
    /// What the sources of a worker or a relay share.
    pub(crate) fn consumer_settings(
        &self,
        suspects: Arc<Suspects>,
        crash_budget: u32,
    ) -> ConsumerSettings {
        ConsumerSettings {
            topology: self.topology.clone(),
            urls: self.urls.clone(),
            connection_name: self.connection_name.clone(),
            publisher: self.publisher.clone(),
            #[cfg(feature = "postgres")]
            database: self.database.clone(),
            #[cfg(feature = "postgres")]
            recorder: self.recorder.clone(),
            observers: self.observers.clone(),
            worker: worker_name(),
            version: self.version.clone(),
            handlers: self
                .registry
                .iter()
                .flat_map(|it| it.iter())
                .map(|it| (it.name(), it.options().timeout))
                .collect(),
            may_declare: self.may_declare,
            dead_at_crashes: QUARANTINE_FROM.saturating_add(crash_budget),
            suspects,
            controls: self.controls.clone(),
            limits: self.limits.clone(),
            parked_tasks: Arc::default(),
            redeclared: Default::default(),
        }
    }
}

/// Starts the collector beside a worker; it runs until the future that it is given completes.
pub(crate) type StartCollector =
    Arc<dyn Fn(BoxFuture<'static, ()>) -> BoxFuture<'static, ()> + Send + Sync>;

impl Worker {
    pub(crate) fn new(parts: WorkerParts, groups: Vec<String>) -> Self {
        Self {
            parts,
            groups,
            grace: DEFAULT_GRACE,
            crash_budget: DEFAULT_CRASH_BUDGET,
            hurry: None,
            unreadable: Unreadable::NONE,
        }
    }

    /// How long running tasks have to end after a shutdown began, such as `"20s"`. They are told of it at once
    /// ([`Context::shutdown_started`](crate::Context::shutdown_started)). When the grace period is over,
    /// their contexts are cancelled, and half a second later they are dropped and given back, at no cost
    /// of an attempt.
    ///
    /// Default 20 s: the worker then ends within 22.4 s, which leaves room below the 30 s that Kubernetes,
    /// ECS and Heroku give a process before they kill it. `docker stop` gives 10 s: set 5 there, or give
    /// the container longer. The guide has a page on
    /// [tasks that outlast a deploy](crate::guide::long_tasks_across_deploys).
    pub fn grace(mut self, grace: impl IntoDuration) -> Self {
        self.unreadable.set("grace", grace, &mut self.grace);
        self
    }

    /// Ends the grace period at once when `hurry` completes: a second signal, say.
    pub fn hurry(mut self, hurry: impl Future<Output = ()> + Send + 'static) -> Self {
        self.hurry = Some(Box::new(Box::pin(hurry)));
        self
    }

    /// How often a worker may die while it runs a task from quarantine, before the task is a dead letter
    /// (`crash loop`). A task runs from quarantine after two workers died while they held it. At least 1;
    /// default 3.
    pub fn crash_budget(self, crash_budget: u32) -> Self {
        Self {
            crash_budget: crash_budget.max(1),
            ..self
        }
    }

    /// Leaves dead letters in their queues. Default: where the app has a database, the worker also
    /// collects them into the log.
    pub fn without_collector(mut self) -> Self {
        self.parts.collector = None;
        self
    }

    /// Works until `shutdown` completes and what was running then has ended.
    ///
    /// From then on nothing is started. What was not started goes back to the broker at once, what
    /// is running is told and has the [grace period](Self::grace). The worker ends at most 2.4 s after
    /// that, whatever the broker does. Lost connections are made again for ever, so nothing but a mistake ends it before.
    ///
    /// Dropping the returned future, as `select!` and `timeout` do, is a way to end without any grace:
    /// it drops the running handlers at their next `await`, and the broker takes their messages back
    /// once they are gone. A blocking handler ([`blocking`](crate::task::blocking)), or code that a
    /// handler spawned elsewhere, cannot be ended and runs on; its context is cancelled. To other workers
    /// this looks like a crash, and they count it as one: let `shutdown` complete where you can.
    ///
    /// # Errors
    /// [`WorkerError::UnknownGroup`], [`WorkerError::LimitsTooLong`], [`WorkerError::RetriesWithoutDelays`],
    /// [`Error::InvalidDuration`], [`Error::Closed`] and what [`Registry::collected`] finds, before anything is begun.
    pub async fn until(self, shutdown: impl Future<Output = ()>) -> Result<(), Error> {
        let Self {
            parts,
            groups,
            grace,
            crash_budget,
            hurry,
            unreadable,
        } = self;
        unreadable.check()?;
        parts.publisher.check_open("start a worker")?;
        let registry = parts.registry.clone().map_err(Error::Shared)?;
        let groups = check(&parts.topology, &registry, &groups)?;
        let watchdog = Watchdog::start(parts.observers.clone(), parts.abort_when_hung)
            .map_err(|cause| Error::Worker(WorkerError::NoWatchdog { cause }))?;
        let publisher = Arc::new(parts.publisher.clone());
        parts.controls.loaded().await;
        let watching = watch_overrides(
            parts.topology.clone(),
            parts.controls.clone(),
            registry.clone(),
            groups.clone(),
        );
        let _watching = AbortOnDropHandle::new(tokio::spawn(watching));
        let shutting_down = Cancellation::new();
        let settings = Arc::new(parts.consumer_settings(parts.suspects.clone(), crash_budget));
        let cancelled = Cancellation::new();
        let shared = Arc::new(Shared {
            #[cfg(feature = "postgres")]
            rows: RowSettings::new(
                &settings,
                parts.database.as_ref(),
                &groups,
                &cancelled,
                parts.keep_marks,
            ),
            executor: Executor::new(registry, parts.data, publisher)
                .middleware(parts.middleware)
                .spans(parts.publisher.spans().clone())
                .shutdown_signal(shutting_down.clone()),
            watchdog,
            cancelled,
            dropped: CancellationToken::new(),
            settings,
        });
        let mut running = RunningGroups::begin(&shared, &parts.topology, &groups);
        let collector = parts
            .collector
            .map(|begin| running.start_collector(&*begin));
        shutdown.await;
        shutting_down.cancel();
        let hurry = async {
            match hurry {
                Some(hurry) => hurry.await,
                None => pending().await,
            }
        };
        running.end(&shared, grace, hurry).await;
        let collector = async {
            if let Some(collector) = collector {
                let _ = timeout(WIND_DOWN, collector).await;
            }
        };
        #[cfg(feature = "postgres")]
        let counts = async {
            if let Some(recorder) = &parts.recorder {
                recorder.flush(WIND_DOWN).await;
            }
        };
        #[cfg(not(feature = "postgres"))]
        let counts = async {};
        join4(
            running.end_leases(),
            collector,
            parts.limits.give_back(),
            counts,
        )
        .await;
        Ok(())
    }

    /// Works until the process is asked to end, with SIGTERM or Ctrl-C; on Windows with Ctrl-C. The second
    /// time it is asked, the grace period ends.
    ///
    /// # Errors
    /// As [`until`](Self::until); [`Error::NoSignals`] where the system does not pass them on.
    pub async fn until_terminated(self) -> Result<(), Error> {
        let termination = Termination::listen()?;
        let worker = self.hurry(termination.asked(2));
        worker.until(termination.asked(1)).await
    }
}

impl IntoFuture for Worker {
    type Output = Result<(), Error>;
    type IntoFuture = BoxFuture<'static, Result<(), Error>>;

    /// Works for ever: as [`until`](Worker::until) with a shutdown that never comes.
    fn into_future(self) -> Self::IntoFuture {
        Box::pin(self.until(pending()))
    }
}

/// The groups at work. They end with this value.
struct RunningGroups {
    groups: JoinSet<()>,
    /// What serves the tiers in Postgres. It ends after the groups, whose leases it extends.
    leases: Option<AbortOnDropHandle<()>>,
    leases_end: CancellationToken,
    phase: watch::Sender<Phase>,
    shared: Arc<Shared>,
}

impl Drop for RunningGroups {
    fn drop(&mut self) {
        self.groups.abort_all();
        // Handlers that cannot be dropped learn at least that nobody waits for them.
        self.shared.cancelled.cancel_because(CancelReason::Shutdown);
    }
}

impl RunningGroups {
    fn begin(shared: &Arc<Shared>, topology: &Topology, names: &[String]) -> Self {
        let (phase, _) = watch::channel(Phase::Work);
        let mut running = Self {
            groups: JoinSet::new(),
            leases: None,
            leases_end: CancellationToken::new(),
            phase,
            shared: shared.clone(),
        };
        #[cfg(feature = "postgres")]
        if let Some(rows) = &shared.rows {
            let serving = rows.clone().serve(running.leases_end.clone());
            running.leases = Some(AbortOnDropHandle::new(tokio::spawn(serving)));
        }
        for group in names.iter().filter_map(|name| topology.group(name)) {
            let (shared, phase) = (shared.clone(), running.phase.subscribe());
            running.groups.spawn(serve(shared, group.clone(), phase));
        }
        let groups = names.iter().filter_map(|name| topology.group(name));
        let has_queues = |group: &&topology::Group| {
            let mut tiers = group.tiers.iter();
            tiers.any(|tier| topology.tier(tier).is_some_and(Tier::uses_broker))
        };
        if let Some(group) = groups.clone().find(has_queues) {
            let (shared, phase) = (shared.clone(), running.phase.subscribe());
            running
                .groups
                .spawn(send_unrouted(shared, group.clone(), phase));
        }
        running
    }

    /// Starts the collector, until the shutdown begins. It ends with what is returned.
    fn start_collector(
        &self,
        begin: &(dyn Fn(BoxFuture<'static, ()>) -> BoxFuture<'static, ()> + Send + Sync),
    ) -> AbortOnDropHandle<()> {
        let mut phase = self.phase.subscribe();
        let told = async move {
            let _ = phase.wait_for(|phase| *phase >= Phase::Drain).await;
        };
        AbortOnDropHandle::new(tokio::spawn(begin(Box::pin(told))))
    }

    async fn end(&mut self, shared: &Shared, grace: Duration, hurry: impl Future<Output = ()>) {
        tracing::info!("shutting down");
        self.enter(Phase::Drain);
        let is_over = tokio::select! {
            () = self.ended() => true,
            () = sleep(grace) => false,
            () = hurry => false,
        };
        if is_over {
            return;
        }
        shared.cancelled.cancel_because(CancelReason::Shutdown);
        if timeout(WIND_DOWN, self.ended()).await.is_ok() {
            return;
        }
        shared.dropped.cancel();
        if timeout(GIVE_BACK, self.ended()).await.is_ok() {
            return;
        }
        self.enter(Phase::Leave);
        let _ = timeout(WIND_DOWN, self.ended()).await;
    }

    /// Ends what serves the tiers in Postgres, after the groups.
    async fn end_leases(&mut self) {
        self.leases_end.cancel();
        if let Some(leases) = self.leases.take() {
            let _ = timeout(WIND_DOWN, leases).await;
        }
    }

    fn enter(&self, phase: Phase) {
        self.phase.send_replace(phase);
    }

    async fn ended(&mut self) {
        while let Some(ended) = self.groups.join_next().await {
            if let Err(error) = ended {
                tracing::error!(%error, "a group failed");
            }
        }
    }
}

/// Says what is wrong with the overrides in force for a worker, each time that something new is.
async fn watch_overrides(
    topology: Topology,
    controls: KnownControls,
    registry: Arc<Registry>,
    groups: Vec<String>,
) {
    let mut changes = controls.changes();
    let mut known = Vec::new();
    loop {
        let now = changes.borrow_and_update().clone();
        let warnings = check_overrides(&topology, &now, &registry, &groups);
        for warning in warnings.iter().filter(|it| !known.contains(*it)) {
            tracing::warn!("{warning}");
        }
        known = warnings;
        if changes.changed().await.is_err() {
            return;
        }
    }
}

/// Serves a group until the shutdown is over, once the app's queues are there. After a panic it is made anew, and the
/// broker redelivers what it held.
async fn serve(shared: Arc<Shared>, group: topology::Group, mut phase: watch::Receiver<Phase>) {
    let topology = &shared.settings.topology;
    // The rows of other tiers do not wait for the broker.
    if group.tiers.iter().all(|tier| topology.is_on_broker(tier)) {
        tokio::select! {
            () = shared.settings.publisher.until_ready() => {}
            _ = phase.wait_for(|phase| *phase >= Phase::Drain) => return,
        }
    }
    Service::new(format!("group {}", group.name), &shared.settings.observers)
        .run(|| Group::new(shared.clone(), &group, phase.clone()).run())
        .await;
}

/// Sends delayed messages that found no queue to their tiers again, until the shutdown begins.
async fn send_unrouted(
    shared: Arc<Shared>,
    group: topology::Group,
    mut phase: watch::Receiver<Phase>,
) {
    let ending = CancellationToken::new();
    let rerouting = Service::new("rerouting", &shared.settings.observers);
    let rerouting =
        rerouting.run(|| reroute(shared.settings.clone(), group.clone(), ending.clone()));
    let shutdown = async {
        let _ = phase.wait_for(|phase| *phase >= Phase::Drain).await;
        ending.cancel();
    };
    join(rerouting, shutdown).await;
}

/// Host and process, as dead letters and the broker's management show them.
fn worker_name() -> String {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let host = match host.trim() {
        "" => "host",
        host => host,
    };
    format!("{host}:{}", std::process::id())
}

impl fmt::Debug for Worker {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Worker")
            .field("groups", &self.groups)
            .field("grace", &self.grace)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_grace_leaves_room_below_what_orchestrators_give() {
        let given = Duration::from_secs(30);
        // For what a program closes after its worker: a web server, pools of connections.
        let own = Duration::from_secs(5);
        // Cancelled, given back, left, and the collector's end.
        let after = WIND_DOWN + GIVE_BACK + WIND_DOWN + WIND_DOWN;
        assert_eq!(after, Duration::from_millis(2_400), "the guide names it");
        assert!(DEFAULT_GRACE + after + own < given);
    }
}
