//! A chart for each part of what `peers` found, in `docs/benchmarks`: the end of
//! `cargo xtask bench --peers`. Those of a quick run, whose figures say little, stay in
//! `target/benchmarks/charts`.

use std::collections::HashSet;
use std::fs;
use std::path::Path;

use anyhow::{Result, ensure};
use tierline_benchmarks::{Chart, Report, folder, is_quick};

fn main() -> Result<()> {
    let charts = match is_quick() {
        true => folder().join("charts"),
        false => Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/benchmarks"),
    };
    fs::create_dir_all(&charts)?;
    let report = Report::read(&folder(), "peers")?;
    let mut written = HashSet::new();
    for chart in report.sections().iter().filter_map(Chart::of) {
        let name = chart.file_name();
        fs::write(charts.join(&name), chart.to_svg())?;
        println!("{name}");
        ensure!(
            written.insert(name),
            "two parts of the report have the same title"
        );
    }
    Ok(())
}
