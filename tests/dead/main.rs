//! Dead letters, against a real broker and a real database.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod bulk;
mod collect;
mod list;
mod redrive;
mod support;
mod worker;
