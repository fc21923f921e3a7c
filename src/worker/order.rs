//! Which tier a free slot takes from. Pure: it sees what each tier has, and answers.

use crate::source::Supply;
use crate::topology;

/// What is done with a free slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Choice {
    /// It runs a message of this tier.
    Take(usize),
    /// It waits for this tier's next message, although a lower tier has one.
    Hold(usize),
    /// There is nothing to run.
    Idle,
}

/// The order of a group's tiers, and its memory of who had their turn.
#[derive(Debug)]
pub(super) enum Order {
    Strict,
    Weighted(Shares),
}

impl Order {
    /// The order of a group whose tiers have these weights.
    pub(super) fn new(order: topology::Order, weights: impl Iterator<Item = f64>) -> Self {
        match order {
            topology::Order::Strict => Self::Strict,
            topology::Order::Weighted => Self::Weighted(Shares::new(weights)),
        }
    }

    /// What to do with the next of `free` slots, given what the tiers have.
    pub(super) fn next(&mut self, free: usize, supplies: &[Supply]) -> Choice {
        match self {
            Self::Strict => strict(free, supplies),
            Self::Weighted(shares) => shares.next(supplies),
        }
    }
}

/// The first tier that has something. What is about to come for a tier keeps as many slots free from
/// the tiers below it: after an acknowledgement the next message is a round trip away, and whoever
/// takes the slot in that moment serves the lower tier while the higher one has a backlog.
fn strict(free: usize, supplies: &[Supply]) -> Choice {
    let mut kept = 0;
    let mut kept_for = None;
    for (tier, supply) in supplies.iter().enumerate() {
        match supply {
            Supply::Ready if kept < free => return Choice::Take(tier),
            Supply::Ready => return kept_for.map_or(Choice::Idle, Choice::Hold),
            Supply::Coming(number) => {
                kept += number;
                kept_for = kept_for.or(Some(tier));
            }
            Supply::Empty => {}
        }
    }
    Choice::Idle
}

/// Smooth weighted round-robin: every tier with work earns its weight, the richest has its turn and
/// pays what all have earned. Over any stretch in which the same tiers have work, each one's turns
/// are within one of its share, and its turns are spread evenly.
#[derive(Debug)]
pub(super) struct Shares {
    weights: Vec<f64>,
    credits: Vec<f64>,
}

impl Shares {
    fn new(weights: impl Iterator<Item = f64>) -> Self {
        let weights: Vec<_> = weights.collect();
        Self {
            credits: vec![0.0; weights.len()],
            weights,
        }
    }

    fn next(&mut self, supplies: &[Supply]) -> Choice {
        let mut earned = 0.0;
        let mut richest = None;
        for (tier, supply) in supplies.iter().enumerate() {
            match supply {
                Supply::Ready => {
                    self.credits[tier] += self.weights[tier];
                    earned += self.weights[tier];
                    if richest.is_none_or(|other: usize| self.credits[tier] > self.credits[other]) {
                        richest = Some(tier);
                    }
                }
                // Its next message is under way: it keeps what it has.
                Supply::Coming(_) => {}
                // Who has no work saves nothing up: it would keep the others waiting later.
                Supply::Empty => self.credits[tier] = 0.0,
            }
        }
        let Some(richest) = richest else {
            return Choice::Idle;
        };
        self.credits[richest] -= earned;
        Choice::Take(richest)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::Supply::{Coming, Empty, Ready};
    use super::*;

    fn weighted(weights: &[f64]) -> Order {
        Order::new(topology::Order::Weighted, weights.iter().copied())
    }

    #[test]
    fn strict_takes_from_the_first_tier_that_has_something() {
        let table = [
            (1, vec![Ready, Ready], Choice::Take(0)),
            (1, vec![Empty, Ready], Choice::Take(1)),
            (1, vec![Empty, Empty], Choice::Idle),
            // A message is under way for the higher tier, and there is one slot.
            (1, vec![Coming(1), Ready], Choice::Hold(0)),
            // There is a slot more than it will need.
            (2, vec![Coming(1), Ready], Choice::Take(1)),
            (2, vec![Coming(1), Coming(1), Ready], Choice::Hold(0)),
            // Nobody waits below, so there is nothing to hold back.
            (1, vec![Coming(3), Empty], Choice::Idle),
            (1, vec![Ready, Coming(5), Ready], Choice::Take(0)),
        ];
        for (free, supplies, turn) in table {
            let mut order = Order::new(topology::Order::Strict, std::iter::empty());
            assert_eq!(order.next(free, &supplies), turn, "{free} {supplies:?}");
        }
    }

    #[test]
    fn tiers_with_work_share_the_turns_by_weight() {
        let weights = [8.0, 4.0, 2.0, 1.0, 0.5];
        let mut order = weighted(&weights);
        let mut turns = [0.0; 5];
        for _ in 0..1550 {
            if let Choice::Take(tier) = order.next(1, &[Ready; 5]) {
                turns[tier] += 1.0;
            }
        }
        for (turns, weight) in turns.iter().zip(weights) {
            assert!((turns - weight * 100.0).abs() <= 1.0, "{turns} {weight}");
        }
    }

    #[test]
    fn a_tier_that_was_idle_has_saved_nothing_up() {
        let mut order = weighted(&[3.0, 1.0]);
        for _ in 0..1000 {
            assert_eq!(order.next(1, &[Empty, Ready]), Choice::Take(1));
        }
        let next: Vec<_> = (0..4).map(|_| order.next(1, &[Ready, Ready])).collect();
        let first = next.iter().filter(|turn| **turn == Choice::Take(0)).count();
        assert_eq!(first, 3, "{next:?}");
    }

    proptest! {
        #[test]
        fn whoever_has_work_is_served_whatever_the_others_do(
            weights in prop::collection::vec(0.001_f64..1000.0, 1..6),
            pattern in prop::collection::vec(0_u8..3, 1..200),
        ) {
            let mut order = weighted(&weights);
            for (step, _) in pattern.iter().enumerate() {
                let supplies: Vec<_> = (0..weights.len())
                    .map(|tier| match pattern[(step + tier * 7) % pattern.len()] {
                        0 => Ready,
                        1 => Coming(1),
                        _ => Empty,
                    })
                    .collect();
                match order.next(1, &supplies) {
                    Choice::Take(tier) => prop_assert_eq!(supplies[tier], Ready),
                    _ => prop_assert!(!supplies.contains(&Ready)),
                }
            }
        }
    }
}
