//! Which payment a request is sent with: the one that was signed for it before, or a new one.

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
use tokio::sync::OwnedMutexGuard;

use super::{Payer, PaymentError, Refusal, SignedPayment, offer::Challenge, payer::Asked};

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
/// those of this crate do, gives the answer again and charges nothing, as long as it remembers it: the last four of a channel. From other
/// sellers it is bought again; what the first voucher was charged stays in the books. The journal knows in which channel a named purchase was
/// signed for, for the last eight of a channel: it is asked for there, or [refused](Refusal::PurchaseOfChannel), and paid by nothing else.
#[derive(Clone)]
pub struct Purchase(Kind);

#[derive(Clone)]
enum Kind {
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
    request: B256,
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
struct Kept {
    identity: Identity,
    payment: SignedPayment,
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
    fn remember(&self, kept: Kept, now: u64) {
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

    fn take_lost(&self, identity: &Identity, now: u64) -> Option<Kept> {
        let mut lost = lock(&self.lost);
        lost.retain(|(until, _)| *until > now);
        let found = lost.iter().position(|(_, kept)| kept.identity == *identity)?;
        lost.remove(found).map(|(_, kept)| kept)
    }

    fn take_voucher(&self, key: B256) -> Option<Kept> {
        let mut vouchers = lock(&self.vouchers);
        let found = vouchers.iter().position(|(known, _)| *known == key)?;
        vouchers.remove(found).map(|(_, kept)| kept)
    }

    fn keep_voucher(&self, key: B256, kept: Kept) {
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

/// The payment of a request that is under way. When this is dropped, also because the caller was cancelled, the payment goes to where the
/// next request of the same purchase finds it.
pub(super) struct HeldPayment<'a> {
    payer: &'a Payer,
    home: Home,
    kept: Option<Kept>,
    /// The seller is done with the request.
    is_answered: bool,
}

/// Where a payment is kept.
enum Home {
    /// Nowhere, unless its answer is lost.
    Lost,
    Purchase(OwnedMutexGuard<Option<Kept>>),
    Journal(B256, #[expect(dead_code, reason = "others wait for it")] OwnedMutexGuard<()>),
}

impl<'a> HeldPayment<'a> {
    /// Returns the place for a payment of a request without a purchase.
    pub(super) const fn none(payer: &'a Payer) -> Self {
        Self { payer, home: Home::Lost, kept: None, is_answered: false }
    }

    /// Waits until no other request uses the purchase, and returns its payment if there is one.
    pub(super) async fn of(payer: &'a Payer, purchase: Purchase, identity: Identity) -> Result<Self, PaymentError> {
        let journal = payer.budget().journal();
        let mut held = Self::none(payer);
        held.is_answered = true;
        match purchase.0 {
            Kind::Unnamed(slot) => {
                let mut slot = slot.lock_owned().await;
                held.kept = slot.take();
                held.home = Home::Purchase(slot);
            }
            Kind::Named(key) => {
                held.home = Home::Journal(key, journal.lock_purchase(key).await);
                held.kept = payer.purchases().take_voucher(key);
                if let Some((entry, is_paid)) = journal.purchase(key) {
                    let request = entry.request.unwrap_or(identity.request);
                    let payment = payer.present_again(entry, is_paid)?;
                    held.kept = Some(Kept { identity: Identity { request, ..identity }, payment });
                }
            }
        }
        let Some(kept) = &mut held.kept else { return Ok(held) };
        if kept.identity.request != identity.request {
            return Err(Refusal::OtherRequest.into());
        }
        let is_void = journal.was_paid(kept.payment.nonce()) == Some(false);
        if is_void || !kept.payment.resume() {
            held.kept = None;
        }
        Ok(held)
    }

    /// Returns `true` if it is known that the payment can never be used.
    fn is_void(&self, kept: &Kept) -> bool {
        self.payer.budget().journal().was_paid(kept.payment.nonce()) == Some(false)
    }

    pub(super) fn payment(&mut self) -> Option<&mut SignedPayment> {
        self.kept.as_mut().map(|kept| &mut kept.payment)
    }

    /// Takes the payment of an identical request whose answer was lost, or signs one.
    pub(super) async fn find_or_sign(
        &mut self,
        challenge: Challenge,
        asked: Asked<'_>,
        identity: Identity,
    ) -> Result<(), PaymentError> {
        let key = match self.home {
            Home::Journal(key, _) => Some(key),
            Home::Lost | Home::Purchase(_) => None,
        };
        if matches!(self.home, Home::Lost)
            && let Some(mut kept) = self.payer.purchases().take_lost(&identity, self.payer.now())
            && !self.is_void(&kept)
            && kept.payment.resume()
        {
            self.kept = Some(kept);
            return Ok(());
        }
        let asked = Asked { purchase: key.map(|key| (key, identity.request)), ..asked };
        let payment = self.payer.sign(challenge, asked).await?;
        self.kept = Some(Kept { identity, payment });
        Ok(())
    }

    /// Notes how the request ended: with an answer, or so that it may be repeated.
    pub(super) const fn set_answered(&mut self, answered: bool) {
        self.is_answered = answered;
    }

    /// Forgets a payment that cannot be used any more, or that needs not be.
    pub(super) fn discard(&mut self) {
        self.kept = None;
    }
}

impl Drop for HeldPayment<'_> {
    fn drop(&mut self) {
        let Some(mut kept) = self.kept.take() else { return };
        kept.payment.pause();
        match &mut self.home {
            Home::Lost if self.is_answered || !kept.payment.was_sent() => {}
            Home::Lost => self.payer.purchases().remember(kept, self.payer.now()),
            Home::Purchase(slot) => **slot = Some(kept),
            Home::Journal(key, _) if kept.payment.is_by_voucher() => self.payer.purchases().keep_voucher(*key, kept),
            Home::Journal(..) => {}
        }
    }
}
