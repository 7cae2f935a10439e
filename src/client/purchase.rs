//! Purchases, and the payments that are remembered for them.

use std::{
    collections::VecDeque,
    fmt,
    pin::pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll, Waker},
};

use alloy_primitives::{B256, keccak256};
use bytes::Buf;
use http::{HeaderMap, Method};
use http_body::Body;
use sha2::{Digest, Sha256};

use super::SignedPayment;

/// How many payments with lost answers are remembered. The oldest are forgotten.
const MAX_LOST: usize = 256;
/// How long a payment with a lost answer is remembered at most, in seconds.
const MAX_LOST_AGE: u64 = 15 * 60;
/// How many named purchases that were paid by voucher are remembered. The oldest are forgotten.
const MAX_VOUCHERS: usize = 256;
/// Headers that differ between two attempts of one request, because tracing layers set them.
const PER_ATTEMPT: [&str; 5] = ["traceparent", "tracestate", "baggage", "b3", "x-request-id"];

/// A purchase: something that is paid for once, however often its request is sent.
///
/// Put it into the request's extensions. The first request with it is paid for; every later one presents the same payment, which can move
/// money only once and gets the seller's stored answer. Requests with one purchase are sent one after the other.
///
/// | | signs once |
/// |---|---|
/// | [`Purchase::new`] | for all requests with a clone of it |
/// | [`Purchase::named`] | for all requests with the same key and journal, also after a restart |
/// | without one | for a request and its repetitions while its answer is lost (see below) |
///
/// A payment is presented again for as long as it may have been used. Another one is signed only if the chain shows that the first was
/// never used, which `reconcile` (feature `onchain`) finds out after it has expired.
///
/// ```no_run
/// # #[cfg(all(feature = "reqwest", feature = "local-signer"))]
/// # async fn example(payer: tower_x402::client::Payer) -> Result<(), Box<dyn std::error::Error>> {
/// use tower_x402::client::{PaymentMiddleware, Purchase};
///
/// let client = PaymentMiddleware::new(payer).client(reqwest::Client::builder())?;
/// let order = Purchase::named("order 17");
/// let request = || client.post("https://api.example/evaluate").body("17 * 23 = 391").with_extension(order.clone());
/// let answer = match request().send().await?.text().await {
///     Ok(text) => text,
///     Err(_broken_off) => request().send().await?.text().await?, // costs nothing
/// };
/// # Ok(()) }
/// ```
///
/// # Without a purchase
///
/// A retry layer above the one that pays repeats a request after an error, a 5xx, 408, 425 or 429. So the client remembers a payment that
/// ended so, or whose future was dropped, and presents it with the next identical request that is answered 402: of the same method, URL,
/// headers (but those of tracing) and body. It is remembered until it expires, for 15 minutes at most, and 256 of them. Requests that were
/// answered are never joined: the same request, sent again after its answer or at the same time, is another purchase.
///
/// This does not cover a restart, a body that broke off after the head of its answer, and request bodies that differ each time, as
/// multipart forms do. Give such requests a purchase.
///
/// # By voucher
///
/// A voucher can be presented again while no other request has used its channel since, and by the process that signed it. Otherwise
/// another one is signed, and a named purchase is presented with it under the same payment identifier. A seller that takes identifiers, as
/// those of this crate do, gives the answer again and charges nothing, as long as it remembers it. The journal knows in which channel a named
/// purchase was signed for: it is asked for there, or [refused](super::Refusal::PurchaseOfChannel), and paid by nothing else. Asking is allowed at any
/// price.
///
/// Sellers of this crate remember the answers to the last four requests of a channel, and the journal the channel of its last eight named
/// purchases. So either side may have forgotten a purchase that was paid:
///
/// | remembered by | the purchase is |
/// |---|---|
/// | both | answered again, and charged nothing |
/// | the journal only | bought again in the same channel, at the present price and within the limits, which count a charge that the client only now hears of; a process that still has the first voucher presents that, and gets the seller's refusal |
/// | the seller only | presented as a new one, under the same payment identifier: the seller gives the answer again if it is asked in the channel that paid |
/// | nobody | bought again, by any offer |
///
/// What the first voucher was charged stays in the books.
#[derive(Clone)]
pub struct Purchase(pub(super) Kind);

/// What makes two purchases one.
#[derive(Clone)]
pub(super) enum Kind {
    Named(B256),
    Unnamed(Arc<tokio::sync::Mutex<Option<Kept>>>),
}

impl Purchase {
    /// Creates a purchase that lasts as long as its clones.
    pub fn new() -> Self {
        Self(Kind::Unnamed(Arc::default()))
    }

    /// Creates a purchase with a key of the caller's own, which the [`Journal`](super::Journal) keeps with the payment.
    ///
    /// The key must be unique among the purchases of one journal. The journal keeps its hash, for 16,384 paid purchases; older ones are
    /// forgotten, and their keys buy again.
    pub fn named(key: impl AsRef<[u8]>) -> Self {
        Self(Kind::Named(keccak256(key)))
    }
}

impl Default for Purchase {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for Purchase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.0 {
            Kind::Named(_) => "Purchase(named)",
            Kind::Unnamed(_) => "Purchase(unnamed)",
        })
    }
}

/// What makes two requests the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Identity {
    /// Of method, URL and body.
    pub(super) request: B256,
    headers: B256,
    /// `false` if the body could not be read.
    is_whole: bool,
}

impl Identity {
    /// `body` adds the body to the hash, and returns `false` if it cannot be read now.
    pub(super) fn of(method: &Method, url: &str, headers: &HeaderMap, body: impl FnOnce(&mut Sha256) -> bool) -> Self {
        let mut request = Sha256::new();
        // Neither has a line break.
        for part in [method.as_str(), "\n", url.split('#').next().unwrap_or_default(), "\n"] {
            request.update(part.as_bytes());
        }
        let is_whole = body(&mut request);
        let mut hash = Sha256::new();
        // In their order, which a repetition keeps.
        for (name, value) in headers.iter().filter(|(name, _)| !PER_ATTEMPT.contains(&name.as_str())) {
            hash.update(name.as_str());
            hash.update(b":");
            hash.update((value.len() as u64).to_be_bytes());
            hash.update(value.as_bytes());
        }
        Self { request: digest(request), headers: digest(hash), is_whole }
    }
}

fn digest(hash: Sha256) -> B256 {
    B256::from_slice(&hash.finalize())
}

/// Adds a body that is in memory to a hash. Returns `false` if it is not.
pub(super) fn hash_body<B: Body>(body: B, hash: &mut Sha256) -> bool {
    let mut body = pin!(body);
    loop {
        match body.as_mut().poll_frame(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(Some(Ok(frame))) => {
                let Ok(mut data) = frame.into_data() else { continue };
                while data.has_remaining() {
                    let length = data.chunk().len();
                    hash.update(data.chunk());
                    data.advance(length);
                }
            }
            Poll::Ready(None) => return true,
            Poll::Ready(Some(Err(_))) | Poll::Pending => return false,
        }
    }
}

/// A payment, and the request that it was signed for.
pub(super) struct Kept {
    pub(super) identity: Identity,
    pub(super) payment: SignedPayment,
}

/// The payments that a payer may have to present again.
#[derive(Default)]
pub(super) struct Purchases {
    /// Payments without an answer, the oldest first, and until when they are remembered.
    lost: Mutex<VecDeque<(u64, Kept)>>,
    /// Named purchases that were paid by voucher. The journal has the others.
    vouchers: Mutex<VecDeque<(B256, Kept)>>,
}

impl Purchases {
    pub(super) fn remember(&self, kept: Kept, now: u64) {
        if !kept.identity.is_whole {
            return;
        }
        let mut lost = lock(&self.lost);
        lost.retain(|(until, _)| *until > now);
        if lost.len() >= MAX_LOST {
            lost.pop_front();
        }
        lost.push_back((kept.payment.valid_before().min(now.saturating_add(MAX_LOST_AGE)), kept));
    }

    pub(super) fn take_lost(&self, identity: &Identity, now: u64) -> Option<Kept> {
        let mut lost = lock(&self.lost);
        lost.retain(|(until, _)| *until > now);
        let found = lost.iter().position(|(_, kept)| kept.identity == *identity)?;
        lost.remove(found).map(|(_, kept)| kept)
    }

    pub(super) fn take_voucher(&self, key: B256) -> Option<Kept> {
        let mut vouchers = lock(&self.vouchers);
        let found = vouchers.iter().position(|(known, _)| *known == key)?;
        vouchers.remove(found).map(|(_, kept)| kept)
    }

    pub(super) fn keep_voucher(&self, key: B256, kept: Kept) {
        let mut vouchers = lock(&self.vouchers);
        if vouchers.len() >= MAX_VOUCHERS {
            vouchers.pop_front();
        }
        vouchers.push_back((key, kept));
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
