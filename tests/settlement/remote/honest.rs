//! Honest facilitators.

use futures_util::future::join_all;
use http::{HeaderMap, header::AUTHORIZATION};
use tower_x402::{
    facilitator::{Facilitator as _, Outgoing, RemoteBuildError, RemoteFacilitator},
    protocol::{PaymentFlow, SupportedKind},
};

use super::stage::Stage;
use support::shop::{PRICE, evaluate, send};

const FLOWS: [PaymentFlow; 2] = [PaymentFlow::Authorization, PaymentFlow::Upfront];

#[tokio::test]
async fn seller_without_a_node_is_paid_in_both_flows_and_versions() {
    let stage = Stage::open().await;
    for flow in FLOWS {
        let seller = stage.seller(stage.remote(), flow).await;
        let customer = stage.customer().await;
        let purchase = customer.pay(&seller.app, evaluate("2 + 2 = 4")).await;
        let answer = seller.ask(&purchase).await;
        assert_eq!((answer.status.as_u16(), answer.text()), (200, "2 + 2 = 4"), "{flow}");
        assert_eq!(seller.income(&stage).await, PRICE);
        let transfers = support::chain::Chain::token_transfers(&stage.chain, seller.pay_to).await;
        assert_eq!(transfers[0].transaction, answer.transaction());

        let again = seller.ask(&purchase).await;
        assert_eq!((again.status.as_u16(), again.text()), (200, "2 + 2 = 4"), "replayed");
        // A client of v1 pays what v2's payments are forwarded as.
        let mut old = customer.pay_v1(&seller.app, evaluate("1")).await;
        old.resource = serde_json::Value::Null;
        let answer = send(&seller.app, old.on_v1(evaluate("1"))).await;
        assert_eq!(answer.status, 200, "{answer:?}");
        assert_eq!((seller.handled(), seller.income(&stage).await), (2, 2 * PRICE));
    }
}

#[tokio::test]
async fn settlement_has_its_block_if_a_node_confirms_it() {
    let stage = Stage::open().await;
    let remote = stage.remote().confirm(tower_x402::Network::BASE_SEPOLIA, chain_url(&stage));
    let seller = stage.seller(remote, PaymentFlow::Authorization).await;
    let purchase = stage.customer().await.pay(&seller.app, evaluate("2 + 2 = 4")).await;
    assert_eq!(seller.ask(&purchase).await.status, 200);
    let record = seller.record(&purchase).await.unwrap();
    assert!(record.settlement.block().is_some(), "{record:?}");
    assert!(record.block_seen.is_some(), "so that a stranger's transfer can be credited");
}

#[tokio::test]
async fn many_copies_settle_once() {
    let stage = Stage::open().await;
    let seller = stage.seller(stage.remote(), PaymentFlow::Authorization).await;
    let purchase = stage.customer().await.pay(&seller.app, evaluate("2 + 2 = 4")).await;
    let answers = join_all((0..20).map(|_| seller.ask(&purchase))).await;
    assert!(answers.iter().all(|answer| answer.status == 200), "{answers:?}");
    assert_eq!((seller.handled(), stage.settles().len(), seller.income(&stage).await), (1, 1, PRICE));
}

#[tokio::test]
async fn supported_kinds_are_asked_for_once() {
    let stage = Stage::open().await;
    let facilitator = RemoteFacilitator::builder(format!("http://{}", stage.address)).build().await.unwrap();
    let said = facilitator.supported().await.unwrap();
    let kind = |kind: &SupportedKind| (kind.x402_version, kind.scheme.clone(), kind.network.clone());
    let kinds: Vec<_> = said.kinds.iter().map(kind).collect();
    let expected = [(1, "exact", "base-sepolia"), (2, "exact", "eip155:84532"), (2, "upto", "eip155:84532")];
    assert_eq!(kinds, expected.map(|(version, scheme, network)| (version, scheme.to_owned(), network.to_owned())));
    assert_eq!(said.signers["eip155:*"], [stage.bank.settlement_address().to_string()]);
}

#[tokio::test]
async fn unreachable_facilitator_fails_the_build() {
    let nobody = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
    let build = |url: String| RemoteFacilitator::builder(url).build();
    assert_eq!(build(format!("http://{nobody}")).await.unwrap_err(), RemoteBuildError::Unreachable);
    let error = build("ftp://user:secret@host".to_owned()).await.unwrap_err();
    assert!(matches!(error, RemoteBuildError::Url(_)) && !error.to_string().contains("secret"), "{error}");
}

#[tokio::test]
async fn every_request_can_be_authenticated_for_its_method_and_path() {
    let stage = Stage::open_with(|service| service.bearer_key("POST /settle").bearer_key("POST /verify")).await;
    let sign = |request: Outgoing| async move {
        let token = format!("Bearer {} {}", request.method, request.path);
        Ok(HeaderMap::from_iter([(AUTHORIZATION, token.parse()?)]))
    };
    let seller = stage.seller(stage.remote().authenticate(sign), PaymentFlow::Upfront).await;
    let purchase = stage.customer().await.pay(&seller.app, evaluate("2 + 2 = 4")).await;
    assert_eq!(seller.ask(&purchase).await.status, 200);

    let stranger = stage.seller(stage.remote().bearer_token("another"), PaymentFlow::Upfront).await;
    let purchase = stage.customer().await.pay(&stranger.app, evaluate("2 + 2 = 4")).await;
    assert_eq!(stranger.ask(&purchase).await.status, 503, "nobody verified it");
    assert_eq!(stranger.handled(), 0);
}

#[tokio::test]
async fn payer_without_funds_is_refused_before_the_work() {
    let stage = Stage::open().await;
    let seller = stage.seller(stage.remote(), PaymentFlow::Authorization).await;
    let poor = support::scripted::customer();
    let purchase = poor.pay(&seller.app, evaluate("2 + 2 = 4")).await;
    let answer = seller.ask(&purchase).await;
    assert_eq!((answer.status.as_u16(), answer.reason().as_str()), (402, "insufficient_funds"));
    assert_eq!((seller.handled(), stage.settles().len()), (0, 0));
    assert!(stage.bank.ledger().list(&Default::default()).await.unwrap().is_empty(), "verifying commits nothing");
}

pub(crate) fn chain_url(stage: &Stage) -> String {
    support::chain::Chain::rpc_url(&stage.chain)
}
