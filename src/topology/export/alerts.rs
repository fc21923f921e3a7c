//! The alerts. Each has an entry on the guide's page `alerts`.
//!
//! A rule of a tier has its thresholds from the map, and the tier's name and group as labels. Expressions of more than one
//! term have no labels of their own, so that one fault raises one alert, however many processes export it.

use std::collections::BTreeMap;
use std::time::Duration;

use super::super::units::show_duration;
use super::super::{Group, Tier, Topology};
use super::burn;
use super::prometheus::{Rule, RuleGroup, RuleSettings};
use super::queries::{app_wide, growth, metric, of_tier, of_tiers, rate};

/// An alert before it has its labels.
pub(super) struct Alert {
    pub(super) name: &'static str,
    /// `page` or `ticket`.
    pub(super) severity: &'static str,
    pub(super) expr: String,
    pub(super) after: Option<Duration>,
    pub(super) summary: String,
    pub(super) description: String,
}

pub(super) const fn minutes(number: u64) -> Duration {
    Duration::from_secs(60 * number)
}

/// The groups of rules for a map.
pub(super) fn groups(topology: &Topology, settings: &RuleSettings) -> Vec<RuleGroup> {
    let app = topology.app();
    let group = |name: &str, rules| RuleGroup {
        name: format!("{app}: {name}"),
        rules,
    };
    let mut recordings = match topology.tiers().iter().any(|tier| tier.slo.is_some()) {
        true => burn::recordings(settings),
        false => Vec::new(),
    };
    recordings.push(run_times(settings));
    for rule in &mut recordings {
        if let Rule::Recording { labels, .. } = rule {
            labels.insert("app".to_owned(), app.to_owned());
        }
    }
    let mut groups = vec![group("recorded", recordings)];
    for served in topology.groups() {
        let tiers = served.tiers.iter().filter_map(|name| topology.tier(name));
        let tiers: Vec<&Tier> = tiers.collect();
        let mut rules = TierRules::new(app, settings, [("group", served.name.as_str())].into());
        of_group(&mut rules, served, &tiers);
        let mut all = rules.rules;
        for tier in tiers {
            let labels = [("group", served.name.as_str()), ("tier", &tier.name)];
            let mut rules = TierRules::new(app, settings, labels.into());
            of_tier_with_slo(&mut rules, tier);
            of_any_tier(&mut rules, tier);
            all.append(&mut rules.rules);
        }
        groups.push(group(&format!("group {}", served.name), all));
    }
    let mut rules = TierRules::new(app, settings, [].into());
    of_app(&mut rules, topology);
    groups.push(group("app", rules.rules));
    groups
}

/// Collects the rules of a tier, a group or the app, which share their labels.
pub(super) struct TierRules<'t> {
    app: &'t str,
    pub(super) settings: &'t RuleSettings,
    labels: BTreeMap<&'t str, &'t str>,
    rules: Vec<Rule>,
}

impl<'t> TierRules<'t> {
    fn new(app: &'t str, settings: &'t RuleSettings, labels: BTreeMap<&'t str, &'t str>) -> Self {
        Self {
            app,
            settings,
            labels,
            rules: Vec::new(),
        }
    }

    /// The matchers of the tier's recorded series.
    pub(super) fn recorded(&self) -> String {
        let tier = self.labels.get("tier").copied().unwrap_or_default();
        format!("app=\"{}\",{}", self.app, of_tier(tier))
    }

    pub(super) fn push(&mut self, alert: Alert) {
        let runbook = &self.settings.runbook;
        let link = format!("{runbook}#{}", alert.name.to_lowercase());
        let fixed = [("app", self.app), ("severity", alert.severity)];
        let labels = self.labels.iter().map(|(name, value)| (*name, *value));
        let owned = |(name, text): (&str, &str)| (name.to_owned(), text.to_owned());
        self.rules.push(Rule::Alert {
            alert: alert.name.to_owned(),
            expr: alert.expr,
            after: alert.after.map(|time| self.settings.time(time)),
            labels: labels.chain(fixed).map(owned).collect(),
            annotations: [
                (
                    "summary".to_owned(),
                    format!("{}: {}", self.app, alert.summary),
                ),
                ("description".to_owned(), alert.description),
                ("runbook_url".to_owned(), link),
            ]
            .into(),
        });
    }
}

/// Run times by tier, from which a rule can take the quantile of a whole day: over the counted series, that would read
/// each one of each task and process.
fn run_times(settings: &RuleSettings) -> Rule {
    let buckets = metric(settings, "tierline_run_seconds_bucket", "");
    let window = settings.time(minutes(5));
    Rule::Recording {
        record: run_time_record(settings),
        expr: format!("sum by (tier, le) (rate({buckets}[{window}]))"),
        labels: BTreeMap::new(),
    }
}

fn run_time_record(settings: &RuleSettings) -> String {
    let window = settings.time(minutes(5));
    format!("tier_le:tierline_run_seconds_bucket:rate{window}")
}

/// Pages for a tier with an SLO, and is a ticket for another: nobody gets up for work that may wait.
fn severity(tier: &Tier) -> &'static str {
    match tier.slo {
        Some(_) => "page",
        None => "ticket",
    }
}

fn of_tier_with_slo(rules: &mut TierRules<'_>, tier: &Tier) {
    let Some(slo) = tier.slo else {
        return;
    };
    let shown = show_duration(slo);
    burn::alerts(rules, tier, &shown);

    let settings = rules.settings;
    let (name, this) = (&tier.name, of_tier(&tier.name));
    let seconds = super::super::slo::decimal(slo.as_secs_f64());
    let waiting = app_wide(settings, "tierline_waiting", &this);
    let is_paused = format!("{} == 1", app_wide(settings, "tierline_paused", &this));
    let is_limited = format!(
        "{} == 1",
        app_wide(settings, "tierline_limit_saturated", &this)
    );
    let started = "tierline_wait_seconds_count";

    let oldest = app_wide(settings, "tierline_oldest_wait_seconds", &this);
    rules.push(Alert {
        name: "TierlineOldestWaitOverSlo",
        severity: "ticket",
        expr: format!("{oldest} > {seconds}\nunless {is_paused}"),
        after: Some(minutes(5)),
        summary: format!("tasks of {name} have waited for longer than {shown}"),
        description: format!(
            "The oldest task of {name} waits for {{{{ $value | humanizeDuration }}}}, and its tasks should start within {shown}."
        ),
    });

    let starts = rate(settings, started, &this, &settings.time(minutes(10)));
    rules.push(Alert {
        name: "TierlineBacklogOverSlo",
        severity: "ticket",
        expr: format!("{waiting}\n  / ({starts} > 0)\n  > {seconds}\nunless {is_paused}"),
        after: Some(minutes(10)),
        summary: format!("more waits in {name} than starts within {shown}"),
        description: format!(
            "At the present rate of starts, what waits in {name} takes {{{{ $value | humanizeDuration }}}}, and its tasks \
             should start within {shown}."
        ),
    });

    // That nobody is there has an alert of its own.
    let nobody = match tier.home.is_on_broker() {
        true => app_wide(settings, "tierline_consumers", &this),
        false => {
            let group = rules.labels.get("group").copied().unwrap_or_default();
            app_wide(
                settings,
                "tierline_processes",
                &format!("group=\"{group}\""),
            )
        }
    };
    // A tier whose tasks may wait for ten minutes need not start one in each of them.
    let rest = slo.clamp(minutes(1), minutes(60));
    let starts = growth(
        settings,
        started,
        &this,
        &settings.time(rest.max(minutes(2))),
    );
    rules.push(Alert {
        name: "TierlineNothingStarts",
        severity: "page",
        expr: format!(
            "{waiting} > 0\nunless {starts} > 0\nunless {is_paused}\nunless {is_limited}\nunless {nobody} == 0"
        ),
        after: Some(rest),
        summary: format!("no task of {name} starts although some wait"),
        description: format!(
            "{{{{ $value }}}} tasks wait in {name}, and none has started for {}.",
            settings.time(rest.max(minutes(2)))
        ),
    });

    let dead = growth(
        settings,
        "tierline_dead_total",
        &this,
        &settings.time(minutes(15)),
    );
    let settled = format!("{this},outcome=~\"done|discarded|dead\"");
    let settled = growth(
        settings,
        "tierline_tasks_total",
        &settled,
        &settings.time(minutes(15)),
    );
    rules.push(Alert {
        name: "TierlineDeadLettersSurge",
        severity: "page",
        expr: format!("{dead} >= 20\nand\n{dead}\n  / {settled} > 0.05"),
        after: None,
        summary: format!("many tasks of {name} become dead letters"),
        description: format!(
            "{{{{ $value | humanize }}}} tasks of {name} became dead letters within {}, more than one of twenty.",
            settings.time(minutes(15))
        ),
    });
}

fn of_any_tier(rules: &mut TierRules<'_>, tier: &Tier) {
    let settings = rules.settings;
    let (name, this) = (&tier.name, of_tier(&tier.name));
    let waiting = app_wide(settings, "tierline_waiting", &this);
    let is_paused = format!("{} == 1", app_wide(settings, "tierline_paused", &this));
    let half_an_hour = settings.time(minutes(30));

    if tier.home.is_on_broker() {
        let consumers = app_wide(settings, "tierline_consumers", &this);
        rules.push(Alert {
            name: "TierlineNoConsumers",
            severity: severity(tier),
            expr: format!("{waiting} > 0\nand {consumers} == 0\nunless {is_paused}"),
            after: Some(minutes(1)),
            summary: format!("nobody consumes from {name} although tasks wait"),
            description: format!(
                "{{{{ $value }}}} tasks wait in {name}, and its queue has no consumer."
            ),
        });
        let rows = app_wide(settings, "tierline_relay_waiting", &this);
        rules.push(Alert {
            name: "TierlineRowsNotTaken",
            severity: severity(tier),
            expr: format!("{rows} > 0"),
            after: Some(minutes(10)),
            summary: format!("nobody takes the rows of {name}"),
            description: format!(
                "{{{{ $value }}}} tasks of {name} are rows in Postgres, and neither a worker with the database nor a relay \
                 takes them."
            ),
        });
    }

    let recorded = format!("{}{{{}}}", run_time_record(settings), rules.recorded());
    let day = settings.time(minutes(24 * 60));
    let hour = settings.time(minutes(60));
    let now = format!("histogram_quantile(0.95, avg_over_time({recorded}[{half_an_hour}]))");
    let before =
        format!("histogram_quantile(0.95, avg_over_time({recorded}[{day}] offset {hour}))");
    let runs = growth(settings, "tierline_run_seconds_count", &this, &half_an_hour);
    rules.push(Alert {
        name: "TierlineRunTimeRising",
        severity: "ticket",
        expr: format!("{now}\n  > 3 * {before}\nand {now} > 1\nand on () {runs} >= 50"),
        after: Some(minutes(15)),
        summary: format!("tasks of {name} run for longer than before"),
        description: format!(
            "95 % of the runs in {name} end within {{{{ $value | humanizeDuration }}}}: three times what it was over the \
             last {day}."
        ),
    });

    let outcomes = |of: &str, window: &str| {
        let matchers = format!("{this},outcome=~\"{of}\"");
        growth(settings, "tierline_tasks_total", &matchers, window)
    };
    let failed = outcomes("retried|dead", &half_an_hour);
    let ran = outcomes("done|retried|discarded|dead", &half_an_hour);
    rules.push(Alert {
        name: "TierlineErrorRateHigh",
        severity: "ticket",
        expr: format!("{failed}\n  / {ran} > 0.2\nand {failed} >= 20"),
        after: Some(minutes(10)),
        summary: format!("many runs in {name} fail"),
        description: format!(
            "{{{{ $value | humanizePercentage }}}} of the runs in {name} within {half_an_hour} ended in a retry or a dead letter."
        ),
    });

    let dead = growth(settings, "tierline_dead_total", &this, &hour);
    // The counter is that of processes that may be gone, or new, by the next scrape. The log is not.
    let in_log = metric(
        settings,
        "tierline_dead_letters",
        &format!("{this},state=\"dead\""),
    );
    rules.push(Alert {
        name: "TierlineDeadLettersGrow",
        severity: "ticket",
        expr: format!("{dead} >= 5\nor\nmax({in_log})\n  - max({in_log} offset {hour}) >= 5"),
        after: None,
        summary: format!("dead letters of {name} grow"),
        description: format!(
            "{{{{ $value | humanize }}}} tasks of {name} became dead letters within {hour}."
        ),
    });

    rules.push(Alert {
        name: "TierlinePausedForLong",
        severity: "ticket",
        expr: format!("{waiting} > 0\nand {is_paused}"),
        after: Some(minutes(60)),
        summary: format!("{name} has been paused for long"),
        description: format!(
            "{{{{ $value }}}} tasks wait in {name}, which an operator has paused; other alerts of it are silent."
        ),
    });

    let limited = app_wide(settings, "tierline_limit_saturated", &this);
    rules.push(Alert {
        name: "TierlineLimitSaturated",
        severity: "ticket",
        expr: format!("{waiting} > 0\nand {limited} == 1\nunless {is_paused}"),
        after: Some(minutes(30)),
        summary: format!("{name} has been at its limit for long"),
        description: format!(
            "{{{{ $value }}}} tasks wait in {name} for its limit, or that of a task."
        ),
    });
}

fn of_group(rules: &mut TierRules<'_>, group: &Group, tiers: &[&Tier]) {
    let settings = rules.settings;
    let name = &group.name;
    let this = format!("group=\"{name}\"");
    let waiting = |tiers: &[&str]| {
        let waiting = metric(settings, "tierline_waiting", &of_tiers(tiers));
        format!("sum(max by (tier) ({waiting})) > 0")
    };
    let names = |is_meant: fn(&Tier) -> bool| {
        let tiers = tiers.iter().filter(|tier| is_meant(tier));
        tiers.map(|tier| tier.name.as_str()).collect::<Vec<_>>()
    };

    // Rows have no consumers that a broker could count.
    let rows = names(|tier| !tier.home.is_on_broker());
    if !rows.is_empty() {
        let processes = app_wide(settings, "tierline_processes", &this);
        let is_urgent = tiers.iter().any(|tier| tier.slo.is_some());
        rules.push(Alert {
            name: "TierlineNoProcesses",
            severity: if is_urgent { "page" } else { "ticket" },
            expr: format!("{}\nand {processes} == 0", waiting(&rows)),
            after: Some(minutes(1)),
            summary: format!("no process works for {name} although tasks wait"),
            description: format!(
                "{{{{ $value }}}} tasks wait in tiers of the group {name} in Postgres, and no live process serves it."
            ),
        });
    }

    // Tiers without an SLO may use all slots for as long as they like.
    let urgent = names(|tier| tier.slo.is_some());
    if !urgent.is_empty() {
        let running = format!("sum({})", metric(settings, "tierline_in_progress", &this));
        let slots = format!("sum({})", metric(settings, "tierline_slots", &this));
        rules.push(Alert {
            name: "TierlineSlotsSaturated",
            severity: "ticket",
            expr: format!("{running}\n  / {slots} > 0.95\nand {}", waiting(&urgent)),
            after: Some(minutes(30)),
            summary: format!("all slots of {name} have been taken for long"),
            description: format!(
                "{{{{ $value | humanizePercentage }}}} of the slots of the group {name} are taken, and tasks wait."
            ),
        });
    }
}

fn of_app(rules: &mut TierRules<'_>, topology: &Topology) {
    let settings = rules.settings;
    if !topology.schedules().is_empty() {
        let leader = app_wide(settings, "tierline_schedule_leader", "");
        rules.push(Alert {
            name: "TierlineNoScheduleLeader",
            severity: "page",
            expr: format!("{leader} == 0"),
            after: Some(minutes(2)),
            summary: "no process leads the schedules".to_owned(),
            description: "Nothing that is scheduled gets published.".to_owned(),
        });
        let hour = settings.time(minutes(60));
        let missed = metric(settings, "tierline_schedule_missed_total", "");
        rules.push(Alert {
            name: "TierlineScheduleMissed",
            severity: "ticket",
            expr: format!("sum by (schedule) (increase({missed}[{hour}])) > 0"),
            after: None,
            summary: "runs of the schedule {{ $labels.schedule }} were missed".to_owned(),
            description: format!(
                "{{{{ $value | humanize }}}} runs of {{{{ $labels.schedule }}}} within {hour} were not published, because they were \
                 too late to be worth it."
            ),
        });
    }
    let build = format!("absent({})", metric(settings, "tierline_build_info", ""));
    rules.push(Alert {
        name: "TierlineMetricsMissing",
        severity: "page",
        expr: build.clone(),
        after: Some(minutes(1)),
        summary: "no process of the app exports metrics".to_owned(),
        description: "Prometheus has no series of the app: nothing runs, or nothing is scraped. All other alerts are silent."
            .to_owned(),
    });
    let waiting = format!("absent({})", metric(settings, "tierline_waiting", ""));
    rules.push(Alert {
        name: "TierlineStatsMissing",
        severity: "page",
        expr: format!("{waiting}\nunless on () {build}"),
        after: Some(minutes(2)),
        summary: "nobody exports how much waits".to_owned(),
        description: "No `tierline serve` is scraped, and no app with stats: nobody would see that work waits and nothing starts."
            .to_owned(),
    });
    let down = metric(settings, "up", "");
    rules.push(Alert {
        name: "TierlineTargetsDown",
        severity: "ticket",
        expr: format!("count({down} == 0) > 0"),
        after: Some(minutes(10)),
        summary: "some processes cannot be scraped".to_owned(),
        description: "{{ $value }} targets of the app do not answer Prometheus, so what they do is not counted.".to_owned(),
    });
    rules.push(Alert {
        name: "TierlineStatsIncomplete",
        severity: "ticket",
        expr: format!("{} > 0", app_wide(settings, "tierline_stats_problems", "")),
        after: Some(minutes(10)),
        summary: "some figures of the app are missing".to_owned(),
        description: "The broker or the database has not answered {{ $value }} questions, so alerts that need the answers are silent."
            .to_owned(),
    });
}
