//! Faults as they are done, and undone.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use tierline_testbed::{Network, Node};
use tokio::time::sleep;

use crate::crew::Crew;
use crate::ledger::{Millis, now};
use crate::plan::{Fault, Step, Trouble};
use crate::verdict::Deletion;
use crate::world::World;

/// What a slow network adds to each piece that it carries.
const SLOWNESS: Duration = Duration::from_millis(300);
/// How long a fault is tried that the state of the broker does not allow yet.
const TRY_LIMIT: Duration = Duration::from_secs(90);

/// Has every channel of the broker be asked for a queue that is not there, as if its client had: the
/// answer to that is the end of the channel with an error.
const BREAK_CHANNELS: &str = "[Channel ! {'$gen_cast', {method, {'queue.declare', 0, <<\"none\">>, true, \
     false, false, false, false, []}, none, noflow}} || Channel <- rabbit_channel:list()].";

/// What was done, and when.
#[derive(Debug, Default)]
pub(crate) struct Happened {
    pub(crate) begin: Millis,
    pub(crate) end: Millis,
    /// When nodes that were gone took connections again.
    pub(crate) accepted: Vec<Millis>,
    pub(crate) deletions: Vec<Deletion>,
    pub(crate) notes: Vec<String>,
    /// Whether what was to happen beside it could not be done.
    pub(crate) is_beside_undone: bool,
    /// Why the fault could not be done, or not be undone.
    pub(crate) failed: Option<anyhow::Error>,
}

/// Does what a step says. When it is over, all is healed, unless it failed.
pub(crate) async fn happen(world: &World, crew: &Crew, step: &Step) -> Happened {
    let begin = now();
    let beside = async {
        match &step.beside {
            None => Happened::default(),
            Some((moment, fault)) => {
                sleep(*moment).await;
                insist(world, crew, fault).await
            }
        }
    };
    let (main, beside) = tokio::join!(do_to(world, crew, &step.fault), beside);
    let mut happened = main.unwrap_or_else(|error| Happened {
        failed: Some(error),
        ..Happened::default()
    });
    happened.deletions.extend(beside.deletions);
    happened.notes.extend(beside.notes);
    happened.is_beside_undone = beside.is_beside_undone;
    happened.begin = begin;
    happened.end = now();
    happened
}

/// A broker that is down closes no connections: then they are closed the moment it is back.
async fn insist(world: &World, crew: &Crew, fault: &Fault) -> Happened {
    let begin = Instant::now();
    loop {
        match do_to(world, crew, fault).await {
            Err(error) if begin.elapsed() > TRY_LIMIT => {
                let note = format!("{fault}: could not be done: {error:#}");
                return Happened {
                    notes: vec![note],
                    is_beside_undone: true,
                    ..Happened::default()
                };
            }
            Err(_) => sleep(Duration::from_millis(200)).await,
            Ok(mut happened) => {
                let late = begin.elapsed();
                if late > Duration::from_secs(4) {
                    let late = late.as_secs_f64();
                    happened
                        .notes
                        .push(format!("{fault}: done {late:.1} s late"));
                }
                return happened;
            }
        }
    }
}

async fn do_to(world: &World, crew: &Crew, fault: &Fault) -> Result<Happened> {
    let mut happened = Happened::default();
    match *fault {
        Fault::Killed(member) => crew.kill(member),
        Fault::WorkerPaused { worker, seconds } => {
            crew.pause(worker, Duration::from_secs(seconds));
        }
        Fault::NodeLost { node, seconds } => {
            // What is gone is on record, also where the rest fails.
            happened.failed = lose(world, node, seconds, &mut happened).await.err();
        }
        Fault::NodeKilled { node, seconds } => {
            let accepted = kill(world.node(node), seconds).await?;
            happened.accepted.push(accepted);
        }
        Fault::LeaderLost { tier, seconds } => {
            let leader = world.leader(tier).await?;
            happened.notes.push(format!("it was {}", leader.name()));
            happened.accepted.push(kill(leader, seconds).await?);
        }
        Fault::RollingRestart => {
            for node in world.nodes() {
                node.stop().await?;
                happened.accepted.push(start(node).await?);
            }
        }
        Fault::NodePaused { node, seconds } => {
            world.node(node).pause().await?;
            sleep(Duration::from_secs(seconds)).await;
            world.node(node).resume().await?;
        }
        Fault::ConnectionsClosed => {
            let close = async |node: &Node| node.close_all_connections().await;
            on_any(world, close).await?;
        }
        Fault::ChannelErrors => {
            let close = async |node: &Node| {
                let closing = node.rabbitmqctl(&["eval", BREAK_CHANNELS]);
                closing.await.map(drop)
            };
            on_any(world, close).await?;
        }
        Fault::MemoryAlarm { node, seconds } => {
            world.node(node).raise_memory_alarm().await?;
            sleep(Duration::from_secs(seconds)).await;
            world.node(node).clear_memory_alarm().await?;
        }
        Fault::QueueDeleted { tier } => {
            let held = world.delete_queue(tier).await?;
            // From here on no error may have it be deleted again: it would not be on record.
            happened.gone(world, tier, now(), held).await;
        }
        Fault::PostgresStopped { crash, seconds } => {
            match crash {
                true => world.postgres.kill().await?,
                false => world.postgres.stop().await?,
            }
            sleep(Duration::from_secs(seconds)).await;
            world.postgres.start().await?;
        }
        Fault::Network {
            trouble,
            way,
            seconds,
        } => {
            let network = match trouble {
                Trouble::Cut => Network::Cut,
                Trouble::Silent => Network::Silent,
                Trouble::HalfOpen => Network::HalfOpen,
                Trouble::Slow => Network::Slow(SLOWNESS),
            };
            world.disturb(way, network);
            sleep(Duration::from_secs(seconds)).await;
            world.disturb(way, Network::Good);
        }
    }
    Ok(happened)
}

impl Happened {
    /// The queue of a tier is gone since then, with so many messages; waits until it is declared again.
    async fn gone(&mut self, world: &World, tier: &str, at: Millis, held: u64) {
        let back = match is_back(world, tier).await {
            true => "it is back",
            false => "it was not declared again",
        };
        let note = format!("{held} were in the queue of {tier}; {back}");
        self.notes.push(note);
        let tier = tier.to_owned();
        self.deletions.push(Deletion { tier, at, held });
    }
}

/// Ends a node and all that it has on its disk. What an operator does then: the others forget it, so
/// that its classic queues can be declared again, and a new one takes its place.
async fn lose(world: &World, node: usize, seconds: u64, happened: &mut Happened) -> Result<()> {
    let gone = world.only_on(node).await?;
    let (lost, other) = (
        world.node(node),
        world.node((node + 1) % world.nodes().len()),
    );
    lost.kill().await?;
    let at = now();
    sleep(Duration::from_secs(seconds)).await;
    let forget = ["forget_cluster_node", lost.name()];
    other.rabbitmqctl(&forget).await?;
    for (tier, held) in gone {
        happened.gone(world, tier, at, held).await;
    }
    lost.forget_all()?;
    lost.join(other)?;
    happened.accepted.push(start(lost).await?);
    Ok(())
}

/// Does something on the first node that can: each speaks for the whole cluster.
async fn on_any(world: &World, work: impl AsyncFn(&Node) -> Result<()>) -> Result<()> {
    let mut failed = None;
    for node in world.nodes() {
        match work(node).await {
            Ok(()) => return Ok(()),
            Err(error) => failed = Some(error),
        }
    }
    Err(failed.context("no node")?)
}

async fn kill(node: &Node, seconds: u64) -> Result<Millis> {
    node.kill().await?;
    sleep(Duration::from_secs(seconds)).await;
    start(node).await
}

/// Starts a node. When it took connections, which is before all of it has started.
async fn start(node: &Node) -> Result<Millis> {
    let accepting = async {
        node.until_accepting().await?;
        anyhow::Ok(now())
    };
    let ((), accepted) = tokio::try_join!(node.start(), accepting)?;
    Ok(accepted)
}

/// Waits until the system has declared a tier's queue again. Whether it has.
async fn is_back(world: &World, tier: &str) -> bool {
    let begin = Instant::now();
    while !world.has_queue(tier).await.unwrap_or(false) {
        if begin.elapsed() > TRY_LIMIT {
            return false;
        }
        sleep(Duration::from_millis(200)).await;
    }
    // Else a kill of its node within half a second would cost it.
    let _ = world.flush_declarations().await;
    true
}
