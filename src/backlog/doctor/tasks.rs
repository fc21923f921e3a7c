//! Tasks that nobody takes.

use std::collections::BTreeSet;

use sqlx::Row;

use super::{finding, shown};
use crate::amqp::{Finding, Severity};
use crate::postgres::PgConnection;
use crate::topology::{Formerly, Topology};

/// How many tasks of a tier are counted, in each of its tables.
const COUNTED: i64 = 10_000;
/// After how many leases the tasks of a dead worker should have been taken over.
const TAKEN_OVER_AFTER: f64 = 2.0;

/// `known` are the tiers of the app that have a number.
pub(super) async fn check(
    connection: &mut PgConnection<'_>,
    topology: &Topology,
    known: &[(i32, String)],
) -> Result<Vec<Finding>, sqlx::Error> {
    let served = served_tiers(connection, topology.app()).await?;
    let runs = runs(connection, topology.app()).await?;
    let mut findings = Vec::new();
    for tier in topology.postgres_tiers() {
        if known.iter().all(|(_, name)| *name != tier.name) {
            findings.push(finding(
                Severity::Note,
                format!("tier {}", tier.name),
                "has no number in tierline.backlogs yet".to_owned(),
                "apply the file; the first publish or worker does it too",
            ));
        }
    }
    for (number, name) in known {
        let is_served = served.contains(name);
        let held = runs.iter().filter(|run| run.tier == *name);
        let held = held.map(|run| run.tasks).sum();
        let tier = topology.tier(name);
        let is_moving = tier.is_some_and(|tier| tier.formerly == Some(Formerly::Postgres));
        findings.extend(match tier.map(|tier| tier.home.is_on_broker()) {
            Some(false) if is_served => None,
            Some(false) => {
                let waiting = waiting(connection, *number).await?;
                Some(unserved(name, &waiting))
            }
            // Every tier may have rows, and somebody takes them.
            Some(true) if is_served && !is_moving => None,
            Some(true) if !is_served => {
                let waiting = waiting(connection, *number).await?;
                unserved_rows(name, &waiting)
            }
            on_broker => {
                let waiting = waiting(connection, *number).await?;
                left_over(name, on_broker.is_some(), is_served, &waiting, held)
            }
        });
    }
    findings.extend(runs.iter().filter_map(|run| run.finding(&served)));
    let keeps = |tier: &str| {
        let tier = topology.tier(tier);
        tier.is_some_and(|tier| tier.home.keep().is_some())
    };
    let others = known.iter().filter(|(_, tier)| !keeps(tier));
    findings.extend(forgotten_history(connection, others).await?);
    Ok(findings)
}

/// Finished tasks of tiers that keep none any more: no worker removes them.
async fn forgotten_history(
    connection: &mut PgConnection<'_>,
    tiers: impl Iterator<Item = &(i32, String)> + Clone,
) -> Result<Vec<Finding>, sqlx::Error> {
    let has_table: bool = sqlx::query_scalar("SELECT to_regclass('tierline.finished') IS NOT NULL")
        .fetch_one(&mut *connection)
        .await?;
    if !has_table {
        return Ok(Vec::new());
    }
    let numbers: Vec<i32> = tiers.clone().map(|(number, _)| *number).collect();
    let found: Vec<i32> = sqlx::query_scalar(
        "SELECT number FROM unnest($1::int[]) AS number \
         WHERE EXISTS (SELECT FROM tierline.finished WHERE backlog = number)",
    )
    .bind(numbers)
    .fetch_all(connection)
    .await?;
    let found = tiers.filter(|(number, _)| found.contains(number));
    let findings = found.map(|(number, tier)| {
        finding(
            Severity::Note,
            format!("tier {tier}"),
            "has no keep in the file, and finished tasks of it are still kept".to_owned(),
            format!(
                "if nobody needs them, run DELETE FROM tierline.finished WHERE backlog = {number}"
            ),
        )
    });
    Ok(findings.collect())
}

fn unserved(tier: &str, waiting: &Waiting) -> Finding {
    let (severity, and) = match (waiting.count(), waiting.oldest) {
        (0, _) => (Severity::Note, String::new()),
        (count, oldest) => {
            let oldest = shown(oldest.unwrap_or_default());
            let count = tasks(count, "waits", "wait");
            let and = format!(", and {count}, the oldest for {oldest}");
            (Severity::Warning, and)
        }
    };
    let what = format!("nobody works on it{and}");
    let help = "start workers of its group; until then its tasks do not expire either";
    finding(severity, format!("tier {tier}"), what, help)
}

/// Rows of a tier on the broker that neither a worker nor a relay takes.
fn unserved_rows(tier: &str, waiting: &Waiting) -> Option<Finding> {
    let help =
        "start a relay with this database (Tierline::relay), or workers of its group with it";
    let object = format!("tier {tier}");
    if let (count @ 1.., oldest) = (waiting.count(), waiting.oldest) {
        let count = tasks(count, "waits", "wait");
        let oldest = shown(oldest.unwrap_or_default());
        let what = format!(
            "is on the broker, and {count} in Postgres, the oldest for {oldest}; nobody takes them"
        );
        return Some(finding(Severity::Warning, object, what, help));
    }
    if waiting.scheduled == 0 {
        return None;
    }
    let count = tasks(waiting.scheduled, "is", "are");
    let what =
        format!("is on the broker, and {count} scheduled in Postgres; nobody would take them now");
    Some(finding(Severity::Note, object, what, help))
}

/// Tasks in the tables of a tier that the file does not have there.
fn left_over(
    tier: &str,
    is_on_broker: bool,
    is_served: bool,
    waiting: &Waiting,
    held: i64,
) -> Option<Finding> {
    let count = waiting.ready + waiting.parked + waiting.scheduled + held;
    if count == 0 {
        return None;
    }
    let what = match is_on_broker {
        true => "is on the broker now",
        false => "is no longer in the file",
    };
    let count = tasks(count, "is", "are");
    let what = format!("{what}, and {count} still in Postgres");
    let object = format!("tier {tier}");
    if is_served {
        let help = "workers take them: wait until they have, before the last of these workers ends";
        return Some(finding(Severity::Note, object, what, help));
    }
    let help = "give the tier queue = \"postgres\" in the file until workers have taken them, or list and cancel them \
                with that file (tierline tasks)";
    Some(finding(Severity::Warning, object, what, help))
}

/// "1 task waits", "3 tasks wait", ">= 10000 tasks wait".
fn tasks(count: i64, one: &str, many: &str) -> String {
    match count {
        1 => format!("1 task {one}"),
        count if count > COUNTED => format!(">= {COUNTED} tasks {many}"),
        count => format!("{count} tasks {many}"),
    }
}

/// The tiers that a live worker or relay serves.
async fn served_tiers(
    connection: &mut PgConnection<'_>,
    app: &str,
) -> Result<BTreeSet<String>, sqlx::Error> {
    let served: Vec<String> = sqlx::query_scalar(
        "SELECT DISTINCT lease.tier \
         FROM tierline.workers CROSS JOIN LATERAL jsonb_each_text(leases) AS lease (tier, seconds) \
         WHERE app = $1 AND heartbeat_at >= clock_timestamp() - make_interval(secs => lease.seconds::float8)",
    )
    .bind(app)
    .fetch_all(connection)
    .await?;
    Ok(served.into_iter().collect())
}

/// The tasks of a tier that wait. Each count ends one above what is counted.
struct Waiting {
    ready: i64,
    /// Those that a pause or a limit holds back.
    parked: i64,
    /// All that are scheduled, and those of them that are due.
    scheduled: i64,
    due: i64,
    /// For how many seconds the oldest has been due.
    oldest: Option<f64>,
}

impl Waiting {
    /// How many are due.
    fn count(&self) -> i64 {
        self.ready + self.parked + self.due
    }
}

async fn waiting(connection: &mut PgConnection<'_>, backlog: i32) -> Result<Waiting, sqlx::Error> {
    let row = sqlx::query(
        "SELECT (SELECT count(*) FROM ( \
                SELECT FROM tierline.ready WHERE backlog = $1 ORDER BY rank, due_at, id LIMIT $2 \
            ) AS counted) AS ready, \
            (SELECT count(*) FROM ( \
                SELECT FROM tierline.parked WHERE backlog = $1 ORDER BY rank, due_at, id LIMIT $2 \
            ) AS counted) AS parked, \
            (SELECT count(*) FROM ( \
                SELECT FROM tierline.scheduled WHERE backlog = $1 ORDER BY due_at, id LIMIT $2 \
            ) AS counted) AS scheduled, \
            (SELECT count(*) FROM ( \
                SELECT FROM tierline.scheduled WHERE backlog = $1 AND due_at <= now() ORDER BY due_at, id LIMIT $2 \
            ) AS counted) AS due, \
            extract(epoch FROM clock_timestamp() - least( \
                (WITH RECURSIVE first AS ( \
                    (SELECT rank, due_at FROM tierline.ready WHERE backlog = $1 ORDER BY rank, due_at, id LIMIT 1) \
                    UNION ALL \
                    SELECT next.rank, next.due_at FROM first CROSS JOIN LATERAL ( \
                        SELECT rank, due_at FROM tierline.ready \
                        WHERE backlog = $1 AND rank > first.rank ORDER BY rank, due_at, id LIMIT 1 \
                    ) AS next \
                ) SELECT min(due_at) FROM first), \
                (SELECT due_at FROM tierline.scheduled WHERE backlog = $1 AND due_at <= now() \
                 ORDER BY due_at, id LIMIT 1) \
            ))::float8 AS oldest",
    )
    .bind(backlog)
    .bind(COUNTED + 1)
    .fetch_one(connection)
    .await?;
    Ok(Waiting {
        ready: row.try_get("ready")?,
        parked: row.try_get("parked")?,
        scheduled: row.try_get("scheduled")?,
        due: row.try_get("due")?,
        oldest: row.try_get("oldest")?,
    })
}

/// What a worker holds of a tier.
struct Runs {
    tier: String,
    worker: i64,
    tasks: i64,
    /// What is known of the worker. `None`: it has left.
    known: Option<KnownWorker>,
}

struct KnownWorker {
    name: String,
    /// How many seconds ago its last heartbeat was.
    silent: f64,
    /// Its lease of the tier, in seconds.
    lease: f64,
}

impl Runs {
    /// Whether the tasks should have been taken over by now.
    fn finding(&self, served: &BTreeSet<String>) -> Option<Finding> {
        let worker = match &self.known {
            Some(known) if known.silent <= TAKEN_OVER_AFTER * known.lease => return None,
            Some(KnownWorker { name, silent, .. }) => {
                format!(
                    "worker {name}, whose last heartbeat was {} ago",
                    shown(*silent)
                )
            }
            // A worker of the tier takes them over at its next look, within a third of its lease.
            None if served.contains(&self.tier) => return None,
            None => format!("worker {}, which is not known any more", self.worker),
        };
        let held = tasks(self.tasks, "is", "are");
        Some(finding(
            Severity::Warning,
            format!("tier {}", self.tier),
            format!("{held} still held by {worker}: nobody has taken over"),
            "start workers of its group, or see in their logs why they cannot look for dead workers",
        ))
    }
}

async fn runs(connection: &mut PgConnection<'_>, app: &str) -> Result<Vec<Runs>, sqlx::Error> {
    let rows = sqlx::query(
        "SELECT backlogs.tier, running.worker, workers.name, count(*) AS tasks, \
             extract(epoch FROM clock_timestamp() - workers.heartbeat_at)::float8 AS silent, \
             (workers.leases ->> backlogs.tier)::float8 AS lease \
         FROM (SELECT worker, backlog FROM tierline.running ORDER BY id LIMIT $2) AS running \
         JOIN tierline.backlogs ON backlogs.id = running.backlog \
         LEFT JOIN tierline.workers ON workers.id = running.worker \
         WHERE backlogs.app = $1 GROUP BY backlogs.tier, running.worker, workers.id ORDER BY 1, 2",
    )
    .bind(app)
    .bind(COUNTED + 1)
    .fetch_all(connection)
    .await?;
    let mut runs = Vec::with_capacity(rows.len());
    for row in &rows {
        let name: Option<String> = row.try_get("name")?;
        let silent: Option<f64> = row.try_get("silent")?;
        let lease: Option<f64> = row.try_get("lease")?;
        runs.push(Runs {
            tier: row.try_get("tier")?,
            worker: row.try_get("worker")?,
            tasks: row.try_get("tasks")?,
            known: name.zip(silent).map(|(name, silent)| KnownWorker {
                name,
                silent,
                lease: lease.unwrap_or_default(),
            }),
        });
    }
    Ok(runs)
}
