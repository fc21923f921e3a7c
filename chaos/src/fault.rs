//! Injects faults, and heals them.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use tierline_testbed::{Network, Node};
use tokio::time::sleep;

use crate::crew::Crew;
use crate::ledger::{Millis, now};
use crate::plan::{Fault, Step, Trouble};
use crate::verdict::Deletion;
use crate::world::World;

/// The delay that a slow network adds to each chunk.
const SLOWNESS: Duration = Duration::from_millis(300);
/// How long a fault is retried that the state of the broker does not allow yet.
const TRY_LIMIT: Duration = Duration::from_secs(90);

/// Makes every channel of the broker declare a missing queue passively, as if its client had: the broker
/// closes the channel with an error.
const BREAK_CHANNELS: &str = "[Channel ! {'$gen_cast', {method, {'queue.declare', 0, <<\"none\">>, true, \
     false, false, false, false, []}, none, noflow}} || Channel <- rabbit_channel:list()].";

/// The faults of a step, and their times.
#[derive(Debug, Default)]
pub(crate) struct Happened {
    pub(crate) begin: Millis,
    pub(crate) end: Millis,
    /// When nodes that were gone accepted connections again.
    pub(crate) accepted: Vec<Millis>,
    pub(crate) deletions: Vec<Deletion>,
    pub(crate) notes: Vec<String>,
    /// Whether the second fault of the step could not be injected.
    pub(crate) is_beside_undone: bool,
    /// Why the fault could not be injected, or not be healed.
    pub(crate) failed: Option<anyhow::Error>,
}

/// Runs a step. Afterwards everything is healed, unless the step failed.
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

/// A broker that is down closes no connections: they are closed the moment it is back.
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
            // The deletion is recorded even if the rest fails.
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
            // After this, an error must not delete it again: that deletion would not be recorded.
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
    /// Records that the queue of a tier is gone, with its number of messages; waits until it is declared again.
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

/// Removes a node with its disk. Then it does what an operator would: the others forget the node, so
/// that its classic queues can be declared again, and a new one replaces it.
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

/// Runs a command on the first node that can: each speaks for the whole cluster.
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

/// Starts a node. Returns when it accepted connections, which is before it has fully started.
async fn start(node: &Node) -> Result<Millis> {
    let accepting = async {
        node.until_accepting().await?;
        anyhow::Ok(now())
    };
    let ((), accepted) = tokio::try_join!(node.start(), accepting)?;
    Ok(accepted)
}

/// Waits until the system has declared a tier's queue again. Returns whether it has.
async fn is_back(world: &World, tier: &str) -> bool {
    let begin = Instant::now();
    while !world.has_queue(tier).await.unwrap_or(false) {
        if begin.elapsed() > TRY_LIMIT {
            return false;
        }
        sleep(Duration::from_millis(200)).await;
    }
    // Otherwise a kill of its node within half a second would lose it.
    let _ = world.flush_declarations().await;
    true
}
