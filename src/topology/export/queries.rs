//! Expressions over the app's metrics that rules and dashboard share.
//!
//! What a process counts is summed over the processes. What each of several processes says of the whole app, such as how
//! many tasks wait, is one value, so the largest is taken: a second exporter must neither double it nor raise a second
//! alert.

use super::prometheus::RuleSettings;

/// A metric of the app, with more matchers: `tierline_waiting{job="hotel",tier="critical"}`.
pub(super) fn metric(settings: &RuleSettings, name: &str, matchers: &str) -> String {
    let parts = [settings.selector.as_str(), matchers];
    let parts: Vec<&str> = parts.into_iter().filter(|part| !part.is_empty()).collect();
    format!("{name}{{{}}}", parts.join(","))
}

/// The value that all exporters agree on.
pub(super) fn app_wide(settings: &RuleSettings, name: &str, matchers: &str) -> String {
    format!("max({})", metric(settings, name, matchers))
}

/// How much a counter of all processes has grown in a window.
pub(super) fn growth(settings: &RuleSettings, name: &str, matchers: &str, window: &str) -> String {
    format!(
        "sum(increase({}[{window}]))",
        metric(settings, name, matchers)
    )
}

/// How fast a counter of all processes grows in a second.
pub(super) fn rate(settings: &RuleSettings, name: &str, matchers: &str, window: &str) -> String {
    format!("sum(rate({}[{window}]))", metric(settings, name, matchers))
}

/// The matcher of one tier.
pub(super) fn of_tier(tier: &str) -> String {
    format!("tier=\"{tier}\"")
}

/// The matcher of some tiers. Their names have letters, digits, `_` and `-`, which mean themselves in a pattern.
pub(super) fn of_tiers(tiers: &[&str]) -> String {
    match tiers {
        [tier] => of_tier(tier),
        tiers => format!("tier=~\"{}\"", tiers.join("|")),
    }
}
