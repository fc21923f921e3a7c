//! Checks the tier that a filter names.

use super::{DeadLetters, UNROUTED};
use crate::Error;
use crate::error::DeadLetterError;

impl DeadLetters {
    /// Fails if a tier is neither in the map nor has rows in the log. A filter with such a tier selects
    /// nothing; most likely its name is mistyped.
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
    /// [`DeadLetterError::UnknownTier`]; as every use of the database, which is queried only if the map does not have
    /// the tier.
    pub async fn check_tier(&self, tier: &str) -> Result<(), Error> {
        if tier == UNROUTED || self.topology.tier(tier).is_some() {
            return Ok(());
        }
        // A tier that was removed from the map may have left rows.
        let known = self.by_tier().await?;
        if known.iter().any(|known| known.tier == tier) {
            return Ok(());
        }
        let names = known.iter().map(|known| known.tier.as_str());
        let names: Vec<&str> = names.chain([UNROUTED]).collect();
        Err(Error::DeadLetter(DeadLetterError::UnknownTier {
            tier: tier.into(),
            known: names.join(", ").into(),
        }))
    }
}
