//! How many rows a tier may still take.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use super::writer::InsertFailure;
use crate::postgres::PgConnection;

/// How often the rows of a full tier are counted at most.
const COUNT_EVERY: Duration = Duration::from_millis(20);
/// A process inserts one of so many parts of a tier's `max_length` before it counts the rows again.
const LENGTH_PARTS: i64 = 200;

/// Keeps a tier below its `max_length`, within a few percent: its rows are counted now and then.
#[derive(Debug)]
pub(super) struct Room {
    most: i64,
    known: Mutex<Known>,
}

#[derive(Debug, Default)]
struct Known {
    /// How many rows may be inserted before they are counted again.
    allowance: i64,
    /// Until when the tier is taken for full without a count.
    full_until: Option<Instant>,
}

impl Room {
    pub(super) fn new(max_length: u32) -> Self {
        Self {
            most: i64::from(max_length),
            known: Mutex::default(),
        }
    }

    /// Whether one more row may be inserted; `None`: the rows have to be [counted](Self::count) first.
    pub(super) fn admit(&self) -> Option<Result<(), InsertFailure>> {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if known.full_until.is_some_and(|until| Instant::now() < until) {
            return Some(Err(InsertFailure::Full));
        }
        if known.allowance == 0 {
            return None;
        }
        known.allowance -= 1;
        Some(Ok(()))
    }

    /// Whether so many rows may be inserted, all or none.
    pub(super) async fn admit_all(
        &self,
        connection: &mut PgConnection<'_>,
        of: (&str, &str),
        rows: usize,
    ) -> Result<Result<(), InsertFailure>, sqlx::Error> {
        let rows = i64::try_from(rows).unwrap_or(i64::MAX);
        if self.is_full() {
            return Ok(Err(InsertFailure::Full));
        }
        if self.take(rows) {
            return Ok(Ok(()));
        }
        let waiting = self.count(connection, of).await?;
        if waiting.saturating_add(rows) > self.most {
            return Ok(Err(InsertFailure::Full));
        }
        self.take(rows);
        Ok(Ok(()))
    }

    /// Whether the tier was found full a moment ago. Counting it at every publish would cost the other tiers too.
    fn is_full(&self) -> bool {
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        known.full_until.is_some_and(|until| Instant::now() < until)
    }

    /// Whether so many rows may be inserted without a count, and takes them from what may be.
    fn take(&self, rows: i64) -> bool {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let has_allowance = known.allowance >= rows;
        known.allowance = known.allowance.saturating_sub(rows).max(0);
        has_allowance
    }

    /// Counts the rows of a tier that wait, up to the limit.
    pub(super) async fn count(
        &self,
        connection: &mut PgConnection<'_>,
        (app, tier): (&str, &str),
    ) -> Result<i64, sqlx::Error> {
        let count: i64 = sqlx::query_scalar(
            "WITH of AS MATERIALIZED (SELECT id FROM tierline.backlogs WHERE app = $1 AND tier = $2) \
             SELECT count(*) FROM ( \
                SELECT FROM tierline.ready WHERE backlog = (SELECT id FROM of) \
                UNION ALL SELECT FROM tierline.parked WHERE backlog = (SELECT id FROM of) LIMIT $3) AS waiting",
        )
        .bind(app)
        .bind(tier)
        .bind(self.most)
        .fetch_one(connection)
        .await?;
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        known.allowance = (self.most - count).clamp(0, (self.most / LENGTH_PARTS).max(1));
        known.full_until = (known.allowance == 0).then(|| Instant::now() + COUNT_EVERY);
        Ok(count)
    }
}
