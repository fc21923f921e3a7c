//! What all benchmarks share: contenders that take turns, medians with their spread, ratios, and a
//! report as tables and as JSON.
//!
//! A benchmark is a program in `src/bin` that makes a [`Report`] and adds to it:
//!
//! ```no_run
//! use tierline_benchmarks::{Comparison, Report, is_quick};
//!
//! # async fn example() -> anyhow::Result<()> {
//! let rounds = if is_quick() { 3 } else { 7 };
//! let mut report = Report::new("naps");
//! let naps = Comparison::new("Naps in an hour", "naps/h")
//!     .contender("cat", async || Ok(4.0))
//!     .contender("dog", async || Ok(3.0))
//!     .at_least(0.7, "cat")
//!     .run(rounds)
//!     .await?;
//! report.add(naps);
//! report.finish()
//! # }
//! ```
//!
//! `cargo xtask bench NAME` starts the servers and runs it in release mode. Machines differ and are
//! noisy: what counts are ratios within one run, in which the contenders take turns.

mod chart;
mod comparison;
mod distribution;
mod figures;
mod process;
mod report;
mod summary;

pub use chart::Chart;
pub use comparison::{Comparison, Measured, median};
pub use distribution::{Distribution, Distributions};
pub use figures::Figures;
pub use process::{processor_time, status};
pub use report::{Check, Report, folder};
pub use summary::{Summary, Surroundings};

/// Whether `--quick` was asked for: fewer rounds and smaller amounts, to see that all works.
pub fn is_quick() -> bool {
    std::env::args().any(|argument| argument == "--quick")
}

/// Whether a part of the benchmark was asked for by its name; without names all are.
pub fn is_wanted(part: &str) -> bool {
    let mut names = std::env::args()
        .skip(1)
        .filter(|name| !name.starts_with('-'));
    match names.next() {
        None => true,
        Some(first) => first == part || names.any(|name| name == part),
    }
}
