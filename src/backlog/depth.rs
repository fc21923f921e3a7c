//! How many rows the tiers of an app have, phase by phase, and for how long the first of them have waited. Each count is
//! bounded, so a deep tier costs no more than a shallow one.

use std::collections::HashMap;
use std::sync::LazyLock;
use std::time::Duration;

use sqlx::{AssertSqlSafe, Row};

use super::row::priority;
use crate::Error;
use crate::postgres::Database;

/// How many rows of a tier are counted in each phase.
pub(crate) const MOST_COUNTED: u64 = 10_000;
/// How many rows of a priority are counted at least, however many there are of those above it.
const LEAST_OF_RANK: i64 = 100;
/// How many priorities of a tier are looked at.
const MOST_RANKS: i64 = 256;

/// A number of rows.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct RowCount {
    pub(crate) count: u64,
    /// Whether there may be more: so many were counted, and no more.
    pub(crate) or_more: bool,
}

/// Rows of one priority.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct RankDepth {
    pub(crate) rank: i16,
    pub(crate) rows: RowCount,
    /// For how long the first of them has waited.
    pub(crate) oldest: Duration,
}

/// The rows of a tier.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct TierDepth {
    /// By rank, the highest priority first.
    pub(crate) ready: Vec<RankDepth>,
    pub(crate) parked: Vec<RankDepth>,
    pub(crate) scheduled: RowCount,
    /// Those that processes have claimed.
    pub(crate) running: RowCount,
}

impl RowCount {
    pub(crate) fn plus(self, other: Self) -> Self {
        Self {
            count: self.count + other.count,
            or_more: self.or_more || other.or_more,
        }
    }
}

impl RankDepth {
    pub(crate) fn is_quarantined(&self) -> bool {
        self.rank > 0
    }

    /// The priority of the messages.
    pub(crate) fn priority(&self) -> u8 {
        priority(self.rank)
    }
}

/// The sum of these ranks, and for how long the oldest row of them has waited.
pub(crate) fn sum<'a>(ranks: impl Iterator<Item = &'a RankDepth>) -> (RowCount, Option<Duration>) {
    ranks.fold((RowCount::default(), None), |(rows, oldest), rank| {
        (rows.plus(rank.rows), oldest.max(Some(rank.oldest)))
    })
}

/// The ranks of a table are found one by one, each with one look into the index, and then rows of each are counted.
static DEPTHS: LazyLock<String> = LazyLock::new(|| {
    let ranks = |phase: &str| {
        let first = |condition: &str| {
            format!(
                "SELECT rank, due_at FROM tierline.{phase} WHERE backlog = of.id {condition} ORDER BY rank, due_at, id LIMIT 1"
            )
        };
        let counted = |limit: &str| {
            format!(
                "SELECT count(*) AS rows FROM ( \
                    SELECT FROM tierline.{phase} WHERE backlog = of.id AND rank = first.rank LIMIT {limit} \
                 ) AS few"
            )
        };
        format!(
            "SELECT '{phase}' AS phase, of.tier, level.rank, least(level.rows, level.most) AS rows, level.rows > level.most AS or_more, \
                extract(epoch FROM clock_timestamp() - level.due_at)::float8 AS age \
             FROM of CROSS JOIN LATERAL ( \
                WITH RECURSIVE levels AS ( \
                    SELECT first.rank, first.due_at, counted.rows, $3::bigint AS most \
                    FROM ({}) AS first CROSS JOIN LATERAL ({}) AS counted \
                    UNION ALL \
                    SELECT first.rank, first.due_at, counted.rows, greatest(above.most - above.rows, $4) \
                    FROM levels AS above CROSS JOIN LATERAL ({}) AS first CROSS JOIN LATERAL ({}) AS counted \
                 ) SELECT * FROM levels LIMIT $5 \
             ) AS level",
            first(""),
            counted("$3 + 1"),
            first("AND rank > above.rank"),
            counted("greatest(above.most - above.rows, $4) + 1"),
        )
    };
    format!(
        "WITH of AS MATERIALIZED (SELECT id, tier FROM tierline.backlogs WHERE app = $1 AND tier = ANY($2)), \
         claimed AS MATERIALIZED (SELECT backlog FROM tierline.running LIMIT $3 + 1) \
         {} UNION ALL {} \
         UNION ALL SELECT 'scheduled', of.tier, NULL, least(counted.rows, $3), counted.rows > $3, NULL \
            FROM of CROSS JOIN LATERAL (SELECT count(*) AS rows FROM ( \
                SELECT FROM tierline.scheduled WHERE backlog = of.id ORDER BY due_at, id LIMIT $3 + 1) AS few) AS counted \
         UNION ALL SELECT 'running', of.tier, NULL, count(claimed.backlog), (SELECT count(*) FROM claimed) > $3, NULL \
            FROM of LEFT JOIN claimed ON claimed.backlog = of.id GROUP BY of.tier",
        ranks("ready"),
        ranks("parked"),
    )
});

/// Counts the rows of these tiers, by tier, all in one snapshot: a row is in exactly one phase. A tier without a number has
/// none.
///
/// # Errors
/// As every use of the database; also where it has no tables of tiers.
pub(crate) async fn tier_depths(
    database: &Database,
    app: &str,
    tiers: &[&str],
    limit: Duration,
) -> Result<HashMap<String, TierDepth>, Error> {
    // For index scans, whatever the statistics say.
    let mut connection = super::connection(database);
    let counting = connection.within(limit, "count the rows of tiers", async |connection| {
        sqlx::query(AssertSqlSafe(DEPTHS.as_str()))
            .bind(app)
            .bind(tiers)
            .bind(i64::try_from(MOST_COUNTED).unwrap_or(i64::MAX))
            .bind(LEAST_OF_RANK)
            .bind(MOST_RANKS)
            .fetch_all(connection)
            .await?
            .into_iter()
            .map(|row| {
                Ok((
                    row.try_get::<String, _>("tier")?,
                    row.try_get::<String, _>("phase")?,
                    row.try_get::<Option<i16>, _>("rank")?,
                    RowCount {
                        count: row.try_get::<i64, _>("rows")?.unsigned_abs(),
                        or_more: row.try_get("or_more")?,
                    },
                    row.try_get::<Option<f64>, _>("age")?,
                ))
            })
            .collect::<Result<Vec<_>, sqlx::Error>>()
    });
    let mut depths: HashMap<String, TierDepth> = HashMap::new();
    for (tier, phase, rank, rows, age) in counting.await? {
        let depth = depths.entry(tier).or_default();
        // A clock that went back, and a task that falls due within the statement, have not waited.
        let oldest = age.and_then(|age| Duration::try_from_secs_f64(age).ok());
        let level = rank.map(|rank| RankDepth {
            rank,
            rows,
            oldest: oldest.unwrap_or_default(),
        });
        match (phase.as_str(), level) {
            ("ready", Some(level)) => depth.ready.push(level),
            ("parked", Some(level)) => depth.parked.push(level),
            ("scheduled", _) => depth.scheduled = rows,
            _ => depth.running = rows,
        }
    }
    for depth in depths.values_mut() {
        depth.ready.sort_by_key(|level| level.rank);
        depth.parked.sort_by_key(|level| level.rank);
    }
    Ok(depths)
}
