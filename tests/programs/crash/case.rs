//! One case of the matrix: where the process is killed, and what must hold after that.

use std::{collections::BTreeMap, fmt, sync::Arc, time::Duration};

use alloy_primitives::{Address, B256, U256};
use alloy_provider::Provider as _;
use alloy_rpc_types_eth::{BlockNumberOrTag, Filter};
use alloy_sol_types::SolEvent as _;
use bytes::Bytes;
use tokio::time::Instant;
use tower_x402::{
    ledger::{Record, SettlementState},
    payment::PaymentKey,
};

use super::{
    buyers::Buyer,
    facilitator_server::{Cut, FacilitatorServer},
    points::Point,
    process::{Next, PATIENCE, Process},
    scene::{Ended, Life, Scene},
    server::{Flow, PRICE, Via},
    store::Store,
};
use support::token::Token;

/// The number of payments in flight at once.
pub(crate) const PAYMENTS: usize = 8;

/// Counts of violations; all must be zero.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Wrong {
    /// Payments that are missing in the ledger or on the chain, or on which the two disagree.
    pub(crate) lost: usize,
    /// Transfers beyond one for each payment.
    pub(crate) doubled: usize,
    /// Payments with two different answers, or whose handler ran again after its answer was on record.
    pub(crate) reworked: usize,
    /// Buyers that retried and got no answer.
    pub(crate) unanswered: usize,
    /// Payments that are neither final nor dead in the end, and last lives that did not finish.
    pub(crate) open: usize,
    /// Buyers that got a receipt with a transaction that did not pay, or a failure of a payment that settled.
    pub(crate) untrue: usize,
}

impl Wrong {
    pub(crate) fn add(&mut self, other: Self) {
        self.lost += other.lost;
        self.doubled += other.doubled;
        self.reworked += other.reworked;
        self.unanswered += other.unanswered;
        self.open += other.open;
        self.untrue += other.untrue;
    }

    pub(crate) fn sum(&self) -> usize {
        let Self { lost, doubled, reworked, unanswered, open, untrue } = self;
        lost + doubled + reworked + unanswered + open + untrue
    }
}

/// The result of a case.
#[derive(Debug, Default)]
pub(crate) struct Report {
    /// The number of kills that were made, or of connections that were cut.
    pub(crate) kills: usize,
    pub(crate) wrong: Wrong,
    /// Buyers of a streamed response that were told the transaction that used their payment, or that nothing was charged.
    pub(crate) told: usize,
    /// Payments that were served and can never be paid, and are on record as owed.
    pub(crate) dead: usize,
    /// Transactions of a process that reverted, or did what another process with its own key had in the pool. With payment channels only.
    pub(crate) in_vain: usize,
    /// The time from the last kill until the last buyer was answered.
    pub(crate) waited: Duration,
    pub(crate) details: Vec<String>,
}

impl Report {
    pub(crate) fn note(&mut self, detail: impl fmt::Display) {
        self.details.push(detail.to_string());
    }
}

/// The stored response of a payment when its process was dead.
#[derive(Default)]
struct Kept(BTreeMap<B256, Bytes>);

/// Kills the process at each of these points, one life after the other, lets the last life finish every payment, and checks the result.
/// Before the last kill only half of the buyers present their payments, so that the life to be ended there sees new payments.
pub(crate) async fn run(via: Via, flow: Flow, store: Option<Store>, stops: &[Point], next: Next) -> Report {
    let mut scene = Scene::new(via, flow, store).await;
    let mut report = Report::default();
    let mut kept = Kept::default();
    let mut process = scene.open(PAYMENTS, stops.first().cloned()).await;
    let mut other = match next {
        Next::Restarted => None,
        Next::Another => Some(scene.another().await),
    };
    for number in 0..stops.len() {
        if scene.live(&mut process, life(number, stops.len())).await == Ended::Stopped {
            report.kills += 1;
        }
        scene.kill(process).await;
        let killed = Instant::now();
        scene.spend_elsewhere();
        kept.look(&scene, &mut report).await;
        let runs = scene.runs();
        process = match other.take() {
            Some(mut other) => {
                other.ahead(scene.clock.get()).await;
                other
            }
            None => scene.reopen(stops.get(number + 1).cloned()).await,
        };
        if number + 1 == stops.len() {
            end(&scene, &mut process, life(number + 1, stops.len()), &mut report).await;
            let answered = *scene.answered.lock().unwrap();
            report.waited = answered.map_or(PATIENCE, |at| at.duration_since(killed));
        }
        kept.compare(&scene, &runs, &mut report);
    }
    scene.kill(process).await;
    judge(&scene, &kept, &mut report).await;
    report
}

/// Returns one of the lives of a process that is killed this many times.
pub(crate) fn life(number: usize, kills: usize) -> Life {
    let buyers = if number + 1 < kills { PAYMENTS / 2 } else { PAYMENTS };
    Life { number: number as u64, buyers, is_last: number == kills }
}

/// Cuts the connection to the facilitator once, and checks the result. No process is killed.
pub(crate) async fn run_cut(via: Via, flow: Flow, store: Option<Store>, cut: Cut, occurrence: u32) -> Report {
    let mut scene = Scene::new(via, flow, store).await;
    let mut report = Report::default();
    let mut process = scene.open(PAYMENTS, None).await;
    let facilitator = scene.facilitator.as_ref().expect("a facilitator elsewhere");
    facilitator.cut(cut, occurrence);
    end(&scene, &mut process, life(0, 0), &mut report).await;
    report.kills = facilitator.cuts();
    scene.kill(process).await;
    let mut kept = Kept::default();
    kept.look(&scene, &mut report).await;
    judge(&scene, &kept, &mut report).await;
    report
}

/// Runs the last life until every payment is finished.
async fn end(scene: &Scene, process: &mut Process, life: Life, report: &mut Report) {
    let ended = scene.live(process, life).await;
    if ended != Ended::Quiet {
        report.wrong.open += 1;
        report.note(format!("the last life ended {ended:?}"));
    }
}

impl Kept {
    /// Remembers the responses on record, which must not change. A payment that the facilitator was asked to settle must not be due.
    async fn look(&mut self, scene: &Scene, report: &mut Report) {
        let mut entrusted = scene.facilitator.as_ref().map(FacilitatorServer::entrusted).unwrap_or_default();
        for (record, response) in scene.setup.store.remains(scene.clock.clone()).await {
            if !matches!(record.settlement.state(), SettlementState::None | SettlementState::Due) {
                entrusted.remove(&record.key.nonce);
            }
            let Some(response) = response else { continue };
            let first = self.0.entry(record.key.nonce).or_insert_with(|| response.body.clone());
            if *first != response.body {
                report.wrong.reworked += 1;
                report.note(format!("{}: another response on record", record.key.nonce));
            }
        }
        for nonce in entrusted {
            report.wrong.lost += 1;
            report.note(format!("{nonce}: with the facilitator, and due on record"));
        }
    }

    /// Checks that no payment with a stored response is worked on again.
    fn compare(&self, scene: &Scene, before: &BTreeMap<B256, usize>, report: &mut Report) {
        let after = scene.runs();
        for nonce in self.0.keys().filter(|nonce| before.get(*nonce) != after.get(*nonce)) {
            report.wrong.reworked += 1;
            report.note(format!("{nonce}: the handler ran again"));
        }
    }
}

async fn judge(scene: &Scene, kept: &Kept, report: &mut Report) {
    let records: BTreeMap<PaymentKey, Record> = scene
        .setup
        .store
        .remains(scene.clock.clone())
        .await
        .into_iter()
        .map(|(record, _)| (record.key, record))
        .collect();
    let transfers = transfers(scene).await;
    for buyer in &scene.buyers {
        judge_answers(scene, buyer, kept, records.get(&buyer.key()), report);
        judge_receipts(buyer, &transfers, report);
    }
    let mut paid = 0;
    for buyer in scene.buyers.iter().chain(&scene.earlier) {
        let nonce = buyer.key().nonce;
        let Some(record) = records.get(&buyer.key()) else {
            if scene.spends_elsewhere(buyer.key().payer) && buyer.answers().is_empty() {
                continue;
            }
            report.wrong.lost += 1;
            report.note(format!("{nonce}: not on record"));
            continue;
        };
        match record.settlement.paid_by() {
            Some(by) if transfers.contains(&(by, record.key.payer)) => {
                paid += 1;
                if !is_for_good(scene, record).await {
                    report.wrong.open += 1;
                    report.note(format!("{nonce}: {:?} is not final", record.settlement));
                }
            }
            Some(by) => {
                report.wrong.lost += 1;
                report.note(format!("{nonce}: {by} moved nothing"));
            }
            // Its response is lost and its payer was told so: it must not be charged.
            None if scene.setup.flow == Flow::Streamed
                && buyer.refusal().is_some()
                && record.settlement.state() == SettlementState::Due => {}
            None if scene.spends_elsewhere(record.key.payer) && buyer.answers().is_empty() => {}
            None if scene.spends_elsewhere(record.key.payer)
                && record.settlement.state() == SettlementState::Dead
                && record.owed() == U256::from(PRICE) =>
            {
                report.dead += 1;
            }
            None => {
                report.wrong.open += 1;
                report.note(format!("{nonce}: {:?} and {:?}", record.fulfilment, record.settlement));
            }
        }
    }
    if transfers.len() > paid {
        report.wrong.doubled += transfers.len() - paid;
        report.note(format!("{} transfers for {paid} payments", transfers.len()));
    }
    let total = scene.devnet.balance_of(scene.setup.pay_to).expect("the devnet answers");
    if U256::from(total.atomic()) != U256::from(paid as u64 * PRICE) {
        report.wrong.lost += 1;
        report.note(format!("the payee has {total}, the ledger {paid} payments"));
    }
}

fn judge_answers(scene: &Scene, buyer: &Arc<Buyer>, kept: &Kept, record: Option<&Record>, report: &mut Report) {
    let (nonce, answers) = (buyer.key().nonce, buyer.answers());
    let on_record = kept.0.get(&nonce);
    if answers.iter().chain(on_record).any(|answer| Some(answer) != answers.first()) && !answers.is_empty() {
        report.wrong.reworked += 1;
        report.note(format!("{nonce}: answered {answers:?}, on record {on_record:?}"));
    }
    let Some((status, refusal)) = buyer.refusal() else {
        if answers.is_empty() {
            report.wrong.unanswered += 1;
            report.note(format!("{nonce}: no answer"));
        }
        return;
    };
    // Its payer cannot pay any more, so it gets no answer.
    let is_paid = record.is_some_and(|record| record.settlement.paid_by().is_some());
    if scene.spends_elsewhere(buyer.key().payer) && status.as_u16() == 402 && !is_paid {
        return;
    }
    let names_transaction = record
        .and_then(|record| record.settlement.paid_by())
        .is_none_or(|transaction| refusal.contains(&transaction.to_string()));
    if scene.setup.flow == Flow::Streamed && status.as_u16() == 409 && names_transaction {
        report.told += 1;
    } else {
        report.wrong.unanswered += 1;
        report.note(format!("{nonce}: {status} {refusal}"));
    }
}

/// Returns `true` if the payment is settled for good: by the shop's ledger, or by the facilitator's where the shop has no node to tell.
async fn is_for_good(scene: &Scene, record: &Record) -> bool {
    match &scene.facilitator {
        Some(facilitator) if scene.setup.via == Via::Remote => facilitator.is_final(&record.key).await,
        _ => record.settlement.state() == SettlementState::Final,
    }
}

/// Checks that every `PAYMENT-RESPONSE` that the buyer got is true.
fn judge_receipts(buyer: &Buyer, transfers: &[(B256, Address)], report: &mut Report) {
    let PaymentKey { payer, nonce, .. } = buyer.key();
    for receipt in buyer.receipts() {
        let transaction = receipt["transaction"].as_str().and_then(|hash| hash.parse().ok());
        let paid = transaction.is_some_and(|by| transfers.contains(&(by, payer)));
        let is_true = match (receipt["success"].as_bool(), receipt["errorReason"].as_str()) {
            // On credit: it is settled later.
            (Some(true), _) => paid || (transaction.is_none() && receipt["extensions"].is_object()),
            (Some(false), Some("settlement_pending")) => true,
            (Some(false), Some(_)) => !paid,
            _ => false,
        };
        if !is_true {
            report.wrong.untrue += 1;
            report.note(format!("{nonce}: told {receipt}"));
        }
    }
}

/// Returns all transfers to the payee: transaction and payer.
async fn transfers(scene: &Scene) -> Vec<(B256, Address)> {
    let filter = Filter::new()
        .from_block(BlockNumberOrTag::Earliest)
        .to_block(BlockNumberOrTag::Latest)
        .address(scene.devnet.asset().address)
        .event_signature(Token::Transfer::SIGNATURE_HASH)
        .topic2(scene.setup.pay_to);
    let logs = scene.devnet.provider().get_logs(&filter).await.expect("the devnet answers");
    let transfer = |log: &alloy_rpc_types_eth::Log| {
        let event = log.log_decode::<Token::Transfer>().expect("a Transfer");
        (log.transaction_hash.expect("it is in a block"), event.inner.from)
    };
    logs.iter().map(transfer).collect()
}
