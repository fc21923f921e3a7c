//! What the broker had for a tier beside its queue: delays, dead letters, quarantine.

use std::time::Duration;

use tokio::time::sleep;

use super::queue::SHOW_HELD;
use super::{Mode, Mover, Step, count, waiting};
use crate::Error;
use crate::amqp::former::{Looked, delete_exchanges, delete_queue, look};
use crate::topology::{QueueType, Tier, Topology};

/// How often, and how far apart, queues are looked at before they are taken for empty. A message on its way from one
/// delay queue to the next is counted by neither, for some milliseconds.
const LOOKS: u32 = 3;
const LOOK_AGAIN: Duration = Duration::from_millis(700);

/// Queues of one purpose.
struct Queues {
    /// What they are for, in words.
    what: String,
    queues: Vec<String>,
    exchanges: Vec<String>,
    /// Whether their consumers may hold messages of them that would be lost with them.
    is_consumed: bool,
    /// What happens to the messages in them.
    help: &'static str,
}

impl Mover<'_> {
    /// Deletes what the broker had for a tier that is in Postgres now, if nothing is in it. `is_queue_gone`: whether
    /// nothing can come into it from the tier's queue any more.
    pub(super) async fn leftovers(
        &self,
        tier: &Tier,
        mode: Mode,
        is_queue_gone: bool,
    ) -> Result<Vec<Step>, Error> {
        if tier.home.is_on_broker() {
            // Another generation uses the same ones.
            return Ok(vec![self.delayed(tier).await?]);
        }
        let mut steps = Vec::new();
        for queues in self.own(tier) {
            let may_delete = is_queue_gone && mode == Mode::Change;
            steps.push(self.end_queues(tier, queues, may_delete).await?);
        }
        for (queues, exchanges) in self.shared(tier) {
            steps.extend(self.kept(tier, &queues, &exchanges).await?);
        }
        Ok(steps)
    }

    /// Says how many messages are delayed. When the old queue is gone, they find their way to the new one.
    async fn delayed(&self, tier: &Tier) -> Result<Step, Error> {
        let names = self.topology.names();
        let (messages, _) = self.messages(tier, &names.delay_levels(&tier.name)).await?;
        Ok(Step::done(match messages {
            0 => "no message waits in its delay queues".to_owned(),
            messages => format!(
                "{} in its delay queues; those for the old queue reach the tier through {}, which workers empty",
                waiting(messages),
                names.unrouted()
            ),
        }))
    }

    /// The queues that the tier alone had.
    fn own(&self, tier: &Tier) -> [Queues; 2] {
        let names = self.topology.names();
        let levels = names.delay_levels(&tier.name);
        let out = names.delay_out(&tier.name);
        [
            Queues {
                what: format!("delay queues {}", level_names(&levels)),
                exchanges: levels.iter().cloned().chain([out]).collect(),
                queues: levels,
                is_consumed: false,
                help: "they reach the tier when they are due, at the latest in half an hour; run this again then",
            },
            Queues {
                what: format!("queue {}", names.dead_letter_queue(&tier.name)),
                queues: vec![names.dead_letter_queue(&tier.name)],
                exchanges: vec![names.dead_letter_exchange(&tier.name)],
                is_consumed: true,
                help: "a collector with this file logs them; run this again when it has",
            },
        ]
    }

    /// The queues that it shared with other tiers, none of which is on the broker any more, and what else goes with them.
    /// They are never deleted here, so it does not matter what their consumers hold.
    fn shared(&self, tier: &Tier) -> Vec<(Queues, String)> {
        let (topology, names) = (self.topology, self.topology.names());
        let mut shared = Vec::new();
        let group = topology
            .groups()
            .iter()
            .find(|group| group.tiers.contains(&tier.name));
        if let Some(group) = group
            && !group.tiers.iter().any(|it| topology.is_on_broker(it))
        {
            let queues = Queues {
                what: format!("quarantine {}", names.quarantine(&group.name)),
                queues: vec![names.quarantine(&group.name)],
                exchanges: Vec::new(),
                is_consumed: false,
                help: "workers with this file take them; run this again when it is empty",
            };
            shared.push((queues, String::new()));
        }
        if !has_broker_tier(topology) {
            let mut queues = names.long_delay_levels();
            let what = format!(
                "delay queues {} and queue {}",
                level_names(&queues),
                names.unrouted()
            );
            queues.push(names.unrouted());
            let exchanges = format!(
                ", the exchanges of the same names and the exchange {}",
                names.tasks_exchange()
            );
            let queues = Queues {
                what,
                queues,
                exchanges: Vec::new(),
                is_consumed: false,
                help: "workers with formerly in their file send them to their tiers when they are due, in up to 30 \
                       days; keep formerly until then",
            };
            shared.push((queues, exchanges));
        }
        shared
    }

    /// Deletes queues and exchanges that are empty.
    async fn end_queues(
        &self,
        tier: &Tier,
        queues: Queues,
        may_delete: bool,
    ) -> Result<Step, Error> {
        let what = &queues.what;
        if let Some(step) = self.obstacle(tier, &queues).await? {
            return Ok(step);
        }
        let (_, found) = self.messages(tier, &queues.queues).await?;
        let connection = self.need_broker(tier)?;
        if found.is_empty() {
            if may_delete {
                delete_exchanges(connection, &queues.exchanges).await?;
            }
            return Ok(Step::done(format!("{what}: gone")));
        }
        if !may_delete {
            return Ok(Step::possible(format!(
                "{what}: empty, and deleted after the tier's queue"
            )));
        }
        for queue in &found {
            // Of either type: it was empty at every look. Collectors may consume from it.
            delete_queue(connection, queue, QueueType::Quorum).await?;
        }
        delete_exchanges(connection, &queues.exchanges).await?;
        Ok(Step::done(format!("{what}: empty, and deleted")))
    }

    /// Says that shared queues stay on the broker, or what is in them.
    async fn kept(
        &self,
        tier: &Tier,
        queues: &Queues,
        exchanges: &str,
    ) -> Result<Option<Step>, Error> {
        if let Some(step) = self.obstacle(tier, queues).await? {
            return Ok(Some(step));
        }
        let (_, found) = self.messages(tier, &queues.queues).await?;
        if found.is_empty() {
            return Ok(None);
        }
        let what = &queues.what;
        Ok(Some(Step::done_with_help(
            format!(
                "{what}: empty, and not deleted, because processes with formerly in their file use it"
            ),
            format!(
                "when no such process is left, and it is still empty, delete by hand: {what}{exchanges}"
            ),
        )))
    }

    /// The messages in queues that must be empty.
    async fn obstacle(&self, tier: &Tier, queues: &Queues) -> Result<Option<Step>, Error> {
        let look_again = match queues.is_consumed {
            true => self.look_again(),
            false => LOOK_AGAIN,
        };
        for number in 0..LOOKS {
            if number > 0 {
                sleep(look_again).await;
            }
            let (messages, found) = self.messages(tier, &queues.queues).await?;
            if messages > 0 {
                let what = format!("{}: {}", queues.what, waiting(messages));
                return Ok(Some(Step::waits(what, queues.help)));
            }
            if found.is_empty() {
                break;
            }
            if queues.is_consumed
                && let Some(step) = self.held(tier, queues, &found).await?
            {
                return Ok(Some(step));
            }
        }
        Ok(None)
    }

    /// The messages of empty queues that consumers hold, or may hold: if a collector died after its queue is deleted, its
    /// dead letters would be lost.
    async fn held(
        &self,
        tier: &Tier,
        queues: &Queues,
        found: &[String],
    ) -> Result<Option<Step>, Error> {
        let what = &queues.what;
        for queue in found {
            match self.unacknowledged(tier, queue).await? {
                Some(0) => {}
                Some(held) => {
                    let what = format!("{what}: {} not acknowledged", count(held, "message"));
                    return Ok(Some(Step::waits(what, queues.help)));
                }
                None => {
                    let what = format!("{what}: empty, but collectors may hold messages of it");
                    return Ok(Some(Step::waits(what, SHOW_HELD)));
                }
            }
        }
        Ok(None)
    }

    /// How many messages the queues have in all, and which of them are there.
    async fn messages(&self, tier: &Tier, queues: &[String]) -> Result<(u64, Vec<String>), Error> {
        let looked = look(self.need_broker(tier)?, queues).await?;
        let mut all = 0;
        let mut found = Vec::new();
        for (queue, looked) in queues.iter().zip(looked) {
            match looked {
                Looked::Missing => {}
                Looked::Found { messages, .. } => {
                    all += u64::from(messages);
                    found.push(queue.clone());
                }
                // It may have messages: as if it had one.
                Looked::Unreachable => {
                    all += 1;
                    found.push(queue.clone());
                }
            }
        }
        Ok((all, found))
    }
}

fn has_broker_tier(topology: &Topology) -> bool {
    topology.broker_tiers().next().is_some()
}

/// `hotel.delay.bulk.*`
fn level_names(levels: &[String]) -> String {
    let first = levels.first().map(String::as_str).unwrap_or_default();
    let ladder = first.rsplit_once('.').map_or(first, |(ladder, _)| ladder);
    format!("{ladder}.*")
}
