//! The text output of `tierline control`.

use serde_json::json;
use tierline::control::{Changed, ControlEntry, Overridden, Process, ProcessGroup, Setting};
use tierline::scaling::{GroupScaling, TierScaling};

use crate::table::{plain, table};

pub(super) fn changed(changed: &Changed) -> String {
    let mut lines = Vec::new();
    match (&changed.before, &changed.after) {
        (before, Some(after)) => {
            lines.push(in_force(after));
            lines.extend(before.as_ref().map(before_line));
        }
        (Some(before), None) => {
            lines.push(ended(before));
            lines.push(before_line(before));
        }
        // The notes say that there was nothing to end.
        (None, None) => {}
    }
    lines.extend(notes(&changed.notes));
    lines.join("\n")
}

pub(super) fn overridden(overridden: &Overridden) -> String {
    let mut lines: Vec<String> = overridden.after.iter().map(in_force).collect();
    lines.extend(overridden.before.iter().map(|entry| {
        let target = &entry.target;
        format!("{target}, {}", before_line(entry))
    }));
    lines.push(format!("rows moved: {}", overridden.moved));
    lines.extend(notes(&overridden.notes));
    lines.join("\n")
}

pub(super) fn list(entries: &[ControlEntry]) -> String {
    if entries.is_empty() {
        return "nothing is paused, limited or overridden by an operator".to_owned();
    }
    let rows: Vec<Vec<String>> = entries
        .iter()
        .map(|entry| {
            let (since, until) = times(entry);
            vec![
                entry.target.to_string(),
                words(&entry.setting),
                since,
                until.unwrap_or_else(|| "-".to_owned()),
                entry.who.clone(),
                entry.why.clone(),
            ]
        })
        .collect();
    table(&["OF", "WHAT", "SINCE", "UNTIL", "WHO", "WHY"], &rows)
}

pub(super) fn processes(processes: &[Process]) -> String {
    if processes.is_empty() {
        return "no live process has this database".to_owned();
    }
    let rows: Vec<Vec<String>> = processes
        .iter()
        .map(|process| {
            let json = json!(process);
            let time = |field: &str| json[field].as_str().unwrap_or("-").to_owned();
            let groups = process.groups.iter().map(group).collect::<Vec<_>>();
            let groups = match process.is_relay {
                true => "relay".to_owned(),
                false => groups.join("; "),
            };
            let state = if process.is_alive { "alive" } else { "silent" };
            vec![
                process.name.clone(),
                process.version.clone(),
                state.to_owned(),
                time("started_at"),
                time("last_heartbeat"),
                groups,
            ]
        })
        .collect();
    let head = [
        "NAME",
        "VERSION",
        "STATE",
        "STARTED",
        "LAST HEARTBEAT",
        "GROUPS, SLOTS, TIERS",
    ];
    table(&head, &rows)
}

pub(super) fn scaling(groups: &[GroupScaling]) -> String {
    let rows: Vec<Vec<String>> = groups
        .iter()
        .map(|group| {
            vec![
                group.group.clone(),
                group.slots.to_string(),
                group.slots_wanted.to_string(),
                group.processes.to_string(),
                group.processes_wanted.to_string(),
                if group.is_estimate { "estimate" } else { "" }.to_owned(),
            ]
        })
        .collect();
    let head = ["GROUP", "SLOTS", "WANTED", "PROCESSES", "WANTED", ""];
    let groups_table = table(&head, &rows);
    let tiers = groups
        .iter()
        .flat_map(|group| group.tiers.iter().map(|tier| tier_row(group, tier)));
    let head = [
        "TIER",
        "GROUP",
        "SLOTS WANTED",
        "BACKLOG",
        "ARRIVALS",
        "MEAN RUN",
        "SLO",
        "",
    ];
    format!(
        "{groups_table}\n{}",
        table(&head, &tiers.collect::<Vec<_>>())
    )
}

fn tier_row(group: &GroupScaling, tier: &TierScaling) -> Vec<String> {
    let or_more = if tier.is_backlog_partial { "+" } else { "" };
    let mean_run = tier
        .mean_run
        .map(|run| format!("{:.3} s", run.as_secs_f64()));
    let state = match (tier.is_paused, tier.is_limited) {
        (true, _) => "paused",
        (false, true) => "at its limit",
        (false, false) => "",
    };
    vec![
        tier.tier.clone(),
        group.group.clone(),
        format!("{:.1}", tier.slots_wanted),
        format!("{}{or_more}", tier.backlog),
        format!("{:.1}/s", tier.arrivals_per_second),
        mean_run.unwrap_or_else(|| "-".to_owned()),
        format!("{} s", tier.slo.as_secs_f64()),
        state.to_owned(),
    ]
}

/// `urgent 8 (critical, high)`.
fn group(group: &ProcessGroup) -> String {
    format!(
        "{} {} ({})",
        group.name,
        group.slots,
        group.tiers.join(", ")
    )
}

/// `tier bulk: paused until 2026-01-31T10:00:00Z`.
fn in_force(entry: &ControlEntry) -> String {
    let until = times(entry).1;
    let until = until.unwrap_or_else(|| "somebody ends it".to_owned());
    plain(&format!(
        "{}: {} until {until}",
        entry.target,
        words(&entry.setting)
    ))
}

fn ended(entry: &ControlEntry) -> String {
    plain(&match entry.setting {
        Setting::Pause => format!("{} is resumed", entry.target),
        _ => format!("{}: the {} has ended", entry.target, entry.setting.kind()),
    })
}

/// What was in force before.
fn before_line(entry: &ControlEntry) -> String {
    let (since, until) = times(entry);
    let until = until.map_or(String::new(), |until| format!(" until {until}"));
    let why = match entry.why.as_str() {
        "" => String::new(),
        why => format!(": {why}"),
    };
    let (what, who) = (words(&entry.setting), &entry.who);
    plain(&format!(
        "before: {what}{until}, by {who} since {since}{why}"
    ))
}

fn words(setting: &Setting) -> String {
    match setting {
        Setting::Pause => "paused".to_owned(),
        Setting::Limit(limit) if limit.rate.is_none() && limit.running.is_none() => {
            "without a limit".to_owned()
        }
        Setting::Limit(limit) => format!("limited to {limit}"),
        Setting::Override { tier, priority } => {
            let tier = tier.as_ref().map(|tier| format!("in tier {tier}"));
            let priority = priority.map(|priority| format!("with priority {priority}"));
            let words: Vec<String> = [tier, priority].into_iter().flatten().collect();
            words.join(" ")
        }
        other => other.kind().to_owned(),
    }
}

fn notes(notes: &[String]) -> impl Iterator<Item = String> {
    notes.iter().map(|note| plain(&format!("note: {note}")))
}

/// Since when and until when, as JSON has them.
fn times(entry: &ControlEntry) -> (String, Option<String>) {
    let json = json!(entry);
    let time = |field: &str| json[field].as_str().map(str::to_owned);
    (time("since").unwrap_or_default(), time("until"))
}
