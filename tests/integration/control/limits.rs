//! Tiers with limits, over several processes.

use std::sync::{Arc, Mutex};
use std::time::Instant;

use tierline::{Error, Registry, Tierline, Topology};
use tierline_testbed::{Network, vhost};

use super::{HOMES, Process, Runs, Servers, Ship, until};
use crate::backlog::behind_a_proxy;
use crate::worker::Heard;

/// A strict group in which the upper tier has a limit.
fn map(home: &str, limit: &str) -> String {
    format!(
        r#"
        app = "shop"
        [tiers.normal]
        queue = "{home}"
        {limit}
        [tiers.other]
        queue = "{home}"
        [groups.all]
        tiers = ["normal", "other"]
        concurrency = 4
        prefetch = 2
        [tasks]
        "order.ship" = "normal"
        "order.notify" = "other"
        "#
    )
}

/// When each task started.
#[derive(Debug, Clone, Default)]
struct Starts(Arc<Mutex<Vec<Instant>>>);

impl Servers {
    /// How many processes have a share of a limit.
    async fn holders(&self) -> i64 {
        let sql = "SELECT coalesce(sum(jsonb_array_length(state::jsonb -> 'holders')), 0)::bigint FROM tierline.limits";
        self.count(sql).await
    }
}

impl Starts {
    /// Handlers of `order.ship` that note when they start, beside those of `order.notify`.
    fn registry(&self) -> Registry {
        let mut registry = Registry::new();
        let starts = self.0.clone();
        registry
            .register::<Ship, _>(move |_: Ship| {
                starts.lock().unwrap().push(Instant::now());
                async {}
            })
            .unwrap();
        registry
    }

    fn count(&self) -> usize {
        self.0.lock().unwrap().len()
    }

    /// The most that started above the rate in any time: starts − rate × time.
    fn most_above(&self, per_second: f64) -> f64 {
        let mut starts = self.0.lock().unwrap().clone();
        starts.sort_unstable();
        let (mut level, mut most) = (0.0_f64, 0.0_f64);
        for (index, start) in starts.iter().enumerate() {
            let since = index.checked_sub(1).map(|before| *start - starts[before]);
            let drained = per_second * since.unwrap_or_default().as_secs_f64();
            level = (level - drained).max(0.0) + 1.0;
            most = most.max(level);
        }
        most
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn two_workers_together_start_no_more_than_the_rate() {
    for home in HOMES {
        let limit = r#"limit = { rate = "20/s", burst = 5 }"#;
        let servers = Servers::start(map(home, limit)).await;
        let starts = Starts::default();
        let one = servers.process_of(starts.registry()).await.working();
        let other = servers.process_of(starts.registry()).await.working();
        one.publish_ships(0..100).await;
        until(async || starts.count() == 100).await;
        // A handler notes its start a moment after it was let through.
        let (most, late) = (starts.most_above(20.0), 4.0);
        assert!(most <= 5.0 + late, "{home}: {most}");
        until(async || one.heard.count("done") + other.heard.count("done") == 100).await;
        assert!(one.heard.count("done") > 0 && other.heard.count("done") > 0);
        one.end().await;
        other.end().await;
        assert_eq!(servers.dead().await, 0, "{home}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tier_at_its_limit_holds_up_no_other_of_its_strict_group() {
    for home in HOMES {
        for limit in [r#"limit = { rate = "1/h" }"#, "limit = { running = 1 }"] {
            let servers = Servers::start(map(home, limit)).await;
            let runs = Runs::held();
            let process = servers.worker(&runs).await;
            process.publish_ships(0..50).await;
            runs.until("ship", 1).await;
            process.publish_notifies(0..50).await;
            // The first task runs on, and has one of four slots.
            runs.until("notify", 3).await;
            assert_eq!(runs.count("ship"), 1, "{home}, {limit}");
            runs.open.add_permits(1_000);
            runs.until("notify", 50).await;
            process.end().await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn no_more_run_than_may_over_two_workers() {
    for home in HOMES {
        let servers = Servers::start(map(home, "limit = { running = 3 }")).await;
        let runs = Runs::held();
        let (one, other) = (servers.worker(&runs).await, servers.worker(&runs).await);
        one.publish_ships(0..60).await;
        runs.until("ship", 3).await;
        for started in 4..=60 {
            runs.open.add_permits(1);
            runs.until("ship", started).await;
        }
        runs.open.add_permits(100);
        until(async || one.heard.count("done") + other.heard.count("done") == 60).await;
        assert_eq!(runs.most_at_once(""), 3, "{home}");
        one.end().await;
        other.end().await;
        assert_eq!(servers.dead().await, 0, "{home}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_limit_is_changed_while_it_is_in_force() {
    let servers = Servers::start(map("quorum", "limit = { running = 1 }")).await;
    let runs = Runs::held();
    let process = servers.process(&runs).await;
    let control = process.app.control().unwrap().by("ada");
    let set = control
        .limit_tier("normal")
        .running(2)
        .because("a test")
        .await
        .unwrap();
    assert_eq!(set.before, None);
    assert_eq!(
        set.notes,
        ["it replaces the limit of the map, 1 running, for its time"]
    );
    let (one, other) = (servers.worker(&runs).await, servers.worker(&runs).await);
    one.publish_ships(0..60).await;
    runs.until("ship", 2).await;
    one.publish_notifies(0..2).await;
    runs.until("notify", 2).await;
    assert_eq!(runs.count("ship"), 2);
    control.limit_tier("normal").running(5).await.unwrap();
    runs.until("ship", 5).await;
    control
        .limit_tier("normal")
        .none()
        .lasting("1h")
        .await
        .unwrap();
    // All eight slots of the two are taken.
    runs.until("ship", 6).await;
    let ended = control.unlimit_tier("normal").await.unwrap();
    assert!(ended.before.is_some() && ended.after.is_none());
    assert_eq!(
        ended.notes,
        ["the limit of the map is in force again: 1 running"]
    );
    let again = control.unlimit_tier("normal").await.unwrap();
    assert_eq!(again.notes, ["tier normal was not limited at run time"]);
    runs.open.add_permits(1_000);
    runs.until("ship", 60).await;
    let log = control.audit_log(None, 10).await.unwrap();
    let actions: Vec<_> = log.iter().map(|it| it.action.as_str()).collect();
    assert_eq!(
        actions,
        ["unlimit tier", "limit tier", "limit tier", "limit tier"]
    );
    for process in [process, one, other] {
        process.end().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn tasks_that_run_already_count_when_a_limit_is_set() {
    for home in HOMES {
        let servers = Servers::start(map(home, "")).await;
        let runs = Runs::held();
        let one = servers.worker(&runs).await;
        one.publish_ships(0..10).await;
        runs.until("ship", 4).await;
        let control = one.app.control().unwrap();
        control.limit_tier("normal").running(3).await.unwrap();
        until(async || servers.holders().await == 1).await;
        let other = servers.worker(&runs).await;
        // Only after two have ended another one may start.
        runs.open.add_permits(2);
        for started in 5..=10 {
            runs.until("ship", started).await;
            runs.open.add_permits(1);
        }
        runs.open.add_permits(10);
        until(async || one.heard.count("done") + other.heard.count("done") == 10).await;
        assert_eq!(runs.most_at_once(""), 4, "{home}");
        one.end().await;
        other.end().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_has_expired_uses_up_no_rate() {
    for home in HOMES {
        let limit = r#"limit = { rate = "1/h", burst = 3 }"#;
        let servers = Servers::start(map(home, limit)).await;
        let runs = Runs::free();
        let process = servers.process(&runs).await;
        for order in 0..20 {
            let customer = String::new();
            let ship = Ship { order, customer };
            process.app.publish(ship).expires("1ms").await.unwrap();
        }
        process.publish_ships(20..22).await;
        let process = process.working();
        runs.until("ship", 2).await;
        until(async || process.heard.count("expired") == 20).await;
        until(async || process.heard.count("done") == 2).await;
        process.end().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn limits_that_make_no_sense_are_refused() {
    let servers = Servers::start(map("postgres", "")).await;
    let process = servers.process(&Runs::free()).await;
    let control = process.app.control().unwrap();
    let tier = || control.limit_tier("normal");
    for (change, expected) in [
        (tier(), "say how often"),
        (tier().burst(5), "needs a rate"),
        (tier().running(0), "running must be from 1 to 1000000"),
        (tier().rate("1/s").burst(2_000_000), "burst must be from 1"),
        (tier().rate("fast"), "cannot read \"fast\" as a rate"),
        (tier().none().running(1), "cannot be none and have"),
        (
            control.limit_tier("nomal").running(1),
            "did you mean \"normal\"?",
        ),
        (
            control.limit_task("order.shp").running(1),
            "did you mean \"order.ship\"?",
        ),
        (tier().running(1).lasting("0s"), "longer than zero"),
    ] {
        let error = change.await.unwrap_err();
        assert!(matches!(error, Error::Control(_)), "{error}");
        assert!(error.to_string().contains(expected), "{error}");
    }
    assert_eq!(control.list().await.unwrap(), []);
    process.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_keeps_its_share_of_the_rate_while_the_database_is_away() {
    for network in [Network::Cut, Network::Silent] {
        let servers = Servers::start(map("quorum", r#"limit = { rate = "50/s" }"#)).await;
        let (proxy, url) = behind_a_proxy(servers.database.url()).await;
        let starts = Starts::default();
        let worker = servers.process_at(&url, starts.registry()).await.working();
        worker.publish_ships(0..400).await;
        until(async || starts.count() >= 60).await;
        proxy.set(network);
        until(async || starts.count() >= 300).await;
        proxy.set(Network::Good);
        until(async || starts.count() == 400).await;
        // A handler notes its start a moment after it was let through.
        let most = starts.most_above(50.0);
        assert!(most <= 50.0 + 10.0, "{network:?}: {most}");
        worker.end().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_share_of_a_slow_rate_outlives_a_database_that_hangs() {
    let limit = r#"limit = { rate = "20/m", burst = 1 }"#;
    let servers = Servers::start(map("quorum", limit)).await;
    let (proxy, url) = behind_a_proxy(servers.database.url()).await;
    let starts = Starts::default();
    let worker = servers.process_at(&url, starts.registry()).await.working();
    worker.publish_ships(0..20).await;
    until(async || starts.count() == 2).await;
    proxy.set(Network::Silent);
    until(async || starts.count() == 7).await;
    proxy.set(Network::Good);
    worker.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_end_of_a_worker_gives_its_share_back() {
    let servers = Servers::start(map("quorum", r#"limit = { rate = "1/h", running = 2 }"#)).await;
    let runs = Runs::free();
    let (one, other) = (servers.worker(&runs).await, servers.process(&runs).await);
    one.publish_ships(0..5).await;
    runs.until("ship", 1).await;
    assert_eq!(servers.holders().await, 1);
    one.end().await;
    assert_eq!(servers.holders().await, 0);
    other.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_share_is_given_back_although_other_processes_are_faster_to_write() {
    let servers = Servers::start(map("quorum", r#"limit = { rate = "1/h" }"#)).await;
    let runs = Runs::free();
    let worker = servers.worker(&runs).await;
    worker.publish_ships(0..1).await;
    runs.until("ship", 1).await;
    assert_eq!(servers.holders().await, 1);
    // For eight writes the row is not as it was read.
    let conflicts = "
        CREATE SEQUENCE tierline.conflicts;
        CREATE FUNCTION tierline.conflict() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            RETURN CASE WHEN nextval('tierline.conflicts') > 8 THEN new END;
        END $$;
        CREATE TRIGGER conflict BEFORE UPDATE ON tierline.limits
            FOR EACH ROW EXECUTE FUNCTION tierline.conflict();
    ";
    let pool = servers.pool().await;
    sqlx::raw_sql(conflicts).execute(&pool).await.unwrap();
    worker.end().await;
    assert_eq!(servers.holders().await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_limit_of_each_process_needs_no_database() {
    let limit = r#"limit = { rate = "1000/s", running = 1, scope = "process" }"#;
    let vhost = vhost().await;
    let runs = Runs::held();
    let heard = Heard::default();
    let app = Tierline::builder(Topology::parse(map("quorum", limit)).unwrap())
        .amqp(vhost.amqp_url())
        .registry(runs.registry())
        .observe(heard.ear())
        .connect()
        .await
        .unwrap();
    let process = Process {
        app,
        heard,
        working: None,
    };
    let process = process.working();
    process.publish_ships(0..20).await;
    process.publish_notifies(0..3).await;
    runs.until("notify", 3).await;
    runs.until("ship", 1).await;
    runs.open.add_permits(100);
    runs.until("ship", 20).await;
    // Both tasks are counted together: three notifications ran beside one order.
    assert!(runs.most_at_once("") <= 4);
    process.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_answer_names_runs_that_a_limit_per_key_does_not_count() {
    let map = map("postgres", "").replace(
        r#""order.ship" = "normal""#,
        r#""order.ship" = { tier = "normal", limit = { running = 1, per = "customer" } }"#,
    );
    let servers = Servers::start(map).await;
    let process = servers.process(&Runs::free()).await;
    let control = process.app.control().unwrap();
    let limiting = || control.limit_task("order.ship");
    let uncounted =
        "what runs now is not counted: one more task of the same customer may start beside each";
    let beside = "tasks of one customer run beside each other now; when running is in force again, one more may start \
                  beside each that still runs";
    let has = |notes: &[String], note: &str| notes.iter().any(|it| it == note);
    // The map counts them, and so does this limit.
    let set = limiting().running(2).await.unwrap();
    assert!(
        !has(&set.notes, uncounted) && !has(&set.notes, beside),
        "{set:?}"
    );
    let lifted = limiting().none().await.unwrap();
    assert!(has(&lifted.notes, beside), "{lifted:?}");
    let set = limiting().running(2).await.unwrap();
    assert!(has(&set.notes, uncounted), "{set:?}");
    limiting().rate("1/s").await.unwrap();
    let ended = control.unlimit_task("order.ship").await.unwrap();
    assert!(has(&ended.notes, uncounted), "{ended:?}");
    process.end().await;
}
