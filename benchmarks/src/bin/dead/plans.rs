//! The log with a million rows: how long its questions take beside a look at every row.

use std::time::{Duration, Instant, SystemTime};

use anyhow::Result;
use sqlx::PgPool;
use tierline::dead::{Filter, Page};
use tierline_benchmarks::Report;
use tierline_testbed::{database, vhost};

use crate::shop;

/// Rows over the thirty days of the retention, in the order in which they died, of 400 kinds of
/// failures and two tiers.
const FILL: &str = "\
    INSERT INTO tierline.dead_letters (app, identity, life, message_id, task, tier, reason, error, \
        error_kind, attempts, died_at, fingerprint, payload, payload_json, properties, state) \
    SELECT 'shop', 'fill-' || n, 0, 'fill-' || n, \
        CASE n % 2 WHEN 0 THEN 'order.pay' ELSE 'order.ship' END, \
        CASE n % 2 WHEN 0 THEN 'critical' ELSE 'normal' END, \
        'retries exhausted', 'connection to 10.0.0.' || n % 250 || ' refused', 'error', 3, \
        now() - interval '30 days' * (1 - n::float8 / $3), lpad(to_hex(n % 400), 16, '0'), \
        convert_to('{\"order\":' || n || '}', 'UTF8'), jsonb_build_object('order', n), \
        decode(repeat('07', 400), 'hex'), CASE n % 20 WHEN 0 THEN 'redriven' ELSE 'dead' END \
    FROM generate_series($1::bigint, $2::bigint) AS n";

/// A look at every row, which no index helps with.
const SCAN: &str = "SELECT count(*) FROM tierline.dead_letters WHERE error LIKE '%no such text%'";

pub(crate) async fn measure(report: &mut Report, is_quick: bool) -> Result<()> {
    let rows: i64 = if is_quick { 50_000 } else { 1_000_000 };
    let (vhost, database) = tokio::join!(vhost(), database());
    let app = shop::connect(vhost.amqp_url(), database.url(), |_| {}).await?;
    let pool = PgPool::connect(database.url()).await?;
    eprintln!("writing {rows} rows");
    for first in (0..rows).step_by(50_000) {
        sqlx::query(FILL)
            .bind(first)
            .bind((first + 49_999).min(rows - 1))
            .bind(rows as f64)
            .execute(&pool)
            .await?;
    }
    sqlx::query("VACUUM ANALYZE tierline.dead_letters")
        .execute(&pool)
        .await?;
    let scan = fastest(async || {
        sqlx::query(SCAN).execute(&pool).await?;
        Ok(())
    })
    .await?;
    let letters = app.dead_letters()?;
    let last_day = Filter::default().since(SystemTime::now() - Duration::from_secs(86_400));
    let plans = letters.explain(&last_day).await?;
    for (name, plan) in ["list", "groups", "by_tier"].iter().zip(&plans) {
        println!("\n{name}:\n{plan}");
    }
    println!("\na full scan of {rows} rows takes {scan:?}");
    let far = letters
        .list(&Filter::default(), Page::first(500))
        .await?
        .next;
    for (name, took) in [
        (
            "list, all",
            fastest(async || ask(letters.list(&Filter::default(), Page::default()).await)).await?,
        ),
        (
            "list, a later page",
            fastest(async || {
                let page = far.map_or(Page::default(), |far| Page::after(50, far));
                ask(letters.list(&Filter::default(), page).await)
            })
            .await?,
        ),
        (
            "list, one task",
            fastest(async || {
                ask(letters
                    .list(&Filter::default().task("order.pay"), Page::default())
                    .await)
            })
            .await?,
        ),
        (
            "list, one group",
            fastest(async || {
                let group = Filter::default().fingerprint("0000000000000007");
                ask(letters.list(&group, Page::default()).await)
            })
            .await?,
        ),
        (
            "groups of the last day",
            fastest(async || ask(letters.groups(&last_day, 20).await)).await?,
        ),
        (
            "counts by tier",
            fastest(async || ask(letters.by_tier().await)).await?,
        ),
    ] {
        let share = took.as_secs_f64() / scan.as_secs_f64();
        report.check(
            format!("{name}: under a tenth of a full scan of {rows} rows"),
            format!("{:.2} ms, {share:.4}", took.as_secs_f64() * 1e3),
            share < 0.1,
        );
    }
    let counted: u64 = letters
        .by_tier()
        .await?
        .iter()
        .map(|tier| tier.dead + tier.redriven)
        .sum();
    report.check(
        "counts by tier are exact",
        counted.to_string(),
        counted == rows.unsigned_abs(),
    );
    Ok(())
}

fn ask<T>(answer: Result<T, tierline::Error>) -> Result<()> {
    answer?;
    Ok(())
}

/// The fastest of five.
async fn fastest(mut work: impl AsyncFnMut() -> Result<()>) -> Result<Duration> {
    let mut fastest = Duration::MAX;
    for _ in 0..5 {
        let begin = Instant::now();
        work().await?;
        fastest = fastest.min(begin.elapsed());
    }
    Ok(fastest)
}
