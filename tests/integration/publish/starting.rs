//! Apps that start before their broker, and the connections of worker groups.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use futures_util::{StreamExt, stream};
use tierline::error::{BrokerError, ErrorKind, PublishError, Stored};
use tierline::task::PublishRequest;
use tierline::{Builder, Error, HealthState, Tierline, Topology};
use tierline_testbed::{Broker, vhost};

use super::closing::until_connections;
use super::{Forget, MAP, Pay, Ship, take_all};

/// Nobody listens there.
const NOBODY: &str = "amqp://ada:secret@127.0.0.1:1";

fn builder(url: &str) -> Builder {
    Tierline::builder(Topology::parse(MAP).unwrap()).amqp(url)
}

#[tokio::test(flavor = "multi_thread")]
async fn an_app_that_connects_before_its_broker_is_up_waits_for_it() {
    let broker = Broker::start().await.unwrap();
    let vhost = broker.vhost().await.unwrap();
    broker.stop().await.unwrap();
    let connecting = builder(vhost.amqp_url()).connect_timeout("5m").connect();
    let (app, started) = tokio::join!(connecting, broker.start());
    started.unwrap();
    app.unwrap().publish(Ship { order: 1 }).await.unwrap();
}

#[tokio::test]
async fn an_app_tries_all_addresses_until_its_time_is_over() {
    let begin = Instant::now();
    let limit = Duration::from_millis(700);
    let connecting = builder(NOBODY).connect_timeout(limit).connect();
    let error = connecting.await.unwrap_err();
    let tried_for = begin.elapsed();
    assert!(
        matches!(error, Error::Broker(BrokerError::Unreachable { .. })),
        "{error:?}"
    );
    assert!(tried_for >= limit / 4, "it was tried for {tried_for:?}");

    let vhost = vhost().await;
    let second = builder(NOBODY).amqp(vhost.amqp_url()).connect_timeout("0s");
    second.connect().await.unwrap();
    let error = builder(NOBODY).connect_timeout("soon").connect().await;
    let error = error.unwrap_err().to_string();
    assert!(error.contains("connect_timeout"), "{error}");
}

#[tokio::test]
async fn a_login_that_is_refused_is_not_tried_again() {
    let vhost = vhost().await;
    let url = vhost.amqp_url().replace("guest:guest", "guest:wrong");
    // With a second attempt the test would take longer than anybody waits.
    let error = builder(&url).connect_timeout("10h").connect().await;
    let error = error.unwrap_err();
    assert!(
        matches!(error, Error::Broker(BrokerError::LoginRefused { .. })),
        "{error:?}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lazy_app_publishes_as_soon_as_its_broker_is_there_and_loses_nothing() {
    let broker = Broker::start().await.unwrap();
    let vhost = broker.vhost().await.unwrap();
    broker.stop().await.unwrap();
    let app = builder(vhost.amqp_url()).connect_lazy().unwrap();
    let early = app.publish(Ship { order: 0 }).deadline("1s").await;
    let early = early.unwrap_err();
    assert!(
        matches!(early, Error::Publish(PublishError::NotConnected { .. })),
        "{early:?}"
    );
    assert_eq!(
        (early.stored(), early.kind()),
        (Some(Stored::No), ErrorKind::Connection)
    );
    let health = app.health().await;
    assert!(matches!(health.broker, Some(HealthState::Down(_))) && !health.is_ready());
    let impossible = app.publish(Forget).await.unwrap_err();
    assert!(
        matches!(
            impossible,
            Error::Publish(PublishError::UnmappedTask { .. })
        ),
        "what no broker takes does not wait for one: {impossible:?}"
    );

    let is_up = Arc::new(AtomicBool::new(false));
    let publishing = async {
        let mut confirmed = Vec::new();
        let mut order = 1;
        while !is_up.load(Ordering::Relaxed) {
            let publish = app.publish(Ship { order }).deadline("2s");
            let many = [PublishRequest::new(&Ship { order: order + 1 }).unwrap()];
            let many = app.publish_many(stream::iter(many));
            let (one, many) = tokio::join!(publish, many.collect::<Vec<_>>());
            confirmed.extend(one.ok().map(|receipt| receipt.id));
            confirmed.extend(many.into_iter().flatten().map(|receipt| receipt.id));
            order += 2;
        }
        confirmed
    };
    let starting = async {
        broker.start().await.unwrap();
        app.publish(Pay { order: 1 }).deadline("1m").await.unwrap();
        is_up.store(true, Ordering::Relaxed);
    };
    let (confirmed, ()) = tokio::join!(publishing, starting);
    assert!(app.health().await.is_ready());
    let stored = take_all(&vhost, "shop.normal").await;
    for id in &confirmed {
        assert!(
            stored.iter().any(|message| message.id == *id),
            "{id} is lost"
        );
    }
}

#[tokio::test]
async fn a_lazy_app_that_can_never_connect_is_refused_at_once() {
    let map = || Topology::parse(MAP).unwrap();
    let without = Tierline::builder(map()).connect_lazy().unwrap_err();
    assert!(without.to_string().contains(".amqp("), "{without}");
    let malformed = builder("http://localhost").connect_lazy().unwrap_err();
    assert!(
        matches!(malformed, Error::Broker(BrokerError::InvalidUrl { .. })),
        "{malformed:?}"
    );
}

#[tokio::test]
async fn a_lazy_app_that_is_closed_while_a_publish_waits_for_the_broker_ends() {
    let app = builder(NOBODY).connect_lazy().unwrap();
    let waiting = app.publish(Ship { order: 1 }).deadline("1h");
    let closing = app.clone();
    tokio::select! {
        early = waiting.into_future() => panic!("{early:?}"),
        () = closing.close() => {}
    }
    let late = app.publish(Ship { order: 2 }).await.unwrap_err();
    assert!(matches!(late, Error::Closed { .. }), "{late:?}");
}

#[tokio::test]
async fn worker_groups_share_no_connection_for_publishing() {
    const GROUPS: &str = r#"
        app = "shop"
        [tiers.critical]
        queue = "classic"
        [tiers.normal]
        queue = "classic"
        [tiers.bulk]
        queue = "classic"
        [groups.urgent]
        tiers = ["critical", "normal"]
        concurrency = 1
        [groups.deferred]
        tiers = ["bulk"]
        concurrency = 1
        [tasks]
        "order.pay" = "critical"
        "order.ship" = "normal"
        "order.forget" = "bulk"
    "#;
    let vhost = vhost().await;
    let app = Tierline::builder(Topology::parse(GROUPS).unwrap())
        .amqp(vhost.amqp_url())
        .publish_connections(1)
        .connect()
        .await
        .unwrap();
    app.publish(Pay { order: 1 }).await.unwrap();
    app.publish(Ship { order: 1 }).await.unwrap();
    until_connections(&vhost, 1).await;
    app.publish(Forget).await.unwrap();
    until_connections(&vhost, 2).await;
}
