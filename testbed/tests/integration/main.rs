//! What the testbed promises. One program: each is linked with all dependencies.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod compose;
mod postgres;
mod proxy;
mod rabbitmq;
