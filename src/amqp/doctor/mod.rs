//! Compares the file with the live broker, and gives advice for each difference.

pub(super) mod checks;
mod cluster;
mod delays;
mod moves;
mod policies;
pub(super) mod snapshot;

use std::fmt;

use serde::Serialize;

use super::connection::Connection;
#[cfg(feature = "management")]
use super::management::Management;
use crate::topology::plan::Plan;
use crate::{Error, Topology};
use snapshot::Snapshot;

/// The findings of the doctor.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Report {
    /// The gravest first.
    pub findings: Vec<Finding>,
    /// The checks that were not possible, with the reason.
    pub not_checked: Vec<String>,
}

/// One finding, with advice.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Finding {
    /// How grave it is.
    pub severity: Severity,
    /// The object, such as `queue hotel.critical`.
    pub object: String,
    /// What was found.
    pub what: String,
    /// What to do about it.
    pub help: String,
}

/// How grave a finding is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// Worth knowing, and part of a server that is well: a tier that nobody works on yet, a trap of
    /// the broker's version.
    Note,
    /// It works, and something is not as it should be.
    Warning,
    /// Messages will be refused, lost, late, or worked on twice.
    Error,
}

impl Report {
    /// Whether there is nothing to mend: notes at most.
    pub fn is_well(&self) -> bool {
        let findings = self.findings.iter();
        findings.map(|finding| finding.severity).max() <= Some(Severity::Note)
    }

    /// Both reports as one: that of the broker and that of the database.
    #[must_use]
    pub fn and(mut self, other: Report) -> Self {
        self.findings.extend(other.findings);
        self.not_checked.extend(other.not_checked);
        self.sorted()
    }

    pub(crate) fn sorted(mut self) -> Self {
        let gravity = |finding: &Finding| std::cmp::Reverse(finding.severity);
        self.findings.sort_by_key(gravity);
        self
    }
}

/// Compares `topology` with the broker, with AMQP alone: whether everything exists, and who
/// works on it. [`doctor_with`] sees more. `has_database` says whether the app's processes have a database, which decides
/// about the [queues for long delays](crate::topology#long-delays).
///
/// ```no_run
/// # async fn example() -> Result<(), tierline::Error> {
/// use tierline::amqp::{Connection, doctor};
///
/// let topology = tierline::Topology::load("topology/hotel.toml")?;
/// let connection = Connection::open("amqp://localhost", "doctor").await?;
/// let report = doctor(&connection, &topology, false).await?;
/// println!("{report}");
/// # Ok(()) }
/// ```
///
/// # Errors
/// [`BrokerError::UnsupportedPriorities`](crate::error::BrokerError::UnsupportedPriorities), and [`BrokerError::Failed`](crate::error::BrokerError::Failed) if the connection is lost.
pub async fn doctor(
    connection: &Connection,
    topology: &Topology,
    has_database: bool,
) -> Result<Report, Error> {
    let plan = Plan::new(topology, connection.version(), has_database)?;
    let snapshot = Snapshot::over_amqp(connection, topology, &plan).await?;
    Ok(examine(connection, topology, &plan, &snapshot))
}

/// Compares `topology` with the broker, with AMQP and the management API: arguments, bindings,
/// policies, nodes, and what the file no longer has.
///
/// The management API tells of a new policy some seconds after it was set.
///
/// # Errors
/// As [`doctor`], and [`BrokerError::ManagementFailed`](crate::error::BrokerError::ManagementFailed).
#[cfg(feature = "management")]
pub async fn doctor_with(
    connection: &Connection,
    topology: &Topology,
    has_database: bool,
    management: &Management,
) -> Result<Report, Error> {
    let plan = Plan::new(topology, connection.version(), has_database)?;
    let snapshot = Snapshot::complete(connection, management).await?;
    Ok(examine(connection, topology, &plan, &snapshot))
}

fn examine(
    connection: &Connection,
    topology: &Topology,
    plan: &Plan,
    snapshot: &Snapshot,
) -> Report {
    let mut findings = checks::all(topology, plan, snapshot);
    findings.extend(policies::check(plan, snapshot));
    findings.extend(checks::traps(connection.version()));
    let report = Report {
        findings,
        not_checked: not_checked(snapshot),
    };
    report.sorted()
}

fn not_checked(snapshot: &Snapshot) -> Vec<String> {
    let mut missing = Vec::new();
    if snapshot.bindings.is_none() {
        missing.push(
            "arguments, bindings, policies, the nodes and what they lead, and what is no longer in the \
             file: give the URL of the management API",
        );
    } else if snapshot.nodes.is_none() {
        missing.push(
            "the nodes and what they lead: give the user of the management API the tag \"monitoring\"",
        );
    }
    missing.push(
        "the broker's ack timeout against the time limits of the handlers: only the app's own \
         process knows these",
    );
    missing.into_iter().map(str::to_owned).collect()
}

/// The findings, what was not checked, and a line that sums up.
impl fmt::Display for Report {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        for finding in &self.findings {
            writeln!(out, "{finding}")?;
        }
        for what in &self.not_checked {
            writeln!(out, "not checked: {what}")?;
        }
        let count = |severity| {
            let findings = self.findings.iter();
            let count = findings.filter(|finding| finding.severity == severity);
            match count.count() {
                1 => format!("1 {severity}"),
                count => format!("{count} {severity}s"),
            }
        };
        let [errors, warnings, notes] =
            [Severity::Error, Severity::Warning, Severity::Note].map(count);
        write!(out, "{errors}, {warnings}, {notes}")
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Finding {
            severity,
            object,
            what,
            help,
        } = self;
        write!(out, "{severity}: {object}: {what}")?;
        match help.is_empty() {
            true => Ok(()),
            false => write!(out, "\n    help: {help}"),
        }
    }
}

impl fmt::Display for Severity {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            Severity::Note => "note",
            Severity::Warning => "warning",
            Severity::Error => "error",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::snapshot::FoundNode;

    /// Nodes that run: `rabbit@1`, `rabbit@2` and so on.
    pub(super) fn nodes(size: usize) -> Vec<FoundNode> {
        let node = |number| FoundNode {
            name: format!("rabbit@{number}"),
            is_running: true,
        };
        (1..=size).map(node).collect()
    }
}
