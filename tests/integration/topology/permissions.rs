//! What is exported for the broker, and what its users may do with it.

use regex::Regex;
use tierline::topology::export::{Definitions, Permission, least_permissions};

use super::{hotel, plan, small};

fn permission(user: &str) -> Permission {
    let permissions = least_permissions(&hotel(), "/");
    permissions
        .into_iter()
        .find(|permission| permission.user == user)
        .unwrap()
}

/// The exchanges and queues of the hotel, and some that are none of its own.
fn allowed(pattern: &str) -> Vec<String> {
    let plan = plan(&hotel(), "4.3.6").unwrap();
    let exchanges = plan.exchanges.into_iter().map(|exchange| exchange.name);
    let queues = plan.queues.into_iter().map(|queue| queue.name);
    let strangers = [
        "amq.default",
        "hotel",
        "hotelXtasks",
        "xhotel.tasks",
        "hotel.tasks2",
        "hotel.critical.g2",
    ];
    let pattern = Regex::new(pattern).unwrap();
    let mut names: Vec<_> = exchanges
        .chain(queues)
        .chain(strangers.map(String::from))
        .collect();
    names.sort();
    names.dedup();
    names
        .into_iter()
        .filter(|name| pattern.is_match(name) && !is_delay_level(name))
        .collect()
}

fn is_delay_level(name: &str) -> bool {
    name.contains(".delay.") && !name.ends_with(".out")
}

#[test]
fn a_publisher_may_publish_and_nothing_else() {
    let publisher = permission("hotel.publisher");
    assert_eq!(allowed(&publisher.write), ["hotel.tasks"]);
    assert_eq!(allowed(&publisher.read), [""; 0]);
    assert_eq!(allowed(&publisher.configure), [""; 0]);
}

#[test]
fn a_worker_may_consume_its_own_tiers_and_quarantine_and_collect_all_dead_letters() {
    let worker = permission("hotel.worker.urgent");
    assert_eq!(
        allowed(&worker.read),
        [
            "hotel.bulk.dlq",
            "hotel.calls.dlq",
            "hotel.critical",
            "hotel.critical.dlq",
            "hotel.critical.g2",
            "hotel.high",
            "hotel.high.dlq",
            "hotel.low.dlq",
            "hotel.normal.dlq",
            "hotel.unrouted",
            "hotel.urgent.quarantine",
        ]
    );
    assert_eq!(
        allowed(&worker.write),
        [
            "hotel.critical.dlx",
            "hotel.high.dlx",
            "hotel.tasks",
            "hotel.unrouted"
        ]
    );
    assert_eq!(allowed(&worker.configure), [""; 0]);
}

#[test]
fn everybody_may_publish_into_every_delay_level() {
    let plan = plan(&hotel(), "4.3.6").unwrap();
    for permission in least_permissions(&hotel(), "/") {
        let write = Regex::new(&permission.write).unwrap();
        let levels = plan
            .exchanges
            .iter()
            .filter(|exchange| is_delay_level(&exchange.name));
        assert_eq!(
            levels.filter(|level| write.is_match(&level.name)).count(),
            6 * 14 + 11
        );
    }
}

#[test]
fn names_with_dashes_are_taken_literally() {
    let topology = small(|text| {
        text.replace("shop", "my-shop")
            .replace("main", "very-urgent_1")
    })
    .unwrap();
    let worker = &least_permissions(&topology, "/")[1];
    assert!(
        Regex::new(&worker.read)
            .unwrap()
            .is_match("my-shop.very-urgent_1")
    );
}

#[test]
fn the_hotels_definitions_are_what_the_broker_imports() {
    let hotel = hotel();
    let plan = plan(&hotel, "4.3.6").unwrap();
    let definitions = Definitions::new(&hotel, &plan, "guests");
    let json = serde_json::to_value(&definitions).unwrap();

    for part in ["users", "permissions", "exchanges", "queues", "bindings"] {
        assert!(!json[part].as_array().unwrap().is_empty(), "{part}");
    }
    for part in ["permissions", "exchanges", "queues", "bindings"] {
        assert!(
            json[part]
                .as_array()
                .unwrap()
                .iter()
                .all(|entry| entry["vhost"] == "guests"),
            "{part}"
        );
    }
    insta::assert_snapshot!(
        "hotel_users",
        serde_json::to_string_pretty(&definitions.users).unwrap()
    );
    insta::assert_snapshot!(
        "hotel_permissions",
        serde_json::to_string_pretty(&definitions.permissions).unwrap()
    );
    let first = |part: &str| serde_json::to_string_pretty(&json[part][0]).unwrap();
    insta::assert_snapshot!(
        "one_of_each",
        ["exchanges", "queues", "bindings"].map(first).join("\n")
    );
}
