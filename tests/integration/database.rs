//! The database room, against a real Postgres.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::collections::BTreeSet;

use futures_util::future::join_all;
use sqlx::{AssertSqlSafe, Connection, Executor, PgConnection};
use tierline::error::DatabaseError;
use tierline::{Database, Error};
use tierline_testbed::database;

async fn execute(url: &str, statement: &str) {
    let mut connection = PgConnection::connect(url).await.unwrap();
    let statement = AssertSqlSafe(statement.to_owned());
    connection.execute(statement).await.unwrap();
}

async fn numbers(url: &str, query: &str) -> BTreeSet<i64> {
    let mut connection = PgConnection::connect(url).await.unwrap();
    let query = sqlx::query_scalar(AssertSqlSafe(query.to_owned()));
    let numbers: Vec<i64> = query.fetch_all(&mut connection).await.unwrap();
    numbers.into_iter().collect()
}

const APPLIED: &str = "SELECT version FROM tierline.migrations WHERE success";

#[tokio::test]
async fn many_processes_migrate_at_once_and_one_does_the_work() {
    let fresh = database().await;
    let databases: Vec<Database> = (0..8)
        .map(|_| Database::new(fresh.url()).unwrap())
        .collect();
    let migrated = join_all(databases.iter().map(Database::migrate)).await;
    let worked = migrated
        .into_iter()
        .filter(|migrated| !migrated.as_ref().unwrap().applied.is_empty());
    assert_eq!(worked.count(), 1);
}

#[tokio::test]
async fn the_database_is_shared_with_an_app_that_uses_sqlx_itself() {
    let fresh = database().await;
    execute(
        fresh.url(),
        "CREATE TABLE _sqlx_migrations (version BIGINT PRIMARY KEY, description TEXT NOT NULL, \
         installed_on TIMESTAMPTZ NOT NULL DEFAULT now(), success BOOLEAN NOT NULL, \
         checksum BYTEA NOT NULL, execution_time BIGINT NOT NULL); \
         INSERT INTO _sqlx_migrations VALUES (1, 'theirs', now(), true, 'x', 1)",
    )
    .await;
    let ours = Database::new(fresh.url()).unwrap();
    ours.migrate().await.unwrap();
    let theirs = "SELECT version FROM _sqlx_migrations";
    assert_eq!(numbers(fresh.url(), theirs).await, BTreeSet::from([1]));
    assert!(numbers(fresh.url(), APPLIED).await.contains(&1));
    let elsewhere = "SELECT count(*) FROM pg_class JOIN pg_namespace n ON n.oid = relnamespace \
                     WHERE nspname = 'public' AND relname NOT LIKE '\\_sqlx%'";
    assert_eq!(numbers(fresh.url(), elsewhere).await, BTreeSet::from([0]));
}

#[tokio::test]
async fn a_database_of_an_older_release_moves_on_whatever_a_newer_one_did_to_it() {
    let fresh = database().await;
    let database = Database::new(fresh.url()).unwrap();
    // A newer release without our first migration: its own number is far above ours.
    execute(
        fresh.url(),
        "CREATE SCHEMA tierline; CREATE TABLE tierline.migrations (version BIGINT PRIMARY KEY, \
         description TEXT NOT NULL, installed_on TIMESTAMPTZ NOT NULL DEFAULT now(), \
         success BOOLEAN NOT NULL, checksum BYTEA NOT NULL, execution_time BIGINT NOT NULL); \
         INSERT INTO tierline.migrations VALUES (9999, 'from the future', now(), true, 'x', 1)",
    )
    .await;
    let migrated = database.migrate().await.unwrap();
    assert!(migrated.to_string().contains("dead letters"), "{migrated}");
    let applied = numbers(fresh.url(), APPLIED).await;
    assert!(
        applied.contains(&1) && applied.contains(&9999),
        "{applied:?}"
    );
    assert!(database.migrate().await.unwrap().applied.is_empty());
}

#[tokio::test]
async fn a_migrated_database_needs_the_right_to_read_alone() {
    let fresh = database().await;
    Database::new(fresh.url()).unwrap().migrate().await.unwrap();
    let role = format!("reader_{}", std::process::id());
    execute(
        fresh.url(),
        &format!(
            "CREATE ROLE {role} LOGIN; GRANT USAGE ON SCHEMA tierline TO {role}; \
             GRANT SELECT ON tierline.migrations TO {role}"
        ),
    )
    .await;
    let (scheme, rest) = fresh.url().split_once("://").unwrap();
    let place = rest.split_once('@').unwrap().1;
    let reader = Database::new(&format!("{scheme}://{role}@{place}")).unwrap();
    let migrated = reader.migrate().await;
    reader.close().await;
    execute(
        fresh.url(),
        &format!("DROP OWNED BY {role}; DROP ROLE {role}"),
    )
    .await;
    assert!(migrated.unwrap().applied.is_empty());
}

#[tokio::test]
async fn a_database_that_is_not_there_is_named_without_credentials() {
    let nowhere = Database::new("postgres://ada:secret@127.0.0.1:1/hotel").unwrap();
    let error = nowhere.migrate().await.unwrap_err();
    assert!(error.is_transient());
    assert!(
        matches!(error, Error::Database(DatabaseError::Unreachable { .. })),
        "{error}"
    );
    let shown = format!("{error} {error:?}");
    assert!(shown.contains("127.0.0.1:1/hotel") && !shown.contains("secret"));
}

#[tokio::test]
async fn a_login_that_is_refused_is_told_from_a_statement_that_is() {
    let fresh = database().await;
    let (scheme, rest) = fresh.url().split_once("://").unwrap();
    let (server, name) = rest.split_once('@').unwrap().1.split_once('/').unwrap();
    let role = format!("stranger_{}", std::process::id());
    let create = format!(
        "CREATE ROLE {role} LOGIN; CREATE ROLE {role}_reader LOGIN; \
         REVOKE CONNECT ON DATABASE {name} FROM PUBLIC; \
         GRANT CONNECT ON DATABASE {name} TO {role}_reader"
    );
    execute(fresh.url(), &create).await;
    let mut refused = Vec::new();
    for (user, name) in [
        ("nobody", name),
        (role.as_str(), name),
        (role.as_str(), "no_such_database"),
        (&format!("{role}_reader"), name),
    ] {
        let url = format!("{scheme}://{user}:secret@{server}/{name}");
        let database = Database::new(&url).unwrap();
        refused.push(database.migrate().await.unwrap_err());
        database.close().await;
    }
    let drop = format!("DROP OWNED BY {role}_reader; DROP ROLE {role}, {role}_reader");
    execute(fresh.url(), &drop).await;
    let not_allowed = refused.pop().unwrap();
    assert!(
        matches!(not_allowed, Error::Database(DatabaseError::Refused { .. })),
        "{not_allowed}"
    );
    for error in refused {
        assert!(
            matches!(error, Error::Database(DatabaseError::LoginRefused { .. }))
                && !error.is_transient(),
            "{error:?}"
        );
        assert!(
            error
                .to_string()
                .contains("check user, password and database")
        );
        assert!(!error.to_string().contains("secret"), "{error}");
    }
}

#[test]
fn every_migration_in_the_folder_is_embedded() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/migrations");
    let source = include_str!("../../src/postgres/migrate.rs");
    for file in std::fs::read_dir(folder).unwrap() {
        let name = file.unwrap().file_name().into_string().unwrap();
        assert!(source.contains(&name), "{name} is not in MIGRATIONS");
    }
}
