//! The operator lists, finds, reconciles, sums up and exports payments.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use alloy_primitives::{B256, U256, hex};
use futures_util::future::join_all;
use tower_x402::{
    Clock,
    ledger::{
        Fingerprint, FulfilmentStep, Lease, LedgerError, Record, Reservation, Settlement, SettlementState,
        SettlementStep,
    },
    ops::{COLUMNS, ExportFormat, Operator, OperatorError, PaymentFilter, PaymentSearch},
    payment::{PaymentKey, Prechecked, SettlementOutcome},
};

use support::engine_stage::*;

fn operator(stage: &Stage) -> Operator {
    Operator::new(stage.ledger.clone()).clock(stage.clock.clone() as Arc<dyn Clock>)
}

async fn keys(operator: &Operator, which: PaymentFilter) -> Vec<PaymentKey> {
    let mut payments = operator.payments(which);
    let mut keys = Vec::new();
    while let Some(page) = payments.next().await.unwrap() {
        assert!(!page.is_empty());
        keys.extend(page.iter().map(|record| record.key));
    }
    keys
}

async fn reserve(stage: &Stage, payment: &Prechecked, until: u64) -> Lease {
    let request = Fingerprint { digest: B256::ZERO, names_caller: false };
    let record = Record::new(payment, request, stage.clock.now(), until);
    match stage.ledger.reserve(&record).await.unwrap() {
        Reservation::New(lease) => lease,
        Reservation::Known(_) => panic!("known"),
    }
}

const TRANSACTION: B256 = B256::repeat_byte(0x7a);

/// A payment that was reserved, went through these steps, and was settled.
async fn paid_after(stage: &Stage, lease_until: u64, steps: Vec<FulfilmentStep>) -> PaymentKey {
    let payment = stage.payment(&new_key());
    let lease = reserve(stage, &payment, lease_until).await;
    stage.ledger.fulfil(&lease, &FulfilmentStep::Admit { funds: None, due: true }).await.unwrap();
    let settled = SettlementStep::Settle { transaction: TRANSACTION, block: Some(9), fee: Some(U256::from(5)) };
    stage.ledger.settle(&payment.key(), &settled).await.unwrap();
    for step in steps {
        stage.ledger.fulfil(&lease, &step).await.unwrap();
    }
    payment.key()
}

#[tokio::test]
async fn settled_but_undeliverable_payment_is_owed() {
    let stage = stage().await;
    let now = stage.clock.now();
    let (start, release) = (FulfilmentStep::Start { until: 0 }, FulfilmentStep::Release { body: None });
    let produce = FulfilmentStep::Produce { charged: None, body: None, at: now, response: None };
    let owed = BTreeSet::from([
        paid_after(&stage, now - 1, vec![]).await,
        paid_after(&stage, now - 1, vec![start.clone()]).await,
        paid_after(&stage, now - 1, vec![start.clone(), release]).await,
        paid_after(&stage, now - 1, vec![start.clone(), produce.clone()]).await,
    ]);
    // Worked on, streaming, delivered: nobody is owed anything.
    paid_after(&stage, now + 60, vec![start.clone()]).await;
    paid_after(&stage, now + 60, vec![start.clone(), produce.clone()]).await;
    paid_after(&stage, now - 1, vec![start, produce, FulfilmentStep::Deliver]).await;
    // Kept for replays.
    let kept = stage.payment(&stage.payer(1));
    stage.produced(&kept).await;
    let settled = SettlementStep::Settle { transaction: TRANSACTION, block: None, fee: None };
    stage.ledger.settle(&kept.key(), &settled).await.unwrap();
    // Not paid.
    reserve(&stage, &stage.payment(&new_key()), now - 1).await;

    let operator = operator(&stage);
    let found: BTreeSet<_> = keys(&operator, PaymentFilter::Owed).await.into_iter().collect();
    assert_eq!(found, owed);
    stage.clock.advance(601);
    assert!(keys(&operator, PaymentFilter::Owed).await.contains(&kept.key()), "its answer is not kept any more");

    let report = operator.report().await.unwrap();
    let [asset] = &report.assets[..] else { panic!("{report:?}") };
    assert_eq!((asset.paid.payments, asset.paid.units), (8, U256::from(8 * PRICE)));
    assert_eq!(asset.owed.payments, 7, "the leases have ended, too");
    assert_eq!(asset.fees_wei, U256::from(7 * 5));
    assert_eq!(asset.states[&SettlementState::None].payments, 1);
    let json = serde_json::to_value(&report).unwrap();
    assert_eq!(json["assets"][0]["states"]["settled"]["units"], "8000");
}

#[tokio::test]
async fn every_payment_is_listed_once() {
    let stage = stage().await;
    let mut reserved = BTreeSet::new();
    for index in 0..600 {
        let payment = stage.payment(&new_key());
        let lease = reserve(&stage, &payment, 0).await;
        if index % 100 == 0 {
            stage.ledger.fulfil(&lease, &FulfilmentStep::Admit { funds: None, due: true }).await.unwrap();
        }
        reserved.insert(payment.key());
    }
    let operator = operator(&stage);
    let listed = keys(&operator, PaymentFilter::All).await;
    assert_eq!(listed.len(), 600);
    assert_eq!(listed.into_iter().collect::<BTreeSet<_>>(), reserved);
    assert_eq!(keys(&operator, "due".parse().unwrap()).await.len(), 6);
    assert_eq!(keys(&operator, PaymentFilter::Open).await.len(), 6);
    assert!(keys(&operator, PaymentFilter::Owed).await.is_empty());
    let mut csv = operator.export(PaymentFilter::All, ExportFormat::Csv);
    let mut lines = 0;
    while let Some(piece) = csv.next().await.unwrap() {
        let held = piece.matches("\r\n").count();
        assert!(held <= 256, "a page at a time is in memory");
        lines += held;
    }
    assert_eq!(lines, 601);
}

/// On the runtime's clock, which does not wait for anything.
#[tokio::test]
async fn a_report_rests_before_each_further_page() {
    let stage = stage().await;
    for _ in 0..600 {
        reserve(&stage, &stage.payment(&new_key()), 0).await;
    }
    let operator = operator(&stage);
    tokio::time::pause();
    let began = tokio::time::Instant::now();
    let whole = operator.report().await.unwrap();
    assert_eq!(began.elapsed(), Duration::ZERO);
    let minute = Duration::from_secs(60);
    assert_eq!(operator.pause(minute).report().await.unwrap(), whole);
    // Three pages, and the look for a fourth.
    let rested = began.elapsed();
    assert!((3 * minute..3 * minute + Duration::from_secs(1)).contains(&rested), "{rested:?}");
}

#[tokio::test]
async fn payments_are_found_by_prefix_and_transaction() {
    let stage = stage().await;
    let payer = stage.payer(2);
    let (first, second) = (stage.payment(&payer), stage.payment(&payer));
    let transaction = paid_by(&stage.admit_and_settle(&first).await);
    reserve(&stage, &second, 0).await;
    let operator = operator(&stage);
    let find = async |text: String| {
        let found = operator.find(&text.parse::<PaymentSearch>().unwrap(), 10).await.unwrap();
        found.into_iter().map(|record| record.key).collect::<BTreeSet<_>>()
    };
    let both = BTreeSet::from([first.key(), second.key()]);
    let PaymentKey { payer, nonce, .. } = first.key();
    assert_eq!(find(format!("{payer}:{nonce}")).await, BTreeSet::from([first.key()]));
    assert_eq!(find(transaction.to_string()).await, BTreeSet::from([first.key()]));
    assert_eq!(
        find(transaction.to_string()[..12].to_uppercase().replace("0X", "0x")).await,
        BTreeSet::from([first.key()])
    );
    assert_eq!(find(second.key().nonce.to_string()[2..20].to_owned()).await, BTreeSet::from([second.key()]));
    assert_eq!(find(payer.to_string()).await, both);
    assert!(find(new_key().address().to_string()).await.is_empty());
    assert_eq!(operator.find(&PaymentSearch::Transaction(transaction), 10).await.unwrap().len(), 1);
    assert_eq!(operator.find(&payer.to_string().parse().unwrap(), 1).await.unwrap().len(), 1, "no more than asked for");
}

#[tokio::test]
async fn reconciliation_records_only_what_the_chain_proves() {
    // What is due is settled at the start, when there is nothing, and from then on only in an hour.
    let stage = Stage::with(|d| d, |b| b.reconcile_interval(Duration::from_secs(3_600))).await;
    let operator = operator(&stage);
    let reconcile = async |payment: &Prechecked| operator.reconcile(&stage.facilitator, &payment.key()).await;

    let front_run = stage.payment(&stage.payer(1));
    stage.admit(&front_run).await;
    let transaction = stage.front_run(&front_run);
    let (record, outcome) = reconcile(&front_run).await.unwrap();
    assert!(matches!(outcome, SettlementOutcome::Settled { .. }));
    assert_eq!(record.settlement.paid_by(), Some(transaction));

    // Due, and never tried: that it is not executed is no failure, and it stays as it was.
    let due = stage.payment(&stage.payer(1));
    stage.produced(&due).await;
    let (record, outcome) = reconcile(&due).await.unwrap();
    assert!(matches!(outcome, SettlementOutcome::Failed { dead: false, .. }));
    assert_eq!((record.settlement, record.last_failure), (Settlement::Due, None));

    let unknown = stage.payment(&stage.payer(1));
    assert!(matches!(reconcile(&unknown).await, Err(OperatorError::Unknown)));

    stage.clock.advance(VALID + 1);
    for _ in 0..80 {
        stage.devnet.mine();
    }
    let (record, outcome) = reconcile(&due).await.unwrap();
    assert!(matches!(outcome, SettlementOutcome::Failed { dead: true, .. }), "{outcome:?}");
    assert_eq!(record.settlement, Settlement::Dead);
}

#[tokio::test]
async fn fee_that_is_looked_up_later_is_the_share_of_the_payment() {
    let stage = Stage::with(every(50), |b| b.block_time(Duration::from_millis(50))).await;
    let stage = Arc::new(stage);
    stage.facilitator.deploy_batch_settler().await.unwrap().unwrap();
    let before = stage.facilitator.stats().spent;
    let payments: Vec<_> = (0..10).map(|_| stage.payment(&stage.payer(1))).collect();
    let verified = join_all(payments.iter().map(|payment| stage.admit(payment))).await;
    let settling = payments.iter().zip(&verified).map(|(payment, verified)| stage.settle(payment, verified));
    for outcome in join_all(settling).await {
        paid_by(&outcome);
    }
    let spent = stage.facilitator.stats().spent - before;
    let mut fees = U256::ZERO;
    for payment in &payments {
        let SettlementOutcome::Settled { fee: Some(fee), .. } = stage.reconcile(payment).await.unwrap() else {
            panic!()
        };
        assert_eq!(Some(fee), stage.record(payment).await.fee);
        fees += fee;
    }
    assert!(fees <= spent && spent - fees < U256::from(10), "{fees} of {spent}");
}

#[tokio::test]
async fn csv_and_json_exports_agree_and_hold_no_signature() {
    let stage = stage().await;
    let payer = stage.payer(2);
    let (settled, open) = (stage.payment(&payer), stage.payment(&payer));
    paid_by(&stage.admit_and_settle(&settled).await);
    reserve(&stage, &open, 0).await;
    let operator = operator(&stage);
    let export = async |format| {
        let mut export = operator.export(PaymentFilter::All, format);
        let mut text = String::new();
        while let Some(piece) = export.next().await.unwrap() {
            text += &piece;
        }
        text
    };
    let (csv, json) = (export(ExportFormat::Csv).await, export(ExportFormat::JsonLines).await);
    for payment in [&settled, &open] {
        let half = hex::encode(&payment.signature().as_bytes()[..32]);
        assert!(!csv.to_lowercase().contains(&half) && !json.to_lowercase().contains(&half));
    }
    let mut lines = csv.strip_suffix("\r\n").unwrap().split("\r\n");
    assert_eq!(lines.next().unwrap().split(',').collect::<Vec<_>>(), COLUMNS);
    let rows: Vec<Vec<&str>> = lines.map(|line| line.split(',').collect()).collect();
    let objects: Vec<serde_json::Value> = json.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!((rows.len(), objects.len()), (2, 2));
    for (row, object) in rows.iter().zip(&objects) {
        assert_eq!(row.len(), COLUMNS.len());
        assert_eq!(object.as_object().unwrap().len(), COLUMNS.len());
        for (column, value) in COLUMNS.iter().zip(row) {
            // Neither a formula nor anything that wants quotes.
            assert!(value.bytes().next().is_none_or(|first| first.is_ascii_alphanumeric()), "{column}: {value}");
            assert!(!value.contains(['"', '\n', ';', '\t']), "{column}: {value}");
            let said = match &object[*column] {
                serde_json::Value::Null => String::new(),
                serde_json::Value::String(text) => text.clone(),
                other => other.to_string(),
            };
            assert_eq!(said, *value, "{column}");
        }
    }
    let record = stage.record(&settled).await;
    let paid = objects.iter().find(|object| object["state"] == "settled").unwrap();
    assert_eq!(paid["nonce"], record.key.nonce.to_string());
    assert_eq!((&paid["amount_units"], &paid["amount"]), (&"1000".into(), &"0.001000".into()));
    assert_eq!(paid["transaction"], record.settlement.paid_by().unwrap().to_string());
    assert_eq!(paid["fee_wei"], record.fee.unwrap().to_string());
    assert_eq!((&paid["time"], &paid["settled_at"]), (&"2027-01-15T08:00:00Z".into(), &"2027-01-15T08:00:00Z".into()));
    assert_eq!((&paid["payee"], &paid["deferred"]), (&serde_json::to_value(PAYEE).unwrap(), &false.into()));
}

#[tokio::test]
async fn failed_ledger_is_an_error_and_not_the_end() {
    let directory = tempfile::tempdir().unwrap();
    let ledger = Arc::new(tower_x402::ledger::SqliteLedger::open(directory.path().join("l.sqlite")).await.unwrap());
    ledger.close().await;
    let operator = Operator::new(ledger);
    assert!(matches!(operator.payments(PaymentFilter::All).next().await, Err(LedgerError::Backend(_))));
    assert!(matches!(operator.report().await, Err(LedgerError::Backend(_))));
}
