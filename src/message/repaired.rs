//! Properties that had to be repaired before anybody could read them.

/// What was wrong with the properties of a delivery, which were rewritten before anybody read them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Repaired {
    /// For people.
    pub(crate) problem: String,
    /// Whether it cannot be said any more which task the message is.
    pub(crate) is_unreadable: bool,
    /// The properties as they came: their flags, and what follows. Empty where there was no room.
    pub(crate) original: Vec<u8>,
}
