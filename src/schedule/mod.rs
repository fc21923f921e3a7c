//! Time: tasks that come due by themselves, published once each by one of many processes.
//!
//! Schedules stand in the file (`[schedules.NAME]`) or are [added](Schedules::add) by code. Any
//! number of processes run the [`Scheduler`]; one of them leads and publishes, and when it dies
//! another one does, within seconds.
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
//! # What is promised
//! - A run is published, with confirm, to the tier of its task. It carries its due time and when it
//!   expires; a worker that gets it later than that skips it and tells so ([`Event::Expired`]).
//! - Its identifier is made of the schedule's name and the due time: `schedule:NAME:TIME`. Where a
//!   process dies between the broker's confirm and the database's commit, the run comes twice, with
//!   the same identifier.
//! - Where several runs of a schedule are due at once, only the newest is published, if it has not
//!   expired, and the others are counted as missed. There is no backlog, so nothing floods.
//! - While the broker is away, a run waits until it is back or the run has expired.
//! - Runs that came due while no scheduler was running for a minute or longer are skipped or made up
//!   for by one, as the schedule's [`missed`](crate::topology::Missed) says.
//!
//! # The clock
//! Due times are compared with the database's clock, which is the same for all processes: a takeover
//! never goes back or forward in time, and the wall clocks of processes may step as they like.
//! Where the database's own clock steps forward, the runs between are due at once, or missed if it
//! was by a minute or more. Where it steps back by less than an hour, no run comes twice: the clock
//! is waited for. After a longer step back, runs are those of the new time.
//!
//! # Headers
//! Every run has the headers `schedule`, the schedule's name, and `schedule-due-at`, its due time as
//! `2026-11-16T02:00:00Z`.
//!
//! [`Event::Expired`]: crate::observe::Event::Expired

mod definition;
mod due;
mod leader;
mod lease;
mod line;
mod run;
mod scheduler;
mod schedules;
mod state;
mod store;
mod table;

use std::time::SystemTime;

use jiff::Timestamp;

pub use run::{DUE_AT_HEADER, SCHEDULE_HEADER};
pub use scheduler::Scheduler;
pub use schedules::Schedules;
pub use state::{Change, Mark, Origin, ScheduleState};

use crate::postgres::Time;

fn to_database(time: Timestamp) -> Time {
    Time(SystemTime::from(time))
}

/// What is beyond the calendar is its end.
fn from_database(Time(time): Time) -> Timestamp {
    Timestamp::try_from(time).unwrap_or(Timestamp::MAX)
}
