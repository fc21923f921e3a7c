//! When the runs of a schedule are due: pure functions from a moment to the next or the latest run.

mod wall;

use std::time::{Duration, SystemTime};

use croner::errors::CronError;
use croner::parser::{CronParser, Seconds, Year};
use jiff::Timestamp;
use jiff::civil::DateTime;
use jiff::tz::TimeZone;

use super::duration::IntoDuration;
use super::reader::{did_you_mean, near_miss, quoted};
use super::units::show_duration;
use crate::Error;
use crate::error::TopologyError;
use wall::Wall;

/// When the runs of a schedule are due.
///
/// ```
/// use tierline::topology::Timing;
///
/// let nightly = Timing::cron("0 2 * * *", "Europe/Rome")?;
/// assert_eq!(nightly.to_string(), "0 2 * * * (Europe/Rome)");
/// assert_eq!(Timing::every("90s")?.to_string(), "every 1m30s");
/// assert!(Timing::cron("0 0 30 2 *", "UTC").is_err(), "February has no 30th");
/// # Ok::<(), tierline::Error>(())
/// ```
#[derive(Clone, PartialEq, Eq)]
pub struct Timing {
    pub(crate) kind: Kind,
}

#[derive(Clone)]
pub(crate) enum Kind {
    Cron {
        expression: String,
        timezone: String,
        wall: Wall,
    },
    Every(Duration),
}

impl PartialEq for Kind {
    fn eq(&self, other: &Self) -> bool {
        match (self, other) {
            (Kind::Every(this), Kind::Every(other)) => this == other,
            (
                Kind::Cron {
                    expression,
                    timezone,
                    ..
                },
                Kind::Cron {
                    expression: other_expression,
                    timezone: other_timezone,
                    ..
                },
            ) => expression == other_expression && timezone == other_timezone,
            _ => false,
        }
    }
}

impl Eq for Kind {}

/// What is wrong, and what helps.
pub(crate) type Mistake = (String, Option<String>);

/// `every` below this would be a loop, not a schedule; cron has no less either.
pub(super) const SHORTEST_EVERY: Duration = Duration::from_secs(1);
pub(super) const LONGEST_EVERY: Duration = Duration::from_secs(366 * 86_400);

/// From when on patterns are tried out: any moment would do, and a fixed one keeps it pure.
const TRIAL: Timestamp = Timestamp::UNIX_EPOCH;
/// The runs that are looked at to find the shortest time between two: so many, or those until the end
/// of a leap year that follows on a common one.
const TRIAL_RUNS: usize = 400;
const TRIAL_ENDS: i16 = 1973;
const TRIAL_BEGINS: DateTime = jiff::civil::date(1970, 12, 31).at(0, 0, 0, 0);

impl Timing {
    /// Due where the clock of the IANA time zone `timezone` fits the cron expression: minute, hour,
    /// day of month, month and day of week, with the second before them if there are six.
    ///
    /// Where the clocks go forward, a run at a fixed time that does not exist is due as soon as the
    /// hour is skipped, and those of a pattern such as `*/5` are left out. Where they go back, a run
    /// at a fixed time is due once, the first time, and a pattern goes on through both hours.
    ///
    /// # Errors
    /// [`TopologyError::InvalidSchedule`] where the expression or the time zone cannot be read, and where no
    /// day ever fits.
    pub fn cron(expression: &str, timezone: &str) -> Result<Self, Error> {
        let zone = Self::read_zone(timezone).map_err(|mistake| invalid(timezone, mistake))?;
        Self::read_cron(expression, (timezone, zone))
            .map_err(|mistake| invalid(expression, mistake))
    }

    /// Due again and again after this time, from 1 s to 366 days, in whole milliseconds.
    ///
    /// The beats are counted from 1970, so that they go on through restarts, and shifted by the
    /// schedule's name, so that many schedules of an hour are spread over the hour. For a certain
    /// minute use [`cron`](Self::cron).
    ///
    /// # Errors
    /// [`Error::InvalidDuration`], and [`TopologyError::InvalidSchedule`] where it is out of range.
    pub fn every(every: impl IntoDuration) -> Result<Self, Error> {
        let every = every.into_duration().map_err(|it| it.of("every"))?;
        Self::read_every(every).map_err(|mistake| invalid(&show_duration(every), mistake))
    }

    /// A moment on the clock that the runs go by, such as `2026-11-16T02:00:00+01:00`: that of the
    /// time zone, or UTC.
    pub fn local_time(&self, time: SystemTime) -> String {
        let zone = match &self.kind {
            Kind::Cron { wall, .. } => wall.zone().clone(),
            Kind::Every(_) => TimeZone::UTC,
        };
        let time = Timestamp::try_from(time).unwrap_or(Timestamp::MAX);
        let shown = time.to_zoned(zone).strftime("%Y-%m-%dT%H:%M:%S%:z");
        shown.to_string()
    }

    /// The parts of `expression` are minute, hour, day of month, month and day of week, with the
    /// second before them if there are six.
    pub(crate) fn read_cron(expression: &str, zone: (&str, TimeZone)) -> Result<Self, Mistake> {
        let parser = CronParser::builder()
            .seconds(Seconds::Optional)
            .year(Year::Disallowed)
            .build();
        let pattern = parser
            .parse(expression)
            .map_err(|error| (explain(&error), Some(CRON_HELP.to_owned())))?;
        let timing = Self {
            kind: Kind::Cron {
                expression: expression.to_owned(),
                timezone: zone.0.to_owned(),
                wall: Wall::new(pattern, expression, zone.1),
            },
        };
        if timing.next_after(TRIAL, "").is_none() {
            let help = "no day of the calendar fits; is a 30th of February meant?";
            return Err(("it never comes due".to_owned(), Some(help.to_owned())));
        }
        Ok(timing)
    }

    /// The time zone of that name in the IANA database: the system's, else the one built in.
    pub(crate) fn read_zone(name: &str) -> Result<TimeZone, Mistake> {
        TimeZone::get(name).map_err(|_| {
            let known: Vec<String> = jiff::tz::db()
                .available()
                .map(|zone| zone.to_string())
                .collect();
            let near = near_miss(name, known.iter().map(String::as_str));
            let help = did_you_mean(near).unwrap_or_else(|| {
                "write a name of the IANA database, such as \"Europe/Rome\" or \"UTC\"".to_owned()
            });
            (format!("{} is no time zone", quoted(name)), Some(help))
        })
    }

    pub(crate) fn read_every(every: Duration) -> Result<Self, Mistake> {
        match every {
            every if !(SHORTEST_EVERY..=LONGEST_EVERY).contains(&every) => Err((
                format!("every {} is out of range", show_duration(every)),
                Some(format!(
                    "it may be {} to {}",
                    show_duration(SHORTEST_EVERY),
                    show_duration(LONGEST_EVERY)
                )),
            )),
            every => Ok(Self {
                kind: Kind::Every(Duration::from_millis(
                    u64::try_from(every.as_millis()).unwrap_or(u64::MAX),
                )),
            }),
        }
    }

    /// The first run after `at` of the schedule called `name`. `None` at the end of time.
    pub(crate) fn next_after(&self, at: Timestamp, name: &str) -> Option<Timestamp> {
        match &self.kind {
            Kind::Cron { wall, .. } => wall.next_after(at),
            Kind::Every(every) => beat(at, *every, name, 1),
        }
    }

    /// The latest run at `at` or before. `None` at the beginning of time.
    #[cfg(any(feature = "postgres", test))]
    pub(crate) fn latest_until(&self, at: Timestamp, name: &str) -> Option<Timestamp> {
        match &self.kind {
            Kind::Cron { wall, .. } => wall.latest_until(at),
            Kind::Every(every) => beat(at, *every, name, 0),
        }
    }

    /// How many runs there are from `first`, itself a run, until `last`; at most `most`.
    #[cfg(any(feature = "postgres", test))]
    pub(crate) fn count(&self, first: Timestamp, last: Timestamp, name: &str, most: u64) -> u64 {
        if let Kind::Every(every) = &self.kind {
            let span = last.as_millisecond() - first.as_millisecond();
            let beats = span / milliseconds(*every);
            return u64::try_from(beats + 1).unwrap_or(0).min(most);
        }
        let mut count = 0;
        let mut run = Some(first);
        while let Some(due) = run.filter(|due| *due <= last && count < most) {
            count += 1;
            run = self.next_after(due, name);
        }
        count
    }

    /// The shortest time between two runs, summer time left aside.
    pub(crate) fn shortest_pause(&self) -> Duration {
        let wall = match &self.kind {
            Kind::Every(every) => return *every,
            Kind::Cron { wall, .. } => wall,
        };
        let mut runs = wall.pattern().iter_after(TRIAL_BEGINS).take(TRIAL_RUNS);
        let Some(mut last) = runs.next() else {
            return LONGEST_EVERY;
        };
        let mut shortest = LONGEST_EVERY;
        for run in runs {
            shortest = shortest.min(run.duration_since(last).unsigned_abs());
            last = run;
            if run.year() >= TRIAL_ENDS {
                break;
            }
        }
        shortest
    }
}

/// As it is shown: all that a parsed expression holds would fill pages.
impl std::fmt::Debug for Timing {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "Timing({self})")
    }
}

/// `0 2 * * * (Europe/Rome)`, or `every 1m30s`.
impl std::fmt::Display for Timing {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.kind {
            Kind::Cron {
                expression,
                timezone,
                ..
            } => write!(out, "{expression} ({timezone})"),
            Kind::Every(every) => write!(out, "every {}", show_duration(*every)),
        }
    }
}

/// The beat of a steady schedule: `ahead` beats after the latest one at `at` or before.
///
/// Beats are counted from 1970, not from when somebody started: so every process computes the same
/// ones. The name shifts them, so that a thousand schedules of an hour are spread over the hour.
fn beat(at: Timestamp, every: Duration, name: &str, ahead: i64) -> Option<Timestamp> {
    let every = milliseconds(every);
    let phase = i64::try_from(stable_hash(name) % every.unsigned_abs()).ok()?;
    let beats = (at.as_millisecond() - phase).div_euclid(every);
    let due = beats
        .checked_add(ahead)?
        .checked_mul(every)?
        .checked_add(phase)?;
    Timestamp::from_millisecond(due).ok()
}

fn milliseconds(duration: Duration) -> i64 {
    i64::try_from(duration.as_millis())
        .unwrap_or(i64::MAX)
        .max(1)
}

/// FNV-1a: the standard library's hash may differ between two builds, and two processes must agree.
fn stable_hash(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

/// For callers that have no file: `what` cannot be used.
pub(crate) fn invalid(what: &str, (problem, help): Mistake) -> Error {
    let help = help.map(|help| format!("; {help}")).unwrap_or_default();
    Error::Topology(TopologyError::InvalidSchedule {
        schedule: what.into(),
        problem: format!("{problem}{help}").into(),
    })
}

const CRON_HELP: &str = "write minute, hour, day of month, month and day of week, such as \
     \"30 2 * * *\" for half past two at night; with six parts the first is the second";

fn explain(error: &CronError) -> String {
    match error {
        CronError::EmptyPattern => "it is empty".to_owned(),
        CronError::InvalidPattern(why)
        | CronError::IllegalCharacters(why)
        | CronError::ComponentError(why) => why.trim_end_matches('.').to_owned(),
        other => other.to_string().trim_end_matches('.').to_owned(),
    }
}

#[cfg(test)]
mod tests;
