//! The programs of the guides run as they stand in the documents, against the devnet and against each other.

use std::{net::TcpListener, path::Path, time::Duration};

use alloy_primitives::{Address, U256, address};
use alloy_signer_local::PrivateKeySigner;
use reqwest::{Client, Response, StatusCode};
use serde_json::json;
use support::programs::example;
use tokio::{
    process::{Child, Command},
    time::{sleep, timeout},
};
use tower_x402::{
    Network, Usdc,
    client::{Payer, PaymentMiddleware, PaymentOutcome, Receipt, ReceiptExt},
    devnet::{Devnet, DevnetPort},
    facilitator::{OnchainFacilitator, RemoteFacilitator, service::FacilitatorService},
    protocol::payment_status::Status,
    server::RequirePaymentLayer,
};
use x402_market::{CardFetcher, EvaluationClient, Score, Submission, Task};

const PATIENCE: Duration = Duration::from_secs(60);
/// The payee that the guides name.
const PAYEE: Address = address!("70997970C51812dc3A010C7d01b50e0d17dc79C8");

#[tokio::test]
async fn program_of_charge_is_paid_by_the_program_of_pay() {
    let node = free_address();
    let seller = Program::start("charge", &[("NODE_LISTEN", &node)], None).await;
    let buyer = PrivateKeySigner::random();
    let mint = json!({ "jsonrpc": "2.0", "id": 1, "method": "devnet_mint", "params": [buyer.address(), "0xf4240"] });
    let minted = Client::new().post(format!("http://{node}")).body(mint.to_string());
    let minted = minted.header("content-type", "application/json").send().await.unwrap();
    assert!(minted.status().is_success());
    assert_eq!(pay(&seller, &buyer).await, "settled for $0.001, $0.999 left\nwell done\n");
}

#[tokio::test]
async fn program_of_production_sells_reports_and_remembers_after_a_restart() {
    let chain = Chain::start(Network::BASE).await;
    let directory = tempfile::tempdir().unwrap();
    let buyer = chain.buyer("$1");
    let variables = [("RPC_URL", chain.node.url().as_str())];
    let start = || Program::start_in(directory.path(), "production", &variables, Some(&chain.settler));

    let seller = start().await;
    assert_eq!(seller.get("/readyz").await.status(), StatusCode::OK);
    let unpaid = Client::new().post(format!("{}/evaluate", seller.url)).send().await.unwrap();
    assert_eq!(unpaid.status(), StatusCode::PAYMENT_REQUIRED);
    let Receipt { network, asset, payer, nonce, transaction, .. } = buy(&seller.url, &buyer).await;
    assert_eq!(chain.devnet.balance_of(PAYEE).unwrap(), "$0.01".parse().unwrap());
    seller.stop().await;

    let restarted = start().await;
    let query = format!("network={network}&asset={asset}&payer={payer}&nonce={nonce}");
    let status = restarted.get(&format!("/payments/status?{query}")).await;
    let status: Status = serde_json::from_slice(&status.bytes().await.unwrap()).unwrap();
    assert!(status.state.is_paid() && status.transaction == transaction, "{status:?}");
    assert_eq!(pay(&restarted, &buyer).await, "settled for $0.01, $0.99 left\nwell done\n");
    restarted.stop().await;
}

#[tokio::test]
async fn program_of_remote_sells_through_our_facilitator_service() {
    let chain = Chain::start(Network::BASE_SEPOLIA).await;
    let onchain = OnchainFacilitator::builder().network(Network::BASE_SEPOLIA).client(chain.devnet.rpc_client());
    let onchain = onchain.signer(chain.settler.clone()).build().await.unwrap();
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let service = axum::Router::new().fallback_service(FacilitatorService::builder(onchain).build());
    let serving = tokio::spawn(axum::serve(listener, service).into_future());

    let seller = Program::start("remote", &[("FACILITATOR_URL", &url)], None).await;
    assert_eq!(pay(&seller, &chain.buyer("$1")).await, "settled for $0.001, $0.999 left\nwell done\n");
    assert_eq!(chain.devnet.balance_of(PAYEE).unwrap(), "$0.001".parse().unwrap());
    serving.abort();
}

#[tokio::test]
async fn facilitator_program_of_remote_settles_for_sellers_with_its_key_only() {
    let chain = Chain::start(Network::BASE_SEPOLIA).await;
    let variables = [("RPC_URL", chain.node.url().as_str()), ("FACILITATOR_KEY", "a-key-of-the-sellers")];
    let facilitator = Program::start("facilitator", &variables, Some(&chain.settler)).await;
    let stranger = Client::new().post(format!("{}/settle", facilitator.url)).body("{}").send().await.unwrap();
    assert_eq!(stranger.status(), StatusCode::UNAUTHORIZED);

    let remote = RemoteFacilitator::builder(&facilitator.url).bearer_token("a-key-of-the-sellers");
    let paywall = RequirePaymentLayer::builder()
        .price("$0.001")
        .pay_to(Network::BASE_SEPOLIA, PAYEE)
        .facilitator(remote.build().await.unwrap())
        .build()
        .unwrap();
    let app = axum::Router::new().route("/evaluate", axum::routing::post(async || "well done")).layer(paywall);
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let serving = tokio::spawn(axum::serve(listener, app).into_future());
    buy(&url, &chain.buyer("$1")).await;
    assert_eq!(chain.devnet.balance_of(PAYEE).unwrap(), "$0.001".parse().unwrap());
    serving.abort();
    facilitator.stop().await;
}

#[tokio::test]
async fn program_of_sell_verdicts_is_paid_for_a_verdict() {
    let chain = Chain::start(Network::BASE_SEPOLIA).await;
    let address = free_address();
    let url = format!("http://{address}");
    let variables = [("RPC_URL", chain.node.url().as_str()), ("CARD_URL", &url), ("LISTEN", &address)];
    let _evaluator = Program::start("sell_verdicts", &variables, Some(&chain.settler)).await;
    let card = CardFetcher::new().unwrap().fetch(&url.parse().unwrap()).await.unwrap();
    let payer = Payer::builder(chain.buyer("$1")).build();
    let task = Task::new("reasoning", "Why is the sky blue?").unwrap();
    let submission = Submission::single(task, "It is, because of Rayleigh scattering.").unwrap();
    let bought = EvaluationClient::new(payer).unwrap().evaluate(&card, &submission).await.unwrap();
    assert_eq!(bought.evaluation.verdicts[0].score, Score::MAX);
    assert_eq!(chain.devnet.balance_of(chain.settler.address()).unwrap(), "$0.001".parse().unwrap());
}

/// A chain with a node on a port, and a settlement key with gas.
struct Chain {
    devnet: Devnet,
    node: DevnetPort,
    settler: PrivateKeySigner,
}

impl Chain {
    async fn start(network: Network) -> Self {
        let devnet = Devnet::builder().chain_id(network.chain_id()).start().await.unwrap();
        let node = devnet.serve("127.0.0.1:0").await.unwrap();
        let settler = PrivateKeySigner::random();
        devnet.fund(settler.address(), U256::from(10).pow(U256::from(18)));
        Self { devnet, node, settler }
    }

    /// Returns a new key with this amount of USDC.
    fn buyer(&self, amount: &str) -> PrivateKeySigner {
        let key = PrivateKeySigner::random();
        self.devnet.mint(key.address(), amount.parse::<Usdc>().unwrap()).unwrap();
        key
    }
}

/// A running program of a guide that serves HTTP; killed when dropped.
struct Program {
    url: String,
    process: Child,
}

impl Program {
    async fn start(name: &str, variables: &[(&str, &str)], key: Option<&PrivateKeySigner>) -> Self {
        Self::start_in(Path::new("."), name, variables, key).await
    }

    /// Starts a program in this directory, and waits until it accepts connections.
    async fn start_in(
        directory: &Path,
        name: &str,
        variables: &[(&str, &str)],
        key: Option<&PrivateKeySigner>,
    ) -> Self {
        let chosen = variables.iter().find_map(|(name, value)| (*name == "LISTEN").then(|| (*value).to_owned()));
        let address = chosen.unwrap_or_else(free_address);
        let mut command = example("guides");
        command.arg(name).current_dir(directory).env("LISTEN", &address).envs(variables.iter().copied());
        if let Some(key) = key {
            command.env("SETTLEMENT_PRIVATE_KEY", key.to_bytes().to_string());
        }
        let mut process = command.spawn().unwrap();
        let accepts = async {
            while tokio::net::TcpStream::connect(&address).await.is_err() {
                assert_eq!(process.try_wait().unwrap(), None, "{name} ended before it served");
                sleep(Duration::from_millis(20)).await;
            }
        };
        timeout(PATIENCE, accepts).await.unwrap_or_else(|_| panic!("{name} does not serve"));
        Self { url: format!("http://{address}"), process }
    }

    async fn get(&self, path: &str) -> Response {
        reqwest::get(format!("{}{path}", self.url)).await.unwrap()
    }

    /// Interrupts the program, and waits until it has ended in order.
    async fn stop(mut self) {
        let id = self.process.id().unwrap().to_string();
        assert!(Command::new("kill").args(["-INT", &id]).status().await.unwrap().success());
        assert!(timeout(PATIENCE, self.process.wait()).await.unwrap().unwrap().success());
    }
}

/// Pays the seller at this origin for a request that succeeds.
async fn buy(seller: &str, key: &PrivateKeySigner) -> Receipt {
    let client = PaymentMiddleware::new(Payer::builder(key.clone()).build()).client(Client::builder()).unwrap();
    let bought = client.post(format!("{seller}/evaluate")).send().await.unwrap();
    assert_eq!((bought.status(), bought.receipt().unwrap().outcome), (StatusCode::OK, PaymentOutcome::Settled));
    bought.receipt().unwrap().clone()
}

/// Runs the program of the guide on paying, and returns its output.
async fn pay(seller: &Program, key: &PrivateKeySigner) -> String {
    let mut command = example("guides");
    command.arg("pay").env("SELLER_URL", format!("{}/evaluate", seller.url));
    command.env("STUDENT_PRIVATE_KEY", key.to_bytes().to_string());
    let output = timeout(PATIENCE, command.output()).await.unwrap().unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// Returns an address on which nothing listened a moment ago.
fn free_address() -> String {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string()
}
