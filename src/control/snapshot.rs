//! The changes in force, as a process knows them. Pure.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use crate::topology::{Limit, Topology};

/// What is in force.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Snapshot {
    pub(super) paused_tiers: HashSet<String>,
    pub(super) paused_groups: HashSet<String>,
    pub(super) paused_tasks: HashSet<String>,
    pub(super) task_overrides: HashMap<String, Arc<Override>>,
    /// By the beginning of the tasks' names, the longest first.
    pub(super) prefix_overrides: Vec<(String, Arc<Override>)>,
    /// Pauses that have ended; their time does not count as waiting.
    pub(super) past_pauses: Vec<PastPause>,
    /// The limits in force: those of the map, where no operator has replaced them.
    pub(super) tier_limits: HashMap<String, Limit>,
    pub(super) task_limits: HashMap<String, Limit>,
}

/// A pause that has ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct PastPause {
    pub(super) target: PauseTarget,
    pub(super) since: SystemTime,
    pub(super) until: SystemTime,
}

/// What was paused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum PauseTarget {
    Tier(String),
    Group(String),
    Task(String),
}

/// Another tier or priority for a task than the map's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Override {
    pub(crate) tier: Option<String>,
    pub(crate) priority: Option<u8>,
}

impl Snapshot {
    /// In which these tiers are paused, and these were.
    #[cfg(test)]
    pub(crate) fn of_pauses(paused: &str, past: &str, from: SystemTime, to: SystemTime) -> Self {
        Self {
            paused_tiers: HashSet::from([paused.to_owned()]),
            past_pauses: vec![PastPause {
                target: PauseTarget::Tier(past.to_owned()),
                since: from,
                until: to,
            }],
            ..Self::default()
        }
    }

    /// What is in force where no operator has changed anything.
    pub(crate) fn of(topology: &Topology) -> Self {
        let tiers = topology.tiers().iter();
        let tiers = tiers.filter_map(|it| Some((it.name.clone(), it.limit.clone()?)));
        let tasks = topology.tasks().iter();
        let tasks = tasks.filter_map(|it| Some((it.name.clone(), it.limit.clone()?)));
        Self {
            tier_limits: tiers.collect(),
            task_limits: tasks.collect(),
            ..Self::default()
        }
    }

    /// Has an operator's limit in place of the map's.
    #[cfg(feature = "postgres")]
    pub(super) fn limit_tier(&mut self, tier: String, limit: Limit) {
        replace(&mut self.tier_limits, tier, limit);
    }

    /// The same for a task, whose keys stay those of the map.
    #[cfg(feature = "postgres")]
    pub(super) fn limit_task(&mut self, topology: &Topology, task: String, limit: Limit) {
        let of_map = topology.task(&task).and_then(|it| it.limit.as_ref());
        let per = of_map.and_then(|limit| limit.per.clone());
        let limit = Limit {
            per: per.filter(|_| limit.running.is_some()),
            ..limit
        };
        replace(&mut self.task_limits, task, limit);
    }

    /// The limit of a tier: an operator's, else the map's.
    pub(crate) fn limit_of_tier(&self, tier: &str) -> Option<&Limit> {
        self.tier_limits.get(tier)
    }

    /// The limit of a task: an operator's, else the map's.
    pub(crate) fn limit_of_task(&self, task: &str) -> Option<&Limit> {
        self.task_limits.get(task)
    }

    /// The limits of tiers, by their names.
    pub(crate) fn tier_limits(&self) -> impl Iterator<Item = (&str, &Limit)> {
        let limits = self.tier_limits.iter();
        limits.map(|(name, limit)| (name.as_str(), limit))
    }

    /// The limits of tasks, by their names.
    pub(crate) fn task_limits(&self) -> impl Iterator<Item = (&str, &Limit)> {
        let limits = self.task_limits.iter();
        limits.map(|(name, limit)| (name.as_str(), limit))
    }

    /// Whether a tier, or the group that has it, is paused.
    pub(crate) fn is_paused(&self, group: &str, tier: &str) -> bool {
        self.paused_tiers.contains(tier) || self.paused_groups.contains(group)
    }

    pub(crate) fn is_task_paused(&self, task: &str) -> bool {
        // Nearly always nothing is paused, and this is asked often.
        !self.paused_tasks.is_empty() && self.paused_tasks.contains(task)
    }

    /// Whether something is paused, or was for a while since then.
    pub(crate) fn has_pauses(&self, since: SystemTime) -> bool {
        let paused = [&self.paused_tiers, &self.paused_groups, &self.paused_tasks];
        paused.into_iter().any(|names| !names.is_empty())
            || self.past_pauses.iter().any(|pause| pause.until > since)
    }

    pub(crate) fn paused_tasks(&self) -> impl Iterator<Item = &str> {
        self.paused_tasks.iter().map(String::as_str)
    }

    /// One override of a prefix.
    #[cfg(all(test, feature = "postgres"))]
    pub(crate) fn of_prefix(prefix: &str, to: Override) -> Self {
        Self {
            prefix_overrides: vec![(prefix.to_owned(), Arc::new(to))],
            ..Self::default()
        }
    }

    /// Puts the longest prefix first.
    #[cfg(feature = "postgres")]
    pub(super) fn sort(&mut self) {
        let prefixes = &mut self.prefix_overrides;
        prefixes.sort_by_key(|(prefix, _)| std::cmp::Reverse(prefix.len()));
    }

    #[cfg(any(test, feature = "postgres"))]
    pub(super) fn has_overrides(&self) -> bool {
        !self.task_overrides.is_empty() || !self.prefix_overrides.is_empty()
    }

    /// The override of a task: one of its name counts before one of a prefix, and a longer prefix before a shorter.
    pub(crate) fn override_of(&self, task: &str) -> Option<&Arc<Override>> {
        if let Some(found) = self.task_overrides.get(task) {
            return Some(found);
        }
        let mut prefixes = self.prefix_overrides.iter();
        let found = prefixes.find(|(prefix, _)| task.starts_with(prefix.as_str()));
        found.map(|(_, found)| found)
    }

    /// How long tasks of a group's tier were paused in the time before `now`: as much longer they may wait. `is_task` says
    /// which tasks are meant. Pauses at the same time count once.
    pub(crate) fn time_paused(
        &self,
        group: &str,
        tier: &str,
        is_task: impl Fn(&str) -> bool,
        within: Duration,
        now: SystemTime,
    ) -> Duration {
        let is_meant = |pause: &&PastPause| pause.target.includes(group, tier, &is_task);
        let mut paused = Duration::ZERO;
        let mut counted_from = now;
        // The latest first: what a task waited before a pause counts, and the pause does not.
        let mut pauses: Vec<&PastPause> = self.past_pauses.iter().filter(is_meant).collect();
        pauses.sort_by_key(|pause| std::cmp::Reverse(pause.until));
        for pause in pauses {
            let until = pause.until.min(counted_from);
            let unpaused = now
                .duration_since(until)
                .unwrap_or_default()
                .saturating_sub(paused);
            if unpaused > within {
                break;
            }
            paused += until.duration_since(pause.since).unwrap_or_default();
            counted_from = counted_from.min(pause.since);
        }
        paused
    }

    /// For how long of the time from `since` to `until` a task, its tier or its group was paused. A pause that is still in
    /// force does not count.
    pub(crate) fn paused_between(
        &self,
        group: &str,
        tier: &str,
        task: &str,
        since: SystemTime,
        until: SystemTime,
    ) -> Duration {
        let pauses = self.past_pauses.iter();
        let pauses = pauses.filter(|pause| pause.target.includes(group, tier, |it| it == task));
        let mut pauses: Vec<_> = pauses.map(|pause| (pause.since, pause.until)).collect();
        pauses.sort_unstable();
        let (mut counted_until, mut paused) = (since, Duration::ZERO);
        for (begin, end) in pauses {
            // Pauses of the tier, its group and the task may overlap.
            let (begin, end) = (begin.max(counted_until), end.min(until));
            if let Ok(length) = end.duration_since(begin) {
                paused += length;
                counted_until = end;
            }
        }
        paused
    }
}

impl PauseTarget {
    fn includes(&self, group: &str, tier: &str, is_task: impl Fn(&str) -> bool) -> bool {
        match self {
            PauseTarget::Tier(paused) => paused == tier,
            PauseTarget::Group(paused) => paused == group,
            PauseTarget::Task(paused) => is_task(paused),
        }
    }
}

#[cfg(feature = "postgres")]
fn replace(limits: &mut HashMap<String, Limit>, name: String, limit: Limit) {
    match limit.rate.is_some() || limit.running.is_some() {
        true => drop(limits.insert(name, limit)),
        false => drop(limits.remove(&name)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(feature = "postgres")]
    #[test]
    fn a_limit_of_an_operator_replaces_that_of_the_map_wholly_but_for_its_keys() {
        let map = r#"
            app = "shop"
            [tiers.mail]
            queue = "postgres"
            limit = { rate = "1/s", running = 2 }
            [groups.all]
            tiers = ["mail"]
            concurrency = 1
            [tasks]
            "mail.send" = { tier = "mail", limit = { running = 1, per = "customer" } }
        "#;
        let topology = Topology::parse(map).unwrap();
        let mut snapshot = Snapshot::of(&topology);
        let running = |running| Limit {
            running: Some(running),
            ..Limit::NONE
        };
        let shown = |limit: Option<&Limit>| limit.map(Limit::to_string);
        let tier = |snapshot: &Snapshot| shown(snapshot.limit_of_tier("mail"));
        let task = |snapshot: &Snapshot| shown(snapshot.limit_of_task("mail.send"));
        assert_eq!(tier(&snapshot).unwrap(), "1/s with bursts of 1, 2 running");
        snapshot.limit_tier("mail".into(), running(5));
        assert_eq!(tier(&snapshot).unwrap(), "5 running");
        snapshot.limit_tier("mail".into(), Limit::NONE);
        assert_eq!(tier(&snapshot), None);
        snapshot.limit_task(&topology, "mail.send".into(), running(3));
        assert_eq!(task(&snapshot).unwrap(), "3 running per customer");
    }

    fn to(tier: &str) -> Arc<Override> {
        Arc::new(Override {
            tier: Some(tier.to_owned()),
            priority: None,
        })
    }

    #[test]
    fn the_override_of_a_name_counts_before_that_of_a_prefix_and_the_longer_prefix_first() {
        let snapshot = Snapshot {
            task_overrides: HashMap::from([("mail.send".into(), to("urgent"))]),
            prefix_overrides: vec![
                ("mail.news.".into(), to("bulk")),
                ("mail.".into(), to("low")),
            ],
            ..Snapshot::default()
        };
        let tier = |task| snapshot.override_of(task).and_then(|it| it.tier.as_deref());
        assert_eq!(tier("mail.send"), Some("urgent"));
        assert_eq!(tier("mail.news.weekly"), Some("bulk"));
        assert_eq!(tier("mail.receipt"), Some("low"));
        assert_eq!(tier("sms.send"), None);
    }

    #[test]
    fn a_tier_is_paused_with_its_group() {
        let snapshot = Snapshot {
            paused_groups: HashSet::from(["calls".into()]),
            paused_tiers: HashSet::from(["bulk".into()]),
            ..Snapshot::default()
        };
        assert!(snapshot.is_paused("calls", "critical") && snapshot.is_paused("other", "bulk"));
        assert!(!snapshot.is_paused("other", "critical"));
    }

    #[test]
    fn time_that_is_paused_twice_counts_once_and_only_within_the_wait() {
        let at = |seconds| SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
        let bulk = || PauseTarget::Tier("bulk".into());
        let mail = || PauseTarget::Task("mail.send".into());
        let pauses = [
            (bulk(), 10, 20),
            (bulk(), 100, 130),
            (PauseTarget::Group("slow".into()), 110, 120),
            (mail(), 125, 150),
        ];
        let pauses = pauses.into_iter().map(|(target, since, until)| PastPause {
            target,
            since: at(since),
            until: at(until),
        });
        let snapshot = Snapshot {
            past_pauses: pauses.collect(),
            ..Snapshot::default()
        };
        let paused = |task, since, until| {
            let paused = snapshot.paused_between("slow", "bulk", task, at(since), at(until));
            paused.as_secs()
        };
        assert_eq!(paused("sms.send", 0, 1_000), 40);
        assert_eq!(paused("sms.send", 15, 105), 10);
        assert_eq!(paused("mail.send", 15, 1_000), 55);
        assert_eq!(paused("mail.send", 20, 100), 0);
    }

    #[test]
    fn the_time_of_pauses_counts_once_and_those_of_long_ago_do_not() {
        let at = |seconds| SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
        let pause = |target, since, until| PastPause {
            target,
            since: at(since),
            until: at(until),
        };
        let bulk = || PauseTarget::Tier("bulk".into());
        let snapshot = Snapshot {
            past_pauses: vec![
                pause(bulk(), 10, 20),
                pause(bulk(), 100, 130),
                pause(PauseTarget::Group("slow".into()), 110, 120),
                pause(PauseTarget::Task("other".into()), 130, 140),
            ],
            ..Snapshot::default()
        };
        let paused = |within| {
            let within = Duration::from_secs(within);
            snapshot.time_paused("slow", "bulk", |task| task == "export", within, at(140))
        };
        assert_eq!(paused(60), Duration::from_secs(30));
        assert_eq!(paused(1_000), Duration::from_secs(40));
        assert_eq!(paused(5), Duration::ZERO);
    }
}
