#![doc = include_str!("../README.md")]

mod error;
pub mod topology;

pub use error::Error;
pub use topology::Topology;
