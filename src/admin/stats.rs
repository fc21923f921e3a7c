//! The endpoint of statistics.

use axum::Json;
use axum::extract::State;

use super::AdminState;
use super::request::ApiResult;
use crate::stats::Stats;

pub(super) async fn stats(State(admin): State<AdminState>) -> ApiResult<Json<Stats>> {
    Ok(Json(admin.app.stats().await?))
}
