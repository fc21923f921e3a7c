//! Tasks that kill their worker.

use std::collections::BTreeMap;

use tierline::message::DeadReason;

use crate::house::{House, PATIENCE, nothing};

#[tokio::test]
async fn a_task_that_aborts_its_process_ends_as_a_dead_letter_and_harms_no_neighbour_classic() {
    let house = House::build("classic", 2).await;
    house
        .kills_only_itself("abort", &[DeadReason::CrashLoop])
        .await;
}

#[tokio::test]
async fn a_task_that_aborts_its_process_ends_as_a_dead_letter_and_harms_no_neighbour_quorum() {
    let house = House::build("quorum", 2).await;
    house
        .kills_only_itself("abort", &[DeadReason::CrashLoop])
        .await;
}

#[tokio::test]
async fn a_killer_is_told_apart_from_all_who_are_suspected_with_it() {
    for queue in ["classic", "quorum"] {
        let house = House::build(queue, 2).await;
        house.publish_notes(0..10, 10).await;
        house.app.publish_named("abort", &nothing()).await.unwrap();
        house.publish_notes(10..20, 10).await;
        house.suspect(21, |_| 2).await;
        house.outlives("abort", &[DeadReason::CrashLoop], 20).await;
    }
}

#[tokio::test]
async fn a_task_that_never_yields_ends_as_a_dead_letter_and_harms_no_neighbour() {
    let house = House::build("quorum", 2).await;
    house
        .kills_only_itself("spin", &[DeadReason::Hung, DeadReason::CrashLoop])
        .await;
}

#[tokio::test]
async fn a_worker_that_is_killed_loses_nothing() {
    let house = House::build("classic", 2).await;
    house.publish_notes(0..300, 10).await;
    let mut worker = house.worker().await;
    house.until_ended(50).await;
    worker.kill().await;
    let mut worker = house.worker().await;
    house.until_all_ended(300).await;
    worker.kill().await;
    let again = house.runs().values().filter(|runs| **runs > 1).count();
    // What was in hand when it was killed: two per slot.
    assert!(again <= 8, "{again} tasks ran twice");
}

