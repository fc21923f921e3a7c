//! A tier whose quorum queue has no leader. The broker answers its consumers with the end of their whole
//! connection.

use tierline_testbed::Broker;

use super::Working;
use super::tasks::{Dig, Fill, Rake, registry};

/// The tier without a leader is between two others.
const MAP: &str = r#"
    app = "yard"
    [tiers.first]
    queue = "quorum"
    [tiers.second]
    queue = "quorum"
    [tiers.third]
    queue = "classic"
    [groups.all]
    tiers = ["first", "second", "third"]
    concurrency = 2
    [tasks]
    dig = "first"
    fill = "second"
    rake = "third"
"#;

/// Stops, or starts again, the only member of the queue of the tier `second`.
async fn steer_second(broker: &Broker, vhost: &str, how: &str) {
    let command = format!(
        "{{ok, Q}} = rabbit_amqqueue:lookup(rabbit_misc:r(<<\"{vhost}\">>, queue, <<\"yard.second\">>)), \
         {{Name, _}} = amqqueue:get_pid(Q), ra:{how}(quorum_queues, {{Name, node()}})."
    );
    let answer = broker.rabbitmqctl(&["eval", &command]).await.unwrap();
    assert_eq!(answer.trim(), "ok");
}

/// Publishes tasks of the other tiers one by one: each is done before the next.
async fn others_go_on(working: &Working) {
    let before = working.heard.count("done dig");
    for number in before..before + 20 {
        working.app.publish(Dig {}).await.unwrap();
        working.heard.until("done dig", number + 1).await;
        working.app.publish(Rake {}).await.unwrap();
        working.heard.until("done rake", number + 1).await;
    }
}

/// The connections of the group, one for each tier.
const CONNECTIONS: usize = 3;
/// The losses that the tier without a leader may cost each time, of its own connection.
const LOSSES: usize = 1;

#[tokio::test(flavor = "multi_thread")]
async fn a_tier_without_a_leader_keeps_no_other_tier_of_its_group_from_running() {
    // Stopping the members of queues leaves nothing to later tests.
    let broker = Broker::start_new().await.unwrap();
    let vhost = broker.vhost().await.unwrap();
    let working = Working::begin_on(vhost, MAP, registry()).await;
    working.heard.until("consuming", 3).await;
    let name = working.vhost.name().to_owned();
    let vhost = working.end().await;

    // When the worker begins.
    steer_second(&broker, &name, "stop_server").await;
    let working = Working::begin_on(vhost, MAP, registry()).await;
    others_go_on(&working).await;
    assert!(working.heard.count("disconnected Work") <= LOSSES);
    steer_second(&broker, &name, "restart_server").await;
    working.heard.until("consuming second", 1).await;
    working.app.publish(Fill {}).await.unwrap();
    working.heard.until("done fill", 1).await;
    assert!(working.heard.count("disconnected Work") <= LOSSES);

    // While it works, and has to connect again.
    steer_second(&broker, &name, "stop_server").await;
    broker.close_all_connections().await.unwrap();
    others_go_on(&working).await;
    assert!(working.heard.count("disconnected Work") <= CONNECTIONS + 2 * LOSSES);
    broker.close_all_connections().await.unwrap();
    others_go_on(&working).await;
    steer_second(&broker, &name, "restart_server").await;
    working.heard.until("consuming second", 2).await;
    working.app.publish(Fill {}).await.unwrap();
    working.heard.until("done fill", 2).await;
    let lines = working.heard.lines();
    assert!(
        working.heard.count("disconnected Work") <= 2 * CONNECTIONS + 2 * LOSSES,
        "{lines:#?}"
    );
    working.end().await;
}
