//! What the tasks that serve all tiers found out: rows that are ready or due, lanes, and whether the leases hold.

use super::{Quarantine, Rows};
use crate::observe::Event;
use crate::source::postgres::signal::{Signalled, earlier};

impl Rows {
    /// Applies what the tasks that serve all tiers found out.
    pub(super) fn apply_signal(&mut self, signalled: Signalled) {
        if let Some(starts) = signalled.starts {
            self.begin_at(&starts);
        }
        self.next_due = earlier(self.next_due, signalled.next_due);
        if let Some(lanes) = signalled.lanes {
            self.found_lanes(lanes);
        }
        if signalled.is_woken {
            self.expects_more = true;
            self.is_woken = true;
            self.ready_rank = None;
            self.learn_of_parked_messages();
        }
        let (group, tier) = (self.group.as_str(), &*self.name);
        let observers = &self.settings.consumer.observers;
        if self.worker.is_some() && signalled.worker.is_none() {
            if let Quarantine::Waiting(_) | Quarantine::Permitted(_) = self.quarantine {
                // The right to take a suspect is that of the whole process.
                self.quarantine = Quarantine::Empty;
            }
            if self.is_home {
                let cause = "its leases cannot be extended";
                observers.emit(&Event::Interrupted { group, tier, cause });
            }
        }
        if self.worker.is_none() && signalled.worker.is_some() {
            if self.is_home {
                observers.emit(&Event::Consuming { group, tier });
            }
            // It may be another process now, to the database, or the database was away.
            self.retry_at = None;
            self.is_failing = false;
            self.expects_more |= self.is_home;
        }
        self.worker = signalled.worker;
        if signalled.generation != self.generation {
            self.generation = signalled.generation;
            self.lose_leases();
        }
    }
}
