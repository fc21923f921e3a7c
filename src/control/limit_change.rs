//! How an operator limits a tier or a task.

use std::future::IntoFuture;

use futures_util::future::BoxFuture;

use super::Control;
use super::change::{Change, Changed, Kind};
use super::entry::{Setting, Target};
use crate::Error;
use crate::task::IntoDuration;
use crate::topology::limit::COUNTS;
use crate::topology::{Limit, Rate};

/// A limit to be set: see [`Control::limit_tier`].
#[derive(Debug, Clone)]
#[must_use = "nothing happens until it is awaited"]
pub struct LimitChange {
    change: Change,
    rate: Option<String>,
    burst: Option<u32>,
    running: Option<u32>,
    is_none: bool,
}

impl LimitChange {
    pub(super) fn new(control: &Control, target: Target) -> Self {
        Self {
            change: Change::begin(control, target, Setting::Limit(Limit::NONE)),
            rate: None,
            burst: None,
            running: None,
            is_none: false,
        }
    }

    /// How often its tasks may start, as in the map: `"50/m"`, `"0.5/s"`, `"5/10s"`. Default: no limit.
    pub fn rate(mut self, rate: &str) -> Self {
        self.rate = Some(rate.to_owned());
        self
    }

    /// How many may start at once after a rest, from 1; with a [`rate`](Self::rate) only. Default: what the rate gives in
    /// one second, rounded up.
    pub fn burst(mut self, burst: u32) -> Self {
        self.burst = Some(burst);
        self
    }

    /// How many may run at a time, from 1. If the map has `per` for the task, of each key. Default: no
    /// limit.
    pub fn running(mut self, running: u32) -> Self {
        self.running = Some(running);
        self
    }

    /// Lifts the limit of the map for this time.
    pub fn none(mut self) -> Self {
        self.is_none = true;
        self
    }

    /// As [`Change::by`].
    pub fn by(mut self, who: &str) -> Self {
        self.change = self.change.by(who);
        self
    }

    /// As [`Change::because`].
    pub fn because(mut self, why: &str) -> Self {
        self.change = self.change.because(why);
        self
    }

    /// As [`Change::lasting`].
    pub fn lasting(mut self, length: impl IntoDuration) -> Self {
        self.change = self.change.lasting(length);
        self
    }

    async fn run(self) -> Result<Changed, Error> {
        let limit = self.limit();
        let mut change = self.change;
        let limit = limit.map_err(|problem| change.invalid(problem))?;
        change.kind = Kind::Begin(Setting::Limit(limit));
        change.await
    }

    fn limit(&self) -> Result<Limit, String> {
        let Self {
            rate,
            burst,
            running,
            is_none,
            ..
        } = self;
        match (*is_none, rate.is_some() || running.is_some() || burst.is_some()) {
            (true, true) => return Err("a limit cannot be none and have a rate, burst or running".into()),
            (false, false) => return Err("say how often its tasks may start (rate), or how many may run (running); none lifts \
                                          the limit of the map".into()),
            _ => {}
        }
        for (what, count) in [("burst", burst), ("running", running)] {
            if count.is_some_and(|count| !COUNTS.contains(&count)) {
                let (least, most) = (COUNTS.start(), COUNTS.end());
                return Err(format!("{what} must be from {least} to {most}"));
            }
        }
        let rate = rate.as_ref().map(|rate| rate.parse::<Rate>());
        let rate = rate.transpose().map_err(|invalid| invalid.to_string())?;
        if burst.is_some() && rate.is_none() {
            return Err(
                "a burst is what may start at once after a rest, so it needs a rate".into(),
            );
        }
        Ok(Limit {
            rate: rate.map(|rate| burst.map_or(rate, |burst| rate.with_burst(burst))),
            running: *running,
            ..Limit::NONE
        })
    }
}

impl IntoFuture for LimitChange {
    type Output = Result<Changed, Error>;
    type IntoFuture = BoxFuture<'static, Self::Output>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(self.run())
    }
}
