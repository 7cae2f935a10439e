//! What the work produced, and how it reaches the client.

use std::{future::poll_fn, pin::pin, sync::Arc};

use bytes::{Bytes, BytesMut};
use http::{HeaderMap, StatusCode, response::Parts};
use http_body::Body;
use tokio::time::Instant;

use super::{
    record::{Destination, Recorder, begin, delivered, stored},
    response_body::ResponseBody,
    sale::Unfinished,
};
use crate::ledger::{Lease, Ledger, StoredResponse};

/// A response's body: whole where it can be kept for replays before it is paid for, and else streaming.
pub(super) enum Produced<R> {
    Whole { bytes: Bytes, trailers: Option<Box<HeaderMap>> },
    Streaming(R),
}

impl<R: Body<Data = Bytes>> Produced<R> {
    /// Reads a body that says its length, and whose length is at most `limit`, until `deadline`. A body that breaks off is
    /// work that did not succeed.
    pub(super) async fn of(parts: &Parts, body: R, limit: usize, deadline: Instant) -> Result<Self, Unfinished> {
        // What follows 101 is a connection.
        let length = body.size_hint().exact().filter(|_| parts.status != StatusCode::SWITCHING_PROTOCOLS);
        let Some(length) = length.and_then(|length| usize::try_from(length).ok()).filter(|length| *length <= limit)
        else {
            return Ok(Self::Streaming(body));
        };
        let read = tokio::time::timeout_at(deadline, read_exactly(body, length)).await;
        let (bytes, trailers) = read.map_err(|_elapsed| Unfinished::TooSlow)?.ok_or(Unfinished::BrokeOff)?;
        Ok(Self::Whole { bytes, trailers })
    }

    /// What the ledger keeps in the same breath as the fact that the work is done.
    pub(super) fn to_keep(&self, parts: &Parts, now: u64) -> Option<Arc<StoredResponse>> {
        match self {
            Self::Whole { bytes, trailers } => {
                Some(Arc::new(stored(parts, bytes.clone(), trailers.as_deref().cloned(), now)))
            }
            Self::Streaming(_) => None,
        }
    }
}

impl<R: Body<Data = Bytes> + Send + 'static> Produced<R> {
    /// Prepares the way to the client, and to the ledger for what it does not have yet.
    pub(super) fn deliver(self, parts: &Parts, destination: impl FnOnce() -> Destination) -> Delivery<R> {
        match self {
            Self::Whole { bytes, trailers } => Delivery::Whole { bytes, trailers },
            Self::Streaming(body) => Delivery::Streaming(Box::new(Recorder::new(parts, body, destination()))),
        }
    }
}

/// A response on its way to the client, once it is paid for. Dropped before that, it is still kept for replays.
pub(super) enum Delivery<R> {
    Whole { bytes: Bytes, trailers: Option<Box<HeaderMap>> },
    Streaming(Box<Recorder<R>>),
}

impl<R> Delivery<R> {
    /// Whether the ledger has all of it.
    pub(super) const fn is_whole(&self) -> bool {
        matches!(self, Self::Whole { .. })
    }

    /// The body for the client.
    pub(super) fn into_body(self, ledger: &Arc<dyn Ledger>, lease: Lease) -> ResponseBody<R> {
        match self {
            Self::Whole { bytes, trailers } => {
                let ledger = ledger.clone();
                begin(async move { delivered(ledger.as_ref(), &lease).await });
                ResponseBody::replay(bytes, trailers)
            }
            Self::Streaming(mut recorder) => {
                recorder.release();
                ResponseBody::recorded(recorder)
            }
        }
    }
}

/// `None` if the body breaks off, or is not as long as it said.
async fn read_exactly<R: Body<Data = Bytes>>(body: R, length: usize) -> Option<(Bytes, Option<Box<HeaderMap>>)> {
    let mut body = pin!(body);
    let (mut first, mut rest) = (Bytes::new(), BytesMut::new());
    let mut trailers: Option<Box<HeaderMap>> = None;
    while let Some(frame) = poll_fn(|cx| body.as_mut().poll_frame(cx)).await {
        match frame.ok()?.into_data() {
            Ok(data) if first.len() + rest.len() + data.len() > length => return None,
            // Most bodies come in one piece, which then need not be copied.
            Ok(data) if first.is_empty() && rest.is_empty() => first = data,
            Ok(data) => {
                rest.extend_from_slice(&std::mem::take(&mut first));
                rest.extend_from_slice(&data);
            }
            Err(frame) => {
                if let Ok(more) = frame.into_trailers() {
                    trailers.get_or_insert_default().extend(more);
                }
            }
        }
    }
    let bytes = if rest.is_empty() { first } else { rest.freeze() };
    (bytes.len() == length).then_some((bytes, trailers))
}
