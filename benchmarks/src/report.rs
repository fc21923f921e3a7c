//! What a benchmark found, printed and kept.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// A part of a report.
pub(crate) trait Section {
    fn to_text(&self) -> String;
    fn to_json(&self) -> Value;
    fn checks(&self) -> Vec<Check>;
}

/// Something that was promised, and whether it holds.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Check {
    /// The promise.
    pub what: String,
    /// What was found.
    pub found: String,
    /// Whether it holds.
    pub holds: bool,
}

/// What a benchmark found.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Report {
    #[serde(rename = "benchmark")]
    pub(crate) name: String,
    pub(crate) sections: Vec<Value>,
    pub(crate) checks: Vec<Check>,
}

/// Where reports are kept.
pub fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/benchmarks")
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

    /// The report that a benchmark left in this folder.
    ///
    /// # Errors
    /// A file that is not there, or is no report.
    pub fn read(folder: &Path, name: &str) -> Result<Self> {
        let file = folder.join(format!("{name}.json"));
        let text = fs::read_to_string(&file);
        let text = text.with_context(|| format!("cannot read {}", file.display()))?;
        serde_json::from_str(&text).with_context(|| format!("{} is no report", file.display()))
    }

    /// Its parts, as they are kept.
    pub fn sections(&self) -> &[Value] {
        &self.sections
    }

    /// Adds a part ([`Measured`](crate::Measured), [`Distributions`](crate::Distributions),
    /// [`Figures`](crate::Figures)) and prints it.
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
        println!("\nPromises\n{}", promises(&self.checks));
        keep(&self.name, &self)?;
        let broken = self.checks.iter().filter(|check| !check.holds).count();
        if broken > 0 {
            bail!("{broken} of {} promises do not hold", self.checks.len());
        }
        Ok(())
    }
}

/// Writes into `target/benchmarks/NAME.json`, and says so.
pub(crate) fn keep(name: &str, content: &impl Serialize) -> Result<()> {
    fs::create_dir_all(folder())?;
    let text = serde_json::to_string_pretty(content)?;
    fs::write(folder().join(format!("{name}.json")), text)?;
    println!("\nalso in target/benchmarks/{name}.json");
    Ok(())
}

/// The table of what was promised.
pub(crate) fn promises(checks: &[Check]) -> String {
    let rows = checks.iter().map(|check| {
        let verdict = if check.holds { "yes" } else { "NO" };
        vec![check.what.clone(), check.found.clone(), verdict.to_owned()]
    });
    table(&["", "found", "holds"], rows)
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
