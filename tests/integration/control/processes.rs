//! Which processes live, and what they serve.

use serde::{Deserialize, Serialize};
use sqlx::{Executor, PgPool};
use tierline::control::Process;
use tierline::{Registry, Task, Tierline, Topology};
use tierline_testbed::{database, vhost};

use super::{until, work_in};

#[derive(Debug, Serialize, Deserialize)]
struct Export;

impl Task for Export {
    const NAME: &'static str = "report.export";
}

fn registry() -> Registry {
    let mut registry = Registry::new();
    registry
        .register::<Export, _>(|_: Export| async {})
        .unwrap();
    registry
}

async fn processes(app: &Tierline) -> Vec<Process> {
    app.control().unwrap().processes().await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_whose_tiers_are_all_on_the_broker_says_what_it_serves() {
    let map = r#"
        app = "shop"
        [tiers.high]
        queue = "quorum"
        [tiers.low]
        queue = "quorum"
        [groups.urgent]
        tiers = ["high"]
        concurrency = 3
        [groups.bulk]
        tiers = ["low"]
        concurrency = 1
        [tasks]
        "report.export" = "low"
    "#;
    let (vhost, database) = tokio::join!(vhost(), database());
    let app = Tierline::builder(Topology::parse(map).unwrap())
        .amqp(vhost.amqp_url())
        .postgres(database.url())
        .registry(registry())
        .version("1.2.3")
        .connect()
        .await
        .unwrap();
    app.database().unwrap().migrate().await.unwrap();
    let working = work_in(&app, ["urgent"]);
    let relay = app.relay().unwrap();
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let relaying = tokio::spawn(relay.until(async {
        let _ = stopped.await;
    }));
    until(async || processes(&app).await.len() == 2).await;
    let processes_now = processes(&app).await;
    let worker = processes_now.iter().find(|it| !it.is_relay).unwrap();
    assert!(worker.is_alive && worker.name.contains(':'), "{worker:?}");
    assert_eq!(worker.version, "1.2.3");
    assert_eq!(worker.groups.len(), 1);
    let group = &worker.groups[0];
    assert_eq!((group.name.as_str(), group.slots), ("urgent", 3));
    assert_eq!(group.tiers, ["high"]);
    assert_eq!(worker.tasks.as_deref().unwrap(), ["report.export"]);
    assert!(worker.has_handler("report.export") && !worker.has_handler("mail.send"));
    assert!(worker.serves("high") && !worker.serves("low"));
    let relay = processes_now.iter().find(|it| it.is_relay).unwrap();
    assert!(relay.groups.is_empty() && !relay.has_handler("report.export"));
    // One that ends leaves the list.
    working.end().await;
    stop.send(()).unwrap();
    relaying.await.unwrap().unwrap();
    assert_eq!(processes(&app).await, []);
}

/// No group has a tier of the other.
const TWO_GROUPS: &str = r#"
    app = "shop"
    [tiers.high]
    queue = "postgres"
    lease = "2s"
    [tiers.low]
    queue = "postgres"
    lease = "2s"
    [groups.urgent]
    tiers = ["high"]
    concurrency = 3
    [groups.bulk]
    tiers = ["low"]
    concurrency = 1
    [tasks]
    "report.export" = "low"
"#;

async fn open(url: &str) -> Tierline {
    Tierline::builder(Topology::parse(TWO_GROUPS).unwrap())
        .postgres(url)
        .registry(registry())
        .connect()
        .await
        .unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_that_died_disappears_although_no_other_serves_its_tiers() {
    let database = database().await;
    let (app, other) = tokio::join!(open(database.url()), open(database.url()));
    let dying = work_in(&app, ["urgent"]);
    until(async || processes(&app).await.len() == 1).await;
    let working = work_in(&other, ["bulk"]);
    until(async || processes(&app).await.len() == 2).await;
    let both = processes(&app).await;
    dying.kill().await;
    until(async || processes(&app).await.len() == 1).await;
    let left = processes(&app).await;
    assert_eq!(left[0].id, both[1].id);
    assert!(left[0].is_alive && left[0].last_heartbeat > both[1].last_heartbeat);
    working.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_that_died_disappears_although_one_of_its_leases_is_long() {
    let database = database().await;
    let (app, other) = tokio::join!(open(database.url()), open(database.url()));
    let working = work_in(&other, ["bulk"]);
    until(async || processes(&app).await.len() == 1).await;
    let pool = PgPool::connect(database.url()).await.unwrap();
    // It served mail, and exports that run for hours.
    let died = "INSERT INTO tierline.workers (app, name, version, leases, groups, tasks) VALUES ('shop', 'dead:1', '', \
                '{\"high\": 2, \"exports\": 86400}', '[]', '{}')";
    pool.execute(died).await.unwrap();
    until(async || processes(&app).await.iter().any(|it| !it.is_alive)).await;
    until(async || processes(&app).await.len() == 1).await;
    assert!(processes(&app).await[0].is_alive);
    working.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_is_silent_after_half_a_minute_whatever_its_leases_are() {
    let database = database().await;
    let app = open(database.url()).await;
    let pool = PgPool::connect(database.url()).await.unwrap();
    let silent = "INSERT INTO tierline.workers (app, name, version, leases, groups, tasks, heartbeat_at) \
                  SELECT 'shop', 'web:' || silent, '', '{\"exports\": 86400}', groups::jsonb, '{}', \
                    now() - make_interval(secs => silent) FROM (VALUES (5, '[]'), (31, '[]'), (40, NULL)) AS of (silent, groups)";
    pool.execute(silent).await.unwrap();
    let known = processes(&app).await;
    let alive: Vec<_> = known
        .iter()
        .filter(|it| it.is_alive)
        .map(|it| &*it.name)
        .collect();
    // An older release sends a heartbeat in each third of its shortest lease.
    assert_eq!(alive, ["web:5", "web:40"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_of_an_older_release_is_taken_to_have_every_handler() {
    let database = database().await;
    let app = open(database.url()).await;
    let pool = PgPool::connect(database.url()).await.unwrap();
    let older = "INSERT INTO tierline.workers (app, name, version, leases) VALUES ('shop', 'old:1', '', '{\"low\": 30}')";
    pool.execute(older).await.unwrap();
    let known = processes(&app).await;
    assert_eq!((known[0].tasks.as_ref(), known[0].groups.len()), (None, 1));
    assert!(known[0].serves("low") && !known[0].serves("high"));
    assert!(known[0].has_handler("report.export"));
    assert!(known[0].is_alive);
    let json = serde_json::to_value(&known[0]).unwrap();
    assert_eq!(json["groups"][0]["name"], "bulk");
    let silent = "UPDATE tierline.workers SET heartbeat_at = now() - interval '31 s'";
    pool.execute(silent).await.unwrap();
    assert!(!processes(&app).await[0].is_alive);
}
