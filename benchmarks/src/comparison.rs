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
    /// Whether every round must reach the ratio, or else the median of all rounds.
    is_in_each_round: bool,
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
                is_in_each_round: false,
            });
        }
        self
    }

    /// Asks of the contender that was added last to reach its ratio in every round, and not only in the median.
    pub fn in_each_round(mut self) -> Self {
        let last = self.contenders.last_mut();
        if let Some(asked) = last.and_then(|it| it.asked.as_mut()) {
            asked.is_in_each_round = true;
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
                ratios: Vec::new(),
            })
            .collect();
        for index in 0..rows.len() {
            let reference = match &rows[index].asked {
                Some(asked) => rows.iter().find(|row| row.name == asked.reference),
                None => rows.first(),
            };
            let reference = reference.context("a reference that is no contender")?;
            rows[index].ratios = ratios(&rows[index].figures, &reference.figures);
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
    /// For each round, the ratio to the reference in the same round: what disturbs the machine for a while
    /// disturbs both.
    ratios: Vec<f64>,
}

impl Row {
    /// The ratio that counts, and whether it is what was asked for.
    fn verdict(&self, asked: &Asked) -> (f64, bool) {
        let ratio = match asked.is_in_each_round {
            true => spread(&self.ratios).0,
            false => median(&self.ratios),
        };
        (ratio, ratio >= asked.ratio)
    }
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
            ratios: ratios(&figures, &first),
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

    /// How a contender compares with another in the median of all rounds, if both are there.
    pub fn ratio(&self, name: &str, reference: &str) -> Option<f64> {
        Some(median(&self.ratios(name, reference)?))
    }

    /// How a contender compares with another in its worst round, if both are there.
    pub fn least_ratio(&self, name: &str, reference: &str) -> Option<f64> {
        Some(spread(&self.ratios(name, reference)?).0)
    }

    fn ratios(&self, name: &str, reference: &str) -> Option<Vec<f64>> {
        let figures = |name| {
            let row = self.rows.iter().find(|row| row.name == name)?;
            Some(row.figures.as_slice())
        };
        Some(ratios(figures(name)?, figures(reference)?))
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
                Some(asked) => {
                    let each = if asked.is_in_each_round {
                        " in each"
                    } else {
                        ""
                    };
                    let verdict = if row.verdict(asked).1 { "yes" } else { "NO" };
                    let asked_for = format!("{:.2}{each} {verdict}", asked.ratio);
                    (asked.reference.as_str(), asked_for)
                }
                None => (reference, String::new()),
            };
            let (worst, best) = spread(&row.ratios);
            vec![
                row.name.clone(),
                format!("{:.0}", median(&row.figures)),
                format!("{least:.0}–{most:.0}"),
                format!("{:.2}", median(&row.ratios)),
                format!("{worst:.2}–{best:.2}"),
                of.to_owned(),
                asked,
            ]
        });
        let head = ["", &self.unit, "min–max", "ratio", "min–max", "to", "asked"];
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
                "ratio": median(&row.ratios),
                "ratios": row.ratios,
                "to": row.asked.as_ref().map(|asked| &asked.reference),
                "asked": row.asked.as_ref().map(|asked| asked.ratio),
            })
        });
        json!({ "title": self.title, "unit": self.unit, "contenders": rows.collect::<Vec<_>>() })
    }

    fn checks(&self) -> Vec<Check> {
        let asked = self.rows.iter().filter_map(|row| {
            let asked = row.asked.as_ref()?;
            let (ratio, holds) = row.verdict(asked);
            let each = match asked.is_in_each_round {
                true => " in each round",
                false => "",
            };
            Some(Check {
                what: format!(
                    "{}: {} at least {:.2} of {}{each}",
                    self.title, row.name, asked.ratio, asked.reference
                ),
                found: format!("{ratio:.2}"),
                holds,
            })
        });
        asked.collect()
    }
}

/// The ratios of all rounds.
fn ratios(figures: &[f64], reference: &[f64]) -> Vec<f64> {
    let pairs = figures.iter().zip(reference);
    pairs.map(|(own, other)| own / other).collect()
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

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn one_slow_round_breaks_a_promise_for_each_round_and_not_one_for_the_median() {
        for (is_in_each_round, holds) in [(false, true), (true, false)] {
            // The first is the warm-up.
            let mut figures = [100.0, 90.0, 50.0, 90.0].into_iter();
            let mut comparison = Comparison::new("Naps", "naps/h")
                .contender("cat", async || Ok(100.0))
                .contender("dog", async || figures.next().context("four rounds"))
                .at_least(0.8, "cat");
            if is_in_each_round {
                comparison = comparison.in_each_round();
            }
            let measured = comparison.run(3).await.unwrap();
            assert_eq!(measured.checks()[0].holds, holds);
            assert_eq!(measured.ratio("dog", "cat"), Some(0.9));
            assert_eq!(measured.least_ratio("dog", "cat"), Some(0.5));
        }
    }
}
