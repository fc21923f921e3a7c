//! Authorization.

use std::fmt;
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::{StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

use super::problem::Problem;
use crate::Error;

/// The shortest token, in bytes: too long to guess if drawn at random.
const SHORTEST: usize = 16;

/// The secret that every request to the admin API must carry. There is no default.
#[derive(Clone)]
pub struct Token {
    /// A hash, so that all tokens have the same length and comparing reveals nothing about it.
    hash: Arc<[u8; 32]>,
}

impl Token {
    /// A token of at least 16 bytes. Draw it at random: `openssl rand -hex 32`.
    ///
    /// # Errors
    /// [`Error::InvalidToken`] if it is shorter.
    pub fn new(token: impl AsRef<str>) -> Result<Self, Error> {
        let token = token.as_ref();
        if token.len() < SHORTEST || token.trim() != token {
            return Err(Error::InvalidToken { shortest: SHORTEST });
        }
        Ok(Self {
            hash: Arc::new(Sha256::digest(token).into()),
        })
    }

    fn is(&self, given: &[u8]) -> bool {
        let given: [u8; 32] = Sha256::digest(given).into();
        self.hash.as_slice().ct_eq(&given).into()
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("Token(…)")
    }
}

/// Lets only requests with the token through.
pub(super) async fn check(State(token): State<Token>, request: Request, next: Next) -> Response {
    let given = request.headers().get(header::AUTHORIZATION);
    let given = given.and_then(|value| bearer(value.as_bytes()));
    if given.is_some_and(|given| token.is(given)) {
        return next.run(request).await;
    }
    let detail = "send the header `Authorization: Bearer …` with the token of this server";
    let mut refused = Problem::new(StatusCode::UNAUTHORIZED, detail).into_response();
    let challenge = header::HeaderValue::from_static("Bearer");
    refused
        .headers_mut()
        .insert(header::WWW_AUTHENTICATE, challenge);
    refused
}

fn bearer(value: &[u8]) -> Option<&[u8]> {
    let (scheme, token) = value.split_at_checked(7)?;
    scheme
        .eq_ignore_ascii_case(b"bearer ")
        .then(|| token.trim_ascii())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_long_and_never_shown() {
        for token in ["", "secret", " 0123456789abcdef"] {
            assert!(Token::new(token).is_err(), "{token:?}");
        }
        let token = Token::new("0123456789abcdef").unwrap();
        assert!(token.is(b"0123456789abcdef") && !token.is(b"0123456789abcdeF"));
        assert!(!format!("{token:?}").contains("0123"));
    }
}
