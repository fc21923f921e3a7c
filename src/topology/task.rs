//! `[tasks]`: the map from every task to its tier.

use std::collections::HashMap;
use std::ops::Range;

use toml::de::{DeTable, DeValue};

use super::limit::{self, Limit, Of};
use super::names::LONGEST;
use super::reader::{At, Reader, did_you_mean, found, near_miss, quoted};
use super::source::Source;
use super::tier::{Home, Tier};

/// A task as the map has it: its one tier, and its priority there.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct MappedTask {
    /// The task's name: up to 255 bytes of UTF-8 without control characters.
    pub name: String,
    /// The tier it runs in; also the routing key that it is published with.
    pub tier: String,
    /// The priority that its messages carry, higher first. What the file says, else 5, or the
    /// tier's `max_priority` where that is lower. In a tier without priorities always 4, so that
    /// the first in is the first out on every version of RabbitMQ.
    pub priority: u8,
    /// How often it may start, and how many may run, over all processes. Default `None`: as there are slots of its tier.
    pub limit: Option<Limit>,
}

pub(super) fn read(root: &mut Reader<'_>, tiers: &[At<Tier>]) -> Vec<MappedTask> {
    let Some(section) = root.table("tasks") else {
        return Vec::new();
    };
    let tiers = tiers
        .iter()
        .map(At::get_ref)
        .map(|tier| (tier.name.as_str(), tier))
        .collect();
    let tasks = section.entries().into_iter();
    tasks
        .filter_map(|(name, value)| read_task(&name, value, &tiers, section.source()))
        .collect()
}

type Tiers<'t> = HashMap<&'t str, &'t Tier>;

/// `"tier"`, or `{ tier = "tier", priority = 9, limit = { … } }`.
fn read_task<'f>(
    name: &At<&str>,
    value: &'f At<DeValue<'f>>,
    tiers: &Tiers<'_>,
    source: &'f Source<'f>,
) -> Option<MappedTask> {
    check_name(name, source);
    let task = *name.get_ref();
    let (tier, priority, limit) = match value.get_ref() {
        DeValue::String(tier) => {
            let tier = find_tier(task, tier, &value.span(), tiers, source)?;
            (tier, None, None)
        }
        DeValue::Table(table) if table.contains_key("tier") || is_inline(value, source) => {
            let what = format!("the task {}", quoted(task));
            let mut table = Reader::new(what, value.span(), table, source);
            let tier = table
                .text("tier")
                .and_then(|tier| find_tier(task, tier, &table.span_of("tier"), tiers, source));
            let priority = table.integer("priority", 0..=u8::MAX);
            if let (Some(tier), Some(priority)) = (tier, priority) {
                check_priority(priority, tier, &table);
            }
            let limit = limit::read(&mut table, Of::Task);
            if let (Some(tier), Some(limit)) = (tier, &limit) {
                check_fair(limit, tier, &table);
            }
            table.finish(&[("tier", "write { tier = \"NAME\", priority = 5 }")]);
            (tier?, priority, limit)
        }
        DeValue::Table(table) => {
            report_unquoted(task, table, source);
            return None;
        }
        other => {
            let message = format!(
                "the task {} must name its tier, found {}",
                quoted(task),
                found(other)
            );
            source.report(
                &value.span(),
                message,
                Some("write \"NAME\", or { tier = \"NAME\", priority = 5 }"),
            );
            return None;
        }
    };
    Some(MappedTask {
        name: task.to_owned(),
        tier: tier.name.clone(),
        priority: tier.priority(priority),
        limit,
    })
}

fn find_tier<'t>(
    task: &str,
    tier: &str,
    span: &Range<usize>,
    tiers: &Tiers<'t>,
    source: &Source<'_>,
) -> Option<&'t Tier> {
    let found = tiers.get(tier).copied();
    // Without any tier, that is the mistake, and it is reported once.
    if found.is_none() && !tiers.is_empty() {
        let message = format!(
            "the task {} names the unknown tier {}",
            quoted(task),
            quoted(tier)
        );
        let near = near_miss(tier, tiers.keys().copied());
        source.report(span, message, did_you_mean(near).as_deref());
    }
    found
}

fn check_priority(priority: u8, tier: &Tier, task: &Reader<'_>) {
    let (reach, help) = match tier.home.max_priority() {
        Some(highest) if priority <= highest => return,
        Some(highest) => (
            format!("goes up to {highest}"),
            format!("lower it, or raise max_priority in [tiers.{}]", tier.name),
        ),
        None => (
            "has no priorities".to_owned(),
            format!(
                "remove it, or set {} in [tiers.{}]",
                match tier.home {
                    Home::Classic { .. } | Home::Postgres { .. } => "max_priority",
                    Home::Quorum { .. } =>
                        "queue = \"classic\" or, from RabbitMQ 4.3 on, max_priority",
                },
                tier.name
            ),
        ),
    };
    let message = format!(
        "{} has priority {priority}, and its tier {:?} {reach}",
        task.what(),
        tier.name
    );
    task.reject("priority", message, Some(&help));
}

/// Refuses keys of a task that are not those of its tier: a row waits among those of one key.
fn check_fair(limit: &Limit, tier: &Tier, task: &Reader<'_>) {
    let (Some(per), Some(fair)) = (&limit.per, &tier.fair) else {
        return;
    };
    if per != fair {
        let message = format!(
            "{} has a limit per {per:?}, and its tier {:?} is fair by {fair:?}",
            task.what(),
            tier.name
        );
        let help = "a waiting task is held back by one key; make the two the same, or give the task another tier";
        task.reject("limit", message, Some(help));
    }
}

/// A dot in a name without quotes makes a table of its first part: finds the names that were meant.
fn report_unquoted(prefix: &str, table: &DeTable<'_>, source: &Source<'_>) {
    for (rest, value) in table {
        let full = format!("{prefix}.{}", rest.get_ref());
        match value.get_ref() {
            DeValue::Table(table) if !is_inline(value, source) => {
                report_unquoted(&full, table, source)
            }
            _ => {
                let full = quoted(&full);
                let message =
                    format!("the name of the task {full} needs quotes, because of its dots");
                let help = format!("write {full} = \"TIER\" below [tasks]");
                source.report(&rest.span(), message, Some(&help));
            }
        }
    }
}

fn is_inline(table: &At<DeValue<'_>>, source: &Source<'_>) -> bool {
    source
        .text()
        .get(table.span())
        .is_some_and(|written| written.starts_with('{'))
}

fn check_name(name: &At<&str>, source: &Source<'_>) {
    let mistake = match *name.get_ref() {
        "" => "is empty".to_owned(),
        name if name.chars().any(char::is_control) => "has control characters".to_owned(),
        name if name.len() > LONGEST => {
            format!("has {} bytes, and AMQP carries {LONGEST}", name.len())
        }
        _ => return,
    };
    let message = format!("the task name {} {mistake}", quoted(name.get_ref()));
    let help = "the name travels with every message; write \"area.verb\", say";
    source.report(&name.span(), message, Some(help));
}
