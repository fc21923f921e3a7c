//! Times, by how many were how long.

use std::time::Duration;

use serde_json::{Value, json};

use crate::report::{Check, Section, table};

/// A number of times: waits, latencies, latenesses.
#[derive(Debug, Clone)]
pub struct Distribution {
    sorted: Vec<Duration>,
}

impl Distribution {
    /// The distribution of these times.
    pub fn of(times: impl IntoIterator<Item = Duration>) -> Self {
        let mut sorted: Vec<_> = times.into_iter().collect();
        sorted.sort();
        Self { sorted }
    }

    /// The time that this share of all does not exceed: `0.5` is the median, `1.0` the longest.
    pub fn quantile(&self, share: f64) -> Duration {
        let last = self.sorted.len().saturating_sub(1);
        let index = (share * self.sorted.len() as f64).ceil() as usize;
        let found = self.sorted.get(index.saturating_sub(1).min(last));
        found.copied().unwrap_or_default()
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.sorted.len()
    }
}

/// A table of distributions.
pub struct Distributions {
    title: String,
    rows: Vec<(String, Distribution)>,
}

impl Distributions {
    /// A table without rows.
    pub fn new(title: impl Into<String>) -> Self {
        Self {
            title: title.into(),
            rows: Vec::new(),
        }
    }

    /// Adds a row.
    #[must_use]
    pub fn row(mut self, name: impl Into<String>, distribution: Distribution) -> Self {
        self.rows.push((name.into(), distribution));
        self
    }
}

const QUANTILES: [(&str, f64); 4] = [("p50", 0.5), ("p95", 0.95), ("p99", 0.99), ("max", 1.0)];

impl Section for Distributions {
    fn to_text(&self) -> String {
        let rows = self.rows.iter().map(|(name, times)| {
            let cells = [name.clone(), times.count().to_string()];
            let quantiles = QUANTILES
                .map(|(_, share)| format!("{:.1}", times.quantile(share).as_secs_f64() * 1_000.0));
            cells.into_iter().chain(quantiles).collect()
        });
        let head = ["", "count", "p50 ms", "p95 ms", "p99 ms", "max ms"];
        format!("{}\n{}", self.title, table(&head, rows))
    }

    fn to_json(&self) -> Value {
        let rows = self.rows.iter().map(|(name, times)| {
            let mut row = json!({ "name": name, "count": times.count() });
            for (quantile, share) in QUANTILES {
                row[format!("{quantile}_ms")] =
                    json!(times.quantile(share).as_secs_f64() * 1_000.0);
            }
            row
        });
        json!({ "title": self.title, "rows": rows.collect::<Vec<_>>() })
    }

    fn checks(&self) -> Vec<Check> {
        Vec::new()
    }
}
