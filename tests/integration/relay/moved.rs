//! Rows that a rule or an operator has moved, and rows with keys.

use sqlx::{AssertSqlSafe, Executor};
use tierline::{Registry, Tierline, Topology};

use super::{MAP, Pay, Relaying, Ship, Shop};
use crate::amqp::until;
use crate::worker::Heard;

/// Tasks wait in Postgres, and those that waited for too long move to a tier on the broker.
fn map_that_promotes() -> String {
    let tier = "[tiers.late]\nqueue = \"postgres\"\npromote = { after = \"1h\", to = \"bulk\" }\n\
                [groups.late]\ntiers = [\"late\"]\nconcurrency = 1\n[groups.urgent]";
    let map = MAP.replace("[groups.urgent]", tier);
    map.replace("\"order.ship\" = \"bulk\"", "\"order.ship\" = \"late\"")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_promoted_row_is_relayed_to_the_queue_of_its_new_tier() {
    let shop = Shop::open().await;
    let heard = Heard::default();
    let app = shop
        .app(&map_that_promotes(), Registry::new(), &heard)
        .await;
    let sent = app.publish(Ship { order: 1 }).await.unwrap();
    assert_eq!(sent.tier, "late");
    shop.execute("UPDATE tierline.ready SET due_at = now() - interval '2h'")
        .await;
    let relaying = Relaying::begin(app.relay().unwrap(), heard);
    let taken = shop.take("shop.bulk", 1).await.remove(0);
    assert_eq!(taken.message.id, sent.id);
    shop.until_no_rows().await;
    relaying.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_escalated_row_is_relayed_to_the_queue_of_its_new_tier() {
    let shop = Shop::open().await;
    let heard = Heard::default();
    let app = shop.app(MAP, Registry::new(), &heard).await;
    let mut ids = Vec::new();
    for order in 0..2 {
        let mut tx = shop.pool.begin().await.unwrap();
        // Its properties say something, or its columns say everything.
        let ship = app.publish(Ship { order });
        let ship = if order == 0 {
            ship
        } else {
            ship.header("customer", "Ada")
        };
        ids.push(ship.within(&mut tx).await.unwrap().id);
        tx.commit().await.unwrap();
        let escalating = app
            .backlog()
            .unwrap()
            .escalate(&ids[order as usize], "critical");
        escalating.await.unwrap();
    }
    let relaying = Relaying::begin(app.relay().unwrap(), heard);
    let taken = shop.take("shop.critical", 2).await;
    let taken: Vec<_> = taken.into_iter().map(|it| it.message.id).collect();
    assert!(ids.iter().all(|id| taken.contains(id)), "{taken:?}");
    shop.until_no_rows().await;
    relaying.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_row_that_its_queue_refuses_keeps_its_key_no_longer_than_it_waits() {
    let shop = Shop::open().await;
    let keyed = shop.rows.publish(Ship { order: 1 }).unique("ship:1");
    let keyed = keyed.await.unwrap();
    let heard = Heard::default();
    let app = shop.app(MAP, Registry::new(), &heard).await;
    shop.vhost.delete_queue("shop.bulk").await.unwrap();
    // It is tried, and goes back.
    let relaying = Relaying::begin(app.relay().unwrap(), heard);
    let tries = async || {
        let query = "SELECT n_tup_ins FROM pg_stat_user_tables WHERE relname = 'running'";
        let tries: i64 = sqlx::query_scalar(query)
            .fetch_one(&shop.pool)
            .await
            .unwrap();
        tries
    };
    until("the row was tried", async || tries().await >= 2).await;
    relaying.end().await;
    assert_eq!(shop.count().await, [0, 1, 0]);
    shop.rows
        .backlog()
        .unwrap()
        .cancel(&keyed.id)
        .await
        .unwrap();
    let again = shop.rows.publish(Ship { order: 2 }).unique("ship:1");
    let again = again.await.unwrap();
    assert!(!again.is_duplicate, "{again:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_that_cannot_be_held_now_costs_its_row_nothing() {
    let shop = Shop::open().await;
    let keyed = shop.rows.publish(Pay { order: 1 }).unique("pay:1");
    let keyed = keyed.await.unwrap();
    // A role that may do everything but change keys.
    let role = format!("relay_{}", std::process::id());
    let grants = format!(
        "CREATE ROLE {role} LOGIN; GRANT USAGE ON SCHEMA tierline TO {role}; \
         GRANT ALL ON ALL TABLES IN SCHEMA tierline TO {role}; GRANT USAGE ON ALL SEQUENCES IN SCHEMA tierline TO {role}; \
         REVOKE UPDATE ON tierline.unique_keys FROM {role}"
    );
    shop.pool.execute(AssertSqlSafe(grants)).await.unwrap();
    let heard = Heard::default();
    let (scheme, rest) = shop.database.url().split_once("://").unwrap();
    let place = rest.rsplit_once('@').map_or(rest, |(_, place)| place);
    let url = format!("{scheme}://{role}@{place}");
    let app = Tierline::builder(Topology::parse(MAP).unwrap())
        .amqp(shop.vhost.amqp_url())
        .postgres(url)
        .observe(heard.ear())
        .connect()
        .await
        .unwrap();
    let relaying = Relaying::begin(app.relay().unwrap(), heard);
    until("the row waits", async || shop.count().await == [1, 0, 0]).await;
    assert_eq!(relaying.heard.count("dead"), 0);
    // It was stored, and will be again, under the same id.
    assert_eq!(shop.take("shop.critical", 1).await[0].message.id, keyed.id);
    let grant = format!("GRANT UPDATE ON tierline.unique_keys TO {role}");
    shop.pool.execute(AssertSqlSafe(grant)).await.unwrap();
    shop.execute("UPDATE tierline.scheduled SET due_at = now()")
        .await;
    let taken = shop.take("shop.critical", 1).await.remove(0);
    assert_eq!(taken.message.id, keyed.id);
    shop.until_no_rows().await;
    // Its key is held, because nobody knows when a message of the broker is done.
    let again = shop.rows.publish(Pay { order: 2 }).unique("pay:1");
    assert!(again.await.unwrap().is_duplicate);
    relaying.end().await;
    let drop = format!("DROP OWNED BY {role}; DROP ROLE {role}");
    shop.pool.execute(AssertSqlSafe(drop)).await.unwrap();
}
