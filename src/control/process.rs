//! The processes of an app, as their heartbeats tell.

use std::time::SystemTime;

use serde::{Deserialize, Serialize};
use sqlx::Row;
use sqlx::postgres::PgRow;

use crate::postgres::{PgConnection, Time};
use crate::topology::Topology;

/// A worker or a relay of the app that has its database.
///
/// A program that runs two workers is listed twice. A process that ends leaves the list at once; one that died leaves it
/// some time after its longest lease, as soon as another one has taken over what it held.
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
    pub last_sign: SystemTime,
    /// Whether that is no longer ago than the longest of its leases.
    pub is_alive: bool,
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
}

/// All processes of an app, the oldest first.
pub(super) async fn processes(
    connection: &mut PgConnection<'_>,
    topology: &Topology,
) -> Result<Vec<Process>, sqlx::Error> {
    let rows = sqlx::query(
        "SELECT id, name, version, groups::text, tasks, is_relay, started_at, heartbeat_at, \
            ARRAY(SELECT jsonb_object_keys(leases)) AS tiers, \
            coalesce(heartbeat_at >= clock_timestamp() - make_interval(secs => \
                (SELECT max(seconds::float8) FROM jsonb_each_text(leases) AS lease (tier, seconds))), false) AS is_alive \
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
    let groups = groups.and_then(|groups| serde_json::from_str(groups).ok());
    let groups = match groups {
        Some(groups) => groups,
        None if is_relay => Vec::new(),
        None => groups_of(topology, &row.try_get::<Vec<String>, _>("tiers")?),
    };
    let (Time(started_at), Time(last_sign)) =
        (row.try_get("started_at")?, row.try_get("heartbeat_at")?);
    Ok(Process {
        id: row.try_get("id")?,
        name: row.try_get("name")?,
        version: row.try_get("version")?,
        groups,
        tasks: row.try_get("tasks")?,
        is_relay,
        started_at,
        last_sign,
        is_alive: row.try_get("is_alive")?,
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
