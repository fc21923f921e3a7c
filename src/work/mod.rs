//! The way through: how a message becomes a run of its handler, and the run a verdict.

mod execute;
mod guard;
mod verdict;

pub use execute::Executor;
pub use verdict::Verdict;
