//! The app of this benchmark, and processes that play a part in it.

use std::process::Stdio;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail};
use futures_util::stream::{FuturesUnordered, StreamExt};
use lapin::options::{BasicPublishOptions, ConfirmSelectOptions, QueuePurgeOptions};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{BasicProperties, Channel, Connection, ConnectionProperties};
use tierline::observe::Event;
use tierline::{Builder, Tierline, Topology};
use tokio::process::{Child, Command};

pub(crate) const MAP: &str = r#"
    app = "shop"
    [tiers.critical]
    queue = "classic"
    [tiers.normal]
    queue = "quorum"
    [groups.all]
    tiers = ["critical", "normal"]
    concurrency = 16
    prefetch = 4
    [tasks]
    "order.pay" = "critical"
    "order.ship" = "normal"
"#;

pub(crate) fn builder(amqp: &str, postgres: &str) -> Result<Builder> {
    let builder = Tierline::builder(Topology::parse(MAP)?);
    Ok(builder.amqp(amqp).postgres(postgres))
}

pub(crate) async fn connect(
    amqp: &str,
    postgres: &str,
    observer: impl Fn(&Event<'_>) + Send + Sync + 'static,
) -> Result<Tierline> {
    let app = builder(amqp, postgres)?.observe(observer).connect().await?;
    app.database()?.migrate().await?;
    Ok(app)
}

pub(crate) async fn channel(url: &str) -> Result<(Connection, Channel)> {
    let connection = Connection::connect(url, ConnectionProperties::default()).await?;
    let channel = connection.create_channel().await?;
    channel
        .confirm_select(ConfirmSelectOptions::default())
        .await?;
    Ok((connection, channel))
}

pub(crate) async fn purge(channel: &Channel, queue: &str) -> Result<u32> {
    let options = QueuePurgeOptions::default();
    Ok(channel.queue_purge(queue.into(), options).await?)
}

/// 256 bytes of JSON.
pub(crate) fn payload(number: usize) -> Vec<u8> {
    let filling = "x".repeat(225);
    format!(r#"{{"order":{number},"note":"{filling}"}}"#).into_bytes()
}

/// A message as a worker leaves it in a dead-letter queue.
pub(crate) fn dead(id: &str) -> BasicProperties {
    let text = |text: &str| AMQPValue::LongString(text.into());
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    let now = i64::try_from(now.as_millis()).unwrap_or_default();
    let mut headers = FieldTable::default();
    for (name, value) in [
        ("tierline-version", AMQPValue::LongLongInt(1)),
        ("tierline-attempt", AMQPValue::LongLongInt(3)),
        ("tierline-enqueued-at", AMQPValue::LongLongInt(now)),
        ("tierline-reason", text("retries exhausted")),
        (
            "tierline-error",
            text("connection to 10.0.0.7:5432 refused"),
        ),
        ("tierline-error-kind", text("error")),
        ("tierline-causes", text(r#"["tcp connect error"]"#)),
        ("tierline-died-at", AMQPValue::LongLongInt(now)),
        ("tierline-worker", text("host:1")),
        ("tierline-worker-version", text("1.0.0")),
    ] {
        headers.insert(name.into(), value);
    }
    BasicProperties::default()
        .with_type("order.ship".into())
        .with_message_id(id.into())
        .with_delivery_mode(2)
        .with_priority(1)
        .with_headers(headers)
}

/// The plain way to publish much: a window of a thousand, with each send awaited.
pub(crate) async fn publish(
    channel: &Channel,
    exchange: &str,
    key: &str,
    messages: impl Iterator<Item = (Vec<u8>, BasicProperties)>,
) -> Result<()> {
    const WINDOW: usize = 1_000;
    let mut confirms = FuturesUnordered::new();
    for (payload, properties) in messages {
        let options = BasicPublishOptions {
            mandatory: true,
            ..BasicPublishOptions::default()
        };
        let sent =
            channel.basic_publish(exchange.into(), key.into(), options, &payload, properties);
        confirms.push(sent.await?);
        if confirms.len() >= WINDOW {
            confirms.next().await.context("no confirm")??;
        }
    }
    while let Some(confirmed) = confirms.next().await {
        confirmed?;
    }
    Ok(())
}

/// What a process of a proof does.
#[derive(Debug)]
pub(crate) struct Role {
    pub(crate) name: String,
    pub(crate) amqp: String,
    pub(crate) postgres: String,
}

impl Role {
    pub(crate) fn of_this_process() -> Option<Self> {
        let mut arguments = std::env::args().skip(1);
        let name = arguments.next()?.strip_prefix("--role=")?.to_owned();
        Some(Self {
            name,
            amqp: arguments.next()?,
            postgres: arguments.next()?,
        })
    }

    /// A process that plays this role until it is killed.
    pub(crate) fn start(name: &str, amqp: &str, postgres: &str) -> Result<Child> {
        let mut command = Command::new(std::env::current_exe()?);
        command
            .arg(format!("--role={name}"))
            .args([amqp, postgres])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .kill_on_drop(true);
        Ok(command.spawn()?)
    }
}

/// Asks again and again until the answer is yes.
pub(crate) async fn until(what: &str, mut is_so: impl AsyncFnMut() -> Result<bool>) -> Result<()> {
    let begin = Instant::now();
    while !is_so().await? {
        if begin.elapsed() > Duration::from_secs(300) {
            bail!("waited for {what} for five minutes");
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    Ok(())
}
