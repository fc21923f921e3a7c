//! The connections of handlers, poolers, and transactions outside of a worker.

use std::sync::Arc;
use std::time::Duration;

use sqlx::{Connection, PgConnection, PgPool};
use tierline::error::TransactionError;
use tierline::execute::Verdict;
use tierline::testing::Tester;
use tierline::{Error, Tierline, Topology};
use tierline_testbed::{PgBouncer, PoolMode, database};

use super::{Act, Add, AddBriefly, Bank, Home, Teller, add, eventually, registry};
use crate::worker::Heard;

/// The groups of two tiers, one of which is urgent.
const TWO_GROUPS: &str = r#"
    app = "bank"
    [tiers.urgent]
    queue = "postgres"
    [tiers.normal]
    queue = "postgres"
    [groups.urgent]
    tiers = ["urgent"]
    concurrency = 1
    [groups.normal]
    tiers = ["normal"]
    concurrency = 2
    [tasks]
    "account.add" = "normal"
    "account.add_briefly" = "urgent"
"#;

#[tokio::test(flavor = "multi_thread")]
async fn transactions_of_one_group_keep_none_of_another_waiting() {
    let bank = Bank::open_with(TWO_GROUPS, Home::Rows).await;
    let working = bank.work();
    for account in [1, 2] {
        bank.app
            .publish(add(account, &[Act::WaitAndCommit]))
            .await
            .unwrap();
    }
    bank.heard.until("started account.add 1", 2).await;
    for account in 3..6 {
        let urgent = AddBriefly(add(account, &[Act::Commit]));
        bank.app.publish(urgent).await.unwrap();
    }
    bank.heard.until("done account.add_briefly", 3).await;
    assert_eq!(bank.heard.count("done account.add "), 0);
    bank.teller.gate.add_permits(2);
    bank.heard.until("done account.add ", 2).await;
    working.end().await;
    for account in 1..6 {
        assert_eq!(bank.value(account).await, 1);
    }
}

/// How many connections handlers have.
async fn handler_connections(pool: &PgPool) -> i64 {
    let count = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() \
         AND application_name = 'tierline handler'";
    sqlx::query_scalar(count).fetch_one(pool).await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn handlers_have_at_most_as_many_connections_as_slots_and_idle_ones_are_closed() {
    let bank = Bank::open(Home::Rows).await;
    assert_eq!(handler_connections(&bank.pool).await, 0);
    let working = bank.work();
    for account in 0..100 {
        let acts = [[Act::Commit, Act::Commit], [Act::Fail, Act::Commit]];
        bank.app
            .publish(add(account, &acts[account as usize % 2]))
            .await
            .unwrap();
    }
    let mut most = 0;
    while bank.heard.count("done account.add") < 100 {
        most = most.max(handler_connections(&bank.pool).await);
    }
    assert!((1..=2).contains(&most), "{most} connections");
    eventually("idle connections are closed", async || {
        handler_connections(&bank.pool).await == 0
    })
    .await;
    bank.app.publish(add(100, &[Act::Commit])).await.unwrap();
    bank.heard.until("done account.add", 101).await;
    working.end().await;
    for account in 0..101 {
        assert_eq!(bank.value(account).await, 1, "account {account}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn transactions_behind_a_transaction_pooler_leave_nothing_on_its_connections() {
    const SERVER_CONNECTIONS: u32 = 3;
    let server = database().await;
    let pool = PgPool::connect(server.url()).await.unwrap();
    sqlx::query("CREATE TABLE accounts (id int PRIMARY KEY, value int NOT NULL)")
        .execute(&pool)
        .await
        .unwrap();
    let pooler = PgBouncer::start(&server, PoolMode::Transaction, SERVER_CONNECTIONS);
    let pooler = pooler.await.unwrap();
    let (heard, teller) = (Heard::default(), Teller::new());
    let app = Tierline::builder(Topology::parse(Home::Rows.map()).unwrap())
        .postgres(pooler.url())
        .postgres_pooler(true)
        .registry(registry())
        .data(teller.clone())
        .observe(heard.ear())
        .connect()
        .await
        .unwrap();
    let bank = Bank {
        database: Arc::new(server),
        vhost: None,
        pool,
        app,
        heard,
        teller,
    };
    let working = bank.work();
    for account in 0..200 {
        let acts = [
            [Act::Commit, Act::Commit],
            [Act::Fail, Act::RollBackAndCommit],
        ];
        bank.app
            .publish(add(account, &acts[account as usize % 2]))
            .await
            .unwrap();
    }
    bank.heard.until("done account.add", 200).await;
    working.end().await;
    for account in 0..200 {
        assert_eq!(bank.value(account).await, 1, "account {account}");
    }
    assert!(
        bank.teller.errors().is_empty(),
        "{:?}",
        bank.teller.errors()
    );
    // Another client gets each of the server connections: as many transactions at once as there are.
    let mut clients = Vec::new();
    for _ in 0..SERVER_CONNECTIONS {
        let options: sqlx::postgres::PgConnectOptions = pooler.url().parse().unwrap();
        let mut client = PgConnection::connect_with(&options.extra_float_digits(None))
            .await
            .unwrap();
        sqlx::raw_sql("BEGIN").execute(&mut client).await.unwrap();
        clients.push(client);
    }
    for client in &mut clients {
        let prepared = sqlx::query_scalar::<_, String>(
            "SELECT statement FROM pg_prepared_statements WHERE name <> ''",
        );
        let prepared = prepared
            .persistent(false)
            .fetch_all(&mut *client)
            .await
            .unwrap();
        assert!(prepared.is_empty(), "{prepared:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_savepoint_of_the_handlers_own_ends_neither_the_transaction_nor_the_task() {
    let bank = Bank::open(Home::Rows).await;
    let database = tierline::Database::new(bank.database.url()).unwrap();
    let tester = Tester::builder()
        .registry(registry())
        .data(bank.teller.clone())
        .database(database)
        .build();
    let cx = tester.context(&tester.message(&add(1, &[])));
    let mut transaction = cx.transaction().await.unwrap();
    for is_kept in [true, false] {
        let mut inner = transaction.begin().await.unwrap();
        super::write(&mut inner, 1).await;
        match is_kept {
            true => inner.commit().await.unwrap(),
            false => inner.rollback().await.unwrap(),
        }
    }
    assert_eq!(bank.value(1).await, 0);
    transaction.commit().await.unwrap();
    assert_eq!((bank.value(1).await, bank.count("completed").await), (1, 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_test_without_a_database_is_told_to_give_one_and_with_one_transactions_are_real() {
    let teller = Teller::new();
    let tester = Tester::builder()
        .registry(registry())
        .data(teller.clone())
        .build();
    let run = tester.run(add(1, &[Act::Commit])).await;
    assert!(matches!(run.verdict, Verdict::Retry { .. }), "{run:?}");
    assert!(
        matches!(
            teller.errors.lock().unwrap().as_slice(),
            [Error::Transaction(TransactionError::NoDatabase { .. })]
        ),
        "{:?}",
        teller.errors()
    );

    let bank = Bank::open(Home::Rows).await;
    let database = tierline::Database::new(bank.database.url()).unwrap();
    let tester = Tester::builder()
        .registry(registry())
        .data(bank.teller.clone())
        .database(database)
        .build();
    let message = tester.message(&add(1, &[Act::CommitAndFail]));
    let run = tester.run_message(message.clone()).await;
    assert_eq!((run.verdict, bank.value(1).await), (Verdict::Done, 1));
    // The same task again is done already.
    let run = tester.run_message(message).await;
    assert_eq!((run.verdict, bank.value(1).await), (Verdict::Done, 1));
    let runs = tester
        .run_to_end(add(2, &[Act::Fail, Act::Forget]))
        .await
        .unwrap();
    assert_eq!((runs.len(), bank.value(2).await), (2, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_transaction_that_outlives_its_attempt_cannot_commit() {
    let bank = Bank::open(Home::Rows).await;
    let database = tierline::Database::new(bank.database.url()).unwrap();
    let (sender, mut left) = tokio::sync::mpsc::unbounded_channel();
    let mut registry = tierline::Registry::new();
    registry
        .register::<Add, _>(move |add: Add, cx: tierline::Context| {
            let sender = sender.clone();
            async move {
                let mut transaction = cx.transaction().await.unwrap();
                super::write(&mut transaction, add.account).await;
                sender.send((cx, transaction)).unwrap();
            }
        })
        .unwrap();
    let tester = Tester::builder()
        .registry(registry)
        .database(database)
        .build();
    let run = tester.run(add(1, &[])).await;
    assert_eq!(run.verdict, Verdict::Done);
    let (cx, transaction) = left.recv().await.unwrap();
    let over = transaction.commit().await.unwrap_err();
    assert!(
        matches!(
            over,
            Error::Transaction(TransactionError::AttemptOver { .. })
        ),
        "{over:?}"
    );
    let over = cx.transaction().await.unwrap_err();
    assert!(
        matches!(
            over,
            Error::Transaction(TransactionError::AttemptOver { .. })
        ),
        "{over:?}"
    );
    tokio::time::timeout(Duration::from_secs(60), async {
        while bank.value(1).await != 0 {}
    })
    .await
    .unwrap();
    assert_eq!(bank.value(1).await, 0);
}
