//! Postgres: a private server, a database for every test, and PgBouncer in front of one.

mod database;
mod pgbouncer;
mod server;

pub use database::Database;
pub(crate) use database::connect;
pub use pgbouncer::{PgBouncer, PoolMode};
pub use server::Postgres;
