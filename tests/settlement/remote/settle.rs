//! How a seller reads its facilitator's answers about a payment that was delegated before.

use std::{sync::Arc, time::Duration};

use alloy_primitives::{B256, U256};
use alloy_signer_local::PrivateKeySigner;
use http::HeaderMap;
use serde_json::json;
use tower_x402::{
    eip3009::{Authorization, PaymentSignature},
    facilitator::{Facilitator as _, FacilitatorError, Outgoing, RemoteFacilitator, RemoteFacilitatorBuilder},
    ledger::{Fingerprint, FulfilmentStep, Ledger, MemoryLedger, Record, Reservation, Settlement, SettlementStep},
    payment::{Funds, Prechecked, SettlementOutcome, Terms, Verified, Window, precheck},
    protocol::{ExactOffer, ExactPayload, Reason},
};

use super::{
    honest::chain_url,
    lies::execute,
    service,
    stage::{Reply, Stage, Turn, refusal},
};
use support::{
    authorization::{self, CancelAuthorization, unix_now},
    chain::Chain as _,
    devnet::DevnetChain,
    permit::{ExactPermit, approve},
    shop::{PRICE, Purchase, evaluate, send},
    token::cancel_vrs,
};

const NET: tower_x402::Network = tower_x402::Network::BASE_SEPOLIA;

/// A payment that is due, and the seller's facilitator and ledger.
struct Case {
    purchase: Purchase,
    payment: Prechecked,
    ledger: Arc<dyn Ledger>,
    facilitator: RemoteFacilitator,
}

impl Case {
    async fn new(stage: &Stage, remote: RemoteFacilitatorBuilder) -> Self {
        Self::of(purchase(stage).await, remote, None).await
    }

    /// The authorization was seen unused at this block, if at any.
    async fn of(purchase: Purchase, remote: RemoteFacilitatorBuilder, seen_unused: Option<u64>) -> Self {
        let payment = checked(&purchase);
        let ledger: Arc<dyn Ledger> = Arc::new(MemoryLedger::new());
        let request = Fingerprint { digest: B256::ZERO, names_caller: false };
        let record = Record::new(&payment, request, unix_now(), unix_now() + 60);
        let Reservation::New(lease) = ledger.reserve(&record).await.unwrap() else { panic!("known") };
        let funds = seen_unused.map(|block| Funds { balance: U256::from(PRICE), block });
        ledger.advance(&lease.key, &lease.step(FulfilmentStep::Admit { funds, due: true })).await.unwrap();
        let remote = remote.reconcile_interval(Duration::from_secs(3_600)).ledger(ledger.clone());
        Self { purchase, payment, ledger, facilitator: remote.build().await.unwrap() }
    }

    async fn step(&self, steps: impl IntoIterator<Item = SettlementStep>) {
        for step in steps {
            self.ledger.advance(&self.payment.key(), &step.into()).await.unwrap();
        }
    }

    async fn record(&self) -> Record {
        self.ledger.get(&self.payment.key()).await.unwrap().unwrap()
    }

    /// Settles it for somebody who presents it now.
    async fn settle(&self) -> Result<SettlementOutcome, FacilitatorError> {
        let again = self.payment.clone().again(self.record().await.failures);
        self.facilitator.settle(&again, &Verified::default()).await
    }

    async fn reconcile(&self) -> SettlementOutcome {
        self.facilitator.reconcile(&self.record().await).await.unwrap()
    }
}

async fn purchase(stage: &Stage) -> Purchase {
    service::purchase(&stage.customer().await, authorization::random_address())
}

fn checked(purchase: &Purchase) -> Prechecked {
    let signed = &purchase.authorization;
    let offer = ExactOffer::new(purchase.asset.clone(), signed.value, signed.to, 3_600);
    let authorization = Authorization {
        from: signed.from,
        to: signed.to,
        value: signed.value,
        valid_after: signed.validAfter,
        valid_before: signed.validBefore,
        nonce: signed.nonce,
    };
    let payload = ExactPayload::new(PaymentSignature::from(purchase.by_key().0.to_vec()), authorization);
    precheck(Arc::new(Terms::new(offer)), payload, Window::default().skew(60), unix_now()).unwrap()
}

/// Asks once.
fn brief(stage: &Stage) -> RemoteFacilitatorBuilder {
    stage.remote().settle_timeout(Duration::from_millis(1))
}

fn confirming(stage: &Stage) -> RemoteFacilitatorBuilder {
    brief(stage).confirm(NET, chain_url(stage))
}

fn success(transaction: B256) -> Turn {
    Turn::Without(Reply::Json(200, json!({ "success": true, "transaction": transaction, "network": NET })))
}

/// A refusal for this reason that names a transaction.
fn named(reason: &str, transaction: B256) -> Turn {
    let said = json!({ "success": false, "errorReason": reason, "transaction": transaction, "network": NET });
    Turn::Without(Reply::Json(200, said))
}

fn pending(byte: u8) -> Turn {
    named("settlement_pending", B256::repeat_byte(byte))
}

fn submit(byte: u8) -> SettlementStep {
    SettlementStep::Submit { transaction: B256::repeat_byte(byte) }
}

fn fail() -> SettlementStep {
    SettlementStep::Fail { reason: Reason::InsufficientFunds, by: 0, known_transactions: vec![B256::repeat_byte(1)] }
}

/// It paid for something else: an authorization that was unused in a block was not used in that block or an earlier one.
#[tokio::test]
async fn transaction_from_before_the_payment_was_seen_unused_does_not_settle_it() {
    let stage = Stage::open().await;
    for blocks_later in 0..2 {
        let purchase = purchase(&stage).await;
        let transaction = execute(&stage, &purchase).await;
        let seen_unused = stage.chain.devnet.block_number() + blocks_later;
        let case = Case::of(purchase, confirming(&stage), Some(seen_unused)).await;
        stage.script([], success(transaction));
        let outcome = case.settle().await.unwrap();
        assert_eq!(outcome, SettlementOutcome::Unknown { transaction: Some(transaction) }, "{blocks_later}");
        assert_eq!(case.record().await.transactions, [transaction], "what it names is looked for again");
    }
}

#[tokio::test]
async fn bounded_number_of_named_transactions_is_recorded() {
    let stage = Stage::open().await;
    let case = Case::new(&stage, brief(&stage)).await;
    for byte in [1, 2, 2, 3, 4, 5, 6, 7, 8, 9, 10] {
        stage.script([], pending(byte));
        case.settle().await.unwrap();
    }
    let noted: Vec<u8> = case.record().await.transactions.iter().map(|transaction| transaction[0]).collect();
    assert_eq!(noted, (1..=8).collect::<Vec<_>>());
}

#[tokio::test]
async fn transaction_named_twice_is_recorded_once() {
    let stage = Stage::open().await;
    let case = Case::new(&stage, stage.remote()).await;
    case.step((1..=7).map(submit)).await;
    stage.script([1, 8, 9].map(pending), Turn::Without(refusal("insufficient_funds")));
    case.settle().await.unwrap();
    let noted: Vec<u8> = case.record().await.transactions.iter().map(|transaction| transaction[0]).collect();
    assert_eq!(noted, (1..=8).collect::<Vec<_>>());
    assert_eq!(stage.settles().len(), 4);
}

/// If the payment was delegated before, the facilitator may refuse it now because that request settled it.
#[tokio::test]
async fn refusal_fails_only_a_payment_that_was_never_delegated_before() {
    let stage = Stage::open().await;
    stage.script([], Turn::Without(refusal("insufficient_funds")));
    let pasts = [
        ("due", vec![], true),
        ("failed before", vec![fail()], true),
        ("unknown", vec![SettlementStep::MarkUnknown], false),
        ("submitted", vec![submit(1)], false),
        ("submitted, and failed", vec![submit(1), fail()], false),
    ];
    for (past, steps, is_failure) in pasts {
        let case = Case::new(&stage, brief(&stage)).await;
        case.step(steps).await;
        let outcome = case.settle().await.unwrap();
        assert_eq!(matches!(outcome, SettlementOutcome::Failed { dead: false, .. }), is_failure, "{past}: {outcome:?}");
        assert_eq!(matches!(outcome, SettlementOutcome::Unknown { .. }), !is_failure, "{past}: {outcome:?}");
    }
}

/// Each request whose answer is lost may be the one that settled it.
#[tokio::test]
async fn refusal_after_lost_answers_is_no_failure() {
    let stage = Stage::open().await;
    for lost in 1..=3 {
        let case = Case::new(&stage, stage.remote()).await;
        stage.script(vec![Turn::Without(Reply::Status(502, "")); lost], Turn::Without(refusal("insufficient_funds")));
        let outcome = case.settle().await.unwrap();
        assert_eq!(outcome, SettlementOutcome::Unknown { transaction: None }, "{lost}");
    }
    assert_eq!(stage.settles().len(), 2 + 3 + 4);
}

#[tokio::test]
async fn delegated_payment_stays_unknown_if_it_cannot_be_sent_again() {
    let stage = Stage::open().await;
    let sign = |_: Outgoing| async { Err::<HeaderMap, _>("the key service is away".into()) };
    for (steps, expected) in [(vec![], Settlement::Due), (vec![SettlementStep::MarkUnknown], Settlement::Unknown)] {
        let case = Case::new(&stage, brief(&stage).authenticate(sign)).await;
        case.step(steps).await;
        let outcome = case.settle().await;
        assert_eq!(outcome.is_err(), expected == Settlement::Due, "{outcome:?}");
        assert_eq!(case.record().await.settlement, expected);
    }
    assert!(stage.settles().is_empty());
}

/// It is not known when the authorization was unused, so that only a named transaction counts.
#[tokio::test]
async fn transaction_named_in_a_refusal_is_looked_up() {
    let stage = Stage::open().await;
    for (past, steps) in [("due", vec![]), ("unknown", vec![SettlementStep::MarkUnknown])] {
        let case = Case::new(&stage, confirming(&stage)).await;
        case.step(steps).await;
        let transaction = execute(&stage, &case.purchase).await;
        stage.script([], named("insufficient_funds", transaction));
        let outcome = case.settle().await.unwrap();
        assert!(
            matches!(outcome, SettlementOutcome::Settled { transaction: paid, .. } if paid == transaction),
            "{past}: {outcome:?}"
        );
    }
}

#[tokio::test]
async fn payment_that_the_chain_shows_as_paid_is_not_sent_again() {
    let stage = Stage::open().await;
    let case = Case::new(&stage, confirming(&stage)).await;
    let transaction = execute(&stage, &case.purchase).await;
    case.step([SettlementStep::Submit { transaction }]).await;
    stage.script([], Turn::Without(refusal("insufficient_funds")));
    let outcome = case.reconcile().await;
    assert!(
        matches!(outcome, SettlementOutcome::Settled { transaction: paid, .. } if paid == transaction),
        "{outcome:?}"
    );
    assert!(stage.settles().is_empty());
}

#[tokio::test]
async fn payment_is_dead_once_its_cancellation_is_final() {
    let stage =
        Stage::open_on(DevnetChain::start_with(None, 3).await, Duration::from_secs(3_600), |service| service).await;
    let purchase = purchase(&stage).await;
    let seen_unused = stage.chain.devnet.block_number();
    let (authorizer, nonce) = (purchase.authorization.from, purchase.authorization.nonce);
    let message = CancelAuthorization { authorizer, nonce };
    let signature = authorization::sign(&purchase.signer, &purchase.asset, &message);
    stage.chain.relayer().await.send(&stage.chain, cancel_vrs(&message, &signature)).await;
    let case = Case::of(purchase, confirming(&stage), Some(seen_unused)).await;
    stage.script([], Turn::Without(refusal("insufficient_funds")));
    let outcome = case.settle().await.unwrap();
    assert!(matches!(outcome, SettlementOutcome::Failed { dead: false, .. }), "its block may be replaced: {outcome:?}");
    for _ in 0..4 {
        stage.chain.devnet.mine();
    }
    let outcome = case.settle().await.unwrap();
    assert!(matches!(outcome, SettlementOutcome::Failed { dead: true, .. }), "{outcome:?}");
    case.step([SettlementStep::of(&outcome, 0, &[])]).await;
    let asked = stage.settles().len();
    let outcome = case.settle().await.unwrap();
    assert!(matches!(outcome, SettlementOutcome::Failed { dead: true, .. }), "{outcome:?}");
    assert_eq!(stage.settles().len(), asked);
}

/// A permit that was executed under an approval of just its amount leaves no approval, and perhaps no balance.
#[tokio::test]
async fn missing_approval_or_balance_is_no_proof_that_a_permit_was_not_executed() {
    let stage = Stage::open().await;
    let seller = stage.seller_with(stage.remote(), |layer| layer.permits()).await;
    let mut income = 0;
    for reason in ["permit2_allowance_required", "permit2_insufficient_balance", "insufficient_balance"] {
        let payer = PrivateKeySigner::random();
        stage.chain.mint(payer.address(), PRICE).await;
        approve(&stage.chain.devnet, payer.address(), U256::from(PRICE));
        let permit = ExactPermit::pay(&payer, &seller.app, evaluate("a")).await;
        let (devnet, executed) = (stage.chain.devnet.clone(), permit.clone());
        let stranger = move || {
            executed.settle(&devnet);
            refusal(reason)
        };
        stage.script([Turn::Other(Arc::new(stranger))], Turn::Without(refusal(reason)));
        let answer = send(&seller.app, permit.on(evaluate("a"))).await;
        income += PRICE;
        assert_eq!(seller.income(&stage).await, income);
        let said = (answer.status.as_u16(), answer.reason());
        assert_eq!(said, (503, "settlement_pending".to_owned()), "{reason}: {answer:?}");
    }
}
