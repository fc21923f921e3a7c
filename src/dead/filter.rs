//! Filters and pages for the log.

use std::fmt;
use std::str::FromStr;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use sqlx::{Postgres, QueryBuilder};

use super::time_filter::{self, parse_time};
use super::{Reason, State};
use crate::Error;
use crate::error::DeadLetterError;
use crate::postgres::Time;

/// Selects dead letters. A row must match every field that is set; all fields are optional.
///
/// ```
/// use std::time::{Duration, SystemTime};
/// use tierline::dead::{Filter, Reason};
///
/// let yesterday = SystemTime::now() - Duration::from_secs(86_400);
/// let filter = Filter::default()
///     .tier("critical")
///     .reason(Reason::RetriesExhausted)
///     .since(yesterday)
///     .text("connection refused");
/// # let _ = filter;
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[non_exhaustive]
pub struct Filter {
    /// The tier whose queue dead-lettered them; `"unrouted"` for those without a tier in the map.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tier: Option<String>,
    /// The task's name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub task: Option<String>,
    /// The reason for their death.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<Reason>,
    /// The fingerprint of their failure.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fingerprint: Option<String>,
    /// Their state.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub state: Option<State>,
    /// They died at this time or later.
    #[serde(
        with = "time_filter::optional",
        skip_serializing_if = "Option::is_none"
    )]
    pub since: Option<SystemTime>,
    /// They died before this time.
    #[serde(
        with = "time_filter::optional",
        skip_serializing_if = "Option::is_none"
    )]
    pub until: Option<SystemTime>,
    /// The error, the id or the JSON of the payload contains this text, ignoring case. Postgres searches every
    /// row of the time window, so `since` is required too.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub text: Option<String>,
}

impl Filter {
    /// The longest text that a filter may have, in bytes.
    pub const LONGEST: usize = 1_000;

    /// Rows of this tier.
    pub fn tier(mut self, tier: impl Into<String>) -> Self {
        self.tier = Some(tier.into());
        self
    }

    /// Rows of this task.
    pub fn task(mut self, task: impl Into<String>) -> Self {
        self.task = Some(task.into());
        self
    }

    /// Rows with this reason.
    pub fn reason(mut self, reason: Reason) -> Self {
        self.reason = Some(reason);
        self
    }

    /// Rows with this fingerprint.
    pub fn fingerprint(mut self, fingerprint: impl Into<String>) -> Self {
        self.fingerprint = Some(fingerprint.into());
        self
    }

    /// Rows in this state.
    pub fn state(mut self, state: State) -> Self {
        self.state = Some(state);
        self
    }

    /// Rows that died at this time or later.
    pub fn since(mut self, time: SystemTime) -> Self {
        self.since = Some(time);
        self
    }

    /// Rows that died before this time.
    pub fn until(mut self, time: SystemTime) -> Self {
        self.until = Some(time);
        self
    }

    /// As [`since`](Self::since), with the time as people write it: `24h` for 24 hours ago, or
    /// `2026-01-31T10:00:00Z`.
    ///
    /// ```
    /// # use tierline::dead::Filter;
    /// let today = Filter::default().since_text("24h")?;
    /// let january = Filter::default().since_text("2026-01-01T00:00:00Z")?.until_text("2026-02-01T00:00:00Z")?;
    /// assert!(Filter::default().since_text("yesterday").is_err());
    /// # Ok::<(), tierline::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`DeadLetterError::InvalidFilter`] if the text is neither.
    pub fn since_text(self, time: &str) -> Result<Self, Error> {
        Ok(self.since(parse_time(time)?))
    }

    /// As [`until`](Self::until), with the time as [`since_text`](Self::since_text) takes it.
    ///
    /// # Errors
    /// [`DeadLetterError::InvalidFilter`] if it cannot be read.
    pub fn until_text(self, time: &str) -> Result<Self, Error> {
        Ok(self.until(parse_time(time)?))
    }

    /// Rows that contain this text; see [`text`](Self::text).
    pub fn text(mut self, text: impl Into<String>) -> Self {
        self.text = Some(text.into());
        self
    }

    /// Refuses filters that Postgres cannot or should not run.
    pub(super) fn check(&self) -> Result<(), Error> {
        let invalid = |problem: String| {
            Err(Error::DeadLetter(DeadLetterError::InvalidFilter {
                problem: problem.into(),
            }))
        };
        for (name, text) in [
            ("tier", &self.tier),
            ("task", &self.task),
            ("fingerprint", &self.fingerprint),
            ("text", &self.text),
        ] {
            let Some(text) = text else { continue };
            let longest = Self::LONGEST;
            if text.is_empty() || text.len() > longest {
                return invalid(format!("`{name}` must have 1 to {longest} bytes"));
            }
            if text.contains('\0') {
                return invalid(format!(
                    "`{name}` contains a NUL, which Postgres cannot store in a text"
                ));
            }
        }
        if self.text.is_some() && self.since.is_none() {
            return invalid("`text` is searched within a time window: give `since` too".to_owned());
        }
        if let (Some(since), Some(until)) = (self.since, self.until)
            && since >= until
        {
            return invalid("`since` must be before `until`".to_owned());
        }
        Ok(())
    }

    /// Adds the conditions to a statement that already has a `WHERE`. Values are always bound.
    pub(super) fn push(&self, query: &mut QueryBuilder<Postgres>) {
        let mut equal = |column: &str, value: Option<&str>| {
            if let Some(value) = value {
                query.push(" AND ").push(column).push(" = ");
                query.push_bind(value.to_owned());
            }
        };
        equal("tier", self.tier.as_deref());
        equal("task", self.task.as_deref());
        equal("reason", self.reason.map(Reason::as_str));
        equal("fingerprint", self.fingerprint.as_deref());
        // A literal, so that Postgres can use the partial index of dead rows.
        if let Some(state) = self.state {
            query.push(format!(" AND state = '{state}'"));
        }
        if let Some(since) = self.since {
            query.push(" AND died_at >= ").push_bind(Time(since));
        }
        if let Some(until) = self.until {
            query.push(" AND died_at < ").push_bind(Time(until));
        }
        if let Some(text) = &self.text {
            query
                .push(" AND strpos(lower(concat_ws(' ', error, message_id, payload_json)), lower(");
            query.push_bind(text.clone());
            query.push(")) > 0");
        }
    }
}

/// A page of a list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Page {
    /// The largest number of rows, 1 to [`Page::LARGEST`].
    pub size: u16,
    /// The end of the previous page; `None` for the first page.
    pub after: Option<Cursor>,
}

impl Page {
    /// The largest page.
    pub const LARGEST: u16 = 500;

    /// The first page, with at most `size` rows.
    pub fn first(size: u16) -> Self {
        Self { size, after: None }
    }

    /// The page after a cursor.
    pub fn after(size: u16, cursor: Cursor) -> Self {
        Self {
            size,
            after: Some(cursor),
        }
    }

    pub(super) fn check(&self) -> Result<(), Error> {
        if self.size == 0 || self.size > Self::LARGEST {
            return Err(Error::DeadLetter(DeadLetterError::InvalidFilter {
                problem: format!("a page has 1 to {} rows", Self::LARGEST).into(),
            }));
        }
        Ok(())
    }
}

impl Default for Page {
    /// The first fifty.
    fn default() -> Self {
        Self::first(50)
    }
}

/// The end of a page. It has a text form for links.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cursor {
    pub(super) died_at: SystemTime,
    pub(super) id: i64,
}

impl fmt::Display for Cursor {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let since = self.died_at.duration_since(UNIX_EPOCH).unwrap_or_default();
        write!(out, "{}-{}", since.as_micros(), self.id)
    }
}

impl FromStr for Cursor {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let read = || {
            let (died_at, id) = text.split_once('-')?;
            let since = Duration::from_micros(died_at.parse().ok()?);
            Some(Self {
                died_at: UNIX_EPOCH.checked_add(since)?,
                id: id.parse().ok()?,
            })
        };
        read().ok_or_else(|| {
            Error::DeadLetter(DeadLetterError::InvalidFilter {
                problem: "the cursor is not one that a page returned".into(),
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cursor_is_read_as_it_was_written() {
        let cursor = Cursor {
            died_at: UNIX_EPOCH + Duration::from_micros(1_700_000_000_123_456),
            id: 7,
        };
        assert_eq!(cursor.to_string().parse::<Cursor>().unwrap(), cursor);
        for text in ["", "-", "a-1", "1-a", "1", "99999999999999999999-1"] {
            assert!(text.parse::<Cursor>().is_err(), "{text}");
        }
    }

    #[test]
    fn what_cannot_be_asked_is_refused_with_the_field() {
        let long = "x".repeat(Filter::LONGEST + 1);
        let now = SystemTime::now();
        for (filter, field) in [
            (Filter::default().tier(""), "tier"),
            (Filter::default().task(long), "task"),
            (Filter::default().fingerprint("a\0"), "fingerprint"),
            (Filter::default().text("x"), "since"),
            (Filter::default().since(now).until(now), "until"),
        ] {
            let error = filter.check().unwrap_err().to_string();
            assert!(error.contains(field), "{error}");
        }
    }
}
