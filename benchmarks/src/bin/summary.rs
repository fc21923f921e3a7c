//! What several benchmarks promised and found, as one table and one file: the end of
//! `cargo xtask bench`.

use anyhow::Result;
use tierline_benchmarks::{Summary, Surroundings};

#[tokio::main]
async fn main() -> Result<()> {
    let arguments = std::env::args().skip(1);
    let names: Vec<String> = arguments.filter(|it| !it.starts_with('-')).collect();
    Summary::read(&names, Surroundings::here().await?).finish()
}
