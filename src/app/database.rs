//! Where the database is, and how to connect to it.

use std::time::Duration;

use sqlx::PgPool;

use super::Builder;
use crate::completion::{KEEP_MARKS, SHORTEST_KEEP};
use crate::postgres::MAX_CONNECTIONS;
use crate::rollup::{KEEP as KEEP_ROLLUPS, SHORTEST_KEEP as SHORTEST_KEEP_ROLLUPS};
use crate::secret::Secret;
use crate::task::IntoDuration;
use crate::{Database, Error};

impl Builder {
    /// The URL of the database for tiers in Postgres, dead letters and schedules; see [`Database::new`](crate::Database::new).
    ///
    /// If the map has tiers in Postgres, [`connect`](Self::connect) reaches it and creates the tables, as
    /// [`on_connect`](Self::on_connect) says. Otherwise it need not be up when the app connects; prepare it once with
    /// [`Database::migrate`](crate::Database::migrate) or `tierline migrate`.
    pub fn postgres(mut self, url: impl Into<String>) -> Self {
        self.postgres.url(url);
        self
    }

    /// How many connections the pool to the database of [`postgres`](Self::postgres) has at most, which dead letters,
    /// schedules and operators use. Workers, publishers to tiers in Postgres and the scheduler have their own beside it:
    /// see the guide's page [tiers in Postgres](crate::guide::tiers_in_postgres). At least 1. Default: 8. A pool of the
    /// app's own has the size that the app gave it.
    pub fn postgres_connections(mut self, most: u32) -> Self {
        self.postgres.connections = most.max(1);
        self
    }

    /// Whether a transaction pooler, such as PgBouncer with `pool_mode = transaction`, is between the app and Postgres;
    /// see [`Database::behind_pooler`](crate::Database::behind_pooler). Default: no, and the app refuses to connect through one.
    pub fn postgres_pooler(mut self, is_behind_pooler: bool) -> Self {
        self.postgres.is_behind_pooler = is_behind_pooler;
        self
    }

    /// The database over a pool that the app has already, in place of a URL; see [`Database::from_pool`](crate::Database::from_pool). It stays
    /// open when tierline is [closed](crate::Tierline::close).
    pub fn postgres_pool(mut self, pool: sqlx::PgPool) -> Self {
        self.postgres.pool(pool);
        self
    }

    /// How long the mark of a task is kept whose handler [committed](crate::Context::transaction), such as `"3d"`. In that
    /// time, a copy of the task that comes again is recognised. A mark takes about 150 bytes. At least a minute;
    /// default: 7 days.
    pub fn keep_completion_marks(mut self, keep: impl IntoDuration) -> Self {
        let kept = &mut self.postgres.keep_marks;
        self.unreadable.set("keep_completion_marks", keep, kept);
        *kept = SHORTEST_KEEP.max(*kept);
        self
    }

    /// How long [rollups](crate::rollup) are kept, such as `"30d"`. A minute in which a task of a tier did something takes
    /// about 400 bytes. If processes of the app differ, the shortest time counts. At least an hour; default: 7 days.
    pub fn keep_rollups(mut self, keep: impl IntoDuration) -> Self {
        let kept = &mut self.postgres.keep_rollups;
        self.unreadable.set("keep_rollups", keep, kept);
        *kept = SHORTEST_KEEP_ROLLUPS.max(*kept);
        self
    }
}

pub(super) struct DatabaseSettings {
    place: Option<Place>,
    connections: u32,
    is_behind_pooler: bool,
    pub(super) keep_marks: Duration,
    pub(super) keep_rollups: Duration,
}

enum Place {
    Url(Secret),
    Pool(PgPool),
}

impl DatabaseSettings {
    fn url(&mut self, url: impl Into<String>) {
        self.place = Some(Place::Url(Secret::new(url)));
    }

    fn pool(&mut self, pool: PgPool) {
        self.place = Some(Place::Pool(pool));
    }

    /// The database, which is not connected yet; `None` if there is none.
    pub(super) fn database(self) -> Result<Option<Database>, Error> {
        let database = match self.place {
            Some(Place::Url(url)) => Database::with_connections(url.expose(), self.connections)?,
            Some(Place::Pool(pool)) => Database::from_pool(pool),
            None => return Ok(None),
        };
        Ok(Some(database.behind_pooler(self.is_behind_pooler)))
    }
}

impl Default for DatabaseSettings {
    fn default() -> Self {
        Self {
            place: None,
            connections: MAX_CONNECTIONS,
            is_behind_pooler: false,
            keep_marks: KEEP_MARKS,
            keep_rollups: KEEP_ROLLUPS,
        }
    }
}
