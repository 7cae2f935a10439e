//! A person reads the page of a directory: headless Chromium.

#[allow(dead_code, reason = "the tests of directories use the rest")]
#[path = "../market/directory/stage.rs"]
mod stage;

use std::sync::Arc;

use alloy_primitives::U256;
use alloy_signer_local::PrivateKeySigner;
use tower_x402::{Clock as _, ManualClock};
use x402_market::evidence::{CallOutcome, Pairs};

use self::stage::{Stage, checker, sign_report};
use super::browser_wallet::browser::Browser;
use support::{
    authorization::{authorization, sign, unix_now},
    chain::Chain as _,
    devnet::DevnetChain,
    token::transfer_vrs,
};

const DAY: u64 = 86_400;

#[tokio::test]
async fn person_reads_what_evaluators_cost_and_are_worth() {
    let (chain, clock) = (DevnetChain::start(None).await, Arc::new(ManualClock::at(unix_now())));
    let ticking = clock.clone();
    let stage = Stage::set_with(&chain, |directory| directory.payment_checker(checker(&chain)).clock(ticking)).await;
    // How many of ten pairs each orders rightly, at first and in the end.
    let evaluators = [
        ("Close reading", "Whether an argument follows from its premises, step by step.", 1_000, 7, 10),
        ("Quick marks", "A first impression of style and tone, of whole groups at once.", 300, 8, 4),
        ("<b>Free lunch</b>", "\"The best\" judge & <script>alert(1)</script>", 2_000, 5, 5),
    ];
    let payers = [stage.payer().await, stage.payer().await, stage.payer().await];
    let mut booths = Vec::new();
    for (name, description, price, ..) in evaluators {
        let booth = stage::Booth::open(&["prose"]).await;
        booth.show(&["prose", "arithmetic"], &booth.payee, price).await;
        booth.show_adjusted(|card| (card.name, card.description) = (name.to_owned(), description.to_owned())).await;
        stage.client().list(&booth.url).await.unwrap();
        booths.push(booth);
    }
    const TIMES: u64 = 12;
    for time in 0..TIMES {
        clock.advance(5 * DAY);
        for (number, (booth, (.., price, first, last))) in booths.iter().zip(evaluators).enumerate() {
            let (payer, evaluator) = (&payers[(time as usize + number) % 3], booth.payee.address());
            let mut message = authorization(payer.address(), evaluator, price);
            message.validBefore = U256::from(clock.now() + DAY);
            let signature = sign(payer, &chain.asset(), &message);
            chain.set_next_timestamp(clock.now()).await;
            let receipt = stage.relayer.send(&chain, transfer_vrs(&message, &signature)).await;
            let paid = stage.paid(message, &receipt).await;
            let right = (first * (TIMES - 1 - time) + last * time) / (TIMES - 1) + (time + number as u64) % 2;
            let right = u32::try_from(right.min(10)).unwrap();
            let mut record = paid.record(evaluator);
            record.outcome = match (number, time) {
                (2, 3 | 7) => CallOutcome::Timeout,
                _ => CallOutcome::answered(Pairs::new(right, 10 - right, 10)),
            };
            let report = sign_report(record, Some(paid.transaction), payer).await;
            assert_eq!(stage.post(&report).await, (201, String::new()));
        }
    }

    let mut browser = Browser::start(&PrivateKeySigner::random(), &chain.rpc_url()).await;
    let seen = browser.open(stage.url.as_str()).await;
    assert_eq!(seen.title, "Evaluators");
    let text = browser.text().await;
    for part in ["Close reading", "$0.0003 for each output", "<b>Free lunch</b>", "<script>alert(1)</script>"] {
        assert!(text.contains(part), "{part} in {text}");
    }
    assert!(text.contains("12 audits in 12 reports, by 3 payers") && text.contains("2 calls failed"), "{text}");
    for (name, width, dark) in
        [("directory.png", 900, false), ("directory-dark.png", 900, true), ("directory-phone.png", 375, false)]
    {
        let seen = browser.picture(name, width, dark).await;
        assert!(!seen.overflows, "{name}");
    }
    let filtered = browser.open(stage.url.join("?skill=arithmetic").unwrap().as_str()).await;
    assert_eq!(filtered.title, "Evaluators");
    assert!(browser.text().await.contains("not audited"));
}
