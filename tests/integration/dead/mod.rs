//! Dead letters, against a real broker and a real database.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod bulk;
mod collect;
mod faults;
mod identity;
mod list;
mod memory;
mod redrive;
mod support;
mod worker;
