//! What operators change while the app runs: pauses, limits and overrides, on record, and without a deploy.
//!
//! The changes are rows in Postgres. Every process of the app that has the database knows them within two seconds. A
//! process that cannot reach it goes on with what it knew last, and says so.
//!
//! A *gate* is the limit of a tier or task inside a process: it says whether one more task may start now. A *lane* is a list of
//! tasks of one name, and of one key if tasks have keys, that may not start now. They wait there as *parked* rows.
//!
//! Read in this order: `entry` is one change, `snapshot` all of them as a process knows them, `known` how a process keeps its
//! snapshot up to date, `table` has the statements, and `process` is a live process. `change` is how an operator makes a change,
//! `limit_change` how one sets a limit, and `overriding` how one overrides the map, and which rows move then. `limit` keeps limits,
//! those of the map too, `gating` says which tasks may not run as they come, and `doctor` names the overrides in force.
//! Operators use [`Control`]; get it from [`Tierline::control`](crate::Tierline::control).

#[cfg(feature = "postgres")]
mod change;
#[cfg(feature = "postgres")]
mod doctor;
#[cfg(feature = "postgres")]
mod entry;
#[cfg(feature = "postgres")]
pub(crate) mod error;
#[cfg_attr(
    not(feature = "postgres"),
    expect(dead_code, reason = "changes are in Postgres")
)]
mod gating;
mod known;
mod limit;
#[cfg(feature = "postgres")]
mod limit_change;
#[cfg(feature = "postgres")]
mod operator;
#[cfg(feature = "postgres")]
mod overriding;
#[cfg(feature = "postgres")]
mod process;
#[cfg_attr(
    not(feature = "postgres"),
    expect(dead_code, reason = "changes are in Postgres")
)]
mod snapshot;
#[cfg(feature = "postgres")]
mod table;

#[cfg(feature = "postgres")]
pub use change::{Change, Changed};
#[cfg(feature = "postgres")]
pub use entry::{ControlEntry, Setting, Target};
pub(crate) use gating::{Gated, Gating};
pub(crate) use known::KnownControls;
#[cfg(feature = "postgres")]
pub(crate) use limit::saturated_tiers;
pub(crate) use limit::{Gate, Gates, Limits, Outlook, Permit};
#[cfg(feature = "postgres")]
pub use limit_change::LimitChange;
#[cfg(feature = "postgres")]
pub use operator::Control;
#[cfg(feature = "postgres")]
pub use overriding::{Overridden, Overriding, WaitingQueue};
#[cfg(feature = "postgres")]
pub use process::{Process, ProcessGroup};
#[cfg(feature = "postgres")]
pub(crate) use process::{longest_silence, processes};
pub(crate) use snapshot::{Override, Snapshot};
#[cfg(feature = "postgres")]
pub(crate) use table::in_force;
