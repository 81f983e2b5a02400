//! The live page, as it is served.
//!
//! Owns: the headers around `page.html`. The file is whole in itself: no other file, no build step, no outside resource.
//! Only its own `<style>` and `<script>` run: they are given a number that the policy names and that no two answers share,
//! so markup that somehow got into the page would not run. The page needs no token, because it says nothing; what it
//! fetches does.

use std::fmt::Write as _;

use axum::http::header;
use axum::response::{Html, IntoResponse, Response};
use windlass_core::error::Kind;

use crate::service::http::Failure;

const PAGE: &str = include_str!("page.html");

/// The page.
pub(super) async fn page() -> Result<Response, Failure> {
    let mut random = [0u8; 16];
    getrandom::fill(&mut random).map_err(|e| Failure::new(Kind::Bug, format!("no random bytes: {e}")))?;
    let nonce = random.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    });
    let page = PAGE
        .replace("<script>", &format!("<script nonce=\"{nonce}\">"))
        .replace("<style>", &format!("<style nonce=\"{nonce}\">"));
    let policy = format!(
        "default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src 'self'; \
         img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    );
    let headers = [
        (header::CONTENT_SECURITY_POLICY, policy),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff".into()),
        (header::REFERRER_POLICY, "no-referrer".into()),
        (header::CACHE_CONTROL, "no-store".into()),
    ];
    Ok((headers, Html(page)).into_response())
}
