//! The table of what was run on what, which runs write themselves.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

use crate::report::Report;

const HEAD: &str = "\
# Chaos: what was run on what

Written by `cargo xtask chaos --record`: a row for each run, in place of an earlier one of the same
broker, nodes, seed and length. Times depend on the machine and on what else it does.

| RabbitMQ | nodes | seed | minutes | faults | confirmed | executed | more than once | dead-lettered | expired | in deleted queues | **lost** | longest standstill | 0.9 of the throughput after a node's return |
|---|---|---|---|---|---|---|---|---|---|---|---|---|---|
";

/// Puts a run into the table of a file, which is made if it is not there.
pub(crate) fn record(path: &Path, report: &Report) -> Result<()> {
    let old = fs::read_to_string(path).unwrap_or_default();
    fs::write(path, with_row(&old, &row(report)))
        .with_context(|| format!("could not write {}", path.display()))
}

fn row(report: &Report) -> String {
    let (order, verdict) = (&report.order, &report.verdict);
    let standstill = report.worst_gap().map_or("-".to_owned(), |(step, gap)| {
        format!("{:.1} s ({})", gap.as_secs_f64(), step.fault)
    });
    let recoveries = report.recoveries();
    let slowest = recoveries
        .iter()
        .map(|(_, took)| *took)
        .collect::<Option<Vec<_>>>();
    let recovery = match slowest.as_deref() {
        None => "not always before the next fault".to_owned(),
        Some(all) => all.iter().max().map_or("-".to_owned(), |most| {
            format!("at most {:.1} s", most.as_secs_f64())
        }),
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

/// The file with one more row, or with one in place of that of the same run. What follows the table
/// under a heading of its own stays.
fn with_row(old: &str, row: &str) -> String {
    let (old, rest) = old.split_at(old.find("\n## ").unwrap_or(old.len()));
    let is_row = |line: &&str| line.starts_with("| ") && !line.starts_with("| RabbitMQ");
    let mut rows: Vec<&str> = old
        .lines()
        .filter(is_row)
        .filter(|line| key(line) != key(row))
        .collect();
    rows.push(row);
    rows.sort_by_key(|row| key(row));
    format!("{HEAD}{}\n{rest}", rows.join("\n"))
}

/// Broker, nodes, seed and length of a row, in an order in which 10 comes after 9.
fn key(row: &str) -> Vec<(u64, String)> {
    let cells = row.trim_start_matches("| ").split(" | ").take(4);
    let sortable = |cell: &str| {
        let number = cell.split('.').next().and_then(|it| it.parse().ok());
        (number.unwrap_or(0), cell.to_owned())
    };
    cells.map(sortable).collect()
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
}
