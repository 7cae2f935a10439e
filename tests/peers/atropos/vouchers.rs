//! The example's environment pays by voucher, and gets back what it did not spend.

use std::{collections::BTreeSet, sync::Arc};

use alloy_primitives::U256;
use alloy_signer_local::PrivateKeySigner;
use axum::Router;
use serde_json::Value;
use tokio::net::TcpListener;
use tower_x402::{
    Network,
    channels::Channels,
    facilitator::channels::{ChannelFacilitator as _, OnchainChannels},
    ledger::MemoryLedger,
    vouchers::AuthorizerKey,
};
use url::Url;
use x402_market::EvaluatorService;

use super::{
    program::{Both, GROUP, Running, Student, environment, server, units},
    trainer::{Trainer, groups_of},
};
use support::{
    chain::Chain,
    student_stage::{Booth, Stage, card, serve},
};

/// An evaluator that offers vouchers beside `exact`, and its channels.
struct Seller {
    booth: Booth,
    channels: Channels,
    contract: OnchainChannels,
}

impl Seller {
    async fn open(stage: &Stage) -> Self {
        let [key, claimer] = [PrivateKeySigner::random(), PrivateKeySigner::random()];
        stage.chain.fund(claimer.address(), U256::from(10).pow(U256::from(18))).await;
        let contract = OnchainChannels::builder().network(Network::BASE_SEPOLIA).rpc_url(stage.chain.rpc_url());
        let contract = contract.signer(claimer.clone()).build().await.unwrap();
        let channels = Channels::builder(contract.clone(), AuthorizerKey::new(claimer));
        let channels = channels.ledger(Arc::new(MemoryLedger::new())).build().unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let card = card(listener.local_addr().unwrap(), key.address()).build().unwrap().sign(&key).await.unwrap();
        let service = EvaluatorService::builder(card, Both).facilitator(stage.facilitator.clone());
        let service = service.paywall(|paywall| paywall.vouchers(channels.clone())).build().unwrap();
        let (url, server) = serve(listener, Router::new().fallback_service(service));
        Self { booth: Booth { url, payee: key.address(), server }, channels, contract }
    }

    fn url(&self) -> &Url {
        &self.booth.url
    }

    /// What was charged by voucher. Nothing more is in the channels, as the chain has them, and all of it is claimed.
    async fn charged_in_closed_channels(&self) -> u64 {
        // A refund claims what was charged. In a channel that is used up there is nothing to refund: its seller claims it some time.
        self.channels.claim_all().await.unwrap();
        let records = self.channels.ledger().channels(None, 100).await.unwrap();
        let ids: Vec<_> = records.iter().map(|record| record.id).collect();
        let mut sum = 0;
        for (record, seen) in records.iter().zip(self.contract.observe(&ids).await.unwrap()) {
            assert_eq!((seen.state.balance, seen.state.total_claimed), (record.charged(), record.charged()));
            sum += u64::try_from(record.charged()).unwrap();
        }
        sum
    }
}

/// Checks that books, chain and payer agree, and that nothing is in escrow. Returns what was spent.
async fn spent(document: &Value, stage: &Stage, student: &Student) -> u64 {
    let paid = student.has_paid(stage).await;
    let on_chain = &document["on_chain"];
    assert_eq!((units(&document["spent"]), units(&on_chain["paid"])), (paid, paid), "{document:#}");
    assert_eq!((units(&document["escrow"]), units(&on_chain["escrow"])), (0, 0), "{document:#}");
    assert_eq!(on_chain["agrees"], true, "{document:#}");
    paid
}

#[tokio::test(flavor = "multi_thread")]
async fn groups_are_paid_by_voucher_and_escrow_is_refunded_at_the_end() {
    let (server, stage) = (server().await, Stage::set().await);
    let trainer = Trainer::start(&server, GROUP as u64).await;
    for (scheme, transfers, vouchers) in
        [("exact", 12..=12, 0..=0), ("vouchers", 0..=0, 12..=12), ("both", 3..=4, 8..=9)]
    {
        let (seller, student) = (Seller::open(&stage).await, Student::rich(&stage).await);
        let mut command = environment(&server.url, &stage, &[seller.url()], &student);
        command.args(["--groups", "6", "--audit-rate", "0"]);
        // `both` is the default.
        if scheme != "both" {
            command.args(["--scheme", scheme]);
        }
        let document = Running::start(command).document().await;
        let paid = spent(&document, &stage, &student).await;
        let by_transfer = stage.chain.token_transfers(seller.booth.payee).await;
        let by_transfer = by_transfer.iter().filter(|transfer| transfer.from == student.key.address());
        let by_transfer: Vec<u64> = by_transfer.map(|transfer| transfer.units).collect();
        let charged = seller.charged_in_closed_channels().await;
        assert_eq!(by_transfer.iter().sum::<u64>() + charged, paid, "{scheme}: {document:#}");
        assert!(transfers.contains(&by_transfer.len()), "{scheme}: {by_transfer:?}");
        // A group has four answers of 1,000 units each; of identical ones, one is bought.
        assert!(vouchers.contains(&charged.div_ceil(4_000)), "{scheme}: {charged}");
        assert_eq!(units(&document["evaluators"][0]["earned"]), paid);
    }
    let (batches, _) = trainer.finish().await;
    let groups = groups_of(batches, GROUP);
    assert!(groups.len() > 10);
    let mut nonces = BTreeSet::new();
    for group in &groups {
        let about = group.overrides.as_ref().unwrap();
        let payments = about[0]["payments"].as_array().unwrap();
        assert_eq!(payments.len(), 2);
        for payment in payments {
            assert!(matches!(payment["outcome"].as_str(), Some("settled" | "accepted")), "{payment}");
            assert!([1_000, 2_000, 3_000, 4_000].contains(&units(&payment["amount"])), "{payment}");
            assert!(nonces.insert(payment["nonce"].to_string()), "a payment is for one group");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_run_goes_on_spending_its_escrow_and_gets_the_rest_back() {
    let (server, stage) = (server().await, Stage::set().await);
    let (seller, student) = (Seller::open(&stage).await, Student::rich(&stage).await);
    let trainer = Trainer::start(&server, GROUP as u64).await;
    let files = tempfile::tempdir().unwrap();
    let command = || {
        let mut command = environment(&server.url, &stage, &[seller.url()], &student);
        command.args(["--groups", "12", "--audit-rate", "0", "--scheme", "vouchers", "--checkpoint"]);
        command.arg(files.path().join("run.json"));
        command
    };
    let mut running = Running::start(command());
    running.has_done(4).await;
    running.kill().await;
    let channels = seller.channels.ledger().channels(None, 100).await.unwrap();
    assert!(channels.iter().any(|channel| channel.state().available() > 0), "money is in escrow: {channels:?}");
    let mut running = Running::start(command());
    running.has_done(8).await;
    running.signal("INT").await;
    let (document, _) = running.failure().await;
    let document = document.expect("there is a summary");
    assert!(units(&document["escrow"]) > 0 && document["on_chain"]["agrees"] == true, "{document:#}");
    assert_eq!(document["escrow"], document["on_chain"]["escrow"], "{document:#}");
    let document = Running::start(command()).document().await;
    drop(trainer);
    assert_eq!(document["groups"]["rolled_out"], 12, "{document:#}");
    let paid = spent(&document, &stage, &student).await;
    assert_eq!(seller.charged_in_closed_channels().await, paid, "{document:#}");
}
