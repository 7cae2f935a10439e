//! What is admitted, kept and told, from real purchases to readers.

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
use x402_market::{
    AgentCard, CardFetcher, EvaluationClient, EvaluatorService, Score, Student, Submission, Task,
    directory::{
        CardQuery, DirectoryBuilder, DirectoryClient, DirectoryStore, PaymentChecker, Publication, ReportQuery,
        SignedEvidence,
    },
    evidence::{CallOutcome, Evidence, EvidenceLog, PaymentId},
    judge::ArithmeticJudge,
    reputation::Reputation,
};

use super::stage::{PRICE, Stage, witness};
use support::{
    authorization::{random_nonce, unix_now},
    chain::{Chain, on_every_chain},
    devnet::DevnetChain,
};

on_every_chain! {
    a_purchase_becomes_a_voice_that_others_read,
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

async fn a_purchase_becomes_a_voice_that_others_read(chain: &dyn Chain) {
    let stage = Stage::set(chain).await;
    let (url, payee) = evaluator(chain).await;
    stage.client().list(&url).await.unwrap();
    let key = stage.payer().await;
    let card = CardFetcher::new().unwrap().fetch(&url).await.unwrap();
    let bought = EvaluationClient::new(payer(&key)).unwrap().evaluate(&card, &sum()).await.unwrap();
    let receipt = bought.receipt.unwrap();
    let verdict = &bought.evaluation.verdicts[0];
    let record = Evidence {
        payment: Some(PaymentId { payer: receipt.payer, nonce: receipt.nonce }),
        evaluator: payee,
        skill: "arithmetic".into(),
        at: unix_now(),
        paid: receipt.amount,
        outcome: CallOutcome::answered(verdict.score.get(), Some(verdict.confidence.get()), Some(true)),
    };
    let published = stage.client().publish(record.clone(), &receipt, &key).await.unwrap();
    assert_eq!(published, Publication::Accepted);

    // Somebody else reads it, and believes the directory nothing.
    let mut reputation = Reputation::new(100, []).payment_checker(Arc::new(witness(chain)));
    let pulled = reputation.fetch(&stage.client()).await.unwrap();
    assert_eq!((pulled.new.as_slice(), pulled.refused), ([record].as_slice(), 0));
    assert!(reputation.fetch(&stage.client()).await.unwrap().new.is_empty(), "it goes on where it was");
}

#[tokio::test]
async fn a_student_finds_its_evaluators_in_a_directory_and_says_what_it_saw() {
    let chain = DevnetChain::start(None).await;
    let stage = Stage::set(&chain).await;
    let (url, payee) = evaluator(&chain).await;
    stage.client().list(&url).await.unwrap();
    let key = stage.payer().await;
    let log = EvidenceLog::in_memory(100);
    let student = Student::builder(payer(&key)).source(stage.client()).private_hosts(true);
    let student = student.evidence(log.clone()).tasks(3).build().unwrap();
    assert_eq!(student.discover().await.found.len(), 1);
    let truth = x402_market::Truth::good([true]);
    for _ in 0..3 {
        let feedback = student.evaluate_known(&sum(), &truth).await.unwrap();
        assert_eq!(feedback.judged_outputs(), 1, "{feedback:?}");
    }
    student.wait_until_idle().await;
    assert_eq!(log.len(), 3);
    // What was not paid is nobody else's business.
    let lie =
        Evidence { payment: None, outcome: CallOutcome::PriceMismatch, ..log.find(&Default::default())[0].clone() };
    log.record(lie, unix_now()).unwrap();
    // And what cannot be said keeps nothing else from being said.
    let unsaid = PaymentId { payer: key.address(), nonce: random_nonce() };
    let itself =
        Evidence { payment: Some(unsaid), evaluator: key.address(), ..log.find(&Default::default())[0].clone() };
    log.record(itself, unix_now()).unwrap();
    let published = stage.client().publish_log(&log, &chain.asset(), &key, |_| None).await.unwrap();
    assert_eq!((published.accepted, published.later.len(), published.refused.len()), (3, 0, 1));
    assert_eq!(published.refused[0].0, unsaid);
    let again = stage.client().publish_log(&log, &chain.asset(), &key, |_| None).await.unwrap();
    assert_eq!((again.accepted, stage.count().await), (3, 3));

    // Another student hears it before it has spent anything; this one has nothing new to hear.
    let other = Student::builder(payer(&stage.payer().await)).source(stage.client()).build().unwrap();
    let said = Reputation::new(100, []).fetch(&stage.client()).await.unwrap().new;
    for evidence in &said {
        assert!(other.add_report(evidence.clone()).unwrap());
        student.add_report(evidence.clone()).expect_err("it said so itself");
    }
    assert_eq!((other.reports().len(), other.evidence().len()), (3, 0));
    assert!(said.iter().all(|evidence| evidence.evaluator == payee));
}

/// A directory with some voices about two evaluators by two payers.
async fn talkative<'a>(
    chain: &'a DevnetChain,
    store: DirectoryStore,
    adjust: fn(DirectoryBuilder) -> DirectoryBuilder,
) -> (Stage<'a>, Vec<SignedEvidence>) {
    let stage = Stage::open(chain, store, |directory| adjust(directory.payment_checker(witness(chain)))).await;
    let booths = [stage.booth(&["prose", "poetry"]).await, stage.booth(&["prose"]).await];
    let payers = [stage.payer().await, stage.payer().await];
    let mut all = Vec::new();
    for number in 0..6 {
        let (booth, payer) = (&booths[number % 2], &payers[number / 3]);
        let paid = stage.pay(payer, booth.payee.address(), PRICE).await;
        let skill = if number == 4 { "poetry" } else { "prose" };
        let record = Evidence { skill: skill.into(), ..paid.record(booth.payee.address()) };
        let said = super::stage::say(record, Some(paid.transaction), payer).await;
        assert_eq!(stage.post(&said).await.0, 201);
        all.push(said);
    }
    (stage, all)
}

#[tokio::test]
async fn voices_are_found_by_whom_they_are_of_and_about_and_come_with_their_proofs() {
    let chain = DevnetChain::start(None).await;
    let (stage, all) = talkative(&chain, DirectoryStore::in_memory().await.unwrap(), |directory| directory).await;
    let find = async |query: ReportQuery| {
        let page = stage.client().reports(&query).await.unwrap();
        assert!(page.skipped == 0 && !page.more);
        page.reports.into_iter().map(|accepted| accepted.report).collect::<Vec<_>>()
    };
    assert_eq!(find(ReportQuery::default()).await, all);
    let evaluator = Some(all[0].evidence.evaluator);
    assert_eq!(
        find(ReportQuery { evaluator, ..Default::default() }).await,
        [&all[0], &all[2], &all[4]].map(Clone::clone)
    );
    let poetry = ReportQuery { evaluator, skill: Some("poetry".into()), ..Default::default() };
    assert_eq!(find(poetry).await, [all[4].clone()]);
    let payer = all[5].evidence.payment.map(|voice| voice.payer);
    assert_eq!(find(ReportQuery { payer, ..Default::default() }).await, all[3..]);

    let lines = async |query: &str| {
        let url = stage.url.join(&format!("evidence.jsonl?{query}")).unwrap();
        let text = reqwest::get(url).await.unwrap().text().await.unwrap();
        text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()).collect::<Vec<_>>()
    };
    let first = lines("limit=4").await;
    let rest = lines(&format!("after={}", first[3]["id"])).await;
    assert_eq!((first.len(), rest.len()), (4, 2));
    for (line, said) in first.iter().chain(&rest).zip(&all) {
        let read: SignedEvidence = serde_json::from_value(line.clone()).unwrap();
        assert_eq!(&read, said);
        let payment = witness(&chain).check(&read).await.unwrap();
        assert_eq!(line["block"], payment.block);
        assert_eq!(line["blockTime"], payment.block_time);
    }
    let page: Value = serde_json::from_slice(
        &reqwest::get(stage.url.join("evidence?limit=4").unwrap()).await.unwrap().bytes().await.unwrap(),
    )
    .unwrap();
    assert_eq!((&page["after"], &page["more"]), (&first[3]["id"], &Value::Bool(true)));
}

#[tokio::test]
async fn a_restart_loses_nothing_and_gives_no_payment_a_second_voice() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("directory.sqlite");
    // The process goes without a word: the files are taken as they are at that moment.
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
        directory.payment_checker(witness(&chain))
    })
    .await;
    let read = async |stage: &Stage<'_>| {
        let voices = stage.client().reports(&ReportQuery::default()).await.unwrap().reports;
        (voices, stage.client().cards(&CardQuery::default()).await.unwrap().found)
    };
    let (before, after) = (read(&stage).await, read(&again).await);
    assert!(before == after && before.0.len() == 6 && before.1.len() == 2);
    assert_eq!(again.post(&all[0]).await.0, 200);
    let mut altered = all[0].clone();
    altered.evidence.outcome = CallOutcome::InvalidAnswer;
    assert_eq!(again.refusal(&altered).await, "bad_voice");
    // And what it is told from now on has new numbers.
    let key = again.payer().await;
    let paid = again.pay(&key, all[0].evidence.evaluator, PRICE).await;
    assert_eq!(again.post(&paid.said(all[0].evidence.evaluator, &key).await).await.0, 201);
    assert!(read(&again).await.0[6].id > before.0[5].id);
}

#[tokio::test]
async fn what_is_kept_is_bounded_and_nothing_forgotten_speaks_again() {
    let start = unix_now();
    let chain = DevnetChain::start_at(start).await;
    let clock = Arc::new(ManualClock::at(start));
    let stage = Stage::set_with(&chain, |directory| {
        directory.payment_checker(witness(&chain)).max_reports(3, 100).clock(clock.clone())
    })
    .await;
    let (booth, payer) = (stage.booth(&["prose"]).await, stage.payer().await);
    let evaluator = booth.payee.address();
    let mut all = Vec::new();
    for number in 0..5 {
        chain.set_next_timestamp(start + 10 * number).await;
        clock.advance(10);
        let said = stage.pay(&payer, evaluator, PRICE).await.said(evaluator, &payer).await;
        all.push(said);
    }
    for said in &all[1..] {
        assert_eq!(stage.post(said).await.0, 201);
    }
    let kept: Vec<_> = stage.client().reports(&ReportQuery::default()).await.unwrap().reports;
    assert_eq!(kept.iter().map(|accepted| &accepted.report).collect::<Vec<_>>(), all[2..].iter().collect::<Vec<_>>());
    assert_eq!(stage.post(&all[1]).await, (410, "too_old".into()), "it was forgotten");
    assert_eq!(stage.post(&all[0]).await, (410, "too_old".into()), "and older ones come too late");
    assert_eq!(stage.post(&all[4]).await.0, 200);
    // Time forgets, too.
    clock.advance(181 * 86_400);
    stage.service.upkeep_once().await.unwrap();
    assert_eq!(stage.count().await, 0);
    assert_eq!(stage.post(&all[4]).await, (410, "too_old".into()));
}

#[tokio::test]
async fn one_payer_does_not_fill_the_directory_nor_flood_it() {
    let chain = DevnetChain::start(None).await;
    let stage = Stage::set_with(&chain, |directory| {
        directory.payment_checker(witness(&chain)).max_reports(1_000, 2).payer_rate(0.001, 4.0)
    })
    .await;
    let (booth, payer, other) = (stage.booth(&["prose"]).await, stage.payer().await, stage.payer().await);
    let evaluator = booth.payee.address();
    let speak = async |payer: &PrivateKeySigner| {
        let said = stage.pay(payer, evaluator, PRICE).await.said(evaluator, payer).await;
        stage.post(&said).await
    };
    assert_eq!(speak(&payer).await.0, 201);
    assert_eq!(speak(&payer).await.0, 201);
    assert_eq!(speak(&payer).await, (429, "too_many_voices".into()));
    // What others send in its name uses up nothing of its allowance.
    let paid = stage.pay(&payer, evaluator, PRICE).await;
    let forged = SignedEvidence { signature: vec![7; 65].into(), ..paid.said(evaluator, &payer).await };
    for _ in 0..10 {
        assert_eq!(stage.refusal(&forged).await, "bad_voice");
    }
    assert_eq!(speak(&payer).await, (429, "too_many_voices".into()));
    assert_eq!(speak(&payer).await, (429, "too_many_requests".into()));
    assert_eq!(speak(&other).await.0, 201, "others are heard");
}

#[tokio::test]
async fn more_at_once_than_can_be_worked_on_come_again() {
    let chain = DevnetChain::start(None).await;
    let stage = Stage::set_with(&chain, |directory| directory.payment_checker(witness(&chain)).max_writes(0)).await;
    let (status, error) = super::stage::post(&stage.url, "evidence", b"{}".to_vec()).await;
    assert_eq!((status, &*error), (503, "unavailable"));
    let healthy = reqwest::get(stage.url.join("healthz").unwrap()).await.unwrap();
    assert_eq!(healthy.status(), 200);
}

#[tokio::test]
async fn of_many_that_say_different_things_about_one_payment_one_is_admitted() {
    let chain = DevnetChain::start(None).await;
    let stage = Stage::set(&chain).await;
    let (booth, payer) = (stage.booth(&["prose"]).await, stage.payer().await);
    let evaluator = booth.payee.address();
    let paid = stage.pay(&payer, evaluator, PRICE).await;
    let mut all = Vec::new();
    for number in 0..20_u32 {
        let outcome = CallOutcome::answered(f64::from(number) / 20.0, None, Some(number % 2 == 0));
        let record = Evidence { outcome, ..paid.record(evaluator) };
        all.push(super::stage::say(record, Some(paid.transaction), &payer).await);
    }
    let answers = futures_util::future::join_all(all.iter().map(|said| stage.post(said))).await;
    let admitted = answers.iter().filter(|(status, _)| *status == 201).count();
    let spoken = answers.iter().filter(|(status, error)| *status == 409 && error == "spoken").count();
    assert_eq!((admitted, spoken, stage.count().await), (1, 19, 1));
}

#[tokio::test]
async fn a_directory_that_makes_up_voices_or_goes_in_circles_is_not_followed() {
    let chain = DevnetChain::start(None).await;
    let (stage, all) = talkative(&chain, DirectoryStore::in_memory().await.unwrap(), |directory| directory).await;
    let mut altered = all[1].clone();
    altered.evidence.outcome = CallOutcome::answered(0.75, Some(0.9), Some(false));
    // Signed, and about a payment that never was.
    let key = PrivateKeySigner::random();
    let mut invented = all[2].evidence.clone();
    invented.payment = Some(PaymentId { payer: key.address(), nonce: random_nonce() });
    let invented = super::stage::say(invented, all[2].transaction, &key).await;
    let entry = |id: u64, said: &SignedEvidence| {
        let mut line = serde_json::to_value(said).unwrap();
        line["id"] = id.into();
        line["block"] = 1.into();
        line["blockTime"] = 1.into();
        line
    };
    let page = json!({
        "voices": [entry(1, &all[0]), entry(2, &altered), entry(3, &invented), entry(3, &all[3]), entry(4, &all[4])],
        "after": 0, "more": true,
    });
    let body = page.to_string();
    let router = Router::new().route("/evidence", axum::routing::get(async move || body.clone()));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url: Url = format!("http://{}", listener.local_addr().unwrap()).parse().unwrap();
    tokio::spawn(async { axum::serve(listener, router).await });
    let liar = DirectoryClient::new(&url).unwrap();
    let mut reputation = Reputation::new(100, []).payment_checker(Arc::new(witness(&chain)));
    let pulled = tokio::time::timeout(Duration::from_secs(60), reputation.fetch(&liar)).await.unwrap().unwrap();
    assert_eq!(pulled.new, [all[0].evidence.clone(), all[4].evidence.clone()]);
    assert!(pulled.refused >= 3 && !pulled.more);
    // What a chain that cannot be asked leaves open is read again.
    let proxy = support::rpc_proxy::RpcProxy::start(chain.rpc_url()).await;
    proxy.judge(|_| support::rpc_proxy::Fate::Status(503));
    let asked =
        x402_market::directory::PaymentChecker::new(Network::BASE_SEPOLIA).rpc_url(proxy.url()).unwrap().depth(0);
    let mut reputation = Reputation::new(100, []).payment_checker(Arc::new(asked));
    assert!(reputation.fetch(&stage.client()).await.is_err() && reputation.log().is_empty());
    proxy.judge(|_| support::rpc_proxy::Fate::Pass);
    assert_eq!(reputation.fetch(&stage.client()).await.unwrap().new.len(), 6);
}

/// A directory that takes payments as they come, and a reader who waits for three blocks on top.
#[tokio::test]
async fn what_is_not_deep_enough_for_a_reader_is_heard_later() {
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
    // Nor is waited for ever.
    clock.advance(3_601);
    let pulled = late.fetch(&stage.client()).await.unwrap();
    assert_eq!((pulled.new.len(), pulled.pending, pulled.refused), (0, 0, 3));
    // But who is deep enough when it is looked at again is heard, however late that is.
    (0..3).for_each(|_| chain.devnet.mine());
    let pulled = patient.fetch(&stage.client()).await.unwrap();
    let expected: Vec<_> = all[3..].iter().map(|said| said.evidence.clone()).collect();
    assert_eq!((pulled.new, pulled.pending, pulled.refused), (expected, 0, 0));
    assert_eq!(patient.fetch(&stage.client()).await.unwrap(), Default::default());
}

#[tokio::test]
async fn a_reader_reads_to_the_end_or_as_much_as_it_keeps() {
    let directory = made_up(45, 1).await;
    let whole = Reputation::new(100, []).fetch(&directory).await.unwrap();
    assert_eq!((whole.new.len(), whole.more), (45, false));
    let mut small = Reputation::new(20, []);
    for (heard, more) in [(20, true), (20, true), (5, false), (0, false)] {
        let pulled = small.fetch(&directory).await.unwrap();
        assert_eq!((pulled.new.len(), pulled.more), (heard, more));
    }
}

/// A directory of voices whose payments no node will ever show costs its reader no more than this.
#[tokio::test]
async fn what_is_looked_at_again_is_bounded() {
    let chain = DevnetChain::start(None).await;
    let directory = made_up(1_005, 1_000).await;
    let mut reputation = Reputation::new(100, []).payment_checker(Arc::new(witness(&chain)));
    let pulled = reputation.fetch(&directory).await.unwrap();
    assert_eq!((pulled.new.len(), pulled.pending, pulled.refused), (0, 1_000, 5));
}

/// A directory of so many voices, so many a page, whose payments never took place.
async fn made_up(voices: u64, per_page: usize) -> DirectoryClient {
    let mut all = Vec::new();
    for number in 0..voices {
        let key = PrivateKeySigner::random();
        let record = Evidence {
            payment: Some(PaymentId { payer: key.address(), nonce: random_nonce() }),
            evaluator: Address::repeat_byte(7),
            skill: "prose".into(),
            at: 1_000_000 + number,
            paid: Usdc::from_atomic(PRICE),
            outcome: CallOutcome::answered(0.75, Some(0.9), Some(true)),
        };
        let mut line = serde_json::to_value(super::stage::say(record, Some(random_nonce()), &key).await).unwrap();
        line["id"] = (number + 1).into();
        line["block"] = 1.into();
        line["blockTime"] = 1.into();
        all.push(line);
    }
    let answer = async move |Query(query): Query<HashMap<String, String>>| {
        let after: usize = query["after"].parse().unwrap();
        let end = all.len().min(after + per_page);
        json!({ "voices": all[after..end], "after": end, "more": end < all.len() }).to_string()
    };
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url: Url = format!("http://{}", listener.local_addr().unwrap()).parse().unwrap();
    let router = Router::new().route("/evidence", axum::routing::get(answer));
    tokio::spawn(async { axum::serve(listener, router).await });
    DirectoryClient::new(&url).unwrap()
}
