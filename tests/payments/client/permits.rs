//! Our buyer pays our seller a price by permit of Permit2 (scheme `exact`).

use alloy_primitives::{Bytes, U256};
use alloy_signer_local::PrivateKeySigner;
use alloy_sol_types::SolCall as _;
use axum::body::Body;
use http::{Method, Request, StatusCode};
use serde_json::json;
use support::{
    chain::Chain as _,
    devnet::DevnetChain,
    permit::approve,
    shop::{App, PRICE, Shop, evaluate, send},
};
use tower::{Layer as _, ServiceExt as _};
use tower_x402::{
    Network, Usdc,
    client::{
        AddPaymentLayer, Budget, Payer, PayerBuilder, PaymentOutcome, PermitPolicy, Receipt, ReceiptExt as _, reconcile,
    },
    permit2::PERMIT2,
    protocol::TransferMethod,
};

alloy_sol_types::sol! {
    function allowance(address owner, address spender) external view returns (uint256);
}

struct Stage {
    chain: DevnetChain,
    shop: Shop,
    app: App,
    buyer: PrivateKeySigner,
}

impl Stage {
    /// A seller that takes either, and a buyer who has approved this much.
    async fn open(approved: u64) -> Self {
        let chain = DevnetChain::start(None).await;
        let shop = Shop::open(&chain).await;
        let app = shop.app(shop.layer().permits());
        let buyer = PrivateKeySigner::random();
        chain.mint(buyer.address(), 100 * PRICE).await;
        approve(&chain.devnet, buyer.address(), U256::from(approved));
        Self { chain, shop, app, buyer }
    }

    fn payer(&self) -> PayerBuilder {
        let policy = PermitPolicy::default().node(Network::BASE_SEPOLIA, self.chain.devnet.rpc_client());
        Payer::builder(self.buyer.clone()).budget(Budget::default()).permits(policy)
    }

    async fn buy(&self, payer: &Payer) -> (StatusCode, Receipt) {
        let http = self.app.clone().map_request(|request: Request<String>| request.map(Body::from));
        let client = AddPaymentLayer::new(payer.clone()).layer(http);
        let request = Request::post("http://shop.example/evaluate").body("a".to_owned()).unwrap();
        let response = client.oneshot(request).await.expect("an answer");
        (response.status(), response.receipt().expect("it was paid for").clone())
    }

    /// Returns how much the buyer lets Permit2 move now: each payment by permit takes some.
    async fn allowed(&self) -> u64 {
        let call = allowanceCall { owner: self.buyer.address(), spender: PERMIT2 };
        let request = json!({ "to": self.shop.asset.address, "data": Bytes::from(call.abi_encode()) });
        let rpc = self.chain.devnet.rpc_client();
        let answer: Bytes = rpc.request("eth_call", (request, "latest")).await.expect("the token answers");
        U256::from_be_slice(&answer).to()
    }
}

#[tokio::test]
async fn buyer_pays_by_permit_if_it_prefers_that_as_far_as_it_has_approved() {
    let stage = Stage::open(2 * PRICE).await;
    let payer = stage.payer().prefer(|offer| offer.method != TransferMethod::Permit).build();
    for (paid, allowed) in [(1_u64, PRICE), (2, 0), (3, 0)] {
        let (status, receipt) = stage.buy(&payer).await;
        assert_eq!((status, receipt.outcome), (StatusCode::OK, PaymentOutcome::Settled), "{receipt:?}");
        assert_eq!((stage.shop.handled() as u64, stage.allowed().await), (paid, allowed));
        assert_eq!(payer.budget().spent(), Usdc::from_atomic(PRICE * paid));
    }
    assert_eq!(payer.budget().reserved(), Usdc::ZERO);
}

#[tokio::test]
async fn buyer_that_does_not_prefer_permits_pays_by_authorization() {
    let stage = Stage::open(PRICE).await;
    let (status, _) = stage.buy(&stage.payer().build()).await;
    assert_eq!((status, stage.allowed().await), (StatusCode::OK, PRICE));
}

/// Reconciliation finds the payment by what the proxy was called with.
#[tokio::test]
async fn buyer_finds_out_by_the_chain_that_a_permit_paid() {
    let stage = Stage::open(PRICE).await;
    let payer = stage.payer().prefer(|offer| offer.method != TransferMethod::Permit).build();
    let unpaid = send(&stage.app, evaluate("a")).await;
    let url = "http://shop.example/evaluate?k=1".parse().unwrap();
    let signed = payer.pay(&Method::POST, &url, &unpaid.headers, None).await.unwrap().expect("a 402");
    let mut request = evaluate("a");
    request.headers_mut().insert("payment-signature", signed.header().clone());
    assert_eq!(send(&stage.app, request).await.status, StatusCode::OK);
    // Nobody tells the payer.
    drop(signed);
    assert_eq!(payer.budget().spent(), Usdc::ZERO);
    stage.chain.mine().await;
    reconcile(payer.budget(), stage.chain.provider()).await.unwrap();
    assert_eq!(payer.budget().spent(), Usdc::from_atomic(PRICE));
}
