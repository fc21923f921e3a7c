//! A night at the hotel: 75 tasks in six tiers, worked by four groups on a real broker and a real
//! database, or with every tier in the database and no broker. `cargo xtask demo` starts the servers and runs this.

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

/// A night at the hotel, on the servers of AMQP_URL and DATABASE_URL; with --postgres on that of DATABASE_URL alone.
#[derive(Parser)]
struct Options {
    /// How long the night takes, about, in seconds.
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u32).range(5..=3600))]
    seconds: u32,
    /// First the same night through one queue with one pool, and then both side by side.
    #[arg(long)]
    flat: bool,
    /// Every tier in Postgres, and no broker.
    #[arg(long)]
    postgres: bool,
    /// The same seed gives the same night.
    #[arg(long, default_value_t = 2)]
    seed: u64,
}

const BEGINNING: &str =
    "a night at the hotel: 75 tasks, seen by how urgent they are (Ctrl-C ends it)\n";
const WITHOUT_BROKER: &str = "every tier is in Postgres; there is no RabbitMQ\n";

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
    let needed: &[_] = match options.postgres {
        true => &[DATABASE_URL],
        false => &[AMQP_URL, DATABASE_URL],
    };
    for variable in needed {
        if std::env::var_os(variable).is_none() {
            bail!("{variable} is not set; `cargo xtask demo` starts the servers and sets it");
        }
    }
    let hotel = match options.postgres {
        true => hotel_in_postgres()?,
        false => hotel()?,
    };
    let screen = Screen::of_output();
    let stage = Stage {
        hotel: &hotel,
        screen: &screen,
        options: &options,
    };
    let slots = slots(&hotel);
    print(BEGINNING)?;
    let mut place = "";
    if options.postgres {
        print(WITHOUT_BROKER)?;
        place = " in Postgres";
    }
    let flat = match options.flat {
        true => {
            let title = format!("one queue{place}, one pool of {slots} slots");
            Some(stage.play(&title, flattened(&hotel)?).await?)
        }
        false => None,
    };
    let (tiers, groups) = (hotel.tiers().len(), hotel.groups().len());
    let title = format!("{tiers} tiers{place}, {groups} groups, {slots} slots");
    let tiered = stage.play(&title, hotel.clone()).await?;
    print(&match &flat {
        Some(flat) => side_by_side(flat, &tiered, screen.has_colours()),
        None => hint(options.postgres),
    })?;
    Ok(tiered.is_well() && flat.is_none_or(|flat| flat.is_well()))
}

fn hint(postgres: bool) -> String {
    let same = if postgres { "--postgres " } else { "" };
    format!("\nthe same night through one queue, beside this one: cargo xtask demo {same}--flat\n")
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

const MAP: &str = include_str!("../../topology/hotel.toml");

/// The hotel's map.
fn hotel() -> Result<Topology> {
    Ok(Topology::parse_named("topology/hotel.toml", MAP)?)
}

/// The hotel's map with every tier in Postgres.
fn hotel_in_postgres() -> Result<Topology> {
    let map = ["classic", "quorum"]
        .iter()
        .fold(MAP.to_owned(), |map, kind| {
            map.replace(&format!("queue = \"{kind}\""), "queue = \"postgres\"")
        });
    Ok(Topology::parse_named(
        "topology/hotel.toml in Postgres",
        map,
    )?)
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]

    use super::*;
    use tierline::topology::{MappedTask, Tier};

    #[test]
    fn the_hotel_in_postgres_differs_in_nothing_but_where_its_tiers_are() {
        let (hotel, moved) = (hotel().unwrap(), hotel_in_postgres().unwrap());
        assert_eq!(hotel.broker_tiers().count(), 6);
        assert_eq!(moved.postgres_tiers().count(), 6);
        let tier_of = |task: &MappedTask| (task.name.clone(), task.tier.clone());
        let both = [&hotel, &moved].map(|map| map.tasks().iter().map(tier_of).collect::<Vec<_>>());
        assert_eq!(both[0], both[1]);
        assert_eq!(hotel.groups(), moved.groups());
        let urgency = |tier: &Tier| (tier.name.clone(), tier.slo, tier.weight);
        let both = [&hotel, &moved].map(|map| map.tiers().iter().map(urgency).collect::<Vec<_>>());
        assert_eq!(both[0], both[1]);
    }
}
