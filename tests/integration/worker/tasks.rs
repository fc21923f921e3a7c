//! Tasks that do nothing, for tests of what happens around them.

use serde::{Deserialize, Serialize};
use tierline::{Registry, Task};

#[derive(Serialize, Deserialize)]
pub(super) struct Dig {}

impl Task for Dig {
    const NAME: &'static str = "dig";
}

#[derive(Serialize, Deserialize)]
pub(super) struct Fill {}

impl Task for Fill {
    const NAME: &'static str = "fill";
}

#[derive(Serialize, Deserialize)]
pub(super) struct Rake {}

impl Task for Rake {
    const NAME: &'static str = "rake";
}

/// Handlers that end at once.
pub(super) fn registry() -> Registry {
    let mut registry = Registry::new();
    registry.register::<Dig, _>(async |_: Dig| {}).unwrap();
    registry.register::<Fill, _>(async |_: Fill| {}).unwrap();
    registry.register::<Rake, _>(async |_: Rake| {}).unwrap();
    registry
}
