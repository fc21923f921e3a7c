//! Texts that no log line, error or `{:?}` may show.

use std::fmt;
use std::sync::Arc;

/// A URL with a password in it, or another text that only its receiver may see.
///
/// It has no `Display`, its `Debug` shows nothing of the text, and it does not dereference to `str`:
/// a struct that derives `Debug` cannot print it, and code that needs the text says so with
/// [`expose`](Self::expose).
#[derive(Clone)]
pub(crate) struct Secret(Arc<str>);

impl Secret {
    pub(crate) fn new(text: impl Into<String>) -> Self {
        Self(text.into().into())
    }

    /// The text, for the server that it is meant for.
    pub(crate) fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Not even a part: the text may not be a URL at all, and then nothing tells which part is secret.
        out.write_str("Secret(…)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_is_exposed_on_purpose_only() {
        let secret = Secret::new("amqp://ada:hush@host");
        assert_eq!(secret.expose(), "amqp://ada:hush@host");
        assert_eq!(
            format!("{secret:?} {:#?}", Some(&secret))
                .matches("hush")
                .count(),
            0
        );
    }
}
