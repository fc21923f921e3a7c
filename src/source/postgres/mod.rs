//! Sources in Postgres: the rows of a tier.
//!
//! Read in this order: `rows` is a tier's rows as a source, `statements` what it asks the database, `settle` how what
//! follows on a run is stored. Some tasks serve the sources: `leases` tells the database that this process lives, `look`
//! finds tasks that no notification told of, `listen` hears notifications, and `recover`, one for each group, takes over
//! what dead processes held. `expire` dead-letters tasks that have waited for too long, `promote` moves them to another
//! tier before that, `forget` removes dead processes that hold nothing, and `history` finished tasks that were kept, old
//! completion marks, and keys whose time is over. `signal` is how these tasks reach a source. Everything that moves rows to be run is done for a
//! tier or a group by itself, so that no wave of rows of a lower tier holds up a higher one.

mod expire;
mod forget;
mod history;
mod leases;
mod listen;
mod look;
mod promote;
mod recover;
mod rows;
mod settle;
mod signal;
mod statements;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use futures_util::future::join_all;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use super::Source;
use super::amqp::ConsumerSettings;
use crate::control::{Gating, Snapshot};
use crate::postgres::Database;
use crate::service::Service;
use crate::task::Cancellation;
use crate::topology;

use leases::Leases;
use recover::Recovery;
use signal::TierSignal;

pub(crate) use rows::Rows;

/// What the sources of a worker, or of a relay, in Postgres share.
pub(crate) struct RowSettings {
    consumer: Arc<ConsumerSettings>,
    database: Database,
    /// The tiers that the worker serves, by their names.
    tiers: HashMap<String, ServedTier>,
    /// The names of each group's tiers, in its order.
    groups: Vec<Vec<String>>,
    /// The groups that the worker serves. A relay serves none.
    served_groups: Vec<topology::Group>,
    /// Asks for a look at what is due, before the next one would come by itself.
    look_now: Notify,
    /// Given when the grace period of a shutdown is over: handlers should end.
    cancelled: Cancellation,
    /// Whether rows are published to the broker, and not run: then they never begin, and none is suspected.
    is_relay: bool,
    /// How long completion marks are kept.
    keep_marks: Duration,
}

/// A tier that a worker serves. One on the broker may have rows too.
struct ServedTier {
    lease: Duration,
    /// Whether the map says that the tier lives in Postgres.
    is_home: bool,
    signal: Arc<TierSignal>,
}

impl RowSettings {
    /// The settings for these groups of a worker; `None` without a database.
    pub(crate) fn new(
        consumer: &Arc<ConsumerSettings>,
        database: Option<&Database>,
        groups: &[String],
        cancelled: &Cancellation,
        keep_marks: Duration,
    ) -> Option<Arc<Self>> {
        let database = database?.clone();
        let topology = &consumer.topology;
        let groups = groups.iter().filter_map(|name| topology.group(name));
        let served_groups: Vec<topology::Group> = groups.cloned().collect();
        let groups: Vec<Vec<String>> = served_groups.iter().map(|it| it.tiers.clone()).collect();
        let tiers = groups.iter().flatten().filter_map(|name| {
            let home = topology.tier(name)?.home;
            let served = ServedTier {
                lease: home.lease().unwrap_or(topology::DEFAULT_LEASE),
                is_home: !home.is_on_broker(),
                signal: Arc::default(),
            };
            Some((name.clone(), served))
        });
        Some(Arc::new(Self {
            consumer: consumer.clone(),
            tiers: tiers.collect(),
            database,
            groups,
            served_groups,
            look_now: Notify::new(),
            cancelled: cancelled.clone(),
            is_relay: false,
            keep_marks,
        }))
    }

    /// The settings for a relay of these tiers. Each is by itself, as if it were a group.
    pub(crate) fn of_relay(
        consumer: &Arc<ConsumerSettings>,
        database: &Database,
        tiers: &[String],
        lease: Duration,
        keep_marks: Duration,
    ) -> Arc<Self> {
        let served = |name: &String| {
            let served = ServedTier {
                lease,
                is_home: false,
                signal: Arc::default(),
            };
            (name.clone(), served)
        };
        Arc::new(Self {
            consumer: consumer.clone(),
            database: database.clone(),
            tiers: tiers.iter().map(served).collect(),
            groups: tiers.iter().map(|tier| vec![tier.clone()]).collect(),
            served_groups: Vec::new(),
            look_now: Notify::new(),
            cancelled: Cancellation::new(),
            is_relay: true,
            keep_marks,
        })
    }

    /// Serves the sources until `ending` is cancelled: the leases, due tasks, notifications.
    pub(crate) async fn serve(self: Arc<Self>, ending: CancellationToken) {
        let observers = &self.consumer.observers;
        let leasing = Service::new("leases", observers);
        let leasing = leasing.run(|| Leases::new(self.clone()).run(ending.clone()));
        let recovering = self.groups.iter().map(async |tiers| {
            let recovering = Service::new("recovery", observers);
            let recovering =
                recovering.run(|| Recovery::new(self.clone(), tiers).run(ending.clone()));
            recovering.await
        });
        let looking = Service::new("ready tasks", observers);
        let looking = looking.run(|| look::run(self.clone(), ending.clone()));
        let listening = Service::new("notifications", observers);
        let listening = listening.run(|| listen::run(self.clone(), ending.clone()));
        let removing = Service::new("finished tasks", observers);
        let removing = removing.run(|| history::remove_tasks(self.clone(), ending.clone()));
        let forgetting = Service::new("completion marks and keys", observers);
        let forgetting = forgetting.run(|| history::remove_leftovers(self.clone(), ending.clone()));
        let expiring = Service::new("expired tasks", observers);
        let expiring = expiring.run(|| expire::run(self.clone(), ending.clone()));
        let cleaning = Service::new("dead processes", observers);
        let cleaning = cleaning.run(|| forget::run(self.clone(), ending.clone()));
        let promoting = Service::new("aging", observers);
        let promoting = promoting.run(|| promote::run(self.clone(), ending.clone()));
        tokio::join!(
            leasing,
            join_all(recovering),
            looking,
            listening,
            removing,
            forgetting,
            expiring,
            cleaning,
            promoting
        );
    }

    /// Whether this process is of no use without the tables: it is a relay, or any of its tiers lives in Postgres, or did
    /// before it moved.
    fn has_home(&self) -> bool {
        if self.is_relay {
            return true;
        }
        let mut tiers = self.consumer.topology.tiers_using_postgres();
        tiers.any(|tier| self.tiers.contains_key(&tier.name))
    }

    pub(crate) fn database(&self) -> &Database {
        &self.database
    }

    fn app(&self) -> &str {
        self.consumer.topology.app()
    }

    /// The name under which this process keeps the tasks that it finishes, if the tier keeps them.
    fn keeper(&self, tier: &str) -> Option<&str> {
        let tier = self.consumer.topology.tier(tier)?;
        tier.home.keep().map(|_| &*self.consumer.worker)
    }

    /// What may not run now as it comes in a tier.
    fn gating(&self, tier: &str, snapshot: &Snapshot) -> Gating {
        let ConsumerSettings {
            topology, limits, ..
        } = &*self.consumer;
        match self.is_relay {
            true => Gating::default(),
            false => Gating::new(topology, tier, snapshot, limits),
        }
    }

    /// How long a task of a tier may wait where `time` is the rule: as much longer as the tier was paused. `None`: it is paused.
    fn waiting_time(&self, tier: &str, time: Duration) -> Option<Duration> {
        let controls = self.consumer.controls.now();
        let group = self
            .consumer
            .topology
            .group_of(tier)
            .map_or("", |group| &group.name);
        if controls.is_paused(group, tier) {
            return None;
        }
        // A task that was paused is ready again among the others.
        let topology = &self.consumer.topology;
        let is_of_tier = |task: &str| {
            let goes_to = self.consumer.goes_to(task);
            goes_to.is_some_and(|it| it.name == tier)
                || topology.task(task).is_some_and(|task| task.tier == tier)
        };
        let paused = controls.time_paused(group, tier, is_of_tier, time, SystemTime::now());
        Some(time.saturating_add(paused))
    }

    fn signal(&self, tier: &str) -> Option<&TierSignal> {
        self.tiers.get(tier).map(|tier| &*tier.signal)
    }
}

/// The rows of a group's tiers in Postgres, as sources.
pub(crate) fn sources(
    settings: Option<&Arc<RowSettings>>,
    group: &topology::Group,
) -> Vec<Box<dyn Source>> {
    let Some(settings) = settings else {
        return Vec::new();
    };
    let tiers = group.tiers.iter().enumerate();
    let slots = usize::from(group.concurrency);
    let window = slots * usize::from(group.prefetch);
    let rows = tiers
        .filter_map(|(index, name)| Rows::new(settings, &group.name, index, name, slots, window));
    rows.map(|rows| Box::new(rows) as Box<dyn Source>).collect()
}
