//! The differences between versions of RabbitMQ, in one place.
//!
//! The version steers publishing and validation only: declarations are the same on every version,
//! because a queue cannot be redeclared with other arguments after an upgrade.

use std::fmt;
use std::str::FromStr;

use serde::{Serialize, Serializer};

use crate::Error;
use crate::error::BrokerError;

/// The oldest RabbitMQ that tierline runs on.
pub const MINIMUM_VERSION: Version = Version::new(3, 10, 0);

/// The first RabbitMQ whose quorum queues order strictly by priority.
pub const QUORUM_PRIORITIES_SINCE: Version = Version::new(4, 3, 0);

/// A version of RabbitMQ. Pre-releases and packagers' suffixes count as their release.
///
/// ```
/// # use tierline::topology::Version;
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
        let unknown = || {
            Error::Broker(BrokerError::UnknownVersion {
                reported: reported.chars().take(60).collect(),
            })
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

/// What differs between versions. A version newer than all known ones counts as the newest.
impl Version {
    /// This version, if tierline runs on it.
    ///
    /// # Errors
    /// [`BrokerError::UnsupportedVersion`] before [`MINIMUM_VERSION`].
    pub(crate) fn supported(self) -> Result<Self, Error> {
        match self < MINIMUM_VERSION {
            true => Err(Error::Broker(BrokerError::UnsupportedVersion {
                version: self,
            })),
            false => Ok(self),
        }
    }

    /// Whether quorum queues order strictly by priority. Else a tier with priorities must be classic.
    pub(crate) fn has_quorum_priorities(self) -> bool {
        self >= QUORUM_PRIORITIES_SINCE
    }

    /// The highest priority to publish to a quorum queue with, the delay levels included. Before
    /// 4.0 priority is ignored there, so any (255). 4.0 to 4.2: 4, because a waiting message above
    /// it stops the expiry of older ones. 4.3: 31.
    pub(crate) fn highest_quorum_priority(self) -> u8 {
        match self {
            _ if self.has_quorum_priorities() => 31,
            _ if self >= Version::new(4, 0, 0) => 4,
            _ => u8::MAX,
        }
    }

    /// What an operator of this version should know, a sentence each.
    pub(crate) fn traps(self) -> Vec<&'static str> {
        let before_4_0 = self < Version::new(4, 0, 0);
        let before_4_3 = self < Version::new(4, 3, 0);
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

    fn version(version: &str) -> Version {
        version.parse().unwrap()
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
                matches!(error, Error::Broker(BrokerError::UnknownVersion { .. })),
                "{junk}"
            );
        }
    }

    #[test]
    fn a_broker_before_3_10_is_refused_and_3_10_is_not() {
        let old = Version::new(3, 9, 29);
        let error = old.supported().unwrap_err().to_string();
        assert!(
            error.contains("3.9.29") && error.contains("3.10.0 or newer"),
            "{error}"
        );
        assert!(Version::new(3, 10, 0).supported().is_ok());
    }

    #[test]
    fn priorities_in_quorum_queues_follow_the_version() {
        for (reported, strict, highest) in [
            ("3.10.8", false, 255),
            ("3.13.7", false, 255),
            ("4.0.0-rc.1", false, 4),
            ("4.2.9", false, 4),
            ("4.3.0-rc.1", true, 31),
            ("5.0.0", true, 31),
        ] {
            let version = version(reported);
            assert_eq!(version.has_quorum_priorities(), strict, "{reported}");
            assert_eq!(version.highest_quorum_priority(), highest, "{reported}");
        }
    }

    #[test]
    fn every_version_has_its_traps_and_none_of_the_others() {
        let trap = |reported: &str, words: &str| {
            version(reported)
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
                ["3.10.8", "4.0.5", "4.3.6"].map(|reported| trap(reported, words)),
                on,
                "{words}"
            );
        }
    }
}
