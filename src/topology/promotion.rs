//! `promote` of a tier: where its tasks go when they have waited for too long.

use std::fmt;
use std::ops::{Range, RangeInclusive};
use std::time::Duration;

use serde::{Serialize, Serializer};

use super::reader::{At, Reader, did_you_mean, near_miss, quoted};
use super::source::Source;
use super::tier::{Home, Tier};
use super::units::show_duration;

/// The rule by which tasks of a tier in Postgres move to another tier: the key `promote`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Promotion {
    /// How long a task waits before it moves, from its due time on: 1 s to 365 days. As JSON it is a text such as `"1h"`.
    #[serde(serialize_with = "shown")]
    pub after: Duration,
    /// The tier that it moves to, in Postgres or on the broker.
    pub to: String,
}

/// `to TIER after TIME`.
impl fmt::Display for Promotion {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "to {} after {}", self.to, show_duration(self.after))
    }
}

fn shown<S: Serializer>(time: &Duration, out: S) -> Result<S::Ok, S::Error> {
    out.serialize_str(&show_duration(*time))
}

/// Where a rule is in the file.
pub(super) struct RulePlace {
    rule: Range<usize>,
    to: Range<usize>,
}

/// A shorter time is no aging: a worker that is busy for a moment would move everything.
const AFTERS: RangeInclusive<Duration> = Duration::from_secs(1)..=Duration::from_secs(365 * 86_400);

/// Reads `promote`, and refuses it in a tier on the broker.
pub(super) fn read(tier: &mut Reader<'_>, home: Home) -> Option<(Promotion, RulePlace)> {
    let rule = tier.value("promote")?.span();
    let mut table = tier.table("promote")?;
    let (after, to) = (table.duration("after", AFTERS), table.text("to"));
    let place = RulePlace {
        rule,
        to: table.span_of("to"),
    };
    table.finish(&[
        (
            "after",
            "write after = \"60m\", say: how long a task waits before it moves",
        ),
        ("to", "write to = \"NAME\" with the tier that it moves to"),
    ]);
    // A wrong queue type is reported once.
    let has_queue = tier.value("queue").is_some_and(|it| {
        let queue = it.get_ref().as_str();
        queue == Some("classic") || queue == Some("quorum")
    });
    if home.is_on_broker() && has_queue {
        let message = format!(
            "promote in {} is for tiers in Postgres, and this tier is on the broker",
            tier.what()
        );
        let help = "a queue gives its messages out in its own order alone; set queue = \"postgres\", or give its tasks a \
                    more urgent tier in [tasks]";
        tier.reject("promote", message, Some(help));
        return None;
    }
    let (after, to) = (after?, to?.to_owned());
    Some((Promotion { after, to }, place))
}

/// Checks the rules against all tiers. `places` has that of each tier with a rule, by the tier's name.
pub(super) fn check(tiers: &[At<Tier>], places: &[(String, RulePlace)], source: &Source<'_>) {
    let tiers: Vec<&Tier> = tiers.iter().map(At::get_ref).collect();
    for (name, place) in places {
        let Some(tier) = find(&tiers, name) else {
            continue;
        };
        let Some(rule) = &tier.promote else {
            continue;
        };
        let what = format!("promote in [tiers.{name}]");
        let Some(_) = find(&tiers, &rule.to) else {
            let message = format!("{what} names the unknown tier {}", quoted(&rule.to));
            let near = near_miss(&rule.to, tiers.iter().map(|tier| tier.name.as_str()));
            source.report(&place.to, message, did_you_mean(near).as_deref());
            continue;
        };
        if rule.to == *name {
            let message = format!("{what} leads to the tier itself");
            let help = "name a more urgent tier, or remove it";
            source.report(&place.to, message, Some(help));
            continue;
        }
        let chain = chain(&tiers, tier);
        if let Some(circle) = circle(&chain, tier, &tiers) {
            let message = format!("{what} leads in a circle: {circle}");
            let help =
                "tasks would move for ever; remove the rule of the most urgent of these tiers";
            source.report(&place.to, message, Some(help));
            continue;
        }
        check_ttl(tier, rule, &chain, place, source);
    }
}

fn find<'t>(tiers: &[&'t Tier], name: &str) -> Option<&'t Tier> {
    tiers.iter().copied().find(|tier| tier.name == name)
}

/// A tier and those that its tasks move on to, each once.
fn chain<'t>(tiers: &[&'t Tier], first: &'t Tier) -> Vec<&'t Tier> {
    let mut chain = vec![first];
    let mut last = first;
    while let Some(rule) = &last.promote
        && let Some(next) = find(tiers, &rule.to)
        && !chain.iter().any(|tier| tier.name == next.name)
    {
        chain.push(next);
        last = next;
    }
    chain
}

/// The names of a circle that the chain of `first` comes back to it by, if `first` is its first tier in the file: a circle
/// is one mistake.
fn circle(chain: &[&Tier], first: &Tier, tiers: &[&Tier]) -> Option<String> {
    let comes_back = chain.last()?.promote.as_ref()?.to == first.name;
    let in_file = |name: &str| tiers.iter().position(|tier| tier.name == name);
    let is_first = chain
        .iter()
        .all(|tier| in_file(&tier.name) >= in_file(&first.name));
    (comes_back && is_first).then(|| {
        let names = chain.iter().map(|tier| tier.name.as_str());
        let names: Vec<&str> = names.chain([first.name.as_str()]).collect();
        names.join(", ")
    })
}

/// Age counts on when a task moves, so no tier on its way may dead-letter it for its age before.
fn check_ttl(
    tier: &Tier,
    rule: &Promotion,
    chain: &[&Tier],
    place: &RulePlace,
    source: &Source<'_>,
) {
    let after = show_duration(rule.after);
    let expires = |it: &&&Tier| it.ttl.is_some_and(|ttl| ttl <= rule.after);
    let Some(strict) = chain.iter().find(expires) else {
        return;
    };
    let ttl = show_duration(strict.ttl.unwrap_or_default());
    let name = &tier.name;
    let (message, help) = match strict.name == tier.name {
        true => (
            format!("promote in [tiers.{name}] comes too late: after {after}, and ttl is {ttl}"),
            "tasks would be dead-lettered before they move; set after below ttl",
        ),
        false => (
            format!(
                "promote in [tiers.{name}] moves tasks that have waited for {after}, and [tiers.{}] dead-letters what has \
                 waited for {ttl}",
                strict.name
            ),
            "the age of a task counts on when it moves; set after below that ttl, or raise the ttl",
        ),
    };
    source.report(&place.rule, message, Some(help));
}
