//! `[groups.NAME]`: the tiers that one pool of workers serves.

use std::collections::HashMap;

use serde::Serialize;

use super::names::{self, Names};
use super::reader::{At, Reader, did_you_mean, near_miss, quoted};
use super::source::Source;
use super::tier::Tier;

/// A group: one pool of slots, and the tiers that it serves. Every tier is in exactly one.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Group {
    /// The name in `[groups.NAME]`: letters, digits, `_` and `-`.
    pub name: String,
    /// The tiers it serves, at least one. In a strict group the first comes first.
    pub tiers: Vec<String>,
    /// Which tier a free slot takes from. Default strict.
    pub order: Order,
    /// How many tasks each process runs at once. No default. With `prefetch`, at most 65535 in all.
    pub concurrency: u16,
    /// How many messages of a tier a process holds per slot, the running one included. Default 1:
    /// what it holds is out of the reach of priority, so more is faster and less urgent.
    pub prefetch: u16,
}

/// How a group with several tiers picks the next task.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Order {
    /// `"strict"`: a tier is served only while all before it in the list are empty.
    Strict,
    /// `"weighted"`: tiers with work share the slots by weight; every tier needs one.
    Weighted,
}

const ORDERS: [(&str, Order); 2] = [("strict", Order::Strict), ("weighted", Order::Weighted)];

pub(super) fn read(root: &mut Reader<'_>, app: Option<&str>, tiers: &[At<Tier>]) -> Vec<Group> {
    let Some(section) = root.table("groups") else {
        return Vec::new();
    };
    let mut members = Members::new(tiers, section.source());
    let mut groups = Vec::new();
    for (name, table) in section.tables() {
        let names = Names::new(app.unwrap_or_default());
        let user = names.worker_user(name.get_ref()).len();
        let length = user.max(names.quarantine(name.get_ref()).len());
        if let Some((message, help)) = names::mistake("group", name.get_ref(), length) {
            section.source().report(&name.span(), message, Some(&help));
        }
        groups.push(read_group(name.get_ref(), table, &mut members));
    }
    members.report_homeless();
    groups
}

fn read_group(name: &str, mut table: Reader<'_>, members: &mut Members<'_>) -> Group {
    let tiers = table.texts("tiers");
    let group = Group {
        name: name.to_owned(),
        tiers: tiers
            .iter()
            .flatten()
            .map(|tier| (*tier.get_ref()).to_owned())
            .collect(),
        order: table.choice("order", &ORDERS).unwrap_or(Order::Strict),
        concurrency: table.integer("concurrency", 1..=u16::MAX).unwrap_or(1),
        prefetch: table.integer("prefetch", 1..=u16::MAX).unwrap_or(1),
    };
    if group.concurrency.checked_mul(group.prefetch).is_none() {
        let held = u32::from(group.concurrency) * u32::from(group.prefetch);
        let message = format!(
            "{} holds {held} messages per tier: concurrency times prefetch",
            table.what()
        );
        let help = format!(
            "AMQP counts prefetched messages up to {}; lower one of them",
            u16::MAX
        );
        table.reject("concurrency", message, Some(&help));
    }
    match tiers {
        Some(tiers) => members.add(&group, &table, &tiers),
        None => members.complete = false,
    }
    table.finish(&[
        (
            "tiers",
            "write tiers = [\"NAME\"] with the tiers that it serves",
        ),
        (
            "concurrency",
            "write concurrency = 4, say: how many tasks a process runs at once",
        ),
    ]);
    group
}

/// Which group each tier is in, to find those that are in none or in two.
struct Members<'f> {
    tiers: &'f [At<Tier>],
    /// The group of each tier, and where in the file that is said.
    homes: HashMap<&'f str, (String, usize)>,
    /// Whether every group's list could be read: else a tier may be in one that could not.
    complete: bool,
    source: &'f Source<'f>,
}

impl<'f> Members<'f> {
    fn new(tiers: &'f [At<Tier>], source: &'f Source<'f>) -> Self {
        Self {
            tiers,
            homes: HashMap::new(),
            complete: true,
            source,
        }
    }

    fn add(&mut self, group: &Group, table: &Reader<'_>, names: &[At<&str>]) {
        if names.is_empty() {
            let message = format!("{} serves no tiers", table.what());
            table.reject(
                "tiers",
                message,
                Some("name at least one tier, or remove the group"),
            );
        }
        let known = self.tiers.iter().map(At::get_ref);
        for name in names {
            match known.clone().find(|tier| tier.name == *name.get_ref()) {
                Some(tier) => self.place(tier, group, table.what(), name),
                // Without any tier, that is the mistake, and it is reported once.
                None if self.tiers.is_empty() => {}
                None => self.report_unknown(group, table.what(), name),
            }
        }
    }

    fn place(&mut self, tier: &'f Tier, group: &Group, what: &str, name: &At<&str>) {
        let shown = quoted(&tier.name);
        if let Some((other, place)) = self.homes.get(tier.name.as_str()) {
            let message = match *other == group.name {
                true => format!("{what} names the tier {shown} twice"),
                false => format!(
                    "the tier {shown} is in two groups: {other:?} and {:?}",
                    group.name
                ),
            };
            let line = self.source.line(*place);
            let help = format!("a tier has one place in one group, as in line {line}; remove one");
            self.source.report(&name.span(), message, Some(&help));
            return;
        }
        self.homes
            .insert(&tier.name, (group.name.clone(), name.span().start));
        if group.order == Order::Weighted && tier.weight.is_none() {
            let message = format!("{what} is weighted, and its tier {shown} has no weight");
            let help = format!(
                "write weight = 1, say, in [tiers.{}], or order = \"strict\" here",
                tier.name
            );
            self.source.report(&name.span(), message, Some(&help));
        }
    }

    fn report_unknown(&mut self, group: &Group, what: &str, name: &At<&str>) {
        let near = near_miss(
            name.get_ref(),
            self.tiers.iter().map(|tier| tier.get_ref().name.as_str()),
        );
        let message = format!("{what} names the unknown tier {}", quoted(name.get_ref()));
        self.source
            .report(&name.span(), message, did_you_mean(near).as_deref());
        // The tier that was meant is not also in no group.
        if let Some(near) = near {
            self.homes
                .entry(near)
                .or_insert_with(|| (group.name.clone(), name.span().start));
        }
    }

    fn report_homeless(&self) {
        for tier in self.tiers.iter().filter(|_| self.complete) {
            let name = tier.get_ref().name.as_str();
            if !self.homes.contains_key(name) {
                let message = format!("the tier {} is in no group", quoted(name));
                let help = "its tasks would not run; add it to the tiers of a group";
                self.source.report(&tier.span(), message, Some(help));
            }
        }
    }
}
