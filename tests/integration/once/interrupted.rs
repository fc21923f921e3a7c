//! A database that is away at the wrong moment.

use sqlx::{Connection, PgConnection};
use tierline::Error;
use tierline::error::TransactionError;
use tierline_testbed::{Network, Proxy, database};

use super::{Act, Bank, HOMES, Home, add, eventually};

/// A proxy before the server of a URL, and the URL that leads through it.
async fn behind_a_proxy(url: &str) -> (Proxy, String) {
    let (server, path) = url.rsplit_once('/').unwrap();
    let (host, port) = server.rsplit_once(':').unwrap();
    let proxy = Proxy::start(port.parse().unwrap()).await.unwrap();
    let url = format!("{host}:{}/{path}", proxy.port());
    (proxy, url)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_commit_whose_answer_is_lost_is_found_out_by_what_comes_next() {
    for home in HOMES {
        let database = database().await;
        let (proxy, url) = behind_a_proxy(database.url()).await;
        let bank = Bank::open_at(&url, database, &home.map(), home).await;
        // The commit waits for a lock of the test's.
        sqlx::raw_sql(
            "CREATE FUNCTION wait() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN \
                 PERFORM pg_advisory_xact_lock(7); RETURN NULL; END $$; \
             CREATE CONSTRAINT TRIGGER wait AFTER INSERT OR UPDATE ON accounts \
                 DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION wait()",
        )
        .execute(&bank.pool)
        .await
        .unwrap();
        let mut holder = PgConnection::connect(bank.database.url()).await.unwrap();
        let lock = sqlx::query("SELECT pg_advisory_lock(7)");
        lock.execute(&mut holder).await.unwrap();
        let working = bank.work();
        bank.app.publish(add(1, &[Act::Commit])).await.unwrap();
        eventually("the commit waits", async || {
            let waiting =
                "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted";
            let waiting = sqlx::query_scalar::<_, i64>(waiting);
            waiting.fetch_one(&bank.pool).await.unwrap() == 1
        })
        .await;
        proxy.set(Network::HalfOpen);
        let unlock = sqlx::query("SELECT pg_advisory_unlock(7)");
        unlock.execute(&mut holder).await.unwrap();
        eventually("it is committed", async || bank.value(1).await == 1).await;
        proxy.reset();
        eventually("the handler is told", async || {
            !bank.teller.errors().is_empty()
        })
        .await;
        proxy.set(Network::Good);
        assert!(
            matches!(
                bank.teller.errors.lock().unwrap().as_slice(),
                [Error::Transaction(TransactionError::Interrupted { .. })]
            ),
            "{:?}",
            bank.teller.errors()
        );
        match home {
            // The retry is stored, comes, and is not run, or cannot commit if the database was not up again.
            Home::Broker => {
                eventually("the retry is done", async || {
                    bank.heard.count("already done") + bank.heard.count("done") == 1
                })
                .await;
            }
            // The row is gone, so nothing follows.
            Home::Rows => {}
        }
        bank.app.publish(add(2, &[Act::Commit])).await.unwrap();
        eventually("the next one is done", async || bank.value(2).await == 1).await;
        working.end().await;
        assert_eq!(bank.value(1).await, 1);
        bank.assert_settled().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_redelivered_task_runs_although_the_database_cannot_say_whether_it_is_done() {
    let database = database().await;
    let (proxy, url) = behind_a_proxy(database.url()).await;
    let bank = Bank::open_at(&url, database, &Home::Broker.map(), Home::Broker).await;
    let working = bank.work();
    bank.app.publish(add(1, &[Act::Commit])).await.unwrap();
    bank.heard.until("done", 1).await;
    proxy.set(Network::Cut);
    bank.app.publish(add(2, &[Act::Commit])).await.unwrap();
    // It cannot open its transaction, and each retry is asked about.
    bank.heard.until("started account.add 3", 1).await;
    proxy.set(Network::Good);
    eventually("it is written", async || bank.value(2).await == 1).await;
    working.end().await;
    assert_eq!((bank.value(1).await, bank.value(2).await), (1, 1));
    assert!(bank.teller.errors()[0].contains("account.add"));
}
