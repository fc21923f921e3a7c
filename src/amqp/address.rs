//! The address of the broker.

use std::fmt;
use std::net::Ipv6Addr;
use std::str::FromStr;

use lapin::uri::{AMQPScheme, AMQPUri};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};

use crate::Error;
use crate::error::BrokerError;

/// Seconds between signs of life, unless the URL says otherwise. A connection on which nothing is heard
/// for twice as long is lost. With the broker's own 60 a worker would wait for two minutes on a node that
/// is frozen, or behind a network that swallows everything, while the rest of the cluster has work.
const HEARTBEAT: u16 = 10;

/// The address of a broker and a virtual host on it, with the credentials for it.
///
/// It is shown without the credentials, in errors and by `{:?}` too.
///
/// ```
/// # use tierline::amqp::Address;
/// let address: Address = "amqp://ada:secret@broker.example/hotel".parse()?;
/// assert_eq!(address.to_string(), "amqp://broker.example:5672/hotel");
/// assert_eq!((address.user(), address.virtual_host()), ("ada", "hotel"));
/// # Ok::<(), tierline::Error>(())
/// ```
#[derive(Clone, PartialEq, Eq)]
pub struct Address {
    uri: AMQPUri,
}

impl Address {
    /// The user that logs in; `guest` unless the URL has one.
    pub fn user(&self) -> &str {
        &self.uri.authority.userinfo.username
    }

    /// The virtual host; `/` unless the URL has one.
    pub fn virtual_host(&self) -> &str {
        &self.uri.vhost
    }

    pub(super) fn uri(&self) -> &AMQPUri {
        &self.uri
    }
}

impl FromStr for Address {
    type Err = Error;

    /// Reads `amqp://user:password@host:port/virtual-host`, or `amqps://` for TLS. All but the host
    /// may be left out. `?heartbeat=20` sets the seconds between signs of life, in place of 10.
    fn from_str(url: &str) -> Result<Self, Error> {
        let invalid = |problem: &str| {
            Error::Broker(BrokerError::InvalidUrl {
                problem: problem.into(),
            })
        };
        let Some((scheme @ ("amqp" | "amqps"), rest)) = url.split_once("://") else {
            return Err(invalid("it does not begin with amqp:// or amqps://"));
        };
        // lapin would speak to it in clear.
        if scheme == "amqps" && !cfg!(feature = "rustls") {
            return Err(invalid(
                "amqps:// needs TLS, and this program was built without the feature `rustls`",
            ));
        }
        let authority_end = rest.find(['/', '?', '#']).unwrap_or(rest.len());
        let (authority, path) = rest.split_at(authority_end);
        // Else a part of the password would be taken for the host, and shown.
        if path.contains(['@', '#']) {
            return Err(invalid(
                "it has an @ or # after the host; in user, password and virtual host write @ as \
                 %40, / as %2F, # as %23 and ? as %3F",
            ));
        }
        let mut uri: AMQPUri = url.parse().map_err(|problem: String| match problem {
            // It goes on with a part of the URL.
            problem if problem.contains(": ") => invalid("it has a part that is not understood"),
            problem => invalid(&problem),
        })?;
        if let Some(host) = ipv6_host(authority) {
            uri.authority.host = host;
        }
        // RabbitMQ's own. lapin's buffers are then as large as they need to be from the start, and take
        // up memory only as they are used; growing them later writes all of it, 8 MiB a connection.
        uri.query.frame_max.get_or_insert(131_072);
        uri.query.heartbeat.get_or_insert(HEARTBEAT);
        Ok(Self { uri })
    }
}

/// The address in `user@[::1]:5672`. lapin takes localhost for any such host.
fn ipv6_host(authority: &str) -> Option<String> {
    let host = authority.rsplit('@').next()?.strip_prefix('[')?;
    let address: Ipv6Addr = host.split(']').next()?.parse().ok()?;
    Some(address.to_string())
}

impl fmt::Display for Address {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = match self.uri.scheme {
            AMQPScheme::AMQP => "amqp",
            AMQPScheme::AMQPS => "amqps",
        };
        let authority = &self.uri.authority;
        match authority.host.contains(':') {
            true => write!(out, "{scheme}://[{}]:{}", authority.host, authority.port)?,
            false => write!(out, "{scheme}://{}:{}", authority.host, authority.port)?,
        }
        match self.uri.vhost.as_str() {
            "/" => Ok(()),
            virtual_host => write!(out, "/{}", percent_encoded(virtual_host)),
        }
    }
}

impl fmt::Debug for Address {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "Address({self})")
    }
}

/// A name as one part of a URL's path.
pub(super) fn percent_encoded(name: &str) -> String {
    utf8_percent_encode(name, RESERVED).to_string()
}

const RESERVED: &AsciiSet = &NON_ALPHANUMERIC
    .remove(b'-')
    .remove(b'.')
    .remove(b'_')
    .remove(b'~');

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(url: &str) -> String {
        url.parse::<Address>().unwrap().to_string()
    }

    #[test]
    fn signs_of_life_are_frequent_unless_the_url_says_otherwise() {
        let heartbeat = |url: &str| url.parse::<Address>().unwrap().uri().query.heartbeat;
        assert_eq!(heartbeat("amqp://host"), Some(HEARTBEAT));
        assert_eq!(heartbeat("amqp://host/hotel?heartbeat=30"), Some(30));
    }

    #[test]
    fn an_address_is_shown_without_its_credentials() {
        for (url, expected) in [
            ("amqp://localhost", "amqp://localhost:5672"),
            ("amqp://ada:secret@10.0.0.1:1234", "amqp://10.0.0.1:1234"),
            ("amqp://ada:se%2Fcr%40et@host/%2f", "amqp://host:5672"),
            (
                "amqp://ada:secret@host/a%2Fb%20c",
                "amqp://host:5672/a%2Fb%20c",
            ),
            ("amqp://ada:secret@[::1]:5673/v", "amqp://[::1]:5673/v"),
            (
                "amqp://ada:secret@[2001:db8::7]",
                "amqp://[2001:db8::7]:5672",
            ),
            ("amqp://ada:secret@host?heartbeat=5", "amqp://host:5672"),
        ] {
            assert_eq!(shown(url), expected);
            let address: Address = url.parse().unwrap();
            assert!(!format!("{address:?}").contains("se"), "{address:?}");
        }
    }

    #[test]
    fn an_ipv6_host_is_the_one_that_is_connected_to() {
        let address: Address = "amqp://[2001:db8::7]:5673/v".parse().unwrap();
        assert_eq!(address.uri().authority.host, "2001:db8::7");
        assert_eq!(address.uri().authority.port, 5673);
    }

    #[test]
    fn what_is_no_url_is_refused_without_being_shown() {
        for url in [
            "",
            "secret",
            "ada:secret@host",
            "http://ada:secret@host",
            "amqp:ada:secret@host",
            "amqp://ada:secret#@host",
            "amqp://ada:12/secret@host",
            "amqp://ada:12#secret@host",
            "amqp://ada:12?secret@host",
            "amqp://ada:secret@host:port",
            "amqp://ada:secret@host:99999",
            "amqp://ada:secret@host?heartbeat=secret",
            "amqp://ada:secret@ho st",
            "amqp://ada@host?auth_mechanism=secret",
            "amqp://ada:%ff%fe@host",
        ] {
            let error = url.parse::<Address>().unwrap_err().to_string();
            assert!(!error.contains("secret"), "{url}: {error}");
            assert!(error.contains("amqp://user:password@host"), "{error}");
        }
    }
}
