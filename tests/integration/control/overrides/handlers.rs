//! Overrides that not all live processes can follow.

use sqlx::Executor;

use super::{Shop, refusal};
use crate::control::until;
use crate::worker::logs::Logged;

#[tokio::test(flavor = "multi_thread")]
async fn processes_that_have_no_handler_are_named() {
    let shop = Shop::open().await;
    shop.add_idle_worker().await;
    shop.add_process("old:7", &["report.export"], 60.0).await;
    let overriding = shop.control.override_prefix("report.").tier("bulk");
    let notes = overriding.await.unwrap().notes;
    let named = "old:7 (no handler for report.send)";
    let is_named = |text: &String| text.contains(named) && !text.contains("idle:1");
    assert!(notes.iter().any(is_named), "{notes:?}");
    let report = shop.control.doctor().await.unwrap();
    assert!(!report.is_well(), "{report}");
    let found: Vec<_> = report.findings.iter().map(|it| it.what.clone()).collect();
    assert!(found.iter().any(is_named), "{report}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_timeout_that_the_broker_does_not_wait_for_refuses_the_override() {
    let shop = Shop::open().await;
    let two_hours = 7_200.0;
    shop.add_process("slow:1", &["report.send"], two_hours)
        .await;
    let refused = refusal(shop.control.override_task("report.send").tier("low")).await;
    assert!(
        refused.contains("report.send (2h)") && refused.contains("ack_timeout"),
        "{refused}"
    );
    // A lease is extended for as long as it takes.
    let overriding = shop.control.override_task("report.send").tier("bulk");
    overriding.await.unwrap();
    assert!(shop.control.doctor().await.unwrap().is_well());
    shop.pool
        .execute("UPDATE tierline.workers SET timeouts = '{60}'")
        .await
        .unwrap();
    let overriding = shop.control.override_task("report.send").tier("low");
    overriding.await.unwrap();
    shop.pool
        .execute("UPDATE tierline.workers SET timeouts = '{7200}'")
        .await
        .unwrap();
    let report = shop.control.doctor().await.unwrap();
    assert!(report.to_string().contains("ack_timeout"), "{report}");
}

#[tokio::test(flavor = "multi_thread")]
async fn processes_of_an_older_release_are_named() {
    let shop = Shop::open().await;
    shop.add_idle_worker().await;
    let older = "INSERT INTO tierline.workers (app, name, version, leases) VALUES ('shop', 'old:1', '', '{\"rows\": 600}')";
    shop.pool.execute(older).await.unwrap();
    let overriding = shop.control.override_task("report.send").tier("bulk");
    let notes = overriding.await.unwrap().notes;
    let is_named = |it: &String| it.contains("follows no overrides") && it.contains("old:1");
    assert!(notes.iter().any(is_named), "{notes:?}");
    let report = shop.control.doctor().await.unwrap();
    assert!(
        report.to_string().contains("follows no overrides"),
        "{report}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_warns_of_an_override_that_it_cannot_run_while_it_works() {
    let logged = Logged::of_this_process();
    let shop = Shop::open().await;
    let working = shop.work(&["slow"]).await;
    // No handler of this worker: another process had one when the override was made.
    let begin = "INSERT INTO tierline.controls (app, kind, target_kind, target, setting, who, why) \
                 VALUES ('shop', 'override', 'task', 'sms.send', '{\"tier\": \"bulk\"}', 'ada', '')";
    shop.pool.execute(begin).await.unwrap();
    let warning = "to tier bulk of group slow: sms.send; this worker has no handler";
    until(async || logged.count(warning) == 1).await;
    let pause = shop.control.pause_tier("fresh").await.unwrap();
    assert!(pause.after.is_some());
    working.end().await;
    assert_eq!(logged.count(warning), 1, "it is said once");
}
