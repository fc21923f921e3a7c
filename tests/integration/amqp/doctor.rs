//! What the doctor finds, each provoked on a real broker.

use lapin::ExchangeKind;
use lapin::options::{
    BasicConsumeOptions, ExchangeDeclareOptions, ExchangeUnbindOptions, QueueBindOptions,
    QueueDeclareOptions,
};
use lapin::types::FieldTable;
use serde_json::json;
use tierline::amqp::{Finding, Report, Severity, doctor, doctor_with};
use tierline_testbed::{Vhost, vhost};

use super::{apply, hotel, hotel_with, management, open, publish, stranger, until};

/// A virtual host with the hotel, as it should be.
async fn applied() -> Vhost {
    let vhost = vhost().await;
    apply(&open(&vhost).await, &hotel()).await.unwrap();
    vhost
}

async fn examine(vhost: &Vhost) -> Report {
    doctor_with(&open(vhost).await, &hotel(), false, &management())
        .await
        .unwrap()
}

/// The one thing to mend.
fn only(report: &Report) -> &Finding {
    let mut findings = report
        .findings
        .iter()
        .filter(|finding| finding.severity > Severity::Note);
    let first = findings.next().expect("a finding");
    assert_eq!(findings.next(), None, "{report}");
    first
}

#[tokio::test]
async fn what_was_just_applied_is_well_and_idle_tiers_are_noted() {
    let vhost = applied().await;
    let report = examine(&vhost).await;
    assert!(report.is_well(), "{report}");
    let idle = report
        .findings
        .iter()
        .filter(|finding| finding.what == "nobody works on it");
    assert_eq!(idle.count(), 6, "{report}");
    assert_eq!(report.not_checked.len(), 1, "{report}");
    assert!(report.not_checked[0].contains("ack timeout"), "{report}");
}

#[tokio::test]
async fn with_amqp_alone_it_says_what_it_did_not_check() {
    let vhost = applied().await;
    let report = doctor(&open(&vhost).await, &hotel(), false).await.unwrap();
    assert!(report.is_well(), "{report}");
    assert!(report.not_checked[0].contains("management API"), "{report}");

    vhost.delete_queue("hotel.high.dlq").await.unwrap();
    let report = doctor(&open(&vhost).await, &hotel(), false).await.unwrap();
    assert_eq!(only(&report).object, "queue hotel.high.dlq");
}

#[tokio::test]
async fn an_empty_virtual_host_is_one_finding() {
    let vhost = vhost().await;
    for report in [
        examine(&vhost).await,
        doctor(&open(&vhost).await, &hotel(), false).await.unwrap(),
    ] {
        assert_eq!(only(&report).what, "nothing of it is on the broker");
    }
}

#[tokio::test]
async fn a_deleted_queue_is_missed_once() {
    let vhost = applied().await;
    vhost.delete_queue("hotel.critical").await.unwrap();
    let report = examine(&vhost).await;
    assert_eq!(only(&report).object, "queue hotel.critical");
    assert_eq!(only(&report).help, "apply the file");
}

#[tokio::test]
async fn other_arguments_are_named_with_a_way_out() {
    let vhost = vhost().await;
    let other = hotel_with("[tiers.high]", "[tiers.high]\nmax_priority = 3");
    apply(&open(&vhost).await, &other).await.unwrap();
    let report = examine(&vhost).await;
    let finding = only(&report);
    assert!(
        finding
            .what
            .contains("x-max-priority: the file says 10, the broker has 3")
    );
    assert!(finding.help.contains("generation = 2"), "{report}");
}

#[tokio::test]
async fn an_exchange_of_another_type_is_named() {
    let vhost = vhost().await;
    let (_stranger, channel) = stranger(vhost.amqp_url()).await;
    let options = ExchangeDeclareOptions {
        durable: true,
        ..ExchangeDeclareOptions::default()
    };
    channel
        .exchange_declare(
            "hotel.low.dlx".into(),
            ExchangeKind::Fanout,
            options,
            FieldTable::default(),
        )
        .await
        .unwrap();
    apply(&open(&vhost).await, &hotel()).await.unwrap_err();
    let report = examine(&vhost).await;
    assert_eq!(only(&report).object, "exchange hotel.low.dlx");
    assert!(
        only(&report)
            .what
            .contains("type: the file says headers, the broker has fanout")
    );
}

#[tokio::test]
async fn what_is_no_longer_in_the_file_is_named_with_what_it_holds() {
    let vhost = applied().await;
    let (_stranger, channel) = stranger(vhost.amqp_url()).await;
    for name in [
        "hotel.normal.g7",
        "hotel.breakfast",
        "hotels.other",
        "other.hotel.x",
    ] {
        let options = QueueDeclareOptions::default();
        channel
            .queue_declare(name.into(), options, FieldTable::default())
            .await
            .unwrap();
        publish(&channel, "", name).await.unwrap();
    }
    let report = examine(&vhost).await;
    let found: Vec<_> = report
        .findings
        .iter()
        .filter(|finding| finding.severity == Severity::Warning)
        .map(|finding| (finding.object.as_str(), finding.what.as_str()))
        .collect();
    assert_eq!(
        found,
        [
            (
                "queue hotel.breakfast",
                "is no longer in the file and holds 1 message"
            ),
            (
                "queue hotel.normal.g7",
                "is another generation of the tier \"normal\" and holds 1 message"
            ),
        ]
    );
}

#[tokio::test]
async fn a_binding_too_many_and_one_too_few_are_found() {
    let vhost = applied().await;
    let (_stranger, channel) = stranger(vhost.amqp_url()).await;
    channel
        .queue_bind(
            "hotel.low".into(),
            "hotel.tasks".into(),
            "critical".into(),
            QueueBindOptions::default(),
            FieldTable::default(),
        )
        .await
        .unwrap();
    channel
        .exchange_unbind(
            "hotel.delay.bulk.13".into(),
            "hotel.delay.long.out".into(),
            "bulk.#".into(),
            ExchangeUnbindOptions::default(),
            FieldTable::default(),
        )
        .await
        .unwrap();
    let report = examine(&vhost).await;
    let found: Vec<_> = report
        .findings
        .iter()
        .filter(|finding| finding.severity == Severity::Error)
        .map(|finding| finding.object.as_str())
        .collect();
    assert_eq!(
        found,
        [
            "binding of hotel.delay.bulk.13 to hotel.delay.long.out with the key \"bulk.#\"",
            "binding of hotel.low to hotel.tasks with the key \"critical\"",
        ]
    );
}

#[tokio::test]
async fn a_policy_that_changes_what_the_file_says_is_found_and_no_other() {
    let vhost = applied().await;
    let harmless = json!({ "delivery-limit": 5_000_000, "overflow": "reject-publish" });
    vhost
        .set_policy("harmless", r"^hotel\.low$", harmless)
        .await
        .unwrap();
    let policy = json!({ "message-ttl": 60_000, "overflow": "drop-head", "max-length": 9 });
    vhost
        .set_policy("short", r"^hotel\.normal$", policy)
        .await
        .unwrap();

    // The management API tells of a policy a moment after it was set.
    let mut report = examine(&vhost).await;
    let is_seen = async || {
        report = examine(&vhost).await;
        !report.is_well()
    };
    until("the policy is seen", is_seen).await;

    let finding = only(&report);
    assert_eq!(finding.object, "queue hotel.normal");
    for part in [
        "\"short\"",
        "message-ttl = 60000",
        "overflow = drop-head",
        "max-length = 9",
    ] {
        assert!(finding.what.contains(part), "{part}: {report}");
    }
}

#[tokio::test]
async fn messages_that_wait_for_nobody_are_a_warning_and_workers_end_it() {
    let vhost = applied().await;
    let (_stranger, channel) = stranger(vhost.amqp_url()).await;
    publish(&channel, "hotel.tasks", "high").await.unwrap();
    let report = examine(&vhost).await;
    assert_eq!(
        only(&report).what,
        "nobody works on it, and 1 message waits"
    );

    let options = BasicConsumeOptions::default();
    channel
        .basic_consume(
            "hotel.high".into(),
            "".into(),
            options,
            FieldTable::default(),
        )
        .await
        .unwrap();
    assert!(examine(&vhost).await.is_well());
}
