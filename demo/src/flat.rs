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
         queue = {:?}\n\
         [groups.everybody]\n\
         tiers = [\"everything\"]\n\
         concurrency = {}\n\
         prefetch = 1\n\
         [tasks]\n",
        kind(hotel),
        slots(hotel)
    );
    for task in hotel.tasks() {
        writeln!(map, "{:?} = \"everything\"", task.name)?;
    }
    Ok(Topology::parse_named("the flat hotel", map)?)
}

/// A classic queue, or rows if the hotel has no broker.
fn kind(hotel: &Topology) -> &'static str {
    match hotel.broker_tiers().next() {
        Some(_) => "classic",
        None => "postgres",
    }
}

/// How many tasks can run at once.
pub(crate) fn slots(hotel: &Topology) -> u16 {
    hotel.groups().iter().map(|group| group.concurrency).sum()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]

    use super::*;
    use crate::{hotel, hotel_in_postgres};

    #[test]
    fn the_flat_hotel_has_all_tasks_and_as_many_slots_in_one_pool() {
        let hotel = hotel().unwrap();
        let flat = flattened(&hotel).unwrap();
        assert_eq!(flat.tasks().len(), 75);
        assert_eq!(flat.tiers().len(), 1);
        assert_eq!(flat.groups().len(), 1);
        assert_eq!((slots(&hotel), slots(&flat)), (20, 20));
    }

    #[test]
    fn the_flat_hotel_is_where_the_hotel_is() {
        let flat = flattened(&hotel().unwrap()).unwrap();
        assert_eq!(flat.postgres_tiers().count(), 0);
        let flat = flattened(&hotel_in_postgres().unwrap()).unwrap();
        assert_eq!(flat.broker_tiers().count(), 0);
    }
}
