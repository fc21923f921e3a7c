//! Computes statistics from what the servers said. Pure.

use std::time::Duration;

use super::Count;
use super::known::Known;
use super::objective::{budget_left, objective_of};
use super::oldest::estimate;
use super::report::{
    DeadLetterStats, GroupStats, LimitStats, OldestWait, PauseStats, PriorityDepth, SloStats,
    TierHome, TierStats,
};
use crate::amqp::QueueState;
use crate::backlog::{RankDepth, TierDepth, sum};
use crate::control::{ControlEntry, Setting, Target};
use crate::rollup::Minute;
use crate::topology::{Group, Home, Limit, LimitScope, Tier, Topology};

/// The time of rates and waits.
pub(super) const WINDOW: Duration = Duration::from_secs(300);
/// Rates are over no less than this, so that the first task is not sixty in a minute.
const SHORTEST_WINDOW: Duration = Duration::from_secs(60);

/// Computes.
pub(super) struct Assembly<'a> {
    pub(super) topology: &'a Topology,
    pub(super) known: &'a Known,
}

impl Assembly<'_> {
    pub(super) fn tier(&self, tier: &Tier) -> TierStats {
        let name = tier.name.as_str();
        let group = self.topology.group_of(name).map_or("", |group| &group.name);
        let is_on_broker = tier.home.is_on_broker();
        let depth = self.depth(name);
        let messages = self.messages(tier);
        let (ready, oldest_ready) = match &depth {
            Some(depth) => sum(depth.ready.iter()),
            None => Default::default(),
        };
        let (parked, oldest_parked) = match &depth {
            Some(depth) => sum(depth.parked.iter()),
            None => Default::default(),
        };
        // Those that wait for the turn of their key are not held back.
        let (ready, oldest_row) = match tier.fair {
            Some(_) => (ready.plus(parked), oldest_ready.max(oldest_parked)),
            None => (ready, oldest_ready),
        };
        let rows = depth.as_ref().map(|_| Count::from(ready));
        let uses_broker = is_on_broker || self.topology.names().former_queue(tier).is_some();
        let waiting = match (uses_broker, messages, rows) {
            (false, _, rows) => rows,
            (true, Some(messages), rows) => {
                Some(Count::exactly(messages).plus(rows.unwrap_or_default()))
            }
            (true, None, rows) if !is_on_broker => rows.map(|rows| Count {
                or_more: true,
                ..rows
            }),
            (true, None, _) => None,
        };
        let quarantined = depth.as_ref().map(|depth| {
            let suspects = depth.ready.iter().chain(&depth.parked);
            Count::from(sum(suspects.filter(|it| it.is_quarantined())).0)
        });
        let processes = self
            .live_processes(|groups| groups.iter().any(|tiers| tiers.iter().any(|it| it == name)));
        TierStats {
            tier: name.to_owned(),
            group: group.to_owned(),
            home: home(tier.home),
            waiting,
            messages,
            rows,
            by_priority: depth
                .as_ref()
                .filter(|_| !is_on_broker && tier.home.max_priority().is_some())
                .map(|depth| priorities(&depth.ready)),
            quarantined,
            oldest: self.oldest(name, messages, oldest_row),
            in_flight: self.in_flight(tier, depth.as_ref()),
            running: self.running(name),
            consumers: match is_on_broker {
                true => self.consumers(tier),
                false => processes,
            },
            processes,
            rate_in: self.rate(name, |minute| minute.arrived),
            rate_out: self.rate(name, |minute| minute.ended),
            wait_p50: self.wait(name, 0.5),
            wait_p99: self.wait(name, 0.99),
            slo: self.slo(tier),
            dead: self.dead(tier),
            relay_waiting: self.relay_waiting(is_on_broker, rows, processes),
            scheduled: depth.as_ref().map(|depth| depth.scheduled.into()),
            delayed_messages: self.delayed_messages(tier),
            parked: depth.as_ref().map(|_| parked.into()),
            paused: self.paused(name, group),
            limit: self.limit(tier),
        }
    }

    pub(super) fn group(&self, group: &Group, tiers: &[TierStats]) -> GroupStats {
        let live = self.known.processes.as_ref().map(|processes| {
            let live = processes.iter().filter(|it| it.is_alive);
            let served = live.flat_map(|process| &process.groups);
            let slots = served
                .filter(|it| it.name == group.name)
                .map(|it| u32::from(it.slots));
            slots.collect::<Vec<_>>()
        });
        let mut running = tiers.iter().filter(|tier| tier.group == group.name);
        GroupStats {
            group: group.name.clone(),
            processes: live.as_ref().map(|slots| number(slots.len())),
            slots: live.map(|slots| slots.iter().sum()),
            running: running.try_fold(0, |all, tier| Some(all + tier.running?)),
        }
    }

    /// The names of tasks that are paused.
    pub(super) fn paused_tasks(&self) -> Option<Vec<String>> {
        let controls = self.known.controls.as_ref()?.iter();
        let tasks = controls.filter_map(|entry| match (&entry.target, &entry.setting) {
            (Target::Task(task), Setting::Pause) => Some(task.clone()),
            _ => None,
        });
        Some(tasks.collect())
    }

    pub(super) fn relays(&self) -> Option<u32> {
        let processes = self.known.processes.as_ref()?.iter();
        Some(number(
            processes.filter(|it| it.is_alive && it.is_relay).count(),
        ))
    }

    /// The rows of a tier; none where it has no number yet.
    fn depth(&self, tier: &str) -> Option<TierDepth> {
        let depths = self.known.depths.as_ref()?;
        Some(depths.get(tier).cloned().unwrap_or_default())
    }

    fn state(&self, queue: &str) -> Option<QueueState> {
        self.known.queues.get(queue).copied().flatten()
    }

    /// How many messages are ready in a queue.
    fn ready_in(&self, queue: &str) -> Option<u64> {
        match self.state(queue)? {
            QueueState::Available { messages, .. } => Some(messages.into()),
            QueueState::Missing => Some(0),
            QueueState::Unreachable | QueueState::NotAllowed => None,
        }
    }

    /// The messages in the queue of a tier, and in the one that it had before.
    fn messages(&self, tier: &Tier) -> Option<u64> {
        let names = self.topology.names();
        let own = tier.home.is_on_broker().then(|| names.queue(tier));
        let queues: Vec<String> = own.into_iter().chain(names.former_queue(tier)).collect();
        if queues.is_empty() {
            return None;
        }
        queues.iter().map(|queue| self.ready_in(queue)).sum()
    }

    fn consumers(&self, tier: &Tier) -> Option<u32> {
        match self.state(&self.topology.names().queue(tier))? {
            QueueState::Available { consumers, .. } => Some(consumers),
            QueueState::Missing => Some(0),
            QueueState::Unreachable | QueueState::NotAllowed => None,
        }
    }

    /// How many live processes serve what is asked for, given the tiers of each of their groups.
    fn live_processes(&self, is_meant: impl Fn(&[&[String]]) -> bool) -> Option<u32> {
        let processes = self.known.processes.as_ref()?.iter();
        let live = processes
            .filter(|it| it.is_alive && !it.is_relay)
            .filter(|process| {
                let tiers: Vec<&[String]> = process
                    .groups
                    .iter()
                    .map(|it| it.tiers.as_slice())
                    .collect();
                is_meant(&tiers)
            });
        Some(number(live.count()))
    }

    fn oldest(
        &self,
        tier: &str,
        messages: Option<u64>,
        row: Option<Duration>,
    ) -> Option<OldestWait> {
        let row = row.map(|age| OldestWait {
            age,
            is_estimate: false,
        });
        let recent = self.known.recent.as_ref();
        let message = recent.and_then(|recent| {
            let age = estimate(messages?, recent.seen.get(tier), self.minutes(tier))?;
            Some(OldestWait {
                age,
                is_estimate: true,
            })
        });
        row.into_iter().chain(message).max_by_key(|it| it.age)
    }

    fn minutes(&self, tier: &str) -> &[Minute] {
        let recent = self.known.recent.as_ref();
        let minutes = recent.and_then(|recent| recent.minutes.get(tier));
        minutes.map_or(&[], Vec::as_slice)
    }

    fn in_flight(&self, tier: &Tier, depth: Option<&TierDepth>) -> Option<Count> {
        let claimed = depth.map(|depth| Count::from(depth.running));
        if !tier.home.is_on_broker() {
            return claimed;
        }
        let managed = self
            .known
            .managed
            .as_ref()
            .and_then(|managed| managed.get(&self.topology.names().queue(tier)));
        match managed {
            Some(managed) => {
                Some(Count::exactly(managed.in_flight).plus(claimed.unwrap_or_default()))
            }
            // What is prefetched is not known.
            None => self.running(&tier.name).map(|running| Count {
                count: running,
                or_more: true,
            }),
        }
    }

    /// What workers report, from whichever home it came.
    fn running(&self, tier: &str) -> Option<u64> {
        let seen = self.known.recent.as_ref()?.seen.get(tier);
        Some(seen.map_or(0, |seen| seen.running))
    }

    fn rate(&self, tier: &str, of: impl Fn(&Minute) -> u64) -> Option<f64> {
        let recent = self.known.recent.as_ref()?;
        // The minute in which the window begins counts wholly.
        let minutes = self
            .minutes(tier)
            .iter()
            .filter(|minute| minute.age < WINDOW + SHORTEST_WINDOW);
        let counted: u64 = minutes.clone().map(of).sum();
        let span = minutes.map(|minute| minute.age).max().unwrap_or_default();
        let span = span.max(WINDOW.min(recent.known_for)).max(SHORTEST_WINDOW);
        Some(counted as f64 / span.as_secs_f64())
    }

    fn wait(&self, tier: &str, share: f64) -> Option<Duration> {
        let waits = &self.known.recent.as_ref()?.waits;
        waits.get(tier)?.quantile(share)
    }

    fn slo(&self, tier: &Tier) -> Option<SloStats> {
        let (start, objective) = (tier.slo?, objective_of(tier)?);
        let minutes = self.minutes(&tier.name).iter();
        let (met, counted) = minutes.fold((0, 0), |(met, counted), minute| {
            (met + minute.slo_met, counted + minute.slo_counted)
        });
        let recent = self.known.recent.as_ref();
        let budget = recent.and_then(|recent| recent.budgets.get(&tier.name).copied());
        Some(SloStats {
            start,
            objective,
            met_last_hour: (counted > 0).then(|| met as f64 / counted as f64),
            budget_left: budget.and_then(|(met, counted)| budget_left(objective, met, counted)),
        })
    }

    fn dead(&self, tier: &Tier) -> Option<DeadLetterStats> {
        let known = self.known.dead.as_ref()?;
        let known = known.iter().find(|it| it.tier == tier.name);
        let since = |age: Duration| {
            self.known.recent.as_ref()?;
            let minutes = self.minutes(&tier.name).iter();
            Some(minutes.filter(|it| it.age < age).map(|it| it.dead).sum())
        };
        Some(DeadLetterStats {
            dead: known.map_or(0, |it| it.dead),
            redriving: known.map_or(0, |it| it.redriving),
            redriven: known.map_or(0, |it| it.redriven),
            discarded: known.map_or(0, |it| it.discarded),
            uncollected: self.ready_in(&self.topology.names().dead_letter_queue(&tier.name)),
            last_five_minutes: since(WINDOW + SHORTEST_WINDOW),
            last_hour: since(Duration::MAX),
        })
    }

    fn relay_waiting(
        &self,
        is_on_broker: bool,
        rows: Option<Count>,
        processes: Option<u32>,
    ) -> Option<Count> {
        if !is_on_broker {
            return None;
        }
        match processes? + self.relays()? {
            0 => rows,
            _ => Some(Count::default()),
        }
    }

    fn delayed_messages(&self, tier: &Tier) -> Option<u64> {
        let managed = self
            .known
            .managed
            .as_ref()
            .filter(|_| tier.home.is_on_broker())?;
        let names = self.topology.names();
        let delayed = managed
            .iter()
            .filter(|(queue, _)| names.is_delay_of(&tier.name, queue));
        Some(delayed.map(|(_, queue)| queue.messages).sum())
    }

    fn paused(&self, tier: &str, group: &str) -> Option<PauseStats> {
        let controls = self.known.controls.as_ref()?.iter();
        let pauses = controls.filter(|entry| entry.setting == Setting::Pause);
        let found = pauses.filter_map(|entry| match &entry.target {
            Target::Tier(name) if name == tier => Some((false, entry)),
            Target::Group(name) if name == group => Some((true, entry)),
            _ => None,
        });
        // Its own pause first.
        let found: Option<(bool, &ControlEntry)> = found.min_by_key(|(of_group, _)| *of_group);
        found.map(|(of_group, entry)| PauseStats {
            of_group,
            who: entry.who.clone(),
            why: entry.why.clone(),
            since: entry.since,
            until: entry.until,
        })
    }

    fn limit(&self, tier: &Tier) -> Option<LimitStats> {
        let controls = self.known.controls.iter().flatten();
        let mut set = controls.filter_map(|entry| match (&entry.target, &entry.setting) {
            (Target::Tier(name), Setting::Limit(limit)) if *name == tier.name => Some(limit),
            _ => None,
        });
        let limits = |limit: &&Limit| limit.rate.is_some() || limit.running.is_some();
        let limit = set.next_back().or(tier.limit.as_ref()).filter(limits)?;
        Some(LimitStats {
            limit: limit.to_string(),
            is_saturated: self
                .known
                .saturated
                .as_ref()
                .filter(|_| limit.scope == LimitScope::App)
                .map(|saturated| saturated.contains(&tier.name)),
        })
    }
}

fn home(home: Home) -> TierHome {
    match home {
        Home::Classic { .. } => TierHome::Classic,
        Home::Quorum { .. } => TierHome::Quorum,
        Home::Postgres { .. } => TierHome::Postgres,
    }
}

fn priorities(ready: &[RankDepth]) -> Vec<PriorityDepth> {
    let waiting = ready.iter().filter(|level| !level.is_quarantined());
    let waiting = waiting.map(|level| PriorityDepth {
        priority: level.priority(),
        rows: level.rows.into(),
    });
    waiting.collect()
}

fn number(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}
