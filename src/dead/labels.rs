//! The closed sets of labels in the log. Each has the same text in Rust, SQL, JSON and on the command line.

use std::fmt;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use crate::message::DeadReason;

macro_rules! labels {
    ($(#[$about:meta])* $name:ident { $($(#[$doc:meta])* $variant:ident = $text:literal,)+ }) => {
        $(#[$about])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[non_exhaustive]
        pub enum $name {
            $($(#[$doc])* $variant,)+
        }

        impl $name {
            /// All variants.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)+];

            /// The label's text.
            pub fn as_str(self) -> &'static str {
                match self {
                    $(Self::$variant => $text,)+
                }
            }

            /// Parses the text of [`as_str`](Self::as_str).
            pub fn parse(text: &str) -> Option<Self> {
                Self::ALL.iter().copied().find(|label| label.as_str() == text)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
                out.pad(self.as_str())
            }
        }

        impl std::str::FromStr for $name {
            type Err = String;

            fn from_str(text: &str) -> Result<Self, String> {
                Self::parse(text).ok_or_else(|| {
                    let known: Vec<_> = Self::ALL.iter().map(|label| label.as_str()).collect();
                    format!("{text:?} is none of: {}", known.join(", "))
                })
            }
        }

        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.serialize_str(self.as_str())
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let text = String::deserialize(deserializer)?;
                text.parse().map_err(de::Error::custom)
            }
        }
    };
}

labels! {
    /// Why a message is in the log. A worker or the broker dead-lettered it.
    Reason {
        /// The last retry failed too.
        RetriesExhausted = "retries exhausted",
        /// The handler returned a permanent error.
        Permanent = "permanent error",
        /// The worker's program has no handler of this name.
        UnknownTask = "unknown task",
        /// The task's type cannot deserialize the payload.
        Undecodable = "undecodable payload",
        /// Workers died repeatedly while it ran.
        CrashLoop = "crash loop",
        /// It exceeded its hard limit and never yielded, so the worker could not stop it.
        Hung = "hung",
        /// It was to run again later, and its tier has no delay queues.
        NoDelays = "no delays",
        /// Its delay ended, and the map has no tier for it.
        Unroutable = "unroutable",
        /// It was a row of a tier on the broker, and the relay cannot publish it: it is too large, or its id or headers
        /// do not fit into a message.
        Unpublishable = "unpublishable",
        /// The broker: a consumer rejected it without requeueing it.
        Rejected = "rejected",
        /// The broker, or a worker for a tier in Postgres: the TTL of its tier ended.
        Expired = "expired",
        /// The broker: it exceeded the queue's delivery limit.
        DeliveryLimit = "delivery limit",
        /// The broker: its queue exceeded the length limit.
        MaxLength = "max length",
        /// Neither the message nor the broker gives a reason.
        Unknown = "unknown",
    }
}

labels! {
    /// The state of a dead letter.
    State {
        /// Nobody has redriven or discarded it yet.
        Dead = "dead",
        /// A redrive is publishing it.
        Redriving = "redriving",
        /// A redrive published it, and the broker confirmed it.
        Redriven = "redriven",
        /// An operator discarded it.
        Discarded = "discarded",
    }
}

labels! {
    /// How a redriven task ended.
    RedriveOutcome {
        /// It succeeded.
        Done = "done",
        /// It died again; a new dead letter gives the reason.
        Dead = "dead",
        /// Its handler discarded it.
        Discarded = "discarded",
        /// It expired before it ran.
        Expired = "expired",
    }
}

impl From<DeadReason> for Reason {
    fn from(reason: DeadReason) -> Self {
        match reason {
            DeadReason::RetriesExhausted => Self::RetriesExhausted,
            DeadReason::Permanent => Self::Permanent,
            DeadReason::UnknownTask => Self::UnknownTask,
            DeadReason::Undecodable => Self::Undecodable,
            DeadReason::CrashLoop => Self::CrashLoop,
            DeadReason::Hung => Self::Hung,
            DeadReason::NoDelays => Self::NoDelays,
            DeadReason::Unroutable => Self::Unroutable,
            DeadReason::Expired => Self::Expired,
            DeadReason::Unpublishable => Self::Unpublishable,
        }
    }
}

impl Reason {
    /// Converts the reason of an `x-death` entry.
    pub(super) fn of_broker(word: &str) -> Self {
        match word {
            "rejected" => Self::Rejected,
            "expired" => Self::Expired,
            "delivery_limit" => Self::DeliveryLimit,
            "maxlen" => Self::MaxLength,
            _ => Self::Unknown,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_log_and_the_wire_have_the_same_words_for_a_workers_reasons() {
        for text in [
            "retries exhausted",
            "permanent error",
            "unknown task",
            "undecodable payload",
            "crash loop",
            "hung",
            "no delays",
            "unroutable",
            "expired",
            "unpublishable",
        ] {
            let reason = DeadReason::parse(text).unwrap();
            assert_eq!(Reason::from(reason).as_str(), text);
        }
    }
}
