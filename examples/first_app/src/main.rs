//! Shows every task that this program handles, its tier, and where its handler is.
//!
//! ```sh
//! cargo run --package first_app
//! ```

use first_app as _;
use tierline::{Registry, Topology};

fn main() -> anyhow::Result<()> {
    let topology = Topology::parse(include_str!("../topology.toml"))?;
    let registry = Registry::collected()?;
    for task in topology.tasks() {
        match registry.get(&task.name) {
            Some(handler) => println!("{:<16} {:<8} {}", task.name, task.tier, handler.place()),
            None => println!(
                "{:<16} {:<8} handled by another program",
                task.name, task.tier
            ),
        }
    }
    Ok(())
}
