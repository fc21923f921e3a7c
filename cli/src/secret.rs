//! Secrets in arguments that must never be printed: passwords in URLs, and tokens.

use std::fmt;

/// An argument that `{:?}` hides.
#[derive(Clone)]
pub(crate) struct Secret(String);

impl Secret {
    /// The text, for the server that needs it.
    pub(crate) fn expose(&self) -> &str {
        &self.0
    }
}

/// Clap's constructor.
impl From<String> for Secret {
    fn from(text: String) -> Self {
        Self(text)
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("Secret(…)")
    }
}

/// Replaces user and password of URLs in errors and help.
const PLACEHOLDER: &str = "user:password";

/// A text for the terminal, without the user and password of any URL.
///
/// An error repeats the command line, and a URL may be there by mistake:
/// `tierline migrate $DATABASE_URL`. Many people can read the output of a CI.
pub(crate) fn without_credentials(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    let mut rest = text;
    while let Some((before, after)) = rest.split_once("://") {
        shown.push_str(before);
        shown.push_str("://");
        let end = after
            .find(|c: char| c.is_whitespace() || "'\"`".contains(c))
            .unwrap_or(after.len());
        let (url, next) = after.split_at(end);
        // The last one: an unencoded password may contain an @ too.
        match url.rsplit_once('@') {
            Some((credentials, host)) if credentials != PLACEHOLDER => {
                shown.push_str("…@");
                shown.push_str(host);
            }
            _ => shown.push_str(url),
        }
        rest = next;
    }
    shown + rest
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::arguments::Arguments;

    #[test]
    fn a_url_in_a_text_loses_its_credentials() {
        for (text, expected) in [
            ("nothing to hide", "nothing to hide"),
            (
                "write amqp://user:password@host",
                "write amqp://user:password@host",
            ),
            (
                "unexpected argument 'postgres://ada:hu@sh@host/hotel' found",
                "unexpected argument 'postgres://…@host/hotel' found",
            ),
            (
                "amqp://ada:hush@one and \"amqps://hush@two:5671/v\"",
                "amqp://…@one and \"amqps://…@two:5671/v\"",
            ),
            (
                "listening on http://127.0.0.1:8080/admin",
                "listening on http://127.0.0.1:8080/admin",
            ),
        ] {
            assert_eq!(without_credentials(text), expected);
        }
    }

    #[test]
    fn no_argument_that_holds_a_credential_is_shown() {
        let urls = [
            ["--amqp", "amqp://ada:hu%73h-hush@host"],
            ["--postgres", "postgres://ada:hush@host/hotel"],
            ["--management", "http://ada:hush@host"],
            ["--token", "hush-hush-hush-hush"],
        ];
        for (command, options) in [
            ("topology plan map.toml", &[0, 1][..]),
            ("topology apply map.toml", &[0, 1, 2]),
            ("topology doctor map.toml", &[0, 1, 2]),
            ("topology move map.toml", &[0, 1, 2]),
            ("tasks list map.toml", &[1]),
            ("tasks show map.toml 1", &[1]),
            ("tasks cancel map.toml 1", &[1]),
            ("tasks audit map.toml", &[1]),
            ("dlq list map.toml", &[1]),
            ("dlq show map.toml 1", &[1]),
            ("dlq groups map.toml", &[1]),
            ("dlq tiers map.toml", &[1]),
            ("dlq redrive map.toml 1", &[0, 1]),
            ("dlq discard map.toml 1", &[1]),
            ("dlq purge map.toml", &[1]),
            ("schedule list map.toml", &[1]),
            ("schedule next map.toml", &[1]),
            ("schedule run map.toml nightly", &[0, 1]),
            ("schedule pause map.toml nightly", &[1]),
            ("schedule resume map.toml nightly", &[1]),
            ("migrate", &[1]),
            #[cfg(feature = "admin")]
            ("serve map.toml", &[0, 1, 3]),
        ] {
            let words = ["tierline"].into_iter().chain(command.split(' '));
            let words = words.chain(options.iter().flat_map(|option| urls[*option]));
            let parsed = Arguments::try_parse_from(words).unwrap();
            let shown = format!("{parsed:?} {parsed:#?}");
            assert!(
                !shown.contains("hush") && shown.contains("Secret"),
                "{shown}"
            );
        }
    }
}
