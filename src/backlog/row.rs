//! A task as a row of the backlog, and back.

use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use lapin::BasicProperties;
use sqlx::Row;
use sqlx::postgres::PgRow;
use uuid::Uuid;

use super::keys::RowKey;
use super::parked::Lane;
use crate::TaskId;
use crate::message::{Message, QUARANTINE_FROM, Received, properties, wire};
use crate::postgres::Time;
use crate::task::KeyClaim;

/// The rank of priority 0 in quarantine. Ordinary ranks are 0 or less.
pub(crate) const QUARANTINE_RANK: i16 = 1_000;

/// A row to be inserted.
#[derive(Debug, Clone)]
pub(crate) struct NewRow {
    pub(crate) id: Uuid,
    pub(crate) tier: String,
    pub(crate) task: String,
    /// The task's id, unless `id` is it.
    pub(crate) name: Option<String>,
    pub(crate) rank: i16,
    /// When it falls due, from now.
    pub(crate) after: Duration,
    pub(crate) properties: Option<Vec<u8>>,
    pub(crate) payload: Vec<u8>,
    /// The key that it is published with.
    pub(crate) key: Option<RowKey>,
    /// Whether its message waited in the queue of its tier, which had room for it by the queue's own limit.
    pub(crate) was_queued: bool,
    /// The lane in which it is to wait. `None`: it may be claimed at once.
    pub(crate) lane: Option<Lane>,
}

impl NewRow {
    /// The row of a task that is published for the first time. An id that was drawn for this publish is the row's
    /// own. One that the caller gave may be that of another task.
    pub(crate) fn first(
        message: &mut Message,
        is_id_drawn: bool,
        claim: Option<KeyClaim>,
        after: Duration,
    ) -> Self {
        let drawn = message.id.uuid().filter(|_| is_id_drawn);
        // The column has it.
        message.due_at = None;
        let properties = match drawn.is_some() && is_plain(message) {
            true => None,
            false => Some(properties::encode(&message.properties(is_id_drawn))),
        };
        let key = claim.map(|it| RowKey::new(it, &message.id, &message.task, &message.payload));
        Self {
            key,
            id: drawn.unwrap_or_else(Uuid::now_v7),
            tier: message.tier.clone(),
            task: readable(&message.task),
            name: drawn.is_none().then(|| readable(message.id.as_str())),
            rank: rank(message.priority, message.crashes),
            after,
            properties,
            payload: std::mem::take(&mut message.payload),
            was_queued: false,
            lane: None,
        }
    }

    /// The row of a message that was delivered before: a retry or a redrive.
    pub(crate) fn forwarded(
        tier: String,
        after: Duration,
        id: &TaskId,
        sent: &BasicProperties,
        payload: Vec<u8>,
    ) -> Self {
        let task = sent.kind().as_ref().map_or("", |task| task.as_str());
        let priority = sent.priority().unwrap_or_default();
        Self {
            id: Uuid::now_v7(),
            tier,
            task: readable(task),
            name: Some(readable(id.as_str())),
            rank: rank(priority, Received::crashes_of(sent)),
            after,
            properties: Some(properties::encode(sent)),
            payload,
            key: None,
            was_queued: false,
            lane: None,
        }
    }

    /// How many bytes it takes in memory and on the way, about.
    pub(crate) fn size(&self) -> usize {
        let optional = [
            self.properties.as_ref().map(Vec::len),
            self.name.as_ref().map(String::len),
            self.key.as_ref().map(RowKey::size),
        ];
        let optional: usize = optional.into_iter().flatten().sum();
        self.payload.len() + optional + self.task.len() + 100
    }
}

/// A row that this process has claimed.
#[derive(Debug, Clone)]
pub(crate) struct ClaimedRow {
    pub(crate) key: RunKey,
    pub(crate) rank: i16,
    pub(crate) due_at: SystemTime,
    /// Whether a process that held it has died.
    pub(crate) is_held: bool,
    /// Whether it has waited for longer than its tier's `ttl`.
    pub(crate) is_expired: bool,
    /// Whether it was promoted or escalated: it stays in its tier.
    is_moved: bool,
    task: String,
    name: Option<String>,
    properties: Option<Vec<u8>>,
    pub(crate) payload: Vec<u8>,
}

/// Names one run of a task: the row, and the token of its claim, which is never used again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct RunKey {
    pub(crate) id: Uuid,
    pub(crate) token: i64,
}

impl ClaimedRow {
    /// The name of its task.
    pub(crate) fn task(&self) -> &str {
        &self.task
    }

    /// How many bytes it takes, about.
    pub(crate) fn size(&self) -> usize {
        self.payload.len() + self.properties.as_ref().map_or(0, Vec::len)
    }

    pub(crate) fn read(row: &PgRow) -> Result<Self, sqlx::Error> {
        let Time(due_at) = row.try_get("due_at")?;
        Ok(Self {
            key: RunKey {
                id: row.try_get("id")?,
                token: row.try_get("token")?,
            },
            rank: row.try_get("rank")?,
            due_at,
            is_held: row.try_get("is_held")?,
            is_expired: row.try_get("is_expired")?,
            is_moved: row.try_get::<Option<i32>, _>("first_backlog")?.is_some(),
            task: row.try_get("task")?,
            name: row.try_get("name")?,
            properties: row.try_get("properties")?,
            payload: row.try_get("payload")?,
        })
    }

    /// The message of this row, as a delivery of its tier.
    pub(crate) fn into_received(self, tier: &Arc<str>, now: SystemTime) -> Received {
        let moved_to = self.is_moved.then_some(priority(self.rank));
        let mut received = self.read_message(tier, now);
        if let Some(priority) = moved_to {
            // The properties have that of its first tier.
            received.mark_moved(priority);
        }
        received
    }

    fn read_message(self, tier: &Arc<str>, now: SystemTime) -> Received {
        let Some(encoded) = self.properties else {
            let name = self.name.as_deref().unwrap_or_default();
            if name.len().max(self.task.len()) > wire::LONGEST {
                // Only a producer without the library can write such a row.
                let problem = "its id or its task has more than 255 bytes";
                return Received::unreadable(&self.task, name, self.payload, tier, now, problem);
            }
            let id = match self.name {
                Some(name) => TaskId::from(name),
                None => TaskId::of_uuid(self.key.id),
            };
            let enqueued_at = TaskId::drawn_time(id.as_str()).unwrap_or(self.due_at);
            return Received::known(
                Message {
                    task: self.task,
                    id,
                    payload: self.payload,
                    attempt: 1,
                    tier: tier.to_string(),
                    priority: priority(self.rank),
                    enqueued_at,
                    due_at: Some(self.due_at),
                    expires_at: None,
                    headers: Default::default(),
                    traceparent: None,
                    life: 0,
                    crashes: 0,
                    history: Vec::new(),
                    redriven: None,
                    key: None,
                    limit_key: None,
                },
                now,
            );
        };
        // Damaged bytes are read as a message without a type, which becomes a dead letter.
        let properties = properties::decode(&encoded).unwrap_or_default();
        let mut received = Received::new(properties, self.payload, None, tier.clone(), now);
        received.assign_due_at(self.due_at);
        received
    }
}

/// The order of a task within its tier: the lowest rank is next.
pub(crate) fn rank(priority: u8, crashes: u32) -> i16 {
    let base = match crashes >= QUARANTINE_FROM {
        true => QUARANTINE_RANK,
        false => 0,
    };
    base - i16::from(priority)
}

/// The priority that a rank stands for.
pub(super) fn priority(rank: i16) -> u8 {
    let base = match rank > 0 {
        true => QUARANTINE_RANK,
        false => 0,
    };
    u8::try_from(base - rank).unwrap_or_default()
}

/// The rank of a task that moves to a tier with these priorities. A suspect stays one.
pub(super) fn rank_among(rank: i16, priorities: &RangeInclusive<u8>) -> i16 {
    let of = priority(rank);
    let nearest = of.clamp(*priorities.start(), *priorities.end());
    rank + i16::from(of) - i16::from(nearest)
}

/// Whether the columns of a row say everything about a first attempt.
fn is_plain(message: &Message) -> bool {
    message.attempt == 1
        && message.expires_at.is_none()
        && message.headers.is_empty()
        && message.traceparent.is_none()
        && message.life == 0
        && message.crashes == 0
        && message.history.is_empty()
        && message.redriven.is_none()
        && message.key.is_none()
        && message.limit_key.is_none()
}

/// A text that Postgres accepts: without NUL. The properties have the text as it is.
pub(super) fn readable(text: &str) -> String {
    text.replace('\0', "\u{fffd}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::task::PublishRequest;

    fn first(request: PublishRequest) -> (Message, NewRow) {
        let is_id_drawn = request.id.is_none();
        let message = Message::first(request, "normal", 5, SystemTime::now());
        let row = NewRow::first(&mut message.clone(), is_id_drawn, None, Duration::ZERO);
        (message, row)
    }

    fn received(row: NewRow, due_at: SystemTime) -> Message {
        let claimed = ClaimedRow {
            key: RunKey {
                id: row.id,
                token: 1,
            },
            rank: row.rank,
            due_at,
            is_held: false,
            is_expired: false,
            is_moved: false,
            task: row.task,
            name: row.name,
            properties: row.properties,
            payload: row.payload,
        };
        let received = claimed.into_received(&"normal".into(), SystemTime::now());
        received.message().unwrap().clone()
    }

    fn milliseconds(time: SystemTime) -> u128 {
        let since = time.duration_since(SystemTime::UNIX_EPOCH);
        since.unwrap().as_millis()
    }

    #[test]
    fn a_plain_task_needs_no_properties_and_comes_back_as_it_was() {
        let (message, row) = first(PublishRequest::named("greet", b"{}".to_vec()));
        assert!(row.properties.is_none() && row.name.is_none());
        let due_at = SystemTime::now();
        let mut back = received(row, due_at);
        assert_eq!(
            milliseconds(back.enqueued_at),
            milliseconds(message.enqueued_at)
        );
        back.enqueued_at = message.enqueued_at;
        let due_at = Some(due_at);
        assert_eq!(back, Message { due_at, ..message });
    }

    #[test]
    fn what_columns_cannot_say_travels_in_properties() {
        let mut request = PublishRequest::named("greet", b"1".to_vec());
        request.headers.insert("who".into(), "Ada".into());
        request.expires = Some(Duration::from_secs(60));
        let (message, row) = first(request);
        let back = received(row, SystemTime::now());
        assert_eq!(back.headers, message.headers);
        assert!(back.expires_at.is_some());
        assert_eq!((back.id, back.priority), (message.id, 5));
    }

    #[test]
    fn an_id_of_the_callers_own_never_is_the_rows_id() {
        let drawn = TaskId::random();
        for id in [drawn.as_str(), "order-7", "a\0b"] {
            let mut request = PublishRequest::named("greet", b"1".to_vec());
            request.id = Some(id.into());
            let (_, row) = first(request);
            assert_ne!(TaskId::of_uuid(row.id).as_str(), id);
            assert!(row.name.as_ref().is_some_and(|it| !it.contains('\0')));
            assert_eq!(received(row, SystemTime::now()).id.as_str(), id);
        }
    }

    #[test]
    fn higher_priorities_come_first_and_quarantine_is_apart() {
        assert!(rank(10, 0) < rank(5, 1) && rank(5, 1) < rank(0, 0));
        assert!(rank(255, 2) > rank(0, 1));
        for of in [0, 5, 255] {
            assert_eq!((priority(rank(of, 0)), priority(rank(of, 2))), (of, of));
        }
    }

    #[test]
    fn a_task_that_moves_has_the_nearest_priority_and_a_suspect_stays_one() {
        for (of, priorities, expected) in [(9, 0..=10, 9), (9, 0..=5, 5), (4, 5..=5, 5)] {
            for crashes in [0, 2] {
                let moved = rank_among(rank(of, crashes), &priorities);
                assert_eq!(moved, rank(expected, crashes), "{of} {priorities:?}");
            }
        }
    }
}
