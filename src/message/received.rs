//! A message as it came, parsed once.

use std::borrow::Cow;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, SystemTime};

use lapin::BasicProperties;

use super::identity::{self, Key};
#[cfg(feature = "postgres")]
use super::identity::{CompletionKey, Unidentified};
use super::{Death, Message, Repaired, wire};
use crate::spans::ProcessSpan;
use crate::task::TaskId;

/// A delivery's message, and everything that travels on with what follows it.
#[derive(Debug)]
pub(crate) struct Received {
    properties: BasicProperties,
    /// Whether it came without properties, which are made of the message where they are needed.
    is_known: bool,
    repaired: Option<Repaired>,
    tier: Arc<str>,
    arrived_at: SystemTime,
    crashes: u32,
    /// Whether it was moved to its tier, where it stays.
    is_moved: bool,
    /// Whether the broker delivered it before.
    #[cfg_attr(
        not(feature = "postgres"),
        expect(dead_code, reason = "completion marks are in Postgres")
    )]
    is_redelivered: bool,
    /// The payload, until the message is parsed.
    unparsed: Mutex<Vec<u8>>,
    message: OnceLock<Result<Message, Unreadable>>,
    key: OnceLock<Option<Key>>,
    /// How long its handler ran, once that has ended.
    ran: OnceLock<Duration>,
    /// The span of its handler, once that was started.
    span: OnceLock<ProcessSpan>,
}

/// A message that cannot become a task.
#[derive(Debug)]
pub(crate) struct Unreadable {
    /// Why, for its dead letter.
    pub(crate) problem: String,
    /// The task that it names, if any.
    pub(crate) task: String,
    /// The id that it came with, or a text that says that it has none.
    pub(crate) id: TaskId,
    payload: Vec<u8>,
}

impl Received {
    /// What arrived in `tier` at `arrived_at`.
    pub(crate) fn new(
        properties: BasicProperties,
        payload: Vec<u8>,
        repaired: Option<Repaired>,
        tier: Arc<str>,
        arrived_at: SystemTime,
    ) -> Self {
        Self {
            crashes: wire::crashes(&properties),
            is_redelivered: false,
            properties,
            is_known: false,
            repaired,
            tier,
            arrived_at,
            is_moved: false,
            unparsed: Mutex::new(payload),
            message: OnceLock::new(),
            key: OnceLock::new(),
            ran: OnceLock::new(),
            span: OnceLock::new(),
        }
    }

    /// A message that is known already, and needs no parsing. It came without properties.
    #[cfg(feature = "postgres")]
    pub(crate) fn known(message: Message, arrived_at: SystemTime) -> Self {
        Self {
            properties: BasicProperties::default(),
            is_known: true,
            repaired: None,
            tier: message.tier.as_str().into(),
            arrived_at,
            crashes: message.crashes,
            is_moved: false,
            is_redelivered: false,
            unparsed: Mutex::default(),
            message: Ok(message).into(),
            key: OnceLock::new(),
            ran: OnceLock::new(),
            span: OnceLock::new(),
        }
    }

    /// A message that cannot become a task, because of its task's name or its id.
    #[cfg(feature = "postgres")]
    pub(crate) fn unreadable(
        task: &str,
        id: &str,
        payload: Vec<u8>,
        tier: &Arc<str>,
        arrived_at: SystemTime,
        problem: &str,
    ) -> Self {
        let cut = |text| wire::cut(text, wire::LONGEST);
        let (task, id) = (cut(task), cut(id));
        let properties = BasicProperties::default().with_type(task.into());
        let properties = properties.with_message_id(id.into());
        let unreadable = Unreadable {
            problem: problem.to_owned(),
            task: task.to_owned(),
            id: TaskId::from(id),
            payload,
        };
        Self {
            message: Err(unreadable).into(),
            ..Self::new(properties, Vec::new(), None, tier.clone(), arrived_at)
        }
    }

    /// Says whether the broker delivered it before.
    pub(crate) fn redelivered(self, is_redelivered: bool) -> Self {
        Self {
            is_redelivered,
            ..self
        }
    }

    /// Notes how long its handler ran. What follows on it is stored later, and said then.
    pub(crate) fn set_ran(&self, ran: Duration) {
        // The watchdog and the handler may both say so; the first one counts.
        let _ = self.ran.set(ran);
    }

    /// Begins the span of its handler.
    pub(crate) fn begin_span(&self, begin: impl FnOnce() -> ProcessSpan) -> &ProcessSpan {
        self.span.get_or_init(begin)
    }

    /// The span of its handler, if that was started.
    pub(crate) fn span(&self) -> Option<&ProcessSpan> {
        self.span.get()
    }

    /// How long its handler ran; `None` if none did.
    pub(crate) fn ran(&self) -> Option<Duration> {
        self.ran.get().copied()
    }

    /// The message. The first call parses it. For most messages that is the job in a slot, so that a group's ticks
    /// are short.
    pub(crate) fn message(&self) -> Result<&Message, &Unreadable> {
        let message = self.message.get_or_init(|| self.parse());
        message.as_ref()
    }

    /// The name of its task, without parsing it. Empty: it has none.
    pub(crate) fn task(&self) -> &str {
        match (self.is_known, self.message.get()) {
            (true, Some(Ok(message))) => &message.task,
            _ => self
                .properties
                .kind()
                .as_ref()
                .map_or("", |task| task.as_str()),
        }
    }

    /// A message without an id is given one.
    fn parse(&self) -> Result<Message, Unreadable> {
        let mut unparsed = self.unparsed.lock().unwrap_or_else(PoisonError::into_inner);
        let payload = std::mem::take(&mut *unparsed);
        let repaired = self.repaired.as_ref();
        let envelope = match repaired.filter(|repaired| repaired.is_unreadable) {
            Some(Repaired { problem, .. }) => {
                Err(format!("its properties are malformed: {problem}"))
            }
            None => Message::envelope(&self.properties, &self.tier, self.arrived_at),
        };
        let task = || self.properties.kind().as_ref();
        match envelope {
            Ok(message) => Ok(Message { payload, ..message }),
            Err(problem) => Err(Unreadable {
                problem,
                task: task().map_or_else(String::new, |task| task.as_str().to_owned()),
                id: TaskId::from(identity::id(&self.properties).unwrap_or("without an id")),
                payload,
            }),
        }
    }

    /// The crash count that properties say.
    #[cfg(feature = "postgres")]
    pub(crate) fn crashes_of(properties: &BasicProperties) -> u32 {
        wire::crashes(properties)
    }

    /// Says when the message fell due, and which priority it has in its tier.
    #[cfg(feature = "postgres")]
    pub(crate) fn assign_place(&mut self, due_at: SystemTime, priority: u8) {
        let _ = self.message();
        if let Some(Ok(message)) = self.message.get_mut() {
            message.due_at = Some(due_at);
            message.priority = priority;
        }
    }

    /// Says that a rule or an operator has moved the message to its tier.
    #[cfg(feature = "postgres")]
    pub(crate) fn mark_moved(&mut self) {
        self.is_moved = true;
    }

    /// Whether a rule or an operator has moved it to its tier. It stays there, whatever the map says of its task.
    pub(crate) fn is_moved(&self) -> bool {
        self.is_moved
    }

    /// Says which tier the message is of. One that cannot be read is of none.
    pub(crate) fn assign_tier(&mut self, tier: String) {
        let _ = self.message();
        if let Some(Ok(message)) = self.message.get_mut() {
            message.tier = tier;
        }
    }

    pub(crate) fn payload(&self) -> &[u8] {
        match self.message() {
            Ok(message) => &message.payload,
            Err(unreadable) => &unreadable.payload,
        }
    }

    /// The tier that it arrived in.
    #[cfg(feature = "postgres")]
    pub(crate) fn tier(&self) -> &str {
        &self.tier
    }

    /// The id, for logs and errors.
    pub(crate) fn id(&self) -> &TaskId {
        match self.message() {
            Ok(message) => &message.id,
            Err(unreadable) => &unreadable.id,
        }
    }

    /// How often a worker died with it.
    pub(crate) fn crashes(&self) -> u32 {
        self.crashes
    }

    /// When the publisher says that it enqueued the message.
    pub(crate) fn stated_enqueued_at(&self) -> Option<SystemTime> {
        wire::stated_enqueued_at(&self.properties, self.arrived_at)
    }

    /// Identifies the message when it is delivered again; `None` if it came without an id. The first call
    /// reads the whole payload.
    pub(crate) fn key(&self) -> Option<Key> {
        *self
            .key
            .get_or_init(|| Key::of(&self.properties, self.payload()))
    }

    /// Identifies the task wherever and however often it is delivered; see [`CompletionKey`].
    ///
    /// # Errors
    /// What the message came without.
    #[cfg(feature = "postgres")]
    pub(crate) fn completion_key(&self, app: &str) -> Result<CompletionKey, Unidentified> {
        if !self.is_known && !self.has_id() {
            return Err(Unidentified::NoId);
        }
        if !self.is_known && self.stated_enqueued_at().is_none() {
            return Err(Unidentified::NoTime);
        }
        let message = self.message().map_err(|_| Unidentified::NoId)?;
        Ok(CompletionKey::of(app, message))
    }

    /// Whether another worker, or another attempt, may have done the task already.
    #[cfg(feature = "postgres")]
    pub(crate) fn may_be_done(&self) -> bool {
        let message = self.message();
        self.is_redelivered
            || self.crashes > 0
            || message.is_ok_and(|message| message.attempt > 1 || message.life > 0)
    }

    /// Whether the message came with an id. Without one, nothing tells it from an equal message.
    pub(crate) fn has_id(&self) -> bool {
        identity::id(&self.properties).is_some()
    }

    /// Whether both are the same message. Ids and lengths tell most messages apart before a payload is
    /// read.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        self.has_id()
            && identity::id(&self.properties) == identity::id(&other.properties)
            && self.payload().len() == other.payload().len()
            && self.key() == other.key()
    }

    /// The properties of `message`, which follows this one: a retry or a copy.
    pub(crate) fn successor(&self, message: &Message) -> BasicProperties {
        message.follow(&self.properties(), self.repaired.as_ref())
    }

    /// Whether it came with properties. A row without them is a first attempt that its columns describe completely.
    #[cfg(feature = "postgres")]
    pub(crate) fn has_properties(&self) -> bool {
        !self.is_known
    }

    /// The properties that it came with.
    fn properties(&self) -> Cow<'_, BasicProperties> {
        match self.message() {
            Ok(message) if self.is_known => Cow::Owned(message.properties(true)),
            _ => Cow::Borrowed(&self.properties),
        }
    }

    /// The properties of this message's dead letter. `message` is what is known of it today, if it can be
    /// read.
    pub(crate) fn dead_letter(&self, death: &Death, message: Option<&Message>) -> BasicProperties {
        let properties = death.properties(&self.properties(), message, self.repaired.as_ref());
        match message {
            // An id that was given at arrival is in logs and events already.
            Some(message) => properties.with_message_id(message.id.as_str().into()),
            None => properties,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn received(properties: BasicProperties) -> Received {
        Received::new(
            properties,
            b"{}".to_vec(),
            None,
            "normal".into(),
            SystemTime::now(),
        )
    }

    #[test]
    fn a_message_without_an_id_is_given_one_and_is_never_the_same_as_another() {
        for properties in [
            BasicProperties::default(),
            BasicProperties::default().with_message_id("".into()),
        ] {
            let one = received(properties.clone().with_type("greet".into()));
            let other = received(properties.with_type("greet".into()));
            assert!(!one.has_id() && !one.is_same(&other));
            assert_ne!(one.id(), other.id());
        }
    }

    #[cfg(feature = "postgres")]
    #[test]
    fn a_message_is_recognised_by_an_id_and_a_time_that_stay_the_same() {
        let with_id = || {
            let properties = BasicProperties::default().with_type("greet".into());
            properties.with_message_id("7".into())
        };
        let without_id = BasicProperties::default().with_type("greet".into());
        let key = |properties| received(properties).completion_key("hotel");
        assert_eq!(key(without_id), Err(Unidentified::NoId));
        // Its time would be that of each arrival.
        assert_eq!(key(with_id()), Err(Unidentified::NoTime));
        let drawn = TaskId::drawn_at(SystemTime::now());
        assert!(key(with_id().with_message_id(drawn.as_str().into())).is_ok());
    }

    #[test]
    fn an_unreadable_message_keeps_its_payload_and_says_why() {
        let received = received(BasicProperties::default().with_message_id("7".into()));
        let unreadable = received.message().unwrap_err();
        assert!(unreadable.problem.contains("type"), "{unreadable:?}");
        assert_eq!(
            (received.payload(), received.id().as_str()),
            (&b"{}"[..], "7")
        );
    }
}
