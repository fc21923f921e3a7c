//! The plan as RabbitMQ definitions, and the least permissions of those who use it.
//!
//! Serialise [`Definitions`] to JSON and hand it to `rabbitmqctl import_definitions`: the broker
//! then has everything, and neither publishers nor workers need the right to declare.
//!
//! ```
//! # use tierline::topology::{export::Definitions, plan::Plan};
//! let topology = tierline::Topology::load("topology/minimal.toml")?;
//! let plan = Plan::new(&topology, "4.3.6".parse()?, false)?;
//! let definitions = Definitions::new(&topology, &plan, "/");
//! assert_eq!(definitions.permissions[0].user, "shop.publisher");
//! # Ok::<(), tierline::Error>(())
//! ```
//!
//! The map also knows every tier, its SLO and its group, so [`Rules`] writes alerts for Prometheus and [`dashboard`] a
//! dashboard for Grafana.

mod alerts;
mod burn;
mod grafana;
mod panels;
mod prometheus;
mod queries;

pub use grafana::dashboard;
pub use prometheus::{Rule, RuleGroup, RuleSettings, Rules};
use serde::Serialize;

use super::plan::{Binding, Exchange, Plan, Queue};
use super::{Group, Topology};

/// Definitions for `rabbitmqctl import_definitions`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Definitions {
    /// The one virtual host that all of it is in.
    pub vhosts: Vec<VirtualHost>,
    /// A user for publishers and one for each group's workers, none with a password: nobody can log
    /// in until `rabbitmqctl change_password` has given it one. An import takes the passwords of
    /// existing users away again; clear this list to leave them alone.
    pub users: Vec<User>,
    /// The permissions of those users.
    pub permissions: Vec<Permission>,
    /// The plan's exchanges.
    pub exchanges: Vec<InVirtualHost<Exchange>>,
    /// The plan's queues.
    pub queues: Vec<InVirtualHost<Queue>>,
    /// The plan's bindings.
    pub bindings: Vec<InVirtualHost<Binding>>,
}

/// A virtual host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct VirtualHost {
    /// Its name.
    pub name: String,
}

/// A user without a password.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct User {
    /// Its name.
    pub name: String,
    /// Always empty: no password fits it.
    pub password_hash: String,
    /// RabbitMQ's own, so that the broker never takes the hash for one of an older kind.
    pub hashing_algorithm: String,
    /// None: it may not use the management API.
    pub tags: Vec<String>,
}

/// The permissions of a user in a virtual host: three patterns over the names of exchanges and queues.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Permission {
    /// The user.
    pub user: String,
    /// The virtual host.
    pub vhost: String,
    /// The objects it may declare and delete: none.
    pub configure: String,
    /// The exchanges it may publish to.
    pub write: String,
    /// The queues it may consume.
    pub read: String,
}

/// A declaration together with its virtual host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct InVirtualHost<T> {
    /// The virtual host.
    pub vhost: String,
    /// The declaration.
    #[serde(flatten)]
    pub declaration: T,
}

impl Definitions {
    /// The definitions of `plan` in the virtual host `vhost`, with users and permissions.
    pub fn new(topology: &Topology, plan: &Plan, vhost: &str) -> Self {
        let permissions = least_permissions(topology, vhost);
        Self {
            vhosts: vec![VirtualHost {
                name: vhost.to_owned(),
            }],
            users: permissions
                .iter()
                .map(|permission| User::without_password(&permission.user))
                .collect(),
            permissions,
            exchanges: place(&plan.exchanges, vhost),
            queues: place(&plan.queues, vhost),
            bindings: place(&plan.bindings, vhost),
        }
    }
}

/// The least that a publisher and each group's workers need, the publisher first. A group whose tiers are all in
/// Postgres needs no user on the broker, and a map with only such groups needs none at all.
///
/// A publisher may publish to the tasks and into the delays. A worker may do that too (follow-ups
/// and retries), publish dead letters of its own tiers and unrouted messages, and consume its own tiers' queues, of any
/// generation so that it can empty an old one; its group's quarantine; unrouted messages; and all dead letters, to
/// collect them.
pub fn least_permissions(topology: &Topology, vhost: &str) -> Vec<Permission> {
    let names = topology.names();
    let publish = publishing_pattern(topology);
    let permission = |user, write: String, read: String| Permission {
        user,
        vhost: vhost.to_owned(),
        configure: NOTHING.to_owned(),
        write,
        read,
    };
    let publisher = permission(
        names.publisher_user(),
        format!("^{publish}$"),
        NOTHING.to_owned(),
    );
    let tiers = any(topology.tiers_using_broker().map(|tier| tier.name.as_str()));
    let dead = format!(r"{}\.({tiers}\.dlq|unrouted)", escape(topology.app()));
    let has_queues = |group: &&Group| group.tiers.iter().any(|tier| topology.is_on_broker(tier));
    let groups = topology.groups().iter().filter(has_queues);
    let workers = groups.map(|group| {
        let app = escape(topology.app());
        let queues = format!(r"{app}\.{}", any_tier(group));
        let quarantine = format!(r"{app}\.{}\.quarantine", escape(&group.name));
        permission(
            names.worker_user(&group.name),
            format!(r"^({publish}|{queues}\.dlx|{app}\.unrouted)$"),
            format!(r"^({queues}(\.g[0-9]+)?|{quarantine}|{dead})$"),
        )
    });
    let publisher = topology.broker_tiers().next().map(|_| publisher);
    publisher.into_iter().chain(workers).collect()
}

/// Matches no name: the broker checks its nameless default exchange as `amq.default`.
const NOTHING: &str = "^$";

fn publishing_pattern(topology: &Topology) -> String {
    let app = escape(topology.app());
    // With those of tiers that have moved away: programs with the map of before still publish there.
    let tiers = topology.tiers_using_broker().filter(|tier| tier.delays);
    let ladders: Vec<_> = tiers.map(|tier| tier.name.as_str()).collect();
    if ladders.is_empty() {
        return format!(r"{app}\.tasks");
    }
    // Also where long delays are rows: a process without a database may have the same user.
    let ladders = any(ladders.into_iter().chain(["long"]));
    format!(r"{app}\.(tasks|delay\.{ladders}\.[0-9]+)")
}

fn any_tier(group: &Group) -> String {
    any(group.tiers.iter().map(String::as_str))
}

fn any<'n>(names: impl Iterator<Item = &'n str>) -> String {
    format!("({})", names.map(escape).collect::<Vec<_>>().join("|"))
}

/// Takes a name literally in a pattern.
fn escape(name: &str) -> String {
    let escaped = |c: char| {
        if c.is_ascii_alphanumeric() || c == '_' {
            String::from(c)
        } else {
            format!("\\{c}")
        }
    };
    name.chars().map(escaped).collect()
}

fn place<T: Clone>(declarations: &[T], vhost: &str) -> Vec<InVirtualHost<T>> {
    let place = |declaration: &T| InVirtualHost {
        vhost: vhost.to_owned(),
        declaration: declaration.clone(),
    };
    declarations.iter().map(place).collect()
}

impl User {
    fn without_password(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            password_hash: String::new(),
            hashing_algorithm: "rabbit_password_hashing_sha256".to_owned(),
            tags: Vec::new(),
        }
    }
}
