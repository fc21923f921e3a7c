//! Accounts for every confirmed task: pure.

use std::collections::{BTreeMap, HashMap, HashSet};

use crate::ledger::{Entry, Fact, Millis};

/// A tier's queue that a fault deleted, or whose only node never comes back.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Deletion {
    pub(crate) tier: String,
    /// When it was deleted.
    pub(crate) at: Millis,
    /// How many messages the broker said were in it.
    pub(crate) held: u64,
}

/// A dead letter in the log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Letter {
    pub(crate) id: String,
    pub(crate) task: String,
    pub(crate) reason: String,
}

/// The evidence at the end of a run.
#[derive(Debug, Default)]
pub(crate) struct Evidence {
    pub(crate) entries: Vec<Entry>,
    pub(crate) letters: Vec<Letter>,
    pub(crate) deletions: Vec<Deletion>,
}

/// The account of all confirmed tasks.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Verdict {
    pub(crate) confirmed: usize,
    /// Confirmed tasks that ran to their end at least once.
    pub(crate) executed: usize,
    /// Tasks that ran to their end more than once, and the number of surplus runs.
    pub(crate) repeated: usize,
    pub(crate) too_many: usize,
    /// Confirmed tasks in the log of dead letters that never ran to their end.
    pub(crate) dead: usize,
    /// Dead letters with the reason `crash loop`. No task kills its worker, so there must be none.
    pub(crate) crash_loops: usize,
    /// Dead letters of tasks that were not meant to fail: task and reason.
    pub(crate) unexpected: BTreeMap<String, usize>,
    pub(crate) expired: usize,
    /// The longest time from a confirm to the end of the first run, in milliseconds.
    pub(crate) slowest: Millis,
    /// Tasks that ran although their publish ended in an error, or its end is unknown.
    pub(crate) unconfirmed: usize,
    /// Publishes that ended in an error, by its kind.
    pub(crate) refused: BTreeMap<String, usize>,
    /// Tasks in a queue that was deleted.
    pub(crate) deleted: usize,
    /// All others: there must be none.
    pub(crate) lost: Vec<Lost>,
}

/// A confirmed task without an end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Lost {
    pub(crate) id: String,
    pub(crate) tier: String,
    pub(crate) confirmed: Millis,
    pub(crate) failed: bool,
}

/// How long after a deletion the ledger may record a confirm of a message that was in the queue, or on
/// its way to it: RabbitMQ confirms that too. A disturbed network delays confirms for up to 6 s.
const WRITTEN_AFTER: Millis = 8_000;
/// How long before a deletion a task may have been sent that was in the queue. An older missing task was
/// lost in another way.
const SENT_BEFORE: Millis = 60_000;
/// Messages of a deleted queue beyond the broker's count: unacknowledged deliveries of two workers
/// (40 slots' worth in a quorum tier) and publishes in flight.
const UNACKNOWLEDGED: u64 = 50;

/// The reason of a dead letter whose workers died.
const CRASHED: &str = "crash loop";

/// Compares confirmed tasks with ended ones.
pub(crate) fn judge(evidence: &Evidence) -> Verdict {
    let mut verdict = Verdict::default();
    let mut confirmed: BTreeMap<&str, (Millis, &str, Millis)> = BTreeMap::new();
    let mut ran: HashMap<&str, usize> = HashMap::new();
    let mut first_run: HashMap<&str, Millis> = HashMap::new();
    let mut failed: HashSet<&str> = HashSet::new();
    let mut expired: HashSet<&str> = HashSet::new();
    for Entry { at, id, fact } in &evidence.entries {
        match fact {
            Fact::Confirmed { tier, sent } => {
                confirmed.entry(id).or_insert((*at, tier, *sent));
            }
            Fact::Refused { why } => *verdict.refused.entry(why.clone()).or_default() += 1,
            Fact::Ran { .. } => {
                *ran.entry(id).or_default() += 1;
                first_run.entry(id).or_insert(*at);
            }
            Fact::Failed => drop(failed.insert(id)),
            Fact::Expired => drop(expired.insert(id)),
        }
    }
    let dead: HashSet<&str> = evidence.letters.iter().map(|it| it.id.as_str()).collect();
    let mut deleted_queues = DeletedQueues::new(&evidence.deletions);
    verdict.confirmed = confirmed.len();
    for (id, (at, tier, sent)) in &confirmed {
        if let Some(first) = first_run.get(id) {
            verdict.executed += 1;
            verdict.slowest = verdict.slowest.max(first.saturating_sub(*at));
        } else if dead.contains(id) {
            verdict.dead += 1;
        } else if expired.contains(id) {
            verdict.expired += 1;
        } else if deleted_queues.take(tier, *sent, *at) {
            verdict.deleted += 1;
        } else {
            verdict.lost.push(Lost {
                id: (*id).to_owned(),
                tier: (*tier).to_owned(),
                confirmed: *at,
                failed: failed.contains(id),
            });
        }
    }
    verdict.unconfirmed = ran.keys().filter(|id| !confirmed.contains_key(*id)).count();
    verdict.repeated = ran.values().filter(|runs| **runs > 1).count();
    verdict.too_many = ran.values().map(|runs| runs - 1).sum();
    let crashed = evidence.letters.iter().filter(|it| it.reason == CRASHED);
    verdict.crash_loops = crashed.count();
    for letter in evidence.letters.iter().filter(|it| it.task != "doomed") {
        let what = format!("{} ({})", letter.task, letter.reason);
        *verdict.unexpected.entry(what).or_default() += 1;
    }
    verdict
}

/// The deleted queues, and how many more tasks each of them can account for.
struct DeletedQueues<'a>(Vec<(&'a Deletion, u64)>);

impl<'a> DeletedQueues<'a> {
    fn new(deletions: &'a [Deletion]) -> Self {
        let capacity = |deletion: &'a Deletion| (deletion, deletion.held + UNACKNOWLEDGED);
        Self(deletions.iter().map(capacity).collect())
    }

    /// Whether a task may have been in one of them.
    fn take(&mut self, tier: &str, sent: Millis, confirmed: Millis) -> bool {
        let fits = |(deletion, capacity): &&mut (&Deletion, u64)| {
            deletion.tier == tier
                && (deletion.at.saturating_sub(SENT_BEFORE)..=deletion.at).contains(&sent)
                && confirmed <= deletion.at + WRITTEN_AFTER
                && *capacity > 0
        };
        match self.0.iter_mut().find(fits) {
            Some((_, capacity)) => {
                *capacity -= 1;
                true
            }
            None => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn confirmed(id: &str, tier: &str, at: Millis) -> Entry {
        let (tier, sent) = (tier.to_owned(), at - 10);
        entry(id, at, Fact::Confirmed { tier, sent })
    }

    fn ran(id: &str, at: Millis) -> Entry {
        let tier = "normal".to_owned();
        entry(id, at, Fact::Ran { tier })
    }

    fn entry(id: &str, at: Millis, fact: Fact) -> Entry {
        let id = id.to_owned();
        Entry { at, id, fact }
    }

    fn letter(id: &str, task: &str) -> Letter {
        Letter {
            id: id.to_owned(),
            task: task.to_owned(),
            reason: "retries exhausted".to_owned(),
        }
    }

    fn lost(verdict: &Verdict) -> Vec<&str> {
        verdict.lost.iter().map(|lost| lost.id.as_str()).collect()
    }

    #[test]
    fn a_confirmed_task_must_run_or_be_a_dead_letter_or_expire() {
        let evidence = Evidence {
            entries: vec![
                confirmed("ran", "normal", 100),
                confirmed("dead", "normal", 100),
                confirmed("expired", "normal", 100),
                confirmed("gone", "normal", 100),
                ran("ran", 200),
                entry("expired", 200, Fact::Expired),
            ],
            letters: vec![letter("dead", "doomed")],
            ..Evidence::default()
        };
        let verdict = judge(&evidence);
        assert_eq!((verdict.confirmed, verdict.executed), (4, 1));
        assert_eq!((verdict.dead, verdict.expired), (1, 1));
        assert_eq!(lost(&verdict), ["gone"]);
    }

    #[test]
    fn a_task_that_only_failed_is_lost_unless_it_is_a_dead_letter() {
        let evidence = Evidence {
            entries: vec![
                confirmed("failed", "normal", 100),
                entry("failed", 200, Fact::Failed),
            ],
            ..Evidence::default()
        };
        assert_eq!(lost(&judge(&evidence)), ["failed"]);
        assert!(judge(&evidence).lost[0].failed);
    }

    #[test]
    fn a_second_run_is_counted_and_no_loss() {
        let entries = vec![
            confirmed("twice", "normal", 100),
            ran("twice", 200),
            ran("twice", 300),
            ran("twice", 400),
            ran("unheard", 400),
        ];
        let verdict = judge(&Evidence {
            entries,
            ..Evidence::default()
        });
        assert_eq!((verdict.executed, verdict.unconfirmed), (1, 1));
        assert_eq!((verdict.repeated, verdict.too_many), (1, 2));
        assert!(verdict.lost.is_empty());
    }

    #[test]
    fn a_deleted_queue_excuses_what_was_confirmed_in_it_before_and_nothing_else() {
        let evidence = Evidence {
            entries: vec![
                confirmed("inside", "normal", 900),
                confirmed("on its way", "normal", 1_005),
                confirmed("afterwards", "normal", 1_100),
                confirmed("elsewhere", "low", 900),
            ],
            deletions: vec![Deletion {
                tier: "normal".to_owned(),
                at: 1_000,
                held: 2,
            }],
            ..Evidence::default()
        };
        let verdict = judge(&evidence);
        assert_eq!(verdict.deleted, 2);
        assert_eq!(lost(&verdict), ["afterwards", "elsewhere"]);
    }

    #[test]
    fn a_deleted_queue_excuses_nothing_that_was_missing_for_long() {
        let at = 2 * SENT_BEFORE;
        let evidence = Evidence {
            entries: vec![
                confirmed("long before", "normal", SENT_BEFORE - 10),
                confirmed("before", "normal", SENT_BEFORE + 20),
            ],
            deletions: vec![Deletion {
                tier: "normal".to_owned(),
                at,
                held: 2,
            }],
            ..Evidence::default()
        };
        assert_eq!(lost(&judge(&evidence)), ["long before"]);
    }

    #[test]
    fn a_task_that_is_said_to_have_killed_workers_is_counted() {
        let mut crash_loops = letter("told to fail", "doomed");
        crash_loops.reason = CRASHED.to_owned();
        let verdict = judge(&Evidence {
            letters: vec![crash_loops, letter("other", "doomed")],
            ..Evidence::default()
        });
        assert_eq!(verdict.crash_loops, 1);
    }

    #[test]
    fn a_deleted_queue_excuses_no_more_than_it_can_have_held() {
        let mut entries = Vec::new();
        for number in 0..=UNACKNOWLEDGED + 3 {
            entries.push(confirmed(&number.to_string(), "normal", 900));
        }
        let verdict = judge(&Evidence {
            entries,
            deletions: vec![Deletion {
                tier: "normal".to_owned(),
                at: 1_000,
                held: 3,
            }],
            ..Evidence::default()
        });
        assert_eq!(verdict.deleted as u64, UNACKNOWLEDGED + 3);
        assert_eq!(verdict.lost.len(), 1);
    }

    #[test]
    fn a_dead_letter_of_a_task_that_was_not_told_to_fail_is_shown() {
        let verdict = judge(&Evidence {
            entries: vec![confirmed("good", "normal", 100)],
            letters: vec![letter("good", "usual"), letter("other", "doomed")],
            ..Evidence::default()
        });
        assert_eq!(verdict.unexpected["usual (retries exhausted)"], 1);
        assert_eq!(verdict.unexpected.len(), 1);
    }
}
