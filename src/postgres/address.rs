//! Database URLs, and the part of them that may be shown.

use sqlx::postgres::PgConnectOptions;

use crate::Error;
use crate::error::DatabaseError;

/// Refuses URLs that the parser would misread.
pub(super) fn check(url: &str) -> Result<(), Error> {
    let Some(("postgres" | "postgresql", rest)) = url.split_once("://") else {
        return Err(invalid(
            "it does not begin with postgres:// or postgresql://",
        ));
    };
    let authority_end = rest.find(['/', '?', '#']).unwrap_or(rest.len());
    // The parser would take a part of the password for the database name, which is shown.
    if rest[authority_end..].contains(['@', '#']) {
        return Err(invalid(
            "it has an @ or # after the host; in user and password write @ as %40, / as %2F, # as \
             %23 and ? as %3F",
        ));
    }
    Ok(())
}

pub(super) fn invalid(problem: &str) -> Error {
    Error::Database(DatabaseError::InvalidUrl {
        problem: problem.into(),
    })
}

/// The location of a database, without the credentials.
pub(super) fn shown(options: &PgConnectOptions) -> String {
    let place = match options.get_socket() {
        Some(socket) => socket.display().to_string(),
        None => format!("{}:{}", options.get_host(), options.get_port()),
    };
    match options.get_database() {
        Some(database) => format!("postgres://{place}/{database}"),
        None => format!("postgres://{place}"),
    }
}

#[cfg(test)]
mod tests {
    use crate::Database;

    #[tokio::test]
    async fn a_database_is_shown_without_its_credentials() {
        for (url, expected) in [
            (
                "postgres://ada:secret@host/hotel",
                "Database(postgres://host:5432/hotel)",
            ),
            (
                "postgresql://ada:s%40ecret@host:6000/h?sslmode=require&password=secret",
                "Database(postgres://host:6000/h)",
            ),
        ] {
            let database = Database::new(url).unwrap();
            assert_eq!(format!("{database:?}"), expected);
        }
    }

    #[tokio::test]
    async fn what_is_no_url_is_refused_without_being_shown() {
        for url in [
            "",
            "secret",
            "amqp://ada:secret@host",
            "postgres://ada:12/secret@host",
            "postgres://ada:12#secret@host",
            "postgres://ada:12?secret@host",
            "postgres://ada:secret@host:port/hotel",
            "postgres://ada:secret@host/hotel?sslmode=secret",
            "postgres://ada:%ff%fe@host/hotel",
        ] {
            let error = Database::new(url).unwrap_err().to_string();
            assert!(!error.contains("secret"), "{url}: {error}");
            assert!(error.contains("postgres://user:password@host"), "{error}");
        }
    }
}
