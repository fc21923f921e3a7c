use crate::error::ErrorKind;

/// What can go wrong with the database.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DatabaseError {
    /// The URL of the database cannot be read. It is not shown, because it may hold a password.
    #[error(
        "cannot read the URL of the database: {problem}; write \
         postgres://user:password@host:5432/database"
    )]
    InvalidUrl {
        /// What is wrong with it.
        problem: Box<str>,
    },

    /// Something needs a database, and the app has none.
    #[error("cannot {tried}: no database was given; call .postgres(…) on the builder")]
    NotConfigured {
        /// What was tried.
        tried: Box<str>,
    },

    /// There is no connection to the database, or none was free in time.
    #[error(
        "cannot {tried}: no connection: {cause}; is Postgres running, and is this its address?"
    )]
    Unreachable {
        /// What was tried, and where, without the credentials.
        tried: Box<str>,
        /// What happened.
        cause: Box<str>,
        /// What the operating system or the TLS library answered.
        source: Option<Box<dyn std::error::Error + Send + Sync>>,
    },

    /// Postgres does not let the user in: the role, its password or the database is another.
    #[error(
        "cannot {tried}: Postgres refuses the login: {cause}; check user, password and database of \
         its URL"
    )]
    LoginRefused {
        /// What was tried, and where, without the credentials.
        tried: Box<str>,
        /// What Postgres says.
        cause: Box<str>,
    },

    /// The connection to the database was lost on the way, or the database gave up for now. What was
    /// asked for may have been done or not.
    #[error("cannot {tried}: {cause}; check Postgres, and try again")]
    Failed {
        /// What was tried, and where.
        tried: Box<str>,
        /// What happened.
        cause: Box<str>,
        /// What the operating system answered.
        source: Option<Box<dyn std::error::Error + Send + Sync>>,
    },

    /// The database refuses what was asked, and will again.
    #[error("cannot {tried}: Postgres says {cause:?}")]
    Refused {
        /// What was tried, and where.
        tried: Box<str>,
        /// What Postgres says.
        cause: Box<str>,
    },

    /// Between the app and Postgres is a transaction pooler, such as PgBouncer with `pool_mode = transaction`, and the
    /// app did not say so.
    #[error(
        "cannot {tried}: this is a transaction pooler, such as PgBouncer with pool_mode = transaction ({cause}); call \
         .postgres_pooler(true) on the builder or .behind_pooler(true) on the Database, give the command --pooler, or \
         connect to Postgres itself"
    )]
    TransactionPooler {
        /// What was tried, and where.
        tried: Box<str>,
        /// How it was recognised.
        cause: Box<str>,
    },

    /// The database lacks tables or columns of ours.
    #[error(
        "cannot {tried}: the database is not prepared for this release ({cause}); run its `tierline migrate`, or call \
         Database::migrate"
    )]
    NotMigrated {
        /// What was tried, and where.
        tried: Box<str>,
        /// What is missing.
        cause: Box<str>,
    },
}

impl DatabaseError {
    pub(crate) fn kind(&self) -> ErrorKind {
        match self {
            DatabaseError::InvalidUrl { .. } => ErrorKind::Invalid,
            DatabaseError::NotConfigured { .. } | DatabaseError::TransactionPooler { .. } => {
                ErrorKind::Configuration
            }
            DatabaseError::Unreachable { .. } | DatabaseError::Failed { .. } => {
                ErrorKind::Connection
            }
            DatabaseError::LoginRefused { .. } => ErrorKind::Permission,
            DatabaseError::Refused { .. } => ErrorKind::Refused,
            DatabaseError::NotMigrated { .. } => ErrorKind::Mismatch,
        }
    }
}
