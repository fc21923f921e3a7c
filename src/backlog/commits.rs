//! Tells workers of rows that were published within transactions of callers, soon after their commits.
//!
//! A notification within the transaction would take a lock of the whole cluster until the commit. And nobody says when the
//! caller commits: the watcher asks the server, first after 2 ms and then less and less often, so that it is late by a
//! part of what the transaction took. Workers look by themselves every second: a transaction that takes longer than
//! the watcher waits, or one too many, is found by them.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until};
use tokio_util::task::AbortOnDropHandle;

use super::notify::{CHANNEL, NOTIFY_BELOW, notice, notice_of_older};
use crate::Error;
use crate::postgres::{Database, DedicatedConnection};

/// How many publishes are watched at once.
const MOST: usize = 4_096;
/// When to ask for a transaction again.
const FIRST_PAUSE: Duration = Duration::from_millis(2);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// Rows that are committed so long after they were inserted may be older than what workers claim by then.
const LATE: Duration = Duration::from_millis(200);
/// How long one statement may take.
const LIMIT: Duration = Duration::from_secs(10);

#[derive(Debug)]
pub(super) struct CommitWatcher {
    sender: mpsc::Sender<Published>,
    _watching: AbortOnDropHandle<()>,
}

/// Rows of a tier that a transaction has inserted.
#[derive(Debug)]
struct Published {
    of: Inserted,
    due: Instant,
}

/// The transaction and the tier.
type Inserted = (i64, Arc<str>);

/// When to look whether a transaction has committed.
#[derive(Debug)]
struct Watched {
    /// When the first of its rows falls due.
    due: Instant,
    look_at: Instant,
    /// How long to wait after that.
    pause: Duration,
}

impl CommitWatcher {
    pub(super) fn start(database: &Database, app: &Arc<str>) -> Self {
        let (sender, published) = mpsc::channel(MOST);
        let watching = watch(DedicatedConnection::to(database), app.clone(), published);
        Self {
            sender,
            _watching: AbortOnDropHandle::new(tokio::spawn(watching)),
        }
    }

    /// Watches a transaction that has inserted rows of a tier, of which the first falls due after this time.
    pub(super) fn watch(&self, transaction: i64, tier: &str, after: Duration) {
        // Workers look for scheduled rows every second.
        if after >= NOTIFY_BELOW {
            return;
        }
        // Without room, workers find the rows by themselves.
        let _ = self.sender.try_send(Published {
            of: (transaction, tier.into()),
            due: Instant::now() + after,
        });
    }
}

async fn watch(
    mut connection: DedicatedConnection,
    app: Arc<str>,
    mut new: mpsc::Receiver<Published>,
) {
    let mut open: HashMap<Inserted, Watched> = HashMap::new();
    loop {
        let next_look = open.values().map(|it| it.look_at).min();
        tokio::select! {
            published = new.recv(), if open.len() < MOST => match published {
                Some(published) => add(&mut open, published),
                None => return,
            },
            () = sleep_until(next_look.unwrap_or_else(Instant::now)), if next_look.is_some() => {
                if let Err(error) = look(&mut connection, &app, &mut open).await {
                    open.clear();
                    tracing::debug!(%error, "cannot notify workers of committed tasks; they look every second");
                }
            }
        }
    }
}

/// A transaction that publishes thousands of tasks is watched once for each tier.
fn add(open: &mut HashMap<Inserted, Watched>, Published { of, due }: Published) {
    let look_at = Instant::now() + FIRST_PAUSE;
    let watched = open.entry(of).or_insert(Watched {
        due,
        look_at,
        pause: FIRST_PAUSE,
    });
    watched.due = watched.due.min(due);
    watched.look_at = watched.look_at.min(look_at);
    watched.pause = FIRST_PAUSE;
}

/// Asks for the transactions whose time has come, and notifies workers of those that have committed.
async fn look(
    connection: &mut DedicatedConnection,
    app: &str,
    open: &mut HashMap<Inserted, Watched>,
) -> Result<(), Error> {
    let now = Instant::now();
    let asked: Vec<(Inserted, Watched)> = open.extract_if(|_, it| it.look_at <= now).collect();
    let transactions: Vec<i64> = asked.iter().map(|((it, _), _)| *it).collect();
    let notices = asked
        .iter()
        .map(|((_, tier), it)| match now > it.due + LATE {
            true => notice_of_older(app, tier),
            false => notice(app, tier, it.due.saturating_duration_since(now)),
        });
    let notices: Vec<String> = notices.collect();
    let looking = connection.within(LIMIT, "notify workers", async |connection| {
        // Equal notices of one statement are one notification.
        sqlx::query_scalar(
            "SELECT CASE txid_status(transaction) WHEN 'committed' THEN pg_notify($3, notice) IS NULL \
                 WHEN 'in progress' THEN true ELSE false END \
             FROM unnest($1::bigint[], $2::text[]) WITH ORDINALITY AS asked (transaction, notice, number) ORDER BY number",
        )
        .bind(&transactions)
        .bind(&notices)
        .bind(CHANNEL)
        .fetch_all(connection)
        .await
    });
    let is_open: Vec<bool> = looking.await?;
    for ((of, mut watched), is_open) in asked.into_iter().zip(is_open) {
        watched.pause *= 2;
        if is_open && watched.pause <= LONGEST_PAUSE {
            watched.look_at = Instant::now() + watched.pause;
            open.insert(of, watched);
        }
    }
    Ok(())
}
