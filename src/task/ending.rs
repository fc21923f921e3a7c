use std::fmt;

use serde::Serialize;

/// How a task came to its end, other than as a dead letter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum TaskEnding {
    /// Its handler succeeded.
    Done,
    /// Its handler said that there is nothing to do any more.
    Discarded,
    /// It came too late ([`expires`](crate::task::PublishRequest::expires)) and was not run.
    Expired,
    /// An operator cancelled it.
    Cancelled,
}

impl TaskEnding {
    #[cfg(feature = "postgres")]
    const ALL: [Self; 4] = [Self::Done, Self::Discarded, Self::Expired, Self::Cancelled];

    /// The ending as a word.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Done => "done",
            Self::Discarded => "discarded",
            Self::Expired => "expired",
            Self::Cancelled => "cancelled",
        }
    }

    /// The ending of this word; `None` if a newer release knows more of them.
    #[cfg(feature = "postgres")]
    pub(crate) fn named(word: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|it| it.as_str() == word)
    }
}

impl fmt::Display for TaskEnding {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(self.as_str())
    }
}
