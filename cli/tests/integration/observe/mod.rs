//! The alert rules and the dashboard of a map: as files, under `promtool`, and in a real Prometheus.

mod day;
mod exporter;
mod faults;
mod files;
#[cfg(all(unix, feature = "admin"))]
mod night;
mod panels;
#[cfg(all(unix, feature = "admin"))]
mod processes;
mod rules;
mod scraped;

use tierline::Topology;
use tierline::topology::export::{RuleSettings, Rules};

fn shop() -> Topology {
    Topology::parse(include_str!("shop.toml")).unwrap()
}

fn hotel() -> Topology {
    Topology::load(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../topology/hotel.toml"
    ))
    .unwrap()
}

fn rules(topology: &Topology) -> Rules {
    Rules::new(topology, &RuleSettings::new(topology))
}
