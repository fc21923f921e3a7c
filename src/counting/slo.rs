//! Which events count for the SLO of a tier, and which of them meet it.

use std::time::{Duration, SystemTime};

use super::Names;
use crate::control::KnownControls;
use crate::message::DeadReason;
use crate::observe::Event;

/// What an event adds to the counts of a tier with `slo`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct SloCount {
    /// How many tasks were started, or waited until they expired.
    pub(crate) counted: u64,
    /// How many of them were started in time.
    pub(crate) met: u64,
}

/// Decides by the map and by what was paused.
pub(crate) struct SloRules {
    controls: KnownControls,
    has_slo: bool,
}

impl SloRules {
    pub(crate) fn new(names: &Names, controls: KnownControls) -> Self {
        Self {
            controls,
            has_slo: names.tiers().iter().any(|tier| tier.slo.is_some()),
        }
    }

    /// Whether anything is paused, or was for a while since then.
    #[cfg(feature = "postgres")]
    pub(crate) fn has_pauses(&self, since: SystemTime) -> bool {
        self.controls.now().has_pauses(since)
    }

    /// What an event adds. `None`: its tier has no SLO, or the event is none that counts.
    ///
    /// A start counts, and so does a task that waited until it expired, which has not met its SLO. The time for which
    /// its tier, group or task was paused does not count as waiting.
    pub(crate) fn count(&self, names: &Names, event: &Event<'_>) -> Option<SloCount> {
        if !self.has_slo {
            return None;
        }
        let slo = |tier: &str| names.known_tier(tier)?.slo;
        let missed = |counted| SloCount { counted, met: 0 };
        match event {
            Event::Started { task, waited } => {
                let slo = slo(task.tier)?;
                let is_met = *waited <= slo
                    || self.without_pauses(names, task.name, task.tier, *waited)? <= slo;
                Some(SloCount {
                    counted: 1,
                    met: is_met.into(),
                })
            }
            Event::Expired { task, .. } => slo(task.tier).map(|_| missed(1)),
            Event::Dead {
                task,
                reason: DeadReason::Expired,
                ..
            } => slo(task.tier).map(|_| missed(1)),
            Event::DeadByBroker {
                tier,
                has_expired: true,
                count,
                ..
            } => slo(tier).map(|_| missed(*count)),
            _ => None,
        }
    }

    /// What of the time that a task has waited until now it was not paused.
    fn without_pauses(
        &self,
        names: &Names,
        task: &str,
        tier: &str,
        waited: Duration,
    ) -> Option<Duration> {
        let now = SystemTime::now();
        let since = now.checked_sub(waited)?;
        let group = names.known_tier(tier).map_or("", |tier| &*tier.group);
        let snapshot = self.controls.now();
        let paused = snapshot.paused_between(group, tier, task, since, now);
        Some(waited.saturating_sub(paused))
    }

    /// Whether a task or its tier is paused, or was for a while since then.
    #[cfg(feature = "postgres")]
    pub(crate) fn is_paused(
        &self,
        names: &Names,
        (task, tier): (usize, usize),
        since: SystemTime,
    ) -> bool {
        let (task, Some(tier)) = (names.task(task), names.tiers().get(tier)) else {
            return false;
        };
        let snapshot = self.controls.now();
        let now = SystemTime::now();
        snapshot.is_paused(&tier.group, &tier.name)
            || snapshot.is_task_paused(task)
            || !snapshot
                .paused_between(&tier.group, &tier.name, task, since, now)
                .is_zero()
    }
}
