//! A day of the shop, as series of one sample a minute: a good one, which tests then spoil.

use std::collections::BTreeMap;

use serde_json::{Value, json};

/// The tiers of the shop with their group.
const TIERS: [(&str, &str); 3] = [("urgent", "front"), ("rows", "back"), ("bulk", "back")];
const WORKERS: [&str; 2] = ["worker-1", "worker-2"];
/// Two processes export what is the same for the whole app.
const EXPORTERS: [&str; 2] = ["serve-1", "serve-2"];
/// Tasks that each worker starts in a minute, of each tier.
pub(super) const PACE: f64 = 60.0;

#[derive(Clone)]
pub(super) struct Day {
    minutes: u32,
    series: BTreeMap<String, Vec<Option<f64>>>,
}

impl Day {
    /// A day on which all is well: nearly all tasks start in time, some are retried, and one becomes a dead letter.
    pub(super) fn good(minutes: u32) -> Self {
        let mut day = Self {
            minutes,
            series: BTreeMap::new(),
        };
        for instance in WORKERS.into_iter().chain(EXPORTERS) {
            day.set("up", &[("instance", instance)], |_| Some(1.0));
            let labels = [("instance", instance), ("version", "0.1.0")];
            day.set("tierline_build_info", &labels, |_| Some(1.0));
        }
        for (tier, group) in TIERS {
            day.count("tierline_wait_seconds_count", &[("tier", tier)], |at| {
                at * PACE
            });
            if tier != "bulk" {
                day.judge(tier, |at| (at / 180.0).floor());
            }
            day.outcome(tier, "done", |at| at * PACE);
            day.outcome(tier, "retried", |at| at);
            day.die(tier, |at| if at < 100.0 { 0.0 } else { 1.0 });
            day.run(tier, [50.0, 58.0, 60.0], |_| 0.0);
            day.say("tierline_waiting", tier, |at| f64::from(at % 3));
            day.say("tierline_oldest_wait_seconds", tier, |at| f64::from(at % 3));
            day.say("tierline_paused", tier, |_| 0.0);
            day.say("tierline_limit_saturated", tier, |_| 0.0);
            if tier != "rows" {
                day.say("tierline_consumers", tier, |_| 16.0);
                day.say("tierline_relay_waiting", tier, |_| 0.0);
            }
            day.gauge(
                "tierline_in_progress",
                &[("tier", tier), ("group", group)],
                |_| 2.0,
            );
        }
        for group in ["front", "back"] {
            day.gauge("tierline_slots", &[("group", group)], |_| 8.0);
            day.app_wide("tierline_processes", &[("group", group)], |_| 2.0);
        }
        day.app_wide("tierline_schedule_leader", &[], |_| 1.0);
        day.app_wide("tierline_stats_problems", &[], |_| 0.0);
        let schedule = [("schedule", "nightly")];
        day.count("tierline_schedule_missed_total", &schedule, |_| 0.0);
        day
    }

    pub(super) fn minutes(&self) -> u32 {
        self.minutes
    }

    /// How many starts of a tier were late until then, for each worker.
    pub(super) fn judge(&mut self, tier: &str, late: impl Fn(f64) -> f64) {
        let met = |met| [("tier", tier), ("met", met)];
        self.count("tierline_slo_tasks_total", &met("true"), |at| {
            at * PACE - late(at)
        });
        self.count("tierline_slo_tasks_total", &met("false"), &late);
    }

    /// How many tasks had ended so until then, for each worker.
    pub(super) fn outcome(&mut self, tier: &str, outcome: &str, count: impl Fn(f64) -> f64) {
        let labels = [("tier", tier), ("task", "a.task"), ("outcome", outcome)];
        self.count("tierline_tasks_total", &labels, count);
    }

    /// How many dead letters there were until then: by one worker, and in the log.
    pub(super) fn die(&mut self, tier: &str, count: impl Fn(f64) -> f64) {
        self.outcome(tier, "dead", &count);
        let labels = [
            ("instance", WORKERS[0]),
            ("tier", tier),
            ("task", "a.task"),
            ("reason", "retries_exhausted"),
        ];
        self.set("tierline_dead_total", &labels, |at| {
            Some(count(f64::from(at)))
        });
        self.in_log(tier, count);
    }

    /// How many dead letters were in the log then.
    pub(super) fn in_log(&mut self, tier: &str, count: impl Fn(f64) -> f64) {
        let labels = [("tier", tier), ("state", "dead")];
        self.app_wide("tierline_dead_letters", &labels, |at| count(f64::from(at)));
    }

    /// Runs in a minute that took up to 0.1, 1 and 10 s, and how many runs up to then took a minute.
    pub(super) fn run(&mut self, tier: &str, up_to: [f64; 3], slow: impl Fn(f64) -> f64) {
        let labels = |le| [("tier", tier), ("task", "a.task"), ("le", le)];
        for (le, runs) in ["0.1", "1.0", "10.0"].into_iter().zip(up_to) {
            let share = runs / PACE;
            self.count("tierline_run_seconds_bucket", &labels(le), |at| {
                share * (at * PACE - slow(at))
            });
        }
        for le in ["60.0", "+Inf"] {
            self.count("tierline_run_seconds_bucket", &labels(le), |at| at * PACE);
        }
        let labels = [("tier", tier), ("task", "a.task")];
        self.count("tierline_run_seconds_count", &labels, |at| at * PACE);
    }

    /// Nothing of a tier starts from then on, while some tasks wait.
    pub(super) fn stop(&mut self, tier: &str, from: u32) {
        let until = |at: f64| at.min(f64::from(from)) * PACE;
        self.count("tierline_wait_seconds_count", &[("tier", tier)], until);
        self.say("tierline_waiting", tier, |at| {
            f64::from(at.saturating_sub(from))
        });
    }

    /// What all exporters say of a tier.
    pub(super) fn say(&mut self, name: &str, tier: &str, value: impl Fn(u32) -> f64) {
        self.app_wide(name, &[("tier", tier)], value);
    }

    pub(super) fn app_wide(
        &mut self,
        name: &str,
        labels: &[(&str, &str)],
        value: impl Fn(u32) -> f64,
    ) {
        for instance in EXPORTERS {
            let labels = [&[("instance", instance)], labels].concat();
            self.set(name, &labels, |at| Some(value(at)));
        }
    }

    /// A gauge of each worker.
    pub(super) fn gauge(
        &mut self,
        name: &str,
        labels: &[(&str, &str)],
        value: impl Fn(u32) -> f64,
    ) {
        for instance in WORKERS {
            let labels = [&[("instance", instance)], labels].concat();
            self.set(name, &labels, |at| Some(value(at)));
        }
    }

    /// A counter of each worker.
    pub(super) fn count(
        &mut self,
        name: &str,
        labels: &[(&str, &str)],
        value: impl Fn(f64) -> f64,
    ) {
        self.gauge(name, labels, |at| value(f64::from(at)));
    }

    /// The series whose names begin so end then.
    pub(super) fn end(&mut self, names: &str, from: u32) {
        for (name, values) in &mut self.series {
            if name.starts_with(names) {
                values[from as usize..].fill(None);
            }
        }
    }

    /// The targets that do not answer from then on.
    pub(super) fn cut_off(&mut self, from: u32) {
        self.gauge("up", &[], |at| f64::from(u8::from(at < from)));
    }

    fn set(&mut self, name: &str, labels: &[(&str, &str)], value: impl Fn(u32) -> Option<f64>) {
        let labels: Vec<_> = labels
            .iter()
            .map(|(key, it)| format!(",{key}=\"{it}\""))
            .collect();
        let series = format!("{name}{{job=\"shop\"{}}}", labels.concat());
        self.series
            .insert(series, (0..=self.minutes).map(value).collect());
    }

    /// The series as `promtool` reads them.
    pub(super) fn series(&self) -> Value {
        let shown = |value: &Option<f64>| value.map_or("_".to_owned(), |it| it.to_string());
        let one = |(series, values): (&String, &Vec<Option<f64>>)| {
            let values: Vec<_> = values.iter().map(shown).collect();
            json!({ "series": series, "values": values.join(" ") })
        };
        self.series.iter().map(one).collect()
    }
}
