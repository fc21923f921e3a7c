//! Which dead letters are the same.

use std::collections::BTreeSet;
use std::time::Duration;

use futures_util::stream::{FuturesUnordered, StreamExt};
use lapin::BasicProperties;
use lapin::options::BasicPublishOptions;
use sqlx::{Connection, PgConnection};
use tierline::dead::{Filter, State};

use super::support::{Letter, Shop, execute, until};

/// A message as the log tells it from others: its id, its task and its payload.
type Told = (Option<String>, Option<String>, Vec<u8>);

async fn rows(shop: &Shop) -> Vec<Told> {
    let mut connection = PgConnection::connect(shop.database.url()).await.unwrap();
    sqlx::query_as("SELECT message_id, task, payload FROM tierline.dead_letters")
        .fetch_all(&mut connection)
        .await
        .unwrap()
}

async fn until_empty(shop: &Shop) {
    until("the queues to be empty", async || {
        let mut left = 0;
        for tier in ["critical", "normal", "small"] {
            left += shop.depth(&format!("shop.{tier}.dlq")).await;
        }
        left == 0
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn ten_thousand_dead_letters_of_which_half_share_ids_are_as_many_rows_as_messages() {
    const COUNT: usize = 10_000;
    let shop = Shop::open().await;
    let mut expected = BTreeSet::new();
    let mut confirms = FuturesUnordered::new();
    for number in 0..COUNT {
        let shared = number % 2 == 1;
        // Ten letters of an id: four payloads, of which two have two tasks, and the rest repetitions
        // that died of something else.
        let (id, part) = match shared {
            true => (format!("shared-{}", number / 20), number / 2 % 10),
            false => (format!("own-{number}"), 0),
        };
        let payload = format!(r#"{{"order":{}}}"#, part % 4);
        let task = match part {
            4 | 5 => "order.pay",
            _ => "order.ship",
        };
        let error = format!("failed on host {part}");
        let letter = Letter {
            task,
            id: &id,
            payload: &payload,
            error: &error,
            attempt: 1 + (part % 3) as i64,
            ..Letter::default()
        };
        let tier = ["critical", "normal", "small"][number / 20 % 3];
        let (exchange, options) = (format!("shop.{tier}.dlx"), BasicPublishOptions::default());
        let bytes = payload.as_bytes();
        let sending = shop.channel.basic_publish(
            exchange.into(),
            "".into(),
            options,
            bytes,
            letter.properties(),
        );
        confirms.push(sending.await.unwrap());
        if confirms.len() >= 500 {
            confirms.next().await.unwrap().unwrap();
        }
        expected.insert((Some(id), Some(task.to_owned()), payload.into_bytes()));
    }
    while let Some(confirmed) = confirms.next().await {
        confirmed.unwrap();
    }
    assert_eq!(expected.len(), 5_000 + 500 * 6);

    let (crashing, one, other) = (shop.collect(), shop.collect(), shop.collect());
    until("the first rows", async || {
        shop.letters.count(&Filter::default()).await.unwrap() > 0
    })
    .await;
    crashing.abort().await;
    until("as many rows", async || {
        shop.letters.count(&Filter::default()).await.unwrap() >= expected.len() as u64
    })
    .await;
    until_empty(&shop).await;
    one.stop().await;
    other.stop().await;
    // What the collectors had not acknowledged would be there again.
    until_empty(&shop).await;
    let rows = rows(&shop).await;
    assert_eq!(rows.len(), expected.len());
    assert!(BTreeSet::from_iter(rows) == expected);
}

#[tokio::test]
async fn equal_messages_without_an_id_have_a_row_each() {
    let shop = Shop::open().await;
    let plain = BasicProperties::default()
        .with_delivery_mode(2)
        .with_type("order.ship".into());
    for _ in 0..20 {
        shop.send("shop.normal.dlx", "", b"7", plain.clone()).await;
    }
    let collecting = shop.collect();
    let rows = shop.logged(20).await;
    assert!(rows.iter().all(|row| row.message_id.is_none()));
    until_empty(&shop).await;
    collecting.stop().await;
    let redriven = shop.letters.redrive_all(Filter::default()).run().await;
    assert_eq!(redriven.unwrap().done, 20);
    let messages = shop.take("shop.normal", 20).await;
    let ids: BTreeSet<_> = messages.iter().map(|message| message.id.as_str()).collect();
    assert_eq!(ids.len(), 20);
}

/// Takes the log back to what the release before the second migration left.
const EARLIER_RELEASE: &str = "\
    DROP TABLE tierline.dead_letter_alerts; \
    ALTER TABLE tierline.dead_letters DROP COLUMN claimed_from; \
    DELETE FROM tierline.migrations WHERE version = 2; \
    UPDATE tierline.dead_letters SET identity = message_id; \
    UPDATE tierline.dead_letters SET state = 'redriving', claim = 'a dead process', \
        claimed_at = now() - interval '1 hour' WHERE message_id = 'ship-2'";

#[tokio::test]
async fn a_log_of_an_earlier_release_is_migrated_and_its_messages_are_known_again() {
    let shop = Shop::open().await;
    let ids = ["ship-1", "ship-2", "ship-3"];
    let letter = |id| Letter {
        id,
        ..Letter::default()
    };
    for id in ids {
        shop.dies("normal", &letter(id)).await;
    }
    let collecting = shop.collect();
    let before = shop.logged(3).await;
    collecting.stop().await;
    execute(&shop, EARLIER_RELEASE).await;
    let migrated = shop.app.database().unwrap().migrate().await.unwrap();
    assert_eq!(migrated.applied, ["dead letter claims"]);

    // The same again, as after an acknowledgement that was lost; and others under the same ids.
    for id in ids {
        shop.dies("normal", &letter(id)).await;
    }
    let payload = Letter {
        payload: r#"{"order":2}"#,
        ..letter("ship-1")
    };
    shop.dies("normal", &payload).await;
    let task = Letter {
        task: "order.pay",
        ..letter("ship-2")
    };
    shop.dies("normal", &task).await;
    let collecting = shop.collect();
    shop.logged(5).await;
    until_empty(&shop).await;
    collecting.stop().await;
    let after = shop.logged(5).await;
    assert!(
        before
            .iter()
            .all(|row| after.iter().any(|it| it.id == row.id))
    );

    // The old rows are redriven as before, and know what became of them.
    let operation = shop.letters.redrive_all(Filter::default()).run().await;
    assert_eq!(operation.unwrap().done, 5);
    let old = before
        .iter()
        .find(|row| row.message_id.as_deref() == Some("ship-3"));
    let old = old.unwrap().id;
    let again = Letter {
        life: 1,
        redriven_from: Some(old),
        ..letter("ship-3")
    };
    shop.dies("normal", &again).await;
    let collecting = shop.collect();
    let rows = shop.logged(6).await;
    collecting.stop().await;
    let newest = rows.iter().map(|row| row.id).max().unwrap();
    let row = shop.letters.get(old).await.unwrap();
    assert_eq!(row.died_again_as, [newest]);
    assert_eq!(row.summary.state, State::Redriven);
}

#[tokio::test]
async fn a_message_that_dies_after_an_equal_one_was_discarded_is_not_hidden() {
    let shop = Shop::open().await;
    let collecting = shop.collect();
    let first = Letter::default();
    shop.dies("normal", &first).await;
    let rows = shop.logged(1).await;
    shop.letters.discard(rows[0].id).await.unwrap();
    let later = Letter {
        died_at: first.died_at + Duration::from_secs(60),
        ..Letter::default()
    };
    // Collected twice, it has one row; and so has the first one, should it be delivered again.
    for letter in [&later, &later, &first] {
        shop.dies("normal", letter).await;
    }
    let other = Letter {
        id: "another",
        ..Letter::default()
    };
    shop.dies("normal", &other).await;
    let rows = shop.logged(3).await;
    let dead = rows.iter().filter(|row| row.state == State::Dead);
    let ids: Vec<_> = dead.map(|row| row.message_id.as_deref().unwrap()).collect();
    assert!(
        ids.contains(&"another") && ids.contains(&first.id),
        "{ids:?}"
    );
    collecting.stop().await;
}
