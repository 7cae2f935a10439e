//! The request body: read whole where it must be, hashed as the handler reads it otherwise.

use std::{
    future::poll_fn,
    pin::{Pin, pin},
    sync::{Arc, Mutex, OnceLock, PoisonError},
    task::{Context, Poll},
    time::Duration,
};

use alloy_primitives::B256;
use bytes::{Bytes, BytesMut};
use http_body::{Body, Frame, SizeHint};
use pin_project_lite::pin_project;
use sha2::{Digest, Sha256};

use crate::{
    charge::{Limits, Unread},
    ledger::BodyDigest,
    upload::{Arrived, Upload},
};

pin_project! {
    /// The body of a request that passed [`RequirePayment`](super::RequirePayment).
    ///
    /// It streams like the one it wraps, hashed on its way where the request was paid for. If it is dropped before its end, what is left is
    /// read in the background, within bounds, so that a client that is still sending it can read the answer.
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
        Inner { #[pin] body: Upload<B> },
        /// Hashed as it passes.
        Hashed { #[pin] body: Upload<B>, read: Progress },
        /// Read before.
        Whole { bytes: Option<Bytes> },
    }
}

impl<B> RequestBody<B> {
    pub(super) const fn untouched(body: Upload<B>) -> Self {
        Self { kind: Kind::Inner { body } }
    }

    fn whole(bytes: Bytes) -> Self {
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
                    Poll::Ready(Some(Err(_))) => read.break_off(),
                    Poll::Pending => {}
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

/// The body of a request as far as it had to be read to know its price, or what its payment is for.
pub(super) enum LazyBody<B> {
    Untouched(Upload<B>),
    /// With its digest, once somebody asked for it: a long body is hashed once.
    Whole(Bytes, OnceLock<BodyDigest>),
    /// More than is kept.
    Long(Box<LongBody<B>>),
}

impl<B: Body<Data = Bytes>> LazyBody<B> {
    /// A body that was read whole.
    pub(super) const fn whole(bytes: Bytes) -> Self {
        Self::Whole(bytes, OnceLock::new())
    }

    /// Returns what was read; empty if nothing was yet.
    pub(super) fn bytes(&self) -> &Bytes {
        static NOTHING: Bytes = Bytes::new();
        match self {
            Self::Whole(bytes, _) => bytes,
            Self::Untouched(_) | Self::Long(_) => &NOTHING,
        }
    }

    /// Returns the digest of a body that was read whole.
    pub(super) fn digest(&self) -> Option<BodyDigest> {
        match self {
            Self::Whole(bytes, digest) => Some(*digest.get_or_init(|| digest_of(bytes))),
            Self::Untouched(_) | Self::Long(_) => None,
        }
    }

    /// Returns how much of it arrives from now on.
    pub(super) fn arrived(&mut self) -> Arrived {
        match self {
            Self::Untouched(body) => body.arrived(),
            Self::Long(long) => long.body.arrived(),
            Self::Whole(..) => Arrived::default(),
        }
    }

    /// Returns `true` if its client may have to be waited for.
    pub(super) fn is_arriving(&self) -> bool {
        match self {
            Self::Untouched(body) => !body.is_end_stream(),
            Self::Whole(..) => false,
            Self::Long(_) => true,
        }
    }

    /// Reads as much as is kept. A body that says that it is longer is not touched.
    pub(super) async fn read(&mut self, limits: &Limits) -> Result<(), Unread> {
        *self = match self.take() {
            Self::Untouched(mut body) if body.size_hint().lower() <= limits.request_body as u64 => {
                let read = read_up_to(Pin::new(&mut body), limits.request_body, limits.body_deadline).await;
                match read? {
                    (all, true) => Self::whole(all),
                    (ahead, false) => Self::Long(Box::new(LongBody::new(body, ahead))),
                }
            }
            known => known,
        };
        Ok(())
    }

    /// Reads all of it, or refuses it as too long.
    pub(super) async fn read_whole(&mut self, limits: &Limits) -> Result<(), Unread> {
        self.read(limits).await?;
        match self {
            Self::Whole(..) => Ok(()),
            Self::Untouched(_) | Self::Long(_) => Err(Unread::TooLarge),
        }
    }

    /// Returns `true` if a handler can have it: not if it was read in part and was too much to be kept.
    pub(super) const fn is_workable(&self) -> bool {
        matches!(self, Self::Whole(..) | Self::Untouched(_))
    }

    /// Returns `true` if this is the body of which so much was read when it was first presented.
    pub(super) async fn is_same(&mut self, read: &BodyDigest, limits: &Limits) -> Result<bool, Unread> {
        // A body that says that it is longer or shorter need not be read.
        if let Self::Untouched(body) = self {
            let says = body.size_hint();
            if (read.complete && says.lower() > read.length) || says.upper().is_some_and(|most| most < read.length) {
                return Ok(false);
            }
        }
        self.read(limits).await?;
        *self = match self.take() {
            Self::Untouched(body) => Self::Long(Box::new(LongBody::new(body, Bytes::new()))),
            read => read,
        };
        match self {
            Self::Long(long) => {
                // A long body had as much time as the handler.
                let within = match read.length > limits.request_body as u64 {
                    true => limits.body_deadline.max(limits.handler_deadline),
                    false => limits.body_deadline,
                };
                tokio::time::timeout(within, long.is_as(read)).await.unwrap_or(Err(Unread::TooSlow))
            }
            Self::Whole(whole, _) => Ok(read.matches(whole)),
            Self::Untouched(_) => Ok(false),
        }
    }

    /// Returns the body for a handler that nobody pays.
    pub(super) fn into_unhashed(self) -> RequestBody<B> {
        match self {
            Self::Untouched(body) => RequestBody::untouched(body),
            Self::Whole(bytes, _) => RequestBody::whole(bytes),
            Self::Long(long) => RequestBody::whole(long.ahead),
        }
    }

    /// Returns the body for the paid handler, and what it will have read of it.
    pub(super) fn into_hashed(self) -> (RequestBody<B>, SoFarRead) {
        match self {
            Self::Untouched(body) => {
                let read = Progress::default();
                if body.is_end_stream() {
                    read.update(&[], true);
                }
                (RequestBody { kind: Kind::Hashed { body, read: read.clone() } }, SoFarRead::Streaming(read))
            }
            Self::Whole(bytes, digest) => {
                let digest = digest.into_inner().unwrap_or_else(|| digest_of(&bytes));
                (RequestBody::whole(bytes), SoFarRead::Whole(digest))
            }
            // Never given to a handler: it is not workable.
            Self::Long(long) => (RequestBody::whole(long.ahead), SoFarRead::Whole(digest_of(&[]))),
        }
    }

    fn take(&mut self) -> Self {
        std::mem::replace(self, Self::whole(Bytes::new()))
    }
}

/// A body that is longer than what is kept: it is compared as it passes, and nothing of it is left.
pub(super) struct LongBody<B> {
    body: Upload<B>,
    is_over: bool,
    /// Read and not compared yet.
    ahead: Bytes,
    hash: Sha256,
    /// How much was hashed.
    length: u64,
}

impl<B: Body<Data = Bytes>> LongBody<B> {
    fn new(body: Upload<B>, ahead: Bytes) -> Self {
        Self { body, is_over: false, ahead, hash: Sha256::new(), length: 0 }
    }

    /// Returns `true` if the handler would have read the same from it. Reads as much as the handler did and no more. It may be asked again
    /// when the handler has read further.
    async fn is_as(&mut self, read: &BodyDigest) -> Result<bool, Unread> {
        while self.length < read.length {
            if !self.has_more().await? {
                return Ok(false);
            }
            let missing = usize::try_from(read.length - self.length).unwrap_or(usize::MAX);
            let next = self.ahead.split_to(self.ahead.len().min(missing));
            self.hash.update(&next);
            self.length += next.len() as u64;
        }
        let is_same = self.length == read.length && self.hash.clone().finalize().as_slice() == read.digest.as_slice();
        Ok(is_same && !(read.complete && self.has_more().await?))
    }

    async fn has_more(&mut self) -> Result<bool, Unread> {
        while self.ahead.is_empty() && !self.is_over {
            match poll_fn(|cx| Pin::new(&mut self.body).poll_frame(cx)).await {
                Some(frame) => self.ahead = frame.map_err(|_| Unread::Broken)?.into_data().unwrap_or_default(),
                None => self.is_over = true,
            }
        }
        Ok(!self.ahead.is_empty())
    }
}

/// How much the handler has read of its body.
pub(super) enum SoFarRead {
    Streaming(Progress),
    Whole(BodyDigest),
}

impl SoFarRead {
    pub(super) fn digest(&self) -> BodyDigest {
        match self {
            Self::Streaming(read) => read.digest(),
            Self::Whole(digest) => *digest,
        }
    }

    /// Returns `true` if the handler was told that the body broke off.
    pub(super) fn is_broken(&self) -> bool {
        match self {
            Self::Streaming(read) => read.is_broken(),
            Self::Whole(_) => false,
        }
    }
}

/// How much of a streaming body has been read so far; shared with the body itself.
#[derive(Clone, Debug, Default)]
pub(super) struct Progress(Arc<Mutex<Hashed>>);

#[derive(Debug, Default)]
struct Hashed {
    hash: Sha256,
    length: u64,
    complete: bool,
    is_broken: bool,
}

impl Progress {
    fn update(&self, data: &[u8], complete: bool) {
        let mut progress = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        progress.hash.update(data);
        progress.length += data.len() as u64;
        progress.complete |= complete;
    }

    fn break_off(&self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).is_broken = true;
    }

    fn is_broken(&self) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).is_broken
    }

    fn digest(&self) -> BodyDigest {
        let progress = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        BodyDigest {
            length: progress.length,
            digest: B256::from_slice(&progress.hash.clone().finalize()),
            complete: progress.complete,
        }
    }
}

/// Returns the digest of a body that was read whole.
fn digest_of(bytes: &[u8]) -> BodyDigest {
    BodyDigest { length: bytes.len() as u64, digest: B256::from_slice(&Sha256::digest(bytes)), complete: true }
}

/// Reads a body whole, if it has at most `limit` bytes and ends in time.
pub(super) async fn read_whole<B: Body<Data = Bytes>>(
    body: B,
    limit: usize,
    within: Duration,
) -> Result<Bytes, Unread> {
    if body.size_hint().lower() > limit as u64 {
        return Err(Unread::TooLarge);
    }
    match read_up_to(pin!(body), limit, within).await? {
        (all, true) => Ok(all),
        (_, false) => Err(Unread::TooLarge),
    }
}

/// Reads until the end, or until it has read more than `limit`. Also returns `true` if it was the end.
async fn read_up_to<B: Body<Data = Bytes>>(
    mut body: Pin<&mut B>,
    limit: usize,
    within: Duration,
) -> Result<(Bytes, bool), Unread> {
    let read = async {
        let mut first = Bytes::new();
        let mut all = BytesMut::new();
        let mut is_over = true;
        while let Some(frame) = poll_fn(|cx| body.as_mut().poll_frame(cx)).await {
            let Ok(data) = frame.map_err(|_| Unread::Broken)?.into_data() else { continue };
            // Most bodies come in one piece, which then need not be copied.
            if first.is_empty() && all.is_empty() {
                first = data;
            } else {
                if all.is_empty() {
                    // All that is said to come, so that it does not grow by doubling.
                    let more = body.size_hint().upper().unwrap_or(0).min(limit as u64);
                    all.reserve(first.len() + data.len() + usize::try_from(more).unwrap_or(0));
                }
                all.extend_from_slice(&std::mem::take(&mut first));
                all.extend_from_slice(&data);
            }
            if first.len() + all.len() > limit {
                is_over = false;
                break;
            }
        }
        Ok((if all.is_empty() { first } else { all.freeze() }, is_over))
    };
    tokio::time::timeout(within, read).await.unwrap_or(Err(Unread::TooSlow))
}

#[cfg(test)]
mod tests {
    use axum::body::Body as AnyBody;
    use futures_util::stream;
    use http::HeaderMap;

    use super::*;

    fn long(pieces: &'static [&'static str], ahead: &'static str) -> LongBody<AnyBody> {
        let body = AnyBody::from_stream(stream::iter(pieces.iter().map(|piece| Ok::<_, std::io::Error>(*piece))));
        LongBody::new(Upload::new(&HeaderMap::new(), body), Bytes::from_static(ahead.as_bytes()))
    }

    fn digest(text: &str, complete: bool) -> BodyDigest {
        BodyDigest { complete, ..digest_of(text.as_bytes()) }
    }

    async fn is_as(long: &mut LongBody<AnyBody>, text: &str, complete: bool) -> bool {
        long.is_as(&digest(text, complete)).await.unwrap_or_else(|_| panic!("it can be read"))
    }

    #[tokio::test]
    async fn comparison_ends_where_the_handler_stopped_reading() {
        for (text, complete, same) in [
            ("abcdef", true, true),
            ("abcdef", false, true),
            ("abcd", false, true),
            ("abcd", true, false),
            ("abcx", false, false),
            ("abcdefg", false, false),
            ("", false, true),
        ] {
            assert_eq!(is_as(&mut long(&["cd", "", "ef"], "ab"), text, complete).await, same, "{text} {complete}");
        }
    }

    #[tokio::test]
    async fn body_can_be_compared_again_when_more_was_read() {
        let mut body = long(&["cd", "ef"], "ab");
        for (text, complete) in [("abc", false), ("abc", false), ("abcdef", false), ("abcdef", true), ("abcdef", true)]
        {
            assert!(is_as(&mut body, text, complete).await, "{text} {complete}");
        }
    }
}
