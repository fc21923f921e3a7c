//! What several benchmarks promised and found, as one table and one file: the end of
//! `cargo xtask bench`.

use anyhow::Result;
use tierline_benchmarks::{Summary, Surroundings, is_quick};

#[tokio::main]
async fn main() -> Result<()> {
    let measured_on = Surroundings {
        date: jiff::Timestamp::now().strftime("%F %H:%M UTC").to_string(),
        rabbitmq: tierline_testbed::rabbitmq_version().await?,
        cores: std::thread::available_parallelism()?.get(),
        is_quick: is_quick(),
    };
    let arguments = std::env::args().skip(1);
    let names: Vec<String> = arguments.filter(|it| !it.starts_with('-')).collect();
    Summary::read(&names, measured_on).finish()
}
