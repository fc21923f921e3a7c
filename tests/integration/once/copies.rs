//! Tasks that come again: from workers that died or stalled, from publishers that repeat themselves, or by accident under
//! the same id.

use lapin::options::{BasicAckOptions, BasicGetOptions, BasicPublishOptions, ConfirmSelectOptions};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{BasicProperties, Channel, Connection, ConnectionProperties};
use sqlx::PgPool;
use tierline::Error;
use tierline::error::TransactionError;

use super::{Act, Add, Bank, HOMES, Home, add, eventually};

/// A channel to the virtual host of a bank.
async fn channel(bank: &Bank) -> Channel {
    let vhost = bank.vhost.as_ref().unwrap();
    let properties = ConnectionProperties::default();
    let connection = Connection::connect(vhost.amqp_url(), properties)
        .await
        .unwrap();
    let channel = connection.create_channel().await.unwrap();
    let confirm = channel.confirm_select(ConfirmSelectOptions::default());
    confirm.await.unwrap();
    channel
}

async fn send(channel: &Channel, task: &Add, properties: BasicProperties) {
    let payload = serde_json::to_vec(task).unwrap();
    let properties = properties
        .with_type("account.add".into())
        .with_delivery_mode(2);
    let options = BasicPublishOptions::default();
    let sending = channel.basic_publish(
        "bank.tasks".into(),
        "normal".into(),
        options,
        &payload,
        properties,
    );
    let confirm = sending.await.unwrap().await.unwrap();
    assert!(confirm.is_ack());
}

fn enqueued_at(milliseconds: i64) -> BasicProperties {
    let mut headers = FieldTable::default();
    headers.insert(
        "tierline-enqueued-at".into(),
        AMQPValue::LongLongInt(milliseconds),
    );
    BasicProperties::default().with_headers(headers)
}

/// Puts the run back as recovery does with those of a dead process.
async fn take_over(pool: &PgPool) {
    let columns = "id, due_at, rank, is_held, backlog, task, name, properties, payload";
    let statement = format!(
        "WITH back AS (DELETE FROM tierline.running RETURNING running.*) \
         INSERT INTO tierline.ready ({columns}) SELECT {columns} FROM back"
    );
    let moved = sqlx::query(sqlx::AssertSqlSafe(statement)).execute(pool);
    assert_eq!(moved.await.unwrap().rows_affected(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_lost_its_task_cannot_commit_and_is_told_so() {
    let map = Home::Rows
        .map()
        .replace("concurrency = 2", "concurrency = 1");
    let stale = Bank::open_with(&map, Home::Rows).await;
    stale
        .app
        .publish(add(1, &[Act::WaitAndCommit]))
        .await
        .unwrap();
    let stale_working = stale.work();
    stale.heard.until("started", 1).await;
    take_over(&stale.pool).await;
    let other = Bank::open_beside(&stale, &map).await;
    let other_working = other.work();
    other.heard.until("started", 1).await;
    // The one that lost it commits first.
    stale.teller.gate.add_permits(1);
    eventually("the commit fails", async || {
        !stale.teller.errors().is_empty()
    })
    .await;
    assert!(
        matches!(
            stale.teller.errors.lock().unwrap().as_slice(),
            [Error::Transaction(TransactionError::TakenOver { .. })]
        ),
        "{:?}",
        stale.teller.errors()
    );
    assert_eq!(stale.value(1).await, 0);
    stale_working.end().await;
    other.teller.gate.add_permits(1);
    other.heard.until("done", 1).await;
    other_working.end().await;
    assert_eq!((other.value(1).await, stale.heard.count("retried")), (1, 0));
    other.assert_settled().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_task_whose_worker_died_after_the_commit_does_not_run_again() {
    for home in HOMES {
        let map = home
            .map()
            .replace("\"postgres\"", "\"postgres\"\nlease = \"2s\"");
        let bank = Bank::open_with(&map, home).await;
        let working = bank.work();
        bank.app
            .publish(add(1, &[Act::CommitAndWait]))
            .await
            .unwrap();
        bank.teller.until_committed().await;
        working.kill().await;

        let next = Bank::open_beside(&bank, &map).await;
        let working = next.work();
        if home == Home::Broker {
            next.heard.until("already done account.add", 1).await;
        }
        next.app.publish(add(2, &[Act::Commit])).await.unwrap();
        next.heard.until("done", 1).await;
        working.end().await;
        assert_eq!(next.heard.count("started"), 1, "{:#?}", next.heard.lines());
        assert_eq!((next.value(1).await, next.value(2).await), (1, 1));
        next.assert_settled().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_that_was_published_twice_is_written_once() {
    let bank = Bank::open(Home::Broker).await;
    let receipt = bank.app.publish(add(1, &[Act::Commit])).await.unwrap();
    let channel = channel(&bank).await;
    let queue = "bank.normal";
    let got = channel
        .basic_get(queue.into(), BasicGetOptions::default())
        .await;
    let got = got.unwrap().unwrap();
    got.ack(BasicAckOptions::default()).await.unwrap();
    assert_eq!(
        got.properties.message_id().as_ref().unwrap().as_str(),
        receipt.id.as_str()
    );
    for _ in 0..3 {
        send(&channel, &add(1, &[Act::Commit]), got.properties.clone()).await;
    }
    let working = bank.work();
    bank.heard.until("done account.add 1", 3).await;
    working.end().await;
    assert_eq!((bank.value(1).await, bank.count("completed").await), (1, 1));
    let errors = bank.teller.errors();
    let are_so = errors.iter().all(|error| error.contains("AlreadyDone"));
    assert!(errors.len() == 2 && are_so, "{errors:?}");
    assert_eq!(bank.heard.count("retried"), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_row_that_has_a_twin_is_written_once() {
    let bank = Bank::open(Home::Rows).await;
    bank.app.publish(add(1, &[Act::Commit])).await.unwrap();
    sqlx::query("CREATE TABLE twin AS SELECT * FROM tierline.ready")
        .execute(&bank.pool)
        .await
        .unwrap();
    let working = bank.work();
    bank.heard.until("done", 1).await;
    // What a publish without an answer does, which is repeated after the task has run.
    let twin = sqlx::query("INSERT INTO tierline.ready SELECT * FROM twin");
    twin.execute(&bank.pool).await.unwrap();
    bank.heard.until("done", 2).await;
    working.end().await;
    assert_eq!(bank.value(1).await, 1, "{:?}", bank.teller.errors());
    bank.assert_settled().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn equal_ids_of_different_tasks_are_not_confused() {
    let bank = Bank::open(Home::Broker).await;
    let channel = channel(&bank).await;
    let with_id = |milliseconds| enqueued_at(milliseconds).with_message_id("monthly".into());
    send(
        &channel,
        &add(1, &[Act::Commit]),
        with_id(1_700_000_000_000),
    )
    .await;
    send(
        &channel,
        &add(2, &[Act::Commit]),
        with_id(1_700_000_000_000),
    )
    .await;
    send(
        &channel,
        &add(1, &[Act::Commit]),
        with_id(1_800_000_000_000),
    )
    .await;
    let working = bank.work();
    bank.heard.until("done", 3).await;
    for done in [4, 5] {
        let again = bank.app.publish(add(3, &[Act::Commit]));
        again.id("monthly").await.unwrap();
        bank.heard.until("done", done).await;
    }
    working.end().await;
    let values = [
        bank.value(1).await,
        bank.value(2).await,
        bank.value(3).await,
    ];
    assert_eq!(values, [2, 1, 2], "{:?}", bank.teller.errors());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_that_could_not_be_recognised_has_no_transaction() {
    let bank = Bank::open(Home::Broker).await;
    let channel = channel(&bank).await;
    let working = bank.work();
    send(
        &channel,
        &add(1, &[Act::Commit]),
        enqueued_at(1_700_000_000_000),
    )
    .await;
    eventually("one is refused", async || bank.teller.errors().len() == 1).await;
    let without_time = BasicProperties::default().with_message_id("monthly".into());
    send(&channel, &add(2, &[Act::Commit]), without_time).await;
    eventually("both are refused", async || bank.teller.errors().len() == 2).await;
    let errors = bank.teller.errors();
    for (error, missing) in errors.iter().zip(["message_id", "tierline-enqueued-at"]) {
        assert!(
            error.contains("NoIdentity") && error.contains(missing),
            "{error}"
        );
    }
    // Their retries have both.
    bank.heard.until("done account.add 2", 2).await;
    working.end().await;
    assert_eq!((bank.value(1).await, bank.value(2).await), (1, 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dead_letter_of_a_task_that_has_committed_is_done_when_it_is_redriven() {
    let bank = Bank::open(Home::Broker).await;
    let channel = channel(&bank).await;
    // A copy of the task that ran before the other one, whose answer was lost, and gave up.
    let properties = || enqueued_at(1_700_000_000_000).with_message_id("7".into());
    send(&channel, &add(1, &[Act::Commit]), properties()).await;
    let working = bank.work();
    bank.heard.until("done", 1).await;
    let mut headers = properties().headers().clone().unwrap();
    headers.insert("tierline-life".into(), AMQPValue::LongLongInt(1));
    send(
        &channel,
        &add(1, &[Act::Commit]),
        properties().with_headers(headers),
    )
    .await;
    bank.heard.until("already done", 1).await;
    working.end().await;
    assert_eq!((bank.value(1).await, bank.heard.count("started")), (1, 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn old_marks_are_removed_and_young_ones_stay() {
    for home in HOMES {
        let bank = Bank::open(home).await;
        let old = "INSERT INTO tierline.completed (key, app, completed_at) \
             SELECT int4send(number), 'bank', now() - interval '8 days' FROM generate_series(1, 2500) AS number \
             UNION ALL SELECT 'young', 'bank', now() - interval '6 days' \
             UNION ALL SELECT 'foreign', 'shop', now() - interval '8 days'";
        sqlx::query(old).execute(&bank.pool).await.unwrap();
        let working = bank.work();
        eventually("old marks go", async || bank.count("completed").await == 2).await;
        working.end().await;
    }
}
