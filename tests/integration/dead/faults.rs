//! Collectors whose broker misbehaves.

use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use tierline::observe::{Event, Purpose};
use tierline::{Tierline, Topology};
use tierline_testbed::{Broker, Proxy};

use super::support::{Letter, MAP, Shop, until};

/// Stops, or starts again, the only member of a quorum queue.
async fn steer_queue(broker: &Broker, vhost: &str, queue: &str, how: &str) {
    let command = format!(
        "{{ok, Q}} = rabbit_amqqueue:lookup(rabbit_misc:r(<<\"{vhost}\">>, queue, <<\"{queue}\">>)), \
         {{Name, _}} = amqqueue:get_pid(Q), ra:{how}(quorum_queues, {{Name, node()}})."
    );
    let answer = broker.rabbitmqctl(&["eval", &command]).await.unwrap();
    assert_eq!(answer.trim(), "ok");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_queue_without_a_leader_keeps_no_other_from_being_collected() {
    // Stopping the members of queues leaves nothing to later tests.
    let broker = Broker::start_new().await.unwrap();
    let vhost = broker.vhost().await.unwrap();
    let shop = Shop::on(vhost, tierline_testbed::database().await, MAP).await;
    let name = shop.vhost.name().to_owned();
    steer_queue(&broker, &name, "shop.small.dlq", "stop_server").await;
    let collecting = shop.collect();
    for number in 0..20 {
        let id = format!("ship-{number}");
        let letter = Letter {
            id: &id,
            ..Letter::default()
        };
        let tier = ["critical", "normal"][number % 2];
        shop.dies(tier, &letter).await;
        shop.logged(number as u64 + 1).await;
    }
    // And it is collected from as soon as it has a leader again.
    steer_queue(&broker, &name, "shop.small.dlq", "restart_server").await;
    let late = Letter {
        id: "late",
        ..Letter::default()
    };
    shop.dies("small", &late).await;
    let rows = shop.logged(21).await;
    assert!(rows.iter().any(|row| row.tier == "small"));
    collecting.stop().await;
}

/// A collector whose connection is reset whenever it has collected something.
#[tokio::test(flavor = "multi_thread")]
async fn a_connection_that_is_made_and_lost_again_backs_off() {
    const CONNECTIONS: usize = 7;
    let shop = Shop::open().await;
    for number in 0..2 * CONNECTIONS {
        let id = format!("ship-{number}");
        let letter = Letter {
            id: &id,
            ..Letter::default()
        };
        shop.dies("normal", &letter).await;
    }
    let (before, path) = shop.vhost.amqp_url().rsplit_once(':').unwrap();
    let (port, path) = path.split_once('/').unwrap();
    let proxy = Proxy::start(port.parse().unwrap()).await.unwrap();
    let url = format!("{before}:{}/{path}", proxy.port());
    let (reset, connected) = (Arc::new(OnceLock::new()), Arc::new(Mutex::new(Vec::new())));
    let (resetting, connecting) = (Arc::clone(&reset), Arc::clone(&connected));
    let app = Tierline::builder(Topology::parse(MAP).unwrap())
        .amqp(url)
        .postgres(shop.database.url())
        .observe(move |event: &Event<'_>| match event {
            Event::Connected {
                purpose: Purpose::Collect,
                ..
            } => connecting.lock().unwrap().push(Instant::now()),
            Event::Collected { .. } => {
                let proxy: Option<&Proxy> = resetting.get();
                proxy.unwrap().reset();
            }
            _ => {}
        })
        .connect()
        .await
        .unwrap();
    reset.set(proxy).unwrap();
    // A row at a time, so that each connection has something to write before it is lost.
    let collector = app.collector().unwrap().batch(1);
    let collecting = tokio::spawn(collector.into_future());
    until("the last connection", async || {
        connected.lock().unwrap().len() >= CONNECTIONS
    })
    .await;
    collecting.abort();
    // The pauses double from 0.1 to 1 s, each less by up to half. A slow machine only makes it longer.
    let connected = connected.lock().unwrap();
    let took = connected[CONNECTIONS - 1].duration_since(connected[0]);
    let least = Duration::from_millis((100 + 200 + 400 + 800 + 1_000 + 1_000) / 2);
    assert!(took >= least, "{CONNECTIONS} connections within {took:?}");
}
