//! What a process counts for Prometheus, while real servers and workers make it happen.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::http::{Request, StatusCode, header};
use serde::{Deserialize, Serialize};
use serde_json::json;
use tierline::admin::{Token, router};
use tierline::metrics::{Metrics, UNKNOWN};
use tierline::{Context, Outcome, Registry, Task, Tierline, Topology};
use tierline_testbed::{Database, Vhost, database, vhost};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tower::ServiceExt;

use crate::worker::Heard;

const MAP: &str = r#"
    app = "shop"
    [tiers.mail]
    queue = "HOME"
    slo = "40m"
    [tiers.bulk]
    queue = "HOME"
    [groups.all]
    tiers = ["mail", "bulk"]
    concurrency = 4
    prefetch = 4
    [tasks]
    "mail.send" = "mail"
    "report.export" = "bulk"
"#;
const TOKEN: &str = "0123456789abcdef0123456789abcdef";

/// What its handler is to do.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
enum Mail {
    Succeed,
    FailOnce,
    SnoozeOnce,
    Discard,
    Die,
    Wait,
}

impl Task for Mail {
    const NAME: &'static str = "mail.send";
}

fn handlers() -> Registry {
    let mut registry = Registry::new();
    let snoozed = Arc::new(AtomicBool::new(false));
    registry
        .register::<Mail, _>(move |mail: Mail, cx: Context| {
            let snoozed = snoozed.clone();
            async move {
                match mail {
                    Mail::FailOnce if cx.attempt() == 1 => Outcome::retry("not yet"),
                    Mail::SnoozeOnce if !snoozed.swap(true, Ordering::Relaxed) => {
                        Outcome::snooze(Duration::from_millis(1))
                    }
                    Mail::Discard => Outcome::discard("nobody wants it"),
                    Mail::Die => Outcome::dead("it cannot be sent"),
                    Mail::Wait => {
                        cx.cancelled().await;
                        Outcome::retry("it was told to stop")
                    }
                    Mail::Succeed | Mail::FailOnce | Mail::SnoozeOnce => Outcome::Done,
                }
            }
        })
        .unwrap();
    registry
}

/// An app that counts, and its servers.
struct Shop {
    app: Tierline,
    heard: Heard,
    vhost: Vhost,
    _database: Database,
}

/// A worker, until it is ended.
struct Work {
    stop: oneshot::Sender<()>,
    ended: JoinHandle<Result<(), tierline::Error>>,
}

impl Work {
    async fn end(self) {
        self.stop.send(()).unwrap();
        self.ended.await.unwrap().unwrap();
    }
}

impl Shop {
    async fn open(home: &str) -> Self {
        let (vhost, database) = tokio::join!(vhost(), database());
        let heard = Heard::default();
        let app = Tierline::builder(Topology::parse(MAP.replace("HOME", home)).unwrap())
            .amqp(vhost.amqp_url())
            .postgres(database.url())
            .registry(handlers())
            .observe(heard.ear())
            .metrics()
            .connect()
            .await
            .unwrap();
        app.database().unwrap().migrate().await.unwrap();
        Self {
            app,
            heard,
            vhost,
            _database: database,
        }
    }

    fn work(&self, grace: Duration) -> Work {
        let (stop, stopped) = oneshot::channel();
        let worker = self.app.work(["all"]).grace(grace);
        let ended = tokio::spawn(worker.until(async {
            let _ = stopped.await;
        }));
        Work { stop, ended }
    }

    async fn scrape(&self) -> Scrape {
        Scrape(self.app.metrics().unwrap().render().await)
    }
}

struct Scrape(String);

impl Scrape {
    /// The sum of all series of a metric with these labels.
    fn sum(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        let samples = self.0.lines().filter_map(|line| {
            let (series, value) = line.rsplit_once(' ')?;
            let (metric, of_series) = series.split_once('{').unwrap_or((series, ""));
            let has =
                |(key, value): &(&str, &str)| of_series.contains(&format!("{key}=\"{value}\""));
            (metric == name && labels.iter().all(has)).then(|| value.parse::<f64>().unwrap())
        });
        samples.sum()
    }

    fn series(&self) -> usize {
        self.0.lines().filter(|line| !line.starts_with('#')).count()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn every_outcome_is_counted_under_its_labels_with_its_histogram() {
    for home in ["quorum", "postgres"] {
        let shop = Shop::open(home).await;
        let app = &shop.app;
        let mails = [
            Mail::Succeed,
            Mail::FailOnce,
            Mail::SnoozeOnce,
            Mail::Discard,
            Mail::Die,
        ];
        for mail in mails {
            app.publish(mail).await.unwrap();
        }
        let expiring = app.publish(Mail::Succeed).expires(Duration::from_millis(1));
        expiring.await.unwrap();
        app.publish(Mail::Succeed).unique("one").await.unwrap();
        let duplicate = app.publish(Mail::Succeed).unique("one").await;
        let is_duplicate = duplicate.unwrap().is_duplicate;
        // No handler is there for it.
        app.publish_named("report.export", &json!({}))
            .await
            .unwrap();
        let refused = app.publish(Mail::Succeed).priority(200).await;
        assert!(refused.is_err() && is_duplicate);

        let work = shop.work(Duration::from_secs(20));
        shop.heard.until("done mail.send", 4).await;
        shop.heard.until("dead", 2).await;
        shop.heard.until("expired", 1).await;
        shop.heard.until("discarded", 1).await;
        work.end().await;

        let scrape = shop.scrape().await;
        let mail = [("tier", "mail"), ("task", "mail.send")];
        for (outcome, tasks, runs) in [
            ("done", 4.0, 4.0),
            ("retried", 1.0, 1.0),
            ("snoozed", 1.0, 1.0),
            ("discarded", 1.0, 1.0),
            ("expired", 1.0, 0.0),
            ("dead", 1.0, 1.0),
            ("given_back", 0.0, 0.0),
        ] {
            let labels = [mail[0], mail[1], ("outcome", outcome)];
            let counted = scrape.sum("tierline_tasks_total", &labels);
            assert_eq!(counted, tasks, "{home} {outcome}: {}", scrape.0);
            let counted = scrape.sum("tierline_run_seconds_count", &labels);
            assert_eq!(counted, runs, "{home} {outcome}: {}", scrape.0);
        }
        let exported = [
            ("tier", "bulk"),
            ("task", "report.export"),
            ("outcome", "dead"),
        ];
        assert_eq!(scrape.sum("tierline_tasks_total", &exported), 1.0);
        for (reason, task) in [
            ("permanent_error", "mail.send"),
            ("unknown_task", "report.export"),
        ] {
            let dead = scrape.sum("tierline_dead_total", &[("reason", reason), ("task", task)]);
            assert_eq!(dead, 1.0, "{}", scrape.0);
        }
        for (result, published) in [("stored", 7.0), ("duplicate", 1.0), ("invalid", 1.0)] {
            let labels = [mail[0], mail[1], ("result", result)];
            let counted = scrape.sum("tierline_published_total", &labels);
            assert_eq!(counted, published, "{home} {result}: {}", scrape.0);
        }
        let counted = scrape.sum("tierline_publish_seconds_count", &[mail[0]]);
        assert_eq!(counted, 9.0, "{}", scrape.0);
        assert_eq!(scrape.sum("tierline_wait_seconds_count", &mail), 8.0);
        // An edge at the SLO of the map, which is none of the usual ones.
        let in_time = [mail[0], mail[1], ("le", "2400.0")];
        assert_eq!(scrape.sum("tierline_wait_seconds_bucket", &in_time), 8.0);
        for (met, counted) in [("true", 8.0), ("false", 1.0)] {
            let labels = [mail[0], ("met", met)];
            assert_eq!(scrape.sum("tierline_slo_tasks_total", &labels), counted);
        }
        assert_eq!(
            scrape.sum("tierline_slo_tasks_total", &[("tier", "bulk")]),
            0.0
        );
        // The worker has ended.
        assert!(!scrape.0.contains("tierline_slots{"), "{}", scrape.0);
        assert_eq!(
            scrape.sum("tierline_connected", &[("purpose", "work")]),
            0.0,
            "{}",
            scrape.0
        );
        app.close().await;
        let connected = shop.scrape().await.sum("tierline_connected", &[]);
        assert_eq!(connected, 0.0, "{home}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_handler_that_runs_is_shown_until_it_was_given_back() {
    for home in ["quorum", "postgres"] {
        let shop = Shop::open(home).await;
        shop.app.publish(Mail::Wait).await.unwrap();
        let work = shop.work(Duration::ZERO);
        shop.heard.until("started", 1).await;
        shop.heard.until("consuming", 2).await;
        let scrape = shop.scrape().await;
        let of_group = [("group", "all"), ("tier", "mail")];
        assert_eq!(
            scrape.sum("tierline_in_progress", &of_group),
            1.0,
            "{}",
            scrape.0
        );
        assert_eq!(
            scrape.sum("tierline_consuming", &of_group),
            1.0,
            "{}",
            scrape.0
        );
        assert_eq!(scrape.sum("tierline_slots", &[("group", "all")]), 4.0);
        let task = [("tier", "mail"), ("task", "mail.send")];
        assert!(scrape.sum("tierline_oldest_run_seconds", &task) > 0.0);
        work.end().await;
        let scrape = shop.scrape().await;
        assert!(!scrape.0.contains("oldest_run"), "{}", scrape.0);
        assert_eq!(shop.heard.count("Ended"), 1);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn ten_thousand_names_that_the_map_does_not_have_add_no_series() {
    let shop = Shop::open("quorum").await;
    let (app, payload) = (&shop.app, json!({}));
    let properties = lapin::ConnectionProperties::default();
    let connection = lapin::Connection::connect(shop.vhost.amqp_url(), properties);
    let connection = connection.await.unwrap();
    let channel = connection.create_channel().await.unwrap();
    let queue = app
        .topology()
        .names()
        .queue(app.topology().tier("mail").unwrap());
    // A program that does not know the map sends tasks to a tier past it.
    let send = async |name: &str| {
        let properties = lapin::BasicProperties::default()
            .with_type(name.into())
            .with_message_id(name.into());
        let options = lapin::options::BasicPublishOptions::default();
        let sent =
            channel.basic_publish("".into(), queue.as_str().into(), options, b"{}", properties);
        sent.await.unwrap();
    };
    let work = shop.work(Duration::from_secs(20));
    assert!(app.publish_named("bad", &payload).await.is_err());
    send("bad").await;
    shop.heard.until("dead", 1).await;
    let before = shop.scrape().await;
    for number in 0..10_000 {
        let name = format!("bad.{number}");
        assert!(app.publish_named(&name, &payload).await.is_err());
        send(&name).await;
    }
    shop.heard.until("dead", 10_001).await;
    let after = shop.scrape().await;
    assert_eq!(after.series(), before.series(), "{}", after.0);
    assert!(!after.0.contains("bad"), "{}", after.0);
    let unknown = [("task", UNKNOWN), ("tier", "mail"), ("outcome", "dead")];
    assert_eq!(after.sum("tierline_tasks_total", &unknown), 10_001.0);
    let unknown = [
        ("task", UNKNOWN),
        ("tier", UNKNOWN),
        ("result", "not_found"),
    ];
    assert_eq!(
        after.sum("tierline_published_total", &unknown),
        10_001.0,
        "{}",
        after.0
    );
    work.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dead_letter_that_is_redriven_is_counted_with_its_result() {
    let shop = Shop::open("postgres").await;
    shop.app.publish(Mail::Die).await.unwrap();
    let work = shop.work(Duration::from_secs(20));
    shop.heard.until("dead", 1).await;
    work.end().await;
    let letters = shop.app.dead_letters().unwrap();
    let all = letters
        .list(&Default::default(), Default::default())
        .await
        .unwrap();
    let id = all.letters[0].id;
    letters.redrive(id).await.unwrap();
    let scrape = shop.scrape().await;
    let redriven = [("tier", "mail"), ("result", "stored")];
    assert_eq!(
        scrape.sum("tierline_redriven_total", &redriven),
        1.0,
        "{}",
        scrape.0
    );
    assert_eq!(shop.heard.count("Redriven"), 1);
}

async fn scrape_of(router: Router, token: Option<&str>) -> (StatusCode, Option<String>, String) {
    let mut request = Request::builder().uri("/metrics");
    if let Some(token) = token {
        request = request.header(header::AUTHORIZATION, format!("Bearer {token}"));
    }
    let response = router
        .oneshot(request.body(Body::empty()).unwrap())
        .await
        .unwrap();
    let status = response.status();
    let content_type = response.headers().get(header::CONTENT_TYPE);
    let content_type = content_type.map(|it| it.to_str().unwrap().to_owned());
    let body = axum::body::to_bytes(response.into_body(), 1 << 20)
        .await
        .unwrap();
    (
        status,
        content_type,
        String::from_utf8(body.to_vec()).unwrap(),
    )
}

#[tokio::test(flavor = "multi_thread")]
async fn the_admin_api_shows_metrics_to_who_has_its_token_and_says_where_there_are_none() {
    let shop = Shop::open("postgres").await;
    let admin = router(&shop.app, Token::new(TOKEN).unwrap()).unwrap();
    let (status, content_type, text) = scrape_of(admin.clone(), Some(TOKEN)).await;
    assert_eq!(status, StatusCode::OK);
    assert_eq!(content_type.as_deref(), Some(Metrics::CONTENT_TYPE));
    assert!(text.contains("tierline_build_info{version="), "{text}");
    let (status, ..) = scrape_of(admin, None).await;
    assert_eq!(status, StatusCode::UNAUTHORIZED);

    let without = Tierline::builder(shop.app.topology().clone())
        .amqp(shop.vhost.amqp_url())
        .postgres(shop._database.url())
        .connect()
        .await
        .unwrap();
    assert!(without.metrics().is_err());
    let admin = router(&without, Token::new(TOKEN).unwrap()).unwrap();
    let (status, _, text) = scrape_of(admin, Some(TOKEN)).await;
    assert_eq!(status, StatusCode::NOT_FOUND);
    assert!(text.contains("call `metrics()` on its builder"), "{text}");
}
