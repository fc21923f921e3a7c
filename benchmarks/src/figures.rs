//! Figures in rows and columns, where nobody competes.

use serde_json::{Map, Value, json};

use crate::report::{Check, Section, table};

/// A table of figures.
pub struct Figures {
    title: String,
    columns: Vec<&'static str>,
    rows: Vec<(String, Vec<f64>)>,
}

impl Figures {
    /// A table without rows; the columns are those after the rows' names.
    pub fn new(title: impl Into<String>, columns: &[&'static str]) -> Self {
        Self {
            title: title.into(),
            columns: columns.to_vec(),
            rows: Vec::new(),
        }
    }

    /// Adds a row, with a figure for each column.
    #[must_use]
    pub fn row(mut self, name: impl Into<String>, figures: &[f64]) -> Self {
        self.rows.push((name.into(), figures.to_vec()));
        self
    }
}

impl Section for Figures {
    fn to_text(&self) -> String {
        let head: Vec<&str> = [""]
            .into_iter()
            .chain(self.columns.iter().copied())
            .collect();
        let rows = self.rows.iter().map(|(name, figures)| {
            let figures = figures.iter().map(|figure| match figure.fract() {
                0.0 => format!("{figure}"),
                _ => format!("{figure:.1}"),
            });
            [name.clone()].into_iter().chain(figures).collect()
        });
        format!("{}\n{}", self.title, table(&head, rows))
    }

    fn to_json(&self) -> Value {
        let rows = self.rows.iter().map(|(name, figures)| {
            let figures = self.columns.iter().zip(figures);
            let figures: Map<_, _> = figures
                .map(|(column, figure)| ((*column).to_owned(), json!(figure)))
                .collect();
            json!({ "name": name, "figures": figures })
        });
        json!({ "title": self.title, "figures": rows.collect::<Vec<_>>() })
    }

    fn checks(&self) -> Vec<Check> {
        Vec::new()
    }
}
