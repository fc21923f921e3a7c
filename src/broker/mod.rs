//! The live broker: connecting to it, making it match the file, and finding where it does not.

mod address;
mod apply;
mod connection;
mod difference;
mod greeting;
mod lanes;
mod operation;

pub use address::Address;
pub use apply::{Applied, apply};
pub use connection::Connection;
pub use difference::{Change, Difference, Mismatch, ObjectKind};
