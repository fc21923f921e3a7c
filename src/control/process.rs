//! The processes of an app, as their heartbeats tell.

use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};
use sqlx::Row;
use sqlx::postgres::PgRow;

use crate::postgres::{PgConnection, Time};
use crate::topology::Topology;

/// After how long without a heartbeat a process is taken for dead, if its shortest lease is not shorter.
const LONGEST_SILENCE: Duration = Duration::from_secs(30);

/// After how long without a heartbeat a process whose shortest lease this is counts as dead, whatever its other leases are.
/// What it holds belongs to it until the lease of its tier is over. A process of an older release sends heartbeats by
/// its leases alone.
pub(crate) fn longest_silence(shortest_lease: Duration, is_older: bool) -> Duration {
    match is_older {
        true => shortest_lease,
        false => shortest_lease.min(LONGEST_SILENCE),
    }
}

/// A worker or a relay of the app that has its database.
///
/// A program that runs two workers is listed twice. A process that ends leaves the list at once. One that died is silent
/// after its shortest lease, and after half a minute at the latest. It leaves the list a short time after that, or as soon as another one
/// has taken over what it held.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Process {
    /// Its number, which is never used again.
    pub id: i64,
    /// Host and process id, such as `web-1:4711`.
    pub name: String,
    /// The version of the program, as it says.
    pub version: String,
    /// The groups that it serves. A relay serves none. A process of an older release does not say; these are the groups
    /// that have its tiers in this map.
    pub groups: Vec<ProcessGroup>,
    /// The tasks that it has handlers for. `None`: it is of an older release, which does not say.
    pub tasks: Option<Vec<String>>,
    /// Whether it is a relay, which runs no tasks.
    pub is_relay: bool,
    /// When it was first known.
    #[serde(serialize_with = "crate::postgres::time::serialize")]
    pub started_at: SystemTime,
    /// Its last heartbeat, by the clock of the database.
    #[serde(serialize_with = "crate::postgres::time::serialize")]
    pub last_heartbeat: SystemTime,
    /// Whether that is no longer ago than its shortest lease, and than half a minute.
    pub is_alive: bool,
    /// How long its handlers may run, in the order of `tasks`.
    #[serde(skip)]
    timeouts: Vec<Duration>,
}

/// A group that a process serves.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ProcessGroup {
    /// Its name.
    pub name: String,
    /// How many tasks the process runs at once in it.
    pub slots: u16,
    /// Its tiers, in their order.
    pub tiers: Vec<String>,
}

impl Process {
    /// Whether it takes tasks of this tier.
    pub fn serves(&self, tier: &str) -> bool {
        let mut tiers = self.groups.iter().flat_map(|group| &group.tiers);
        tiers.any(|it| it == tier)
    }

    /// Whether it has a handler for this task. A process that does not say is taken to have one.
    pub fn has_handler(&self, task: &str) -> bool {
        let mut tasks = self.tasks.iter().flatten();
        !self.is_relay && (self.tasks.is_none() || tasks.any(|it| it == task))
    }

    /// Whether it is of a release that knows nothing of changes at run time.
    pub(super) fn is_older(&self) -> bool {
        self.tasks.is_none()
    }

    /// How long its handler for this task may run, if it says so.
    pub(super) fn timeout(&self, task: &str) -> Option<Duration> {
        let tasks = self.tasks.iter().flatten().zip(&self.timeouts);
        tasks
            .filter(|(name, _)| *name == task)
            .map(|(_, timeout)| *timeout)
            .next()
    }
}

/// All processes of an app, the oldest first.
pub(crate) async fn processes(
    connection: &mut PgConnection<'_>,
    topology: &Topology,
) -> Result<Vec<Process>, sqlx::Error> {
    let rows = sqlx::query(
        "SELECT id, name, version, groups::text, tasks, timeouts, is_relay, started_at, heartbeat_at, \
            ARRAY(SELECT jsonb_object_keys(leases)) AS tiers, \
            (SELECT min(seconds::float8) FROM jsonb_each_text(leases) AS lease (tier, seconds)) AS shortest_lease, \
            extract(epoch FROM clock_timestamp() - heartbeat_at)::float8 AS silent \
         FROM tierline.workers WHERE app = $1 ORDER BY id",
    )
    .bind(topology.app())
    .fetch_all(connection)
    .await?;
    rows.iter().map(|row| read(row, topology)).collect()
}

fn read(row: &PgRow, topology: &Topology) -> Result<Process, sqlx::Error> {
    let is_relay = row.try_get("is_relay")?;
    let groups: Option<&str> = row.try_get("groups")?;
    let is_older = groups.is_none();
    let groups = groups.and_then(|groups| serde_json::from_str(groups).ok());
    let groups = match groups {
        Some(groups) => groups,
        None if is_relay => Vec::new(),
        None => groups_of(topology, &row.try_get::<Vec<String>, _>("tiers")?),
    };
    let (Time(started_at), Time(last_heartbeat)) =
        (row.try_get("started_at")?, row.try_get("heartbeat_at")?);
    let lease = row.try_get::<Option<f64>, _>("shortest_lease")?;
    let lease = Duration::try_from_secs_f64(lease.unwrap_or_default()).unwrap_or_default();
    let silent: f64 = row.try_get("silent")?;
    let timeouts: Option<Vec<f64>> = row.try_get("timeouts")?;
    let timeouts = timeouts.into_iter().flatten();
    let timeouts = timeouts.map(|it| Duration::try_from_secs_f64(it).unwrap_or(Duration::MAX));
    Ok(Process {
        id: row.try_get("id")?,
        name: row.try_get("name")?,
        version: row.try_get("version")?,
        groups,
        tasks: row.try_get("tasks")?,
        is_relay,
        started_at,
        last_heartbeat,
        timeouts: timeouts.collect(),
        is_alive: silent <= longest_silence(lease, is_older).as_secs_f64(),
    })
}

/// The groups of the map that have one of these tiers.
fn groups_of(topology: &Topology, tiers: &[String]) -> Vec<ProcessGroup> {
    let groups = topology.groups().iter();
    let groups = groups.filter(|group| group.tiers.iter().any(|tier| tiers.contains(tier)));
    let groups = groups.map(|group| ProcessGroup {
        name: group.name.clone(),
        slots: group.concurrency,
        tiers: group.tiers.clone(),
    });
    groups.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_lease_does_not_make_a_silent_process_alive() {
        let second = Duration::from_secs(1);
        assert_eq!(longest_silence(second * 2, false), second * 2);
        assert_eq!(longest_silence(second * 86_400, false), second * 30);
        assert_eq!(longest_silence(second * 86_400, true), second * 86_400);
    }
}
