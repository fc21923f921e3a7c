//! Which node of a cluster leads the queues, and what the doctor says about it.

use std::collections::BTreeMap;
use std::net::TcpListener;

use tierline::Tierline;
use tierline::amqp::{Finding, Management, Report, Severity, doctor_with};
use tierline_testbed::{Cluster, Node, Vhost};

use super::{hotel, open, until};

/// The tiers of the hotel in the order of its file. The first two and the last are classic queues.
const TIERS: [&str; 6] = ["critical", "high", "normal", "low", "bulk", "calls"];

async fn connect(urls: &[String]) {
    let builder = Tierline::builder(hotel());
    let builder = urls.iter().fold(builder, |builder, url| builder.amqp(url));
    builder.connect().await.unwrap().close().await;
}

fn url(node: &Node, vhost: &Vhost) -> String {
    format!("{}/{}", node.amqp_url(), vhost.name())
}

/// The nodes that lead the queues of a tier, its dead letters and its delays.
fn nodes_of<'a>(tier: &str, leaders: &'a BTreeMap<String, String>) -> Vec<&'a str> {
    let own = [format!("hotel.{tier}"), format!("hotel.{tier}.dlq")];
    let delays = format!("hotel.delay.{tier}.");
    let its = |queue: &&String| own.contains(queue) || queue.starts_with(&delays);
    let mut nodes: Vec<_> = leaders
        .iter()
        .filter(|(queue, _)| its(queue))
        .map(|(_, leader)| leader.as_str())
        .collect();
    assert_eq!(nodes.len(), 2 + 14, "{leaders:?}");
    nodes.sort_unstable();
    nodes.dedup();
    nodes
}

async fn examine(node: &Node, vhost: &Vhost) -> Report {
    let management = Management::new(&node.management_url().unwrap()).unwrap();
    doctor_with(&open(vhost).await, &hotel(), false, &management)
        .await
        .unwrap()
}

fn about<'r>(report: &'r Report, object: &str) -> Option<&'r Finding> {
    report.findings.iter().find(|it| it.object == object)
}

#[tokio::test(flavor = "multi_thread")]
async fn every_node_that_is_named_leads_the_queues_of_some_tiers_and_the_doctor_shows_it() {
    let cluster = Cluster::start().await.unwrap();
    let [a, b, c] = cluster.nodes();

    let vhost = cluster.vhost().await.unwrap();
    let urls = cluster.nodes().each_ref().map(|node| url(node, &vhost));
    connect(&urls).await;
    let leaders = vhost.leaders().await.unwrap();
    for (tier, node) in TIERS.iter().zip([a, b, c, a, b, c]) {
        assert_eq!(nodes_of(tier, &leaders), [node.name()], "{tier}");
    }
    // With the first tier of its group.
    assert_eq!(leaders["hotel.normal.quarantine"], c.name());
    let report = examine(a, &vhost).await;
    let spread = about(&report, "cluster").unwrap();
    assert_eq!(spread.severity, Severity::Note, "{report}");
    for node in cluster.nodes() {
        assert!(
            spread.what.contains(&format!("{} 2", node.name())),
            "{report}"
        );
    }

    // A queue that was deleted comes back where it was.
    vhost.delete_queue("hotel.high").await.unwrap();
    connect(&urls).await;
    assert_eq!(vhost.leaders().await.unwrap()["hotel.high"], b.name());

    // The others share the tiers of an address that does not answer.
    let other = cluster.vhost().await.unwrap();
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let silent = silent.local_addr().unwrap();
    let silent = format!("amqp://guest:guest@{silent}/{}", other.name());
    connect(&[url(b, &other), silent, url(c, &other)]).await;
    let leaders = other.leaders().await.unwrap();
    for (tier, node) in TIERS.iter().zip([b, c, c, b, b, c]) {
        assert_eq!(nodes_of(tier, &leaders), [node.name()], "{tier}");
    }

    // With one address its node leads everything.
    let one = cluster.vhost().await.unwrap();
    connect(&[url(b, &one)]).await;
    let report = examine(a, &one).await;
    let warning = about(&report, &format!("node {}", b.name())).unwrap();
    assert_eq!(warning.severity, Severity::Warning, "{report}");
    assert!(warning.what.starts_with("leads 6 of 6"), "{report}");
    assert!(
        warning.help.contains("rabbitmq-queues rebalance"),
        "{report}"
    );
    assert!(warning.help.contains("critical, high, calls"), "{report}");

    for node in cluster.nodes() {
        node.flush_declarations().await.unwrap();
    }
    b.kill().await.unwrap();
    until("the doctor names the node that is down", async || {
        let report = examine(a, &vhost).await;
        about(&report, "queue hotel.high")
            .is_some_and(|it| it.what == format!("cannot be reached: {} is down", b.name()))
    })
    .await;
    b.start().await.unwrap();
}
