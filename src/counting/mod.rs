//! What counters of events share: the tasks and tiers under which they count, and when an event meets the SLO of its tier.
//!
//! Two modules count events: `rollup` for a table that all processes write, `metrics` for a scrape of this process. Pure
//! but for the clock.

mod names;
mod slo;

#[cfg(feature = "prometheus")]
pub(crate) use names::Fnv;
pub(crate) use names::{Names, Place};
#[cfg(feature = "postgres")]
pub(crate) use slo::SloCount;
pub(crate) use slo::SloRules;

/// The name under which tasks and tiers are counted that the map does not have.
pub const UNKNOWN: &str = "(unknown)";
