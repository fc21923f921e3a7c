//! Connections that are made and lost again at once.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tierline::observe::{Event, Purpose};
use tierline::{Registry, Tierline, Topology};
use tierline_testbed::{Proxy, vhost};
use tokio::sync::mpsc;

use super::behind_a_proxy;

const MAP: &str = r#"
    app = "yard"
    [tiers.only]
    queue = "classic"
    [groups.all]
    tiers = ["only"]
    concurrency = 1
    [tasks]
    dig = "only"
"#;

/// How many connections are made, and lost again at once.
const CONNECTIONS: usize = 6;
/// The sum of the pauses between them, of which each is at its shortest.
const SHORTEST: Duration = Duration::from_millis(50 + 100 + 200 + 400 + 500);

#[tokio::test(flavor = "multi_thread")]
async fn connections_that_are_made_and_lost_again_back_off_like_those_that_cannot_be_made() {
    let vhost = vhost().await;
    let (url, proxy) = behind_a_proxy(&vhost).await;
    let cut: Arc<Mutex<Option<Proxy>>> = Arc::default();
    let (sender, mut made) = mpsc::unbounded_channel();
    let app = Tierline::builder(Topology::parse(MAP).unwrap())
        .amqp(url)
        .publish_connections(1)
        .registry(Registry::new())
        .observe({
            let cut = cut.clone();
            move |event| {
                if let (Event::Connected { purpose, .. }, Some(proxy)) =
                    (event, &*cut.lock().unwrap())
                {
                    let _ = sender.send((*purpose, Instant::now()));
                    proxy.reset();
                }
            }
        })
        .connect()
        .await
        .unwrap();
    // From here on every connection is reset as soon as it is made.
    proxy.reset();
    *cut.lock().unwrap() = Some(proxy);
    let worker = tokio::spawn(app.work(["all"]).until(std::future::pending()));
    let (mut working, mut publishing) = (Vec::new(), Vec::new());
    while working.len() < CONNECTIONS || publishing.len() < CONNECTIONS {
        let (purpose, at) = made.recv().await.unwrap();
        match purpose {
            Purpose::Work => working.push(at),
            Purpose::Publish => publishing.push(at),
            other => panic!("nobody connects for {other:?}"),
        }
    }
    worker.abort();
    for times in [working, publishing] {
        let took = times[CONNECTIONS - 1] - times[0];
        assert!(took >= SHORTEST, "{CONNECTIONS} connections in {took:?}");
    }
}
