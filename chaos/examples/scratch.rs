#![allow(missing_docs, clippy::unwrap_used)]
use std::time::{Duration, Instant};
use tierline::{Tierline, Topology};
use tierline::task::PublishRequest;
use tierline_testbed::Broker;

const MAP: &str = r#"
    app = "chaos"
    [tiers.critical]
    queue = "classic"
    [tiers.normal]
    queue = "quorum"
    [groups.all]
    tiers = ["critical", "normal"]
    concurrency = 4
    [tasks]
    "urgent" = "critical"
    "usual" = "normal"
"#;

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let graceful = std::env::args().nth(1).as_deref() == Some("stop");
    let broker = Broker::start().await?;
    let app = Tierline::builder(Topology::parse(MAP)?).amqp(broker.amqp_url()).connect().await?;
    broker.flush_declarations().await?;
    let publisher = app.publisher();
    let mut confirmed = 0;
    let begin = Instant::now();
    while begin.elapsed() < Duration::from_secs(4) {
        for task in ["urgent", "usual"] {
            let mut request = PublishRequest::named(task, b"{}".to_vec());
            request.delay = Some(Duration::from_secs(1));
            publisher.publish(request).await?;
            confirmed += 1;
        }
    }
    println!("{confirmed} confirmed, now the broker goes (graceful: {graceful})");
    if graceful { broker.stop().await?; } else { broker.kill().await?; }
    broker.start().await?;
    let begin = Instant::now();
    let mut last = String::new();
    while begin.elapsed() < Duration::from_secs(420) {
        let listed = broker.rabbitmqctl(&["list_queues", "--no-table-headers", "name", "messages", "messages_ready"]).await?;
        let lines: Vec<&str> = listed.lines().filter(|l| !l.ends_with("\t0\t0") && !l.ends_with("\t0\t0\t")).collect();
        let now = lines.join(" | ");
        if now != last {
            println!("{:.1} s: {now}", begin.elapsed().as_secs_f64());
            last = now;
        }
        let total: u64 = lines.iter().filter(|l| l.starts_with("chaos.normal\t") || l.starts_with("chaos.critical\t")).filter_map(|l| l.split('\t').nth(1)?.parse::<u64>().ok()).sum();
        if total >= confirmed { println!("all there"); break; }
        tokio::time::sleep(Duration::from_secs(2)).await;
    }
    let log = std::fs::read_to_string(broker.folder().join("log").join("a@localhost.log")).unwrap_or_default();
    for line in log.lines().filter(|l| l.contains("[warn") || l.contains("[error") || l.contains("dlx")).take(40) { println!("{line}"); }
    Ok(())
}
