//! The audit log: who did what to what, why, and what it was before and after.

use std::time::SystemTime;

use serde::Serialize;
use serde_json::Value;
use sqlx::Row;

use super::{Database, PgConnection, STATEMENT_LIMIT, Time};
use crate::Error;

/// An entry of the audit log.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct AuditEntry {
    /// Its number, which rises.
    pub id: i64,
    /// When it was done.
    #[serde(serialize_with = "super::time::serialize")]
    pub at: SystemTime,
    /// The operator.
    pub who: String,
    /// The operator's reason; may be empty.
    pub why: String,
    /// What was done, in words.
    pub action: String,
    /// What it was done to.
    pub subject: Value,
    /// What it was before, where that is known.
    pub before: Option<Value>,
    /// What it became, where that is known.
    pub after: Option<Value>,
}

/// An action to be recorded.
#[derive(Debug)]
pub(crate) struct Action<'a> {
    pub(crate) app: &'a str,
    pub(crate) who: &'a str,
    pub(crate) why: &'a str,
    pub(crate) action: &'a str,
    pub(crate) subject: Value,
    pub(crate) before: Option<Value>,
    pub(crate) after: Option<Value>,
}

/// Records an action, in the transaction that it is done in.
pub(crate) async fn record(
    connection: &mut PgConnection<'_>,
    action: &Action<'_>,
) -> Result<(), sqlx::Error> {
    let text = |value: &Value| value.to_string().replace("\\u0000", "\\ufffd");
    sqlx::query(
        "INSERT INTO tierline.audit_log (app, who, why, action, subject, before, after) \
         VALUES ($1, $2, $3, $4, $5::jsonb, $6::jsonb, $7::jsonb)",
    )
    .bind(action.app)
    .bind(action.who)
    .bind(action.why)
    .bind(action.action)
    .bind(text(&action.subject))
    .bind(action.before.as_ref().map(text))
    .bind(action.after.as_ref().map(text))
    .execute(connection)
    .await?;
    Ok(())
}

impl Database {
    /// The latest entries of an app's audit log, the newest first, at most `most` and only those before `before`.
    ///
    /// # Errors
    /// As every use of the database.
    pub(crate) async fn audit_log(
        &self,
        app: &str,
        before: Option<i64>,
        most: u16,
    ) -> Result<Vec<AuditEntry>, Error> {
        let reading = async {
            let rows = sqlx::query(
                "SELECT id, at, who, why, action, subject::text, before::text, after::text FROM tierline.audit_log \
                 WHERE app = $1 AND id < coalesce($2, 9223372036854775807) ORDER BY id DESC LIMIT $3",
            )
            .bind(app)
            .bind(before)
            .bind(i64::from(most))
            .fetch_all(self.pool())
            .await?;
            let json = |text: Option<String>| {
                let text = text.unwrap_or_default();
                serde_json::from_str(&text).ok()
            };
            let read = |row: &sqlx::postgres::PgRow| {
                let Time(at) = row.try_get("at")?;
                Ok(AuditEntry {
                    id: row.try_get("id")?,
                    at,
                    who: row.try_get("who")?,
                    why: row.try_get("why")?,
                    action: row.try_get("action")?,
                    subject: json(row.try_get("subject")?).unwrap_or_default(),
                    before: json(row.try_get("before")?),
                    after: json(row.try_get("after")?),
                })
            };
            rows.iter().map(read).collect()
        };
        self.within(STATEMENT_LIMIT, "read the audit log", reading)
            .await
    }
}
