//! A shop behind the real layer. Nothing that arrives in a header may get more out of it than the offer, except one payment
//! whose signature is real.

use std::{
    convert::Infallible,
    fmt,
    sync::{Arc, LazyLock, Mutex},
};

use alloy_primitives::{Address, U256, address};
use async_trait::async_trait;
use bytes::Bytes;
use http::{HeaderValue, Request, Response, StatusCode};
use http_body_util::{BodyExt as _, Full};
use serde::Deserialize;
use serde_json::{Value, value::RawValue};
use tokio::runtime::Runtime;
use tower::{Layer as _, ServiceExt as _, util::BoxCloneService};
use tower_x402::{
    ManualClock, Network, Usdc,
    facilitator::{Facilitator, FacilitatorError, VerifyError},
    ledger::{Counts, Ledger, MemoryLedger, Record},
    payment::{Authenticity, Prechecked, Rejection, SettlementOutcome, Terms, Verified},
    protocol::{
        ExactOffer, ExactPayload, MAX_REQUIRED_HEADER, PaymentFlow, PaymentId, PaymentRequired, Reason,
        SupportedResponse, decode_header, header_name, v1,
    },
    server::{RequestBody, RequirePaymentLayer, ResponseBody},
};

use super::Depth;

/// When everything here happens, in Unix seconds.
pub(super) const NOW: u64 = 1_800_000_000;
const PRICE: Usdc = Usdc::from_atomic(1_000);
const PAYEE: Address = address!("70997970C51812dc3A010C7d01b50e0d17dc79C8");

/// A payment that is good at that time and place. Its signature is the only one of its payer's key that anybody knows.
const GENUINE: &str = include_str!("../corpus/payment_v2/believed_genuine.json");

/// The same with another text for one of its fields.
pub(super) fn genuine_with(field: &str, text: &str) -> String {
    let mut fields: std::collections::BTreeMap<String, Box<RawValue>> =
        serde_json::from_str(GENUINE).expect("the seed is JSON");
    fields.insert(field.to_owned(), super::raw_json(text));
    serde_json::to_string(&fields).expect("JSON can be written")
}

/// Presents a header and says how far it got. `is_whole`: whether all of it can be read; `None` if it is no message.
pub(super) fn present(name: &'static str, value: &[u8], is_whole: Option<bool>) -> Depth {
    // What an HTTP server does not take for a header never arrives.
    let Ok(value) = HeaderValue::from_bytes(value) else { return Depth::Unread };
    thread_local!(static SHOP: Shop = Shop::open());
    SHOP.with(|shop| shop.serve(name, value, is_whole))
}

type App = BoxCloneService<Request<Full<Bytes>>, Response<ResponseBody<Full<Bytes>>>, Infallible>;

struct Shop {
    runtime: Runtime,
    app: App,
    till: Arc<Till>,
}

impl Shop {
    fn open() -> Self {
        let till = Arc::new(Till::new());
        let layer = RequirePaymentLayer::builder()
            .price(PRICE)
            .pay_to(Network::BASE_SEPOLIA, PAYEE)
            .pay_to(Network::BASE, PAYEE)
            .flow(PaymentFlow::Authorization)
            .flow(PaymentFlow::Upfront)
            .public_origin("https://api.example")
            .payment_identifier(true)
            .clock(Arc::new(ManualClock::at(NOW)))
            .facilitator(till.clone())
            .build()
            .expect("a complete layer");
        let handler = |_: Request<RequestBody<Full<Bytes>>>| async { panic!("nothing was paid, so nobody works") };
        let app = BoxCloneService::new(layer.layer(tower::service_fn(handler)));
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().expect("a runtime");
        Self { runtime, app, till }
    }

    fn serve(&self, name: &'static str, value: HeaderValue, is_whole: Option<bool>) -> Depth {
        let version = decode_header(value.as_bytes(), value.len()).ok().map(|Versioned { version }| version);
        let request = Request::post("/evaluate").header(name, value).body(Full::default()).expect("a request");
        let (head, body, counts) = self.runtime.block_on(async {
            let (head, body) = self.app.clone().oneshot(request).await.expect("infallible").into_parts();
            let body = body.collect().await.expect("the layer's own body").to_bytes();
            (head, body, self.till.ledger.counts().await.expect("a ledger in memory counts"))
        });
        assert_eq!(counts, Counts::default(), "the ledger forgets what was refused");

        let status = head.status;
        match is_whole {
            None => assert_eq!(status, StatusCode::BAD_REQUEST),
            Some(true) => assert_eq!(status, StatusCode::PAYMENT_REQUIRED),
            Some(false) => assert!(matches!(status.as_u16(), 400 | 402), "{status}"),
        }
        for header in [header_name::PAYMENT_RESPONSE, header_name::X_PAYMENT_RESPONSE] {
            assert!(!head.headers.contains_key(header), "nothing was settled");
        }
        let mut demands = head.headers.get_all(header_name::PAYMENT_REQUIRED).iter();
        let (Some(demand), None) = (demands.next(), demands.next()) else { panic!("the offer is made once") };
        let demand: PaymentRequired =
            decode_header(demand.as_bytes(), MAX_REQUIRED_HEADER).expect("clients can read the offer");
        let reason = Reason::from(demand.error.as_deref().expect("the offer says why it is made again"));
        assert!(Reason::KNOWN.contains(&reason), "{reason} is not the sender's to choose");
        let is_version = reason == Reason::InvalidX402Version;
        assert!(
            !is_version || version != Some(if name == header_name::X_PAYMENT { 1 } else { 2 }),
            "it is the right one"
        );
        assert_eq!(demand.resource.url, "https://api.example/evaluate");
        let extensions = demand.extensions.as_ref().map(|extensions| extensions.read().expect("extensions"));
        assert_eq!(extensions, Some(PaymentId::extension().declared()));
        let offers: Vec<_> = demand.accepts.iter().map(|offer| offer.read().expect("an offer")).collect();
        let offers: Vec<_> = offers.iter().map(|offer| ExactOffer::try_from(offer).expect("an offer")).collect();
        assert_eq!(offers.len(), 4);
        assert!(offers.iter().all(is_ours));

        let body: v1::PaymentRequiredV1 = serde_json::from_slice(&body).expect("clients of v1 can read the offer");
        assert_eq!(body.accepts.len(), 2, "flows are not told apart in v1");
        let sentence = body.error.expect("a sentence says why");
        assert!(sentence.starts_with(reason.as_str()));
        assert!(sentence.len() < 128 * 1024, "a header is not blown up");

        let asked = self.till.asked.lock().expect("nobody panicked").take();
        match asked {
            _ if status == StatusCode::BAD_REQUEST => Depth::Unread,
            None => Depth::Read,
            Some(Authenticity::ChainMustJudge(_)) => Depth::Judged,
            Some(Authenticity::Proven) => Depth::Believed,
        }
    }
}

fn is_ours(offer: &ExactOffer) -> bool {
    offer.pay_to == PAYEE
        && offer.amount == U256::from(PRICE.atomic())
        && [Network::BASE, Network::BASE_SEPOLIA].map(Network::usdc).contains(&Some(offer.asset.clone()))
}

#[derive(Deserialize)]
struct Versioned {
    #[serde(rename = "x402Version")]
    version: u64,
}

/// The facilitator: compares what reaches it with what may, and refuses all of it.
struct Till {
    ledger: Arc<dyn Ledger>,
    /// What the last payment to reach it looked like.
    asked: Mutex<Option<Authenticity>>,
}

impl Till {
    fn new() -> Self {
        Self { ledger: Arc::new(MemoryLedger::new()), asked: Mutex::default() }
    }
}

impl fmt::Debug for Till {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Till")
    }
}

#[async_trait]
impl Facilitator for Till {
    fn ledger(&self) -> &Arc<dyn Ledger> {
        &self.ledger
    }

    fn serves(&self, _: &Terms) -> bool {
        true
    }

    async fn supported(&self) -> Result<SupportedResponse, FacilitatorError> {
        Ok(SupportedResponse::default())
    }

    async fn verify(&self, payment: &Prechecked) -> Result<Verified, VerifyError> {
        let (offer, authorization) = (payment.terms().offer(), payment.authorization());
        assert!(is_ours(offer), "checked against an offer of ours: {offer:?}");
        assert_eq!((authorization.to, authorization.value), (offer.pay_to, offer.amount));
        assert!(authorization.valid_after < U256::from(NOW));
        assert!(authorization.valid_before > U256::from(NOW));
        let pending = self.ledger.counts().await.expect("a ledger in memory counts").pending;
        let reason = match payment.authenticity() {
            Authenticity::Proven => {
                static SIGNED: LazyLock<ExactPayload> = LazyLock::new(|| {
                    let seed: Value = serde_json::from_str(GENUINE).expect("the seed is JSON");
                    serde_json::from_value(seed["payload"].clone()).expect("the seed is a payment")
                });
                assert_eq!(authorization, &SIGNED.authorization, "nobody signed this");
                assert_eq!(payment.signature(), &SIGNED.signature, "one authorization, one signature");
                assert_eq!(offer.network(), Network::BASE_SEPOLIA, "it was signed for one chain");
                // Paid before the work, it is reserved only when its payer has the money and its body is there.
                let reserved = u64::from(offer.flow != PaymentFlow::Upfront);
                assert_eq!(pending, reserved, "reserved before anybody is asked");
                Reason::InsufficientFunds
            }
            Authenticity::ChainMustJudge(_) => {
                assert_eq!(pending, 0, "what anybody can make up is not in the ledger");
                Reason::Signature
            }
        };
        *self.asked.lock().expect("nobody panicked") = Some(payment.authenticity());
        Err(Rejection::new(reason, "nobody gets anything here").into())
    }

    async fn settle(&self, _: &Prechecked, _: &Verified) -> Result<SettlementOutcome, FacilitatorError> {
        panic!("nothing was verified, so nothing is settled")
    }

    async fn reconcile(&self, _: &Record) -> Result<SettlementOutcome, FacilitatorError> {
        panic!("nothing was submitted, so nothing is out of sight")
    }
}
