//! The tiers that are published to.

use anyhow::{Context, Result};
use lapin::options::{BasicConsumeOptions, QueuePurgeOptions};
use lapin::types::FieldTable;
use lapin::{Channel, Connection, ConnectionProperties, Consumer};
use serde::{Deserialize, Serialize};
use tierline::{Tierline, Topology};

/// A tier of each type of queue; a task of the same name goes to it.
pub(crate) const TIERS: [&str; 2] = ["classic", "quorum"];

const MAP: &str = r#"
    app = "bench"
    [tiers.classic]
    queue = "classic"
    [tiers.quorum]
    queue = "quorum"
    [groups.all]
    tiers = ["classic", "quorum"]
    concurrency = 4
    [tasks]
    classic = "classic"
    quorum = "quorum"
    "hotel.send_a_note.classic" = "classic"
    "hotel.send_a_note.quorum" = "quorum"
"#;

/// The task of a tier with a name as long as many have: about 25 bytes.
pub(crate) fn task(tier: &str) -> String {
    format!("hotel.send_a_note.{tier}")
}

/// A payload of 256 bytes as JSON.
#[derive(Serialize, Deserialize)]
pub(crate) struct Payload {
    text: String,
}

impl Payload {
    pub(crate) fn new() -> Self {
        let text = "x".repeat(256 - r#"{"text":""}"#.len());
        Self { text }
    }

    pub(crate) fn to_json(&self) -> Result<Vec<u8>> {
        Ok(serde_json::to_vec(self)?)
    }
}

pub(crate) async fn connect(url: &str) -> Result<Tierline> {
    let topology = Topology::parse(MAP)?;
    Ok(Tierline::builder(topology).amqp(url).connect().await?)
}

pub(crate) fn queue(tier: &str) -> String {
    format!("bench.{tier}")
}

/// A channel for what a benchmark does beside publishing, with its connection.
pub(crate) async fn channel(url: &str) -> Result<(Connection, Channel)> {
    let connection = Connection::connect(url, ConnectionProperties::default()).await?;
    let channel = connection.create_channel().await?;
    Ok((connection, channel))
}

/// Empties a queue, and says how many were in it.
pub(crate) async fn purge(channel: &Channel, tier: &str) -> Result<u32> {
    let options = QueuePurgeOptions::default();
    Ok(channel.queue_purge(queue(tier).into(), options).await?)
}

/// Takes everything out of a tier's queue as it comes.
pub(crate) async fn consume(channel: &Channel, tier: &str) -> Result<Consumer> {
    let options = BasicConsumeOptions {
        no_ack: true,
        ..BasicConsumeOptions::default()
    };
    channel
        .basic_consume(
            queue(tier).into(),
            "".into(),
            options,
            FieldTable::default(),
        )
        .await
        .context("cannot consume")
}
