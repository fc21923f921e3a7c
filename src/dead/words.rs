//! The closed sets of words that the log uses, each the same in Rust, SQL, JSON and on the command
//! line.

use std::fmt;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use crate::message::DeadReason;

macro_rules! words {
    ($(#[$about:meta])* $name:ident { $($(#[$doc:meta])* $word:ident = $text:literal,)+ }) => {
        $(#[$about])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[non_exhaustive]
        pub enum $name {
            $($(#[$doc])* $word,)+
        }

        impl $name {
            /// All of them.
            pub const ALL: &'static [Self] = &[$(Self::$word,)+];

            /// The word for it.
            pub fn as_str(self) -> &'static str {
                match self {
                    $(Self::$word => $text,)+
                }
            }

            /// What [`as_str`](Self::as_str) wrote.
            pub fn parse(text: &str) -> Option<Self> {
                Self::ALL.iter().copied().find(|word| word.as_str() == text)
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
                    let known: Vec<_> = Self::ALL.iter().map(|word| word.as_str()).collect();
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

words! {
    /// Why a message is in the log: a worker gave it up, or the broker did.
    Reason {
        /// The last retry failed too.
        RetriesExhausted = "retries exhausted",
        /// The handler said that another attempt would not help.
        Permanent = "permanent error",
        /// No handler of this name was in the program.
        UnknownTask = "unknown task",
        /// The payload was not what the task's type reads.
        Undecodable = "undecodable payload",
        /// Worker after worker died while it ran.
        CrashLoop = "crash loop",
        /// It was past its hard limit and never yielded, so nothing could stop it.
        Hung = "hung",
        /// The broker: somebody rejected it without requeueing it.
        Rejected = "rejected",
        /// The broker: it waited in its queue for longer than the queue allows.
        Expired = "expired",
        /// The broker: it was delivered too often.
        DeliveryLimit = "delivery limit",
        /// The broker: its queue was too long.
        MaxLength = "max length",
        /// It was delayed, and then no queue was bound for it.
        Unroutable = "unroutable",
        /// It does not say, and the broker does not either.
        Unknown = "unknown",
    }
}

words! {
    /// Where a dead letter stands.
    State {
        /// It waits for somebody to decide.
        Dead = "dead",
        /// Somebody is publishing it again.
        Redriving = "redriving",
        /// It was published again, and the broker has confirmed it.
        Redriven = "redriven",
        /// Somebody decided that it is not needed.
        Discarded = "discarded",
    }
}

words! {
    /// How a redriven task ended.
    RedriveOutcome {
        /// It ran well: the redrive helped.
        Done = "done",
        /// It died again; a new dead letter says why.
        Dead = "dead",
        /// Its handler said that there is nothing to do any more.
        Discarded = "discarded",
        /// It came too late.
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
        }
    }
}

impl Reason {
    /// The broker's word in an `x-death` entry.
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
        ] {
            let reason = DeadReason::parse(text).unwrap();
            assert_eq!(Reason::from(reason).as_str(), text);
        }
    }
}
