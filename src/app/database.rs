//! Where the database is, and how to connect to it.

use sqlx::PgPool;

use crate::postgres::MAX_CONNECTIONS;
use crate::secret::Secret;
use crate::{Database, Error};

pub(super) struct DatabaseSettings {
    place: Option<Place>,
    pub(super) connections: u32,
    pub(super) is_behind_pooler: bool,
}

enum Place {
    Url(Secret),
    Pool(PgPool),
}

impl DatabaseSettings {
    pub(super) fn url(&mut self, url: impl Into<String>) {
        self.place = Some(Place::Url(Secret::new(url)));
    }

    pub(super) fn pool(&mut self, pool: PgPool) {
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
        }
    }
}
