//! Postgres: a private server, a database for every test.

mod database;
mod server;

pub use database::Database;
pub(crate) use database::connect;
pub use server::Postgres;
