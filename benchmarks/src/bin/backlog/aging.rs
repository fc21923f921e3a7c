//! A hundred thousand old rows of a lower tier move up while the higher one is busy.

use std::time::Duration;

use anyhow::{Context, Result};
use sqlx::{AssertSqlSafe, Executor};
use tierline::{Registry, Tierline, Topology};
use tierline_benchmarks::{Figures, Report};
use tokio::time::{Instant, MissedTickBehavior, interval, sleep};

use crate::scene::{Noop, Scene};
use crate::stats::CountingServer;

/// How the statements begin.
const FIND: &str = "WITH RECURSIVE of AS MATERIALIZED";
const PROMOTE: &str = "WITH of AS MATERIALIZED";
/// Tasks a second that are published to the higher tier meanwhile.
const RATE: usize = 1_000;
const LONGEST: Duration = Duration::from_millis(100);
const LIMIT: Duration = Duration::from_secs(300);

const MAP: &str = r#"
    app = "bench"
    [tiers.normal]
    queue = "postgres"
    [tiers.low]
    queue = "postgres"
    promote = { after = "1h", to = "normal" }
    [groups.all]
    tiers = ["normal"]
    concurrency = 8
    prefetch = 16
    [groups.rest]
    tiers = ["low"]
    concurrency = 1
    [tasks]
    noop = "normal"
"#;

pub(crate) async fn measure(report: &mut Report, is_quick: bool) -> Result<()> {
    let count: i64 = if is_quick { 20_000 } else { 100_000 };
    let server = CountingServer::start_with_autovacuum().await?;
    let scene = Scene::set_on(server.database().await?, Topology::parse(MAP)?).await?;
    scene.fill(1).await?;
    add_old(&scene, count).await?;
    server.reset().await?;

    let mut registry = Registry::new();
    registry.register::<Noop, _>(async |_: Noop| {})?;
    let begin = Instant::now();
    let working = scene.begin(registry).await?;
    let publishing = tokio::spawn(publish(working.app.clone()));
    let took = loop {
        let waiting = "SELECT count(*) FROM tierline.ready JOIN tierline.backlogs ON backlogs.id = backlog AND tier = 'low'";
        let waiting: i64 = sqlx::query_scalar(waiting).fetch_one(&scene.pool).await?;
        if waiting == 0 {
            break begin.elapsed();
        }
        anyhow::ensure!(begin.elapsed() < LIMIT, "{waiting} have not moved");
        sleep(Duration::from_millis(50)).await;
    };
    anyhow::ensure!(!publishing.is_finished(), "the publisher has ended");
    publishing.abort();
    working.end().await?;

    let (moved, batches, swapped): (i64, i64, i64) = sqlx::query_as(
        "SELECT sum(count)::bigint, count(*), count(*) FILTER (WHERE first < last) FROM ( \
             SELECT count(*) AS count, min(due_at) AS first, lag(max(due_at)) OVER (ORDER BY min(number)) AS last \
             FROM moves GROUP BY moved_in) AS batches",
    )
    .fetch_one(&scene.pool)
    .await?;
    let find = server.longest(&scene.database, FIND).await?;
    let promote = server.longest(&scene.database, PROMOTE).await?;
    let each = server.reads(&scene.database, PROMOTE).await?;
    let title = format!("{count} old tasks move up, {RATE} tasks/s in the higher tier");
    let columns = [
        "tasks/s",
        "batches",
        "ms a batch",
        "buffers a batch",
        "longest look, ms",
        "longest batch, ms",
    ];
    let figures = [
        count as f64 / took.as_secs_f64(),
        batches as f64,
        each.milliseconds,
        each.buffers,
        find.as_secs_f64() * 1e3,
        promote.as_secs_f64() * 1e3,
    ];
    report.add(Figures::new(title, &columns).row("tierline", &figures));
    report.check(
        format!("all {count} old tasks move, in order of age"),
        format!("{moved} moved, {swapped} batches of {batches} out of order"),
        moved == count && swapped == 0,
    );
    report.check(
        "aging: no statement over 100 ms",
        format!("{:.1?}", find.max(promote)),
        find.max(promote) <= LONGEST,
    );
    Ok(())
}

/// Old rows in the lower tier, of several priorities, and a note of each that moves.
async fn add_old(scene: &Scene, count: i64) -> Result<()> {
    scene
        .pool
        .execute("INSERT INTO tierline.backlogs (app, tier) VALUES ('bench', 'low') ON CONFLICT DO NOTHING")
        .await?;
    let insert = format!(
        "INSERT INTO tierline.ready (id, due_at, backlog, rank, task, payload) \
         SELECT gen_random_uuid(), now() - interval '2 hours' + number * interval '1 ms', backlogs.id, -(number % 7), \
             ready.task, ready.payload \
         FROM tierline.ready, tierline.backlogs, generate_series(1, {count}) AS number WHERE tier = 'low'"
    );
    scene.pool.execute(AssertSqlSafe(insert)).await?;
    scene
        .pool
        .execute(
            "CREATE TABLE moves (number bigserial, due_at timestamptz, moved_in xid8); \
             CREATE FUNCTION note_move() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN \
                 INSERT INTO moves (due_at, moved_in) VALUES (new.due_at, pg_current_xact_id()); RETURN NULL; \
             END $$; \
             CREATE TRIGGER note_move AFTER UPDATE OF backlog ON tierline.ready \
                 FOR EACH ROW EXECUTE FUNCTION note_move()",
        )
        .await
        .context("cannot note moves")?;
    Ok(())
}

async fn publish(app: Tierline) -> Result<()> {
    let mut ticks = interval(Duration::from_millis(10));
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let batch = (0..RATE / 100).map(|_| app.publish(Noop::new()).into_future());
        futures_util::future::try_join_all(batch).await?;
    }
}
