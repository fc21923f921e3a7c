//! The rules and the dashboard in a real Prometheus that scrapes an exporter.

use std::time::{Duration, Instant};

use tierline::Topology;
use tierline::topology::export::{RuleSettings, Rules, dashboard};
use tierline_testbed::{FiringAlert, Prometheus, ScrapeTarget};
use tokio::sync::Mutex;
use tokio::time::Interval;

use super::exporter::{Exporter, Page, Series};
use super::hotel;
use super::panels::panel_queries;

const LIMIT: Duration = Duration::from_secs(120);
/// An hour of the rules is a minute, and five minutes are five seconds.
const FACTOR: u32 = 60;

/// The exporter of an app, and a Prometheus beside it that has its rules.
struct Observed {
    series: Series,
    prometheus: Prometheus,
    settings: RuleSettings,
    begin: Instant,
    seconds: Mutex<Interval>,
    _exporter: Exporter,
}

impl Observed {
    async fn start(topology: &Topology) -> Self {
        Prometheus::provide().await.unwrap();
        let series = Series::of(topology);
        let exporter = Exporter::start(Page::Scripted(series.clone())).await;
        let settings = RuleSettings::new(topology).shortened_by(FACTOR);
        let rules = Rules::new(topology, &settings);
        println!("{}", rules.header.join("\n"));
        let targets = [ScrapeTarget::open(&exporter.address)];
        let prometheus = Prometheus::start(topology.app(), &targets, &rules.to_string()).await;
        Self {
            series,
            prometheus: prometheus.unwrap(),
            settings,
            begin: Instant::now(),
            seconds: Mutex::new(tokio::time::interval(Duration::from_secs(1))),
            _exporter: exporter,
        }
    }

    /// Plays a second of a good day, with what `spoil` adds.
    async fn play_second(&self, topology: &Topology, spoil: impl FnOnce(&Series)) {
        self.seconds.lock().await.tick().await;
        for tier in topology.tiers() {
            self.series.publish(&tier.name, 20.0);
            self.series.end(&tier.name, "done", 20.0);
        }
        self.series.schedule();
        spoil(&self.series);
    }

    /// Plays second after second until the alerts that fire are as wanted.
    async fn until(
        &self,
        topology: &Topology,
        what: &str,
        mut spoil: impl FnMut(&Series),
        is_so: impl Fn(&[FiringAlert]) -> bool,
    ) -> Vec<FiringAlert> {
        loop {
            self.play_second(topology, &mut spoil).await;
            let mut alerts = self.prometheus.alerts().await.unwrap();
            alerts.retain(|alert| alert.is_firing);
            if is_so(&alerts) {
                let names: Vec<_> = alerts.iter().map(shown).collect();
                println!(
                    "{:5.1} s: {what}: {names:?}",
                    self.begin.elapsed().as_secs_f64()
                );
                return alerts;
            }
            assert!(self.begin.elapsed() < 3 * LIMIT, "{what}: {alerts:?}");
        }
    }
}

fn shown(alert: &FiringAlert) -> String {
    let tier = alert.labels.get("tier").map_or("", String::as_str);
    format!("{} {tier}", alert.name)
}

fn start_all(topology: &Topology, series: &Series, but: &str) {
    let tiers = topology.tiers().iter().filter(|tier| tier.name != but);
    tiers.for_each(|tier| series.start(&tier.name, 20.0, true));
}

#[tokio::test]
async fn every_query_of_the_dashboard_has_an_answer_from_a_real_prometheus() {
    let hotel = hotel();
    let observed = Observed::start(&hotel).await;
    let dashboard = dashboard(&hotel, &observed.settings);
    let mut open: Vec<_> = panel_queries(&dashboard);
    let all = open.len();
    let begin = Instant::now();
    while !open.is_empty() {
        let play = |series: &Series| start_all(&hotel, series, "");
        observed.play_second(&hotel, play).await;
        let mut empty = Vec::new();
        for panel in open {
            if panel.ask(&observed.prometheus).await.is_none() {
                empty.push(panel);
            }
        }
        open = empty;
        assert!(begin.elapsed() < LIMIT, "no answer for {open:#?}");
    }
    println!("{all} queries had an answer");
    let errors = observed.prometheus.rule_errors().await.unwrap();
    assert!(errors.is_empty(), "{errors:#?}");
}

/// The night of the demo, by an exporter that is told what to say.
#[tokio::test]
async fn an_outage_raises_dead_letters_and_stopped_workers_a_burn_and_both_resolve() {
    let hotel = hotel();
    let observed = Observed::start(&hotel).await;
    let has = |alerts: &[FiringAlert], name: &str| {
        let is_it = |alert: &FiringAlert| {
            let tier = alert.labels.get("tier");
            alert.name == name && tier.is_some_and(|tier| tier == "critical")
        };
        alerts.iter().any(is_it)
    };
    let play = |series: &Series| start_all(&hotel, series, "");

    let recorded = "tier:tierline_slo_late:ratio_rate5s{tier=\"critical\"}";
    let begin = Instant::now();
    while observed
        .prometheus
        .query(recorded)
        .await
        .unwrap()
        .is_empty()
    {
        observed.play_second(&hotel, play).await;
        assert!(begin.elapsed() < LIMIT);
    }

    let outage = |series: &Series| {
        play(series);
        series.die("critical", 2.0);
    };
    let grown = |alerts: &[FiringAlert]| has(alerts, "TierlineDeadLettersGrow");
    let alerts = observed
        .until(&hotel, "payments are down", outage, grown)
        .await;
    let burning = alerts.iter().filter(|alert| alert.name.contains("Burn"));
    assert_eq!(burning.count(), 0, "{alerts:?}");

    // While nothing of it starts, nothing is late yet: the alerts on what waits are for that time.
    let mut waiting = 0.0;
    let stopped = |series: &Series| {
        start_all(&hotel, series, "critical");
        waiting += 20.0;
        series.set("tierline_waiting", &[("tier", "critical")], waiting);
        series.set("tierline_consumers", &[("tier", "critical")], 0.0);
    };
    let nobody = |alerts: &[FiringAlert]| has(alerts, "TierlineNoConsumers");
    observed
        .until(&hotel, "the workers are stopped", stopped, nobody)
        .await;

    let mut left: f64 = 400.0;
    let late = |series: &Series| {
        start_all(&hotel, series, "critical");
        left = (left - 40.0).max(0.0);
        series.start("critical", 40.0, left == 0.0);
        series.set("tierline_waiting", &[("tier", "critical")], left);
        series.set("tierline_consumers", &[("tier", "critical")], 1.0);
    };
    let burns = |alerts: &[FiringAlert]| has(alerts, "TierlineSloBurnFast");
    observed
        .until(&hotel, "they are back, and late", late, burns)
        .await;

    observed
        .series
        .set("tierline_waiting", &[("tier", "critical")], 0.0);
    let resolved = |alerts: &[FiringAlert]| !burns(alerts) && !grown(alerts);
    observed
        .until(&hotel, "all is well again", play, resolved)
        .await;
}
