//! What the testbed does to Postgres, seen through an ordinary client.

#![allow(clippy::unwrap_used, reason = "a test may panic")]
use sqlx::{Connection, PgConnection};
use tierline_testbed::{Postgres, Proxy, database};

#[tokio::test]
async fn a_stopped_or_crashed_server_comes_back_with_what_was_committed() {
    let server = Postgres::start_new().await.unwrap();
    let database = server.database().await.unwrap();
    let mut connection = PgConnection::connect(database.url()).await.unwrap();
    sqlx::query("CREATE TABLE letter (number int)")
        .execute(&mut connection)
        .await
        .unwrap();

    for number in 1..=2 {
        let mut connection = PgConnection::connect(database.url()).await.unwrap();
        sqlx::query("INSERT INTO letter VALUES ($1)")
            .bind(number)
            .execute(&mut connection)
            .await
            .unwrap();
        match number {
            1 => server.stop().await.unwrap(),
            _ => server.kill().await.unwrap(),
        }
        assert!(PgConnection::connect(database.url()).await.is_err());
        server.start().await.unwrap();
    }

    let mut connection = PgConnection::connect(database.url()).await.unwrap();
    let count: i64 = sqlx::query_scalar("SELECT count(*) FROM letter")
        .fetch_one(&mut connection)
        .await
        .unwrap();
    assert_eq!(count, 2);

    server.kill_connections().await.unwrap();
    assert!(
        connection.ping().await.is_err(),
        "the connection was not cut"
    );
}

#[tokio::test]
async fn a_database_starts_empty_and_is_gone_with_its_value() {
    let (mine, other) = (database().await, database().await);
    let mut connection = PgConnection::connect(mine.url()).await.unwrap();
    sqlx::query("CREATE TABLE letter (number int)")
        .execute(&mut connection)
        .await
        .unwrap();
    let mut elsewhere = PgConnection::connect(other.url()).await.unwrap();
    let seen = sqlx::query("SELECT * FROM letter")
        .execute(&mut elsewhere)
        .await;
    assert!(seen.is_err(), "two tests share a database");

    mine.kill_connections().await.unwrap();
    assert!(connection.ping().await.is_err());
    let url = mine.url().to_owned();
    drop(mine);
    assert!(
        PgConnection::connect(&url).await.is_err(),
        "the database is still there"
    );
}

#[tokio::test]
async fn a_promoted_standby_has_every_commit_of_a_primary_that_was_killed() {
    let primary = Postgres::start_new().await.unwrap();
    let proxy = Proxy::start(primary.port()).await.unwrap();
    let port = primary.port().to_string();
    let url = primary.url().replace(&port, &proxy.port().to_string());
    let mut connection = PgConnection::connect(&url).await.unwrap();
    sqlx::query("CREATE TABLE letter (number int)")
        .execute(&mut connection)
        .await
        .unwrap();
    let standby = primary.start_standby().await.unwrap();
    sqlx::query("INSERT INTO letter VALUES (1)")
        .execute(&mut connection)
        .await
        .unwrap();
    primary.kill_hard().await.unwrap();
    assert!(PgConnection::connect(&url).await.is_err());
    standby.promote().await.unwrap();
    proxy.switch_to(standby.port());
    let mut connection = PgConnection::connect(&url).await.unwrap();
    let number: i32 = sqlx::query_scalar("UPDATE letter SET number = 2 RETURNING number")
        .fetch_one(&mut connection)
        .await
        .unwrap();
    assert_eq!(number, 2);
    // The old one comes back as it was killed.
    primary.start().await.unwrap();
    let mut connection = PgConnection::connect(&primary.url()).await.unwrap();
    let number: i32 = sqlx::query_scalar("SELECT number FROM letter")
        .fetch_one(&mut connection)
        .await
        .unwrap();
    assert_eq!(number, 1);
}
