//! The code of the guides runs as it stands in the documents, against the devnet and against each other.
//!
//! `examples/build.rs` takes every block of Rust out of the guides. The one that needs the API server of Atropos runs in
//! `peers/atropos/guide.rs`.

use std::{net::TcpListener, path::Path, time::Duration};

use alloy_primitives::{Address, U256, address};
use alloy_provider::Provider as _;
use alloy_signer_local::PrivateKeySigner;
use reqwest::{Client, Method, Response, StatusCode};
use serde_json::json;
use support::programs::example;
use tokio::{
    process::{Child, Command},
    time::{sleep, timeout},
};
use tower_x402::{
    Network, Usdc,
    client::{Budget, ChannelPolicy, Journal, Payer, PaymentMiddleware, PaymentOutcome, Receipt, ReceiptExt},
    facilitator::{BatchSettler, Facilitator, OnchainFacilitator, RemoteFacilitator, channels::OnchainChannels},
    protocol::payment_status::Status,
    server::RequirePaymentLayer,
};
use x402_devnet::{Devnet, DevnetPort};
use x402_directory::{DirectoryClient, DirectoryService, DirectoryStore, PaymentChecker};
use x402_facilitator::FacilitatorService;
use x402_market::{
    AgentCard, CardFetcher, Confidence, EvaluationClient, EvaluatorService, Score, Student, Submission, Task, Truth,
    Verdict, judge::output_judge,
};

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
    let service = FacilitatorService::builder(chain.facilitator().await).build();
    let url = serve(axum::Router::new().fallback_service(service)).await;
    let seller = Program::start("remote", &[("FACILITATOR_URL", &url)], None).await;
    assert_eq!(pay(&seller, &chain.buyer("$1")).await, "settled for $0.001, $0.999 left\nwell done\n");
    assert_eq!(chain.devnet.balance_of(PAYEE).unwrap(), "$0.001".parse().unwrap());
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
    let url = serve(app).await;
    buy(&url, &chain.buyer("$1")).await;
    assert_eq!(chain.devnet.balance_of(PAYEE).unwrap(), "$0.001".parse().unwrap());
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

#[tokio::test]
async fn part_of_sell_verdicts_is_paid_by_voucher() {
    let chain = Chain::start(Network::BASE_SEPOLIA).await;
    let (address, directory) = (free_address(), tempfile::tempdir().unwrap());
    let (url, claimer) = (format!("http://{address}"), chain.other_settler().to_bytes().to_string());
    let variables = [
        ("RPC_URL", chain.node.url().as_str()),
        ("CARD_URL", &url),
        ("LISTEN", &address),
        ("CHANNELS_PRIVATE_KEY", &claimer),
    ];
    let name = "verdicts_by_voucher";
    let _evaluator = Program::start_in(directory.path(), name, &variables, Some(&chain.settler)).await;
    let card = CardFetcher::new().unwrap().fetch(&url.parse().unwrap()).await.unwrap();
    let payer = Payer::builder(chain.buyer("$1")).vouchers(ChannelPolicy::new()).build();
    let client = EvaluationClient::new(payer).unwrap();
    for number in 0..2 {
        let task = Task::new("reasoning", "Why is the sky blue?").unwrap();
        let submission = Submission::single(task, format!("Answer {number}.")).unwrap();
        let bought = client.evaluate(&card, &submission).await.unwrap();
        assert!(bought.receipt.unwrap().channel.is_some(), "it is paid by voucher");
    }
}

#[tokio::test]
async fn program_of_upto_is_charged_what_its_handler_says() {
    assert_eq!(output("upto", &[], None).await, "charged $0.025 of $0.10\n");
}

#[tokio::test]
async fn program_of_vouchers_claims_twenty_payments() {
    assert_eq!(output("vouchers", &[], None).await, "20 answers, and the payee has $0.02\n");
}

#[tokio::test]
async fn part_of_vouchers_claims_through_a_facilitator_without_gas_of_its_own() {
    let chain = Chain::start(Network::BASE_SEPOLIA).await;
    let contract = OnchainChannels::builder().network(Network::BASE_SEPOLIA).client(chain.devnet.rpc_client());
    let contract = contract.signer(chain.settler.clone()).build().await.unwrap();
    let onchain = OnchainFacilitator::builder().network(Network::BASE_SEPOLIA).client(chain.devnet.rpc_client());
    let onchain = onchain.signer(chain.other_settler()).build().await.unwrap();
    let service = FacilitatorService::builder(onchain).channels(contract).build();
    let facilitator = serve(axum::Router::new().fallback_service(service)).await;

    let directory = tempfile::tempdir().unwrap();
    let variables = [("FACILITATOR_URL", &*facilitator), ("RPC_URL", chain.node.url().as_str())];
    let authorizer = PrivateKeySigner::random();
    let seller = Program::start_in(directory.path(), "channels_elsewhere", &variables, Some(&authorizer)).await;
    let payer = Payer::builder(chain.buyer("$1")).vouchers(ChannelPolicy::new()).build();
    let client = PaymentMiddleware::new(payer).client(Client::builder()).unwrap();
    for _ in 0..3 {
        let bought = client.post(format!("{}/evaluate", seller.url)).send().await.unwrap();
        assert_eq!(bought.text().await.unwrap(), "well done");
    }
    seller.stop().await;
    assert_eq!(chain.devnet.balance_of(PAYEE).unwrap(), "$0.003".parse().unwrap());
    assert_eq!(chain.devnet.eth_balance(authorizer.address()), U256::ZERO);
}

#[tokio::test]
async fn parts_of_charge_name_the_payer_and_price_by_the_request() {
    let chain = Chain::start(Network::BASE_SEPOLIA).await;
    let seller = chain.seller_of_charge().await;
    let key = chain.buyer("$1");
    let payer = Payer::builder(key.clone()).build();
    let client = PaymentMiddleware::new(payer).client(Client::builder()).unwrap();
    let bought = client.post(format!("{}/evaluate", seller.url)).send().await.unwrap();
    assert_eq!(bought.text().await.unwrap(), format!("1000 units from {}", key.address()));
    let by_body = client.post(format!("{}/by_body", seller.url)).body("three\nlines\nof text").send().await.unwrap();
    assert_eq!(by_body.receipt().unwrap().amount, "$0.00003".parse().unwrap());
    let by_path = client.get(format!("{}/by_path", seller.url)).send().await.unwrap();
    assert_eq!(by_path.receipt().unwrap().amount, "$0.001".parse().unwrap());
    assert_eq!(seller.get("/by_path?preview").await.status(), StatusCode::OK);
    let asked = Client::new().post(format!("{}/browsers/evaluate", seller.url)).header("origin", "https://app.example");
    let unpaid = asked.send().await.unwrap();
    assert_eq!(
        (unpaid.status(), &unpaid.headers()["access-control-allow-origin"]),
        (StatusCode::PAYMENT_REQUIRED, &"*".parse().unwrap())
    );
    let exposed = unpaid.headers()["access-control-expose-headers"].to_str().unwrap();
    assert_eq!(exposed, "payment-required,payment-response,x-payment-response,retry-after,x-request-id");
}

#[tokio::test]
async fn parts_of_pay_say_which_limit_refused_and_what_is_open() {
    let chain = Chain::start(Network::BASE_SEPOLIA).await;
    let seller = chain.seller_of_charge().await;
    let key = chain.buyer("$1");
    let url = format!("{}/by_path", seller.url);
    let refused = output("refusals", &[("SELLER_URL", &url)], Some(&key)).await;
    assert!(refused.starts_with("not paid: ") && refused.contains("$0.0001"), "{refused}");

    // A payment that was signed, and of which nobody knows whether it was sent.
    let directory = tempfile::tempdir().unwrap();
    let journal = Journal::open(directory.path().join("payments.journal")).unwrap();
    let payer = Payer::builder(key).budget(Budget::builder().journal(journal).build()).build();
    let unpaid = seller.get("/by_path").await;
    let signed = payer.pay(&Method::GET, &url.parse().unwrap(), unpaid.headers(), None).await.unwrap();
    drop((signed.expect("the seller asks for a payment"), payer));
    let variables = [("RPC_URL", chain.node.url().as_str())];
    let found = output_in(directory.path(), "reopen", &variables, None).await;
    assert_eq!(found, "0 were paid, 0 are void, 1 are still open\n");
}

#[tokio::test]
async fn part_of_pay_names_a_purchase_that_is_paid_once_by_two_processes() {
    let chain = Chain::start(Network::BASE_SEPOLIA).await;
    let seller = chain.seller_of_charge().await;
    let (key, directory) = (chain.buyer("$1"), tempfile::tempdir().unwrap());
    let url = format!("{}/by_path", seller.url);
    for _ in 0..2 {
        let bought = output_in(directory.path(), "named", &[("SELLER_URL", &url)], Some(&key)).await;
        assert_eq!(bought, "well done for $0.001 in all\n");
    }
    assert_eq!(chain.devnet.balance_of(PAYEE).unwrap(), "$0.001".parse().unwrap());
}

#[tokio::test]
async fn parts_of_production_deploy_the_batch_settler_and_list_the_days_payments() {
    let chain = Chain::start(Network::BASE_SEPOLIA).await;
    let variables = [("RPC_URL", chain.node.url().as_str())];
    let settler = || async { chain.devnet.provider().get_code_at(BatchSettler::ADDRESS).await.unwrap() };
    assert!(settler().await.is_empty());
    for _ in 0..2 {
        output("batches", &variables, Some(&chain.settler)).await;
        assert!(!settler().await.is_empty());
    }

    let directory = tempfile::tempdir().unwrap();
    let base = Chain::start(Network::BASE).await;
    let variables = [("RPC_URL", base.node.url().as_str())];
    let seller = Program::start_in(directory.path(), "production", &variables, Some(&base.settler)).await;
    let Receipt { payer, transaction, .. } = buy(&seller.url, &base.buyer("$1")).await;
    seller.stop().await;
    let listed = output_in(directory.path(), "end_of_day", &[], None).await;
    assert!(listed.starts_with("1 payments, of which 0 are owed\n"), "{listed}");
    let [payer, transaction] = [payer.to_string(), transaction.unwrap().to_string()].map(|text| text.to_lowercase());
    let listed = listed.to_lowercase();
    assert!(listed.contains(&payer) && listed.contains(&transaction), "{listed}");
}

#[tokio::test]
async fn part_of_remote_sells_through_a_facilitator_that_a_node_checks() {
    let chain = Chain::start(Network::BASE).await;
    let service = FacilitatorService::builder(chain.facilitator().await).bearer_key("a-key-of-the-sellers").build();
    let facilitator = serve(axum::Router::new().fallback_service(service)).await;
    let directory = tempfile::tempdir().unwrap();
    let variables = [
        ("FACILITATOR_URL", &*facilitator),
        ("RPC_URL", chain.node.url().as_str()),
        ("FACILITATOR_KEY", "a-key-of-the-sellers"),
    ];
    let seller = Program::start_in(directory.path(), "checked", &variables, None).await;
    assert_eq!(pay(&seller, &chain.buyer("$1")).await, "settled for $0.001, $0.999 left\nwell done\n");
    assert_eq!(chain.devnet.balance_of(PAYEE).unwrap(), "$0.001".parse().unwrap());
}

#[tokio::test]
async fn program_of_hire_evaluators_hires_three_that_a_facilitator_lists() {
    let chain = Chain::start(Network::BASE_SEPOLIA).await;
    let service = FacilitatorService::builder(chain.facilitator().await);
    let service = service.catalogue(100, Duration::from_secs(86_400)).catalogue_local_hosts(true).build();
    let facilitator = serve(axum::Router::new().fallback_service(service)).await;
    let mut origins = Vec::new();
    for _ in 0..3 {
        let remote = RemoteFacilitator::builder(&facilitator).build().await.unwrap();
        let origin = evaluator(remote, "$0.0003").await;
        // Facilitators list what was paid for.
        let card = CardFetcher::new().unwrap().fetch(&origin.parse().unwrap()).await.unwrap();
        let client = EvaluationClient::new(Payer::builder(chain.buyer("$1")).build()).unwrap();
        let task = Task::new("reasoning", "Why is the sky blue?").unwrap();
        client.evaluate(&card, &Submission::single(task, "It just is.").unwrap()).await.unwrap();
        origins.push(origin);
    }
    let variables = [("FACILITATOR_URL", &*facilitator)];
    let listed = output("catalogue", &variables, None).await;
    assert!(origins.iter().all(|origin| listed.contains(origin)), "{listed}");

    let directory = tempfile::tempdir().unwrap();
    let feedback = output_in(directory.path(), "hire_evaluators", &variables, Some(&chain.buyer("$1"))).await;
    assert!(feedback.starts_with("Some([") && feedback.ends_with("for $0.0018\n"), "{feedback}");
}

#[tokio::test]
async fn parts_of_hire_evaluators_audit_and_read_reports() {
    let chain = Chain::start(Network::BASE_SEPOLIA).await;
    let origin = evaluator(chain.facilitator().await, "$0.001").await;
    let checker = PaymentChecker::new(Network::BASE_SEPOLIA).rpc_url(chain.node.url()).unwrap().depth(0);
    let service = DirectoryService::builder(DirectoryStore::in_memory().await.unwrap()).private_hosts(true);
    let service = service.payment_checker(checker).build().unwrap();
    let directory_url = serve(axum::Router::new().fallback_service(service)).await;
    let directory = DirectoryClient::new(&directory_url).unwrap();
    directory.list(&origin.parse().unwrap()).await.unwrap();

    let variables = [("EVALUATOR_URL", &*origin), ("DIRECTORY_URL", &*directory_url)];
    let audited = output("audits", &variables, Some(&chain.buyer("$1"))).await;
    assert_eq!(audited, "1 audits, 1 of 1 pairs right\n");

    let other = chain.buyer("$1");
    let payer = Payer::builder(other.clone()).build();
    let student = Student::builder(payer).source(vec![origin.parse::<url::Url>().unwrap()]).tasks(100).seed(1);
    let student = student.build().unwrap();
    student.discover().await;
    let task = Task::new("arithmetic", "What is 17 * 23?").unwrap();
    let answers = Submission::group(task, ["391", "381"]).unwrap();
    let feedback = student.evaluate(&answers).await.unwrap();
    assert_eq!(feedback.judged_outputs(), 2, "{feedback:?}");
    student.audit(&feedback, &Truth::good([true, false])).await.unwrap();
    let published = directory.publish_log(student.evidence(), &chain.devnet.asset(), &other, |_| None).await.unwrap();
    assert_eq!(published.accepted, 1, "{published:?}");
    assert_eq!(output("reports", &variables, Some(&chain.buyer("$1"))).await, "1 reports\n");
}

#[tokio::test]
async fn part_of_sell_verdicts_opens_a_judge_that_learns() {
    let directory = tempfile::tempdir().unwrap();
    assert_eq!(output_in(directory.path(), "learning", &[], None).await, "version Some(\"0\")\n");
    assert!(directory.path().join("learned.jsonl").exists());
}

/// Starts an evaluator of reasons and sums with this price. Returns its origin.
async fn evaluator(facilitator: impl Facilitator + 'static, price: &str) -> String {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let origin = format!("http://{}", listener.local_addr().unwrap());
    let key = PrivateKeySigner::random();
    let card = AgentCard::builder("Reasons and sums", &origin)
        .skill("reasoning", "Says whether an answer gives reasons", Score::MAX)
        .skill("arithmetic", "Marks sums", Score::MAX)
        .price(price)
        .pay_to(Network::BASE_SEPOLIA, key.address());
    let card = card.build().unwrap().sign(&key).await.unwrap();
    let judge = output_judge(async |_task, output| {
        let is_good = output.contains("ecause") || output == "391";
        let score = if is_good { Score::MAX } else { Score::MIN };
        Ok(Verdict::new(score, Confidence::new(0.9).unwrap(), "as it seems"))
    });
    let service = EvaluatorService::builder(card, judge).facilitator(facilitator).build().unwrap();
    let app = axum::Router::new().fallback_service(service);
    tokio::spawn(axum::serve(listener, app).into_future());
    origin
}

/// Serves a router for as long as the test runs. Returns its origin.
async fn serve(app: axum::Router) -> String {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let origin = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(axum::serve(listener, app).into_future());
    origin
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

    async fn facilitator(&self) -> OnchainFacilitator {
        let facilitator = OnchainFacilitator::builder().network(self.devnet.network()).client(self.devnet.rpc_client());
        facilitator.signer(self.settler.clone()).build().await.unwrap()
    }

    /// Returns a new key with gas.
    fn other_settler(&self) -> PrivateKeySigner {
        let key = PrivateKeySigner::random();
        self.devnet.fund(key.address(), U256::from(10).pow(U256::from(18)));
        key
    }

    /// Starts the seller with the prices of the guide on charging.
    async fn seller_of_charge(&self) -> Program {
        Program::start("prices", &[("RPC_URL", self.node.url().as_str())], Some(&self.settler)).await
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

    /// Has the program stop, as systemd and Kubernetes do, and waits until it has ended in order.
    async fn stop(mut self) {
        let id = self.process.id().unwrap().to_string();
        assert!(Command::new("kill").args(["-TERM", &id]).status().await.unwrap().success());
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
    output("pay", &[("SELLER_URL", &format!("{}/evaluate", seller.url))], Some(key)).await
}

/// Runs code of a guide that ends by itself, and returns its output.
async fn output(name: &str, variables: &[(&str, &str)], key: Option<&PrivateKeySigner>) -> String {
    output_in(Path::new("."), name, variables, key).await
}

async fn output_in(directory: &Path, name: &str, variables: &[(&str, &str)], key: Option<&PrivateKeySigner>) -> String {
    let mut command = example("guides");
    command.arg(name).current_dir(directory).envs(variables.iter().copied());
    if let Some(key) = key {
        let key = key.to_bytes().to_string();
        command.env("STUDENT_PRIVATE_KEY", &key).env("SETTLEMENT_PRIVATE_KEY", key);
    }
    let output = timeout(PATIENCE, command.output()).await.unwrap().unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// Returns an address on which nothing listened a moment ago.
fn free_address() -> String {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string()
}
