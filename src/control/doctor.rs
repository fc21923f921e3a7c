//! What is in force, and what of it cannot work, as findings of the doctor.

use std::time::{Duration, SystemTime};

use super::Control;
use super::entry::{ControlEntry, Setting};
use super::overriding::handlers::{Unhandled, listed, older, partly_handled, too_long, unhandled};
use super::process::{Process, processes};
use super::table::{in_force, is_migrated};
use crate::Error;
use crate::amqp::{Finding, Report, Severity};
use crate::topology::Topology;

/// How long the database may take.
const LIMIT: Duration = Duration::from_secs(20);

impl Control {
    /// Names the overrides in force, with who made them, why, and until when, and those that cannot work: their tier or
    /// their tasks are not in the map, a live process of the tier's group has no handler or may not run it for so long, or a process
    /// is of a release that follows no override.
    ///
    /// ```no_run
    /// # async fn example(control: tierline::control::Control) -> Result<(), tierline::Error> {
    /// println!("{}", control.doctor().await?);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As every use of the database.
    pub async fn doctor(&self) -> Result<Report, Error> {
        let topology = &self.topology;
        let reading = async {
            let mut connection = self.database.pool().acquire().await?;
            if !is_migrated(&mut connection).await? {
                return Ok((Vec::new(), Vec::new()));
            }
            let entries = in_force(&mut connection, topology.app()).await?;
            Ok((entries, processes(&mut connection, topology).await?))
        };
        let tried = "look for overrides";
        let (entries, processes) = self.database.within(LIMIT, tried, reading).await?;
        let mut report = Report::default();
        for entry in &entries {
            report
                .findings
                .extend(findings(topology, &processes, entry));
        }
        let is_override = |it: &ControlEntry| matches!(it.setting, Setting::Override { .. });
        if entries.iter().any(is_override) {
            report
                .findings
                .extend(older(&processes).map(|what| Finding {
                    severity: Severity::Warning,
                    object: "overrides".to_owned(),
                    what,
                    help: "deploy this release to them, or end them".to_owned(),
                }));
        }
        Ok(report.sorted())
    }
}

/// That an override is in force, and what is wrong with it.
fn findings(topology: &Topology, processes: &[Process], entry: &ControlEntry) -> Vec<Finding> {
    let Setting::Override { tier, priority } = &entry.setting else {
        return Vec::new();
    };
    let target = &entry.target;
    let finding = |severity, what: String, help: &str| Finding {
        severity,
        object: format!("override of {target}"),
        what,
        help: help.to_owned(),
    };
    let mut findings = vec![finding(
        Severity::Note,
        in_words(entry, tier.as_deref(), *priority),
        "when it is not needed any more, end it: `tierline control end-override`",
    )];
    let tasks = topology.tasks().iter().map(|task| task.name.as_str());
    let tasks: Vec<&str> = tasks.filter(|task| target.has(task)).collect();
    if tasks.is_empty() {
        findings.push(finding(
            Severity::Warning,
            "the map has no such task any more".to_owned(),
            "end it, or put the task back into [tasks]",
        ));
    }
    let Some(tier) = tier else {
        return findings;
    };
    if topology.tier(tier).is_none() {
        findings.push(finding(
            Severity::Warning,
            format!("the map has no tier {tier}, so its tasks go by the map"),
            "end it, or override the tasks to another tier",
        ));
        return findings;
    }
    let help = "start workers of the tier's group that have the handlers, or end it";
    let unhandled = unhandled(processes, tier, &tasks);
    let is_handled = unhandled.is_none();
    match unhandled {
        None => {}
        Some(Unhandled::NoProcess) => findings.push(finding(
            Severity::Warning,
            format!("no live process serves tier {tier}: nobody will run its tasks"),
            help,
        )),
        Some(Unhandled::Tasks(tasks)) => findings.push(finding(
            Severity::Warning,
            format!(
                "no live process that serves tier {tier} has a handler for {}",
                listed(&tasks)
            ),
            help,
        )),
    }
    let problems = [
        (
            partly_handled(processes, tier, &tasks).filter(|_| is_handled),
            "deploy the handlers to all workers of the tier's group, or end it",
        ),
        (
            too_long(topology, processes, tier, &tasks),
            "end it, or give the tasks shorter timeouts",
        ),
    ];
    let problems = problems.into_iter();
    findings
        .extend(problems.filter_map(|(what, help)| Some(finding(Severity::Warning, what?, help))));
    findings
}

/// `goes to tier low with priority 3 until 2026-01-31T10:00:00Z; ada made it at …: the quarter's reports`.
fn in_words(entry: &ControlEntry, tier: Option<&str>, priority: Option<u8>) -> String {
    let time = |at: SystemTime| humantime::format_rfc3339_seconds(at).to_string();
    let mut words = match (tier, priority) {
        (Some(tier), Some(priority)) => format!("goes to tier {tier} with priority {priority}"),
        (Some(tier), None) => format!("goes to tier {tier}"),
        (None, Some(priority)) => format!("has priority {priority}"),
        (None, None) => "changes nothing".to_owned(),
    };
    words.push_str(&match entry.until {
        Some(until) => format!(" until {}", time(until)),
        None => " until somebody ends it".to_owned(),
    });
    words.push_str(&format!("; {} made it at {}", entry.who, time(entry.since)));
    if !entry.why.is_empty() {
        words.push_str(&format!(": {}", entry.why));
    }
    words
}
