//! Maps that went wrong in the hands of somebody in a hurry.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use tierline::Topology;
use tierline::topology::Version;
use tierline::topology::plan::Plan;
use tierline_fuzz::{Edit, edited};

const HOTEL: &[u8] = include_bytes!("../../topology/hotel.toml");
const MINIMAL: &[u8] = include_bytes!("../../topology/minimal.toml");

/// What is refused is refused with a reason, and what is taken can be planned.
fn read(file: &[u8]) {
    match Topology::parse(file) {
        Ok(topology) => match Plan::new(&topology, Version::new(3, 10, 8), false) {
            Ok(plan) => assert!(!plan.queues.is_empty()),
            Err(error) => assert!(!error.to_string().is_empty()),
        },
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}

#[test]
fn any_bytes_are_a_map_or_an_error() {
    bolero::check!().for_each(read);
}

#[test]
fn an_edited_map_is_a_map_or_an_error() {
    bolero::check!()
        .with_type::<(bool, Vec<Edit>)>()
        .for_each(|(is_large, edits)| {
            let file = if *is_large { HOTEL } else { MINIMAL };
            read(&edited(file, edits));
        });
}
