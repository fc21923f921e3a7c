//! Errors as problem JSON (RFC 9457).

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::json;

use crate::Error;
use crate::error::{BacklogError, DeadLetterError, ErrorKind, Stored};

/// The problem of a request.
#[derive(Debug)]
pub(super) struct Problem {
    status: StatusCode,
    detail: String,
}

impl Problem {
    pub(super) fn new(status: StatusCode, detail: impl Into<String>) -> Self {
        Self {
            status,
            detail: detail.into(),
        }
    }

    pub(super) fn bad(detail: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, detail)
    }
}

impl From<Error> for Problem {
    fn from(error: Error) -> Self {
        let status = match (error.kind(), error.stored()) {
            // A dead letter that cannot be published as it is, or not to the broker as it is.
            (ErrorKind::Invalid | ErrorKind::Mismatch, Some(Stored::No))
            | (ErrorKind::Conflict, _) => StatusCode::CONFLICT,
            (ErrorKind::Invalid, None) => StatusCode::BAD_REQUEST,
            // It is a part of the filter, or of the body.
            _ if matches!(
                error,
                Error::DeadLetter(DeadLetterError::UnknownTier { .. })
                    | Error::Backlog(BacklogError::UnknownTier { .. })
            ) =>
            {
                StatusCode::BAD_REQUEST
            }
            (ErrorKind::NotFound, None) => StatusCode::NOT_FOUND,
            _ => StatusCode::SERVICE_UNAVAILABLE,
        };
        if status != StatusCode::SERVICE_UNAVAILABLE {
            return Self::new(status, error.to_string());
        }
        // Details of the servers behind the API go to the log, not to the client.
        tracing::error!(%error, "a request to the admin API failed");
        let detail = "the database or the broker failed: see the server's log";
        Self::new(status, detail)
    }
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let body = json!({
            "type": "about:blank",
            "title": self.status.canonical_reason().unwrap_or("Error"),
            "status": self.status.as_u16(),
            "detail": self.detail,
        });
        let problem = HeaderValue::from_static("application/problem+json");
        let headers = [(header::CONTENT_TYPE, problem)];
        (self.status, headers, body.to_string()).into_response()
    }
}
