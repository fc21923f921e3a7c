//! A schedule defined in code, and its stored form: a JSON document with the keys of the file.

use std::time::Duration;

use serde::{Serialize, Serializer};
use serde_json::{Value, json};

use crate::Error;
use crate::error::{PublishError, TopologyError};
use crate::task::{IntoDuration, PublishRequest, Task};
use crate::topology::timing::{Kind, invalid};
use crate::topology::{
    Missed, Schedule, Timing, Topology, parse_duration, schedule, show_duration,
};

impl Schedule {
    /// A schedule that publishes `payload` at the times of `timing`. Each run expires `expires` after its due
    /// time. Give it to [`Schedules::add`](super::Schedules::add), which
    /// checks it like a schedule of the file.
    ///
    /// ```
    /// use tierline::topology::{Missed, Schedule, Timing};
    /// # #[derive(serde::Serialize, serde::Deserialize)]
    /// # struct Report { all: bool }
    /// # impl tierline::Task for Report { const NAME: &'static str = "report.build"; }
    ///
    /// let nightly = Timing::cron("0 2 * * *", "Europe/Rome")?;
    /// let mut schedule = Schedule::new("nightly-report", nightly, "4h", &Report { all: true })?;
    /// schedule.missed = Missed::Once;
    /// # Ok::<(), tierline::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`PublishError::PayloadNotEncodable`] and [`Error::InvalidDuration`].
    pub fn new<T: Task>(
        name: &str,
        timing: Timing,
        expires: impl IntoDuration,
        payload: &T,
    ) -> Result<Self, Error> {
        let not_encodable = |cause| {
            Error::Publish(PublishError::PayloadNotEncodable {
                task: T::NAME,
                cause,
            })
        };
        // Through text, as it will be published: a value made directly keeps other digits.
        let payload = PublishRequest::new(payload)?.payload;
        let payload = serde_json::from_slice(&payload).map_err(not_encodable)?;
        Ok(Self::of(
            name,
            T::NAME,
            payload,
            timing,
            expires.into_duration().map_err(|it| it.of("expires"))?,
        ))
    }

    /// Checks the rules of the file.
    pub(super) fn check(&self, topology: &Topology) -> Result<(), Error> {
        let refuse = |mistake| Err(invalid(&self.name, mistake));
        if let Some((message, help)) = schedule::name_mistake(&self.name) {
            return refuse((message, Some(help)));
        }
        if let Some((message, help)) = schedule::task_mistake(&self.task, topology.tasks()) {
            return refuse((format!("it {message}"), help));
        }
        if let Some((message, help)) = schedule::expiry_mistake(&self.timing, self.expires) {
            return refuse((format!("it expires after {message}"), help));
        }
        Ok(())
    }

    /// The schedule without its name, as the database stores it.
    pub(super) fn document(&self) -> Value {
        let mut document = json!({
            "task": self.task,
            "expires": show_duration(self.expires),
            "missed": self.missed.as_str(),
            "payload": self.payload,
        });
        match &self.timing.kind {
            Kind::Every(every) => document["every"] = json!(show_duration(*every)),
            Kind::Cron {
                expression,
                timezone,
                ..
            } => {
                document["cron"] = json!(expression);
                document["timezone"] = json!(timezone);
            }
        }
        document
    }

    /// Reads the schedule that the database stores as `document`.
    pub(super) fn from_document(name: &str, mut document: Value) -> Result<Self, Error> {
        let refuse = |problem: &str| {
            Error::Topology(TopologyError::InvalidSchedule {
                schedule: name.into(),
                problem: format!("the database has {problem}; did a newer release write it?")
                    .into(),
            })
        };
        let payload = document["payload"].take();
        let text = |key: &str| document[key].as_str();
        let duration = |key: &str| {
            text(key)
                .and_then(|text| parse_duration(text).ok())
                .ok_or_else(|| refuse(&format!("{key} = {}", document[key])))
        };
        let timing = match text("cron") {
            Some(cron) => Timing::cron(cron, text("timezone").unwrap_or("UTC"))?,
            None => Timing::every(duration("every")?)?,
        };
        let missed = Missed::CHOICES
            .iter()
            .find(|(word, _)| text("missed") == Some(word))
            .ok_or_else(|| refuse(&format!("missed = {}", document["missed"])))?;
        let task = text("task").ok_or_else(|| refuse("no task"))?;
        let mut schedule = Self::of(name, task, payload, timing, duration("expires")?);
        schedule.missed = missed.1;
        Ok(schedule)
    }

    pub(super) fn of(
        name: &str,
        task: &str,
        payload: Value,
        timing: Timing,
        expires: Duration,
    ) -> Self {
        Self {
            name: name.to_owned(),
            task: task.to_owned(),
            timing,
            payload,
            expires,
            missed: Missed::default(),
        }
    }
}

/// With the keys of the file.
impl Serialize for Schedule {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut document = self.document();
        document["name"] = json!(self.name);
        document.serialize(serializer)
    }
}
