//! Hears notifications of new rows. They only save time: `look` finds the same rows a little later.

use std::sync::Arc;
use std::time::Duration;

use sqlx::postgres::{PgListener, PgPoolOptions};
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;

use super::RowSettings;
use crate::backlog::{CHANNEL, OLDER};
use crate::backoff::Backoff;

/// How long to wait for a notification before the connection is checked.
const CHECK_EVERY: Duration = Duration::from_secs(60);
/// How long the check may take.
const CHECK_LIMIT: Duration = Duration::from_secs(5);

/// Behind a transaction pooler nothing can be heard: it gives the connection that listens to other clients.
pub(super) async fn run(settings: Arc<RowSettings>, ending: CancellationToken) {
    if settings.database.is_behind_pooler() {
        return ending.cancelled().await;
    }
    let mut backoff = Backoff::new();
    let listening = async {
        loop {
            let begin = Instant::now();
            let listened = listen(&settings).await;
            // Before the warning: the loss of a connection that lasted is a new incident, and attempts that follow belong to it.
            let pause = backoff.next_after(begin.elapsed());
            if let Err(error) = listened {
                match backoff.is_worth_a_warning() {
                    true => {
                        tracing::warn!(%error, "cannot listen for new tasks; looking every second")
                    }
                    false => {
                        tracing::debug!(%error, "cannot listen for new tasks; looking every second")
                    }
                }
            }
            sleep(pause).await;
        }
    };
    let _: Option<()> = ending.run_until_cancelled(listening).await;
}

/// Listens until the connection is lost.
async fn listen(settings: &RowSettings) -> Result<(), sqlx::Error> {
    let options = settings.database.pool().connect_options();
    let pool = PgPoolOptions::new()
        .max_connections(1)
        .connect_lazy_with((*options).clone());
    let mut listener = PgListener::connect_with(&pool).await?;
    listener.ignore_pool_close_event(true);
    listener.listen(CHANNEL).await?;
    // What came before was not heard.
    settings.look_now.notify_one();
    loop {
        let Ok(received) = timeout(CHECK_EVERY, listener.try_recv()).await else {
            // A connection that is half open gives neither a notification nor an error.
            let asking = sqlx::query("SELECT 1").execute(&mut listener);
            let answered = timeout(CHECK_LIMIT, asking).await;
            answered.map_err(|_| sqlx::Error::PoolTimedOut)??;
            continue;
        };
        let Some(notification) = received? else {
            return Ok(());
        };
        let mut words = notification.payload().split(' ');
        let (Some(app), Some(tier)) = (words.next(), words.next()) else {
            continue;
        };
        if app != settings.app() {
            continue;
        }
        let Some(signal) = settings.signal(tier) else {
            continue;
        };
        match words.next() {
            None => signal.wake(),
            Some(OLDER) => settings.look_now.notify_one(),
            Some(word) => {
                if let Ok(milliseconds) = word.parse() {
                    let due = Instant::now().checked_add(Duration::from_millis(milliseconds));
                    signal.change(|state| state.falls_due(due));
                }
            }
        }
    }
}
