//! A request body that is read only if it must be.

use std::{future::poll_fn, pin::Pin, sync::Arc};

use bytes::Bytes;
use http_body::Body;
use sha2::{Digest, Sha256};

use super::{
    answer::Answer,
    body::{ReadError, read_up_to},
    config::Config,
    job::Work,
    request_body::digest_of,
    sale,
};
use crate::ledger::{BodyDigest, Record};

/// The body of a request with a payment, as far as it had to be read to know what the payment is for.
pub(super) struct Unread<B> {
    config: Arc<Config>,
    content: Content<B>,
}

enum Content<B> {
    Untouched(B),
    Whole(Bytes),
    Long(Box<Long<B>>),
}

impl<B: Body<Data = Bytes>> Unread<B> {
    pub(super) fn new(work: Work<B>, config: Arc<Config>) -> Self {
        let content = match work {
            Work::Streaming(body) => Content::Untouched(body),
            Work::Whole(bytes) => Content::Whole(bytes),
        };
        Self { config, content }
    }

    /// What was read, if it was.
    pub(super) fn digest(&self) -> Option<BodyDigest> {
        match &self.content {
            Content::Whole(bytes) => Some(digest_of(bytes)),
            Content::Untouched(_) | Content::Long(_) => None,
        }
    }

    /// Reads as much as is kept. What says that it is longer is not touched.
    pub(super) async fn read(&mut self) -> Result<(), Answer> {
        let limits = &self.config.limits;
        self.content = match std::mem::replace(&mut self.content, Content::Whole(Bytes::new())) {
            Content::Untouched(body) if body.size_hint().lower() <= limits.request_body as u64 => {
                let mut body = Box::pin(body);
                let read = read_up_to(body.as_mut(), limits.request_body, limits.body_deadline).await;
                match read.map_err(|error| sale::unread(&error))? {
                    (all, true) => Content::Whole(all),
                    (ahead, false) => Content::Long(Box::new(Long::of(body, ahead))),
                }
            }
            known => known,
        };
        Ok(())
    }

    /// Reads all of it, or refuses it as too long.
    pub(super) async fn whole(&mut self) -> Result<(), Answer> {
        self.read().await?;
        match &self.content {
            Content::Whole(_) => Ok(()),
            Content::Untouched(_) | Content::Long(_) => Err(sale::unread(&ReadError::TooLarge)),
        }
    }

    /// Whether a handler can have it: not what was read in part and was too much to be kept.
    pub(super) const fn is_workable(&self) -> bool {
        matches!(self.content, Content::Whole(_) | Content::Untouched(_))
    }

    /// Refuses another body than the one first presented.
    pub(super) async fn compare(&mut self, record: &Record) -> Result<(), Answer> {
        let Some(read) = &record.body else { return Ok(()) };
        // What says that it is longer or shorter need not come.
        if let Content::Untouched(body) = &self.content {
            let says = body.size_hint();
            if (read.complete && says.lower() > read.length) || says.upper().is_some_and(|most| most < read.length) {
                return Err(sale::other_request());
            }
        }
        self.read().await?;
        if let Content::Untouched(_) = self.content
            && let Content::Untouched(body) = std::mem::replace(&mut self.content, Content::Whole(Bytes::new()))
        {
            self.content = Content::Long(Box::new(Long::of(Box::pin(body), Bytes::new())));
        }
        let is_same = match &mut self.content {
            Content::Long(long) => {
                let limits = &self.config.limits;
                // What was long had as much time as the handler.
                let within = match read.length > limits.request_body as u64 {
                    true => limits.body_deadline.max(limits.handler_deadline),
                    false => limits.body_deadline,
                };
                let compared = tokio::time::timeout(within, long.is_as(read)).await;
                compared.unwrap_or(Err(ReadError::TooSlow)).map_err(|error| sale::unread(&error))?
            }
            Content::Whole(whole) => read.matches(whole),
            Content::Untouched(_) => false,
        };
        if is_same { Ok(()) } else { Err(sale::other_request()) }
    }

    /// The body for the work, if it is [workable](Self::is_workable).
    pub(super) fn into_work(self) -> Work<B> {
        match self.content {
            Content::Untouched(body) => Work::Streaming(body),
            Content::Whole(bytes) => Work::Whole(bytes),
            Content::Long(long) => Work::Whole(long.ahead),
        }
    }
}

/// A body that is longer than what is kept: it is compared as it passes, and nothing of it is left.
struct Long<B> {
    body: Pin<Box<B>>,
    is_over: bool,
    /// What was read and not compared yet.
    ahead: Bytes,
    hash: Sha256,
    /// How much was hashed.
    length: u64,
}

impl<B: Body<Data = Bytes>> Long<B> {
    fn of(body: Pin<Box<B>>, ahead: Bytes) -> Self {
        Self { body, is_over: false, ahead, hash: Sha256::new(), length: 0 }
    }

    /// Whether the handler would have read the same from it. Reads as much as the handler did and no more. It may be asked again
    /// when the handler has read further.
    async fn is_as(&mut self, read: &BodyDigest) -> Result<bool, ReadError> {
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

    async fn has_more(&mut self) -> Result<bool, ReadError> {
        while self.ahead.is_empty() && !self.is_over {
            match poll_fn(|cx| self.body.as_mut().poll_frame(cx)).await {
                Some(frame) => self.ahead = frame.map_err(|_| ReadError::Broken)?.into_data().unwrap_or_default(),
                None => self.is_over = true,
            }
        }
        Ok(!self.ahead.is_empty())
    }
}

#[cfg(test)]
mod tests {
    use axum::body::Body as AnyBody;
    use futures_util::stream;

    use super::*;

    fn long(pieces: &'static [&'static str], ahead: &'static str) -> Long<AnyBody> {
        let body = AnyBody::from_stream(stream::iter(pieces.iter().map(|piece| Ok::<_, std::io::Error>(*piece))));
        Long::of(Box::pin(body), Bytes::from_static(ahead.as_bytes()))
    }

    fn digest(text: &str, complete: bool) -> BodyDigest {
        BodyDigest { complete, ..digest_of(text.as_bytes()) }
    }

    async fn is_as(long: &mut Long<AnyBody>, text: &str, complete: bool) -> bool {
        long.is_as(&digest(text, complete)).await.unwrap_or_else(|_| panic!("it can be read"))
    }

    #[tokio::test]
    async fn as_much_is_compared_as_was_read() {
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
    async fn it_can_be_compared_again_when_more_was_read() {
        let mut body = long(&["cd", "ef"], "ab");
        for (text, complete) in [("abc", false), ("abc", false), ("abcdef", false), ("abcdef", true), ("abcdef", true)]
        {
            assert!(is_as(&mut body, text, complete).await, "{text} {complete}");
        }
    }
}
