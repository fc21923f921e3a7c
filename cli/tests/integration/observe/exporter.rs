//! An exporter that says what a test tells it to, under the names of the real one. What it exports is text in the
//! format of Prometheus, so a test can scrape the app in its place.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::{Arc, Mutex};

use tierline::Topology;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;

/// The series of an app by name and labels, which a test changes while Prometheus scrapes them.
#[derive(Clone, Default)]
pub(super) struct Series(Arc<Mutex<BTreeMap<String, f64>>>);

/// What an exporter shows.
#[derive(Clone)]
pub(super) enum Page {
    Scripted(Series),
    /// The metrics of a process.
    #[cfg(feature = "admin")]
    Real(tierline::metrics::Metrics),
}

impl Page {
    async fn content(&self) -> (&'static str, String) {
        match self {
            Self::Scripted(series) => ("text/plain; version=0.0.4", series.text()),
            #[cfg(feature = "admin")]
            Self::Real(metrics) => (
                tierline::metrics::Metrics::CONTENT_TYPE,
                metrics.render().await,
            ),
        }
    }
}

/// Serves a page at every path until it is dropped.
pub(super) struct Exporter {
    pub(super) address: String,
    serving: JoinHandle<()>,
}

impl Exporter {
    pub(super) async fn start(page: Page) -> Self {
        Self::start_at("127.0.0.1:0", page).await
    }

    pub(super) async fn start_at(address: &str, page: Page) -> Self {
        let listener = TcpListener::bind(address).await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let serving = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(answer(stream, page.clone()));
            }
        });
        Self { address, serving }
    }

    /// Ends it, and frees its address.
    pub(super) async fn end(mut self) {
        self.serving.abort();
        let _ = (&mut self.serving).await;
    }
}

impl Drop for Exporter {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

async fn answer(mut stream: TcpStream, page: Page) -> std::io::Result<()> {
    let mut request = [0; 4_096];
    let _ = stream.read(&mut request).await?;
    let (content_type, text) = page.content().await;
    let head = format!(
        "HTTP/1.1 200 OK\r\ncontent-type: {content_type}\r\ncontent-length: {}\r\nconnection: close\r\n\r\n",
        text.len()
    );
    stream.write_all(head.as_bytes()).await?;
    stream.write_all(text.as_bytes()).await?;
    stream.shutdown().await
}

impl Series {
    /// Those of an app in which all is well and that has done nothing yet.
    pub(super) fn of(topology: &Topology) -> Self {
        let series = Self::default();
        series.set("tierline_build_info", &[("version", "0.1.0")], 1.0);
        for name in ["tierline_schedule_leader", "tierline_leader"] {
            series.set(name, &[], 1.0);
        }
        series.set("tierline_stats_problems", &[], 0.0);
        for purpose in ["publish", "work", "collect"] {
            series.set("tierline_connected", &[("purpose", purpose)], 2.0);
        }
        for schedule in topology.schedules() {
            let labels = [("schedule", schedule.name.as_str())];
            series.set("tierline_schedule_missed_total", &labels, 0.0);
        }
        for group in topology.groups() {
            let labels = [("group", group.name.as_str())];
            series.set("tierline_slots", &labels, f64::from(group.concurrency));
            series.set("tierline_processes", &labels, 1.0);
        }
        for tier in topology.tiers() {
            let labels = [("tier", tier.name.as_str())];
            for gauge in [
                "waiting",
                "scheduled",
                "parked",
                "paused",
                "limit_saturated",
                "relay_waiting",
                "oldest_wait_seconds",
            ] {
                series.set(&format!("tierline_{gauge}"), &labels, 0.0);
            }
            series.set("tierline_consumers", &labels, 1.0);
            for counter in ["suspected_total", "leases_lost_total"] {
                series.set(&format!("tierline_{counter}"), &labels, 0.0);
            }
            if let (Some(slo), Some(objective)) = (tier.slo, tier.objective()) {
                series.set("tierline_slo_seconds", &labels, slo.as_secs_f64());
                series.set("tierline_slo_objective", &labels, objective);
                for met in ["true", "false"] {
                    series.add("tierline_slo_tasks_total", &[labels[0], ("met", met)], 0.0);
                }
            }
            series.set(
                "tierline_dead_letters",
                &[labels[0], ("state", "dead")],
                0.0,
            );
            series.publish(&tier.name, 0.0);
            series.start(&tier.name, 0.0, true);
            series.end(&tier.name, "done", 0.0);
            series.die(&tier.name, 0.0);
        }
        for group in topology.groups() {
            for tier in &group.tiers {
                let labels = [("group", group.name.as_str()), ("tier", tier)];
                series.set("tierline_in_progress", &labels, 1.0);
            }
        }
        series
    }

    pub(super) fn publish(&self, tier: &str, count: f64) {
        let labels = [("tier", tier), ("task", "a.task"), ("result", "stored")];
        self.add("tierline_published_total", &labels, count);
    }

    /// So many tasks start, and have waited for less than their SLO or far longer.
    pub(super) fn start(&self, tier: &str, count: f64, is_in_time: bool) {
        let labels = [("tier", tier), ("task", "a.task")];
        let seconds = if is_in_time { 0.05 } else { 500.0 };
        self.observe("tierline_wait_seconds", &labels, seconds, count);
        let met = [
            ("tier", tier),
            ("met", if is_in_time { "true" } else { "false" }),
        ];
        if self.has("tierline_slo_tasks_total", &met) {
            self.add("tierline_slo_tasks_total", &met, count);
        }
    }

    pub(super) fn end(&self, tier: &str, outcome: &str, count: f64) {
        let labels = [("tier", tier), ("task", "a.task"), ("outcome", outcome)];
        self.add("tierline_tasks_total", &labels, count);
        self.observe("tierline_run_seconds", &labels, 0.05, count);
    }

    pub(super) fn die(&self, tier: &str, count: f64) {
        self.end(tier, "dead", count);
        let reason = [
            ("tier", tier),
            ("task", "a.task"),
            ("reason", "retries_exhausted"),
        ];
        self.add("tierline_dead_total", &reason, count);
        self.add(
            "tierline_dead_letters",
            &[("tier", tier), ("state", "dead")],
            count,
        );
    }

    pub(super) fn schedule(&self) {
        self.observe("tierline_schedule_late_seconds", &[], 0.05, 1.0);
    }

    fn observe(&self, name: &str, labels: &[(&str, &str)], seconds: f64, count: f64) {
        for edge in ["0.1", "1.0", "10.0", "100.0", "1000.0", "+Inf"] {
            let is_below = edge.parse().is_ok_and(|edge: f64| seconds <= edge);
            let labels = [labels, &[("le", edge)]].concat();
            let counted = if is_below { count } else { 0.0 };
            self.add(&format!("{name}_bucket"), &labels, counted);
        }
        self.add(&format!("{name}_count"), labels, count);
        self.add(&format!("{name}_sum"), labels, seconds * count);
    }

    fn key(name: &str, labels: &[(&str, &str)]) -> String {
        let labels: Vec<_> = labels
            .iter()
            .map(|(key, it)| format!("{key}=\"{it}\""))
            .collect();
        format!("{name}{{{}}}", labels.join(","))
    }

    fn has(&self, name: &str, labels: &[(&str, &str)]) -> bool {
        self.0
            .lock()
            .unwrap()
            .contains_key(&Self::key(name, labels))
    }

    pub(super) fn set(&self, name: &str, labels: &[(&str, &str)], value: f64) {
        let mut series = self.0.lock().unwrap();
        series.insert(Self::key(name, labels), value);
    }

    fn add(&self, name: &str, labels: &[(&str, &str)], count: f64) {
        let mut series = self.0.lock().unwrap();
        *series.entry(Self::key(name, labels)).or_default() += count;
    }

    fn text(&self) -> String {
        let series = self.0.lock().unwrap();
        series.iter().fold(String::new(), |mut text, (key, value)| {
            let _ = writeln!(text, "{key} {value}");
            text
        })
    }
}
