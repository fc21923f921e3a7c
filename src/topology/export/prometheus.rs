//! Recording and alert rules for Prometheus, as data and as a rules file.
//!
//! The file is YAML that people read before they load it, so expressions are blocks of lines. A serialiser would write
//! them as quoted strings, and the crates that do better (serde-saphyr; `serde_yaml` is no longer maintained) would be
//! compiled by every app for this one file. Its shape is fixed, so `Display` writes it, with texts in the quotes of
//! JSON, which is a part of YAML. A test reads it back with a parser.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use serde::Serialize;

use super::super::Topology;
use super::super::units::show_duration;
use super::alerts;

/// What the rules depend on besides the map.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct RuleSettings {
    /// The label matchers that select the series of this app, without braces. Default `job="APP"`, with the app's name
    /// in the map.
    pub selector: String,
    /// By how much all times of the rules are shortened: 60 makes a minute of an hour. It is for rehearsals; the windows
    /// of burn rates only make sense at 1, the default.
    pub shortened_by: u32,
    /// The page with an entry for each alert, to which the alert's name in lower case is added as `#fragment`. Default
    /// the [guide's page](crate::guide::alerts) on docs.rs.
    pub runbook: String,
}

/// Where the guide's page on alerts is published.
const RUNBOOK: &str = "https://docs.rs/tierline/latest/tierline/guide/alerts/index.html";

impl RuleSettings {
    /// The settings that fit most: a scrape job with the app's name, and the times as they are.
    pub fn new(topology: &Topology) -> Self {
        Self {
            selector: format!("job=\"{}\"", topology.app()),
            shortened_by: 1,
            runbook: RUNBOOK.to_owned(),
        }
    }

    /// Selects the app's series by other labels, such as `namespace="prod",job=~"hotel-.*"`.
    #[must_use]
    pub fn selector(mut self, matchers: impl Into<String>) -> Self {
        self.selector = matchers.into();
        self
    }

    /// Shortens all times, for a rehearsal that takes minutes where the rules take days. 0 is 1.
    #[must_use]
    pub fn shortened_by(mut self, factor: u32) -> Self {
        self.shortened_by = factor.max(1);
        self
    }

    /// Links to a page of your own.
    #[must_use]
    pub fn runbook(mut self, url: impl Into<String>) -> Self {
        self.runbook = url.into();
        self
    }

    /// A time of the rules, as PromQL writes it.
    pub(super) fn time(&self, time: Duration) -> String {
        show_duration((time / self.shortened_by.max(1)).max(Duration::from_millis(1)))
    }
}

/// The rules that follow from a map. `Display` writes the rules file.
///
/// ```
/// # use tierline::topology::export::{Rules, RuleSettings};
/// let topology = tierline::Topology::load("topology/hotel.toml")?;
/// let rules = Rules::new(&topology, &RuleSettings::new(&topology));
/// assert!(rules.to_string().contains("alert: TierlineSloBurnFast"));
/// # Ok::<(), tierline::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Rules {
    /// Lines for the beginning of the file, without `#`.
    #[serde(skip)]
    pub header: Vec<String>,
    /// The groups of rules: those that record, and one for each group of the map and the app.
    pub groups: Vec<RuleGroup>,
}

/// Rules that Prometheus evaluates one after the other.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct RuleGroup {
    /// Its name, which begins with that of the app.
    pub name: String,
    /// The rules in order.
    pub rules: Vec<Rule>,
}

/// One rule.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(untagged)]
#[non_exhaustive]
pub enum Rule {
    /// It stores the result of an expression as series of their own.
    Recording {
        /// The name of the series.
        record: String,
        /// The expression.
        expr: String,
        /// The labels that the series get.
        labels: BTreeMap<String, String>,
    },
    /// It raises an alert while an expression has a result.
    Alert {
        /// The name of the alert, which the guide has an entry for.
        alert: String,
        /// The expression.
        expr: String,
        /// For how long it has to have a result first. `None`: not at all.
        #[serde(rename = "for", skip_serializing_if = "Option::is_none")]
        after: Option<String>,
        /// `severity` (`page` or `ticket`), `app` and, where they apply, `tier` and `group`.
        labels: BTreeMap<String, String>,
        /// `summary`, `description` and `runbook_url`.
        annotations: BTreeMap<String, String>,
    },
}

impl Rules {
    /// The rules for a map.
    pub fn new(topology: &Topology, settings: &RuleSettings) -> Self {
        let app = topology.app();
        let mut header = vec![
            format!(
                "The rules of {app} for Prometheus, written by `tierline topology export --prometheus`."
            ),
            "Write them again when the map changes, rather than to edit them.".to_owned(),
            format!("They select the app's series by {}.", settings.selector),
        ];
        if settings.shortened_by > 1 {
            header.push(format!(
                "All times are shortened by a factor of {}, for a rehearsal: an hour is {}.",
                settings.shortened_by,
                settings.time(Duration::from_secs(3_600)),
            ));
        }
        let mut groups = alerts::groups(topology, settings);
        groups.retain(|group| !group.rules.is_empty());
        Self { header, groups }
    }

    /// The names of the alerts, each once, in the order of their first rule.
    pub fn alerts(&self) -> Vec<&str> {
        let mut names = Vec::new();
        for rule in self.groups.iter().flat_map(|group| &group.rules) {
            if let Rule::Alert { alert, .. } = rule
                && !names.contains(&alert.as_str())
            {
                names.push(alert.as_str());
            }
        }
        names
    }
}

impl fmt::Display for Rules {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        for line in &self.header {
            writeln!(out, "# {}", line.replace(['\n', '\r'], " "))?;
        }
        if self.groups.is_empty() {
            return writeln!(out, "groups: []");
        }
        writeln!(out, "groups:")?;
        for group in &self.groups {
            writeln!(out, "  - name: {}", quoted(&group.name))?;
            writeln!(out, "    rules:")?;
            for rule in &group.rules {
                write!(out, "{rule}")?;
            }
        }
        Ok(())
    }
}

/// An entry of the list `rules` of the file.
impl fmt::Display for Rule {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Recording {
                record,
                expr,
                labels,
            } => {
                writeln!(out, "      - record: {record}")?;
                write_block(out, expr)?;
                write_texts(out, "labels", labels)
            }
            Self::Alert {
                alert,
                expr,
                after,
                labels,
                annotations,
            } => {
                writeln!(out, "      - alert: {alert}")?;
                write_block(out, expr)?;
                if let Some(after) = after {
                    writeln!(out, "        for: {after}")?;
                }
                write_texts(out, "labels", labels)?;
                write_texts(out, "annotations", annotations)
            }
        }
    }
}

fn write_block(out: &mut fmt::Formatter<'_>, expr: &str) -> fmt::Result {
    // The first line has no indentation in any of the expressions, so YAML can tell that of the block by it.
    writeln!(out, "        expr: |-")?;
    expr.lines()
        .try_for_each(|line| writeln!(out, "          {line}"))
}

fn write_texts(
    out: &mut fmt::Formatter<'_>,
    key: &str,
    texts: &BTreeMap<String, String>,
) -> fmt::Result {
    writeln!(out, "        {key}:")?;
    texts
        .iter()
        .try_for_each(|(name, text)| writeln!(out, "          {name}: {}", quoted(text)))
}

/// A text that is the same in JSON and YAML, whatever is in it.
fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}
