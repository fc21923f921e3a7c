//! The hotel before it had tiers: the same tasks in one queue, the same number of slots in one pool.

use std::fmt::Write;

use anyhow::Result;
use tierline::Topology;

/// The map of the flat hotel. With a prefetch of 1 no task waits behind a prefetched one, so this is the
/// best that one queue can do.
pub(crate) fn flattened(hotel: &Topology) -> Result<Topology> {
    let mut map = format!(
        "app = \"hotel\"\n\
         [tiers.everything]\n\
         queue = \"classic\"\n\
         [groups.everybody]\n\
         tiers = [\"everything\"]\n\
         concurrency = {}\n\
         prefetch = 1\n\
         [tasks]\n",
        slots(hotel)
    );
    for task in hotel.tasks() {
        writeln!(map, "{:?} = \"everything\"", task.name)?;
    }
    Ok(Topology::parse_named("the flat hotel", map)?)
}

/// How many tasks can run at once.
pub(crate) fn slots(hotel: &Topology) -> u16 {
    hotel.groups().iter().map(|group| group.concurrency).sum()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]

    use super::*;
    use crate::hotel;

    #[test]
    fn the_flat_hotel_has_all_tasks_and_as_many_slots_in_one_pool() {
        let hotel = hotel().unwrap();
        let flat = flattened(&hotel).unwrap();
        assert_eq!(flat.tasks().len(), 75);
        assert_eq!(flat.tiers().len(), 1);
        assert_eq!(flat.groups().len(), 1);
        assert_eq!((slots(&hotel), slots(&flat)), (20, 20));
    }
}
