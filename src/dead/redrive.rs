//! Redrive: publish a dead letter again, wait for the confirm, then mark its row.
//!
//! A redrive first claims the row (state `redriving`, with a token, a time and the state before), so that
//! two operators never publish the same one. If it cannot be published, the row returns to the state
//! before. If the caller goes away, the row is published and marked anyway. A process that dies in between
//! leaves claims behind, which any process may take after the lease. The message may then be published
//! twice, with the same id, and is never lost.

use std::time::Duration;

use futures_util::{StreamExt, stream};
use lapin::BasicProperties;
use sqlx::postgres::PgRow;
use sqlx::{Postgres, QueryBuilder, Row};
use tokio::time::{Instant, sleep};
use tracing::Instrument;

use super::{DeadLetters, State};
use crate::error::{DatabaseError, DeadLetterError, PublishError};
use crate::message::{Message, Redriven, properties};
use crate::observe::{Event, PublishResult};
use crate::postgres::Time;
use crate::publish::{Content, DEFAULT_DEADLINE, Outgoing, Publisher};
use crate::route::{self, RouteRequest};
use crate::spans::{RedriveSpan, in_current_context};
use crate::task::Receipt;
use crate::topology::Topology;
use crate::{Error, TaskId};

/// How long a claim lasts: longer than any batch takes to be published and marked.
pub(super) const LEASE: Duration = Duration::from_secs(60);
/// How many messages of a batch are in flight at once.
const AT_ONCE: usize = 1_000;
/// How many bytes of rows one claim takes, about: they are held in memory.
const CLAIMED_BYTES: i64 = 4 << 20;
/// How often, and with which pause, a redrive tries to mark published rows.
const MARK_TRIES: u32 = 20;
const MARK_PAUSE: Duration = Duration::from_millis(500);

/// A row that this process has claimed.
#[derive(Debug)]
pub(super) struct Claimed {
    pub(super) id: i64,
    identity: String,
    /// `None` where it could not be read.
    task: Option<String>,
    life: i32,
    tier: String,
    payload: Vec<u8>,
    properties: Vec<u8>,
    /// Its position in the order of a bulk redrive.
    pub(super) died_at: Time,
}

/// The result of publishing a claimed row.
#[derive(Debug)]
pub(super) enum Sent {
    /// Published and confirmed.
    Confirmed,
    /// It cannot be published in its present form.
    Refused(Error),
    /// Not confirmed: the broker may have stored it or not.
    Failed(Error),
}

impl DeadLetters {
    /// Publishes a dead letter again, to the tier that the map gives its task today, and waits for
    /// the confirm. Its attempts, crash count and expiry are reset; its id, headers and payload stay.
    ///
    /// A row is redriven once. If the task dies again, it becomes a new dead letter that is linked to this one.
    ///
    /// # Errors
    /// [`DeadLetterError::NotFound`]; [`DeadLetterError::Refused`] if its task is no longer in the
    /// map, it cannot be parsed, it was already redriven or another process is redriving it; as publishing,
    /// and then its state does not change; as every use of the database.
    pub async fn redrive(&self, id: i64) -> Result<Receipt, Error> {
        self.publisher()?;
        let letters = self.clone();
        to_its_end(async move { letters.redrive_one(id).await }).await
    }

    async fn redrive_one(&self, id: i64) -> Result<Receipt, Error> {
        let publisher = self.publisher()?;
        publisher
            .until_overrides_are_known(Instant::now() + DEFAULT_DEADLINE)
            .await;
        let token = uuid::Uuid::now_v7().to_string();
        let mut query = self.claim(&token);
        query.push(" AND id = ").push_bind(id);
        query.push(" AND (state IN ('dead', 'discarded')");
        self.push_stale(&mut query);
        query.push(")");
        let claimed = self.claimed(query).await?;
        let Some(claimed) = claimed.into_iter().next() else {
            let problem = match self.get(id).await?.summary.state {
                State::Redriven => {
                    "it was already redriven; if it died again, redrive the new dead letter"
                }
                _ => "another process is redriving it",
            };
            return Err(Error::DeadLetter(DeadLetterError::Refused {
                id,
                problem: problem.into(),
            }));
        };
        let deadline = Instant::now() + DEFAULT_DEADLINE;
        match self.send_one(publisher, claimed, deadline).await {
            Ok((task, tier)) => {
                self.mark_published(&token, &[id]).await?;
                Ok(Receipt::new(task, tier, std::time::SystemTime::now()))
            }
            Err(error) => {
                self.give_back(&token, &[id]).await?;
                Err(error)
            }
        }
    }

    /// The beginning of a statement that claims rows. Add conditions, then run it with [`claimed`].
    ///
    /// [`claimed`]: Self::claimed
    pub(super) fn claim(&self, token: &str) -> QueryBuilder<Postgres> {
        let mut query = QueryBuilder::new("WITH token AS (SELECT ");
        query.push_bind(token.to_owned());
        query.push(
            "::text AS token), chosen AS (SELECT id, died_at, \
             octet_length(payload) + octet_length(properties) AS size \
             FROM tierline.dead_letters WHERE app = ",
        );
        query.push_bind(self.app().to_owned());
        query
    }

    /// Adds rows whose claim is older than the lease.
    pub(super) fn push_stale(&self, query: &mut QueryBuilder<Postgres>) {
        query.push(" OR state = 'redriving' AND claimed_at < now() - make_interval(secs => ");
        query.push_bind(self.lease.as_secs_f64()).push(")");
    }

    /// Restores the state before the claim for rows whose claim is older than the lease, or belongs to a dead
    /// runner.
    pub(super) async fn take_up(&self, dead_runner: Option<&str>) -> Result<(), Error> {
        let taking = sqlx::query(
            "UPDATE tierline.dead_letters SET state = coalesce(claimed_from, 'dead'), \
             claimed_from = NULL, claim = NULL, claimed_at = NULL \
             WHERE app = $1 AND state = 'redriving' \
             AND (claim = $2 OR claimed_at < now() - make_interval(secs => $3))",
        )
        .bind(self.app())
        .bind(dead_runner)
        .bind(self.lease.as_secs_f64())
        .execute(self.database.pool());
        self.within("release abandoned claims on dead letters", taking)
            .await?;
        Ok(())
    }

    /// Runs a statement that claims rows. It takes them in the order in which they died, as far as they fit
    /// into memory, and at least one.
    pub(super) async fn claimed(
        &self,
        mut query: QueryBuilder<Postgres>,
    ) -> Result<Vec<Claimed>, Error> {
        query.push(
            " FOR UPDATE SKIP LOCKED), \
             sized AS (SELECT id, sum(size) OVER (ORDER BY died_at, id) - size AS before FROM chosen) \
             UPDATE tierline.dead_letters AS letter \
             SET state = 'redriving', claim = token.token, claimed_at = now(), \
             claimed_from = CASE letter.state WHEN 'redriving' \
                 THEN coalesce(letter.claimed_from, 'dead') ELSE letter.state END \
             FROM sized, token WHERE letter.id = sized.id AND sized.before < ",
        );
        query.push_bind(CLAIMED_BYTES);
        query
            .push(" RETURNING letter.id, identity, task, life, tier, payload, properties, died_at");
        let claiming = async {
            let rows = query.build().fetch_all(self.database.pool()).await?;
            let claimed: Result<Vec<_>, _> = rows.iter().map(Claimed::read).collect();
            claimed
        };
        self.within("claim dead letters", claiming).await
    }

    /// Publishes claimed rows concurrently, and returns the result of each.
    pub(super) async fn send(&self, claimed: Vec<Claimed>) -> Result<Vec<(i64, Sent)>, Error> {
        let publisher = self.publisher()?;
        publisher
            .until_overrides_are_known(Instant::now() + DEFAULT_DEADLINE)
            .await;
        let deadline = Instant::now() + DEFAULT_DEADLINE;
        let sending = claimed.into_iter().map(|claimed| async move {
            let id = claimed.id;
            match self.send_one(publisher, claimed, deadline).await {
                Ok(_) => (id, Sent::Confirmed),
                Err(error) if error.is_transient() => (id, Sent::Failed(error)),
                Err(error) => (id, Sent::Refused(error)),
            }
        });
        let sending = stream::iter(sending).buffer_unordered(AT_ONCE);
        Ok(sending.collect().await)
    }

    /// Publishes a claimed row, and emits what became of that. Returns its task's id and the tier that it went to.
    async fn send_one(
        &self,
        publisher: &Publisher,
        claimed: Claimed,
        deadline: Instant,
    ) -> Result<(TaskId, String), Error> {
        let dead_letter = claimed.id;
        let (name, died_in) = (claimed.task.clone(), claimed.tier.clone());
        let mut span = RedriveSpan::default();
        let sending = async {
            let (outgoing, task, tier, begun) =
                prepare(&self.topology, publisher, claimed, &self.who)?;
            span = begun;
            publisher.forward(outgoing, &task, deadline).await?;
            Ok((task, tier))
        };
        let sent: Result<(TaskId, String), Error> = sending.await;
        match &sent {
            Ok((_, tier)) => span.ended(tier, None),
            Err(error) => span.ended(&died_in, Some(error.kind().as_str())),
        }
        let (id, tier, result) = match &sent {
            Ok((id, tier)) => (Some(id), tier, PublishResult::Stored),
            Err(error) => (None, &died_in, PublishResult::Failed(error.kind())),
        };
        publisher.observers().emit(&Event::Redriven {
            dead_letter,
            name: name.as_deref(),
            id,
            tier,
            result,
        });
        sent
    }

    /// Marks the rows as redriven whose claim is still ours. A row that is published and not marked would be
    /// published again, so this tries for a while.
    pub(super) async fn mark_published(&self, token: &str, ids: &[i64]) -> Result<(), Error> {
        let mut tries = 0;
        loop {
            match self.mark(token, ids).await {
                Err(error) if error.is_transient() && tries < MARK_TRIES => {
                    tries += 1;
                    sleep(MARK_PAUSE).await;
                }
                marked => return marked,
            }
        }
    }

    async fn mark(&self, token: &str, ids: &[i64]) -> Result<(), Error> {
        let marking = sqlx::query(
            "UPDATE tierline.dead_letters SET state = 'redriven', redriven_at = now(), \
             claimed_from = NULL, claim = NULL, claimed_at = NULL, \
             actions = actions || jsonb_build_object( \
                 'at', to_char(now() AT TIME ZONE 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS.MS\"Z\"'), \
                 'who', $3::text, 'what', 'redriven', 'why', $4::text) \
             WHERE id = ANY($1) AND claim = $2 AND state = 'redriving'",
        )
        .bind(ids)
        .bind(token)
        .bind(&*self.who)
        .bind(&*self.why)
        .execute(self.database.pool());
        self.within("mark redriven dead letters", marking).await?;
        Ok(())
    }

    /// Releases rows that were not published: restores their state before the claim.
    pub(super) async fn give_back(&self, token: &str, ids: &[i64]) -> Result<(), Error> {
        let giving = sqlx::query(
            "UPDATE tierline.dead_letters SET state = coalesce(claimed_from, 'dead'), \
             claimed_from = NULL, claim = NULL, claimed_at = NULL \
             WHERE id = ANY($1) AND claim = $2 AND state = 'redriving'",
        )
        .bind(ids)
        .bind(token)
        .execute(self.database.pool());
        self.within("release dead letters", giving).await?;
        Ok(())
    }
}

/// Runs a future to its end even if the caller goes away.
pub(super) async fn to_its_end<T: Send + 'static>(
    work: impl Future<Output = Result<T, Error>> + Send + 'static,
) -> Result<T, Error> {
    match tokio::spawn(in_current_context(work.in_current_span())).await {
        Ok(done) => done,
        Err(ended) => match ended.try_into_panic() {
            Ok(panic) => std::panic::resume_unwind(panic),
            Err(_) => Err(Error::Database(DatabaseError::Failed {
                tried: "redrive dead letters".into(),
                cause: "the runtime is shutting down".into(),
                source: None,
            })),
        },
    }
}

impl Claimed {
    fn read(row: &PgRow) -> Result<Self, sqlx::Error> {
        Ok(Self {
            id: row.try_get("id")?,
            identity: row.try_get("identity")?,
            task: row.try_get("task")?,
            life: row.try_get("life")?,
            tier: row.try_get("tier")?,
            payload: row.try_get("payload")?,
            properties: row.try_get("properties")?,
            died_at: row.try_get("died_at")?,
        })
    }
}

/// The message that a row becomes, with its destination, its id and its tier.
fn prepare(
    topology: &Topology,
    publisher: &Publisher,
    claimed: Claimed,
    who: &str,
) -> Result<(Outgoing, TaskId, String, RedriveSpan), Error> {
    let refused = |problem: String| {
        Error::DeadLetter(DeadLetterError::Refused {
            id: claimed.id,
            problem: problem.into(),
        })
    };
    let delivered = properties::decode(&claimed.properties)
        .ok_or_else(|| refused("its properties cannot be parsed".to_owned()))?;
    let now = std::time::SystemTime::now();
    let message = Message::from_wire(&delivered, Vec::new(), &claimed.tier, now);
    let mut message = message.map_err(refused)?;
    let origin = RouteRequest::Redrive {
        tier: &claimed.tier,
        priority: message.priority,
    };
    let overridden = publisher.override_of(&message.task);
    let (overridden, servers, task) = (overridden.as_deref(), publisher.servers(), &message.task);
    let route = route::destination(topology, overridden, servers, task, origin, Duration::ZERO);
    let route = route.map_err(|error| match error {
        Error::Publish(PublishError::UnmappedTask { task }) => refused(format!(
            "its task `{task}` is not mapped to a tier: add it to [tasks] in the map"
        )),
        error => error,
    })?;
    route::check_size(topology, &message.task, &claimed.payload)?;
    message.priority = route.priority;
    let mut message = redriven_message(&claimed, message, &delivered, who);
    // Its wait for a worker begins now; the time in the log does not count.
    message.due_at = Some(now);
    let span = publisher.spans().redrive(
        claimed.id,
        claimed.task.as_deref(),
        message.traceparent.as_deref(),
    );
    message.traceparent = span.traceparent().or(message.traceparent);
    let content = Content::Forwarded {
        payload: claimed.payload,
        properties: message.follow(&delivered, None),
    };
    let tier = route.tier.clone();
    let letter = Outgoing::new(route, &message.id, content)?;
    Ok((letter, message.id, tier, span))
}

fn redriven_message(
    claimed: &Claimed,
    mut message: Message,
    delivered: &BasicProperties,
    who: &str,
) -> Message {
    let id = delivered.message_id().as_ref();
    if id.is_none_or(|id| id.as_str().is_empty()) {
        // The same each time, so that a message that is published twice is recognised.
        message.id = TaskId::from(claimed.identity.as_str());
    }
    message.attempt = 1;
    message.crashes = 0;
    message.history.clear();
    message.expires_at = None;
    message.life = claimed.life.unsigned_abs().saturating_add(1);
    message.redriven = Some(Redriven {
        from: claimed.id.to_string(),
        by: who.to_owned(),
    });
    message
}
