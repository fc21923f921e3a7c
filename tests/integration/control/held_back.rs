//! Tasks that are held back: their keys, their place among others, and what becomes of them when something changes.

use std::collections::BTreeSet;
use std::time::Duration;

use futures_util::{StreamExt, stream};
use tierline::backlog::{TaskFilter, TaskState};
use tierline::task::PublishRequest;
use tierline_testbed::Network;
use tokio::time::sleep;

use super::{HOMES, Notify, Process, Runs, Servers, Ship, until};
use crate::backlog::behind_a_proxy;

const PER_CUSTOMER: &str = r#"{ tier = "normal", limit = { per = "customer", running = 1 } }"#;

/// A tier with two tasks, of which one has a limit.
fn map(home: &str, ship: &str, concurrency: u32, prefetch: u32) -> String {
    format!(
        r#"
        app = "shop"
        [tiers.urgent]
        queue = "{home}"
        [tiers.normal]
        queue = "{home}"
        [groups.all]
        tiers = ["urgent", "normal"]
        concurrency = {concurrency}
        prefetch = {prefetch}
        [tasks]
        "order.ship" = {ship}
        "order.notify" = "normal"
        "#
    )
}

async fn publish(process: &Process, ships: impl IntoIterator<Item = (u32, String)>) {
    let requests = ships
        .into_iter()
        .map(|(order, customer)| PublishRequest::new(&Ship { order, customer }).unwrap());
    let requests: Vec<_> = requests.collect();
    let published = process.app.publish_many(stream::iter(requests));
    published.for_each(async |it| drop(it.unwrap())).await;
}

/// How many of these customers' tasks have started.
fn customers(runs: &Runs, orders: impl IntoIterator<Item = u32>) -> usize {
    let started: BTreeSet<u32> = runs.of("ship").into_iter().collect();
    orders
        .into_iter()
        .filter(|order| started.contains(order))
        .count()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fair_tier_goes_on_after_it_was_empty() {
    let map = r#"
        app = "shop"
        [tiers.normal]
        queue = "postgres"
        fair = "customer"
        [groups.all]
        tiers = ["normal"]
        concurrency = 2
        [tasks]
        "order.ship" = "normal"
    "#;
    let servers = Servers::start(map).await;
    let runs = Runs::free();
    let (one, other) = (servers.worker(&runs).await, servers.worker(&runs).await);
    for round in 0..4 {
        let ships = (round * 10..(round + 1) * 10).map(|order| (order, format!("c{}", order % 3)));
        publish(&one, ships).await;
        let wanted = (round as usize + 1) * 10;
        until(async || one.heard.count("done") + other.heard.count("done") == wanted).await;
    }
    one.end().await;
    other.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn keys_count_also_after_a_pause() {
    for home in HOMES {
        let servers = Servers::start(map(home, PER_CUSTOMER, 8, 1)).await;
        let runs = Runs::held();
        let publisher = servers.process(&runs).await;
        let control = publisher.app.control().unwrap();
        control.pause_task("order.ship").await.unwrap();
        let worker = servers.worker(&runs).await;
        publish(&publisher, (0..3).map(|order| (order, "ada".to_owned()))).await;
        publish(&publisher, (3..8).map(|order| (order, format!("c{order}")))).await;
        until(async || servers.parked().await == 8).await;
        control.resume_task("order.ship").await.unwrap();
        // One of ada's, and each of the others.
        runs.until("ship", 6).await;
        publish(&publisher, [(8, "ada".to_owned())]).await;
        until(async || servers.parked().await == 3).await;
        assert_eq!(customers(&runs, [0, 1, 2, 8]), 1, "{home}");
        runs.open.add_permits(100);
        runs.until("ship", 9).await;
        until(async || worker.heard.count("done") == 9).await;
        assert_eq!(runs.most_at_once("ada"), 1, "{home}");
        worker.end().await;
        publisher.end().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_counts_in_all_tiers_of_the_app() {
    let servers = Servers::start(map("postgres", PER_CUSTOMER, 8, 1)).await;
    let runs = Runs::held();
    let worker = servers.worker(&runs).await;
    publish(&worker, [(0, "ada".to_owned())]).await;
    runs.until("ship", 1).await;
    publish(&worker, [(1, "ada".to_owned()), (2, "bob".to_owned())]).await;
    runs.until("ship", 2).await;
    until(async || servers.parked().await == 1).await;
    let backlog = worker.app.backlog().unwrap();
    let parked = TaskFilter::default().state(TaskState::Parked);
    let parked = backlog.list(&parked, None, 10).await.unwrap();
    let ada = &parked.tasks[0].id;
    backlog.escalate(ada, "urgent").await.unwrap();
    until(async || {
        let moved = backlog.get(ada).await.unwrap().summary;
        (moved.tier.as_str(), moved.state) == ("urgent", TaskState::Parked)
    })
    .await;
    // Long enough for some looks of its new tier.
    sleep(Duration::from_millis(2_500)).await;
    assert_eq!(runs.count("ship"), 2);
    runs.open.add_permits(100);
    runs.until("ship", 3).await;
    until(async || worker.heard.count("done") == 3).await;
    assert_eq!(runs.most_at_once("ada"), 1);
    worker.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_task_at_its_limit_leaves_the_slots_to_others_with_the_smallest_prefetch() {
    let limited = r#"{ tier = "normal", limit = { running = 2 } }"#;
    for home in HOMES {
        let servers = Servers::start(map(home, limited, 4, 1)).await;
        let runs = Runs::held();
        let worker = servers.worker(&runs).await;
        worker.publish_ships(0..100).await;
        runs.until("ship", 2).await;
        worker.publish_notifies(0..10).await;
        runs.until("notify", 2).await;
        assert_eq!(runs.count("ship"), 2, "{home}");
        runs.open.add_permits(1_000);
        runs.until("ship", 100).await;
        runs.until("notify", 10).await;
        until(async || worker.heard.count("done") == 110).await;
        assert_eq!(servers.parked().await, 0, "{home}");
        worker.end().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_backlog_of_keys_and_other_tasks_of_the_tier_take_turns() {
    for prefetch in [1, 4] {
        let servers = Servers::start(map("postgres", PER_CUSTOMER, 1, prefetch)).await;
        let runs = Runs::held();
        let publisher = servers.process(&runs).await;
        publish(
            &publisher,
            (0..200).map(|order| (order, format!("c{order}"))),
        )
        .await;
        let worker = servers.worker(&runs).await;
        runs.until("ship", 1).await;
        publisher.publish_notifies(0..200).await;
        runs.open.add_permits(1_000);
        until(async || worker.heard.count("done") == 400).await;
        let started = runs.started.lock().unwrap().clone();
        let half = &started[..300];
        let ships = half.iter().filter(|(task, _)| *task == "ship").count();
        // Neither waits until the other is through.
        assert!((60..=199).contains(&ships), "prefetch {prefetch}: {ships}");
        worker.end().await;
        publisher.end().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn parked_tasks_expire_while_their_key_is_busy() {
    let map = map("postgres", PER_CUSTOMER, 2, 1).replace(
        "[tiers.normal]\n        queue = \"postgres\"",
        "[tiers.normal]\n        queue = \"postgres\"\n        ttl = \"2s\"",
    );
    let servers = Servers::start(map).await;
    let runs = Runs::held();
    let worker = servers.worker(&runs).await;
    publish(&worker, (0..5).map(|order| (order, "ada".to_owned()))).await;
    runs.until("ship", 1).await;
    until(async || servers.dead().await == 4).await;
    assert_eq!((servers.parked().await, runs.count("ship")), (0, 1));
    runs.open.add_permits(10);
    publish(&worker, [(5, "ada".to_owned())]).await;
    runs.until("ship", 2).await;
    worker.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_leave_their_lanes_when_the_map_loses_the_limit() {
    let mut servers = Servers::start(map("postgres", PER_CUSTOMER, 2, 1)).await;
    let runs = Runs::held();
    let worker = servers.worker(&runs).await;
    publish(&worker, (0..20).map(|order| (order, "ada".to_owned()))).await;
    runs.until("ship", 1).await;
    until(async || servers.parked().await == 19).await;
    runs.open.add_permits(1);
    worker.end().await;
    servers.map = map("postgres", r#""normal""#, 2, 1);
    let free = Runs::free();
    let later = servers.worker(&free).await;
    until(async || runs.count("ship") + free.count("ship") >= 20).await;
    until(async || servers.parked().await == 0).await;
    later.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_operators_rate_on_a_task_with_keys_takes_all_its_lanes() {
    let servers = Servers::start(map("postgres", PER_CUSTOMER, 4, 2)).await;
    let runs = Runs::held();
    let publisher = servers.process(&runs).await;
    let control = publisher.app.control().unwrap();
    control.pause_task("order.ship").await.unwrap();
    let worker = servers.worker(&runs).await;
    publish(
        &publisher,
        (0..300).map(|order| (order, format!("c{order}"))),
    )
    .await;
    until(async || servers.parked().await == 300).await;
    let fast = control.limit_task("order.ship").rate("1000/s").burst(100);
    fast.await.unwrap();
    control.resume_task("order.ship").await.unwrap();
    runs.open.close();
    runs.until("ship", 300).await;
    until(async || worker.heard.count("done") == 300).await;
    worker.end().await;
    publisher.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn paused_tasks_hold_up_no_others_and_become_no_suspects_while_the_database_is_away() {
    for home in ["quorum", "classic"] {
        let servers = Servers::start(map(home, r#""normal""#, 2, 1)).await;
        let (proxy, url) = behind_a_proxy(servers.database.url()).await;
        let runs = Runs::free();
        let publisher = servers.process(&runs).await;
        let control = publisher.app.control().unwrap();
        control.pause_task("order.ship").await.unwrap();
        let one = servers.process_at(&url, runs.registry()).await.working();
        let other = servers.process_at(&url, runs.registry()).await.working();
        publisher.publish_notifies(0..2).await;
        runs.until("notify", 2).await;
        proxy.set(Network::Silent);
        publisher.publish_ships(0..10).await;
        publisher.publish_notifies(2..30).await;
        runs.until("notify", 30).await;
        assert_eq!(runs.count("ship"), 0, "{home}");
        proxy.set(Network::Good);
        control.resume_task("order.ship").await.unwrap();
        runs.until("ship", 10).await;
        let done = || one.heard.count("done") + other.heard.count("done");
        until(async || done() == 40).await;
        for process in [&one, &other] {
            assert_eq!(process.heard.count("suspected"), 0, "{home}");
            assert_eq!(process.heard.count("dead"), 0, "{home}");
        }
        for process in [one, other, publisher] {
            process.end().await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn parked_messages_are_rows_of_their_lanes_at_once() {
    let servers = Servers::start(map("quorum", PER_CUSTOMER, 2, 1)).await;
    let runs = Runs::held();
    let worker = servers.worker(&runs).await;
    let ada = |order| (order, "ada".to_owned());
    publish(&worker, (0..6).map(ada)).await;
    runs.until("ship", 1).await;
    until(async || servers.parked().await == 5).await;
    // A relay would publish ready rows to the queue again.
    let ready = servers.count("SELECT count(*) FROM tierline.ready").await;
    assert_eq!(ready, 0);
    let notify = Notify { order: 0 };
    worker.app.publish(notify).await.unwrap();
    runs.until("notify", 1).await;
    runs.open.add_permits(100);
    runs.until("ship", 6).await;
    assert_eq!(runs.of("ship"), (0..6).collect::<Vec<_>>(), "in order");
    until(async || worker.heard.count("done") == 7).await;
    worker.end().await;
}
