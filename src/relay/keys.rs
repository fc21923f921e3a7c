//! Holds the unique keys of rows that the broker has stored until their maximum.
//!
//! The broker tells nobody when a task is done. Until a key is held so, it is held because a relay has its row; so a row
//! that goes back to its tier keeps its key as it was.

use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;

use super::tier::Published;
use crate::Error;
use crate::backlog::hold_keys_to_the_end;
use crate::postgres::{Database, DedicatedConnection};

/// How long one statement may take, with further looks at keys that a publish has locked.
const LIMIT: Duration = Duration::from_secs(3);

pub(super) struct KeyHolder {
    /// `None` while a statement is under way.
    connection: Option<DedicatedConnection>,
    under_way: Option<BoxFuture<'static, Held>>,
    /// How many rows it is for.
    rows_under_way: usize,
    waiting: Vec<Published>,
}

/// What became of a statement.
struct Held {
    connection: DedicatedConnection,
    rows: Vec<Published>,
    result: Result<(), Arc<Error>>,
}

impl KeyHolder {
    pub(super) fn new(database: &Database) -> Self {
        Self {
            connection: Some(DedicatedConnection::to(database)),
            under_way: None,
            rows_under_way: 0,
            waiting: Vec::new(),
        }
    }

    pub(super) fn push(&mut self, published: Published) {
        self.waiting.push(published);
    }

    /// How many rows are not finished.
    pub(super) fn len(&self) -> usize {
        self.waiting.len() + self.rows_under_way
    }

    /// The rows of the last statement, if it has ended, and begins the next one. Where it failed, they are not stored as
    /// far as the caller is concerned.
    pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> Vec<Published> {
        let mut finished = Vec::new();
        loop {
            if let Some(under_way) = &mut self.under_way {
                let Poll::Ready(held) = under_way.poll_unpin(cx) else {
                    return finished;
                };
                self.under_way = None;
                self.rows_under_way = 0;
                self.connection = Some(held.connection);
                for mut published in held.rows {
                    published.stored = held.result.clone();
                    finished.push(published);
                }
            }
            if self.waiting.is_empty() {
                return finished;
            }
            let Some(connection) = self.connection.take() else {
                return finished;
            };
            let rows = std::mem::take(&mut self.waiting);
            self.rows_under_way = rows.len();
            self.under_way = Some(hold(connection, rows).boxed());
        }
    }
}

async fn hold(mut connection: DedicatedConnection, rows: Vec<Published>) -> Held {
    let ids: Vec<_> = rows.iter().map(|published| published.row).collect();
    let tried = "hold the keys of tasks that were relayed";
    let holding = connection.within(LIMIT, tried, async |connection| {
        hold_keys_to_the_end(connection, &ids).await
    });
    let result = holding.await.map_err(Arc::new);
    Held {
        connection,
        rows,
        result,
    }
}
