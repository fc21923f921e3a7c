//! Dead letters: collecting beside a plain insert loop, redriving beside a plain publish loop, the
//! log with a million rows, and two proofs with processes that are killed.
//!
//! `cargo xtask bench dead [--quick]`

mod collect;
mod plans;
mod proof;
mod redrive;
mod shop;

use anyhow::Result;
use tierline_benchmarks::{Report, is_quick};

#[tokio::main]
async fn main() -> Result<()> {
    if let Some(role) = shop::Role::of_this_process() {
        return proof::play(&role).await;
    }
    let is_quick = is_quick();
    let mut report = Report::new("dead");
    // One part alone, to look at it more closely: `dead redrive`.
    let part = std::env::args()
        .skip(1)
        .find(|argument| !argument.starts_with("--"));
    let is_asked = |name: &str| part.as_deref().is_none_or(|part| part == name);
    if is_asked("collect") {
        collect::measure(&mut report, is_quick).await?;
    }
    if is_asked("redrive") {
        redrive::measure(&mut report, is_quick).await?;
    }
    if is_asked("plans") {
        plans::measure(&mut report, is_quick).await?;
    }
    if is_asked("proof") {
        proof::collect(&mut report, is_quick).await?;
        proof::redrive(&mut report, is_quick).await?;
    }
    report.finish()
}
