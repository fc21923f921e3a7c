use std::error::Error as _;
use std::panic::Location;
use std::time::Duration;

use super::*;
use crate::TaskId;
use crate::task::IntoDuration;
use crate::topology::Topology;

#[test]
fn the_error_stays_small_enough_to_return_by_value() {
    assert!(size_of::<Error>() <= 64, "{} bytes", size_of::<Error>());
}

const NO: Option<Stored> = Some(Stored::No);
const MAYBE: Option<Stored> = Some(Stored::Maybe);

/// Every error there is: its kind, whether it is transient, and whether the task is stored.
fn every_error() -> Vec<(Error, ErrorKind, bool, Option<Stored>)> {
    use ErrorKind::*;

    let id = || TaskId::from("1");
    let io = || io::Error::from_raw_os_error(2);
    let source = || Some(io().into());
    let first = Location::caller();
    let version = || "3.9.0".parse().unwrap();
    let no_json = serde_json::to_vec(&std::collections::BTreeMap::from([((), 1)])).unwrap_err();
    let Err(Error::Topology(invalid)) = Topology::parse("app = 5") else {
        panic!("a number is no name")
    };
    let (task, text): (Box<str>, Box<str>) = ("email.send".into(), "it".into());
    let t = || text.clone();
    #[cfg_attr(not(feature = "postgres"), allow(unused_mut))]
    #[rustfmt::skip]
    let mut errors: Vec<(Error, ErrorKind, bool, Option<Stored>)> = vec![
        (TopologyError::Unreadable { path: "a.toml".into(), cause: io() }.into(), Configuration, false, None),
        (TopologyError::Unreadable { path: "a.toml".into(), cause: io::Error::new(io::ErrorKind::TimedOut, "no answer") }.into(), Configuration, true, None),
        (invalid.into(), Configuration, false, None),
        (TopologyError::InvalidSchedule { schedule: t(), problem: t() }.into(), Invalid, false, None),
        (TopologyError::UnknownSchedule { schedule: t(), near: None }.into(), NotFound, false, None),
        (BrokerError::InvalidUrl { problem: t() }.into(), Invalid, false, None),
        (BrokerError::Unreachable { address: t(), cause: t(), source: source() }.into(), Connection, true, None),
        (BrokerError::LoginRefused { address: t(), user: t() }.into(), Permission, false, None),
        (BrokerError::VirtualHostRefused { virtual_host: t(), cause: t() }.into(), Permission, false, None),
        (BrokerError::UnknownVersion { reported: "?".into() }.into(), Unsupported, false, None),
        (BrokerError::UnsupportedVersion { version: version() }.into(), Unsupported, false, None),
        (BrokerError::UnsupportedPriorities { tier: "a".into(), max_priority: 5, version: version() }.into(), Unsupported, false, None),
        (BrokerError::Failed { tried: t(), cause: t(), source: source() }.into(), Connection, true, None),
        (BrokerError::AccessRefused { tried: t(), needed: t() }.into(), Permission, false, None),
        (BrokerError::Refused { tried: t(), cause: t() }.into(), Refused, false, None),
        (BrokerError::InvalidManagementUrl { problem: t() }.into(), Invalid, false, None),
        (BrokerError::ManagementFailed { tried: t(), cause: t(), source: source() }.into(), Connection, true, None),
        (BrokerError::ManagementLoginRefused { tried: t(), user: t() }.into(), Permission, false, None),
        (PublishError::UnmappedTask { task: "a".into() }.into(), NotFound, false, NO),
        (PublishError::PayloadNotEncodable { task: "a", cause: no_json }.into(), Invalid, false, NO),
        (PublishError::TooLarge { task: task.clone(), size: 2, limit: 1 }.into(), Invalid, false, NO),
        (PublishError::HeadersTooLarge { task: task.clone(), size: 2, limit: 1 }.into(), Invalid, false, NO),
        (PublishError::InvalidMessage { task: task.clone(), problem: t() }.into(), Invalid, false, NO),
        (PublishError::InvalidPriority { task, priority: 3, highest: None }.into(), Invalid, false, NO),
        (TopologyError::NotMoving { tier: t(), near: None, moving: t() }.into(), NotFound, false, None),
        (TopologyError::NotOnBroker { tier: t(), near: None, on_broker: t() }.into(), NotFound, false, None),
        (TopologyError::NoBroker { tiers: t() }.into(), Configuration, false, None),
        (TopologyError::NoDatabase { tiers: t() }.into(), Configuration, false, None),
        (TopologyError::LimitsWithoutDatabase { limited: t() }.into(), Configuration, false, None),
        (PublishError::DelayTooLong { delay: Duration::MAX, longest: Duration::ZERO }.into(), Invalid, false, NO),
        (PublishError::NoDelays { task: t(), tier: t() }.into(), Invalid, false, NO),
        (PublishError::InvalidKey { task: t(), problem: t() }.into(), Invalid, false, NO),
        (PublishError::KeyWithoutDatabase { task: t() }.into(), Configuration, false, NO),
        (PublishError::Duplicate { task: t(), key: t(), first: id() }.into(), Conflict, false, NO),
        (PublishError::IdempotencyMismatch { task: t(), key: t(), first: id() }.into(), Conflict, false, NO),
        (PublishError::KeyBusy { id: id(), key: t(), problem: t() }.into(), Conflict, true, NO),
        (PublishError::NoLongDelays { id: id(), queue: t() }.into(), Mismatch, false, NO),
        (PublishError::Unroutable { id: id(), queue: t() }.into(), Mismatch, false, NO),
        (PublishError::QueueDown { id: id(), queue: t() }.into(), Connection, true, NO),
        (PublishError::Refused { id: id() }.into(), Overloaded, true, NO),
        (PublishError::Blocked { id: id() }.into(), Overloaded, true, MAYBE),
        (PublishError::NotConnected { id: id(), cause: t() }.into(), Connection, true, NO),
        (PublishError::Unconfirmed { id: id(), cause: t() }.into(), Connection, true, MAYBE),
        (WorkerError::DuplicateHandler { task: "a", first, second: first }.into(), Configuration, false, None),
        (WorkerError::SoftTimeoutTooLong { task: "a", soft_timeout: Duration::MAX, timeout: Duration::ZERO }.into(), Configuration, false, None),
        (WorkerError::UnknownGroup { group: t(), known: t() }.into(), NotFound, false, None),
        (WorkerError::MiddlewareWithoutTarget { target: t(), near: None }.into(), NotFound, false, None),
        (WorkerError::LimitsTooLong(Box::new(LimitsTooLong {
            task: "a", timeout: Duration::MAX, group: "b".into(), prefetch: 1, ack_timeout: Duration::ZERO,
        })).into(), Configuration, false, None),
        (WorkerError::RetriesWithoutDelays { tier: t(), tasks: t() }.into(), Configuration, false, None),
        (WorkerError::NoWatchdog { cause: io() }.into(), System, false, None),
        (Error::InvalidDuration(Box::new("soon".into_duration().unwrap_err().of("delay"))), Invalid, false, None),
        (Error::Closed { tried: t() }, Closed, false, NO),
        (BrokerError::InvalidPool { problem: t() }.into(), Configuration, false, None),
        (Error::InvalidToken { shortest: 16 }, Invalid, false, None),
        #[cfg(feature = "prometheus")]
        (Error::NoMetrics, Configuration, false, None),
        (Error::NoSignals { cause: io() }, System, false, None),
        (Error::Shared(Arc::new(PublishError::Blocked { id: id() }.into())), Overloaded, true, MAYBE),
    ];
    #[cfg(feature = "postgres")]
    #[rustfmt::skip]
    errors.extend::<[(Error, ErrorKind, bool, Option<Stored>); _]>([
        (DatabaseError::InvalidUrl { problem: t() }.into(), Invalid, false, None),
        (DatabaseError::NotConfigured { tried: t() }.into(), Configuration, false, None),
        (ControlError::Unknown(Box::new(UnknownName { tried: t(), what: "tier", name: t(), near: None, app: t() })).into(), NotFound, false, None),
        (ControlError::Invalid { tried: t(), problem: t() }.into(), Invalid, false, None),
        (ControlError::Refused { tried: t(), problem: t() }.into(), Conflict, false, None),
        (DatabaseError::Unreachable { tried: t(), cause: t(), source: source() }.into(), Connection, true, None),
        (DatabaseError::LoginRefused { tried: t(), cause: t() }.into(), Permission, false, None),
        (DatabaseError::Failed { tried: t(), cause: t(), source: source() }.into(), Connection, true, None),
        (DatabaseError::Refused { tried: t(), cause: t() }.into(), Refused, false, None),
        (DatabaseError::TransactionPooler { tried: t(), cause: t() }.into(), Configuration, false, None),
        (DatabaseError::NotMigrated { tried: t(), cause: t() }.into(), Mismatch, false, None),
        (BacklogError::InvalidFilter { problem: t() }.into(), Invalid, false, None),
        (BacklogError::NotFound { id: id() }.into(), NotFound, false, None),
        (BacklogError::UnknownTier { tier: t(), near: None, known: t() }.into(), NotFound, false, None),
        (BacklogError::Refused { id: id(), problem: t() }.into(), Conflict, false, None),
        (TransactionError::NoDatabase { task: t() }.into(), Configuration, false, None),
        (TransactionError::NoIdentity { task: t(), missing: "it" }.into(), Invalid, false, None),
        (TransactionError::Unbalanced { task: t(), problem: "it" }.into(), Invalid, false, None),
        (TransactionError::StillOpen { task: t() }.into(), Conflict, false, None),
        (TransactionError::AlreadyCommitted { task: t() }.into(), Conflict, false, None),
        (TransactionError::AttemptOver { task: t() }.into(), Conflict, false, None),
        (TransactionError::TakenOver { task: t(), id: id() }.into(), Conflict, false, None),
        (TransactionError::AlreadyDone { task: t(), id: id() }.into(), Conflict, false, None),
        (TransactionError::Interrupted { task: t(), cause: t() }.into(), Connection, true, None),
        (DeadLetterError::InvalidFilter { problem: t() }.into(), Invalid, false, None),
        (DeadLetterError::NoPublisher.into(), Configuration, false, None),
        (DeadLetterError::UnknownTier { tier: t(), known: t() }.into(), NotFound, false, None),
        (DeadLetterError::NotFound { id: 1 }.into(), NotFound, false, None),
        (DeadLetterError::Refused { id: 1, problem: t() }.into(), Conflict, false, None),
        (DeadLetterError::OperationNotFound { id: 1 }.into(), NotFound, false, None),
        (DeadLetterError::OperationRefused { id: 1, problem: t() }.into(), Conflict, false, None),
    ]);
    errors
}

#[test]
fn every_error_says_its_kind_whether_to_try_again_and_whether_the_task_is_stored() {
    for (error, kind, is_transient, stored) in every_error() {
        assert_eq!(error.kind(), kind, "{error:?}");
        assert_eq!(error.is_transient(), is_transient, "{error:?}");
        assert_eq!(error.stored(), stored, "{error:?}");
    }
}

#[test]
#[cfg(feature = "postgres")]
fn the_table_has_every_error() {
    use std::collections::BTreeSet;

    /// What `apply` and `doctor` find, which their own tests make: the table has no way to.
    const ELSEWHERE: [&str; 2] = ["Mismatch", "NotVerified"];

    let mut known = BTreeSet::new();
    for source in [
        include_str!("mod.rs"),
        include_str!("../topology/error.rs"),
        include_str!("../amqp/error.rs"),
        include_str!("../publish/error.rs"),
        include_str!("../worker/error.rs"),
        include_str!("../postgres/error.rs"),
        include_str!("../backlog/error.rs"),
        include_str!("../completion/error.rs"),
        include_str!("../dead/error.rs"),
    ] {
        for item in syn::parse_file(source).unwrap().items {
            if let syn::Item::Enum(item) = item
                && item.ident.to_string().ends_with("Error")
            {
                let names = item.variants.iter().map(|it| it.ident.to_string());
                known.extend(names.filter(|name| !ELSEWHERE.contains(&name.as_str())));
            }
        }
    }
    let errors: Vec<String> = every_error()
        .iter()
        .map(|(error, ..)| format!("{error:?}"))
        .collect();
    let is_word = |c: char| c.is_alphanumeric();
    let told: BTreeSet<&str> = errors
        .iter()
        .flat_map(|error| error.split(|c| !is_word(c)))
        .collect();
    let missing: Vec<_> = known.iter().filter(|it| !told.contains(&***it)).collect();
    assert!(known.len() > 40 && missing.is_empty(), "{missing:?}");
}

#[test]
fn no_text_is_printed_twice_by_a_report_of_all_sources() {
    let mut with_source = 0;
    for (error, ..) in every_error() {
        let text = error.to_string();
        let mut source = error.source();
        while let Some(cause) = source {
            with_source += 1;
            assert!(!text.contains(&cause.to_string()), "{text}: {cause}");
            source = cause.source();
        }
    }
    assert!(with_source >= 9, "only {with_source}");
}

#[test]
fn an_error_of_the_operating_system_is_described_by_its_kind_and_is_the_source() {
    let refused = io::Error::from_raw_os_error(2);
    let Cause { text, source } = Cause::from(&refused);
    assert_eq!(&*text, "entity not found");
    let source = source.unwrap();
    let source = source.downcast_ref::<io::Error>().unwrap();
    assert_eq!(source.raw_os_error(), Some(2));
}

#[test]
fn an_error_that_somebody_wrote_is_described_by_its_text_alone() {
    let unknown = io::Error::other("no such host is known");
    let Cause { text, source } = Cause::from(&unknown);
    assert_eq!(&*text, "no such host is known");
    assert!(source.is_none());
}
