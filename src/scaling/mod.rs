//! How many slots each worker group wants, for autoscalers.
//!
//! [`Tierline::scaling`](crate::Tierline::scaling) gives a [`GroupScaling`] for each group of the map. An autoscaler keeps as
//! many processes as [`processes_wanted`](GroupScaling::processes_wanted) says, within limits of its own.
//!
//! # The formula
//! A group wants the slots of its tiers, added up and rounded up. A tier wants, with `run` for the mean run time of its
//! handlers and `slo` for how soon its tasks should start:
//!
//! - for what comes in, by Little's law: `arrivals per second × run / 0.8`;
//! - for what waits, so that all of it starts within the SLO: `backlog × run / slo / 0.8`, and no more than one slot for
//!   each task, since a slot that runs a task for longer than the SLO starts no second one in time.
//!
//! 0.8 is the share of time in which slots are busy: with more, waits grow fast. Arrivals are what processes of the app have
//! published to the tier without a delay in the last ten minutes, and retries and snoozes, because each of them is one more
//! run. Run times are those of the last hour. Both are [rollups](crate::rollup).
//!
//! - A tier without `slo` is taken to have one of ten minutes.
//! - A tier whose run times are not known, because nothing ran in the last hour, is taken to run tasks for a second each, and the
//!   figure is an [estimate](GroupScaling::is_estimate).
//! - The backlog is what waits in the tier's queue, and its rows that are ready or parked, of which at most 10,000 are counted.
//!   A parked task with a limit counts once for each key, or once if it has no keys. The backlog does not include rows of paused
//!   tasks, delayed tasks, and what workers have prefetched. Where the broker did not answer in time, only the rows count, and the
//!   figure is an estimate.
//! - A delayed publish is not an arrival, and neither is a publish of another program or of the SQL function `tierline.publish`.
//!   They count as backlog when they wait: without arrivals, slots settle where tasks wait for about as long as the SLO.
//! - A tier with a [limit](crate::topology::Limit) for all processes wants no more slots than `running`, and none for what would
//!   exceed its rate. The rates of single tasks bound their arrivals.
//! - A paused tier wants none. A paused task has no arrivals; its messages in a queue count until a worker has parked them.
//!
//! With arrivals alone this is a steady figure. A burst raises it by its backlog, and it falls again as the backlog is worked
//! off.

mod formula;
mod read;

use std::time::Duration;

use serde::{Serialize, Serializer};

pub(crate) use read::{Sources, scaling};

/// How many slots a worker group wants, and what this was computed from. See [the module](self) for the formula.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct GroupScaling {
    /// The group.
    pub group: String,
    /// How many slots it wants to meet the SLO of its tiers.
    pub slots_wanted: u32,
    /// How many slots its live processes have.
    pub slots: u32,
    /// How many processes provide the wanted slots, at the `concurrency` of the map.
    pub processes_wanted: u32,
    /// How many live processes serve it. A program that runs two workers counts twice.
    pub processes: u32,
    /// Whether something was not known, and assumed, for a tier that is not idle.
    pub is_estimate: bool,
    /// Its tiers.
    pub tiers: Vec<TierScaling>,
}

/// What is known of a tier.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct TierScaling {
    /// The tier.
    pub tier: String,
    /// How many slots it wants. The group's figure is the sum of these, rounded up.
    pub slots_wanted: f64,
    /// How many tasks wait that may start now.
    pub backlog: u64,
    /// Whether there may be more: the broker did not answer in time, or there are more rows than are counted.
    pub is_backlog_partial: bool,
    /// How many tasks come in each second.
    pub arrivals_per_second: f64,
    /// How long its handlers run on average. `None`: nothing ran in the last hour.
    #[serde(rename = "mean_run_seconds", serialize_with = "seconds_of_some")]
    pub mean_run: Option<Duration>,
    /// How soon its tasks should start: the `slo` of the map, or ten minutes.
    #[serde(rename = "slo_seconds", serialize_with = "seconds")]
    pub slo: Duration,
    /// Whether it is paused, and wants no slots.
    pub is_paused: bool,
    /// Whether a limit keeps it from wanting more.
    pub is_limited: bool,
}

fn seconds<S: Serializer>(duration: &Duration, out: S) -> Result<S::Ok, S::Error> {
    out.serialize_f64(duration.as_secs_f64())
}

fn seconds_of_some<S: Serializer>(duration: &Option<Duration>, out: S) -> Result<S::Ok, S::Error> {
    duration.map(|it| it.as_secs_f64()).serialize(out)
}
