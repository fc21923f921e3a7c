//! The rounds in which processes divide limits, by way of a row for each limit in Postgres.
//!
//! A round reads the row, computes the next pool (`share`), and writes it if the row is still as it was read. No statement
//! waits for another process: a row that has changed, or is locked, is tried again a moment later. A limit of which
//! nothing is to be started costs nothing.

use std::collections::HashMap;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use sqlx::Row;
use sqlx::postgres::PgRow;
use tokio::sync::{Mutex, mpsc, oneshot, watch};
use tokio::time::{Instant, sleep, sleep_until, timeout};

use super::beats::Liveness;
use super::share::{LimitParts, Outcome, Pool, Report};
use super::{Gate, Gates, Shared};
use crate::Error;
use crate::backoff::Backoff;
use crate::postgres::{Database, DedicatedConnection, PgConnection};
use crate::random;
use crate::service::Service;

/// How often those who wait are told to ask again.
const ASK_AGAIN_EVERY: Duration = Duration::from_millis(500);
/// The least time between two rounds of a limit.
const SHORTEST: Duration = Duration::from_millis(20);
/// How long a statement may take, with the time to connect.
const LIMIT: Duration = Duration::from_secs(2);
/// How long the end of a worker waits for its shares to be given back.
const GIVE_BACK_LIMIT: Duration = Duration::from_millis(500);

/// The kind and the name of what is limited.
type Key = (&'static str, String);

/// Asks for the shares of a process to be given back.
#[derive(Debug, Clone)]
pub(super) struct GiveBack(mpsc::Sender<oneshot::Sender<()>>);

impl GiveBack {
    pub(super) async fn give_back(&self) {
        let giving = async {
            let (given, done) = oneshot::channel();
            if self.0.send(given).await.is_ok() {
                let _ = done.await;
            }
        };
        if timeout(GIVE_BACK_LIMIT, giving).await.is_err() {
            tracing::debug!(
                "the shares of limits stay with this process until others take them over"
            );
        }
    }
}

/// Takes part in rounds, until what is returned is dropped with all its clones.
pub(super) fn start(
    shared: Arc<Shared>,
    database: &Database,
    app: &str,
    service: Service,
) -> GiveBack {
    let (sender, asked) = mpsc::channel(1);
    let (database, app, asked) = (database.clone(), app.to_owned(), Mutex::new(asked));
    tokio::spawn(async move {
        let dividing = service.run(|| {
            let rounds = Rounds {
                shared: &shared,
                gates: shared.gates.subscribe(),
                due: shared.signals.due(),
                connection: DedicatedConnection::to(&database),
                app: &app,
                limits: HashMap::new(),
                backoff: Backoff::new(),
                retry_at: None,
            };
            let (shared, asked) = (&shared, &asked);
            async move {
                tokio::select! {
                    () = rounds.run(asked) => {}
                    never = ask_again(shared) => match never {},
                }
            }
        });
        dividing.await;
    });
    GiveBack(sender)
}

/// Tells those who were refused to ask again, which shows that they still wait. It goes on while a round waits for a database
/// that hangs: the share of a process of which nobody asks goes to others.
async fn ask_again(shared: &Shared) -> Infallible {
    let mut due = shared.signals.due();
    loop {
        due.mark_unchanged();
        let now = Instant::now();
        let (mut takes_part, mut is_refused) = (false, false);
        for (_, _, gate) in shared.all() {
            let mut local = gate.local();
            local.tick(now);
            takes_part |= local.takes_part(now);
            is_refused |= local.lacks(now);
        }
        if is_refused {
            shared.signals.open();
        }
        if !takes_part && due.changed().await.is_err() {
            std::future::pending().await
        }
        sleep(ASK_AGAIN_EVERY).await;
    }
}

struct Rounds<'a> {
    shared: &'a Shared,
    gates: watch::Receiver<Arc<Gates>>,
    due: watch::Receiver<()>,
    connection: DedicatedConnection,
    app: &'a str,
    limits: HashMap<Key, Limited>,
    backoff: Backoff,
    /// When the database is asked again that did not answer.
    retry_at: Option<Instant>,
}

/// A limit, as the rounds of this process have it.
#[derive(Debug)]
struct Limited {
    gate: Arc<Gate>,
    /// As it was last in force. With that the process gives its share back after the limit has ended.
    limit: LimitParts,
    /// When the last round was, and when the next is due at the earliest.
    last: Option<Instant>,
    not_before: Option<Instant>,
    liveness: Liveness,
}

/// A row of a limit.
struct Stored {
    /// `None`: there is none yet.
    version: Option<i64>,
    pool: Option<Pool>,
    /// The clock of the database.
    now: f64,
}

impl Rounds<'_> {
    async fn run(mut self, asked: &Mutex<mpsc::Receiver<oneshot::Sender<()>>>) {
        let mut asked = asked.lock().await;
        self.follow();
        loop {
            let now = Instant::now();
            let (due, next) = self.due(now);
            if !due.is_empty() {
                self.round(due).await;
                continue;
            }
            let waiting = async {
                match next {
                    Some(next) => sleep_until(next).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = waiting => {}
                // The senders live as long as `shared`.
                _ = self.due.changed() => {}
                _ = self.gates.changed() => self.follow(),
                given = asked.recv() => match given {
                    Some(given) => {
                        self.give_back().await;
                        let _ = given.send(());
                    }
                    // The app has ended.
                    None => return,
                },
            }
        }
    }

    /// Divides the limits that there are.
    fn follow(&mut self) {
        self.gates.mark_unchanged();
        // Those that have lost their limit too: this process may still have a share of it.
        for (kind, name, gate) in self.shared.all() {
            let limited = self.limits.entry((kind, name));
            limited.or_insert_with(|| Limited::new(gate));
        }
    }

    /// The limits whose round is due, and when to look again.
    fn due(&mut self, now: Instant) -> (Vec<Key>, Option<Instant>) {
        let mut due = Vec::new();
        let mut next: Option<Instant> = None;
        for (key, limited) in &mut self.limits {
            let Some(at) = limited.due_at(now) else {
                continue;
            };
            let at = self.retry_at.map_or(at, |retry_at| at.max(retry_at));
            match at <= now {
                true => due.push(key.clone()),
                false => next = Some(next.map_or(at, |next| next.min(at))),
            }
        }
        (due, next)
    }

    /// One round of each of these limits.
    async fn round(&mut self, keys: Vec<Key>) {
        match self.divide(&keys).await {
            Ok(()) => {
                if self.retry_at.take().is_some() {
                    tracing::info!("shared limits are refreshed again");
                }
                self.backoff = Backoff::new();
            }
            Err(error) => {
                match self.backoff.is_worth_a_warning() {
                    true => tracing::warn!(
                        %error,
                        "cannot refresh the shared limits: rates stay at each process's last share; tasks with a `running` limit \
                         stop starting after 20 s; trying again; check Postgres"
                    ),
                    false => {
                        tracing::debug!(%error, "cannot refresh the shared limits, trying again")
                    }
                }
                self.retry_at = Some(Instant::now() + self.backoff.next());
                for limited in self.limits.values_mut() {
                    limited.liveness.forget();
                }
            }
        }
    }

    async fn divide(&mut self, keys: &[Key]) -> Result<(), Error> {
        let app = self.app;
        let sent = Instant::now();
        // Before the row is read: what a process gives up must not be in its hands any more at the time of the pool.
        let reports: Vec<(Key, LimitParts, Report)> = keys
            .iter()
            .filter_map(|key| {
                let limited = self.limits.get_mut(key)?;
                let mut local = limited.gate.local();
                if let Some(limit) = local.shared_limit() {
                    limited.limit = LimitParts::of(limit);
                }
                Some((key.clone(), limited.limit, local.report(sent)))
            })
            .collect();
        let reading = self
            .connection
            .within(LIMIT, "read limits", async |connection| {
                read(connection, app, &reports).await
            });
        let rows = reading.await?;
        for ((key, limit, report), stored) in reports.iter().zip(rows) {
            let Some(limited) = self.limits.get_mut(key) else {
                continue;
            };
            let limit = *limit;
            let dead = limited.liveness.dead(stored.pool.as_ref(), Instant::now());
            let pool = stored.pool.unwrap_or_else(|| Pool::new(limit, stored.now));
            let Outcome { pool, answer } = pool.round(limit, report, &dead, stored.now);
            if let Some(pool) = pool {
                let state = serde_json::to_string(&pool).unwrap_or_default();
                let writing = self
                    .connection
                    .within(LIMIT, "divide limits", async |connection| {
                        write(connection, app, key, stored.version, &state).await
                    });
                if !writing.await? {
                    // Another process was faster.
                    let pause = SHORTEST + Duration::from_millis(u64::from(random::number() % 30));
                    limited.not_before = Some(Instant::now() + pause);
                    limited.last = None;
                    continue;
                }
            }
            let now = Instant::now();
            let is_raised = limited.gate.local().answered(answer.as_ref(), sent, now);
            limited.last = Some(now);
            limited.not_before = Some(now + SHORTEST);
            if is_raised {
                self.shared.signals.open();
            }
        }
        Ok(())
    }

    /// Gives up everything that is held and not in use.
    async fn give_back(&mut self) {
        let deadline = Instant::now() + GIVE_BACK_LIMIT;
        let mut keys = Vec::new();
        for (key, limited) in &mut self.limits {
            let mut local = limited.gate.local();
            local.give_up();
            if local.takes_part(Instant::now()) {
                keys.push(key.clone());
            }
        }
        while !keys.is_empty() && Instant::now() < deadline {
            self.round(keys.clone()).await;
            let (limits, now) = (&self.limits, Instant::now());
            keys.retain(|key| limits.get(key).is_some_and(|it| it.must_give_back(now)));
            if !keys.is_empty() {
                // Other processes write the same rows, perhaps because they end too.
                let pause = Duration::from_millis(5 + u64::from(random::number() % 25));
                sleep(pause).await;
            }
        }
        // Another worker of this process may wait.
        self.shared.signals.open();
    }
}

impl Limited {
    fn new(gate: Arc<Gate>) -> Self {
        Self {
            gate,
            limit: LimitParts::default(),
            last: None,
            not_before: None,
            liveness: Liveness::default(),
        }
    }

    /// Whether it has a share although nobody wants to start anything.
    fn must_give_back(&self, now: Instant) -> bool {
        let local = self.gate.local();
        local.takes_part(now) && !local.is_wanted(now) && !local.runs_any()
    }

    /// When the next round is due, if there is to be one.
    fn due_at(&mut self, now: Instant) -> Option<Instant> {
        let Some(pause) = self.gate.local().pause(now) else {
            self.last = None;
            return None;
        };
        let due = self.last.map_or(now, |last| last + pause);
        Some(
            self.not_before
                .map_or(due, |not_before| due.max(not_before)),
        )
    }
}

/// The rows of these limits, in their order.
async fn read(
    connection: &mut PgConnection<'_>,
    app: &str,
    reports: &[(Key, LimitParts, Report)],
) -> Result<Vec<Stored>, sqlx::Error> {
    let keys = reports.iter().map(|(key, ..)| key);
    let (kinds, names): (Vec<&str>, Vec<&str>) =
        keys.map(|(kind, name)| (*kind, name.as_str())).unzip();
    let rows = sqlx::query(
        "SELECT limits.version, limits.state, extract(epoch FROM clock_timestamp())::float8 AS now \
         FROM unnest($2::text[], $3::text[]) WITH ORDINALITY AS wanted (kind, name, place) \
            LEFT JOIN tierline.limits ON limits.app = $1 AND limits.kind = wanted.kind AND limits.name = wanted.name \
         ORDER BY wanted.place",
    )
    .bind(app)
    .bind(kinds)
    .bind(names)
    .fetch_all(connection)
    .await?;
    rows.iter().map(stored).collect()
}

fn stored(row: &PgRow) -> Result<Stored, sqlx::Error> {
    let state: Option<&str> = row.try_get("state")?;
    let now = row.try_get("now")?;
    // What a newer release wrote and this one cannot read begins anew, without a token.
    let read = |state| serde_json::from_str(state).unwrap_or_else(|_| Pool::empty(now));
    Ok(Stored {
        version: row.try_get("version")?,
        pool: state.map(read),
        now,
    })
}

/// Writes the pool of a limit, if it is as it was read; whether it was.
async fn write(
    connection: &mut PgConnection<'_>,
    app: &str,
    (kind, name): &Key,
    version: Option<i64>,
    state: &str,
) -> Result<bool, sqlx::Error> {
    let writing = match version {
        // It does not wait for a row that somebody has locked.
        Some(version) => sqlx::query(
            "UPDATE tierline.limits AS changed SET state = $4, version = changed.version + 1 \
             WHERE (changed.app, changed.kind, changed.name) IN (SELECT app, kind, name FROM tierline.limits \
                WHERE app = $1 AND kind = $2 AND name = $3 AND version = $5 FOR UPDATE SKIP LOCKED)",
        )
        .bind(app)
        .bind(kind)
        .bind(name)
        .bind(state)
        .bind(version),
        None => sqlx::query(
            "INSERT INTO tierline.limits (app, kind, name, state) VALUES ($1, $2, $3, $4) ON CONFLICT DO NOTHING",
        )
        .bind(app)
        .bind(kind)
        .bind(name)
        .bind(state),
    };
    let written = writing.execute(connection).await?;
    Ok(written.rows_affected() == 1)
}
