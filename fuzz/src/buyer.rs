//! A payer with a small budget, among servers that say anything.

use std::sync::{
    Arc, Mutex,
    atomic::{AtomicU64, Ordering},
};

use alloy_primitives::{Address, B256, U256, address};
use async_trait::async_trait;
use http::{HeaderMap, HeaderValue, Method, StatusCode};
use serde::Deserialize;
use serde_json::Value;
use tokio::runtime::Runtime;
use tower_x402::{
    Asset, ManualClock, Network, Nonces, RandomnessError, Usdc,
    client::{Budget, Payer, PaymentError, PaymentOutcome, SignedPayment},
    eip3009::{Authorization, AuthorizationSigner, PaymentSignature, SignError, TokenDomain},
    protocol::{
        ExactOffer, MAX_PAYMENT_HEADER, MAX_REQUIRED_BODY, MAX_REQUIRED_HEADER, PaymentPayload, PaymentRequirements,
        SettlementResponse, Verbatim, Version, decode_header, header_name, v1,
    },
};
use url::Url;

use super::{
    Depth,
    seller::NOW,
    wire::{as_header, is_echoed_but_for_id},
};

const PAYER: Address = address!("f39Fd6e51aad88F6F4ce6aB8827279cffFb92266");
const LIMIT: Usdc = Usdc::from_atomic(5_000);
/// The longest validity that is signed, in seconds.
const MAX_WINDOW: u64 = 3_600;
/// How many offers a payer looks at.
const MAX_OFFERS: usize = 64;

/// A 402 that a payer pays 1,000 units for.
const DEMAND: &str = include_str!("../corpus/required_v2/believed_two_flows.json");

/// The same 402 with these extensions.
pub(super) fn demand_with(extensions: &str) -> String {
    let end = DEMAND.trim_end().strip_suffix('}').expect("the seed is an object");
    format!("{end},\"extensions\":{extensions}}}")
}

/// What of a 402 is to be echoed, and the offers.
#[derive(Deserialize)]
struct Demand {
    resource: Option<Verbatim<Value>>,
    accepts: Vec<Verbatim<PaymentRequirements>>,
    extensions: Option<Verbatim<Value>>,
}

/// The offers of a 402 of v1.
#[derive(Deserialize)]
struct DemandInV1 {
    accepts: Vec<Verbatim<v1::PaymentRequirementsV1>>,
}

/// Asks for money in `PAYMENT-REQUIRED`: what is signed is within the budget and is what was asked for.
pub(super) fn asked(value: &[u8]) -> Depth {
    let Ok(value) = HeaderValue::from_bytes(value) else { return Depth::Unread };
    let headers = HeaderMap::from_iter([(http::HeaderName::from_static(header_name::PAYMENT_REQUIRED), value.clone())]);
    let buyer = Buyer::new();
    let payment = match buyer.pay(&headers, None) {
        Ok(payment) => payment.expect("whoever sends the header asks for money"),
        Err(error) => return buyer.has_not_paid(&error),
    };
    let (signed, separator) = &buyer.has_promised_little();
    let header = payment.header();
    assert!(header.is_sensitive());
    let sent: PaymentPayload =
        decode_header(header.as_bytes(), MAX_PAYMENT_HEADER).expect("what is signed fits where it must go");
    let demand: Demand = decode_header(value.as_bytes(), MAX_REQUIRED_HEADER).expect("the payer could read it");
    assert_eq!(text(&sent.resource), text(&demand.resource), "the resource is echoed");
    match (text(&demand.extensions), text(&sent.extensions)) {
        (Some(came), Some(sent)) => is_echoed_but_for_id(came, sent),
        (came, sent) => assert_eq!(came, sent, "the extensions are echoed"),
    }
    assert!(demand.accepts.iter().any(|offer| offer == &sent.accepted), "an offer is echoed");
    let offer = readable(&sent.accepted).expect("the payer could read it");
    is_signed(&offer, signed, separator);
    let cheapest = demand.accepts.iter().take(MAX_OFFERS).filter_map(readable).filter(is_payable);
    assert!(cheapest.into_iter().all(|other| other.amount >= offer.amount), "the cheapest is taken");
    assert_eq!(sent.payload.read().expect("the payer's own").authorization, *signed);

    // Whatever a second 402 says, the money stays reserved: there is a signature.
    let outcome = buyer.conclude(payment, StatusCode::PAYMENT_REQUIRED, &headers, None);
    assert!(matches!(outcome, PaymentOutcome::Failed | PaymentOutcome::Unknown));
    assert_eq!(U256::from(buyer.books().1), signed.value);
    Depth::Believed
}

/// Asks for money in the body of a 402, as v1 does: likewise; and a body that is no demand is none of the payer's business.
pub(super) fn asked_in_v1(body: &[u8]) -> Depth {
    let (buyer, headers) = (Buyer::new(), HeaderMap::new());
    let payment = match buyer.pay(&headers, Some(body)) {
        Ok(Some(payment)) => payment,
        Ok(None) => {
            assert!(buyer.signed().is_empty() && buyer.books() == (0, 0));
            return Depth::Unread;
        }
        Err(error) => return buyer.has_not_paid(&error),
    };
    assert!(body.len() <= MAX_REQUIRED_BODY);
    let (signed, separator) = &buyer.has_promised_little();
    assert_eq!((payment.version(), payment.header_name().as_str()), (Version::V1, header_name::X_PAYMENT));
    assert!(payment.header().is_sensitive());
    let sent: v1::PaymentPayloadV1 =
        decode_header(payment.header().as_bytes(), MAX_PAYMENT_HEADER).expect("what is signed fits where it must go");
    assert_eq!(sent.payload.read().expect("the payer's own").authorization, *signed);
    let demand: DemandInV1 = serde_json::from_slice(body).expect("the payer could read it");
    let offers = demand.accepts.iter().take(MAX_OFFERS).filter_map(|offer| offer.read().ok());
    let payable = offers.filter_map(|offer| ExactOffer::try_from(&offer).ok()).filter(is_payable);
    let cheapest = payable.min_by_key(|offer| offer.amount).expect("one was paid");
    assert_eq!((sent.scheme.as_str(), Network::from_v1_name(&sent.network)), ("exact", Some(signed_on(separator))));
    assert_eq!(signed.value, cheapest.amount, "the cheapest is taken");
    let outcome = buyer.conclude(payment, StatusCode::PAYMENT_REQUIRED, &headers, Some(body));
    assert!(matches!(outcome, PaymentOutcome::Failed | PaymentOutcome::Unknown));
    assert_eq!(U256::from(buyer.books().1), signed.value);
    Depth::Believed
}

/// What is signed is the offer.
fn is_signed(offer: &ExactOffer, signed: &Authorization, separator: &B256) {
    assert_eq!((signed.value, signed.to), (offer.amount, offer.pay_to), "what is signed is the offer");
    assert!(signed.valid_before <= U256::from(NOW).saturating_add(U256::from(offer.max_timeout_seconds)));
    assert!(trusted().contains(&offer.asset));
    assert_eq!(separator, &TokenDomain::of(&offer.asset).separator());
}

/// The network of the token whose domain was signed for.
fn signed_on(separator: &B256) -> Network {
    let asset = trusted().into_iter().find(|asset| TokenDomain::of(asset).separator() == *separator);
    asset.expect("no other token is paid with").network
}

/// Answers a payment with this `PAYMENT-RESPONSE`: paid is what it says of exactly this payment.
pub(super) fn told(value: &[u8]) -> Depth {
    let Ok(value) = HeaderValue::from_bytes(value) else { return Depth::Unread };
    // Some servers write what v1 does.
    let response = match decode_header::<v1::SettlementResponseV1>(value.as_bytes(), MAX_PAYMENT_HEADER) {
        Ok(response) if Network::from_v1_name(&response.network).is_some() => Ok(response.into()),
        _ => decode_header::<SettlementResponse>(value.as_bytes(), MAX_PAYMENT_HEADER),
    };
    let headers = HeaderMap::from_iter([(http::HeaderName::from_static(header_name::PAYMENT_RESPONSE), value)]);
    let mut depth = if response.is_ok() { Depth::Read } else { Depth::Unread };
    for status in [StatusCode::OK, StatusCode::PAYMENT_REQUIRED, StatusCode::SERVICE_UNAVAILABLE] {
        let buyer = Buyer::new();
        let demand = HeaderValue::try_from(as_header(DEMAND.as_bytes())).expect("base64");
        let asked = HeaderMap::from_iter([(http::HeaderName::from_static(header_name::PAYMENT_REQUIRED), demand)]);
        let payment = buyer.pay(&asked, None).expect("the seed can be paid").expect("the seed asks");
        let outcome = buyer.conclude(payment, status, &headers, None);
        if outcome.is_paid() {
            let response = response.as_ref().expect("only what can be read is believed");
            assert!(response.success);
            assert_eq!(response.network.parse(), Ok(Network::BASE_SEPOLIA));
            assert!(response.payer.as_ref().is_none_or(|payer| payer.parse() == Ok(PAYER)));
            assert!(response.amount.as_ref().is_none_or(|amount| amount.parse() == Ok(1_000_u64)));
            assert_eq!(outcome == PaymentOutcome::Settled, response.transaction.parse::<B256>().is_ok());
            assert_eq!(buyer.books(), (1_000, 0));
            depth = Depth::Believed;
        } else {
            assert_eq!(buyer.books(), (0, 1_000), "nothing else frees or spends what was signed");
        }
        assert_eq!(buyer.budget.journal().unresolved().len(), usize::from(!outcome.is_paid()));
    }
    depth
}

fn text<T>(part: &Option<Verbatim<T>>) -> Option<&str> {
    part.as_ref().map(Verbatim::text)
}

fn readable(offer: &Verbatim<PaymentRequirements>) -> Option<ExactOffer> {
    ExactOffer::try_from(&offer.read().ok()?).ok()
}

fn trusted() -> [Asset; 2] {
    [Network::BASE, Network::BASE_SEPOLIA].map(|network| network.usdc().expect("known"))
}

fn is_payable(offer: &ExactOffer) -> bool {
    trusted().contains(&offer.asset) && offer.amount > U256::ZERO && offer.max_timeout_seconds > 0
}

struct Buyer {
    payer: Payer,
    budget: Budget,
    signed: Signed,
}

type Signed = Arc<Mutex<Vec<(Authorization, B256)>>>;

impl Buyer {
    fn new() -> Self {
        let signed = Signed::default();
        let budget = Budget::builder().per_payment(LIMIT).total("$0.01".parse().expect("an amount")).build();
        let payer = Payer::builder(Notary(signed.clone()))
            .budget(budget.clone())
            .clock(Arc::new(ManualClock::at(NOW)))
            .nonces(Numbered(AtomicU64::new(1)))
            .build();
        Self { payer, budget, signed }
    }

    fn pay(&self, headers: &HeaderMap, body: Option<&[u8]>) -> Result<Option<SignedPayment>, PaymentError> {
        let url = Url::parse("https://api.example/evaluate").expect("a URL");
        wait(self.payer.pay(&Method::POST, &url, headers, body))
    }

    /// What did not lead to a payment left no trace.
    fn has_not_paid(&self, error: &PaymentError) -> Depth {
        assert!(self.signed().is_empty() || matches!(error, PaymentError::Encode(_)), "{error}: nothing is signed");
        assert_eq!(self.books(), (0, 0));
        assert!(self.budget.journal().unresolved().is_empty());
        if matches!(error, PaymentError::Unreadable(_)) { Depth::Unread } else { Depth::Read }
    }

    /// What was signed, once and within the budget; with the domain of its token.
    fn has_promised_little(&self) -> (Authorization, B256) {
        let mut all = self.signed();
        let (signed, separator) = all.pop().expect("it was signed");
        assert!(all.is_empty(), "one purchase, one signature");
        assert_eq!(signed.from, PAYER);
        assert!(
            signed.value > U256::ZERO && signed.value <= U256::from(LIMIT.atomic()),
            "{} is above the budget",
            signed.value
        );
        assert_eq!(U256::from(self.books().1), signed.value, "what is signed is reserved");
        assert!(signed.valid_after < U256::from(NOW) && signed.valid_before > U256::from(NOW));
        assert!(signed.valid_before <= U256::from(NOW + MAX_WINDOW));
        (signed, separator)
    }

    fn conclude(
        &self,
        mut payment: SignedPayment,
        status: StatusCode,
        headers: &HeaderMap,
        body: Option<&[u8]>,
    ) -> PaymentOutcome {
        payment.answered(status, headers, body);
        let receipt = wait(payment.conclude());
        assert!(receipt.reason.is_none_or(|reason| reason.chars().count() <= 256), "a server fills no logs");
        receipt.outcome
    }

    fn signed(&self) -> Vec<(Authorization, B256)> {
        self.signed.lock().expect("nobody panicked").clone()
    }

    /// What is spent and what is reserved.
    fn books(&self) -> (u64, u64) {
        (self.budget.spent().atomic(), self.budget.reserved().atomic())
    }
}

fn wait<F: Future>(future: F) -> F::Output {
    thread_local!(static RUNTIME: Runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime"));
    RUNTIME.with(|runtime| runtime.block_on(future))
}

/// A signer that keeps a list of what it signed, and takes no time for it.
struct Notary(Signed);

#[async_trait]
impl AuthorizationSigner for Notary {
    fn address(&self) -> Address {
        PAYER
    }

    async fn sign(&self, authorization: &Authorization, domain: &TokenDomain) -> Result<PaymentSignature, SignError> {
        self.0.lock().expect("nobody panicked").push((authorization.clone(), domain.separator()));
        Ok(PaymentSignature::from(vec![0x1b; 65]))
    }
}

#[derive(Debug)]
struct Numbered(AtomicU64);

impl Nonces for Numbered {
    fn next(&self) -> Result<B256, RandomnessError> {
        Ok(U256::from(self.0.fetch_add(1, Ordering::Relaxed)).into())
    }
}
