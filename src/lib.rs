// The README's links lead readers of the repository to files. Here the same link names lead to items: of two
// definitions of a link, the first counts.
#![doc = "[your first task]: guide::your_first_task"]
#![doc = "[choosing tiers]: guide::choosing_tiers"]
#![doc = "[tiers in Postgres]: guide::tiers_in_postgres"]
#![doc = "[prefetch and concurrency]: guide::prefetch_and_concurrency"]
#![doc = "[metrics]: guide::metrics"]
#![doc = "[idempotent handlers]: guide::idempotent_handlers"]
#![doc = "[effectively once]: guide::effectively_once"]
#![doc = "[long tasks across deploys]: guide::long_tasks_across_deploys"]
#![doc = "[middleware]: guide::middleware"]
#![doc = "[watching tiers]: guide::watching_tiers"]
#![doc = "[handlers that hang]: guide::handlers_that_hang"]
#![doc = "[deploying a new task]: guide::deploying_a_new_task"]
#![doc = "[changing a topology]: guide::changing_a_topology"]
#![doc = "[operating dead letters]: guide::operating_dead_letters"]
#![doc = "[crashes and poison]: guide::crashes_and_poison"]
#![doc = "[running on a cluster]: guide::running_on_a_cluster"]
#![doc = "[coming from Celery]: guide::coming_from_celery"]
#![doc = "[coming from SQL queues]: guide::coming_from_sql_queues"]
#![doc = "[guarantees]: guide::guarantees"]
#![doc = "[how it compares]: guide::how_it_compares"]
#![doc = "[wire format]: message::wire"]
#![doc = ""]
#![doc = include_str!("../README.md")]
#![allow(
    clippy::test_attr_in_doctest,
    reason = "the guide shows a test to be copied"
)]

pub mod guide;

pub mod error;
mod random;
mod secret;

mod backoff;

pub mod topology;

pub mod task;

mod spans;

pub mod message;

pub mod observe;

mod service;

#[cfg(feature = "postgres")]
pub mod postgres;

pub mod amqp;

#[cfg(feature = "postgres")]
pub mod backlog;

pub mod control;

#[cfg(any(feature = "postgres", feature = "prometheus"))]
mod counting;

#[cfg(feature = "postgres")]
pub mod rollup;

mod route;

#[cfg(feature = "postgres")]
mod completion;

pub mod moving;

pub mod publish;

#[cfg(feature = "postgres")]
pub mod scaling;

#[cfg(feature = "postgres")]
pub mod dead;

mod source;

pub mod execute;

pub mod worker;

#[cfg(feature = "postgres")]
pub mod relay;

#[cfg(feature = "postgres")]
pub mod schedule;

#[cfg(feature = "postgres")]
pub mod stats;

#[cfg(feature = "prometheus")]
pub mod metrics;

mod app;

#[cfg(feature = "admin")]
pub mod admin;

#[cfg(feature = "testing")]
pub mod testing;

pub use app::{Builder, Health, HealthState, OnConnect, Tierline};
pub use error::{Error, ErrorKind};
#[cfg(feature = "postgres")]
pub use postgres::Database;
#[cfg(feature = "postgres")]
pub use task::TaskTransaction;
pub use task::{
    Context, IntoOutcome, Outcome, Registry, Task, TaskError, TaskId, TaskOptions,
    assert_every_task_is_mapped, assert_every_task_is_mapped_strictly,
};
#[cfg(feature = "macros")]
pub use tierline_macros::{Task, task};
pub use topology::Topology;
pub use topology::duration::InvalidDuration;

/// For the macros' expansion alone: no part of the public interface.
#[doc(hidden)]
pub mod __private {
    pub use crate::task::expansion::*;
    pub use inventory;
}
