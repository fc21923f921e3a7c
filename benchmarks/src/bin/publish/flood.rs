//! Critical publishes beside as many publishes into a bulk tier as the broker takes.
//!
//! The tiers are in groups of their own. What counts is how much a critical publish suffers from a flood of its own
//! process, compared with a critical publish of another process beside the same flood. Either way two processes are
//! connected: one floods, and one of the two publishes the critical tasks.
//!
//! Nothing consumes the bulk queue, because a consumer would take processor time from the contenders. The turns
//! are short instead, each on a virtual host of its own, so the queue stays small enough for the broker's memory.
//!
//! If `TIERLINE_BEFORE` is the path of the program `publish` of an older tree, built with this file, its
//! processes take turns with those of this tree.

use std::ffi::OsString;
use std::fmt;
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use futures_util::stream::{self, StreamExt};
use tierline::task::PublishRequest;
use tierline::{Tierline, Topology};
use tierline_benchmarks::{Distribution, Distributions, Figures, Report, median};
use tierline_testbed::vhost;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::process::{Child, ChildStdout, Command};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until, timeout};

/// The types of queues, of the bulk tier in turns and of the critical tiers side by side.
const QUEUES: [&str; 2] = ["quorum", "classic"];
/// The critical tiers take turns, so each gets a task every 10 ms.
const PUBLISH_EVERY: Duration = Duration::from_millis(5);
/// How long the flood goes on before anything counts: queues, windows and allocators have settled by then.
const WARM_UP: Duration = Duration::from_millis(1_500);
/// How long a process may take to get ready, and to end after its time.
const SOON: Duration = Duration::from_secs(30);
/// The p99 beside a flood of the same process, in terms of the p99 beside a flood of another.
const LIMIT: f64 = 1.2;

const URL: &str = "TIERLINE_FLOOD_URL";
const BULK: &str = "TIERLINE_FLOOD_BULK";
const DUTY: &str = "TIERLINE_FLOOD_DUTY";
const MILLISECONDS: &str = "TIERLINE_FLOOD_MILLISECONDS";
const BEFORE: &str = "TIERLINE_BEFORE";

#[derive(Clone, Copy, PartialEq, Eq)]
enum Contender {
    /// Nothing but critical publishes.
    Calm,
    /// Flood and critical publishes in two processes.
    Apart,
    /// Flood and critical publishes in one process.
    Together,
    /// The same with the program of an older tree.
    TogetherBefore,
}

impl Contender {
    /// What the two processes do.
    fn duties(self) -> [Duty; 2] {
        let idle = Duty::default();
        let (flood, critical) = (
            Duty {
                floods: true,
                ..idle
            },
            Duty {
                is_critical: true,
                ..idle
            },
        );
        match self {
            Self::Calm => [idle, critical],
            Self::Apart => [flood, critical],
            Self::Together | Self::TogetherBefore => [
                Duty {
                    floods: true,
                    is_critical: true,
                },
                idle,
            ],
        }
    }

    fn program(self) -> Result<OsString> {
        match self {
            Self::TogetherBefore => std::env::var_os(BEFORE).context("there is a tree before"),
            _ => Ok(std::env::current_exe()?.into()),
        }
    }
}

impl fmt::Display for Contender {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            Self::Calm => "no flood",
            Self::Apart => "flood of another process",
            Self::Together => "flood of the same process",
            Self::TogetherBefore => "flood of the same process, tree before",
        })
    }
}

/// What a process is there for.
#[derive(Clone, Copy, Default)]
struct Duty {
    floods: bool,
    is_critical: bool,
}

/// What a turn of a contender found.
#[derive(Default)]
struct Turn {
    /// The messages of the flood that were confirmed in a second.
    rate: f64,
    /// For each type of the critical queue, from the time that a publish was due to its confirm.
    waits: [Vec<Duration>; 2],
    /// How late the publishes began.
    late: Vec<Duration>,
}

pub(crate) async fn measure(report: &mut Report, is_quick: bool) -> Result<()> {
    // Many short rounds: what disturbs the machine for a while spoils only some of them.
    let (rounds, length) = match is_quick {
        true => (2, Duration::from_secs(2)),
        false => (20, Duration::from_secs(3)),
    };
    let mut contenders = vec![Contender::Apart, Contender::Together];
    if std::env::var_os(BEFORE).is_some() {
        contenders.push(Contender::TogetherBefore);
    }
    for bulk in QUEUES {
        let calm = take_turn(Contender::Calm, bulk, length).await?;
        let mut turns: Vec<Vec<Turn>> = contenders.iter().map(|_| Vec::new()).collect();
        for round in 0..rounds {
            // In turns, so that none is always measured first.
            for step in 0..contenders.len() {
                let index = (round + step) % contenders.len();
                let turn = take_turn(contenders[index], bulk, length).await?;
                let p99 = turn.waits.each_ref().map(|waits| p99([waits]));
                eprintln!(
                    "flood into {bulk}, round {}: {} p99 {p99:.1?}, {:.0} msg/s",
                    round + 1,
                    contenders[index],
                    turn.rate
                );
                turns[index].push(turn);
            }
        }
        let mut rows = vec![(Contender::Calm, vec![calm])];
        rows.extend(contenders.iter().copied().zip(turns));
        add_tables(report, bulk, &rows);
        add_checks(report, bulk, &rows);
    }
    Ok(())
}

fn add_tables(report: &mut Report, bulk: &str, rows: &[(Contender, Vec<Turn>)]) {
    for (index, queue) in QUEUES.iter().enumerate() {
        let mut waits = Distributions::new(format!(
            "A publish to a critical {queue} queue, from the time it was due, and a flood into a {bulk} queue"
        ));
        for (contender, turns) in rows {
            let all = turns.iter().flat_map(|turn| &turn.waits[index]);
            waits = waits.row(contender.to_string(), Distribution::of(all.copied()));
        }
        report.add(waits);
    }
    let columns = ["confirmed/s", "late starts, p50 ms", "late starts, p99 ms"];
    let mut floods = Figures::new(format!("The flood into a {bulk} queue"), &columns);
    for (contender, turns) in rows {
        let rates: Vec<_> = turns.iter().map(|turn| turn.rate).collect();
        let late = turns.iter().flat_map(|turn| &turn.late);
        let late = Distribution::of(late.copied());
        let late = [0.5, 0.99].map(|share| late.quantile(share).as_secs_f64() * 1_000.0);
        let figures = [median(&rates).round(), late[0], late[1]];
        floods = floods.row(contender.to_string(), &figures);
    }
    report.add(floods);
}

fn add_checks(report: &mut Report, bulk: &str, rows: &[(Contender, Vec<Turn>)]) {
    let of = |wanted: Contender| {
        let row = rows.iter().find(|(contender, _)| *contender == wanted);
        row.map(|(_, turns)| turns)
    };
    let (Some(apart), Some(together)) = (of(Contender::Apart), of(Contender::Together)) else {
        return;
    };
    for (index, queue) in QUEUES.iter().enumerate() {
        let compare = |turns: &[Turn]| {
            let pairs = turns.iter().zip(apart);
            let ratios = pairs.map(|(own, other)| {
                let [own, other] = [own, other].map(|turn| p99([&turn.waits[index]]));
                own.as_secs_f64() / other.as_secs_f64()
            });
            let [own, other] =
                [turns, apart].map(|turns| p99(turns.iter().map(|it| &it.waits[index])));
            let all = own.as_secs_f64() / other.as_secs_f64();
            (median(&ratios.collect::<Vec<_>>()), all)
        };
        let (ratio, all) = compare(together);
        let mut found = format!("{ratio:.2} (median of rounds), {all:.2} (all rounds)");
        if let Some(before) = of(Contender::TogetherBefore) {
            let (ratio, all) = compare(before);
            found += &format!("; tree before {ratio:.2}, {all:.2}");
        }
        report.check(
            format!(
                "critical {queue}, flood into {bulk} from its process: p99 at most {LIMIT} times that beside another's"
            ),
            found,
            ratio <= LIMIT,
        );
    }
}

fn p99<'a>(times: impl IntoIterator<Item = &'a Vec<Duration>>) -> Duration {
    Distribution::of(times.into_iter().flatten().copied()).quantile(0.99)
}

async fn take_turn(contender: Contender, bulk: &str, length: Duration) -> Result<Turn> {
    let vhost = vhost().await;
    let program = contender.program()?;
    let mut processes = Vec::new();
    for duty in contender.duties() {
        // One after the other: both declare the queues.
        processes.push(Process::start(&program, vhost.amqp_url(), bulk, duty, length).await?);
    }
    for process in &mut processes {
        process.begin().await?;
    }
    let mut turn = Turn::default();
    for process in processes {
        let ended = timeout(WARM_UP + length + SOON, process.read_to_end(&mut turn)).await;
        ended.context("a process did not end")??;
    }
    turn.rate /= length.as_secs_f64();
    Ok(turn)
}

/// A process that this one has started.
struct Process {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Process {
    /// Starts a process, and waits until it can publish.
    async fn start(
        program: &OsString,
        url: &str,
        bulk: &str,
        duty: Duty,
        length: Duration,
    ) -> Result<Self> {
        let duties = [(duty.floods, FLOODS), (duty.is_critical, CRITICAL)];
        let duties = duties.iter().filter_map(|(has, name)| has.then_some(*name));
        let mut child = Command::new(program)
            .env(URL, url)
            .env(BULK, bulk)
            .env(DUTY, duties.collect::<Vec<_>>().join(" "))
            .env(MILLISECONDS, length.as_millis().to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()?;
        let output = child.stdout.take().context("a process has an output")?;
        let mut lines = BufReader::new(output).lines();
        let first = timeout(SOON, lines.next_line()).await;
        let first = first.context("a process did not get ready")??;
        ensure!(first.as_deref() == Some(READY), "a process is not ready");
        Ok(Self { child, lines })
    }

    async fn begin(&mut self) -> Result<()> {
        let input = self.child.stdin.as_mut();
        let input = input.context("a process has an input")?;
        input.write_all(b"begin\n").await?;
        Ok(())
    }

    /// Adds what the process prints.
    async fn read_to_end(mut self, turn: &mut Turn) -> Result<()> {
        while let Some(line) = self.lines.next_line().await? {
            let words: Vec<_> = line.split(' ').collect();
            let nanoseconds = |word: &str| word.parse().map(Duration::from_nanos);
            match words[..] {
                [CONFIRMED, count] => turn.rate += count.parse::<f64>()?,
                [WAITED, queue, waited, late] => {
                    let queue = QUEUES.iter().position(|it| *it == queue);
                    let index = queue.context("a type of queue")?;
                    turn.waits[index].push(nanoseconds(waited)?);
                    turn.late.push(nanoseconds(late)?);
                }
                _ => bail!("a process printed {line:?}"),
            }
        }
        let status = self.child.wait().await?;
        ensure!(status.success(), "a process failed");
        Ok(())
    }
}

const READY: &str = "ready";
const CONFIRMED: &str = "confirmed";
const WAITED: &str = "waited";
const FLOODS: &str = "floods";
const CRITICAL: &str = "critical";

/// Whether this process was started for a turn.
pub(crate) fn is_child() -> bool {
    std::env::var_os(DUTY).is_some()
}

/// Floods, or publishes critical tasks, or both, and prints what it found.
pub(crate) async fn run_child() -> Result<()> {
    let topology = Topology::parse(map(&std::env::var(BULK)?))?;
    let builder = Tierline::builder(topology).amqp(std::env::var(URL)?);
    let app = builder.connect().await?;
    let duty = std::env::var(DUTY)?;
    let has = |name| duty.split(' ').any(|it| it == name);
    let length = Duration::from_millis(std::env::var(MILLISECONDS)?.parse()?);
    // Opens the connections and channels of all groups.
    for _ in 0..10 {
        for task in QUEUES.into_iter().chain(["bulk"]) {
            app.publisher().publish(request(task)).await?;
        }
    }
    println!("{READY}");
    let mut input = BufReader::new(tokio::io::stdin()).lines();
    input.next_line().await?.context("told to begin")?;

    let confirmed = Arc::new(AtomicU64::new(0));
    let flood = has(FLOODS).then(|| tokio::spawn(flood(app.clone(), Arc::clone(&confirmed))));
    sleep(WARM_UP).await;
    let before = confirmed.load(Ordering::Relaxed);
    let mut waits = Vec::new();
    if has(CRITICAL) {
        waits = tokio::spawn(publish_critical(app.clone(), length)).await??;
    } else {
        sleep(length).await;
    }
    let after = confirmed.load(Ordering::Relaxed);
    if let Some(flood) = flood {
        ensure!(!flood.is_finished(), "the flood ended: {:?}", flood.await?);
        flood.abort();
        println!("{CONFIRMED} {}", after - before);
    }
    for (queue, waited, late) in waits {
        println!("{WAITED} {queue} {} {}", waited.as_nanos(), late.as_nanos());
    }
    Ok(())
}

/// Publishes without end, and counts what is confirmed.
async fn flood(app: Tierline, confirmed: Arc<AtomicU64>) -> Result<()> {
    let requests = stream::repeat_with(|| request("bulk"));
    let mut outcomes = std::pin::pin!(app.publish_many(requests));
    while let Some(outcome) = outcomes.next().await {
        outcome?;
        confirmed.fetch_add(1, Ordering::Relaxed);
    }
    Ok(())
}

/// Publishes at a fixed pace, whether or not the earlier publishes are confirmed. For each: the type of its queue, how
/// long after its due time it was confirmed, and how long after it was begun.
async fn publish_critical(
    app: Tierline,
    length: Duration,
) -> Result<Vec<(&'static str, Duration, Duration)>> {
    let publisher = app.publisher();
    let begin = Instant::now();
    let mut publishes = JoinSet::new();
    let mut due = begin;
    for queue in QUEUES.into_iter().cycle() {
        if due >= begin + length {
            break;
        }
        sleep_until(due).await;
        let publisher = Arc::clone(&publisher);
        publishes.spawn(async move {
            let late = due.elapsed();
            publisher.publish(request(queue)).await?;
            anyhow::Ok((queue, due.elapsed(), late))
        });
        due += PUBLISH_EVERY;
    }
    let mut waits = Vec::new();
    while let Some(waited) = publishes.join_next().await {
        waits.push(waited??);
    }
    Ok(waits)
}

/// A task of 256 bytes of JSON.
fn request(task: &str) -> PublishRequest {
    let (before, after) = (r#"{"text":""#, r#""}"#);
    let text = "x".repeat(256 - before.len() - after.len());
    PublishRequest::named(task, format!("{before}{text}{after}").into_bytes())
}

/// The critical tiers are named like their types; the classic one has priorities.
fn map(bulk: &str) -> String {
    format!(
        r#"
        app = "bench"
        [tiers.classic]
        queue = "classic"
        [tiers.quorum]
        queue = "quorum"
        [tiers.bulk]
        queue = "{bulk}"
        [groups.urgent]
        tiers = ["classic", "quorum"]
        concurrency = 4
        [groups.bulk]
        tiers = ["bulk"]
        concurrency = 4
        [tasks]
        classic = "classic"
        quorum = "quorum"
        bulk = "bulk"
        "#
    )
}
