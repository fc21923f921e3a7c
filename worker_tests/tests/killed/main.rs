//! Tasks that kill their worker, workers that are killed, and workers that are asked to end.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod deployment;
mod killers;
mod once;
mod relay;
mod rows;
mod shutdown;
