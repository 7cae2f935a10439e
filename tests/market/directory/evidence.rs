//! Reports from real purchases to readers: accepted, stored, read.

use std::{collections::HashMap, sync::Arc, time::Duration};

use alloy_primitives::{Address, U256};
use alloy_signer_local::PrivateKeySigner;
use axum::{Router, extract::Query};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tower_x402::{
    ManualClock, Network, Usdc,
    client::{Budget, Payer},
    facilitator::OnchainFacilitator,
};
use url::Url;
use x402_directory::{
    CardQuery, DirectoryBuilder, DirectoryClient, DirectoryStore, PaymentChecker, Publication, ReportQuery,
    SignedEvidence, reputation::Reputation,
};
use x402_judges::ArithmeticJudge;
use x402_market::{
    AgentCard, CardFetcher, EvaluationClient, EvaluatorService, Score, Student, Submission, Task, Truth,
    evidence::{CallOutcome, Evidence, EvidenceLog, EvidencePayment, Pairs},
};

use super::stage::{PRICE, Stage, checker};
use support::{
    authorization::{random_nonce, unix_now},
    chain::{Chain, on_every_chain},
    devnet::DevnetChain,
};

on_every_chain! {
    a_purchase_becomes_a_report_that_others_read,
}

/// An evaluator that judges, on a port, with its settlement.
pub async fn evaluator(chain: &dyn Chain) -> (Url, Address) {
    let (settler, payee) = (PrivateKeySigner::random(), PrivateKeySigner::random());
    chain.fund(settler.address(), U256::from(10).pow(U256::from(18))).await;
    let facilitator = OnchainFacilitator::builder().rpc_url(chain.rpc_url()).network(Network::BASE_SEPOLIA);
    let facilitator = facilitator.signer(settler).build().await.unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url: Url = format!("http://{}", listener.local_addr().unwrap()).parse().unwrap();
    let card = AgentCard::builder("The judge", url.clone()).skill("arithmetic", "Marks sums", Score::MAX);
    let card = card.price("$0.001").pay_to(Network::BASE_SEPOLIA, payee.address()).build().unwrap();
    let card = card.sign(&payee).await.unwrap();
    let service = EvaluatorService::builder(card, ArithmeticJudge).facilitator(facilitator).build().unwrap();
    tokio::spawn(async { axum::serve(listener, Router::new().fallback_service(service)).await });
    (url, payee.address())
}

fn payer(key: &PrivateKeySigner) -> Payer {
    let budget = Budget::builder().per_payment("$1".parse().unwrap()).total("$1".parse().unwrap()).build();
    Payer::builder(key.clone()).budget(budget).build()
}

fn sum() -> Submission {
    Submission::single(Task::new("arithmetic", "What is 17 * 23?").unwrap(), "17 * 23 = 391").unwrap()
}

async fn a_purchase_becomes_a_report_that_others_read(chain: &dyn Chain) {
    let stage = Stage::set(chain).await;
    let (url, payee) = evaluator(chain).await;
    stage.client().list(&url).await.unwrap();
    let key = stage.payer().await;
    let card = CardFetcher::new().unwrap().fetch(&url).await.unwrap();
    let bought = EvaluationClient::new(payer(&key)).unwrap().evaluate(&card, &sum()).await.unwrap();
    let receipt = bought.receipt.unwrap();
    let record =
        Evidence::new(payee, "arithmetic", receipt.amount, unix_now(), CallOutcome::answered(Pairs::new(1, 0, 1)))
            .with_payment(EvidencePayment { payer: receipt.payer, nonce: receipt.nonce });
    let (network, asset) = (receipt.network, receipt.asset);
    let report = SignedEvidence::sign(record.clone(), network, asset, receipt.transaction, &key).await.unwrap();
    let published = stage.client().publish_signed(&report).await.unwrap();
    assert_eq!(published, Publication::Accepted);

    // Another reader checks all of it itself.
    let mut reputation = Reputation::new(100, []).payment_checker(Arc::new(checker(chain)));
    let pulled = reputation.fetch(&stage.client()).await.unwrap();
    assert_eq!((pulled.new.as_slice(), pulled.refused), ([record].as_slice(), 0));
    assert!(reputation.fetch(&stage.client()).await.unwrap().new.is_empty(), "it continues where it stopped");
}

#[tokio::test]
async fn student_finds_evaluators_in_a_directory_and_publishes_reports() {
    let chain = DevnetChain::start(None).await;
    let stage = Stage::set(&chain).await;
    let (url, payee) = evaluator(&chain).await;
    stage.client().list(&url).await.unwrap();
    let key = stage.payer().await;
    let log = EvidenceLog::in_memory(100);
    let student = Student::builder(payer(&key)).source(stage.client()).private_hosts(true);
    let student = student.evidence(log.clone()).tasks(4).build().unwrap();
    assert_eq!(student.discover().await.found.len(), 1);
    let task = Task::new("arithmetic", "What is 17 * 23?").unwrap();
    let sums = Submission::group(task, ["17 * 23 = 391", "17 * 23 = 381"]).unwrap();
    let audited = Truth::good([true, false]);
    for _ in 0..3 {
        let feedback = student.evaluate(&sums).await.unwrap();
        assert_eq!(student.audit(&feedback, &audited).await.unwrap().evaluations.len(), 1, "{feedback:?}");
    }
    // One that was not audited is no news.
    student.evaluate(&sums).await.unwrap();
    assert_eq!(log.len(), 4);
    // Evidence without a payment is not published.
    let lie = support::changed(log.records()[0].clone(), |record| {
        record.payment = None;
        record.outcome = CallOutcome::PriceMismatch;
    });
    log.record(lie, unix_now()).unwrap();
    // Evidence that cannot be reported does not stop the others.
    let unsaid = EvidencePayment { payer: key.address(), nonce: random_nonce() };
    let itself = support::changed(log.records()[0].clone(), |record| {
        record.payment = Some(unsaid);
        record.evaluator = key.address();
    });
    log.record(itself, unix_now()).unwrap();
    let published = stage.client().publish_log(&log, &chain.asset(), &key, |_| None).await.unwrap();
    assert_eq!((published.accepted, published.later.len(), published.refused.len()), (3, 0, 1));
    assert_eq!(published.refused[0].0, unsaid);
    let again = stage.client().publish_log(&log, &chain.asset(), &key, |_| None).await.unwrap();
    assert_eq!((again.accepted, stage.count().await), (3, 3));

    // Another student learns the reports before it has spent anything. For this one nothing is new.
    let other = Student::builder(payer(&stage.payer().await)).source(stage.client()).build().unwrap();
    let report = Reputation::new(100, []).fetch(&stage.client()).await.unwrap().new;
    for evidence in &report {
        assert!(other.add_report(evidence.clone()).unwrap());
        student.add_report(evidence.clone()).expect_err("it report so itself");
    }
    assert_eq!((other.reports().len(), other.evidence().len()), (3, 0));
    assert!(report.iter().all(|evidence| evidence.evaluator == payee));
}

/// A directory with reports about two evaluators by two payers.
async fn talkative<'a>(
    chain: &'a DevnetChain,
    store: DirectoryStore,
    adjust: fn(DirectoryBuilder) -> DirectoryBuilder,
) -> (Stage<'a>, Vec<SignedEvidence>) {
    let stage = Stage::open(chain, store, |directory| adjust(directory.payment_checker(checker(chain)))).await;
    let booths = [stage.booth(&["prose", "poetry"]).await, stage.booth(&["prose"]).await];
    let payers = [stage.payer().await, stage.payer().await];
    let mut all = Vec::new();
    for number in 0..6 {
        let (booth, payer) = (&booths[number % 2], &payers[number / 3]);
        let paid = stage.pay(payer, booth.payee.address(), PRICE).await;
        let skill = if number == 4 { "poetry" } else { "prose" };
        let record = support::changed(paid.record(booth.payee.address()), |record| record.skill = skill.into());
        let report = super::stage::sign_report(record, Some(paid.transaction), payer).await;
        assert_eq!(stage.post(&report).await.0, 201);
        all.push(report);
    }
    (stage, all)
}

#[tokio::test]
async fn reports_are_found_by_payer_evaluator_and_skill_with_their_transactions() {
    let chain = DevnetChain::start(None).await;
    let (stage, all) = talkative(&chain, DirectoryStore::in_memory().await.unwrap(), |directory| directory).await;
    let find = async |query: ReportQuery| {
        let page = stage.client().reports(&query).await.unwrap();
        assert!(page.skipped == 0 && !page.more);
        page.reports.into_iter().map(|accepted| accepted.report).collect::<Vec<_>>()
    };
    assert_eq!(find(ReportQuery::default()).await, all);
    let of_first = || ReportQuery::default().evaluator(all[0].evidence.evaluator);
    assert_eq!(find(of_first()).await, [&all[0], &all[2], &all[4]].map(Clone::clone));
    let poetry = of_first().skill("poetry");
    assert_eq!(find(poetry).await, [all[4].clone()]);
    let payer = all[5].evidence.payment.unwrap().payer;
    assert_eq!(find(ReportQuery::default().payer(payer)).await, all[3..]);

    let page = async |query: &str| {
        let url = stage.url.join(&format!("evidence?{query}")).unwrap();
        reqwest::get(url).await.unwrap().json::<Value>().await.unwrap()
    };
    let first = page("limit=4").await;
    assert_eq!((&first["after"], &first["more"]), (&first["reports"][3]["id"], &Value::Bool(true)));
    let rest = page(&format!("after={}", first["after"])).await;
    let [first, rest] = [&first, &rest].map(|page| page["reports"].as_array().unwrap());
    assert_eq!((first.len(), rest.len()), (4, 2));
    for (listed, report) in first.iter().chain(rest).zip(&all) {
        let read: SignedEvidence = serde_json::from_value(listed.clone()).unwrap();
        assert_eq!(&read, report);
        let payment = checker(&chain).check(&read).await.unwrap();
        assert_eq!(listed["block"], payment.block);
        assert_eq!(listed["blockTime"], payment.block_time);
    }
}

#[tokio::test]
async fn restart_loses_no_report_and_allows_no_second_one() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("directory.sqlite");
    // The process ends without closing: the files are copied as they are at that moment.
    let chain = DevnetChain::start(None).await;
    let (stage, all) = talkative(&chain, DirectoryStore::open(&path).await.unwrap(), |directory| directory).await;
    assert!(DirectoryStore::open(&path).await.is_err(), "one process at a time");
    let killed = folder.path().join("killed.sqlite");
    for end in ["", "-wal"] {
        std::fs::copy(format!("{}{end}", path.display()), format!("{}{end}", killed.display())).unwrap();
    }
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt as _;
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    }
    let again = Stage::open(&chain, DirectoryStore::open(&killed).await.unwrap(), |directory| {
        directory.payment_checker(checker(&chain))
    })
    .await;
    let read = async |stage: &Stage<'_>| {
        let reports = stage.client().reports(&ReportQuery::default()).await.unwrap().reports;
        (reports, stage.client().cards(&CardQuery::default()).await.unwrap().found)
    };
    let (before, after) = (read(&stage).await, read(&again).await);
    assert!(before == after && before.0.len() == 6 && before.1.len() == 2);
    assert_eq!(again.post(&all[0]).await.0, 200);
    let mut altered = all[0].clone();
    altered.evidence.outcome = CallOutcome::InvalidAnswer;
    assert_eq!(again.refusal(&altered).await, "bad_report");
    // New reports have new numbers.
    let key = again.payer().await;
    let paid = again.pay(&key, all[0].evidence.evaluator, PRICE).await;
    assert_eq!(again.post(&paid.report(all[0].evidence.evaluator, &key).await).await.0, 201);
    assert!(read(&again).await.0[6].id > before.0[5].id);
}

#[tokio::test]
async fn deleted_reports_cannot_be_sent_again() {
    let start = unix_now();
    let chain = DevnetChain::start_at(start).await;
    let clock = Arc::new(ManualClock::at(start));
    let stage = Stage::set_with(&chain, |directory| {
        directory.payment_checker(checker(&chain)).max_reports(3, 100).clock(clock.clone())
    })
    .await;
    let (booth, payer) = (stage.booth(&["prose"]).await, stage.payer().await);
    let evaluator = booth.payee.address();
    let mut all = Vec::new();
    for number in 0..5 {
        chain.set_next_timestamp(start + 10 * number).await;
        clock.advance(10);
        let report = stage.pay(&payer, evaluator, PRICE).await.report(evaluator, &payer).await;
        all.push(report);
    }
    for report in &all[1..] {
        assert_eq!(stage.post(report).await.0, 201);
    }
    let kept: Vec<_> = stage.client().reports(&ReportQuery::default()).await.unwrap().reports;
    assert_eq!(kept.iter().map(|accepted| &accepted.report).collect::<Vec<_>>(), all[2..].iter().collect::<Vec<_>>());
    assert_eq!(stage.post(&all[1]).await, (410, "too_old".into()), "it was deleted");
    assert_eq!(stage.post(&all[0]).await, (410, "too_old".into()), "and older ones are too late");
    assert_eq!(stage.post(&all[4]).await.0, 200);
    // Old reports are deleted, too.
    clock.advance(181 * 86_400);
    stage.service.upkeep_once().await.unwrap();
    assert_eq!(stage.count().await, 0);
    assert_eq!(stage.post(&all[4]).await, (410, "too_old".into()));
}

#[tokio::test]
async fn one_payer_can_neither_fill_nor_flood_the_directory() {
    let chain = DevnetChain::start(None).await;
    let stage = Stage::set_with(&chain, |directory| {
        directory.payment_checker(checker(&chain)).max_reports(1_000, 2).payer_rate(0.001, 4.0)
    })
    .await;
    let (booth, payer, other) = (stage.booth(&["prose"]).await, stage.payer().await, stage.payer().await);
    let evaluator = booth.payee.address();
    let send = async |payer: &PrivateKeySigner| {
        let report = stage.pay(payer, evaluator, PRICE).await.report(evaluator, payer).await;
        stage.post(&report).await
    };
    assert_eq!(send(&payer).await.0, 201);
    assert_eq!(send(&payer).await.0, 201);
    assert_eq!(send(&payer).await, (429, "too_many_reports".into()));
    // Forged reports do not use up its allowance.
    let paid = stage.pay(&payer, evaluator, PRICE).await;
    let forged = support::changed(paid.report(evaluator, &payer).await, |report| report.signature = vec![7; 65].into());
    for _ in 0..10 {
        assert_eq!(stage.refusal(&forged).await, "bad_report");
    }
    assert_eq!(send(&payer).await, (429, "too_many_reports".into()));
    assert_eq!(send(&payer).await, (429, "too_many_requests".into()));
    assert_eq!(send(&other).await.0, 201, "reports of others are accepted");
}

#[tokio::test]
async fn requests_beyond_the_concurrency_limit_are_answered_503() {
    let chain = DevnetChain::start(None).await;
    let stage = Stage::set_with(&chain, |directory| directory.payment_checker(checker(&chain)).max_writes(0)).await;
    let (status, error) = super::stage::post(&stage.url, "evidence", b"{}".to_vec()).await;
    assert_eq!((status, &*error), (503, "unavailable"));
    let healthy = reqwest::get(stage.url.join("healthz").unwrap()).await.unwrap();
    assert_eq!(healthy.status(), 200);
}

#[tokio::test]
async fn of_different_reports_about_one_payment_one_is_accepted() {
    let chain = DevnetChain::start(None).await;
    let stage = Stage::set(&chain).await;
    let (booth, payer) = (stage.booth(&["prose"]).await, stage.payer().await);
    let evaluator = booth.payee.address();
    let paid = stage.pay(&payer, evaluator, PRICE).await;
    let mut all = Vec::new();
    for number in 0..20_u32 {
        let outcome = CallOutcome::answered(Pairs::new(number, 1, 30));
        let record = support::changed(paid.record(evaluator), |record| record.outcome = outcome);
        all.push(super::stage::sign_report(record, Some(paid.transaction), &payer).await);
    }
    let answers = futures_util::future::join_all(all.iter().map(|report| stage.post(report))).await;
    let admitted = answers.iter().filter(|(status, _)| *status == 201).count();
    let spoken = answers.iter().filter(|(status, error)| *status == 409 && error == "already_reported").count();
    assert_eq!((admitted, spoken, stage.count().await), (1, 19, 1));
}

#[tokio::test]
async fn reader_ignores_invented_reports_and_circular_pages() {
    let chain = DevnetChain::start(None).await;
    let (stage, all) = talkative(&chain, DirectoryStore::in_memory().await.unwrap(), |directory| directory).await;
    let mut altered = all[1].clone();
    altered.evidence.outcome = CallOutcome::answered(Pairs::new(0, 1, 1));
    // Signed, and about an invented payment.
    let key = PrivateKeySigner::random();
    let mut invented = all[2].evidence.clone();
    invented.payment = Some(EvidencePayment { payer: key.address(), nonce: random_nonce() });
    let invented = super::stage::sign_report(invented, all[2].transaction, &key).await;
    let entry = |id: u64, report: &SignedEvidence| {
        let mut line = serde_json::to_value(report).unwrap();
        line["id"] = id.into();
        line["block"] = 1.into();
        line["blockTime"] = 1.into();
        line
    };
    let page = json!({
        "reports": [entry(1, &all[0]), entry(2, &altered), entry(3, &invented), entry(3, &all[3]), entry(4, &all[4])],
        "after": 0, "more": true,
    });
    let body = page.to_string();
    let router = Router::new().route("/evidence", axum::routing::get(async move || body.clone()));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url: Url = format!("http://{}", listener.local_addr().unwrap()).parse().unwrap();
    tokio::spawn(async { axum::serve(listener, router).await });
    let liar = DirectoryClient::new(&url).unwrap();
    let mut reputation = Reputation::new(100, []).payment_checker(Arc::new(checker(&chain)));
    let pulled = tokio::time::timeout(Duration::from_secs(60), reputation.fetch(&liar)).await.unwrap().unwrap();
    assert_eq!(pulled.new, [all[0].evidence.clone(), all[4].evidence.clone()]);
    assert!(pulled.refused >= 3 && !pulled.more);
    // Reports that could not be checked are read again.
    let proxy = support::rpc_proxy::RpcProxy::start(chain.rpc_url()).await;
    proxy.judge(|_| support::rpc_proxy::Fate::Status(503));
    let asked = x402_directory::PaymentChecker::new(Network::BASE_SEPOLIA).rpc_url(proxy.url()).unwrap().depth(0);
    let mut reputation = Reputation::new(100, []).payment_checker(Arc::new(asked));
    assert!(reputation.fetch(&stage.client()).await.is_err() && reputation.log().is_empty());
    proxy.judge(|_| support::rpc_proxy::Fate::Pass);
    assert_eq!(reputation.fetch(&stage.client()).await.unwrap().new.len(), 6);
}

/// A directory that accepts payments at once, and a reader that waits for three blocks on top.
#[tokio::test]
async fn reports_are_learned_once_their_payments_are_deep_enough() {
    let chain = DevnetChain::start(None).await;
    let (stage, all) = talkative(&chain, DirectoryStore::in_memory().await.unwrap(), |directory| directory).await;
    let clock = Arc::new(ManualClock::at(unix_now()));
    let proxy = support::rpc_proxy::RpcProxy::start(chain.rpc_url()).await;
    let deep = PaymentChecker::new(Network::BASE_SEPOLIA).rpc_url(proxy.url()).unwrap().depth(3);
    let deep = Arc::new(deep);
    let reader = || Reputation::new(100, []).payment_checker(deep.clone()).clock(clock.clone());
    let (mut patient, mut late) = (reader(), reader());
    for heard in [3, 0] {
        let pulled = patient.fetch(&stage.client()).await.unwrap();
        assert_eq!((pulled.new.len(), pulled.pending, pulled.refused), (heard, 3, 0));
    }
    assert_eq!(late.fetch(&stage.client()).await.unwrap().pending, 3);
    // A chain that cannot be asked loses none of them.
    proxy.judge(|_| support::rpc_proxy::Fate::Status(503));
    assert!(patient.fetch(&stage.client()).await.is_err());
    proxy.judge(|_| support::rpc_proxy::Fate::Pass);
    // They are not kept for ever.
    clock.advance(3_601);
    let pulled = late.fetch(&stage.client()).await.unwrap();
    assert_eq!((pulled.new.len(), pulled.pending, pulled.refused), (0, 0, 3));
    // A payment that is deep enough at the next check is accepted, however late that is.
    (0..3).for_each(|_| chain.devnet.mine());
    let pulled = patient.fetch(&stage.client()).await.unwrap();
    let expected: Vec<_> = all[3..].iter().map(|report| report.evidence.clone()).collect();
    assert_eq!((pulled.new, pulled.pending, pulled.refused), (expected, 0, 0));
    assert_eq!(patient.fetch(&stage.client()).await.unwrap(), Default::default());
}

#[tokio::test]
async fn reader_reads_to_the_end_or_as_much_as_its_log_keeps() {
    let directory = made_up(45, 1).await;
    let whole = Reputation::new(100, []).fetch(&directory).await.unwrap();
    assert_eq!((whole.new.len(), whole.more), (45, false));
    let mut small = Reputation::new(20, []);
    for (heard, more) in [(20, true), (20, true), (5, false), (0, false)] {
        let pulled = small.fetch(&directory).await.unwrap();
        assert_eq!((pulled.new.len(), pulled.more), (heard, more));
    }
}

/// Reports about payments that no node ever shows cost a reader only this much.
#[tokio::test]
async fn pending_reports_are_bounded() {
    let chain = DevnetChain::start(None).await;
    let directory = made_up(1_005, 1_000).await;
    let mut reputation = Reputation::new(100, []).payment_checker(Arc::new(checker(&chain)));
    let pulled = reputation.fetch(&directory).await.unwrap();
    assert_eq!((pulled.new.len(), pulled.pending, pulled.refused), (0, 1_000, 5));
}

/// A directory with this many reports, in pages of this size, about invented payments.
async fn made_up(reports: u64, per_page: usize) -> DirectoryClient {
    let mut all = Vec::new();
    for number in 0..reports {
        let key = PrivateKeySigner::random();
        let record = Evidence::new(
            Address::repeat_byte(7),
            "prose",
            Usdc::from_atomic(PRICE),
            1_000_000 + number,
            CallOutcome::answered(Pairs::new(1, 0, 1)),
        )
        .with_payment(EvidencePayment { payer: key.address(), nonce: random_nonce() });
        let mut line =
            serde_json::to_value(super::stage::sign_report(record, Some(random_nonce()), &key).await).unwrap();
        line["id"] = (number + 1).into();
        line["block"] = 1.into();
        line["blockTime"] = 1.into();
        all.push(line);
    }
    let answer = async move |Query(query): Query<HashMap<String, String>>| {
        let after: usize = query["after"].parse().unwrap();
        let end = all.len().min(after + per_page);
        json!({ "reports": all[after..end], "after": end, "more": end < all.len() }).to_string()
    };
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url: Url = format!("http://{}", listener.local_addr().unwrap()).parse().unwrap();
    let router = Router::new().route("/evidence", axum::routing::get(answer));
    tokio::spawn(async { axum::serve(listener, router).await });
    DirectoryClient::new(&url).unwrap()
}
