//! The demo's own record of confirmed and finished tasks, by id: publishers record confirms, handlers
//! record success. It does not use tierline.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use tierline::TaskId;

#[derive(Default)]
pub(crate) struct Ledger {
    entries: Mutex<HashMap<TaskId, Entry>>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Entry {
    /// The task's name, once its publish is confirmed.
    confirmed: Option<&'static str>,
    done: u32,
}

/// The end of a task that no handler finished.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fate {
    Dead,
    /// It expired.
    Expired,
}

/// The result of the audit.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Audit {
    pub(crate) confirmed: usize,
    pub(crate) done: usize,
    /// Confirmed, not done, and in the log of dead letters.
    pub(crate) dead: usize,
    /// Confirmed, and expired.
    pub(crate) expired: usize,
    /// Confirmed, and neither done nor dead nor expired: this must be empty.
    pub(crate) lost: Vec<String>,
    /// Done more than once, which at-least-once delivery allows.
    pub(crate) repeated: usize,
}

impl Ledger {
    /// Records that this task is stored.
    pub(crate) fn note_confirmed(&self, id: &TaskId, task: &'static str) {
        self.lock().entry(id.clone()).or_default().confirmed = Some(task);
    }

    /// Records that a handler finished this task.
    pub(crate) fn note_done(&self, id: &TaskId) {
        self.lock().entry(id.clone()).or_default().done += 1;
    }

    /// How many confirmed tasks are neither done nor have another known end.
    pub(crate) fn open(&self, fate: impl Fn(&TaskId) -> Option<Fate>) -> usize {
        let entries = self.lock();
        let open = entries.iter().filter(|(id, entry)| {
            entry.confirmed.is_some() && entry.done == 0 && fate(id).is_none()
        });
        open.count()
    }

    /// Checks every id.
    pub(crate) fn audit(&self, fate: impl Fn(&TaskId) -> Option<Fate>) -> Audit {
        let mut audit = Audit::default();
        for (id, entry) in self.lock().iter() {
            let Some(task) = entry.confirmed else {
                continue;
            };
            audit.confirmed += 1;
            if entry.done > 0 {
                audit.done += 1;
                audit.repeated += usize::from(entry.done > 1);
                continue;
            }
            match fate(id) {
                Some(Fate::Dead) => audit.dead += 1,
                Some(Fate::Expired) => audit.expired += 1,
                None => audit.lost.push(format!("{task} {id}")),
            }
        }
        audit.lost.sort();
        audit
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<TaskId, Entry>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_confirmed_and_has_no_known_end_is_lost() {
        let ledger = Ledger::default();
        for id in ["done", "dead", "late", "twice", "lost"] {
            ledger.note_confirmed(&id.into(), "task");
        }
        for id in ["done", "twice", "twice", "never confirmed"] {
            ledger.note_done(&id.into());
        }
        let fate = |id: &TaskId| match id.as_str() {
            "dead" => Some(Fate::Dead),
            "late" => Some(Fate::Expired),
            _ => None,
        };
        assert_eq!(ledger.open(fate), 1);
        let audit = ledger.audit(fate);
        let expected = Audit {
            confirmed: 5,
            done: 2,
            dead: 1,
            expired: 1,
            lost: vec!["task lost".to_owned()],
            repeated: 1,
        };
        assert_eq!(audit, expected);
    }
}
