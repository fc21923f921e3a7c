//! Spans of time as callers give them: a `Duration`, or the text that the file would have.

use std::time::Duration;

use super::units::parse_duration;
use crate::error::Error;

/// A duration: a [`Duration`], or text such as `"20s"`, `"10m"` or `"1h 30m"`.
///
/// A text is one or more numbers, each with its unit: `ms`, `s`, `m`, `h`, `d` or `w`, or a word for it
/// (`5 sec`, `10 minutes`, `2 days`). A number may have a fraction, `1.5h`. Months and years are refused, because
/// they have no fixed length. The map, the attributes of `#[task]`, the command line and the admin API read the
/// same texts.
///
/// Setters take either and never fail. A text that cannot be read is reported as [`Error::InvalidDuration`], with
/// the name of the setting, by the first call after it that returns a `Result`: the `await` of a publish, a worker,
/// a collector or a redrive, the registration of a handler's options.
///
/// ```
/// use std::time::Duration;
/// use tierline::task::IntoDuration;
///
/// assert_eq!("10m".into_duration()?, Duration::from_secs(600));
/// assert_eq!("5 sec".into_duration()?, Duration::from_secs(5));
/// assert!("10 parsecs".into_duration().is_err());
/// # Ok::<(), tierline::Error>(())
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a duration",
    note = "give a `Duration`, or text such as \"20s\" or \"10m\""
)]
pub trait IntoDuration {
    /// The duration.
    ///
    /// # Errors
    ///
    /// [`InvalidDuration`] where the text cannot be read.
    fn into_duration(self) -> Result<Duration, InvalidDuration>;
}

impl IntoDuration for Duration {
    fn into_duration(self) -> Result<Duration, InvalidDuration> {
        Ok(self)
    }
}

impl IntoDuration for &str {
    fn into_duration(self) -> Result<Duration, InvalidDuration> {
        parse_duration(self).map_err(|problem| InvalidDuration {
            setting: "a duration",
            text: self.to_owned(),
            problem,
        })
    }
}

impl IntoDuration for String {
    fn into_duration(self) -> Result<Duration, InvalidDuration> {
        self.as_str().into_duration()
    }
}

impl IntoDuration for &String {
    fn into_duration(self) -> Result<Duration, InvalidDuration> {
        self.as_str().into_duration()
    }
}

/// A text that was given for a span of time and cannot be read as one.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("cannot read {text:?} as {setting}: {problem}")]
#[non_exhaustive]
pub struct InvalidDuration {
    /// What it was given for, such as `grace` or `retention`.
    pub setting: &'static str,
    /// The text.
    pub text: String,
    /// What is wrong with it.
    pub problem: String,
}

impl InvalidDuration {
    /// The same, of this setting.
    pub(crate) fn of(self, setting: &'static str) -> Self {
        Self { setting, ..self }
    }
}

impl From<InvalidDuration> for Error {
    fn from(invalid: InvalidDuration) -> Self {
        Self::InvalidDuration(Box::new(invalid))
    }
}

/// The first of a builder's durations that cannot be read. Setters note it here, so that they need not fail.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Unreadable(Option<InvalidDuration>);

impl Unreadable {
    pub(crate) const NONE: Self = Self(None);

    /// Reads a setting into its place, or notes why that is not possible.
    pub(crate) fn set(
        &mut self,
        setting: &'static str,
        value: impl IntoDuration,
        place: &mut Duration,
    ) {
        match value.into_duration() {
            Ok(duration) => *place = duration,
            Err(invalid) => {
                self.0.get_or_insert(invalid.of(setting));
            }
        }
    }

    /// # Errors
    /// [`Error::InvalidDuration`] where a setting could not be read.
    pub(crate) fn check(&self) -> Result<(), Error> {
        match &self.0 {
            Some(invalid) => Err(invalid.clone().into()),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_read_as_people_write_it_and_months_are_refused() {
        assert_eq!(
            "1h 30m".into_duration().unwrap(),
            Duration::from_secs(5_400)
        );
        for text in ["", "10", "10 parsecs", "5M", "1 month", "2y"] {
            let error = text.into_duration().unwrap_err().to_string();
            assert!(error.contains(&format!("{text:?}")), "{error}");
        }
    }

    #[test]
    fn the_first_setting_that_cannot_be_read_is_reported_and_changes_nothing() {
        let (mut grace, mut wait) = (Duration::from_secs(1), Duration::from_secs(2));
        let mut unreadable = Unreadable::default();
        unreadable.set("grace", "10 parsecs", &mut grace);
        unreadable.set("wait", "soon", &mut wait);
        unreadable.set("wait", "3s", &mut wait);
        assert_eq!(grace, Duration::from_secs(1));
        assert_eq!(wait, Duration::from_secs(3));
        let error = unreadable.check().unwrap_err().to_string();
        assert!(
            error.starts_with("cannot read \"10 parsecs\" as grace: "),
            "{error}"
        );
    }
}
