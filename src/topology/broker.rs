//! `[broker]`: settings of the broker that a client cannot query, and whether it holds long delays.

use std::ops::RangeInclusive;
use std::time::Duration;

use super::reader::Reader;

/// The settings of `[broker]`. All but `long_delays` describe the broker and change nothing on it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct BrokerSettings {
    /// How long the broker waits for the acknowledgement of a delivery (its `consumer_timeout`)
    /// before it takes the consumer's channel away. From 1 s to 365 days; default 30 minutes, which
    /// is RabbitMQ's own. For a broker on which it is switched off, give the longest.
    pub ack_timeout: Duration,
    /// The largest message that the broker takes, in bytes (its `max_message_size`). From 1 KiB to
    /// 512 MiB; default 16 MiB, which every supported version takes (before 4.0 it is 128 MiB).
    pub max_message_size: u64,
    /// Whether delays of more than [27 minutes](super::delay::MAX_TIER_DELAY) wait in queues of the broker although the
    /// app has a database. Default: no, they are rows of their tier, and the eleven queues for them are not
    /// declared. A process without a database declares and uses those queues in any case.
    pub long_delays: bool,
}

impl Default for BrokerSettings {
    fn default() -> Self {
        Self {
            ack_timeout: Duration::from_secs(30 * 60),
            max_message_size: 16 << 20,
            long_delays: false,
        }
    }
}

const ACK_TIMEOUT: RangeInclusive<Duration> =
    Duration::from_secs(1)..=Duration::from_secs(365 * 86_400);
const MAX_MESSAGE_SIZE: RangeInclusive<u64> = (1 << 10)..=(512 << 20);

pub(super) fn read(root: &mut Reader<'_>) -> BrokerSettings {
    let default = BrokerSettings::default();
    let Some(mut section) = root.table("broker") else {
        return default;
    };
    let ack_timeout = section.duration("ack_timeout", ACK_TIMEOUT);
    let max_message_size = section.size("max_message_size", MAX_MESSAGE_SIZE);
    let long_delays = section.boolean("long_delays");
    section.finish(&[]);
    BrokerSettings {
        ack_timeout: ack_timeout.unwrap_or(default.ack_timeout),
        max_message_size: max_message_size.unwrap_or(default.max_message_size),
        long_delays: long_delays.unwrap_or(default.long_delays),
    }
}
