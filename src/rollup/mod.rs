//! Rollups: what happened in each minute, by tier and task, as rows in Postgres that all processes of the app add to.
//!
//! They are what statistics, charts and autoscalers are made of. A process counts its events in memory, and adds its counts
//! to the rows about every ten seconds and at its end. While the database is away it keeps them, minute by minute.
//! [`Rollups`] reads them; get it from [`Tierline::rollups`](crate::Tierline::rollups).
//!
//! An app that has no database, or one without tierline's tables, keeps none.
//!
//! Read in this order: `histogram` counts durations, `totals` is what is counted, `counters` counts events where they happen,
//! `pending` is what is not written yet, `recorder` writes it, `table` has the statements, and `read` is how the rows are read.
//! `report` is what each process sees of its tiers beside that, and `recent` what statistics read of both.

mod counters;
mod histogram;
mod pending;
mod read;
mod recent;
mod recorder;
mod report;
mod table;
mod totals;

pub use crate::counting::UNKNOWN;
pub(crate) use counters::RunningTask;
pub use histogram::Histogram;
pub use read::{Rollup, RollupQuery, Rollups};
pub(crate) use recent::{Minute, Recent, Seen, recent};
pub(crate) use recorder::{KEEP, Recorder, SHORTEST_KEEP};
pub(crate) use table::Arrivals;
pub use totals::RollupTotals;
