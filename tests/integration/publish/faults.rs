//! Brokers that die, connections that are cut, leaders that are lost: publishing goes on.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use futures_util::{StreamExt, poll, stream};
use tierline::error::{ErrorKind, PublishError, Stored};
use tierline::observe::{Event, Purpose};
use tierline::task::{PublishRequest, Receipt};
use tierline::{Error, Tierline, Topology};
use tierline_testbed::{Broker, Cluster};

use super::{MAP, Pay, Ship, connect, take_all};

#[tokio::test(flavor = "multi_thread")]
async fn a_restart_of_the_broker_can_be_watched() {
    let broker = Broker::start().await.unwrap();
    let vhost = broker.vhost().await.unwrap();
    let (sender, mut events) = tokio::sync::mpsc::unbounded_channel();
    let app = Tierline::builder(Topology::parse(MAP).unwrap())
        .amqp(vhost.amqp_url())
        .publish_connections(1)
        .observe(move |event| {
            let _ = sender.send(match event {
                Event::Connected { purpose, address } => {
                    assert!(!address.contains("guest"), "{address}");
                    ("connected", *purpose)
                }
                Event::Disconnected { purpose, .. } => ("disconnected", *purpose),
                Event::ConnectFailed { purpose, .. } => ("failed", *purpose),
                _ => return,
            });
        })
        .connect()
        .await
        .unwrap();
    assert_eq!(
        events.recv().await.unwrap(),
        ("connected", Purpose::Publish)
    );
    broker.stop().await.unwrap();
    assert_eq!(
        events.recv().await.unwrap(),
        ("disconnected", Purpose::Publish)
    );
    assert_eq!(events.recv().await.unwrap(), ("failed", Purpose::Publish));
    broker.start().await.unwrap();
    let back = loop {
        match events.recv().await.unwrap() {
            ("failed", _) => {}
            other => break other,
        }
    };
    assert_eq!(back, ("connected", Purpose::Publish));
    app.publish(Ship { order: 1 }).await.unwrap();
}

#[tokio::test]
async fn what_may_go_once_only_ends_with_its_connection_and_the_rest_goes_on() {
    let broker = Broker::start().await.unwrap();
    let vhost = broker.vhost().await.unwrap();
    let app = connect(vhost.amqp_url()).await;
    // On a slow machine the channel may not be open yet, and the first message is never sent: then once more.
    for _ in 0..8 {
        let (lost, confirmed) = kill_under_way(&broker, &app).await;
        if matches!(lost, Error::Publish(PublishError::NotConnected { .. })) {
            continue;
        }
        assert!(
            matches!(lost, Error::Publish(PublishError::Unconfirmed { .. })),
            "{lost:?}"
        );
        assert_eq!(lost.stored(), Some(Stored::Maybe));
        let stored = take_all(&vhost, "shop.normal").await;
        assert!(stored.iter().any(|message| message.id == confirmed.id));
        let of_once = br#"{"order":1}"#.as_slice();
        let times = stored.iter().filter(|it| it.payload == of_once).count();
        assert!(times <= 1, "{stored:?}");
        return;
    }
    panic!("no message was under way when the broker was killed");
}

/// Kills the broker while a message is under way that may go once only, and another one, and starts it again. What became
/// of them.
async fn kill_under_way(broker: &Broker, app: &Tierline) -> (Error, Receipt) {
    let publishing = |order| app.publish(Ship { order });
    // So that every channel is open, also of a broker that was just started.
    for _ in 0..10 {
        let many = (0..10).map(|_| publishing(0).deadline("2m").into_future());
        for opened in join_all(many).await {
            opened.unwrap();
        }
    }
    broker.flush_declarations().await.unwrap();
    broker.pause().await.unwrap();
    let mut once = publishing(1).once().deadline("10s").into_future();
    let mut until_confirmed = publishing(2).deadline("2m").into_future();
    assert!(poll!(&mut once).is_pending() && poll!(&mut until_confirmed).is_pending());
    // The messages are on their way before the broker is gone.
    tokio::task::yield_now().await;
    broker.kill().await.unwrap();
    let lost = once.await.unwrap_err();
    broker.start().await.unwrap();
    (lost, until_confirmed.await.unwrap())
}

#[tokio::test(flavor = "multi_thread")]
async fn many_go_on_when_the_broker_is_killed_and_started_again() {
    let broker = Broker::start().await.unwrap();
    let vhost = broker.vhost().await.unwrap();
    let app = connect(vhost.amqp_url()).await;
    broker.flush_declarations().await.unwrap();
    let requests = stream::iter(0..5_000).map(|order| {
        let mut request = PublishRequest::new(&Ship { order }).unwrap();
        request.deadline = Some(Duration::from_secs(60));
        request
    });
    let mut outcomes = std::pin::pin!(app.publish_many(requests));
    let mut confirmed = HashSet::new();
    for _ in 0..200 {
        let receipt = outcomes.next().await.unwrap().unwrap();
        confirmed.insert(receipt.id.to_string());
    }
    broker.kill().await.unwrap();
    broker.start().await.unwrap();
    while let Some(outcome) = outcomes.next().await {
        confirmed.insert(outcome.unwrap().id.to_string());
    }
    assert_eq!(confirmed.len(), 5_000);
    let stored = take_all(&vhost, "shop.normal").await;
    let stored: HashSet<_> = stored.iter().map(|it| it.id.to_string()).collect();
    assert_eq!(stored, confirmed);
}

#[tokio::test(flavor = "multi_thread")]
async fn every_publish_ends_in_time_and_what_was_confirmed_is_there_whatever_the_broker_does() {
    let broker = Broker::start().await.unwrap();
    let vhost = broker.vhost().await.unwrap();
    let app = connect(vhost.amqp_url()).await;
    broker.flush_declarations().await.unwrap();
    let deadline = Duration::from_secs(2);

    let is_over = Arc::new(AtomicBool::new(false));
    let count = Arc::new(AtomicUsize::new(0));
    let publishers: Vec<_> = (0..20_u64)
        .map(|publisher| {
            let (app, is_over, count) = (app.clone(), Arc::clone(&is_over), Arc::clone(&count));
            tokio::spawn(async move {
                let mut outcomes = Vec::new();
                while !is_over.load(Ordering::Relaxed) {
                    let order = publisher << 32 | outcomes.len() as u64;
                    let begin = Instant::now();
                    let outcome = match order % 2 {
                        0 => app.publish(Pay { order }).deadline(deadline).await,
                        _ => app.publish(Ship { order }).deadline(deadline).await,
                    };
                    count.fetch_add(outcome.is_ok().into(), Ordering::Relaxed);
                    outcomes.push((order, outcome, begin.elapsed()));
                }
                outcomes
            })
        })
        .collect();
    // Between two faults everything is at work again.
    let recovered = async || {
        let before = count.load(Ordering::Relaxed);
        while count.load(Ordering::Relaxed) < before + 500 {
            app.publish(Pay { order: 0 }).deadline("60s").await.unwrap();
        }
    };

    recovered().await;
    broker.kill().await.unwrap();
    broker.start().await.unwrap();
    recovered().await;
    broker.close_all_connections().await.unwrap();
    recovered().await;
    broker.raise_memory_alarm().await.unwrap();
    let blocked = app.publish(Pay { order: 0 }).deadline("1s").await;
    assert!(
        matches!(blocked, Err(Error::Publish(PublishError::Blocked { .. }))),
        "{blocked:?}"
    );
    broker.clear_memory_alarm().await.unwrap();
    recovered().await;
    broker.pause().await.unwrap();
    // A process that is busy stops a moment after it was told to.
    let silent = async {
        loop {
            let publishing = app.publish(Pay { order: 0 }).deadline("1s");
            if let Err(silent) = publishing.await {
                return silent;
            }
        }
    };
    let silent = tokio::time::timeout(Duration::from_secs(60), silent);
    let silent = silent.await.unwrap();
    assert_eq!(silent.kind(), ErrorKind::Connection, "{silent:?}");
    broker.resume().await.unwrap();
    recovered().await;
    is_over.store(true, Ordering::Relaxed);

    let mut confirmed = HashSet::new();
    for publisher in publishers {
        for (order, outcome, took) in publisher.await.unwrap() {
            let limit = 5 * deadline;
            assert!(took < limit, "{outcome:?} took {took:?}");
            match outcome {
                Ok(_) => {
                    confirmed.insert(order);
                }
                Err(error) => assert!(error.is_transient(), "{error}"),
            }
        }
    }
    let mut stored = HashSet::new();
    for queue in ["shop.critical", "shop.normal"] {
        for message in take_all(&vhost, queue).await {
            let ship: Ship = serde_json::from_slice(&message.payload).unwrap();
            stored.insert(ship.order);
        }
    }
    let lost: Vec<_> = confirmed.difference(&stored).collect();
    assert!(
        lost.is_empty(),
        "{} of {} confirmed tasks are lost",
        lost.len(),
        confirmed.len()
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn publishing_goes_on_when_the_leader_of_a_queue_never_comes_back() {
    let cluster = Cluster::start().await.unwrap();
    let vhost = cluster.vhost().await.unwrap();
    let [first, second, _] = cluster.nodes();
    // Declared through the first node, which leads all queues therefore.
    drop(connect(vhost.amqp_url()).await);
    for node in cluster.nodes() {
        node.flush_declarations().await.unwrap();
    }
    let url = format!("{}/{}", second.amqp_url(), vhost.name());
    let app = Tierline::builder(Topology::parse(MAP).unwrap())
        .amqp(url)
        .publish_connections(8)
        .connect()
        .await
        .unwrap();
    first.kill().await.unwrap();
    // Channels that meet the lost leader with their first message are refused for ever.
    let ships = (0..200).map(|order| {
        let publish = app.publish(Ship { order });
        publish.deadline(Duration::from_secs(60)).into_future()
    });
    for outcome in join_all(ships).await {
        outcome.unwrap();
    }
    first.start().await.unwrap();
}
