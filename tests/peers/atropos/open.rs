//! Payments whose outcome the chain knows and the books do not know yet.

use std::sync::atomic::{AtomicUsize, Ordering};

use alloy_primitives::Address;
use alloy_signer_local::PrivateKeySigner;
use axum::{
    Router,
    extract::Request,
    http::StatusCode,
    middleware::{Next, from_fn},
    response::{IntoResponse as _, Response},
};
use serde_json::Value;
use tokio::{net::TcpListener, process::Command};
use url::Url;
use x402_market::EvaluatorService;

use super::{
    program::{Both, GROUP, Running, Student, blind, environment, incomes, server, units},
    trainer::Trainer,
};
use support::student_stage::{Stage, card, serve};
use support::{
    chain::Chain,
    rpc_proxy::{Fate, RpcProxy},
};

/// The finality depth of the chain, in blocks.
const DEPTH: u64 = 20;

/// An evaluator that is paid, and whose answer is lost every time.
async fn mute(stage: &Stage, price: &str) -> (Url, Address) {
    async fn lose(request: Request, next: Next) -> Response {
        let was_paid = request.headers().contains_key("payment-signature");
        let answer = next.run(request).await;
        if was_paid { StatusCode::BAD_GATEWAY.into_response() } else { answer }
    }
    let (listener, key) = (TcpListener::bind("127.0.0.1:0").await.unwrap(), PrivateKeySigner::random());
    let card = card(listener.local_addr().unwrap(), key.address()).price(price).build().unwrap();
    let card = card.sign(&key).await.unwrap();
    let evaluator = EvaluatorService::builder(card, Both).facilitator(stage.facilitator.clone()).build().unwrap();
    let (url, _) = serve(listener, Router::new().fallback_service(evaluator).layer(from_fn(lose)));
    (url, key.address())
}

#[tokio::test(flavor = "multi_thread")]
async fn unanswered_payment_is_open_until_final_and_no_disagreement() {
    let (server, stage) = (server().await, Stage::set_with_finality(DEPTH).await);
    let (mute_url, mute_payee) = mute(&stage, "$0.0005").await;
    let booth = stage.open(Both).await;
    let student = Student::rich(&stage).await;
    let trainer = Trainer::start(&server, GROUP as u64).await;
    let files = tempfile::tempdir().unwrap();
    let urls = [&mute_url, &booth.url];
    let on = |mut command: Command, groups: &str| {
        command.args(["--groups", groups, "--panel", "2", "--checkpoint"]).arg(files.path().join("run.json"));
        Running::start(command)
    };
    // The first run does not look at the chain, so that payments are open when the second run looks for the first time.
    let mut command = blind(&server.url, &urls, &student);
    command.args(["--patience", "60"]);
    let document = on(command, "1").document().await;
    let lost: u64 = stage.chain.token_transfers(mute_payee).await.iter().map(|transfer| transfer.units).sum();
    assert!(lost > 0, "it was paid, and nobody said so: {document:#}");
    let look = || environment(&server.url, &stage, &urls, &student);
    let document = on(look(), "3").document().await;
    let (paid, spent) = (student.has_paid(&stage).await, units(&document["spent"]));
    let lost: u64 = stage.chain.token_transfers(mute_payee).await.iter().map(|transfer| transfer.units).sum();
    assert!(paid == spent + lost, "{document:#}");
    let on_chain = &document["on_chain"];
    assert_eq!((units(&on_chain["paid"]), units(&on_chain["open"])), (paid, lost), "{document:#}");
    assert_eq!((&on_chain["agrees"], units(&document["reserved"])), (&Value::Null, lost), "{document:#}");

    for _ in 0..DEPTH {
        stage.chain.mine().await;
    }
    let document = on(look(), "3").document().await;
    assert_eq!((units(&document["spent"]), units(&document["reserved"])), (paid, 0), "{document:#}");
    assert_eq!((&document["on_chain"]["agrees"], units(&document["on_chain"]["open"])), (&true.into(), 0));
    assert_eq!(incomes(&document, &stage, &[mute_payee, booth.payee]).await, paid);
    drop(trainer);
}

#[tokio::test(flavor = "multi_thread")]
async fn books_agree_if_the_payer_receives_money_meanwhile() {
    let (server, stage) = (server().await, Stage::set().await);
    let booth = stage.open(Both).await;
    let student = Student::rich(&stage).await;
    let trainer = Trainer::start(&server, GROUP as u64).await;
    let files = tempfile::tempdir().unwrap();
    let command = |groups: &str| {
        let mut command = environment(&server.url, &stage, &[&booth.url], &student);
        command.args(["--groups", groups, "--checkpoint"]).arg(files.path().join("run.json"));
        command
    };
    let document = Running::start(command("2")).document().await;
    let before = units(&document["spent"]);
    stage.chain.mint(student.key.address(), 5_000_000).await;
    let document = Running::start(command("4")).document().await;
    let paid = student.had + 5_000_000 - stage.chain.balance(student.key.address()).await;
    assert!(paid > before);
    assert_eq!((units(&document["spent"]), units(&document["on_chain"]["paid"])), (paid, paid), "{document:#}");
    assert_eq!(document["on_chain"]["agrees"], true);
    drop(trainer);
}

#[tokio::test(flavor = "multi_thread")]
async fn books_from_before_the_first_look_at_the_chain_agree_with_it() {
    let (server, stage) = (server().await, Stage::set().await);
    let booth = stage.open(Both).await;
    let student = Student::rich(&stage).await;
    let trainer = Trainer::start(&server, GROUP as u64).await;
    let files = tempfile::tempdir().unwrap();
    let checkpoint = files.path().join("run.json");
    let mut command = blind(&server.url, &[&booth.url], &student);
    command.args(["--groups", "2", "--patience", "60", "--checkpoint"]).arg(&checkpoint);
    let document = Running::start(command).document().await;
    let mut paid = student.has_paid(&stage).await;
    assert!(paid > 0 && units(&document["spent"]) == paid && document["on_chain"].is_null(), "{document:#}");
    for groups in ["4", "2"] {
        let mut command = environment(&server.url, &stage, &[&booth.url], &student);
        command.args(["--groups", groups, "--checkpoint"]).arg(&checkpoint);
        let document = Running::start(command).document().await;
        let before = std::mem::replace(&mut paid, student.has_paid(&stage).await);
        assert!(paid > before && units(&document["spent"]) == paid, "{document:#}");
        assert_eq!((&document["on_chain"]["agrees"], units(&document["on_chain"]["paid"])), (&true.into(), paid));
        // Then the journal is all there is.
        std::fs::remove_file(&checkpoint).unwrap();
    }
    drop(trainer);
}

#[tokio::test(flavor = "multi_thread")]
async fn silent_node_makes_open_payments_unknown_and_the_summary_is_written() {
    let (server, stage) = (server().await, Stage::set().await);
    let booth = stage.open(Both).await;
    let student = Student::rich(&stage).await;
    let trainer = Trainer::start(&server, GROUP as u64).await;
    let node = RpcProxy::start(stage.chain.rpc_url()).await;
    // Only the first look gets an answer.
    let looks = AtomicUsize::new(0);
    node.judge(move |methods| {
        let is_look = methods.iter().any(|method| method == "eth_blockNumber");
        match looks.fetch_add(usize::from(is_look), Ordering::SeqCst) {
            0 => Fate::Pass,
            _ if !is_look && looks.load(Ordering::SeqCst) == 1 => Fate::Pass,
            _ => Fate::Status(503),
        }
    });
    let mut command = blind(&server.url, &[&booth.url], &student);
    command.args(["--groups", "2", "--patience", "60", "--rpc-url", node.url()]);
    let mut running = Running::start(command);
    running.says("the budget cannot be compared with the chain").await;
    let document = running.document().await;
    assert_eq!(units(&document["spent"]), student.has_paid(&stage).await);
    let unknown = serde_json::json!({ "paid": null, "agrees": null, "open": null, "escrow": null });
    assert_eq!(document["on_chain"], unknown, "{document:#}");
    drop(trainer);
}

#[tokio::test(flavor = "multi_thread")]
async fn unrecorded_transfer_is_a_disagreement_and_the_summary_is_written() {
    let (server, stage) = (server().await, Stage::set().await);
    let booth = stage.open(Both).await;
    let student = Student::rich(&stage).await;
    let trainer = Trainer::start(&server, GROUP as u64).await;
    let files = tempfile::tempdir().unwrap();
    let journal = files.path().join("run.journal");
    let command = || {
        let mut command = environment(&server.url, &stage, &[&booth.url], &student);
        command.args(["--groups", "2", "--checkpoint"]).arg(files.path().join("run.json"));
        command
    };
    let first = Running::start(command()).document().await;
    std::fs::remove_file(&journal).unwrap();
    let (document, log) = Running::start(command()).failure().await;
    let document = document.expect("there is a summary");
    assert_eq!((&document["on_chain"]["agrees"], units(&document["spent"])), (&false.into(), 0), "{document:#}");
    assert_eq!(document["on_chain"]["paid"], first["spent"]);
    assert!(log.contains("the budget does not agree with the chain"), "{log}");
    drop(trainer);
}
