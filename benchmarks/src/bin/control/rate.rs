//! A rate over three processes: never more than it allows, nearly all of it, and no other tier slower.
//!
//! The limited tasks are in the upper tier of a strict group, all of them published before the workers begin. The lower tier
//! has a backlog too, so its starts are what the slots are free for. It is compared with the same app where the limited tasks
//! are not limited and come at the rate of the limit: in both the slots have the same work.

use std::time::Duration;

use anyhow::Result;
use tierline_benchmarks::{Comparison, Figures, Report};
use tokio::time::sleep;

use crate::child::{Stream, Work, end_all};
use crate::log::{What, most_in_a_second, now};
use crate::scene::{Scene, Servers, homes, print_load, starts, within};

const PROCESSES: usize = 3;
const SLOTS: usize = 4;
const RATE: u32 = 100;
const BURST: usize = 10;
/// How long a handler of either task takes.
const LIMITED_MILLISECONDS: u64 = 1;
const OTHER_MILLISECONDS: u64 = 20;
const PREFETCH: usize = 4;
/// How many tasks of a tier a process holds at most, with those that run.
const HELD: usize = SLOTS * (PREFETCH + 1);
const LIMIT: Duration = Duration::from_secs(300);
const UPPER: &str = "rate.upper";
const LOWER: &str = "rate.lower";

struct Amounts {
    backlog: usize,
    length: Duration,
    round: Duration,
    rounds: usize,
}

/// What has the limit.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Subject {
    Tier,
    Task,
}

pub(crate) async fn measure(report: &mut Report, servers: &Servers, is_quick: bool) -> Result<()> {
    print_load("rate");
    let amounts = match is_quick {
        true => Amounts {
            backlog: 5_000,
            length: Duration::from_secs(10),
            round: Duration::from_secs(5),
            rounds: 1,
        },
        false => Amounts {
            backlog: 100_000,
            length: Duration::from_secs(60),
            round: Duration::from_secs(15),
            rounds: 3,
        },
    };
    let columns = [
        "starts",
        "most in 1 s",
        "deliveries of each task",
        "others a second",
    ];
    let title = format!(
        "{RATE}/s with bursts of {BURST} over {PROCESSES} processes for {:?}, {} tasks wait",
        amounts.length, amounts.backlog
    );
    let mut figures = Figures::new(&title, &columns);
    for home in homes() {
        for subject in [Subject::Tier, Subject::Task] {
            let row = one(report, servers, home, subject, &amounts).await?;
            figures = figures.row(format!("{home}, {subject:?}"), &row);
        }
    }
    report.add(figures);
    Ok(())
}

fn map(home: &str, subject: Subject, is_limited: bool) -> String {
    let limit = match is_limited {
        true => format!("limit = {{ rate = \"{RATE}/s\", burst = {BURST} }}"),
        false => String::new(),
    };
    let (of_tier, of_task) = match (subject, is_limited) {
        (Subject::Tier, _) => (limit, String::new()),
        (Subject::Task, true) => (String::new(), format!(", {limit}")),
        (Subject::Task, false) => Default::default(),
    };
    format!(
        r#"
        app = "rate"
        [tiers.upper]
        queue = "{home}"
        {of_tier}
        [tiers.lower]
        queue = "{home}"
        [groups.all]
        tiers = ["upper", "lower"]
        order = "strict"
        concurrency = {SLOTS}
        prefetch = {PREFETCH}
        [tasks]
        limited = {{ tier = "upper"{of_task} }}
        other = "lower"
        "#
    )
}

/// One home with a limit of one subject.
async fn one(
    report: &mut Report,
    servers: &Servers,
    home: &str,
    subject: Subject,
    amounts: &Amounts,
) -> Result<[f64; 4]> {
    let name = format!("{RATE}/s of a {subject:?}, {home}").to_lowercase();
    let mut side = Side::set(servers, &map(home, subject, true)).await?;
    side.fill("limited", amounts.backlog).await?;
    let Alone {
        started,
        most,
        others,
        deliveries,
    } = alone(&mut side, home, subject, amounts).await?;
    let least = amounts.length.as_secs() as f64 * f64::from(RATE) * 0.95;
    report.check(
        format!("{name}: at most {} start in any 1 s", RATE as usize + BURST),
        most.to_string(),
        most <= RATE as usize + BURST,
    );
    report.check(
        format!("{name}: at least {least} start in {:?}", amounts.length),
        started.to_string(),
        started as f64 >= least,
    );
    if let Some(deliveries) = deliveries {
        report.check(
            format!("{name}: each task is delivered at most 1.05 times"),
            format!("{deliveries:.3}"),
            deliveries <= 1.05,
        );
    }
    let reference = Side::set(servers, &map(home, subject, false)).await?;
    let (side, reference) = (&mut side, &mut { reference });
    let measured = Comparison::new(format!("{name}: the other tier"), "tasks/s")
        .contender("without the limit", async || {
            reference.round(amounts, true).await
        })
        .contender("beside the limit", async || {
            side.round(amounts, false).await
        })
        .at_least(0.95, "without the limit")
        .run(amounts.rounds)
        .await?;
    report.add(measured);
    Ok([
        started as f64,
        most as f64,
        deliveries.unwrap_or_default(),
        others,
    ])
}

/// The limit kept for the whole time.
async fn alone(side: &mut Side, home: &str, subject: Subject, amounts: &Amounts) -> Result<Alone> {
    let enough = side.others(amounts.length * 2);
    side.fill("other", enough).await?;
    let workers = side.scene.workers(PROCESSES).await?;
    let ready = now();
    side.scene.started("limited", 1, LIMIT).await?;
    sleep(amounts.length).await;
    let lines = side.scene.log.read()?;
    let mut limited = starts(lines, "limited");
    let begin = limited.iter().min().copied().unwrap_or_default();
    let started = within(&limited, begin, amounts.length);
    let others = within(&starts(lines, "other"), ready, amounts.length);
    let most = most_in_a_second(&mut limited);
    if home == "postgres" {
        end_all(workers).await?;
        return Ok(Alone {
            started,
            most,
            others: others as f64 / amounts.length.as_secs_f64(),
            deliveries: None,
        });
    }
    if subject == Subject::Task {
        // All of them come to be rows, and each is delivered for that.
        let is_parked = async |scene: &mut Scene| Ok(scene.vhost.depth(UPPER).await? == 0);
        let what = "all of a limited task are parked";
        side.scene.until(what, LIMIT, is_parked).await?;
    }
    end_all(workers).await?;
    let deliveries = side.scene.deliveries().await?;
    let lower = deliveries.get(LOWER).copied().unwrap_or_default();
    let upper = deliveries.values().sum::<u64>() - lower;
    let upper_tasks = match subject {
        Subject::Tier => side.scene.log.count(What::Start, "limited")?,
        Subject::Task => side.limited,
    };
    let lower_tasks = side.scene.log.count(What::Start, "other")?;
    // What the processes had prefetched at the end was delivered once and has not started.
    let each = |deliveries: u64, tasks: usize| {
        deliveries.saturating_sub((PROCESSES * HELD) as u64) as f64 / tasks.max(1) as f64
    };
    println!(
        "  {home}, {subject:?}: {upper} deliveries of {upper_tasks} limited tasks, {lower} of {lower_tasks} others"
    );
    Ok(Alone {
        started,
        most,
        others: others as f64 / amounts.length.as_secs_f64(),
        deliveries: Some(each(upper, upper_tasks).max(each(lower, lower_tasks))),
    })
}

/// What was seen while the limit was kept.
struct Alone {
    started: usize,
    /// Within one second.
    most: usize,
    /// How many of the other tier started in a second.
    others: f64,
    /// How often each task was delivered, of the limited ones or the others, whichever was delivered more often. `None`: not on
    /// the broker.
    deliveries: Option<f64>,
}

/// An app with or without the limit.
struct Side {
    scene: Scene,
    /// How many tasks of either name were published.
    limited: usize,
    other: usize,
}

impl Side {
    async fn set(servers: &Servers, map: &str) -> Result<Self> {
        Ok(Self {
            scene: Scene::set(servers, map).await?,
            limited: 0,
            other: 0,
        })
    }

    async fn fill(&mut self, task: &str, count: usize) -> Result<()> {
        let (next, milliseconds) = match task {
            "limited" => (&mut self.limited, LIMITED_MILLISECONDS),
            _ => (&mut self.other, OTHER_MILLISECONDS),
        };
        let first = *next;
        *next += count;
        let requests = (first..first + count).map(|number| {
            let work = Work {
                number,
                milliseconds,
                customer: String::new(),
            };
            work.request(task)
        });
        self.scene.publish(requests).await
    }

    /// How many tasks of the lower tier all slots run in this time at most.
    fn others(&self, length: Duration) -> usize {
        let all = PROCESSES * SLOTS * length.as_millis() as usize;
        all / OTHER_MILLISECONDS as usize
    }

    /// How fast the lower tier starts.
    async fn round(&mut self, amounts: &Amounts, is_reference: bool) -> Result<f64> {
        let started = self.scene.log.count(What::Start, "other")?;
        let wanted = started + self.others(amounts.round * 2);
        self.fill("other", wanted.saturating_sub(self.other))
            .await?;
        let publisher = match is_reference {
            true => Some(self.scene.publisher(Stream {
                tasks: vec!["limited".into()],
                first: self.limited,
                each_second: RATE,
                milliseconds: LIMITED_MILLISECONDS,
            })?),
            false => {
                // As many for each second as in the long run: those of a limited task are to be parked.
                let share = amounts.round.as_secs_f64() / amounts.length.as_secs_f64();
                self.fill("limited", (amounts.backlog as f64 * share) as usize)
                    .await?;
                None
            }
        };
        let workers = self.scene.workers(PROCESSES).await?;
        let ready = now();
        sleep(amounts.round).await;
        let lines = self.scene.log.read()?;
        let others = within(&starts(lines, "other"), ready, amounts.round);
        let limited = within(&starts(lines, "limited"), ready, amounts.round);
        eprintln!("  {limited} limited tasks started meanwhile");
        if let Some(publisher) = publisher {
            publisher.end().await?;
            let sent = self.scene.log.count(What::Sent, "limited")?;
            self.limited = self.limited.max(sent);
        }
        end_all(workers).await?;
        Ok(others as f64 / amounts.round.as_secs_f64())
    }
}
