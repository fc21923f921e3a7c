//! The topology from the outside: files in, answers out. No broker is needed.

#![cfg(test)]

mod delays;
mod fuzz;
mod hotel;
mod limited;
mod limits;
mod mistakes;
mod permissions;
mod schedules;

use tierline::Topology;
use tierline::error::TopologyError;
use tierline::topology::plan::Plan;
use tierline::topology::problem::Problem;

const HOTEL: &str = "topology/hotel.toml";

fn hotel() -> Topology {
    Topology::load(HOTEL).unwrap()
}

fn plan(topology: &Topology, version: &str) -> Result<Plan, tierline::Error> {
    Plan::new(topology, version.parse()?, false)
}

/// A file with one tier, one group and one task, and `change` applied to it.
fn small(change: impl FnOnce(String) -> String) -> Result<Topology, tierline::Error> {
    let text = r#"app = "shop"
[tiers.main]
queue = "classic"
[groups.all]
tiers = ["main"]
concurrency = 4
[tasks]
"mail.send" = "main"
"#;
    Topology::parse(change(text.to_owned()))
}

/// Every mistake of a file.
fn problems(result: Result<Topology, tierline::Error>) -> Vec<Problem> {
    match result {
        Err(tierline::Error::Topology(TopologyError::Invalid(invalid))) => {
            invalid.problems().to_vec()
        }
        other => panic!("expected mistakes, got {other:?}"),
    }
}

/// The one mistake of a file, as it is printed.
#[track_caller]
fn the_problem(result: Result<Topology, tierline::Error>) -> String {
    let problems = problems(result);
    assert_eq!(problems.len(), 1, "{problems:#?}");
    problems[0].to_string()
}
