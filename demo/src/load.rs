//! The events of a night at the hotel. The same seed gives the same night.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use tierline::Topology;
use tierline::task::PublishRequest;

use crate::pace::Pace;
use crate::tasks::{TASKS, typical_milliseconds};

/// The payload of a task: its subject, duration and failures.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Job {
    pub(crate) about: String,
    pub(crate) milliseconds: u64,
    pub(crate) trouble: Trouble,
}

/// The failure that a task brings with it.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Trouble {
    Nothing,
    /// Its first attempts fail.
    Fails {
        attempts: u32,
    },
    /// It panics, whenever it runs.
    Poison,
}

impl Job {
    /// A job with the usual duration of this task.
    pub(crate) fn usual(task: &str, about: &str, pace: Pace) -> Self {
        Self {
            about: about.to_owned(),
            milliseconds: pace.run(typical_milliseconds(task).into()),
            trouble: Trouble::Nothing,
        }
    }
}

/// An event of the night, and its time.
pub(crate) struct Scene {
    pub(crate) at: Duration,
    /// The message to print; usual traffic has none.
    pub(crate) message: Option<String>,
    pub(crate) happening: Happening,
}

pub(crate) enum Happening {
    Orders(Vec<Order>),
    ProviderFails,
    ProviderReturns,
}

/// A task to publish.
pub(crate) struct Order {
    pub(crate) task: &'static str,
    pub(crate) job: Job,
    /// When it expires, if at all.
    pub(crate) expires: Option<Duration>,
}

impl Order {
    pub(crate) fn request(&self) -> PublishRequest {
        let payload = serde_json::json!(self.job).to_string();
        let mut request = PublishRequest::named(self.task, payload.into_bytes());
        request.expires = self.expires;
        request
    }
}

/// A one-time password expires after this.
const PASSWORD_LIFE: Duration = Duration::from_secs(60);
const CONTACTS: usize = 50_000;
const CONTACTS_PER_PAGE: usize = 100;
const CALLS: usize = 40;
const TRANSCRIPTS: usize = 6;
const COACH_PARTY: usize = 60;
const ROOMS: usize = 200;

/// The usual traffic of a tier, in tasks per night.
const USUAL: [(&str, usize); 6] = [
    ("critical", 140),
    ("high", 120),
    ("normal", 96),
    ("low", 60),
    ("bulk", 22),
    ("calls", 18),
];
/// The share of the night in which usual traffic arrives; the rest is for finishing it.
const USUAL_UNTIL: f64 = 0.5;
/// How many of a hundred usual tasks fail at first, and how many of these twice.
const FAIL_PERCENT: u64 = 6;
const FAIL_TWICE_PERCENT: u64 = 25;

/// The night, in the order of its events.
pub(crate) fn night(hotel: &Topology, pace: Pace, seed: u64) -> Vec<Scene> {
    let mut night = Night {
        pace,
        random: Random(seed),
        scenes: Vec::new(),
    };
    night.tell_the_story();
    for (tier, count) in USUAL {
        night.add_usual_traffic(hotel, tier, pace.usual(count));
    }
    night.scenes.sort_by_key(|scene| scene.at);
    night.scenes
}

struct Night {
    pace: Pace,
    random: Random,
    scenes: Vec<Scene>,
}

impl Night {
    fn tell_the_story(&mut self) {
        let pages = CONTACTS / CONTACTS_PER_PAGE;
        let export = self.many("contacts.export", pages, "page");
        self.add(
            0.02,
            "somebody exports 50,000 contacts: 500 pages, bulk",
            export,
        );
        let prices = self.many("rates.update_prices", ROOMS, "room");
        self.add(
            0.04,
            "the prices of 200 rooms change: 200 tasks, normal",
            prices,
        );
        self.add_coach_party(0.06);
        self.add_locked_out_guest(0.09, 214);
        let payment = self.many("payments.process_stripe_webhook", 1, "payment");
        self.add(
            0.11,
            "a payment webhook arrives: critical, with three tasks to follow",
            payment,
        );
        let invites = self.many("calendar.create_event", 3, "invite");
        self.add(0.12, "three calendar invites: high", invites);
        self.add_wave_of_calls(0.14);
        let transcripts = self.many("calls.score_quality", TRANSCRIPTS, "transcript");
        self.add(0.16, "six transcripts to score: calls", transcripts);
        self.add_poison(0.18);
        self.turn(
            0.20,
            "the payment provider is down",
            Happening::ProviderFails,
        );
        self.add_locked_out_guest(0.30, 305);
        let payments = self.many("payments.process_stripe_webhook", 5, "payment");
        self.add(
            0.34,
            "five payment webhooks arrive, and cannot be worked on",
            payments,
        );
        self.turn(
            0.45,
            "the payment provider is back",
            Happening::ProviderReturns,
        );
    }

    fn add_coach_party(&mut self, share: f64) {
        let mut orders = self.many("email.send_booking_confirmation", COACH_PARTY, "guest");
        orders.extend(self.many("sms.send_checkin_reminder", COACH_PARTY, "guest"));
        orders.extend(self.many("push.notify_front_desk", COACH_PARTY, "guest"));
        self.add(
            share,
            "a coach party of 60 books: 180 messages, high",
            orders,
        );
    }

    fn add_locked_out_guest(&mut self, share: f64, room: u32) {
        let about = format!("room {room}");
        let mut orders = vec![
            self.order("email.send_otp", &about),
            self.order("access.issue_door_code", &about),
        ];
        for order in &mut orders {
            order.expires = Some(PASSWORD_LIFE);
        }
        let message =
            format!("the guest of room {room} is locked out: a password, a door code, critical");
        self.add(share, &message, orders);
    }

    fn add_wave_of_calls(&mut self, share: f64) {
        let tasks = TASKS.iter().map(|(task, _)| *task);
        let of_calls = tasks.filter(|task| task.starts_with("calls."));
        // Dialling has its own tier, and does not follow a call.
        let steps: Vec<_> = of_calls.filter(|it| *it != "calls.dial_outbound").collect();
        let mut orders = Vec::new();
        for call in 1..=CALLS {
            for step in &steps {
                orders.push(self.order(step, &format!("call {call}")));
            }
        }
        self.add(share, "a wave of 40 calls ends: 360 tasks, calls", orders);
    }

    fn add_poison(&mut self, share: f64) {
        let mut order = self.order("documents.extract_text", "a broken document");
        order.job.trouble = Trouble::Poison;
        self.add(
            share,
            "a document that kills whoever reads it: poison, normal",
            vec![order],
        );
    }

    /// Every task of the tier, in turn, at random times.
    fn add_usual_traffic(&mut self, hotel: &Topology, tier: &str, count: usize) {
        let in_tier = |task: &str| hotel.task(task).is_some_and(|task| task.tier == tier);
        let tasks: Vec<_> = TASKS.iter().filter(|(task, _)| in_tier(task)).collect();
        for ((task, _), number) in tasks.iter().cycle().zip(0..count) {
            let mut order = self.order(task, &format!("{task} {number}"));
            order.job.trouble = self.usual_trouble();
            let at = self.pace.at(self.random.share() * USUAL_UNTIL);
            self.scenes.push(Scene {
                at,
                message: None,
                happening: Happening::Orders(vec![order]),
            });
        }
    }

    fn usual_trouble(&mut self) -> Trouble {
        if self.random.below(100) >= FAIL_PERCENT {
            return Trouble::Nothing;
        }
        let is_twice = self.random.below(100) < FAIL_TWICE_PERCENT;
        let attempts = if is_twice { 2 } else { 1 };
        Trouble::Fails { attempts }
    }

    fn many(&mut self, task: &'static str, count: usize, what: &str) -> Vec<Order> {
        let about = (1..=count).map(|number| format!("{what} {number}"));
        about.map(|about| self.order(task, &about)).collect()
    }

    fn order(&mut self, task: &'static str, about: &str) -> Order {
        // No two have the same duration: between 0.7 and 1.3 of the typical one.
        let spread = 0.7 + 0.6 * self.random.share();
        let milliseconds = f64::from(typical_milliseconds(task)) * spread;
        Order {
            task,
            job: Job {
                milliseconds: self.pace.run(milliseconds),
                ..Job::usual(task, about, self.pace)
            },
            expires: None,
        }
    }

    fn add(&mut self, share: f64, message: &str, orders: Vec<Order>) {
        self.turn(share, message, Happening::Orders(orders));
    }

    fn turn(&mut self, share: f64, message: &str, happening: Happening) {
        self.scenes.push(Scene {
            at: self.pace.at(share),
            message: Some(message.to_owned()),
            happening,
        });
    }
}

/// SplitMix64: small, and the same everywhere.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }

    /// From 0 to 1.
    fn share(&mut self) -> f64 {
        self.next() as f64 / u64::MAX as f64
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]

    use std::collections::BTreeSet;

    use super::*;
    use crate::hotel;

    fn orders(seconds: u32, seed: u64) -> Vec<(Duration, &'static str, Job)> {
        let mut orders = Vec::new();
        for scene in night(&hotel().unwrap(), Pace::of(seconds), seed) {
            if let Happening::Orders(of_scene) = scene.happening {
                let of_scene = of_scene.into_iter();
                orders.extend(of_scene.map(|order| (scene.at, order.task, order.job)));
            }
        }
        orders
    }

    #[test]
    fn the_same_seed_gives_the_same_night_and_another_gives_another() {
        assert_eq!(orders(60, 7), orders(60, 7));
        assert_ne!(orders(60, 7), orders(60, 8));
    }

    #[test]
    fn every_task_has_work_in_every_night() {
        for seconds in [5, 60, 300] {
            let tasks: BTreeSet<_> = orders(seconds, 1).iter().map(|order| order.1).collect();
            assert_eq!(tasks.len(), 75);
        }
    }

    #[test]
    fn one_task_is_poison() {
        let all = orders(5, 1);
        let poison = all
            .iter()
            .filter(|(_, _, job)| job.trouble == Trouble::Poison);
        assert_eq!(poison.count(), 1);
    }
}
