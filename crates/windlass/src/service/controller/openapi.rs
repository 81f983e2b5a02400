//! The description of the endpoints, for those who generate clients and for tests that attack them.
//!
//! Owns: `openapi.json`, which is written by hand: every route, parameter, body and status. A test holds it against the
//! routes and the types.

use axum::http::header;
use axum::response::{IntoResponse, Response};

/// The description. Its version is that of the API, not of the release.
pub const DESCRIPTION: &str = include_str!("openapi.json");

/// `GET /openapi.json`.
pub(super) async fn document() -> Response {
    ([(header::CONTENT_TYPE, "application/json")], DESCRIPTION).into_response()
}
