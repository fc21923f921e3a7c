//! The reference scenario, from its file to its plan.

use std::collections::BTreeMap;
use std::time::Duration;

use tierline::error::BrokerError;
use tierline::topology::plan::{Argument, Plan};
use tierline::topology::{Order, QueueType};
use tierline::{Error, Topology};

use super::{hotel, plan, small};

#[test]
fn the_hotel_has_six_tiers_four_groups_and_75_tasks() {
    let hotel = hotel();
    assert_eq!(
        (
            hotel.tiers().len(),
            hotel.groups().len(),
            hotel.tasks().len()
        ),
        (6, 4, 75)
    );
    let mut counts = BTreeMap::new();
    for task in hotel.tasks() {
        *counts.entry(task.tier.as_str()).or_insert(0) += 1;
    }
    let expected = [
        ("bulk", 11),
        ("calls", 9),
        ("critical", 7),
        ("high", 20),
        ("low", 12),
        ("normal", 16),
    ];
    assert_eq!(counts, expected.into());
}

#[test]
fn the_hotels_tiers_are_as_specified_and_in_file_order() {
    use QueueType::{Classic, Quorum};
    let hotel = hotel();
    let tiers: Vec<_> = hotel
        .tiers()
        .iter()
        .map(|tier| {
            (
                tier.name.as_str(),
                tier.weight,
                tier.slo.map(|slo| slo.as_secs()),
                tier.home.queue_type().unwrap(),
            )
        })
        .collect();
    assert_eq!(
        tiers,
        [
            ("critical", Some(10.0), Some(5), Classic),
            ("high", Some(8.0), Some(30), Classic),
            ("normal", Some(5.0), Some(120), Quorum),
            ("low", Some(3.0), Some(600), Quorum),
            ("bulk", Some(1.0), None, Quorum),
            ("calls", None, Some(30), Classic),
        ]
    );
}

#[test]
fn the_hotels_groups_are_as_specified() {
    let hotel = hotel();
    let groups: Vec<_> = hotel
        .groups()
        .iter()
        .map(|group| {
            (
                group.name.as_str(),
                group.tiers.join(" "),
                group.order,
                group.concurrency,
                group.prefetch,
            )
        })
        .collect();
    assert_eq!(
        groups,
        [
            ("urgent", "critical high".to_owned(), Order::Strict, 8, 1),
            ("normal", "normal".to_owned(), Order::Strict, 4, 4),
            ("deferred", "low bulk".to_owned(), Order::Weighted, 4, 4),
            ("calls", "calls".to_owned(), Order::Strict, 4, 1),
        ]
    );
}

#[test]
fn a_task_has_one_tier_and_an_unmapped_one_has_none() {
    let hotel = hotel();
    let task = hotel.task("calls.download_recording").unwrap();
    assert_eq!((task.tier.as_str(), task.priority), ("calls", 9));
    assert_eq!(hotel.task("email.send_otp").unwrap().priority, 5);
    assert_eq!(hotel.task("email.send_spam"), None);
}

#[test]
fn the_hotels_plan_is_the_same_on_every_version() {
    let [oldest, middle, newest] =
        ["3.10.8", "4.0.5", "4.3.6"].map(|version| plan(&hotel(), version).unwrap());
    assert_eq!(oldest, middle);
    assert_eq!(middle, newest);
    insta::assert_snapshot!("hotel_plan", newest);
    insta::assert_snapshot!(
        "hotel_tasks",
        serde_json::to_string_pretty(&newest.tasks).unwrap()
    );
}

#[test]
fn two_readings_of_a_file_give_the_same_json() {
    let json = || serde_json::to_string(&plan(&hotel(), "4.3.6").unwrap()).unwrap();
    assert_eq!(json(), json());
}

#[test]
fn all_that_a_tier_may_say_reaches_its_queues() {
    let settings = "queue = \"quorum\"\nttl = \"30d\"\nmax_length = 1000\ndelivery_limit = 7\ngeneration = 2\n\
                    dlq = { queue = \"classic\", expiry = \"7d\" }";
    let topology = small(|text| text.replace("queue = \"classic\"", settings)).unwrap();
    let plan = plan(&topology, "3.10.8").unwrap();
    let shown = |name: &str| {
        let queue = plan.queues.iter().find(|queue| queue.name == name).unwrap();
        serde_json::to_string(&queue.arguments).unwrap()
    };
    assert_eq!(
        shown("shop.main.g2"),
        "{\"x-dead-letter-exchange\":\"shop.main.dlx\",\"x-dead-letter-strategy\":\"at-least-once\",\
         \"x-delivery-limit\":7,\"x-max-length\":1000,\"x-message-ttl\":2592000000,\
         \"x-overflow\":\"reject-publish\",\"x-queue-type\":\"quorum\"}"
    );
    assert_eq!(
        shown("shop.main.dlq"),
        "{\"x-message-ttl\":604800000,\"x-queue-type\":\"classic\"}"
    );
    assert!(
        plan.bindings
            .iter()
            .all(|binding| binding.destination != "shop.main")
    );
}

#[test]
fn no_routing_key_leads_to_two_generations_of_a_tier() {
    let generation = |number: u32| {
        let settings = format!("queue = \"quorum\"\ngeneration = {number}");
        let topology = small(|text| text.replace("queue = \"classic\"", &settings)).unwrap();
        plan(&topology, "3.10.8").unwrap()
    };
    let (first, second) = (generation(1), generation(2));
    let keys = |plan: &Plan| {
        let bindings = plan.bindings.iter();
        let of_tier = bindings.filter(|it| it.routing_key.starts_with("main"));
        let mut keys: Vec<_> = of_tier.map(|it| it.routing_key.clone()).collect();
        keys.sort();
        keys
    };
    assert_eq!(keys(&first), ["main", "main.#", "main.#"]);
    assert_eq!(keys(&second), ["main:g2", "main:g2.#", "main:g2.#"]);
    assert_eq!(second.tasks["mail.send"].routing_key, "main:g2");
    let queues = |plan: &Plan| {
        plan.queues
            .iter()
            .map(|it| it.name.clone())
            .collect::<Vec<_>>()
    };
    let differ = queues(&first)
        .into_iter()
        .zip(queues(&second))
        .filter(|(one, other)| one != other);
    let differ: Vec<_> = differ.collect();
    assert_eq!(
        differ,
        [("shop.main".to_owned(), "shop.main.g2".to_owned())]
    );
}

#[test]
fn a_group_keeps_its_quarantine_while_a_tier_of_it_moves_to_postgres() {
    let queues = |settings: &str| {
        let topology = small(|text| text.replace("queue = \"classic\"", settings)).unwrap();
        let plan = plan(&topology, "3.10.8").unwrap();
        plan.queues
            .into_iter()
            .map(|it| it.name)
            .collect::<Vec<_>>()
    };
    let moving = queues("queue = \"postgres\"\nformerly = \"classic\"");
    assert_eq!(moving, ["shop.all.quarantine", "shop.unrouted"]);
    assert_eq!(queues("queue = \"postgres\""), ["shop.unrouted"]);
}

#[test]
fn every_binding_connects_what_the_plan_declares() {
    let plan = plan(&hotel(), "4.3.6").unwrap();
    let declared = |name: &str| plan.exchanges.iter().any(|exchange| exchange.name == name);
    for binding in &plan.bindings {
        assert!(declared(&binding.source), "{binding:?}");
        let queue = plan
            .queues
            .iter()
            .any(|queue| queue.name == binding.destination);
        assert!(queue || declared(&binding.destination), "{binding:?}");
    }
    for arguments in plan.queues.iter().map(|queue| &queue.arguments) {
        assert!(arguments.contains_key("x-queue-type"));
        if let Some(Argument::Text(exchange)) = arguments.get("x-dead-letter-exchange") {
            assert!(declared(exchange), "{exchange}");
        }
    }
}

#[test]
fn a_quorum_tier_with_priorities_needs_4_3() {
    let settings = "queue = \"quorum\"\nmax_priority = 10";
    let topology = small(|text| text.replace("queue = \"classic\"", settings)).unwrap();
    let error = plan(&topology, "4.2.1").unwrap_err();
    assert!(matches!(
        error,
        Error::Broker(BrokerError::UnsupportedPriorities { .. })
    ));
    assert_eq!(
        error.to_string(),
        "tier \"main\" is a quorum queue with max_priority = 10, which needs RabbitMQ 4.3.0 or newer, and the \
         broker is 4.2.1; either set queue = \"classic\" for this tier (priorities on one node), or upgrade the \
         broker"
    );

    let plan = plan(&topology, "4.3.0").unwrap();
    let queue = plan
        .queues
        .iter()
        .find(|queue| queue.name == "shop.main")
        .unwrap();
    assert!(
        !queue.arguments.contains_key("x-max-priority"),
        "quorum queues refuse it"
    );
}

#[test]
fn the_smallest_file_is_enough() {
    let minimal = Topology::load("topology/minimal.toml").unwrap();
    assert_eq!(minimal.app(), "shop");
    assert_eq!(plan(&minimal, "3.10.8").unwrap().tasks.len(), 1);
    assert_eq!(minimal.broker().ack_timeout, Duration::from_secs(1800));
}

#[test]
fn with_a_database_the_hotel_has_no_queues_for_long_delays_unless_it_asks_for_them() {
    let hotel = hotel();
    let newest = || "4.3.6".parse().unwrap();
    let without = Plan::new(&hotel, newest(), false).unwrap();
    let with = Plan::new(&hotel, newest(), true).unwrap();
    let count = |plan: &Plan| {
        let (exchanges, queues) = (plan.exchanges.len(), plan.queues.len());
        (exchanges, queues, plan.bindings.len())
    };
    println!(
        "the hotel: {:?} without a database, {:?} with one",
        count(&without),
        count(&with)
    );
    assert_eq!(count(&without), (110, 112, 219));
    assert_eq!(count(&with), (98, 101, 191));
    let is_long = |name: &str| name.starts_with("hotel.delay.long.");
    let rest = without.queues.into_iter().filter(|it| !is_long(&it.name));
    assert_eq!(rest.collect::<Vec<_>>(), with.queues);
    let rest = without.bindings.into_iter();
    let rest = rest.filter(|it| !is_long(&it.source) && !is_long(&it.destination));
    assert_eq!(rest.collect::<Vec<_>>(), with.bindings);

    let file = std::fs::read_to_string(super::HOTEL).unwrap();
    let asking = file.replacen("[broker]", "[broker]\nlong_delays = true", 1);
    let asking = Topology::parse(asking).unwrap();
    let asking = Plan::new(&asking, newest(), true).unwrap();
    assert_eq!(count(&asking), (110, 112, 219));
}
