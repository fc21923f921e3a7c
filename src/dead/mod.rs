//! The log of dead letters: collect them into Postgres, find their causes, redrive them.
//!
//! | file | what |
//! |---|---|
//! | `entry`, `identity`, `fingerprint` | make a log row from a delivery of a dead-letter queue |
//! | `collect`, `queues`, `subscription`, `log`, `housekeeping` | move dead letters into the log; retention and growth alerts |
//! | `filter`, `time_filter`, `letter`, `list`, `labels` | read the log |
//! | `triage` | the probable cause of a failure, and what to do about it |
//! | `redrive`, `bulk`, `bulk_runner`, `operation`, `discard` | redrive one, redrive many, discard |
//! | `outcome` | how redriven tasks ended |

mod bulk;
mod bulk_runner;
mod collect;
mod discard;
mod entry;
pub(crate) mod error;
mod filter;
mod fingerprint;
mod housekeeping;
mod identity;
mod labels;
mod letter;
mod list;
mod log;
mod operation;
mod outcome;
mod queues;
mod redrive;
mod subscription;
mod tiers;
mod time_filter;
mod triage;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

pub use bulk::{BulkRedrive, Canary};
pub use collect::Collector;
pub(crate) use entry::Entry;
pub use entry::UNROUTED;
pub use filter::{Cursor, Filter, Page};
pub use housekeeping::DEFAULT_RETENTION;
pub use labels::{Reason, RedriveOutcome, State};
pub use letter::{Action, DeadLetter, PastAttempt, Summary};
pub(crate) use list::count_by_tier;
pub use list::{FailureGroup, Listed, TierCount};
pub(crate) use log::{insert_entries, write_entry};
pub use operation::{Operation, OperationKind, OperationState};
#[doc(hidden)]
pub use outcome::Outcomes;
#[cfg(feature = "admin")]
pub(crate) use time_filter::TIME_PATTERN;
pub use triage::{Advice, Assessment, Classifying, Failing, RootCause, Triage};

use crate::Error;
#[cfg(feature = "admin")]
use crate::backlog::Backlog;
use crate::error::DeadLetterError;
use crate::postgres::Database;
use crate::publish::Publisher;
use crate::task::IntoDuration;
use crate::topology::Topology;
use crate::topology::duration::Unreadable;

/// The longest operator name and reason that the log keeps, in bytes.
const LONGEST: usize = 200;

/// The log of dead letters. Get it from [`Tierline::dead_letters`](crate::Tierline::dead_letters).
/// Cheap to clone.
///
/// ```no_run
/// # async fn example(app: tierline::Tierline) -> Result<(), tierline::Error> {
/// use std::time::{Duration, SystemTime};
/// use tierline::dead::{Canary, Filter};
///
/// let letters = app.dead_letters()?.by("ada").because("the provider is back");
/// let yesterday = SystemTime::now() - Duration::from_secs(86_400);
/// for group in letters.groups(&Filter::default().since(yesterday), 20).await? {
///     println!("{} × {}: {}", group.count, group.fingerprint, group.assessment.because);
///     letters
///         .redrive_all(Filter::default().fingerprint(group.fingerprint))
///         .rate(50)
///         .canary(Canary::of(10))
///         .run()
///         .await?;
/// }
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct DeadLetters {
    topology: Topology,
    database: Database,
    /// `None`: this instance cannot redrive.
    publisher: Option<Publisher>,
    triage: Triage,
    who: Arc<str>,
    why: Arc<str>,
    lease: Duration,
    unreadable: Unreadable,
}

impl DeadLetters {
    pub(crate) fn new(
        topology: Topology,
        database: Database,
        publisher: Publisher,
        triage: Triage,
    ) -> Self {
        Self {
            publisher: Some(publisher),
            triage,
            ..Self::without_broker(topology, database)
        }
    }

    /// The log of this map's app for programs that do not publish. It does everything except redrive.
    pub fn without_broker(topology: Topology, database: Database) -> Self {
        Self {
            topology,
            database,
            publisher: None,
            triage: Triage::default(),
            who: "somebody".into(),
            why: "".into(),
            lease: redrive::LEASE,
            unreadable: Unreadable::NONE,
        }
    }

    /// The operator who makes the changes that follow. Every changed row records it. Default: `somebody`.
    pub fn by(mut self, who: &str) -> Self {
        self.who = kept(who);
        self
    }

    /// The reason for these changes. Every changed row records it. Default: empty.
    pub fn because(mut self, why: &str) -> Self {
        self.why = kept(why);
        self
    }

    /// How long a claim on rows that are being redriven lasts after its process last reported, such as `"2m"`. Default:
    /// 60 s. It must be longer than the broker takes to confirm a batch.
    /// A text that cannot be read is refused where something is redriven.
    pub fn lease(mut self, lease: impl IntoDuration) -> Self {
        self.unreadable.set("lease", lease, &mut self.lease);
        self
    }

    /// Deletes rows that died, and were logged, longer ago than `keep`, as the collector does. Returns how many.
    ///
    /// # Errors
    /// [`Error::InvalidDuration`], and as every use of the database.
    pub async fn expire(&self, keep: impl IntoDuration) -> Result<u64, Error> {
        let keep = keep.into_duration().map_err(|it| it.of("keep"))?;
        housekeeping::expire(&self.database, self.app(), keep).await
    }

    /// The tasks of the same app in Postgres.
    #[cfg(feature = "admin")]
    pub(crate) fn backlog(&self) -> Backlog {
        Backlog::new(self.topology.clone(), self.database.clone())
    }

    /// What redrives go through.
    fn publisher(&self) -> Result<&Publisher, Error> {
        self.unreadable.check()?;
        let none = Error::DeadLetter(DeadLetterError::NoPublisher);
        self.publisher.as_ref().ok_or(none)
    }

    pub(crate) fn database(&self) -> &Database {
        &self.database
    }

    fn app(&self) -> &str {
        self.topology.app()
    }
}

/// The part of a text that the log keeps.
fn kept(text: &str) -> Arc<str> {
    let text = text.replace('\0', "\u{fffd}");
    text[..text.floor_char_boundary(LONGEST)].into()
}

impl fmt::Debug for DeadLetters {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("DeadLetters")
            .field("app", &self.app())
            .field("database", &self.database)
            .field("who", &self.who)
            .finish_non_exhaustive()
    }
}
