//! A snapshot that somebody holds open: nobody can remove the entries of rows that were deleted since.
//!
//! Claims begin where rows were last seen, so the same run shows that tasks in front of that are found soon.

use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result};
use futures_util::{StreamExt, stream};
use sqlx::{AssertSqlSafe, Connection, Executor, PgConnection};
use tierline::task::PublishRequest;
use tierline::{Registry, Tierline, Topology};
use tierline_benchmarks::{Figures, Report};
use tokio::sync::mpsc;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep, timeout};

use crate::scene::{Noop, Scene};
use crate::stats::{CLAIM, CountingServer, LOOK, Reads};

const RATE: usize = 1_000;
/// The time within which a task in front of the last claimed one is to be found.
const FOUND_WITHIN: Duration = Duration::from_secs(2);

const MAP: &str = r#"
    app = "bench"
    [tiers.bulk]
    queue = "postgres"
    [tiers.other]
    queue = "postgres"
    [groups.all]
    tiers = ["bulk"]
    concurrency = 8
    prefetch = 16
    [groups.rest]
    tiers = ["other"]
    concurrency = 1
    [tasks]
    noop = "bulk"
"#;

/// How long each phase lasts.
struct Lengths {
    before: Duration,
    held: Duration,
    /// The end of the held phase, in which claims are counted.
    counted: Duration,
}

/// What a phase showed.
struct Phase {
    claims: Reads,
    looks: Reads,
    /// Tasks a second that ran.
    ran: f64,
    /// Tasks that wait at its end.
    waiting: i64,
}

pub(crate) async fn measure(report: &mut Report, is_quick: bool) -> Result<()> {
    let seconds = Duration::from_secs;
    let lengths = match is_quick {
        true => Lengths {
            before: seconds(8),
            held: seconds(25),
            counted: seconds(8),
        },
        false => Lengths {
            before: seconds(30),
            held: seconds(300),
            counted: seconds(30),
        },
    };
    let server = CountingServer::start_with_autovacuum().await?;
    let scene = Scene::set_on(server.database().await?, Topology::parse(MAP)?).await?;
    scene.fill(1).await?;
    let rank = sqlx::query_scalar("SELECT rank FROM tierline.ready");
    let rank: i16 = rank.fetch_one(&scene.pool).await?;
    let starts = Starts::default();
    let (sender, mut late_starts) = mpsc::unbounded_channel();
    let working = scene.begin(starts.registry(sender)?).await?;
    let publishing = tokio::spawn(publish(working.app.clone()));

    let before = observe(&server, &scene, &starts, lengths.before).await?;
    let mut snapshot = PgConnection::connect(scene.database.url()).await?;
    snapshot
        .execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        .await?;
    snapshot
        .execute("SELECT count(*) FROM tierline.ready")
        .await?;
    sleep(lengths.held - lengths.counted).await;
    let held = observe(&server, &scene, &starts, lengths.counted).await?;
    let found = find_late(&scene, rank, &mut late_starts).await?;
    anyhow::ensure!(!publishing.is_finished(), "the publisher has ended");
    publishing.abort();
    snapshot.execute("ROLLBACK").await?;
    working.end().await?;

    let title = format!(
        "{RATE} tasks/s, a snapshot held open for {:?}",
        lengths.held
    );
    let columns = [
        "tasks/s",
        "waiting",
        "buffers a claim",
        "ms a claim",
        "buffers a look",
        "ms a look",
    ];
    let mut figures = Figures::new(title, &columns);
    for (name, phase) in [("before", &before), ("at the end", &held)] {
        let Phase {
            claims,
            looks,
            ran,
            waiting,
        } = phase;
        let waiting = *waiting as f64;
        let row = [
            *ran,
            waiting,
            claims.buffers,
            claims.milliseconds,
            looks.buffers,
            looks.milliseconds,
        ];
        figures = figures.row(name, &row);
    }
    report.add(figures);
    report.check(
        format!(
            "a snapshot held open for {:?}: throughput keeps up",
            lengths.held
        ),
        format!(
            "{:.0} of {:.0} tasks/s, {} waiting",
            held.ran, before.ran, held.waiting
        ),
        held.ran >= 0.95 * RATE as f64 && held.waiting < RATE as i64,
    );
    let times = held.claims.buffers / before.claims.buffers;
    report.check(
        "a snapshot held open: at most 5 times the buffers a claim",
        format!("{times:.2} times"),
        times <= 5.0,
    );
    for (what, after) in found {
        report.check(
            format!("a snapshot held open: {what} is found within {FOUND_WITHIN:?}"),
            format!("{after:.2?}"),
            after <= FOUND_WITHIN,
        );
    }
    Ok(())
}

/// Counts what starts.
#[derive(Clone, Default)]
struct Starts(Arc<Mutex<usize>>);

impl Starts {
    /// Handlers that count, and tell when a task starts that has another text than most.
    fn registry(&self, late: mpsc::UnboundedSender<(String, SystemTime)>) -> Result<Registry> {
        let (starts, mut registry) = (self.clone(), Registry::new());
        registry.register::<Noop, _>(move |noop: Noop| {
            if let Ok(mut count) = starts.0.lock() {
                *count += 1;
            }
            if !noop.text.starts_with('x') {
                let _ = late.send((noop.text, SystemTime::now()));
            }
            async {}
        })?;
        Ok(registry)
    }

    fn count(&self) -> usize {
        self.0.lock().map(|count| *count).unwrap_or_default()
    }
}

/// Publishes at a steady rate until it is aborted.
async fn publish(app: Tierline) -> Result<()> {
    const EVERY: Duration = Duration::from_millis(10);
    let mut ticks = interval(EVERY);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Burst);
    loop {
        ticks.tick().await;
        let requests = (0..RATE / 100).map(|_| PublishRequest::new(&Noop::new()));
        let requests: Vec<_> = requests.collect::<Result<_, _>>()?;
        let mut published = std::pin::pin!(app.publish_many(stream::iter(requests)));
        while let Some(outcome) = published.next().await {
            outcome?;
        }
    }
}

async fn observe(
    server: &CountingServer,
    scene: &Scene,
    starts: &Starts,
    length: Duration,
) -> Result<Phase> {
    server.reset().await?;
    let (begin, before) = (Instant::now(), starts.count());
    sleep(length).await;
    let ran = (starts.count() - before) as f64 / begin.elapsed().as_secs_f64();
    let waiting = sqlx::query_scalar("SELECT count(*) FROM tierline.ready");
    Ok(Phase {
        claims: server.reads(&scene.database, CLAIM).await?,
        looks: server.reads(&scene.database, LOOK).await?,
        ran,
        waiting: waiting.fetch_one(&scene.pool).await?,
    })
}

/// How long tasks wait that appear in front of the last claimed one.
async fn find_late(
    scene: &Scene,
    rank: i16,
    starts: &mut mpsc::UnboundedReceiver<(String, SystemTime)>,
) -> Result<Vec<(&'static str, Duration)>> {
    let early = |table: &str, tier: &str, text: &str| {
        AssertSqlSafe(format!(
            "INSERT INTO tierline.{table} (id, due_at, backlog, rank, task, payload) \
             SELECT gen_random_uuid(), now() - interval '1 hour', id, {rank}, 'noop', \
                 convert_to('{{\"text\":\"{text}\"}}', 'UTF8') FROM tierline.backlogs WHERE tier = '{tier}'"
        ))
    };
    let mut connection = PgConnection::connect(scene.database.url()).await?;
    let mut found = Vec::new();
    for round in 0..3 {
        let text = format!("late {round}");
        let mut transaction = connection.begin().await?;
        transaction.execute(early("ready", "bulk", &text)).await?;
        sleep(Duration::from_secs(2)).await;
        transaction.commit().await?;
        found.push((
            "a task whose transaction commits late",
            wait(starts, &text).await?,
        ));

        let text = format!("retry {round}");
        connection
            .execute(early("scheduled", "bulk", &text))
            .await?;
        found.push(("a retry", wait(starts, &text).await?));

        // It waits in a tier that has no worker.
        let text = format!("escalated {round}");
        connection.execute(early("ready", "other", &text)).await?;
        let rise = "UPDATE tierline.ready SET rank = rank - 1, backlog = \
            (SELECT id FROM tierline.backlogs WHERE tier = 'bulk') \
            WHERE backlog = (SELECT id FROM tierline.backlogs WHERE tier = 'other')";
        connection.execute(rise).await?;
        found.push(("a task that is escalated", wait(starts, &text).await?));
    }
    let mut longest: Vec<(&'static str, Duration)> = Vec::new();
    for (what, after) in found {
        match longest.iter_mut().find(|(known, _)| *known == what) {
            Some((_, known)) => *known = after.max(*known),
            None => longest.push((what, after)),
        }
    }
    Ok(longest)
}

/// How long it takes from now until the task with this text starts.
async fn wait(
    starts: &mut mpsc::UnboundedReceiver<(String, SystemTime)>,
    text: &str,
) -> Result<Duration> {
    let begin = SystemTime::now();
    loop {
        let start = timeout(Duration::from_secs(60), starts.recv()).await;
        let (started, at) = start
            .with_context(|| format!("{text} was not found within a minute"))?
            .context("the worker ended")?;
        if started == text {
            return Ok(at.duration_since(begin).unwrap_or_default());
        }
    }
}
