//! Leader election: a lease in the database, by the database's clock.
//!
//! The lease is a row, not a session lock. So it works through poolers that give each statement
//! another session. And when a leader's machine vanishes, the row expires, while the session of a lock
//! would stay until TCP times out.
//!
//! A leader renews a lease of three seconds every second. The other processes look when the lease is about
//! to expire, and at least every second. So another process leads three seconds after a leader's last
//! renewal, and at once after one that shut down.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use jiff::Timestamp;
use sqlx::{Executor, Row};
use tokio::time::Instant;

use super::{from_database, to_database};
use crate::Error;
use crate::postgres::{DedicatedConnection, Time};

pub(super) const LEASE: Duration = Duration::from_secs(3);
pub(super) const RENEWAL: Duration = Duration::from_secs(1);
/// The leader's safety margin, for clocks that do not run at quite the same speed.
const MARGIN: Duration = Duration::from_millis(250);
/// A time without a leader that is shorter than this counts as none: a takeover, a restart.
const LONGEST_TAKEOVER: Duration = Duration::from_secs(60);
/// How long an attempt may take: three must fit into a lease.
const LIMIT: Duration = Duration::from_secs(1);

/// The clock that due times are compared with.
///
/// By default it is the database's clock. It is the same for every process, so a takeover never goes back
/// or forward in time, and it wrote the state that it is compared with. Between two queries the process's
/// monotonic clock advances it, so steps of the process's wall clock do not matter.
#[derive(Clone, Default)]
pub(super) struct Clock {
    pub(super) given: Option<Arc<dyn Fn() -> SystemTime + Send + Sync>>,
}

impl fmt::Debug for Clock {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "Clock(given: {})", self.given.is_some())
    }
}

impl Clock {
    pub(super) fn given(&self) -> Option<Timestamp> {
        let given = self.given.as_ref()?;
        Timestamp::try_from(given()).ok()
    }
}

/// A lease that was taken or renewed.
#[derive(Debug, Clone)]
pub(super) struct Lease {
    pub(super) epoch: i64,
    /// Since when there has been a leader without a longer gap.
    pub(super) led_since: Timestamp,
    /// How long there was no leader before this lease.
    pub(super) gap: Duration,
    clock: Clock,
    now: Timestamp,
    asked: Instant,
    asked_wall: SystemTime,
}

impl Lease {
    /// The time by the clock of due times.
    pub(super) fn now(&self) -> Timestamp {
        let carried = || self.now.checked_add(self.asked.elapsed()).ok();
        self.clock.given().or_else(carried).unwrap_or(self.now)
    }

    /// When it will be `time`, by the process's monotonic clock.
    pub(super) fn instant(&self, time: Timestamp) -> Instant {
        let wait = Duration::try_from(time.duration_since(self.now()));
        Instant::now() + wait.unwrap_or_default().min(LEASE)
    }

    /// Whether the lease certainly still holds.
    ///
    /// The monotonic clock stops while the machine sleeps, and the wall clock does not. If either says that
    /// the lease is over, it is.
    pub(super) fn holds(&self) -> bool {
        let slept = self.asked_wall.elapsed().unwrap_or_default();
        self.asked.elapsed().max(slept) < LEASE - MARGIN
    }

    /// When the lease ends unless it is renewed.
    pub(super) fn ends(&self) -> Instant {
        self.asked + LEASE - MARGIN
    }
}

/// The result of an attempt to take or renew the lease.
pub(super) enum LeaseOutcome {
    Leads(Lease),
    /// Another process leads. Its lease lasts for this long unless renewed.
    Follows(Duration),
}

/// Takes the lease if it is free, or renews it.
const ASK: &str = "
WITH taken AS (
    INSERT INTO tierline.schedule_leaders AS l (app, holder, epoch, expires_at, seen_at, led_since)
    SELECT $1, $2, 1, clock_timestamp() + $3 * interval '1 ms', due.now, due.now
    FROM (SELECT coalesce($4, clock_timestamp()) AS now) AS due
    WHERE NOT EXISTS (
        SELECT FROM tierline.schedule_leaders
        WHERE app = $1 AND holder <> $2 AND expires_at > clock_timestamp()
    )
    ON CONFLICT (app) DO UPDATE SET
        holder = excluded.holder,
        epoch = l.epoch + (l.holder <> excluded.holder)::int,
        expires_at = clock_timestamp() + $3 * interval '1 ms',
        seen_at = excluded.seen_at,
        led_since = CASE
            WHEN excluded.seen_at - l.seen_at < $5 * interval '1 ms' THEN l.led_since
            ELSE excluded.seen_at
        END
    WHERE l.holder = excluded.holder OR l.expires_at <= clock_timestamp()
    RETURNING epoch, led_since
)
SELECT true AS leads, taken.epoch, taken.led_since, clock_timestamp() AS now,
    coalesce((extract(epoch FROM coalesce($4, clock_timestamp()) - before.seen_at) * 1000)::bigint, 0)
        AS milliseconds
FROM taken LEFT JOIN tierline.schedule_leaders AS before ON before.app = $1
UNION ALL
SELECT false, epoch, led_since, clock_timestamp(),
    (extract(epoch FROM expires_at - clock_timestamp()) * 1000)::bigint
FROM tierline.schedule_leaders WHERE app = $1 AND NOT EXISTS (SELECT FROM taken)";

/// Releases the lease, so that the next leader need not wait for its end.
const GIVE_UP: &str = "
UPDATE tierline.schedule_leaders SET expires_at = clock_timestamp()
WHERE app = $1 AND holder = $2 AND epoch = $3";

/// A process that may lead.
#[derive(Debug)]
pub(super) struct Candidate {
    connection: DedicatedConnection,
    app: String,
    holder: String,
    clock: Clock,
}

impl Candidate {
    pub(super) fn new(
        connection: DedicatedConnection,
        app: &str,
        holder: &str,
        clock: Clock,
    ) -> Self {
        Self {
            connection,
            app: app.to_owned(),
            holder: holder.to_owned(),
            clock,
        }
    }

    /// Takes the lease if it is free, or renews it.
    pub(super) async fn ask(&mut self) -> Result<LeaseOutcome, Error> {
        let (asked, asked_wall) = (Instant::now(), SystemTime::now());
        let given = self.clock.given();
        let query = sqlx::query(ASK)
            .bind(&self.app)
            .bind(&self.holder)
            .bind(milliseconds(LEASE))
            .bind(given.map(to_database))
            .bind(milliseconds(LONGEST_TAKEOVER));
        let tried = "take or renew the scheduler lease";
        let row = self.connection.within(LIMIT, tried, async |connection| {
            connection.fetch_optional(query).await
        });
        let Some(row) = row.await? else {
            // The lease was free, and another process was faster.
            return Ok(LeaseOutcome::Follows(RENEWAL));
        };
        let read = || -> Result<LeaseOutcome, sqlx::Error> {
            let milliseconds: i64 = row.try_get("milliseconds")?;
            let duration = Duration::from_millis(u64::try_from(milliseconds).unwrap_or_default());
            if !row.try_get::<bool, _>("leads")? {
                return Ok(LeaseOutcome::Follows(duration));
            }
            let now: Time = row.try_get("now")?;
            let led_since: Time = row.try_get("led_since")?;
            Ok(LeaseOutcome::Leads(Lease {
                epoch: row.try_get("epoch")?,
                led_since: from_database(led_since),
                gap: duration,
                clock: self.clock.clone(),
                now: from_database(now),
                asked,
                asked_wall,
            }))
        };
        read().map_err(|error| self.connection.failed(tried, error))
    }

    /// Releases the lease. If that fails, the lease expires.
    pub(super) async fn give_up(&mut self, epoch: i64) {
        let query = sqlx::query(GIVE_UP)
            .bind(&self.app)
            .bind(&self.holder)
            .bind(epoch);
        let given_up =
            self.connection
                .within(LIMIT, "release the scheduler lease", async |connection| {
                    connection.execute(query).await
                });
        if let Err(error) = given_up.await {
            tracing::debug!(%error, "cannot release the scheduler lease; it expires");
        }
    }
}

fn milliseconds(duration: Duration) -> i64 {
    i64::try_from(duration.as_millis()).unwrap_or(i64::MAX)
}
