//! The broker room against real brokers. `cargo xtask test` starts them.

#![cfg(test)]

mod apply;
mod cluster;
mod doctor;
mod exported;
mod login;

use std::time::Duration;

use lapin::options::{BasicPublishOptions, ConfirmSelectOptions};
use lapin::{BasicProperties, Channel, ConnectionProperties};
use tierline::amqp::{Connection, Management};
use tierline::topology::plan::Plan;
use tierline::{Error, Topology};
use tierline_testbed::{Vhost, management_url};

const HOTEL: &str = "topology/hotel.toml";

fn hotel() -> Topology {
    Topology::load(HOTEL).unwrap()
}

/// The hotel's file with some of its text replaced.
fn hotel_with(text: &str, replacement: &str) -> Topology {
    let file = std::fs::read_to_string(HOTEL).unwrap();
    assert!(file.contains(text), "{text}");
    Topology::parse(file.replacen(text, replacement, 1)).unwrap()
}

async fn open(vhost: &Vhost) -> Connection {
    Connection::open(vhost.amqp_url(), "test").await.unwrap()
}

fn plan(connection: &Connection, topology: &Topology) -> Plan {
    Plan::new(topology, connection.version(), false).unwrap()
}

async fn apply(connection: &Connection, topology: &Topology) -> Result<(), Error> {
    tierline::amqp::apply(connection, &plan(connection, topology))
        .await
        .map(|_| ())
}

/// The management API of the broker that the tests share.
pub(crate) fn management() -> Management {
    let amqp = std::env::var(tierline_testbed::AMQP_URL).unwrap();
    Management::new(&management_url(&amqp)).unwrap()
}

/// A channel of a client that knows nothing of tierline, with publisher confirms.
async fn stranger(url: &str) -> (lapin::Connection, Channel) {
    let connection = lapin::Connection::connect(url, ConnectionProperties::default())
        .await
        .unwrap();
    let channel = connection.create_channel().await.unwrap();
    channel
        .confirm_select(ConfirmSelectOptions::default())
        .await
        .unwrap();
    (connection, channel)
}

async fn publish(channel: &Channel, exchange: &str, key: &str) -> lapin::Result<()> {
    let options = BasicPublishOptions::default();
    let properties = BasicProperties::default().with_delivery_mode(2);
    channel
        .basic_publish(exchange.into(), key.into(), options, b"{}", properties)
        .await?
        .await
        .map(|_| ())
}

/// Asks again and again until the answer is yes.
pub(crate) async fn until(what: &str, mut happened: impl AsyncFnMut() -> bool) {
    let asking = async {
        while !happened().await {
            // The broker is to get on with it, not to answer.
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    let limit = Duration::from_secs(30);
    let waited = tokio::time::timeout(limit, asking).await;
    assert!(waited.is_ok(), "{what}: not within {limit:?}");
}
