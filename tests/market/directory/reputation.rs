//! Paid reports that are lies, and readers with audits of their own, whom they do not move.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use alloy_primitives::{Address, B256, U256};
use alloy_signer_local::PrivateKeySigner;
use axum::{Router, routing::get};
use http::StatusCode;
use serde_json::json;
use tokio::net::TcpListener;
use tower_x402::{ManualClock, Usdc};
use url::Url;
use x402_directory::{
    DirectoryClient,
    reputation::{PullError, Reputation},
};
use x402_market::{
    evidence::{CallOutcome, Evidence, EvidenceLog, EvidencePayment, Pairs},
    selection::{Selector as _, Skills, Thompson},
};

use super::stage::{PRICE, Stage, sign_report};
use support::devnet::DevnetChain;

const NOW: u64 = 1_800_000_000;

fn skills() -> Skills {
    ["prose"].into_iter().collect()
}

fn address(number: u64) -> Address {
    Address::left_padding_from(&number.to_be_bytes())
}

fn record(payer: u64, number: u64, evaluator: Address, right: bool) -> Evidence {
    let nonce = B256::from(U256::from(payer) << 64 | U256::from(number));
    Evidence::new(
        evaluator,
        "prose",
        Usdc::from_atomic(PRICE),
        NOW,
        CallOutcome::answered(Pairs::new(right.into(), (!right).into(), 1)),
    )
    .with_payment(EvidencePayment { payer: address(payer), nonce })
}

/// What one has seen oneself: of each evaluator so many verdicts, so many of them right.
fn audits(me: u64, seen: &[(Address, u64, u64)]) -> EvidenceLog {
    let log = EvidenceLog::in_memory(1_000);
    let mut nonce = 0;
    for (evaluator, verdicts, right) in seen {
        for number in 0..*verdicts {
            nonce += 1;
            log.record(record(me, nonce, *evaluator, number < *right), NOW).unwrap();
        }
    }
    log
}

fn worth(selector: &Thompson, evaluator: Address) -> f64 {
    selector.estimate(evaluator, skills().get("prose").unwrap()).unwrap().worth
}

fn apply_report(selector: &mut Thompson, report: &Evidence) {
    let skill = skills().get(&report.skill).unwrap();
    selector.learn_report(report.payment.unwrap().payer, &report.observation(skill));
}

/// A reader with audits of its own, which has read what others report.
fn reader(own: &EvidenceLog, said: &EvidenceLog) -> Thompson {
    let mut selector = Thompson::seeded(1);
    selector.restore(own, &[address(1)], &skills());
    said.for_each(|evidence| apply_report(&mut selector, evidence));
    selector
}

/// Each of these reports is about a payment that took place, and the directory accepts them all.
#[tokio::test]
async fn thousand_self_payments_do_not_move_a_reader_with_audits() {
    let chain = DevnetChain::start(None).await;
    let stage = Stage::set(&chain).await;
    let booth = stage.booth(&["prose"]).await;
    let evaluator = booth.payee.address();
    let me = PrivateKeySigner::random();
    let own = audits(1, &[(evaluator, 8, 2)]);

    let mut wash = Vec::new();
    for _ in 0..10 {
        wash.push(stage.payer().await);
    }
    for number in 0..1_000 {
        let payer = &wash[number % wash.len()];
        let paid = stage.pay(payer, evaluator, PRICE).await;
        let praise = support::changed(paid.record(evaluator), |record| {
            record.outcome = CallOutcome::answered(Pairs::new(1, 0, 1))
        });
        let said = sign_report(praise, Some(paid.transaction), payer).await;
        assert_eq!(stage.post(&said).await.0, 201, "it was paid, and may be said");
    }

    let mut selector = Thompson::seeded(1);
    selector.restore(&own, &[address(1)], &skills());
    let before = worth(&selector, evaluator);
    let mut reputation = Reputation::new(10_000, [me.address()]);
    let pulled = reputation.fetch(&stage.client()).await.unwrap();
    pulled.new.iter().for_each(|evidence| apply_report(&mut selector, evidence));
    assert_eq!((pulled.new.len(), pulled.refused), (1_000, 0));
    let after = worth(&selector, evaluator);
    assert!((after - before).abs() < 0.02 && after < 0.0, "{before} {after}");
    for friend in &wash {
        assert!(selector.trust(friend.address()) < 0.01);
    }
}

/// However many accomplices report, they move the reader by no more than its trust in one of them, which its own audits reduce.
#[test]
fn no_number_of_accomplices_outweighs_own_audits() {
    let (good, liar) = (address(1_001), address(1_002));
    let mut moved = Vec::new();
    for audited in [8, 16, 32] {
        let own = audits(1, &[(good, 12, 11), (liar, audited, audited / 3)]);
        let mut selector = Thompson::seeded(1);
        selector.restore(&own, &[address(1)], &skills());
        let before = worth(&selector, liar);
        for friend in 2..202 {
            for number in 0..20 {
                apply_report(&mut selector, &record(friend, number, liar, true));
            }
            let (after, trust) = (worth(&selector, liar), selector.trust(address(friend)));
            assert!(
                after <= before + trust * (1.0 - before) + 0.06 && after < 0.0,
                "{friend} {before} {after} {trust}"
            );
        }
        moved.push(worth(&selector, liar) - before);
    }
    assert!(moved.is_sorted_by(|a, b| a > b) && moved[0] < 0.2 && moved[2] < 0.06, "{moved:?}");
}

#[test]
fn payers_that_agree_with_own_audits_are_trusted_about_others() {
    let (known, bad, unknown) = (address(1_001), address(1_002), address(1_003));
    let own = audits(1, &[(known, 20, 18), (bad, 20, 9)]);
    let (honest, liar) = (2, 3);
    let said = EvidenceLog::in_memory(1_000);
    for number in 0..40 {
        said.record(record(honest, number, known, number % 10 != 0), NOW).unwrap();
        said.record(record(honest, 100 + number, bad, number % 2 == 0), NOW).unwrap();
        said.record(record(honest, 200 + number, unknown, number % 8 != 0), NOW).unwrap();
        // The other way round.
        said.record(record(liar, number, known, number % 2 == 0), NOW).unwrap();
        said.record(record(liar, 100 + number, bad, true), NOW).unwrap();
    }
    let selector = reader(&own, &said);
    assert!(selector.trust(address(honest)) > 0.75 && selector.trust(address(liar)) < 0.01);
    assert!(worth(&selector, unknown) > 0.4, "{}", worth(&selector, unknown));
    assert!(worth(&selector, bad) < 0.2, "{}", worth(&selector, bad));
}

/// The copier reports of every evaluator what others report, pays for it, is trusted for that, and praises an accomplice whom the reader
/// never hired.
#[test]
fn own_audits_overrule_a_copier_that_praises_an_accomplice() {
    let (friend, next) = (address(2_000), address(2_001));
    // So many evaluators the reader knows, some good and some bad.
    let known: Vec<_> = (0..6).map(|number| (address(1_001 + number), 20, 10 + 2 * (number % 5))).collect();
    let believed = |audited: u64| {
        let mut seen = known.clone();
        if audited > 0 {
            seen.push((friend, audited, audited / 4));
        }
        let said = EvidenceLog::in_memory(10_000);
        for copycat in 2..22 {
            for (place, (evaluator, verdicts, right)) in known.iter().enumerate() {
                for number in 0..*verdicts {
                    let record = record(copycat, 100 * place as u64 + number, *evaluator, number < *right);
                    said.record(record, NOW).unwrap();
                }
            }
            for (praised, first) in [(friend, 1_000), (next, 2_000)] {
                for number in 0..40 {
                    said.record(record(copycat, first + number, praised, true), NOW).unwrap();
                }
            }
        }
        let selector = reader(&audits(1, &seen), &said);
        [worth(&selector, friend), worth(&selector, next), selector.trust(address(2))]
    };
    let [first, _, trust] = believed(0);
    // Until it looks, the reader takes their word: that is what this cannot prevent.
    assert!(trust > 0.9 && first > 0.6, "{first} {trust}");
    let looked: Vec<_> = [0, 4, 8, 16, 32].map(believed).into();
    // Every look costs the friend's reputation, theirs, and that of whomever they praise next.
    for pair in looked.windows(2) {
        assert!(pair[0].iter().zip(&pair[1]).all(|(before, after)| after < before), "{pair:?}");
    }
    // After sixteen they are trusted like unknown payers, though they agree with 124 audits in all else; after twice that, by nobody.
    let [.., [at_sixteen, _, trust_at_sixteen], [at_last, next, trust_at_last]] = *looked else { unreachable!() };
    assert!(at_sixteen < 0.0 && trust_at_sixteen < 0.45, "{looked:?}");
    assert!((at_last + 0.5).abs() < 0.1 && trust_at_last < 0.1, "{looked:?}");
    assert!(next < 0.2, "{looked:?}");
}

#[test]
fn many_unknown_reporters_are_trusted_no_more_than_one() {
    let unknown = address(1_001);
    let own = audits(1, &[]);
    let of = |payers: u64| {
        let said = EvidenceLog::in_memory(100_000);
        for payer in 0..payers {
            for number in 0..10 {
                said.record(record(100 + payer, number, unknown, true), NOW).unwrap();
            }
        }
        let selector = reader(&own, &said);
        (worth(&selector, unknown), selector.trust(address(100)))
    };
    let (one, many) = (of(1), of(500));
    assert!(one.1 < 0.41 && many.1 < 0.41, "{one:?} {many:?}");
    assert!(one.0 > 0.1 && many.0 < 0.6, "{one:?} {many:?}");
}

/// Its reports are recorded, so that none is learned twice.
#[tokio::test]
async fn reports_read_before_a_failure_are_returned_by_the_next_fetch() {
    let payer = PrivateKeySigner::random();
    let mut said = Vec::new();
    for number in 0..2 {
        let mut record = record(2, number, address(1_001), true);
        record.payment = record.payment.map(|payment| EvidencePayment { payer: payer.address(), ..payment });
        said.push(sign_report(record, None, &payer).await);
    }
    let page = |id: usize| {
        let mut line = serde_json::to_value(&said[id - 1]).unwrap();
        (line["id"], line["block"], line["blockTime"]) = (id.into(), 1.into(), NOW.into());
        json!({ "reports": [line], "after": id, "more": id == 1 }).to_string()
    };
    let (first, second) = (page(1), page(2));
    let asked = Arc::new(AtomicUsize::new(0));
    let answer = async move || match asked.fetch_add(1, Ordering::SeqCst) {
        0 => Ok(first.clone()),
        1 | 2 => Err(StatusCode::SERVICE_UNAVAILABLE),
        _ => Ok(second.clone()),
    };
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url: Url = format!("http://{}", listener.local_addr().unwrap()).parse().unwrap();
    tokio::spawn(async { axum::serve(listener, Router::new().route("/evidence", get(answer))).await });
    let directory = DirectoryClient::new(&url).unwrap();
    let mut others = Reputation::new(100, []).clock(Arc::new(ManualClock::at(NOW)));
    for _ in 0..2 {
        assert!(matches!(others.fetch(&directory).await, Err(PullError::Directory(_))));
    }
    let heard = others.fetch(&directory).await.unwrap().new;
    assert_eq!(heard, said.into_iter().map(|said| said.evidence).collect::<Vec<_>>());
}

/// Payers that nobody knows cost little. However many there are, they make nobody forget what it saw itself.
#[test]
fn crowd_of_unknown_reporters_erases_no_own_evidence() {
    let (good, liar, elsewhere) = (address(1_001), address(1_002), address(1_003));
    let own = audits(1, &[(good, 12, 11), (liar, 12, 3)]);
    let mut selector = Thompson::seeded(1);
    selector.restore(&own, &[address(1)], &skills());
    let before = [good, liar].map(|evaluator| worth(&selector, evaluator));
    for payer in 2..3_002 {
        apply_report(&mut selector, &record(payer, 1, elsewhere, payer % 2 == 0));
    }
    let after = [good, liar].map(|evaluator| worth(&selector, evaluator));
    let moved = before.iter().zip(after).map(|(before, after)| (before - after).abs()).fold(0.0, f64::max);
    assert!(moved < 0.03, "{before:?} {after:?}");
}
