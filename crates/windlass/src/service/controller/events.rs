//! The status document as server-sent events, for the live page.
//!
//! Owns: how often it is made, and the stream to each listener. One task makes the document for all of them: not more often
//! than every [`PACE`], when something changed, and every [`IDLE`] when receivers were only heard of. A listener that
//! takes long gets the newest document next, and those in between never. After [`KEEP_ALIVE`] without news a comment
//! shows that the connection is alive.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::header;
use axum::response::{IntoResponse, Response};
use hyper::body::Frame;
use tokio::sync::{OwnedSemaphorePermit, watch};
use windlass_core::error::Kind;

use super::hub::{Hub, MAX_LISTENERS};
use crate::service::http::Failure;

/// The least time between two documents.
pub(super) const PACE: Duration = Duration::from_millis(250);
/// The time between two documents when nothing but heartbeats came in.
pub(super) const IDLE: Duration = Duration::from_secs(2);
/// After this long without a document a listener gets a comment.
pub(super) const KEEP_ALIVE: Duration = Duration::from_secs(10);

/// Publishes documents while there are listeners, until it is dropped.
pub(super) async fn publish(hub: &Hub) {
    let mut changed = hub.changed.subscribe();
    loop {
        if hub.listeners.available_permits() == MAX_LISTENERS {
            // No listeners. The first one changes the state by connecting.
            hub.document.send_replace("".into());
            if changed.changed().await.is_err() {
                return;
            }
            continue;
        }
        changed.mark_unchanged();
        let heard = hub.heard.load(Ordering::Relaxed);
        if let Ok(text) = serde_json::to_string(&hub.status()) {
            hub.document.send_replace(text.into());
        }
        tokio::time::sleep(PACE).await;
        while tokio::time::timeout(IDLE, changed.changed()).await.is_err() {
            if hub.heard.load(Ordering::Relaxed) != heard {
                break;
            }
        }
    }
}

/// `GET /events`.
pub(super) fn listen(hub: &Arc<Hub>) -> Result<Response, Failure> {
    let room = Arc::clone(&hub.listeners).try_acquire_owned().map_err(|_| {
        Failure::new(Kind::Exhausted, format!("{MAX_LISTENERS} pages are open already: close one"))
    })?;
    let documents = hub.document.subscribe();
    hub.changed.send_modify(|n| *n += 1);
    let stream = Events { next: Some(Box::pin(next(Arc::clone(hub), documents, true))), _room: room };
    let headers = [(header::CONTENT_TYPE, "text/event-stream"), (header::CACHE_CONTROL, "no-store")];
    Ok((headers, Body::new(stream)).into_response())
}

type Next = Pin<Box<dyn Future<Output = Option<(Bytes, Arc<Hub>, watch::Receiver<Arc<str>>)>> + Send>>;

/// What a listener reads.
struct Events {
    /// None after the end.
    next: Option<Next>,
    _room: OwnedSemaphorePermit,
}

/// The next piece of the stream; none at the end of the service.
async fn next(
    hub: Arc<Hub>,
    mut documents: watch::Receiver<Arc<str>>,
    first: bool,
) -> Option<(Bytes, Arc<Hub>, watch::Receiver<Arc<str>>)> {
    let fresh = async {
        loop {
            if first && !documents.borrow_and_update().is_empty() {
                break;
            }
            if documents.changed().await.is_err() {
                return None;
            }
            if !documents.borrow_and_update().is_empty() {
                break;
            }
        }
        Some(Bytes::from(format!("data: {}\n\n", &**documents.borrow())))
    };
    let piece = tokio::select! {
        piece = tokio::time::timeout(KEEP_ALIVE, fresh) => piece.unwrap_or(Some(Bytes::from_static(b": alive\n\n"))),
        () = hub.ended() => None,
    }?;
    Some((piece, hub, documents))
}

impl hyper::body::Body for Events {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        let Some(waiting) = &mut self.next else { return Poll::Ready(None) };
        waiting.as_mut().poll(cx).map(|piece| {
            self.next = None;
            let (bytes, hub, documents) = piece?;
            self.next = Some(Box::pin(next(hub, documents, false)));
            Some(Ok(Frame::data(bytes)))
        })
    }
}
