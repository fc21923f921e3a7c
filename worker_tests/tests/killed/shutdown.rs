//! Workers that are asked to end.

use std::time::Instant;

use crate::deployment::{Deployment, PATIENCE};

#[tokio::test]
async fn a_worker_that_is_asked_to_end_gives_back_what_it_has_not_begun() {
    let deployment = Deployment::build("quorum", 4).await;
    deployment.publish_notes(0..200, 20).await;
    let mut worker = deployment.worker().await;
    deployment.until_ended(20).await;
    worker.terminate().await;
    let ran = deployment.runs();
    assert!(ran.len() < 200, "there is work left");
    let ended = deployment.ended();
    assert_eq!(ended, ran.len(), "what was begun has ended");
    deployment.until_depth(200 - ran.len()).await;
    let mut other = deployment.worker().await;
    deployment.until_all_ended(200).await;
    other.terminate().await;
    assert!(deployment.runs().values().all(|runs| *runs == 1));
}

#[tokio::test]
async fn a_worker_that_is_asked_to_end_while_it_is_busy_loses_nothing() {
    let deployment = Deployment::build("quorum", 4).await;
    // A few outlast the grace period.
    for number in 0..200 {
        let milliseconds = if number % 50 == 49 { 8_000 } else { 10 };
        deployment
            .publish_notes(number..number + 1, milliseconds)
            .await;
    }
    let mut worker = deployment.worker().await;
    deployment.until_ended(110).await;
    let begin = Instant::now();
    worker.terminate().await;
    println!("it took {:?}, with 1.5 s of grace", begin.elapsed());
    let mut other = deployment.worker().await;
    deployment.until_all_ended(200).await;
    other.terminate().await;
    let again = deployment.runs().values().filter(|runs| **runs > 1).count();
    println!("{again} of 200 tasks ran twice");
    assert!(again >= 1, "none outlasted the grace period");
    assert!(again <= 4, "more than there are slots: {again}");
}

#[tokio::test]
async fn a_worker_that_takes_long_to_end_leaves_alone_what_waits() {
    let deployment = Deployment::build("classic", 1).await;
    // In all slots, and longer than a worker is content with a consumer of which it hears nothing.
    deployment.publish_notes(0..4, 13_000).await;
    let mut worker = deployment.worker_with(PATIENCE).await;
    deployment
        .until("all are begun", || deployment.begun() == 4)
        .await;
    worker.ask_to_end().await;
    deployment.publish_notes(4..40, 10).await;
    worker.until_terminated().await;
    assert_eq!(deployment.ended(), 4);
    let lines = worker.rest().await;
    assert!(
        !lines.iter().any(|it| it == "consuming normal"),
        "{lines:?}"
    );
    deployment.until_depth(36).await;
}

#[tokio::test]
async fn a_task_that_outlasts_the_grace_period_is_given_back_at_no_cost() {
    let deployment = Deployment::build("classic", 1).await;
    deployment.publish_notes(0..1, 600_000).await;
    let mut worker = deployment.worker().await;
    deployment
        .until("it is begun", || deployment.begun() == 1)
        .await;
    let begin = Instant::now();
    worker.terminate().await;
    println!("it took {:?}", begin.elapsed());
    deployment.until_depth(1).await;
    let mut other = deployment.worker().await;
    deployment
        .until("it was begun again", || deployment.runs()[&0] == 2)
        .await;
    other.kill().await;
    let lines = other.rest().await;
    assert!(
        !lines.iter().any(|it| it.contains("suspected")),
        "{lines:?}"
    );
}

#[tokio::test]
async fn a_suspect_that_waits_in_a_worker_is_given_back_at_no_cost() {
    let deployment = Deployment::build("quorum", 2).await;
    // All slots of both groups, and then all the rest of their windows.
    deployment.publish_notes(0..8, 4_000).await;
    deployment.publish_notes(8..16, 10).await;
    // The next crash would be their last.
    deployment
        .suspect(16, |number| if number < 8 { 0 } else { 3 })
        .await;
    let mut worker = deployment.worker().await;
    deployment
        .until("8 are begun", || deployment.begun() >= 8)
        .await;
    deployment.until_depth(0).await;
    worker.terminate().await;
    let mut other = deployment.worker().await;
    deployment.until_all_ended(16).await;
    other.terminate().await;
    assert_eq!(deployment.dead_letters().await, 0);
}

#[tokio::test]
async fn a_graceful_restart_makes_no_suspects_loses_nothing_and_runs_nothing_twice_classic() {
    restarts("classic").await;
}

#[tokio::test]
async fn a_graceful_restart_makes_no_suspects_loses_nothing_and_runs_nothing_twice_quorum() {
    restarts("quorum").await;
}

/// Restarts a busy worker with SIGTERM, `TIERLINE_TEST_RESTARTS` times, while tasks are published: first a backlog,
/// then one at a time, so that restarts meet a full and a nearly empty queue.
async fn restarts(queue: &str) {
    let restarts = std::env::var("TIERLINE_TEST_RESTARTS").ok();
    let restarts: u64 = restarts.map_or(4, |number| number.parse().unwrap());
    let deployment = Deployment::build(queue, 4).await;
    let mut published = 0;
    let mut suspected = Vec::new();
    for restart in 0..restarts {
        let mut worker = deployment.worker_with(PATIENCE).await;
        let from = deployment.ended();
        if restart % 2 == 0 {
            deployment
                .publish_notes(published..published + 200, 5)
                .await;
            published += 200;
            deployment.until_ended(from + 50).await;
            worker.ask_to_end().await;
        } else {
            for number in 0..150 {
                deployment.publish_notes(published..published + 1, 1).await;
                published += 1;
                if number == 100 {
                    worker.ask_to_end().await;
                }
            }
        }
        worker.until_terminated().await;
        suspected.extend(
            worker
                .rest()
                .await
                .into_iter()
                .filter(|line| line.contains("suspected")),
        );
    }
    let mut worker = deployment.worker_with(PATIENCE).await;
    deployment.until_all_ended(published as usize).await;
    worker.terminate().await;
    suspected.extend(
        worker
            .rest()
            .await
            .into_iter()
            .filter(|line| line.contains("suspected")),
    );
    let again = deployment.runs().values().filter(|runs| **runs > 1).count();
    println!(
        "{queue}: {restarts} restarts, {published} tasks, {again} ran twice, suspects {suspected:?}"
    );
    assert!(
        suspected.is_empty() && again == 0,
        "{again} ran twice, {suspected:?}"
    );
    deployment.until_depth(0).await;
    assert_eq!(deployment.dead_letters().await, 0);
}
