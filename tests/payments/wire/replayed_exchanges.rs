//! What was on the wire between us and the programs of others (`tests/exchanges`), replayed: a change of ours that one of them
//! would stumble over is seen without node, Python or the peer. `docs/peers.md` says how the exchanges are recorded.

use std::{
    collections::BTreeMap,
    fs,
    sync::{Arc, Mutex, atomic::Ordering},
};

use alloy_primitives::{Address, B256, U256, address, b256};
use alloy_signer_local::PrivateKeySigner;
use axum::{Router, body::Body, extract::Request};
use base64::{Engine as _, prelude::BASE64_STANDARD};
use http::{HeaderMap, HeaderName, HeaderValue, Method, Response, StatusCode};
use http_body_util::BodyExt as _;
use serde::Deserialize;
use serde_json::{Value, json, value::RawValue};
use support::{
    chain::Chain,
    devnet::DevnetChain,
    scripted::{echo, serve},
    shop::{PRICE, send},
};
use tower::ServiceExt as _;
use tower_x402::{
    Clock, ManualClock, Network, Nonces, RandomnessError,
    client::{Payer, PaymentOutcome},
    facilitator::{Facilitator, OnchainFacilitator, RemoteFacilitator},
    protocol::PaymentFlow,
    server::{RequirePaymentLayer, RequirePaymentLayerBuilder},
};
use x402_facilitator::FacilitatorService;

/// Who bought and who was paid in every exchange: accounts of anvil's, whose keys everybody knows.
const BUYER: B256 = b256!("59c6995e998f97a5a0044966f0945389dc9e86dae88c7a8412f4603b6b78690d");
const PAYEE: Address = address!("90F79bf6EB2c4f870365E785982E1f101E93b906");

#[tokio::test]
async fn the_payments_of_their_clients_are_accepted_and_settled() {
    let files = recorded("client");
    assert!(files.iter().any(|file| file.x402_version == 1) && files.iter().any(|file| file.flow == "upfront"));
    for file in files {
        let (demand, sale) = (file.to("/evaluate", 0), file.to("/evaluate", 1));
        let stage = Stage::of(&file, sale.at).await;
        let (app, handled) = serve(stage.sells(&file, stage.onchain().await), echo);

        let ours = send(&app, demand.request()).await;
        assert_eq!(ours.status, demand.status(), "{file}");
        let (ours, theirs) = (parts(&ours.headers, &ours.body), demand.answered());
        for message in ["payment-required", "body"] {
            for field in ["x402Version", "accepts"] {
                assert_eq!(
                    ours[message][field], theirs[message][field],
                    "{file}: what they were asked for is not asked"
                );
            }
        }

        let spoilt = send(&app, sale.with_another_signature()).await;
        assert_eq!((spoilt.status.as_u16(), handled.load(Ordering::SeqCst)), (402, 0), "{file}: {}", spoilt.text());
        let answer = send(&app, sale.request()).await;
        assert_eq!(answer.status, sale.status(), "{file}: {}", answer.text());
        assert_eq!(handled.load(Ordering::SeqCst), 1, "{file}");
        let (ours, theirs) = (parts(&answer.headers, &answer.body), sale.answered());
        let receipt = if file.x402_version == 1 { "x-payment-response" } else { "payment-response" };
        assert_eq!(ours.contains_key("x-payment-response"), theirs.contains_key("x-payment-response"), "{file}");
        same_but_for(&["transaction"], &ours[receipt], &theirs[receipt], &file);
        assert_eq!(stage.chain.balance(PAYEE).await, PRICE, "{file}");
    }
}

#[tokio::test]
async fn our_client_pays_their_offers_as_they_accepted_it_and_reads_their_receipts() {
    let (sold, facilitated) = (recorded("server"), recorded("facilitated"));
    assert!(sold.len() > 10 && facilitated.len() > 10);
    for file in sold.into_iter().chain(facilitated) {
        let (demand, sale) = (file.to("/evaluate", 0), file.to("/evaluate", 1));
        let (name, payment) = sale.payment();
        let authorization = &payment["payload"]["authorization"];
        let nonce: B256 = text(&authorization["nonce"]).parse().unwrap();
        // The student backdates by ten minutes.
        let signed_at = text(&authorization["validAfter"]).parse::<u64>().unwrap() + 600;
        assert!(signed_at.abs_diff(sale.at) <= 1, "{file}");

        let payer = Payer::builder(PrivateKeySigner::from_bytes(&BUYER).unwrap())
            .clock(Arc::new(ManualClock::at(signed_at)))
            .nonces(Recorded(nonce))
            .build();
        let url = "http://127.0.0.1:4021/evaluate".parse().unwrap();
        let (headers, body) = (demand.response_headers(), demand.response.body_bytes());
        let paid = payer.pay(&Method::POST, &url, &headers, Some(&body)).await.unwrap().expect("an offer of x402");
        assert_eq!(paid.header_name(), name, "{file}");
        assert_eq!(decode(paid.header()).unwrap(), payment, "{file}: they accepted another payment");

        let mut paid = paid;
        paid.answered(sale.status(), &sale.response_headers(), Some(&sale.response.body_bytes()));
        let receipt = paid.conclude().await;
        let answered = sale.answered();
        if !file.is_settled() {
            let why = text(&answered.get("payment-required").unwrap_or(&answered["body"])["error"]);
            // Some say it in a sentence, of which only a code is believed.
            let (outcome, reason) = match why.strip_prefix("Verification failed: ") {
                Some(sentence) if sentence.contains(' ') => {
                    (PaymentOutcome::Unknown, format!("the server asked again: {why}"))
                }
                Some(code) => (PaymentOutcome::Failed, code.to_owned()),
                None => (PaymentOutcome::Failed, why.to_owned()),
            };
            assert_eq!((receipt.outcome, receipt.transaction), (outcome, None), "{file}");
            assert_eq!(receipt.reason, Some(reason), "{file}");
            continue;
        }
        let settlement = answered.get("payment-response").or_else(|| answered.get("x-payment-response")).unwrap();
        let transaction = text(&settlement["transaction"]).parse().unwrap();
        assert_eq!((receipt.outcome, receipt.transaction), (PaymentOutcome::Settled, Some(transaction)), "{file}");
    }
}

#[tokio::test]
async fn our_facilitator_answers_their_servers_as_they_understood_it() {
    for file in recorded("facilitated") {
        let stage = Stage::of(&file, file.exchanges[0].at).await;
        let service = FacilitatorService::builder(stage.onchain().await).clock(stage.clock.clone()).build();
        let asked: Vec<&Exchange> = file.exchanges.iter().filter(|exchange| exchange.path() != "/evaluate").collect();
        assert_eq!(asked.iter().any(|exchange| exchange.path() == "/settle"), file.is_settled(), "{file}");
        for exchange in asked {
            let response = service.clone().oneshot(exchange.request()).await.unwrap();
            assert_eq!(response.status(), exchange.status(), "{file} {}", exchange.request.head);
            let mut ours: Value = serde_json::from_slice(&response.collect().await.unwrap().to_bytes()).unwrap();
            let theirs: Value = serde_json::from_slice(&exchange.response.body_bytes()).unwrap();
            // What we support beyond what was recorded is in kinds of its own.
            if let Some(kinds) = ours.get_mut("kinds").and_then(Value::as_array_mut) {
                kinds.retain(|kind| kind["scheme"] == "exact");
            }
            // Who signs for us is up to the installation, and what is said to people may change.
            same_but_for(&["transaction", "signers", "invalidMessage"], &ours, &theirs, &file);
        }
        assert_eq!(stage.chain.balance(PAYEE).await, file.income(), "{file}: settled once, however often it was asked");
    }
}

#[tokio::test]
async fn our_server_asks_their_facilitators_as_they_understood_it_and_reads_their_answers() {
    let files = recorded("facilitator");
    assert!(files.len() >= 6, "official, Python and x402-rs, in both flows");
    for file in files {
        let sale = file.to("/evaluate", 1);
        let stage = Stage::of(&file, sale.at).await;
        let (url, asked) = plays(&file).await;
        let remote = RemoteFacilitator::builder(url).network(Network::BASE_SEPOLIA).clock(stage.clock.clone());
        let (app, handled) = serve(stage.sells(&file, remote.build().await.unwrap()), echo);
        let answer = send(&app, sale.request()).await;
        let expected = (sale.status(), u64::from(file.is_settled()));
        assert_eq!((answer.status, handled.load(Ordering::SeqCst)), expected, "{file}: {}", answer.text());
        let (ours, theirs) = (parts(&answer.headers, &answer.body), sale.answered());
        assert_eq!(ours.get("payment-response"), theirs.get("payment-response"), "{file}");
        if !file.is_settled() {
            assert_eq!(ours["payment-required"]["error"], theirs["payment-required"]["error"], "{file}");
        }

        let asked = std::mem::take(&mut *asked.lock().unwrap());
        assert_eq!(asked.contains_key("/settle"), file.is_settled(), "{file}");
        for (path, body) in asked {
            let mut understood: Value = serde_json::from_slice(&file.to(&path, 0).request.body_bytes()).unwrap();
            // What the payer echoed is passed on as far as this seller, which is not the recorded one in every word, offered it.
            for echo in ["resource", "extensions"] {
                if body["paymentPayload"].get(echo).is_none() {
                    understood["paymentPayload"].as_object_mut().unwrap().remove(echo);
                }
            }
            if let Some(declared) = body["paymentPayload"]["extensions"].as_object() {
                let echoed = understood["paymentPayload"]["extensions"].as_object_mut().unwrap();
                echoed.retain(|name, _| declared.contains_key(name));
            }
            assert_eq!(body, understood, "{file}: {path} is asked in another way");
        }
    }
}

/// A file of exchanges.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct File {
    peer: String,
    version: String,
    role: String,
    x402_version: u8,
    flow: String,
    /// What became of the payment: `settled` or `refused`.
    outcome: String,
    exchanges: Vec<Exchange>,
}

#[derive(Deserialize)]
struct Exchange {
    /// When the request arrived, in seconds since 1970.
    at: u64,
    request: Message,
    response: Message,
}

#[derive(Deserialize)]
struct Message {
    /// Method and path, or the status.
    head: String,
    headers: BTreeMap<String, Box<RawValue>>,
    body: Option<Box<RawValue>>,
}

impl std::fmt::Display for File {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { peer, version, role, x402_version, flow, outcome, .. } = self;
        write!(f, "{role} {peer} {version}, v{x402_version}, {flow}, {outcome}")
    }
}

impl File {
    /// The exchange that is the `index`th to this path.
    fn to(&self, path: &str, index: usize) -> &Exchange {
        let mut found = self.exchanges.iter().filter(|exchange| exchange.path() == path);
        found.nth(index).unwrap_or_else(|| panic!("{self}: nothing is said to {path}"))
    }

    fn is_settled(&self) -> bool {
        self.outcome == "settled"
    }

    /// What is on the payee's account in the end.
    fn income(&self) -> u64 {
        if self.is_settled() { PRICE } else { 0 }
    }

    fn flow(&self) -> PaymentFlow {
        if self.flow == "upfront" { PaymentFlow::Upfront } else { PaymentFlow::Authorization }
    }
}

impl Exchange {
    fn path(&self) -> &str {
        self.request.head.split_once(' ').unwrap().1
    }

    fn status(&self) -> StatusCode {
        self.response.head.parse().unwrap()
    }

    fn request(&self) -> Request {
        let (method, path) = self.request.head.split_once(' ').unwrap();
        let mut request = Request::builder().method(method).uri(path).body(Body::from(self.request.body_bytes()));
        *request.as_mut().unwrap().headers_mut() = self.request.header_map();
        request.unwrap()
    }

    fn response_headers(&self) -> HeaderMap {
        self.response.header_map()
    }

    /// What the answer says, by header, and in `body`.
    fn answered(&self) -> BTreeMap<String, Value> {
        parts(&self.response.header_map(), &self.response.body_bytes())
    }

    /// The payment in the request, and the header it is in.
    fn payment(&self) -> (HeaderName, Value) {
        let headers = self.request.header_map();
        let name = ["payment-signature", "x-payment"].into_iter().find(|name| headers.contains_key(*name));
        let name = HeaderName::from_static(name.expect("a payment"));
        let payment = decode(&headers[&name]).unwrap();
        (name, payment)
    }

    /// The request with another payment, signed by nobody.
    fn with_another_signature(&self) -> Request {
        let ((name, mut payment), mut request) = (self.payment(), self.request());
        let authorization = &mut payment["payload"]["authorization"];
        authorization["nonce"] = json!(B256::repeat_byte(7));
        let header = BASE64_STANDARD.encode(payment.to_string());
        request.headers_mut().insert(name, header.parse().unwrap());
        request
    }
}

impl Message {
    /// The headers as they were, to the byte.
    fn header_map(&self) -> HeaderMap {
        #[derive(Deserialize)]
        struct Base64 {
            base64: Box<RawValue>,
        }
        let value = |json: &RawValue| match serde_json::from_str::<Base64>(json.get()) {
            Ok(Base64 { base64 }) => BASE64_STANDARD.encode(base64.get()),
            Err(_) => serde_json::from_str(json.get()).unwrap(),
        };
        self.headers.iter().map(|(name, json)| (name.parse().unwrap(), value(json).parse().unwrap())).collect()
    }

    fn body_bytes(&self) -> Vec<u8> {
        let text = self.body.as_ref().map_or("", |body| body.get());
        serde_json::from_str::<String>(text).unwrap_or_else(|_| text.to_owned()).into_bytes()
    }
}

/// The files of one role.
fn recorded(role: &str) -> Vec<File> {
    let directory = support::repository().join("tests/exchanges");
    let mut paths: Vec<_> = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    let files = paths.iter().map(|path| {
        let text = fs::read_to_string(path).unwrap();
        serde_json::from_str::<File>(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
    });
    files.filter(|file| file.role == role).collect()
}

/// A chain at the time of an exchange, on which the buyer has what it pays, or nothing.
struct Stage {
    chain: DevnetChain,
    clock: Arc<dyn Clock>,
}

impl Stage {
    async fn of(file: &File, time: u64) -> Self {
        let chain = DevnetChain::start_at(time).await;
        chain.mint(PrivateKeySigner::from_bytes(&BUYER).unwrap().address(), file.income()).await;
        Self { chain, clock: Arc::new(ManualClock::at(time)) }
    }

    async fn onchain(&self) -> OnchainFacilitator {
        let settler = PrivateKeySigner::random();
        self.chain.fund(settler.address(), U256::from(10).pow(U256::from(18))).await;
        let facilitator = OnchainFacilitator::builder().rpc_url(self.chain.rpc_url()).network(Network::BASE_SEPOLIA);
        facilitator.signer(settler).clock(self.clock.clone()).build().await.unwrap()
    }

    /// What the evaluator sells, as far as its clients must understand it.
    fn sells(&self, file: &File, facilitator: impl Facilitator) -> RequirePaymentLayerBuilder {
        RequirePaymentLayer::builder()
            .price("$0.001")
            .pay_to(Network::BASE_SEPOLIA, PAYEE)
            .flow(file.flow())
            .facilitator(facilitator)
            .public_origin("http://evaluator.example")
            .description("Exact arithmetic and unit checking of a worked answer")
            .mime_type("application/json")
            .payment_identifier(true)
            .clock(self.clock.clone())
    }
}

/// The requests that were made of a facilitator, by path.
type Asked = Arc<Mutex<BTreeMap<String, Value>>>;

/// A facilitator that answers as the recorded one did; where it is, and what it is asked.
async fn plays(file: &File) -> (String, Asked) {
    let asked = Asked::default();
    let answers: BTreeMap<String, (StatusCode, HeaderMap, Vec<u8>)> = file
        .exchanges
        .iter()
        .filter(|exchange| exchange.path() != "/evaluate")
        .map(|exchange| {
            let answer = (exchange.status(), exchange.response_headers(), exchange.response.body_bytes());
            (exchange.path().to_owned(), answer)
        })
        .collect();
    let log = asked.clone();
    let handler = move |request: Request| {
        let (path, log) = (request.uri().path().to_owned(), log.clone());
        let answer = answers.get(&path).cloned();
        async move {
            let body = request.into_body().collect().await.unwrap().to_bytes();
            if let Ok(body) = serde_json::from_slice(&body) {
                log.lock().unwrap().insert(path, body);
            }
            let Some((status, headers, body)) = answer else { return Response::default() };
            let mut response = Response::new(Body::from(body));
            (*response.status_mut(), *response.headers_mut()) = (status, headers);
            response
        }
    };
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move { axum::serve(listener, Router::new().fallback(handler)).await });
    (url, asked)
}

/// The nonce of the recorded payment.
#[derive(Debug)]
struct Recorded(B256);

impl Nonces for Recorded {
    fn next(&self) -> Result<B256, RandomnessError> {
        Ok(self.0)
    }
}

/// The messages of an answer: those in headers, and the body.
fn parts(headers: &HeaderMap, body: &[u8]) -> BTreeMap<String, Value> {
    let decoded = headers.iter().filter_map(|(name, value)| Some((name.as_str().to_owned(), decode(value)?)));
    let mut parts: BTreeMap<String, Value> = decoded.collect();
    parts.insert("body".to_owned(), serde_json::from_slice(body).unwrap_or_default());
    parts
}

/// The message in a header.
fn decode(header: &HeaderValue) -> Option<Value> {
    serde_json::from_slice(&BASE64_STANDARD.decode(header).ok()?).ok()
}

/// The same fields with the same values; these may have others.
fn same_but_for(fields: &[&str], ours: &Value, theirs: &Value, file: &File) {
    let (mut ours, mut theirs) = (ours.clone(), theirs.clone());
    for field in fields {
        for message in [&mut ours, &mut theirs] {
            if let Some(value) = message.get_mut(*field) {
                let is_transaction = value.as_str().is_some_and(|hash| hash.parse::<B256>().is_ok());
                assert_eq!(is_transaction, *field == "transaction", "{file}: {field} is {value}");
                *value = Value::Null;
            }
        }
    }
    // Each writes an address in letters of its own: some in the payer's, some with the checksum.
    for message in [&mut ours, &mut theirs] {
        if let Some(payer) = message.get("payer").and_then(|payer| payer.as_str()?.parse::<Address>().ok()) {
            message["payer"] = json!(payer);
        }
    }
    assert_eq!(ours, theirs, "{file}");
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_else(|| panic!("{value} is not text"))
}
