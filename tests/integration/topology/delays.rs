//! A message that is delayed takes the way that the plan lays out for it, and exactly as long.

use std::time::Duration;

use proptest::prelude::*;
use tierline::error::PublishError;
use tierline::topology::delay::{self, MAX_DELAY};
use tierline::topology::export::least_permissions;
use tierline::topology::plan::{Argument, DestinationType, Plan};
use tierline::{Error, Topology};

use super::{hotel, plan, small, the_problem};

proptest! {
    #[test]
    fn every_delay_ends_in_its_tier_after_its_time(
        tier in prop::sample::select(vec!["critical", "normal", "bulk"]),
        milliseconds in prop_oneof![1..10_000u64, 1..2_592_000_000u64],
    ) {
        let plan = plan(&hotel(), "4.3.6").unwrap();
        let delay = Duration::from_millis(milliseconds);
        let route = delay::route("hotel", tier, delay).unwrap().unwrap();
        let (queue, waited) = travel(&plan, &route.exchange, &route.routing_key);
        prop_assert_eq!(queue, format!("hotel.{tier}"));
        prop_assert_eq!(waited, milliseconds.next_multiple_of(100));
    }
}

#[test]
fn the_longest_and_the_shortest_delay_arrive() {
    let plan = plan(&hotel(), "4.3.6").unwrap();
    for (delay, waited) in [
        (Duration::from_nanos(1), 100),
        (Duration::from_millis(100), 100),
        (MAX_DELAY, 2_592_000_000),
    ] {
        let route = delay::route("hotel", "low", delay).unwrap().unwrap();
        assert_eq!(
            travel(&plan, &route.exchange, &route.routing_key),
            ("hotel.low".to_owned(), waited)
        );
    }
}

#[test]
fn a_message_enters_at_its_highest_one_bit() {
    let exchange = |delay| {
        delay::route("hotel", "low", delay)
            .unwrap()
            .unwrap()
            .exchange
    };
    assert_eq!(exchange(Duration::from_millis(100)), "hotel.delay.low.00");
    assert_eq!(exchange(Duration::from_millis(101)), "hotel.delay.low.01");
    assert_eq!(
        exchange(Duration::from_millis(1_638_300)),
        "hotel.delay.low.13"
    );
    assert_eq!(
        exchange(Duration::from_millis(1_638_301)),
        "hotel.delay.long.14"
    );
    assert_eq!(exchange(MAX_DELAY), "hotel.delay.long.24");
}

#[test]
fn no_delay_needs_no_ladder() {
    assert_eq!(delay::route("hotel", "low", Duration::ZERO).unwrap(), None);
}

#[test]
fn a_delay_above_30_days_is_refused_with_the_way_out() {
    for delay in [MAX_DELAY + Duration::from_nanos(1), Duration::MAX] {
        let error = delay::route("hotel", "low", delay).unwrap_err();
        assert!(matches!(
            error,
            Error::Publish(PublishError::DelayTooLong { .. })
        ));
        assert!(
            error.to_string().contains("30days") && error.to_string().contains("when it is due"),
            "{error}"
        );
    }
}

#[test]
fn a_message_whose_tier_is_gone_is_caught() {
    let plan = plan(&hotel(), "4.3.6").unwrap();
    let route = delay::route("hotel", "sold", Duration::from_secs(3_600))
        .unwrap()
        .unwrap();
    assert_eq!(
        travel(&plan, &route.exchange, &route.routing_key).0,
        "hotel.unrouted"
    );
}

/// The hotel, whose tiers of these names have no delays.
fn hotel_without_delays(tiers: &[&str]) -> Topology {
    let mut map = std::fs::read_to_string(super::HOTEL).unwrap();
    for tier in tiers {
        let section = format!("[tiers.{tier}]\n");
        assert!(map.contains(&section));
        map = map.replace(&section, &format!("{section}delays = false\n"));
    }
    Topology::parse(map).unwrap()
}

#[test]
fn a_tier_without_delays_has_no_delay_queues_and_the_others_keep_theirs() {
    let all = plan(&hotel(), "4.3.6").unwrap();
    let some = hotel_without_delays(&["critical", "bulk"]);
    assert!(!some.tier("bulk").unwrap().delays && some.tier("low").unwrap().delays);
    let some = plan(&some, "4.3.6").unwrap();
    let is_theirs = |name: &str| {
        name.starts_with("hotel.delay.critical.") || name.starts_with("hotel.delay.bulk.")
    };
    let exchanges = all.exchanges.into_iter();
    let exchanges = exchanges.filter(|it| !is_theirs(&it.name));
    assert_eq!(exchanges.collect::<Vec<_>>(), some.exchanges);
    let queues = all.queues.into_iter().filter(|it| !is_theirs(&it.name));
    assert_eq!(queues.collect::<Vec<_>>(), some.queues);
    let bindings = all.bindings.into_iter();
    let bindings = bindings.filter(|it| !is_theirs(&it.source) && !is_theirs(&it.destination));
    assert_eq!(bindings.collect::<Vec<_>>(), some.bindings);
    assert_eq!(all.tasks, some.tasks);
}

#[test]
fn a_map_without_delays_has_no_delay_queues_at_all() {
    let tiers = ["critical", "high", "normal", "low", "bulk", "calls"];
    let plan = plan(&hotel_without_delays(&tiers), "4.3.6").unwrap();
    let exchanges = plan.exchanges.iter().map(|it| &it.name);
    let queues = plan.queues.iter().map(|it| &it.name);
    let delays: Vec<_> = exchanges.chain(queues).collect();
    assert!(
        delays.iter().all(|it| !it.contains(".delay.")),
        "{delays:?}"
    );
}

#[test]
fn delays_are_true_or_false() {
    for value in ["\"no\"", "0", "\"5s\""] {
        let delays = format!("\"classic\"\ndelays = {value}");
        let problem = the_problem(small(|text| text.replace("\"classic\"", &delays)));
        let expected = "delays in [tiers.main] must be true or false, found";
        assert!(problem.contains(expected), "{problem}");
    }
    let problem = the_problem(small(|text| {
        text.replace("[groups.all]", "[groups.all]\ndelays = false")
    }));
    assert!(problem.contains("unknown key \"delays\""), "{problem}");
}

#[test]
fn nobody_may_publish_into_delay_queues_that_do_not_exist() {
    let write = |tiers: &[&str]| {
        let permissions = least_permissions(&hotel_without_delays(tiers), "/");
        permissions.into_iter().next().unwrap().write
    };
    assert_eq!(
        write(&["high", "normal", "low", "bulk"]),
        r"^hotel\.(tasks|delay\.(critical|calls|long)\.[0-9]+)$"
    );
    let none = write(&["critical", "high", "normal", "low", "bulk", "calls"]);
    assert_eq!(none, r"^hotel\.tasks$");
}

/// Plays the broker: the queue in which the message ends, and the milliseconds it waited on its way.
fn travel(plan: &Plan, exchange: &str, routing_key: &str) -> (String, u64) {
    let matching: Vec<_> = plan
        .bindings
        .iter()
        .filter(|binding| binding.source == exchange && matches(&binding.routing_key, routing_key))
        .collect();
    let next = match matching.as_slice() {
        [binding] => *binding,
        [] => {
            let here = plan
                .exchanges
                .iter()
                .find(|known| known.name == exchange)
                .unwrap();
            return (text(&here.arguments["alternate-exchange"]), 0);
        }
        several => panic!("the message would be doubled: {several:?}"),
    };
    if next.destination_type == DestinationType::Exchange {
        return travel(plan, &next.destination, routing_key);
    }
    let queue = plan
        .queues
        .iter()
        .find(|queue| queue.name == next.destination)
        .unwrap();
    if !queue.name.contains(".delay.") {
        return (queue.name.clone(), 0);
    }
    let Argument::Int(wait) = queue.arguments["x-message-ttl"] else {
        panic!("a TTL is a number");
    };
    let (end, waited) = travel(
        plan,
        &text(&queue.arguments["x-dead-letter-exchange"]),
        routing_key,
    );
    (end, waited + u64::try_from(wait).unwrap())
}

/// A topic pattern as the broker reads it, for patterns whose `#` is at the end.
fn matches(pattern: &str, routing_key: &str) -> bool {
    let mut words = routing_key.split('.');
    for part in pattern.split('.') {
        match (part, words.next()) {
            ("#", _) => return true,
            ("*", Some(_)) => {}
            (part, word) if Some(part) == word => {}
            _ => return false,
        }
    }
    words.next().is_none()
}

fn text(argument: &Argument) -> String {
    argument.to_string()
}
