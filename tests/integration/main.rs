//! All integration tests of the library in one program: a program of tests is linked with all
//! dependencies, which takes longer than to compile it.
//!
//! Tests that look at all handlers of their program are in programs of their own (`macros`,
//! `sentinel`), because `#[task]` adds to what they see. Run a part by its name:
//! `cargo test --test integration dead::`.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test may panic")]

#[cfg(feature = "admin")]
mod admin;
#[cfg(feature = "management")]
mod amqp;
#[cfg(feature = "postgres")]
mod backlog;
#[cfg(feature = "postgres")]
mod control;
#[cfg(all(feature = "admin", feature = "management"))]
mod credentials;
#[cfg(feature = "postgres")]
mod database;
#[cfg(feature = "postgres")]
mod dead;
#[cfg(all(feature = "macros", feature = "postgres"))]
mod examples;
mod execution;
mod first_task;
#[cfg(feature = "postgres")]
mod hostile;
#[cfg(all(feature = "admin", feature = "prometheus"))]
mod metrics;
mod middleware;
#[cfg(all(feature = "postgres", feature = "management"))]
mod moving;
#[cfg(feature = "postgres")]
mod once;
#[cfg(feature = "admin")]
mod openapi;
mod public_api;
mod publish;
mod python_producer;
#[cfg(feature = "postgres")]
mod relay;
#[cfg(feature = "postgres")]
mod schedule;
#[cfg(feature = "postgres")]
mod stats;
mod testing;
mod topology;
#[cfg(all(feature = "otel", feature = "postgres"))]
mod traces;
mod worker;
