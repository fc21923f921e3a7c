//! Tiers, groups and tasks are paused and resumed.

use std::time::Duration;

use tierline::Error;
use tierline::error::ControlError;
use tokio::time::sleep;

use super::{HOMES, Runs, Servers, Ship, until};
use crate::worker::behind_a_proxy;

fn map(home: &str) -> String {
    format!(
        r#"
        app = "shop"
        [tiers.normal]
        queue = "{home}"
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

/// A map in which two tasks share a tier.
fn shared(home: &str) -> String {
    map(home).replace(
        r#""order.notify" = "other""#,
        r#""order.notify" = "normal""#,
    )
}

/// Two seconds, in which every process follows a change, and a little more.
const KNOWN: Duration = Duration::from_millis(2_500);

#[tokio::test(flavor = "multi_thread")]
async fn a_paused_tier_starts_nothing_loses_nothing_and_goes_on_with_what_runs() {
    for home in HOMES {
        let servers = Servers::start(map(home)).await;
        let runs = Runs::held();
        let (one, other) = (servers.worker(&runs).await, servers.worker(&runs).await);
        one.publish_ships(0..100).await;
        runs.until("ship", 8).await;
        let control = one.app.control().unwrap().by("ada");
        let paused = control
            .pause_tier("normal")
            .because("a test")
            .await
            .unwrap();
        assert_eq!(paused.after.unwrap().who, "ada", "{home}");
        sleep(KNOWN).await;
        // What runs ends, and no other one takes its place.
        runs.open.add_permits(8);
        other.heard.until("done order.ship", 1).await;
        until(async || one.heard.count("done") + other.heard.count("done") == 8).await;
        one.publish_ships(100..120).await;
        one.publish_notifies(0..4).await;
        runs.until("notify", 4).await;
        runs.open.add_permits(4);
        sleep(KNOWN).await;
        assert_eq!(runs.count("ship"), 8, "{home}");

        control.resume_tier("normal").await.unwrap();
        runs.open.add_permits(1_000);
        runs.until("ship", 120).await;
        until(async || one.heard.count("done") + other.heard.count("done") == 124).await;
        let mut ships = runs.of("ship");
        ships.sort_unstable();
        assert_eq!(ships, (0..120).collect::<Vec<_>>(), "{home}");
        for process in [&one, &other] {
            assert_eq!(process.heard.count("suspected"), 0, "{home}");
            assert_eq!(process.heard.count("dead"), 0, "{home}");
        }
        one.end().await;
        other.end().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_runs_over_a_pause_and_a_lost_connection_is_not_run_a_second_time() {
    for home in ["quorum", "classic"] {
        let servers = Servers::start(map(home)).await;
        let runs = Runs::held();
        let (amqp, proxy) = behind_a_proxy(&servers.vhost).await;
        let database = servers.database.url();
        let worker = servers.process_over(&amqp, database, runs.registry()).await;
        let worker = worker.working();
        worker.publish_ships(0..1).await;
        runs.until("ship", 1).await;
        let control = worker.app.control().unwrap();
        control.pause_tier("normal").await.unwrap();
        sleep(KNOWN).await;
        control.resume_tier("normal").await.unwrap();
        worker.heard.until("consuming normal", 2).await;
        proxy.reset();
        worker.heard.until("consuming normal", 3).await;
        worker.publish_ships(1..2).await;
        runs.until("ship", 2).await;
        assert_eq!(runs.of("ship"), [0, 1], "{home}");
        runs.open.add_permits(10);
        until(async || worker.heard.count("done") == 2).await;
        worker.end().await;
        assert_eq!(
            servers.vhost.depth("shop.normal").await.unwrap(),
            0,
            "{home}"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_paused_task_waits_as_rows_and_starts_from_there_in_order_while_others_of_its_tier_go_on()
{
    for home in HOMES {
        let servers = Servers::start(shared(home)).await;
        let runs = Runs::free();
        let worker = servers.worker(&runs).await;
        let control = worker.app.control().unwrap();
        control.pause_task("order.ship").await.unwrap();
        sleep(KNOWN).await;
        // One after another: many at once go over several connections, and reach the queue in another order.
        for order in 0..700 {
            let customer = String::new();
            worker.app.publish(Ship { order, customer }).await.unwrap();
        }
        worker.publish_notifies(0..50).await;
        runs.until("notify", 50).await;
        until(async || servers.parked().await == 700).await;
        assert_eq!(runs.count("ship"), 0, "{home}");

        control.resume_task("order.ship").await.unwrap();
        runs.until("ship", 700).await;
        until(async || worker.heard.count("done") == 750).await;
        let ships = runs.of("ship");
        // Deliveries that arrive together, and handlers of several slots, may overtake each other.
        for (place, order) in ships.iter().enumerate() {
            assert!(
                place.abs_diff(*order as usize) <= 64,
                "{home}: {order} as number {place}"
            );
        }
        assert_eq!(servers.parked().await, 0);
        assert_eq!(
            worker.heard.count("suspected") + worker.heard.count("dead"),
            0,
            "{home}"
        );
        worker.end().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pause_ends_by_itself_and_holds_for_processes_that_start_later() {
    let servers = Servers::start(map("postgres")).await;
    let runs = Runs::free();
    let publisher = servers.process(&runs).await;
    let control = publisher.app.control().unwrap();
    let paused = control.pause_group("all").lasting("6s").await.unwrap();
    assert!(paused.after.unwrap().until.is_some());
    publisher.publish_ships(0..5).await;
    let worker = servers.worker(&runs).await;
    sleep(KNOWN).await;
    assert_eq!(runs.count("ship"), 0);
    runs.until("ship", 5).await;
    assert!(control.list().await.unwrap().is_empty());
    worker.end().await;
    publisher.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_the_map_does_not_have_cannot_be_paused_and_everything_is_on_record() {
    let servers = Servers::start(map("postgres")).await;
    let runs = Runs::free();
    let process = servers.process(&runs).await;
    let control = process.app.control().unwrap().by("ada");
    for (change, near) in [
        (control.pause_tier("norml"), "normal"),
        (control.pause_group("al"), "all"),
        (control.pause_task("order.shp"), "order.ship"),
    ] {
        let error = change.await.unwrap_err();
        assert!(
            matches!(&error, Error::Control(ControlError::Unknown(_))),
            "{error}"
        );
        assert!(
            error
                .to_string()
                .contains(&format!("did you mean {near:?}?")),
            "{error}"
        );
    }
    for (change, near) in [
        (control.resume_tier("norml"), "normal"),
        (control.unlimit_task("order.shp"), "order.ship"),
        (control.end_override_prefix("ordr."), "order."),
    ] {
        let error = change.await.unwrap_err().to_string();
        assert!(
            error.contains(&format!("did you mean {near:?}?")),
            "{error}"
        );
    }
    let error = control
        .pause_tier("normal")
        .lasting("0s")
        .await
        .unwrap_err();
    assert!(
        matches!(&error, Error::Control(ControlError::Invalid { .. })),
        "{error}"
    );
    let error = control.resume_tier("a\0b").await.unwrap_err();
    assert!(
        matches!(&error, Error::Control(ControlError::Invalid { .. })),
        "{error}"
    );
    assert!(control.list().await.unwrap().is_empty());

    control
        .pause_tier("normal")
        .because("the provider is down")
        .await
        .unwrap();
    let again = control.pause_tier("normal").because("still").await.unwrap();
    assert_eq!(again.before.unwrap().why, "the provider is down");
    control.resume_tier("normal").await.unwrap();
    let resumed = control.resume_tier("normal").await.unwrap();
    assert_eq!(resumed.notes, ["tier normal was not paused"]);
    let log = control.audit_log(None, 10).await.unwrap();
    let actions: Vec<_> = log
        .iter()
        .map(|it| (it.action.as_str(), it.who.as_str()))
        .collect();
    assert_eq!(
        actions,
        [
            ("resume tier", "ada"),
            ("pause tier", "ada"),
            ("pause tier", "ada")
        ]
    );
    process.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_paused_is_a_dead_letter_or_promoted() {
    let map = r#"
        app = "shop"
        [tiers.high]
        queue = "postgres"
        [tiers.normal]
        queue = "postgres"
        promote = { after = "1s", to = "high" }
        [tiers.other]
        queue = "postgres"
        ttl = "1s"
        [groups.all]
        tiers = ["high", "normal", "other"]
        concurrency = 1
        [tasks]
        "order.ship" = "normal"
        "order.notify" = "other"
    "#;
    let servers = Servers::start(map).await;
    let runs = Runs::free();
    let publisher = servers.process(&runs).await;
    let control = publisher.app.control().unwrap();
    control.pause_tier("normal").await.unwrap();
    control.pause_task("order.notify").await.unwrap();
    publisher.publish_ships(0..3).await;
    publisher.publish_notifies(0..3).await;
    let worker = servers.worker(&runs).await;
    // Longer than any rule allows, and than the pauses between two looks.
    sleep(Duration::from_secs(6)).await;
    assert_eq!(worker.heard.count("promoted"), 0);
    assert_eq!(
        (
            runs.count("ship"),
            runs.count("notify"),
            servers.dead().await
        ),
        (0, 0, 0)
    );
    control.resume_task("order.notify").await.unwrap();
    control.resume_tier("normal").await.unwrap();
    runs.until("notify", 3).await;
    runs.until("ship", 3).await;
    assert_eq!(
        (worker.heard.count("promoted"), servers.dead().await),
        (0, 0)
    );
    worker.end().await;
    publisher.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_resumed_and_paused_otherwise_is_named() {
    let servers = Servers::start(shared("postgres")).await;
    let process = servers.process(&Runs::free()).await;
    let control = process.app.control().unwrap().by("ada");
    control.pause_tier("normal").await.unwrap();
    control.pause_group("all").by("eve").await.unwrap();
    control.pause_task("order.ship").await.unwrap();
    control.pause_task("order.notify").await.unwrap();
    let tier = "tier normal is still paused, by ada";
    let group = "group all is still paused, by eve";
    let ship = "task order.ship is still paused, by ada";
    let resumed = control.resume_task("order.notify").await.unwrap();
    assert_eq!(resumed.notes, [tier, group]);
    let resumed = control.resume_tier("normal").await.unwrap();
    assert_eq!(resumed.notes, [group, ship]);
    let resumed = control.resume_group("all").await.unwrap();
    assert_eq!(resumed.notes, [ship]);
    let resumed = control.resume_task("order.ship").await.unwrap();
    assert!(resumed.notes.is_empty(), "{resumed:?}");
    process.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn pauses_of_the_tier_to_which_an_override_sends_a_task_are_named() {
    let servers = Servers::start(map("postgres")).await;
    let process = servers.worker(&Runs::free()).await;
    let control = process.app.control().unwrap().by("ada");
    until(async || !control.processes().await.unwrap().is_empty()).await;
    let overriding = control.override_prefix("order.s").tier("other");
    overriding.await.unwrap();
    control.pause_tier("normal").await.unwrap();
    control.pause_tier("other").by("eve").await.unwrap();
    control.pause_task("order.ship").await.unwrap();
    let normal = "tier normal is still paused, by ada";
    let other = "tier other is still paused, by eve";
    let ship = "task order.ship is still paused, by ada";
    // What the broker had before the override may wait in the tier of the map.
    let resumed = control.resume_task("order.ship").await.unwrap();
    assert_eq!(resumed.notes, [normal, other]);
    control.pause_task("order.ship").await.unwrap();
    let resumed = control.resume_tier("other").await.unwrap();
    assert_eq!(resumed.notes, [ship]);
    process.end().await;
}
