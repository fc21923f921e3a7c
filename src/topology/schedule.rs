//! `[schedules.NAME]`: a task that comes due by itself.

use std::time::{Duration, SystemTime};

use jiff::Timestamp;
use serde_json::{Map, Value};
use toml::de::DeValue;

use super::names;
use super::reader::{At, Reader, did_you_mean, near_miss, quoted};
use super::task::MappedTask;
use super::timing::{LONGEST_EVERY, Mistake, SHORTEST_EVERY, Timing};
use super::units::show_duration;

/// A schedule: which task, with what payload, when, and until when a run is worth running.
///
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Schedule {
    /// The name in `[schedules.NAME]`: up to 128 letters, digits, `_` and `-`.
    pub name: String,
    /// The task that is published. It must be in `[tasks]`, which says to which tier it goes.
    pub task: String,
    /// When runs are due: `cron` with its `timezone` (default `"UTC"`), or `every`.
    pub timing: Timing,
    /// The payload of every run. Default `null`, which a unit struct reads.
    pub payload: Value,
    /// For how long after its due time a run is worth running. No default: it is what keeps runs
    /// from piling up. From 1 s to the shortest time between two runs, or a minute if that is longer.
    pub expires: Duration,
    /// How to handle runs that came due while no scheduler was running. Default `"skip"`.
    pub missed: Missed,
}

impl Schedule {
    /// When the next `count` runs after `at` are due.
    ///
    /// ```
    /// use std::time::{Duration, UNIX_EPOCH};
    /// use tierline::Topology;
    ///
    /// let map = Topology::load("topology/hotel.toml")?;
    /// let nightly = &map.schedules()[0];
    /// let week = nightly.upcoming(UNIX_EPOCH + Duration::from_secs(1_800_000_000), 7);
    /// assert_eq!(week.len(), 7);
    /// # Ok::<(), tierline::Error>(())
    /// ```
    pub fn upcoming(&self, at: SystemTime, count: usize) -> Vec<SystemTime> {
        let first = Timestamp::try_from(at).ok();
        let next = |at: &Timestamp| self.timing.next_after(*at, &self.name);
        let runs = std::iter::successors(first, next);
        runs.skip(1).take(count).map(SystemTime::from).collect()
    }
}

/// How to handle runs that came due while no scheduler was running for a minute or longer.
///
/// All of them are counted. Shorter absences, such as the takeover by another process, are none:
/// after these, as while a scheduler is running, the newest run that has not expired is published.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Missed {
    /// `"skip"`: none is made up for. The next run is the next one by the clock.
    #[default]
    Skip,
    /// `"once"`: the newest is published if it has not expired, and no other.
    Once,
}

impl Missed {
    pub(crate) const CHOICES: [(&'static str, Missed); 2] =
        [("skip", Missed::Skip), ("once", Missed::Once)];

    /// The word that the file uses.
    pub fn as_str(self) -> &'static str {
        match self {
            Missed::Skip => "skip",
            Missed::Once => "once",
        }
    }
}

const LONGEST_NAME: usize = 128;
const SHORTEST_EXPIRY: Duration = Duration::from_secs(1);
/// Runs may overlap in the queue for this long, however close together they are.
const OVERLAP: Duration = Duration::from_secs(60);

pub(super) fn read(root: &mut Reader<'_>, mapped: &[MappedTask]) -> Vec<Schedule> {
    let Some(section) = root.table("schedules") else {
        return Vec::new();
    };
    let mut schedules = Vec::new();
    for (name, table) in section.tables() {
        if let Some((message, help)) = name_mistake(name.get_ref()) {
            section.source().report(&name.span(), message, Some(&help));
        }
        schedules.extend(read_schedule(name.get_ref(), table, mapped));
    }
    schedules
}

fn read_schedule(name: &str, mut table: Reader<'_>, mapped: &[MappedTask]) -> Option<Schedule> {
    let task = read_task(&mut table, mapped);
    let timing = read_timing(&mut table);
    let payload = match table.value("payload") {
        Some(payload) => to_json(payload, &table),
        None => Some(Value::Null),
    };
    let expires = table.duration("expires", SHORTEST_EXPIRY..=LONGEST_EVERY);
    let missed = table.choice("missed", &Missed::CHOICES);
    if let (Some(timing), Some(expires)) = (&timing, expires)
        && let Some((message, help)) = expiry_mistake(timing, expires)
    {
        let message = format!("expires in {} is {message}", table.what());
        table.reject("expires", message, help.as_deref());
    }
    table.finish(&[
        ("task", "write task = \"NAME\" with a task of [tasks]"),
        (
            "expires",
            "write expires = \"5m\", say: after that a run that has not started is skipped, so that \
             runs never pile up",
        ),
    ]);
    Some(Schedule {
        name: name.to_owned(),
        task: task?,
        timing: timing?,
        payload: payload?,
        expires: expires?,
        missed: missed.unwrap_or_default(),
    })
}

fn read_task(table: &mut Reader<'_>, mapped: &[MappedTask]) -> Option<String> {
    let task = table.text("task")?;
    if let Some((message, help)) = task_mistake(task, mapped) {
        let message = format!("{} {message}", table.what());
        table.reject("task", message, help.as_deref());
    }
    Some(task.to_owned())
}

fn read_timing(table: &mut Reader<'_>) -> Option<Timing> {
    let cron = table.text("cron");
    let every = table.duration("every", SHORTEST_EVERY..=LONGEST_EVERY);
    let timezone = table.text("timezone");
    let what = table.what().to_owned();
    match (table.has("cron"), table.has("every")) {
        (true, true) => {
            let message = format!("{what} has both cron and every");
            table.reject("every", message, Some("keep the one that you mean"));
            return None;
        }
        (false, false) => {
            let message = format!("{what} does not say when it is due");
            let help = "write cron = \"30 2 * * *\" or every = \"10m\"";
            let is_misspelt = |key: &str| near_miss(key, ["cron", "every"].into_iter()).is_some();
            // A misspelt key is reported as such, and once.
            if !table
                .entries()
                .iter()
                .any(|(key, _)| is_misspelt(key.get_ref()))
            {
                table.source().report(table.span(), message, Some(help));
            }
            return None;
        }
        (false, true) if table.has("timezone") => {
            let message = format!("timezone in {what} is for cron, and this schedule has every");
            table.reject("timezone", message, Some("remove it"));
        }
        _ => {}
    }
    if let Some(every) = every {
        return Timing::read_every(every).ok();
    }
    let name = timezone.unwrap_or("UTC");
    let zone = Timing::read_zone(name).map_err(|(message, help)| {
        let message = format!("timezone in {what}: {message}");
        table.reject("timezone", message, help.as_deref());
    });
    let cron = cron?;
    // The expression is looked at even where the time zone is wrong.
    let is_known = zone.is_ok();
    let timing = Timing::read_cron(cron, (name, zone.unwrap_or(jiff::tz::TimeZone::UTC)))
        .map_err(|(message, help)| {
            let message = format!("cron = {} in {what}: {message}", quoted(cron));
            table.reject("cron", message, help.as_deref());
        })
        .ok()?;
    is_known.then_some(timing)
}

/// The mistake in the name of a schedule.
pub(crate) fn name_mistake(name: &str) -> Option<(String, String)> {
    if name.len() > LONGEST_NAME {
        let message = format!(
            "the schedule name {} has {} bytes",
            quoted(name),
            name.len()
        );
        return Some((message, format!("it may have {LONGEST_NAME}")));
    }
    names::mistake("schedule", name, 0).map(|(message, _)| {
        let help = "the identifier of every run is built from it";
        (message, help.to_owned())
    })
}

/// The mistake in the task of a schedule.
pub(crate) fn task_mistake(task: &str, mapped: &[MappedTask]) -> Option<Mistake> {
    let mut tasks = mapped.iter().map(|task| task.name.as_str());
    if tasks.clone().any(|known| known == task) {
        return None;
    }
    let near = did_you_mean(near_miss(task, &mut tasks));
    let help = near.unwrap_or_else(|| "add it to [tasks] with its tier".to_owned());
    Some((
        format!("names the task {}, which is not mapped", quoted(task)),
        Some(help),
    ))
}

/// The mistake in the expiry of a schedule.
///
/// If runs outlive the next ones, a pool that is late or down for a while has many outdated runs to
/// catch up with: the stampede that `expires` prevents.
pub(crate) fn expiry_mistake(timing: &Timing, expires: Duration) -> Option<Mistake> {
    if (SHORTEST_EXPIRY..=OVERLAP).contains(&expires) {
        return None;
    }
    let longest = timing.shortest_pause().max(OVERLAP);
    if expires < SHORTEST_EXPIRY {
        let least = show_duration(SHORTEST_EXPIRY);
        return Some((
            format!("{}, and no run starts so soon", show_duration(expires)),
            Some(format!("it may be {least} to {}", show_duration(longest))),
        ));
    }
    (expires > longest).then(|| {
        let message = format!(
            "{}, and two runs may be only {} apart",
            show_duration(expires),
            show_duration(timing.shortest_pause())
        );
        let help = format!(
            "older runs would pile up behind newer ones; it may be at most {}",
            show_duration(longest)
        );
        (message, Some(help))
    })
}

/// A value of the file as JSON. Reports values that JSON does not have.
fn to_json(value: &At<DeValue<'_>>, table: &Reader<'_>) -> Option<Value> {
    let refuse = |problem: &str| {
        let message = format!("payload in {} {problem}", table.what());
        table
            .source()
            .report(&value.span(), message, Some("write it as a string"));
        None
    };
    match value.get_ref() {
        DeValue::String(text) => Some(Value::String(text.to_string())),
        DeValue::Boolean(boolean) => Some(Value::Bool(*boolean)),
        DeValue::Datetime(datetime) => Some(Value::String(datetime.to_string())),
        DeValue::Integer(integer) => match i64::from_str_radix(integer.as_str(), integer.radix()) {
            Ok(integer) => Some(Value::from(integer)),
            Err(_) => refuse("has a number with more than 64 bits"),
        },
        DeValue::Float(float) => {
            let number = float.as_str().parse().ok();
            match number.and_then(serde_json::Number::from_f64) {
                Some(number) => Some(Value::Number(number)),
                None => refuse("has a number that JSON does not have"),
            }
        }
        DeValue::Array(array) => array
            .iter()
            .map(|element| to_json(element, table))
            .collect::<Option<Vec<_>>>()
            .map(Value::Array),
        DeValue::Table(entries) => entries
            .iter()
            .map(|(key, value)| Some((key.get_ref().to_string(), to_json(value, table)?)))
            .collect::<Option<Map<_, _>>>()
            .map(Value::Object),
    }
}
