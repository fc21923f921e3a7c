//! A suspect of one group beside the critical tasks of others: how long these wait for their start while the
//! suspect waits for a slot, runs, and kills its worker, compared with the same load without a suspect.
//!
//! `cargo xtask bench suspect [--quick]`

mod log;
mod run;
mod worker;

use anyhow::Result;
use tierline_benchmarks::{Distribution, Distributions, Figures, Report, is_quick};

use crate::run::{Last, Lengths, Phase, Run};

/// The tiers of the critical tasks, and the type of each one's queue.
const TIERS: [(&str, &str); 2] = [("critical", "classic"), ("critical_quorum", "quorum")];

/// The p99 of the waits beside a suspect, in terms of the p99 without one.
const LIMIT: f64 = 1.5;

#[tokio::main]
async fn main() -> Result<()> {
    if worker::is_worker() {
        return worker::work().await;
    }
    let (lengths, rounds) = if is_quick() {
        (Lengths::seconds(10, 5), 2)
    } else {
        (Lengths::seconds(90, 20), 2)
    };
    let (mut without, mut with) = (Vec::new(), Vec::new());
    for round in 0..rounds {
        // In turns, so that neither is always measured first.
        let mut order = [Last::Harmless, Last::Suspect];
        order.rotate_left(round % 2);
        for last in order {
            let run = run::run(last, lengths).await?;
            match last {
                Last::Harmless => without.push(run),
                Last::Suspect => with.push(run),
            }
        }
    }
    let mut report = Report::new("suspect");
    for (tier, queue) in TIERS {
        compare_waits(&mut report, tier, queue, &without, &with);
    }
    report_last_tasks(&mut report, &without, &with);
    check_critical_tasks(&mut report, without.iter().chain(&with));
    check_suspects(&mut report, &with);
    report.finish()
}

fn compare_waits(report: &mut Report, tier: &str, queue: &str, without: &[Run], with: &[Run]) {
    let of = |runs: &[Run], phase: Option<Phase>| {
        let counted = runs
            .iter()
            .flat_map(|run| &run.waits)
            .filter(|it| it.tier == tier && !it.was_held_by_killed)
            .filter(|it| phase.is_none_or(|phase| it.phase == phase));
        Distribution::of(counted.map(|it| it.waited))
    };
    let mut table = Distributions::new(format!(
        "From the publish of a critical task to its start, {queue} queue"
    ));
    for (name, runs) in [("without a suspect", without), ("with a suspect", with)] {
        table = table.row(name, of(runs, None));
        for (phase, name) in [
            (Phase::Waits, "while the last deferred task waits"),
            (Phase::Runs, "while it runs"),
            (Phase::Ended, "after its end"),
        ] {
            table = table.row(format!("  {name}"), of(runs, Some(phase)));
        }
    }
    let held = with
        .iter()
        .flat_map(|run| &run.waits)
        .filter(|it| it.tier == tier && it.was_held_by_killed);
    let held = Distribution::of(held.map(|it| it.waited));
    report.add(table.row("held by the killed worker: to the last start", held.clone()));

    let p99 = |runs| of(runs, None).quantile(0.99);
    let (before, beside) = (p99(without), p99(with));
    let ratio = beside.as_secs_f64() / before.as_secs_f64();
    report.check(
        format!("critical, {queue}: p99 at most {LIMIT} times that without a suspect"),
        format!(
            "{ratio:.2} times: {beside:.2?}, without {before:.2?}; {} held, {:.2?} at most",
            held.count(),
            held.quantile(1.0)
        ),
        ratio <= LIMIT,
    );
}

/// The tasks that wait behind the long ones, and what becomes of them.
fn report_last_tasks(report: &mut Report, without: &[Run], with: &[Run]) {
    let columns = ["waited", "of it with a free slot", "ran", "then dead after"];
    let mut table = Figures::new("The last deferred task, in seconds", &columns);
    for (name, runs) in [("harmless", without), ("suspect", with)] {
        for run in runs {
            let last = &run.last;
            let dead_after = last.dead_after.unwrap_or_default();
            let figures = [
                last.waited,
                last.waited_with_free_slot,
                last.ran,
                dead_after,
            ];
            table = table.row(name, &figures.map(|it| it.as_secs_f64()));
        }
    }
    report.add(table);
}

fn check_critical_tasks<'a>(report: &mut Report, runs: impl Iterator<Item = &'a Run>) {
    let (mut published, mut ran, mut twice) = (0, 0, 0);
    for run in runs {
        published += run.published;
        ran += run.waits.len();
        let others = run.waits.iter().filter(|it| !it.was_held_by_killed);
        twice += others.filter(|it| it.starts > 1).count();
    }
    report.check(
        "every critical task runs, and twice only if the killed worker held it",
        format!("{ran} of {published} ran, {twice} others ran twice"),
        ran == published && twice == 0,
    );
}

fn check_suspects(report: &mut Report, with: &[Run]) {
    let dead = with.iter().filter_map(|run| run.last.dead_after).count();
    report.check(
        "every suspect kills one worker and is a dead letter then",
        format!("{dead} of {} with crash budget 1", with.len()),
        dead == with.len(),
    );
}
