//! A node of a cluster that hangs.

use tierline::{Tierline, Topology};
use tierline_testbed::Cluster;
use tokio::sync::oneshot;

use super::Heard;
use super::tasks::registry;

/// As many tiers as the cluster has nodes.
const MAP: &str = r#"
    app = "yard"
    [tiers.first]
    queue = "quorum"
    [tiers.second]
    queue = "quorum"
    [tiers.third]
    queue = "quorum"
    [groups.first]
    tiers = ["first"]
    concurrency = 2
    [groups.others]
    tiers = ["second", "third"]
    concurrency = 2
    [tasks]
    dig = "first"
    fill = "second"
    rake = "third"
"#;

const TASKS: [(&str, &str); 3] = [("first", "dig"), ("second", "fill"), ("third", "rake")];

#[tokio::test(flavor = "multi_thread")]
async fn a_frozen_node_of_three_stops_a_third_of_the_tiers() {
    let cluster = Cluster::start().await.unwrap();
    let vhost = cluster.vhost().await.unwrap();
    let urls = cluster.amqp_urls();
    let urls = urls.iter().map(|url| format!("{url}/{}", vhost.name()));
    let heard = Heard::default();
    let app = Tierline::builder(Topology::parse(MAP).unwrap());
    let app = urls.fold(app, |app, url| app.amqp(url));
    let app = app.registry(registry()).observe(heard.ear());
    let app = app.connect().await.unwrap();
    for node in cluster.nodes() {
        node.flush_declarations().await.unwrap();
    }
    let (stop, stopped) = oneshot::channel::<()>();
    let worker = app.work(["first", "others"]);
    let worker = tokio::spawn(worker.until(async { drop(stopped.await) }));
    heard.until("consuming", 3).await;

    // The one that all connections led to first.
    let [frozen, witness, _] = cluster.nodes();
    let (mut led_elsewhere, mut led_by_it) = (Vec::new(), Vec::new());
    for (tier, task) in TASKS {
        let queue = format!("yard.{tier}");
        let leader = cluster.leader(witness, vhost.name(), &queue).await.unwrap();
        match leader.name() == frozen.name() {
            true => led_by_it.push(task),
            false => led_elsewhere.push(task),
        }
    }
    assert_eq!((led_elsewhere.len(), led_by_it.len()), (2, 1));
    frozen.pause().await.unwrap();
    for round in 1..=10 {
        for task in &led_elsewhere {
            let publishing = app.publish_named(task, &serde_json::json!({}));
            publishing.deadline("60s").await.unwrap();
            heard.until(&format!("done {task}"), round).await;
        }
    }
    frozen.resume().await.unwrap();
    let publishing = app.publish_named(led_by_it[0], &serde_json::json!({}));
    publishing.deadline("60s").await.unwrap();
    heard.until(&format!("done {}", led_by_it[0]), 1).await;
    drop(stop);
    worker.await.unwrap().unwrap();
}
