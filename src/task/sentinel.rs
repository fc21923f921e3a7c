use std::collections::BTreeMap;
use std::fmt;
use std::io::Write;
use std::panic::Location;
use std::path::Path;

use super::{Registration, Registry};
use crate::topology::Topology;

/// Fails unless every `#[task]` handler of this program is mapped to a tier.
///
/// One test keeps a task without a tier out of production:
///
/// ```no_run
/// # #![allow(clippy::test_attr_in_doctest)]
/// #[test]
/// fn every_task_is_mapped() {
///     tierline::assert_every_task_is_mapped("topology/hotel.toml");
/// }
/// ```
///
/// The path is relative to the package, where `cargo test` runs its tests. In a file of the `tests`
/// folder, name the crate of the handlers, or it is not linked: `use my_app as _;`.
///
/// An override at run time is not in the file. One to a tier whose workers have no handler is refused when it is made, and
/// workers that get tasks without a handler by an override warn of them.
///
/// A mapped task that has no handler here is printed as a warning, since another program may serve
/// it; [`assert_every_task_is_mapped_strictly`] fails for it.
///
/// # Panics
///
/// If a task is not mapped (with the place of its handler and the line to add to the map), a task
/// has two handlers, no handler at all is linked, or the map is not valid.
#[track_caller]
pub fn assert_every_task_is_mapped(topology: impl AsRef<Path>) {
    let report = check_file(topology.as_ref());
    assert!(report.passes(), "{report}");
    if !report.passes_strictly() {
        // Not `eprintln!`: the test harness hides its output in a test that passes.
        let _ = write!(std::io::stderr(), "{report}");
    }
}

/// Like [`assert_every_task_is_mapped`], and fails for a mapped task that has no handler here: for
/// programs that serve every group of the map.
///
/// # Panics
///
/// As [`assert_every_task_is_mapped`], and if a mapped task has no handler.
#[track_caller]
pub fn assert_every_task_is_mapped_strictly(topology: impl AsRef<Path>) {
    let report = check_file(topology.as_ref());
    assert!(report.passes_strictly(), "{report}");
}

#[track_caller]
fn check_file(path: &Path) -> SentinelReport {
    match Topology::load(path) {
        Ok(topology) => Sentinel::collected().check(&topology),
        Err(error) => panic!(
            "cannot check that every task is mapped: {error}\n(the map is {}, relative to {})",
            path.display(),
            std::env::current_dir().unwrap_or_default().display(),
        ),
    }
}

/// Compares handlers with a map. It is behind [`assert_every_task_is_mapped`]; use it if you register by
/// hand or want the report itself.
///
/// ```
/// use tierline::{Registry, Topology, task::Sentinel};
/// # use serde::{Deserialize, Serialize};
/// # #[derive(Serialize, Deserialize)]
/// # struct Greet;
/// # impl tierline::Task for Greet { const NAME: &'static str = "greet"; }
/// # let topology = Topology::parse(r#"
/// # app = "hotel"
/// # [tiers.normal]
/// # queue = "quorum"
/// # slo = "2m"
/// # [groups.all]
/// # tiers = ["normal"]
/// # concurrency = 4
/// # [tasks]
/// # "farewell" = "normal"
/// # "#)?;
///
/// let mut registry = Registry::new();
/// registry.register::<Greet, _>(|_: Greet| async {})?;
///
/// let report = Sentinel::of(&registry).check(&topology);
/// assert_eq!(report.unmapped(), ["greet"]);
/// # Ok::<(), tierline::Error>(())
/// ```
#[derive(Debug)]
pub struct Sentinel {
    handlers: BTreeMap<&'static str, Vec<&'static Location<'static>>>,
}

impl Sentinel {
    /// For every `#[task]` handler of every crate linked into this program.
    pub fn collected() -> Self {
        Self::over(Registration::collected().map(|registration| handler(&registration)))
    }

    /// For the handlers of this registry.
    pub fn of(registry: &Registry) -> Self {
        Self::over(registry.iter().map(handler))
    }

    fn over(handlers: impl Iterator<Item = (&'static str, &'static Location<'static>)>) -> Self {
        let mut by_name: BTreeMap<_, Vec<_>> = BTreeMap::new();
        for (name, place) in handlers {
            by_name.entry(name).or_default().push(place);
        }
        for places in by_name.values_mut() {
            places.sort();
        }
        Self { handlers: by_name }
    }

    /// Lists tasks that the map lacks, and names in it that have no handler.
    pub fn check(&self, topology: &Topology) -> SentinelReport {
        let is_mapped = |name: &str| topology.task(name).is_some();
        SentinelReport {
            handlers: self.handlers.len(),
            unmapped: self
                .handlers
                .iter()
                .filter(|(name, _)| !is_mapped(name))
                .map(|(name, places)| (*name, places.clone()))
                .collect(),
            duplicated: self
                .handlers
                .iter()
                .filter(|(_, places)| places.len() > 1)
                .map(|(name, places)| (*name, places.clone()))
                .collect(),
            unhandled: mapped_names(topology)
                .filter(|name| !self.handlers.contains_key(name))
                .map(str::to_owned)
                .collect(),
            tiers: topology
                .tiers()
                .iter()
                .map(|tier| tier.name.clone())
                .collect(),
        }
    }
}

fn handler(registration: &Registration) -> (&'static str, &'static Location<'static>) {
    (registration.name(), registration.place())
}

fn mapped_names(topology: &Topology) -> impl Iterator<Item = &str> {
    topology.tasks().iter().map(|task| task.name.as_str())
}

/// The result of [`Sentinel::check`]. Its `Display` is the message for developers.
#[derive(Debug, Clone)]
pub struct SentinelReport {
    handlers: usize,
    unmapped: Vec<Handlers>,
    duplicated: Vec<Handlers>,
    unhandled: Vec<String>,
    tiers: Vec<String>,
}

type Handlers = (&'static str, Vec<&'static Location<'static>>);

impl SentinelReport {
    /// Whether there are handlers, and every task has one handler and one tier.
    pub fn passes(&self) -> bool {
        self.handlers > 0 && self.unmapped.is_empty() && self.duplicated.is_empty()
    }

    /// Whether, on top of that, every mapped task has a handler here.
    pub fn passes_strictly(&self) -> bool {
        self.passes() && self.unhandled.is_empty()
    }

    /// The names of tasks that have a handler and no tier.
    pub fn unmapped(&self) -> Vec<&'static str> {
        self.unmapped.iter().map(|(name, _)| *name).collect()
    }

    /// The names of tasks that have two handlers or more.
    pub fn duplicated(&self) -> Vec<&'static str> {
        self.duplicated.iter().map(|(name, _)| *name).collect()
    }

    /// The names in the map that have no handler here.
    pub fn unhandled(&self) -> &[String] {
        &self.unhandled
    }
}

impl fmt::Display for SentinelReport {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.handlers == 0 {
            writeln!(
                formatter,
                "error: no task handler is linked into this program, so nothing was checked.\n\
                 Mention the crate that has the handlers, for example `use my_app as _;`."
            )?;
        }
        if !self.unmapped.is_empty() {
            writeln!(
                formatter,
                "error: {} not mapped to a tier:",
                tasks(self.unmapped.len())
            )?;
            for (name, places) in &self.unmapped {
                writeln!(formatter, "  {name}, handled at {}", list(places))?;
            }
            writeln!(
                formatter,
                "Add to [tasks] in the map (the tiers are {}):",
                self.tiers.join(", ")
            )?;
            for (name, _) in &self.unmapped {
                writeln!(formatter, "  {} = \"TIER\"", toml_key(name))?;
            }
        }
        if !self.duplicated.is_empty() {
            writeln!(
                formatter,
                "error: {} handled twice:",
                tasks(self.duplicated.len())
            )?;
            for (name, places) in &self.duplicated {
                writeln!(formatter, "  {name}, at {}", list(places))?;
            }
            writeln!(
                formatter,
                "Give each task one handler, or the second a name of its own."
            )?;
        }
        if !self.unhandled.is_empty() {
            writeln!(
                formatter,
                "warning: {} mapped and not handled in this program:",
                tasks(self.unhandled.len())
            )?;
            for name in &self.unhandled {
                writeln!(formatter, "  {name}")?;
            }
            writeln!(
                formatter,
                "That is right if another program serves them. Else link the crate that does, \
                 or take them out of the map."
            )?;
        }
        Ok(())
    }
}

/// Formats a name as a TOML key. TOML does not know all escapes of Rust's `Debug`.
fn toml_key(name: &str) -> String {
    let mut key = String::from('"');
    for character in name.chars() {
        match character {
            '"' | '\\' => key.extend(['\\', character]),
            control if control.is_control() => {
                key.push_str(&format!("\\u{:04X}", u32::from(control)));
            }
            other => key.push(other),
        }
    }
    key.push('"');
    key
}

fn tasks(count: usize) -> String {
    if count == 1 {
        "1 task is".to_owned()
    } else {
        format!("{count} tasks are")
    }
}

fn list(places: &[&Location<'_>]) -> String {
    let places: Vec<String> = places
        .iter()
        .map(|place| format!("{}:{}", place.file(), place.line()))
        .collect();
    places.join(" and ")
}
