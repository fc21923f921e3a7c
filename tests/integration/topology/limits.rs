//! What a name, a number and a file may be at most.

use tierline::Topology;
use tierline::topology::{BrokerSettings, Formerly, Home, MAX_FILE_SIZE, QueueType};

use super::{plan, small, the_problem};

#[test]
fn no_name_of_an_accepted_file_is_longer_than_amqp_carries() {
    for (app, tier) in [(200, 44), (240, 4), (10, 205)] {
        let (app, tier) = ("a".repeat(app), "t".repeat(tier));
        let accepted = small(|text| text.replace("shop", &app).replace("main", &tier)).unwrap();
        let plan = plan(&accepted, "4.3.6").unwrap();
        let names = plan.exchanges.iter().map(|exchange| &exchange.name);
        let names = names.chain(plan.queues.iter().map(|queue| &queue.name));
        let names = names.chain(plan.bindings.iter().map(|binding| &binding.routing_key));
        let key = tierline::topology::delay::route(&app, &tier, std::time::Duration::from_secs(1));
        let longest = names
            .map(String::len)
            .chain([key.unwrap().unwrap().routing_key.len()])
            .max();
        assert_eq!(longest, Some(255));
    }
}

#[test]
fn a_name_one_byte_too_long_is_refused() {
    for (app, tier) in [(200, 45), (241, 3), (10, 206)] {
        let problem = the_problem(small(|text| {
            text.replace("shop", &"a".repeat(app))
                .replace("main", &"t".repeat(tier))
                .replace("groups.all", "groups.g")
        }));
        assert!(
            problem.contains("256 bytes, and AMQP carries 255"),
            "{problem}"
        );
        assert!(problem.ends_with("by 1"), "{problem}");
    }
    let group = |length| {
        small(|text| text.replace("groups.all", &format!("groups.{}", "g".repeat(length))))
    };
    group(239).unwrap();
    assert!(the_problem(group(240)).contains("256 bytes"));
}

#[test]
fn a_task_name_has_up_to_255_bytes_and_no_control_characters() {
    let named = |name: &str| small(|text| text.replace("mail.send", name));
    assert!(
        named(&"é".repeat(127))
            .unwrap()
            .task(&"é".repeat(127))
            .is_some()
    );
    assert!(the_problem(named(&"é".repeat(128))).contains("has 256 bytes"));
    assert!(the_problem(named("bell\\u0007")).contains("control characters"));
    assert!(the_problem(named("")).contains("is empty"));
}

#[test]
fn names_that_would_collide_with_our_own_are_refused() {
    for tier in ["tasks", "delay", "long", "unrouted"] {
        let problem = the_problem(small(|text| text.replace("main", tier)));
        assert!(
            problem.contains("tierline uses the name itself"),
            "{problem}"
        );
    }
    assert!(the_problem(small(|text| text.replace("shop", "amq"))).contains("\"amq.\""));
    for name in ["a.b", "a b", "", "é", "a/b"] {
        assert!(
            the_problem(small(|text| text.replace("shop", name))).contains("the app name"),
            "{name}"
        );
    }
}

#[test]
fn slots_times_prefetch_fit_amqps_counter() {
    let group = |concurrency: u32, prefetch: u32| {
        small(|text| {
            text.replace(
                "concurrency = 4",
                &format!("concurrency = {concurrency}\nprefetch = {prefetch}"),
            )
        })
    };
    group(65_535, 1).unwrap();
    group(255, 257).unwrap();
    assert!(the_problem(group(256, 256)).contains("holds 65536 messages"));
    assert!(the_problem(group(0, 1)).contains("1 to 65535, found 0"));
    assert!(the_problem(group(1, 0)).contains("1 to 65535, found 0"));
    assert!(the_problem(group(65_536, 1)).contains("found 65536"));
}

#[test]
fn times_end_where_the_brokers_timers_end() {
    for key in ["slo", "ttl", "dlq.expiry"] {
        let with = |value: &str| {
            small(|text| text.replace("\"classic\"", &format!("\"classic\"\n{key} = \"{value}\"")))
        };
        with("1ms").unwrap();
        with("49d").unwrap();
        assert!(
            the_problem(with("0s")).contains("is out of range\n    help: it may be 1ms to 49d")
        );
        assert!(the_problem(with("49d1ms")).contains("is out of range"));
    }
}

#[test]
fn a_priority_above_the_tiers_maximum_is_refused() {
    let with = |settings: &str, priority: &str| {
        small(|text| {
            let target = format!("= {{ tier = \"main\", priority = {priority} }}");
            text.replace("= \"main\"", &target)
                .replace("queue = \"classic\"", settings)
        })
    };
    let resolved = |settings, priority| with(settings, priority).unwrap().tasks()[0].priority;
    assert_eq!(resolved("queue = \"classic\"", "10"), 10);
    assert_eq!(
        resolved("queue = \"classic\"\nmax_priority = 255", "255"),
        255
    );
    assert_eq!(resolved("queue = \"quorum\"\nmax_priority = 31", "31"), 31);
    assert!(
        the_problem(with("queue = \"classic\"", "11"))
            .contains("priority 11, and its tier \"main\" goes up to 10")
    );
    for without in [
        "queue = \"quorum\"",
        "queue = \"classic\"\nmax_priority = 0",
    ] {
        assert!(the_problem(with(without, "0")).contains("has no priorities"));
    }
    assert!(
        the_problem(with("queue = \"quorum\"\nmax_priority = 32", "1"))
            .contains("1 to 31, found 32")
    );
    assert!(the_problem(with("queue = \"classic\"", "-1")).contains("found -1"));
    assert!(
        the_problem(with("queue = \"classic\"", "99999999999999999999"))
            .contains("found 99999999999999999999")
    );
}

#[test]
fn a_task_without_a_priority_gets_one_that_its_tier_has() {
    let resolved = |settings| {
        small(|text| text.replace("queue = \"classic\"", settings))
            .unwrap()
            .tasks()[0]
            .priority
    };
    assert_eq!(resolved("queue = \"classic\""), 5);
    assert_eq!(resolved("queue = \"classic\"\nmax_priority = 3"), 3);
    assert_eq!(resolved("queue = \"quorum\"\nmax_priority = 31"), 5);
    assert_eq!(resolved("queue = \"classic\"\nmax_priority = 0"), 4);
    assert_eq!(
        resolved("queue = \"quorum\""),
        4,
        "what every version bears"
    );
}

#[test]
fn a_large_file_is_refused_and_the_largest_is_read() {
    let padded = |size: usize| {
        small(|text| {
            let padding = "#".repeat(size - text.len());
            text + &padding
        })
    };
    padded(MAX_FILE_SIZE).unwrap();
    assert!(the_problem(padded(MAX_FILE_SIZE + 1)).contains("larger than 4MiB"));
    assert!(the_problem(padded(10_000_000)).contains("larger than 4MiB"));
}

#[test]
fn deep_nesting_is_a_mistake_and_no_crash() {
    for text in [
        "[".repeat(100_000),
        "a.".repeat(100_000),
        format!("[{}a]", "a.".repeat(100_000)),
        "x = ".to_owned() + &"{a=".repeat(100_000),
    ] {
        assert!(Topology::parse(text).is_err());
    }
}

#[test]
fn a_tier_says_what_it_was_before_it_moved() {
    let formerly = |settings| {
        let topology = small(|text| text.replace("queue = \"classic\"", settings)).unwrap();
        let tier = topology.tier("main").unwrap();
        (tier.formerly, topology.names().former_queue(tier))
    };
    let queue = |queue, generation| Some(Formerly::Queue { queue, generation });
    let first = Some("shop.main".to_owned());
    for (settings, expected) in [
        ("queue = \"quorum\"", (None, None)),
        (
            "queue = \"quorum\"\nformerly = \"postgres\"",
            (Some(Formerly::Postgres), None),
        ),
        (
            "queue = \"quorum\"\nformerly = { queue = \"postgres\" }",
            (Some(Formerly::Postgres), None),
        ),
        (
            "queue = \"postgres\"\nformerly = \"classic\"",
            (queue(QueueType::Classic, 1), first.clone()),
        ),
        (
            "queue = \"quorum\"\ngeneration = 3\nformerly = { queue = \"quorum\" }",
            (queue(QueueType::Quorum, 1), first),
        ),
        (
            "queue = \"quorum\"\nformerly = { queue = \"classic\", generation = 12 }",
            (
                queue(QueueType::Classic, 12),
                Some("shop.main.g12".to_owned()),
            ),
        ),
    ] {
        assert_eq!(formerly(settings), expected, "{settings}");
    }
}

#[test]
fn what_the_file_leaves_out_has_its_documented_default() {
    let topology = small(|text| text).unwrap();
    assert_eq!(*topology.broker(), BrokerSettings::default());
    let tier = topology.tier("main").unwrap();
    assert_eq!(
        (tier.home, tier.generation),
        (
            Home::Classic {
                max_priority: Some(10)
            },
            1
        )
    );
    assert_eq!(
        (tier.weight, tier.slo, tier.ttl, tier.max_length),
        (None, None, None, None)
    );
    assert_eq!(tier.dlq.queue, QueueType::Quorum);
    assert_eq!(tier.dlq.expiry.as_secs(), 30 * 86_400);
    assert_eq!(topology.group("all").unwrap().prefetch, 1);

    let quorum = small(|text| text.replace("classic", "quorum")).unwrap();
    let tier = quorum.tier("main").unwrap();
    assert_eq!(
        tier.home,
        Home::Quorum {
            max_priority: None,
            delivery_limit: 100
        }
    );
}

#[test]
fn what_the_file_says_about_the_broker_is_kept() {
    let broker = "[broker]\nack_timeout = \"1h30m\"\nmax_message_size = \"64MiB\"\n";
    let topology =
        small(|text| text.replace("[tiers.main]", &format!("{broker}[tiers.main]"))).unwrap();
    assert_eq!(topology.broker().ack_timeout.as_secs(), 5_400);
    assert_eq!(topology.broker().max_message_size, 64 << 20);
}
