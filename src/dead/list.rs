//! Reads the log.

use std::collections::BTreeMap;
use std::time::SystemTime;

use serde::Serialize;
use sqlx::{Postgres, QueryBuilder, Row};

use super::filter::{Cursor, Filter, Page};
use super::letter::{DETAILS, DeadLetter, SUMMARY, Summary, later_identities};
use super::triage::{Advice, Assessment, Failing};
use super::{DeadLetters, State, time_filter};
use crate::Error;
use crate::error::DeadLetterError;
use crate::postgres::{PgConnection, STATEMENT_LIMIT, Time};
use crate::topology::Topology;

/// A page of a list.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Listed {
    /// The rows, the latest death first.
    pub letters: Vec<Summary>,
    /// The start of the next page; `None` if this is the last.
    #[serde(serialize_with = "cursor")]
    pub next: Option<Cursor>,
}

fn cursor<S: serde::Serializer>(cursor: &Option<Cursor>, out: S) -> Result<S::Ok, S::Error> {
    match cursor {
        Some(cursor) => out.collect_str(cursor),
        None => out.serialize_none(),
    }
}

/// How many rows a tier has.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct TierCount {
    /// The tier, or `"unrouted"`.
    pub tier: String,
    /// Rows that nobody has redriven or discarded yet.
    pub dead: u64,
    /// Rows that a redrive is publishing.
    pub redriving: u64,
    /// Rows that were redriven.
    pub redriven: u64,
    /// Rows that were discarded.
    pub discarded: u64,
}

/// Failures with the same fingerprint.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct FailureGroup {
    /// Their fingerprint.
    pub fingerprint: String,
    /// How many there are.
    pub count: u64,
    /// When the first of them died, within the filter.
    #[serde(serialize_with = "time_filter::serialize")]
    pub first_seen: SystemTime,
    /// When the last of them died, within the filter.
    #[serde(serialize_with = "time_filter::serialize")]
    pub last_seen: SystemTime,
    /// The one that was logged last.
    pub sample: Summary,
    /// Their probable cause, what to do about it, and why.
    #[serde(flatten)]
    pub assessment: Assessment,
}

impl DeadLetters {
    /// One page of the rows that a filter selects, the latest death first.
    ///
    /// # Errors
    /// [`DeadLetterError::InvalidFilter`], and as every use of the database.
    pub async fn list(&self, filter: &Filter, page: Page) -> Result<Listed, Error> {
        let mut query = self.list_query("", filter, page)?;
        let reading = async {
            let rows = query.build().fetch_all(self.database.pool()).await?;
            let letters: Result<Vec<_>, _> = rows.iter().map(Summary::read).collect();
            letters
        };
        let mut letters = self.within("list dead letters", reading).await?;
        let is_more = letters.len() > usize::from(page.size);
        letters.truncate(page.size.into());
        let last = letters.last().filter(|_| is_more);
        let next = last.map(|last| Cursor {
            died_at: last.died_at,
            id: last.id,
        });
        Ok(Listed { letters, next })
    }

    /// A dead letter with all its fields.
    ///
    /// # Errors
    /// [`DeadLetterError::NotFound`], and as every use of the database.
    pub async fn get(&self, id: i64) -> Result<DeadLetter, Error> {
        let mut query = self.select(&format!("SELECT {SUMMARY}, {DETAILS}"));
        query.push(" AND id = ").push_bind(id);
        let reading = async {
            let pool = self.database.pool();
            let Some(row) = query.build().fetch_optional(pool).await? else {
                return Ok(None);
            };
            let mut letter = DeadLetter::read(&row)?;
            letter.died_again_as = sqlx::query_scalar(
                "SELECT id FROM tierline.dead_letters WHERE app = $1 AND identity = ANY($2) \
                 AND life > $3 AND payload = $4 ORDER BY life, id",
            )
            .bind(self.app())
            .bind(later_identities(&row)?)
            .bind(i32::try_from(letter.summary.life).unwrap_or(i32::MAX))
            .bind(&letter.payload)
            .fetch_all(pool)
            .await?;
            Ok(Some(letter))
        };
        let found = self.within("read a dead letter", reading).await?;
        found.ok_or(Error::DeadLetter(DeadLetterError::NotFound { id }))
    }

    /// How many rows each tier has: the tiers of the map in its order, then tiers that are no longer in it.
    /// The counts are maintained, so this costs the same however many rows there are.
    ///
    /// # Errors
    /// As every use of the database.
    pub async fn by_tier(&self) -> Result<Vec<TierCount>, Error> {
        let counting = async {
            let mut connection = self.database.pool().acquire().await?;
            count_by_tier(&mut connection, &self.topology).await
        };
        self.within("count dead letters", counting).await
    }

    /// The failures that a filter selects, grouped by fingerprint, the largest groups first. Set a time window:
    /// Postgres counts every row in it.
    ///
    /// # Errors
    /// [`DeadLetterError::InvalidFilter`], and as every use of the database.
    pub async fn groups(&self, filter: &Filter, most: u16) -> Result<Vec<FailureGroup>, Error> {
        let mut query = self.groups_query("", filter, most)?;
        let reading = async {
            let rows = query.build().fetch_all(self.database.pool()).await?;
            let groups: Result<Vec<_>, sqlx::Error> = rows
                .iter()
                .map(|row| {
                    let count: i64 = row.try_get("count")?;
                    let first_seen: Time = row.try_get("first_seen")?;
                    let last_seen: Time = row.try_get("last_seen")?;
                    let sample = Summary::read(row)?;
                    Ok((count.unsigned_abs(), first_seen.0, last_seen.0, sample))
                })
                .collect();
            groups
        };
        let groups = self.within("group dead letters", reading).await?;
        let mut assessed = Vec::with_capacity(groups.len());
        for (count, first_seen, last_seen, sample) in groups {
            let failing = Failing {
                sample: &sample,
                count,
                first_seen,
                last_seen,
                is_mapped: self.is_mapped(sample.task.as_deref()),
            };
            let assessment = self.triage.assess(&failing).await;
            assessed.push(FailureGroup {
                fingerprint: sample.fingerprint.clone(),
                count,
                first_seen,
                last_seen,
                assessment,
                sample,
            });
        }
        Ok(assessed)
    }

    /// The probable cause of one dead letter, what to do about it, and why.
    pub async fn assess(&self, letter: &Summary) -> Assessment {
        let failing = Failing {
            sample: letter,
            count: 1,
            first_seen: letter.died_at,
            last_seen: letter.died_at,
            is_mapped: self.is_mapped(letter.task.as_deref()),
        };
        self.triage.assess(&failing).await
    }

    /// How many rows a filter selects. Postgres counts every one of them.
    ///
    /// # Errors
    /// [`DeadLetterError::InvalidFilter`], and as every use of the database.
    pub async fn count(&self, filter: &Filter) -> Result<u64, Error> {
        filter.check()?;
        let mut query = self.select("SELECT count(*)");
        filter.push(&mut query);
        let counting = query.build_query_scalar().fetch_one(self.database.pool());
        let count: i64 = self.within("count dead letters", counting).await?;
        Ok(count.unsigned_abs())
    }

    /// The query plans of [`list`](Self::list), [`groups`](Self::groups) and
    /// [`by_tier`](Self::by_tier), with `EXPLAIN ANALYZE`. For benchmarks.
    ///
    /// # Errors
    /// As those functions.
    #[doc(hidden)]
    pub async fn explain(&self, filter: &Filter) -> Result<[String; 3], Error> {
        const EXPLAIN: &str = "EXPLAIN (ANALYZE, BUFFERS, COSTS OFF) ";
        let queries = [
            self.list_query(EXPLAIN, filter, Page::default())?,
            self.groups_query(EXPLAIN, filter, 20)?,
            by_tier_query(EXPLAIN, self.app()),
        ];
        let mut plans = Vec::new();
        for mut query in queries {
            let reading = query.build_query_scalar().fetch_all(self.database.pool());
            let lines: Vec<String> = self.within("explain", reading).await?;
            plans.push(lines.join("\n"));
        }
        Ok(plans.try_into().unwrap_or_default())
    }

    fn list_query(
        &self,
        prefix: &str,
        filter: &Filter,
        page: Page,
    ) -> Result<QueryBuilder<Postgres>, Error> {
        filter.check()?;
        page.check()?;
        let mut query = self.select(&format!("{prefix}SELECT {SUMMARY}"));
        filter.push(&mut query);
        if let Some(Cursor { died_at, id }) = page.after {
            query.push(" AND (died_at, id) < (");
            query.push_bind(Time(died_at)).push(", ");
            query.push_bind(id).push(")");
        }
        query.push(" ORDER BY died_at DESC, id DESC LIMIT ");
        // One more row than the page has tells whether there is another page.
        query.push_bind(i64::from(page.size) + 1);
        Ok(query)
    }

    fn groups_query(
        &self,
        prefix: &str,
        filter: &Filter,
        most: u16,
    ) -> Result<QueryBuilder<Postgres>, Error> {
        filter.check()?;
        Page::first(most).check()?;
        let mut query = self.select(&format!(
            "{prefix}WITH groups AS (SELECT fingerprint AS of, count(*) AS count, \
             min(died_at) AS first_seen, max(died_at) AS last_seen, max(id) AS sample"
        ));
        filter.push(&mut query);
        query.push(" GROUP BY fingerprint ORDER BY count(*) DESC, fingerprint LIMIT ");
        query.push_bind(i64::from(most));
        query.push(format!(
            ") SELECT count, first_seen, last_seen, {SUMMARY} FROM groups \
             JOIN tierline.dead_letters AS letter ON letter.id = groups.sample \
             ORDER BY count DESC, of"
        ));
        Ok(query)
    }

    fn is_mapped(&self, task: Option<&str>) -> bool {
        task.is_some_and(|task| self.topology.task(task).is_some())
    }

    /// The beginning of a statement on this app's rows; conditions follow.
    pub(super) fn select(&self, beginning: &str) -> QueryBuilder<Postgres> {
        let mut query = QueryBuilder::new(format!(
            "{beginning} FROM tierline.dead_letters AS letter WHERE app = "
        ));
        query.push_bind(self.app().to_owned());
        query
    }

    pub(super) async fn within<T>(
        &self,
        tried: &str,
        work: impl Future<Output = Result<T, sqlx::Error>>,
    ) -> Result<T, Error> {
        self.database.within(STATEMENT_LIMIT, tried, work).await
    }
}

/// How many rows each tier has: the tiers of the map in its order, then others.
pub(crate) async fn count_by_tier(
    connection: &mut PgConnection<'_>,
    topology: &Topology,
) -> Result<Vec<TierCount>, sqlx::Error> {
    let rows = by_tier_query("", topology.app())
        .build()
        .fetch_all(connection)
        .await?;
    let mut counts: BTreeMap<String, BTreeMap<State, u64>> = BTreeMap::new();
    for row in rows {
        let state: String = row.get("state");
        let count: i64 = row.get("count");
        if let Some(state) = State::parse(&state) {
            let tier = counts.entry(row.get("tier")).or_default();
            tier.insert(state, count.max(0).unsigned_abs());
        }
    }
    let mapped: Vec<String> = topology
        .tiers()
        .iter()
        .map(|tier| tier.name.clone())
        .collect();
    let others = counts.keys().filter(|tier| !mapped.contains(tier)).cloned();
    let tiers: Vec<String> = mapped.iter().cloned().chain(others).collect();
    let count = |tier: String| {
        let of = |state| {
            let counts = counts.get(&tier);
            counts.and_then(|counts| counts.get(&state)).copied()
        };
        TierCount {
            dead: of(State::Dead).unwrap_or_default(),
            redriving: of(State::Redriving).unwrap_or_default(),
            redriven: of(State::Redriven).unwrap_or_default(),
            discarded: of(State::Discarded).unwrap_or_default(),
            tier,
        }
    };
    Ok(tiers.into_iter().map(count).collect())
}

fn by_tier_query(prefix: &str, app: &str) -> QueryBuilder<Postgres> {
    let mut query = QueryBuilder::new(prefix);
    query.push(
        "SELECT tier, state, sum(change)::bigint AS count \
         FROM tierline.dead_letter_counts WHERE app = ",
    );
    query.push_bind(app.to_owned());
    query.push(" GROUP BY tier, state");
    query
}

impl FailureGroup {
    /// What to do about it.
    pub fn advice(&self) -> Advice {
        self.assessment.advice
    }
}
