//! What it costs to check the broker's frames before lapin parses them: processor time per message of
//! a drain, with and without the check.
//!
//! The drain is the leanest there is: plain lapin that does nothing with a message and acknowledges many
//! at once. So the share of the check is larger here than in any worker.

use anyhow::{Context, Result};
use async_rs::util::RuntimeParts;
use async_rs::{Runtime, Tokio, TokioRuntime};
use futures_util::StreamExt;
use lapin::options::{
    BasicAckOptions, BasicConsumeOptions, BasicPublishOptions, BasicQosOptions,
    ConfirmSelectOptions, QueueDeclareOptions,
};
use lapin::tcp::{AMQPUriTcpExt, OwnedTLSConfig};
use lapin::types::{AMQPValue, FieldTable};
use lapin::uri::AMQPUri;
use lapin::{AsyncTcpStream, BasicProperties, Connection, ConnectionProperties};
use tierline::TaskId;
use tierline_benchmarks::{Comparison, Report, is_quick};
use tierline_testbed::vhost;

use stream::{Checked, CheckedReactor};

/// The files that check what the broker sends, as they are in the library.
#[path = "../../../../src/amqp/stream"]
#[allow(dead_code, reason = "not all of it is used here")]
mod checking {
    pub(crate) mod content_header;
    pub(crate) mod frames;
}

mod stream;

const QUEUE: &str = "drained";
const PREFETCH: u16 = 1_000;
const FRAME_MAX: u32 = 131_072;

#[tokio::main]
async fn main() -> Result<()> {
    let (rounds, count) = match is_quick() {
        true => (3, 20_000),
        false => (9, 100_000),
    };
    let vhost = vhost().await;
    let url = vhost.amqp_url();
    let mut report = Report::new("frames");
    // More is better in a comparison, so the figure is messages per second of processor time.
    let measured = Comparison::new(
        "A drain of plain lapin, messages of 256 bytes with tierline's properties",
        "messages per second of processor time",
    )
    .contender("without the check", async || {
        fill(url, count).await?;
        drain(unchecked(url).await?, count).await
    })
    .contender("with the check", async || {
        fill(url, count).await?;
        drain(checked(url).await?, count).await
    })
    .at_least(1.0 / 1.03, "without the check")
    .run(rounds)
    .await?;
    report.add(measured);
    report.finish()
}

fn uri(url: &str) -> Result<AMQPUri> {
    let mut uri: AMQPUri = url.parse().map_err(anyhow::Error::msg)?;
    uri.query.frame_max = Some(FRAME_MAX);
    Ok(uri)
}

async fn unchecked(url: &str) -> Result<Connection> {
    let connecting = Connection::connect_uri(uri(url)?, ConnectionProperties::default());
    Ok(connecting.await?)
}

async fn checked(url: &str) -> Result<Connection> {
    let tokio = Tokio::current();
    let reactor = CheckedReactor(tokio.clone());
    let connecting = Connection::connector(
        uri(url)?,
        Runtime::new(RuntimeParts::new(tokio, reactor)),
        async move |uri, _| {
            let tls = OwnedTLSConfig::default();
            let tokio = TokioRuntime::tokio_current();
            let stream = uri.connect_with_config_async(tls.as_ref(), &tokio).await?;
            Ok(AsyncTcpStream::Plain(Checked::new(stream, FRAME_MAX)))
        },
        ConnectionProperties::default(),
    );
    Ok(connecting.await?)
}

/// Publishes what a worker would find, as a first attempt.
async fn fill(url: &str, count: u64) -> Result<()> {
    let connection = unchecked(url).await?;
    let channel = connection.create_channel().await?;
    let mut arguments = FieldTable::default();
    arguments.insert(
        "x-queue-type".into(),
        AMQPValue::LongString("quorum".into()),
    );
    let options = QueueDeclareOptions::durable();
    channel
        .queue_declare(QUEUE.into(), options, arguments)
        .await?;
    channel
        .confirm_select(ConfirmSelectOptions::default())
        .await?;
    let properties = BasicProperties::default()
        .with_delivery_mode(2)
        .with_priority(5)
        .with_message_id(TaskId::random().as_str().into())
        .with_type("guest.send_welcome_email".into());
    let payload = [b'x'; 256];
    let publishing = futures_util::stream::iter(0..count).map(|_| async {
        let (exchange, options) = ("".into(), BasicPublishOptions::default());
        let properties = properties.clone();
        let sent = channel.basic_publish(exchange, QUEUE.into(), options, &payload, properties);
        sent.await?.await
    });
    let mut publishing = publishing.buffer_unordered(1_000);
    while let Some(confirmed) = publishing.next().await {
        confirmed?;
    }
    connection.close(200, "done".into()).await?;
    Ok(())
}

/// How many messages a second of processor time is enough for.
async fn drain(connection: Connection, count: u64) -> Result<f64> {
    let channel = connection.create_channel().await?;
    channel
        .basic_qos(PREFETCH, BasicQosOptions::default())
        .await?;
    let options = BasicConsumeOptions::default();
    let before = processor_time()?;
    let mut consumer = channel
        .basic_consume(QUEUE.into(), "".into(), options, FieldTable::default())
        .await?;
    for seen in 1..=count {
        let delivery = consumer.next().await.context("the consumer ended")??;
        if seen % 200 == 0 || seen == count {
            let options = BasicAckOptions { multiple: true };
            channel.basic_ack(delivery.delivery_tag, options).await?;
        }
    }
    let used = processor_time()? - before;
    connection.close(200, "done".into()).await?;
    Ok(count as f64 / used)
}

/// The seconds that this process has been running on a processor, all its threads together.
fn processor_time() -> Result<f64> {
    let mut nanoseconds = 0;
    for thread in std::fs::read_dir("/proc/self/task")? {
        // A thread may end meanwhile; those of a drain do not.
        let Ok(stat) = std::fs::read_to_string(thread?.path().join("schedstat")) else {
            continue;
        };
        let on_processor = stat.split_whitespace().next().context("no times")?;
        nanoseconds += on_processor.parse::<u64>()?;
    }
    Ok(nanoseconds as f64 / 1e9)
}
