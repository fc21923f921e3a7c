//! Reads queries and bodies of requests.

use axum::Json;
use axum::body::Bytes;
use axum::extract::Query;
use axum::extract::rejection::{BytesRejection, QueryRejection};
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use super::problem::Problem;

pub(super) type ApiResult<T = Json<Value>> = Result<T, Problem>;
pub(super) type QueryResult<T> = Result<Query<T>, QueryRejection>;
pub(super) type Body = Result<Bytes, BytesRejection>;

pub(super) fn read_query<T>(query: QueryResult<T>) -> ApiResult<T> {
    let query = query.map_err(|rejection| Problem::bad(rejection.body_text()))?;
    Ok(query.0)
}

pub(super) fn read_body<T: DeserializeOwned>(body: Body, may_be_empty: bool) -> ApiResult<T> {
    let body = body.map_err(|rejection| Problem::new(rejection.status(), rejection.body_text()))?;
    let body = match body.is_empty() && may_be_empty {
        true => b"{}",
        false => body.as_ref(),
    };
    fields(serde_json::from_slice(body).map_err(wrong_body)?)
}

pub(super) fn fields<T: DeserializeOwned>(fields: Map<String, Value>) -> ApiResult<T> {
    serde_json::from_value(Value::Object(fields)).map_err(wrong_body)
}

fn wrong_body(error: serde_json::Error) -> Problem {
    Problem::bad(format!("the body is invalid: {error}"))
}
