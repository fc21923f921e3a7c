//! The changes in force, as a process knows them. Pure.

use std::collections::{HashMap, HashSet};
use std::time::{Duration, SystemTime};

/// What is in force. An empty one is that of an app without a database.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Snapshot {
    pub(super) paused_tiers: HashSet<String>,
    pub(super) paused_groups: HashSet<String>,
    pub(super) paused_tasks: HashSet<String>,
    pub(super) task_overrides: HashMap<String, Override>,
    /// By the beginning of the tasks' names, the longest first.
    pub(super) prefix_overrides: Vec<(String, Override)>,
    /// When tiers were paused that are not any more: tasks waited there through no fault of theirs.
    pub(super) past_pauses: HashMap<String, Vec<(SystemTime, SystemTime)>>,
    /// When tasks were paused that are not any more.
    pub(super) past_task_pauses: HashMap<String, Vec<(SystemTime, SystemTime)>>,
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
            past_pauses: HashMap::from([(past.to_owned(), vec![(from, to)])]),
            ..Self::default()
        }
    }

    /// Whether a tier, or the group that has it, is paused.
    pub(crate) fn is_paused(&self, group: &str, tier: &str) -> bool {
        self.paused_tiers.contains(tier) || self.paused_groups.contains(group)
    }

    pub(crate) fn is_task_paused(&self, task: &str) -> bool {
        // Nearly always nothing is paused, and this is asked for each delivery.
        !self.paused_tasks.is_empty() && self.paused_tasks.contains(task)
    }

    pub(crate) fn paused_tasks(&self) -> impl Iterator<Item = &str> {
        self.paused_tasks.iter().map(String::as_str)
    }

    /// The override of a task: one of its name counts before one of a prefix, and a longer prefix before a shorter.
    pub(crate) fn override_of(&self, task: &str) -> Option<&Override> {
        if let Some(found) = self.task_overrides.get(task) {
            return Some(found);
        }
        let mut prefixes = self.prefix_overrides.iter();
        let found = prefixes.find(|(prefix, _)| task.starts_with(prefix.as_str()));
        found.map(|(_, found)| found)
    }

    /// How long a tier was paused in the time before `now`: as much longer its tasks may wait.
    pub(crate) fn time_paused(&self, tier: &str, within: Duration, now: SystemTime) -> Duration {
        let Some(pauses) = self.past_pauses.get(tier) else {
            return Duration::ZERO;
        };
        let earliest = now.checked_sub(within).unwrap_or(SystemTime::UNIX_EPOCH);
        let recent = pauses.iter().filter(|(_, until)| *until >= earliest);
        let lengths = recent.map(|(since, until)| until.duration_since(*since).unwrap_or_default());
        lengths.sum()
    }

    /// For how long of the time from `since` to `until` a task or its tier was paused. A pause that is still in force does
    /// not count.
    pub(crate) fn paused_between(
        &self,
        tier: &str,
        task: &str,
        since: SystemTime,
        until: SystemTime,
    ) -> Duration {
        let pauses = [self.past_pauses.get(tier), self.past_task_pauses.get(task)];
        let mut pauses: Vec<_> = pauses.into_iter().flatten().flatten().copied().collect();
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

#[cfg(test)]
mod tests {
    use super::*;

    fn to(tier: &str) -> Override {
        Override {
            tier: Some(tier.to_owned()),
            priority: None,
        }
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
        let snapshot = Snapshot {
            past_pauses: HashMap::from([(
                "bulk".into(),
                vec![(at(10), at(20)), (at(100), at(130)), (at(110), at(120))],
            )]),
            past_task_pauses: HashMap::from([("mail.send".into(), vec![(at(125), at(150))])]),
            ..Snapshot::default()
        };
        let paused = |task, since, until| {
            let paused = snapshot.paused_between("bulk", task, at(since), at(until));
            paused.as_secs()
        };
        assert_eq!(paused("sms.send", 0, 1_000), 40);
        assert_eq!(paused("sms.send", 15, 105), 10);
        assert_eq!(paused("mail.send", 15, 1_000), 55);
        assert_eq!(paused("mail.send", 20, 100), 0);
    }

    #[test]
    fn pauses_of_long_ago_do_not_count() {
        let at = |seconds| SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
        let snapshot = Snapshot {
            past_pauses: HashMap::from([(
                "bulk".into(),
                vec![(at(10), at(20)), (at(100), at(130))],
            )]),
            ..Snapshot::default()
        };
        let paused = |within| snapshot.time_paused("bulk", Duration::from_secs(within), at(140));
        assert_eq!(paused(60), Duration::from_secs(30));
        assert_eq!(paused(1_000), Duration::from_secs(40));
        assert_eq!(paused(5), Duration::ZERO);
    }
}
