//! Reads what the formula needs, in a bounded time.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, timeout};

use super::formula::{DEFAULT_SLO, Demand, processes_of, slots_of};
use super::{GroupScaling, TierScaling};
use crate::Error;
use crate::amqp::QueueState;
use crate::backlog::{HeldBack, Startable, count_startable};
use crate::control::{Control, KnownControls, Process, Snapshot};
use crate::postgres::Database;
use crate::publish::Publisher;
use crate::rollup::{Arrivals, Rollups};
use crate::topology::{Group, Limit, LimitScope, Tier, Topology};

/// How long the servers may take to answer.
const LIMIT: Duration = Duration::from_millis(1_800);
/// How many rows of a tier are looked at.
const MOST_ROWS: u64 = 10_000;

/// What the figures are read from.
pub(crate) struct Sources<'a> {
    pub(crate) topology: &'a Topology,
    pub(crate) database: &'a Database,
    pub(crate) publisher: &'a Publisher,
    pub(crate) controls: &'a KnownControls,
}

/// What was read.
struct Known {
    processes: Vec<Process>,
    /// By tier.
    runs: HashMap<String, Duration>,
    arrivals: Vec<Arrivals>,
    rows: HashMap<String, Startable>,
    /// By tier on the broker; `None`: it did not answer.
    queues: HashMap<String, Option<u64>>,
    snapshot: Arc<Snapshot>,
}

/// The figures of all groups.
pub(crate) async fn scaling(sources: Sources<'_>) -> Result<Vec<GroupScaling>, Error> {
    let known = sources.read().await?;
    let groups = sources.topology.groups().iter();
    Ok(groups.map(|group| sources.group(group, &known)).collect())
}

impl Sources<'_> {
    async fn read(&self) -> Result<Known, Error> {
        let (database, queues) = tokio::join!(timeout(LIMIT, self.read_database()), self.queues());
        let tried = "compute how many slots are wanted";
        let unanswered = || {
            let silent = format!("no answer within {LIMIT:?}").into();
            self.database.interrupted(tried, silent)
        };
        let known = database.map_err(|_| unanswered())??;
        Ok(Known { queues, ..known })
    }

    async fn read_database(&self) -> Result<Known, Error> {
        // An app that has just started does not know yet what is paused.
        self.controls.wait_until_known(Instant::now() + LIMIT).await;
        let snapshot = self.controls.now();
        let held_back = HeldBack {
            paused: snapshot.paused_tasks().collect(),
            limited: snapshot.task_limits().map(|(task, _)| task).collect(),
        };
        let control = Control::new(self.topology.clone(), self.database.clone());
        let rollups = Rollups::new(self.topology, self.database.clone());
        let app = self.topology.app();
        let all = self.topology.tiers();
        let tiers: Vec<&str> = all.iter().map(|tier| tier.name.as_str()).collect();
        let (processes, totals, arrivals, rows) = tokio::try_join!(
            control.processes(),
            rollups.last(Duration::from_secs(3_600)).into_future(),
            rollups.arrivals(),
            count_startable(self.database, app, &tiers, &held_back, MOST_ROWS, LIMIT),
        )?;
        let runs = totals.into_iter();
        let runs = runs.filter_map(|it| Some((it.tier, it.totals.run.mean()?)));
        Ok(Known {
            processes,
            runs: runs.collect(),
            arrivals,
            rows,
            queues: HashMap::new(),
            snapshot,
        })
    }

    /// How many messages wait in the queues of tiers.
    async fn queues(&self) -> HashMap<String, Option<u64>> {
        let names = self.topology.names();
        let tiers = self.topology.tiers().iter();
        let tiers = tiers.filter(|tier| tier.home.is_on_broker());
        let queues = tiers
            .clone()
            .map(|tier| (tier.name.as_str(), names.queue(tier)));
        let deadline = Instant::now() + LIMIT;
        let states = self.publisher.queue_states(queues, deadline).await;
        let waiting = |queue: String| match states.get(&queue).copied().flatten() {
            Some(QueueState::Available { messages, .. }) => Some(messages.into()),
            Some(QueueState::Missing) => Some(0),
            Some(QueueState::Unreachable | QueueState::NotAllowed) | None => None,
        };
        tiers
            .map(|tier| (tier.name.clone(), waiting(names.queue(tier))))
            .collect()
    }

    fn group(&self, group: &Group, known: &Known) -> GroupScaling {
        let tiers = group.tiers.iter();
        let tiers = tiers.filter_map(|name| self.topology.tier(name));
        let tiers: Vec<TierScaling> = tiers.map(|it| self.tier(group, it, known)).collect();
        let slots_wanted = slots_of(tiers.iter().map(|tier| tier.slots_wanted));
        let processes = known.processes.iter().filter(|it| it.is_alive);
        let slots: Vec<u32> = processes
            .flat_map(|process| &process.groups)
            .filter(|it| it.name == group.name)
            .map(|it| u32::from(it.slots))
            .collect();
        let is_assumed = |tier: &TierScaling| {
            let is_idle = tier.backlog == 0 && tier.arrivals_per_second == 0.0;
            let is_silent = known.queues.get(&tier.tier) == Some(&None);
            !tier.is_paused && (is_silent || tier.mean_run.is_none() && !is_idle)
        };
        GroupScaling {
            group: group.name.clone(),
            slots_wanted,
            slots: slots.iter().sum(),
            processes_wanted: processes_of(slots_wanted, group.concurrency),
            processes: u32::try_from(slots.len()).unwrap_or(u32::MAX),
            is_estimate: tiers.iter().any(is_assumed),
            tiers,
        }
    }

    fn tier(&self, group: &Group, tier: &Tier, known: &Known) -> TierScaling {
        let rows = known.rows.get(&tier.name).copied().unwrap_or_default();
        let queued = known.queues.get(&tier.name).copied();
        let backlog = rows.count.min(MOST_ROWS) + queued.flatten().unwrap_or_default();
        let arrivals = known.arrivals.iter().filter(|it| it.tier == tier.name);
        let is_task_paused = |task: &str| known.snapshot.paused_tasks().any(|it| it == task);
        let arrivals = arrivals.filter(|it| !is_task_paused(&it.task)).map(|it| {
            let limit = of_app(known.snapshot.limit_of_task(&it.task));
            let rate = limit.and_then(|limit| limit.rate);
            rate.map_or(it.per_second, |rate| it.per_second.min(rate.per_second()))
        });
        let limit = of_app(known.snapshot.limit_of_tier(&tier.name));
        let demand = Demand {
            // The sum of nothing would be -0.0.
            arrivals_per_second: arrivals.fold(0.0, |sum, it| sum + it).max(0.0),
            backlog,
            mean_run: known.runs.get(&tier.name).copied(),
            slo: tier.slo.unwrap_or(DEFAULT_SLO),
            is_paused: known.snapshot.is_paused(&group.name, &tier.name),
            rate: limit
                .and_then(|limit| limit.rate)
                .map(|rate| rate.per_second()),
            running: limit.and_then(|limit| limit.running),
        };
        let wanted = demand.wanted();
        TierScaling {
            tier: tier.name.clone(),
            slots_wanted: wanted.slots,
            backlog,
            is_backlog_partial: rows.may_be_more || queued == Some(None),
            arrivals_per_second: demand.arrivals_per_second,
            mean_run: demand.mean_run,
            slo: demand.slo,
            is_paused: demand.is_paused,
            is_limited: wanted.is_limited,
        }
    }
}

/// A limit of each process by itself is no limit for all: more processes start more.
fn of_app(limit: Option<&Limit>) -> Option<&Limit> {
    limit.filter(|limit| limit.scope == LimitScope::App)
}
