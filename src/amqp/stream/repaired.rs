//! The originals of rewritten properties, for the consumer of the delivery.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::message::Repaired;

/// How many bytes of originals one connection keeps. Beyond that a delivery has the description of the
/// problem without the original.
const MOST_BYTES: usize = 8 << 20;

/// The rewritten properties of one connection, by channel and delivery tag, until the consumer takes
/// them.
#[derive(Debug, Clone, Default)]
pub(crate) struct Repairs(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    /// Nearly always zero, and then the lock is not needed.
    count: AtomicUsize,
    kept: Mutex<Kept>,
}

#[derive(Debug, Default)]
struct Kept {
    deliveries: BTreeMap<(u16, u64), Repaired>,
    bytes: usize,
}

impl Repairs {
    /// Removes and returns the problem of a delivery.
    pub(crate) fn take(&self, channel: u16, tag: u64) -> Option<Repaired> {
        if self.0.count.load(Ordering::Acquire) == 0 {
            return None;
        }
        let mut kept = self.lock();
        let repaired = kept.deliveries.remove(&(channel, tag))?;
        kept.bytes -= repaired.original.len();
        self.0.count.store(kept.deliveries.len(), Ordering::Release);
        Some(repaired)
    }

    pub(super) fn keep(&self, channel: u16, tag: u64, mut repaired: Repaired) {
        let mut kept = self.lock();
        if kept.bytes + repaired.original.len() > MOST_BYTES {
            repaired.original = Vec::new();
        }
        kept.bytes += repaired.original.len();
        if let Some(before) = kept.deliveries.insert((channel, tag), repaired) {
            kept.bytes -= before.original.len();
        }
        self.0.count.store(kept.deliveries.len(), Ordering::Release);
    }

    /// A channel was opened: its number may be reused, and its delivery tags begin again.
    pub(super) fn forget(&self, channel: u16) {
        if self.0.count.load(Ordering::Acquire) == 0 {
            return;
        }
        let mut kept = self.lock();
        let Kept { deliveries, bytes } = &mut *kept;
        deliveries.retain(|(of, _), repaired| {
            let is_other = *of != channel;
            if !is_other {
                *bytes -= repaired.original.len();
            }
            is_other
        });
        self.0.count.store(kept.deliveries.len(), Ordering::Release);
    }

    fn lock(&self) -> MutexGuard<'_, Kept> {
        self.0.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn repaired(size: usize) -> Repaired {
        Repaired {
            problem: "p".to_owned(),
            is_unreadable: false,
            original: vec![0; size],
        }
    }

    #[test]
    fn an_original_is_handed_out_once_and_only_for_its_delivery() {
        let repairs = Repairs::default();
        repairs.keep(1, 7, repaired(3));
        assert_eq!((repairs.take(1, 6), repairs.take(2, 7)), (None, None));
        assert_eq!(repairs.take(1, 7), Some(repaired(3)));
        assert_eq!(repairs.take(1, 7), None);
    }

    #[test]
    fn a_channel_that_is_opened_again_has_nothing_of_the_one_before() {
        let repairs = Repairs::default();
        repairs.keep(1, 1, repaired(3));
        repairs.keep(2, 1, repaired(3));
        repairs.forget(1);
        assert_eq!(
            (repairs.take(1, 1), repairs.take(2, 1)),
            (None, Some(repaired(3)))
        );
    }

    #[test]
    fn originals_are_bounded_in_bytes_and_problems_stay() {
        let repairs = Repairs::default();
        (0..20).for_each(|tag| repairs.keep(1, tag, repaired(1 << 20)));
        let kept: usize = (0..20)
            .map(|tag| repairs.take(1, tag).unwrap().original.len())
            .sum();
        assert_eq!(kept, MOST_BYTES);
        repairs.keep(1, 20, repaired(1 << 20));
        assert_eq!(repairs.take(1, 20), Some(repaired(1 << 20)));
    }
}
