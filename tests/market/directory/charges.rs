//! Reports about evaluations that were paid for by voucher.

use std::sync::Arc;

use alloy_primitives::{Address, B256, U256};
use alloy_signer_local::PrivateKeySigner;
use axum::Router;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tower_x402::{
    Network, Usdc,
    channels::Channels,
    client::{Budget, ChannelPolicy, Payer},
    facilitator::{OnchainFacilitator, channels::OnchainChannels},
    ledger::MemoryLedger,
    vouchers::AuthorizerKey,
};
use url::Url;
use x402_devnet::Orphans;
use x402_directory::{PaymentCheckError, ReportQuery, SignedEvidence, reputation::Reputation};
use x402_judges::ArithmeticJudge;
use x402_market::{
    AgentCard, EvaluatorService, Score, Student, Submission, Task, Truth,
    evidence::{CallOutcome, ChannelCharge, Evidence, EvidencePayment, Pairs},
};

use super::stage::{Booth, PRICE, Stage, checker, forge, sign_report};
use support::{
    authorization::random_nonce,
    chain::Chain,
    devnet::DevnetChain,
    escrow::{Channel, claim_call, refund_call, send},
};

/// What is in the channels here, in units.
const DEPOSIT: u64 = 10 * PRICE;

/// A channel of a payer to an evaluator.
pub struct Tab {
    channel: Channel,
    at: u64,
}

impl Tab {
    pub async fn open(stage: &Stage<'_>, evaluator: Address) -> Self {
        let authorizer = PrivateKeySigner::random();
        let channel = Channel::funded(stage.chain, evaluator, &authorizer, DEPOSIT).await;
        channel.deposit(stage.chain, &stage.relayer, DEPOSIT.into()).await;
        Self { channel, at: stage.chain.timestamp().await }
    }

    /// Claims up to so many units. Returns the transaction.
    pub async fn claim(&self, stage: &Stage<'_>, total: u64) -> B256 {
        let row = self.channel.row(DEPOSIT.into(), total.into()).await;
        // A reorganization may have removed transactions of the stage's relayer.
        let relayer = stage.chain.relayer().await;
        let receipt = send(stage.chain, &relayer, &claim_call(&[row], &self.channel.authorizer)).await;
        assert!(receipt.status(), "the claim reverted");
        receipt.transaction_hash
    }

    /// The evidence of an evaluation that cost `paid`, after which `charged` units had been charged in all.
    fn record(&self, charged: u64, paid: u64) -> Evidence {
        let charge = ChannelCharge { channel: self.channel.config, charged: Usdc::from_atomic(charged) };
        let outcome = CallOutcome::answered(Pairs::new(1, 0, 1));
        let receiver = self.channel.config.receiver;
        support::changed(Evidence::new(receiver, "prose", Usdc::from_atomic(paid), self.at, outcome), |record| {
            record.payment = Some(charge.payment(Network::BASE_SEPOLIA));
            record.charge = Some(charge);
        })
    }

    /// The report of it, without the transaction that claimed.
    pub async fn report(&self, charged: u64, paid: u64) -> SignedEvidence {
        sign_report(self.record(charged, paid), None, &self.channel.payer).await
    }

    async fn report_with(&self, charged: u64, paid: u64, transaction: B256) -> SignedEvidence {
        sign_report(self.record(charged, paid), Some(transaction), &self.channel.payer).await
    }
}

fn not_yet() -> (u16, String) {
    (409, "not_yet".into())
}

fn spoken() -> (u16, String) {
    (409, "already_reported".into())
}

#[tokio::test]
async fn charge_can_be_reported_once_it_is_claimed() {
    let chain = DevnetChain::start(None).await;
    let stage = Stage::set(&chain).await;
    let booth = stage.booth(&["prose"]).await;
    let tab = Tab::open(&stage, booth.payee.address()).await;
    let report = tab.report(PRICE, PRICE).await;
    assert_eq!(stage.post(&report).await, not_yet());
    let transaction = tab.claim(&stage, PRICE).await;
    assert_eq!(stage.post(&report).await.0, 201);
    assert_eq!(stage.post(&report).await.0, 200);
    assert_eq!(stage.post(&tab.report(2 * PRICE, PRICE).await).await, not_yet(), "this one is not claimed");

    let accepted = stage.client().reports(&Default::default()).await.unwrap().reports;
    assert_eq!((accepted.len(), accepted[0].report.transaction), (1, Some(transaction)));
    let mut reader = Reputation::new(100, []).payment_checker(Arc::new(checker(&chain)));
    let pulled = reader.fetch(&stage.client()).await.unwrap();
    assert_eq!((pulled.new.as_slice(), pulled.refused), ([tab.record(PRICE, PRICE)].as_slice(), 0));
}

#[tokio::test]
async fn claim_must_be_as_deep_as_a_payment() {
    let chain = DevnetChain::start(None).await;
    let stage = Stage::set_with(&chain, |directory| directory.payment_checker(checker(&chain).depth(3))).await;
    let booth = stage.booth(&["prose"]).await;
    let tab = Tab::open(&stage, booth.payee.address()).await;
    let transaction = tab.claim(&stage, PRICE).await;
    for report in [tab.report(PRICE, PRICE).await, tab.report_with(PRICE, PRICE, transaction).await] {
        assert_eq!(stage.post(&report).await, not_yet());
    }
    (0..3).for_each(|_| chain.devnet.mine());
    assert_eq!(stage.post(&tab.report(PRICE, PRICE).await).await.0, 201);
}

#[tokio::test]
async fn charge_of_another_payer_evaluator_token_chain_or_amount_is_refused() {
    let chain = DevnetChain::start(None).await;
    let stage = Stage::set(&chain).await;
    let (booth, other) = (stage.booth(&["prose"]).await, stage.booth(&["prose"]).await);
    let tab = Tab::open(&stage, booth.payee.address()).await;
    tab.claim(&stage, DEPOSIT).await;
    let (payer, thief) = (&tab.channel.payer, PrivateKeySigner::random());
    let record = || tab.record(PRICE, PRICE);
    let with = |change: &dyn Fn(&mut ChannelCharge)| {
        let mut charge = record().charge.unwrap();
        change(&mut charge);
        support::changed(record(), |record| {
            record.payment = Some(charge.payment(Network::BASE_SEPOLIA));
            record.charge = Some(charge);
        })
    };
    let nonce = record().payment.unwrap().nonce;
    let stolen = support::changed(record(), |record| {
        record.payment = Some(EvidencePayment { payer: thief.address(), nonce });
    });
    let about_another = support::changed(record(), |record| record.evaluator = other.payee.address());
    let on_another_chain = support::changed(record(), |record| {
        record.payment = record.charge.map(|charge| charge.payment(Network::BASE));
    });
    let unrelated = support::changed(record(), |record| record.payment.as_mut().unwrap().nonce = random_nonce());
    for (what, record, key) in [
        ("somebody else's channel", stolen, &thief),
        ("somebody else's report", record(), &thief),
        ("another evaluator", about_another, payer),
        ("a channel to another", with(&|charge| charge.channel.receiver = other.payee.address()), payer),
        ("another token", with(&|charge| charge.channel.token = Address::repeat_byte(7)), payer),
        ("another chain", on_another_chain, payer),
        ("another nonce", unrelated, payer),
        ("more than was charged", tab.record(PRICE, PRICE + 1), payer),
    ] {
        assert_eq!(stage.refusal(&forge(record, None, key).await).await, "bad_report", "{what}");
    }
    // A channel that nobody opened.
    let invented = with(&|charge| charge.channel.salt = random_nonce());
    assert_eq!(stage.refusal(&forge(invented, None, payer).await).await, "not_yet");
    // What was signed covers every field of the channel, and whether there is one.
    let signed = serde_json::to_value(tab.report(PRICE, PRICE).await).unwrap();
    for (place, value) in [
        ("/evidence/charge/channel/salt", json!(random_nonce())),
        ("/evidence/charge/channel/payerAuthorizer", json!(thief.address())),
        ("/evidence/charge/channel/receiverAuthorizer", json!(thief.address())),
        ("/evidence/charge/channel/withdrawDelay", json!(901)),
        ("/evidence/charge/charged", json!("2000")),
    ] {
        let mut changed = signed.clone();
        *changed.pointer_mut(place).unwrap() = value;
        assert_eq!(stage.refusal(&changed).await, "bad_report", "{place}");
    }
    let mut stripped = signed.clone();
    stripped["evidence"].as_object_mut().unwrap().remove("charge");
    assert_eq!(stage.refusal(&stripped).await, "not_yet", "no authorization has this nonce");
    assert_eq!(stage.count().await, 0);
    assert_eq!(stage.post(&signed).await.0, 201);
}

/// The token is real, and not the one that the directory is about.
#[tokio::test]
async fn channel_of_a_token_that_is_not_served_is_refused() {
    let chain = DevnetChain::start(None).await;
    let stage = Stage::set(&chain).await;
    let booth = stage.booth(&["prose"]).await;
    let mut tab = Tab::open(&stage, booth.payee.address()).await;
    tab.channel.config.token = Address::repeat_byte(7);
    let (record, payer) = (tab.record(PRICE, PRICE), &tab.channel.payer);
    let report = SignedEvidence::sign(record, Network::BASE_SEPOLIA, Address::repeat_byte(7), None, payer).await;
    assert_eq!(stage.refusal(&report.unwrap()).await, "not_served");
}

#[tokio::test]
async fn reports_are_about_no_more_than_was_claimed() {
    let chain = DevnetChain::start(None).await;
    let stage = Stage::set(&chain).await;
    let booth = stage.booth(&["prose"]).await;
    let tab = Tab::open(&stage, booth.payee.address()).await;
    let first = tab.claim(&stage, 2 * PRICE).await;
    let second = tab.claim(&stage, 3 * PRICE + 1).await;
    // Of 3,001 claimed units three reports of 1,000 each can be, whatever totals they name.
    let posted = async |charged, paid| stage.post(&tab.report(charged, paid).await).await;
    assert_eq!(posted(4 * PRICE, PRICE).await, not_yet());
    assert_eq!(posted(3 * PRICE + 2, PRICE).await, not_yet());
    assert_eq!(posted(2 * PRICE + 1, PRICE).await, (422, "not_paid".into()), "no claim is of all of it");
    assert_eq!(posted(PRICE, PRICE - 1).await, (422, "underpaid".into()));
    let with = async |transaction, charged| stage.post(&tab.report_with(charged, PRICE, transaction).await).await;
    assert_eq!(with(second, PRICE).await, (422, "not_paid".into()), "another transaction claimed that");
    assert_eq!(with(first, 3 * PRICE).await, (422, "not_paid".into()));
    let other = Tab::open(&stage, booth.payee.address()).await.claim(&stage, 4 * PRICE).await;
    assert_eq!(with(other, 4 * PRICE).await, (422, "not_paid".into()), "that is another channel's");
    assert_eq!(posted(PRICE, PRICE).await.0, 201);
    assert_eq!(with(first, 2 * PRICE).await.0, 201);
    assert_eq!(posted(3 * PRICE, PRICE).await.0, 201);
    assert_eq!(posted(3 * PRICE + 1, PRICE).await, spoken());
    assert_eq!(stage.count().await, 3);
}

#[tokio::test]
async fn each_part_of_a_claim_supports_one_report() {
    let chain = DevnetChain::start(None).await;
    let stage = Stage::set(&chain).await;
    let booth = stage.booth(&["prose"]).await;
    let tab = Tab::open(&stage, booth.payee.address()).await;
    tab.claim(&stage, 6 * PRICE).await;
    let posted = async |charged, paid| stage.post(&tab.report(charged, paid).await).await;
    assert_eq!(posted(4 * PRICE, 2 * PRICE).await.0, 201);
    for (charged, paid) in [(4, 1), (3, 1), (3, 2), (5, 2), (6, 6)] {
        assert_eq!(posted(charged * PRICE, paid * PRICE).await, spoken(), "{charged} {paid}");
    }
    let differently = support::changed(tab.record(4 * PRICE, 2 * PRICE), |record| {
        record.outcome = CallOutcome::InvalidAnswer;
    });
    assert_eq!(stage.post(&sign_report(differently, None, &tab.channel.payer).await).await, spoken());
    for charged in [2, 1, 5, 6] {
        assert_eq!(posted(charged * PRICE, PRICE).await.0, 201, "{charged}");
    }
    // Another channel to the same evaluator has parts of its own.
    let other = Tab::open(&stage, booth.payee.address()).await;
    other.claim(&stage, 4 * PRICE).await;
    assert_eq!(stage.post(&other.report(4 * PRICE, 2 * PRICE).await).await.0, 201);
}

/// An evaluator that reports about itself pays for one deposit and one claim, and gets the money back.
#[tokio::test]
async fn one_claim_neither_empties_a_full_directory_nor_fills_it_for_nothing() {
    const LIMIT: u64 = 30;
    let chain = DevnetChain::start(None).await;
    let stage =
        Stage::set_with(&chain, |directory| directory.payment_checker(checker(&chain)).max_reports(LIMIT, 20_000));
    let stage = stage.await;
    let honest = stage.booth(&["prose"]).await;
    let mut reports = Vec::new();
    for _ in 0..20 {
        let payer = stage.payer().await;
        let paid = stage.pay(&payer, honest.payee.address(), PRICE).await;
        reports.push(paid.report(honest.payee.address(), &payer).await);
        assert_eq!(stage.post(&reports[reports.len() - 1]).await.0, 201);
    }
    chain.devnet.mine();
    let attacker = Booth::open(&["prose"]).await;
    attacker.show(&["prose"], &attacker.payee, 1).await;
    stage.client().list(&attacker.url).await.unwrap();
    let tab = Tab::open(&stage, attacker.payee.address()).await;
    tab.claim(&stage, DEPOSIT).await;
    assert_eq!(stage.post(&tab.report(99, 99).await).await, (422, "underpaid".into()), "less than a report weighs");
    let mut answers = Vec::new();
    for number in 1..=40 {
        answers.push(stage.post(&tab.report(100 * number, 100).await).await.0);
    }
    let kept = stage.client().reports(&Default::default()).await.unwrap().reports;
    let of = |payee: Address| kept.iter().filter(|kept| kept.report.evidence.evaluator == payee).count();
    assert_eq!((of(honest.payee.address()), of(attacker.payee.address())), (20, 10), "{answers:?}");
    // One of its reports makes room for each further one, and for those of others.
    assert_eq!(stage.post(&tab.report(100, 100).await).await, (410, "too_old".into()));
    for left in [9, 8] {
        let payer = stage.payer().await;
        let paid = stage.pay(&payer, honest.payee.address(), PRICE).await;
        assert_eq!(stage.post(&paid.report(honest.payee.address(), &payer).await).await.0, 201);
        let query = ReportQuery::default().payer(tab.channel.config.payer);
        assert_eq!(stage.client().reports(&query).await.unwrap().reports.len(), left);
    }
    for report in &reports {
        assert_eq!(stage.post(report).await.0, 200, "it is there still");
    }
}

/// The payer gets back what was not claimed. What was stays the evaluator's.
#[tokio::test]
async fn claimed_charge_can_be_reported_after_a_refund_and_others_cannot() {
    let chain = DevnetChain::start(None).await;
    let stage = Stage::set(&chain).await;
    let booth = stage.booth(&["prose"]).await;
    let tab = Tab::open(&stage, booth.payee.address()).await;
    tab.claim(&stage, PRICE).await;
    let refund = refund_call(&tab.channel, (DEPOSIT - PRICE).into(), 0);
    assert!(send(&chain, &stage.relayer, &refund).await.status());
    assert_eq!(tab.channel.state(&chain).await, (PRICE.into(), PRICE.into()));
    assert_eq!(stage.post(&tab.report(2 * PRICE, PRICE).await).await, not_yet());
    assert_eq!(stage.post(&tab.report(PRICE, PRICE).await).await.0, 201);
    // Filled again, it goes on where it stopped.
    chain.mint(tab.channel.payer.address(), PRICE).await;
    tab.channel.deposit(&chain, &stage.relayer, PRICE.into()).await;
    tab.claim(&stage, 2 * PRICE).await;
    assert_eq!(stage.post(&tab.report(PRICE, PRICE).await).await.0, 200);
    assert_eq!(stage.post(&tab.report(2 * PRICE, PRICE).await).await.0, 201);
}

#[tokio::test]
async fn claim_may_come_a_day_after_the_evaluation() {
    let chain = DevnetChain::start(None).await;
    let stage = Stage::set(&chain).await;
    let booth = stage.booth(&["prose"]).await;
    let mut tab = Tab::open(&stage, booth.payee.address()).await;
    tab.claim(&stage, 2 * PRICE).await;
    let claimed_at = chain.timestamp().await;
    for (at, status) in [(claimed_at - 90_001, 422), (claimed_at - 89_000, 201)] {
        tab.at = at;
        assert_eq!(stage.post(&tab.report(PRICE, PRICE).await).await.0, status, "{at}");
    }
    // No report is of a time long after its claim.
    tab.claim(&stage, 3 * PRICE).await;
    tab.at = chain.timestamp().await + 3_601;
    let checked = checker(&chain).check(&tab.report(3 * PRICE, PRICE).await).await;
    assert!(matches!(checked, Err(PaymentCheckError::Implausible { .. })), "{checked:?}");
}

#[tokio::test]
async fn reorged_claim_cannot_be_reported_and_its_report_is_deleted() {
    let chain = DevnetChain::start_with(None, 4).await;
    let stage = Stage::set(&chain).await;
    let booth = stage.booth(&["prose"]).await;
    let (kept, lost) = (Tab::open(&stage, booth.payee.address()).await, Tab::open(&stage, booth.payee.address()).await);
    kept.claim(&stage, PRICE).await;
    let transaction = lost.claim(&stage, PRICE).await;
    let (stays, goes) = (kept.report(PRICE, PRICE).await, lost.report(PRICE, PRICE).await);
    assert_eq!((stage.post(&stays).await.0, stage.post(&goes).await.0), (201, 201));
    chain.devnet.reorg(1, Orphans::Lost);
    assert_eq!(lost.channel.state(&chain).await.1, 0);
    stage.service.upkeep_once().await.unwrap();
    assert_eq!(stage.count().await, 2, "nothing is final yet");
    (0..10).for_each(|_| chain.devnet.mine());
    stage.service.upkeep_once().await.unwrap();
    let reports = stage.client().reports(&Default::default()).await.unwrap().reports;
    let left: Vec<_> = reports.iter().map(|accepted| accepted.report.evidence.payment).collect();
    assert_eq!(left, [stays.evidence.payment]);
    assert_eq!(stage.post(&goes).await, not_yet());
    let named = lost.report_with(PRICE, PRICE, transaction).await;
    assert_eq!(stage.post(&named).await, not_yet());
    // Claimed after all, it can be reported.
    lost.claim(&stage, PRICE).await;
    assert_eq!(stage.post(&goes).await.0, 201);
}

/// Readers check the transaction that a report names.
#[tokio::test]
async fn claim_by_another_transaction_after_a_reorg_can_be_reported_again() {
    let chain = DevnetChain::start_with(None, 4).await;
    let stage = Stage::set(&chain).await;
    let booth = stage.booth(&["prose"]).await;
    let tab = Tab::open(&stage, booth.payee.address()).await;
    let before = tab.claim(&stage, PRICE).await;
    let report = tab.report(PRICE, PRICE).await;
    assert_eq!(stage.post(&report).await.0, 201);
    chain.devnet.reorg(1, Orphans::Lost);
    let again = tab.claim(&stage, 2 * PRICE).await;
    assert_ne!(again, before);
    (0..10).for_each(|_| chain.devnet.mine());
    stage.service.upkeep_once().await.unwrap();
    assert_eq!(stage.count().await, 0);
    assert_eq!(stage.post(&report).await.0, 201);
    let accepted = stage.client().reports(&Default::default()).await.unwrap().reports;
    assert_eq!(accepted[0].report.transaction, Some(again));
    stage.service.upkeep_once().await.unwrap();
    assert_eq!(stage.count().await, 1);
}

/// An evaluator that offers vouchers, and what claims for it.
async fn evaluator(chain: &dyn Chain) -> (Url, Channels) {
    let [settler, payee, claimer] = std::array::from_fn(|_| PrivateKeySigner::random());
    for key in [&settler, &claimer] {
        chain.fund(key.address(), U256::from(10).pow(U256::from(18))).await;
    }
    let facilitator = OnchainFacilitator::builder().rpc_url(chain.rpc_url()).network(Network::BASE_SEPOLIA);
    let facilitator = facilitator.signer(settler).build().await.unwrap();
    let contract = OnchainChannels::builder().network(Network::BASE_SEPOLIA).rpc_url(chain.rpc_url());
    let contract = contract.signer(claimer.clone()).build().await.unwrap();
    let channels = Channels::builder(contract, AuthorizerKey::new(claimer)).ledger(Arc::new(MemoryLedger::new()));
    let channels = channels.build().unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url: Url = format!("http://{}", listener.local_addr().unwrap()).parse().unwrap();
    let card = AgentCard::builder("The judge", url.clone()).skill("arithmetic", "Marks sums", Score::MAX);
    let card = card.price("$0.001").pay_to(Network::BASE_SEPOLIA, payee.address()).build().unwrap();
    let card = card.sign(&payee).await.unwrap();
    let offered = channels.clone();
    let service = EvaluatorService::builder(card, ArithmeticJudge).facilitator(facilitator);
    let service = service.paywall(|paywall| paywall.vouchers(offered)).build().unwrap();
    tokio::spawn(async { axum::serve(listener, Router::new().fallback_service(service)).await });
    (url, channels)
}

#[tokio::test]
async fn student_that_pays_with_vouchers_publishes_once_the_evaluator_has_claimed() {
    let chain = DevnetChain::start(None).await;
    let stage = Stage::set(&chain).await;
    let (url, channels) = evaluator(&chain).await;
    stage.client().list(&url).await.unwrap();
    let key = stage.payer().await;
    let budget = Budget::builder().per_payment("$1".parse().unwrap()).total("$1".parse().unwrap()).build();
    // The first payment is a transfer.
    let payer = Payer::builder(key.clone()).budget(budget).vouchers(ChannelPolicy::new().exact_first(1)).build();
    let student = Student::builder(payer).source(stage.client()).private_hosts(true).tasks(4).build().unwrap();
    assert_eq!(student.discover().await.found.len(), 1);
    let sum = Task::new("arithmetic", "What is 17 * 23?").unwrap();
    let sum = Submission::group(sum, ["17 * 23 = 391", "17 * 23 = 381"]).unwrap();
    for _ in 0..4 {
        let feedback = student.evaluate(&sum).await.unwrap();
        assert_eq!(student.audit(&feedback, &Truth::good([true, false])).await.unwrap().evaluations.len(), 1);
    }
    let records = student.evidence().records();
    assert_eq!(records.iter().filter(|record| record.charge.is_some()).count(), 3, "{records:?}");

    let publish = async || {
        let published = stage.client().publish_log(student.evidence(), &chain.asset(), &key, |_| None).await.unwrap();
        (published.accepted, published.later.len(), published.refused.len())
    };
    assert_eq!(publish().await, (1, 3, 0));
    channels.claim_all().await.unwrap();
    assert_eq!(publish().await, (4, 0, 0));
    assert_eq!((publish().await, stage.count().await), ((4, 0, 0), 4));

    // Another student learns them.
    let other = Payer::builder(stage.payer().await).build();
    let other = Student::builder(other).source(stage.client()).build().unwrap();
    let mut reader = Reputation::new(100, []).payment_checker(Arc::new(checker(&chain)));
    let found = reader.fetch(&stage.client()).await.unwrap().new;
    assert_eq!(found.len(), 4);
    for evidence in found {
        assert!(other.add_report(evidence).unwrap());
    }
}

/// The wire as it is documented.
#[tokio::test]
async fn report_of_a_charge_names_the_channel_and_what_was_charged_in_it() {
    let chain = DevnetChain::start(None).await;
    let stage = Stage::set(&chain).await;
    let booth = stage.booth(&["prose"]).await;
    let tab = Tab::open(&stage, booth.payee.address()).await;
    let report: Value = serde_json::to_value(tab.report(2 * PRICE, PRICE).await).unwrap();
    let config = serde_json::to_value(tab.channel.config).unwrap();
    assert_eq!(report["evidence"]["charge"], json!({ "channel": config, "charged": "2000" }));
    let nonce = Channel::escrow().voucher_digest(tab.channel.id(), 2_000);
    assert_eq!(report["evidence"]["payment"], json!({ "payer": tab.channel.payer.address(), "nonce": nonce }));
}
