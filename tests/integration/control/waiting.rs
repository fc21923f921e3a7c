//! What waits in lanes: when it expires, and in which order tasks of several names are taken from there.

use futures_util::{StreamExt, stream};
use tierline::task::PublishRequest;

use super::{Notify, Process, Runs, Servers, Ship, until};

const SHIP: &str = r#"{ tier = "normal", limit = { per = "customer", running = 1 } }"#;
const NOTIFY: &str = r#"{ tier = "normal", limit = { per = "order", running = 1 } }"#;

/// A tier with these lines, and two tasks.
fn map(of_tier: &str, ship: &str, notify: &str, concurrency: u32) -> String {
    format!(
        r#"
        app = "shop"
        [tiers.high]
        queue = "postgres"
        [tiers.normal]
        queue = "postgres"
        {of_tier}
        [groups.all]
        tiers = ["high", "normal"]
        concurrency = {concurrency}
        [tasks]
        "order.ship" = {ship}
        "order.notify" = {notify}
        "#
    )
}

async fn publish(process: &Process, ships: impl IntoIterator<Item = (u32, String)>) {
    let requests = ships
        .into_iter()
        .map(|(order, customer)| PublishRequest::new(&Ship { order, customer }).unwrap());
    let published = process
        .app
        .publish_many(stream::iter(requests.collect::<Vec<_>>()));
    published.for_each(async |it| drop(it.unwrap())).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_paused_and_has_waited_for_long_before_a_worker_comes_stays_where_it_is() {
    for rule in [
        r#"ttl = "10m""#,
        r#"promote = { after = "10m", to = "high" }"#,
    ] {
        let servers = Servers::start(map(rule, r#""normal""#, r#""normal""#, 2)).await;
        let runs = Runs::free();
        let publisher = servers.process(&runs).await;
        let control = publisher.app.control().unwrap();
        control.pause_task("order.ship").await.unwrap();
        publisher.publish_ships(0..2_500).await;
        publisher.publish_notifies(0..5).await;
        servers
            .execute("UPDATE tierline.ready SET due_at = due_at - interval '1 hour'")
            .await;
        let worker = servers.worker(&runs).await;
        let others_are_gone = async || {
            let sql = "SELECT count(*) FROM tierline.dead_letters WHERE task = 'order.notify'";
            servers.count(sql).await + runs.count("notify") as i64 == 5
        };
        until(others_are_gone).await;
        until(async || servers.parked().await == 2_500).await;
        let sql = "SELECT count(*) FROM tierline.dead_letters WHERE task = 'order.ship'";
        assert_eq!(servers.count(sql).await, 0, "{rule}");
        let sql = "SELECT count(*) FROM tierline.parked JOIN tierline.backlogs ON backlogs.id = backlog \
             WHERE tier = 'normal'";
        assert_eq!(servers.count(sql).await, 2_500, "{rule}");
        worker.end().await;
        publisher.end().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn keys_whose_tasks_have_all_expired_hold_up_no_other_key() {
    let servers = Servers::start(map(r#"ttl = "8s""#, SHIP, r#""normal""#, 1)).await;
    let runs = Runs::held();
    let worker = servers.worker(&runs).await;
    publish(&worker, (0..200).map(|order| (order, format!("c{order}")))).await;
    runs.until("ship", 1).await;
    let started = runs.count("ship") as i64;
    until(async || servers.dead().await + started == 200).await;
    publish(&worker, [(200, "eve".to_owned())]).await;
    runs.open.close();
    until(async || runs.of("ship").contains(&200)).await;
    worker.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn tasks_with_keys_share_the_slots_of_their_tier() {
    let notify_of_fair_tier = NOTIFY.replace("order", "customer");
    for (of_tier, ship, notify) in [
        ("", SHIP, NOTIFY),
        (r#"fair = "customer""#, r#""normal""#, &*notify_of_fair_tier),
    ] {
        let servers = Servers::start(map(of_tier, ship, notify, 1)).await;
        let runs = Runs::free();
        let publisher = servers.process(&runs).await;
        publish(
            &publisher,
            (0..300).map(|order| (order, format!("c{order}"))),
        )
        .await;
        for order in 0..300 {
            let notify = publisher.app.publish(Notify { order });
            notify.limit_key(order.to_string()).await.unwrap();
        }
        let worker = servers.worker(&runs).await;
        until(async || worker.heard.count("done") == 600).await;
        let started = runs.started.lock().unwrap().clone();
        let ships = started[..400].iter().filter(|(task, _)| *task == "ship");
        let ships = ships.count();
        assert!(
            (110..=290).contains(&ships),
            "{of_tier}: {ships} of the first 400"
        );
        worker.end().await;
        publisher.end().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_suspect_whose_key_is_busy_holds_up_no_other_suspect() {
    let servers = Servers::start(map("", SHIP, r#""normal""#, 4)).await;
    let runs = Runs::held();
    let worker = servers.worker(&runs).await;
    publish(&worker, [(0, "ada".to_owned())]).await;
    runs.until("ship", 1).await;
    let mut transaction = servers.pool().await.begin().await.unwrap();
    let ship = Ship {
        order: 1,
        customer: "ada".to_owned(),
    };
    let ship = worker.app.publish(ship).within(&mut transaction);
    ship.await.unwrap();
    let notify = worker.app.publish(Notify { order: 0 });
    notify.within(&mut transaction).await.unwrap();
    sqlx::query("UPDATE tierline.ready SET rank = rank + 1000 WHERE rank <= 0")
        .execute(&mut *transaction)
        .await
        .unwrap();
    transaction.commit().await.unwrap();
    runs.until("notify", 1).await;
    assert_eq!(runs.most_at_once("ada"), 1);
    runs.open.close();
    until(async || servers.parked().await == 0).await;
    worker.end().await;
}
