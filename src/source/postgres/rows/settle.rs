//! Settles runs: what follows on them is stored, or they go back.

use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::Instant;
use uuid::Uuid;

use super::{Forwarded, PendingDeadLetter, Quarantine, Rows, State, Unsettled};
use crate::Error;
use crate::backlog::{Later, RunKey};
use crate::error::PublishError;
use crate::message::{DeadReason, Failure, properties};
use crate::observe::Event;
use crate::publish::Outgoing;
use crate::source::postgres::settle::{NextAttempt, waited_too_long};
use crate::source::postgres::signal::earlier;
use crate::source::{Handle, Next, emit_later, no_delays, task_ref};
use crate::task::CancelReason;

/// The pause before an attempt runs again because what follows on it could not be stored.
const BACK_PAUSE: Duration = Duration::from_secs(1);

impl Rows {
    /// The row of a delivery.
    pub(crate) fn row_id(&self, handle: Handle) -> Option<Uuid> {
        self.unsettled.get(&handle).map(|it| it.run.id)
    }

    /// Ends a run whose message the broker has stored: the task goes on there.
    pub(crate) fn relayed(&mut self, handle: Handle) {
        if let Some(unsettled) = self.remove(handle) {
            self.done.push((unsettled.run, None));
        }
    }

    /// Dead-letters a task that waited for too long, as a queue of the broker does.
    pub(super) fn expire(&mut self, handle: Handle) {
        let Some(unsettled) = self.unsettled.get_mut(&handle) else {
            return;
        };
        self.prefetched_bytes -= unsettled.bytes;
        let message = unsettled.received.message().ok().cloned().map(Box::new);
        unsettled.state = State::Settling;
        let next = Next::Dead {
            message,
            reason: DeadReason::Expired,
            failure: waited_too_long(),
        };
        self.store(handle, next);
    }

    /// Stores what follows on a run: its next attempt, or its dead letter.
    pub(super) fn store(&mut self, handle: Handle, next: Next) {
        let Some(unsettled) = self.unsettled.get_mut(&handle) else {
            return;
        };
        let (run, received) = (unsettled.run, unsettled.received.clone());
        match next {
            Next::Done(_) | Next::Back => {}
            Next::Later {
                message,
                after,
                failure,
            } => {
                if !self.settings.is_relay {
                    unsettled.follows = Some((after, failure.clone()));
                }
                let next = self.settings.next_attempt(run, &received, *message, after);
                match next {
                    Ok(NextAttempt::Row(later)) => self.later.push((handle, later)),
                    Ok(NextAttempt::Message(outgoing)) => self.forward(handle, run, outgoing),
                    Err(Error::Publish(
                        PublishError::NoDelays { .. } | PublishError::DelayTooLong { .. },
                    )) => self.store_undelayed(handle, failure),
                    Err(error) => self.not_stored(handle, &error),
                }
            }
            Next::Dead {
                message,
                reason,
                failure,
            } => self.dead.push(PendingDeadLetter {
                handle,
                run,
                received,
                message,
                reason,
                failure,
            }),
        }
    }

    /// Sends the next attempt to the broker, where its tier has moved, if the run is still ours.
    fn forward(&mut self, handle: Handle, run: RunKey, outgoing: Outgoing) {
        let Some(unsettled) = self.unsettled.get(&handle) else {
            return;
        };
        let (settings, received) = (self.settings.clone(), unsettled.received.clone());
        let (sender, is_ours) = oneshot::channel();
        self.beginning.push((run, sender));
        let sender = self.sender.clone();
        tokio::spawn(async move {
            let stored = match is_ours.await {
                Ok(true) => match settings.forward(run, outgoing, &received).await {
                    Ok(()) => Forwarded::Yes,
                    Err(error) => Forwarded::No(error),
                },
                _ => Forwarded::NotOurs,
            };
            // Without a receiver the worker has ended.
            let _ = sender.send((handle, stored));
        });
    }

    /// Dead-letters a task that was to run again later, where it cannot wait.
    fn store_undelayed(&mut self, handle: Handle, failure: Option<Failure>) {
        let Some(unsettled) = self.unsettled.get(&handle) else {
            return;
        };
        let message = unsettled.received.message().ok();
        let tier = message.and_then(|message| {
            let tier = self.settings.consumer.goes_to(&message.task);
            tier.map(|tier| tier.name.clone())
        });
        let failure = no_delays(&tier.unwrap_or_default(), failure);
        let next = Next::Dead {
            message: message.map(|message| Box::new(message.clone().failed(&failure))),
            reason: DeadReason::NoDelays,
            failure,
        };
        self.store(handle, next);
    }

    pub(super) fn stored(&mut self, handle: Handle, stored: Forwarded) {
        let Some(unsettled) = self.unsettled.get_mut(&handle) else {
            return;
        };
        match stored {
            // The run is another process's, or the database did not answer. In both cases it is right to give it back.
            Forwarded::NotOurs => self.back.push((handle, unsettled.run)),
            Forwarded::Yes => {
                let run = unsettled.run;
                if let Some((after, failure)) = unsettled.follows.take() {
                    let observers = &self.settings.consumer.observers;
                    emit_later(observers, &unsettled.received, after, failure.as_ref());
                }
                // It goes on at the broker, so it has come to no end.
                self.done.push((run, None));
                self.settle_now(handle);
            }
            Forwarded::No(error) => self.not_stored(handle, &error),
        }
    }

    /// What follows on a run was not stored: the same attempt runs again, a moment later.
    pub(super) fn not_stored(&mut self, handle: Handle, error: &Error) {
        let Some(unsettled) = self.unsettled.get_mut(&handle) else {
            return;
        };
        unsettled.follows = None;
        let (run, id) = (unsettled.run, unsettled.received.id());
        tracing::warn!(%id, %error, "what follows on a task was not stored: it goes back");
        let Ok(message) = unsettled.received.message() else {
            self.back.push((handle, run));
            return;
        };
        let (task, why) = (task_ref(message), &error.to_string());
        let (observers, ran) = (&self.settings.consumer.observers, unsettled.received.ran());
        observers.emit(&Event::GivenBack { task, why, ran });
        let sent = unsettled.received.successor(message);
        let later = Later {
            run,
            tier: message.tier.clone(),
            rank: unsettled.place.0,
            after: BACK_PAUSE,
            properties: properties::encode(&sent),
            is_held: unsettled.is_held,
        };
        self.later.push((handle, later));
    }

    /// At the end of a shutdown, what follows on runs is not waited for while the database is away.
    pub(super) fn give_up_settling(&mut self) {
        let is_over = self.drain_by.is_some_and(|by| Instant::now() >= by);
        if !is_over || self.is_up() {
            return;
        }
        let settling = self.unsettled.iter();
        let settling = settling.filter(|(_, it)| it.state == State::Settling);
        let handles: Vec<Handle> = settling.map(|(handle, _)| *handle).collect();
        for handle in handles {
            self.settle_now(handle);
        }
    }

    pub(super) fn stored_later(&mut self, handle: Handle, after: Duration, is_ours: bool) {
        self.next_due = earlier(self.next_due, Instant::now().checked_add(after));
        if let Some(unsettled) = self.unsettled.get_mut(&handle)
            && let Some((after, failure)) = unsettled.follows.take()
            && is_ours
        {
            let observers = &self.settings.consumer.observers;
            emit_later(observers, &unsettled.received, after, failure.as_ref());
        }
        self.settle_now(handle);
    }

    pub(super) fn settle_now(&mut self, handle: Handle) {
        self.remove(handle);
        self.settled.push_back(handle);
    }

    pub(super) fn remove(&mut self, handle: Handle) -> Option<Unsettled> {
        if let Quarantine::Held(held, _) = self.quarantine
            && held == handle
        {
            self.quarantine = Quarantine::Empty;
            // There may be another one.
            self.settings.look_now.notify_one();
        }
        self.unsettled.remove(&handle)
    }

    /// Puts a row that was not begun back, as if it had never been claimed.
    pub(super) fn put_back(&mut self, handle: Handle) {
        let Some(unsettled) = self.unsettled.get_mut(&handle) else {
            return;
        };
        if unsettled.state == State::Prefetched {
            self.prefetched_bytes -= unsettled.bytes;
        }
        unsettled.state = State::Settling;
        self.back.push((handle, unsettled.run));
    }

    /// Another process may have taken over what was claimed: cancels what runs, and puts the rest back.
    pub(super) fn lose_leases(&mut self) {
        let lease = std::mem::replace(&mut self.lease, self.settings.cancelled.child());
        lease.cancel_because(CancelReason::LeaseLost);
        let lost: Vec<Handle> = self.unsettled.keys().copied().collect();
        for handle in lost {
            let Some(unsettled) = self.unsettled.get(&handle) else {
                continue;
            };
            match unsettled.state {
                State::Prefetched => {
                    self.prefetched.remove(&unsettled.place);
                    self.put_back(handle);
                }
                // What a relay has sent is stored or not, whoever holds the row.
                State::Taken if self.settings.is_relay => {}
                State::Taken => {
                    if let Ok(message) = unsettled.received.message() {
                        let task = task_ref(message);
                        let (name, id) = (task.name, task.id);
                        tracing::warn!(task = name, %id, "the lease is lost: the handler is cancelled");
                        let observers = &self.settings.consumer.observers;
                        observers.emit(&Event::LeaseLost { task });
                    }
                }
                State::Settling => {}
            }
        }
    }
}
