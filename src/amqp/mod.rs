//! The live broker: connecting to it, making it match the file, and finding where it does not.

mod address;
mod apply;
mod connection;
mod difference;
mod doctor;
mod lanes;
#[cfg(feature = "management")]
mod management;
mod operation;
mod stream;

pub use address::Address;
pub use apply::{Applied, apply};
pub use connection::Connection;
pub use difference::{Change, Difference, Mismatch, ObjectKind};
pub use doctor::{Finding, Report, Severity, doctor};
#[cfg(feature = "postgres")]
pub(crate) use stream::ReadBudget;
pub(crate) use stream::Repairs;
#[cfg(feature = "management")]
pub use {apply::apply_with, doctor::doctor_with, management::Management};
