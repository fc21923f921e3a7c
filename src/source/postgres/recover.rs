//! Takes over what dead processes held in the tiers of a group.
//!
//! A process is dead when its heartbeat has not changed for a lease, by the monotonic clock of the process that looks. No
//! clock of the server is compared with it, because that clock may jump, for example with a standby that takes over. A
//! process that could not look begins anew: a database that was away raises no crash count. Tasks that had begun get a
//! higher crash count; those that had not are ready again as they were. A relay runs nothing: what it held is as if it
//! had never been claimed.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use sqlx::Row;
use sqlx::postgres::PgRow;
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;

use super::RowSettings;
use super::forget::forget;
use super::look::is_not_migrated;
use crate::Error;
use crate::backlog::{ClaimedRow, Later, RunKey, connection, rank, store_later};
use crate::backoff::Backoff;
use crate::message::{DeadReason, Message, Received, properties};
use crate::observe::Event;
use crate::postgres::{DedicatedConnection, PgConnection, Time};
use crate::source::crash::{crash_loop, delay_after_crash};
use crate::source::task_ref;

/// How often to look for dead processes within the shortest lease.
const LOOKS: u32 = 3;
/// How long one step may take.
const LIMIT: Duration = Duration::from_secs(10);
/// How many tasks, and about how many bytes of them, one transaction takes over. It is at least one task.
const AT_ONCE: i64 = 50;
const BYTES_AT_ONCE: i64 = 4 << 20;

pub(super) struct Recovery {
    settings: Arc<RowSettings>,
    /// The names of the group's tiers, in its order.
    tiers: Vec<String>,
    connection: DedicatedConnection,
    /// The last heartbeat of each process, and since when this one has seen no other. Empty after a look failed, or came
    /// late.
    watched: HashMap<i64, (SystemTime, Instant)>,
}

/// A run of a dead process.
struct Lost {
    run: RunKey,
    /// The message, without its payload.
    received: Received,
    claimed: ClaimedRow,
    is_begun: bool,
}

/// What becomes of a run of a dead process.
enum Recovered {
    /// It is ready again, with this crash count if it had begun.
    Ready { crashes: Option<u32> },
    /// It is to be a dead letter.
    Dead { crashes: u32 },
}

impl Recovery {
    pub(super) fn new(settings: Arc<RowSettings>, tiers: &[String]) -> Self {
        Self {
            tiers: tiers.to_vec(),
            connection: connection(&settings.database),
            watched: HashMap::new(),
            settings,
        }
    }

    /// Takes over what dead processes held, until `ending` is cancelled.
    pub(super) async fn run(mut self, ending: CancellationToken) {
        let served = |name: &String| self.settings.tiers.get(name);
        let leases = self.tiers.iter().filter_map(served).map(|tier| tier.lease);
        let every = leases.min().unwrap_or_default() / LOOKS;
        let mut backoff = Backoff::new();
        let recovering = async {
            loop {
                if let Err(error) = self.recover(every).await {
                    let is_needed = self.settings.has_home() || !is_not_migrated(&error);
                    match backoff.is_worth_a_warning() && is_needed {
                        true => {
                            tracing::warn!(%error, tiers = ?self.tiers, "cannot take over from dead workers, trying again")
                        }
                        false => {
                            tracing::debug!(%error, tiers = ?self.tiers, "cannot take over from dead workers, trying again")
                        }
                    }
                    self.watched.clear();
                }
                let begin = Instant::now();
                sleep(every).await;
                if begin.elapsed() > every * 2 {
                    // This process stood still, and perhaps its whole machine.
                    self.watched.clear();
                }
            }
        };
        let _: Option<()> = ending.run_until_cancelled(recovering).await;
    }

    async fn recover(&mut self, every: Duration) -> Result<(), Error> {
        let settings = self.settings.clone();
        let (tiers, asked) = (&self.tiers, Instant::now());
        let looking = self
            .connection
            .within(LIMIT, "look for dead workers", async |connection| {
                holders(connection, settings.app(), tiers).await
            });
        let holders = looking.await?;
        if asked.elapsed() > every {
            self.watched.clear();
        }
        let mut dead = self.dead_among(holders);
        // The higher tier first.
        let tiers = &self.tiers;
        dead.sort_by_key(|dead| tiers.iter().position(|tier| *tier == dead.tier));
        if dead.is_empty() {
            return Ok(());
        }
        let mut failed = None;
        for dead in &dead {
            // One that fails keeps no other one waiting.
            failed = self.take_over_all(dead).await.err().or(failed);
        }
        let silent: Vec<_> = dead
            .iter()
            .filter_map(|dead| Some((dead.worker, dead.heartbeat_at?)))
            .collect();
        let forgetting = self
            .connection
            .within(LIMIT, "forget dead workers", async |connection| {
                forget(connection, &silent).await
            });
        forgetting.await?;
        failed.map_or(Ok(()), Err)
    }

    /// Those whose heartbeat has not changed for a lease, and those that the database does not know any more.
    fn dead_among(&mut self, holders: Vec<Holder>) -> Vec<Holder> {
        let now = Instant::now();
        let known = |worker: &i64| holders.iter().any(|holder| holder.worker == *worker);
        self.watched.retain(|worker, _| known(worker));
        let mut dead = Vec::new();
        for holder in holders {
            let (Some(heartbeat_at), Some(lease)) = (holder.heartbeat_at, holder.lease) else {
                // What nobody owns needs no patience: its process has left.
                dead.push(holder);
                continue;
            };
            let watched = self.watched.entry(holder.worker);
            let watched = watched.or_insert((heartbeat_at, now));
            if watched.0 != heartbeat_at {
                *watched = (heartbeat_at, now);
            }
            if now - watched.1 >= lease {
                dead.push(holder);
            }
        }
        dead
    }

    async fn take_over_all(&mut self, dead: &Holder) -> Result<(), Error> {
        while self.take_over(dead).await? {}
        Ok(())
    }

    /// Takes over some runs of a dead process. Whether there may be more.
    async fn take_over(&mut self, dead: &Holder) -> Result<bool, Error> {
        let settings = &self.settings;
        let taking = self
            .connection
            .within(LIMIT, "take over tasks", async |connection| {
                let mut transaction = connection.begin().await?;
                let lost = lost_runs(&mut transaction, settings.app(), dead).await?;
                let mut recovered = Vec::with_capacity(lost.len());
                for lost in &lost {
                    let is_held = !dead.is_relay;
                    recovered.push(settings.recover(&mut transaction, lost, is_held).await?);
                }
                transaction.commit().await?;
                Ok((lost, recovered))
            });
        let (lost, recovered) = taking.await?;
        let mut is_any = false;
        for (lost, recovered) in lost.iter().zip(recovered) {
            match recovered {
                Recovered::Ready { crashes } => {
                    self.settings.report(lost, crashes);
                    is_any = true;
                }
                Recovered::Dead { crashes } => match self.dead_letter(lost, crashes).await {
                    Ok(()) => is_any = true,
                    // It holds up no other.
                    Err(error) => {
                        tracing::warn!(%error, "cannot dead-letter a task that kills workers, trying again");
                    }
                },
            }
        }
        Ok(is_any)
    }

    /// Makes a run a dead letter that workers have died of too often, in a transaction of its own: Postgres may refuse
    /// a part of it.
    async fn dead_letter(&mut self, lost: &Lost, crashes: u32) -> Result<(), Error> {
        let failure = crash_loop(crashes);
        let run = lost.run;
        let reading = self
            .connection
            .within(LIMIT, "read a task", async |connection| {
                payload(connection, run).await
            });
        let Some(payload) = reading.await? else {
            // Somebody else was faster.
            return Ok(());
        };
        let received = lost.received(payload);
        let message = received.message().ok();
        let dead = message.map(|message| {
            let counted = Message {
                crashes,
                ..message.clone()
            };
            counted.failed(&failure)
        });
        let (connection, dead) = (&mut self.connection, dead.as_ref());
        let reason = DeadReason::CrashLoop;
        let storing = self
            .settings
            .store_dead(connection, run, &received, dead, reason, failure);
        storing.await.map(drop)
    }
}

/// A process that serves a tier, or holds tasks of it.
struct Holder {
    worker: i64,
    tier: String,
    /// Its last heartbeat, by the clock of the server, and the lease that it has there, by what it said itself: maps of
    /// two releases may differ. `None`: the database does not know it any more.
    heartbeat_at: Option<SystemTime>,
    lease: Option<Duration>,
    is_relay: bool,
}

/// The processes that serve one of these tiers, and those that hold something and are not known any more.
async fn holders(
    connection: &mut PgConnection<'_>,
    app: &str,
    tiers: &[String],
) -> Result<Vec<Holder>, sqlx::Error> {
    let rows = sqlx::query(
        "SELECT workers.id, lease.tier, heartbeat_at, lease.seconds::float8 AS seconds, is_relay \
         FROM tierline.workers CROSS JOIN LATERAL jsonb_each_text(leases) AS lease (tier, seconds) \
         WHERE app = $1 AND lease.tier = ANY($2) \
         UNION \
         SELECT running.worker, backlogs.tier, NULL, NULL, false FROM tierline.running \
         JOIN tierline.backlogs ON backlogs.id = running.backlog \
         WHERE backlogs.app = $1 AND backlogs.tier = ANY($2) \
             AND NOT EXISTS (SELECT FROM tierline.workers WHERE workers.id = running.worker)",
    )
    .bind(app)
    .bind(tiers)
    .fetch_all(connection)
    .await?;
    let read = |row: &PgRow| {
        let seconds: Option<f64> = row.try_get("seconds")?;
        let heartbeat_at: Option<Time> = row.try_get("heartbeat_at")?;
        Ok(Holder {
            worker: row.try_get("id")?,
            tier: row.try_get("tier")?,
            heartbeat_at: heartbeat_at.map(|Time(at)| at),
            lease: seconds.and_then(|it| Duration::try_from_secs_f64(it).ok()),
            is_relay: row.try_get("is_relay")?,
        })
    };
    rows.iter().map(read).collect()
}

/// Locks some runs of a process that is still dead. Their payloads stay in the database.
async fn lost_runs(
    connection: &mut PgConnection<'_>,
    app: &str,
    dead: &Holder,
) -> Result<Vec<Lost>, sqlx::Error> {
    let rows = sqlx::query(
        "WITH locked AS MATERIALIZED ( \
            SELECT id, token, due_at, rank, is_begun, is_held, first_backlog, task, name, properties, \
                octet_length(payload) AS size \
            FROM tierline.running WHERE worker = $1 \
                AND backlog = (SELECT id FROM tierline.backlogs WHERE app = $6 AND tier = $2) \
                AND NOT EXISTS (SELECT FROM tierline.workers WHERE id = $1 AND heartbeat_at IS DISTINCT FROM $3) \
            ORDER BY id LIMIT $4 FOR UPDATE OF running SKIP LOCKED \
         ) SELECT *, ''::bytea AS payload, false AS is_expired \
         FROM (SELECT locked.*, sum(size) OVER (ORDER BY id) - size AS before FROM locked) AS locked WHERE before < $5",
    )
    .bind(dead.worker)
    .bind(&dead.tier)
    .bind(dead.heartbeat_at.map(Time))
    .bind(AT_ONCE)
    .bind(BYTES_AT_ONCE)
    .bind(app)
    .fetch_all(connection)
    .await?;
    let read = |row: &PgRow| {
        let claimed = ClaimedRow::read(row)?;
        let tier = dead.tier.as_str().into();
        Ok(Lost {
            run: claimed.key,
            is_begun: row.try_get("is_begun")?,
            received: claimed.clone().into_received(&tier, SystemTime::now()),
            claimed,
        })
    };
    rows.iter().map(read).collect()
}

async fn payload(
    connection: &mut PgConnection<'_>,
    run: RunKey,
) -> Result<Option<Vec<u8>>, sqlx::Error> {
    sqlx::query_scalar("SELECT payload FROM tierline.running WHERE id = $1 AND token = $2")
        .bind(run.id)
        .bind(run.token)
        .fetch_optional(connection)
        .await
}

impl Lost {
    /// The message with its payload.
    fn received(&self, payload: Vec<u8>) -> Received {
        let mut claimed = self.claimed.clone();
        claimed.payload = payload;
        claimed.into_received(&self.received.tier().into(), SystemTime::now())
    }
}

impl RowSettings {
    /// Makes a run of a dead process ready again, unless it is to be a dead letter. `is_held`: whether to remember that
    /// a process died with it.
    async fn recover(
        &self,
        connection: &mut PgConnection<'_>,
        lost: &Lost,
        is_held: bool,
    ) -> Result<Recovered, sqlx::Error> {
        let counted = match lost.received.message() {
            Ok(message) if lost.is_begun => Some(Message {
                crashes: message.crashes.saturating_add(1),
                ..message.clone()
            }),
            _ => None,
        };
        let Some(counted) = counted else {
            let back = ready_again(connection, lost.run, is_held).await;
            return back.map(|()| Recovered::Ready { crashes: None });
        };
        let crashes = counted.crashes;
        if crashes >= self.consumer.dead_at_crashes {
            return Ok(Recovered::Dead { crashes });
        }
        let later = Later {
            run: lost.run,
            tier: counted.tier.clone(),
            rank: rank(counted.priority, crashes),
            after: delay_after_crash(crashes),
            properties: properties::encode(&lost.received.successor(&counted)),
            is_held: true,
        };
        store_later(connection, &[later]).await?;
        let crashes = Some(crashes);
        Ok(Recovered::Ready { crashes })
    }

    fn report(&self, lost: &Lost, crashes: Option<u32>) {
        if let Ok(message) = lost.received.message() {
            let task = task_ref(message);
            let (name, id) = (task.name, task.id);
            match crashes {
                Some(crashes) => {
                    tracing::warn!(task = name, %id, crashes, "a worker died while it ran this task");
                    let observers = &self.consumer.observers;
                    observers.emit(&Event::Suspected { task, crashes });
                }
                None => {
                    tracing::info!(task = name, %id, "a worker died before it ran this task: it is ready again");
                }
            }
        }
        self.look_now.notify_one();
    }
}

/// Puts a run that had not begun back as it was.
async fn ready_again(
    connection: &mut PgConnection<'_>,
    run: RunKey,
    is_held: bool,
) -> Result<(), sqlx::Error> {
    sqlx::query(
        "WITH back AS (DELETE FROM tierline.running WHERE id = $1 AND token = $2 RETURNING running.*) \
         INSERT INTO tierline.ready (id, due_at, rank, is_held, backlog, first_backlog, task, name, properties, payload) \
         SELECT id, due_at, rank, is_held OR $3, backlog, first_backlog, task, name, properties, payload FROM back \
         ON CONFLICT (id) DO NOTHING",
    )
    .bind(run.id)
    .bind(run.token)
    .bind(is_held)
    .execute(connection)
    .await?;
    Ok(())
}
