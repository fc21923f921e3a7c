//! Statistics: how an app is doing right now, tier by tier.
//!
//! [`Tierline::stats`](crate::Tierline::stats) gives them, and so do `GET /stats` of the admin API, `tierline stats` and
//! `tierline top`. They come from both servers at once, within two seconds, whatever waits there: no count goes through more
//! than 10,000 rows of a tier, and no queue is read. What could not be asked is in [`Stats::problems`], and its fields are
//! `None`: a server that does not answer hides its own part only.
//!
//! | what | from |
//! |---|---|
//! | messages, consumers | the broker, asked about each queue with a passive declare |
//! | rows: ready, parked, scheduled, running | Postgres, up to 10,000 of each and tier |
//! | rates, waits, SLO, growth of dead letters | [rollups](crate::rollup), which processes write about every ten seconds |
//! | in flight and oldest age of a queue on the broker | reports of the workers that have the database, with the rollups |
//! | delayed messages, unacknowledged messages | the management API, if [`Builder::management`](crate::Builder) names it |
//!
//! # The oldest age
//! The oldest row is known exactly. RabbitMQ does not say how old the oldest message of a queue is, so that is an estimate.
//! A queue gives its messages in their order, so what waits in it was enqueued
//!
//! - after what the workers have started last,
//! - after the queue was last empty,
//! - and with n messages in the queue, not before the nth last publish, by the rollups of the last hour.
//!
//! The estimate is the latest of these times. Workers report the first two every ten seconds, so it may be too old by that. In a
//! queue with priorities, a message of a low priority may have waited for longer. Without a worker or a publisher that has
//! the app's database, nothing is known.
//!
//! Read in this order: `count` is a count that is bounded, `report` what this module gives, `read` asks the servers, `known` is
//! what they said, and `tier` computes a tier from it.

mod assemble;
mod budget;
mod count;
mod json;
mod known;
mod oldest;
mod read;
mod report;

pub use count::Count;
pub(crate) use read::{Sources, stats};
pub use report::{
    DeadLetterStats, GroupStats, LimitStats, OldestWait, PauseStats, PriorityDepth, ScheduleStats,
    SloStats, Stats, StatsProblem, StatsServer, TierHome, TierStats,
};
