//! What a claim costs beside a million rows that are due later, a million that are ready, and rows in front of it that
//! it may not take.

use anyhow::Result;
use sqlx::{AssertSqlSafe, Connection, Executor, PgConnection};
use tierline::Topology;
use tierline_benchmarks::{Comparison, Figures, Report};

use crate::scene::Scene;
use crate::stats::{CLAIM, CountingServer, Reads};

const REFERENCE: &str = "10,000 ready";
/// How many tasks run in each round.
const COUNT: usize = 8_000;

const MAP: &str = r#"
    app = "bench"
    [tiers.other]
    queue = "postgres"
    [tiers.bulk]
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

/// A backlog that is measured.
struct Case {
    name: String,
    scene: Scene,
    /// Holds locks until the end.
    _locks: Option<PgConnection>,
}

pub(crate) async fn measure(report: &mut Report, is_quick: bool) -> Result<()> {
    let (rounds, many, held) = match is_quick {
        true => (3, 100_000, 10_000),
        false => (5, 1_000_000, 100_000),
    };
    let server = CountingServer::start().await?;
    let cases = [
        Case::set(&server, REFERENCE.to_owned(), &[]).await?,
        Case::set(
            &server,
            format!("{many} due in a year, 10,000 ready"),
            &[Rows::of("scheduled", "bulk", "+ interval '1 year'", many)],
        )
        .await?,
        Case::set(
            &server,
            format!("{many} ready"),
            &[Rows::of("ready", "bulk", "- interval '1 day'", many)],
        )
        .await?,
        Case::set(
            &server,
            format!("{held} of another tier in front"),
            &[Rows::of("ready", "other", "- interval '1 day'", held)],
        )
        .await?,
        Case::set_leased(&server, format!("{held} leased by another worker"), held).await?,
        Case::set_locked(
            &server,
            format!("{held} in front that a transaction has locked"),
            held,
        )
        .await?,
    ];
    for statistics in ["unanalysed", "analysed"] {
        if statistics == "analysed" {
            for case in &cases {
                case.scene.pool.execute("ANALYZE").await?;
            }
        }
        compare(report, &server, &cases, statistics, rounds).await?;
    }
    Ok(())
}

async fn compare(
    report: &mut Report,
    server: &CountingServer,
    cases: &[Case],
    statistics: &str,
    rounds: usize,
) -> Result<()> {
    server.reset().await?;
    let title = format!("No-op tasks of a backlog, {statistics}");
    let mut comparison = Comparison::new(title, "tasks/s");
    for case in cases {
        comparison = comparison.contender(case.name.clone(), async || {
            case.scene.fill(COUNT).await?;
            case.scene.pool.execute("CHECKPOINT").await?;
            let took = case.scene.work(COUNT).await?;
            Ok(COUNT as f64 / took.as_secs_f64())
        });
        if case.is_promised() {
            comparison = comparison.at_least(0.8, REFERENCE);
        }
    }
    report.add(comparison.run(rounds).await?);
    let mut figures = Figures::new(
        format!("Each claim, {statistics}"),
        &["buffers", "tasks", "buffers a task", "ms"],
    );
    let mut of_reference = None;
    for case in cases {
        let reads = server.reads(&case.scene.database, CLAIM).await?;
        let Reads {
            buffers,
            rows,
            milliseconds,
            ..
        } = reads;
        figures = figures.row(&case.name, &[buffers, rows, buffers / rows, milliseconds]);
        let reference = *of_reference.get_or_insert(reads);
        if case.is_promised() {
            let times = (buffers / rows) / (reference.buffers / reference.rows);
            let of_claim = buffers / reference.buffers;
            report.check(
                format!(
                    "{}, {statistics}: at most 2 times the buffers a claim",
                    case.name
                ),
                format!("{of_claim:.2} times, {times:.2} times a task"),
                of_claim <= 2.0,
            );
        }
    }
    report.add(figures);
    for case in cases {
        case.scene.fill(1_000).await?;
        let plan = server.plan_while(CLAIM, case.scene.work(1_000)).await?;
        println!("\n{}, {statistics}:\n{plan}", case.name);
    }
    Ok(())
}

/// Rows that a case has beside its 10,000 ready ones.
struct Rows {
    table: &'static str,
    tier: &'static str,
    /// From now.
    due: &'static str,
    count: usize,
}

impl Rows {
    fn of(table: &'static str, tier: &'static str, due: &'static str, count: usize) -> Self {
        Self {
            table,
            tier,
            due,
            count,
        }
    }
}

impl Case {
    async fn set(server: &CountingServer, name: String, beside: &[Rows]) -> Result<Self> {
        let scene = Scene::set_on(server.database().await?, Topology::parse(MAP)?).await?;
        // They have been published, so the tiers are known.
        scene.fill(1).await?;
        sqlx::query("INSERT INTO tierline.backlogs (app, tier) VALUES ('bench', 'other') ON CONFLICT DO NOTHING")
            .execute(&scene.pool)
            .await?;
        for rows in beside {
            let Rows {
                table,
                tier,
                due,
                count,
            } = rows;
            // A millisecond apart, as if they had been published one after another.
            let insert = format!(
                "INSERT INTO tierline.{table} (id, due_at, backlog, rank, task, payload) \
                 SELECT gen_random_uuid(), now() {due} + number * interval '1 ms', backlogs.id, ready.rank, \
                     ready.task, ready.payload \
                 FROM tierline.ready, tierline.backlogs, generate_series(1, {count}) AS number \
                 WHERE backlogs.tier = '{tier}'"
            );
            scene.pool.execute(AssertSqlSafe(insert)).await?;
        }
        scene.fill(10_000 - COUNT).await?;
        eprintln!("{name}: set");
        Ok(Self {
            name,
            scene,
            _locks: None,
        })
    }

    /// With so many rows that another worker has claimed.
    async fn set_leased(server: &CountingServer, name: String, count: usize) -> Result<Self> {
        let before = [Rows::of("ready", "other", "- interval '1 day'", count)];
        let case = Self::set(server, name, &before).await?;
        // It lives for as long as the benchmark lasts.
        let lease = "WITH other AS ( \
                INSERT INTO tierline.workers (app, name, version, leases, heartbeat_at) \
                VALUES ('bench', 'other', '1', '{\"bulk\": 30}', now() + interval '1 day') RETURNING id \
            ), taken AS ( \
                DELETE FROM tierline.ready WHERE due_at < now() - interval '1 hour' RETURNING ready.* \
            ) INSERT INTO tierline.running (id, due_at, token, worker, backlog, rank, is_begun, task, payload) \
            SELECT taken.id, due_at, 1, other.id, (SELECT id FROM tierline.backlogs WHERE tier = 'bulk'), rank, \
                true, task, payload FROM taken, other";
        case.scene.pool.execute(lease).await?;
        // Those that were deleted are nobody's.
        case.scene.pool.execute("VACUUM tierline.ready").await?;
        Ok(case)
    }

    /// Nothing is promised beside a transaction that locks rows for longer than a moment: every second a claim walks over
    /// them, because there may be others between them.
    fn is_promised(&self) -> bool {
        self.name != REFERENCE && self._locks.is_none()
    }

    /// With so many rows in front that another transaction has locked.
    async fn set_locked(server: &CountingServer, name: String, count: usize) -> Result<Self> {
        let in_front = [Rows::of("ready", "bulk", "- interval '1 day'", count)];
        let mut case = Self::set(server, name, &in_front).await?;
        let mut locks = PgConnection::connect(case.scene.database.url()).await?;
        locks.execute("BEGIN").await?;
        let lock =
            "SELECT id FROM tierline.ready WHERE due_at < now() - interval '1 hour' FOR UPDATE";
        locks.execute(lock).await?;
        case._locks = Some(locks);
        Ok(case)
    }
}
