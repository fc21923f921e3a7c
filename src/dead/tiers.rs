//! Whether a tier that somebody names can have dead letters.

use super::{DeadLetters, UNROUTED};
use crate::Error;

impl DeadLetters {
    /// Fails where a tier is neither in the map nor has rows in the log. A filter with such a tier means
    /// nothing, and most likely somebody mistyped it.
    ///
    /// ```no_run
    /// # async fn example(letters: tierline::dead::DeadLetters) -> Result<(), tierline::Error> {
    /// # use tierline::dead::{Filter, Page};
    /// let tier = "critcal";
    /// letters.check_tier(tier).await?; // there is no tier "critcal" …; did you mean "critical"?
    /// letters.list(&Filter::default().tier(tier), Page::first(50)).await?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// [`Error::UnknownTier`]; as every use of the database, which is asked only where the map does not have
    /// the tier.
    pub async fn check_tier(&self, tier: &str) -> Result<(), Error> {
        if tier == UNROUTED || self.topology.tier(tier).is_some() {
            return Ok(());
        }
        // A tier that was taken out of the map may have left some.
        let known = self.by_tier().await?;
        if known.iter().any(|known| known.tier == tier) {
            return Ok(());
        }
        let names = known.iter().map(|known| known.tier.as_str());
        let names: Vec<&str> = names.chain([UNROUTED]).collect();
        Err(Error::UnknownTier {
            tier: tier.into(),
            known: names.join(", ").into(),
        })
    }
}
