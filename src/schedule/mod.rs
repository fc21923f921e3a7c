//! Schedules: periodic tasks, each run published once by one of many processes.
//!
//! Schedules are in the file (`[schedules.NAME]`) or [added](Schedules::add) by code. Any
//! number of processes run the [`Scheduler`]. One of them leads and publishes. If it dies,
//! another one takes over within seconds.
//!
//! ```no_run
//! # async fn example(shutdown: impl Future<Output = ()>) -> Result<(), tierline::Error> {
//! use tierline::{Tierline, Topology};
//!
//! let app = Tierline::builder(Topology::load("topology/hotel.toml")?)
//!     .amqp("amqp://localhost")
//!     .postgres("postgres://localhost/hotel")
//!     .connect()
//!     .await?;
//! app.scheduler()?.until(shutdown).await?;
//! # Ok(()) }
//! ```
//!
//! # Guarantees
//! - The leader publishes a run, with a confirm, to the tier of its task. The message carries its due time
//!   and its expiry. A worker that receives it later skips it and emits [`Event::Expired`].
//! - Its id consists of the schedule's name and the due time: `schedule:NAME:TIME`. If the process dies
//!   between the broker's confirm and the database's commit, the run is published twice, with the same id.
//! - If several runs of a schedule are due at once, only the newest is published, unless it has expired. The
//!   others count as missed. There is no backlog, so nothing floods.
//! - While the broker is away, a run waits until it is back or the run has expired.
//! - Runs that came due while no scheduler was running for a minute or longer are skipped or replaced by
//!   one, according to the schedule's [`missed`](crate::topology::Missed).
//!
//! # The clock
//! Due times are compared with the database's clock, which is the same for all processes. A takeover never
//! goes back or forward in time, and steps of the processes' wall clocks do not matter. If the database's
//! clock steps forward, the runs between are due at once, or missed if the step was a minute or more. If it
//! steps back by less than an hour, runs wait until it has caught up, so none is published twice. After a
//! longer step back, runs follow the new time.
//!
//! # Headers
//! Every run has the headers `schedule`, the schedule's name, and `schedule-due-at`, its due time in the form
//! `2026-11-16T02:00:00Z`.
//!
//! [`Event::Expired`]: crate::observe::Event::Expired

mod definition;
mod due;
mod leader;
mod lease;
mod overview;
mod run;
mod scheduler;
mod schedules;
mod state;
mod store;
mod table;

use std::time::SystemTime;

use jiff::Timestamp;

pub(crate) use overview::overview;
pub use run::{DUE_AT_HEADER, SCHEDULE_HEADER};
pub use scheduler::Scheduler;
pub use schedules::Schedules;
pub use state::{Mark, Origin, ScheduleChange, ScheduleState};

use crate::postgres::Time;

fn to_database(time: Timestamp) -> Time {
    Time(SystemTime::from(time))
}

/// Times beyond the calendar become its end.
fn from_database(Time(time): Time) -> Timestamp {
    Timestamp::try_from(time).unwrap_or(Timestamp::MAX)
}
