//! Nodes that refuse some requests, that are behind others at the same address, or that keep few transactions of an account.

use std::{
    borrow::Cow,
    future::Future,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use alloy_consensus::{Transaction as _, TxEnvelope};
use alloy_eips::Decodable2718 as _;
use alloy_json_rpc::{ErrorPayload, RequestPacket, Response, ResponsePacket, ResponsePayload, RpcError};
use alloy_primitives::{Bytes, U64, U256};
use alloy_rpc_client::RpcClient;
use alloy_transport::{TransportError, TransportFut};
use futures_util::future::join_all;
use serde_json::{Value, json, value::to_raw_value};
use tokio::sync::Mutex;
use tower_service::Service;
use tower_x402::{
    ManualClock,
    facilitator::{
        Facilitator as _, NotReady, OnchainBuildError, OnchainFacilitator, OnchainFacilitatorBuilder, RemoteBuildError,
        RemoteFacilitator, VerifyError,
    },
    ledger::{MemoryLedger, ResponseLimits, SettlementState},
    payment::{SettlementOutcome, Terms},
    protocol::ExactOffer,
};
use x402_devnet::{BlockTime, Devnet, DevnetBuilder, Fault, Orphans};

use support::engine_stage::*;

type Answer = Result<Value, ErrorPayload>;
type Answering = Pin<Box<dyn Future<Output = Answer> + Send>>;

/// A node in front of the devnet. `answer` gets each call, with the number of the request that it came in.
#[derive(Clone)]
struct Front {
    devnet: Devnet,
    answer: Arc<dyn Fn(Devnet, u64, String, Value) -> Answering + Send + Sync>,
    requests: Arc<AtomicU64>,
}

impl Front {
    fn client<F: Future<Output = Answer> + Send + 'static>(
        devnet: &Devnet,
        answer: impl Fn(Devnet, u64, String, Value) -> F + Send + Sync + 'static,
    ) -> RpcClient {
        let answer =
            move |devnet, request, method, params| -> Answering { Box::pin(answer(devnet, request, method, params)) };
        let front = Self { devnet: devnet.clone(), answer: Arc::new(answer), requests: Arc::default() };
        RpcClient::new(front, true)
    }
}

impl Service<RequestPacket> for Front {
    type Response = ResponsePacket;
    type Error = TransportError;
    type Future = TransportFut<'static>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), TransportError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, packet: RequestPacket) -> Self::Future {
        let this = self.clone();
        Box::pin(async move {
            let number = this.requests.fetch_add(1, Ordering::Relaxed);
            let mut responses = Vec::new();
            for request in packet.requests() {
                let params = request.params().map_or(Value::Null, |params| serde_json::from_str(params.get()).unwrap());
                let answer = (this.answer)(this.devnet.clone(), number, request.method().to_owned(), params).await;
                let payload = match answer {
                    Ok(result) => ResponsePayload::Success(to_raw_value(&result).unwrap()),
                    Err(error) => {
                        ResponsePayload::Failure(ErrorPayload { code: error.code, message: error.message, data: None })
                    }
                };
                responses.push(Response { id: request.id().clone(), payload });
            }
            Ok(match packet {
                RequestPacket::Single(_) => ResponsePacket::Single(responses.remove(0)),
                RequestPacket::Batch(_) => ResponsePacket::Batch(responses),
            })
        })
    }
}

fn refusal(message: &'static str) -> ErrorPayload {
    ErrorPayload { code: -32000, message: Cow::Borrowed(message), data: None }
}

async fn ask(devnet: &Devnet, method: String, params: Value) -> Answer {
    devnet.rpc_client().request::<_, Value>(method, params).await.map_err(|error| match error {
        RpcError::ErrorResp(ErrorPayload { code, message, .. }) => ErrorPayload { code, message, data: None },
        other => panic!("{other}"),
    })
}

/// A facilitator that asks the devnet through the client that `front` makes.
async fn stage_behind(
    devnet: impl FnOnce(DevnetBuilder) -> DevnetBuilder,
    front: impl FnOnce(&Devnet) -> RpcClient,
    facilitator: impl FnOnce(OnchainFacilitatorBuilder) -> OnchainFacilitatorBuilder,
) -> Stage {
    let clock = Arc::new(ManualClock::at(1_800_000_000));
    let ledger = Arc::new(MemoryLedger::with(ResponseLimits::default(), 10_000, clock.clone()));
    let devnet = devnet(Devnet::builder().clock(clock.clone())).start().await.unwrap();
    devnet.fund(settlement_key().address(), U256::from(ETHER));
    let builder = OnchainFacilitator::builder()
        .network(devnet.network())
        .client(front(&devnet))
        .signer(settlement_key())
        .ledger(ledger.clone())
        .clock(clock.clone());
    let facilitator = facilitator(builder).build().await.unwrap();
    let terms = Arc::new(Terms::new(ExactOffer::new(devnet.asset(), U256::from(PRICE), PAYEE, VALID)));
    Stage { devnet, clock, ledger, facilitator, terms }
}

const RECEIPT: &str = "eth_getTransactionReceipt";
const REFUSED: &str = "archive requests require a paid plan";

fn refuses_receipts(call: &x402_devnet::RpcCall<'_>) -> Fault {
    match call.method {
        RECEIPT => Fault::Error { code: -32000, message: REFUSED.into() },
        "eth_sendRawTransactionSync" => Fault::Error { code: -32601, message: "Method not found".into() },
        _ => Fault::None,
    }
}

#[tokio::test(start_paused = true)]
async fn node_without_receipts_is_refused_at_build() {
    let devnet = Devnet::start().await.unwrap();
    let build = async |client| {
        OnchainFacilitator::builder().network(devnet.network()).client(client).signer(settlement_key()).build().await
    };
    let none = |devnet, _, method: String, params| async move {
        if method == RECEIPT { Ok(Value::Null) } else { ask(&devnet, method, params).await }
    };
    build(Front::client(&devnet, none)).await.expect("on a chain without transactions there is none to be had");
    devnet.faults().set(refuses_receipts);
    let error = build(devnet.rpc_client()).await.unwrap_err();
    assert_eq!(error, OnchainBuildError::Refused { method: RECEIPT, message: REFUSED.into() });
    devnet.faults().clear();
    devnet.mint(PAYEE, tower_x402::Usdc::from_atomic(1)).unwrap();
    let error = build(Front::client(&devnet, none)).await.unwrap_err();
    assert!(matches!(error, OnchainBuildError::Refused { method: RECEIPT, .. }), "{error}");
    build(devnet.rpc_client()).await.expect("this node has receipts");
}

#[tokio::test]
async fn node_without_receipts_confirms_no_remote_facilitator() {
    let devnet = Devnet::start().await.unwrap();
    let (network, port) = (devnet.network(), devnet.serve("127.0.0.1:0").await.unwrap());
    let build = async || {
        RemoteFacilitator::builder("http://127.0.0.1:9").network(network).confirm(network, port.url()).build().await
    };
    build().await.unwrap();
    devnet.faults().set(refuses_receipts);
    assert_eq!(build().await.unwrap_err(), RemoteBuildError::Receipts(network));
}

#[tokio::test(start_paused = true)]
async fn nothing_more_is_sold_while_the_node_refuses_receipts() {
    let stage = Stage::with(every(200), |builder| builder).await;
    let first = stage.payment(&stage.payer(1));
    let verified = stage.admit(&first).await;
    stage.devnet.faults().reset();
    stage.devnet.faults().set(refuses_receipts);
    let outcome = stage.settle(&first, &verified).await.unwrap();
    assert!(matches!(outcome, SettlementOutcome::Unknown { .. }), "{outcome:?}");

    let next = stage.payment(&stage.payer(1));
    let refused = stage.verify(&next).await;
    assert!(matches!(refused, Err(VerifyError::Unavailable(_))), "{refused:?}");
    until(async || stage.facilitator.readiness().await.reasons == [NotReady::Receipts]).await;
    tokio::time::sleep(Duration::from_secs(40)).await;
    let sends = stage.calls("eth_sendRawTransaction") + stage.calls("eth_sendRawTransactionSync");
    assert!(sends <= 20 && stage.calls(RECEIPT) <= 60, "{:?}", stage.devnet.faults().calls());

    stage.devnet.faults().clear();
    until(async || stage.facilitator.readiness().await.is_ready() && stage.verify(&next).await.is_ok()).await;
    until(async || stage.record(&first).await.settlement.paid_by().is_some()).await;
    assert_eq!(stage.received(), 1);
}

#[tokio::test(start_paused = true)]
async fn one_refused_receipt_stops_no_sale() {
    let stage = Stage::with(every(200), |builder| builder).await;
    stage.devnet.faults().set(|call| match (call.method, call.index) {
        (RECEIPT, 0) => refuses_receipts(call),
        ("eth_sendRawTransactionSync", _) => refuses_receipts(call),
        _ => Fault::None,
    });
    paid_by(&stage.admit_and_settle(&stage.payment(&stage.payer(1))).await);
    stage.verify(&stage.payment(&stage.payer(1))).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn node_without_a_history_of_fees_is_asked_for_the_price() {
    let stage = stage().await;
    stage.devnet.faults().set(|call| match call.method {
        "eth_feeHistory" => Fault::Error { code: -32000, message: REFUSED.into() },
        _ => Fault::None,
    });
    paid_by(&stage.admit_and_settle(&stage.payment(&stage.payer(1))).await);
}

/// How far one of the nodes is behind the other, in blocks.
const LAG: u64 = 3;

/// Answers as a node that is behind. It passes transactions on.
async fn answer_late(devnet: Devnet, method: String, mut params: Value) -> Answer {
    let head = devnet.block_number().saturating_sub(LAG);
    let block_of =
        |value: &Value| value.as_str().and_then(|text| text.parse::<U64>().ok()).map(|block| block.to::<u64>());
    let position = match &*method {
        "eth_blockNumber" => return Ok(json!(U64::from(head))),
        "eth_call" | "eth_getBalance" | "eth_getCode" | "eth_getTransactionCount" | "eth_feeHistory" => Some(1),
        "eth_getBlockByNumber" => Some(0),
        _ => None,
    };
    if let Some(asked) = position.and_then(|position| params.get_mut(position)) {
        match asked.as_str() {
            Some("latest" | "pending") => *asked = json!(U64::from(head)),
            _ if block_of(asked).is_some_and(|block| block > head) => {
                return if method == "eth_getBlockByNumber" {
                    Ok(Value::Null)
                } else {
                    Err(refusal("header not found"))
                };
            }
            _ => {}
        }
    }
    let answer = ask(&devnet, method.clone(), params).await?;
    let is_unseen = block_of(&answer["blockNumber"]).is_some_and(|block| block > head);
    let is_lookup = matches!(&*method, "eth_getTransactionReceipt" | "eth_getTransactionByHash");
    Ok(if is_lookup && is_unseen { Value::Null } else { answer })
}

/// Two nodes behind one address, of which any may answer.
fn two_nodes(devnet: &Devnet) -> RpcClient {
    Front::client(devnet, |devnet, request, method, params| async move {
        // Spread, so that neither node gets all requests of a kind.
        let is_late = (request.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) % 2 == 0;
        match is_late && !method.starts_with("eth_sendRaw") {
            true => answer_late(devnet, method, params).await,
            false => ask(&devnet, method, params).await,
        }
    })
}

#[tokio::test(start_paused = true)]
async fn node_behind_another_one_raises_no_alarm_and_fails_no_payment() {
    let devnet =
        |builder: DevnetBuilder| builder.block_time(BlockTime::Every(Duration::from_millis(200))).finality_depth(8);
    let settings = |builder: OnchainFacilitatorBuilder| builder.reconcile_interval(Duration::from_millis(300));
    let stage = stage_behind(devnet, two_nodes, settings).await;
    tokio::time::sleep(Duration::from_secs(3)).await;
    // The newest block is known from now on.
    let mut payments = vec![stage.payment(&stage.payer(1))];
    tokio::time::sleep(Duration::from_secs(2)).await;
    paid_by(&stage.admit_and_settle(&payments[0]).await);
    for number in 0..30 {
        // Funded in the newest block.
        let payment = stage.payment(&stage.payer(1));
        let outcome = stage.admit_and_settle(&payment).await;
        assert!(matches!(outcome, Ok(SettlementOutcome::Settled { .. })), "{number}: {outcome:?}");
        payments.push(payment);
    }
    until(async || {
        let records = join_all(payments.iter().map(|payment| stage.record(payment))).await;
        let states: Vec<_> = records.iter().map(|record| record.settlement.state()).collect();
        let is_paid = |state: &SettlementState| matches!(state, SettlementState::Settled | SettlementState::Final);
        assert!(states.iter().all(is_paid), "a settled payment is open again: {states:?}");
        states.iter().all(|state| *state == SettlementState::Final)
    })
    .await;
    assert_eq!((stage.facilitator.stats().reorged, stage.received()), (0, 31));
}

/// The number of SECURITY.md. A permit takes a simulation and two reads each time, a transfer one read.
#[tokio::test(start_paused = true)]
async fn payment_is_looked_at_eight_times_while_the_node_is_behind() {
    let ahead = |devnet: &Devnet| {
        Front::client(devnet, |devnet, _, method, params| async move {
            match method.as_str() {
                "eth_blockNumber" => Ok(json!(U64::from(devnet.block_number() + 5))),
                _ => ask(&devnet, method, params).await,
            }
        })
    };
    let mut stage = stage_behind(|devnet| devnet, ahead, |builder| builder).await;
    for (by_permit, simulations, reads) in [(false, 0, 8), (true, 8, 16)] {
        let offer = ExactOffer::new(stage.devnet.asset(), U256::from(PRICE), PAYEE, VALID);
        stage.terms = Arc::new(Terms::new(if by_permit { offer.by_permit() } else { offer }));
        let payment = stage.payment(&new_key());
        stage.devnet.faults().reset();
        let verified = stage.verify(&payment).await;
        assert!(matches!(verified, Err(VerifyError::Unavailable(_))), "{verified:?}");
        assert_eq!((stage.calls("eth_estimateGas"), stage.calls("eth_call")), (simulations, reads));
    }
}

/// One of the nodes behind an address falls behind, and answers all that does not send.
fn late_node(devnet: &Devnet, is_late: &Arc<AtomicBool>) -> RpcClient {
    let is_late = is_late.clone();
    Front::client(devnet, move |devnet, _, method, params| {
        let is_late = is_late.load(Ordering::SeqCst) && !method.starts_with("eth_sendRaw");
        async move {
            match is_late {
                true => answer_late(devnet, method, params).await,
                false => ask(&devnet, method, params).await,
            }
        }
    })
}

/// It shows neither the newest block that was seen, nor the transaction in it.
#[tokio::test(start_paused = true)]
async fn node_that_falls_behind_has_nothing_looked_up_or_sent_again() {
    let is_late = Arc::<AtomicBool>::default();
    let settings = |builder: OnchainFacilitatorBuilder| builder.reconcile_interval(Duration::from_millis(300));
    let front = |devnet: &Devnet| late_node(devnet, &is_late);
    let stage = stage_behind(|devnet| devnet.finality_depth(64), front, settings).await;
    for _ in 0..LAG {
        stage.devnet.mine();
    }
    let payment = stage.payment(&stage.payer(1));
    paid_by(&stage.admit_and_settle(&payment).await);
    let passes = async || {
        let seen = stage.calls("eth_getBlockByNumber");
        until(async || stage.calls("eth_getBlockByNumber") >= seen + 6).await;
    };
    passes().await;
    is_late.store(true, Ordering::SeqCst);
    stage.devnet.faults().reset();
    passes().await;
    for method in [RECEIPT, "eth_sendRawTransaction", "eth_sendRawTransactionSync", "eth_getLogs"] {
        assert_eq!(stage.calls(method), 0, "{method}");
    }
    assert_eq!(stage.record(&payment).await.settlement.state(), SettlementState::Settled);
    assert_eq!(stage.facilitator.stats().reorged, 0);
}

/// A block above it was replaced, so that all payments are looked at. The node that is asked for the receipt does not have the payment's
/// block yet, or has not read its receipts.
#[tokio::test(start_paused = true)]
async fn payment_whose_receipt_a_node_does_not_have_yet_is_not_taken_for_reorged() {
    for has_block in [false, true] {
        let (hidden, asked) = (Arc::<AtomicU64>::default(), Arc::<AtomicU64>::default());
        let front = |devnet: &Devnet| {
            let (hidden, asked) = (hidden.clone(), asked.clone());
            Front::client(devnet, move |devnet, _, method, params| {
                let hidden = hidden.load(Ordering::SeqCst);
                let is_block = method == "eth_getBlockByNumber" && params[0] == json!(U64::from(hidden));
                if hidden > 0 && method == RECEIPT {
                    asked.fetch_add(1, Ordering::SeqCst);
                }
                let is_hidden = hidden > 0 && (method == RECEIPT || is_block && !has_block);
                async move { if is_hidden { Ok(Value::Null) } else { ask(&devnet, method, params).await } }
            })
        };
        let settings = |builder: OnchainFacilitatorBuilder| builder.reconcile_interval(Duration::from_millis(300));
        let stage = stage_behind(|devnet| devnet.finality_depth(8), front, settings).await;
        let payment = stage.payment(&stage.payer(1));
        paid_by(&stage.admit_and_settle(&payment).await);
        let block = stage.devnet.block_number();
        stage.devnet.mine();
        // A pass that sees the block above it.
        let seen = stage.calls("eth_getBlockByNumber");
        until(async || stage.calls("eth_getBlockByNumber") >= seen + 6).await;
        hidden.store(block, Ordering::SeqCst);
        stage.devnet.reorg(1, Orphans::Lost);
        until(async || asked.load(Ordering::SeqCst) >= 4).await;
        let settled = stage.record(&payment).await.settlement;
        assert_eq!((settled.state(), settled.block()), (SettlementState::Settled, Some(block)), "{has_block}");
        hidden.store(0, Ordering::SeqCst);
        for _ in 0..8 {
            stage.devnet.mine();
        }
        until(async || stage.record(&payment).await.settlement.state() == SettlementState::Final).await;
        assert_eq!((stage.facilitator.stats().reorged, stage.received()), (0, 1), "{has_block}");
    }
}

/// A node that keeps one transaction of the account, and none that waits for another. Counts what it is sent.
fn keeps_one(devnet: &Devnet, sends: &Arc<AtomicU64>) -> RpcClient {
    let (one_at_a_time, sends) = (Arc::new(Mutex::new(())), sends.clone());
    Front::client(devnet, move |devnet, _, method, params| {
        let (one_at_a_time, sends) = (one_at_a_time.clone(), sends.clone());
        async move {
            if !method.starts_with("eth_sendRaw") {
                return ask(&devnet, method, params).await;
            }
            sends.fetch_add(1, Ordering::Relaxed);
            let _one = one_at_a_time.lock().await;
            let raw: Bytes = serde_json::from_value(params[0].clone()).unwrap();
            let transaction = TxEnvelope::decode_2718_exact(&raw).unwrap();
            let count = async |at: &str| -> u64 {
                let params = json!([settlement_key().address(), at]);
                let count = ask(&devnet, "eth_getTransactionCount".into(), params).await.unwrap();
                serde_json::from_value::<U64>(count).unwrap().to()
            };
            let (next, waiting) = (count("latest").await, count("pending").await);
            let known = ask(&devnet, "eth_getTransactionByHash".into(), json!([transaction.tx_hash()])).await.unwrap();
            if known.is_null() && transaction.nonce() > next {
                return Err(refusal("gapped-nonce tx from delegated accounts"));
            }
            if known.is_null() && waiting > next {
                return Err(refusal("in-flight transaction limit reached for delegated accounts"));
            }
            // It must not wait for the block here.
            if method == "eth_sendRawTransactionSync" {
                return Err(ErrorPayload { code: -32601, message: Cow::Borrowed("Method not found"), data: None });
            }
            ask(&devnet, method, params).await
        }
    })
}

#[tokio::test(start_paused = true)]
async fn all_payments_of_a_delegated_key_are_delivered_one_after_the_other_and_no_nonce_is_wasted() {
    let devnet = |builder: DevnetBuilder| builder.block_time(BlockTime::Every(Duration::from_millis(100)));
    let sends = Arc::<AtomicU64>::default();
    let front = |devnet: &Devnet| keeps_one(devnet, &sends);
    let stage = stage_behind(devnet, front, |builder| builder.block_time(Duration::from_millis(100))).await;
    stage.devnet.delegate(settlement_key().address(), PAYEE);
    let payments: Vec<_> = (0..60).map(|_| stage.payment(&stage.payer(1))).collect();
    let outcomes = join_all(payments.iter().map(|payment| stage.admit_and_settle(payment))).await;
    let unpaid: Vec<_> =
        outcomes.iter().filter(|outcome| !matches!(outcome, Ok(SettlementOutcome::Settled { .. }))).collect();
    assert!(unpaid.is_empty(), "{} of 60: {unpaid:?}", unpaid.len());
    assert_eq!((stage.received(), stage.next_nonce().await), (60, 60));
    assert_eq!(stage.facilitator.stats().transactions, 60);
    // The window is as narrow as the node's, and not all that wait are refused for each that is taken.
    let sends = sends.load(Ordering::Relaxed);
    assert!(sends < 3 * 60, "it was sent {sends}");
}

/// Behind one address there may be a node of another chain, which has neither the token nor the transactions.
#[tokio::test(start_paused = true)]
async fn node_of_another_chain_proves_no_payment_dead() {
    let other = Devnet::builder().chain_id(10).start().await.unwrap();
    let is_other = Arc::new(AtomicBool::new(false));
    let front = |devnet: &Devnet| {
        other.set_code(devnet.asset().address, Bytes::new());
        let (other, is_other) = (other.clone(), is_other.clone());
        Front::client(devnet, move |devnet, _, method, params| {
            let is_other = is_other.load(Ordering::SeqCst) && matches!(&*method, RECEIPT | "eth_call");
            let node = if is_other { other.clone() } else { devnet };
            async move { ask(&node, method, params).await }
        })
    };
    let settings = |builder: OnchainFacilitatorBuilder| builder.reconcile_interval(Duration::from_secs(86_400));
    let stage = stage_behind(|devnet| devnet, front, settings).await;
    let payment = stage.payment(&stage.payer(1));
    // Its receipt is lost.
    stage.devnet.faults().set(|call| match call.method {
        "eth_sendRawTransactionSync" => Fault::Error { code: -32601, message: "Method not found".into() },
        RECEIPT => Fault::Error { code: -32005, message: "too many requests".into() },
        _ => Fault::None,
    });
    let outcome = stage.admit_and_settle(&payment).await;
    assert!(matches!(outcome, Ok(SettlementOutcome::Unknown { .. })), "{outcome:?}");
    stage.devnet.faults().clear();
    stage.clock.advance(VALID + 1);
    stage.devnet.mine();
    for _ in 0..stage.devnet.block_number() + 10 {
        other.mine();
    }
    is_other.store(true, Ordering::SeqCst);
    let outcome = stage.reconcile(&payment).await;
    assert!(!matches!(outcome, Ok(SettlementOutcome::Failed { .. })), "{outcome:?}");
    is_other.store(false, Ordering::SeqCst);
    paid_by(&stage.reconcile(&payment).await);
    assert_eq!(stage.received(), 1);
}
