//! The alert rules and the dashboard of a map: as files, under `promtool`, and in a real Prometheus.

mod day;
mod exporter;
mod faults;
mod files;
mod rules;
mod scraped;

use serde_json::Value;
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

/// The titles and queries of all panels of a dashboard, those in closed rows too.
fn queries(dashboard: &Value) -> Vec<(String, String)> {
    let panels = dashboard["panels"].as_array().unwrap().iter();
    let all = panels.flat_map(|panel| {
        let inside = panel["panels"].as_array().into_iter().flatten();
        std::iter::once(panel).chain(inside)
    });
    let of_panel = |panel: &Value| {
        let title = panel["title"].as_str().unwrap().to_owned();
        let targets = panel["targets"].as_array().cloned().unwrap_or_default();
        let query = move |target: Value| {
            let query = target["expr"].as_str().unwrap().to_owned();
            (title.clone(), query)
        };
        targets.into_iter().map(query)
    };
    all.flat_map(of_panel).collect()
}
