//! Which rows an override moves.

use sqlx::Executor;
use tierline::Outcome;
use tierline::control::Overridden;

use super::{MAP, Send, Shop};
use crate::control::until;

impl Shop {
    async fn publish_sends(&self, numbers: std::ops::Range<u32>) {
        for number in numbers {
            self.app.publish(Send { number }).await.unwrap();
        }
    }

    /// How many tasks `report.send` are ready in a tier.
    async fn ready_in(&self, tier: &str) -> usize {
        let rows = self.rows("ready", "report.send").await;
        rows.iter().filter(|row| row.0 == tier).count()
    }
}

fn says(overridden: &Overridden, text: &str) -> bool {
    overridden.notes.iter().any(|note| note.contains(text))
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_that_others_had_locked_or_committed_late_move_too() {
    let shop = Shop::open().await;
    shop.add_idle_worker().await;
    shop.publish_sends(0..10).await;
    let mut locking = shop.pool.begin().await.unwrap();
    let lock = "SELECT FROM tierline.ready WHERE id = (SELECT min(id::text)::uuid FROM tierline.ready) FOR UPDATE";
    locking.execute(lock).await.unwrap();
    let mut publishing = shop.pool.begin().await.unwrap();
    let publish = "SELECT tierline.publish('shop', 'report.send', '{\"number\": 10}')";
    publishing.execute(publish).await.unwrap();
    let overriding = shop.control.override_task("report.send").tier("bulk");
    let overriding = tokio::spawn(overriding.into_future());
    // The first walk is over.
    until(async || shop.ready_in("bulk").await == 9).await;
    locking.rollback().await.unwrap();
    publishing.commit().await.unwrap();
    let overridden = overriding.await.unwrap().unwrap();
    assert_eq!(overridden.moved, 11, "{overridden:?}");
    assert_eq!(shop.ready_in("bulk").await, 11);
    assert!(!says(&overridden, "again"), "{overridden:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_answer_says_that_rows_stay_locked_or_are_claimed() {
    let shop = Shop::open_with(MAP, || Outcome::Done).await;
    shop.publish_sends(0..1).await;
    let working = shop.work(&["urgent", "slow"]).await;
    // It waits for the gate.
    shop.heard.until("started report.send", 1).await;
    let mut locking = shop.pool.begin().await.unwrap();
    locking
        .execute("INSERT INTO tierline.scheduled (id, due_at, backlog, rank, task, payload) \
                  SELECT gen_random_uuid(), now() + interval '1 hour', id, 0, 'report.send', '{\"number\": 1}' \
                  FROM tierline.backlogs WHERE tier = 'rows'")
        .await
        .unwrap();
    locking.commit().await.unwrap();
    let mut locking = shop.pool.begin().await.unwrap();
    let lock = "SELECT FROM tierline.scheduled FOR UPDATE";
    locking.execute(lock).await.unwrap();
    let overriding = shop.control.override_task("report.send").tier("bulk");
    let overridden = overriding.await.unwrap();
    assert_eq!(overridden.moved, 0);
    assert!(
        says(&overridden, "set the override again"),
        "{overridden:?}"
    );
    assert!(
        says(&overridden, "have claimed 1 of the tasks"),
        "{overridden:?}"
    );
    locking.rollback().await.unwrap();
    shop.gate.add_permits(1);
    shop.heard.until("done report.send", 1).await;
    working.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_answer_says_that_parked_rows_stay_locked() {
    let shop = Shop::open().await;
    let pausing = shop.control.pause_task("report.send");
    pausing.await.unwrap();
    let working = shop.work(&["urgent"]).await;
    let parked = async || shop.rows("parked", "report.send").await.len();
    let mut number = 0;
    until(async || {
        shop.publish_sends(number..number + 1).await;
        number += 1;
        parked().await >= 3
    })
    .await;
    working.end().await;
    shop.add_idle_worker().await;
    let waiting = parked().await + shop.ready_in("rows").await;
    let mut locking = shop.pool.begin().await.unwrap();
    let lock = "SELECT FROM tierline.parked WHERE id = (SELECT min(id::text)::uuid FROM tierline.parked) FOR UPDATE";
    locking.execute(lock).await.unwrap();
    let to_bulk = || shop.control.override_task("report.send").tier("bulk");
    let overridden = to_bulk().await.unwrap();
    assert_eq!(overridden.moved, waiting as u64 - 1, "{overridden:?}");
    assert!(
        says(&overridden, "set the override again"),
        "{overridden:?}"
    );
    locking.rollback().await.unwrap();
    let overridden = to_bulk().await.unwrap();
    assert_eq!(overridden.moved, 1, "{overridden:?}");
    assert!(
        !says(&overridden, "set the override again"),
        "{overridden:?}"
    );
    assert_eq!((parked().await, shop.ready_in("bulk").await), (0, waiting));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_an_override_moved_that_has_ended_can_be_moved_again_and_back() {
    let shop = Shop::open().await;
    shop.add_idle_worker().await;
    shop.publish_sends(0..5).await;
    let to = async |tier: &str| {
        let overriding = shop.control.override_task("report.send").tier(tier);
        overriding.await.unwrap()
    };
    assert_eq!(to("bulk").await.moved, 5);
    let ended = shop.control.end_override_task("report.send").await.unwrap();
    let stay = "5 rows of report.send stay in tier bulk";
    assert!(
        ended.notes.iter().any(|note| note.starts_with(stay)),
        "{ended:?}"
    );
    shop.publish_sends(5..6).await;
    let overridden = to("fresh").await;
    assert_eq!(overridden.moved, 6, "{overridden:?}");
    assert!(
        says(&overridden, "takes 100000 tasks (max_length)"),
        "{overridden:?}"
    );
    shop.control.end_override_task("report.send").await.unwrap();
    assert_eq!(to("rows").await.moved, 6);
    assert_eq!(shop.ready_in("rows").await, 6);
    let ended = shop.control.end_override_task("report.send").await.unwrap();
    assert!(
        !ended.notes.iter().any(|note| note.contains("stay in tier")),
        "{ended:?}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn an_override_that_was_replaced_moves_no_more_rows() {
    let shop = Shop::open().await;
    shop.add_idle_worker().await;
    shop.publish_sends(0..10).await;
    let first = shop.control.override_task("report.send").tier("bulk");
    let first = tokio::spawn(first.into_future());
    until(async || !shop.control.list().await.unwrap().is_empty()).await;
    let second = shop.control.override_task("report.send").tier("fresh");
    let second = second.await.unwrap();
    let first = first.await.unwrap().unwrap();
    assert!(says(&first, "has ended or was replaced"), "{first:?}");
    assert!(!says(&first, "again"), "{first:?}");
    assert_eq!((first.moved, second.moved), (0, 10));
    assert_eq!(shop.ready_in("fresh").await, 10);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_override_that_is_over_before_its_rows_have_moved_moves_none() {
    let shop = Shop::open().await;
    shop.add_idle_worker().await;
    shop.publish_sends(0..3).await;
    let short = shop.control.override_task("report.send").tier("bulk");
    let short = short.lasting("1s").await.unwrap();
    assert!(says(&short, "has ended or was replaced"), "{short:?}");
    assert_eq!((short.moved, shop.ready_in("rows").await), (0, 3));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_answer_names_what_holds_up_the_tier_that_tasks_go_to() {
    let shop = Shop::open().await;
    shop.add_idle_worker().await;
    let control = shop.control.clone().by("ada");
    control.pause_tier("bulk").await.unwrap();
    control.pause_group("slow").await.unwrap();
    control.limit_tier("bulk").rate("5/m").await.unwrap();
    let overridden = control.override_task("report.send").tier("bulk");
    let overridden = overridden.await.unwrap();
    for note in [
        "tier bulk is paused, by ada: the tasks wait there",
        "group slow is paused, by ada: the tasks wait there",
        "tier bulk is limited to 5/m",
    ] {
        assert!(says(&overridden, note), "{overridden:?}");
    }
}
