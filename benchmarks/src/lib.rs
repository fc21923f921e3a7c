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

mod comparison;
mod distribution;
mod report;

pub use comparison::{Comparison, Measured};
pub use distribution::{Distribution, Distributions};
pub use report::{Check, Report};

/// Whether `--quick` was asked for: fewer rounds and smaller amounts, to see that all works.
pub fn is_quick() -> bool {
    std::env::args().any(|argument| argument == "--quick")
}
