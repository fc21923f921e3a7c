//! Metrics of a process, in the text format that Prometheus scrapes (feature `prometheus`).
//!
//! [`Builder::metrics`](crate::Builder::metrics) asks for them, [`Tierline::metrics`](crate::Tierline::metrics) gives them,
//! and [`Metrics::render`] writes them for a route of yours. The admin API and `tierline serve` have such a route, `/metrics`.
//!
//! All counts are those of [events](crate::observe::Event) of this process, since it began. Labels have names of the map and
//! fixed words alone: tasks and tiers that the map does not have are [counted under one name](UNKNOWN), so no message
//! adds a series.
//!
//! | metric | what it counts or shows |
//! |---|---|
//! | `tierline_published_total{tier,task,result}` | publishes; `result` is `stored`, `replaced`, `duplicate` or the kind of the error |
//! | `tierline_publish_seconds{tier}` | histogram of the time from the call of a publish to its outcome |
//! | `tierline_wait_seconds{tier,task}` | histogram of how long tasks had waited when they were started, with an edge at every `slo` of the map |
//! | `tierline_run_seconds{tier,task,outcome}` | histogram of how long handlers ran |
//! | `tierline_tasks_total{tier,task,outcome}` | `done`, `retried`, `snoozed`, `discarded`, `expired`, `dead`, `given_back` |
//! | `tierline_slo_tasks_total{tier,met}` | starts of tiers with `slo`, and tasks that waited until they expired, which have not met it; the time of a pause does not count |
//! | `tierline_slo_seconds{tier}`, `tierline_slo_objective{tier}` | the `slo` of the map |
//! | `tierline_dead_total{tier,task,reason}` | dead letters; `reason` is `broker` where the broker made it by itself |
//! | `tierline_redriven_total{tier,result}` | dead letters that were published again, or could not be |
//! | `tierline_suspected_total{tier}`, `tierline_leases_lost_total{tier}` | tasks whose worker died, or lost their lease |
//! | `tierline_promoted_total{from,to}`, `tierline_relayed_total{tier}`, `tierline_rerouted_total{tier}` | tasks that moved on |
//! | `tierline_schedule_published_total{schedule}`, `tierline_schedule_missed_total{schedule}` | runs of schedules |
//! | `tierline_schedule_late_seconds` | histogram of how late they were published |
//! | `tierline_in_progress{group,tier}`, `tierline_slots{group}` | handlers that run, and how many may; only of groups that this process works for, like the next two |
//! | `tierline_oldest_run_seconds{tier,task}` | for how long the oldest handler has run, of those that run |
//! | `tierline_consuming{group,tier}` | 1 while a worker is subscribed to the tier's queue, or can hold leases of its rows |
//! | `tierline_connected{purpose}`, `tierline_connect_failures_total{purpose}` | connections to the broker: `publish`, `work`, `collect` |
//! | `tierline_leader` | 1 while this process publishes due runs of schedules |
//! | `tierline_restarts_total{service}` | parts of the app that panicked, and were started again |
//! | `tierline_build_info{version}` | 1 |
//!
//! With [`Tierline::metrics_with_stats`](crate::Tierline::metrics_with_stats), and at `/metrics` of the admin API, the state of the
//! whole app follows, from its [statistics](crate::stats). It is the same from every process, so take `max by (tier)` of it.
//!
//! | metric | what it shows |
//! |---|---|
//! | `tierline_waiting{tier}`, `tierline_oldest_wait_seconds{tier}` | what waits and is due, and for how long the oldest has: 0 where nothing waits, absent where it is not known |
//! | `tierline_consumers{tier}`, `tierline_processes{group}` | consumers of the queue, and live processes |
//! | `tierline_scheduled{tier}`, `tierline_parked{tier}` | rows that are due later, or held back |
//! | `tierline_dead_letters{tier,state}` | `dead`, `redriving`, `redriven`, `discarded` in the log; `uncollected` in the queue |
//! | `tierline_paused{tier}`, `tierline_limit_saturated{tier}` | 1 while a pause or a limit keeps tasks from starting |
//! | `tierline_relay_waiting{tier}` | rows of a tier on the broker that nobody takes |
//! | `tierline_schedule_leader` | whether a process publishes due runs |
//! | `tierline_stats_problems` | how many questions got no answer; what they ask for is missing then |
//!
//! Read in this order: `histogram` counts durations, `running` knows which handlers run, `counters` counts events, `labels` has
//! the fixed words, `collector` reads the counters at a scrape, and `encode` writes them.

mod collector;
mod counters;
mod encode;
mod histogram;
mod labels;
mod running;
#[cfg(feature = "postgres")]
mod state;

use std::fmt;
use std::sync::Arc;

use futures_util::future::{BoxFuture, join_all};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::text::encode;
use prometheus_client::registry::Registry;

#[cfg(feature = "postgres")]
use crate::Error;
use crate::control::KnownControls;
pub use crate::counting::UNKNOWN;
use crate::observe::Event;
#[cfg(feature = "postgres")]
use crate::stats::Stats;
use crate::topology::Topology;
use counters::{Counters, ProcessCounts};

/// The metrics of an app's process. Cheap to clone; all clones are the same.
///
/// ```no_run
/// # async fn example(topology: tierline::Topology) -> Result<(), tierline::Error> {
/// # use tierline::Tierline;
/// use tierline::metrics::Metrics;
///
/// let app = Tierline::builder(topology).amqp("amqp://localhost").metrics().connect().await?;
/// let metrics = app.metrics()?;
/// // What a route for Prometheus answers.
/// let (content_type, body) = (Metrics::CONTENT_TYPE, metrics.render().await);
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct Metrics {
    sources: Vec<Source>,
}

/// What is asked at each scrape, and answers with its families of metrics. It bounds its own time.
type Source = Arc<dyn Fn() -> BoxFuture<'static, Box<dyn Collector>> + Send + Sync>;

impl Metrics {
    /// The content type of what [`render`](Self::render) writes.
    pub const CONTENT_TYPE: &'static str =
        "application/openmetrics-text; version=1.0.0; charset=utf-8";

    fn new(counters: &Arc<Counters>) -> Self {
        let counters = counters.clone();
        let source = move || -> BoxFuture<'static, Box<dyn Collector>> {
            let counters: Box<dyn Collector> = Box::new(counters.clone());
            Box::pin(std::future::ready(counters))
        };
        Self {
            sources: vec![Arc::new(source)],
        }
    }

    /// These, and the state of the whole app.
    #[cfg(feature = "postgres")]
    pub(crate) fn with_state(
        mut self,
        ask: impl Fn() -> BoxFuture<'static, Result<Stats, Error>> + Send + Sync + 'static,
    ) -> Self {
        self.sources.push(state::source(ask));
        self
    }

    /// All metrics as they are now, as OpenMetrics text.
    pub async fn render(&self) -> String {
        let mut registry = Registry::default();
        let asked = join_all(self.sources.iter().map(|source| source()));
        for collector in asked.await {
            registry.register_collector(collector);
        }
        let mut text = String::new();
        if encode(&mut text, &registry).is_err() {
            // A text takes whatever is written to it.
            tracing::error!("metrics cannot be written, which is a bug");
        }
        text
    }
}

impl fmt::Debug for Metrics {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Metrics").finish_non_exhaustive()
    }
}

/// Counts the events of a process that was asked for metrics.
#[derive(Clone, Default)]
pub(crate) struct EventCounter {
    process: Arc<ProcessCounts>,
}

impl EventCounter {
    /// Counts events of parts that the controls need, and that must therefore not keep the controls alive: the counts of
    /// tasks do.
    #[cfg(feature = "postgres")]
    pub(crate) fn early(&self) -> impl Fn(&Event<'_>) + Send + Sync + use<> {
        let process = self.process.clone();
        move |event| process.handle(event)
    }

    /// Counts all events, and shows what was counted.
    pub(crate) fn start(
        self,
        topology: &Topology,
        controls: KnownControls,
    ) -> (Metrics, impl Fn(&Event<'_>) + Send + Sync + use<>) {
        let counters = Arc::new(Counters::new(topology, controls, self.process));
        let metrics = Metrics::new(&counters);
        (metrics, move |event| counters.handle(event))
    }
}

impl fmt::Debug for Counters {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Counters").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
