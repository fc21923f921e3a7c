//! The plan of faults: pure, and the same for the same seed.

use std::fmt;
use std::time::Duration;

use crate::random::Random;
use crate::roles::TIERS;

/// A fault. Each heals itself, at the latest after the seconds it names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    /// `kill -9` of a process, which is restarted at once.
    Killed(Member),
    /// `SIGSTOP` of a worker, until the broker has closed its connection. The run does not wait for its end.
    WorkerPaused { worker: usize, seconds: u64 },
    /// `kill -9` of a node; it comes back after a while.
    NodeKilled { node: usize, seconds: u64 },
    /// `kill -9` of the node that leads the quorum queue of a tier.
    LeaderLost { tier: &'static str, seconds: u64 },
    /// `kill -9` of a node of a cluster, whose disk is gone too. An empty one takes its place after a
    /// while.
    NodeLost { node: usize, seconds: u64 },
    /// Every node is shut down and started, one after the other.
    RollingRestart,
    /// `SIGSTOP`, then `SIGCONT`.
    NodePaused { node: usize, seconds: u64 },
    /// The broker closes all connections.
    ConnectionsClosed,
    /// The broker closes all channels with an error.
    ChannelErrors,
    /// A memory alarm: a node stops reading from publishers.
    MemoryAlarm { node: usize, seconds: u64 },
    /// A tier's queue is deleted with its messages.
    QueueDeleted { tier: &'static str },
    /// Postgres is shut down, or crashes.
    PostgresStopped { crash: bool, seconds: u64 },
    /// The network to all nodes, or to one, or to Postgres is disturbed.
    Network {
        trouble: Trouble,
        way: Way,
        seconds: u64,
    },
}

/// A process that can be killed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Member {
    Worker(usize),
    Collector,
    Scheduler,
    Producer,
}

/// How many workers there are.
pub(crate) const WORKERS: usize = 2;

/// The disturbance of a network.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Trouble {
    Cut,
    Silent,
    HalfOpen,
    Slow,
}

/// The connections that are disturbed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Way {
    AllNodes,
    Node(usize),
    Postgres,
}

/// A fault, the quiet time before it, and a second fault during it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Step {
    pub(crate) quiet: Duration,
    pub(crate) fault: Fault,
    pub(crate) beside: Option<(Duration, Fault)>,
}

/// The steps of a run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Plan {
    pub(crate) steps: Vec<Step>,
}

/// From this duration on a run has every kind of fault.
const FULL: Duration = Duration::from_secs(120);
/// How long a node takes to come back, for the estimate.
const NODE_START: u64 = 9;
/// Below this there is no time for another fault.
const SHORTEST: u64 = 6;

impl Plan {
    /// Every kind of fault once, in an order that the seed decides, and then again until the time is
    /// used up. A shorter run has those that fit. A cluster loses a node at the end.
    pub(crate) fn new(seed: u64, nodes: usize, length: Duration) -> Plan {
        let mut random = Random::new(seed);
        let is_full = length >= FULL;
        let pause = if is_full { 30 } else { length.as_secs() / 4 };
        let mut left = length.as_secs();
        let mut steps = Vec::new();
        for round in 0.. {
            let mut lights = lights(&mut random);
            let before = steps.len();
            for fault in heavies(&mut random, nodes, pause.max(1)) {
                let quiet = random.between(1_000, 3_000);
                let cost = fault.cost(nodes) + 2;
                if !(is_full && round == 0) && cost > left {
                    continue;
                }
                left = left.saturating_sub(cost);
                let moment = Duration::from_millis(random.between(0, 3_000));
                let beside = take_fitting(&mut lights, &fault).map(|light| (moment, light));
                steps.push(Step {
                    quiet: Duration::from_millis(quiet),
                    fault,
                    beside,
                });
            }
            if left < SHORTEST || steps.len() == before {
                break;
            }
        }
        if is_full && nodes > 1 {
            steps.push(loss(&mut random, nodes));
        }
        Plan { steps }
    }

    /// The steps whose text contains `text`.
    pub(crate) fn only(mut self, text: &str) -> Plan {
        self.steps
            .retain(|step| step.fault.to_string().contains(text));
        self
    }
}

/// Faults with a duration, in any order.
fn heavies(random: &mut Random, nodes: usize, pause: u64) -> Vec<Fault> {
    let mut short = || random.between(2, 6).min(pause);
    let seconds = [short(), short(), short(), short(), short(), short()];
    let node = [
        random.below(nodes),
        random.below(nodes),
        random.below(nodes),
    ];
    let mut faults = vec![
        Fault::NodeKilled {
            node: node[0],
            seconds: random.between(0, 2),
        },
        Fault::RollingRestart,
        Fault::NodePaused {
            node: node[1],
            seconds: pause,
        },
        Fault::MemoryAlarm {
            node: node[2],
            seconds: seconds[0],
        },
        Fault::PostgresStopped {
            crash: random.below(2) == 0,
            seconds: seconds[1],
        },
    ];
    let troubles = [
        Trouble::Cut,
        Trouble::Silent,
        Trouble::HalfOpen,
        Trouble::Slow,
    ];
    for (trouble, seconds) in troubles.into_iter().zip(&seconds[2..]) {
        let ways = [
            Way::AllNodes,
            Way::AllNodes,
            Way::Node(random.below(nodes)),
            Way::Postgres,
        ];
        faults.push(Fault::Network {
            trouble,
            way: random.one_of(&ways),
            seconds: *seconds,
        });
    }
    if nodes > 1 {
        faults.push(Fault::LeaderLost {
            tier: random.one_of(&["normal", "low"]),
            seconds: random.between(0, 2),
        });
    }
    random.shuffle(&mut faults);
    faults
}

/// The loss of a node with its disk, and the kill of a worker with it.
fn loss(random: &mut Random, nodes: usize) -> Step {
    let worker = Fault::Killed(Member::Worker(random.below(WORKERS)));
    Step {
        quiet: Duration::from_millis(random.between(1_000, 3_000)),
        fault: Fault::NodeLost {
            node: random.below(nodes),
            seconds: random.between(2, 6),
        },
        beside: Some((Duration::from_millis(random.between(0, 3_000)), worker)),
    }
}

/// Momentary faults, which happen during those with a duration.
fn lights(random: &mut Random) -> Vec<Fault> {
    let tier = random.one_of(&TIERS);
    let worker = random.below(WORKERS);
    let mut faults = vec![
        Fault::Killed(Member::Worker(worker)),
        Fault::Killed(Member::Worker(WORKERS - 1 - worker)),
        Fault::Killed(Member::Collector),
        Fault::Killed(Member::Scheduler),
        Fault::Killed(Member::Producer),
        Fault::WorkerPaused {
            worker: random.below(WORKERS),
            seconds: random.between(22, 32),
        },
        Fault::ConnectionsClosed,
        Fault::ChannelErrors,
        Fault::QueueDeleted { tier },
    ];
    random.shuffle(&mut faults);
    faults
}

/// A quorum queue that is declared in the half second before its node dies never works again
/// (RabbitMQ 3.10.8): no queue is deleted while nodes come and go.
fn take_fitting(lights: &mut Vec<Fault>, heavy: &Fault) -> Option<Fault> {
    let is_fitting =
        |light: &Fault| !(matches!(light, Fault::QueueDeleted { .. }) && heavy.ends_nodes());
    let found = lights.iter().position(is_fitting)?;
    Some(lights.remove(found))
}

impl Fault {
    /// Whether nodes come back in it, so that the recovery time is of interest.
    pub(crate) fn ends_nodes(&self) -> bool {
        matches!(
            self,
            Fault::NodeKilled { .. } | Fault::LeaderLost { .. } | Fault::RollingRestart
        )
    }

    /// How many seconds it takes, about.
    fn cost(&self, nodes: usize) -> u64 {
        match self {
            Fault::NodeKilled { seconds, .. }
            | Fault::LeaderLost { seconds, .. }
            | Fault::NodeLost { seconds, .. } => NODE_START + seconds,
            Fault::RollingRestart => (NODE_START + 3) * nodes as u64,
            Fault::NodePaused { seconds, .. }
            | Fault::MemoryAlarm { seconds, .. }
            | Fault::PostgresStopped { seconds, .. }
            | Fault::Network { seconds, .. } => *seconds + 1,
            _ => 1,
        }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Fault::Killed(Member::Worker(number)) => {
                write!(out, "kill -9 of worker {}", number + 1)
            }
            Fault::Killed(Member::Collector) => write!(out, "kill -9 of the collector"),
            Fault::Killed(Member::Scheduler) => write!(out, "kill -9 of the scheduler"),
            Fault::Killed(Member::Producer) => write!(out, "kill -9 of the producer"),
            Fault::NodeKilled { node, seconds } => {
                write!(out, "kill -9 of node {}, gone {seconds} s", name(*node))
            }
            Fault::WorkerPaused { worker, seconds } => {
                write!(out, "SIGSTOP of worker {} for {seconds} s", worker + 1)
            }
            Fault::NodeLost { node, seconds } => {
                let node = name(*node);
                write!(
                    out,
                    "node {node} lost with its disk, replaced after {seconds} s"
                )
            }
            Fault::LeaderLost { tier, seconds } => {
                write!(out, "kill -9 of the leader of {tier}, gone {seconds} s")
            }
            Fault::RollingRestart => write!(out, "rolling restart"),
            Fault::NodePaused { node, seconds } => {
                write!(out, "SIGSTOP of node {} for {seconds} s", name(*node))
            }
            Fault::ConnectionsClosed => write!(out, "all connections closed"),
            Fault::ChannelErrors => write!(out, "all channels closed with an error"),
            Fault::MemoryAlarm { node, seconds } => {
                write!(out, "memory alarm on node {} for {seconds} s", name(*node))
            }
            Fault::QueueDeleted { tier } => write!(out, "queue of {tier} deleted"),
            Fault::PostgresStopped { crash, seconds } => {
                let how = if *crash { "crashed" } else { "stopped" };
                write!(out, "Postgres {how}, gone {seconds} s")
            }
            Fault::Network {
                trouble,
                way,
                seconds,
            } => write!(out, "network to {way} {trouble} for {seconds} s"),
        }
    }
}

impl fmt::Display for Trouble {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            Trouble::Cut => "cut",
            Trouble::Silent => "silent",
            Trouble::HalfOpen => "half-open",
            Trouble::Slow => "slow",
        })
    }
}

impl fmt::Display for Way {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Way::AllNodes => write!(out, "all nodes"),
            Way::Node(node) => write!(out, "node {}", name(*node)),
            Way::Postgres => write!(out, "Postgres"),
        }
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (number, step) in self.steps.iter().enumerate() {
            let quiet = step.quiet.as_secs_f64();
            write!(out, "{:>4}. after {quiet:.1} s: {}", number + 1, step.fault)?;
            if let Some((moment, beside)) = &step.beside {
                write!(out, "; {:.1} s into it: {beside}", moment.as_secs_f64())?;
            }
            writeln!(out)?;
        }
        Ok(())
    }
}

fn name(node: usize) -> char {
    char::from(b'a' + node as u8)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_seed_gives_the_same_plan_and_another_one_another() {
        let plan = |seed| Plan::new(seed, 3, FULL);
        assert_eq!(plan(7), plan(7));
        assert_ne!(plan(7), plan(8));
    }

    #[test]
    fn a_run_of_two_minutes_has_every_kind_of_fault() {
        for seed in 0..50 {
            let plan = Plan::new(seed, 3, FULL);
            let text = plan.to_string();
            for kind in [
                "of worker 1",
                "of worker 2",
                "of the collector",
                "of the scheduler",
                "of the producer",
                "kill -9 of node",
                "kill -9 of the leader",
                "rolling restart",
                "SIGSTOP of node",
                "SIGSTOP of worker",
                "lost with its disk",
                "all connections closed",
                "all channels closed",
                "memory alarm",
                "deleted",
                "Postgres",
                " cut ",
                " silent ",
                " half-open ",
                " slow ",
            ] {
                assert!(text.contains(kind), "seed {seed} has no {kind}:\n{text}");
            }
        }
    }

    #[test]
    fn a_short_run_is_short_and_not_empty() {
        for seed in 0..50 {
            let plan = Plan::new(seed, 1, Duration::from_secs(12));
            let cost: u64 = plan.steps.iter().map(|step| step.fault.cost(1) + 2).sum();
            assert!(!plan.steps.is_empty() && cost <= 12, "seed {seed}: {plan}");
        }
    }
}
