//! A facilitator that does as it is told, and a service that charges through it: for interleavings and failures that no
//! chain produces on demand.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use alloy_primitives::B256;
use alloy_signer_local::PrivateKeySigner;
use async_trait::async_trait;
use axum::body::Body;
use futures_util::future::BoxFuture;
use http::{Request, Response};
use http_body_util::BodyExt as _;
use tower::{BoxError, Layer as _};
use tower_x402::{
    Network,
    facilitator::{Facilitator, FacilitatorError, VerifyError},
    ledger::{Ledger, MemoryLedger, Record, Settlement},
    payment::{PaymentKey, Prechecked, SettlementOutcome, Terms, Verified},
    protocol::{Reason, SupportedResponse},
    server::{RequestBody, RequirePaymentLayer, RequirePaymentLayerBuilder},
};

use super::shop::{App, Customer, Purchase, app};

type Verify = dyn Fn(u64, Prechecked) -> BoxFuture<'static, Result<Verified, VerifyError>> + Send + Sync;
type Settle = dyn Fn(u64, Prechecked) -> BoxFuture<'static, Result<SettlementOutcome, FacilitatorError>> + Send + Sync;
type Reconcile = dyn Fn(u64, Record) -> BoxFuture<'static, Result<SettlementOutcome, FacilitatorError>> + Send + Sync;

/// Says what the test tells it to, by the number of the call.
pub struct Scripted {
    pub ledger: Arc<dyn Ledger>,
    /// What it says of itself.
    pub settles_in_background: bool,
    /// The only network that it serves; all of them if there is none.
    pub serves: Option<Network>,
    verify: Box<Verify>,
    settle: Box<Settle>,
    reconcile: Box<Reconcile>,
    verified: AtomicU64,
    settled: AtomicU64,
    reconciled: AtomicU64,
    /// What it was left to settle.
    soon: Mutex<Vec<PaymentKey>>,
}

impl std::fmt::Debug for Scripted {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Scripted")
    }
}

impl Scripted {
    pub fn new() -> Self {
        Self {
            ledger: Arc::new(MemoryLedger::new()),
            settles_in_background: true,
            serves: None,
            verify: Box::new(|_, _| Box::pin(async { Ok(Verified::default()) })),
            settle: Box::new(|_, _| Box::pin(async { Ok(paid()) })),
            reconcile: Box::new(|_, record| {
                // What nobody asked to be settled was not.
                let is_unasked = matches!(record.settlement, Settlement::None | Settlement::Due);
                let unknown = SettlementOutcome::Unknown { transaction: None };
                Box::pin(async move { Ok(if is_unasked { not_yet() } else { unknown }) })
            }),
            verified: AtomicU64::new(0),
            settled: AtomicU64::new(0),
            reconciled: AtomicU64::new(0),
            soon: Mutex::default(),
        }
    }

    pub fn verify<F>(mut self, verify: impl Fn(u64, Prechecked) -> F + Send + Sync + 'static) -> Self
    where
        F: Future<Output = Result<Verified, VerifyError>> + Send + 'static,
    {
        self.verify = Box::new(move |call, payment| Box::pin(verify(call, payment)));
        self
    }

    pub fn settle<F>(mut self, settle: impl Fn(u64, Prechecked) -> F + Send + Sync + 'static) -> Self
    where
        F: Future<Output = Result<SettlementOutcome, FacilitatorError>> + Send + 'static,
    {
        self.settle = Box::new(move |call, payment| Box::pin(settle(call, payment)));
        self
    }

    pub fn reconcile<F>(mut self, reconcile: impl Fn(u64, Record) -> F + Send + Sync + 'static) -> Self
    where
        F: Future<Output = Result<SettlementOutcome, FacilitatorError>> + Send + 'static,
    {
        self.reconcile = Box::new(move |call, record| Box::pin(reconcile(call, record)));
        self
    }

    /// Which payments were left to it to settle later; it never does.
    pub fn left(&self) -> Vec<PaymentKey> {
        self.soon.lock().unwrap().clone()
    }

    pub fn settlements(&self) -> u64 {
        self.settled.load(Ordering::SeqCst)
    }

    /// How often it was asked what became of a payment.
    pub fn reconciliations(&self) -> u64 {
        self.reconciled.load(Ordering::SeqCst)
    }
}

pub fn paid() -> SettlementOutcome {
    SettlementOutcome::Settled { transaction: B256::repeat_byte(0x77), block: Some(1), fee: None }
}

pub fn not_yet() -> SettlementOutcome {
    failed_in(None)
}

/// A failure that names the transaction that did not pay, or none.
pub fn failed_in(transaction: Option<B256>) -> SettlementOutcome {
    let detail = "not yet".to_owned();
    SettlementOutcome::Failed { reason: Reason::InsufficientFunds, detail, transaction, dead: false }
}

pub fn away() -> FacilitatorError {
    FacilitatorError::Unreachable { what: "the node", retry_after: Duration::from_secs(1) }
}

#[async_trait]
impl Facilitator for Scripted {
    fn ledger(&self) -> &Arc<dyn Ledger> {
        &self.ledger
    }

    fn serves(&self, terms: &Terms) -> bool {
        self.serves.is_none_or(|network| terms.offer().network() == network)
    }

    async fn supported(&self) -> Result<SupportedResponse, FacilitatorError> {
        Ok(SupportedResponse::default())
    }

    async fn verify(&self, payment: &Prechecked) -> Result<Verified, VerifyError> {
        (self.verify)(self.verified.fetch_add(1, Ordering::SeqCst), payment.clone()).await
    }

    async fn settle(&self, payment: &Prechecked, _: &Verified) -> Result<SettlementOutcome, FacilitatorError> {
        (self.settle)(self.settled.fetch_add(1, Ordering::SeqCst), payment.clone()).await
    }

    async fn reconcile(&self, record: &Record) -> Result<SettlementOutcome, FacilitatorError> {
        (self.reconcile)(self.reconciled.fetch_add(1, Ordering::SeqCst), record.clone()).await
    }

    fn settles_in_background(&self) -> bool {
        self.settles_in_background
    }

    fn settle_soon(&self, payment: &PaymentKey) {
        self.soon.lock().unwrap().push(*payment);
    }
}

pub fn layer(facilitator: &Arc<Scripted>) -> RequirePaymentLayerBuilder {
    RequirePaymentLayer::builder()
        .price("$0.001")
        .pay_to(Network::BASE_SEPOLIA, alloy_primitives::Address::repeat_byte(0xba))
        .facilitator(facilitator.clone())
}

/// A service that counts its runs; the handler gets the run's number and the unread request.
pub fn serve<H, F>(layer: RequirePaymentLayerBuilder, handler: H) -> (App, Arc<AtomicU64>)
where
    H: Fn(u64, Request<RequestBody<Body>>) -> F + Clone + Send + Sync + 'static,
    F: Future<Output = Response<Body>> + Send + 'static,
{
    let handled = Arc::new(AtomicU64::new(0));
    let counter = handled.clone();
    let service = tower::service_fn(move |request: Request<RequestBody<Body>>| {
        let work = handler(counter.fetch_add(1, Ordering::SeqCst), request);
        async move { Ok::<_, BoxError>(work.await) }
    });
    (app(layer.build().unwrap().layer(service)), handled)
}

/// Echoes the request's body.
pub async fn echo(_: u64, request: Request<RequestBody<Body>>) -> Response<Body> {
    Response::new(Body::from(request.into_body().collect().await.unwrap().to_bytes()))
}

pub fn customer() -> Customer {
    let signer = PrivateKeySigner::random();
    Customer { from: signer.address(), signer }
}

pub async fn record(facilitator: &Scripted, purchase: &Purchase) -> Option<Record> {
    facilitator.ledger.get(&key(purchase)).await.unwrap()
}

pub fn key(purchase: &Purchase) -> PaymentKey {
    PaymentKey {
        network: purchase.asset.network,
        asset: purchase.asset.address,
        payer: purchase.authorization.from,
        nonce: purchase.authorization.nonce,
    }
}
