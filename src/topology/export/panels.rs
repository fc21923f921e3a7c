//! The panels of the dashboard: what each shows, and by which queries.

use std::time::Duration;

use super::super::slo::decimal;
use super::super::{Tier, Topology};
use super::alerts::minutes;
use super::prometheus::RuleSettings;
use super::queries::{app_wide, metric, of_tier, rate};

/// A row of panels.
pub(super) struct Row {
    pub(super) title: String,
    pub(super) panels: Vec<Panel>,
}

/// One panel.
pub(super) struct Panel {
    pub(super) title: &'static str,
    pub(super) description: String,
    pub(super) unit: &'static str,
    /// Whether it shows the newest values alone, and not their course.
    pub(super) is_stat: bool,
    /// Values at which the graph has a line.
    pub(super) lines: Vec<f64>,
    /// What each series is called, and its expression.
    pub(super) queries: Vec<(String, String)>,
}

impl Panel {
    fn new(title: &'static str, unit: &'static str, description: impl Into<String>) -> Self {
        Self {
            title,
            description: description.into(),
            unit,
            is_stat: false,
            lines: Vec::new(),
            queries: Vec::new(),
        }
    }

    fn query(mut self, legend: &str, expression: String) -> Self {
        self.queries.push((legend.to_owned(), expression));
        self
    }

    fn stat(mut self) -> Self {
        self.is_stat = true;
        self
    }
}

/// Grafana's own: four scrapes at least.
const RATE: &str = "$__rate_interval";
/// The time that the dashboard shows.
const RANGE: &str = "$__range";

/// The rows for a map: all tiers together, each tier, and the app.
pub(super) fn rows(topology: &Topology, settings: &RuleSettings) -> Vec<Row> {
    let mut rows = vec![overview(settings)];
    let mut tiers: Vec<&Tier> = topology.tiers().iter().collect();
    // As urgent as the map says: those that are to start soonest come first.
    tiers.sort_by_key(|tier| tier.slo.unwrap_or(Duration::MAX));
    rows.extend(
        tiers
            .into_iter()
            .map(|tier| of_tier_row(topology, tier, settings)),
    );
    rows.push(of_app(topology, settings));
    rows
}

fn overview(settings: &RuleSettings) -> Row {
    let by_tier = |name: &str| format!("max by (tier) ({})", metric(settings, name, ""));
    let waits = metric(settings, "tierline_wait_seconds_bucket", "");
    let judged = |matchers: &str| {
        let tasks = metric(settings, "tierline_slo_tasks_total", matchers);
        format!("sum by (tier) (increase({tasks}[{RANGE}]))")
    };
    let dead = metric(settings, "tierline_dead_letters", "state=\"dead\"");
    let panels = vec![
        Panel::new(
            "Waiting by tier",
            "short",
            "Tasks that could start now, as messages and rows.",
        )
        .query("{{tier}}", by_tier("tierline_waiting")),
        Panel::new(
            "Wait p99 by tier",
            "s",
            "How long 99 of 100 tasks waited at most until they started.",
        )
        .query(
            "{{tier}}",
            format!("histogram_quantile(0.99, sum by (tier, le) (rate({waits}[{RATE}])))"),
        ),
        Panel::new("SLO met by tier", "percentunit", "Over the time shown.")
            .query(
                "{{tier}}",
                format!("{}\n  / {}", judged("met=\"true\""), judged("")),
            )
            .stat(),
        Panel::new(
            "Dead letters by tier",
            "short",
            "Tasks in the log that nobody has redriven or discarded.",
        )
        .query("{{tier}}", format!("max by (tier) ({dead})")),
    ];
    Row {
        title: "All tiers".to_owned(),
        panels,
    }
}

fn of_tier_row(topology: &Topology, tier: &Tier, settings: &RuleSettings) -> Row {
    let name = tier.name.as_str();
    let this = of_tier(name);
    let group = topology
        .groups()
        .iter()
        .find(|group| group.tiers.iter().any(|tier| tier == name));
    let quantile = |share: &str, buckets: &str| {
        let buckets = metric(settings, buckets, &this);
        format!("histogram_quantile({share}, sum by (le) (rate({buckets}[{RATE}])))")
    };
    let tasks = |of: &str| {
        let matchers = format!("{this}{of}");
        rate(settings, "tierline_tasks_total", &matchers, RATE)
    };

    let mut oldest = Panel::new(
        "Oldest wait",
        "s",
        "How long the oldest task has waited. It is not known for all queues.",
    )
    .query(
        "oldest",
        app_wide(settings, "tierline_oldest_wait_seconds", &this),
    );
    if tier.slo.is_some() {
        oldest = oldest.query("SLO", app_wide(settings, "tierline_slo_seconds", &this));
    }
    let mut panels = vec![
        Panel::new(
            "Waiting",
            "short",
            "Tasks that could start now, and those that are due later.",
        )
        .query("waiting", app_wide(settings, "tierline_waiting", &this))
        .query("scheduled", app_wide(settings, "tierline_scheduled", &this)),
        oldest,
        Panel::new(
            "Wait",
            "s",
            "From the time at which a task could start to its start.",
        )
        .query("p50", quantile("0.5", "tierline_wait_seconds_bucket"))
        .query("p99", quantile("0.99", "tierline_wait_seconds_bucket")),
    ];
    if let Some(objective) = tier.objective() {
        panels.extend(of_slo(settings, &this, objective));
    }
    let outcomes = metric(settings, "tierline_tasks_total", &this);
    let published = format!("{this},result=~\"stored|replaced\"");
    let mut slots = Panel::new(
        "In progress",
        "short",
        "Tasks that run, of this tier, and the slots of its group.",
    )
    .query(
        "running",
        format!("sum({})", metric(settings, "tierline_in_progress", &this)),
    );
    if let Some(group) = group {
        let of_group = format!("group=\"{}\"", group.name);
        let all = format!("sum({})", metric(settings, "tierline_slots", &of_group));
        slots = slots.query("slots", all);
    }
    let dead = metric(settings, "tierline_dead_letters", &this);
    let reasons = metric(settings, "tierline_dead_total", &this);
    panels.extend([
        Panel::new(
            "In and out",
            "ops",
            "Tasks that were published, and that ended for good.",
        )
        .query(
            "in",
            rate(settings, "tierline_published_total", &published, RATE),
        )
        .query("out", tasks(",outcome=~\"done|discarded|expired|dead\"")),
        Panel::new("Outcomes", "ops", "How runs end.").query(
            "{{outcome}}",
            format!("sum by (outcome) (rate({outcomes}[{RATE}]))"),
        ),
        Panel::new("Run time", "s", "How long handlers run.")
            .query("p50", quantile("0.5", "tierline_run_seconds_bucket"))
            .query("p95", quantile("0.95", "tierline_run_seconds_bucket")),
        slots,
        Panel::new("Dead letters", "short", "In the log, by state.")
            .query("{{state}}", format!("max by (state) ({dead})")),
        Panel::new("New dead letters", "ops", "By reason.").query(
            "{{reason}}",
            format!("sum by (reason) (rate({reasons}[{RATE}]))"),
        ),
    ]);
    let title = match tier.slo {
        Some(slo) => {
            let objective = decimal(tier.objective().unwrap_or_default() * 100.0);
            let slo = super::super::units::show_duration(slo);
            format!("{name}: {objective} % start within {slo}")
        }
        None => format!("{name}: no SLO"),
    };
    Row { title, panels }
}

fn of_slo(settings: &RuleSettings, this: &str, objective: f64) -> [Panel; 2] {
    let share = |met: &str, function: &str, window: &str| {
        let of = |matchers: &str| {
            let tasks = metric(settings, "tierline_slo_tasks_total", matchers);
            format!("sum({function}({tasks}[{window}]))")
        };
        format!("{}\n  / {}", of(&format!("{this},met=\"{met}\"")), of(this))
    };
    let budget = decimal(1.0 - objective);
    let late = share("false", "increase", RANGE);
    let met = Panel::new(
        "SLO met, and budget left",
        "percentunit",
        "Over the time shown. A budget below zero is overdrawn.",
    )
    .query("met", share("true", "increase", RANGE))
    .query("budget left", format!("1 - {late}\n  / {budget}"));
    let mut burn = Panel::new(
        "Burn rate",
        "none",
        "How many times as fast as the objective allows the budget is used up. Somebody is paged at 14.4 over an hour, and \
         at 6 over six.",
    );
    for hours in [1, 6, 24] {
        let window = settings.time(minutes(60 * hours));
        let burned = format!("{}\n  / {budget}", share("false", "rate", &window));
        burn = burn.query(&window, burned);
    }
    burn.lines = vec![1.0, 6.0, 14.4];
    [met.stat(), burn]
}

fn of_app(topology: &Topology, settings: &RuleSettings) -> Row {
    let by = |aggregate: &str, label: &str, name: &str| {
        format!("{aggregate} by ({label}) ({})", metric(settings, name, ""))
    };
    let rates = |label: &str, name: &str| {
        format!(
            "sum by ({label}) (rate({}[{RATE}]))",
            metric(settings, name, "")
        )
    };
    let mut panels = Vec::new();
    if !topology.schedules().is_empty() {
        let late = metric(settings, "tierline_schedule_late_seconds_bucket", "");
        let quantile = |share: &str| {
            format!("histogram_quantile({share}, sum by (le) (rate({late}[{RANGE}])))")
        };
        let missed = metric(settings, "tierline_schedule_missed_total", "");
        panels.extend([
            Panel::new(
                "Schedule lateness",
                "s",
                "From the due time of a run to its publish, over the time shown.",
            )
            .query("p50", quantile("0.5"))
            .query("p99", quantile("0.99")),
            Panel::new("Missed runs", "short", "Over the time shown.")
                .query(
                    "{{schedule}}",
                    format!("sum by (schedule) (increase({missed}[{RANGE}]))"),
                )
                .stat(),
            Panel::new(
                "Schedules are led",
                "short",
                "1: a process publishes what comes due.",
            )
            .query("led", app_wide(settings, "tierline_schedule_leader", "")),
        ]);
    }
    panels.extend([
        Panel::new(
            "Limits and pauses",
            "short",
            "1: an operator has paused the tier, or it is at a limit.",
        )
        .query("{{tier}} paused", by("max", "tier", "tierline_paused"))
        .query(
            "{{tier}} limited",
            by("max", "tier", "tierline_limit_saturated"),
        ),
        Panel::new(
            "Held back by a pause or limit of a task",
            "short",
            "Tasks that wait as rows for it.",
        )
        .query("{{tier}}", by("max", "tier", "tierline_parked")),
        Panel::new("Connections", "short", "Of all processes, by purpose.")
            .query("{{purpose}}", by("sum", "purpose", "tierline_connected")),
        Panel::new(
            "Live processes",
            "short",
            "By group, as the database knows them, and the consumers of queues.",
        )
        .query("{{group}}", by("max", "group", "tierline_processes"))
        .query(
            "{{tier}} consumers",
            by("max", "tier", "tierline_consumers"),
        ),
        Panel::new(
            "Crashes",
            "ops",
            "Tasks whose process died, and leases that were lost.",
        )
        .query(
            "{{tier}} suspected",
            rates("tier", "tierline_suspected_total"),
        )
        .query(
            "{{tier}} leases lost",
            rates("tier", "tierline_leases_lost_total"),
        ),
        Panel::new(
            "Rows that nobody takes",
            "short",
            "Of tiers on the broker: they need a relay.",
        )
        .query("{{tier}}", by("max", "tier", "tierline_relay_waiting")),
        Panel::new(
            "Versions",
            "short",
            "Processes by their version of tierline.",
        )
        .query("{{version}}", by("count", "version", "tierline_build_info")),
    ]);
    Row {
        title: "The app".to_owned(),
        panels,
    }
}
