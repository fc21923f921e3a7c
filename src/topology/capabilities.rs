//! The differences between versions of RabbitMQ, in one place.
//!
//! The version steers publishing and validation only: declarations are the same on every version,
//! because a queue cannot be redeclared with other arguments after an upgrade.

use std::fmt;
use std::str::FromStr;

use serde::{Serialize, Serializer};

use super::tier::QueueType;
use crate::Error;

/// The oldest RabbitMQ that tierline runs on.
pub const MINIMUM_VERSION: Version = Version::new(3, 10, 0);

/// The first RabbitMQ whose quorum queues order strictly by priority.
pub const QUORUM_PRIORITIES_SINCE: Version = Version::new(4, 3, 0);

/// A version of RabbitMQ. Pre-releases and packagers' suffixes count as their release.
///
/// ```
/// # use tierline::topology::capabilities::Version;
/// let version: Version = "4.3.0-rc.1".parse()?;
/// assert_eq!(version, Version::new(4, 3, 0));
/// assert!("3.10.8".parse::<Version>()? < version);
/// # Ok::<(), tierline::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Version {
    major: u16,
    minor: u16,
    patch: u16,
}

impl Version {
    /// The version `major.minor.patch`.
    pub const fn new(major: u16, minor: u16, patch: u16) -> Self {
        Self {
            major,
            minor,
            patch,
        }
    }
}

impl FromStr for Version {
    type Err = Error;

    /// Parses the version that a broker reports, such as `3.10.8`, `4.3.0-rc.1` or `4.0.5+debian`.
    fn from_str(reported: &str) -> Result<Self, Error> {
        let unknown = || Error::UnknownBrokerVersion {
            reported: reported.chars().take(60).collect(),
        };
        let release = reported
            .trim()
            .split(['-', '+', '~', ' '])
            .next()
            .unwrap_or_default();
        let mut numbers = release
            .split('.')
            .map(|number| number.parse::<u16>().map_err(|_| unknown()));
        let mut next = || numbers.next();
        let major = next().ok_or_else(unknown)??;
        let minor = next().ok_or_else(unknown)??;
        let patch = next().transpose()?.unwrap_or_default();
        Ok(Self {
            major,
            minor,
            patch,
        })
    }
}

impl fmt::Display for Version {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

impl Serialize for Version {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// The features and limits of one version of RabbitMQ. A version newer than all known ones counts as
/// the newest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Capabilities {
    /// The version that all of this follows from.
    pub version: Version,
    /// Whether quorum queues order strictly by priority (4.3). Else a tier with priorities must be
    /// classic.
    pub quorum_priorities: bool,
    /// The highest priority to publish to a quorum queue with, the delay levels included. Before
    /// 4.0 priority is ignored there, so any (255). 4.0 to 4.2: 4, because a waiting message above
    /// it stops the expiry of older ones. 4.3: 31.
    pub highest_quorum_priority: u8,
    /// After how many deliveries a quorum queue without a limit of its own gives a message up.
    /// `None`: never (before 4.0). All ours have a limit of their own.
    pub default_delivery_limit: Option<u32>,
    /// Whether a `nack` with requeue counts against the delivery limit (before 4.3).
    pub nack_counts_as_delivery: bool,
    /// Whether `x-death` headers sent by a client are believed (before 4.0). Then a republished
    /// message that carries them may be taken for a cycle and dropped: strip them.
    pub believes_clients_death_headers: bool,
    /// Whether a dead-lettered message says why it died last, `x-last-death-reason` (4.0).
    pub reports_last_death: bool,
    /// The largest message in bytes, unless the broker is set up otherwise.
    pub default_max_message_size: u64,
}

/// How the broker handles a delivery that is not acknowledged within its timeout.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum AckTimeout {
    /// It closes the channel, with every consumer on it.
    ClosesChannel,
    /// It cancels the one consumer.
    CancelsConsumer,
    /// It waits for ever.
    None,
}

impl Capabilities {
    /// The capabilities of a broker of `version`.
    ///
    /// # Errors
    /// [`Error::UnsupportedBroker`] before [`MINIMUM_VERSION`].
    pub fn of(version: Version) -> Result<Self, Error> {
        if version < MINIMUM_VERSION {
            return Err(Error::UnsupportedBroker { version });
        }
        let since_4_0 = version >= Version::new(4, 0, 0);
        let quorum_priorities = version >= QUORUM_PRIORITIES_SINCE;
        Ok(Self {
            version,
            quorum_priorities,
            highest_quorum_priority: match (since_4_0, quorum_priorities) {
                (_, true) => 31,
                (true, false) => 4,
                (false, false) => u8::MAX,
            },
            default_delivery_limit: since_4_0.then_some(20),
            nack_counts_as_delivery: version < Version::new(4, 3, 0),
            believes_clients_death_headers: !since_4_0,
            reports_last_death: since_4_0,
            default_max_message_size: if since_4_0 { 16 << 20 } else { 128 << 20 },
        })
    }

    /// How the broker handles a late acknowledgement on a queue of that type.
    pub fn ack_timeout(&self, queue: QueueType) -> AckTimeout {
        if self.version < Version::new(4, 3, 0) {
            return AckTimeout::ClosesChannel;
        }
        match queue {
            QueueType::Quorum => AckTimeout::CancelsConsumer,
            QueueType::Classic => AckTimeout::None,
        }
    }

    /// Whether a queue of that type may set its own ack timeout, `x-consumer-timeout`.
    pub fn takes_consumer_timeout(&self, queue: QueueType) -> bool {
        let since_3_12 = self.version >= Version::new(3, 12, 0);
        match queue {
            QueueType::Quorum => since_3_12,
            QueueType::Classic => since_3_12 && self.version < Version::new(4, 3, 0),
        }
    }

    /// Warnings for operators of this version, a sentence each.
    pub fn traps(&self) -> Vec<&'static str> {
        let before_4_0 = self.version < Version::new(4, 0, 0);
        let before_4_3 = self.version < Version::new(4, 3, 0);
        [
            (before_4_0, "Quorum queues ignore priority: a quorum tier is first in, first out."),
            (before_4_0, "x-death headers sent by a client are believed: a foreign producer that copies them may have its messages dropped as a cycle."),
            (before_4_0, "Upgrading to 4.0 lowers the default message size limit from 128 MiB to 16 MiB, and gives quorum queues without a delivery limit one of 20."),
            (!before_4_0 && before_4_3, "A message of priority above 4 that waits in a quorum queue stops the expiry of older ones: delayed messages are published with priority 4 at most, and keep it when they reach a classic tier."),
            (before_4_3, "Every return of a message to a quorum queue counts against its delivery limit, a worker's shutdown included: keep delivery_limit generous."),
            (before_4_3, "An acknowledgement after the ack timeout closes the whole channel."),
            (!before_4_3, "Classic queues have no ack timeout: the broker never takes a message back from a consumer that hangs."),
            (!before_4_3, "In quorum queues returned messages come first, whatever their priority."),
        ]
        .into_iter()
        .filter_map(|(applies, trap)| applies.then_some(trap))
        .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn capabilities(version: &str) -> Capabilities {
        Capabilities::of(version.parse().unwrap()).unwrap()
    }

    #[test]
    fn versions_read_as_brokers_report_them() {
        for (reported, version) in [
            ("3.10.8", Version::new(3, 10, 8)),
            ("4.3.0-rc.1", Version::new(4, 3, 0)),
            ("4.0.5+debian", Version::new(4, 0, 5)),
            ("4.1.0~beta2", Version::new(4, 1, 0)),
            ("3.13.7.2", Version::new(3, 13, 7)),
            ("4.2", Version::new(4, 2, 0)),
            (" 4.2.1\n", Version::new(4, 2, 1)),
        ] {
            assert_eq!(reported.parse::<Version>().unwrap(), version, "{reported}");
        }
    }

    #[test]
    fn junk_is_no_version() {
        for junk in [
            "",
            "4",
            "four.three",
            "4.",
            ".3",
            "4.x.1",
            "4.3.x",
            "-4.3",
            "99999.0",
            "0xff.1",
            "%%VSN%%",
        ] {
            let error = junk.parse::<Version>().unwrap_err();
            assert!(
                matches!(error, Error::UnknownBrokerVersion { .. }),
                "{junk}"
            );
        }
    }

    #[test]
    fn a_broker_before_3_10_is_refused_and_3_10_is_not() {
        let error = Capabilities::of(Version::new(3, 9, 29))
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("3.9.29") && error.contains("3.10.0 or newer"),
            "{error}"
        );
        assert!(Capabilities::of(Version::new(3, 10, 0)).is_ok());
    }

    #[test]
    fn priorities_in_quorum_queues_follow_the_version() {
        for (version, strict, highest) in [
            ("3.10.8", false, 255),
            ("3.13.7", false, 255),
            ("4.0.0-rc.1", false, 4),
            ("4.2.9", false, 4),
            ("4.3.0-rc.1", true, 31),
            ("5.0.0", true, 31),
        ] {
            let capabilities = capabilities(version);
            assert_eq!(capabilities.quorum_priorities, strict, "{version}");
            assert_eq!(capabilities.highest_quorum_priority, highest, "{version}");
        }
    }

    #[test]
    fn a_late_acknowledgement_costs_what_the_version_says() {
        use QueueType::{Classic, Quorum};
        assert_eq!(
            capabilities("4.2.0").ack_timeout(Quorum),
            AckTimeout::ClosesChannel
        );
        assert_eq!(
            capabilities("4.2.0").ack_timeout(Classic),
            AckTimeout::ClosesChannel
        );
        assert_eq!(
            capabilities("4.3.0").ack_timeout(Quorum),
            AckTimeout::CancelsConsumer
        );
        assert_eq!(capabilities("4.3.0").ack_timeout(Classic), AckTimeout::None);
        let takes = |version, queue| capabilities(version).takes_consumer_timeout(queue);
        assert!(!takes("3.11.28", Quorum) && takes("3.12.0", Classic));
        assert!(takes("4.3.0", Quorum) && !takes("4.3.0", Classic));
    }

    #[test]
    fn every_version_has_its_traps_and_none_of_the_others() {
        let trap = |version: &str, words: &str| {
            capabilities(version)
                .traps()
                .iter()
                .any(|trap| trap.contains(words))
        };
        for (words, on) in [
            ("ignore priority", [true, false, false]),
            ("above 4", [false, true, false]),
            ("closes the whole channel", [true, true, false]),
            ("no ack timeout", [false, false, true]),
        ] {
            assert_eq!(
                ["3.10.8", "4.0.5", "4.3.6"].map(|version| trap(version, words)),
                on,
                "{words}"
            );
        }
    }
}
