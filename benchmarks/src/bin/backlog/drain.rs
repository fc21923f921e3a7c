//! No-op tasks a second, beside a plain sqlx loop.

use anyhow::Result;
use sqlx::Executor;
use sqlx::PgPool;
use tierline_benchmarks::{Comparison, Figures, Report};

use crate::plain;
use crate::scene::Scene;

const PLAIN: &str = "sqlx, 4 connections, 32 at a time";

pub(crate) async fn measure(report: &mut Report, is_quick: bool) -> Result<()> {
    let (rounds, count) = if is_quick { (3, 40_000) } else { (5, 120_000) };
    let scene = &Scene::set(8, 16).await?;
    let tidy = async || {
        // Vacuum of the last round's rows must not run in this one.
        let tables = "VACUUM tierline.ready, tierline.running; CHECKPOINT";
        for statement in tables.split("; ") {
            scene.pool.execute(statement).await?;
        }
        anyhow::Ok(())
    };
    let measured = Comparison::new("No-op tasks in Postgres, 8 slots, prefetch 16", "tasks/s")
        .contender(PLAIN, async || {
            plain::fill(&scene.pool, count).await?;
            scene.pool.execute("VACUUM ANALYZE plain_ready").await?;
            tidy().await?;
            plain::drain(scene.database.url(), 4, 32, count).await
        })
        .contender("tierline", async || {
            scene.fill(count).await?;
            tidy().await?;
            let took = scene.work(count).await?;
            Ok(count as f64 / took.as_secs_f64())
        })
        .at_least(0.75, PLAIN)
        .run(rounds)
        .await?;
    report.add(measured);

    // In rounds of their own: to ask the server what it wrote takes a moment, which counts in no rate.
    let written = Written::by(&scene.pool, count, async || {
        plain::fill(&scene.pool, count).await?;
        tidy().await?;
        let before = Written::so_far(&scene.pool).await?;
        plain::drain(scene.database.url(), 4, 32, count).await?;
        Ok(before)
    });
    let of_plain = written.await?;
    let written = Written::by(&scene.pool, count, async || {
        scene.fill(count).await?;
        tidy().await?;
        let before = Written::so_far(&scene.pool).await?;
        scene.work(count).await?;
        Ok(before)
    });
    let of_tierline = written.await?;
    let columns = ["KB of WAL", "commits"];
    let title = "A thousand tasks in Postgres, from their claim to their end";
    let figures = Figures::new(title, &columns)
        .row(PLAIN, &of_plain)
        .row("tierline", &of_tierline);
    report.add(figures);
    Ok(())
}

/// What the server has written.
struct Written {
    wal: f64,
    commits: f64,
}

impl Written {
    async fn so_far(pool: &PgPool) -> Result<Self> {
        // Sessions that are idle report what they did within a second; their last act is older by then.
        tokio::time::sleep(std::time::Duration::from_secs(2)).await;
        let (wal, commits) = sqlx::query_as(
            "SELECT (pg_current_wal_lsn() - '0/0')::float8, \
                 (SELECT xact_commit::float8 FROM pg_stat_database WHERE datname = current_database())",
        )
        .fetch_one(pool)
        .await?;
        Ok(Self { wal, commits })
    }

    /// KB of WAL and commits for a thousand of `count` tasks, since `work` looked.
    async fn by(
        pool: &PgPool,
        count: usize,
        work: impl AsyncFn() -> Result<Self>,
    ) -> Result<[f64; 2]> {
        let before = work().await?;
        let after = Self::so_far(pool).await?;
        let each = |before: f64, after: f64| (after - before) * 1_000.0 / count as f64;
        Ok([
            each(before.wal, after.wal) / 1_000.0,
            each(before.commits, after.commits),
        ])
    }
}
