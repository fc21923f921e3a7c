//! Keys of publishes: unique work, and requests that may be repeated.

use std::fmt;
use std::time::Duration;

use serde::Serialize;

use super::IntoDuration;
use crate::error::{Error, PublishError};
use crate::topology::duration::Unreadable;

/// The longest key, in bytes.
pub const MAX_KEY: usize = 512;

/// How long a unique key is held at most, and how long an idempotency key is remembered, unless the publish says
/// otherwise.
const DEFAULT_TIME: Duration = Duration::from_secs(24 * 60 * 60);

/// A key that at most one task of the app has at a time. See [`PublishBuilder::unique`](super::PublishBuilder::unique).
///
/// ```
/// use tierline::task::Unique;
///
/// // While one waits or runs, another publish gets its id.
/// let unique = Unique::key("report:42");
/// // While one waits. A publish after its start is a new task, because the running one may have missed what changed.
/// let unique = Unique::key("index:7").until_started();
/// // The last publish wins, as long as the one before it still waits.
/// let unique = Unique::key("invoice:7").or_replace();
/// // One each hour, however soon it is done.
/// let unique = Unique::key("digest:ada").for_period("1h").or_refuse();
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unique(Box<UniqueSettings>);

#[derive(Debug, Clone, PartialEq, Eq)]
struct UniqueSettings {
    key: String,
    lifetime: Lifetime,
    period: Duration,
    at_most: Option<Duration>,
    if_held: IfHeld,
    unreadable: Unreadable,
}

/// Until when a key is held.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Lifetime {
    Started,
    Done,
    Period,
}

/// What a publish does whose key is held.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum IfHeld {
    Report,
    Replace,
    Refuse,
}

impl Unique {
    /// This key, held until the task is done, for 24 hours at most. A second publish gets the id of the first.
    ///
    /// All tasks of an app share their keys, so begin a key with what it is about. It has 1 to [`MAX_KEY`] bytes.
    pub fn key(key: impl Into<String>) -> Self {
        Self(Box::new(UniqueSettings {
            key: key.into(),
            lifetime: Lifetime::Done,
            period: DEFAULT_TIME,
            at_most: None,
            if_held: IfHeld::Report,
            unreadable: Unreadable::default(),
        }))
    }

    /// Holds the key while the task waits, until a worker takes it. A task that waits for a retry holds the key again,
    /// unless another one has it by then.
    #[must_use]
    pub fn until_started(mut self) -> Self {
        self.0.lifetime = Lifetime::Started;
        self
    }

    /// Holds the key while the task waits or runs, its retries included, until it is done, discarded, cancelled or a dead
    /// letter. The default.
    #[must_use]
    pub fn until_done(mut self) -> Self {
        self.0.lifetime = Lifetime::Done;
        self
    }

    /// Holds the key for this time after the publish, whatever becomes of the task.
    #[must_use]
    pub fn for_period(mut self, period: impl IntoDuration) -> Self {
        self.0.lifetime = Lifetime::Period;
        let Self(settings) = &mut self;
        settings
            .unreadable
            .set("for_period", period, &mut settings.period);
        self
    }

    /// Frees the key after this time, whatever became of the task: counted from when the task falls due, and for
    /// [a period](Self::for_period) from the publish. Default: 24 hours, or the period.
    #[must_use]
    pub fn at_most(mut self, time: impl IntoDuration) -> Self {
        let Self(settings) = &mut self;
        let mut at_most = settings.at_most.unwrap_or(DEFAULT_TIME);
        settings.unreadable.set("at_most", time, &mut at_most);
        settings.at_most = Some(at_most);
        self
    }

    /// If a task has the key and still waits, puts this one in its place: the other one will not run, and
    /// [`Receipt::replaced`](super::Receipt::replaced) is its id. One that runs cannot be replaced: this publish is then a
    /// duplicate.
    #[must_use]
    pub fn or_replace(mut self) -> Self {
        self.0.if_held = IfHeld::Replace;
        self
    }

    /// If a task has the key, fails with [`PublishError::Duplicate`], in place of a receipt for that task.
    #[must_use]
    pub fn or_refuse(mut self) -> Self {
        self.0.if_held = IfHeld::Refuse;
        self
    }
}

impl Unique {
    pub(super) fn task_key(&self) -> TaskKey {
        TaskKey::Unique(self.0.key.clone())
    }
}

impl From<&str> for Unique {
    fn from(key: &str) -> Self {
        Self::key(key)
    }
}

impl From<String> for Unique {
    fn from(key: String) -> Self {
        Self::key(key)
    }
}

/// A key under which a task is published once, however often the caller tries. See
/// [`PublishBuilder::idempotency_key`](super::PublishBuilder::idempotency_key).
///
/// ```
/// use tierline::task::IdempotencyKey;
///
/// let key = IdempotencyKey::new("POST /orders 7d1c").window("1h");
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IdempotencyKey(Box<IdempotencySettings>);

#[derive(Debug, Clone, PartialEq, Eq)]
struct IdempotencySettings {
    key: String,
    window: Duration,
    unreadable: Unreadable,
}

impl IdempotencyKey {
    /// This key, remembered for 24 hours. All tasks of an app share their keys. It has 1 to [`MAX_KEY`] bytes.
    pub fn new(key: impl Into<String>) -> Self {
        Self(Box::new(IdempotencySettings {
            key: key.into(),
            window: DEFAULT_TIME,
            unreadable: Unreadable::default(),
        }))
    }

    /// Remembers the key for this time after the publish.
    #[must_use]
    pub fn window(mut self, window: impl IntoDuration) -> Self {
        let Self(settings) = &mut self;
        settings
            .unreadable
            .set("window", window, &mut settings.window);
        self
    }
}

impl IdempotencyKey {
    pub(super) fn task_key(&self) -> TaskKey {
        TaskKey::Idempotency(self.0.key.clone())
    }
}

impl From<&str> for IdempotencyKey {
    fn from(key: &str) -> Self {
        Self::new(key)
    }
}

impl From<String> for IdempotencyKey {
    fn from(key: String) -> Self {
        Self::new(key)
    }
}

/// The key that a task was published with.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum TaskKey {
    /// Of [unique](Unique) work.
    Unique(String),
    /// Of a request that may be [repeated](IdempotencyKey).
    Idempotency(String),
}

impl TaskKey {
    /// The key as text.
    pub fn as_str(&self) -> &str {
        match self {
            Self::Unique(key) | Self::Idempotency(key) => key,
        }
    }

    /// What the key is for, as a word.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Unique(_) => "unique",
            Self::Idempotency(_) => "idempotency",
        }
    }
}

/// The key, and what it is for: `report:42 (unique)`.
impl fmt::Display for TaskKey {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{} ({})", self.as_str(), self.kind())
    }
}

/// A key that was checked, and how a publish takes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct KeyClaim {
    pub(crate) key: TaskKey,
    lifetime: Lifetime,
    time: Duration,
    if_held: IfHeld,
}

impl KeyClaim {
    /// # Errors
    /// [`PublishError::InvalidKey`] and [`Error::InvalidDuration`].
    pub(super) fn new(
        task: &str,
        unique: Option<&Unique>,
        idempotency: Option<&IdempotencyKey>,
    ) -> Result<Option<Self>, Error> {
        let refuse = |problem: String| {
            Err(Error::Publish(PublishError::InvalidKey {
                task: task.into(),
                problem: problem.into(),
            }))
        };
        let claim = match (unique, idempotency) {
            (None, None) => return Ok(None),
            (Some(_), Some(_)) => {
                return refuse(
                    "it has a unique key and an idempotency key; publish it with one of them"
                        .into(),
                );
            }
            (Some(unique), None) => {
                unique.0.unreadable.check()?;
                Self::unique(unique)
            }
            (None, Some(key)) => {
                key.0.unreadable.check()?;
                Self::idempotency(key)
            }
        };
        let (key, kind) = (claim.key.as_str(), claim.key.kind());
        if key.is_empty() || key.len() > MAX_KEY {
            return refuse(format!(
                "its {kind} key has {} bytes, and must have 1 to {MAX_KEY}; hash what is longer",
                key.len()
            ));
        }
        if key.contains('\0') {
            return refuse(format!(
                "its {kind} key contains NUL, which Postgres cannot store"
            ));
        }
        if claim.time.is_zero() {
            return refuse(format!("its {kind} key would be held for no time"));
        }
        Ok(Some(claim))
    }

    fn unique(unique: &Unique) -> Self {
        let Unique(settings) = unique;
        let (period, at_most) = (settings.period, settings.at_most);
        Self {
            key: unique.task_key(),
            lifetime: settings.lifetime,
            time: match settings.lifetime {
                Lifetime::Started | Lifetime::Done => at_most.unwrap_or(DEFAULT_TIME),
                Lifetime::Period => period.min(at_most.unwrap_or(Duration::MAX)),
            },
            if_held: settings.if_held,
        }
    }

    fn idempotency(key: &IdempotencyKey) -> Self {
        Self {
            key: key.task_key(),
            lifetime: Lifetime::Period,
            time: key.0.window,
            if_held: IfHeld::Report,
        }
    }
}

#[cfg(feature = "postgres")]
impl KeyClaim {
    /// Until when the key is held, as the database has it.
    pub(crate) fn holds(&self) -> &'static str {
        match self.lifetime {
            Lifetime::Started => "started",
            Lifetime::Done => "done",
            Lifetime::Period => "period",
        }
    }

    /// How long the key is held at most, from the publish of a task that falls due after `delay`.
    pub(crate) fn lasts(&self, delay: Duration) -> Duration {
        match self.lifetime {
            // A report of next quarter must not lose its key tomorrow.
            Lifetime::Started | Lifetime::Done => self.time.saturating_add(delay),
            Lifetime::Period => self.time,
        }
    }

    /// Whether another payload under the same key is an error.
    pub(crate) fn is_idempotency(&self) -> bool {
        matches!(self.key, TaskKey::Idempotency(_))
    }

    /// Whether the task takes the place of one that waits.
    pub(crate) fn replaces(&self) -> bool {
        self.if_held == IfHeld::Replace
    }

    /// Whether a key that is held is an error.
    pub(crate) fn refuses(&self) -> bool {
        self.if_held == IfHeld::Refuse
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR: Duration = Duration::from_secs(3_600);

    fn unique(unique: Unique) -> Result<KeyClaim, Error> {
        KeyClaim::new("ship", Some(&unique), None).map(Option::unwrap)
    }

    fn idempotency(key: IdempotencyKey) -> Result<KeyClaim, Error> {
        KeyClaim::new("ship", None, Some(&key)).map(Option::unwrap)
    }

    #[test]
    fn a_key_is_held_until_the_task_is_done_and_a_day_after_it_was_due_at_most() {
        let claim = unique("a".into()).unwrap();
        assert_eq!((claim.holds(), claim.lasts(HOUR)), ("done", 25 * HOUR));
        let claim = unique(Unique::key("a").until_started().at_most("2h")).unwrap();
        assert_eq!((claim.holds(), claim.lasts(HOUR)), ("started", 3 * HOUR));
    }

    #[test]
    fn a_period_counts_from_the_publish_and_may_be_longer_than_a_day() {
        let week = Unique::key("a").for_period("7d");
        let claim = unique(week.clone()).unwrap();
        assert_eq!((claim.holds(), claim.lasts(HOUR)), ("period", 168 * HOUR));
        assert_eq!(unique(week.at_most("1h")).unwrap().lasts(HOUR), HOUR);
        let window = IdempotencyKey::new("a").window("1h");
        assert_eq!(idempotency(window).unwrap().lasts(HOUR), HOUR);
        assert_eq!(idempotency("a".into()).unwrap().lasts(HOUR), 24 * HOUR);
    }

    #[test]
    fn keys_that_cannot_be_stored_are_refused() {
        let long = "k".repeat(MAX_KEY + 1);
        for key in ["", "a\0b", long.as_str()] {
            for refused in [unique(key.into()), idempotency(key.into())] {
                let error = refused.unwrap_err();
                assert!(
                    matches!(error, Error::Publish(PublishError::InvalidKey { .. })),
                    "{error}"
                );
            }
        }
        assert!(unique("k".repeat(MAX_KEY).into()).is_ok());
        assert!(unique(Unique::key("a").at_most("0s")).is_err());
        let both = KeyClaim::new("ship", Some(&"a".into()), Some(&"a".into()));
        assert!(both.unwrap_err().to_string().contains("one of them"));
        let unreadable = unique(Unique::key("a").for_period("10 parsecs")).unwrap_err();
        assert!(
            unreadable.to_string().contains("for_period"),
            "{unreadable}"
        );
    }
}
