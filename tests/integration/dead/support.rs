//! What the tests of dead letters share: an app with a log, and messages that die.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use lapin::options::{BasicConsumeOptions, BasicPublishOptions, ConfirmSelectOptions};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{BasicProperties, Channel, Connection, ConnectionProperties};
use sqlx::{AssertSqlSafe, Connection as _, Executor, PgConnection};
use tierline::dead::{DeadLetters, Filter, Page, Summary};
use tierline::message::Message;
use tierline::observe::Event;
use tierline::{Tierline, Topology};
use tierline_testbed::{Database, Vhost};
use tokio_util::sync::CancellationToken;

pub(crate) const MAP: &str = r#"
    app = "shop"
    [tiers.critical]
    queue = "classic"
    [tiers.normal]
    queue = "quorum"
    [tiers.small]
    queue = "quorum"
    ttl = "1s"
    [groups.all]
    tiers = ["critical", "normal", "small"]
    concurrency = 4
    [tasks]
    "order.pay" = { tier = "critical", priority = 7 }
    "order.ship" = "normal"
    "order.count" = "small"
"#;

/// An app with a broker, a database, and a record of what happened.
pub(crate) struct Shop {
    pub(crate) app: Tierline,
    pub(crate) letters: DeadLetters,
    pub(crate) happened: Arc<Mutex<Vec<String>>>,
    pub(crate) channel: Channel,
    pub(crate) vhost: Vhost,
    pub(crate) database: Database,
    /// The connection of the channel.
    _connection: Connection,
}

impl Shop {
    pub(crate) async fn open() -> Self {
        let (vhost, database) =
            tokio::join!(tierline_testbed::vhost(), tierline_testbed::database());
        Self::on(vhost, database, MAP).await
    }

    pub(crate) async fn on(vhost: Vhost, database: Database, map: &str) -> Self {
        let (app, happened) = connect(&vhost, database.url(), map).await;
        app.database().unwrap().migrate().await.unwrap();
        let properties = ConnectionProperties::default();
        let connection = Connection::connect(vhost.amqp_url(), properties).await;
        let connection = connection.unwrap();
        let channel = connection.create_channel().await.unwrap();
        let options = ConfirmSelectOptions::default();
        channel.confirm_select(options).await.unwrap();
        Self {
            letters: app.dead_letters().unwrap(),
            app,
            happened,
            channel,
            vhost,
            database,
            _connection: connection,
        }
    }

    /// A collector in the background; it ends when the token is cancelled.
    pub(crate) fn collect(&self) -> Collecting {
        let token = CancellationToken::new();
        let shutdown = token.clone().cancelled_owned();
        let collector = self.app.collector().unwrap();
        let task = tokio::spawn(collector.until(shutdown));
        Collecting { token, task }
    }

    /// Sends to an exchange, confirmed.
    pub(crate) async fn send(
        &self,
        exchange: &str,
        key: &str,
        payload: &[u8],
        properties: BasicProperties,
    ) {
        let options = BasicPublishOptions {
            mandatory: true,
            ..BasicPublishOptions::default()
        };
        let publishing =
            self.channel
                .basic_publish(exchange.into(), key.into(), options, payload, properties);
        let confirmed = publishing.await.unwrap().await.unwrap();
        assert!(confirmed.is_ack(), "{confirmed:?}");
    }

    /// A message that a worker gives up: it goes where the worker sends it.
    pub(crate) async fn dies(&self, tier: &str, letter: &Letter<'_>) {
        let exchange = format!("shop.{tier}.dlx");
        let payload = letter.payload.as_bytes();
        self.send(&exchange, "", payload, letter.properties()).await;
    }

    /// Waits until the log has so many rows.
    pub(crate) async fn logged(&self, count: u64) -> Vec<Summary> {
        until("the rows to be logged", async || {
            self.letters.count(&Filter::default()).await.unwrap() >= count
        })
        .await;
        let page = Page::first(Page::LARGEST);
        let listed = self.letters.list(&Filter::default(), page).await.unwrap();
        if count < u64::from(Page::LARGEST) {
            assert_eq!(listed.letters.len() as u64, count, "{listed:?}");
        }
        listed.letters
    }

    /// Takes the next messages of a queue.
    pub(crate) async fn take(&self, queue: &str, count: usize) -> Vec<Message> {
        use futures_util::StreamExt;
        let options = BasicConsumeOptions {
            no_ack: true,
            ..BasicConsumeOptions::default()
        };
        let tag = format!("{queue}-{:?}", Instant::now());
        let (arguments, tag) = (FieldTable::default(), tag.as_str());
        let consuming = self
            .channel
            .basic_consume(queue.into(), tag.into(), options, arguments);
        let consumer = consuming.await.unwrap();
        let tier = queue.rsplit('.').next().unwrap();
        let taken = consumer.take(count).map(|delivery| {
            let delivery = delivery.unwrap();
            let now = SystemTime::now();
            Message::from_wire(&delivery.properties, delivery.data, tier, now).unwrap()
        });
        let taken = tokio::time::timeout(LIMIT, taken.collect()).await.unwrap();
        let options = lapin::options::BasicCancelOptions::default();
        self.channel
            .basic_cancel(tag.into(), options)
            .await
            .unwrap();
        taken
    }

    pub(crate) async fn depth(&self, queue: &str) -> u32 {
        self.vhost.depth(queue).await.unwrap()
    }
}

/// Changes something in the database behind everybody's back.
pub(crate) async fn execute(shop: &Shop, statements: &str) {
    let mut connection = PgConnection::connect(shop.database.url()).await.unwrap();
    let statements = AssertSqlSafe(statements.to_owned());
    connection.execute(statements).await.unwrap();
}

pub(crate) async fn connect(
    vhost: &Vhost,
    database: &str,
    map: &str,
) -> (Tierline, Arc<Mutex<Vec<String>>>) {
    let happened = Arc::new(Mutex::new(Vec::new()));
    let told = Arc::clone(&happened);
    let app = Tierline::builder(Topology::parse(map).unwrap())
        .amqp(vhost.amqp_url())
        .postgres(database)
        .observe(move |event: &Event<'_>| told.lock().unwrap().push(format!("{event:?}")))
        .connect()
        .await
        .unwrap();
    (app, happened)
}

/// A collector that runs.
pub(crate) struct Collecting {
    token: CancellationToken,
    task: tokio::task::JoinHandle<Result<(), tierline::Error>>,
}

impl Collecting {
    pub(crate) async fn stop(self) {
        self.token.cancel();
        self.task.await.unwrap().unwrap();
    }

    /// Ends it as a crash would.
    pub(crate) async fn abort(self) {
        self.task.abort();
        let _ = self.task.await;
    }
}

/// A message that a worker gave up, as the wire format describes it.
pub(crate) struct Letter<'a> {
    pub(crate) task: &'a str,
    pub(crate) id: &'a str,
    pub(crate) payload: &'a str,
    pub(crate) reason: &'a str,
    pub(crate) error: &'a str,
    pub(crate) attempt: i64,
    pub(crate) life: i64,
    pub(crate) redriven_from: Option<i64>,
    pub(crate) died_at: SystemTime,
}

impl Default for Letter<'_> {
    fn default() -> Self {
        Self {
            task: "order.ship",
            id: "ship-1",
            payload: r#"{"order":1}"#,
            reason: "retries exhausted",
            error: "connection refused",
            attempt: 3,
            life: 0,
            redriven_from: None,
            died_at: SystemTime::now(),
        }
    }
}

impl Letter<'_> {
    pub(crate) fn properties(&self) -> BasicProperties {
        let text = |text: &str| AMQPValue::LongString(text.into());
        let number = AMQPValue::LongLongInt;
        let died_at = self.died_at.duration_since(UNIX_EPOCH).unwrap();
        let died_at = i64::try_from(died_at.as_millis()).unwrap();
        let mut headers = FieldTable::default();
        for (name, value) in [
            ("tenant", text("ada")),
            ("tierline-version", number(1)),
            ("tierline-attempt", number(self.attempt)),
            ("tierline-enqueued-at", number(1_700_000_000_000)),
            ("tierline-expires-at", number(died_at + 1)),
            ("tierline-crashes", number(2)),
            ("tierline-life", number(self.life)),
            (
                "tierline-history",
                text(r#"[{"attempt":1,"at":1700000001000,"kind":"timed out","error":"slow"}]"#),
            ),
            ("tierline-reason", text(self.reason)),
            ("tierline-error", text(self.error)),
            ("tierline-error-kind", text("error")),
            ("tierline-error-type", text("reqwest::Error")),
            ("tierline-causes", text(r#"["tcp connect"]"#)),
            ("tierline-died-at", number(died_at)),
            ("tierline-worker", text("host:1")),
            ("tierline-worker-version", text("1.2.3")),
        ] {
            headers.insert(name.into(), value);
        }
        if let Some(from) = self.redriven_from {
            headers.insert("tierline-redriven-from".into(), text(&from.to_string()));
        }
        BasicProperties::default()
            .with_type(self.task.into())
            .with_message_id(self.id.into())
            .with_delivery_mode(2)
            .with_priority(1)
            .with_headers(headers)
    }
}

const LIMIT: Duration = Duration::from_secs(60);

/// Asks again and again until the answer is yes.
pub(crate) async fn until(what: &str, mut is_so: impl AsyncFnMut() -> bool) {
    let begin = Instant::now();
    while !is_so().await {
        assert!(begin.elapsed() < LIMIT, "waited for {what} for {LIMIT:?}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
