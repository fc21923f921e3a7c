//! One task of each customer at a time, with many tasks of one customer in front of all others.
//!
//! The time that the other customers take is measured without kills, in turns with the same tasks alone: from when the workers
//! take tasks until the last one of the others has ended. Then workers are killed while all of it runs to the end.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use anyhow::{Context, Result};
use tierline_benchmarks::{Comparison, Figures, Report};
use tokio::time::{Instant, sleep};

use crate::child::{Work, end_all};
use crate::log::{Line, What, now};
use crate::scene::{Account, Scene, Servers, homes, print_load};

const PROCESSES: usize = 3;
const MILLISECONDS: u64 = 10;
/// A shorter handler while workers are killed: the tasks of one customer run one after another.
const SHORT_MILLISECONDS: u64 = 1;
const KILL_EVERY: Duration = Duration::from_secs(4);
const LIMIT: Duration = Duration::from_secs(3_600);
const MANY: &str = "ada";
/// The most of the time alone that the others may take beside the many.
const SLOWER: f64 = 1.3;

struct Amounts {
    /// How many tasks of one customer are in front.
    many: usize,
    others: usize,
    customers: usize,
    rounds: usize,
    kills: usize,
}

pub(crate) async fn measure(report: &mut Report, servers: &Servers, is_quick: bool) -> Result<()> {
    print_load("keys");
    let amounts = match is_quick {
        true => Amounts {
            many: 8_000,
            others: 2_000,
            customers: 200,
            rounds: 1,
            kills: 3,
        },
        false => Amounts {
            many: 40_000,
            others: 10_000,
            customers: 1_000,
            rounds: 3,
            kills: 15,
        },
    };
    let mut figures = Figures::new(
        "One task of each customer at a time, while workers are killed",
        &["kills", "runs", "seconds"],
    );
    for home in homes() {
        let name = format!("one of each customer at a time, {home}");
        let at_once = RefCell::new(Vec::new());
        let beside = async |many: usize| {
            let (took, twice) = others(servers, home, many, &amounts).await?;
            at_once.borrow_mut().extend(twice);
            Ok(amounts.others as f64 / took.as_secs_f64())
        };
        let many = format!("{} of one customer in front", amounts.many);
        let title = format!("{name}: {} tasks of the other customers", amounts.others);
        let measured = Comparison::new(title, "tasks/s")
            .contender("alone", async || beside(0).await)
            .contender(many, async || beside(amounts.many).await)
            .at_least(1.0 / SLOWER, "alone")
            .run(amounts.rounds)
            .await?;
        report.add(measured);
        check_never_two(report, &name, &at_once.into_inner());
        let row = with_kills(report, servers, home, &name, &amounts).await?;
        figures = figures.row(home, &row);
    }
    report.add(figures);
    Ok(())
}

fn map(home: &str) -> String {
    // What a dead process held comes back after it. Of rows of a tier on the broker it is the default.
    let lease = match home {
        "postgres" => "lease = \"10s\"",
        _ => "",
    };
    format!(
        r#"
        app = "keys"
        [tiers.all]
        queue = "{home}"
        {lease}
        [groups.all]
        tiers = ["all"]
        concurrency = 8
        prefetch = 4
        [tasks]
        keyed = {{ tier = "all", limit = {{ running = 1, per = "customer" }} }}
        "#
    )
}

/// How long the tasks of the other customers take behind so many of one, and what ran at once although it must not.
async fn others(
    servers: &Servers,
    home: &str,
    many: usize,
    amounts: &Amounts,
) -> Result<(Duration, Vec<String>)> {
    let mut scene = Scene::set(servers, &map(home)).await?;
    fill(&scene, many, amounts, MILLISECONDS).await?;
    let workers = scene.workers(PROCESSES).await?;
    let ready = now();
    let wanted = amounts.others;
    let are_done = async |scene: &mut Scene| {
        let lines = scene.log.read()?.iter();
        let others = lines.filter(|it| it.what == What::End && it.about != MANY);
        Ok(others.count() >= wanted)
    };
    let what = "the tasks of the other customers end";
    scene.until(what, LIMIT, are_done).await?;
    let lines = scene.log.read()?.iter();
    let ends = lines.filter(|it| it.what == What::End && it.about != MANY);
    let last = ends.map(|it| it.at).max().context("none has ended")?;
    end_all(workers).await?;
    let ran = scene.log.count(What::End, "keyed")?;
    eprintln!("  {} of the many ran meanwhile", ran - wanted);
    Ok((last - ready, at_once(scene.log.read()?)))
}

/// All tasks run to their end while workers are killed.
async fn with_kills(
    report: &mut Report,
    servers: &Servers,
    home: &str,
    name: &str,
    amounts: &Amounts,
) -> Result<[f64; 3]> {
    let mut scene = Scene::set(servers, &map(home)).await?;
    fill(&scene, amounts.many, amounts, SHORT_MILLISECONDS).await?;
    let all = amounts.many + amounts.others;
    let begin = Instant::now();
    let mut workers = scene.workers(PROCESSES).await?;
    for _ in 0..amounts.kills {
        sleep(KILL_EVERY).await;
        workers.remove(0).kill(&scene.log).await?;
        workers.extend(scene.workers(1).await?);
    }
    // A process may be killed after a task was settled and before it writes that: whether any was lost is seen from those that
    // ended, and from what is left.
    let mut ended = BTreeSet::new();
    let mut read = 0;
    let is_over = async |scene: &mut Scene| {
        let lines = scene.log.read()?;
        let new = lines[read..].iter().filter(|it| it.what == What::End);
        ended.extend(new.map(|it| it.number));
        read = lines.len();
        Ok(ended.len() >= all && scene.left().await?.0 == 0)
    };
    if let Err(error) = scene.until("all have ended", LIMIT, is_over).await {
        println!("{name}: {error:#}");
    }
    let took = begin.elapsed();
    end_all(workers).await?;
    let lines = scene.log.read()?;
    let twice = at_once(lines);
    let account = Account::of(lines, "keyed", 0..all);
    let lost = all - ended.len();
    let runs = lines.iter().filter(|it| it.what == What::Start).count();
    let (left, dead) = scene.left().await?;
    check_never_two(report, &format!("{name}, {} kills", amounts.kills), &twice);
    report.check(
        format!(
            "{name}, {} kills: each task ends, and nothing is left",
            amounts.kills
        ),
        format!(
            "{lost} not, {left} left, {dead} dead letters, {} run again, {:?}",
            account.twice, account.faults
        ),
        lost == 0 && left == 0 && dead == 0,
    );
    Ok([amounts.kills as f64, runs as f64, took.as_secs_f64()])
}

fn check_never_two(report: &mut Report, name: &str, found: &[String]) {
    let what = match found.first() {
        None => "never".to_owned(),
        Some(first) => format!("{} times, first {first}", found.len()),
    };
    report.check(format!("{name}: never two"), what, found.is_empty());
}

/// Those of the many first, and then those of the other customers in turns.
async fn fill(scene: &Scene, many: usize, amounts: &Amounts, milliseconds: u64) -> Result<()> {
    let request = |number: usize, customer: String| {
        let work = Work {
            number,
            milliseconds,
            customer,
        };
        work.request("keyed")
    };
    let in_front = (0..many).map(|number| request(number, MANY.into()));
    scene.publish(in_front).await?;
    let customers = amounts.customers - 1;
    let others = (0..amounts.others)
        .map(|number| request(many + number, format!("customer-{}", number % customers)));
    scene.publish(others).await
}

/// The runs that began while another one of the same customer was on.
fn at_once(lines: &[Line]) -> Vec<String> {
    let mut running: BTreeMap<&str, Vec<&Line>> = BTreeMap::new();
    let mut found = Vec::new();
    for line in lines {
        match line.what {
            What::Start => {
                let running = running.entry(&line.about).or_default();
                if let Some(other) = running.last() {
                    found.push(format!(
                        "{} in {} {} ms after {} in {}, both of {}",
                        line.number,
                        line.process,
                        (line.at.saturating_sub(other.at)).as_millis(),
                        other.number,
                        other.process,
                        line.about
                    ));
                }
                running.push(line);
            }
            What::End => {
                let running = running.entry(&line.about).or_default();
                let is_it = |it: &&Line| it.number == line.number && it.process == line.process;
                if let Some(index) = running.iter().position(is_it) {
                    running.remove(index);
                }
            }
            What::Killed => {
                for running in running.values_mut() {
                    running.retain(|it| it.process != line.process);
                }
            }
            _ => {}
        }
    }
    found
}
