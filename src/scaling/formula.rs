//! The formula. Pure.

use std::time::Duration;

/// The share of time in which slots are busy.
const UTILISATION: f64 = 0.8;
/// How soon tasks of a tier without `slo` should start.
pub(super) const DEFAULT_SLO: Duration = Duration::from_secs(600);
/// How long tasks run of which nothing is known.
const DEFAULT_RUN: Duration = Duration::from_secs(1);
/// Shorter SLOs are like this one, which no autoscaler is fast enough for.
const SHORTEST_SLO: Duration = Duration::from_millis(100);

/// What the slots of a tier follow from.
#[derive(Debug, Clone, Copy)]
pub(super) struct Demand {
    pub(super) arrivals_per_second: f64,
    pub(super) backlog: u64,
    pub(super) mean_run: Option<Duration>,
    pub(super) slo: Duration,
    pub(super) is_paused: bool,
    /// How many of its tasks may start in a second, and how many may run at a time.
    pub(super) rate: Option<f64>,
    pub(super) running: Option<u32>,
}

/// How many slots a tier wants.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Wanted {
    pub(super) slots: f64,
    /// Whether a limit keeps it from wanting more.
    pub(super) is_limited: bool,
}

impl Demand {
    pub(super) fn wanted(&self) -> Wanted {
        if self.is_paused {
            return Wanted {
                slots: 0.0,
                is_limited: false,
            };
        }
        let run = self.mean_run.unwrap_or(DEFAULT_RUN).as_secs_f64();
        let slo = self.slo.max(SHORTEST_SLO).as_secs_f64();
        let backlog = self.backlog as f64;
        let steady = self.arrivals_per_second * run / UTILISATION;
        // A task needs one slot at most.
        let catching_up = (backlog * run / slo / UTILISATION).min(backlog);
        let slots = steady + catching_up;
        let by_rate = self.rate.map(|rate| rate * run / UTILISATION);
        let by_running = self.running.map(f64::from);
        let most = [by_rate, by_running].into_iter().flatten();
        let limited = most.fold(slots, f64::min);
        Wanted {
            slots: limited,
            is_limited: limited < slots,
        }
    }
}

/// The slots of a group whose tiers want so many.
pub(super) fn slots_of(tiers: impl IntoIterator<Item = f64>) -> u32 {
    let sum: f64 = tiers.into_iter().sum();
    // What is left of divisions is no further slot.
    let slots = (sum - 1e-9).ceil().max(0.0);
    // A figure that no fleet has.
    slots.min(f64::from(u32::MAX)) as u32
}

/// How many processes provide these slots.
pub(super) fn processes_of(slots: u32, concurrency: u16) -> u32 {
    slots.div_ceil(u32::from(concurrency).max(1))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const IDLE: Demand = Demand {
        arrivals_per_second: 0.0,
        backlog: 0,
        mean_run: Some(Duration::from_secs(2)),
        slo: Duration::from_secs(10),
        is_paused: false,
        rate: None,
        running: None,
    };

    fn slots(demand: Demand) -> f64 {
        demand.wanted().slots
    }

    #[test]
    fn an_idle_tier_wants_no_slots() {
        assert_eq!(slots(IDLE), 0.0);
        assert_eq!(slots_of([0.0, 0.0]), 0);
        assert_eq!(processes_of(0, 4), 0);
    }

    #[test]
    fn what_comes_in_keeps_slots_busy_for_four_fifths_of_the_time() {
        // 4 a second that run for 2 s keep 8 slots busy.
        let demand = Demand {
            arrivals_per_second: 4.0,
            ..IDLE
        };
        assert_eq!(slots_of([slots(demand)]), 10);
        assert_eq!(processes_of(10, 4), 3);
    }

    #[test]
    fn a_backlog_wants_as_many_slots_as_start_it_within_the_slo() {
        // A slot starts 4 of them in 8 of 10 s.
        let backlog = Demand {
            backlog: 100,
            ..IDLE
        };
        assert_eq!(slots(backlog), 25.0);
        let both = Demand {
            arrivals_per_second: 4.0,
            ..backlog
        };
        assert_eq!(slots(both), 35.0);
    }

    #[test]
    fn a_task_that_runs_for_longer_than_the_slo_wants_one_slot() {
        let demand = Demand {
            backlog: 3,
            mean_run: Some(Duration::from_secs(3_600)),
            ..IDLE
        };
        assert_eq!(slots(demand), 3.0);
        let none = Demand {
            slo: Duration::ZERO,
            ..demand
        };
        assert_eq!(slots(none), 3.0);
    }

    #[test]
    fn run_times_that_are_not_known_are_taken_to_be_a_second() {
        let demand = Demand {
            backlog: 80,
            mean_run: None,
            ..IDLE
        };
        assert_eq!(slots(demand), 10.0);
    }

    #[test]
    fn a_limit_wants_no_more_slots_than_it_lets_run() {
        let demand = Demand {
            backlog: 1_000,
            ..IDLE
        };
        let running = Demand {
            running: Some(4),
            ..demand
        };
        let rate = Demand {
            rate: Some(0.8),
            ..demand
        };
        let limited = |slots| Wanted {
            slots,
            is_limited: true,
        };
        assert_eq!(running.wanted(), limited(4.0));
        assert_eq!(rate.wanted(), limited(2.0));
        let generous = Demand {
            rate: Some(1e6),
            running: Some(u32::MAX),
            ..demand
        };
        assert_eq!(generous.wanted(), demand.wanted());
        assert!(!demand.wanted().is_limited);
    }

    #[test]
    fn a_paused_tier_wants_none() {
        let demand = Demand {
            arrivals_per_second: 100.0,
            backlog: 1_000,
            is_paused: true,
            ..IDLE
        };
        assert_eq!(slots(demand), 0.0);
    }

    #[test]
    fn figures_that_no_fleet_has_do_not_overflow() {
        let demand = Demand {
            arrivals_per_second: 1e300,
            backlog: u64::MAX,
            mean_run: Some(Duration::MAX),
            ..IDLE
        };
        assert_eq!(slots_of([slots(demand), f64::INFINITY]), u32::MAX);
        assert_eq!(processes_of(u32::MAX, 1), u32::MAX);
    }

    proptest! {
        #[test]
        fn more_work_never_wants_fewer_slots(
            arrivals in 0.0_f64..1e4,
            backlog in 0_u64..1_000_000,
            run in 0_u64..1_000_000,
            slo in 1_u64..1_000_000,
            more in 0_u64..1_000,
        ) {
            let demand = Demand {
                arrivals_per_second: arrivals,
                backlog,
                mean_run: Some(Duration::from_millis(run)),
                slo: Duration::from_millis(slo),
                ..IDLE
            };
            let busier = Demand {
                arrivals_per_second: arrivals + more as f64,
                backlog: backlog + more,
                ..demand
            };
            prop_assert!(slots(busier) >= slots(demand));
            prop_assert!(slots(demand).is_finite() && slots(demand) >= 0.0);
        }
    }
}
