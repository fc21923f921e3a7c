//! Tests of tierline's macros that need tierline itself.
//!
//! A crate of macros is compiled for the compiler's own use, with different features and another profile than
//! programs, and so is all that its tests depend on: in `macros`, tierline and its client of the broker
//! would be compiled once more.

#[doc = include_str!("../../macros/src/task.md")]
mod task {}

#[doc = include_str!("../../macros/src/task_payload.md")]
mod task_payload {}
