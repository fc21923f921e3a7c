//! Error budgets: how fast a tier uses up the late starts that its objective allows.
//!
//! A burn rate of 1 uses the budget up in exactly the time that the objective is for. The windows and rates are those of
//! the SRE workbook: a long window says that it matters, and a short one that it still goes on.

use std::time::Duration;

use super::super::Tier;
use super::super::slo::decimal;
use super::alerts::{Alert, TierRules, minutes};
use super::prometheus::{Rule, RuleSettings};
use super::queries::metric;

/// A burn rate that lasts for a window.
struct Burn {
    rate: f64,
    long: Duration,
    short: Duration,
}

const FAST: [Burn; 2] = [
    Burn {
        rate: 14.4,
        long: minutes(60),
        short: minutes(5),
    },
    Burn {
        rate: 6.0,
        long: minutes(6 * 60),
        short: minutes(30),
    },
];

const SLOW: [Burn; 2] = [
    Burn {
        rate: 3.0,
        long: minutes(24 * 60),
        short: minutes(2 * 60),
    },
    Burn {
        rate: 1.0,
        long: minutes(3 * 24 * 60),
        short: minutes(6 * 60),
    },
];

/// So many tasks are late in the long window at least: one late task of three says little about a tier.
const FEWEST_LATE: u32 = 10;

/// With an objective of 0.9, the highest burn rate is 10. An alert that could never fire would look like one that is
/// silent because all is well.
const MOST_LATE: f64 = 0.95;

/// The rules that record the shares of late starts, of all tiers at once.
pub(super) fn recordings(settings: &RuleSettings) -> Vec<Rule> {
    let mut rules = Vec::new();
    let burns = || FAST.iter().chain(&SLOW);
    let mut windows: Vec<Duration> = burns().flat_map(|it| [it.long, it.short]).collect();
    windows.sort();
    windows.dedup();
    for window in windows {
        let time = settings.time(window);
        let late = metric(settings, "tierline_slo_tasks_total", "met=\"false\"");
        let all = metric(settings, "tierline_slo_tasks_total", "");
        rules.push((
            late_share(settings, window),
            format!(
                "sum by (tier) (rate({late}[{time}]))\n  / (sum by (tier) (rate({all}[{time}])) > 0)"
            ),
        ));
    }
    for burn in burns() {
        let time = settings.time(burn.long);
        let late = metric(settings, "tierline_slo_tasks_total", "met=\"false\"");
        rules.push((
            late_count(settings, burn.long),
            format!("sum by (tier) (increase({late}[{time}]))"),
        ));
    }
    let recording = |(record, expr)| Rule::Recording {
        record,
        expr,
        labels: [].into(),
    };
    rules.into_iter().map(recording).collect()
}

/// The alerts of a tier with an objective.
pub(super) fn alerts(rules: &mut TierRules<'_>, tier: &Tier, slo: &str) {
    let Some(objective) = tier.objective() else {
        return;
    };
    let name = &tier.name;
    let share = decimal(objective * 100.0);
    let description = |rest: &str| {
        format!(
            "{{{{ $value | humanizePercentage }}}} of the starts in {name} were later than {slo}, and the objective is \
             {share} % on time. {rest}"
        )
    };
    rules.push(Alert {
        name: "TierlineSloBurnFast",
        severity: "page",
        expr: any(rules, objective, &FAST),
        after: None,
        summary: format!("{name} uses up its error budget fast"),
        description: description("At this rate the budget of a month is gone within days."),
    });
    rules.push(Alert {
        name: "TierlineSloBurnSlow",
        severity: "ticket",
        expr: any(rules, objective, &SLOW),
        after: None,
        summary: format!("{name} uses up more of its error budget than there is"),
        description: description(
            "If it goes on like this, the tier misses its objective this month.",
        ),
    });
}

fn any(rules: &TierRules<'_>, objective: f64, burns: &[Burn]) -> String {
    let one = |burn: &Burn| {
        let most = decimal((burn.rate * (1.0 - objective)).min(MOST_LATE));
        let of = |record: String| format!("{record}{{{}}}", rules.recorded());
        let long = of(late_share(rules.settings, burn.long));
        let short = of(late_share(rules.settings, burn.short));
        let count = of(late_count(rules.settings, burn.long));
        format!(
            "(\n    {long} > {most}\n  and\n    {short} > {most}\n  and\n    {count} >= {FEWEST_LATE}\n)"
        )
    };
    let all: Vec<String> = burns.iter().map(one).collect();
    all.join("\nor\n")
}

fn late_share(settings: &RuleSettings, window: Duration) -> String {
    format!("tier:tierline_slo_late:ratio_rate{}", settings.time(window))
}

fn late_count(settings: &RuleSettings, window: Duration) -> String {
    format!("tier:tierline_slo_late:increase{}", settings.time(window))
}
