//! `limit` of a tier or a task, and `fair` of a tier: how many of its tasks may start, and run, in all processes.

use std::fmt;
use std::ops::RangeInclusive;
use std::str::FromStr;
use std::time::Duration;

use serde::ser::SerializeMap;
use serde::{Serialize, Serializer};
#[cfg(feature = "postgres")]
use serde_json::Value;

use super::reader::Reader;
use super::tier::Home;
use super::units::{parse_milliseconds, show_duration};

/// How often tasks of a tier, or a task, may start, and how many of them may run at a time.
///
/// At least one of `rate` and `running` is set.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Limit {
    /// In any time T, at most the rate times T and `burst` more tasks start. `None`: as many as there are.
    pub rate: Option<Rate>,
    /// How many may run at a time; with `per`, of each key. `None`: as many as there are slots.
    pub running: Option<u32>,
    /// The field of the payload whose values are the keys that `running` is for, as a path into JSON objects such as
    /// `customer` or `order.customer`. Tasks only. Default `None`: `running` is for all of them.
    pub per: Option<String>,
    /// What the limit is for. Default: all processes of the app together.
    pub scope: LimitScope,
}

/// What a limit is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum LimitScope {
    /// `"app"`: all processes of the app together. They share the limit by way of the database.
    #[default]
    App,
    /// `"process"`: each process by itself. No database is needed, and with n processes n times as much starts.
    Process,
}

/// How often tasks may start: a number of them in a time, and how many at once after a rest.
///
/// It is written as `"100/m"`, with the unit `s`, `m`, `h` or `d` or with a duration, `"5/10s"`. The number may have up
/// to three decimals. `burst` is a key of its own in the map.
///
/// ```
/// use tierline::topology::Rate;
///
/// let rate: Rate = "100/m".parse()?;
/// assert_eq!((rate.to_string().as_str(), rate.burst()), ("100/m", 2));
/// assert_eq!("0.5/s".parse::<Rate>()?.per_second(), 0.5);
/// assert!("100".parse::<Rate>().is_err());
/// # Ok::<(), tierline::topology::InvalidRate>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Rate {
    /// How many thousandths of a task may start in `period`.
    thousandths: u64,
    period: Duration,
    burst: u32,
}

/// A text that is no rate, with the reason.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("cannot read {text:?} as a rate: {problem}")]
#[non_exhaustive]
pub struct InvalidRate {
    /// The text.
    pub text: String,
    /// What is wrong with it.
    pub problem: String,
}

/// Rates per second. Below that, a limit is a pause; above it, no machine would notice it.
const RATES: RangeInclusive<f64> = (1.0 / (366.0 * 86_400.0))..=1_000_000.0;
const PERIODS: RangeInclusive<Duration> =
    Duration::from_millis(1)..=Duration::from_secs(366 * 86_400);
/// How many tasks may start at once after a rest, and how many may run.
pub(crate) const COUNTS: RangeInclusive<u32> = 1..=1_000_000;
/// The units that stand for a time of one.
const UNITS: [(&str, u64); 4] = [("s", 1), ("m", 60), ("h", 3_600), ("d", 86_400)];
const HOW: &str = "write a number and a time, such as \"100/m\", \"0.5/s\" or \"5/10s\"";
const LONGEST_PATH: usize = 255;

impl Rate {
    /// How many tasks may start in a second, in the long run.
    pub fn per_second(&self) -> f64 {
        self.thousandths as f64 / 1_000.0 / self.period.as_secs_f64()
    }

    /// How many may start at once after a rest. Unless it is said otherwise, what the rate gives in one second, rounded
    /// up.
    pub fn burst(&self) -> u32 {
        self.burst
    }

    /// The same rate with another burst, from 1 to 1,000,000.
    #[must_use]
    pub fn with_burst(self, burst: u32) -> Self {
        let burst = burst.clamp(*COUNTS.start(), *COUNTS.end());
        Self { burst, ..self }
    }

    fn read(text: &str) -> Result<Self, String> {
        let (number, time) = text.split_once('/').ok_or(HOW)?;
        let thousandths = thousandths(number.trim()).ok_or_else(|| {
            format!(
                "{:?} is no number with at most three decimals; {HOW}",
                number.trim()
            )
        })?;
        let time = time.trim();
        let unit = UNITS.iter().find(|(unit, _)| *unit == time);
        let period = match unit {
            Some((_, seconds)) => Duration::from_secs(*seconds),
            None => parse_milliseconds(time)
                .map_err(|problem| format!("{time:?} is no time: {problem}; {HOW}"))?,
        };
        if !PERIODS.contains(&period) {
            return Err(format!(
                "the time may be {} to {}",
                show_duration(*PERIODS.start()),
                show_duration(*PERIODS.end())
            ));
        }
        let rate = Self {
            thousandths,
            period,
            burst: 1,
        };
        let per_second = rate.per_second();
        if per_second < *RATES.start() {
            return Err(
                "it may be one task in a year at least; pause what must not run".to_owned(),
            );
        }
        if per_second > *RATES.end() {
            return Err("it may be 1000000/s at most; no limit is needed above".to_owned());
        }
        // It is at most a million.
        let of_a_second = per_second.ceil() as u32;
        Ok(rate.with_burst(of_a_second))
    }
}

/// A number with up to three decimals, in thousandths.
fn thousandths(number: &str) -> Option<u64> {
    let (whole, decimals) = number.split_once('.').unwrap_or((number, "0"));
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    if !is_number(whole) || !is_number(decimals) || decimals.len() > 3 {
        return None;
    }
    let whole: u64 = whole.parse().ok()?;
    let decimals: u64 = format!("{decimals:0<3}").parse().ok()?;
    whole.checked_mul(1_000)?.checked_add(decimals)
}

impl FromStr for Rate {
    type Err = InvalidRate;

    fn from_str(text: &str) -> Result<Self, InvalidRate> {
        Self::read(text).map_err(|problem| InvalidRate {
            text: text.to_owned(),
            problem,
        })
    }
}

/// As in the map, without the burst.
impl fmt::Display for Rate {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (whole, decimals) = (self.thousandths / 1_000, self.thousandths % 1_000);
        write!(out, "{whole}")?;
        if decimals > 0 {
            let decimals = format!("{decimals:03}");
            write!(out, ".{}", decimals.trim_end_matches('0'))?;
        }
        let seconds = (self.period.subsec_nanos() == 0).then_some(self.period.as_secs());
        match UNITS.iter().find(|(_, length)| seconds == Some(*length)) {
            Some((unit, _)) => write!(out, "/{unit}"),
            None => write!(out, "/{}", show_duration(self.period)),
        }
    }
}

impl Limit {
    /// One that limits nothing, to be filled in.
    #[cfg(feature = "postgres")]
    pub(crate) const NONE: Self = Self {
        rate: None,
        running: None,
        per: None,
        scope: LimitScope::App,
    };

    /// Whether the processes of an app need the database to keep it.
    pub(crate) fn needs_database(&self) -> bool {
        self.scope == LimitScope::App || self.per.is_some()
    }

    /// The keys of the map, as JSON has them. `None`: a newer release has written what this one does not know.
    #[cfg(feature = "postgres")]
    pub(crate) fn from_json(stored: &Value) -> Option<Self> {
        let count = |key: &str| {
            let count = u32::try_from(stored.get(key)?.as_u64()?).ok()?;
            COUNTS.contains(&count).then_some(count)
        };
        let rate = match stored.get("rate").and_then(Value::as_str) {
            Some(text) => Some(text.parse::<Rate>().ok()?),
            None => None,
        };
        let rate = match (rate, count("burst")) {
            (Some(rate), Some(burst)) => Some(rate.with_burst(burst)),
            (rate, _) => rate,
        };
        let scope = match stored.get("scope").and_then(Value::as_str) {
            None | Some("app") => LimitScope::App,
            Some("process") => LimitScope::Process,
            Some(_) => return None,
        };
        let per = stored.get("per").and_then(Value::as_str);
        Some(Self {
            rate,
            running: count("running"),
            per: per.map(str::to_owned),
            scope,
        })
    }
}

/// The keys of the map.
impl Serialize for Limit {
    fn serialize<S: Serializer>(&self, out: S) -> Result<S::Ok, S::Error> {
        let mut keys = out.serialize_map(None)?;
        if let Some(rate) = &self.rate {
            keys.serialize_entry("rate", &rate.to_string())?;
            keys.serialize_entry("burst", &rate.burst)?;
        }
        if let Some(running) = self.running {
            keys.serialize_entry("running", &running)?;
        }
        if let Some(per) = &self.per {
            keys.serialize_entry("per", per)?;
        }
        if self.scope == LimitScope::Process {
            keys.serialize_entry("scope", &self.scope)?;
        }
        keys.end()
    }
}

/// `100/m with bursts of 20, 4 running per customer`.
impl fmt::Display for Limit {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(rate) = &self.rate {
            write!(out, "{rate} with bursts of {}", rate.burst)?;
        }
        if let Some(running) = self.running {
            let comma = if self.rate.is_some() { ", " } else { "" };
            write!(out, "{comma}{running} running")?;
        }
        if let Some(per) = &self.per {
            write!(out, " per {per}")?;
        }
        match (self.rate.is_some() || self.running.is_some(), self.scope) {
            (false, _) => out.write_str("none"),
            (true, LimitScope::Process) => out.write_str(", in each process"),
            (true, LimitScope::App) => Ok(()),
        }
    }
}

/// Whether `limit` may have `per`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Of {
    Tier,
    Task,
}

/// Reads `limit` of a tier or a task.
pub(super) fn read(owner: &mut Reader<'_>, of: Of) -> Option<Limit> {
    let mut table = owner.table("limit")?;
    let what = format!("limit in {}", owner.what());
    let rate = read_rate(&mut table);
    let burst = table.integer("burst", COUNTS);
    let running = table.integer("running", COUNTS);
    let per = read_path(&mut table, "per");
    let scopes = [("app", LimitScope::App), ("process", LimitScope::Process)];
    let scope = table.choice("scope", &scopes).unwrap_or_default();
    if burst.is_some() && !table.has("rate") {
        let message = format!("burst in {what} has no rate");
        let help =
            "a burst is what may start at once after a rest; write rate = \"100/m\" beside it, say";
        table.reject("burst", message, Some(help));
    }
    if of == Of::Tier && table.has("per") {
        let message = format!("per in {what} is for tasks");
        let help = "give the tier's tasks the limit, as { tier = \"NAME\", limit = { running = 1, per = \"customer\" } }; \
                    for keys that take turns, write fair = \"customer\" in the tier";
        table.reject("per", message, Some(help));
    } else if table.has("per") && !table.has("running") {
        let message = format!("per in {what} has no running");
        let help = "write running = 1 beside it, say: how many tasks of each key may run at a time";
        table.reject("per", message, Some(help));
    } else if table.has("per") && scope == LimitScope::Process {
        let message = format!("{what} has per and scope = \"process\"");
        let help = "the tasks of a key are counted in the database, over all processes; remove one of the two";
        table.reject("scope", message, Some(help));
    }
    if !table.has("rate") && !table.has("running") && !table.has("per") && !table.has("burst") {
        let message = format!("{what} limits nothing");
        let help = "write rate = \"100/m\", running = 4 or both in it, or remove it";
        owner.reject("limit", message, Some(help));
    }
    table.finish(&[]);
    let rate = rate.map(|rate: Rate| burst.map_or(rate, |burst| rate.with_burst(burst)));
    let limit = Limit {
        rate,
        running,
        per,
        scope,
    };
    // A wrong value is reported once.
    (rate.is_some() || running.is_some()).then_some(limit)
}

fn read_rate(table: &mut Reader<'_>) -> Option<Rate> {
    let text = table.text("rate")?;
    match text.parse::<Rate>() {
        Ok(rate) => Some(rate),
        Err(InvalidRate { problem, .. }) => {
            let message = format!("rate in {} cannot be {text:?}", table.what());
            table.reject("rate", message, Some(&problem));
            None
        }
    }
}

/// A path into the JSON objects of a payload.
fn read_path(table: &mut Reader<'_>, key: &'static str) -> Option<String> {
    let path = table.text(key)?;
    let is_path = path.len() <= LONGEST_PATH
        && path.split('.').all(|name| !name.is_empty())
        && !path.chars().any(char::is_control);
    if !is_path {
        let message = format!("{key} in {} cannot be {path:?}", table.what());
        let help = "name a field of the payload, such as \"customer\", or \"order.customer\" for one inside another";
        table.reject(key, message, Some(help));
        return None;
    }
    Some(path.to_owned())
}

/// Reads `fair` of a tier, and refuses it in a tier on the broker.
pub(super) fn read_fair(tier: &mut Reader<'_>, home: Home) -> Option<String> {
    let path = read_path(tier, "fair")?;
    // A wrong queue type is reported once.
    let has_queue = tier.value("queue").is_some_and(|it| {
        let queue = it.get_ref().as_str();
        queue == Some("classic") || queue == Some("quorum")
    });
    if home.is_on_broker() && has_queue {
        let message = format!(
            "fair in {} is for tiers in Postgres, and this tier is on the broker",
            tier.what()
        );
        let help =
            "a queue gives its messages out in its own order alone; set queue = \"postgres\"";
        tier.reject("fair", message, Some(help));
        return None;
    }
    if tier.has("promote") {
        let message = format!(
            "{} has fair and promote, and only one of the two decides which task is next",
            tier.what()
        );
        let help = "with fair the keys take turns, so no task waits behind all of another key; leave promote out, or fair";
        tier.reject("promote", message, Some(help));
        return None;
    }
    Some(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_read_as_people_write_them_and_are_shown_like_that() {
        for (text, per_second, burst) in [
            ("100/m", 100.0 / 60.0, 2),
            ("1/h", 1.0 / 3_600.0, 1),
            ("0.5/s", 0.5, 1),
            ("5/10s", 0.5, 1),
            ("2000/d", 2_000.0 / 86_400.0, 1),
            ("2.25/s", 2.25, 3),
            ("3/1h30m", 3.0 / 5_400.0, 1),
            ("1000000/s", 1_000_000.0, 1_000_000),
            ("10/100ms", 100.0, 100),
        ] {
            let rate: Rate = text.parse().unwrap();
            assert!((rate.per_second() - per_second).abs() < 1e-9, "{text}");
            assert_eq!((rate.to_string(), rate.burst()), (text.to_owned(), burst));
        }
        let same: Rate = " 1.50 / 60s ".parse().unwrap();
        assert_eq!(same.to_string(), "1.5/m");
    }

    #[test]
    fn what_is_no_rate_says_what_to_write() {
        for (text, expected) in [
            ("100", "\"100/m\""),
            ("", "\"100/m\""),
            ("/m", "no number"),
            ("-1/s", "no number"),
            ("1e3/s", "no number"),
            ("0.0001/s", "three decimals"),
            ("1/parsec", "no time"),
            ("1/0s", "the time may be"),
            ("1/1M", "no time"),
            ("0/s", "pause"),
            ("0.001/366d", "pause"),
            ("1000001/s", "at most"),
            ("99999999999999999999/s", "no number"),
        ] {
            let error = text.parse::<Rate>().unwrap_err();
            assert!(error.problem.contains(expected), "{text:?}: {error}");
        }
    }

    #[cfg(feature = "postgres")]
    #[test]
    fn a_limit_comes_back_from_json_as_it_was() {
        let limit = Limit {
            rate: Some("1.5/m".parse::<Rate>().unwrap().with_burst(7)),
            running: Some(4),
            per: Some("order.customer".into()),
            scope: LimitScope::Process,
        };
        for limit in [Limit::NONE, limit] {
            let json = serde_json::to_value(&limit).unwrap();
            assert_eq!(Limit::from_json(&json), Some(limit), "{json}");
        }
        let newer = serde_json::json!({ "rate": "1/s", "scope": "galaxy" });
        assert_eq!(Limit::from_json(&newer), None);
    }

    #[cfg(feature = "postgres")]
    #[test]
    fn a_limit_is_shown_in_words() {
        let limit = Limit {
            rate: Some("100/m".parse::<Rate>().unwrap().with_burst(20)),
            running: Some(4),
            per: Some("customer".into()),
            scope: LimitScope::App,
        };
        assert_eq!(
            limit.to_string(),
            "100/m with bursts of 20, 4 running per customer"
        );
        assert_eq!(Limit::NONE.to_string(), "none");
    }
}
