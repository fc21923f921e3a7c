//! What the SQL function does with overrides.

use sqlx::{AssertSqlSafe, Executor};
use tierline::{Topology, backlog};

use super::{MAP, Shop};

#[tokio::test(flavor = "multi_thread")]
async fn a_producer_with_the_documented_rights_publishes_where_the_override_says() {
    let shop = Shop::open().await;
    shop.add_idle_worker().await;
    let role = format!("producer_{}", std::process::id());
    let grants = format!(
        "CREATE ROLE {role}; GRANT USAGE ON SCHEMA tierline TO {role}; \
         GRANT SELECT ON tierline.tasks, tierline.backlogs TO {role}; \
         GRANT INSERT ON tierline.ready, tierline.scheduled TO {role}"
    );
    shop.pool.execute(AssertSqlSafe(grants)).await.unwrap();
    let publish = async || {
        let mut transaction = shop.pool.begin().await.unwrap();
        let role = format!("SET LOCAL ROLE {role}");
        transaction.execute(AssertSqlSafe(role)).await.unwrap();
        let published =
            sqlx::query("SELECT tierline.publish('shop', 'report.send', '{\"number\": 1}')");
        let published = published.execute(&mut *transaction).await;
        transaction.commit().await.unwrap();
        published.map(drop)
    };
    let before = publish().await;
    let overriding = shop.control.override_task("report.send").tier("bulk");
    let overridden = overriding.await;
    let under_override = publish().await;
    let drop_role = format!("DROP OWNED BY {role}; DROP ROLE {role}");
    shop.pool.execute(AssertSqlSafe(drop_role)).await.unwrap();
    before.unwrap();
    overridden.unwrap();
    under_override.unwrap();
    let rows = shop.rows("ready", "report.send").await;
    assert_eq!(rows, [("bulk".to_owned(), 1, 5), ("bulk".to_owned(), 1, 5)]);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_function_follows_no_override_to_a_tier_that_left_the_map() {
    let shop = Shop::open().await;
    shop.add_idle_worker().await;
    let overriding = shop.control.override_task("report.send");
    overriding.tier("bulk").priority(3).await.unwrap();
    assert_eq!(
        shop.publish_by_sql("report.send", None).await,
        ("bulk".into(), 3)
    );
    let database = shop.app.database().unwrap();
    let later = Topology::parse(MAP.replace("bulk", "batch")).unwrap();
    backlog::apply(database, &later).await.unwrap();
    // Its priority stays in force, as for the library.
    assert_eq!(
        shop.publish_by_sql("report.send", None).await,
        ("rows".into(), 3)
    );
    backlog::apply(database, shop.app.topology()).await.unwrap();
    assert_eq!(
        shop.publish_by_sql("report.send", None).await,
        ("bulk".into(), 3)
    );
}
