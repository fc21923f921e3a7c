//! Three processes on fifty schedules of one second, and the one that leads is killed twice.

use std::collections::{BTreeMap, BTreeSet};
use std::process::Stdio;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result};
use futures_util::StreamExt;
use lapin::options::BasicConsumeOptions;
use lapin::types::FieldTable;
use lapin::{Connection, ConnectionProperties};
use tierline::message::Message;
use tierline::observe::Event;
use tierline::schedule::{DUE_AT_HEADER, SCHEDULE_HEADER, Schedules};
use tierline::{Database, Tierline, Topology};
use tierline_benchmarks::{Distribution, Distributions, Report};
use tierline_testbed::{database, vhost};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, BufReader};
use tokio::process::{Child, Command};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::time::{sleep, timeout};

const SCHEDULES: usize = 50;
const PROCESSES: usize = 3;
/// The longest that nobody may lead.
const LONGEST_GAP: Duration = Duration::from_secs(5);
const AMQP: &str = "TIERLINE_BENCH_SCHEDULER_AMQP";
const POSTGRES: &str = "TIERLINE_BENCH_SCHEDULER_POSTGRES";

fn topology() -> Result<Topology> {
    let schedules: String = (0..SCHEDULES)
        .map(|number| {
            format!(
                "[schedules.tick-{number}]\ntask = \"tick\"\ncron = \"* * * * * *\"\nexpires = \"10s\"\n"
            )
        })
        .collect();
    Ok(Topology::parse(super::map(&schedules))?)
}

/// The servers of a scheduler, if this process is to be one.
pub(crate) fn child_servers() -> Option<(String, String)> {
    let variable = |name| std::env::var(name).ok();
    Some((variable(AMQP)?, variable(POSTGRES)?))
}

/// A scheduler that says when it leads, until its input ends.
pub(crate) async fn schedule((amqp, postgres): (String, String)) -> Result<()> {
    let app = Tierline::builder(topology()?)
        .amqp(amqp)
        .postgres(postgres)
        .observe(|event| {
            if let Event::LeaderChanged { leads: true, .. } = event {
                println!("leads");
            }
        })
        .connect()
        .await?;
    let input_ends = async {
        let _ = tokio::io::stdin().read_to_end(&mut Vec::new()).await;
    };
    Ok(app.scheduler()?.until(input_ends).await?)
}

/// A run that came out of the queue.
struct Arrived {
    schedule: String,
    id: String,
    due: u64,
    at: SystemTime,
}

pub(crate) async fn measure(report: &mut Report, is_quick: bool) -> Result<()> {
    let third = Duration::from_secs(if is_quick { 6 } else { 20 });
    let (vhost, database) = (vhost().await, database().await);
    let ours = Database::new(database.url())?;
    ours.migrate().await?;
    let leaders = unbounded_channel();
    let (tell, mut leading) = leaders;
    let mut children = Vec::new();
    for number in 0..PROCESSES {
        let servers = (vhost.amqp_url(), database.url());
        children.push(Some(start(number, servers, tell.clone())?));
    }
    let first = next_leader(&mut leading).await?;
    let arrived = Arc::new(Mutex::new(Vec::new()));
    let consuming = tokio::spawn(consume(vhost.amqp_url().to_owned(), arrived.clone()));

    let mut kills = Vec::new();
    let mut leader = first;
    for _ in 0..2 {
        sleep(third).await;
        let mut child = children[leader].take().context("it was killed before")?;
        kills.push(SystemTime::now());
        child.kill().await?;
        leader = next_leader(&mut leading).await?;
    }
    sleep(third).await;
    for mut child in children.into_iter().flatten() {
        drop(child.stdin.take());
        timeout(Duration::from_secs(10), child.wait()).await??;
    }
    // What was confirmed last is on its way.
    sleep(Duration::from_millis(500)).await;
    consuming.abort();
    let arrived = std::mem::take(&mut *arrived.lock().unwrap_or_else(PoisonError::into_inner));
    let states = Schedules::new(topology()?, ours).list().await?;
    let (published, missed) = states.iter().fold((0, 0), |(published, missed), state| {
        (published + state.published, missed + state.missed)
    });
    judge(report, &arrived, &kills, published, missed);
    Ok(())
}

fn start(
    number: usize,
    (amqp, postgres): (&str, &str),
    tell: UnboundedSender<usize>,
) -> Result<Child> {
    let mut child = Command::new(std::env::current_exe()?)
        .env(AMQP, amqp)
        .env(POSTGRES, postgres)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()?;
    let mut lines = BufReader::new(child.stdout.take().context("no output")?).lines();
    tokio::spawn(async move {
        while let Ok(Some(_)) = lines.next_line().await {
            let _ = tell.send(number);
        }
    });
    Ok(child)
}

async fn next_leader(leading: &mut UnboundedReceiver<usize>) -> Result<usize> {
    let leader = timeout(Duration::from_secs(30), leading.recv()).await;
    leader.context("nobody leads")?.context("nobody is left")
}

async fn consume(url: String, arrived: Arc<Mutex<Vec<Arrived>>>) -> Result<()> {
    let connection = Connection::connect(&url, ConnectionProperties::default()).await?;
    let channel = connection.create_channel().await?;
    let options = BasicConsumeOptions {
        no_ack: true,
        ..BasicConsumeOptions::default()
    };
    let queue = "bench.main".into();
    let mut consumer = channel
        .basic_consume(queue, "".into(), options, FieldTable::default())
        .await?;
    while let Some(delivery) = consumer.next().await {
        let (delivery, at) = (delivery?, SystemTime::now());
        let run = Message::from_wire(&delivery.properties, delivery.data, "main", at)
            .map_err(anyhow::Error::msg)?;
        let id = run.id.to_string();
        let schedule = run.headers.get(SCHEDULE_HEADER).context("no schedule")?;
        let due = run.headers.get(DUE_AT_HEADER).context("no due time")?;
        let due = due.parse::<jiff::Timestamp>()?.as_second().unsigned_abs();
        arrived
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(Arrived {
                schedule: schedule.clone(),
                id,
                due,
                at,
            });
    }
    Ok(())
}

fn judge(
    report: &mut Report,
    arrived: &[Arrived],
    kills: &[SystemTime],
    published: u64,
    missed: u64,
) {
    let seconds = |time: SystemTime| time.duration_since(UNIX_EPOCH).unwrap_or_default();
    // From each kill to the first run that the next leader published.
    let gaps: Vec<(Duration, Duration)> = kills
        .iter()
        .map(|kill| {
            let after = |run: &&Arrived| {
                let late = run.at.duration_since(*kill).unwrap_or_default();
                // What the dead had under way arrives within a moment.
                late > Duration::from_millis(500)
            };
            let next = arrived.iter().filter(after).map(|run| run.at).min();
            (seconds(*kill), seconds(next.unwrap_or(UNIX_EPOCH)))
        })
        .collect();
    let is_in_gap = |due: u64| {
        let due = Duration::from_secs(due);
        // A run is under way for a moment after it is due.
        gaps.iter()
            .any(|(from, to)| due + Duration::from_secs(1) >= *from && due <= *to)
    };

    let mut runs: BTreeMap<&str, BTreeMap<u64, Vec<&str>>> = BTreeMap::new();
    for run in arrived {
        let of_schedule = runs.entry(&run.schedule).or_default();
        of_schedule.entry(run.due).or_default().push(&run.id);
    }
    let first = arrived.iter().map(|run| run.due).min().unwrap_or_default();
    let last = arrived.iter().map(|run| run.due).max().unwrap_or_default();
    let due = (last - first + 1) * SCHEDULES as u64;
    let distinct: u64 = runs.values().map(|runs| runs.len() as u64).sum();
    let missing_outside = runs
        .values()
        .flat_map(|runs| (first..=last).filter(|due| !runs.contains_key(due) && !is_in_gap(*due)))
        .count();
    let twice = runs
        .values()
        .flat_map(|runs| runs.iter())
        .filter(|(_, ids)| ids.len() > 1);
    let mut twice_outside = 0;
    let mut twice_in_all = 0;
    let mut other_ids = 0;
    for (due, ids) in twice {
        twice_in_all += 1;
        twice_outside += usize::from(!is_in_gap(*due));
        other_ids += usize::from(ids.iter().collect::<BTreeSet<_>>().len() > 1);
    }
    let lateness = arrived
        .iter()
        .filter(|run| !is_in_gap(run.due))
        .map(|run| seconds(run.at).saturating_sub(Duration::from_secs(run.due)));
    let title = format!(
        "{SCHEDULES} schedules of one second, {PROCESSES} processes, the leader killed twice"
    );
    report.add(
        Distributions::new(title).row("due to arrival, no kill near", Distribution::of(lateness)),
    );

    for (from, to) in &gaps {
        let gap = to.saturating_sub(*from);
        report.check(
            format!(
                "from kill -9 to the next run under {} s",
                LONGEST_GAP.as_secs()
            ),
            format!("{:.2} s", gap.as_secs_f64()),
            !gap.is_zero() && gap < LONGEST_GAP,
        );
    }
    report.check(
        "no run is missing outside the gaps",
        format!("{missing_outside} of {due} due, {distinct} came"),
        missing_outside == 0 && runs.len() == SCHEDULES,
    );
    report.check(
        "inside, what did not come is counted as missed",
        format!("{} did not come, {missed} counted", due - distinct),
        missed >= due - distinct
            && published + missed >= due
            && missed - (due - distinct) <= 2 * SCHEDULES as u64,
    );
    report.check(
        "only runs in flight at a kill come twice",
        format!("{twice_in_all} twice, {twice_outside} of them elsewhere"),
        twice_outside == 0,
    );
    report.check(
        "what comes twice has the same id",
        format!("{other_ids} had another"),
        other_ids == 0,
    );
}
