//! The reports of several benchmarks as one.

use std::fmt;
use std::path::Path;

use anyhow::Result;
use serde::Serialize;

use crate::is_quick;
use crate::report::{Check, Report, folder, keep, promises};

/// What was measured on.
#[derive(Debug, Clone, Serialize)]
pub struct Surroundings {
    /// When the run ended, in UTC.
    pub date: String,
    /// RabbitMQ's version.
    pub rabbitmq: String,
    /// How many cores programs and servers had together.
    pub cores: usize,
    /// Whether it was a quick run, whose figures say little.
    pub is_quick: bool,
}

impl Surroundings {
    /// Those of this process, at the end of its run.
    ///
    /// # Errors
    /// A broker that does not say its version.
    pub async fn here() -> Result<Self> {
        Ok(Self {
            date: jiff::Timestamp::now().strftime("%F %H:%M UTC").to_string(),
            rabbitmq: tierline_testbed::rabbitmq_version().await?,
            cores: std::thread::available_parallelism()?.get(),
            is_quick: is_quick(),
        })
    }
}

impl fmt::Display for Surroundings {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let quick = if self.is_quick { ", quick" } else { "" };
        write!(
            out,
            "RabbitMQ {}, {} cores, {}{quick}",
            self.rabbitmq, self.cores, self.date
        )
    }
}

/// The reports of several benchmarks.
#[derive(Debug, Serialize)]
pub struct Summary {
    measured_on: Surroundings,
    reports: Vec<Report>,
}

impl Summary {
    /// Reads what the benchmarks of these names left in `target/benchmarks`.
    pub fn read(names: &[String], measured_on: Surroundings) -> Self {
        let reports = names
            .iter()
            .map(|name| report_or_complaint(&folder(), name));
        Self {
            measured_on,
            reports: reports.collect(),
        }
    }

    /// Prints all that was promised as one table, and writes `target/benchmarks/all.json`.
    ///
    /// # Errors
    /// A file that cannot be written.
    pub fn finish(&self) -> Result<()> {
        let promises = promises(&self.checks());
        println!("\nAll promises: {}\n{promises}", self.measured_on);
        keep("all", self)
    }

    fn checks(&self) -> Vec<Check> {
        let reports = self.reports.iter();
        let checks = reports.flat_map(|report| {
            report.checks.iter().map(|check| Check {
                what: format!("{}: {}", report.name, check.what),
                ..check.clone()
            })
        });
        checks.collect()
    }
}

/// A benchmark that broke off is not left out: it has broken the promise to end.
fn report_or_complaint(folder: &Path, name: &str) -> Report {
    Report::read(folder, name).unwrap_or_else(|_| {
        let mut report = Report::new(name);
        report.check("runs to its end", "no report", false);
        report
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_benchmark_without_a_report_has_broken_a_promise() {
        let report = report_or_complaint(Path::new("/nowhere"), "publish");
        let on = Surroundings {
            date: "today".to_owned(),
            rabbitmq: "4.3.0".to_owned(),
            cores: 2,
            is_quick: false,
        };
        let summary = Summary {
            measured_on: on,
            reports: vec![report],
        };
        let checks = summary.checks();
        assert_eq!(checks.len(), 1);
        assert_eq!(checks[0].what, "publish: runs to its end");
        assert!(!checks[0].holds);
    }
}
