//! Rows a second: the collector beside a plain loop of batched inserts.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Instant, SystemTime};

use anyhow::Result;
use sqlx::{PgPool, Row};
use tierline::observe::Event;
use tierline_benchmarks::{Comparison, Report};
use tierline_testbed::{database, vhost};
use tokio::sync::Notify;

use crate::shop;

const PLAIN: &str = "plain inserts of 500 rows, same table";
const BATCH: usize = 500;

pub(crate) async fn measure(report: &mut Report, is_quick: bool) -> Result<()> {
    let (rounds, count) = if is_quick { (3, 5_000) } else { (5, 20_000) };
    let (vhost, database) = tokio::join!(vhost(), database());
    let (logged, news) = (Arc::new(AtomicU64::new(0)), Arc::new(Notify::new()));
    let (counting, telling) = (Arc::clone(&logged), Arc::clone(&news));
    let app = shop::connect(vhost.amqp_url(), database.url(), move |event| {
        if let Event::Collected { count, .. } = event {
            counting.fetch_add(*count, Ordering::Relaxed);
            telling.notify_one();
        }
    })
    .await?;
    let (_connection, channel) = shop::channel(vhost.amqp_url()).await?;
    let pool = PgPool::connect(database.url()).await?;
    let run = std::cell::Cell::new(0);
    let next = || {
        run.set(run.get() + 1);
        run.get()
    };
    let (app, channel, pool) = (&app, &channel, &pool);
    let (logged, news, next) = (&logged, &news, &next);
    let measured = Comparison::new(format!("Logging {count} dead letters"), "rows/s")
        .contender(PLAIN, async move || {
            clear(pool).await?;
            let run = next();
            let begin = Instant::now();
            for first in (0..count).step_by(BATCH) {
                insert(pool, run, first..(first + BATCH).min(count)).await?;
            }
            Ok(count as f64 / begin.elapsed().as_secs_f64())
        })
        .contender("tierline, the collector", async move || {
            clear(pool).await?;
            let run = next();
            let messages = (0..count).map(|number| {
                let id = format!("{run}-{number}");
                (shop::payload(number), shop::dead(&id))
            });
            shop::publish(channel, "shop.normal.dlx", "", messages).await?;
            logged.store(0, Ordering::Relaxed);
            let begin = Instant::now();
            let collecting = tokio::spawn(app.collector()?.into_future());
            while logged.load(Ordering::Relaxed) < count as u64 {
                news.notified().await;
            }
            let took = begin.elapsed();
            collecting.abort();
            // What was not acknowledged yet when it was cut off.
            let _ = collecting.await;
            shop::purge(channel, "shop.normal.dlq").await?;
            Ok(count as f64 / took.as_secs_f64())
        })
        .at_least(0.5, PLAIN)
        .run(rounds)
        .await?;
    report.add(measured);
    Ok(())
}

async fn clear(pool: &PgPool) -> Result<()> {
    sqlx::query("TRUNCATE tierline.dead_letters")
        .execute(pool)
        .await?;
    let left = sqlx::query("SELECT count(*) FROM tierline.dead_letter_counts");
    let left: i64 = left.fetch_one(pool).await?.get(0);
    anyhow::ensure!(left == 0, "counts are left");
    Ok(())
}

/// What somebody would write who needs it once: the same columns, nothing looked at.
async fn insert(pool: &PgPool, run: u32, numbers: std::ops::Range<usize>) -> Result<()> {
    let ids: Vec<String> = numbers
        .clone()
        .map(|number| format!("{run}-{number}"))
        .collect();
    let payloads: Vec<Vec<u8>> = numbers.map(shop::payload).collect();
    let texts: Vec<String> = payloads
        .iter()
        .map(|payload| String::from_utf8_lossy(payload).into_owned())
        .collect();
    let headers = r#"{"tierline-version": 1, "tierline-attempt": 3, "tierline-enqueued-at": 1700000000000,
        "tierline-reason": "retries exhausted", "tierline-error-kind": "error",
        "tierline-died-at": 1700000000000}"#;
    let properties = vec![7_u8; 400];
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)?;
    sqlx::query(
        "INSERT INTO tierline.dead_letters (app, identity, life, message_id, task, tier, reason, \
         error, error_kind, causes, attempts, enqueued_at, died_at, worker, worker_version, \
         fingerprint, payload, payload_json, properties, headers) \
         SELECT 'shop', id, 0, id, 'order.ship', 'normal', 'retries exhausted', \
         'connection to 10.0.0.7:5432 refused', 'error', '[\"tcp connect error\"]', 3, \
         to_timestamp($6), to_timestamp($6), 'host:1', '1.0.0', '0123456789abcdef', payload, \
         json::jsonb, $5, $4::jsonb \
         FROM UNNEST($1::text[], $2::bytea[], $3::text[]) AS row (id, payload, json) \
         ON CONFLICT (app, identity, life) DO NOTHING",
    )
    .bind(ids)
    .bind(payloads)
    .bind(texts)
    .bind(headers)
    .bind(properties)
    .bind(now.as_secs_f64())
    .execute(pool)
    .await?;
    Ok(())
}
