//! Triage: the probable cause of a failure, and what to do about it.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};
use tokio::time::timeout;

use super::{Reason, Summary};
use crate::message::FailureKind;

/// How long the user's classifier may take.
const CLASSIFIER_LIMIT: Duration = Duration::from_secs(20);
/// The cause of failures this recent may persist.
const RECENT: Duration = Duration::from_secs(600);

/// The probable cause of a failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum RootCause {
    /// A service that the task depends on was unavailable.
    ProviderOutage,
    /// A service that the task depends on limited the rate.
    RateLimited,
    /// The task's data is invalid.
    BadData,
    /// It took too long.
    Timeout,
    /// Its process died.
    Crash,
    /// Its handler panicked. The worker caught the panic and went on.
    Panic,
    /// No program has a handler for it, or the map has no tier for it.
    UnknownTask,
    /// The handler's type cannot deserialize the payload.
    PayloadMismatch,
    /// It waited for too long, or its queue was too long: there were too few workers.
    Overload,
    /// The rules found no cause.
    Unknown,
}

/// What to do about a failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Advice {
    /// Redrive it now.
    Redrive,
    /// Redrive it when its cause is gone.
    RedriveLater,
    /// Fix the program or the map, deploy, then redrive it.
    FixFirst,
    /// It is no longer worth running.
    Discard,
}

/// The probable cause of a failure, what to do about it, and why.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Assessment {
    /// The probable cause.
    pub root_cause: RootCause,
    /// What to do about it.
    pub advice: Advice,
    /// The reason for the advice, in a sentence.
    pub because: String,
}

/// A group of equal failures, for rules and classifiers.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct Failing<'a> {
    /// One of them.
    pub sample: &'a Summary,
    /// How many there are.
    pub count: u64,
    /// When the first of them died.
    pub first_seen: SystemTime,
    /// When the last of them died.
    pub last_seen: SystemTime,
    /// Whether the map has the task today.
    pub is_mapped: bool,
}

/// Assesses failures: first the user's rules, then the user's classifier, then tierline's own rules. The
/// first one that returns an assessment decides.
///
/// ```
/// use tierline::dead::{Advice, Assessment, RootCause, Triage};
///
/// let triage = Triage::default().rule(|failing| {
///     let error = failing.sample.error.as_deref()?;
///     error.contains("card declined").then(|| Assessment {
///         root_cause: RootCause::BadData,
///         advice: Advice::Discard,
///         because: "a declined card stays declined".to_owned(),
///     })
/// });
/// # let _ = triage;
/// ```
#[derive(Clone, Default)]
pub struct Triage {
    rules: Vec<Arc<Rule>>,
    classifier: Option<Arc<Classifier>>,
}

type Rule = dyn Fn(&Failing<'_>) -> Option<Assessment> + Send + Sync;
type Classifier = dyn for<'a> Fn(&'a Failing<'a>) -> Classifying<'a> + Send + Sync;

/// The future of a classifier; `None` leaves the assessment to tierline's rules.
pub type Classifying<'a> = Pin<Box<dyn Future<Output = Option<Assessment>> + Send + 'a>>;

impl Triage {
    /// Adds a rule. Rules run in the order in which they were added, before everything else.
    pub fn rule(
        mut self,
        rule: impl Fn(&Failing<'_>) -> Option<Assessment> + Send + Sync + 'static,
    ) -> Self {
        self.rules.push(Arc::new(rule));
        self
    }

    /// Adds a classifier that runs before tierline's own rules, for example a language model. It runs once per
    /// group and has 20 s. If it fails or returns `None`, tierline's rules decide.
    pub fn classifier(
        mut self,
        classifier: impl for<'a> Fn(&'a Failing<'a>) -> Classifying<'a> + Send + Sync + 'static,
    ) -> Self {
        self.classifier = Some(Arc::new(classifier));
        self
    }

    pub(super) async fn assess(&self, failing: &Failing<'_>) -> Assessment {
        if let Some(answer) = self.rules.iter().find_map(|rule| rule(failing)) {
            return answer;
        }
        if let Some(classifier) = &self.classifier
            && let Ok(Some(answer)) = timeout(CLASSIFIER_LIMIT, classifier(failing)).await
        {
            return answer;
        }
        assess(failing, SystemTime::now())
    }
}

impl fmt::Debug for Triage {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let classifier = self.classifier.is_some();
        write!(out, "{} rules, classifier: {classifier}", self.rules.len())
    }
}

/// Assesses by tierline's own rules.
pub(super) fn assess(failing: &Failing<'_>, now: SystemTime) -> Assessment {
    let root_cause = root_cause(failing);
    let (advice, because) = advice(failing, root_cause, now);
    Assessment {
        root_cause,
        advice,
        because: because.to_owned(),
    }
}

/// Texts in an error, in lower case, and the cause that they show. The first match counts.
const WORDS: [(RootCause, &[&str]); 4] = [
    (
        RootCause::RateLimited,
        &[
            "rate limit",
            "ratelimit",
            "too many requests",
            "throttl",
            "quota exceeded",
            " 429",
        ],
    ),
    (
        RootCause::ProviderOutage,
        &[
            "connection refused",
            "connection reset",
            "connection closed",
            "connection aborted",
            "broken pipe",
            "unreachable",
            "no route to host",
            "dns",
            "failed to lookup",
            "name resolution",
            "service unavailable",
            "bad gateway",
            "internal server error",
            "temporarily unavailable",
            "pool timed out",
            " 500",
            " 502",
            " 503",
        ],
    ),
    (
        RootCause::Timeout,
        &[
            "timed out",
            "timeout",
            "deadline exceeded",
            "deadline has elapsed",
            " 504",
        ],
    ),
    (
        RootCause::BadData,
        &[
            "invalid",
            "not found",
            "no such",
            "does not exist",
            "missing",
            "malformed",
            "unexpected",
            "out of range",
            "duplicate key",
            "violates",
            "constraint",
            "parse",
            "bad request",
            "unprocessable",
            " 400",
            " 404",
            " 422",
        ],
    ),
];

fn root_cause(failing: &Failing<'_>) -> RootCause {
    let sample = failing.sample;
    let kind = sample.error_kind.as_deref().and_then(FailureKind::parse);
    match (sample.reason, kind) {
        (Reason::UnknownTask, _) => return RootCause::UnknownTask,
        (Reason::Undecodable, _) => return RootCause::PayloadMismatch,
        (Reason::CrashLoop | Reason::DeliveryLimit, _) => return RootCause::Crash,
        (Reason::Hung, _) => return RootCause::Timeout,
        (Reason::Expired | Reason::MaxLength, _) => return RootCause::Overload,
        (_, Some(FailureKind::Crash)) => return RootCause::Crash,
        (_, Some(FailureKind::Panic)) => return RootCause::Panic,
        (_, Some(FailureKind::TimedOut)) => return RootCause::Timeout,
        (Reason::Unroutable, _) => return RootCause::UnknownTask,
        _ => {}
    }
    // A space at the beginning lets texts such as " 429" match the first word.
    let error = format!(" {}", sample.error.as_deref().unwrap_or_default()).to_lowercase();
    let found = WORDS
        .iter()
        .find(|(_, words)| words.iter().any(|word| error.contains(word)));
    match found {
        Some((cause, _)) => *cause,
        None if !failing.is_mapped => RootCause::UnknownTask,
        None => RootCause::Unknown,
    }
}

fn advice(failing: &Failing<'_>, cause: RootCause, now: SystemTime) -> (Advice, &'static str) {
    let is_recent = now
        .duration_since(failing.last_seen)
        .map_or(true, |since| since < RECENT);
    if !failing.is_mapped {
        return (
            Advice::FixFirst,
            "the map has no tier for this task: map it again, or discard it",
        );
    }
    if failing.sample.reason == Reason::NoDelays {
        return (
            Advice::FixFirst,
            "its tier has delays = false, so it could not run again later: remove that and apply the map, or let \
             its handler neither retry nor snooze",
        );
    }
    if failing.sample.reason == Reason::Unpublishable {
        return (
            Advice::FixFirst,
            "the broker does not take it as it is: raise max_message_size if it takes more, or give its task a tier \
             with queue = \"postgres\", then redrive it",
        );
    }
    match cause {
        RootCause::ProviderOutage if is_recent => (
            Advice::RedriveLater,
            "the last one failed minutes ago, so the outage may continue: try a canary first",
        ),
        RootCause::ProviderOutage => (
            Advice::Redrive,
            "an outage passes, and none failed in the last ten minutes",
        ),
        RootCause::RateLimited => (
            Advice::RedriveLater,
            "a redrive of all at once would hit the rate limit again: redrive with a rate",
        ),
        RootCause::Timeout if is_recent => (
            Advice::RedriveLater,
            "a dependency that was slow minutes ago may still be slow: try a canary first",
        ),
        RootCause::Timeout => (
            Advice::Redrive,
            "it timed out, and none did in the last ten minutes",
        ),
        RootCause::BadData => (
            Advice::FixFirst,
            "the same data fails in the same way: correct it, or discard it",
        ),
        RootCause::Crash => (
            Advice::FixFirst,
            "it killed its worker, and would again: fix the handler first",
        ),
        RootCause::Panic => (
            Advice::FixFirst,
            "its handler panicked, and the worker went on: make the handler return an error where it \
             panics, deploy that, then redrive it",
        ),
        RootCause::UnknownTask => (
            Advice::FixFirst,
            "deploy a program that has a handler for it, then redrive it",
        ),
        RootCause::PayloadMismatch => (
            Advice::FixFirst,
            "deploy a handler that reads this payload, then redrive it",
        ),
        RootCause::Overload if failing.sample.reason == Reason::Expired => (
            Advice::Discard,
            "it waited for longer than its tier allows, and is probably of no use any more",
        ),
        RootCause::Overload => (
            Advice::RedriveLater,
            "its queue was full: redrive with a rate when the backlog is gone",
        ),
        RootCause::Unknown => (
            Advice::FixFirst,
            "no rule matches this error: look at the error, then try a canary",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dead::State;

    fn summary(reason: Reason, error: &str) -> Summary {
        Summary {
            id: 1,
            message_id: None,
            task: Some("order.pay".to_owned()),
            tier: "normal".to_owned(),
            reason,
            error: Some(error.to_owned()),
            error_type: None,
            error_kind: Some("error".to_owned()),
            attempts: 1,
            life: 0,
            enqueued_at: None,
            died_at: SystemTime::UNIX_EPOCH,
            fingerprint: String::new(),
            state: State::Dead,
            redriven_from: None,
            redriven_at: None,
            outcome: None,
        }
    }

    fn failing(sample: &Summary) -> Failing<'_> {
        Failing {
            sample,
            count: 3,
            first_seen: SystemTime::UNIX_EPOCH,
            last_seen: SystemTime::UNIX_EPOCH,
            is_mapped: true,
        }
    }

    #[test]
    fn the_errors_of_everyday_are_told_apart() {
        use Reason::*;
        for (reason, error, cause, advice) in [
            (
                RetriesExhausted,
                "HTTP 503",
                RootCause::ProviderOutage,
                Advice::Redrive,
            ),
            (
                RetriesExhausted,
                "Connection refused (os error 111)",
                RootCause::ProviderOutage,
                Advice::Redrive,
            ),
            (
                RetriesExhausted,
                "429 Too Many Requests",
                RootCause::RateLimited,
                Advice::RedriveLater,
            ),
            (
                RetriesExhausted,
                "deadline has elapsed",
                RootCause::Timeout,
                Advice::Redrive,
            ),
            (
                Permanent,
                "invalid phone number",
                RootCause::BadData,
                Advice::FixFirst,
            ),
            (CrashLoop, "", RootCause::Crash, Advice::FixFirst),
            (UnknownTask, "", RootCause::UnknownTask, Advice::FixFirst),
            (
                Undecodable,
                "",
                RootCause::PayloadMismatch,
                Advice::FixFirst,
            ),
            (Expired, "", RootCause::Overload, Advice::Discard),
            (Permanent, "no", RootCause::Unknown, Advice::FixFirst),
        ] {
            let sample = summary(reason, error);
            let assessed = assess(&failing(&sample), SystemTime::now());
            assert_eq!(
                (assessed.root_cause, assessed.advice),
                (cause, advice),
                "{error}"
            );
        }
    }

    #[test]
    fn a_panic_that_was_caught_is_no_crash() {
        let mut sample = summary(Reason::RetriesExhausted, "index out of bounds");
        sample.error_kind = Some("panic".to_owned());
        let panicked = assess(&failing(&sample), SystemTime::now());
        assert_eq!(panicked.root_cause, RootCause::Panic);
        assert!(panicked.because.contains("the worker went on"));
        for (reason, kind) in [
            (Reason::RetriesExhausted, "crash"),
            (Reason::CrashLoop, "panic"),
        ] {
            let mut sample = summary(reason, "");
            sample.error_kind = Some(kind.to_owned());
            let crashed = assess(&failing(&sample), SystemTime::now());
            assert_eq!(crashed.root_cause, RootCause::Crash);
            assert_ne!(crashed.because, panicked.because);
        }
    }

    #[test]
    fn an_outage_of_this_minute_is_left_to_pass() {
        let sample = summary(Reason::RetriesExhausted, "connection refused");
        let mut failing = failing(&sample);
        failing.last_seen = SystemTime::now();
        let assessed = assess(&failing, SystemTime::now());
        assert_eq!(assessed.advice, Advice::RedriveLater);
    }

    #[tokio::test]
    async fn rules_of_the_user_come_first_and_a_classifier_before_ours() {
        let answer = |because: &str| Assessment {
            root_cause: RootCause::BadData,
            advice: Advice::Discard,
            because: because.to_owned(),
        };
        let triage = Triage::default()
            .rule(move |failing| (failing.count > 10).then(|| answer("rule")))
            .classifier(move |failing| {
                Box::pin(async move { (failing.count > 5).then(|| answer("classifier")) })
            });
        let sample = summary(Reason::Permanent, "no");
        for (count, expected) in [(11, "rule"), (6, "classifier"), (1, "no rule matches")] {
            let failing = Failing {
                count,
                ..failing(&sample)
            };
            let assessed = triage.assess(&failing).await;
            assert!(assessed.because.starts_with(expected), "{assessed:?}");
        }
    }
}
