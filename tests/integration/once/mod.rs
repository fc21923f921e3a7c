//! Effectively once: handlers whose writes and completion are one commit, in tiers on the broker and in Postgres.

mod connections;
mod copies;
mod endings;
mod interrupted;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::FutureExt;
use serde::{Deserialize, Serialize};
use sqlx::{Connection, Executor, PgPool};
use tierline::{Context, Error, Outcome, Registry, Task, TaskOptions, Tierline, Topology};
use tierline_testbed::{Database, Vhost, database, vhost};
use tokio::sync::{Semaphore, oneshot};
use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::worker::{Heard, PATIENCE};

/// Where the tier is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Home {
    Broker,
    Rows,
}

const HOMES: [Home; 2] = [Home::Broker, Home::Rows];

impl Home {
    fn map(self) -> String {
        let queue = match self {
            Home::Broker => "classic",
            Home::Rows => "postgres",
        };
        format!(
            r#"
            app = "bank"
            [tiers.normal]
            queue = "{queue}"
            [groups.all]
            tiers = ["normal"]
            concurrency = 2
            prefetch = 1
            [tasks]
            "account.add" = "normal"
            "account.add_briefly" = "normal"
            "#
        )
    }
}

/// What a handler does after it has added 1 to its account in a transaction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
enum Act {
    Commit,
    CommitAndFail,
    CommitAndPanic,
    CommitAndSnooze,
    CommitAndDiscard,
    CommitAndGiveUp,
    /// It does not return before its timeout.
    CommitAndStay,
    /// It does not yield before its timeout.
    CommitAndBlock,
    /// It waits for a permit after the commit, or before it.
    CommitAndWait,
    WaitAndCommit,
    /// Opens a second transaction after the commit, or beside the first one.
    CommitTwice,
    OpenTwice,
    RollBackAndCommit,
    /// Leaves a transaction within the first one open, or drops one while it begins.
    LeaveOpen,
    DropBegin,
    /// Its transaction has one snapshot, and takes long.
    RepeatableRead,
    /// Publishes a task for the account 100 numbers further within the transaction.
    PublishAndFail,
    PublishAndCommit,
    Fail,
    Forget,
}

/// Adds 1 to an account. Each attempt does the next act, and the last one again.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Add {
    account: i32,
    acts: Vec<Act>,
}

impl Task for Add {
    const NAME: &'static str = "account.add";
}

/// The same with a short timeout.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct AddBriefly(Add);

impl Task for AddBriefly {
    const NAME: &'static str = "account.add_briefly";
}

fn add(account: i32, acts: &[Act]) -> Add {
    let acts = acts.to_vec();
    Add { account, acts }
}

/// What handlers share with their test.
#[derive(Clone)]
struct Teller {
    /// What `transaction` and `commit` answered, if they failed.
    errors: Arc<Mutex<Vec<Error>>>,
    gate: Arc<Semaphore>,
    committed: Arc<Semaphore>,
}

impl Teller {
    fn new() -> Self {
        Self {
            errors: Arc::default(),
            gate: Arc::new(Semaphore::new(0)),
            committed: Arc::new(Semaphore::new(0)),
        }
    }

    fn refused(&self, error: Error) -> Outcome {
        let text = error.to_string();
        self.errors.lock().unwrap().push(error);
        Outcome::retry(text)
    }

    fn errors(&self) -> Vec<String> {
        let errors = self.errors.lock().unwrap();
        errors.iter().map(|error| format!("{error:?}")).collect()
    }

    /// Waits for a handler that has committed.
    async fn until_committed(&self) {
        let committed = tokio::time::timeout(PATIENCE, self.committed.acquire()).await;
        committed.unwrap().unwrap().forget();
    }
}

async fn handle(add: Add, cx: Context) -> Outcome {
    let teller = cx.data::<Teller>().clone();
    match act(&add, &cx, &teller).await {
        Ok(outcome) => outcome,
        Err(error) => teller.refused(error),
    }
}

async fn act(add: &Add, cx: &Context, teller: &Teller) -> Result<Outcome, Error> {
    let attempt = usize::try_from(cx.attempt()).unwrap() - 1;
    let act = add.acts[attempt.min(add.acts.len() - 1)];
    let mut transaction = cx.transaction().await?;
    if act == Act::RepeatableRead {
        let level = "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ";
        transaction.execute(level).await.unwrap();
    }
    if act == Act::RollBackAndCommit {
        write(&mut transaction, add.account).await;
        transaction.rollback().await?;
        transaction = cx.transaction().await?;
    }
    write(&mut transaction, add.account).await;
    if let Act::PublishAndFail | Act::PublishAndCommit = act {
        let next = self::add(add.account + 100, &[Act::Commit]);
        cx.publish(next).within(&mut transaction).await?;
    }
    match act {
        Act::Fail | Act::PublishAndFail => return Ok(Outcome::retry("no money")),
        Act::Forget => return Ok(Outcome::Done),
        Act::OpenTwice => {
            let refused = cx.transaction().await.unwrap_err();
            teller.errors.lock().unwrap().push(refused);
        }
        Act::LeaveOpen => std::mem::forget(transaction.begin().await.unwrap()),
        // It has begun, and is known to have, long before it commits.
        Act::RepeatableRead => tokio::time::sleep(Duration::from_millis(100)).await,
        // It is sent, and nobody waits for the answer, unless that came at once.
        Act::DropBegin => while transaction.begin().now_or_never().is_some() {},
        Act::WaitAndCommit => teller.gate.acquire().await.unwrap().forget(),
        _ => {}
    }
    transaction.commit().await?;
    teller.committed.add_permits(1);
    Ok(match act {
        Act::CommitAndFail => Outcome::retry("too late to fail"),
        Act::CommitAndPanic => panic!("too late to panic"),
        Act::CommitAndSnooze => Outcome::Snooze(Duration::ZERO),
        Act::CommitAndDiscard => Outcome::discard("too late to discard"),
        Act::CommitAndGiveUp => Outcome::dead("too late to die"),
        Act::CommitAndStay => std::future::pending().await,
        Act::CommitAndBlock => {
            std::thread::sleep(BRIEFLY * 3);
            Outcome::Done
        }
        Act::CommitAndWait => {
            teller.gate.acquire().await.unwrap().forget();
            Outcome::Done
        }
        Act::CommitTwice => {
            let refused = cx.transaction().await.unwrap_err();
            teller.errors.lock().unwrap().push(refused);
            Outcome::Done
        }
        _ => Outcome::Done,
    })
}

async fn write(connection: &mut sqlx::PgConnection, account: i32) {
    sqlx::query(
        "INSERT INTO accounts (id, value) VALUES ($1, 1) ON CONFLICT (id) DO UPDATE SET value = accounts.value + 1",
    )
    .bind(account)
    .execute(connection)
    .await
    .unwrap();
}

/// The timeout of the task that has a short one.
const BRIEFLY: Duration = Duration::from_secs(3);

fn registry() -> Registry {
    let mut registry = Registry::new();
    let options = || TaskOptions::new().retries(5).backoff("1ms");
    registry
        .register_with::<Add, _>(handle, options().timeout("5m"))
        .unwrap();
    let briefly = options().soft_timeout(BRIEFLY / 2).timeout(BRIEFLY);
    registry
        .register_with::<AddBriefly, _>(|add: AddBriefly, cx: Context| handle(add.0, cx), briefly)
        .unwrap();
    registry
}

/// An app with accounts in its database.
struct Bank {
    database: Arc<Database>,
    vhost: Option<Arc<Vhost>>,
    pool: PgPool,
    app: Tierline,
    heard: Heard,
    teller: Teller,
}

/// A worker of an app.
struct Working {
    stop: oneshot::Sender<()>,
    ended: JoinHandle<Result<(), Error>>,
}

impl Bank {
    async fn open(home: Home) -> Self {
        Self::open_with(&home.map(), home).await
    }

    async fn open_with(map: &str, home: Home) -> Self {
        let database = database().await;
        let url = database.url().to_owned();
        Self::open_at(&url, database, map, home).await
    }

    /// An app that reaches its database by another way than its tests do.
    async fn open_at(url: &str, database: Database, map: &str, home: Home) -> Self {
        let pool = PgPool::connect(database.url()).await.unwrap();
        let table = "CREATE TABLE accounts (id int PRIMARY KEY, value int NOT NULL)";
        sqlx::query(table).execute(&pool).await.unwrap();
        let migrating = tierline::Database::new(database.url()).unwrap();
        migrating.migrate().await.unwrap();
        migrating.close().await;
        let vhost = match home {
            Home::Broker => Some(Arc::new(vhost().await)),
            Home::Rows => None,
        };
        Self::connect(url, Arc::new(database), vhost, pool, map).await
    }

    /// Another process of the app.
    async fn open_beside(other: &Self, map: &str) -> Self {
        let (database, vhost) = (other.database.clone(), other.vhost.clone());
        let url = database.url().to_owned();
        Self::connect(&url, database, vhost, other.pool.clone(), map).await
    }

    async fn connect(
        url: &str,
        database: Arc<Database>,
        vhost: Option<Arc<Vhost>>,
        pool: PgPool,
        map: &str,
    ) -> Self {
        let (heard, teller) = (Heard::default(), Teller::new());
        let mut builder = Tierline::builder(Topology::parse(map).unwrap())
            .postgres(url)
            .registry(registry())
            .data(teller.clone())
            .observe(heard.ear());
        if let Some(vhost) = &vhost {
            builder = builder.amqp(vhost.amqp_url());
        }
        let app = builder.connect().await.unwrap();
        Self {
            database,
            vhost,
            pool,
            app,
            heard,
            teller,
        }
    }

    fn work(&self) -> Working {
        let groups = self.app.topology().groups().iter();
        let groups: Vec<_> = groups.map(|it| it.name.clone()).collect();
        let (stop, stopped) = oneshot::channel();
        let worker = self.app.work(groups).grace(Duration::from_secs(20));
        let ended = tokio::spawn(worker.until(async {
            let _ = stopped.await;
        }));
        Working { stop, ended }
    }

    /// What was added to an account.
    async fn value(&self, account: i32) -> i32 {
        let value = sqlx::query_scalar("SELECT value FROM accounts WHERE id = $1");
        let value = value.bind(account).fetch_optional(&self.pool).await;
        value.unwrap().unwrap_or(0)
    }

    async fn count(&self, table: &'static str) -> i64 {
        let count = format!("SELECT count(*) FROM tierline.{table}");
        let count = sqlx::query_scalar(sqlx::AssertSqlSafe(count));
        count.fetch_one(&self.pool).await.unwrap()
    }

    /// Nothing waits or runs in Postgres, and nothing is a dead letter.
    async fn assert_settled(&self) {
        for table in ["ready", "scheduled", "running", "dead_letters"] {
            assert_eq!(
                self.count(table).await,
                0,
                "{table}: {:#?}",
                self.heard.lines()
            );
        }
    }
}

impl Working {
    /// Ends when everything that the worker has to say is in the database.
    async fn end(self) {
        self.stop.send(()).unwrap();
        self.ended.await.unwrap().unwrap();
    }

    /// Ends as a process does that is killed, as far as others can tell.
    async fn kill(self) {
        self.ended.abort();
        let _ = self.ended.await;
    }
}

/// Waits until something is so.
async fn eventually(what: &str, is_so: impl AsyncFn() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !is_so().await {
        assert!(Instant::now() < deadline, "never: {what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
