//! Messages a second: a bulk redrive beside a plain loop that publishes.

use std::time::Instant;

use anyhow::{Result, ensure};
use sqlx::PgPool;
use tierline::dead::Filter;
use tierline_benchmarks::{Comparison, Report};
use tierline_testbed::{database, vhost};

use crate::shop;

const PLAIN: &str = "lapin, window 1,000, awaiting each send";

pub(crate) async fn measure(report: &mut Report, is_quick: bool) -> Result<()> {
    let (rounds, count) = if is_quick { (3, 5_000) } else { (5, 20_000) };
    let (vhost, database) = tokio::join!(vhost(), database());
    let app = shop::connect(vhost.amqp_url(), database.url(), |_| {}).await?;
    let (_connection, channel) = shop::channel(vhost.amqp_url()).await?;
    let pool = PgPool::connect(database.url()).await?;
    let messages =
        (0..count).map(|number| (shop::payload(number), shop::dead(&number.to_string())));
    shop::publish(&channel, "shop.normal.dlx", "", messages).await?;
    let collecting = tokio::spawn(app.collector()?.into_future());
    let letters = app.dead_letters()?;
    let everything = Filter::default();
    shop::until("the rows", async || {
        Ok(letters.count(&everything).await? == count as u64)
    })
    .await?;
    collecting.abort();
    let (channel, letters, pool) = (&channel, &letters, &pool);
    let measured = Comparison::new(format!("Redriving {count} dead letters"), "msg/s")
        .contender(PLAIN, async move || {
            let begin = Instant::now();
            let messages =
                (0..count).map(|number| (shop::payload(number), shop::dead(&number.to_string())));
            shop::publish(channel, "shop.tasks", "normal", messages).await?;
            let took = begin.elapsed();
            ensure!(shop::purge(channel, "shop.normal").await? as usize == count);
            Ok(count as f64 / took.as_secs_f64())
        })
        .contender("tierline, redrive_all", async move || {
            // Written anew, as rows are that were just collected.
            for statement in [
                "UPDATE tierline.dead_letters SET state = 'dead', actions = '[]'",
                "DELETE FROM tierline.dead_letter_counts",
                "VACUUM ANALYZE tierline.dead_letters",
            ] {
                sqlx::query(statement).execute(pool).await?;
            }
            let begin = Instant::now();
            let operation = letters.redrive_all(Filter::default()).run().await?;
            let took = begin.elapsed();
            ensure!(operation.done as usize == count, "{operation:?}");
            ensure!(shop::purge(channel, "shop.normal").await? as usize == count);
            Ok(count as f64 / took.as_secs_f64())
        })
        .at_least(0.5, PLAIN)
        .run(rounds)
        .await?;
    report.add(measured);
    Ok(())
}
