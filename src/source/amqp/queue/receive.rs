//! Deliveries that arrive: each runs, is counted as a suspect, is parked, or goes to the quarantine.

use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::SystemTime;

use lapin::message::Delivery as AmqpDelivery;
use tokio::time::Instant;

use super::Queue;
use super::consumer::Consumer;
use super::settle::Unsettled;
use crate::message::{QUARANTINE_FROM, Received, Repaired};
use crate::observe::Event;
use crate::source::Handle;
use crate::source::amqp::redelivery::RedeliveryCause;

impl Queue {
    /// Receives what has arrived, and the broker's answers.
    pub(super) fn poll_deliveries(&mut self, cx: &mut Context<'_>) -> Result<(), String> {
        while let Consumer::Subscribed(subscription) = &mut self.consumer
            && let Poll::Ready(delivery) = subscription.poll(cx)
        {
            let (delivery, repaired) = delivery?;
            self.receive(delivery, repaired);
        }
        if let Consumer::Subscribed(subscription) = &self.consumer {
            if subscription.unsettled() >= self.window.into() {
                // A full window means that there may be more.
                self.outlook.expects_more = true;
            }
            if self.outlook.poll_answer(cx)? && !self.is_former {
                let tier = &self.name;
                self.settings.observers.emit(&Event::QueueEmpty { tier });
            }
        }
        Ok(())
    }

    fn receive(&mut self, delivery: AmqpDelivery, repaired: Option<Repaired>) {
        self.outlook.moved();
        let redelivered = delivery.redelivered;
        let (received, tag) = self.received(delivery, repaired);
        let cause = match redelivered {
            true if self.adopt(&received, tag) => return,
            true => self.history.cause_of(&received),
            false => self.history.first_delivery(),
        };
        self.accept(received, tag, cause);
    }

    pub(super) fn received(
        &self,
        delivery: AmqpDelivery,
        repaired: Option<Repaired>,
    ) -> (Received, u64) {
        let AmqpDelivery {
            delivery_tag: tag,
            properties,
            data,
            redelivered,
            ..
        } = delivery;
        let (tier, now) = (self.name.clone(), SystemTime::now());
        let received = Received::new(properties, data, repaired, tier, now);
        (received.redelivered(redelivered), tag)
    }

    /// Lets a delivery run, or does with it what its cause asks for.
    pub(super) fn accept(&mut self, received: Received, tag: u64, cause: RedeliveryCause) {
        if cause == RedeliveryCause::Done {
            self.finished(self.generation, tag);
            return;
        }
        let handle = self.next_handle;
        self.next_handle += 1;
        let crashes = received.crashes();
        let is_unexplained = cause == RedeliveryCause::Unexplained;
        let received = Arc::new(received);
        let unsettled = Unsettled {
            generation: self.generation,
            tag,
            received: received.clone(),
            is_taken: false,
            storing: None,
            running: None,
            counting: is_unexplained.then(|| self.settings.suspects.count()),
        };
        self.unsettled.insert(handle, unsettled);
        let (settings, origin) = (self.settings.clone(), self.origin());
        if is_unexplained {
            self.store(handle, async move {
                settings.count_crash(&origin, &received).await
            });
            return;
        }
        self.parks_arrivals = self.must_park(&received);
        if self.parks_arrivals {
            self.park(handle, received);
        } else if crashes >= QUARANTINE_FROM {
            let group = self.group.clone();
            self.store(handle, async move {
                settings.quarantine(&group, &received).await
            });
        } else {
            self.admit(handle, &received, Instant::now());
        }
    }

    /// Gives a delivery to the run of the same message that came on an earlier channel, if there is one. Each
    /// delivery is given to one run: of equal messages each needs its own acknowledgement.
    fn adopt(&mut self, received: &Received, tag: u64) -> bool {
        let is_same = |handle: &Handle| {
            let orphan = self.unsettled.get(handle);
            orphan.is_some_and(|it| it.received.is_same(received))
        };
        let Some(index) = self.orphans.iter().position(is_same) else {
            return false;
        };
        let handle = self.orphans.swap_remove(index);
        if let Some(orphan) = self.unsettled.get_mut(&handle) {
            orphan.generation = self.generation;
            orphan.tag = tag;
        }
        true
    }
}
