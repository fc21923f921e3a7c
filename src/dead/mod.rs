//! The way back: dead letters are logged in Postgres, understood, and redriven.
//!
//! | file | what |
//! |---|---|
//! | `entry`, `identity`, `fingerprint`, `properties` | what a delivery from a dead-letter queue becomes in the log |
//! | `collect`, `queues`, `subscription`, `log`, `housekeeping` | taking dead letters into the log; retention and growth |
//! | `filter`, `letter`, `list` | reading the log |
//! | `triage` | what probably caused a failure, and what to do about it |
//! | `redrive`, `bulk`, `run`, `operation`, `discard` | one back, many back, none back |
//! | `outcome` | how redriven tasks ended |

mod bulk;
mod collect;
mod discard;
mod entry;
mod filter;
mod fingerprint;
mod housekeeping;
mod identity;
mod letter;
mod list;
mod log;
mod operation;
mod outcome;
mod properties;
mod queues;
mod redrive;
mod run;
mod subscription;
mod tiers;
mod times;
mod triage;
mod words;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

pub use bulk::{BulkRedrive, Canary};
pub use collect::Collector;
pub use entry::UNROUTED;
pub use filter::{Cursor, Filter, Page};
pub use fingerprint::{fingerprint, template};
pub use housekeeping::DEFAULT_RETENTION;
pub use letter::{Action, DeadLetter, PastAttempt, Summary};
pub use list::{Group, Listed, TierCount};
pub use operation::{Operation, OperationKind, OperationState};
pub use outcome::Outcomes;
#[cfg(feature = "admin")]
pub(crate) use times::TIME_PATTERN;
pub use times::parse_time;
pub use triage::{Advice, Assessment, Classifying, Failing, RootCause, Triage};
pub use words::{Reason, RedriveOutcome, State};

use crate::Error;
use crate::postgres::Database;
use crate::publish::Publisher;
use crate::topology::Topology;

/// The longest name and reason that are kept, in bytes.
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
    /// `None`: nothing can be redriven.
    publisher: Option<Publisher>,
    triage: Triage,
    who: Arc<str>,
    why: Arc<str>,
    lease: Duration,
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

    /// The log of this map's app, for programs that have no broker: everything but redriving.
    pub fn without_broker(topology: Topology, database: Database) -> Self {
        Self {
            topology,
            database,
            publisher: None,
            triage: Triage::default(),
            who: "somebody".into(),
            why: "".into(),
            lease: redrive::LEASE,
        }
    }

    /// Who does what follows. It is kept with every row that is changed. Default: `somebody`.
    pub fn by(mut self, who: &str) -> Self {
        self.who = kept(who);
        self
    }

    /// Why that is done, kept likewise. Default: nothing.
    pub fn because(mut self, why: &str) -> Self {
        self.why = kept(why);
        self
    }

    /// How long rows that somebody began to redrive are left to them, when they are not heard of any
    /// more. Default: 60 s. It must be longer than a batch takes to be published.
    pub fn lease(mut self, lease: Duration) -> Self {
        self.lease = lease;
        self
    }

    /// Removes rows that died, and were logged, longer ago than `keep`, as the collector does. Answers how many.
    ///
    /// # Errors
    /// As every use of the database.
    pub async fn expire(&self, keep: Duration) -> Result<u64, Error> {
        housekeeping::expire(&self.database, self.app(), keep).await
    }

    fn publisher(&self) -> Result<&Publisher, Error> {
        let none = || Error::InvalidBrokerUrl {
            problem: "none was given, and it takes one to redrive".into(),
        };
        self.publisher.as_ref().ok_or_else(none)
    }

    pub(crate) fn database(&self) -> &Database {
        &self.database
    }

    fn app(&self) -> &str {
        self.topology.app()
    }
}

/// What is kept of a text that somebody gave.
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
