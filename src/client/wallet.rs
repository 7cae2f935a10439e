//! What signing a payment takes, by any scheme: the key, the budget, and the clock.

use std::{
    sync::Arc,
    time::{Duration, UNIX_EPOCH},
};

use alloy_primitives::{Address, B256};
use http::{HeaderMap, Method, header};
use url::Url;

use super::{Budget, ChannelPolicy, PaymentError, PermitPolicy, Refusal};
use crate::{
    clock::{Clock, Nonces},
    eip3009::AuthorizationSigner,
};

/// The key, the budget and the settings that payments are signed with.
pub(super) struct Wallet {
    pub(super) signer: Box<dyn AuthorizationSigner>,
    pub(super) budget: Budget,
    /// `None` if it opens no channels.
    pub(super) channels: Option<ChannelPolicy>,
    pub(super) permits: PermitPolicy,
    pub(super) max_window: Duration,
    pub(super) clock: Arc<dyn Clock>,
    pub(super) nonces: Arc<dyn Nonces>,
}

impl Wallet {
    pub(super) fn address(&self) -> Address {
        self.signer.address()
    }

    pub(super) fn now(&self) -> u64 {
        self.clock.now()
    }

    /// Returns for how long an authorization is valid if the server asks for this, in seconds.
    pub(super) fn window(&self, max_timeout_seconds: u64) -> u64 {
        max_timeout_seconds.min(self.max_window.as_secs().max(1))
    }
}

debug_fields!(Wallet |this| { address: this.address(), budget: this.budget });

/// The request that was answered 402.
#[derive(Clone, Copy)]
pub(super) struct Asked<'a> {
    pub(super) method: &'a Method,
    pub(super) url: &'a Url,
    /// When the 402 was made by the seller's clock, in seconds since the Unix epoch.
    pub(super) date: Option<u64>,
    /// The hashes of the purchase's key and of the request, if the caller named the purchase.
    pub(super) purchase: Option<(B256, B256)>,
}

/// The window of validity of something that is signed, which begins when the signature is there.
pub(super) struct Validity {
    window: u64,
    /// How far the window is off its length when the signature is there, at most.
    tolerance: u64,
    /// How long the signer takes, as far as is known.
    lead: u64,
    begun: u64,
    valid_before: u64,
    signatures: u32,
}

impl Validity {
    /// How often a signer is asked at most.
    const MAX_SIGNATURES: u32 = 3;

    pub(super) const fn new(window: u64) -> Self {
        let quarter = window / 4;
        let tolerance = if quarter < 15 { quarter } else { 15 };
        Self { window, tolerance, lead: 0, begun: 0, valid_before: 0, signatures: 0 }
    }

    /// Returns when the window ends for something that is signed from `now` on.
    pub(super) const fn begin(&mut self, now: u64) -> u64 {
        self.begun = now;
        self.signatures += 1;
        self.valid_before = now.saturating_add(self.lead).saturating_add(self.window);
        self.valid_before
    }

    /// Returns `true` if the window is as long as it should be now that the signature is there; else it must be signed again.
    pub(super) fn is_good(&mut self, now: u64) -> Result<bool, PaymentError> {
        let took = now.saturating_sub(self.begun);
        if self.valid_before.saturating_sub(now).abs_diff(self.window) <= self.tolerance {
            return Ok(true);
        }
        self.lead = took;
        if self.signatures < Self::MAX_SIGNATURES {
            return Ok(false);
        }
        let (took, window) = (Duration::from_secs(took), Duration::from_secs(self.window));
        Err(PaymentError::SlowSigner { took, window })
    }
}

/// How far this clock may be ahead of the seller's, in seconds. Sellers refuse authorizations for longer than they offered.
const MAX_AHEAD: u64 = 30;
/// How much time an authorization must have left by the seller's clock, in seconds, unless it is offered for less than twice as long.
const MIN_LEFT: u64 = 20;
/// A seller's clock that is further off is taken to be wrong itself.
const MAX_BELIEVED: u64 = 24 * 60 * 60;

/// Compares this clock with that of the seller, in whose time an authorization must be valid.
pub(super) fn check_clock(now: u64, date: Option<u64>, window: u64) -> Result<(), Refusal> {
    let Some(date) = date.filter(|date| date.abs_diff(now) <= MAX_BELIEVED) else { return Ok(()) };
    let (ahead, behind) = (now.saturating_sub(date), date.saturating_sub(now));
    if ahead > MAX_AHEAD {
        return Err(Refusal::ClockAhead { by: Duration::from_secs(ahead) });
    }
    if behind > window.saturating_sub(MIN_LEFT.min(window / 2)) {
        return Err(Refusal::ClockBehind { by: Duration::from_secs(behind) });
    }
    Ok(())
}

/// Returns the time of an answer by the clock of who made it, unless it comes from a cache.
pub(super) fn date_of(headers: &HeaderMap) -> Option<u64> {
    let date = headers.get(header::DATE).filter(|_| !headers.contains_key(header::AGE))?.to_str().ok()?;
    Some(httpdate::parse_http_date(date).ok()?.duration_since(UNIX_EPOCH).ok()?.as_secs())
}
