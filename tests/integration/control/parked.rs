//! Limits per key, and keys that take turns.

use std::collections::BTreeMap;

use futures_util::{StreamExt, stream};
use tierline::backlog::{TaskFilter, TaskState};
use tierline::task::{PublishRequest, Unique};

use super::{HOMES, Process, Runs, Servers, Ship, until};

fn map(home: &str) -> String {
    format!(
        r#"
        app = "shop"
        [tiers.normal]
        queue = "{home}"
        [groups.all]
        tiers = ["normal"]
        concurrency = 4
        prefetch = 4
        [tasks]
        "order.ship" = {{ tier = "normal", limit = {{ per = "customer", running = 1 }} }}
        "#
    )
}

async fn publish(process: &Process, orders: impl Iterator<Item = (u32, String)>) {
    let requests =
        orders.map(|(order, customer)| PublishRequest::new(&Ship { order, customer }).unwrap());
    let published = process
        .app
        .publish_many(stream::iter(requests.collect::<Vec<_>>()));
    published.for_each(async |it| drop(it.unwrap())).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn two_tasks_of_a_key_never_run_at_once_and_a_key_with_many_holds_up_no_other() {
    for home in HOMES {
        let servers = Servers::start(map(home)).await;
        let runs = Runs::free();
        let publisher = servers.process(&runs).await;
        let many = (0..2_000).map(|order| (order, "ada".to_owned()));
        publish(&publisher, many).await;
        let others = (2_000..2_200).map(|order| (order, format!("c{}", order % 50)));
        publish(&publisher, others).await;
        let (one, other) = (servers.worker(&runs).await, servers.worker(&runs).await);
        let others_done = || {
            runs.of("ship")
                .into_iter()
                .filter(|order| *order >= 2_000)
                .count()
        };
        until(async || others_done() == 200).await;
        let waiting = 2_200 - runs.count("ship");
        assert!(waiting > 0, "{home}: the others waited for all of ada's");
        runs.until("ship", 2_200).await;
        until(async || one.heard.count("done") + other.heard.count("done") == 2_200).await;
        for customer in ["ada", "c0", "c7"] {
            assert_eq!(runs.most_at_once(customer), 1, "{home} {customer}");
        }
        let mut all = runs.of("ship");
        all.sort_unstable();
        assert_eq!(
            all,
            (0..2_200).collect::<Vec<_>>(),
            "{home}: each runs once"
        );
        for process in [one, other, publisher] {
            process.end().await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_may_be_given_at_the_publish_and_a_task_without_one_counts_under_the_empty_key() {
    let servers = Servers::start(map("postgres")).await;
    let runs = Runs::held();
    let worker = servers.worker(&runs).await;
    let ship = |order| Ship {
        order,
        customer: format!("c{order}"),
    };
    for order in 0..2 {
        worker
            .app
            .publish(ship(order))
            .limit_key("same")
            .await
            .unwrap();
    }
    for order in 2..4 {
        let nobody = serde_json::json!({ "order": order });
        worker
            .app
            .publish_named("order.ship", &nobody)
            .await
            .unwrap();
    }
    worker.app.publish(ship(4)).await.unwrap();
    // One of each key.
    runs.until("ship", 3).await;
    until(async || servers.parked().await == 2).await;
    let mut started = runs.of("ship");
    started.sort_unstable();
    assert_eq!(started, [0, 2, 4]);
    let long = worker.app.publish(ship(5)).limit_key("x".repeat(201)).await;
    assert!(
        long.unwrap_err()
            .to_string()
            .contains("limit_key may have 200 bytes")
    );
    runs.open.add_permits(100);
    runs.until("ship", 5).await;
    worker.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn keys_of_a_fair_tier_take_turns() {
    let map = r#"
        app = "shop"
        [tiers.normal]
        queue = "postgres"
        fair = "customer"
        [groups.all]
        tiers = ["normal"]
        concurrency = 1
        [tasks]
        "order.ship" = "normal"
    "#;
    let servers = Servers::start(map).await;
    let runs = Runs::free();
    let publisher = servers.process(&runs).await;
    let customers = [("ada", 600), ("bob", 40), ("eve", 20)];
    let mut names = BTreeMap::new();
    for (number, (customer, count)) in customers.into_iter().enumerate() {
        let first = number as u32 * 1_000;
        names.insert(first, customer);
        publish(
            &publisher,
            (first..first + count).map(|order| (order, customer.to_owned())),
        )
        .await;
    }
    let worker = servers.worker(&runs).await;
    runs.until("ship", 660).await;
    let started = runs.of("ship");
    let place_of_last = |from: u32, to: u32| {
        started
            .iter()
            .rposition(|order| (from..to).contains(order))
            .unwrap()
    };
    // While three keys have tasks, each has every third start, but for what was claimed before the others were known.
    assert!(
        place_of_last(2_000, 3_000) <= 3 * 20 + 10,
        "{:?}",
        &started[..100]
    );
    assert!(
        place_of_last(1_000, 2_000) <= 2 * 40 + 20 + 10,
        "{:?}",
        &started[..120]
    );
    worker.end().await;
    publisher.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_excess_of_a_limited_task_waits_as_rows_and_holds_up_no_other_task_of_its_tier() {
    for home in HOMES {
        let map = map(home)
            .replace(r#"per = "customer", running = 1"#, "running = 2")
            .replace("[tasks]", "[tasks]\n\"order.notify\" = \"normal\"");
        let servers = Servers::start(map).await;
        let runs = Runs::held();
        let (one, other) = (servers.worker(&runs).await, servers.worker(&runs).await);
        one.publish_ships(0..300).await;
        runs.until("ship", 2).await;
        other.publish_notifies(0..10).await;
        // As many as the process that took them has free slots.
        runs.until("notify", 2).await;
        assert_eq!(runs.count("ship"), 2, "{home}");
        runs.open.add_permits(10_000);
        runs.until("ship", 300).await;
        runs.until("notify", 10).await;
        until(async || one.heard.count("done") + other.heard.count("done") == 310).await;
        assert_eq!(runs.count("ship"), 300, "{home}");
        assert_eq!(runs.most_at_once(""), 2, "{home}");
        assert_eq!(servers.parked().await, 0, "{home}");
        for process in [one, other] {
            assert_eq!(
                process.heard.count("suspected") + process.heard.count("dead"),
                0,
                "{home}"
            );
            process.end().await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn parked_tasks_are_listed_found_escalated_and_cancelled() {
    let map = r#"
        app = "shop"
        [tiers.urgent]
        queue = "postgres"
        [tiers.normal]
        queue = "postgres"
        max_length = 12
        [groups.all]
        tiers = ["urgent", "normal"]
        concurrency = 4
        [tasks]
        "order.ship" = { tier = "normal", limit = { per = "customer", running = 1 } }
        "order.notify" = "normal"
    "#;
    let servers = Servers::start(map).await;
    let runs = Runs::held();
    let publisher = servers.process(&runs).await;
    let control = publisher.app.control().unwrap();
    control.pause_task("order.notify").await.unwrap();
    let ada = |order| (order, "ada".to_owned());
    publish(&publisher, (0..6).map(ada)).await;
    publisher.publish_notifies(0..4).await;
    let worker = servers.worker(&runs).await;
    until(async || (runs.count("ship"), servers.parked().await) == (1, 9)).await;

    let backlog = worker.app.backlog().unwrap().by("ada");
    let parked = TaskFilter::default().state(TaskState::Parked);
    let list = backlog.list(&parked, None, 4).await.unwrap();
    let rest = backlog.list(&parked, list.next.as_deref(), 50);
    let rest = rest.await.unwrap();
    assert_eq!((list.tasks.len(), rest.tasks.len()), (4, 5));
    let all = backlog.list(&TaskFilter::default(), None, 50).await;
    assert_eq!(
        all.unwrap().tasks.len(),
        10,
        "one runs, and nine are parked"
    );
    let ships = rest.tasks.iter().chain(&list.tasks);
    let ships: Vec<_> = ships.filter(|it| it.task == "order.ship").collect();
    let found = backlog.get(&ships[0].id).await.unwrap();
    assert_eq!(found.summary.state, TaskState::Parked);

    // A paused task stays paused in another tier.
    let notify = list.tasks.iter().find(|it| it.task == "order.notify");
    let notify = notify.unwrap_or_else(|| {
        let mut rest = rest.tasks.iter();
        rest.find(|it| it.task == "order.notify").unwrap()
    });
    let escalated = backlog.escalate(&notify.id, "urgent").await.unwrap();
    assert_eq!(escalated.before.state, TaskState::Parked);
    assert_eq!(escalated.after.tier, "urgent");
    until(async || {
        let found = backlog.get(&notify.id).await.unwrap().summary;
        (found.state, found.tier.as_str()) == (TaskState::Parked, "urgent")
    })
    .await;
    assert_eq!(runs.count("notify"), 0);

    backlog.cancel(&ships[0].id).await.unwrap();
    let notifies = TaskFilter::default().task("order.notify");
    assert_eq!(backlog.cancel_all(&notifies).await.unwrap(), 4);
    assert_eq!(servers.parked().await, 4);
    // What is held back counts for `max_length`.
    publish(&worker, (10..18).map(ada)).await;
    until(async || servers.parked().await == 12).await;
    let full = worker.app.publish(Ship {
        order: 18,
        customer: "eve".to_owned(),
    });
    let full = full.await.unwrap_err().to_string();
    assert!(full.contains("full"), "{full}");

    runs.open.add_permits(100);
    until(async || worker.heard.count("done") == 13).await;
    assert_eq!(servers.parked().await, 0);
    let mut ships = runs.of("ship");
    ships.sort_unstable();
    assert_eq!(ships.len(), 13);
    worker.end().await;
    publisher.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_parked_task_has_its_unique_key_and_can_be_replaced() {
    let servers = Servers::start(map("postgres")).await;
    let runs = Runs::free();
    let publisher = servers.process(&runs).await;
    let control = publisher.app.control().unwrap();
    control.pause_task("order.ship").await.unwrap();
    let worker = servers.worker(&runs).await;
    let publish = async |order, unique: Unique| {
        let customer = String::new();
        let ship = Ship { order, customer };
        publisher.app.publish(ship).unique(unique).await.unwrap()
    };
    let until_started = || Unique::key("a").until_started();
    let first = publish(1, until_started()).await;
    let other = publish(2, Unique::key("b")).await;
    until(async || servers.parked().await == 2).await;
    let again = publish(3, until_started()).await;
    assert!(again.is_duplicate && again.id == first.id, "{again:?}");
    let mut transaction = servers.pool().await.begin().await.unwrap();
    let ship = Ship {
        order: 4,
        customer: String::new(),
    };
    let within = publisher.app.publish(ship).unique(until_started());
    let within = within.within(&mut transaction).await.unwrap();
    assert!(within.is_duplicate && within.id == first.id, "{within:?}");
    transaction.commit().await.unwrap();
    let last = publish(5, Unique::key("b").or_replace()).await;
    assert_eq!(last.replaced.as_ref(), Some(&other.id));
    control.resume_task("order.ship").await.unwrap();
    worker.heard.until("done order.ship", 2).await;
    let mut ships = runs.of("ship");
    ships.sort_unstable();
    assert_eq!(ships, [1, 5]);
    worker.end().await;
    publisher.end().await;
}
