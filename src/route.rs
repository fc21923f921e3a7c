//! The only router: task, priority and delay in, destination out. Pure.
//!
//! A publish, a due run of a schedule, a retry and a redrive all take their exchange, routing key
//! and priority from here, so a change of the map applies to all of them alike.

use std::time::Duration;

use crate::Error;
use crate::error::PublishError;
use crate::topology::Version;
use crate::topology::{Home, MappedTask, Tier, Topology, UNORDERED_PRIORITY, delay};

/// The place that a message is sent to, and the priority that it is sent with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Destination {
    /// The tier whose workers run the task.
    pub(crate) tier: String,
    pub(crate) address: Address,
    pub(crate) priority: u8,
}

/// Where a message is stored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Address {
    /// On the broker.
    Exchange {
        exchange: String,
        routing_key: String,
    },
    /// As a row of its tier in Postgres, which falls due after this time.
    Row { after: Duration },
}

/// The reason why a message is sent, which decides its priority.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RouteRequest<'a> {
    /// A publish, or a due run of a schedule, with the priority that it asks for, if any. A priority
    /// that the tier does not have is an error.
    Publish {
        priority: Option<u8>,
        /// Whether it asks for what only Postgres can give: then it is a row, whatever its tier's home.
        is_row: bool,
    },
    /// A worker sends a delivery from the queue of `tier` again. If the map no longer has the task,
    /// the message stays in that tier.
    Retry { tier: &'a str, priority: u8 },
    /// An operator redrives a dead letter of `tier`.
    #[cfg_attr(
        not(feature = "postgres"),
        expect(dead_code, reason = "dead letters are logged in Postgres")
    )]
    Redrive { tier: &'a str, priority: u8 },
}

/// The destination of a message of `task` that is due after `delay`.
///
/// A new message has the priority that its publisher asks for, else the map's. A message that is sent
/// again keeps its priority while the map keeps its task in the same tier, else it has the map's. No
/// priority is higher than the tier's highest, or than what the broker supports in a quorum queue;
/// the delay levels are quorum queues too.
///
/// # Errors
/// [`PublishError::UnmappedTask`], [`PublishError::InvalidPriority`], [`PublishError::DelayTooLong`],
/// [`PublishError::NoDelays`].
pub(crate) fn destination(
    topology: &Topology,
    broker: Version,
    task: &str,
    request: RouteRequest<'_>,
    delay: Duration,
) -> Result<Destination, Error> {
    let unmapped = || {
        Error::Publish(PublishError::UnmappedTask {
            task: task.to_owned(),
        })
    };
    let mapped = topology.task(task);
    let tier = match (mapped, request) {
        (Some(mapped), _) => mapped.tier.as_str(),
        (None, RouteRequest::Retry { tier, .. }) => tier,
        (None, RouteRequest::Publish { .. } | RouteRequest::Redrive { .. }) => {
            return Err(unmapped());
        }
    };
    let tier = topology.tier(tier).ok_or_else(unmapped)?;
    let priority = priority(task, mapped, tier, request)?;
    let asks_for_row = matches!(request, RouteRequest::Publish { is_row: true, .. });
    if asks_for_row || !tier.home.is_on_broker() {
        return Ok(Destination {
            tier: tier.name.clone(),
            address: Address::Row { after: delay },
            // Without priorities all rows are equal, whatever another program gave them.
            priority: match tier.home.max_priority() {
                Some(_) => priority,
                None => UNORDERED_PRIORITY,
            },
        });
    }
    let key = topology.names().routing_key(tier);
    let delayed = delay::route(topology.app(), &key, delay)?;
    if delayed.is_some() && !tier.delays {
        return Err(Error::Publish(PublishError::NoDelays {
            task: task.into(),
            tier: tier.name.as_str().into(),
        }));
    }
    let is_in_quorum_queue = match tier.home {
        Home::Classic { .. } | Home::Postgres { .. } => delayed.is_some(),
        Home::Quorum { .. } => true,
    };
    let (exchange, routing_key) = match delayed {
        Some(delayed) => (delayed.exchange, delayed.routing_key),
        None => (topology.names().tasks_exchange(), key),
    };
    Ok(Destination {
        tier: tier.name.clone(),
        address: Address::Exchange {
            exchange,
            routing_key,
        },
        priority: match is_in_quorum_queue {
            true => priority.min(broker.highest_quorum_priority()),
            false => priority,
        },
    })
}

/// Refuses a payload that is larger than the broker accepts.
///
/// # Errors
/// [`PublishError::TooLarge`].
pub(crate) fn check_size(topology: &Topology, task: &str, payload: &[u8]) -> Result<(), Error> {
    let limit = topology.broker().max_message_size;
    let size = payload.len() as u64;
    if size > limit {
        return Err(Error::Publish(PublishError::TooLarge {
            task: task.into(),
            size,
            limit,
        }));
    }
    Ok(())
}

/// The priority in `tier`, before the limits of the broker.
fn priority(
    task: &str,
    mapped: Option<&MappedTask>,
    tier: &Tier,
    request: RouteRequest<'_>,
) -> Result<u8, Error> {
    let highest = tier.home.max_priority();
    let kept = match request {
        RouteRequest::Publish { priority: None, .. } => None,
        RouteRequest::Publish {
            priority: Some(wanted),
            ..
        } => match highest {
            Some(highest) if wanted <= highest => Some(wanted),
            Some(_) | None => {
                return Err(Error::Publish(PublishError::InvalidPriority {
                    task: task.into(),
                    priority: wanted,
                    highest,
                }));
            }
        },
        RouteRequest::Retry {
            tier: from,
            priority,
        }
        | RouteRequest::Redrive {
            tier: from,
            priority,
        } => (from == tier.name).then_some(priority.min(highest.unwrap_or(u8::MAX))),
    };
    let of_map = mapped.map(|mapped| mapped.priority);
    Ok(kept.or(of_map).unwrap_or_default())
}

#[cfg(test)]
mod tests {
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

    fn route_on(
        version: &str,
        task: &str,
        request: RouteRequest<'_>,
        delay: Duration,
    ) -> Result<Destination, Error> {
        let broker = version.parse().unwrap();
        destination(&topology(), broker, task, request, delay)
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
            "[tiers.normal]\n        queue = \"quorum\"",
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
            let oldest = "3.10.8".parse().unwrap();
            let expected = Destination {
                tier: "normal".to_owned(),
                address: Address::Row { after: year },
                priority,
            };
            let found = destination(&topology, oldest, "mail", request, year);
            assert_eq!(found.unwrap(), expected, "{request:?}");
        }
    }

    #[test]
    fn a_publish_that_asks_for_a_row_gets_one_in_any_tier_with_any_delay() {
        let year = Duration::from_secs(365 * 86_400);
        for (task, priority, expected) in [("otp", Some(9), 9), ("otp", None, 8), ("mail", None, 4)]
        {
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
    fn each_generation_of_a_tier_has_a_routing_key_of_its_own() {
        let map = MAP.replace("[tiers.urgent]", "[tiers.urgent]\ngeneration = 2");
        let topology = Topology::parse(map).unwrap();
        let newest = "4.3.6".parse().unwrap();
        let route = |delay| {
            let routed = destination(&topology, newest, "otp", publish(None), delay);
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
        let newest = "4.3.6".parse().unwrap();
        for request in [publish(None), retry("urgent", 5), redrive("urgent", 5)] {
            let route = |delay| destination(&topology, newest, "otp", request, delay);
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
        for (task, priority, most) in [("otp", 11, Some(10)), ("mail", 1, None), ("ping", 0, None)]
        {
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
}
