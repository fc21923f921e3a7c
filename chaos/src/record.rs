//! The table of runs, which the runs write themselves, and its totals in the README.

use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};

use crate::report::Report;

const HEAD: &str = "\
# Chaos runs

Written by `cargo xtask chaos --record`: a row for each run, in place of an earlier one of the same
broker, nodes, seed and length. Times depend on the machine and on what else it does.

| RabbitMQ | nodes | seed | minutes | faults | confirmed | executed | more than once | dead-lettered | expired | gone with their queue | **lost** | longest standstill | 0.9 of the throughput after a node's return |
|---|---|---|---|---|---|---|---|---|---|---|---|---|---|
";

/// Adds a run to the table of a file, which is created if missing, and writes the totals of that table
/// between the two [`MARKS`] of another.
pub(crate) fn record(table: &Path, summary: Option<&Path>, report: &Report) -> Result<()> {
    let old = fs::read_to_string(table).unwrap_or_default();
    let new = with_row(&old, &row(report));
    write(table, &new)?;
    let Some(summary) = summary else {
        return Ok(());
    };
    let old = fs::read_to_string(summary)
        .with_context(|| format!("could not read {}", summary.display()))?;
    let new = with_summary(&old, &sum(&new))
        .with_context(|| format!("{} has no lines {MARKS:?}", summary.display()))?;
    write(summary, &new)
}

fn write(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).with_context(|| format!("could not write {}", path.display()))
}

fn row(report: &Report) -> String {
    let (order, verdict) = (&report.order, &report.verdict);
    let standstill = report.worst_gap().map_or("-".to_owned(), |(step, gap)| {
        format!("{:.1} s ({})", gap.as_secs_f64(), step.fault)
    });
    let recoveries = report.recoveries();
    let took: Vec<Duration> = recoveries.iter().filter_map(|(_, took)| *took).collect();
    let most = took.iter().max().map(Duration::as_secs_f64);
    let recovery = match (most, recoveries.len() - took.len()) {
        (None, 0) => "-".to_owned(),
        (Some(most), 0) => format!("at most {most:.1} s"),
        (_, late) => format!("{late} of {} later", recoveries.len()),
    };
    let lost = match report.is_drained {
        true => verdict.lost.len().to_string(),
        false => format!("{}, not drained", verdict.lost.len()),
    };
    let cells = [
        report.version.clone(),
        order.nodes.to_string(),
        order.seed.to_string(),
        (order.length.as_secs_f64() / 60.0).to_string(),
        report.faults().to_string(),
        verdict.confirmed.to_string(),
        verdict.executed.to_string(),
        verdict.repeated.to_string(),
        verdict.dead.to_string(),
        verdict.expired.to_string(),
        verdict.deleted.to_string(),
        format!("**{lost}**"),
        standstill,
        recovery,
    ];
    format!("| {} |", cells.join(" | "))
}

/// The file with one more row, or with a row replaced if it is the same run. Text after the table
/// under its own heading stays.
fn with_row(old: &str, row: &str) -> String {
    let (old, rest) = old.split_at(old.find("\n## ").unwrap_or(old.len()));
    let mut rows: Vec<&str> = rows(old).filter(|line| key(line) != key(row)).collect();
    rows.push(row);
    rows.sort_by_key(|row| key(row));
    format!("{HEAD}{}\n{rest}", rows.join("\n"))
}

fn rows(table: &str) -> impl Iterator<Item = &str> {
    let is_row = |line: &&str| line.starts_with("| ") && !line.starts_with("| RabbitMQ");
    table.lines().filter(is_row)
}

fn cells(row: &str) -> Vec<&str> {
    row.trim_matches(['|', ' ']).split(" | ").collect()
}

/// Broker, nodes, seed and length of a row, as a key that sorts 10 after 9.
fn key(row: &str) -> Vec<(u64, String)> {
    let cells = cells(row).into_iter().take(4);
    let sortable = |cell: &str| {
        let number = cell.split('.').next().and_then(|it| it.parse().ok());
        (number.unwrap_or(0), cell.to_owned())
    };
    cells.map(sortable).collect()
}

/// The marks around the totals of all runs.
const MARKS: [&str; 2] = ["<!-- chaos -->\n", "<!-- /chaos -->\n"];

const SUM_HEAD: &str = "\
| RabbitMQ | nodes | seeds | faults | confirmed | run more than once | **lost** | longest standstill | as fast as before after a node's return |
|---|---|---|---|---|---|---|---|---|
";

/// All runs on the same broker with the same nodes.
#[derive(Default)]
struct Sum<'a> {
    broker: &'a str,
    nodes: &'a str,
    seeds: Vec<&'a str>,
    faults: u64,
    confirmed: u64,
    repeated: u64,
    lost: u64,
    is_drained: bool,
    standstill: f64,
    recovery: Option<f64>,
}

/// One line for each broker and number of nodes in a table.
fn sum(table: &str) -> String {
    let mut sums: Vec<Sum> = Vec::new();
    for row in rows(table) {
        let cells = cells(row);
        let cell = |place: usize| cells.get(place).copied().unwrap_or_default();
        let number = |place| leading_number(cell(place));
        let (broker, nodes) = (cell(0), cell(1));
        if !matches!(sums.last(), Some(sum) if (sum.broker, sum.nodes) == (broker, nodes)) {
            sums.push(Sum {
                broker,
                nodes,
                is_drained: true,
                recovery: Some(0.0),
                ..Sum::default()
            });
        }
        let Some(sum) = sums.last_mut() else { continue };
        sum.seeds.push(cell(2));
        sum.faults += number(4) as u64;
        sum.confirmed += number(5) as u64;
        sum.repeated += number(7) as u64;
        sum.lost += number(11) as u64;
        sum.is_drained &= !cell(11).contains("not drained");
        sum.standstill = sum.standstill.max(number(12));
        // A run in which no node went down has none.
        if cell(13) != "-" {
            let recovery = cell(13).strip_prefix("at most ").map(leading_number);
            sum.recovery = sum.recovery.zip(recovery).map(|(a, b)| a.max(b));
        }
    }
    let lines = sums.iter().map(Sum::line);
    format!("{SUM_HEAD}{}", lines.collect::<String>())
}

impl Sum<'_> {
    fn line(&self) -> String {
        let Sum {
            broker,
            nodes,
            faults,
            confirmed,
            repeated,
            lost,
            standstill,
            ..
        } = self;
        let seeds = self.seeds.join(", ");
        let recovery = self
            .recovery
            .map_or("not always in time".to_owned(), |most| {
                format!("within {most:.1} s")
            });
        let drained = if self.is_drained { "" } else { ", not drained" };
        format!(
            "| {broker} | {nodes} | {seeds} | {faults} | {confirmed} | {repeated} | **{lost}{drained}** | {standstill:.0} s | {recovery} |\n"
        )
    }
}

fn leading_number(cell: &str) -> f64 {
    let text = cell.trim_start_matches('*');
    let is_inside = |letter: char| letter.is_ascii_digit() || letter == '.';
    let end = text.find(|letter| !is_inside(letter));
    text[..end.unwrap_or(text.len())].parse().unwrap_or(0.0)
}

/// The file with this text between the marks, if it has them.
fn with_summary(old: &str, summary: &str) -> Option<String> {
    let (before, rest) = old.split_once(MARKS[0])?;
    let (_, after) = rest.split_once(MARKS[1])?;
    Some(format!("{before}{}{summary}{}{after}", MARKS[0], MARKS[1]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_is_added_in_order_and_takes_the_place_of_the_same_run_before() {
        let table = with_row("", "| 3.10.8 | 1 | 2 | 2 | first |");
        let table = with_row(&table, "| 3.10.8 | 1 | 10 | 2 | second |");
        let table = with_row(&table, "| 3.10.8 | 1 | 2 | 2 | third |");
        assert!(table.starts_with(HEAD));
        let rows: Vec<&str> = table.lines().skip(HEAD.lines().count()).collect();
        let expected = [
            "| 3.10.8 | 1 | 2 | 2 | third |",
            "| 3.10.8 | 1 | 10 | 2 | second |",
        ];
        assert_eq!(rows, expected);
    }

    #[test]
    fn what_follows_the_table_stays() {
        let row = "| 3.10.8 | 1 | 2 | 2 | first |";
        let table = format!("{}\n## Findings\nA text.\n", with_row("", row));
        assert_eq!(with_row(&table, row), table);
    }

    #[test]
    fn the_summary_has_a_line_for_each_broker_and_number_of_nodes() {
        let row = |broker, seed, lost, recovery| {
            format!(
                "| {broker} | 1 | {seed} | 2 | 21 | 100 | 90 | 3 | 10 | 0 | 2 | **{lost}** | 9.6 s (x) | {recovery} |"
            )
        };
        let mut table = String::new();
        for row in [
            row("3.10.8", 1, "0", "1 of 2 later"),
            row("3.10.8", 2, "1, not drained", "at most 2.0 s"),
            row("4.3.6", 1, "0", "at most 1.0 s"),
            row("4.3.6", 3, "0", "-"),
            row("4.3.6", 2, "0", "at most 3.5 s"),
        ] {
            table = with_row(&table, &row);
        }
        let expected = format!(
            "{SUM_HEAD}| 3.10.8 | 1 | 1, 2 | 42 | 200 | 6 | **1, not drained** | 10 s | not always in time |\n\
             | 4.3.6 | 1 | 1, 2, 3 | 63 | 300 | 9 | **0** | 10 s | within 3.5 s |\n"
        );
        assert_eq!(sum(&table), expected);
    }

    #[test]
    fn the_summary_takes_the_place_of_the_last_one() {
        let [begin, end] = MARKS;
        let old = format!("A\n{begin}old\n{end}B\n");
        let new = with_summary(&old, "new\n").unwrap_or_default();
        assert_eq!(new, format!("A\n{begin}new\n{end}B\n"));
        assert_eq!(with_summary("no marks", "new\n"), None);
    }
}
