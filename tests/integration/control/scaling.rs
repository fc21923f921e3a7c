//! How many slots groups want while tasks are paused or limited.

use super::{Runs, Servers, Ship, until};

const MAP: &str = r#"
    app = "shop"
    [tiers.keyed]
    queue = "postgres"
    [tiers.turns]
    queue = "postgres"
    fair = "customer"
    [groups.all]
    tiers = ["keyed", "turns"]
    concurrency = 4
    [tasks]
    "order.ship" = { tier = "keyed", limit = { per = "customer", running = 1 } }
    "order.notify" = "turns"
"#;

#[tokio::test(flavor = "multi_thread")]
async fn tasks_that_are_paused_want_no_slots_and_those_of_a_limit_want_one_for_each_key() {
    let servers = Servers::start(MAP).await;
    let runs = Runs::free();
    let process = servers.process(&runs).await;
    let backlog = async || {
        let groups = process.app.scaling().await.unwrap();
        let tiers: Vec<u64> = groups[0].tiers.iter().map(|it| it.backlog).collect();
        (tiers[0], tiers[1])
    };
    let control = process.app.control().unwrap();
    for order in 0..6 {
        let customer = format!("c{}", order % 3);
        let ship = process.app.publish(Ship { order, customer });
        ship.await.unwrap();
    }
    process.publish_notifies(0..5).await;
    assert_eq!(backlog().await, (6, 5));
    control.pause_task("order.ship").await.unwrap();
    control.pause_task("order.notify").await.unwrap();
    until(async || backlog().await == (0, 0)).await;

    let worker = servers.worker(&runs).await;
    until(async || servers.parked().await == 11).await;
    worker.end().await;
    assert_eq!(backlog().await, (0, 0));
    // Without a worker they stay parked.
    control.resume_task("order.ship").await.unwrap();
    control.resume_task("order.notify").await.unwrap();
    until(async || backlog().await == (3, 5)).await;
    let limiting = control.limit_task("order.notify").running(2);
    limiting.await.unwrap();
    until(async || backlog().await == (3, 1)).await;
    process.end().await;
}
