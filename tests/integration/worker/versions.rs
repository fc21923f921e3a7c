//! Programs of both versions of the wire format share a broker.
//!
//! [`version_1`] is how the release before version 2 wrote and read messages. It must never change: such programs may
//! still run.

use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use lapin::options::{BasicPublishOptions, ConfirmSelectOptions};
use lapin::{BasicProperties, Confirmation, ConnectionProperties};
use serde::{Deserialize, Serialize};
use tierline::message::Message;
use tierline::{Context, Registry, Task, TaskError, TaskId, TaskOptions, Tierline, Topology};
use tierline_testbed::{Vhost, vhost};

use super::{Working, take_one};

const MAP: &str = r#"
    app = "hotel"
    [tiers.normal]
    queue = "quorum"
    [groups.all]
    tiers = ["normal"]
    concurrency = 1
    [tasks]
    "hotel.clean" = "normal"
"#;
const QUEUE: &str = "hotel.normal";
const DEAD: &str = "hotel.normal.dlq";
/// When a message of version 1 was enqueued.
const AT: i64 = 1_700_000_000_123;

#[derive(Serialize, Deserialize)]
struct Clean {
    room: u32,
}

impl Task for Clean {
    const NAME: &'static str = "hotel.clean";
}

/// The rules of version 1.
mod version_1 {
    use lapin::BasicProperties;
    use lapin::types::{AMQPValue, FieldTable, ShortString};

    /// What a program reads from properties. Without `enqueued_at`, it takes the time of the arrival.
    #[derive(Debug, PartialEq, Eq)]
    pub(super) struct Read {
        pub(super) task: String,
        pub(super) id: String,
        pub(super) attempt: i64,
        pub(super) enqueued_at: Option<i64>,
        pub(super) due_at: Option<i64>,
        pub(super) expires_at: Option<i64>,
        pub(super) life: i64,
        pub(super) crashes: i64,
    }

    pub(super) fn read(properties: &BasicProperties) -> Result<Read, String> {
        let integer = |name: &str| match properties.headers().as_ref()?.inner().get(name)? {
            AMQPValue::LongLongInt(number) => Some(*number),
            AMQPValue::LongInt(number) => Some((*number).into()),
            other => panic!("{name} is {other:?}"),
        };
        let version = integer("tierline-version").unwrap_or(1);
        if version != 1 {
            return Err(format!("it is in version {version}"));
        }
        let text = |text: &Option<ShortString>| text.as_ref().map(ToString::to_string);
        Ok(Read {
            task: text(properties.kind()).ok_or("it has no type")?,
            id: text(properties.message_id()).ok_or("it has no id")?,
            attempt: integer("tierline-attempt").unwrap_or(1),
            enqueued_at: integer("tierline-enqueued-at"),
            due_at: integer("tierline-due-at"),
            expires_at: integer("tierline-expires-at"),
            life: integer("tierline-life").unwrap_or_default(),
            crashes: integer("tierline-crashes").unwrap_or_default(),
        })
    }

    /// What a publisher writes.
    pub(super) fn first(task: &str, id: &str, enqueued_at: i64) -> BasicProperties {
        BasicProperties::default()
            .with_content_type("application/json".into())
            .with_delivery_mode(2)
            .with_priority(0)
            .with_message_id(id.into())
            .with_type(task.into())
            .with_app_id("hotel".into())
            .with_headers(headers(1, enqueued_at))
    }

    /// What a worker publishes as the second attempt of a message without headers, which arrived at this time.
    pub(super) fn retry(delivered: BasicProperties, arrived_at: i64) -> BasicProperties {
        let enqueued_at = read(&delivered).ok().and_then(|it| it.enqueued_at);
        let headers = headers(2, enqueued_at.unwrap_or(arrived_at));
        delivered.with_headers(headers)
    }

    fn headers(attempt: i64, enqueued_at: i64) -> FieldTable {
        let mut headers = FieldTable::default();
        for (name, value) in [
            ("tierline-version", 1),
            ("tierline-attempt", attempt),
            ("tierline-enqueued-at", enqueued_at),
        ] {
            headers.insert(name.into(), AMQPValue::LongLongInt(value));
        }
        headers
    }
}

/// The attempts of a task that always fails, with what the handler knew of them.
type Attempts = Arc<Mutex<Vec<(u32, TaskId, SystemTime)>>>;

fn always_fails(attempts: &Attempts) -> Registry {
    let attempts = Arc::clone(attempts);
    let handler = move |_: Clean, cx: Context| {
        let attempt = (cx.attempt(), cx.id().clone(), cx.enqueued_at());
        attempts.lock().unwrap().push(attempt);
        async { Err::<(), _>(TaskError::from("no soap")) }
    };
    let options = TaskOptions::new()
        .retries(1)
        .backoff(Duration::from_millis(100));
    let mut registry = Registry::new();
    let registered = registry.register_with::<Clean, _>(handler, options);
    registered.unwrap();
    registry
}

async fn publish_raw(vhost: &Vhost, properties: BasicProperties) {
    let options = ConnectionProperties::default();
    let connection = lapin::Connection::connect(vhost.amqp_url(), options).await;
    let channel = connection.unwrap().create_channel().await.unwrap();
    let confirms = channel.confirm_select(ConfirmSelectOptions::default());
    confirms.await.unwrap();
    let options = BasicPublishOptions::default();
    let (exchange, payload) = ("hotel.tasks".into(), br#"{"room":7}"#);
    let sent = channel.basic_publish(exchange, "normal".into(), options, payload, properties);
    let confirmed = sent.await.unwrap().await.unwrap();
    assert!(matches!(confirmed, Confirmation::Ack(None)));
}

fn time(milliseconds: i64) -> SystemTime {
    UNIX_EPOCH + Duration::from_millis(milliseconds.unsigned_abs())
}

fn milliseconds(time: SystemTime) -> i64 {
    time.duration_since(UNIX_EPOCH).unwrap().as_millis() as i64
}

#[tokio::test]
async fn a_program_of_version_1_reads_all_that_is_published() {
    let vhost = vhost().await;
    let map = Topology::parse(MAP).unwrap();
    let app = Tierline::builder(map).amqp(vhost.amqp_url());
    let app = app.connect().await.unwrap();
    let before = milliseconds(SystemTime::now());
    let room = |room| app.publish(Clean { room });

    let drawn = room(1).await.unwrap();
    let (_, properties) = take_one(&vhost, QUEUE).await;
    let headers = properties.headers().iter().flat_map(|it| it.inner());
    let is_broker = |name: &str| name.starts_with("x-");
    assert!(
        headers
            .into_iter()
            .all(|(name, _)| is_broker(name.as_str())),
        "{properties:?}"
    );
    assert!(properties.app_id().is_none() && properties.content_type().is_none());
    let plain = version_1::Read {
        task: Clean::NAME.to_owned(),
        id: drawn.id.to_string(),
        attempt: 1,
        enqueued_at: None,
        due_at: None,
        expires_at: None,
        life: 0,
        crashes: 0,
    };
    assert_eq!(version_1::read(&properties), Ok(plain));

    // An id that a caller gives states no time, whatever its form.
    for id in [TaskId::random(), drawn.id, "order-7".into()] {
        room(2).id(id.clone()).await.unwrap();
        let (_, properties) = take_one(&vhost, QUEUE).await;
        let read = version_1::read(&properties).unwrap();
        assert_eq!(read.id, id.as_str());
        assert!(read.enqueued_at.is_some_and(|at| at >= before), "{read:?}");
    }

    let full = room(3).delay("200ms").expires("1h").header("tenant", "ada");
    full.await.unwrap();
    let (_, properties) = take_one(&vhost, QUEUE).await;
    let read = version_1::read(&properties).unwrap();
    assert_eq!((read.attempt, read.enqueued_at), (1, None));
    let lifetime = read.expires_at.unwrap() - read.due_at.unwrap();
    assert_eq!(lifetime, 3_600_000 - 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_task_keeps_its_enqueue_time_for_either_version() {
    let attempts = Attempts::default();
    let working = Working::begin(MAP, always_fails(&attempts)).await;
    let before = time(milliseconds(SystemTime::now()));
    let receipt = working.app.publish(Clean { room: 7 }).await.unwrap();
    let (payload, dead) = take_one(&working.vhost, DEAD).await;
    let (first, second) = {
        let attempts = attempts.lock().unwrap();
        (attempts[0].clone(), attempts[1].clone())
    };
    let enqueued_at = first.2;
    assert!(before <= enqueued_at && enqueued_at <= receipt.confirmed_at);
    assert_eq!(first, (1, receipt.id.clone(), enqueued_at));
    assert_eq!(second, (2, receipt.id.clone(), enqueued_at));
    let read = version_1::read(&dead).unwrap();
    let stated = read.enqueued_at.map(time);
    assert_eq!((read.attempt, stated), (2, Some(enqueued_at)));
    let read = Message::from_wire(&dead, payload, "normal", SystemTime::now()).unwrap();
    assert_eq!((read.id, read.enqueued_at), (receipt.id, enqueued_at));
    working.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_of_version_1_is_run_and_retried_and_its_dead_letter_is_read_by_version_1() {
    let attempts = Attempts::default();
    let working = Working::begin(MAP, always_fails(&attempts)).await;
    // The second has the form of an id that tells the time, which it does not in version 1.
    for id in [
        "0190163d-8694-739b-aea5-966c26f8ad91",
        TaskId::random().as_str(),
    ] {
        attempts.lock().unwrap().clear();
        publish_raw(&working.vhost, version_1::first(Clean::NAME, id, AT)).await;
        let (_, dead) = take_one(&working.vhost, DEAD).await;
        let expected = [1, 2].map(|attempt| (attempt, TaskId::from(id), time(AT)));
        assert_eq!(*attempts.lock().unwrap(), expected);
        let read = version_1::read(&dead).unwrap();
        assert_eq!(
            (read.id.as_str(), read.attempt, read.enqueued_at),
            (id, 2, Some(AT))
        );
        let properties = [dead.app_id(), dead.content_type()].map(Option::is_some);
        assert_eq!(properties, [true, true], "what it came with stays");
    }
    working.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_retry_by_a_worker_of_version_1_goes_on_with_the_time_that_it_says() {
    let vhost = vhost().await;
    let map = Topology::parse(MAP).unwrap();
    let app = Tierline::builder(map).amqp(vhost.amqp_url());
    let app = app.connect().await.unwrap();
    let receipt = app.publish(Clean { room: 7 }).await.unwrap();
    let (_, delivered) = take_one(&vhost, QUEUE).await;
    publish_raw(&vhost, version_1::retry(delivered, AT)).await;
    let attempts = Attempts::default();
    let working = Working::begin_on(vhost, MAP, always_fails(&attempts)).await;
    let (_, dead) = take_one(&working.vhost, DEAD).await;
    assert_eq!(
        *attempts.lock().unwrap(),
        [(2, receipt.id, time(AT))],
        "it was the last attempt"
    );
    assert_eq!(version_1::read(&dead).unwrap().enqueued_at, Some(AT));
    working.end().await;
}
