//! A remote facilitator that outlives the seller's process. It has its own ledger, and cuts connections on command.

use std::{
    collections::BTreeSet,
    convert::Infallible,
    future::Future,
    panic::resume_unwind,
    sync::{Arc, Mutex},
    time::Duration,
};

use alloy_primitives::{B256, U256};
use alloy_signer_local::PrivateKeySigner;
use axum::{
    Router,
    body::{Body, Bytes, to_bytes},
    extract::Request,
    response::Response,
};
use futures_util::stream;
use http_body_util::Full;
use serde_json::Value;
use tokio::{net::TcpListener, sync::watch, task::AbortHandle};
use tower::ServiceExt as _;
use tower_x402::{
    Network,
    facilitator::{Facilitator as _, OnchainFacilitator},
    ledger::{Ledger, MemoryLedger, ResponseLimits, SettlementState},
    payment::PaymentKey,
};
use x402_devnet::Devnet;
use x402_facilitator::FacilitatorService;

use super::server::{Ahead, UPKEEP};

/// When the connection of a request for a settlement is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Cut {
    /// Before the facilitator has the request.
    Unheard,
    /// While the facilitator works on it.
    AtWork,
    /// When the facilitator has settled, before it answers.
    Unanswered,
    /// In the middle of the answer.
    Halfway,
}

impl Cut {
    pub(crate) const ALL: [Self; 4] = [Self::Unheard, Self::AtWork, Self::Unanswered, Self::Halfway];

    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Unheard => "facilitator settle: cut before it is heard",
            Self::AtWork => "facilitator settle: cut while it is worked on",
            Self::Unanswered => "facilitator settle: cut before the answer",
            Self::Halfway => "facilitator settle: cut within the answer",
        }
    }
}

pub(crate) struct FacilitatorServer {
    pub(crate) url: String,
    ledger: Arc<dyn Ledger>,
    /// The number of requests so far.
    asked: watch::Receiver<u64>,
    cutter: Arc<Mutex<Cutter>>,
    /// The nonces of the payments that it was asked to settle.
    entrusted: Arc<Mutex<BTreeSet<B256>>>,
    serving: AbortHandle,
}

/// The request for a settlement, counted from now, whose connection is to be cut.
#[derive(Default)]
struct Cutter {
    due: Option<(Cut, u32)>,
    cuts: usize,
}

impl Cutter {
    /// Counts a request, and returns `true` if its connection is to be cut.
    fn next(&mut self) -> Option<Cut> {
        let (cut, left) = self.due.take()?;
        if left > 1 {
            self.due = Some((cut, left - 1));
            return None;
        }
        self.cuts += 1;
        Some(cut)
    }
}

impl FacilitatorServer {
    pub(crate) async fn open(devnet: &Devnet, clock: Arc<Ahead>) -> Self {
        let signer = PrivateKeySigner::random();
        devnet.fund(signer.address(), U256::from(10).pow(U256::from(18)));
        let facilitator = OnchainFacilitator::builder()
            .network(Network::BASE_SEPOLIA)
            .client(devnet.rpc_client())
            .signer(signer)
            .ledger(Arc::new(MemoryLedger::with(ResponseLimits::default(), 10_000, clock.clone())))
            .clock(clock.clone())
            .confirm_timeout(Duration::from_secs(10))
            .reconcile_interval(UPKEEP)
            .build()
            .await
            .expect("the devnet answers");
        let ledger = facilitator.ledger().clone();
        let service = FacilitatorService::builder(facilitator).clock(clock).build();
        let (cutter, (ask, asked)) = (Arc::<Mutex<Cutter>>::default(), watch::channel(0));
        let entrusted = Arc::<Mutex<BTreeSet<B256>>>::default();
        let (cuts, nonces) = (cutter.clone(), entrusted.clone());
        let front = Router::new().fallback(move |request: Request| {
            let (service, cuts, nonces, ask) = (service.clone(), cuts.clone(), nonces.clone(), ask.clone());
            async move {
                let (parts, body) = request.into_parts();
                let body = to_bytes(body, 1 << 20).await.expect("a small body");
                let settles = parts.uri.path() == "/settle";
                if settles {
                    nonces.lock().unwrap().insert(nonce(&body));
                }
                ask.send_modify(|count| *count += 1);
                let cut = if settles { cuts.lock().unwrap().next() } else { None };
                answer(service.oneshot(Request::from_parts(parts, Body::from(body))), cut).await
            }
        });
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let url = format!("http://{}", listener.local_addr().expect("it is bound"));
        let serving = tokio::spawn(async move { axum::serve(listener, front).await }).abort_handle();
        Self { url, ledger, asked, cutter, entrusted, serving }
    }

    /// Returns a receiver that is notified of requests from now on.
    pub(crate) fn asked(&self) -> watch::Receiver<u64> {
        let mut asked = self.asked.clone();
        asked.mark_unchanged();
        asked
    }

    /// Cuts the connection of the `occurrence`-th request for a settlement from now on.
    pub(crate) fn cut(&self, cut: Cut, occurrence: u32) {
        self.cutter.lock().unwrap().due = Some((cut, occurrence));
    }

    /// Returns the number of connections that were cut.
    pub(crate) fn cuts(&self) -> usize {
        self.cutter.lock().unwrap().cuts
    }

    /// The nonces of the payments that it was asked to settle.
    pub(crate) fn entrusted(&self) -> BTreeSet<B256> {
        self.entrusted.lock().unwrap().clone()
    }

    /// Returns `true` if the payment is final in the facilitator's ledger.
    pub(crate) async fn is_final(&self, key: &PaymentKey) -> bool {
        let record = self.ledger.get(key).await.expect("the ledger answers");
        record.is_some_and(|record| record.settlement.state() == SettlementState::Final)
    }
}

impl Drop for FacilitatorServer {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

fn nonce(settlement: &[u8]) -> B256 {
    let said: Value = serde_json::from_slice(settlement).expect("JSON");
    let nonce = said["paymentPayload"]["payload"]["authorization"]["nonce"].as_str();
    nonce.and_then(|nonce| nonce.parse().ok()).expect("a payment")
}

async fn answer<F>(work: F, cut: Option<Cut>) -> Response
where
    F: Future<Output = Result<axum::http::Response<Full<Bytes>>, Infallible>> + Send + 'static,
{
    match cut {
        None => work.await.expect("it always answers").map(Body::new),
        Some(Cut::Unheard) => resume_unwind(Box::new("cut")),
        Some(Cut::AtWork) => {
            tokio::spawn(work);
            resume_unwind(Box::new("cut"))
        }
        Some(Cut::Unanswered) => {
            let _ = work.await;
            resume_unwind(Box::new("cut"))
        }
        Some(Cut::Halfway) => {
            let (parts, body) = work.await.expect("it always answers").into_parts();
            let mut whole = to_bytes(Body::new(body), 1 << 20).await.expect("a small body");
            let half = whole.split_to(whole.len() / 2);
            let pieces = [Ok(half), Err(std::io::Error::other("cut"))];
            Response::from_parts(parts, Body::from_stream(stream::iter(pieces)))
        }
    }
}
