//! Which rows an override moves, and moving them.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::Overriding;
use super::handlers::listed;
use crate::Error;
use crate::backlog::{Moved, TasksLeft, TasksToMove, WalkEnd, count_tasks_left, move_tasks};
use crate::control::entry::Target;
use crate::control::known::KNOWN_WITHIN;
use crate::control::snapshot::Snapshot;
use crate::postgres::Database;
use crate::topology::{Topology, show_duration};

/// How long waiting rows are moved before the answer comes. At some 50,000 rows a second that is a backlog of millions.
const LONGEST_MOVE: Duration = Duration::from_secs(120);
/// How often the rows of a tier are walked over at most. A further walk finds what others had locked, and what transactions
/// that had begun before have committed since.
const WALKS: u32 = 3;
/// The pause between two walks.
const PAUSE: Duration = Duration::from_secs(1);

/// Tasks whose rows in one tier are to be in another.
pub(super) struct RowsToMove {
    pub(super) from: String,
    pub(super) to: String,
    tasks: Vec<String>,
    /// What the last walk did.
    last: Moved,
    is_done: bool,
}

impl Overriding {
    /// The rows of the tasks that this override is about, unless a more specific one is in force. They wait in the tier of
    /// the map, or in one to which an override has led that is in force or was.
    pub(super) fn rows_to_move(
        &self,
        overridden: &[(Target, String)],
        after: &Snapshot,
    ) -> Vec<RowsToMove> {
        let topology = &self.control.topology;
        let mut tasks: BTreeMap<(String, String), BTreeSet<String>> = BTreeMap::new();
        for task in self.tasks() {
            let now = after.override_of(&task.name);
            let is_ours =
                now.is_some_and(|it| it.tier == self.tier && it.priority == self.priority);
            let Some(to) = self.tier_of(task).filter(|_| is_ours) else {
                continue;
            };
            let led_to = overridden.iter().filter(|it| it.0.has(&task.name));
            let led_to = led_to.map(|(_, tier)| tier);
            let led_to = led_to.filter(|tier| topology.tier(tier).is_some());
            for from in led_to.chain([&task.tier]) {
                if *from == to.name && self.priority.is_none() {
                    continue;
                }
                let tiers = (from.clone(), to.name.clone());
                tasks.entry(tiers).or_default().insert(task.name.clone());
            }
        }
        let rows = tasks.into_iter().map(|((from, to), tasks)| RowsToMove {
            from,
            to,
            tasks: tasks.into_iter().collect(),
            last: Moved::default(),
            is_done: false,
        });
        rows.collect()
    }

    /// Moves the waiting rows. The override is in force by now, so a failure is a note. The more urgent tiers of the map
    /// come first.
    /// They move as long as the overrides with these `numbers` are in force: another operator may set another one meanwhile.
    pub(super) async fn move_rows(
        &self,
        all: &mut [RowsToMove],
        numbers: &[i64],
        notes: &mut Vec<String>,
    ) -> u64 {
        if all.is_empty() {
            return 0;
        }
        let topology = &self.control.topology;
        all.sort_by_key(|rows| topology.tiers().iter().position(|it| it.name == rows.to));
        // Until every process that reaches the database knows the override: what publishers have meanwhile stored by the
        // map is moved too, and no worker sends what has moved back by the map.
        sleep(KNOWN_WITHIN).await;
        let end = Instant::now() + LONGEST_MOVE;
        let mut moved = 0;
        for walk in 1..=WALKS {
            for rows in all.iter_mut().filter(|rows| !rows.is_done) {
                rows.last = Moved::default();
                let walk = self.walk(rows, numbers, end).await;
                moved += rows.last.count;
                if let Ok(WalkEnd::NotInForce) = walk {
                    notes.push(
                        "the override has ended or was replaced, and no more rows move; see what is in force".to_owned(),
                    );
                    return moved;
                }
                let is_settled = rows.last.count == 0 && rows.last.locked == 0;
                rows.is_done = is_settled || !matches!(walk, Ok(WalkEnd::Complete));
                notes.extend(not_done(rows, walk));
            }
            if walk == WALKS || all.iter().all(|rows| rows.is_done) {
                break;
            }
            sleep(PAUSE).await;
        }
        for rows in all {
            notes.extend(self.notes_of_rows(rows).await);
        }
        moved
    }

    async fn walk(
        &self,
        rows: &mut RowsToMove,
        numbers: &[i64],
        end: Instant,
    ) -> Result<WalkEnd, Error> {
        let topology = &self.control.topology;
        let (Some(from), Some(to)) = (topology.tier(&rows.from), topology.tier(&rows.to)) else {
            return Ok(WalkEnd::Complete);
        };
        let tasks = TasksToMove {
            app: topology.app(),
            controls: numbers,
            tasks: rows.names(),
            from: &from.name,
            to: &to.name,
            priorities: match self.priority {
                Some(priority) => priority..=priority,
                None => to.priorities_from(from),
            },
            ttl: to.ttl.filter(|_| from.name != to.name),
        };
        let mut last = Moved::default();
        let walked = move_tasks(&self.control.database, &tasks, end, &mut last).await;
        rows.last = last;
        walked
    }

    /// What stays in the tier that the tasks leave.
    async fn notes_of_rows(&self, rows: &RowsToMove) -> Vec<String> {
        let RowsToMove { from, to, .. } = rows;
        let mut notes = Vec::new();
        if rows.last.too_old > 0 {
            notes.push(format!(
                "{} rows stay in tier {from}: they have waited for longer than the ttl of tier {to}, where they would expire",
                rows.last.too_old
            ));
        }
        if !rows.is_done {
            notes.push(format!(
                "rows of these tasks came to tier {from} while they were moved, or others had locked them: {AGAIN}"
            ));
        }
        if from == to {
            return notes;
        }
        let (database, app) = (&self.control.database, self.control.topology.app());
        match count_tasks_left(database, app, from, &rows.names()).await {
            Ok(TasksLeft { claimed: 0, .. }) => {}
            Ok(TasksLeft { claimed, .. }) => notes.push(format!(
                "workers of tier {from} have claimed {claimed} of the tasks, and run them there; only their retries follow"
            )),
            Err(error) => notes.push(format!(
                "how many of the tasks run in tier {from} is not known: {error}"
            )),
        }
        notes
    }
}

const AGAIN: &str = "set the override again to move the rest";

impl RowsToMove {
    fn names(&self) -> Vec<&str> {
        self.tasks.iter().map(String::as_str).collect()
    }
}

/// Why a walk came to no end.
fn not_done(rows: &RowsToMove, walk: Result<WalkEnd, Error>) -> Option<String> {
    let from = &rows.from;
    match walk {
        Ok(WalkEnd::Complete | WalkEnd::NotInForce) => None,
        Ok(WalkEnd::OutOfTime) => Some(format!(
            "not all rows of tier {from} have moved within {}; {AGAIN}",
            show_duration(LONGEST_MOVE)
        )),
        Err(error) => Some(format!(
            "the override is in force, and not all rows of tier {from} have moved: {error}; {AGAIN}"
        )),
    }
}

/// What stays in the tier of an override that has ended, of the tasks that go elsewhere now.
pub(in crate::control) async fn note_of_end(
    topology: &Topology,
    database: &Database,
    target: &Target,
    tier: &str,
    now: &Snapshot,
) -> Option<String> {
    let tasks = topology.tasks().iter().filter(|task| {
        let tier_now = now.override_of(&task.name).and_then(|it| it.tier.as_ref());
        let tier_now = tier_now.filter(|tier| topology.tier(tier).is_some());
        target.has(&task.name) && tier_now.unwrap_or(&task.tier) != tier
    });
    let tasks: Vec<&str> = tasks.map(|task| task.name.as_str()).collect();
    if tasks.is_empty() {
        return None;
    }
    let left = count_tasks_left(database, topology.app(), tier, &tasks).await;
    let left = match left {
        Ok(left) => left,
        Err(error) => {
            return Some(format!(
                "how many rows stay in tier {tier} is not known: {error}"
            ));
        }
    };
    let (least, waiting) = (
        if left.may_be_more { "at least " } else { "" },
        left.waiting,
    );
    (waiting > 0 || left.may_be_more).then(|| {
        format!(
            "{least}{waiting} rows of {} stay in tier {tier}; an override to another tier moves them, that of the map too",
            listed(&tasks)
        )
    })
}
