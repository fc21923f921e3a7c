//! A chart for each part of what `peers` found, and a page that shows them, in `docs/benchmarks`: the
//! end of `cargo xtask bench --peers`. Those of a quick run, whose figures say little, stay in
//! `target/benchmarks/charts`.

use std::fs;
use std::path::Path;

use anyhow::{Result, ensure};
use tierline_benchmarks::{Chart, Report, Surroundings, folder, is_quick};

const PAGE: &str = "README.md";

const HOW: &str = "All contenders took turns on the same broker, each in processes of its own, with persistent messages,
publisher confirms and acknowledgements after the work. tierline's tasks that do nothing wait in a classic
queue without priorities, of the same kind as the others', and in another row in a quorum queue, which its
guide advises where no priorities are needed.
";

#[tokio::main]
async fn main() -> Result<()> {
    let charts = match is_quick() {
        true => folder().join("charts"),
        false => Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/benchmarks"),
    };
    fs::create_dir_all(&charts)?;
    let report = Report::read(&folder(), "peers")?;
    let mut page = format!(
        "# Comparison with other frameworks\n\nMade by `cargo xtask bench --peers` from what it measured: {}.\n{HOW}",
        Surroundings::here().await?
    );
    for chart in report.sections().iter().filter_map(Chart::of) {
        let (name, title) = (chart.file_name(), chart.title());
        let line = format!("\n![{title}]({name})\n");
        ensure!(
            !page.contains(&line),
            "two parts of the report have the title {title:?}"
        );
        fs::write(charts.join(&name), chart.to_svg())?;
        println!("{name}");
        page += &line;
    }
    fs::write(charts.join(PAGE), page)?;
    Ok(())
}
