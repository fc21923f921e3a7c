//! Transactions that keep Postgres from removing finished rows: until they end, every claim walks over more dead entries
//! of its index.

use std::time::Duration;

use sqlx::Row;

use super::{finding, shown};
use crate::amqp::{Finding, Severity};
use crate::postgres::PgConnection;

/// How many sessions are listed.
const MOST: i64 = 20;
/// Slots and standbys tell no time: how many transactions ago their snapshot may be.
const OLD_SNAPSHOT: i64 = 100_000;
const WHY: &str = "Postgres cannot remove rows of tasks that finished since, and claims slow down";

/// The findings, and what this user may not see.
pub(super) async fn check(
    connection: &mut PgConnection<'_>,
    open_for: Duration,
) -> Result<(Vec<Finding>, Option<String>), sqlx::Error> {
    let mut findings = transactions(connection, open_for).await?;
    findings.extend(prepared(connection, open_for).await?);
    findings.extend(slots(connection).await?);
    findings.extend(standbys(connection).await?);
    let row = sqlx::query(
        "SELECT pg_has_role('pg_read_all_stats', 'USAGE') AS sees_all, current_user::text AS role",
    )
    .fetch_one(connection)
    .await?;
    let (sees_all, role): (bool, String) = (row.try_get("sees_all")?, row.try_get("role")?);
    let hidden = (!sees_all).then(|| {
        format!("transactions of other users and standbys: run GRANT pg_read_all_stats TO {role:?}")
    });
    Ok((findings, hidden))
}

/// Only transactions in this database matter to its tables.
async fn transactions(
    connection: &mut PgConnection<'_>,
    open_for: Duration,
) -> Result<Vec<Finding>, sqlx::Error> {
    let rows = sqlx::query(
        "SELECT pid, coalesce(usename::text, '') AS role, coalesce(application_name, '') AS application, \
             coalesce(state, '') AS state, extract(epoch FROM clock_timestamp() - xact_start)::float8 AS age, \
             backend_xmin IS NOT NULL OR backend_xid IS NOT NULL AS is_holding \
         FROM pg_stat_activity \
         WHERE datname = current_database() AND pid <> pg_backend_pid() \
             AND xact_start <= clock_timestamp() - make_interval(secs => $1) \
             AND backend_type NOT IN ('autovacuum worker', 'walsender') \
             AND pid NOT IN (SELECT pid FROM pg_stat_progress_vacuum) \
         ORDER BY xact_start LIMIT $2",
    )
    .bind(open_for.as_secs_f64())
    .bind(MOST)
    .fetch_all(connection)
    .await?;
    let mut findings = Vec::with_capacity(rows.len());
    for row in &rows {
        let pid: i32 = row.try_get("pid")?;
        let role: String = row.try_get("role")?;
        let application: String = row.try_get("application")?;
        let state: String = row.try_get("state")?;
        let age = shown(row.try_get("age")?);
        let is_holding: bool = row.try_get("is_holding")?;
        let what = format!(
            "its transaction has been open for {age} (state {state:?}, application_name {application:?}, user {role:?})"
        );
        let (severity, what) = match is_holding {
            true => (Severity::Warning, format!("{what}: {WHY}")),
            false => (
                Severity::Note,
                format!("{what}; it holds no snapshot at the moment"),
            ),
        };
        let help = match state.as_str() {
            "active" => format!(
                "make its query shorter; if it may be ended, run SELECT pg_cancel_backend({pid})"
            ),
            _ => format!(
                "have the application commit sooner; if it may be ended, run SELECT pg_terminate_backend({pid}); \
                 idle_in_transaction_session_timeout ends such sessions by itself"
            ),
        };
        findings.push(finding(severity, format!("session {pid}"), what, help));
    }
    Ok(findings)
}

async fn prepared(
    connection: &mut PgConnection<'_>,
    open_for: Duration,
) -> Result<Vec<Finding>, sqlx::Error> {
    let rows = sqlx::query(
        "SELECT gid, owner::text AS role, extract(epoch FROM clock_timestamp() - prepared)::float8 AS age \
         FROM pg_prepared_xacts \
         WHERE database = current_database() AND prepared <= clock_timestamp() - make_interval(secs => $1) \
         ORDER BY prepared LIMIT $2",
    )
    .bind(open_for.as_secs_f64())
    .bind(MOST)
    .fetch_all(connection)
    .await?;
    let mut findings = Vec::with_capacity(rows.len());
    for row in &rows {
        let gid: String = row.try_get("gid")?;
        let role: String = row.try_get("role")?;
        let age = shown(row.try_get("age")?);
        findings.push(finding(
            Severity::Warning,
            format!("prepared transaction {gid:?}"),
            format!("was prepared {age} ago by {role:?} and has not ended: {WHY}"),
            "run COMMIT PREPARED or ROLLBACK PREPARED with its name",
        ));
    }
    Ok(findings)
}

async fn slots(connection: &mut PgConnection<'_>) -> Result<Vec<Finding>, sqlx::Error> {
    let rows = sqlx::query(
        "SELECT slot_name::text AS name, active, age(xmin)::bigint AS age FROM pg_replication_slots \
         WHERE xmin IS NOT NULL AND age(xmin) >= $1 ORDER BY age(xmin) DESC LIMIT $2",
    )
    .bind(OLD_SNAPSHOT)
    .bind(MOST)
    .fetch_all(connection)
    .await?;
    let mut findings = Vec::with_capacity(rows.len());
    for row in &rows {
        let name: String = row.try_get("name")?;
        let is_active: bool = row.try_get("active")?;
        let age: i64 = row.try_get("age")?;
        let (state, help) = match is_active {
            true => (
                "active",
                "end long queries on its standby, or turn hot_standby_feedback off there"
                    .to_owned(),
            ),
            false => (
                "inactive",
                format!("if its standby is gone, run SELECT pg_drop_replication_slot('{name}')"),
            ),
        };
        findings.push(finding(
            Severity::Warning,
            format!("replication slot {name}"),
            format!("is {state} and holds a snapshot that is {age} transactions old: {WHY}"),
            help,
        ));
    }
    Ok(findings)
}

async fn standbys(connection: &mut PgConnection<'_>) -> Result<Vec<Finding>, sqlx::Error> {
    let rows = sqlx::query(
        "SELECT pid, coalesce(application_name, '') AS application, age(backend_xmin)::bigint AS age \
         FROM pg_stat_replication \
         WHERE backend_xmin IS NOT NULL AND age(backend_xmin) >= $1 ORDER BY age(backend_xmin) DESC LIMIT $2",
    )
    .bind(OLD_SNAPSHOT)
    .bind(MOST)
    .fetch_all(connection)
    .await?;
    let mut findings = Vec::with_capacity(rows.len());
    for row in &rows {
        let pid: i32 = row.try_get("pid")?;
        let application: String = row.try_get("application")?;
        let age: i64 = row.try_get("age")?;
        findings.push(finding(
            Severity::Warning,
            format!("standby {application:?} (session {pid})"),
            format!("its feedback holds a snapshot that is {age} transactions old: {WHY}"),
            "end long queries on the standby, or turn hot_standby_feedback off there",
        ));
    }
    Ok(findings)
}
