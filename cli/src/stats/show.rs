//! The text output of `tierline stats`.

use serde_json::json;
use tierline::stats::{Stats, TierStats};

use crate::figures::{count, notes, number, oldest, rate, share, some_duration};
use crate::output;
use crate::table::{plain, table};

const HEAD: [&str; 12] = [
    "TIER", "WAITING", "OLDEST", "RUN", "CONS", "IN/s", "OUT/s", "P50", "P99", "SLO", "BUDGET",
    "DEAD",
];

pub(super) fn stats(stats: &Stats) -> String {
    let rows: Vec<Vec<String>> = stats.tiers.iter().map(row).collect();
    let mut lines = vec![table(&HEAD, &rows).trim_end().to_owned()];
    let noted = stats.tiers.iter().map(|tier| (tier, notes(tier)));
    for (tier, notes) in noted.filter(|(_, notes)| !notes.is_empty()) {
        lines.push(plain(&format!("{}: {}", tier.tier, notes.join("; "))));
    }
    lines.push(summary(stats));
    if let Some(tasks) = stats
        .paused_tasks
        .as_ref()
        .filter(|tasks| !tasks.is_empty())
    {
        lines.push(plain(&format!("paused tasks: {}", tasks.join(", "))));
    }
    let problems = stats.problems.iter();
    lines.extend(problems.map(|it| plain(&format!("not known: {}", it.problem))));
    lines.join("\n")
}

fn row(tier: &TierStats) -> Vec<String> {
    let dead = tier.dead.as_ref();
    let growth = dead
        .and_then(|dead| dead.last_hour)
        .filter(|dead| *dead > 0);
    let dead = number(dead.map(|dead| dead.dead));
    vec![
        tier.tier.clone(),
        count(tier.waiting),
        oldest(tier.oldest),
        number(tier.running),
        number(tier.consumers.map(Into::into)),
        rate(tier.rate_in),
        rate(tier.rate_out),
        some_duration(tier.wait_p50),
        some_duration(tier.wait_p99),
        some_duration(tier.slo.map(|slo| slo.start)),
        share(tier.slo.and_then(|slo| slo.budget_left)),
        match growth {
            Some(growth) => format!("{dead} +{growth}/h"),
            None => dead,
        },
    ]
}

/// The groups and the schedules, on a line.
fn summary(stats: &Stats) -> String {
    let groups = stats
        .groups
        .iter()
        .map(|group| match (group.processes, group.slots) {
            (Some(processes), Some(slots)) => format!(
                "{}: {}, {} of {} slots",
                group.group,
                processes_of(processes),
                number(group.running),
                slots,
            ),
            _ => format!("{}: not known", group.group),
        });
    let mut parts: Vec<String> = groups.collect();
    if let Some(relays) = stats.relays.filter(|relays| *relays > 0) {
        parts.push(output::count(relays, "relay"));
    }
    if let Some(schedules) = &stats.schedules {
        let next = json!(schedules)["next_due"].as_str().map(str::to_owned);
        let leader = if schedules.has_leader {
            "led"
        } else {
            "no leader"
        };
        let next = next.map_or(String::new(), |next| format!(", next due {next}"));
        parts.push(format!(
            "{}, {leader}{next}",
            output::count(schedules.count, "schedule")
        ));
    }
    plain(&parts.join("; "))
}

fn processes_of(number: u32) -> String {
    match number {
        1 => "1 live process".to_owned(),
        number => format!("{number} live processes"),
    }
}
