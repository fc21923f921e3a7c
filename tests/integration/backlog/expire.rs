//! Tasks that wait for longer than their tier's `ttl`.

use std::collections::BTreeSet;

use tierline::dead::{Filter, Page, Reason};

use super::{MAP, Ship, Shop, gated};

#[tokio::test(flavor = "multi_thread")]
async fn tasks_of_a_low_priority_expire_while_a_worker_is_busy_with_higher_ones() {
    let map = MAP.replace("lease = \"2s\"", "lease = \"2s\"\nttl = \"30m\"");
    let (registry, open) = gated();
    let shop = Shop::open(&map, registry).await;
    // As many as the worker holds: two slots, four each.
    for order in 0..8 {
        let publish = shop.app.publish(Ship { order }).priority(9);
        publish.await.unwrap();
    }
    let mut late = BTreeSet::new();
    for order in 8..10 {
        let publish = shop.app.publish(Ship { order }).priority(1);
        late.insert(publish.await.unwrap().id.to_string());
    }
    // Postgres refuses this text in JSON, which must not hold up the others.
    let nul = serde_json::json!({ "order": "\u{0}" });
    let publish = shop.app.publish_named("order.ship", &nul).priority(1);
    late.insert(publish.await.unwrap().id.to_string());
    let pool = shop.pool().await;
    let age = "UPDATE tierline.ready SET due_at = now() - interval '31 minutes' WHERE rank = -1";
    let aged = sqlx::query(age).execute(&pool).await.unwrap();
    assert_eq!(aged.rows_affected(), 3);
    for (order, priority) in [(10, 1), (11, 0)] {
        let publish = shop.app.publish(Ship { order }).priority(priority);
        publish.await.unwrap();
    }

    let working = shop.work();
    shop.heard.until("dead order.ship: expired", 3).await;
    assert_eq!(shop.heard.count("done"), 0, "{:#?}", shop.heard.lines());
    assert_eq!(shop.rows().await, [0, 2, 8]);
    let letters = shop.app.dead_letters().unwrap();
    let page = letters.list(&Filter::default(), Page::first(10)).await;
    let page = page.unwrap();
    let found: BTreeSet<String> = page
        .letters
        .iter()
        .inspect(|it| assert_eq!((it.reason, it.tier.as_str()), (Reason::Expired, "normal")))
        .filter_map(|it| it.message_id.clone())
        .collect();
    assert_eq!(found, late);

    open.add_permits(10);
    shop.heard.until("done", 10).await;
    working.end().await;
    assert_eq!(shop.heard.count("dead"), 3);
    assert_eq!(shop.rows().await, [0, 0, 0]);
}
