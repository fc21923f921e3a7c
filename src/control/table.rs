//! The statements about controls.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use serde_json::Value;
use sqlx::Row;
use sqlx::postgres::PgRow;
use tokio::time::Instant;

use super::entry::{ControlEntry, Setting, Target};
use super::snapshot::{Override, PastPause, PauseTarget, Snapshot};
use crate::postgres::{PgConnection, Time};
use crate::topology::Topology;

/// How long a pause is remembered that has ended, for the time in which tasks waited, and an override, for the rows that it has
/// moved. The audit log has all changes.
const REMEMBERED: Duration = Duration::from_secs(32 * 86_400);

/// Of how many overrides at most the tiers are looked up, the latest first.
const MOST_OVERRIDES: i64 = 10_000;

const DAY: Duration = Duration::from_secs(86_400);

/// How many pauses that have ended are remembered at most, the latest first.
const MOST_PAUSES: i64 = 500;
/// How often pauses that have ended are read although no pause has begun or ended since.
const READ_PAUSES_EVERY: Duration = Duration::from_secs(60);

/// What the database has said.
pub(super) struct Loaded {
    pub(super) snapshot: Snapshot,
    /// When the first of the changes ends by itself, if that is soon.
    pub(super) next_end: Option<Instant>,
}

/// What was read before and need not be read each time.
#[derive(Default)]
pub(super) struct LastLoaded {
    is_migrated: bool,
    /// The numbers of the pauses in force.
    pauses: Vec<i64>,
    past_pauses: Vec<PastPause>,
    past_read_at: Option<Instant>,
}

impl LastLoaded {
    /// The tables may have gone.
    pub(super) fn failed(&mut self) {
        self.is_migrated = false;
    }
}

/// What is in force, by the clock of the server, and the pauses that have ended a short time ago.
pub(super) async fn load(
    connection: &mut PgConnection<'_>,
    topology: &Topology,
    last: &mut LastLoaded,
) -> Result<Loaded, sqlx::Error> {
    let mut loaded = Loaded {
        snapshot: Snapshot::of(topology),
        next_end: None,
    };
    // Many apps have a database that they have not migrated yet: each poll would be an error in its log.
    if !last.is_migrated {
        last.is_migrated = is_migrated(connection).await?;
    }
    if !last.is_migrated {
        return Ok(loaded);
    }
    let in_force = read_in_force(connection, topology.app()).await?;
    let now = Instant::now();
    let is_pause = |stored: &&Stored| stored.entry.setting == Setting::Pause;
    let pauses = in_force.iter().filter(is_pause).map(|stored| stored.id);
    let pauses: Vec<i64> = pauses.collect();
    let is_read = |at: Instant| now.saturating_duration_since(at) < READ_PAUSES_EVERY;
    if pauses != last.pauses || !last.past_read_at.is_some_and(is_read) {
        last.past_pauses = read_past_pauses(connection, topology).await?;
        (last.pauses, last.past_read_at) = (pauses, Some(now));
    }
    for stored in in_force {
        let end = stored.rest.map(|rest| rest.max(0.0));
        let end = end.and_then(|rest| now.checked_add(Duration::try_from_secs_f64(rest).ok()?));
        loaded.next_end = [loaded.next_end, end].into_iter().flatten().min();
        apply(&mut loaded.snapshot, topology, stored.entry);
    }
    loaded.snapshot.past_pauses = last.past_pauses.clone();
    loaded.snapshot.sort();
    Ok(loaded)
}

/// Whether the table is there.
pub(super) async fn is_migrated(connection: &mut PgConnection<'_>) -> Result<bool, sqlx::Error> {
    sqlx::query_scalar("SELECT to_regclass('tierline.controls') IS NOT NULL")
        .fetch_one(connection)
        .await
}

fn apply(snapshot: &mut Snapshot, topology: &Topology, entry: ControlEntry) {
    let ControlEntry {
        target, setting, ..
    } = entry;
    match (setting, target) {
        (Setting::Pause, Target::Tier(tier)) => drop(snapshot.paused_tiers.insert(tier)),
        (Setting::Pause, Target::Group(group)) => drop(snapshot.paused_groups.insert(group)),
        (Setting::Pause, Target::Task(task)) => drop(snapshot.paused_tasks.insert(task)),
        (Setting::Limit(limit), Target::Tier(tier)) => {
            snapshot.limit_tier(tier, limit);
        }
        (Setting::Limit(limit), Target::Task(task)) => {
            snapshot.limit_task(topology, task, limit);
        }
        (Setting::Override { tier, priority }, Target::Task(task)) => {
            let to = Arc::new(Override { tier, priority });
            snapshot.task_overrides.insert(task, to);
        }
        (Setting::Override { tier, priority }, Target::Prefix(prefix)) => {
            let to = Arc::new(Override { tier, priority });
            snapshot.prefix_overrides.push((prefix, to));
        }
        _ => {}
    }
}

/// What these changes, which are in force, mean together.
pub(super) fn snapshot_of(topology: &Topology, entries: &[ControlEntry]) -> Snapshot {
    let mut snapshot = Snapshot::default();
    for entry in entries {
        apply(&mut snapshot, topology, entry.clone());
    }
    snapshot.sort();
    snapshot
}

/// A change that is in force.
struct Stored {
    id: i64,
    entry: ControlEntry,
    /// In how many seconds it ends by itself.
    rest: Option<f64>,
}

/// The changes in force, in the order in which they were made.
async fn read_in_force(
    connection: &mut PgConnection<'_>,
    app: &str,
) -> Result<Vec<Stored>, sqlx::Error> {
    let rows = sqlx::query(
        "SELECT id, kind, target_kind, target, setting::text, who, why, since, until, \
            extract(epoch FROM until - statement_timestamp())::float8 AS rest \
         FROM tierline.controls WHERE app = $1 AND (until IS NULL OR until > statement_timestamp()) ORDER BY id",
    )
    .bind(app)
    .fetch_all(connection)
    .await?;
    let read = |row: &PgRow| {
        let entry = read(row)?;
        let (id, rest) = (row.try_get("id")?, row.try_get("rest")?);
        Ok(entry.map(|entry| Stored { id, entry, rest }))
    };
    rows.iter()
        .filter_map(|row| read(row).transpose())
        .collect()
}

/// The changes in force.
pub(crate) async fn in_force(
    connection: &mut PgConnection<'_>,
    app: &str,
) -> Result<Vec<ControlEntry>, sqlx::Error> {
    let in_force = read_in_force(connection, app).await?.into_iter();
    Ok(in_force.map(|it| it.entry).collect())
}

/// The pauses that have ended within the longest time for which tasks wait by the map.
async fn read_past_pauses(
    connection: &mut PgConnection<'_>,
    topology: &Topology,
) -> Result<Vec<PastPause>, sqlx::Error> {
    let waits = topology.tiers().iter().flat_map(|tier| {
        let promotion = tier.promote.as_ref().map(|rule| rule.after);
        // A start within the SLO of a tier is found out also after several pauses.
        let slo = tier.slo.map(|slo| slo.max(DAY));
        tier.ttl.into_iter().chain(promotion).chain(slo)
    });
    let longest = waits.max().unwrap_or_default().min(REMEMBERED);
    let found: Vec<(String, String, Time, Time)> = sqlx::query_as(
        "SELECT target_kind, target, since, until FROM tierline.controls \
         WHERE app = $1 AND kind = 'pause' AND until <= statement_timestamp() \
            AND until > statement_timestamp() - make_interval(secs => $2) ORDER BY until DESC LIMIT $3",
    )
    .bind(topology.app())
    .bind(longest.as_secs_f64())
    .bind(MOST_PAUSES)
    .fetch_all(connection)
    .await?;
    let past = found
        .into_iter()
        .filter_map(|(kind, name, Time(since), Time(until))| {
            let target = match Target::new(&kind, name)? {
                Target::Tier(tier) => PauseTarget::Tier(tier),
                Target::Group(group) => PauseTarget::Group(group),
                Target::Task(task) => PauseTarget::Task(task),
                Target::Prefix(_) => return None,
            };
            Some(PastPause {
                target,
                since,
                until,
            })
        });
    Ok(past.collect())
}

/// The tiers to which overrides lead that are in force or were: rows of their tasks may wait there.
pub(super) async fn tiers_of_overrides(
    connection: &mut PgConnection<'_>,
    app: &str,
) -> Result<Vec<(Target, String)>, sqlx::Error> {
    let found: Vec<(String, String, String)> = sqlx::query_as(
        "SELECT target_kind, target, tier FROM ( \
            SELECT target_kind, target, setting ->> 'tier' AS tier, max(id) AS latest FROM tierline.controls \
            WHERE app = $1 AND kind = 'override' GROUP BY 1, 2, 3 \
         ) AS found WHERE tier IS NOT NULL ORDER BY latest DESC LIMIT $2",
    )
    .bind(app)
    .bind(MOST_OVERRIDES)
    .fetch_all(connection)
    .await?;
    let found = found.into_iter();
    let found = found.filter_map(|(kind, name, tier)| Some((Target::new(&kind, name)?, tier)));
    Ok(found.collect())
}

/// `None`: a newer release has written what this one does not know.
fn read(row: &PgRow) -> Result<Option<ControlEntry>, sqlx::Error> {
    let kind: &str = row.try_get("kind")?;
    let setting: &str = row.try_get("setting")?;
    let setting: Value = serde_json::from_str(setting).unwrap_or_default();
    let target = Target::new(row.try_get("target_kind")?, row.try_get("target")?);
    let (Some(setting), Some(target)) = (Setting::from_json(kind, &setting), target) else {
        return Ok(None);
    };
    let Time(since) = row.try_get("since")?;
    let until: Option<Time> = row.try_get("until")?;
    Ok(Some(ControlEntry {
        target,
        setting,
        who: row.try_get("who")?,
        why: row.try_get("why")?,
        since,
        until: until.map(|Time(at)| at),
    }))
}

/// Locks the controls of an app until the transaction ends: of two operators who change the same, the second sees what
/// the first has done.
pub(super) async fn lock(connection: &mut PgConnection<'_>, app: &str) -> Result<(), sqlx::Error> {
    sqlx::query("SELECT pg_advisory_xact_lock(hashtextextended('tierline.controls ' || $1, 0))")
        .bind(app)
        .execute(connection)
        .await
        .map(drop)
}

/// Ends the change of this kind that is in force. Returns it.
pub(super) async fn end(
    connection: &mut PgConnection<'_>,
    app: &str,
    kind: &str,
    target: &Target,
) -> Result<Option<ControlEntry>, sqlx::Error> {
    sqlx::query(
        "DELETE FROM tierline.controls WHERE app = $1 AND until < clock_timestamp() - \
            CASE WHEN kind = 'limit' THEN interval '0' ELSE make_interval(secs => $2) END",
    )
    .bind(app)
    .bind(REMEMBERED.as_secs_f64())
    .execute(&mut *connection)
    .await?;
    let row = sqlx::query(
        "UPDATE tierline.controls AS changed SET until = clock_timestamp() FROM tierline.controls AS before \
         WHERE changed.id = before.id AND before.app = $1 AND before.kind = $2 AND before.target_kind = $3 \
            AND before.target = $4 AND (before.until IS NULL OR before.until > clock_timestamp()) \
         RETURNING before.id, before.kind, before.target_kind, before.target, before.setting::text AS setting, before.who, \
            before.why, before.since, before.until",
    )
    .bind(app)
    .bind(kind)
    .bind(target.kind())
    .bind(target.name())
    .fetch_optional(connection)
    .await?;
    match row {
        Some(row) => read(&row),
        None => Ok(None),
    }
}

/// Who makes a change, why, and for how long; `None`: until somebody ends it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Reason<'a> {
    pub(super) who: &'a str,
    pub(super) why: &'a str,
    pub(super) length: Option<Duration>,
}

/// Puts a change in force, and returns its number. `stored` is its setting, with what else is to be known of it in the database.
pub(super) async fn begin(
    connection: &mut PgConnection<'_>,
    app: &str,
    target: &Target,
    setting: &Setting,
    stored: &Value,
    reason: Reason<'_>,
) -> Result<(i64, ControlEntry), sqlx::Error> {
    let Reason { who, why, length } = reason;
    let row = sqlx::query(
        "INSERT INTO tierline.controls (app, kind, target_kind, target, setting, who, why, until) \
         VALUES ($1, $2, $3, $4, $5::jsonb, $6, $7, clock_timestamp() + make_interval(secs => $8)) RETURNING id, since, until",
    )
    .bind(app)
    .bind(setting.kind())
    .bind(target.kind())
    .bind(target.name())
    .bind(stored.to_string())
    .bind(who)
    .bind(why)
    .bind(length.map(|it| it.as_secs_f64()))
    .fetch_one(connection)
    .await?;
    let Time(since) = row.try_get("since")?;
    let until: Option<Time> = row.try_get("until")?;
    let until: Option<SystemTime> = until.map(|Time(at)| at);
    let entry = ControlEntry {
        target: target.clone(),
        setting: setting.clone(),
        who: who.to_owned(),
        why: why.to_owned(),
        since,
        until,
    };
    Ok((row.try_get("id")?, entry))
}
