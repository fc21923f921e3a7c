use std::error::Error as StdError;
use std::fmt;
use std::time::Duration;

use super::IntoDuration;

/// The error of a failed attempt.
///
/// `?` converts any error into it, also `anyhow::Error`, boxed errors and plain text. For that reason it
/// does not implement [`std::error::Error`], like `anyhow::Error`.
///
/// The task's policy decides about a retry, unless the error is made with [`permanent`] or
/// [`retry_after`]:
///
/// ```
/// use tierline::TaskError;
///
/// async fn charge(card: &str) -> Result<(), TaskError> {
///     let number: u64 = card.parse().map_err(TaskError::permanent)?;
///     if number % 2 == 1 {
///         return Err(TaskError::retry_after("30s", "rate limited"));
///     }
///     std::fs::read("receipt.txt")?;
///     Ok(())
/// }
/// ```
///
/// [`permanent`]: TaskError::permanent
/// [`retry_after`]: TaskError::retry_after
pub struct TaskError {
    error: Box<dyn StdError + Send + Sync>,
    type_name: Option<&'static str>,
    advice: ErrorAdvice,
}

/// The longest chain of causes: an error may name itself as its cause.
const MOST_CAUSES: usize = 32;

/// What an error requires of the next attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ErrorAdvice {
    AsThePolicySays,
    RetryAfter(Duration),
    Permanent,
}

impl TaskError {
    /// An error that another attempt cannot fix: the task becomes a dead letter at once.
    pub fn permanent(error: impl Into<TaskError>) -> Self {
        Self {
            advice: ErrorAdvice::Permanent,
            ..error.into()
        }
    }

    /// An error after which the next attempt follows after `delay`, not after the policy's backoff. It counts
    /// as an attempt like any other.
    ///
    /// Where `delay` is a text that cannot be read, the attempt fails with that
    /// ([`Error::InvalidDuration`](crate::Error::InvalidDuration)) and comes again when the policy says.
    pub fn retry_after(delay: impl IntoDuration, error: impl Into<TaskError>) -> Self {
        match delay.into_duration() {
            Ok(delay) => Self {
                advice: ErrorAdvice::RetryAfter(delay),
                ..error.into()
            },
            Err(invalid) => {
                let (invalid, error) = (invalid.of("retry_after"), error.into().message());
                Self::from(format!("{invalid} (after: {error})"))
            }
        }
    }

    /// Whether the task becomes a dead letter with this error, even if retries are left.
    pub fn is_permanent(&self) -> bool {
        self.advice == ErrorAdvice::Permanent
    }

    /// The error's message, without its causes.
    pub fn message(&self) -> String {
        self.error.to_string()
    }

    /// The messages of the error's causes, the nearest first, up to 32.
    pub fn causes(&self) -> Vec<String> {
        std::iter::successors(self.error.source(), |cause| (*cause).source())
            .take(MOST_CAUSES)
            .map(ToString::to_string)
            .collect()
    }

    /// The type of the error, if known: unknown for text and for errors that were already boxed.
    pub fn type_name(&self) -> Option<&'static str> {
        self.type_name
    }

    /// The error that was given.
    pub fn as_error(&self) -> &(dyn StdError + Send + Sync + 'static) {
        &*self.error
    }

    pub(crate) fn advice(&self) -> ErrorAdvice {
        self.advice
    }
}

impl<E: Into<Box<dyn StdError + Send + Sync>>> From<E> for TaskError {
    fn from(error: E) -> Self {
        Self {
            error: error.into(),
            type_name: informative_type_name::<E>(),
            advice: ErrorAdvice::AsThePolicySays,
        }
    }
}

impl fmt::Display for TaskError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}", self.error)?;
        for cause in self.causes() {
            write!(formatter, ": {cause}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for TaskError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("TaskError")
            .field("error", &self.error)
            .field("type_name", &self.type_name)
            .field("advice", &self.advice)
            .finish()
    }
}

/// `None` for text and for types that only wrap an error: their name does not tell two failures apart.
fn informative_type_name<E>() -> Option<&'static str> {
    let name = std::any::type_name::<E>();
    let is_wrapper = name.starts_with("alloc::boxed::Box<dyn")
        || name.starts_with("alloc::borrow::Cow<")
        || [
            "&str",
            "alloc::string::String",
            "anyhow::Error",
            "eyre::Report",
        ]
        .contains(&name);
    (!is_wrapper).then_some(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("the text message was not sent")]
    struct NotSent(#[source] std::io::Error);

    fn not_sent() -> NotSent {
        NotSent(std::io::Error::other("connection reset"))
    }

    #[test]
    fn any_error_converts_with_a_question_mark() {
        fn typed() -> Result<(), TaskError> {
            Err(not_sent())?;
            Ok(())
        }
        fn boxed() -> Result<(), TaskError> {
            Err(Box::<dyn StdError + Send + Sync>::from("boxed"))?;
            Ok(())
        }
        fn from_anyhow() -> Result<(), TaskError> {
            Err(anyhow::Error::new(not_sent()).context("no OTP"))?;
            Ok(())
        }
        fn from_itself() -> Result<(), TaskError> {
            typed()?;
            Ok(())
        }
        assert_eq!(
            typed().unwrap_err().message(),
            "the text message was not sent"
        );
        assert_eq!(boxed().unwrap_err().message(), "boxed");
        assert_eq!(from_anyhow().unwrap_err().causes().len(), 2);
        assert!(
            from_itself()
                .unwrap_err()
                .type_name()
                .unwrap()
                .ends_with("NotSent")
        );
    }

    #[test]
    fn the_chain_of_causes_and_the_type_are_kept() {
        let error = TaskError::from(not_sent());
        assert_eq!(error.causes(), ["connection reset"]);
        assert!(error.type_name().unwrap().ends_with("NotSent"));
        assert_eq!(
            error.to_string(),
            "the text message was not sent: connection reset"
        );
    }

    #[test]
    fn an_error_that_is_its_own_cause_ends() {
        #[derive(Debug)]
        struct Own;
        impl fmt::Display for Own {
            fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("own cause")
            }
        }
        impl StdError for Own {
            fn source(&self) -> Option<&(dyn StdError + 'static)> {
                Some(self)
            }
        }
        assert_eq!(TaskError::from(Own).causes().len(), MOST_CAUSES);
    }

    #[test]
    fn text_and_wrappers_have_no_informative_type() {
        assert_eq!(TaskError::from("text").type_name(), None);
        assert_eq!(TaskError::from("text".to_owned()).type_name(), None);
        assert_eq!(TaskError::from(anyhow::anyhow!("text")).type_name(), None);
    }

    #[test]
    fn marking_an_error_keeps_the_error() {
        let error = TaskError::permanent(TaskError::retry_after(Duration::ZERO, not_sent()));
        assert!(error.is_permanent());
        assert_eq!(error.message(), "the text message was not sent");
    }
}
