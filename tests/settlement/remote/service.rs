//! The facilitator service, asked directly.

use std::{sync::Arc, time::Duration};

use alloy_primitives::{Address, B256, U256};
use alloy_sol_types::{SolCall as _, sol};
use axum::{Router, body::Body};
use futures_util::future::join_all;
use reqwest::Client;
use serde_json::{Value, json};
use tokio::{
    io::AsyncWriteExt as _,
    net::{TcpListener, TcpStream},
    sync::Notify,
};
use tower::ServiceExt as _;
use tower_x402::{
    Clock as _, ManualClock, Network, SystemClock,
    facilitator::Facilitator as _,
    ledger::{FulfilmentStep, Ledger, LedgerError, Listing, MemoryLedger, SettlementStep, Settling},
    ops::Operator,
    payment::{Funds, PaymentKey, Prechecked, Rejection, SettlementOutcome, Verified, Window},
    protocol::Reason,
    server::PeerAddress,
};
use x402_facilitator::FacilitatorService;

use super::stage::Stage;
use support::{
    around_ledger::{Around, AroundLedger, Call},
    authorization,
    chain::Chain as _,
    devnet::DevnetChain,
    eventually::in_time,
    scripted::{Scripted, customer, failed_in, key, not_yet, paid},
    shop::{Customer, PRICE, Purchase, Shop},
};

/// A payment of the customer to a payee of its choice, as a resource server would have got it.
pub(crate) fn purchase(customer: &Customer, pay_to: Address) -> Purchase {
    let asset = tower_x402::Network::BASE_SEPOLIA.usdc().unwrap();
    let offer = json!({
        "scheme": "exact", "network": "eip155:84532", "amount": PRICE.to_string(), "asset": asset.address,
        "payTo": pay_to, "maxTimeoutSeconds": 60, "extra": { "name": asset.name, "version": asset.version },
    });
    customer.sign(&json!({ "x402Version": 2, "accepts": [offer], "resource": { "url": "https://a.example/" } }), 0)
}

pub(crate) fn request(purchase: &Purchase) -> Value {
    json!({ "x402Version": 2, "paymentPayload": purchase.payload(), "paymentRequirements": purchase.offer })
}

pub(crate) async fn post(stage: &Stage, path: &str, body: &Value) -> (u16, Value) {
    let url = format!("http://{}/{path}", stage.address);
    let request = Client::new().post(url).header("content-type", "application/json").body(body.to_string());
    let response = request.send().await.unwrap();
    let status = response.status().as_u16();
    (status, serde_json::from_slice(&response.bytes().await.unwrap()).unwrap())
}

#[tokio::test]
async fn verification_changes_nothing() {
    let stage = Stage::open().await;
    let (customer, pay_to) = (stage.customer().await, authorization::random_address());
    let good = purchase(&customer, pay_to);
    for _ in 0..2 {
        let (status, said) = post(&stage, "verify", &request(&good)).await;
        assert_eq!((status, &said["isValid"]), (200, &json!(true)), "{said}");
        assert_eq!(said["payer"], json!(customer.from.to_string()));
    }
    assert!(stage.bank.ledger().list(&Listing::default()).await.unwrap().is_empty());
    assert_eq!(stage.chain.balance(pay_to).await, 0);
}

#[tokio::test]
async fn repeated_settlement_has_the_same_answer() {
    let stage = Stage::open().await;
    let pay_to = authorization::random_address();
    let purchase = purchase(&stage.customer().await, pay_to);
    let body = request(&purchase);
    let answers = join_all((0..10).map(|_| post(&stage, "settle", &body))).await;
    let later = post(&stage, "settle", &body).await;
    assert_eq!((later.0, &later.1["success"]), (200, &json!(true)), "{later:?}");
    assert!(answers.iter().all(|answer| *answer == later), "{answers:?}");
    assert_eq!(stage.chain.token_transfers(pay_to).await.len(), 1);
    assert_eq!(stage.chain.token_transfers(pay_to).await[0].transaction.to_string(), later.1["transaction"]);

    let (_, said) = post(&stage, "verify", &body).await;
    assert_eq!(
        (&said["isValid"], &said["invalidReason"]),
        (&json!(false), &json!("invalid_exact_evm_nonce_already_used"))
    );
}

#[tokio::test]
async fn what_is_settled_for_others_is_owed_to_nobody() {
    let stage = Stage::open().await;
    let purchase = purchase(&stage.customer().await, authorization::random_address());
    let (_, said) = post(&stage, "settle", &request(&purchase)).await;
    assert_eq!(said["success"], json!(true), "{said}");
    // Long after whoever settled it has let go of it.
    let later = ManualClock::at(SystemClock.now() + 3_600);
    let operator = Operator::new(stage.bank.ledger().clone()).clock(Arc::new(later));
    let report = operator.report().await.unwrap();
    let [asset] = &report.assets[..] else { panic!("{report:?}") };
    assert_eq!((asset.paid.payments, asset.owed.payments), (1, 0));
}

#[tokio::test]
async fn of_two_payments_with_one_nonce_only_the_paid_one_is_reported() {
    let stage = Stage::open().await;
    let customer = stage.customer().await;
    let good = purchase(&customer, authorization::random_address());
    let mut decoy = purchase(&customer, authorization::random_address());
    decoy.authorization.nonce = good.authorization.nonce;
    decoy.resign();
    // At once, so that most find a settlement under way.
    let both = [request(&decoy), request(&good)];
    let answers = join_all((0..10).map(|number| post(&stage, "settle", &both[number % 2]))).await;
    let mut paid = 0;
    for (number, purchase) in [&decoy, &good].into_iter().enumerate() {
        let income = stage.chain.balance(purchase.authorization.to).await;
        let told = |answer: &&(u16, Value)| answer.1["success"] == json!(true);
        let successes = answers.iter().skip(number).step_by(2).filter(told).count();
        assert_eq!(successes, if income == 0 { 0 } else { 5 }, "{income} units: {answers:?}");
        paid += income;
    }
    assert_eq!(paid, PRICE);
}

#[tokio::test]
async fn payment_executed_after_a_failure_is_reported_as_settled() {
    let ledger: Arc<dyn Ledger> = Arc::new(MemoryLedger::new());
    let journal = ledger.clone();
    // A transaction fails, and what it holds is executed by somebody else: from then on the nonce is used.
    let verify = |call, _| async move {
        let used = || Rejection::new(Reason::NonceAlreadyUsed, "the authorization was used");
        if call == 0 { Ok(Verified::default()) } else { Err(used().into()) }
    };
    let settle = move |call, payment: Prechecked| {
        let journal = journal.clone();
        async move {
            if call > 0 {
                return Ok(paid());
            }
            let transaction = B256::repeat_byte(1);
            journal.advance(&payment.key(), &SettlementStep::Submit { transaction }.into()).await.unwrap();
            Ok(failed_in(Some(transaction)))
        }
    };
    let mut bank = Scripted::new().verify(verify).settle(settle);
    bank.ledger = ledger;
    let service = FacilitatorService::builder(bank).build();
    let body = request(&purchase(&customer(), authorization::random_address()));
    let first = settle_at(&service, &body).await;
    assert_eq!((&first["success"], &first["errorReason"]), (&json!(false), &json!("insufficient_funds")), "{first}");
    let again = settle_at(&service, &body).await;
    assert_eq!((&again["success"], &again["transaction"]), (&json!(true), &json!(B256::repeat_byte(0x77))), "{again}");
}

/// Asks a service by itself to settle this.
async fn settle_at(service: &FacilitatorService, body: &Value) -> Value {
    let request = http::Request::post("/settle").header("content-type", "application/json");
    let response = service.clone().oneshot(request.body(Body::from(body.to_string())).unwrap()).await.unwrap();
    let bytes = axum::body::to_bytes(Body::new(response.into_body()), 1 << 16).await.unwrap();
    serde_json::from_slice(&bytes).unwrap()
}

fn is_paid(said: &Value) -> bool {
    said["success"] == json!(true)
}

/// That a nonce is used does not tell for what.
fn is_refused(said: &Value) -> bool {
    (&said["success"], &said["errorReason"]) == (&json!(false), &json!("invalid_exact_evm_nonce_already_used"))
}

#[tokio::test]
async fn settled_payment_does_not_settle_another_with_its_nonce() {
    let stage = Stage::open().await;
    let customer = stage.customer().await;
    let good = purchase(&customer, authorization::random_address());
    let (_, said) = post(&stage, "settle", &request(&good)).await;
    assert!(is_paid(&said), "{said}");
    let mut other = purchase(&customer, authorization::random_address());
    other.authorization.nonce = good.authorization.nonce;
    other.resign();
    let (_, said) = post(&stage, "settle", &request(&other)).await;
    assert!(is_refused(&said), "{said}");
    assert_eq!(stage.chain.balance(other.authorization.to).await, 0);
}

/// The layer has sold something for it. The service would tell another seller that it was paid.
#[tokio::test]
async fn payment_to_a_layer_is_not_paid_to_a_service_on_its_ledger_too() {
    let scripted = Arc::new(Scripted::new());
    let (app, _) = support::scripted::serve(support::scripted::layer(&scripted), support::scripted::echo);
    let purchase = customer().pay(&app, support::shop::evaluate("x")).await;
    assert_eq!(support::shop::send(&app, purchase.on(support::shop::evaluate("x"))).await.status, 200);
    let mut bank = Scripted::new();
    bank.ledger = scripted.ledger.clone();
    let said = settle_at(&FacilitatorService::builder(bank).build(), &request(&purchase)).await;
    assert!(is_refused(&said), "{said}");
}

/// A signature that is not the payer's key's may be its wallet's: only the chain can tell, and it was asked about the first one alone.
#[tokio::test]
async fn wallet_payment_is_settled_once_and_only_for_its_signature() {
    let bank = Arc::new(Scripted::new());
    let service = FacilitatorService::builder(bank.clone()).build();
    let mut purchase = purchase(&customer(), authorization::random_address());
    purchase.signature = vec![1; 65].into();
    for _ in 0..2 {
        let said = settle_at(&service, &request(&purchase)).await;
        assert!(is_paid(&said), "{said}");
    }
    assert_eq!(bank.settlements(), 1);
    purchase.signature = vec![2; 65].into();
    let said = settle_at(&service, &request(&purchase)).await;
    assert!(is_refused(&said), "{said}");
    assert_eq!(bank.settlements(), 1);
}

/// Another process has submitted it meanwhile.
#[tokio::test]
async fn failure_refused_by_the_ledger_is_not_reported_by_a_service() {
    let ledger: Arc<dyn Ledger> = Arc::new(MemoryLedger::new());
    let others = ledger.clone();
    let settle = move |_, payment: Prechecked| {
        let others = others.clone();
        async move {
            let until = authorization::unix_now() + 600;
            for step in [
                SettlementStep::Claim(Settling { by: 7, until }),
                SettlementStep::Submit { transaction: B256::repeat_byte(1) },
            ] {
                others.advance(&payment.key(), &step.into()).await.unwrap();
            }
            Ok(not_yet())
        }
    };
    let mut bank = Scripted::new().settle(settle);
    bank.ledger = ledger;
    let service = FacilitatorService::builder(bank).build();
    let said = settle_at(&service, &request(&purchase(&customer(), authorization::random_address()))).await;
    assert_eq!(said["errorReason"], json!("settlement_pending"), "{said}");
}

/// Rule F5 of x402-conformance: no success before there is a block, and what is pending names its transaction and network.
#[tokio::test]
async fn settlement_is_pending_under_its_transaction_until_it_is_in_a_block() {
    let chain = DevnetChain::start(None).await;
    let patience = Duration::from_secs(1);
    let shop = Shop::open_with(&chain, |bank| bank.rpc_url(chain.rpc_url()).confirm_timeout(patience)).await;
    let service = FacilitatorService::builder(shop.facilitator.clone()).build();
    let customer = Customer::with_funds(&chain, PRICE).await;
    let body = request(&purchase(&customer, shop.pay_to));
    chain.devnet.stall(true);
    let pending = settle_at(&service, &body).await;
    assert_eq!((is_paid(&pending), &pending["errorReason"]), (false, &json!("settlement_pending")), "{pending}");
    assert_eq!(pending["network"], "eip155:84532");
    assert!(pending["transaction"].as_str().is_some_and(|hash| hash.len() == 66), "{pending}");
    chain.devnet.stall(false);
    chain.devnet.mine();
    let settled = settle_at(&service, &body).await;
    assert!(is_paid(&settled), "{settled}");
    assert_eq!(settled["transaction"], pending["transaction"]);
    assert_eq!(chain.balance(shop.pay_to).await, PRICE);
}

/// Two processes of a service on one ledger: what one of them settles, for the first time or once more, the other one does not.
#[tokio::test]
async fn one_process_of_a_service_settles_a_payment_at_a_time() {
    let ledger: Arc<dyn Ledger> = Arc::new(MemoryLedger::new());
    let body = request(&purchase(&customer(), authorization::random_address()));
    let (begun, go_on) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let (begin, told, journal) = (begun.clone(), go_on.clone(), ledger.clone());
    let settle = move |call, payment: Prechecked| {
        let (begin, told, journal) = (begin.clone(), told.clone(), journal.clone());
        async move {
            begin.notify_one();
            told.notified().await;
            if call == 0 {
                let submit = SettlementStep::Submit { transaction: B256::repeat_byte(1) };
                journal.advance(&payment.key(), &submit.into()).await.unwrap();
            }
            Ok(if call == 0 { failed_in(Some(B256::repeat_byte(1))) } else { paid() })
        }
    };
    let (mut one, mut other) = (Scripted::new().settle(settle), Scripted::new());
    (one.ledger, other.ledger) = (ledger.clone(), ledger);
    let (one, other) = (Arc::new(one), Arc::new(other));
    let [first, second] = [one.clone(), other.clone()].map(|bank| FacilitatorService::builder(bank).build());
    for is_last in [false, true] {
        let meanwhile = async {
            in_time("it is being settled", begun.notified()).await;
            let said = settle_at(&second, &body).await;
            go_on.notify_one();
            said
        };
        let (told, meanwhile) = tokio::join!(settle_at(&first, &body), meanwhile);
        assert_eq!(meanwhile["errorReason"], json!("settlement_pending"), "{meanwhile}");
        assert_eq!(is_paid(&told), is_last, "{told}");
    }
    assert_eq!((one.settlements(), other.settlements()), (2, 0));
}

/// When a payment of a payer is first admitted in vain, its earlier one is recorded as settled.
struct SettlesTheEarlier {
    ledger: Arc<dyn Ledger>,
    earlier: PaymentKey,
}

impl Around for SettlesTheEarlier {
    async fn around<T: Send>(
        &self,
        call: Call<'_>,
        work: impl Future<Output = Result<T, LedgerError>> + Send,
    ) -> Result<T, LedgerError> {
        let result = work.await;
        if let (Call::Fulfil(FulfilmentStep::Admit { .. }), Err(LedgerError::BalancePending)) = (call, &result) {
            let settle = SettlementStep::Settle { transaction: B256::repeat_byte(1), block: Some(5), fee: None };
            self.ledger.advance(&self.earlier, &settle.into()).await.unwrap();
        }
        result
    }
}

/// The balance may have been read before the earlier payment took its part of it, or after.
#[tokio::test]
async fn payment_waits_at_a_service_until_the_payers_earlier_one_is_recorded() {
    let ledger: Arc<dyn Ledger> = Arc::new(MemoryLedger::new());
    let payer = customer();
    let [earlier, later] = [(); 2].map(|()| purchase(&payer, authorization::random_address()));
    let balance_of_one = |_, _| async {
        let mut verified = Verified::default();
        verified.funds = Some(Funds { balance: U256::from(PRICE), block: 5 });
        Ok(verified)
    };
    let journal = ledger.clone();
    let submit = move |_, payment: Prechecked| {
        let journal = journal.clone();
        async move {
            let transaction = B256::repeat_byte(1);
            journal.advance(&payment.key(), &SettlementStep::Submit { transaction }.into()).await.unwrap();
            Ok(SettlementOutcome::Unknown { transaction: Some(transaction) })
        }
    };
    let mut bank = Scripted::new().verify(balance_of_one).settle(submit);
    bank.ledger = ledger.clone();
    let said = settle_at(&FacilitatorService::builder(bank).build(), &request(&earlier)).await;
    assert_eq!(said["errorReason"], json!("settlement_pending"), "{said}");

    let mut bank = Scripted::new().verify(balance_of_one);
    let around = SettlesTheEarlier { ledger: ledger.clone(), earlier: key(&earlier) };
    bank.ledger = AroundLedger::new(ledger, around);
    let said = settle_at(&FacilitatorService::builder(bank).build(), &request(&later)).await;
    assert!(is_paid(&said), "{said}");
}

#[tokio::test]
async fn v1_is_supported() {
    let stage = Stage::open().await;
    let pay_to = authorization::random_address();
    let purchase = purchase(&stage.customer().await, pay_to);
    let mut offer = purchase.offer.clone();
    offer["maxAmountRequired"] = offer["amount"].take();
    offer["network"] = json!("base-sepolia");
    offer["resource"] = json!("https://a.example/");
    let body = json!({ "x402Version": 1, "paymentPayload": purchase.payload_v1(), "paymentRequirements": offer });
    let (_, said) = post(&stage, "verify", &body).await;
    assert_eq!(said["isValid"], json!(true), "{said}");
    let (_, said) = post(&stage, "settle", &body).await;
    assert_eq!((&said["success"], &said["network"]), (&json!(true), &json!("base-sepolia")), "{said}");
    assert_eq!(stage.chain.balance(pay_to).await, PRICE);
}

#[tokio::test]
async fn invalid_payment_is_refused_with_a_reason_and_not_sent() {
    let (stage, other) = (Stage::open().await, authorization::random_address());
    let allowed = authorization::random_address();
    let strict = Stage::open_with(|service| service.payee(allowed)).await;
    let customer = stage.customer().await;
    let change = |change: fn(&mut Value)| {
        let mut body = request(&purchase(&customer, allowed));
        change(&mut body);
        body
    };
    let cases = [
        ("invalid_payment_requirements", 200, change(|body| body["paymentRequirements"]["amount"] = json!("1"))),
        ("unsupported_scheme", 400, change(|body| body["paymentRequirements"]["scheme"] = json!("escrow"))),
        ("invalid_x402_version", 400, change(|body| body["x402Version"] = json!(1))),
        ("invalid_payload", 400, change(|body| body["paymentPayload"]["payload"]["signature"] = json!(7))),
        ("invalid_payload", 400, json!({})),
        (
            "invalid_network",
            200,
            change(|body| {
                body["paymentRequirements"]["network"] = json!("eip155:8453");
                body["paymentPayload"]["accepted"]["network"] = json!("eip155:8453");
            }),
        ),
        (
            "invalid_payment_requirements",
            200,
            change(|body| {
                let token = json!("0x2222222222222222222222222222222222222222");
                body["paymentRequirements"]["asset"] = token.clone();
                body["paymentPayload"]["accepted"]["asset"] = token;
            }),
        ),
    ];
    for (reason, status, body) in cases {
        let (verified, said) = post(&stage, "verify", &body).await;
        assert_eq!((verified, &said["invalidReason"]), (status, &json!(reason)), "{body}");
        let (settled, said) = post(&stage, "settle", &body).await;
        assert_eq!(
            (settled, &said["errorReason"], &said["success"]),
            (status, &json!(reason), &json!(false)),
            "{body}"
        );
    }
    let (_, said) = post(&strict, "settle", &request(&purchase(&customer, other))).await;
    assert_eq!(said["errorReason"], json!("invalid_payment_requirements"), "{said}");
    assert_eq!(stage.bank.stats().transactions + strict.bank.stats().transactions, 0);
}

#[tokio::test]
async fn failed_settlement_is_repeated_only_if_asked_for() {
    let stage = Stage::open().await;
    let pay_to = authorization::random_address();
    let poor = customer();
    let body = request(&purchase(&poor, pay_to));
    let (status, said) = post(&stage, "settle", &body).await;
    assert_eq!((status, &said["errorReason"]), (200, &json!("insufficient_funds")), "{said}");
    assert!(
        stage.bank.ledger().list(&Listing::default()).await.unwrap().is_empty(),
        "nothing was sent, nothing is kept"
    );
    stage.chain.mint(poor.from, PRICE).await;
    let (_, said) = post(&stage, "settle", &body).await;
    assert_eq!(said["success"], json!(true), "{said}");
    assert_eq!(stage.chain.balance(pay_to).await, PRICE);
}

#[tokio::test]
async fn unauthorized_and_rate_limited_callers_are_refused() {
    let stage = Stage::open_with(|service| service.bearer_key("secret").rate(3, Duration::from_secs(3_600))).await;
    let body = request(&purchase(&stage.customer().await, authorization::random_address()));
    let mut statuses = Vec::new();
    for _ in 0..5 {
        statuses.push(post(&stage, "verify", &body).await.0);
    }
    assert_eq!(statuses, [401, 401, 401, 429, 429]);
    let (health, _) = get(&stage, "healthz").await;
    assert_eq!(health, 200);
    let known = Client::new().post(format!("http://{}/verify", stage.address)).bearer_auth("secret");
    assert_eq!(known.body(body.to_string()).send().await.unwrap().status(), 200, "another caller is not concerned");
}

#[tokio::test]
async fn service_with_two_facilitators_uses_the_one_that_serves_the_network() {
    let stage = Stage::open().await;
    let body = request(&purchase(&stage.customer().await, authorization::random_address()));
    let elsewhere = || {
        let mut scripted = Scripted::new();
        scripted.serves = Some(Network::BASE);
        FacilitatorService::builder(scripted)
    };
    assert_eq!(settle_at(&elsewhere().build(), &body).await["success"], false);
    let both = elsewhere().facilitator(stage.bank.clone()).build();
    assert_eq!(settle_at(&both, &body).await["success"], true);
}

#[tokio::test]
async fn service_keeps_the_window_and_the_number_of_requests_that_it_is_given() {
    let body = async |stage: &Stage| request(&purchase(&stage.customer().await, authorization::random_address()));
    // The payment is valid for a minute.
    for (remaining, is_valid) in [(30, true), (90, false)] {
        let stage = Stage::open_with(|service| service.window(Window::default().remaining(remaining))).await;
        let (status, said) = post(&stage, "verify", &body(&stage).await).await;
        assert_eq!((status, &said["isValid"]), (200, &json!(is_valid)), "{said}");
    }
    let stage = Stage::open_with(|service| service.max_concurrent(0)).await;
    assert_eq!(post(&stage, "verify", &body(&stage).await).await.0, 503);
}

#[tokio::test]
async fn oversized_body_is_not_read() {
    let stage = Stage::open().await;
    let url = format!("http://{}/verify", stage.address);
    let response = Client::new().post(url).body(vec![b' '; 65 * 1024]).send().await.unwrap();
    assert_eq!(response.status(), 413);
    let (status, _) = get(&stage, "verify").await;
    assert_eq!(status, 405);
    assert_eq!(get(&stage, "elsewhere").await.0, 404);
}

pub(crate) async fn get(stage: &Stage, path: &str) -> (u16, Value) {
    let response = reqwest::get(format!("http://{}/{path}", stage.address)).await.unwrap();
    (response.status().as_u16(), serde_json::from_slice(&response.bytes().await.unwrap()).unwrap())
}

/// A stranger needs nothing to open connections that send half of a body.
#[tokio::test]
async fn honest_callers_are_served_while_strangers_bodies_stand_still() {
    const STALLED: usize = 400;
    let service = FacilitatorService::builder(Scripted::new()).max_concurrent(64).build();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move { axum::serve(listener, Router::new().fallback_service(service)).await });
    let before = resident();
    let mut stalled = Vec::new();
    for _ in 0..STALLED {
        let mut stream = TcpStream::connect(address).await.unwrap();
        let head = "POST /settle HTTP/1.1\r\nhost: a.example\r\ncontent-length: 60000\r\n\r\n";
        stream.write_all([head, &" ".repeat(50_000)].concat().as_bytes()).await.unwrap();
        stalled.push(stream);
    }
    for _ in 0..5 {
        let body = request(&purchase(&customer(), authorization::random_address())).to_string();
        let asked = Client::new().post(format!("http://{address}/settle")).body(body).send();
        let answer = in_time("an honest caller is answered", asked).await.unwrap();
        assert_eq!(answer.status(), 200);
        assert!(is_paid(&serde_json::from_slice(&answer.bytes().await.unwrap()).unwrap()));
    }
    // 4 MiB of bodies, and what the server keeps for each connection.
    let grown = resident().saturating_sub(before);
    assert!(grown < 48 << 20, "{grown} bytes");
}

/// Each cost the service gas. Payers can do this to an honest seller, so it waits and is not banned.
#[tokio::test(start_paused = true)]
async fn stranger_whose_settlements_revert_has_to_wait() {
    let bank = || Scripted::new().settle(|_, _| async { Ok(failed_in(Some(B256::repeat_byte(1)))) });
    let open = FacilitatorService::builder(bank()).build();
    let keyed = FacilitatorService::builder(bank()).bearer_key("secret").build();
    let payer = customer();
    let ask = async |service: &FacilitatorService, peer: u8| {
        let body = request(&purchase(&payer, authorization::random_address())).to_string();
        let mut request = http::Request::post("/settle").body(Body::from(body)).unwrap();
        request.extensions_mut().insert(PeerAddress([192, 0, 2, peer].into()));
        request.headers_mut().insert("authorization", "Bearer secret".parse().unwrap());
        let response = service.clone().oneshot(request).await.unwrap();
        let wait = response.headers().get("retry-after").map(|wait| wait.to_str().unwrap().to_owned());
        (response.status().as_u16(), wait)
    };
    for _ in 0..10 {
        assert_eq!(ask(&open, 1).await, (200, None));
    }
    assert_eq!(ask(&open, 1).await, (429, Some("60".to_owned())));
    assert_eq!(ask(&open, 2).await, (200, None), "others do not wait for it");
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert_eq!(ask(&open, 1).await, (200, None));
    assert_eq!(ask(&open, 1).await.0, 429);
    for _ in 0..20 {
        assert_eq!(ask(&keyed, 1).await, (200, None));
    }
}

#[tokio::test(start_paused = true)]
async fn settlements_under_way_count_towards_the_gas_of_an_hour() {
    let slow = Scripted::new().settle(|_, _| async {
        tokio::time::sleep(Duration::from_secs(5)).await;
        Ok(paid())
    });
    let service = FacilitatorService::builder(slow).gas_per_hour(1_600_000).build();
    let ask = async || {
        let body = request(&purchase(&customer(), authorization::random_address())).to_string();
        let request = http::Request::post("/settle").body(Body::from(body)).unwrap();
        service.clone().oneshot(request).await.unwrap().status().as_u16()
    };
    let (first, second) = tokio::join!(ask(), ask());
    assert_eq!((first, second), (200, 503), "a quarter may be used at once, which is one settlement");
    assert_eq!(ask().await, 200);
}

/// Returns the memory of this process, in bytes.
fn resident() -> usize {
    let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
    pages.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * 4_096
}

/// A wallet decides how much gas its check takes, and how long its signature is.
#[tokio::test]
async fn payment_of_a_wallet_costs_a_stranger_at_most_400_000_gas() {
    let stage = Stage::open().await;
    let payer = stage.customer().await;
    let wallet = stage.chain.deploy_wallet(payer.from).await;
    stage.chain.mint(wallet, 100 * PRICE).await;
    let payer = Customer { from: wallet, ..payer };
    let burn = |gas: u64| {
        let call = TestWallet::setGasBurnCall { amount: U256::from(gas) };
        stage.chain.devnet.execute(Address::repeat_byte(9), wallet, call.abi_encode()).unwrap();
    };
    let mut used = 0;
    for (burnt, padding, is_paid) in
        [(0, 0, true), (150_000, 0, true), (300_000, 0, false), (0, 2_000, true), (0, 20_000, false)]
    {
        burn(burnt);
        let mut purchase = purchase(&payer, authorization::random_address());
        purchase.signature = [purchase.signature.to_vec(), vec![1; padding]].concat().into();
        let (_, verified) = post(&stage, "verify", &request(&purchase)).await;
        let (_, settled) = post(&stage, "settle", &request(&purchase)).await;
        assert_eq!(
            (&verified["isValid"], &settled["success"]),
            (&json!(is_paid), &json!(is_paid)),
            "{burnt} {settled}"
        );
        if !is_paid {
            assert_eq!(settled["errorReason"], "invalid_exact_evm_transaction_simulation_failed", "{settled}");
        }
        let gas = stage.bank.stats().gas_used - used;
        assert!(gas <= 400_000 && (gas > 0) == is_paid, "{gas}");
        used += gas;
    }
}

sol! {
    interface TestWallet {
        function setGasBurn(uint256 amount) external;
    }
}
