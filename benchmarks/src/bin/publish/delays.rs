//! How punctual delayed messages are.

use std::time::{Duration, SystemTime};

use anyhow::{Result, ensure};
use futures_util::stream::{self, StreamExt};
use lapin::message::Delivery;
use serde::{Deserialize, Serialize};
use tierline::Tierline;
use tierline::message::Message;
use tierline::task::PublishRequest;
use tierline_benchmarks::{Distribution, Distributions, Report};
use tierline_testbed::vhost;

use crate::map;

/// The resolution of delays: what is between two steps is rounded up.
const STEP: Duration = Duration::from_millis(100);

#[derive(Serialize, Deserialize)]
struct Due {
    delay_ms: u64,
}

pub(crate) async fn measure(report: &mut Report, is_quick: bool) -> Result<()> {
    let (count, few, bulk) = match is_quick {
        true => (500, 100, 2_000),
        false => (10_000, 1_000, 50_000),
    };
    let mut table = Distributions::new("Lateness of delayed messages");
    for tier in map::TIERS {
        let vhost = vhost().await;
        let app = map::connect(vhost.amqp_url()).await?;
        // Numbers that are spread as random ones are, and the same in every run.
        let delays = (1..=count).map(|number| STEP * (number * 7_919 % 200 + 1) as u32);
        let (late, early) = lateness(&app, vhost.amqp_url(), tier, delays.collect()).await?;
        report.check(
            format!("{count} of 0.1 to 20 s to {tier}: none lost, none early"),
            format!("{} lost, {early} early", count as usize - late.count()),
            late.count() == count as usize && early == 0,
        );
        table = table.row(format!("{tier}, {count} of 0.1 to 20 s"), late);
    }

    let vhost = vhost().await;
    let url = vhost.amqp_url();
    let app = map::connect(url).await?;
    let spread = |from: Duration| {
        let delays = (0..few).map(move |number| from + STEP * (number * 100 / few));
        delays.collect::<Vec<_>>()
    };
    let (alone, _) = lateness(&app, url, "classic", spread(STEP)).await?;
    table = table.row(
        format!("classic, {few} published at once, due over 10 s"),
        alone,
    );

    // All of the other tier falls due at one moment, and what is measured in the ten seconds after.
    let lead = Duration::from_secs(if is_quick { 5 } else { 40 });
    let due = SystemTime::now() + lead;
    let requests = stream::iter(0..bulk).filter_map(async |_| {
        let delay = due.duration_since(SystemTime::now()).unwrap_or_default();
        request("quorum", delay).ok()
    });
    let mut outcomes = std::pin::pin!(app.publish_many(requests));
    while let Some(outcome) = outcomes.next().await {
        outcome?;
    }
    let left = due.duration_since(SystemTime::now());
    ensure!(left.is_ok(), "publishing {bulk} took longer than {lead:?}");
    let steps = left.unwrap_or_default().as_millis() / STEP.as_millis();
    let delays = spread(STEP * u32::try_from(steps)?);
    let (beside, _) = lateness(&app, url, "classic", delays).await?;
    table = table.row(
        format!("the same, while {bulk} of another tier fall due"),
        beside,
    );
    report.add(table);
    Ok(())
}

pub(crate) fn request(tier: &str, delay: Duration) -> Result<PublishRequest> {
    let delay_ms = u64::try_from(delay.as_millis())?;
    let mut request = PublishRequest::named(tier, serde_json::to_vec(&Due { delay_ms })?);
    request.delay = Some(delay);
    Ok(request)
}

/// Publishes to a tier with these delays, and gives by how much each was late, and how many early.
async fn lateness(
    app: &Tierline,
    url: &str,
    tier: &str,
    delays: Vec<Duration>,
) -> Result<(Distribution, usize)> {
    let (_connection, channel) = map::channel(url).await?;
    let mut arrivals = map::consume(&channel, tier).await?;
    let count = delays.len();
    let arrived = async {
        let (mut late, mut early) = (Vec::new(), 0);
        let limit = Duration::from_secs(120);
        while late.len() < count
            && let Ok(Some(delivery)) = tokio::time::timeout(limit, arrivals.next()).await
        {
            match read(delivery?, tier)? {
                Ok(lateness) => late.push(lateness),
                Err(_) => {
                    early += 1;
                    late.push(Duration::ZERO);
                }
            }
        }
        anyhow::Ok((Distribution::of(late), early))
    };
    let published = async {
        let requests = stream::iter(delays).filter_map(async |delay| request(tier, delay).ok());
        let mut outcomes = std::pin::pin!(app.publish_many(requests));
        while let Some(outcome) = outcomes.next().await {
            outcome?;
        }
        anyhow::Ok(())
    };
    let (arrived, ()) = tokio::try_join!(arrived, published)?;
    Ok(arrived)
}

/// By how much a message is late; `Err` by how much it is early.
pub(crate) fn read(delivery: Delivery, tier: &str) -> Result<Result<Duration, Duration>> {
    let now = SystemTime::now();
    let message = Message::from_wire(&delivery.properties, delivery.data, tier, now);
    let message = message.map_err(anyhow::Error::msg)?;
    let due: Due = serde_json::from_slice(&message.payload)?;
    let due_at = message.enqueued_at + Duration::from_millis(due.delay_ms);
    Ok(now.duration_since(due_at).map_err(|early| early.duration()))
}
