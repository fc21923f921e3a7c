//! How long a large topology takes to parse and plan.
//!
//! `cargo bench --bench topology`

#![allow(clippy::unwrap_used)] // a benchmark that cannot run should stop

use std::fmt::Write;
use std::hint::black_box;

use criterion::{Criterion, criterion_group, criterion_main};
use tierline::Topology;
use tierline::topology::Version;
use tierline::topology::plan::Plan;

criterion_group!(benches, ten_thousand_tasks);
criterion_main!(benches);

fn ten_thousand_tasks(criterion: &mut Criterion) {
    let text = hotel_with_tasks(10_000);
    let version = Version::new(4, 3, 6);
    criterion.bench_function("parse and plan 10,000 tasks", |bencher| {
        bencher.iter(|| {
            let topology = Topology::parse(black_box(&text)).unwrap();
            black_box(Plan::new(&topology, version, false).unwrap())
        });
    });
    let topology = Topology::parse(&text).unwrap();
    criterion.bench_function("look up one of 10,000 tasks", |bencher| {
        bencher.iter(|| black_box(topology.task(black_box("area.task_9999"))));
    });
}

fn hotel_with_tasks(count: usize) -> String {
    let mut text = include_str!("../topology/hotel.toml").to_owned();
    let tiers = ["critical", "high", "normal", "low", "bulk", "calls"];
    for (number, tier) in (0..count).zip(tiers.iter().cycle()) {
        writeln!(text, "\"area.task_{number}\" = \"{tier}\"").unwrap();
    }
    text
}
