//! The `tierline` command from the outside. One program: each is linked with all dependencies.

#![cfg(test)]

mod command;
mod control;
mod dlq;
mod exit_codes;
mod observe;
mod postgres_tiers;
mod schedule;
mod serve;
mod stats;
mod tasks;
mod without_broker;
