use std::time::Duration;

use crate::error::Error;
use crate::topology::parse_duration;

/// A duration: a [`Duration`], or text such as `"20s"`, `"10m"` or `"1h 30m"`.
///
/// A text is one or more numbers, each with its unit: `ms`, `s`, `m`, `h`, `d` or `w`, or a word for it
/// (`5 sec`, `10 minutes`, `2 days`). A number may have a fraction, `1.5h`. Months and years are refused, because
/// they have no fixed length. The map, the attributes of `#[task]`, the command line and the admin API read the
/// same texts.
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
    /// [`Error::InvalidDuration`] if the text cannot be parsed.
    fn into_duration(self) -> Result<Duration, Error>;
}

impl IntoDuration for Duration {
    fn into_duration(self) -> Result<Duration, Error> {
        Ok(self)
    }
}

impl IntoDuration for &str {
    fn into_duration(self) -> Result<Duration, Error> {
        parse_duration(self).map_err(|problem| Error::InvalidDuration {
            text: self.into(),
            problem: problem.into(),
        })
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
}
