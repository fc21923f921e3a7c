//! The exported definitions on a broker of their own, and what its users can do there.

use lapin::options::{
    BasicConsumeOptions, BasicGetOptions, QueueDeclareOptions, QueueDeleteOptions,
};
use lapin::types::FieldTable;
use lapin::{Channel, ErrorKind};
use tierline::Error;
use tierline::amqp::{Connection, Management, doctor_with};
use tierline::error::BrokerError;
use tierline::topology::export::Definitions;
use tierline_testbed::Broker;

use super::{apply, hotel, plan, publish, stranger};

/// One test, because it needs a broker of its own: users belong to all virtual hosts.
#[tokio::test]
async fn exported_definitions_make_a_broker_that_is_well_with_users_who_may_just_enough() {
    let broker = Broker::start_new().await.unwrap();
    import(&broker).await;

    let connection = Connection::open(&broker.amqp_url(), "test").await.unwrap();
    let management = Management::new(&broker.management_url().unwrap()).unwrap();
    let report = doctor_with(&connection, &hotel(), false, &management)
        .await
        .unwrap();
    assert!(report.is_well(), "{report}");

    nobody_can_log_in_before_a_password_is_set(&broker).await;
    for user in ["hotel.publisher", "hotel.worker.urgent"] {
        let arguments = ["change_password", user, "pa/ss@word"];
        broker.rabbitmqctl(&arguments).await.unwrap();
    }
    a_publisher_can_only_publish(&broker).await;
    a_worker_can_consume_its_own_tiers_collect_and_publish(&broker).await;
    who_may_not_declare_is_told_what_is_missing(&broker).await;

    broker.close_all_connections().await.unwrap();
    let error = apply(&connection, &hotel()).await.unwrap_err();
    assert!(
        matches!(error, Error::Broker(BrokerError::Failed { .. })),
        "{error}"
    );
    assert!(error.is_transient());
}

async fn import(broker: &Broker) {
    let connection = Connection::open(&broker.amqp_url(), "test").await.unwrap();
    let topology = hotel();
    let definitions = Definitions::new(&topology, &plan(&connection, &topology), "/");
    let file = broker.folder().join("definitions.json");
    std::fs::write(&file, serde_json::to_string(&definitions).unwrap()).unwrap();
    let arguments = ["import_definitions", file.to_str().unwrap()];
    broker.rabbitmqctl(&arguments).await.unwrap();
}

fn url(broker: &Broker, user: &str) -> String {
    broker
        .amqp_url()
        .replace("guest:guest", &format!("{user}:pa%2Fss%40word"))
}

async fn nobody_can_log_in_before_a_password_is_set(broker: &Broker) {
    for password in ["", "guest"] {
        let credentials = format!("hotel.publisher:{password}");
        let url = broker.amqp_url().replace("guest:guest", &credentials);
        let error = Connection::open(&url, "test").await.unwrap_err();
        assert!(
            matches!(error, Error::Broker(BrokerError::LoginRefused { .. })),
            "{error}"
        );
    }
}

async fn a_publisher_can_only_publish(broker: &Broker) {
    let url = url(broker, "hotel.publisher");
    for exchange in [
        "hotel.tasks",
        "hotel.delay.critical.00",
        "hotel.delay.long.24",
    ] {
        assert_eq!(
            attempt(&url, Attempt::Publish(exchange)).await,
            Ok(()),
            "{exchange}"
        );
    }
    for refused in [
        Attempt::Publish("hotel.critical.dlx"),
        Attempt::Publish(""),
        Attempt::Publish("amq.topic"),
        Attempt::Consume("hotel.critical"),
        Attempt::Consume("hotel.critical.dlq"),
        Attempt::Get("hotel.normal"),
        Attempt::Declare("hotel.new"),
        Attempt::Delete("hotel.critical"),
    ] {
        assert_eq!(attempt(&url, refused).await, Err(403), "{refused:?}");
    }
}

async fn a_worker_can_consume_its_own_tiers_collect_and_publish(broker: &Broker) {
    let url = url(broker, "hotel.worker.urgent");
    for allowed in [
        Attempt::Consume("hotel.critical"),
        Attempt::Consume("hotel.high"),
        Attempt::Consume("hotel.critical.dlq"),
        Attempt::Consume("hotel.normal.dlq"),
        Attempt::Consume("hotel.unrouted"),
        Attempt::Publish("hotel.tasks"),
        Attempt::Publish("hotel.delay.high.05"),
        Attempt::Publish("hotel.delay.bulk.05"),
        Attempt::Publish("hotel.critical.dlx"),
        Attempt::Publish("hotel.high.dlx"),
        Attempt::Publish("hotel.unrouted"),
    ] {
        assert_eq!(attempt(&url, allowed).await, Ok(()), "{allowed:?}");
    }
    for refused in [
        Attempt::Consume("hotel.normal"),
        Attempt::Publish("hotel.normal.dlx"),
        Attempt::Publish(""),
        Attempt::Declare("hotel.critical.g2"),
        Attempt::Declare("anything"),
        Attempt::Delete("hotel.critical"),
    ] {
        assert_eq!(attempt(&url, refused).await, Err(403), "{refused:?}");
    }
}

async fn who_may_not_declare_is_told_what_is_missing(broker: &Broker) {
    let url = url(broker, "hotel.publisher");
    let connection = Connection::open(&url, "test").await.unwrap();
    let error = apply(&connection, &hotel()).await.unwrap_err();
    assert!(
        matches!(error, Error::Broker(BrokerError::AccessRefused { .. })),
        "{error}"
    );
    let shown = format!("{error} {error:?}");
    for part in ["\"hotel.tasks\"", "\"hotel.publisher\"", "configure"] {
        assert!(error.to_string().contains(part), "{part}: {error}");
    }
    assert!(!shown.contains("word"), "{shown}");
}

#[derive(Debug, Clone, Copy)]
enum Attempt {
    Publish(&'static str),
    Consume(&'static str),
    Get(&'static str),
    Declare(&'static str),
    Delete(&'static str),
}

/// Tries something as a user; an error is the broker's code for it.
async fn attempt(url: &str, attempt: Attempt) -> Result<(), u16> {
    let (_connection, channel) = stranger(url).await;
    let tried = match attempt {
        Attempt::Publish(exchange) => publish(&channel, exchange, "hotel.critical").await,
        Attempt::Consume(queue) => consume(&channel, queue).await,
        Attempt::Get(queue) => {
            let options = BasicGetOptions::default();
            channel.basic_get(queue.into(), options).await.map(|_| ())
        }
        Attempt::Declare(queue) => {
            let options = QueueDeclareOptions::default();
            let arguments = FieldTable::default();
            channel
                .queue_declare(queue.into(), options, arguments)
                .await
                .map(|_| ())
        }
        Attempt::Delete(queue) => {
            let options = QueueDeleteOptions::default();
            channel
                .queue_delete(queue.into(), options)
                .await
                .map(|_| ())
        }
    };
    tried.map_err(|error| match error.kind() {
        ErrorKind::ProtocolError(said) => said.get_id(),
        _ => panic!("{attempt:?}: {error}"),
    })
}

async fn consume(channel: &Channel, queue: &str) -> lapin::Result<()> {
    let options = BasicConsumeOptions::default();
    let arguments = FieldTable::default();
    channel
        .basic_consume(queue.into(), "".into(), options, arguments)
        .await
        .map(|_| ())
}
