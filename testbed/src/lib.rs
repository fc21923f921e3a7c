//! Real servers for tests, demo and benchmarks: private RabbitMQ nodes, clusters and Postgres
//! servers that are started, steered (killed, paused, cut off) and gone without a trace.
//!
//! Most tests share one broker and one Postgres, which `cargo xtask test` starts, and are kept
//! apart by a virtual host ([`vhost`]) and a database ([`database`]) of their own. Tests that steer
//! a server start their own: [`Broker`], [`Cluster`], [`Postgres`].
//!
//! Everything is on 127.0.0.1, on ports that no other testbed of this machine uses, with its data
//! under `target/testbed`. When the process that started a server ends, however it ends, the
//! server ends too.

mod cargo;
mod compose;
mod folder;
mod guard;
mod ports;
mod postgres;
mod process;
mod prometheus;
mod provide;
mod proxy;
mod python;
mod rabbitmq;
mod servers;
mod shared;
mod url;

pub use cargo::cargo;
pub use folder::{KEEP, target, wait_until_clean};
pub use postgres::{Database, PgBouncer, PoolMode, Postgres};
pub use process::Foreground;
pub use prometheus::{FiringAlert, Prometheus, Promtool, ScrapeTarget};
pub use provide::programs;
pub use proxy::{Network, Proxy};
pub use python::Python;
pub use rabbitmq::{
    Broker, Cluster, Node, Plugins, QueueInfo, RawProducer, Release, Vhost, WHICH, depth,
};
pub use servers::{DatabaseServer, Servers};
pub use shared::{
    AMQP_URL, DATABASE_URL, MANAGEMENT_URL, check_management, connection_memory, database,
    management_url, rabbitmq_version, vhost,
};
