//! An app that is closed: what is under way ends well, and nothing begins.

use std::time::{Duration, Instant};

use futures_util::{StreamExt, stream};
use tierline::task::PublishRequest;
use tierline::{Error, Registry};
use tierline_testbed::{Vhost, vhost};

use super::{Ship, connect};

/// How long a test waits for something that must happen.
const PATIENCE: Duration = Duration::from_secs(180);

#[tokio::test]
async fn an_app_that_is_closed_ends_what_is_under_way_and_refuses_what_follows() {
    let vhost = vhost().await;
    let app = connect(vhost.amqp_url()).await;
    let clone = app.clone();
    let requests = (0..500).map(|order| PublishRequest::new(&Ship { order }).unwrap());
    let mut outcomes = std::pin::pin!(clone.publish_many(stream::iter(requests)));
    // With the first outcome all of them are under way.
    outcomes.next().await.unwrap().unwrap();
    let closing = tokio::spawn({
        let app = app.clone();
        async move { app.close().await }
    });
    let stored = outcomes.filter(|outcome| std::future::ready(outcome.is_ok()));
    assert_eq!(stored.count().await, 499);
    closing.await.unwrap();

    let refused = clone.publish(Ship { order: 0 }).await;
    assert!(matches!(refused, Err(Error::Closed { .. })), "{refused:?}");
    let request = PublishRequest::new(&Ship { order: 0 }).unwrap();
    let many = clone.publish_many(stream::iter([request]));
    let refused = std::pin::pin!(many).next().await.unwrap();
    assert!(matches!(refused, Err(Error::Closed { .. })), "{refused:?}");
    let refused = clone.work(["all"]).until(std::future::ready(())).await;
    assert!(matches!(refused, Err(Error::Closed { .. })), "{refused:?}");
    assert_eq!(vhost.depth("shop.normal").await.unwrap(), 500);
    until_connections(&vhost, 0).await;
    // A second time there is nothing to do.
    app.close().await;
}

/// Waits until the broker has so many connections of the test's virtual host.
pub(crate) async fn until_connections(vhost: &Vhost, wanted: usize) {
    let begin = Instant::now();
    loop {
        let (connections, _) = vhost.connections_and_channels().await.unwrap();
        if connections == wanted {
            return;
        }
        assert!(begin.elapsed() < PATIENCE, "{connections} connections");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

#[tokio::test]
async fn a_duration_that_cannot_be_read_is_reported_with_its_setting_where_it_is_awaited() {
    let vhost = vhost().await;
    let app = connect(vhost.amqp_url()).await;
    let publish = || app.publish(Ship { order: 1 });
    let worker = app.work(["all"]).grace("soon");
    for (ended, setting) in [
        (publish().delay("soon").await.map(drop), "delay"),
        (publish().deadline("soon").await.map(drop), "deadline"),
        (publish().expires("soon").await.map(drop), "expires"),
        (worker.until(std::future::ready(())).await, "grace"),
        (register("soon"), "timeout"),
    ] {
        let Err(Error::InvalidDuration(invalid)) = ended else {
            panic!("{setting}: {ended:?}");
        };
        assert_eq!((invalid.setting, invalid.text.as_str()), (setting, "soon"));
    }
    assert!(register("1m").is_ok());
    assert_eq!(vhost.depth("shop.normal").await.unwrap(), 0);
}

fn register(timeout: &str) -> Result<(), Error> {
    let options = tierline::TaskOptions::new().timeout(timeout);
    let mut registry = Registry::new();
    registry.register_with::<Ship, _>(async |_: Ship| {}, options)?;
    Ok(())
}
