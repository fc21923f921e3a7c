//! RabbitMQ: single nodes, clusters, virtual hosts.

mod broker;
mod cluster;
mod management;
mod node;
mod pool;
mod raw;
mod release;
mod tls;
mod vhost;

pub use broker::Broker;
pub use cluster::Cluster;
pub(crate) use management::Management;
pub use node::{Node, Plugins};
pub use raw::RawProducer;
pub use release::{Release, WHICH};
pub use vhost::{QueueInfo, Vhost, depth};
