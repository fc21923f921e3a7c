#![doc = include_str!("../README.md")]

mod backoff;
mod error;
mod random;
pub mod topology;

pub mod task;

pub mod message;

pub mod observe;

#[cfg(feature = "postgres")]
pub mod database;

pub mod broker;

pub mod publish;

pub mod work;

#[cfg(feature = "postgres")]
pub mod dead;

#[cfg(feature = "postgres")]
pub mod schedule;

mod app;

#[cfg(feature = "admin")]
pub mod admin;

#[cfg(feature = "testing")]
pub mod testing;

pub use app::{Builder, OnConnect, Tierline};
#[cfg(feature = "postgres")]
pub use database::Database;
pub use error::{Error, LimitsTooLong};
pub use task::{
    Context, IntoOutcome, Outcome, Registry, Task, TaskError, TaskId, TaskOptions,
    assert_every_task_is_mapped, assert_every_task_is_mapped_strictly,
};
#[cfg(feature = "macros")]
pub use tierline_macros::{Task, task};
pub use topology::Topology;

/// For the macros' expansion alone: no part of the public interface.
#[doc(hidden)]
pub mod __private {
    pub use crate::task::expansion::*;
    pub use inventory;
}
