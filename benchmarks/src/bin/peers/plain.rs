//! The best plain lapin programs: sends overlapped, one acknowledgement for all that has arrived.

use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use futures_util::{FutureExt, StreamExt, stream};
use lapin::options::{
    BasicAckOptions, BasicConsumeOptions, BasicPublishOptions, BasicQosOptions,
    ConfirmSelectOptions, QueueDeclareOptions,
};
use lapin::types::FieldTable;
use lapin::{BasicProperties, Channel, Confirmation, Connection, ConnectionProperties};
use tierline_testbed::AMQP_URL;

use crate::own::{note, now};
use crate::program::NOTES_EVERY;

const QUEUE: &str = "noop";
const WINDOW: u16 = 1_000;

/// A command of `peers/peer.py`, and `many` to publish in a window.
pub(crate) async fn run(command: &[&str]) -> Result<()> {
    let url = std::env::var(AMQP_URL)?;
    let connection = Connection::connect(&url, ConnectionProperties::default()).await?;
    let channel = connection.create_channel().await?;
    let options = QueueDeclareOptions {
        durable: true,
        ..QueueDeclareOptions::default()
    };
    channel
        .queue_declare(QUEUE.into(), options, FieldTable::default())
        .await?;
    match *command {
        ["fill" | "many", QUEUE, count] => {
            let window = if command[0] == "many" { WINDOW } else { 1 };
            tokio::spawn(fill(channel, count.parse()?, window)).await?
        }
        ["work", "drain"] => work(channel).await,
        _ => bail!("not a command: {command:?}"),
    }
}

async fn fill(channel: Channel, count: usize, window: u16) -> Result<()> {
    channel
        .confirm_select(ConfirmSelectOptions::default())
        .await?;
    let begin = Instant::now();
    let mut sends = stream::iter(0..count)
        .map(|number| send(&channel, number))
        .buffered(window.into());
    while let Some(confirmation) = sends.next().await {
        ensure!(matches!(confirmation?, Confirmation::Ack(None)), "refused");
    }
    println!("{}", begin.elapsed().as_secs_f64());
    Ok(())
}

async fn send(channel: &Channel, number: usize) -> lapin::Result<Confirmation> {
    let payload = format!(r#"{{"number":{number}}}"#);
    let properties = BasicProperties::default()
        .with_content_type("application/json".into())
        .with_delivery_mode(2);
    let options = BasicPublishOptions {
        mandatory: true,
        immediate: false,
    };
    let sent = channel.basic_publish(
        "".into(),
        QUEUE.into(),
        options,
        payload.as_bytes(),
        properties,
    );
    sent.await?.await
}

async fn work(channel: Channel) -> Result<()> {
    channel
        .basic_qos(WINDOW, BasicQosOptions::default())
        .await?;
    let options = BasicConsumeOptions::default();
    let mut consumer = channel
        .basic_consume(QUEUE.into(), "".into(), options, FieldTable::default())
        .await?;
    loop {
        let mut delivery = consumer.next().await.context("the consumer ended")??;
        loop {
            execute(&delivery.data)?;
            match consumer.next().now_or_never() {
                Some(Some(more)) => delivery = more?,
                _ => break,
            }
        }
        let options = BasicAckOptions { multiple: true };
        let _ = channel
            .basic_ack(delivery.delivery_tag, options)
            .now_or_never();
    }
}

fn execute(payload: &[u8]) -> Result<()> {
    #[derive(serde::Deserialize)]
    struct Noop {
        number: usize,
    }
    let Noop { number } = serde_json::from_slice(payload)?;
    if number.is_multiple_of(NOTES_EVERY) {
        note(&format!("noop {}", now()));
    }
    Ok(())
}
