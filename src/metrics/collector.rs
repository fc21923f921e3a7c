//! Reads the counters at a scrape, and gives them their names and labels.

use std::fmt;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};

use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;

use super::counters::{Counters, TaskCounts, TierCounts};
use super::encode::{Labels, counters, gauge, gauges, histogram, histograms};
use super::histogram::AtomicHistogram;
use super::labels::{Outcome, PURPOSES, REASONS, RESULTS, purpose_label};

impl Collector for Counters {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let encoder = &mut encoder;
        self.encode_published(encoder)?;
        self.encode_tasks(encoder)?;
        self.encode_tiers(encoder)?;
        self.encode_groups(encoder)?;
        self.encode_schedules(encoder)?;
        self.encode_process(encoder)
    }
}

impl Counters {
    fn encode_published(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let published = self.cells().flat_map(|cell| {
            let counts = RESULTS.iter().enumerate().map(move |(index, result)| {
                let count = cell.counts.map_or(0, |it| load(&it.published[index]));
                // A counter that begins with one never shows that one to `increase()`.
                let is_shown = count > 0 || index == 0 && cell.is_mapped;
                is_shown.then(|| (cell.labels([("result", *result)]), count))
            });
            counts.flatten()
        });
        counters(
            encoder,
            "tierline_published",
            "Publishes of this process by their result",
            published,
        )?;
        let publish = self.tiers().filter_map(|(tier, counts)| {
            let publish = counts.publish.get()?;
            Some(([("tier", tier)], publish.read(&self.edges)))
        });
        histograms(
            encoder,
            "tierline_publish_seconds",
            "Time from the call of a publish to its outcome",
            publish,
        )
    }

    fn encode_tasks(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        // Of a histogram that begins with its first start, `increase()` and `rate()` would never see that one.
        let none = AtomicHistogram::new(&self.wait_edges);
        let waits = self.cells().filter_map(|cell| {
            let wait = cell.counts.map_or(&none, |it| &it.wait);
            let wait = wait.read(&self.wait_edges);
            let is_shown = wait.count > 0 || cell.is_worked;
            is_shown.then(|| (cell.labels([]), wait))
        });
        histograms(
            encoder,
            "tierline_wait_seconds",
            "Time that tasks had waited when they were started, since they were enqueued, fell due or were redriven",
            waits,
        )?;
        let runs = self.cells().flat_map(|cell| {
            let runs = Outcome::ALL.into_iter().filter_map(move |outcome| {
                let run: &AtomicHistogram = cell.counts?.runs[outcome as usize].get()?;
                let labels = cell.labels([("outcome", outcome.label())]);
                Some((labels, run.read(&self.edges)))
            });
            runs.collect::<Vec<_>>()
        });
        histograms(
            encoder,
            "tierline_run_seconds",
            "Time that handlers ran",
            runs,
        )?;
        let outcomes = self.cells().flat_map(|cell| {
            Outcome::ALL.into_iter().filter_map(move |outcome| {
                let counts = cell.counts;
                let count = counts.map_or(0, |it| load(&it.outcomes[outcome as usize]));
                let is_shown = count > 0 || cell.is_worked;
                is_shown.then(|| (cell.labels([("outcome", outcome.label())]), count))
            })
        });
        counters(
            encoder,
            "tierline_tasks",
            "Deliveries of tasks by their outcome",
            outcomes,
        )?;
        let dead = self.cells().flat_map(|cell| {
            REASONS
                .iter()
                .enumerate()
                .filter_map(move |(index, reason)| {
                    let count = cell.counts.map_or(0, |it| load(&it.dead[index]));
                    let is_shown = count > 0 || cell.is_worked;
                    is_shown.then(|| (cell.labels([("reason", *reason)]), count))
                })
        });
        counters(
            encoder,
            "tierline_dead",
            "Tasks that became dead letters",
            dead,
        )
    }

    fn encode_tiers(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let slo = self.tiers().zip(0..).flat_map(|((tier, counts), index)| {
            let has_slo = self.names.tiers().get(index);
            let has_slo = has_slo.is_some_and(|tier| tier.slo.is_some());
            let met = [("true", &counts.slo_met), ("false", &counts.slo_missed)];
            let met = met.map(|(met, count)| ([("tier", tier), ("met", met)], load(count)));
            met.into_iter().filter(move |_| has_slo)
        });
        counters(
            encoder,
            "tierline_slo_tasks",
            "Tasks of tiers with an SLO that were started, or waited until they expired, by whether they were started in time",
            slo,
        )?;
        let seconds = self.names.tiers().iter();
        let seconds = seconds.filter_map(|it| Some(([("tier", &*it.name)], it.slo?.as_secs_f64())));
        gauges(
            encoder,
            "tierline_slo_seconds",
            "The SLO of a tier in the map: the time within which its tasks are to start",
            seconds,
        )?;
        let objectives = self.names.tiers().iter();
        let objectives = objectives.filter_map(|it| Some(([("tier", &*it.name)], it.objective?)));
        gauges(
            encoder,
            "tierline_slo_objective",
            "The share of tasks that are to start within the SLO, in the map",
            objectives,
        )?;
        type Of = fn(&TierCounts) -> &AtomicU64;
        let by_tier: [(&str, &str, Of); 4] = [
            (
                "tierline_suspected",
                "Tasks whose worker died while it held them",
                |it| &it.suspected,
            ),
            (
                "tierline_leases_lost",
                "Tasks whose lease was lost while their handler ran",
                |it| &it.leases_lost,
            ),
            (
                "tierline_relayed",
                "Rows that the relay has published to the queue of their tier",
                |it| &it.relayed,
            ),
            (
                "tierline_rerouted",
                "Delayed tasks that fell due while the queue of their tier was away, and are in it now",
                |it| &it.rerouted,
            ),
        ];
        for (name, help, of) in by_tier {
            let counts = self.tiers();
            let counts = counts.map(|(tier, counts)| ([("tier", tier)], load(of(counts))));
            counters(encoder, name, help, self.known(counts))?;
        }
        let redriven = self.tiers().flat_map(|(tier, counts)| {
            RESULTS
                .iter()
                .zip(&counts.redriven)
                .filter_map(move |(result, count)| {
                    let count = load(count);
                    (count > 0).then_some(([("tier", tier), ("result", *result)], count))
                })
        });
        counters(
            encoder,
            "tierline_redriven",
            "Dead letters that were published again, by the result",
            redriven,
        )?;
        let promoted = self.tiers().flat_map(|(from, counts)| {
            let promoted = counts.promoted.get().into_iter().flatten().enumerate();
            promoted.filter_map(move |(to, count)| {
                let labels = [("from", from), ("to", self.names.tier(to))];
                let count = load(count);
                (count > 0).then_some((labels, count))
            })
        });
        counters(
            encoder,
            "tierline_promoted",
            "Tasks that had waited for too long in a tier and were moved to another one",
            promoted,
        )
    }

    fn encode_groups(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let running = self.running.read();
        let tiers = || {
            let groups = self.groups.iter().filter(|group| group.is_worked());
            groups.flat_map(|group| group.tiers.iter().map(move |tier| (group, tier)))
        };
        let in_progress = tiers().map(|(group, tier)| {
            let of_tier = running.iter().filter(|it| it.tier == tier.tier);
            let labels = [
                ("group", &*group.name),
                ("tier", self.names.tier(tier.tier)),
            ];
            (labels, of_tier.map(|it| it.count).sum::<u64>())
        });
        gauges(
            encoder,
            "tierline_in_progress",
            "Handlers that run",
            in_progress,
        )?;
        let slots = self.groups.iter().filter(|group| group.is_worked());
        let slots = slots.map(|group| ([("group", &*group.name)], count(&group.slots)));
        gauges(
            encoder,
            "tierline_slots",
            "How many handlers may run at once",
            slots,
        )?;
        let oldest = running.iter().map(|it| {
            let (tier, task) = (self.names.tier(it.tier), self.names.task(it.task));
            ([("tier", tier), ("task", task)], it.oldest.as_secs_f64())
        });
        gauges(
            encoder,
            "tierline_oldest_run_seconds",
            "For how long the oldest handler has run that runs",
            oldest,
        )?;
        let consuming = tiers().map(|(group, tier)| {
            let labels = [
                ("group", &*group.name),
                ("tier", self.names.tier(tier.tier)),
            ];
            (labels, flag(&tier.is_consuming))
        });
        gauges(
            encoder,
            "tierline_consuming",
            "Whether a worker is subscribed to the queue of a tier, or holds leases of its rows",
            consuming,
        )
    }

    fn encode_schedules(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let late = self.schedule_late.read(&self.edges);
        let has_schedules = self.schedules.len() > 1;
        if late.count > 0 || has_schedules {
            histogram(
                encoder,
                "tierline_schedule_late_seconds",
                "Time from when a run of a schedule was due to when it was published",
                late,
            )?;
        }
        let counts = |of: fn(&super::counters::ScheduleCounts) -> &AtomicU64| {
            let schedules = self.schedules.iter().enumerate();
            schedules.filter_map(move |(index, schedule)| {
                let count = load(of(schedule));
                let is_of_map = index + 1 < self.schedules.len();
                let is_shown = count > 0 || is_of_map;
                is_shown.then_some(([("schedule", &*schedule.name)], count))
            })
        };
        counters(
            encoder,
            "tierline_schedule_missed",
            "Runs of a schedule that were skipped",
            counts(|it| &it.missed),
        )?;
        counters(
            encoder,
            "tierline_schedule_published",
            "Runs of a schedule that were published",
            counts(|it| &it.published),
        )
    }

    fn encode_process(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let process = &self.process;
        let connected = PURPOSES.into_iter().zip(&process.connected);
        let connected =
            connected.map(|(purpose, it)| ([("purpose", purpose_label(purpose))], count(it)));
        gauges(
            encoder,
            "tierline_connected",
            "Connections to the broker that are open",
            connected,
        )?;
        let failures = PURPOSES.into_iter().zip(&process.connect_failures);
        let failures =
            failures.map(|(purpose, it)| ([("purpose", purpose_label(purpose))], load(it)));
        counters(
            encoder,
            "tierline_connect_failures",
            "Attempts to connect to the broker that failed",
            failures,
        )?;
        let restarts = process.restarts.lock();
        let restarts = restarts.unwrap_or_else(PoisonError::into_inner).clone();
        let restarts = restarts.iter();
        counters(
            encoder,
            "tierline_restarts",
            "Parts of the app that panicked and were started again",
            restarts.map(|(service, count)| ([("service", &**service)], *count)),
        )?;
        gauge(
            encoder,
            "tierline_leader",
            "Whether this process publishes the runs of schedules that are due",
            flag(&process.leads),
        )?;
        gauges(
            encoder,
            "tierline_build_info",
            "The version of tierline",
            [([("version", env!("CARGO_PKG_VERSION"))], 1_u64)],
        )
    }

    /// All tiers of the map, and the one for those that it does not have.
    fn tiers(&self) -> impl Iterator<Item = (&str, &TierCounts)> {
        let tiers = self.tiers.iter().enumerate();
        tiers.map(|(index, counts)| (self.names.tier(index), counts))
    }

    /// Without the tier that the map does not have, as long as nothing is counted for it.
    fn known<'a>(
        &self,
        counts: impl Iterator<Item = (Labels<'a, 1>, u64)>,
    ) -> impl Iterator<Item = (Labels<'a, 1>, u64)> {
        let tiers = self.names.tiers().len();
        counts
            .enumerate()
            .filter(move |(index, (_, count))| *index < tiers || *count > 0)
            .map(|(_, counted)| counted)
    }

    /// Every task in the tier that the map gives it, and in each tier where anything was counted.
    fn cells(&self) -> impl Iterator<Item = Cell<'_>> {
        let worked: Vec<usize> = self
            .groups
            .iter()
            .filter(|group| group.is_worked())
            .flat_map(|group| group.tiers.iter().map(|it| it.tier))
            .collect();
        let tiers = self.tiers.len();
        (0..=self.names.tasks()).flat_map(move |task| {
            let worked = worked.clone();
            let mapped = (task < self.names.tasks()).then(|| self.names.tier_of(task));
            (0..tiers).filter_map(move |tier| {
                let counts = self.counted(task, tier);
                let is_mapped = mapped == Some(tier);
                (is_mapped || counts.is_some()).then(|| Cell {
                    task: self.names.task(task),
                    tier: self.names.tier(tier),
                    is_mapped,
                    is_worked: is_mapped && worked.contains(&tier),
                    counts,
                })
            })
        })
    }
}

/// A task in a tier.
#[derive(Clone, Copy)]
struct Cell<'a> {
    task: &'a str,
    tier: &'a str,
    /// Whether the map gives the task this tier.
    is_mapped: bool,
    /// Whether this process works for it.
    is_worked: bool,
    counts: Option<&'a TaskCounts>,
}

impl<'a> Cell<'a> {
    fn labels<const MORE: usize>(
        &self,
        more: [(&'a str, &'a str); MORE],
    ) -> Vec<(&'a str, &'a str)> {
        let labels = [("tier", self.tier), ("task", self.task)];
        labels.into_iter().chain(more).collect()
    }
}

fn load(count: &AtomicU64) -> u64 {
    count.load(Ordering::Relaxed)
}

fn count(gauge: &AtomicI64) -> u64 {
    u64::try_from(gauge.load(Ordering::Relaxed)).unwrap_or_default()
}

fn flag(flag: &AtomicBool) -> u64 {
    flag.load(Ordering::Relaxed).into()
}
