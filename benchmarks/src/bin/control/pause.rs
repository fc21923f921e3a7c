//! A tier or a task is paused and resumed under load, over two processes.

use std::time::Duration;

use anyhow::Result;
use tierline_benchmarks::{Figures, Report};
use tokio::time::sleep;

use crate::child::{Stream, Work, end_all};
use crate::log::{What, now};
use crate::scene::{Account, Scene, Servers, homes, print_load, starts, within};

const PROCESSES: usize = 2;
const SLOTS: usize = 4;
const MILLISECONDS: u64 = 20;
/// How many of each task are published a second while all this happens, beside those that wait.
const EACH_SECOND: u32 = 40;
const KNOWN: Duration = Duration::from_secs(2);
const LIMIT: Duration = Duration::from_secs(300);
/// What a rate may be below that of before.
const AS_BEFORE: f64 = 0.9;

struct Amounts {
    /// How long rates are measured, before the pause and after it.
    window: Duration,
    paused: Duration,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Subject {
    Tier,
    Task,
}

pub(crate) async fn measure(report: &mut Report, servers: &Servers, is_quick: bool) -> Result<()> {
    print_load("pause");
    let seconds = Duration::from_secs;
    let amounts = match is_quick {
        true => Amounts {
            window: seconds(3),
            paused: seconds(5),
        },
        false => Amounts {
            window: seconds(10),
            paused: seconds(15),
        },
    };
    let columns = [
        "last start after, ms",
        "a second before",
        "a second after",
        "deliveries of each task",
    ];
    let mut figures = Figures::new(
        format!("A pause of {:?} over {PROCESSES} processes", amounts.paused),
        &columns,
    );
    for home in homes() {
        for subject in [Subject::Tier, Subject::Task] {
            let row = one(report, servers, home, subject, &amounts).await?;
            figures = figures.row(format!("{home}, {subject:?}"), &row);
        }
    }
    report.add(figures);
    Ok(())
}

/// A paused tier is the upper one of a strict group; a paused task shares its tier with the other one.
fn map(home: &str, subject: Subject) -> String {
    let other = match subject {
        Subject::Tier => "lower",
        Subject::Task => "upper",
    };
    format!(
        r#"
        app = "pause"
        [tiers.upper]
        queue = "{home}"
        [tiers.lower]
        queue = "{home}"
        [groups.all]
        tiers = ["upper", "lower"]
        order = "strict"
        concurrency = {SLOTS}
        prefetch = 4
        [tasks]
        paused = "upper"
        other = "{other}"
        "#
    )
}

async fn one(
    report: &mut Report,
    servers: &Servers,
    home: &str,
    subject: Subject,
    amounts: &Amounts,
) -> Result<[f64; 4]> {
    let name = format!("pause of a {subject:?}, {home}").to_lowercase();
    let mut scene = Scene::set(servers, &map(home, subject)).await?;
    let waiting = fill(&scene, subject, amounts).await?;
    let workers = scene.workers(PROCESSES).await?;
    let publisher = scene.publisher(Stream {
        tasks: vec!["paused".into(), "other".into()],
        first: waiting,
        each_second: EACH_SECOND,
        milliseconds: MILLISECONDS,
    })?;
    scene.started("paused", 50, LIMIT).await?;
    sleep(amounts.window).await;

    let control = scene.app.control()?.by("ada");
    let (pause, resume) = match subject {
        Subject::Tier => (control.pause_tier("upper"), control.resume_tier("upper")),
        Subject::Task => (control.pause_task("paused"), control.resume_task("paused")),
    };
    let asked = now();
    pause.because("a benchmark").await?;
    let paused = now();
    sleep(amounts.paused).await;
    let resuming = now();
    resume.because("it is over").await?;
    let resumed = now();
    sleep(KNOWN + amounts.window).await;
    publisher.end().await?;
    let sent = scene.log.count(What::Sent, "paused")?;
    let all = 2 * (waiting + sent);
    let settled = async |scene: &mut Scene| {
        let settled =
            scene.log.count(What::Done, "paused")? + scene.log.count(What::Done, "other")?;
        Ok(settled >= all)
    };
    // What does not come is counted as lost below.
    let settled = scene.until("all are settled", LIMIT, settled).await;
    if let Err(error) = settled {
        println!("{name}: {error:#}");
    }
    end_all(workers).await?;

    let lines = scene.log.read()?;
    let (subjects, others) = (starts(lines, "paused"), starts(lines, "other"));
    let while_paused = subjects
        .iter()
        .filter(|it| **it > paused && **it < resuming);
    let last = while_paused.max().map_or(Duration::ZERO, |it| *it - paused);
    let rates = |times: &[Duration]| {
        let before = within(times, asked - amounts.window, amounts.window);
        let after = within(times, resumed + KNOWN, amounts.window);
        [before, after].map(|count| count as f64 / amounts.window.as_secs_f64())
    };
    let (of_subject, of_others) = (rates(&subjects), rates(&others));
    let all_before = of_subject[0] + of_others[0];
    let all_after = of_subject[1] + of_others[1];
    let others_meanwhile = within(&others, paused + KNOWN, resuming - paused - KNOWN);
    let mut accounts = Vec::new();
    for task in ["paused", "other"] {
        accounts.push(Account::of(lines, task, 0..waiting + sent));
    }
    let not_sent = lines.iter().filter(|it| it.what == What::NotSent).count();
    let (left, dead) = scene.left().await?;

    report.check(
        format!("{name}: no start later than 2 s after the answer"),
        format!("the last after {:.2} s", last.as_secs_f64()),
        last <= KNOWN,
    );
    report.check(
        format!("{name}: others go on meanwhile"),
        format!("{others_meanwhile} started"),
        others_meanwhile > 0,
    );
    report.check(
        format!(
            "{name}: 2 s after it is resumed it starts as fast as before, at least {AS_BEFORE}"
        ),
        format!("{:.0}/s, {:.0}/s before", of_subject[1], of_subject[0]),
        of_subject[1] >= AS_BEFORE * of_subject[0] && of_subject[0] > 0.0,
    );
    report.check(
        format!("{name}: 2 s after it is resumed all together start as fast as before, at least {AS_BEFORE}"),
        format!("{all_after:.0}/s, {all_before:.0}/s before"),
        all_after >= AS_BEFORE * all_before,
    );
    let lost: usize = accounts.iter().map(|it| it.lost).sum();
    let twice: usize = accounts.iter().map(|it| it.twice).sum();
    report.check(
        format!("{name}: each task is settled once, and nothing is left"),
        format!("{lost} of {all} not, {twice} twice, {left} left, {not_sent} not published"),
        lost == 0 && twice == 0 && left == 0 && not_sent == 0,
    );
    let faults: Vec<_> = accounts.iter().flat_map(|it| &it.faults).collect();
    report.check(
        format!("{name}: no crash counts, no dead letters"),
        format!("{faults:?}, {dead} dead letters"),
        faults.is_empty() && dead == 0,
    );
    let mut each = 0.0;
    if home != "postgres" {
        let deliveries = scene.deliveries().await?;
        each = deliveries.values().sum::<u64>() as f64 / all as f64;
        report.check(
            format!("{name}: each task is delivered at most 1.05 times"),
            format!("{each:.3}"),
            each <= 1.05,
        );
    }
    let last = last.as_secs_f64() * 1_000.0;
    Ok([last, of_subject[0], of_subject[1], each])
}

/// Publishes enough of both tasks, one after the other, for the time of the run. Returns how many of each.
async fn fill(scene: &Scene, subject: Subject, amounts: &Amounts) -> Result<usize> {
    let slots = 1_000 * PROCESSES / MILLISECONDS as usize * SLOTS;
    let working = match subject {
        // The upper tier has all slots but while it is paused.
        Subject::Tier => 2 * amounts.window + 2 * KNOWN,
        // A message of the paused task that is met is stored, so its tier gives twice as many tasks then.
        Subject::Task => amounts.window + amounts.paused + 2 * KNOWN,
    };
    let count = slots * working.as_secs() as usize;
    let requests = (0..count).flat_map(|number| {
        let work = Work {
            number,
            milliseconds: MILLISECONDS,
            customer: String::new(),
        };
        ["paused", "other"].map(|task| work.request(task))
    });
    scene.publish(requests).await?;
    Ok(count)
}
