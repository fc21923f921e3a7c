//! The live broker: connecting to it, making it match the file, and finding where it does not.

mod address;
mod apply;
mod connection;
mod difference;
mod doctor;
mod greeting;
#[cfg_attr(
    not(feature = "postgres"),
    expect(dead_code, reason = "the collector alone needs it")
)]
mod inflow;
mod lanes;
#[cfg(feature = "management")]
mod management;
mod operation;

pub use address::Address;
pub use apply::{Applied, apply};
pub use connection::Connection;
pub use difference::{Change, Difference, Mismatch, ObjectKind};
pub use doctor::{Finding, Report, Severity, doctor};
#[cfg(feature = "postgres")]
pub(crate) use inflow::ReadBudget;
#[cfg(feature = "management")]
pub use {apply::apply_with, doctor::doctor_with, management::Management};
