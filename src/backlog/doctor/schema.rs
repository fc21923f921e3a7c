//! Whether the tables are those that this release expects: migrations and indexes.

use sqlx::Row;

use super::finding;
use crate::amqp::{Finding, Severity};
use crate::postgres::{MigrationState, PgConnection};

/// The indexes that statements rely on, as Postgres describes them. Their names may differ.
const INDEXES: [&str; 28] = [
    "CREATE UNIQUE INDEX backlogs_app_tier_key ON tierline.backlogs USING btree (app, tier)",
    "CREATE UNIQUE INDEX ready_pkey ON tierline.ready USING btree (id)",
    "CREATE UNIQUE INDEX ready_order ON tierline.ready USING btree (backlog, rank, due_at, id)",
    "CREATE INDEX ready_by_name ON tierline.ready USING btree (name) WHERE (name IS NOT NULL)",
    "CREATE UNIQUE INDEX scheduled_pkey ON tierline.scheduled USING btree (id)",
    "CREATE UNIQUE INDEX scheduled_order ON tierline.scheduled USING btree (backlog, due_at, id)",
    "CREATE INDEX scheduled_by_name ON tierline.scheduled USING btree (name) WHERE (name IS NOT NULL)",
    "CREATE UNIQUE INDEX running_pkey ON tierline.running USING btree (id)",
    "CREATE INDEX running_by_key ON tierline.running USING btree (counted) WHERE (counted IS NOT NULL)",
    "CREATE UNIQUE INDEX parked_pkey ON tierline.parked USING btree (id)",
    "CREATE UNIQUE INDEX parked_order ON tierline.parked USING btree (lane, rank, due_at, id)",
    "CREATE UNIQUE INDEX parked_by_tier ON tierline.parked USING btree (backlog, rank, due_at, id)",
    "CREATE INDEX parked_by_name ON tierline.parked USING btree (name) WHERE (name IS NOT NULL)",
    "CREATE UNIQUE INDEX lanes_backlog_task_key_key ON tierline.lanes USING btree (backlog, task, key)",
    "CREATE UNIQUE INDEX lanes_order ON tierline.lanes USING btree (backlog, task, rank, turn, id) WHERE (rank IS NOT NULL)",
    "CREATE INDEX lanes_suspects ON tierline.lanes USING btree (backlog, task) WHERE has_suspects",
    "CREATE INDEX lanes_empty ON tierline.lanes USING btree (emptied_at) WHERE (emptied_at IS NOT NULL)",
    "CREATE INDEX controls_by_target ON tierline.controls USING btree (app, kind, target_kind, target)",
    "CREATE INDEX controls_by_end ON tierline.controls USING btree (app, until)",
    "CREATE UNIQUE INDEX finished_pkey ON tierline.finished USING btree (id, finished_at)",
    "CREATE INDEX finished_order ON tierline.finished USING btree (backlog, finished_at, id)",
    "CREATE INDEX finished_by_name ON tierline.finished USING btree (name) WHERE (name IS NOT NULL)",
    "CREATE UNIQUE INDEX completed_pkey ON tierline.completed USING btree (key)",
    "CREATE INDEX completed_order ON tierline.completed USING btree (app, completed_at)",
    "CREATE UNIQUE INDEX unique_keys_pkey ON tierline.unique_keys USING btree (app, kind, key)",
    "CREATE INDEX unique_keys_by_row ON tierline.unique_keys USING btree (row_id)",
    "CREATE INDEX unique_keys_by_expiry ON tierline.unique_keys USING btree (expires_at)",
    "CREATE UNIQUE INDEX workers_pkey ON tierline.workers USING btree (id)",
];

pub(super) fn check(migrations: &MigrationState) -> Vec<Finding> {
    let mut findings = Vec::new();
    let schema = || "schema tierline".to_owned();
    if !migrations.pending.is_empty() {
        let pending = migrations.pending.join(", ");
        findings.push(finding(
            Severity::Error,
            schema(),
            format!("lacks migrations of this release: {pending}"),
            "apply the file, or run `tierline migrate`",
        ));
    }
    if !migrations.unknown.is_empty() {
        let unknown: Vec<String> = migrations.unknown.iter().map(i64::to_string).collect();
        let unknown = unknown.join(", ");
        findings.push(finding(
            Severity::Note,
            schema(),
            format!("a newer release has migrated it (migrations {unknown})"),
            "use the doctor of that release: it knows what to check there",
        ));
    }
    findings
}

/// Indexes that are missing, or that Postgres does not use.
pub(super) async fn indexes(
    connection: &mut PgConnection<'_>,
) -> Result<Vec<Finding>, sqlx::Error> {
    let rows = sqlx::query(
        "SELECT pg_get_indexdef(indexrelid) AS definition, 'tierline.' || quote_ident(relname) AS name, \
             indisvalid AND indisready AND indislive AS is_valid \
         FROM pg_index JOIN pg_class ON pg_class.oid = indexrelid \
         WHERE relnamespace = 'tierline'::regnamespace",
    )
    .fetch_all(connection)
    .await?;
    let mut found: Vec<(String, String, bool)> = Vec::with_capacity(rows.len());
    for row in &rows {
        let definition: String = row.try_get("definition")?;
        found.push((definition, row.try_get("name")?, row.try_get("is_valid")?));
    }
    let findings = INDEXES.iter().filter_map(|expected| {
        let (name, columns) = parts(expected)?;
        let like_it = || {
            found
                .iter()
                .filter(|(it, ..)| parts(it).map(|it| it.1) == Some(columns))
        };
        if like_it().any(|(_, _, is_valid)| *is_valid) {
            return None;
        }
        let create = expected.replacen("INDEX", "INDEX CONCURRENTLY", 1);
        Some(match like_it().next() {
            Some((_, found, _)) => finding(
                Severity::Error,
                format!("index {found}"),
                "is invalid, so Postgres does not use it".to_owned(),
                format!("run REINDEX INDEX CONCURRENTLY {found}"),
            ),
            None => finding(
                Severity::Error,
                format!("index tierline.{name}"),
                "is missing: statements that need it scan whole tables".to_owned(),
                format!("run {create}"),
            ),
        })
    });
    Ok(findings.collect())
}

/// The name of an index, and what it is on.
fn parts(definition: &str) -> Option<(&str, (bool, &str))> {
    let (head, on) = definition.split_once(" ON ")?;
    let name = head.rsplit(' ').next()?;
    Some((name, (head.contains("UNIQUE"), on)))
}
