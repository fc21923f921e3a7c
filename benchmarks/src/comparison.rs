//! Contenders that take turns.

use std::future::Future;
use std::pin::Pin;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use crate::report::{Check, Section, table};

/// An asynchronous closure without its type.
trait Run {
    fn run(&mut self) -> Pin<Box<dyn Future<Output = Result<f64>> + '_>>;
}

impl<F: AsyncFnMut() -> Result<f64>> Run for F {
    fn run(&mut self) -> Pin<Box<dyn Future<Output = Result<f64>> + '_>> {
        Box::pin(self())
    }
}

/// Programs that do the same, each of which says how well: more is better.
pub struct Comparison<'a> {
    title: String,
    unit: String,
    contenders: Vec<Contender<'a>>,
}

struct Contender<'a> {
    name: String,
    run: Box<dyn Run + 'a>,
    asked: Option<Asked>,
}

/// What is asked of a contender: at least this ratio to another one.
#[derive(Clone)]
struct Asked {
    ratio: f64,
    reference: String,
}

impl<'a> Comparison<'a> {
    /// A comparison without contenders. The first one to be added is the reference of all others,
    /// unless [`at_least`](Self::at_least) names another.
    pub fn new(title: impl Into<String>, unit: impl Into<String>) -> Self {
        Self {
            title: title.into(),
            unit: unit.into(),
            contenders: Vec::new(),
        }
    }

    /// Adds a contender. `run` does a whole round, cleans up, and gives its figure.
    pub fn contender(
        mut self,
        name: impl Into<String>,
        run: impl AsyncFnMut() -> Result<f64> + 'a,
    ) -> Self {
        self.contenders.push(Contender {
            name: name.into(),
            run: Box::new(run),
            asked: None,
        });
        self
    }

    /// Asks of the contender that was added last to reach this ratio to `reference`.
    pub fn at_least(mut self, ratio: f64, reference: impl Into<String>) -> Self {
        if let Some(last) = self.contenders.last_mut() {
            last.asked = Some(Asked {
                ratio,
                reference: reference.into(),
            });
        }
        self
    }

    /// Lets everybody run once to warm up, then in `rounds` rounds, each beginning with another one.
    ///
    /// # Errors
    /// The first failure of a contender.
    pub async fn run(mut self, rounds: usize) -> Result<Measured> {
        let count = self.contenders.len();
        let mut figures = vec![Vec::new(); count];
        for round in 0..=rounds {
            for turn in 0..count {
                let index = (round + turn) % count;
                let contender = &mut self.contenders[index];
                let figure = contender
                    .run
                    .run()
                    .await
                    .with_context(|| format!("{}: {}", self.title, contender.name))?;
                let label = if round == 0 { "warm-up" } else { "round" };
                eprintln!(
                    "{}, {label} {round}: {} {figure:.0} {}",
                    self.title, contender.name, self.unit
                );
                if round > 0 {
                    figures[index].push(figure);
                }
            }
        }
        let rows = self.contenders.into_iter().zip(figures);
        let mut rows: Vec<Row> = rows
            .map(|(contender, figures)| Row {
                name: contender.name,
                figures,
                asked: contender.asked,
                ratio: 1.0,
            })
            .collect();
        for index in 0..rows.len() {
            let reference = match &rows[index].asked {
                Some(asked) => rows.iter().find(|row| row.name == asked.reference),
                None => rows.first(),
            };
            let reference = reference.context("a reference that is no contender")?;
            rows[index].ratio = ratio(&rows[index].figures, &reference.figures);
        }
        Ok(Measured {
            title: self.title,
            unit: self.unit,
            rows,
        })
    }
}

/// What came out of a [`Comparison`].
pub struct Measured {
    title: String,
    unit: String,
    rows: Vec<Row>,
}

struct Row {
    name: String,
    figures: Vec<f64>,
    asked: Option<Asked>,
    /// The median of the ratios of all rounds to the reference in the same round: what disturbs the
    /// machine for a while disturbs both.
    ratio: f64,
}

impl Measured {
    /// What was measured elsewhere: the figures of each contender, one for each round.
    pub fn of(
        title: impl Into<String>,
        unit: impl Into<String>,
        contenders: Vec<(String, Vec<f64>)>,
    ) -> Self {
        let first = contenders.first().map(|(_, figures)| figures.clone());
        let first = first.unwrap_or_default();
        let rows = contenders.into_iter().map(|(name, figures)| Row {
            ratio: ratio(&figures, &first),
            name,
            figures,
            asked: None,
        });
        Self {
            title: title.into(),
            unit: unit.into(),
            rows: rows.collect(),
        }
    }

    /// What was measured.
    pub fn title(&self) -> &str {
        &self.title
    }

    /// How a contender compares with another, if both are there.
    pub fn ratio(&self, name: &str, reference: &str) -> Option<f64> {
        let figures = |name| {
            let row = self.rows.iter().find(|row| row.name == name)?;
            Some(row.figures.as_slice())
        };
        Some(ratio(figures(name)?, figures(reference)?))
    }

    /// The median of a contender, if it is there.
    pub fn median(&self, name: &str) -> Option<f64> {
        let row = self.rows.iter().find(|row| row.name == name)?;
        Some(median(&row.figures))
    }
}

impl Section for Measured {
    fn to_text(&self) -> String {
        let reference = self.rows.first().map_or("", |row| &row.name);
        let rows = self.rows.iter().map(|row| {
            let (least, most) = spread(&row.figures);
            let (of, asked) = match &row.asked {
                Some(asked) => (
                    asked.reference.as_str(),
                    format!("{:.2} {}", asked.ratio, verdict(row.ratio >= asked.ratio)),
                ),
                None => (reference, String::new()),
            };
            vec![
                row.name.clone(),
                format!("{:.0}", median(&row.figures)),
                format!("{least:.0}–{most:.0}"),
                format!("{:.2}", row.ratio),
                of.to_owned(),
                asked,
            ]
        });
        let head = ["", &self.unit, "min–max", "ratio", "to", "asked"];
        format!("{}\n{}", self.title, table(&head, rows))
    }

    fn to_json(&self) -> Value {
        let rows = self.rows.iter().map(|row| {
            let (least, most) = spread(&row.figures);
            json!({
                "contender": row.name,
                "median": median(&row.figures),
                "min": least,
                "max": most,
                "rounds": row.figures,
                "ratio": row.ratio,
                "to": row.asked.as_ref().map(|asked| &asked.reference),
                "asked": row.asked.as_ref().map(|asked| asked.ratio),
            })
        });
        json!({ "title": self.title, "unit": self.unit, "contenders": rows.collect::<Vec<_>>() })
    }

    fn checks(&self) -> Vec<Check> {
        let asked = self.rows.iter().filter_map(|row| {
            let asked = row.asked.as_ref()?;
            Some(Check {
                what: format!(
                    "{}: {} at least {:.2} of {}",
                    self.title, row.name, asked.ratio, asked.reference
                ),
                found: format!("{:.2}", row.ratio),
                holds: row.ratio >= asked.ratio,
            })
        });
        asked.collect()
    }
}

fn verdict(holds: bool) -> &'static str {
    if holds { "yes" } else { "NO" }
}

/// The median of the ratios of all rounds.
fn ratio(figures: &[f64], reference: &[f64]) -> f64 {
    let pairs = figures.iter().zip(reference);
    median(&pairs.map(|(own, other)| own / other).collect::<Vec<_>>())
}

/// The figure in the middle; not a number where there is none.
pub fn median(figures: &[f64]) -> f64 {
    let mut sorted = figures.to_vec();
    sorted.sort_by(f64::total_cmp);
    match sorted.len() {
        0 => f64::NAN,
        count if count % 2 == 1 => sorted[count / 2],
        count => f64::midpoint(sorted[count / 2 - 1], sorted[count / 2]),
    }
}

fn spread(figures: &[f64]) -> (f64, f64) {
    let least = figures.iter().copied().fold(f64::INFINITY, f64::min);
    let most = figures.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    (least, most)
}
