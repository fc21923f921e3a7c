//! What a process and its broker look like, second by second.

use std::time::Duration;

use anyhow::Result;
use tierline_benchmarks::{Figures, Report, median, status};
use tierline_testbed::Vhost;
use tokio::runtime::Handle;
use tokio::time::{Instant, interval};

use crate::load::{Load, SLOTS};

const A_MINUTE: usize = 60;

/// A second.
pub(crate) struct Sample {
    at: Instant,
    settled: u64,
    waiting: f64,
    resident_mib: f64,
    threads: f64,
    /// Of tokio, alive.
    tasks: f64,
    connections: f64,
    channels: f64,
}

type Field = fn(&Sample) -> f64;

impl Sample {
    async fn take(load: &Load, vhost: &Vhost) -> Result<Self> {
        let tasks = Handle::current().metrics().num_alive_tasks() as f64;
        let (connections, channels) = vhost.connections_and_channels().await?;
        Ok(Self {
            at: Instant::now(),
            settled: load.settled(),
            waiting: load.waiting() as f64,
            resident_mib: status("self", "VmRSS")? as f64 / 1024.0,
            threads: status("self", "Threads")? as f64,
            tasks,
            connections: connections as f64,
            channels: channels as f64,
        })
    }
}

/// A sample every second.
pub(crate) async fn watch(load: &Load, vhost: &Vhost, minutes: usize) -> Result<Vec<Sample>> {
    let mut seconds = interval(Duration::from_secs(1));
    // All at once, so that the samples do not grow into what they measure.
    let mut samples = Vec::with_capacity(minutes * A_MINUTE);
    for second in 0..minutes * A_MINUTE {
        seconds.tick().await;
        let sample = Sample::take(load, vhost).await?;
        if second % 10 == 0 {
            eprintln!(
                "{second:>4} s: {} settled, {} waiting, {:.1} MiB",
                sample.settled, sample.waiting, sample.resident_mib
            );
        }
        samples.push(sample);
    }
    Ok(samples)
}

/// The samples by minute, and what was promised of them.
pub(crate) fn report(report: &mut Report, samples: &[Sample]) {
    let columns = [
        "tasks/s",
        "waiting",
        "resident MiB",
        "threads",
        "tokio tasks",
        "connections",
        "channels",
    ];
    let mut table = Figures::new("By minute, medians", &columns);
    for (index, minute) in samples.chunks(A_MINUTE).enumerate() {
        let figures = [
            rate(minute),
            middle(minute, |it| it.waiting),
            middle(minute, |it| it.resident_mib),
            middle(minute, |it| it.threads),
            middle(minute, |it| it.tasks),
            middle(minute, |it| it.connections),
            middle(minute, |it| it.channels),
        ];
        table = table.row(format!("minute {}", index + 1), &figures);
    }
    report.add(table);

    // A run of one minute is compared by its halves.
    let span = A_MINUTE.min(samples.len() / 2);
    let (first, last) = (&samples[..span], &samples[samples.len() - span..]);
    let ends = |field: Field| (middle(first, field), middle(last, field));

    let (before, after) = ends(|it| it.resident_mib);
    report.check(
        "soak: memory at the end at most 1.1 times that of the beginning and 2 MiB",
        format!("{before:.1} MiB, then {after:.1} MiB"),
        after <= before * 1.1 + 2.0,
    );
    // A task that is being run is one of tokio's, and how many slots are busy at a moment is chance.
    let (before, after) = ends(|it| it.tasks);
    report.check(
        format!(
            "soak: tokio's tasks at the end at most {SLOTS} (the slots) more than in the beginning"
        ),
        format!("{before}, then {after}"),
        after <= before + SLOTS as f64,
    );
    let fields: [(_, Field); 2] = [
        ("connections", |it| it.connections),
        ("channels", |it| it.channels),
    ];
    for (what, field) in fields {
        let figures = samples.iter().map(field);
        let least = figures.clone().fold(f64::INFINITY, f64::min);
        let most = figures.fold(0.0, f64::max);
        report.check(
            format!("soak: as many {what} all the time"),
            format!("{least} to {most}"),
            least == most,
        );
    }
}

fn middle(samples: &[Sample], field: Field) -> f64 {
    median(&samples.iter().map(field).collect::<Vec<_>>())
}

/// Tasks that were settled a second.
fn rate(samples: &[Sample]) -> f64 {
    let [first, .., last] = samples else {
        return f64::NAN;
    };
    (last.settled - first.settled) as f64 / (last.at - first.at).as_secs_f64()
}
