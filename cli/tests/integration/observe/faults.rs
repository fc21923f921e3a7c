//! The faults that the alerts are for, each as what it does to a good day, and the alerts that it raises.

use super::day::{Day, PACE};

pub(super) struct Fault {
    pub(super) name: &'static str,
    pub(super) day: Day,
    /// When to look, in minutes.
    pub(super) at: u32,
    /// All alerts that fire then: name, severity, tier and group.
    pub(super) fires: Vec<[&'static str; 4]>,
}

/// When short faults begin, and when their day ends.
const BEGIN: u32 = 120;
const END: u32 = 180;

const BURN_FAST: [&str; 4] = ["TierlineSloBurnFast", "page", "urgent", "front"];
const BURN_SLOW: [&str; 4] = ["TierlineSloBurnSlow", "ticket", "urgent", "front"];
const NOTHING_STARTS: [&str; 4] = ["TierlineNothingStarts", "page", "urgent", "front"];

fn fault(
    name: &'static str,
    minutes: u32,
    fires: &[[&'static str; 4]],
    spoil: impl FnOnce(&mut Day),
) -> Fault {
    let mut day = Day::good(minutes);
    spoil(&mut day);
    let at = day.minutes();
    Fault {
        name,
        day,
        at,
        fires: fires.to_vec(),
    }
}

/// From the beginning of a fault on, 1.
fn since(begin: u32) -> impl Fn(u32) -> f64 {
    move |at| f64::from(u8::from(at >= begin))
}

/// So much in each minute of a fault.
fn growing(by: f64) -> impl Fn(f64) -> f64 {
    move |at| (at - f64::from(BEGIN)).max(0.0) * by
}

pub(super) fn all() -> Vec<Fault> {
    [burning(), waiting(), failing(), blind()]
        .into_iter()
        .flatten()
        .collect()
}

fn burning() -> Vec<Fault> {
    let late = |share: f64| move |at: f64| at * PACE * share;
    let mut over = fault(
        "a tenth was late until an hour ago",
        200,
        &[BURN_SLOW],
        |day| {
            day.judge("urgent", |at| at.clamp(30.0, 130.0) * PACE * 0.1);
        },
    );
    over.at = 200;
    vec![
        fault(
            "a tenth is late for an hour",
            END,
            &[BURN_FAST, BURN_SLOW],
            |day| day.judge("urgent", growing(PACE * 0.1)),
        ),
        over,
        fault(
            "eight of 1,000 are late for seven hours",
            420,
            &[BURN_FAST, BURN_SLOW],
            |day| day.judge("urgent", late(0.008)),
        ),
        fault(
            "four of 1,000 are late for a day",
            26 * 60,
            &[BURN_SLOW],
            |day| day.judge("urgent", late(0.004)),
        ),
        fault(
            "three of 2,000 are late for three days",
            72 * 60,
            &[BURN_SLOW],
            |day| day.judge("urgent", late(0.0015)),
        ),
        fault(
            "three of four tasks of a quiet tier are late",
            END,
            &[],
            |day| {
                for (met, tasks) in [("true", 0.5), ("false", 1.5)] {
                    let labels = [("tier", "urgent"), ("met", met)];
                    day.count("tierline_slo_tasks_total", &labels, |at| {
                        (at - 110.0).clamp(0.0, tasks)
                    });
                }
            },
        ),
    ]
}

fn waiting() -> Vec<Fault> {
    let no_consumers = ["TierlineNoConsumers", "page", "urgent", "front"];
    let mut gone = fault(
        "all workers of urgent are gone",
        END,
        &[no_consumers],
        |day| {
            day.stop("urgent", BEGIN - 1);
            day.say("tierline_consumers", "urgent", |at| {
                16.0 * (1.0 - since(BEGIN)(at))
            });
        },
    );
    // Without any event of the tier, somebody knows within two minutes.
    gone.at = BEGIN + 2;
    vec![
        fault(
            "the oldest task waits for 20 s",
            END,
            &[["TierlineOldestWaitOverSlo", "ticket", "urgent", "front"]],
            |day| {
                day.say("tierline_oldest_wait_seconds", "urgent", |at| {
                    20.0 * since(BEGIN)(at)
                });
            },
        ),
        fault(
            "what waits takes five minutes",
            END,
            &[["TierlineBacklogOverSlo", "ticket", "urgent", "front"]],
            |day| day.say("tierline_waiting", "urgent", |at| 600.0 * since(BEGIN)(at)),
        ),
        fault("no handler ends", END, &[NOTHING_STARTS], |day| {
            day.stop("urgent", BEGIN);
        }),
        gone,
        fault(
            "all workers of bulk are gone",
            END,
            &[["TierlineNoConsumers", "ticket", "bulk", "back"]],
            |day| {
                day.stop("bulk", BEGIN);
                day.say("tierline_consumers", "bulk", |at| {
                    16.0 * (1.0 - since(BEGIN)(at))
                });
            },
        ),
        fault(
            "all workers of a group with rows are gone",
            END,
            &[["TierlineNoProcesses", "page", "", "back"]],
            |day| {
                day.stop("rows", BEGIN);
                let group = [("group", "back")];
                day.app_wide("tierline_processes", &group, |at| {
                    2.0 * (1.0 - since(BEGIN)(at))
                });
            },
        ),
        fault(
            "all slots are taken",
            END,
            &[["TierlineSlotsSaturated", "ticket", "", "front"]],
            |day| {
                let labels = [("tier", "urgent"), ("group", "front")];
                day.gauge("tierline_in_progress", &labels, |at| {
                    2.0 + 6.0 * since(BEGIN)(at)
                });
                day.say("tierline_waiting", "urgent", |_| 3.0);
            },
        ),
        fault(
            "nobody takes rows of bulk",
            END,
            &[["TierlineRowsNotTaken", "ticket", "bulk", "back"]],
            |day| {
                day.say("tierline_relay_waiting", "bulk", |at| {
                    7.0 * since(BEGIN)(at)
                })
            },
        ),
        fault(
            "a pause is forgotten",
            END + 10,
            &[["TierlinePausedForLong", "ticket", "urgent", "front"]],
            |day| {
                day.stop("urgent", BEGIN);
                day.say("tierline_paused", "urgent", since(BEGIN));
                day.say("tierline_consumers", "urgent", |at| {
                    16.0 * (1.0 - since(BEGIN)(at))
                });
            },
        ),
        fault(
            "a limit lets nothing through",
            END,
            &[["TierlineLimitSaturated", "ticket", "urgent", "front"]],
            |day| {
                day.stop("urgent", BEGIN);
                day.say("tierline_limit_saturated", "urgent", since(BEGIN));
            },
        ),
    ]
}

fn failing() -> Vec<Fault> {
    let dead_letters = ["TierlineDeadLettersGrow", "ticket", "urgent", "front"];
    vec![
        fault(
            "handlers take a minute",
            END,
            &[["TierlineRunTimeRising", "ticket", "urgent", "front"]],
            |day| day.run("urgent", [50.0, 58.0, 60.0], growing(PACE)),
        ),
        fault(
            "every second run fails",
            END,
            &[["TierlineErrorRateHigh", "ticket", "urgent", "front"]],
            |day| day.outcome("urgent", "retried", growing(PACE)),
        ),
        fault("ten tasks die in an hour", END, &[dead_letters], |day| {
            day.die("urgent", growing(10.0 / 60.0));
        }),
        fault(
            "the log has ten more dead letters, of a process that is gone",
            END,
            &[dead_letters],
            |day| {
                day.in_log("urgent", |at| growing(10.0 / 50.0)(at));
            },
        ),
        fault(
            "a tenth of the tasks dies",
            END,
            &[
                dead_letters,
                ["TierlineDeadLettersSurge", "page", "urgent", "front"],
            ],
            |day| day.die("urgent", growing(PACE * 0.2)),
        ),
        fault(
            "no process leads the schedules",
            END,
            &[["TierlineNoScheduleLeader", "page", "", ""]],
            |day| day.app_wide("tierline_schedule_leader", &[], |at| 1.0 - since(BEGIN)(at)),
        ),
        fault(
            "a run is missed",
            END,
            &[["TierlineScheduleMissed", "ticket", "", ""]],
            |day| {
                let schedule = [("schedule", "nightly")];
                day.count("tierline_schedule_missed_total", &schedule, |at| {
                    f64::from(u8::from(at >= 150.0))
                });
            },
        ),
    ]
}

/// Prometheus does not see the app, or a part of it.
fn blind() -> Vec<Fault> {
    let mut nothing = fault(
        "nothing is scraped",
        END,
        &[["TierlineMetricsMissing", "page", "", ""]],
        |day| {
            day.end("tierline_", BEGIN);
            day.end("up", BEGIN);
        },
    );
    nothing.at = END - 10;
    vec![
        nothing,
        fault(
            "nobody exports the stats",
            END,
            &[["TierlineStatsMissing", "page", "", ""]],
            |day| day.end("tierline_waiting", BEGIN),
        ),
        fault(
            "two workers do not answer",
            END,
            &[["TierlineTargetsDown", "ticket", "", ""]],
            |day| day.cut_off(BEGIN),
        ),
        fault(
            "the broker does not answer questions",
            END,
            &[["TierlineStatsIncomplete", "ticket", "", ""]],
            |day| day.app_wide("tierline_stats_problems", &[], |at| 2.0 * since(BEGIN)(at)),
        ),
    ]
}
