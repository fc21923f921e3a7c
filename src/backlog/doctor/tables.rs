//! Whether Postgres can keep up with the rows that come and go: autovacuum and its settings.

use std::collections::BTreeMap;

use sqlx::Row;

use super::{finding, shown};
use crate::amqp::{Finding, Severity};
use crate::postgres::PgConnection;

/// The tables whose rows come and go by the thousand.
const TABLES: [&str; 4] = ["ready", "scheduled", "running", "parked"];
/// Their storage parameters, as migrations 201 and 303 set them.
const PARAMETERS: [(&str, &str); 4] = [
    ("autovacuum_vacuum_scale_factor", "0.01"),
    ("autovacuum_vacuum_threshold", "5000"),
    ("autovacuum_vacuum_cost_delay", "0"),
    ("autovacuum_vacuum_insert_scale_factor", "0.5"),
];
/// How many times more dead rows than begin a vacuum are too many.
const FAR_ABOVE: f64 = 10.0;
/// Autovacuum looks at a database every minute. A busy table has many dead rows by then.
const VACUUM_PATIENCE: f64 = 300.0;

pub(super) async fn check(connection: &mut PgConnection<'_>) -> Result<Vec<Finding>, sqlx::Error> {
    let mut findings = Vec::new();
    let is_on: bool = sqlx::query_scalar(
        "SELECT current_setting('autovacuum')::boolean AND current_setting('track_counts')::boolean",
    )
    .fetch_one(&mut *connection)
    .await?;
    if !is_on {
        findings.push(finding(
            Severity::Warning,
            "autovacuum".to_owned(),
            "is off on this server: rows of finished tasks are never removed, and claims slow down"
                .to_owned(),
            "set autovacuum = on and track_counts = on in postgresql.conf, and reload it",
        ));
    }
    let rows = sqlx::query(
        "SELECT relname::text AS name, coalesce(reloptions, '{}') AS options, \
             greatest(reltuples, 0)::float8 AS live, pg_stat_get_dead_tuples(oid)::float8 AS dead, \
             extract(epoch FROM clock_timestamp() - greatest(pg_stat_get_last_autovacuum_time(oid), \
                 pg_stat_get_last_vacuum_time(oid)))::float8 AS vacuumed \
         FROM pg_class WHERE relnamespace = 'tierline'::regnamespace AND relname = ANY($1) ORDER BY relname",
    )
    .bind(&TABLES[..])
    .fetch_all(connection)
    .await?;
    for row in &rows {
        let name: String = row.try_get("name")?;
        let options: Vec<String> = row.try_get("options")?;
        findings.extend(parameters(&name, &options));
        let (live, dead): (f64, f64) = (row.try_get("live")?, row.try_get("dead")?);
        findings.extend(dead_rows(&name, live, dead, row.try_get("vacuumed")?));
    }
    Ok(findings)
}

fn parameters(table: &str, options: &[String]) -> Option<Finding> {
    let set: BTreeMap<&str, &str> = options.iter().filter_map(|it| it.split_once('=')).collect();
    let object = format!("table tierline.{table}");
    let is_off = |value: &&str| ["false", "off", "no", "0"].contains(value);
    if set.get("autovacuum_enabled").is_some_and(is_off) {
        return Some(finding(
            Severity::Warning,
            object,
            "autovacuum is off for it: rows of finished tasks are never removed, and claims slow down"
                .to_owned(),
            format!("run ALTER TABLE tierline.{table} RESET (autovacuum_enabled)"),
        ));
    }
    let number = |value: &str| value.parse::<f64>().ok();
    let other = PARAMETERS
        .iter()
        .filter(|(name, value)| set.get(name).and_then(|it| number(it)) != number(value));
    let other: Vec<_> = other.collect();
    if other.is_empty() {
        return None;
    }
    let found = other.iter().map(|(name, value)| match set.get(name) {
        Some(found) => format!("{name} is {found}, not {value}"),
        None => format!("{name} is not set, and was {value}"),
    });
    let found: Vec<String> = found.collect();
    let set: Vec<String> = other
        .iter()
        .map(|(name, value)| format!("{name} = {value}"))
        .collect();
    Some(finding(
        Severity::Warning,
        object,
        format!("its storage parameters were changed: {}", found.join("; ")),
        format!("run ALTER TABLE tierline.{table} SET ({})", set.join(", ")),
    ))
}

/// Dead rows that autovacuum should have removed.
fn dead_rows(table: &str, live: f64, dead: f64, vacuumed: Option<f64>) -> Option<Finding> {
    let begins_at = 5_000.0 + 0.01 * live;
    if dead < FAR_ABOVE * begins_at || vacuumed.is_some_and(|ago| ago < VACUUM_PATIENCE) {
        return None;
    }
    let vacuumed = match vacuumed {
        Some(ago) => format!("the last vacuum was {} ago", shown(ago)),
        None => "it was never vacuumed".to_owned(),
    };
    Some(finding(
        Severity::Warning,
        format!("table tierline.{table}"),
        format!("has about {dead:.0} dead rows and {live:.0} live ones; {vacuumed}"),
        "end transactions that hold an old snapshot, see that autovacuum has a free worker \
         (autovacuum_max_workers), or run VACUUM on the table",
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_dead_rows_are_a_finding_unless_a_vacuum_was_just_there() {
        assert_eq!(dead_rows("ready", 0.0, 49_000.0, None), None);
        assert_eq!(dead_rows("ready", 1_000_000.0, 100_000.0, None), None);
        assert_eq!(dead_rows("ready", 0.0, 900_000.0, Some(60.0)), None);
        let found = dead_rows("ready", 0.0, 900_000.0, Some(3_600.0)).unwrap();
        assert!(found.what.contains("900000 dead rows") && found.what.contains("1h ago"));
    }

    #[test]
    fn parameters_written_otherwise_are_the_same_and_others_are_named() {
        let options = |scale: &str| {
            [
                format!("autovacuum_vacuum_scale_factor={scale}"),
                "autovacuum_vacuum_threshold=5000".to_owned(),
                "autovacuum_vacuum_cost_delay=0".to_owned(),
                "autovacuum_vacuum_insert_scale_factor=0.50".to_owned(),
            ]
        };
        assert_eq!(parameters("ready", &options("0.01")), None);
        let found = parameters("ready", &options("0.2")).unwrap();
        assert!(
            found
                .what
                .contains("autovacuum_vacuum_scale_factor is 0.2, not 0.01")
        );
    }
}
