//! What statistics consist of.

use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};

use super::Count;
use super::json::{seconds, some_seconds, some_time, time};

/// How an app is doing. See [the module](super).
///
/// As JSON, durations are numbers of seconds. What `GET /stats` and `tierline stats --json` give can be read back as this.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Stats {
    /// The app of the map.
    pub app: String,
    /// When they were asked for, by the clock of this machine.
    #[serde(with = "time")]
    pub at: SystemTime,
    /// How long the servers took to answer.
    #[serde(rename = "took_seconds", with = "seconds")]
    pub took: Duration,
    /// The tiers of the map, in its order.
    pub tiers: Vec<TierStats>,
    /// The groups of the map, in its order.
    pub groups: Vec<GroupStats>,
    /// The names of the tasks that are paused. `None`: not known.
    pub paused_tasks: Option<Vec<String>>,
    /// How many relays live. `None`: not known.
    pub relays: Option<u32>,
    /// The schedules. `None`: the map has none, or they are not known.
    pub schedules: Option<ScheduleStats>,
    /// What could not be asked, and why.
    pub problems: Vec<StatsProblem>,
}

/// A question that got no answer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct StatsProblem {
    /// The server that was asked.
    pub server: StatsServer,
    /// What was tried, and what happened.
    pub problem: String,
}

/// A server that is asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum StatsServer {
    /// RabbitMQ, over AMQP.
    Broker,
    /// RabbitMQ's management API.
    Management,
    /// Postgres.
    Database,
}

/// A tier.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct TierStats {
    /// Its name.
    pub tier: String,
    /// The group that serves it.
    pub group: String,
    /// Where its tasks wait.
    pub home: TierHome,
    /// How many tasks wait that are due: messages in its queue, and rows. Parked ones are not among them, unless they wait for
    /// the turn of their key (`fair`). `None`: its home did not say.
    pub waiting: Option<Count>,
    /// Of [`waiting`](Self::waiting), the messages in its queue, and in the queue that it had before it moved. `None`: it has
    /// none, or the broker did not say.
    pub messages: Option<u64>,
    /// Of [`waiting`](Self::waiting), the rows. `None`: the database did not say.
    pub rows: Option<Count>,
    /// The rows by their priority, the highest first. `None` where a queue has the tasks, or the database did not say.
    pub by_priority: Option<Vec<PriorityDepth>>,
    /// Rows in quarantine: tasks whose workers have died twice. They are among [`rows`](Self::rows).
    pub quarantined: Option<Count>,
    /// For how long the oldest of those that wait has waited. `None`: nothing waits, or it is not known.
    pub oldest: Option<OldestWait>,
    /// How many tasks workers hold: those that run, and those that are next. Rows: those that processes have claimed. Messages:
    /// those that are not acknowledged, by the management API; without it, at least those that run.
    pub in_flight: Option<Count>,
    /// How many handlers run, by the reports of workers that have the database. These are up to ten seconds old.
    pub running: Option<u64>,
    /// How many consumers its queue has; of a tier in Postgres, how many live processes serve it.
    pub consumers: Option<u32>,
    /// How many live processes serve it, of those that have the database.
    pub processes: Option<u32>,
    /// How many tasks come in each second, over the last five minutes: publishes without a delay, retries and snoozes.
    #[serde(rename = "in_per_second")]
    pub rate_in: Option<f64>,
    /// How many attempts end each second, over the last five minutes, and tasks that expire.
    #[serde(rename = "out_per_second")]
    pub rate_out: Option<f64>,
    /// How long half of the tasks waited at most that were started in the last five minutes. `None`: none was.
    #[serde(rename = "wait_p50_seconds", with = "some_seconds")]
    pub wait_p50: Option<Duration>,
    /// The same for 99 of 100.
    #[serde(rename = "wait_p99_seconds", with = "some_seconds")]
    pub wait_p99: Option<Duration>,
    /// How it meets its SLO. `None`: it has none.
    pub slo: Option<SloStats>,
    /// Its dead letters. `None`: the database did not say.
    pub dead: Option<DeadLetterStats>,
    /// Rows of a tier on the broker that nobody takes: neither a relay lives, nor a worker of the tier that has the database. 0
    /// where somebody does. `None`: not known.
    pub relay_waiting: Option<Count>,
    /// Rows that are due later.
    pub scheduled: Option<Count>,
    /// Messages in its delay queues: publishes with a delay, retries and snoozes. `None`: it has none, or the management API
    /// was not asked or did not say.
    pub delayed_messages: Option<u64>,
    /// Rows that are held back by a pause or a limit, or that wait for the turn of their key.
    pub parked: Option<Count>,
    /// Why it is paused, if it is.
    pub paused: Option<PauseStats>,
    /// Its limit, if it has one.
    pub limit: Option<LimitStats>,
}

/// Where the tasks of a tier wait: `queue` in the map.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum TierHome {
    /// In a classic queue.
    Classic,
    /// In a quorum queue.
    Quorum,
    /// As rows in Postgres.
    Postgres,
}

/// The rows of one priority.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct PriorityDepth {
    /// The priority.
    pub priority: u8,
    /// How many rows are ready. Where rows of higher priorities have used up the count of 10,000, only 100 are counted.
    pub rows: Count,
}

/// For how long something has waited.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct OldestWait {
    /// For how long.
    #[serde(rename = "seconds", with = "seconds")]
    pub age: Duration,
    /// Whether this is an estimate: see [the module](super).
    pub is_estimate: bool,
}

/// How a tier meets its SLO.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct SloStats {
    /// How soon a task should start.
    #[serde(rename = "start_seconds", with = "seconds")]
    pub start: Duration,
    /// Which share of the tasks should.
    pub objective: f64,
    /// Which share of the tasks did in the last hour. `None`: none was started, or it is not known.
    pub met_last_hour: Option<f64>,
    /// Which part of the error budget of the last 24 hours is left: 1 is all of it, and below 0 more tasks were late than the
    /// objective allows. `None`: none was started, or it is not known.
    pub budget_left: Option<f64>,
}

/// The dead letters of a tier.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct DeadLetterStats {
    /// Those in the log that nobody has redriven or discarded.
    pub dead: u64,
    /// Those that a redrive is publishing.
    pub redriving: u64,
    /// Those that were redriven.
    pub redriven: u64,
    /// Those that were discarded.
    pub discarded: u64,
    /// Those in the tier's dead-letter queue, which no collector has stored yet. `None`: it has none, or the broker did not
    /// say.
    pub uncollected: Option<u64>,
    /// How many came in the last five minutes. `None`: not known.
    pub last_five_minutes: Option<u64>,
    /// How many came in the last hour. `None`: not known.
    pub last_hour: Option<u64>,
}

/// A pause that is in force.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct PauseStats {
    /// Whether the tier's group is paused, and not the tier itself.
    pub of_group: bool,
    /// The operator.
    pub who: String,
    /// The operator's reason; may be empty.
    pub why: String,
    /// Since when.
    #[serde(with = "time")]
    pub since: SystemTime,
    /// When it ends by itself. `None`: it does not.
    #[serde(with = "some_time")]
    pub until: Option<SystemTime>,
}

/// A limit that is in force.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct LimitStats {
    /// Such as `100/m with bursts of 20, 4 running`.
    pub limit: String,
    /// Whether it keeps tasks from starting. `None`: not known, as of a limit of each process by itself.
    pub is_saturated: Option<bool>,
}

/// A group.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct GroupStats {
    /// Its name.
    pub group: String,
    /// How many live processes serve it, of those that have the database. A program that runs two workers counts twice.
    /// `None`: not known.
    pub processes: Option<u32>,
    /// How many slots they have together.
    pub slots: Option<u32>,
    /// How many handlers run in them.
    pub running: Option<u64>,
}

/// The schedules of an app.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ScheduleStats {
    /// How many there are.
    pub count: u32,
    /// How many of them are paused.
    pub paused: u32,
    /// Whether a process leads, and so publishes what is due.
    pub has_leader: bool,
    /// When the next one is due.
    #[serde(with = "some_time")]
    pub next_due: Option<SystemTime>,
}
