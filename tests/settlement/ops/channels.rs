//! The operator lists, sums up and exports payment channels.

use std::sync::Arc;

use alloy_primitives::U256;
use tower_x402::{
    ManualClock,
    ledger::{
        MemoryLedger, SqliteLedger,
        channels::{ChannelLedger, ChannelStep},
        conformance::{
            START,
            channels::{id, observation, open, sell},
            hash,
        },
    },
    ops::{CHANNEL_COLUMNS, ChannelFilter, ExportFormat, Operator},
    vouchers::{ChannelId, ChannelObservation},
};

/// Channels 1 to 4: unused, unclaimed, claimed, and with a withdrawal that could take 20 of the 30 that are unclaimed.
async fn operator() -> Operator {
    let ledger = Arc::new(MemoryLedger::new());
    for salt in 1..=4 {
        open(&*ledger, salt, 100).await;
    }
    sell(&*ledger, 2, hash(1), 10).await;
    sell(&*ledger, 3, hash(1), 10).await;
    sell(&*ledger, 4, hash(1), 30).await;
    for seen in
        [(3, observation(3, 100, 10, 2)), (4, ChannelObservation { withdrawal: 90, ..observation(4, 100, 0, 2) })]
    {
        ledger.advance(&id(seen.0), &ChannelStep::Observe { observation: seen.1, now: START }).await.unwrap();
    }
    Operator::new(ledger.clone()).channel_ledger(ledger)
}

async fn listed(operator: &Operator, which: &str) -> Vec<ChannelId> {
    let mut channels = operator.channels(which.parse().unwrap());
    let mut ids = Vec::new();
    while let Some(page) = channels.next().await.unwrap() {
        assert!(!page.is_empty());
        ids.extend(page.iter().map(|record| record.id));
    }
    ids
}

fn in_order<const N: usize>(salts: [u8; N]) -> Vec<ChannelId> {
    let mut ids = salts.map(id).to_vec();
    ids.sort_unstable();
    ids
}

#[tokio::test]
async fn channels_are_listed_by_what_is_unclaimed_and_at_risk() {
    let operator = operator().await;
    assert_eq!(listed(&operator, "all").await, in_order([1, 2, 3, 4]));
    assert_eq!(listed(&operator, "unclaimed").await, in_order([2, 4]));
    assert_eq!(listed(&operator, "at-risk").await, in_order([4]));
    for text in ["atrisk", "idle", "idle:", "idle:1d", "idle:-1", "idle: 1"] {
        assert!(text.parse::<ChannelFilter>().is_err(), "{text}");
    }
}

/// A channel with nothing in it is nothing to do about.
#[tokio::test]
async fn channels_are_listed_that_nobody_used_for_a_time() {
    let ledger = Arc::new(MemoryLedger::new());
    for salt in 1..=3 {
        open(&*ledger, salt, 100).await;
        sell(&*ledger, salt, hash(1), 10).await;
    }
    for (salt, observed) in [(2, observation(2, 10, 10, 2)), (3, observation(3, 11, 10, 2))] {
        ledger.advance(&id(salt), &ChannelStep::Observe { observation: observed, now: START + 3_600 }).await.unwrap();
    }
    let clock = Arc::new(ManualClock::at(START + 3_599));
    let operator = Operator::new(ledger.clone()).channel_ledger(ledger).clock(clock.clone());
    let used_at = operator.channels(ChannelFilter::All).next().await.unwrap().unwrap()[0].used_at;
    assert_eq!(used_at, START);
    assert_eq!(listed(&operator, "idle:3600").await, []);
    clock.advance(1);
    assert_eq!(listed(&operator, "idle:3600").await, in_order([1, 3]));
    assert_eq!(listed(&operator, "idle:0").await, in_order([1, 3]));
}

#[tokio::test]
async fn channels_beyond_one_page_are_listed_once() {
    let ledger = Arc::new(MemoryLedger::new());
    for n in 0..600_u32 {
        let mut config = tower_x402::ledger::conformance::channels::config(1);
        config.salt = U256::from(n).into();
        let network = tower_x402::Network::BASE;
        let id = tower_x402::vouchers::Escrow::on(network).channel_id(&config);
        let mut observation = observation(1, 100, 0, 1);
        observation.state.channel_id = id;
        ledger.advance(&id, &ChannelStep::Open { network, config, observation, now: START }).await.unwrap();
    }
    let operator = Operator::new(ledger.clone()).channel_ledger(ledger);
    let ids = listed(&operator, "all").await;
    assert!(ids.is_sorted_by(|a, b| a < b));
    assert_eq!(ids.len(), 600);
}

#[tokio::test]
async fn channels_are_summed_up_by_token() {
    let reports = operator().await.channel_report().await.unwrap();
    let [report] = &reports[..] else { panic!("one token: {reports:?}") };
    let sums = [report.charged, report.claimed, report.unclaimed, report.at_risk, report.unspent];
    assert_eq!((report.channels, sums), (4, [50, 10, 40, 20, 350].map(U256::from)));
    assert_eq!(serde_json::to_value(report).unwrap()["unclaimed"], "40");
}

#[tokio::test]
async fn both_export_formats_have_the_same_values_and_no_signature() {
    let operator = operator().await;
    let export = async |format| {
        let mut export = operator.export_channels(ChannelFilter::AtRisk, format);
        let mut text = String::new();
        while let Some(lines) = export.next().await.unwrap() {
            text.push_str(&lines);
        }
        text
    };
    let csv = export(ExportFormat::Csv).await;
    let lines: Vec<Vec<&str>> = csv.trim_end().split("\r\n").map(|line| line.split(',').collect()).collect();
    assert_eq!(lines.len(), 2);
    assert_eq!(lines[0], CHANNEL_COLUMNS);
    let json: serde_json::Value = serde_json::from_str(&export(ExportFormat::JsonLines).await).unwrap();
    assert_eq!(json.as_object().unwrap().len(), CHANNEL_COLUMNS.len());
    for (column, value) in CHANNEL_COLUMNS.iter().zip(&lines[1]) {
        let in_json = json[column].as_str().map_or_else(|| json[column].to_string(), str::to_owned);
        assert_eq!(&in_json, value, "{column}");
        assert!(value.starts_with(|first: char| first.is_ascii_alphanumeric()), "{column} is no formula: {value}");
    }
    let id = id(4).to_string();
    for (column, value) in [
        ("channel", &id[..]),
        ("charged_units", "30"),
        ("charged", "0.000030"),
        ("claimed_units", "0"),
        ("unclaimed_units", "30"),
        ("at_risk_units", "20"),
        ("balance_units", "100"),
        ("withdrawal_units", "90"),
        ("used_at", "2027-01-15T08:00:00Z"),
    ] {
        assert_eq!(json[column], value, "{column}");
    }
    let signature = "01".repeat(32);
    assert!(!csv.contains(&signature), "with it, a voucher is money");
}

#[tokio::test]
async fn failed_books_are_an_error_and_not_the_end() {
    let directory = tempfile::tempdir().unwrap();
    let ledger = Arc::new(SqliteLedger::open(directory.path().join("l.sqlite")).await.unwrap());
    ledger.close().await;
    let operator = Operator::new(ledger.clone()).channel_ledger(ledger);
    assert!(operator.channels(ChannelFilter::All).next().await.is_err());
    assert!(operator.channel_report().await.is_err());
}
