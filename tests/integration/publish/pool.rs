//! Publishing over a pool that the app has already.

use std::time::{Duration, Instant};

use deadpool_lapin::{Config, Pool, PoolConfig, Runtime};
use lapin::ConnectionProperties;
use tierline::error::BrokerError;
use tierline::{Error, Tierline, Topology};
use tierline_testbed::{Proxy, vhost};

use super::closing::until_connections;
use super::{MAP, Ship};

fn pool(url: &str, max_size: usize) -> Pool {
    let config = Config {
        url: Some(url.to_owned()),
        pool: Some(PoolConfig::new(max_size)),
    };
    let properties = ConnectionProperties::default;
    config.create_pool(properties, Runtime::Tokio1).unwrap()
}

async fn connect(url: &str, pool: &Pool) -> Result<Tierline, Error> {
    let builder = Tierline::builder(Topology::parse(MAP).unwrap()).amqp(url);
    builder.amqp_pool(pool.clone()).connect().await
}

#[tokio::test]
async fn publishing_keeps_connections_of_the_pool_and_gives_them_back() {
    let vhost = vhost().await;
    let pool = pool(vhost.amqp_url(), 3);
    let app = connect(vhost.amqp_url(), &pool).await.unwrap();
    for order in 0..20 {
        app.publish(Ship { order }).await.unwrap();
    }
    until("both connections to be taken", || taken(&pool) == 2).await;
    // None but those of the pool.
    until_connections(&vhost, 2).await;
    assert_eq!(vhost.depth("shop.normal").await.unwrap(), 20);

    app.close().await;
    until("both to be given back", || taken(&pool) == 0).await;
    // As they are: the app goes on with them.
    let connection = pool.get().await.unwrap();
    connection.create_channel().await.unwrap();
    assert_eq!(pool.status().size, 2);
}

#[tokio::test]
async fn a_connection_of_the_pool_that_is_lost_is_replaced_by_another_one() {
    let vhost = vhost().await;
    let (before, after) = vhost.amqp_url().rsplit_once(':').unwrap();
    let (port, path) = after.split_once('/').unwrap();
    let proxy = Proxy::start(port.parse().unwrap()).await.unwrap();
    let pool = pool(&format!("{before}:{}/{path}", proxy.port()), 2);
    let app = connect(vhost.amqp_url(), &pool).await.unwrap();
    app.publish(Ship { order: 1 }).await.unwrap();
    until("both connections to be taken", || taken(&pool) == 2).await;

    proxy.reset();
    for order in 2..12 {
        let publishing = app.publish(Ship { order }).deadline("60s");
        publishing.await.unwrap();
    }
    until("both connections to be taken again", || taken(&pool) == 2).await;
    assert_eq!(pool.status().size, 2);
}

#[tokio::test]
async fn a_pool_that_cannot_serve_is_refused_with_what_it_needs() {
    let (here, elsewhere) = tokio::join!(vhost(), vhost());
    let small = connect(here.amqp_url(), &pool(here.amqp_url(), 1)).await;
    let error = small.unwrap_err();
    assert!(
        matches!(error, Error::Broker(BrokerError::InvalidPool { .. })),
        "{error:?}"
    );
    assert!(
        error.to_string().contains("set its max_size to 2"),
        "{error}"
    );

    let astray = connect(here.amqp_url(), &pool(elsewhere.amqp_url(), 2)).await;
    let error = astray.unwrap_err();
    assert!(
        matches!(error, Error::Broker(BrokerError::InvalidPool { .. })),
        "{error:?}"
    );
    assert!(error.to_string().contains(elsewhere.name()), "{error}");
}

/// How many connections the pool has lent.
fn taken(pool: &Pool) -> usize {
    let status = pool.status();
    status.size - status.available
}

async fn until(what: &str, is_so: impl Fn() -> bool) {
    let begin = Instant::now();
    while !is_so() {
        assert!(begin.elapsed() < Duration::from_secs(60), "{what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}
