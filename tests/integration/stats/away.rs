//! What statistics say when a server does not answer.

use tierline::stats::StatsServer;
use tierline_testbed::Network;

use crate::backlog::behind_a_proxy;

use super::{Mail, Ship, Shop, builder, shown, tier};

#[tokio::test(flavor = "multi_thread")]
async fn a_silent_broker_hides_its_own_part_only() {
    let shop = Shop::open().await;
    shop.publish(2, || Ship::Succeed).await;
    shop.publish(2, || Mail {}).await;
    let (proxy, url) = behind_a_proxy(shop.vhost.amqp_url()).await;
    let app = builder(&url, shop.database.url()).connect().await.unwrap();
    assert_eq!(app.stats().await.unwrap().problems, []);
    proxy.set(Network::Silent);
    // For a moment what the broker has just said is what it says.
    let stats = loop {
        let stats = app.stats().await.unwrap();
        if !stats.problems.is_empty() {
            break stats;
        }
    };
    let urgent = tier(&stats, "urgent");
    assert_eq!(
        (urgent.messages, urgent.waiting, urgent.consumers),
        (None, None, None)
    );
    assert_eq!(shown(tier(&stats, "mail").waiting), "2");
    assert!(tier(&stats, "mail").dead.is_some());
    let servers: Vec<_> = stats.problems.iter().map(|it| it.server).collect();
    assert_eq!(servers, [StatsServer::Broker], "{:?}", stats.problems);
    assert!(
        stats.problems[0].problem.contains("shop.urgent"),
        "{:?}",
        stats.problems
    );
    shop.app.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_silent_database_hides_its_own_part_only() {
    let shop = Shop::open().await;
    shop.publish(2, || Ship::Succeed).await;
    let (proxy, url) = behind_a_proxy(shop.database.url()).await;
    let app = builder(shop.vhost.amqp_url(), &url)
        .connect()
        .await
        .unwrap();
    assert_eq!(app.stats().await.unwrap().problems, []);
    proxy.set(Network::Silent);
    let stats = app.stats().await.unwrap();
    let urgent = tier(&stats, "urgent");
    assert_eq!(
        (urgent.messages, shown(urgent.waiting).as_str()),
        (Some(2), "2")
    );
    assert_eq!(
        (urgent.dead, urgent.rate_in, urgent.processes),
        (None, None, None)
    );
    assert_eq!(tier(&stats, "mail").waiting, None);
    let servers = stats.problems.iter().map(|it| it.server);
    assert!(
        servers.clone().count() > 0 && servers.into_iter().all(|it| it == StatsServer::Database)
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_table_that_is_locked_hides_its_own_part_only() {
    let shop = Shop::open().await;
    shop.publish(2, || Mail {}).await;
    let pool = shop.pool().await;
    let mut lock = pool.begin().await.unwrap();
    sqlx::query("LOCK TABLE tierline.rollups IN ACCESS EXCLUSIVE MODE")
        .execute(&mut *lock)
        .await
        .unwrap();
    let stats = shop.stats().await;
    let mail = tier(&stats, "mail");
    assert_eq!((shown(mail.waiting).as_str(), mail.rate_in), ("2", None));
    assert!(
        mail.dead.is_some()
            && mail.processes.is_some()
            && mail.limit.as_ref().unwrap().is_saturated.is_some()
    );
    assert_eq!(stats.problems.len(), 1, "{:?}", stats.problems);
    assert!(
        stats.problems[0].problem.contains("read the rollups"),
        "{:?}",
        stats.problems
    );
    lock.rollback().await.unwrap();
    shop.app.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_queue_and_tables_that_are_not_there_are_named() {
    let (vhost, database) = tokio::join!(tierline_testbed::vhost(), tierline_testbed::database());
    let app = builder(vhost.amqp_url(), database.url())
        .on_connect(tierline::OnConnect::Nothing)
        .connect_lazy()
        .unwrap();
    let stats = app.stats().await.unwrap();
    assert_eq!(stats.tiers.len(), 3);
    let problems: Vec<&str> = stats
        .problems
        .iter()
        .map(|it| it.problem.as_str())
        .collect();
    assert!(
        problems
            .iter()
            .any(|it| it.contains("are not there; apply the map: ")),
        "{problems:?}"
    );
    assert!(
        problems.iter().any(|it| it.contains("migrate")),
        "{problems:?}"
    );
    assert!(problems.len() <= 3, "each is said once: {problems:?}");
    app.close().await;
}
