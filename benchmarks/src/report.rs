//! What a benchmark found, printed and kept.

use std::fs;
use std::path::Path;

use anyhow::{Result, bail};
use serde::Serialize;
use serde_json::{Value, json};

/// A part of a report.
pub(crate) trait Section {
    fn to_text(&self) -> String;
    fn to_json(&self) -> Value;
    fn checks(&self) -> Vec<Check>;
}

/// Something that was promised, and whether it holds.
#[derive(Debug, Clone, Serialize)]
pub struct Check {
    /// The promise.
    pub what: String,
    /// What was found.
    pub found: String,
    /// Whether it holds.
    pub holds: bool,
}

/// What a benchmark found.
pub struct Report {
    name: String,
    sections: Vec<Value>,
    checks: Vec<Check>,
}

impl Report {
    /// A report of the benchmark of this name.
    pub fn new(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            sections: Vec::new(),
            checks: Vec::new(),
        }
    }

    /// Adds a part ([`Measured`](crate::Measured), [`Distributions`](crate::Distributions)) and
    /// prints it.
    #[expect(private_bounds, reason = "the parts are those of this crate")]
    pub fn add(&mut self, section: impl Section) {
        println!("\n{}", section.to_text());
        self.sections.push(section.to_json());
        self.checks.extend(section.checks());
    }

    /// Adds a promise that is not a ratio, and whether it holds.
    pub fn check(&mut self, what: impl Into<String>, found: impl Into<String>, holds: bool) {
        self.checks.push(Check {
            what: what.into(),
            found: found.into(),
            holds,
        });
    }

    /// Prints what was promised, and writes `target/benchmarks/NAME.json`.
    ///
    /// # Errors
    /// A file that cannot be written; a promise that does not hold.
    pub fn finish(self) -> Result<()> {
        let rows = self.checks.iter().map(|check| {
            let verdict = if check.holds { "yes" } else { "NO" };
            vec![check.what.clone(), check.found.clone(), verdict.to_owned()]
        });
        println!("\nPromises\n{}", table(&["", "found", "holds"], rows));

        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/benchmarks");
        fs::create_dir_all(&folder)?;
        let report = json!({
            "benchmark": self.name,
            "sections": self.sections,
            "checks": self.checks,
        });
        let text = serde_json::to_string_pretty(&report)?;
        fs::write(folder.join(format!("{}.json", self.name)), text)?;
        println!("\nalso in target/benchmarks/{}.json", self.name);

        let broken = self.checks.iter().filter(|check| !check.holds).count();
        if broken > 0 {
            bail!("{broken} of {} promises do not hold", self.checks.len());
        }
        Ok(())
    }
}

/// Columns, each as wide as its widest cell; all but the first to the right.
pub(crate) fn table(head: &[&str], rows: impl Iterator<Item = Vec<String>>) -> String {
    let head = head.iter().map(|cell| (*cell).to_owned()).collect();
    let rows: Vec<Vec<String>> = std::iter::once(head).chain(rows).collect();
    let columns = rows.first().map_or(0, Vec::len);
    let widths: Vec<usize> = (0..columns)
        .map(|column| {
            let cells = rows.iter().filter_map(|row| row.get(column));
            cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
        })
        .collect();
    let mut text = String::new();
    for row in rows {
        for (column, (cell, width)) in row.iter().zip(&widths).enumerate() {
            text += &match column {
                0 => format!("  {cell:<width$}"),
                _ => format!("  {cell:>width$}"),
            };
        }
        text.truncate(text.trim_end().len());
        text.push('\n');
    }
    text.truncate(text.trim_end().len());
    text
}
