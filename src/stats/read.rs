//! Asks the servers, all at once and in a bounded time.

use std::time::{Duration, SystemTime};

use tokio::time::Instant;

use super::assemble::{Assembly, WINDOW};
use super::known::Known;
#[cfg(feature = "management")]
use super::known::ManagedQueue;
use super::report::{ScheduleStats, Stats, StatsProblem, StatsServer};
use crate::Error;
use crate::amqp::QueueState;
use crate::backlog::tier_depths;
use crate::control::{in_force, processes, saturated_tiers};
use crate::dead::count_by_tier;
use crate::error::{DatabaseError, ErrorKind};
use crate::postgres::{Database, DedicatedConnection, PgConnection};
use crate::publish::{Publisher, PublisherStatus};
use crate::rollup::recent;
use crate::schedule::overview;
use crate::topology::Topology;

/// How long the servers may take to answer.
const LIMIT: Duration = Duration::from_millis(1_800);
/// The time of error budgets.
const BUDGET: Duration = Duration::from_secs(86_400);
/// A table that is locked hides its own part, and leaves the others time. Behind a pooler this ends with each transaction.
const SETUP: &str = "SET statement_timeout = '600ms'; SET jit = off";

/// What statistics are read from.
pub(crate) struct Sources<'a> {
    pub(crate) topology: &'a Topology,
    pub(crate) database: &'a Database,
    pub(crate) publisher: &'a Publisher,
    /// The management API, and the virtual host of the app.
    #[cfg(feature = "management")]
    pub(crate) management: Option<(&'a crate::amqp::Management, &'a str)>,
}

/// The statistics of an app.
pub(crate) async fn stats(sources: Sources<'_>) -> Stats {
    let (at, begin) = (SystemTime::now(), Instant::now());
    let topology = sources.topology;
    let known = sources.read(begin + LIMIT).await;
    let assembly = Assembly {
        topology,
        known: &known,
    };
    let tiers = topology.tiers().iter().map(|tier| assembly.tier(tier));
    let tiers: Vec<_> = tiers.collect();
    let groups = topology.groups().iter();
    Stats {
        app: topology.app().to_owned(),
        at,
        groups: groups.map(|group| assembly.group(group, &tiers)).collect(),
        tiers,
        paused_tasks: assembly.paused_tasks(),
        relays: assembly.relays(),
        took: begin.elapsed(),
        schedules: known.schedules,
        problems: known.problems,
    }
}

impl Sources<'_> {
    async fn read(&self, deadline: Instant) -> Known {
        let (broker, rows, others, managed) = tokio::join!(
            self.read_queues(deadline),
            self.read_rows(),
            self.read_others(deadline),
            self.read_managed(deadline),
        );
        let mut problems = broker.problems;
        // Both parts of the database say the same where it does not answer.
        for problem in rows
            .problems
            .into_iter()
            .chain(others.problems)
            .chain(managed.problems)
        {
            let is_known = problems.iter().any(|known| {
                known.server == problem.server && is_same(&known.problem, &problem.problem)
            });
            if !is_known {
                problems.push(problem);
            }
        }
        Known {
            queues: broker.queues,
            depths: rows.depths,
            managed: managed.managed,
            problems,
            ..others
        }
    }

    /// The queues of tiers, those that they had before, and those of their dead letters.
    async fn read_queues(&self, deadline: Instant) -> Known {
        let names = self.topology.names();
        let tiers = self.topology.tiers_using_broker();
        let queues = tiers.flat_map(|tier| {
            let own = tier.home.is_on_broker().then(|| names.queue(tier));
            let queues = own.into_iter().chain(names.former_queue(tier));
            let queues = queues.chain([names.dead_letter_queue(&tier.name)]);
            queues.map(|queue| (tier.name.as_str(), queue))
        });
        let queues = self.publisher.queue_states(queues, deadline).await;
        let mut problems = Vec::new();
        let needed = |queue: &str| {
            // What a tier had before it moved may be gone.
            let mut tiers = self.topology.broker_tiers();
            tiers.any(|tier| {
                queue == names.queue(tier) || queue == names.dead_letter_queue(&tier.name)
            })
        };
        let mut by_state = |is_it: fn(&Option<QueueState>) -> bool, what: &str| {
            let mut queues: Vec<&str> = queues
                .iter()
                .filter(|(queue, state)| {
                    is_it(state) && (**state != Some(QueueState::Missing) || needed(queue))
                })
                .map(|(queue, _)| queue.as_str())
                .collect();
            queues.sort_unstable();
            if !queues.is_empty() {
                problems.push(StatsProblem {
                    server: StatsServer::Broker,
                    problem: format!("{what} {}", queues.join(", ")),
                });
            }
        };
        let silent = match self.publisher.status() {
            PublisherStatus::Down(cause) => {
                format!("cannot reach the broker ({cause}), so it did not say what is in")
            }
            PublisherStatus::Blocked | PublisherStatus::Up => {
                format!("the broker did not say within {LIMIT:?} what is in")
            }
        };
        by_state(|state| state.is_none(), &silent);
        by_state(
            |state| *state == Some(QueueState::Unreachable),
            "these queues do not answer, because their node is down or they have no leader:",
        );
        by_state(
            |state| *state == Some(QueueState::NotAllowed),
            "the user has no permission on the queues",
        );
        by_state(
            |state| *state == Some(QueueState::Missing),
            "these queues are not there; apply the map:",
        );
        Known {
            queues,
            problems,
            ..Known::default()
        }
    }

    async fn read_rows(&self) -> Known {
        let tiers = self.topology.tiers().iter();
        let tiers: Vec<&str> = tiers.map(|tier| tier.name.as_str()).collect();
        let app = self.topology.app();
        match tier_depths(self.database, app, &tiers, LIMIT).await {
            Ok(depths) => Known {
                depths: Some(depths),
                ..Known::default()
            },
            Err(error) => Known {
                problems: vec![problem(StatsServer::Database, &error)],
                ..Known::default()
            },
        }
    }

    /// What is in small tables, one after the other on one connection.
    async fn read_others(&self, deadline: Instant) -> Known {
        let app = self.topology.app();
        let mut known = Known::default();
        let mut asking = Asking {
            connection: DedicatedConnection::with_setup(self.database, SETUP),
            deadline,
            is_away: false,
            lacks_tables: false,
            problems: Vec::new(),
        };
        known.processes = asking
            .ask("list the processes", async |it| {
                processes(it, self.topology).await
            })
            .await;
        known.controls = asking
            .ask("read the controls", async |it| in_force(it, app).await)
            .await;
        known.dead = asking
            .ask("count dead letters", async |it| {
                count_by_tier(it, self.topology).await
            })
            .await;
        known.recent = asking
            .ask("read the rollups", async |it| {
                recent(it, app, WINDOW, BUDGET).await
            })
            .await;
        known.saturated = asking
            .ask("read the shares of limits", async |it| {
                saturated_tiers(it, app).await
            })
            .await;
        let schedules = asking
            .ask("look at the schedules", async |it| overview(it, app).await)
            .await;
        known.schedules = schedules
            .filter(|found| found.count > 0)
            .map(|found| ScheduleStats {
                count: found.count,
                paused: found.paused,
                has_leader: found.has_leader,
                next_due: found.next_due,
            });
        known.problems = asking.problems;
        known
    }

    #[cfg(feature = "management")]
    async fn read_managed(&self, deadline: Instant) -> Known {
        let Some((management, virtual_host)) = self.management else {
            return Known::default();
        };
        let limit = deadline.saturating_duration_since(Instant::now());
        let mut known = Known::default();
        match management.queues_within(virtual_host, limit).await {
            Ok(queues) => {
                let number = |queue: &serde_json::Value, field: &str| {
                    queue[field].as_u64().unwrap_or_default()
                };
                let queues = queues.iter().filter_map(|queue| {
                    let managed = ManagedQueue {
                        in_flight: number(queue, "messages_unacknowledged"),
                        messages: number(queue, "messages"),
                    };
                    Some((queue["name"].as_str()?.to_owned(), managed))
                });
                known.managed = Some(queues.collect());
            }
            Err(error) => known
                .problems
                .push(problem(StatsServer::Management, &error)),
        }
        known
    }

    #[cfg(not(feature = "management"))]
    async fn read_managed(&self, _: Instant) -> Known {
        Known::default()
    }
}

/// Asks the database one question after the other.
struct Asking {
    connection: DedicatedConnection,
    deadline: Instant,
    /// A server that is away is not asked again.
    is_away: bool,
    /// Whether tables are missing, as the last answer said.
    lacks_tables: bool,
    problems: Vec<StatsProblem>,
}

impl Asking {
    async fn ask<T>(
        &mut self,
        tried: &str,
        question: impl AsyncFnOnce(&mut PgConnection<'_>) -> Result<T, sqlx::Error>,
    ) -> Option<T> {
        if self.is_away {
            return None;
        }
        let limit = self.deadline.saturating_duration_since(Instant::now());
        match self.connection.within(limit, tried, question).await {
            Ok(answer) => Some(answer),
            Err(error) => {
                self.is_away = matches!(
                    error,
                    Error::Database(
                        DatabaseError::Unreachable { .. }
                            | DatabaseError::LoginRefused { .. }
                            | DatabaseError::TransactionPooler { .. }
                    )
                );
                // One migration that is missing is said once, and no further question depends on it.
                let is_known =
                    std::mem::replace(&mut self.lacks_tables, error.kind() == ErrorKind::Mismatch);
                if !is_known || !self.lacks_tables {
                    self.problems.push(problem(StatsServer::Database, &error));
                }
                None
            }
        }
    }
}

fn problem(server: StatsServer, error: &Error) -> StatsProblem {
    StatsProblem {
        server,
        problem: error.to_string(),
    }
}

/// Whether two problems have the same cause: what was tried comes first, then where, and then the cause.
fn is_same(one: &str, other: &str) -> bool {
    let cause = |text: &str| text.split_once(" in ").map(|(_, cause)| cause.to_owned());
    one == other || cause(one).is_some() && cause(one) == cause(other)
}
