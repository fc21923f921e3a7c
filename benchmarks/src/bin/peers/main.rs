//! tierline beside Celery, Dramatiq, apalis-amqp and plain lapin, each with what its documentation
//! advises for reliability: publishing, draining, urgent tasks among others, memory.
//!
//! `cargo xtask bench peers [--quick] [publish] [drain] [urgent]`

mod own;
mod plain;
mod program;

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tierline_benchmarks::{
    Comparison, Distribution, Distributions, Measured, Report, is_quick, is_wanted,
};
use tierline_testbed::Python;
use tokio::process::Command;
use tokio::time::timeout;

use program::Program;

const BUILD_LIMIT: Duration = Duration::from_secs(1_200);

const PEERS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/peers");

#[tokio::main]
async fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match words[..] {
        ["as", "tierline", ref command @ ..] => return own::run(own::PLAIN, command).await,
        ["as", "quorum", ref command @ ..] => return own::run(own::QUORUM, command).await,
        ["as", "lapin", ref command @ ..] => return plain::run(command).await,
        _ => {}
    }
    let python = Python::with(&Path::new(PEERS).join("requirements.txt")).await?;
    let contenders = Contenders::find(&python).await?;
    let mut report = Report::new("peers");
    if is_wanted("publish") {
        publish(&mut report, &contenders).await?;
    }
    if is_wanted("drain") {
        drain(&mut report, &contenders).await?;
    }
    if is_wanted("urgent") {
        urgent(&mut report, &contenders).await?;
    }
    report.finish()
}

struct Contenders {
    tierline: Program,
    quorum: Program,
    lapin: Program,
    celery: Program,
    dramatiq: Program,
    apalis: Program,
}

impl Contenders {
    async fn find(python: &Python) -> Result<Self> {
        let this = std::env::current_exe()?;
        let script = |name| Path::new(PEERS).join(name);
        let python = python.program();
        Ok(Self {
            tierline: Program::new("tierline", &[&this, &"as", &"tierline"]),
            quorum: Program::new("tierline, quorum", &[&this, &"as", &"quorum"]),
            lapin: Program::new("lapin", &[&this, &"as", &"lapin"]),
            celery: Program::new("Celery", &[&python, &script("celery_peer.py")]),
            dramatiq: Program::new("Dramatiq", &[&python, &script("dramatiq_peer.py")]),
            apalis: Program::new("apalis-amqp", &[&build_apalis().await?]),
        })
    }

    fn peers(&self) -> [&Program; 3] {
        [&self.celery, &self.dramatiq, &self.apalis]
    }
}

async fn build_apalis() -> Result<PathBuf> {
    let folder = Path::new(PEERS).join("apalis");
    let target = Path::new(PEERS).join("../../target/apalis");
    let mut build = Command::new("cargo");
    build
        .args(["build", "--release", "--quiet", "--manifest-path"])
        .arg(folder.join("Cargo.toml"))
        .arg("--target-dir")
        .arg(&target)
        .kill_on_drop(true);
    let built = timeout(BUILD_LIMIT, build.status()).await;
    let built = built.context("the peer of apalis-amqp took too long to build")??;
    ensure!(built.success(), "the peer of apalis-amqp cannot be built");
    Ok(target.join("release/apalis-peer"))
}

fn rounds() -> usize {
    if is_quick() { 1 } else { 3 }
}

/// tierline's own way to publish many is in the table, and so is lapin's best; the others have none.
async fn publish(report: &mut Report, contenders: &Contenders) -> Result<()> {
    let (few, many) = if is_quick() {
        (500, 10_000)
    } else {
        (2_000, 30_000)
    };
    let Contenders {
        tierline, lapin, ..
    } = contenders;
    let mut comparison = Comparison::new("Publishing with confirm", "tasks/s")
        .contender("lapin", async || lapin.publish("fill", few).await)
        .contender("tierline", async || tierline.publish("fill", few).await)
        .contender("lapin, window of 1,000", async || {
            lapin.publish("many", many).await
        })
        .contender("tierline, publish_many", async || {
            tierline.publish("many", many).await
        });
    for peer in contenders.peers() {
        comparison = comparison.contender(peer.name, async || peer.publish("fill", few).await);
    }
    let measured = comparison.run(rounds()).await?;
    for peer in contenders.peers() {
        ahead(report, &measured, tierline, peer, 1.0);
    }
    report.add(measured);
    Ok(())
}

async fn drain(report: &mut Report, contenders: &Contenders) -> Result<()> {
    let (few, many) = if is_quick() {
        (2_000, 10_000)
    } else {
        (6_000, 20_000)
    };
    let Contenders {
        tierline,
        quorum,
        lapin,
        apalis,
        ..
    } = contenders;
    let mut comparison = Comparison::new("Tasks that do nothing", "tasks/s")
        .contender(lapin.name, async || lapin.drain(many).await)
        .contender(tierline.name, async || tierline.drain(many).await)
        .contender(quorum.name, async || quorum.drain(many).await)
        .contender(apalis.name, async || apalis.drain(many).await);
    for peer in [&contenders.celery, &contenders.dramatiq] {
        comparison = comparison.contender(peer.name, async || peer.drain(few).await);
    }
    let measured = comparison.run(if is_quick() { 1 } else { 5 }).await?;
    for own in [tierline, quorum] {
        ahead(report, &measured, own, &contenders.celery, 5.0);
        ahead(report, &measured, own, &contenders.dramatiq, 3.0);
    }
    for own in [tierline, quorum] {
        // In each round, because a classic queue of RabbitMQ 3.10 drains messages with more than 64 bytes of
        // properties at two speeds (docs/facts.md), and a median would not show the slow one.
        let ratio = measured.least_ratio(own.name, apalis.name);
        let ratio = ratio.unwrap_or_default();
        report.check(
            format!(
                "{}: {} ahead of {} in each round",
                measured.title(),
                own.name,
                apalis.name
            ),
            format!("{ratio:.2} at least"),
            ratio > 1.0,
        );
    }
    report.add(measured);
    Ok(())
}

fn ahead(report: &mut Report, measured: &Measured, own: &Program, peer: &Program, asked: f64) {
    let ratio = measured.ratio(own.name, peer.name).unwrap_or_default();
    let what = format!(
        "{}: {} at least {asked:.1} times {}",
        measured.title(),
        own.name,
        peer.name
    );
    report.check(what, format!("{ratio:.2}"), ratio >= asked);
}

async fn urgent(report: &mut Report, contenders: &Contenders) -> Result<()> {
    let arrivals = if is_quick() { 50 } else { 150 };
    let Contenders {
        tierline,
        celery,
        dramatiq,
        apalis,
        ..
    } = contenders;
    for (layout, name, programs) in [
        (
            "one",
            "one worker of 8 slots",
            vec![tierline, celery, dramatiq],
        ),
        (
            "own",
            "2 slots for critical, 6 for the others",
            vec![tierline, celery, dramatiq, apalis],
        ),
    ] {
        let mut waits = vec![Vec::new(); programs.len()];
        let mut memory = vec![Vec::new(); programs.len()];
        for round in 0..rounds() {
            for (program, (waits, memory)) in programs.iter().zip(waits.iter_mut().zip(&mut memory))
            {
                eprintln!("urgent, {name}, round {}: {}", round + 1, program.name);
                let (waited, used) = program.urgent(layout, arrivals).await?;
                waits.extend(waited);
                memory.push(used);
            }
        }
        let waits: Vec<_> = waits.into_iter().map(Distribution::of).collect();
        let mut table = Distributions::new(format!(
            "From the publish of a critical task to its start, {name}"
        ));
        for (program, waited) in programs.iter().zip(&waits) {
            table = table.row(program.name, waited.clone());
        }
        report.add(table);
        for (program, theirs) in programs.iter().zip(&waits).skip(1) {
            for share in [0.5, 0.99] {
                let (our, their) = (waits[0].quantile(share), theirs.quantile(share));
                let what = format!("{name}: p{} ahead of {}", share * 100.0, program.name);
                report.check(what, format!("{our:.1?} against {their:.1?}"), our < their);
            }
        }
        let names = programs.iter().map(|program| program.name.to_owned());
        let title = format!("Memory of the worker, {name}");
        let used = Measured::of(title, "MiB", names.zip(memory).collect());
        for program in &programs[1..] {
            let ratio = used.ratio("tierline", program.name).unwrap_or(f64::NAN);
            let what = format!("{name}: less memory than {}", program.name);
            report.check(what, format!("{ratio:.2} of it"), ratio < 1.0);
        }
        report.add(used);
    }
    Ok(())
}
