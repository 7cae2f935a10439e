//! The answers that the layer writes itself: the 402, problems, receipts and CORS headers.

use std::{sync::Arc, time::Duration};

use alloy_primitives::{B256, hex};
use bytes::Bytes;
use http::{
    HeaderMap, HeaderName, HeaderValue, Response, StatusCode,
    header::{
        ACCESS_CONTROL_ALLOW_HEADERS, ACCESS_CONTROL_ALLOW_METHODS, ACCESS_CONTROL_ALLOW_ORIGIN,
        ACCESS_CONTROL_EXPOSE_HEADERS, ACCESS_CONTROL_REQUEST_HEADERS, ACCESS_CONTROL_REQUEST_METHOD, CACHE_CONTROL,
        CONTENT_LENGTH, CONTENT_TYPE, RETRY_AFTER, TRANSFER_ENCODING, VARY,
    },
    request,
    response::Parts,
};
use serde::Serialize;
use serde_json::{Map, Value};

use super::{
    builder::Config,
    offer::{Offer, PriceError, RenderedOffers},
    payment_header::{PAYMENT_SIGNATURE, Refusal, X_PAYMENT},
    request_body::ReadError,
    resource_url::Target,
    response::{ResponseBody, Unfinished},
    vouchers::Statement,
};
use crate::{
    facilitator::{FacilitatorError, VerifyError, channels::Executed},
    ledger::{LedgerError, Record, channels::ChannelRecord},
    payment::{PaymentKey, Rejection},
    protocol::{Reason, SettlementResponse, Verbatim, Version, encode_header, header_name, payment_status, v1},
    telemetry::{self, RequestOutcome},
    vouchers::{ChannelState, SettlementExtra, VoucherState},
};

const PAYMENT_REQUIRED: HeaderName = HeaderName::from_static(header_name::PAYMENT_REQUIRED);
const PAYMENT_RESPONSE: HeaderName = HeaderName::from_static(header_name::PAYMENT_RESPONSE);
const X_PAYMENT_RESPONSE: HeaderName = HeaderName::from_static(header_name::X_PAYMENT_RESPONSE);
const EXPOSED: HeaderValue =
    HeaderValue::from_static("PAYMENT-REQUIRED, PAYMENT-RESPONSE, X-PAYMENT-RESPONSE, Retry-After");
const JSON: HeaderValue = HeaderValue::from_static("application/json");
const ANY: HeaderValue = HeaderValue::from_static("*");
const NO_STORE: HeaderValue = HeaderValue::from_static("no-store");

/// When a client should come back to see what became of its payment.
const RETRY_SOON: Duration = Duration::from_secs(1);
/// When it should come back to a ledger that failed.
const RETRY_LEDGER: Duration = Duration::from_secs(5);

/// An answer that is being written. Boxed, because it is the error of most functions here and rarely made.
#[derive(Debug)]
pub(super) struct Answer(Box<Content>);

#[derive(Debug)]
struct Content {
    status: StatusCode,
    headers: HeaderMap,
    body: Bytes,
    ended: RequestOutcome,
}

#[derive(Serialize)]
struct Problem<'a> {
    error: &'a str,
    detail: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    transaction: Option<B256>,
}

impl Answer {
    /// Returns an answer with a status, a code and a sentence.
    pub(super) fn problem(status: StatusCode, error: &str, detail: &str, transaction: Option<B256>) -> Self {
        let body = serde_json::to_vec(&Problem { error, detail, transaction }).unwrap_or_default();
        let ended = match status {
            StatusCode::CONFLICT => RequestOutcome::Conflict,
            StatusCode::SERVICE_UNAVAILABLE => RequestOutcome::Unavailable,
            status if status.is_client_error() => RequestOutcome::Malformed,
            _ => RequestOutcome::Failed,
        };
        Self(Box::new(Content { status, headers: HeaderMap::new(), body: body.into(), ended }))
    }

    /// Returns the offer, with 402 or, for a payment that cannot be read, 400.
    pub(super) fn payment_required(status: StatusCode, offers: Option<RenderedOffers>) -> Self {
        // Only a price or a description that does not fit in a header leaves nothing to say.
        let Some(RenderedOffers { header, body }) = offers else {
            return Self::problem(
                StatusCode::INTERNAL_SERVER_ERROR,
                "internal_error",
                "the offer cannot be written",
                None,
            );
        };
        let headers = HeaderMap::from_iter([(PAYMENT_REQUIRED, header)]);
        Self(Box::new(Content { status, headers, body, ended: RequestOutcome::Unpaid }))
    }

    /// Replaces the body by a page for a person, and adds the headers that go with it.
    pub(super) fn shown_as(mut self, headers: HeaderMap, html: String) -> Self {
        self.0.headers.extend(headers);
        self.0.body = html.into();
        self
    }

    /// Returns an answer to a request for a refund that was made.
    pub(super) fn done(body: &Value) -> Self {
        let body = body.to_string().into();
        Self(Box::new(Content { status: StatusCode::OK, headers: HeaderMap::new(), body, ended: RequestOutcome::Paid }))
    }

    /// Asks to repeat the request soon.
    pub(super) fn retry_soon(self) -> Self {
        self.retry_after(RETRY_SOON)
    }

    /// Sets how it is counted, where that does not follow from its status.
    fn counted(mut self, ended: RequestOutcome) -> Self {
        self.0.ended = ended;
        self
    }

    /// Adds the receipt of a payment, whether it was settled or not.
    fn with_settlement(self, settlement: &SettlementResponse, version: Version) -> Self {
        self.with_receipt(Receipt::of(settlement, version))
    }

    /// Adds a receipt, if there is one.
    pub(super) fn with_receipt(mut self, receipt: Option<Receipt>) -> Self {
        if let Some(receipt) = receipt {
            receipt.attach(&mut self.0.headers);
        }
        self
    }

    /// Returns the status.
    fn status(&self) -> StatusCode {
        self.0.status
    }

    /// Adds when to try again.
    pub(super) fn retry_after(mut self, delay: Duration) -> Self {
        self.0.headers.insert(RETRY_AFTER, delay.as_secs().max(1).into());
        self
    }

    /// Returns the response, counted as one to a request.
    pub(super) fn into_response<B>(self) -> Response<ResponseBody<B>> {
        self.into_counted(telemetry::request)
    }

    /// Returns the response to a payment by voucher, counted as such.
    pub(super) fn into_voucher_response<B>(self) -> Response<ResponseBody<B>> {
        self.into_counted(telemetry::voucher_request)
    }

    /// Returns the response, after `count` was told how the request ended.
    pub(super) fn into_counted<B>(self, count: fn(RequestOutcome)) -> Response<ResponseBody<B>> {
        let Content { status, headers, body, ended } = *self.0;
        count(ended);
        let mut response = Response::new(ResponseBody::own(body));
        *response.status_mut() = status;
        *response.headers_mut() = headers;
        response.headers_mut().entry(CONTENT_TYPE).or_insert(JSON);
        response.headers_mut().insert(CACHE_CONTROL, NO_STORE);
        response
    }
}

/// One request: the offers made to it, and all that its answers are written from.
#[derive(Clone)]
pub(super) struct RequestContext {
    pub(super) config: Arc<Config>,
    pub(super) offers: Arc<[Offer]>,
    /// Where the request was sent.
    pub(super) target: Target<'static>,
    /// The version of the protocol in which the payment came.
    pub(super) version: Version,
    /// The payer's address as the payer writes it.
    pub(super) payer: String,
    /// The request's headers, which its response may depend on.
    pub(super) asked: HeaderMap,
}

impl RequestContext {
    pub(super) fn new(config: Arc<Config>, offers: Arc<[Offer]>, parts: &request::Parts) -> Self {
        let target = config.catalogue.target(&parts.uri, &parts.headers).into_owned();
        let asked = parts.headers.clone();
        Self { config, offers, target, version: Version::default(), payer: String::new(), asked }
    }

    /// The 402 without an error.
    pub(super) fn payment_required(&self) -> Answer {
        Answer::payment_required(
            StatusCode::PAYMENT_REQUIRED,
            self.config.catalogue.render(&self.target, &self.offers, None),
        )
    }

    /// The offer again, to a payment of a scheme that is not on offer.
    pub(super) fn not_exact(&self) -> Answer {
        let detail = "only vouchers of payment channels (batch-settlement) are taken here";
        self.reject(StatusCode::PAYMENT_REQUIRED, &Rejection::new(Reason::UnsupportedScheme, detail))
    }

    /// The offer again, with what is wrong with the payment.
    pub(super) fn reject(&self, status: StatusCode, rejection: &Rejection) -> Answer {
        let error = (rejection.reason.as_str(), rejection.detail.as_str());
        let ended =
            if status == StatusCode::BAD_REQUEST { RequestOutcome::Malformed } else { RequestOutcome::Rejected };
        Answer::payment_required(status, self.config.catalogue.render(&self.target, &self.offers, Some(error)))
            .counted(ended)
    }

    pub(super) fn refuse(&self, refusal: &Refusal) -> Answer {
        match refusal {
            Refusal::Invalid(status, rejection) => self.reject(*status, rejection),
            Refusal::Ledger(error) => ledger_failed(error),
        }
    }

    /// The offer again, with what is wrong with the voucher. Where it is only for another amount than it should be, the offer that was
    /// accepted says how the channel stands, so that the payer can sign another one.
    pub(super) fn refuse_voucher(
        &self,
        status: StatusCode,
        code: &str,
        detail: &str,
        corrective: Option<(usize, &ChannelRecord)>,
    ) -> Answer {
        let (catalogue, error) = (&self.config.catalogue, (code, detail));
        let offers = match corrective {
            None => catalogue.render(&self.target, &self.offers, Some(error)),
            Some((offer, record)) => {
                let more = corrective_fields(record);
                catalogue.render_corrective(&self.target, &self.offers, error, (offer, more))
            }
        };
        let ended =
            if status == StatusCode::BAD_REQUEST { RequestOutcome::Malformed } else { RequestOutcome::Rejected };
        Answer::payment_required(status, offers).counted(ended)
    }

    /// What a request cost that was paid with a voucher, and how its channel stands. `moved` is a deposit or a refund.
    pub(super) fn voucher_receipt(&self, statement: &Statement<'_>, moved: Option<&Executed>) -> Option<Receipt> {
        let state =
            ChannelState { charged_cumulative_amount: Some(statement.total), ..statement.record.observed.state };
        let extra = SettlementExtra { charged_amount: statement.charged, channel_state: Some(state) };
        let settlement = SettlementResponse {
            success: true,
            error_reason: None,
            payer: Some(self.payer.clone()),
            transaction: moved.map_or(String::new(), |moved| hex::encode_prefixed(moved.transaction)),
            network: statement.record.network.to_string(),
            amount: Some(moved.map_or(String::new(), |moved| moved.amount.to_string())),
            extensions: None,
            extra: Some(extra.to_map()),
        };
        Receipt::of(&settlement, Version::V2)
    }

    pub(super) fn not_verified(&self, error: &VerifyError) -> Answer {
        match error {
            VerifyError::Invalid(rejection) => self.reject(StatusCode::PAYMENT_REQUIRED, rejection),
            VerifyError::Unavailable(error) => unavailable(error),
        }
    }

    pub(super) fn not_covered(&self) -> Answer {
        let detail = "the payer's balance does not cover this payment and what else it has in flight";
        self.reject(StatusCode::PAYMENT_REQUIRED, &Rejection::new(Reason::InsufficientFunds, detail))
    }

    /// Settlement did not happen: the offer again, and how it failed.
    pub(super) fn not_settled(
        &self,
        record: &Record,
        reason: Reason,
        detail: &str,
        transaction: Option<B256>,
    ) -> Answer {
        self.reject(StatusCode::PAYMENT_REQUIRED, &Rejection::new(reason.clone(), detail))
            .with_settlement(&settlement_of(record, &self.payer, Err((reason, transaction))), self.version)
    }

    /// How the payment for a response was or will be settled; `None` if it is not.
    pub(super) fn receipt(&self, record: &Record) -> Option<Receipt> {
        let settlement = match record.settlement.paid_by() {
            Some(transaction) => settlement_of(record, &self.payer, Ok(transaction)),
            None => settled_later(record, &self.payer, self.config.settings.status_url.as_deref())?,
        };
        Receipt::of(&settlement, self.version)
    }

    /// The work was begun and failed. A client that paid for it before is told so: to pay anew would be to pay twice.
    pub(super) fn unfinished(&self, why: Unfinished, record: &Record) -> Answer {
        let Unfinished(status, error, what) = why;
        match record.settlement.paid_by() {
            Some(transaction) => self.paid_but_unfinished(record, transaction, status, error, what),
            None => unfinished(why),
        }
    }

    /// The ledger did not take a step of work that was verified, and paid for if the flow is so. Unless the payment `is_given_back`, the
    /// ledger may have taken the step all the same, and have what was produced charged for.
    pub(super) fn unrecorded(&self, error: &LedgerError, record: &Record, is_given_back: bool) -> Answer {
        let answer = ledger_failed(error);
        if answer.status() != StatusCode::SERVICE_UNAVAILABLE {
            return answer;
        }
        match record.settlement.paid_by() {
            Some(transaction) => {
                let (status, what) = (StatusCode::SERVICE_UNAVAILABLE, "the work could not be recorded");
                self.paid_but_unfinished(record, transaction, status, "ledger_unavailable", what)
                    .retry_after(RETRY_LEDGER)
            }
            None if is_given_back => answer,
            None => self.pending(record, None),
        }
    }

    fn paid_but_unfinished(
        &self,
        record: &Record,
        transaction: B256,
        status: StatusCode,
        error: &str,
        what: &str,
    ) -> Answer {
        let detail = format!("{what}; it is paid for, and presenting the same payment again charges nothing more");
        Answer::problem(status, error, &detail, Some(transaction))
            .with_settlement(&settlement_of(record, &self.payer, Ok(transaction)), self.version)
    }

    /// The payment was answered before, and the response is no longer kept, or not for this request.
    pub(super) fn answered_before(&self, record: &Record) -> Answer {
        let detail = "this payment was used and its response is no longer available";
        Answer::problem(StatusCode::CONFLICT, "payment_already_used", detail, record.settlement.paid_by())
            .with_receipt(self.receipt(record))
    }

    /// The work failed as often as it may be tried.
    pub(super) fn exhausted(&self, record: &Record) -> Answer {
        exhausted(record.settlement.paid_by()).with_receipt(self.receipt(record))
    }

    /// It is not known whether the payment was settled.
    pub(super) fn pending(&self, record: &Record, transaction: Option<B256>) -> Answer {
        let transaction = transaction.or_else(|| record.transactions.last().copied());
        let detail = "the payment's outcome is not known yet; repeat the same request with the same payment";
        let settlement = settlement_of(record, &self.payer, Err((Reason::SettlementPending, transaction)));
        Answer::problem(StatusCode::SERVICE_UNAVAILABLE, Reason::SettlementPending.as_str(), detail, transaction)
            .with_settlement(&settlement, self.version)
            .retry_after(RETRY_SOON)
            .counted(RequestOutcome::Pending)
    }
}

/// The work was begun and failed, and nobody has paid for it.
pub(super) fn unfinished(Unfinished(status, error, what): Unfinished) -> Answer {
    Answer::problem(status, error, &format!("{what}; nothing was charged for it"), None)
}

/// The work failed as often as it may be tried. `transaction` paid for it, if anything did.
pub(super) fn exhausted(transaction: Option<B256>) -> Answer {
    let detail = match transaction {
        Some(_) => "paid, but the work failed every time it was tried; contact the seller",
        None => "the work failed every time it was tried; nothing was charged",
    };
    Answer::problem(StatusCode::CONFLICT, "attempts_exhausted", detail, transaction)
}

/// The response that is kept was made for other values of the headers with these names, and may be of no use to the client.
pub(super) fn other_headers(names: &str) -> Answer {
    let detail = format!(
        "the response to this payment depends on headers of the request ({names}): repeat it with the values of the request that was \
         answered. Nothing was charged by this request"
    );
    let mut answer = Answer::problem(StatusCode::CONFLICT, "response_varies", &detail, None);
    if let Ok(names) = names.try_into() {
        answer.0.headers.insert(VARY, names);
    }
    answer
}

/// The payment was presented with another request before.
pub(super) fn other_request() -> Answer {
    let detail = "this payment was presented with another request; it pays for that one only";
    Answer::problem(StatusCode::CONFLICT, "payment_already_used", detail, None)
}

/// The payment, or its identifier, was presented with another one before.
pub(super) fn other_id() -> Answer {
    let detail = "a payment identifier stands for one request; this one, or this payment, was presented before with another. \
                  Nothing was charged by this request";
    Answer::problem(StatusCode::CONFLICT, "payment_identifier_conflict", detail, None)
}

/// The work is done, but its response is gone before it was paid for: charging for it now would charge for nothing.
pub(super) fn not_kept() -> Answer {
    let detail = "the response to this payment is no longer available, so the payment is not settled; make another one";
    Answer::problem(StatusCode::CONFLICT, "response_not_kept", detail, None)
}

/// The request cannot be priced.
pub(super) fn not_priced(error: &PriceError) -> Answer {
    Answer::problem(error.status(), "not_priced", error.message(), None)
}

/// Another worker has the payment.
pub(super) fn in_progress() -> Answer {
    let detail = "a request with this payment is still being worked on; repeat it";
    Answer::problem(StatusCode::CONFLICT, "payment_in_progress", detail, None).retry_after(RETRY_SOON)
}

/// The facilitator could not be asked.
pub(super) fn unavailable(error: &FacilitatorError) -> Answer {
    tracing::warn!(%error, "payments cannot be verified or settled");
    let detail = "payments cannot be verified or settled now; nothing was charged by this request";
    Answer::problem(StatusCode::SERVICE_UNAVAILABLE, "facilitator_unavailable", detail, None)
        .retry_after(error.retry_after())
}

/// Nothing more is worked on at once.
pub(super) fn overloaded() -> Answer {
    let detail = "too many payments are being worked on; nothing was charged";
    Answer::problem(StatusCode::SERVICE_UNAVAILABLE, "busy", detail, None).retry_after(RETRY_SOON)
}

/// The ledger did not do what it was asked.
pub(super) fn ledger_failed(error: &LedgerError) -> Answer {
    match error {
        LedgerError::LeaseLost | LedgerError::InvalidTransition(_) => in_progress(),
        LedgerError::IdTaken { .. } => other_id(),
        LedgerError::Full => overloaded(),
        error => {
            tracing::error!(error = error as &dyn std::error::Error, "the ledger failed");
            let detail = "the payment could not be recorded; nothing was charged by this request";
            Answer::problem(StatusCode::SERVICE_UNAVAILABLE, "ledger_unavailable", detail, None)
                .retry_after(RETRY_LEDGER)
        }
    }
}

/// The request body was not read.
pub(super) fn unread(error: &ReadError) -> Answer {
    let (status, code, detail) = match error {
        ReadError::TooLarge => {
            (StatusCode::PAYLOAD_TOO_LARGE, "body_too_large", "the request body is larger than a paid request may be")
        }
        ReadError::TooSlow => (StatusCode::REQUEST_TIMEOUT, "body_too_slow", "the request body did not arrive in time"),
        ReadError::Broken => (StatusCode::BAD_REQUEST, "body_broken", "the request body broke off"),
    };
    Answer::problem(status, code, detail, None)
}

/// The work panicked. A client that paid before is told so: to pay anew would be to pay twice.
pub(super) fn panicked(record: Option<&Record>, payer: &str, version: Version) -> Answer {
    let (status, code) = (StatusCode::INTERNAL_SERVER_ERROR, "internal_error");
    match record.and_then(|record| record.settlement.paid_by().map(|transaction| (record, transaction))) {
        Some((record, transaction)) => {
            let detail = "the work failed; it is paid for, and presenting the same payment again charges nothing more";
            Answer::problem(status, code, detail, Some(transaction))
                .with_settlement(&settlement_of(record, payer, Ok(transaction)), version)
        }
        None => {
            let detail = "the work failed; however often the same payment is presented, it is charged once at most";
            Answer::problem(status, code, detail, None)
        }
    }
}

/// `PAYMENT-RESPONSE`, or what v1 calls so.
#[derive(Debug)]
pub(super) struct Receipt {
    name: HeaderName,
    value: HeaderValue,
}

impl Receipt {
    /// Returns `None` only for what cannot be written in a header.
    fn of(settlement: &SettlementResponse, version: Version) -> Option<Self> {
        let (name, value) = match version {
            Version::V1 => (X_PAYMENT_RESPONSE, encode_header(&v1::SettlementResponseV1::from(settlement))),
            Version::V2 => (PAYMENT_RESPONSE, encode_header(settlement)),
        };
        Some(Self { name, value: value.ok()?.try_into().ok()? })
    }

    fn attach(self, headers: &mut HeaderMap) {
        headers.insert(self.name, self.value);
    }
}

/// Returns what a corrective 402 says of a channel.
fn corrective_fields(record: &ChannelRecord) -> Map<String, Value> {
    let voucher = record.voucher.as_ref().map(|voucher| VoucherState {
        signed_max_claimable: voucher.max_claimable_amount,
        signature: voucher.signature,
    });
    let mut fields = Map::new();
    let mut add = |name: &str, value: Result<Value, serde_json::Error>| {
        if let Ok(value) = value {
            fields.insert(name.to_owned(), value);
        }
    };
    add("channelState", serde_json::to_value(record.state()));
    if let Some(voucher) = voucher {
        add("voucherState", serde_json::to_value(voucher));
    }
    fields
}

/// Returns a settlement as the client is told of it.
fn settlement_of(record: &Record, payer: &str, result: Result<B256, (Reason, Option<B256>)>) -> SettlementResponse {
    let offer = record.terms.offer();
    let (success, error_reason, transaction) = match result {
        Ok(transaction) => (true, None, Some(transaction)),
        Err((reason, transaction)) => (false, Some(reason), transaction),
    };
    SettlementResponse {
        success,
        error_reason,
        payer: Some(payer.to_owned()),
        transaction: transaction.map_or(String::new(), hex::encode_prefixed),
        network: offer.network().to_string(),
        amount: success.then(|| offer.amount.to_string()),
        extensions: None,
        extra: None,
    }
}

/// Returns what the client is told of a payment that is settled after it has its response: success without a transaction, and the
/// payment's name. Returns `None` where it owes nothing yet.
fn settled_later(record: &Record, payer: &str, status_url: Option<&str>) -> Option<SettlementResponse> {
    let PaymentKey { network, asset, payer: from, nonce } = record.key;
    let pending = || payment_status::pending(network, asset, from, nonce, status_url);
    let extensions = record.deferred.then(|| Verbatim::of(&pending()).ok())?;
    Some(SettlementResponse { transaction: String::new(), extensions, ..settlement_of(record, payer, Ok(B256::ZERO)) })
}

/// Adds the receipt to a response that was paid for, and keeps it out of shared caches.
pub(super) fn mark_paid(parts: &mut Parts, receipt: Receipt) {
    receipt.attach(&mut parts.headers);
    keep_private(&mut parts.headers);
}

/// Keeps a paid response out of shared caches.
fn keep_private(headers: &mut HeaderMap) {
    // Most handlers say nothing of caches.
    if !headers.keys().any(speaks_to_caches) {
        headers.insert(CACHE_CONTROL, HeaderValue::from_static("private"));
        return;
    }
    let kept: Vec<String> = headers
        .get_all(CACHE_CONTROL)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .map(str::trim)
        .filter(|directive| {
            let name = directive.split('=').next().unwrap_or_default().trim();
            !["", "public", "private", "s-maxage"].iter().any(|removed| name.eq_ignore_ascii_case(removed))
        })
        .map(str::to_owned)
        .collect();
    let targeted: Vec<HeaderName> =
        headers.keys().filter(|name| **name != CACHE_CONTROL && speaks_to_caches(name)).cloned().collect();
    for name in targeted {
        headers.remove(name);
    }
    let value = std::iter::once("private".to_owned()).chain(kept).collect::<Vec<_>>().join(", ");
    headers.insert(CACHE_CONTROL, HeaderValue::try_from(value).unwrap_or(NO_STORE));
}

/// `Cache-Control`, and what speaks to caches that then do not look at it (RFC 9213, and what came before it).
fn speaks_to_caches(name: &HeaderName) -> bool {
    let text = name.as_str();
    *name == CACHE_CONTROL
        || text.ends_with("cdn-cache-control")
        || ["surrogate-control", "edge-control", "x-accel-expires"].contains(&text)
}

/// Returns the request headers that a CORS layer above a [`RequirePaymentLayer`](super::RequirePaymentLayer) must allow, so that scripts
/// on other origins can pay.
///
/// They are `PAYMENT-SIGNATURE`, `X-PAYMENT` and, since the official clients send it, `Access-Control-Expose-Headers`. Allow what your
/// handlers need beside them, such as `Content-Type` for JSON.
///
/// ```
/// use axum::http::{HeaderName, Method, header::CONTENT_TYPE};
/// use tower_http::cors::{Any, CorsLayer};
/// use tower_x402::server::{cors_allow_headers, cors_expose_headers};
///
/// let cors = CorsLayer::new()
///     .allow_origin(Any)
///     .allow_methods([Method::GET, Method::POST])
///     .allow_headers([cors_allow_headers(), vec![CONTENT_TYPE]].concat())
///     .expose_headers([cors_expose_headers(), vec![HeaderName::from_static("x-request-id")]].concat());
/// ```
pub fn cors_allow_headers() -> Vec<HeaderName> {
    vec![PAYMENT_SIGNATURE.clone(), X_PAYMENT.clone(), ACCESS_CONTROL_EXPOSE_HEADERS]
}

/// Returns the response headers that a CORS layer above a [`RequirePaymentLayer`](super::RequirePaymentLayer) must expose, so that scripts
/// on other origins can read offers, receipts and when to try again.
///
/// The layer exposes them itself, but a CORS layer that exposes any headers replaces what layers below it say. See
/// [`cors_allow_headers`] for an example.
pub fn cors_expose_headers() -> Vec<HeaderName> {
    vec![PAYMENT_REQUIRED, PAYMENT_RESPONSE, X_PAYMENT_RESPONSE, RETRY_AFTER]
}

/// The CORS headers that a script on another origin needs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cors {
    /// Whether every origin is allowed; otherwise that is left to a layer above.
    pub(super) any_origin: bool,
}

impl Cors {
    /// Lets the script read the payment headers.
    pub(super) fn apply(self, headers: &mut HeaderMap) {
        headers.append(ACCESS_CONTROL_EXPOSE_HEADERS, EXPOSED);
        if self.any_origin {
            headers.insert(ACCESS_CONTROL_ALLOW_ORIGIN, ANY);
        }
    }

    /// Allows what a preflight asks for. Without credentials, this lets a script do no more than any program can.
    pub(super) fn preflight<B>(request: &HeaderMap) -> Response<ResponseBody<B>> {
        let mut response = Response::new(ResponseBody::own(Bytes::new()));
        *response.status_mut() = StatusCode::NO_CONTENT;
        let headers = response.headers_mut();
        headers.insert(ACCESS_CONTROL_ALLOW_ORIGIN, ANY);
        for (asked, allowed) in [
            (ACCESS_CONTROL_REQUEST_METHOD, ACCESS_CONTROL_ALLOW_METHODS),
            (ACCESS_CONTROL_REQUEST_HEADERS, ACCESS_CONTROL_ALLOW_HEADERS),
        ] {
            if let Some(asked) = request.get(asked) {
                headers.insert(allowed, asked.clone());
            }
        }
        headers.insert(VARY, HeaderValue::from_static("Access-Control-Request-Method, Access-Control-Request-Headers"));
        response
    }
}

/// The answer to a preflight that the service gave: the head is all that a browser reads of it, and a service that does not
/// look at the method would give away what it sells in the body.
pub(super) fn head_only<R, B>(response: Response<R>) -> Response<ResponseBody<B>> {
    let (mut parts, _) = response.into_parts();
    for name in [CONTENT_LENGTH, CONTENT_TYPE, TRANSFER_ENCODING] {
        parts.headers.remove(name);
    }
    Response::from_parts(parts, ResponseBody::own(Bytes::new()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_paid_response_is_private_whatever_the_handler_said() {
        for (said, kept) in [
            (&[][..], "private"),
            (&["public, max-age=60, s-maxage=600"], "private, max-age=60"),
            (&["no-store", "Public"], "private, no-store"),
            (&["S-MaxAge = 5,private"], "private"),
        ] {
            let mut headers = HeaderMap::new();
            for value in said {
                headers.append(CACHE_CONTROL, HeaderValue::from_static(value));
            }
            keep_private(&mut headers);
            assert_eq!(headers.get_all(CACHE_CONTROL).iter().collect::<Vec<_>>(), [kept]);
        }
    }

    #[test]
    fn no_cache_is_told_otherwise_in_a_header_of_its_own() {
        let mut headers = HeaderMap::new();
        for name in ["cdn-cache-control", "vercel-cdn-cache-control", "surrogate-control", "edge-control"] {
            headers.insert(name, HeaderValue::from_static("public, max-age=600"));
        }
        headers.insert("x-accel-expires", HeaderValue::from_static("600"));
        keep_private(&mut headers);
        assert_eq!(headers.keys().collect::<Vec<_>>(), [CACHE_CONTROL]);
    }
}
