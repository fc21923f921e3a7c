//! The state of the whole app at a scrape, from its statistics: the same from every process that shows it.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;
use tokio::sync::Mutex;
use tokio::time::Instant;

use super::Source;
use super::encode::{gauge, gauges};
use crate::Error;
use crate::stats::{Stats, TierStats};

/// For how long an answer counts. Several servers may scrape, and each asks both servers of the app.
const FRESH_FOR: Duration = Duration::from_secs(5);

struct Answer {
    at: Instant,
    stats: Arc<Stats>,
}

/// Shows the state that `ask` gives.
pub(super) fn source(
    ask: impl Fn() -> BoxFuture<'static, Result<Stats, Error>> + Send + Sync + 'static,
) -> Source {
    let last: Arc<Mutex<Option<Answer>>> = Arc::default();
    let ask = Arc::new(ask);
    Arc::new(move || {
        let (last, ask) = (last.clone(), ask.clone());
        Box::pin(async move {
            // Who scrapes at the same time waits for the same answer.
            let mut last = last.lock().await;
            let stats = match &*last {
                Some(answer) if answer.at.elapsed() < FRESH_FOR => Some(answer.stats.clone()),
                _ => match ask().await {
                    Ok(stats) => {
                        let stats = Arc::new(stats);
                        *last = Some(Answer {
                            at: Instant::now(),
                            stats: stats.clone(),
                        });
                        Some(stats)
                    }
                    Err(error) => {
                        tracing::warn!(%error, "metrics without the state of the app");
                        None
                    }
                },
            };
            let state: Box<dyn Collector> = Box::new(AppState { stats });
            state
        })
    })
}

#[derive(Debug)]
struct AppState {
    /// `None`: nothing could be asked.
    stats: Option<Arc<Stats>>,
}

impl Collector for AppState {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let encoder = &mut encoder;
        let problems = self.stats.as_ref().map_or(1, |it| it.problems.len());
        gauge(
            encoder,
            "tierline_stats_problems",
            "Questions about the state of the app that got no answer at the last scrape",
            i64::try_from(problems).unwrap_or(i64::MAX),
        )?;
        let Some(stats) = &self.stats else {
            return Ok(());
        };
        encode_tiers(encoder, &stats.tiers)?;
        encode_dead_letters(encoder, &stats.tiers)?;
        let groups = stats.groups.iter();
        let processes = groups.filter_map(|it| {
            let processes = i64::from(it.processes?);
            Some(([("group", it.group.as_str())], processes))
        });
        gauges(
            encoder,
            "tierline_processes",
            "Live processes that serve a group and have the database",
            processes,
        )?;
        match &stats.schedules {
            Some(schedules) => gauge(
                encoder,
                "tierline_schedule_leader",
                "Whether a process leads, and so publishes due runs of schedules",
                i64::from(schedules.has_leader),
            ),
            None => Ok(()),
        }
    }
}

type OfTier = fn(&TierStats) -> Option<f64>;

/// What is shown of each tier, where it is known.
const OF_TIERS: [(&str, &str, OfTier); 8] = [
    (
        "tierline_waiting",
        "Tasks that wait and are due: messages in the queue, and rows. Rows are counted up to 10,000",
        |it| Some(it.waiting?.count as f64),
    ),
    (
        "tierline_oldest_wait_seconds",
        "Time that the oldest waiting task has waited; an estimate for a queue",
        oldest_wait,
    ),
    (
        "tierline_consumers",
        "Consumers of the queue; of a tier in Postgres, live processes that serve it",
        |it| Some(it.consumers?.into()),
    ),
    (
        "tierline_scheduled",
        "Rows that are due later. They are counted up to 10,000",
        |it| Some(it.scheduled?.count as f64),
    ),
    (
        "tierline_parked",
        "Rows that a pause or a limit holds back, or that wait for the turn of their key. They are counted up to 10,000",
        |it| Some(it.parked?.count as f64),
    ),
    (
        "tierline_paused",
        "Whether an operator has paused the tier or its group",
        |it| Some(f64::from(u8::from(it.paused.is_some()))),
    ),
    (
        "tierline_limit_saturated",
        "Whether the limit of the tier keeps tasks from starting",
        |it| Some(f64::from(u8::from(it.limit.as_ref()?.is_saturated?))),
    ),
    (
        "tierline_relay_waiting",
        "Rows of a tier on the broker that neither a relay nor a worker takes",
        |it| Some(it.relay_waiting?.count as f64),
    ),
];

/// `None`: it is not known. What does not wait has waited for 0 s, so that a line falls when the last task has started.
fn oldest_wait(tier: &TierStats) -> Option<f64> {
    match &tier.oldest {
        Some(oldest) => Some(oldest.age.as_secs_f64()),
        None => (tier.waiting?.count == 0).then_some(0.0),
    }
}

fn encode_tiers(encoder: &mut DescriptorEncoder<'_>, tiers: &[TierStats]) -> fmt::Result {
    for (name, help, value) in OF_TIERS {
        let known = tiers
            .iter()
            .filter_map(|tier| Some(([("tier", tier.tier.as_str())], value(tier)?)));
        gauges(encoder, name, help, known)?;
    }
    Ok(())
}

fn encode_dead_letters(encoder: &mut DescriptorEncoder<'_>, tiers: &[TierStats]) -> fmt::Result {
    let by_state = tiers.iter().filter_map(|tier| {
        let dead = tier.dead?;
        let states = [
            ("dead", Some(dead.dead)),
            ("redriving", Some(dead.redriving)),
            ("redriven", Some(dead.redriven)),
            ("discarded", Some(dead.discarded)),
            ("uncollected", dead.uncollected),
        ];
        let shown = states.into_iter().filter_map(move |(state, count)| {
            let labels = [("tier", tier.tier.as_str()), ("state", state)];
            Some((labels, i64::try_from(count?).unwrap_or(i64::MAX)))
        });
        Some(shown)
    });
    gauges(
        encoder,
        "tierline_dead_letters",
        "Dead letters by their state: in the log, or in their queue (uncollected)",
        by_state.flatten(),
    )
}
