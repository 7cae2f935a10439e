//! The request body a paid handler reads.

use std::{
    pin::Pin,
    sync::{Arc, Mutex, PoisonError},
    task::{Context, Poll},
};

use alloy_primitives::B256;
use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use pin_project_lite::pin_project;
use sha2::{Digest, Sha256};

use crate::ledger::BodyDigest;

pin_project! {
    /// The body of a request that passed [`RequirePayment`](super::RequirePayment).
    ///
    /// It streams like the one it wraps, hashed on its way where the request was paid for.
    #[derive(Debug)]
    pub struct RequestBody<B> {
        #[pin]
        kind: Kind<B>,
    }
}

pin_project! {
    #[project = KindProjection]
    #[derive(Debug)]
    enum Kind<B> {
        /// Untouched.
        Inner { #[pin] body: B },
        /// Hashed as it passes.
        Hashed { #[pin] body: B, read: Read },
        /// Read before.
        Whole { bytes: Option<Bytes> },
    }
}

impl<B: Body<Data = Bytes>> RequestBody<B> {
    pub(super) fn untouched(body: B) -> Self {
        Self { kind: Kind::Inner { body } }
    }

    /// A body that is hashed as the handler reads it, and what will have been read of it.
    pub(super) fn hashed(body: B) -> (Self, Read) {
        let read = Read::default();
        if body.is_end_stream() {
            read.update(&[], true);
        }
        (Self { kind: Kind::Hashed { body, read: read.clone() } }, read)
    }

    pub(super) fn whole(bytes: Bytes) -> Self {
        Self { kind: Kind::Whole { bytes: Some(bytes).filter(|bytes| !bytes.is_empty()) } }
    }
}

impl<B: Body<Data = Bytes>> Body for RequestBody<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        match self.project().kind.project() {
            KindProjection::Inner { body } => body.poll_frame(cx),
            KindProjection::Whole { bytes } => Poll::Ready(bytes.take().map(|bytes| Ok(Frame::data(bytes)))),
            KindProjection::Hashed { mut body, read } => {
                let polled = body.as_mut().poll_frame(cx);
                match &polled {
                    Poll::Ready(Some(Ok(frame))) => {
                        read.update(frame.data_ref().map_or(&[], |data| data), body.is_end_stream());
                    }
                    Poll::Ready(None) => read.update(&[], true),
                    Poll::Ready(Some(Err(_))) | Poll::Pending => {}
                }
                polled
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.kind {
            Kind::Inner { body } | Kind::Hashed { body, .. } => body.is_end_stream(),
            Kind::Whole { bytes } => bytes.is_none(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.kind {
            Kind::Inner { body } | Kind::Hashed { body, .. } => body.size_hint(),
            Kind::Whole { bytes } => SizeHint::with_exact(bytes.as_ref().map_or(0, |bytes| bytes.len() as u64)),
        }
    }
}

/// What has been read of a body so far; shared with the body that is being read.
#[derive(Clone, Debug, Default)]
pub(super) struct Read(Arc<Mutex<Progress>>);

#[derive(Debug, Default)]
struct Progress {
    hash: Sha256,
    length: u64,
    complete: bool,
}

impl Read {
    fn update(&self, data: &[u8], complete: bool) {
        let mut progress = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        progress.hash.update(data);
        progress.length += data.len() as u64;
        progress.complete |= complete;
    }

    pub(super) fn digest(&self) -> BodyDigest {
        let progress = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        BodyDigest {
            length: progress.length,
            digest: B256::from_slice(&progress.hash.clone().finalize()),
            complete: progress.complete,
        }
    }
}

/// The digest of a body that was read whole.
pub(super) fn digest_of(bytes: &[u8]) -> BodyDigest {
    BodyDigest { length: bytes.len() as u64, digest: B256::from_slice(&Sha256::digest(bytes)), complete: true }
}
