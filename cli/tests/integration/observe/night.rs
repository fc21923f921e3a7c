//! A night of the hotel on real servers: processes with metrics of their own, `tierline serve` with the state of the app,
//! and a Prometheus that scrapes both and has the hotel's rules.

use std::collections::BTreeSet;
use std::fmt::Write;
use std::time::{Duration, Instant};

use tierline::Topology;
use tierline::dead::Filter;
use tierline::topology::export::{RuleSettings, Rules, dashboard};
use tierline_testbed::{FiringAlert, Prometheus, ScrapeTarget, database, vhost};
use tokio::time::Interval;

use super::hotel;
use super::panels::{Answer, PanelQuery, panel_queries, selected};
use super::processes::{LOAD, OF_EACH_TIER, Process, Provider, Servers};
use crate::command::File;
use crate::serve::{Serving, TOKEN};

/// An hour of the rules is a minute, and five minutes are five seconds. SLOs are not shortened.
const FACTOR: u32 = 60;
/// For how long payments fail, in real time.
const OUTAGE: Duration = Duration::from_secs(20);
/// For how long the urgent workers are gone, in real time.
const STOPPED: Duration = Duration::from_secs(90);
/// How long a test waits for something that must happen.
const LIMIT: Duration = Duration::from_secs(180);
/// A schedule that comes due while the test runs.
const OFTEN: &str = "
[schedules.often]
task = \"health.check_schedules\"
every = \"10s\"
expires = \"5s\"
";
/// With this, what the panels show is written to the docs.
const WRITE: &str = "TIERLINE_WRITE_PANELS";
const TEST: &str = "a_night_on_real_servers";
const HOTEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../topology/hotel.toml");
const PANELS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/observe/panels.md");

/// An alert by its severity, its name, and its tier or group.
type Named = (String, String, String);

/// What is watched all night.
struct Watch {
    prometheus: Prometheus,
    /// What is published in a second: tasks, and how many of each.
    load: &'static [(&'static str, usize)],
    begin: Instant,
    seconds: Interval,
    ticks: u32,
    /// When alerts began to fire, and when they ended.
    fired: Vec<(Named, f64, Option<f64>)>,
    /// The queries of the dashboard, with their last answer that has more than zeros.
    panels: Vec<(PanelQuery, Option<(f64, Answer)>)>,
    /// What the rules select and Prometheus never had.
    unseen: BTreeSet<String>,
}

impl Watch {
    /// Starts a Prometheus with the rules of a map, which scrapes these.
    async fn start(
        topology: &Topology,
        serving: &Serving,
        processes: &[&Process],
        load: &'static [(&'static str, usize)],
    ) -> Self {
        Prometheus::provide().await.unwrap();
        let settings = RuleSettings::new(topology).shortened_by(FACTOR);
        let rules = Rules::new(topology, &settings);
        println!("{}", rules.header.join("\n"));
        let open = processes.iter().map(|it| ScrapeTarget::open(it.address()));
        let serve = serving.address.to_string();
        let guarded = ScrapeTarget::guarded(&serve, "/admin/metrics", TOKEN);
        let targets: Vec<_> = open.chain([guarded]).collect();
        let prometheus = Prometheus::start(topology.app(), &targets, &rules.to_string()).await;
        let panels = panel_queries(&dashboard(topology, &settings));
        Self {
            prometheus: prometheus.unwrap(),
            load,
            begin: Instant::now(),
            seconds: tokio::time::interval(Duration::from_secs(1)),
            ticks: 0,
            fired: Vec::new(),
            panels: panels.into_iter().map(|panel| (panel, None)).collect(),
            unseen: selected(&serde_json::json!(rules)),
        }
    }

    /// Publishes until an expression has an answer.
    async fn until_it_says(&mut self, desk: &Process, expression: &str) {
        while self.prometheus.query(expression).await.unwrap().is_empty() {
            self.second(desk).await;
            assert!(self.begin.elapsed() < LIMIT, "no answer: {expression}");
        }
    }

    /// Publishes second after second until the alerts that fire are as wanted.
    async fn until(&mut self, desk: &Process, what: &str, is_so: impl Fn(&Watch) -> bool) {
        let begin = Instant::now();
        loop {
            self.second(desk).await;
            if is_so(self) {
                let firing = self.firing();
                let firing: Vec<_> = firing.map(|(_, name, of)| format!("{name} {of}")).collect();
                println!("{:6.1} s: {what}: {firing:?}", self.now());
                return;
            }
            assert!(begin.elapsed() < LIMIT, "not so: {what}: {:?}", self.fired);
        }
    }

    async fn second(&mut self, desk: &Process) {
        self.seconds.tick().await;
        for (task, count) in self.load {
            for _ in 0..*count {
                let payload = serde_json::Value::Null;
                desk.app.publish_named(task, &payload).await.unwrap();
            }
        }
        let alerts = self.prometheus.alerts().await.unwrap();
        let firing: Vec<Named> = alerts.iter().filter(|it| it.is_firing).map(named).collect();
        let now = self.now();
        for (name, _, end) in &mut self.fired {
            if end.is_none() && !firing.contains(name) {
                *end = Some(now);
            }
        }
        for name in firing {
            if !self.is_firing(&name.1, &name.2) {
                self.fired.push((name, now, None));
            }
        }
        self.ticks += 1;
        if self.ticks.is_multiple_of(5) {
            self.ask_panels(now).await;
            for selector in self.unseen.clone() {
                if !self.prometheus.query(&selector).await.unwrap().is_empty() {
                    self.unseen.remove(&selector);
                }
            }
        }
    }

    async fn ask_panels(&mut self, now: f64) {
        for (panel, last) in &mut self.panels {
            let Some(answer) = panel.ask(&self.prometheus).await else {
                continue;
            };
            if last.is_none() || !answer.is_all_zero() {
                *last = Some((now, answer));
            }
        }
    }

    fn now(&self) -> f64 {
        self.begin.elapsed().as_secs_f64()
    }

    fn firing(&self) -> impl Iterator<Item = &Named> {
        let open = self.fired.iter().filter(|(_, _, end)| end.is_none());
        open.map(|(name, ..)| name)
    }

    fn is_firing(&self, name: &str, of: &str) -> bool {
        self.firing().any(|it| it.1 == name && it.2 == of)
    }

    /// Whether it has fired at any time.
    fn has_fired(&self, name: &str, of: &str) -> bool {
        self.fired.iter().any(|(it, ..)| it.1 == name && it.2 == of)
    }

    /// The alerts that have fired, as a table.
    fn alerts(&self) -> String {
        let head = "| alert | of | severity | fired | resolved |\n|---|---|---|---|---|\n";
        let mut text = head.to_owned();
        for ((severity, name, of), begin, end) in &self.fired {
            let end = end.map_or("not yet".to_owned(), |end| format!("{end:.1} s"));
            let _ = writeln!(
                text,
                "| {name} | {of} | {severity} | {begin:.1} s | {end} |"
            );
        }
        text
    }
}

fn named(alert: &FiringAlert) -> Named {
    let label = |name| alert.labels.get(name).cloned();
    let of = label("tier").or(label("group")).unwrap_or_default();
    let severity = label("severity").unwrap_or_default();
    (severity, alert.name.clone(), of)
}

#[tokio::test]
async fn a_night_on_real_servers_raises_the_alerts_of_its_faults_and_fills_the_dashboard() {
    let hotel = hotel();
    let (vhost, database) = tokio::join!(vhost(), database());
    let serving = Serving::of(HOTEL, vhost.amqp_url(), database.url()).await;
    let provider = Provider::default();
    let servers = Servers {
        amqp: vhost.amqp_url(),
        postgres: database.url(),
        provider: &provider,
    };
    let anywhere = "127.0.0.1:0";
    let desk = Process::start(&hotel, &servers, anywhere, &[]).await;
    let urgent = Process::start(&hotel, &servers, anywhere, &["urgent"]).await;
    let others = ["normal", "deferred", "calls"];
    let mut rest = Process::start(&hotel, &servers, anywhere, &others).await;
    rest.schedule();

    let mut watch = Watch::start(&hotel, &serving, &[&desk, &urgent, &rest], &LOAD).await;
    println!(
        "Payments fail for {OUTAGE:?}, and the workers are stopped for {STOPPED:?} of real time."
    );
    let judged = "sum(up{job=\"hotel\"}) == 4 and on () tier:tierline_slo_late:ratio_rate5s{tier=\"critical\"} == 0";
    watch.until_it_says(&desk, judged).await;

    // What a night does not fill by itself: a limit, runs of a schedule within minutes, and a dead letter of each tier.
    let control = desk.app.control().unwrap();
    let limit = control.limit_tier("bulk").rate("100/s");
    limit.by("ada").because("a rehearsal").await.unwrap();
    let often = format!("{}{OFTEN}", std::fs::read_to_string(HOTEL).unwrap());
    let often = Topology::parse(&often).unwrap();
    let often = often.schedules().iter().find(|it| it.name == "often");
    let schedules = desk.app.schedules().unwrap();
    schedules.add(often.unwrap()).await.unwrap();
    for task in OF_EACH_TIER {
        let poison = serde_json::json!({ "is_poison": true });
        desk.app.publish_named(task, &poison).await.unwrap();
    }
    watch.until(&desk, "all is well", |it| it.ticks > 15).await;

    provider.set_down(true);
    println!("{:6.1} s: payments fail", watch.now());
    let begin = Instant::now();
    let grown = |it: &Watch| {
        it.is_firing("TierlineDeadLettersGrow", "critical") && begin.elapsed() >= OUTAGE
    };
    watch.until(&desk, "payments are dead letters", grown).await;
    provider.set_down(false);
    let log = desk.app.dead_letters().unwrap();
    let letters = log.by("the night porter").because("payments are back");
    let redriven = letters.redrive_all(Filter::default()).run().await.unwrap();
    let burned = watch.fired.iter().find(|(it, ..)| it.1.contains("Burn"));
    assert_eq!(burned, None, "{:?}", watch.fired);
    println!(
        "{:6.1} s: payments work, {} are redriven",
        watch.now(),
        redriven.done
    );

    let address = urgent.address().to_owned();
    urgent.end().await;
    let begin = Instant::now();
    println!("{:6.1} s: the urgent workers are stopped", watch.now());
    let nobody = |it: &Watch| {
        let tiers = ["critical", "high"];
        tiers.map(|tier| it.is_firing("TierlineNoConsumers", tier)) == [true; 2]
            && begin.elapsed() >= STOPPED
    };
    watch.until(&desk, "nobody works", nobody).await;
    let urgent = Process::start(&hotel, &servers, &address, &["urgent"]).await;
    let burns = |it: &Watch| it.is_firing("TierlineSloBurnFast", "critical");
    watch.until(&desk, "they are back, and late", burns).await;
    let is_well = |it: &Watch| {
        let has_resolved = |(_, name, _): &Named| {
            !name.contains("NoConsumers")
                && !name.contains("DeadLetters")
                && name != "TierlineSloBurnFast"
        };
        it.firing().all(has_resolved)
    };
    watch.until(&desk, "all is well again", is_well).await;
    println!("{}", watch.alerts());
    assert!(!watch.has_fired("TierlineStatsIncomplete", ""));
    let errors = watch.prometheus.rule_errors().await.unwrap();
    assert!(errors.is_empty(), "{errors:#?}");

    // An alert on what nobody exports is silent for ever. Tiers without a limit have none that could be saturated.
    let unseen = watch.unseen.iter();
    let unseen: Vec<_> = unseen
        .filter(|it| !it.contains("limit_saturated"))
        .collect();
    assert!(unseen.is_empty(), "nobody exports {unseen:#?}");

    let table = table(&hotel, &watch);
    let empty: Vec<_> = watch.panels.iter().filter(|it| it.1.is_none()).collect();
    println!("{table}");
    assert!(empty.is_empty(), "without an answer: {empty:#?}");
    if std::env::var_os(WRITE).is_some() {
        std::fs::write(PANELS, table).unwrap();
    }
    for process in [desk, urgent, rest] {
        process.end().await;
    }
    assert_eq!(serving.terminated().await, 0);
}

#[tokio::test]
async fn workers_of_rows_that_are_gone_raise_an_alert_until_they_are_back() {
    let text = std::fs::read_to_string(HOTEL).unwrap();
    let on_broker = "[tiers.calls]\nqueue = \"classic\"";
    assert!(text.contains(on_broker));
    let text = text.replace(on_broker, "[tiers.calls]\nqueue = \"postgres\"");
    let map = File::new("night", &text);
    let hotel = Topology::load(&map.0).unwrap();
    let (vhost, database) = tokio::join!(vhost(), database());
    let serving = Serving::of(&map.0, vhost.amqp_url(), database.url()).await;
    let servers = Servers {
        amqp: vhost.amqp_url(),
        postgres: database.url(),
        provider: &Provider::default(),
    };
    let anywhere = "127.0.0.1:0";
    let desk = Process::start(&hotel, &servers, anywhere, &[]).await;
    let calls = Process::start(&hotel, &servers, anywhere, &["calls"]).await;
    let load = &[("calls.transcribe", 2)];
    let mut watch = Watch::start(&hotel, &serving, &[&desk, &calls], load).await;
    let worked = "tierline_processes{group=\"calls\"} == 1 and on () tierline_wait_seconds_count{tier=\"calls\"} > 0";
    watch.until_it_says(&desk, worked).await;

    let address = calls.address().to_owned();
    calls.end().await;
    println!("{:6.1} s: the workers are gone", watch.now());
    let nobody = |it: &Watch| it.is_firing("TierlineNoProcesses", "calls");
    watch.until(&desk, "nobody works", nobody).await;
    let gone = watch
        .prometheus
        .query("tierline_processes{group=\"calls\"}");
    let gone = gone.await.unwrap();
    assert_eq!(gone[0]["value"][1], "0", "0, and not absent: {gone:?}");
    let calls = Process::start(&hotel, &servers, &address, &["calls"]).await;
    let is_well = |it: &Watch| !nobody(it);
    watch.until(&desk, "they are back", is_well).await;
    println!("{}", watch.alerts());
    for process in [desk, calls] {
        process.end().await;
    }
    assert_eq!(serving.terminated().await, 0);
}

/// The queries of the dashboard as it is in the docs, and what those with shorter windows returned.
fn table(hotel: &Topology, watch: &Watch) -> String {
    let panels = panel_queries(&dashboard(hotel, &RuleSettings::new(hotel)));
    let mut text = format!(
        "# What the panels show\n\n\
         The queries of [the hotel's dashboard](hotel.dashboard.json), and what a Prometheus returned in a night of the hotel on a\n\
         RabbitMQ and a Postgres. Windows were shortened by a factor of {FACTOR}, `$__rate_interval` was 10s and `$__range` 1m. Each\n\
         answer is the last one that had more than zeros, and when. Payments failed for {} s, a task of each tier died, the urgent\n\
         workers were gone for {} s, bulk had a limit, and a schedule ran every ten seconds.\n\n\
         Written by a test: `{WRITE}=1 cargo xtask test {TEST}`\n",
        OUTAGE.as_secs(),
        STOPPED.as_secs()
    );
    let _ = write!(text, "\n## Alerts of that night\n\n{}", watch.alerts());
    let mut row = "";
    for (panel, (_, answer)) in panels.iter().zip(&watch.panels) {
        if row != panel.row {
            row = &panel.row;
            let _ = write!(
                text,
                "\n## {row}\n\n| panel | series | query | returned |\n|---|---|---|---|\n"
            );
        }
        let answer = match answer {
            Some((at, answer)) => format!("{} (at {at:.0} s)", answer.cell()),
            None => "nothing".to_owned(),
        };
        let PanelQuery { title, legend, .. } = panel;
        let _ = writeln!(text, "| {title} | {legend} | {} | {answer} |", panel.cell());
    }
    text
}
