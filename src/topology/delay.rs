//! Delays in the broker without plugins: a binary ladder of queues.
//!
//! A delay is a number of 100 ms units. Level `i` is a topic exchange and a queue in which every
//! message waits 2^i units before it is dead-lettered to the level below. The bits of the delay
//! travel in the routing key: a one stops at its level's queue, a zero passes it by. All messages
//! of a queue wait equally long, so none blocks another, and the hops are the ones of the number.
//!
//! Levels 0 to 13 exist once per tier, so that one tier's wave of retries delays no other. Levels
//! 14 to 24 are shared, and hand over to the tier's own. They are declared and used only by processes without a
//! database, unless the map has `long_delays = true`: with a database, a delay above [`MAX_TIER_DELAY`] is a row.
//!
//! ```
//! # use std::time::Duration;
//! # use tierline::topology::delay;
//! let route = delay::route("hotel", "critical", Duration::from_millis(250))?.unwrap();
//! assert_eq!(route.exchange, "hotel.delay.critical.01"); // 300 ms are 0b11 units
//! assert!(route.routing_key.starts_with("critical.0.0.") && route.routing_key.ends_with(".0.1.1"));
//!
//! assert_eq!(delay::route("hotel", "critical", Duration::ZERO)?, None); // publish it directly
//! # Ok::<(), tierline::Error>(())
//! ```

use std::time::Duration;

use super::names::Names;
use crate::Error;
use crate::error::PublishError;

/// The unit of delays, which are rounded up to it.
pub const UNIT: Duration = Duration::from_millis(100);

/// The longest delay in the queues of one tier, 27 minutes: 2^14 - 1 units.
pub const MAX_TIER_DELAY: Duration = Duration::from_millis(100 * ((1 << SHORT_LEVELS) - 1));

/// The longest delay in the broker.
pub const MAX_DELAY: Duration = Duration::from_secs(30 * 86_400);

/// Levels of a tier's own ladder, which reaches 27 minutes.
const SHORT_LEVELS: u32 = 14;
/// Levels in all, which reach 38 days.
const LEVELS: u32 = 25;

/// One level of a ladder.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Level(u32);

impl Level {
    /// The levels of each tier's own ladder, the longest wait first.
    pub(super) fn short() -> impl Iterator<Item = Level> {
        (0..SHORT_LEVELS).rev().map(Level)
    }

    /// The levels that all tiers share, the longest wait first.
    pub(super) fn long() -> impl Iterator<Item = Level> {
        (SHORT_LEVELS..LEVELS).rev().map(Level)
    }

    /// The highest level of a tier's own ladder.
    pub(super) const TOP_OF_SHORT: Level = Level(SHORT_LEVELS - 1);

    /// 0 to 24.
    pub(super) fn number(self) -> u32 {
        self.0
    }

    /// How long a message waits here: 2^number units.
    pub(super) fn wait(self) -> Duration {
        UNIT * (1 << self.0)
    }

    /// Whether all tiers share this level.
    pub(super) fn is_long(self) -> bool {
        self.0 >= SHORT_LEVELS
    }

    /// The level below in the same ladder, if this is not its last.
    pub(super) fn below(self) -> Option<Level> {
        (self.0 != 0 && self.0 != SHORT_LEVELS).then(|| Level(self.0 - 1))
    }

    /// The binding key for messages whose bit of this level is `bit`.
    pub(super) fn binding_key(self, bit: bool) -> String {
        let words_before = "*.".repeat((LEVELS - self.0) as usize);
        format!("{words_before}{}.#", u8::from(bit))
    }
}

/// The exchange and routing key of a message that reaches its tier after a delay.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct DelayRoute {
    /// The exchange of the delay's highest one-bit: nothing above it would stop the message.
    pub exchange: String,
    /// The routing key of the tier and the delay's bits, highest first: `{tier}.b24.….b0`.
    pub routing_key: String,
}

/// The exchange and routing key for a message that reaches a tier after `delay`, rounded up to the [`UNIT`]; `None` for no delay at all.
/// `tier` is the tier's [routing key](super::Names::routing_key): its name, and `{name}:g2` in its second generation.
///
/// # Errors
/// [`PublishError::DelayTooLong`] above [`MAX_DELAY`].
pub fn route(app: &str, tier: &str, delay: Duration) -> Result<Option<DelayRoute>, Error> {
    let too_long = || {
        Error::Publish(PublishError::DelayTooLong {
            delay,
            longest: MAX_DELAY,
        })
    };
    if delay > MAX_DELAY {
        return Err(too_long());
    }
    let units =
        u32::try_from(delay.as_nanos().div_ceil(UNIT.as_nanos())).map_err(|_| too_long())?;
    // All generations of a tier share its levels.
    let name = tier.split(':').next().unwrap_or_default();
    Ok(units.checked_ilog2().map(|highest| DelayRoute {
        exchange: Names::new(app).delay_level(name, Level(highest)),
        routing_key: routing_key(tier, units),
    }))
}

pub(super) fn routing_key(tier: &str, units: u32) -> String {
    let mut key = String::with_capacity(tier.len() + 2 * LEVELS as usize);
    key.push_str(tier);
    for level in (0..LEVELS).rev() {
        key.push_str(if units >> level & 1 == 1 { ".1" } else { ".0" });
    }
    key
}
