//! Tasks that kill their worker.

use std::cell::Cell;
use std::os::unix::process::ExitStatusExt;
use std::time::Duration;

use tierline::message::DeadReason;

use crate::deployment::{Deployment, PATIENCE, Worker, nothing};

const SIGABRT: i32 = 6;
const SIGKILL: i32 = 9;

#[tokio::test]
async fn a_task_that_aborts_its_process_ends_as_a_dead_letter_and_harms_no_neighbour_classic() {
    let deployment = Deployment::build("classic", 2).await;
    deployment
        .kills_only_itself("abort", &[DeadReason::CrashLoop])
        .await;
}

#[tokio::test]
async fn a_task_that_aborts_its_process_ends_as_a_dead_letter_and_harms_no_neighbour_quorum() {
    let deployment = Deployment::build("quorum", 2).await;
    deployment
        .kills_only_itself("abort", &[DeadReason::CrashLoop])
        .await;
}

#[tokio::test]
async fn a_killer_is_told_apart_from_all_who_are_suspected_with_it() {
    for queue in ["classic", "quorum"] {
        let deployment = Deployment::build(queue, 2).await;
        deployment.publish_notes(0..10, 10).await;
        deployment
            .app
            .publish_named("abort", &nothing())
            .await
            .unwrap();
        deployment.publish_notes(10..20, 10).await;
        deployment.suspect(21, |_| 2).await;
        deployment
            .outlives("abort", &[DeadReason::CrashLoop], 20)
            .await;
    }
}

#[tokio::test]
async fn a_task_that_never_yields_ends_as_a_dead_letter_and_harms_no_neighbour() {
    let deployment = Deployment::build("quorum", 2).await;
    deployment
        .kills_only_itself("spin", &[DeadReason::Hung, DeadReason::CrashLoop])
        .await;
}

#[tokio::test]
async fn a_worker_that_is_killed_loses_nothing() {
    let deployment = Deployment::build("classic", 2).await;
    deployment.publish_notes(0..300, 10).await;
    let mut worker = deployment.worker().await;
    deployment.until_ended(50).await;
    worker.kill().await;
    let mut worker = deployment.worker().await;
    deployment.until_all_ended(300).await;
    worker.kill().await;
    let again = deployment.runs().values().filter(|runs| **runs > 1).count();
    // What was in hand when it was killed: two per slot.
    assert!(again <= 8, "{again} tasks ran twice");
}

/// How many runs a test makes of what happens by chance; `TIERLINE_TEST_RUNS` makes more.
fn runs() -> usize {
    let runs = std::env::var("TIERLINE_TEST_RUNS").ok();
    runs.map_or(1, |runs| runs.parse().unwrap())
}

/// The most workers that a killer may cost.
const MOST_DEATHS: usize = 6;

#[tokio::test]
async fn a_killer_is_a_dead_letter_and_no_neighbour_is_while_connections_are_cut() {
    for run in 0..runs() {
        let queue = ["classic", "quorum"][run % 2];
        only_killers_die(queue, 1).await;
    }
}

#[tokio::test]
async fn three_killers_in_two_tiers_are_dead_letters_and_no_neighbour_is() {
    for run in 0..runs() {
        let queue = ["quorum", "classic"][run % 2];
        only_killers_die(queue, 3).await;
    }
}

/// Two workers, each replaced when it dies, run killers among twenty neighbours. Their connections are cut while
/// a killer runs.
async fn only_killers_die(queue: &str, killers: u64) {
    const NEIGHBOURS: u64 = 20;
    let deployment = Deployment::build(queue, 2).await;
    let (url, proxy) = deployment.behind_a_proxy().await;
    deployment.publish("note", 0..5, 20).await;
    deployment.publish("note_low", 5..10, 20).await;
    for killer in 0..killers {
        let task = ["abort", "abort_low"][killer as usize % 2];
        deployment.publish(task, killer..killer + 1, 200).await;
    }
    deployment.publish("note", 10..15, 20).await;
    deployment.publish("note_low", 15..NEIGHBOURS, 20).await;
    let grace = Duration::from_millis(1_500);
    let mut workers: [Option<Worker>; 2] = [None, None];
    let cuts = Cell::new(0);
    // Apart from the workers' replacement, which takes longer than a killer runs.
    let cutting = async {
        let mut deaths = 0;
        loop {
            let seen: usize = deployment.deaths().values().sum();
            // The second and the third run of a killer: one in its tier's queue, one from quarantine.
            if seen > deaths && (2..=3).contains(&seen) {
                proxy.reset();
                cuts.set(cuts.get() + 1);
            }
            deaths = seen;
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    let working = async {
        loop {
            for worker in &mut workers {
                let has_ended = worker
                    .as_mut()
                    .is_none_or(|it| it.process.try_wait().unwrap().is_some());
                if has_ended {
                    *worker = Some(deployment.worker_at(&url, grace).await);
                }
            }
            let dead = deployment.dead_letters().await;
            if dead >= killers && deployment.ended() as u64 >= NEIGHBOURS {
                for worker in workers.iter_mut().flatten() {
                    worker.end().await;
                }
                // A worker that dies between the confirm of a counted copy and the acknowledgement of the original
                // leaves two of a message.
                if deployment.is_drained().await {
                    return;
                }
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    let is_over = async {
        tokio::select! {
            () = working => {}
            () = cutting => {}
        }
    };
    let is_over = tokio::time::timeout(PATIENCE, is_over).await;
    assert!(
        is_over.is_ok(),
        "deaths {:?}, runs {:?}",
        deployment.deaths(),
        deployment.runs()
    );
    let dead = deployment.take_all_dead().await;
    let copies: usize = dead.values().sum();
    println!(
        "{queue}: deaths of each killer {:?}, {} cuts, {copies} dead letters of {} tasks",
        deployment.deaths(),
        cuts.get(),
        dead.len()
    );
    let is_killer = |task: &str| task.starts_with("abort");
    assert!(dead.keys().all(|(task, _)| is_killer(task)), "{dead:?}");
    assert_eq!(dead.len() as u64, killers, "{dead:?}");
    for (killer, deaths) in deployment.deaths() {
        assert!(
            deaths <= MOST_DEATHS,
            "killer {killer} cost {deaths} workers"
        );
    }
}

#[tokio::test]
async fn a_worker_whose_threads_all_hang_is_left_alone_unless_it_may_be_aborted() {
    for (runtime, spins) in [("CURRENT_THREAD", 1), ("MULTI_THREAD", 4)] {
        let deployment = Deployment::build("quorum", 1).await;
        for _ in 0..spins {
            deployment
                .app
                .publish_named("spin", &nothing())
                .await
                .unwrap();
        }
        let url = deployment.vhost.amqp_url();
        let grace = Duration::from_millis(1_500);
        let mut worker = deployment.worker_of(url, grace, &[runtime]).await;
        worker.until("runtime hung, aborts: false").await;
        worker.process.start_kill().unwrap();
        let ended = worker.process.wait().await.unwrap();
        assert_eq!(ended.signal(), Some(SIGKILL), "it had ended by itself");

        let mut worker = deployment
            .worker_of(url, grace, &[runtime, "ABORT_WHEN_HUNG"])
            .await;
        worker.until("runtime hung, aborts: true").await;
        let ended = tokio::time::timeout(PATIENCE, worker.process.wait()).await;
        assert_eq!(ended.unwrap().unwrap().signal(), Some(SIGABRT));
    }
}
