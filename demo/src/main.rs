//! A night at the hotel: 75 tasks in six tiers, worked by four groups on a real broker and a real
//! database. `cargo xtask demo` starts both and runs this.

mod flat;
mod handlers;
mod ledger;
mod load;
mod meter;
mod night;
mod pace;
mod summary;
mod tasks;
mod view;

use anyhow::{Result, bail};
use clap::Parser;
use tierline::Topology;
use tierline_testbed::{AMQP_URL, DATABASE_URL};
use tokio::signal::unix::{SignalKind, signal};

use crate::flat::{flattened, slots};
use crate::night::{Ending, Setting, play};
use crate::pace::Pace;
use crate::summary::side_by_side;
use crate::view::{Screen, print};

/// A night at the hotel, on the servers of AMQP_URL and DATABASE_URL.
#[derive(Parser)]
struct Options {
    /// How long the night takes, about, in seconds.
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u32).range(5..=3600))]
    seconds: u32,
    /// First the same night through one queue with one pool, and then both side by side.
    #[arg(long)]
    flat: bool,
    /// The same seed gives the same night.
    #[arg(long, default_value_t = 2)]
    seed: u64,
}

const BEGINNING: &str =
    "a night at the hotel: 75 tasks, seen by how urgent they are (Ctrl-C ends it)\n";
const HINT: &str = "\nthe same night through one queue, beside this one: cargo xtask demo --flat\n";

#[tokio::main]
async fn main() {
    let options = Options::parse();
    handlers::keep_the_poison_quiet();
    // Dropping the work removes what it has made on the servers.
    let ended = tokio::select! {
        result = run(options) => Some(result),
        _ = interrupted() => None,
    };
    let code = match ended {
        Some(Ok(true)) => 0,
        Some(Ok(false)) => 1,
        Some(Err(error)) => {
            eprintln!("error: {error:#}");
            1
        }
        None => 130,
    };
    // Not by returning: a running lapin thread would panic without its runtime.
    std::process::exit(code);
}

/// Runs the night, and returns whether it succeeded.
async fn run(options: Options) -> Result<bool> {
    for variable in [AMQP_URL, DATABASE_URL] {
        if std::env::var_os(variable).is_none() {
            bail!("{variable} is not set; `cargo xtask demo` starts the servers and sets it");
        }
    }
    let hotel = hotel()?;
    let screen = Screen::of_output();
    let stage = Stage {
        hotel: &hotel,
        screen: &screen,
        options: &options,
    };
    let slots = slots(&hotel);
    print(BEGINNING)?;
    let flat = match options.flat {
        true => {
            let title = format!("one queue, one pool of {slots} slots");
            Some(stage.play(&title, flattened(&hotel)?).await?)
        }
        false => None,
    };
    let (tiers, groups) = (hotel.tiers().len(), hotel.groups().len());
    let title = format!("{tiers} tiers, {groups} groups, {slots} slots");
    let tiered = stage.play(&title, hotel.clone()).await?;
    print(&match &flat {
        Some(flat) => side_by_side(flat, &tiered, screen.has_colours()),
        None => HINT.to_owned(),
    })?;
    Ok(tiered.is_well() && flat.is_none_or(|flat| flat.is_well()))
}

/// The part that all nights share.
struct Stage<'a> {
    hotel: &'a Topology,
    screen: &'a Screen,
    options: &'a Options,
}

impl Stage<'_> {
    async fn play(&self, title: &str, map: Topology) -> Result<Ending> {
        let pace = Pace::of(self.options.seconds);
        let ending = play(Setting {
            title,
            map,
            hotel: self.hotel,
            pace,
            scenes: load::night(self.hotel, pace, self.options.seed),
            screen: self.screen,
        })
        .await?;
        self.screen.leave();
        print(&ending.summary(self.screen.has_colours()))?;
        Ok(ending)
    }
}

/// The hotel's map.
fn hotel() -> Result<Topology> {
    let map = include_str!("../../topology/hotel.toml");
    Ok(Topology::parse_named("topology/hotel.toml", map)?)
}

/// Completes when this process receives a shutdown signal.
async fn interrupted() -> Result<()> {
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    let mut hangup = signal(SignalKind::hangup())?;
    tokio::select! {
        _ = interrupt.recv() => {}
        _ = terminate.recv() => {}
        _ = hangup.recv() => {}
    }
    eprintln!("ending, and removing what was made on the servers");
    Ok(())
}
