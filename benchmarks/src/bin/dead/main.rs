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
    collect::measure(&mut report, is_quick).await?;
    redrive::measure(&mut report, is_quick).await?;
    plans::measure(&mut report, is_quick).await?;
    proof::collect(&mut report, is_quick).await?;
    proof::redrive(&mut report, is_quick).await?;
    report.finish()
}
