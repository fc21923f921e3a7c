use std::time::Duration;

use super::{IntoDuration, TaskError};

/// How an attempt ended. The set is closed: every attempt ends in one of these.
///
/// A handler that only succeeds or fails returns `Result<(), TaskError>`. A handler that also snoozes or
/// discards returns `Result<Outcome, TaskError>`:
///
/// ```
/// use tierline::{Outcome, TaskError};
///
/// # enum State { Ready, Rendering, Deleted }
/// # struct Report { state: State }
/// async fn send_report(report: Report) -> Result<Outcome, TaskError> {
///     match report.state {
///         State::Ready => Ok(Outcome::Done),
///         State::Rendering => Ok(Outcome::snooze("30s")),
///         State::Deleted => Ok(Outcome::discard("the report was deleted")),
///     }
/// }
/// ```
#[derive(Debug)]
pub enum Outcome {
    /// It succeeded.
    Done,
    /// It failed, and runs again while its policy has retries left. Every error becomes this unless
    /// it is permanent.
    Retry(TaskError),
    /// It could not run yet, and runs again after this time. This is not counted as an attempt.
    Snooze(Duration),
    /// The task is no longer needed. It is counted and logged with the reason, not kept.
    Discard(String),
    /// It failed, and another attempt would not help: it becomes a dead letter at once.
    Dead(TaskError),
}

impl Outcome {
    /// Another run after this time, at no cost of an attempt.
    ///
    /// Where `after` is a text that cannot be read, the attempt fails with that
    /// ([`Error::InvalidDuration`](crate::Error::InvalidDuration)).
    pub fn snooze(after: impl IntoDuration) -> Self {
        match after.into_duration() {
            Ok(after) => Self::Snooze(after),
            Err(invalid) => Self::Retry(invalid.of("snooze").into()),
        }
    }

    /// Discards the task for this reason.
    pub fn discard(reason: impl Into<String>) -> Self {
        Self::Discard(reason.into())
    }

    /// Dead-letters the task at once for this reason.
    pub fn dead(reason: impl Into<TaskError>) -> Self {
        Self::Dead(reason.into())
    }

    /// Retries the task for this reason, if the policy has a retry left.
    pub fn retry(reason: impl Into<TaskError>) -> Self {
        Self::Retry(reason.into())
    }
}

/// The return types of handlers: `()`, an [`Outcome`], or a `Result` of either with any error.
///
/// ```
/// use tierline::{IntoOutcome, Outcome};
///
/// let text = "12a".parse::<u32>().map(|_| ());
/// assert!(matches!(text.into_outcome(), Outcome::Retry(error) if !error.is_permanent()));
/// ```
#[diagnostic::on_unimplemented(
    message = "a task handler cannot return `{Self}`",
    label = "not an outcome of a task",
    note = "return `Result<(), TaskError>`, or `Result<Outcome, TaskError>` to snooze or discard"
)]
pub trait IntoOutcome {
    /// How the attempt ended.
    fn into_outcome(self) -> Outcome;
}

impl IntoOutcome for () {
    fn into_outcome(self) -> Outcome {
        Outcome::Done
    }
}

impl IntoOutcome for Outcome {
    fn into_outcome(self) -> Outcome {
        self
    }
}

impl<T: IntoOutcome, E: Into<TaskError>> IntoOutcome for Result<T, E> {
    fn into_outcome(self) -> Outcome {
        match self.map_err(Into::into) {
            Ok(value) => value.into_outcome(),
            Err(error) if error.is_permanent() => Outcome::Dead(error),
            Err(error) => Outcome::Retry(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_is_a_retry_unless_it_is_marked_permanent() {
        let usual: Result<(), TaskError> = Err("the line is busy".into());
        let permanent: Result<(), TaskError> = Err(TaskError::permanent("no such number"));
        assert!(matches!(usual.into_outcome(), Outcome::Retry(_)));
        assert!(matches!(permanent.into_outcome(), Outcome::Dead(_)));
    }

    #[test]
    fn a_handler_may_return_anyhow_results_as_they_are() {
        let result: anyhow::Result<()> = Err(anyhow::anyhow!("the line is busy"));
        assert!(matches!(result.into_outcome(), Outcome::Retry(_)));
    }
}
