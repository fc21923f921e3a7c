use super::*;

const MAP: &str = r#"
    app = "shop"
    [broker]
    max_message_size = "1KiB"
    [tiers.urgent]
    queue = "classic"
    [tiers.plain]
    queue = "classic"
    max_priority = 0
    [tiers.normal]
    queue = "quorum"
    [tiers.ranked]
    queue = "quorum"
    max_priority = 20
    [groups.all]
    tiers = ["urgent", "plain", "normal", "ranked"]
    concurrency = 1
    [tasks]
    otp = { tier = "urgent", priority = 8 }
    ping = "plain"
    mail = "normal"
    report = { tier = "ranked", priority = 12 }
"#;

fn topology() -> Topology {
    Topology::parse(MAP).unwrap()
}

/// A broker of this version, and no database.
fn on(version: &str) -> Servers {
    Servers {
        broker: version.parse().unwrap(),
        has_database: false,
    }
}

fn with_database() -> Servers {
    Servers {
        has_database: true,
        ..on("4.3.6")
    }
}

fn route_on(
    version: &str,
    task: &str,
    request: RouteRequest<'_>,
    delay: Duration,
) -> Result<Destination, Error> {
    destination(&topology(), None, on(version), task, request, delay)
}

fn route(task: &str, request: RouteRequest<'_>) -> Destination {
    route_on("4.3.6", task, request, Duration::ZERO).unwrap()
}

fn exchange(exchange: &str, routing_key: &str) -> Address {
    Address::Exchange {
        exchange: exchange.to_owned(),
        routing_key: routing_key.to_owned(),
    }
}

fn publish(priority: impl Into<Option<u8>>) -> RouteRequest<'static> {
    RouteRequest::Publish {
        priority: priority.into(),
        is_row: false,
    }
}

fn retry(tier: &str, priority: u8) -> RouteRequest<'_> {
    RouteRequest::Retry { tier, priority }
}

fn redrive(tier: &str, priority: u8) -> RouteRequest<'_> {
    RouteRequest::Redrive { tier, priority }
}

#[test]
fn every_request_leads_to_the_tier_that_the_map_names() {
    for request in [publish(None), retry("normal", 8), redrive("normal", 8)] {
        let expected = Destination {
            tier: "urgent".to_owned(),
            address: exchange("shop.tasks", "urgent"),
            priority: 8,
        };
        assert_eq!(route("otp", request), expected, "{request:?}");
    }
}

#[test]
fn a_tier_in_postgres_takes_rows_with_any_delay_and_its_own_priorities() {
    let map = MAP.replace(
        "[tiers.normal]\n    queue = \"quorum\"",
        "[tiers.normal]\nqueue = \"postgres\"",
    );
    let topology = Topology::parse(map).unwrap();
    let year = Duration::from_secs(365 * 86_400);
    for (request, priority) in [
        (publish(None), 5),
        (publish(10), 10),
        (retry("normal", 7), 7),
        (redrive("urgent", 7), 5),
    ] {
        let oldest = on("3.10.8");
        let expected = Destination {
            tier: "normal".to_owned(),
            address: Address::Row { after: year },
            priority,
        };
        let found = destination(&topology, None, oldest, "mail", request, year);
        assert_eq!(found.unwrap(), expected, "{request:?}");
    }
}

#[test]
fn a_publish_that_asks_for_a_row_gets_one_in_any_tier_with_any_delay() {
    let year = Duration::from_secs(365 * 86_400);
    for (task, priority, expected) in [("otp", Some(9), 9), ("otp", None, 8), ("mail", None, 4)] {
        let request = RouteRequest::Publish {
            priority,
            is_row: true,
        };
        let found = route_on("3.10.8", task, request, year).unwrap();
        assert_eq!(found.address, Address::Row { after: year }, "{task}");
        assert_eq!(found.priority, expected, "{task}");
    }
    let refused = RouteRequest::Publish {
        priority: Some(11),
        is_row: true,
    };
    assert!(route_on("3.10.8", "otp", refused, Duration::ZERO).is_err());
}

#[test]
fn a_delay_leads_through_the_delay_levels_of_the_tier() {
    for request in [publish(None), retry("urgent", 5), redrive("urgent", 5)] {
        let delay = Duration::from_millis(300);
        let delayed = route_on("4.3.6", "otp", request, delay).unwrap();
        assert_eq!(delayed.tier, "urgent");
        let Address::Exchange {
            exchange,
            routing_key,
        } = &delayed.address
        else {
            panic!("{delayed:?}");
        };
        assert_eq!(exchange, "shop.delay.urgent.01");
        assert!(routing_key.starts_with("urgent.0."), "{delayed:?}");
    }
    let too_long = delay::MAX_DELAY + Duration::from_millis(1);
    let refused = route_on("4.3.6", "otp", publish(None), too_long);
    assert!(matches!(
        refused,
        Err(Error::Publish(PublishError::DelayTooLong { .. }))
    ));
}

#[test]
fn with_a_database_a_delay_above_27_minutes_is_a_row_of_its_tier() {
    let at_most = delay::MAX_TIER_DELAY;
    let year = Duration::from_secs(365 * 86_400);
    let delays = [at_most, at_most + Duration::from_millis(1), year];
    let topology = topology();
    for request in [publish(None), retry("urgent", 8), redrive("urgent", 8)] {
        let is_row = delays.map(|delay| {
            let routed = destination(&topology, None, with_database(), "otp", request, delay);
            let routed = routed.unwrap();
            assert_eq!((routed.tier.as_str(), routed.priority), ("urgent", 8));
            routed.address == Address::Row { after: delay }
        });
        assert_eq!(is_row, [false, true, true], "{request:?}");
    }
    let hour = Duration::from_secs(3_600);
    let mail = destination(
        &topology,
        None,
        with_database(),
        "mail",
        publish(None),
        hour,
    );
    assert_eq!(mail.unwrap().priority, UNORDERED_PRIORITY);
}

#[test]
fn a_map_with_long_delays_has_them_in_the_broker_up_to_30_days() {
    let topology = Topology::parse(MAP.replace("[broker]", "[broker]\nlong_delays = true"));
    let topology = topology.unwrap();
    let address = |delay| {
        let routed = destination(
            &topology,
            None,
            with_database(),
            "otp",
            publish(None),
            delay,
        );
        routed.unwrap().address
    };
    let Address::Exchange { exchange, .. } = address(delay::MAX_DELAY) else {
        panic!("the broker has queues for it");
    };
    assert_eq!(exchange, "shop.delay.long.24");
    let after = delay::MAX_DELAY + Duration::from_millis(1);
    assert_eq!(address(after), Address::Row { after });
}

#[test]
fn a_row_that_runs_again_stays_a_row_unless_its_tier_has_left_postgres() {
    let again = RouteRequest::RetryRow {
        tier: "urgent",
        priority: 3,
    };
    let route = |map: &str, delay| {
        let topology = Topology::parse(map).unwrap();
        let routed = destination(&topology, None, with_database(), "otp", again, delay);
        routed.unwrap()
    };
    for after in [Duration::ZERO, Duration::from_secs(1)] {
        let routed = route(MAP, after);
        assert_eq!(
            (routed.address, routed.priority),
            (Address::Row { after }, 3)
        );
    }
    let moved = MAP.replace("[tiers.urgent]", "[tiers.urgent]\nformerly = \"postgres\"");
    let routed = route(&moved, Duration::ZERO);
    assert_eq!(routed.address, exchange("shop.tasks", "urgent"));
}

#[test]
fn each_generation_of_a_tier_has_a_routing_key_of_its_own() {
    let map = MAP.replace("[tiers.urgent]", "[tiers.urgent]\ngeneration = 2");
    let topology = Topology::parse(map).unwrap();
    let newest = on("4.3.6");
    let route = |delay| {
        let routed = destination(&topology, None, newest, "otp", publish(None), delay);
        routed.unwrap().address
    };
    assert_eq!(route(Duration::ZERO), exchange("shop.tasks", "urgent:g2"));
    let Address::Exchange {
        exchange,
        routing_key,
    } = route(Duration::from_millis(300))
    else {
        panic!("a tier on the broker");
    };
    assert_eq!(exchange, "shop.delay.urgent.01");
    assert!(routing_key.starts_with("urgent:g2.0."), "{routing_key}");
}

#[test]
fn a_tier_without_delays_takes_a_message_at_once_or_not_at_all() {
    let map = MAP.replace("[tiers.urgent]", "[tiers.urgent]\ndelays = false");
    let topology = Topology::parse(map).unwrap();
    let newest = on("4.3.6");
    for request in [publish(None), retry("urgent", 5), redrive("urgent", 5)] {
        let route = |delay| destination(&topology, None, newest, "otp", request, delay);
        assert_eq!(
            route(Duration::ZERO).unwrap().address,
            exchange("shop.tasks", "urgent")
        );
        assert!(matches!(
            route(Duration::from_nanos(1)),
            Err(Error::Publish(PublishError::NoDelays { tier, .. })) if &*tier == "urgent"
        ));
    }
}

#[test]
fn an_unmapped_task_is_an_error_and_its_retry_stays_in_its_tier() {
    for request in [publish(None), redrive("urgent", 5), retry("gone", 5)] {
        let refused = route_on("4.3.6", "spam", request, Duration::ZERO);
        assert!(matches!(
            refused,
            Err(Error::Publish(PublishError::UnmappedTask { .. }))
        ));
    }
    let stays = route("spam", retry("urgent", 7));
    assert_eq!((stays.tier.as_str(), stays.priority), ("urgent", 7));
}

#[test]
fn a_publisher_gets_the_priority_that_it_asks_for_or_an_error() {
    assert_eq!(route("otp", publish(0)).priority, 0);
    assert_eq!(route("otp", publish(10)).priority, 10);
    assert_eq!(route("mail", publish(None)).priority, 4);
    for (task, priority, most) in [("otp", 11, Some(10)), ("mail", 1, None), ("ping", 0, None)] {
        match route_on("4.3.6", task, publish(priority), Duration::ZERO) {
            Err(Error::Publish(PublishError::InvalidPriority { highest, .. })) => {
                assert_eq!(highest, most, "{task}")
            }
            other => panic!("{task}: {other:?}"),
        }
    }
}

#[test]
fn a_message_that_is_sent_again_keeps_its_priority_unless_its_task_has_moved() {
    for again in [retry, redrive] {
        assert_eq!(route("otp", again("urgent", 3)).priority, 3);
        assert_eq!(route("otp", again("normal", 3)).priority, 8);
        // Another producer may set a priority that the tier does not have.
        assert_eq!(route("otp", again("urgent", 200)).priority, 10);
        assert_eq!(route("ping", again("plain", 200)).priority, 200);
        assert_eq!(route("report", again("ranked", 25)).priority, 20);
    }
}

/// Version, task, request, delay in ms, priority.
type Case = (&'static str, &'static str, RouteRequest<'static>, u64, u8);

#[test]
fn no_priority_in_a_quorum_queue_exceeds_what_the_broker_supports() {
    let request = |task| match task {
        "otp" => RouteRequest::Retry {
            tier: "urgent",
            priority: 9,
        },
        _ => RouteRequest::Redrive {
            tier: "normal",
            priority: 40,
        },
    };
    let cases: [Case; 9] = [
        ("3.10.8", "mail", request("mail"), 0, 40),
        ("4.2.0", "mail", request("mail"), 0, 4),
        ("4.3.0", "mail", request("mail"), 0, 31),
        ("3.10.8", "otp", request("otp"), 100, 9),
        ("4.2.0", "otp", request("otp"), 100, 4),
        ("4.3.0", "otp", request("otp"), 100, 9),
        ("4.2.0", "otp", request("otp"), 0, 9),
        ("4.2.0", "otp", publish(9), 100, 4),
        ("4.2.0", "otp", publish(9), 0, 9),
    ];
    for (version, task, request, delay, expected) in cases {
        let delay = Duration::from_millis(delay);
        let priority = route_on(version, task, request, delay).unwrap().priority;
        assert_eq!(priority, expected, "{version} {task} {request:?} {delay:?}");
    }
}

#[test]
fn a_payload_may_have_the_size_that_the_map_gives_and_no_more() {
    assert!(check_size(&topology(), "mail", &[0; 1024]).is_ok());
    let refused = check_size(&topology(), "mail", &[0; 1025]);
    let expected = (1025, 1024);
    assert!(
        matches!(refused, Err(Error::Publish(PublishError::TooLarge { size, limit, .. })) if (size, limit) == expected)
    );
}

fn overridden(tier: Option<&str>, priority: Option<u8>) -> Override {
    Override {
        tier: tier.map(str::to_owned),
        priority,
    }
}

/// The tier and the priority of a message that is due now.
fn under(of: &Override, task: &str, request: RouteRequest<'_>) -> (String, u8) {
    let routed = destination(
        &topology(),
        Some(of),
        on("4.3.6"),
        task,
        request,
        Duration::ZERO,
    );
    let routed = routed.unwrap();
    (routed.tier, routed.priority)
}

#[test]
fn an_override_is_where_publishes_retries_and_redrives_go() {
    let of = overridden(Some("ranked"), None);
    let (tier, priority) = ("urgent", 8);
    for request in [
        publish(None),
        RouteRequest::Retry { tier, priority },
        RouteRequest::Redrive { tier, priority },
    ] {
        assert_eq!(
            under(&of, "otp", request),
            ("ranked".into(), 8),
            "{request:?}"
        );
    }
    // What an operator moved by itself stays.
    let moved = RouteRequest::Moved { tier, priority };
    assert_eq!(under(&of, "otp", moved), ("urgent".into(), 8));
    // What is there already keeps its priority.
    let again = RouteRequest::Retry {
        tier: "ranked",
        priority: 3,
    };
    assert_eq!(under(&of, "otp", again), ("ranked".into(), 3));
    assert_eq!(
        tier_of(&topology(), Some(&of), "otp").unwrap().name,
        "ranked"
    );
    assert_eq!(tier_of(&topology(), None, "otp").unwrap().name, "urgent");
    assert!(tier_of(&topology(), Some(&of), "nobody").is_none());
}

#[test]
fn the_priority_of_an_override_counts_before_all_others_as_far_as_the_tier_has_it() {
    let of = overridden(None, Some(3));
    assert_eq!(under(&of, "otp", publish(Some(9))), ("urgent".into(), 3));
    let again = RouteRequest::Retry {
        tier: "urgent",
        priority: 8,
    };
    assert_eq!(under(&of, "otp", again).1, 3);
    let of = overridden(Some("plain"), Some(3));
    assert_eq!(
        under(&of, "otp", publish(None)),
        ("plain".into(), UNORDERED_PRIORITY)
    );
    let of = overridden(Some("urgent"), Some(200));
    assert_eq!(under(&of, "ping", publish(None)), ("urgent".into(), 10));
}

#[test]
fn a_publisher_may_ask_for_the_priorities_of_the_maps_tier_under_an_override_too() {
    let of = overridden(Some("plain"), None);
    assert_eq!(under(&of, "otp", publish(Some(9))).1, UNORDERED_PRIORITY);
    let of = overridden(Some("urgent"), None);
    assert_eq!(under(&of, "report", publish(Some(20))).1, 10);
    // A task without priorities has that of a task that asks for none.
    assert_eq!(under(&of, "ping", publish(None)).1, 5);
    let (topology, servers) = (topology(), on("4.3.6"));
    let refused = destination(
        &topology,
        Some(&of),
        servers,
        "ping",
        publish(Some(1)),
        Duration::ZERO,
    );
    let Err(Error::Publish(PublishError::InvalidPriority { highest: None, .. })) = refused else {
        panic!("{refused:?}");
    };
}

#[test]
fn an_override_to_a_tier_that_this_map_does_not_have_is_none() {
    let of = overridden(Some("gone"), None);
    assert_eq!(under(&of, "otp", publish(None)), ("urgent".into(), 8));
}
