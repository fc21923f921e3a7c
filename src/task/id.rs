use std::fmt;
use std::sync::Arc;

use uuid::Uuid;

/// Identifies one enqueued task through all its attempts.
///
/// A UUID v7 unless the publisher gave one of its own; producers in other languages may use any
/// text.
///
/// ```
/// use tierline::TaskId;
///
/// assert_ne!(TaskId::random(), TaskId::random());
/// assert_eq!(TaskId::from("order-1007").as_str(), "order-1007");
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TaskId(Arc<str>);

impl TaskId {
    /// A new UUID v7: later ones sort after earlier ones.
    pub fn random() -> Self {
        Self(Uuid::now_v7().to_string().into())
    }

    /// The identifier as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl From<&str> for TaskId {
    fn from(id: &str) -> Self {
        Self(id.into())
    }
}

impl From<String> for TaskId {
    fn from(id: String) -> Self {
        Self(id.into())
    }
}

impl fmt::Display for TaskId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}
