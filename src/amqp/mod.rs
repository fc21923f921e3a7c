//! The live broker: connections, `apply` to declare the topology, and `doctor` to find differences.

mod address;
mod apply;
mod command;
mod connection;
mod difference;
mod doctor;
pub(crate) mod error;
pub(crate) mod former;
#[cfg(feature = "management")]
mod management;
mod run_commands;
mod spread;
mod stream;

pub use address::Address;
pub use apply::{Applied, apply};
pub use connection::Connection;
pub(crate) use connection::close_unanswered;
pub use difference::{ArgumentDifference, Difference, Mismatch, ObjectKind};
pub use doctor::{Finding, Report, Severity, doctor};
pub(crate) use run_commands::{QueueState, queue_state};
pub use spread::spread;
#[cfg(feature = "postgres")]
pub(crate) use stream::ReadBudget;
pub(crate) use stream::Repairs;
#[cfg(feature = "management")]
pub use {apply::apply_with, doctor::doctor_with, management::Management};
