//! Minute by minute: what came in, what ended and what died, by tier. Pure.

use std::collections::HashMap;
use std::time::SystemTime;

use tierline::rollup::Rollup;

/// How many minutes are kept.
pub(super) const MINUTES: usize = 60;

/// The last whole minutes of all tiers, the oldest first.
#[derive(Debug, Default, Clone, PartialEq)]
pub(super) struct History(HashMap<String, Vec<Minute>>);

/// A minute of a tier.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) struct Minute {
    pub(super) arrived: u64,
    pub(super) ended: u64,
    pub(super) dead: u64,
}

impl History {
    /// From sums of each minute. The present minute is left out: it is not over.
    pub(super) fn new(rollups: &[Rollup], now: SystemTime) -> Self {
        let minute_of = |time: SystemTime| {
            let since = time.duration_since(SystemTime::UNIX_EPOCH);
            since.unwrap_or_default().as_secs() / 60
        };
        let present = minute_of(now);
        let mut tiers: HashMap<String, Vec<Minute>> = HashMap::new();
        for rollup in rollups {
            let begin = rollup.since.map_or(0, minute_of);
            let Some(ago) = present.checked_sub(begin).filter(|ago| *ago > 0) else {
                continue;
            };
            let place = usize::try_from(ago)
                .ok()
                .and_then(|ago| MINUTES.checked_sub(ago));
            let minutes = tiers
                .entry(rollup.tier.clone())
                .or_insert_with(|| vec![Minute::default(); MINUTES]);
            if let Some(minute) = place.and_then(|place| minutes.get_mut(place)) {
                let totals = &rollup.totals;
                let repeated = totals.retried + totals.snoozed;
                let over = totals.done + totals.discarded + totals.expired + totals.dead;
                *minute = Minute {
                    arrived: totals.published.saturating_sub(totals.delayed) + repeated,
                    ended: over + repeated,
                    dead: totals.dead,
                };
            }
        }
        Self(tiers)
    }

    /// One figure of the last minutes of a tier, the oldest first.
    pub(super) fn last(&self, tier: &str, most: usize, of: fn(&Minute) -> u64) -> Vec<u64> {
        let minutes = self.0.get(tier).map_or(&[][..], Vec::as_slice);
        let first = minutes.len().saturating_sub(most);
        minutes.iter().skip(first).map(of).collect()
    }
}

const BARS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

/// A line of bars, one for each figure; nothing is a low dot, so that a quiet minute is not a gap.
pub(super) fn sparkline(figures: &[u64]) -> String {
    let most = figures.iter().copied().max().unwrap_or_default();
    let bar = |figure: &u64| match *figure {
        0 => '·',
        figure => {
            let height = (figure.saturating_mul(8)).div_ceil(most.max(1));
            let place = usize::try_from(height).unwrap_or(8).clamp(1, 8) - 1;
            BARS[place]
        }
    };
    figures.iter().map(bar).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sparkline_is_as_high_as_its_highest_figure() {
        assert_eq!(sparkline(&[]), "");
        assert_eq!(sparkline(&[0, 0]), "··");
        assert_eq!(sparkline(&[0, 1, 4, 8]), "·▁▄█");
        assert_eq!(sparkline(&[u64::MAX, 1]).chars().count(), 2);
    }
}
