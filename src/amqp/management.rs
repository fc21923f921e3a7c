//! The few questions to RabbitMQ's management API that AMQP has no answer to.

use std::fmt;
use std::time::Duration;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use percent_encoding::percent_decode_str;
use serde_json::Value;

use super::address::percent_encoded;
use crate::Error;
use crate::error::{BrokerError, Cause};
use crate::secret::Secret;

/// How long one question may take.
const LIMIT: Duration = Duration::from_secs(30);

/// The management API of a broker. It is shown without its credentials.
///
/// The user needs the tag `monitoring` for everything to be seen, and permissions on the virtual
/// host.
///
/// ```
/// # use tierline::amqp::Management;
/// let management = Management::new("http://ada:secret@broker.example:15672")?;
/// assert_eq!(management.to_string(), "http://broker.example:15672");
/// # Ok::<(), tierline::Error>(())
/// ```
#[derive(Clone)]
pub struct Management {
    base: String,
    user: String,
    authorization: Secret,
    agent: ureq::Agent,
}

impl Management {
    /// The API at `http://user:password@host:port`, or `https://`. The user is `guest` unless the
    /// URL has one. Nothing is asked yet.
    ///
    /// # Errors
    /// [`BrokerError::InvalidManagementUrl`].
    pub fn new(url: &str) -> Result<Self, Error> {
        let invalid = |problem: &str| {
            Error::Broker(BrokerError::InvalidManagementUrl {
                problem: problem.into(),
            })
        };
        let Some((scheme @ ("http" | "https"), rest)) = url.split_once("://") else {
            return Err(invalid("it does not begin with http:// or https://"));
        };
        if scheme == "https" && !cfg!(feature = "rustls") {
            return Err(invalid(
                "https:// needs TLS, and this program was built without the feature `rustls`",
            ));
        }
        let (credentials, host) = rest.rsplit_once('@').unwrap_or(("guest:guest", rest));
        if credentials.contains(['/', '?', '#', '@']) || host.contains(['?', '#']) {
            return Err(invalid(
                "it has a character that URLs reserve; in user and password write @ as %40, / as \
                 %2F, # as %23 and ? as %3F",
            ));
        }
        let base = format!("{scheme}://{}", host.trim_end_matches('/'));
        if !has_host(&base) {
            return Err(invalid("its host or port is not one"));
        }
        let (user, password) = credentials.split_once(':').unwrap_or((credentials, ""));
        let decoded = |text: &str| percent_decode_str(text).decode_utf8_lossy().into_owned();
        let (user, password) = (decoded(user), decoded(password));
        Ok(Self {
            base,
            authorization: Secret::new(format!(
                "Basic {}",
                BASE64_STANDARD.encode(format!("{user}:{password}"))
            )),
            user,
            agent: agent(),
        })
    }

    /// Asks for a list of what a virtual host has, with these columns.
    pub(super) async fn list(
        &self,
        what: &str,
        virtual_host: &str,
        columns: &str,
    ) -> Result<Vec<Value>, Error> {
        let virtual_host = percent_encoded(virtual_host);
        let path = format!("{what}/{virtual_host}?columns={columns}");
        self.array(what, path).await
    }

    /// Asks for the names of the cluster's nodes, and whether they run.
    pub(super) async fn nodes(&self) -> Result<Vec<Value>, Error> {
        self.array("nodes", "nodes?columns=name,running".to_owned())
            .await
    }

    /// Asks how many messages each queue of a virtual host has, and how many of them are not acknowledged.
    #[cfg(feature = "postgres")]
    pub(crate) async fn queues_within(
        &self,
        virtual_host: &str,
        limit: Duration,
    ) -> Result<Vec<Value>, Error> {
        let columns = "name,messages,messages_unacknowledged";
        let path = format!("queues/{}?columns={columns}", percent_encoded(virtual_host));
        self.array_within("queues", path, limit).await
    }

    async fn array(&self, what: &str, path: String) -> Result<Vec<Value>, Error> {
        self.array_within(what, path, LIMIT).await
    }

    async fn array_within(
        &self,
        what: &str,
        path: String,
        limit: Duration,
    ) -> Result<Vec<Value>, Error> {
        let tried = || format!("ask {self} for its {what}").into();
        let failed = |cause: &str, source| {
            Error::Broker(BrokerError::ManagementFailed {
                tried: tried(),
                cause: cause.into(),
                source,
            })
        };
        let this = self.clone();
        // The client blocks, with a limit of its own.
        let answer = tokio::task::spawn_blocking(move || this.get(&path, limit));
        let (status, body) = answer
            .await
            .map_err(|_| failed("the runtime is shutting down", None))?
            .map_err(|error| {
                let Cause { text, source } = Cause::from(&error);
                let text = format!("{text}; is it running, and is this its address?");
                failed(&text, source)
            })?;
        match (status, body) {
            (200, Value::Array(items)) => Ok(items),
            (200, _) => Err(failed(
                "the answer is not a list; is it RabbitMQ's management API?",
                None,
            )),
            (401, _) => Err(Error::Broker(BrokerError::ManagementLoginRefused {
                tried: tried(),
                user: self.user.as_str().into(),
            })),
            (404, _) => Err(failed("it has no such virtual host, or no such API", None)),
            (status, _) => Err(failed(&format!("it answered with status {status}"), None)),
        }
    }

    fn get(&self, path: &str, limit: Duration) -> Result<(u16, Value), ureq::Error> {
        let answer = self
            .agent
            .get(format!("{}/api/{path}", self.base))
            .header("authorization", self.authorization.expose())
            .config()
            .timeout_global(Some(limit))
            .build()
            .call();
        let mut answer = answer?;
        let status = answer.status().as_u16();
        let body = answer.body_mut().with_config().limit(LARGEST_ANSWER);
        match status {
            200 => body.read_json().map(|body| (status, body)),
            _ => Ok((status, Value::Null)),
        }
    }
}

/// Whether a URL has a host, and a number for a port if it has one.
fn has_host(url: &str) -> bool {
    let Ok(url) = url.parse::<ureq::http::Uri>() else {
        return false;
    };
    url.authority().is_some_and(|authority| {
        let port = authority.as_str().strip_prefix(authority.host());
        port == Some("") || authority.port_u16().is_some()
    })
}

impl From<&ureq::Error> for Cause {
    fn from(error: &ureq::Error) -> Self {
        match error {
            ureq::Error::Io(error) => error.into(),
            other => other.to_string().into(),
        }
    }
}

/// Room for some 100,000 queues.
const LARGEST_ANSWER: u64 = 256 << 20;

fn agent() -> ureq::Agent {
    let config = ureq::Agent::config_builder()
        .timeout_global(Some(LIMIT))
        .http_status_as_error(false)
        // A redirect would take the credentials elsewhere.
        .max_redirects(0);
    #[cfg(feature = "rustls")]
    let config = config.tls_config(
        ureq::tls::TlsConfig::builder()
            .root_certs(ureq::tls::RootCerts::PlatformVerifier)
            .build(),
    );
    config.build().new_agent()
}

impl fmt::Display for Management {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(&self.base)
    }
}

impl fmt::Debug for Management {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "Management({self})")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn credentials_are_sent_as_they_are_meant_and_never_shown() {
        let management = Management::new("http://ada:p%40ss%3A@[::1]:15672/prefix/").unwrap();
        assert_eq!(management.to_string(), "http://[::1]:15672/prefix");
        assert_eq!(
            format!("{management:?}"),
            "Management(http://[::1]:15672/prefix)"
        );
        let expected = BASE64_STANDARD.encode("ada:p@ss:");
        assert_eq!(
            management.authorization.expose(),
            format!("Basic {expected}")
        );
    }

    #[test]
    fn what_is_no_url_is_refused_without_being_shown() {
        for url in [
            "",
            "secret",
            "amqp://ada:secret@host",
            "http://ada:sec/ret@host",
            "http://ada:secret@host#x",
            "http://ada:secret@",
            "http://ada:secret@host:port",
            "http://ada:secret@ho st",
        ] {
            let error = Management::new(url).unwrap_err().to_string();
            assert!(!error.contains("sec"), "{url}: {error}");
        }
    }
}
