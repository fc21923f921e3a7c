//! Limits of tiers and tasks: how often they start, and how many of them run, over all processes.
//!
//! No task asks the database. Each process holds a share of a limit, and takes a right to start from that: `gate` is what
//! workers ask, and `local` what it decides by. `share` is how processes divide a limit, `beats` which of them are dead, and
//! `rounds` how they do it by way of a row in Postgres, about twice a second and only while something is to be started.
//! [`Limits`] has the gates.

#[cfg(feature = "postgres")]
mod beats;
mod gate;
mod local;
#[cfg(feature = "postgres")]
mod rounds;
#[cfg(feature = "postgres")]
mod saturated;
#[cfg(feature = "postgres")]
mod share;
#[cfg(all(test, feature = "postgres"))]
mod tests;

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::watch;

use gate::Signals;
pub(crate) use gate::{Gate, Permit};
pub(crate) use local::Outlook;
#[cfg(feature = "postgres")]
pub(crate) use saturated::saturated_tiers;

use super::Snapshot;
#[cfg(feature = "postgres")]
use crate::observe::Observers;
#[cfg(feature = "postgres")]
use crate::postgres::Database;
#[cfg(feature = "postgres")]
use crate::service::Service;
use crate::topology::{Limit, Topology};

/// The gates of a process. Cheap to clone; all clones are the same.
#[derive(Clone)]
pub(crate) struct Limits {
    shared: Arc<Shared>,
    #[cfg(feature = "postgres")]
    rounds: Option<rounds::GiveBack>,
}

struct Shared {
    /// Those with a limit.
    gates: watch::Sender<Arc<Gates>>,
    /// Also those that have lost their limit: tasks that started under it may still run, and count when there is one again.
    all: Mutex<Gates>,
    /// Whether there is any gate: nearly always there is none.
    is_any: AtomicBool,
    signals: Arc<Signals>,
}

/// The gates of what is limited, by name.
#[derive(Debug, Clone, Default)]
pub(crate) struct Gates {
    tiers: HashMap<String, Arc<Gate>>,
    tasks: HashMap<String, Arc<Gate>>,
}

impl Limits {
    /// The gates for the limits of the map. Processes divide the limits as long as a clone of this value lives.
    pub(crate) fn new(
        topology: &Topology,
        #[cfg(feature = "postgres")] database: Option<&Database>,
        #[cfg(feature = "postgres")] observers: &Observers,
    ) -> Self {
        let shared = Arc::new(Shared::new(&Snapshot::of(topology)));
        #[cfg(feature = "postgres")]
        let rounds = database.map(|database| {
            let service = Service::new("limits", observers);
            rounds::start(shared.clone(), database, topology.app(), service)
        });
        Self {
            shared,
            #[cfg(feature = "postgres")]
            rounds,
        }
    }

    /// Has the gates for what is in force, before others learn of it.
    #[cfg(feature = "postgres")]
    pub(super) fn follow(&self, snapshot: &Snapshot) {
        self.shared.follow(snapshot);
    }

    /// The gate of a tier; `None`: it has no limit.
    pub(crate) fn tier(&self, name: &str) -> Option<Arc<Gate>> {
        self.find(|gates| gates.tiers.get(name))
    }

    /// The gate of a task; `None`: it has no limit, or none but `running` for each key, which the database keeps.
    pub(crate) fn task(&self, name: &str) -> Option<Arc<Gate>> {
        self.find(|gates| gates.tasks.get(name))
    }

    /// Changes when a tier or a task comes to have a gate, or loses it.
    pub(crate) fn changes(&self) -> watch::Receiver<Arc<Gates>> {
        self.shared.gates.subscribe()
    }

    /// Gives the shares of this process back, at its end. What still wants to start something asks for a share again.
    pub(crate) async fn give_back(&self) {
        #[cfg(feature = "postgres")]
        if let Some(rounds) = &self.rounds
            && self.shared.has_had_any()
        {
            rounds.give_back().await;
        }
    }

    /// Changes when any gate lets more start than before, and when whoever was refused is to ask again.
    pub(crate) fn opened(&self) -> watch::Receiver<()> {
        self.shared.signals.opened()
    }

    fn find(&self, find: impl FnOnce(&Gates) -> Option<&Arc<Gate>>) -> Option<Arc<Gate>> {
        if !self.shared.is_any.load(Ordering::Acquire) {
            return None;
        }
        find(&self.shared.gates.borrow()).cloned()
    }
}

impl Shared {
    fn new(snapshot: &Snapshot) -> Self {
        let shared = Self {
            gates: watch::channel(Arc::default()).0,
            all: Mutex::default(),
            is_any: AtomicBool::new(false),
            signals: Arc::new(Signals::new()),
        };
        shared.follow(snapshot);
        shared
    }

    /// Has a gate for each limit of the snapshot. One that is there follows its limit.
    fn follow(&self, snapshot: &Snapshot) {
        let before = self.gates.borrow().clone();
        let mut all = self.all.lock().unwrap_or_else(PoisonError::into_inner);
        let gates = Gates {
            tiers: self.gates_of(snapshot.tier_limits(), &mut all.tiers),
            tasks: self.gates_of(snapshot.task_limits(), &mut all.tasks),
        };
        drop(all);
        let is_any = !gates.tiers.is_empty() || !gates.tasks.is_empty();
        let names =
            |gates: &HashMap<String, Arc<Gate>>| gates.keys().cloned().collect::<HashSet<_>>();
        let is_same = names(&gates.tiers) == names(&before.tiers)
            && names(&gates.tasks) == names(&before.tasks);
        self.is_any.store(is_any, Ordering::Release);
        if !is_same {
            self.gates.send_replace(Arc::new(gates));
        }
    }

    fn gates_of<'s>(
        &self,
        limits: impl Iterator<Item = (&'s str, &'s Limit)>,
        all: &mut HashMap<String, Arc<Gate>>,
    ) -> HashMap<String, Arc<Gate>> {
        // Tasks of a key are counted in the database.
        let limits = limits.filter(|(_, limit)| limit.rate.is_some() || limit.per.is_none());
        let mut gates = HashMap::new();
        for (name, limit) in limits {
            let gate = match all.get(name) {
                Some(gate) => {
                    gate.set_limit(Some(limit));
                    gate.clone()
                }
                None => {
                    let gate = Arc::new(Gate::new(limit, &self.signals));
                    all.insert(name.to_owned(), gate.clone());
                    gate
                }
            };
            gates.insert(name.to_owned(), gate);
        }
        for (name, gate) in all {
            if !gates.contains_key(name) {
                // A source that has not heard of it yet may start what it wants.
                gate.set_limit(None);
            }
        }
        gates
    }

    #[cfg(feature = "postgres")]
    fn has_had_any(&self) -> bool {
        let all = self.all.lock().unwrap_or_else(PoisonError::into_inner);
        !all.tiers.is_empty() || !all.tasks.is_empty()
    }

    /// All gates, also those that have lost their limit, with what is limited.
    #[cfg(feature = "postgres")]
    fn all(&self) -> Vec<(&'static str, String, Arc<Gate>)> {
        let all = self.all.lock().unwrap_or_else(PoisonError::into_inner);
        let tiers = all.tiers.iter().map(|it| ("tier", it));
        let both = tiers.chain(all.tasks.iter().map(|it| ("task", it)));
        both.map(|(kind, (name, gate))| (kind, name.clone(), gate.clone()))
            .collect()
    }
}

impl fmt::Debug for Limits {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Limits")
            .field("gates", &*self.shared.gates.borrow())
            .finish_non_exhaustive()
    }
}
