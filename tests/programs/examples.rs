//! The examples run as programs: `evaluator` charges, `student` pays.

use std::{collections::BTreeSet, time::Duration};

use alloy_primitives::{Address, B256, U256};
use alloy_provider::{DynProvider, Provider, ProviderBuilder};
use alloy_signer_local::PrivateKeySigner;
use futures_util::future::join_all;
use serde_json::{Value, json};
use support::{
    authorization::random_address,
    chain::{Chain, call, on_every_chain},
    devnet::DevnetChain,
    eventually::eventually,
    programs::example,
    scripted::customer,
    shop::{Answer, Customer, Purchase, demand},
    token::Token,
};
use tokio::{
    io::{AsyncBufReadExt, BufReader, Lines},
    process::{Child, ChildStdout, Command},
    time::timeout,
};
use tower_x402::client::{Payer, PaymentMiddleware};
use url::Url;
use x402_market::{CardFetcher, EvaluationClient, Submission, Task};

/// The timeout of everything that a program does here, without compiling.
const PATIENCE: Duration = Duration::from_secs(60);
/// The evaluator's price, in atomic units.
const PRICE: u64 = 1_000;

on_every_chain! {
    a_student_buys_in_the_default_flow,
    a_student_buys_upfront,
    a_student_that_has_paid_before_pays_later,
}

#[tokio::test]
async fn quickstart_moves_money() {
    let output = timeout(PATIENCE, example("quickstart").output()).await.unwrap().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{text}\n{}", String::from_utf8_lossy(&output.stderr));
    let words = text.split(|c: char| !c.is_ascii_alphanumeric());
    let transactions: BTreeSet<_> = words.filter(|word| word.len() == 66 && word.starts_with("0x")).collect();
    assert!(transactions.len() >= 2, "several purchases, each in a transaction:\n{text}");
}

#[tokio::test]
async fn help_names_every_flag() {
    let flags: [(&str, &[&str]); 5] = [
        ("quickstart", &[]),
        (
            "evaluator",
            &[
                "--listen",
                "--price",
                "--network",
                "--pay-to",
                "--asset",
                "--rpc-url",
                "--facilitator-url",
                "--flow",
                "--ledger",
                "--public-url",
                "--handler-delay-ms",
                "--scheme",
                "--refund-idle",
                "--payments",
                "--export",
                "--admin-token",
                "/admin/channels",
                "--judge",
                "--llm-url",
                "/readyz",
            ],
        ),
        (
            "facilitator",
            &["--listen", "--network", "--rpc-url", "--asset", "--payee", "--rate", "--metrics", "--ledger"],
        ),
        (
            "atropos_environment",
            &[
                "--atropos-url",
                "--trainer",
                "--evaluator",
                "--groups",
                "--group-size",
                "--budget",
                "--max-payment",
                "--panel",
                "--audit-rate",
                "--policy-url",
                "--policy-model",
                "--checkpoint",
                "--out",
                "--network",
                "--asset",
                "--asset-name",
                "--asset-version",
                "--seed",
                "--max-queue",
                "--patience",
                "STUDENT_PRIVATE_KEY",
                "POLICY_API_KEY",
                "--rpc-url",
            ],
        ),
        (
            "student",
            &[
                "--url",
                "--count",
                "--concurrency",
                "--budget",
                "--max-payment",
                "--rpc-url",
                "--journal",
                "--timeout",
                "--scheme",
                "--channels",
                "--close",
            ],
        ),
    ];
    for (name, flags) in flags {
        let output = timeout(PATIENCE, example(name).arg("--help").output()).await.unwrap().unwrap();
        assert!(output.status.success(), "{name} --help");
        let help = String::from_utf8(output.stdout).unwrap();
        for flag in flags {
            assert!(help.contains(flag), "{name} --help does not name {flag}");
        }
    }
}

#[tokio::test]
async fn learning_draws_a_picture_and_prints_the_same_again() {
    let directory = tempfile::tempdir().unwrap();
    let run = async || {
        let mut command = example("learning");
        command.args(["--experiment", "M", "--seeds", "1", "--groups", "40", "--out"]).arg(directory.path());
        let output = timeout(PATIENCE, command.output()).await.unwrap().unwrap();
        assert!(output.status.success());
        String::from_utf8(output.stdout).unwrap()
    };
    let first = run().await;
    assert!(first.contains("| final quality |"), "{first}");
    assert_eq!(run().await, first);
    let picture = std::fs::read_to_string(directory.path().join("learning-M.svg")).unwrap();
    assert!(picture.contains("<svg") && picture.contains("Final quality"), "{picture}");
}

#[tokio::test]
async fn a_student_buys_on_the_evaluators_own_devnet() {
    let evaluator = Evaluator::start(&[], None).await;
    let student = PrivateKeySigner::random();
    let mint = json!([student.address(), U256::from(100_000)]);
    let _: Value = evaluator.provider.raw_request("devnet_mint".into(), mint).await.unwrap();

    let purchases = evaluator.sell(&student, &["--count", "3"]).await;
    assert!(purchases.succeeded);
    assert_eq!(purchases.outcomes(), ["settled"; 3]);
    assert_eq!(evaluator.income().await, 3 * PRICE);
}

#[tokio::test]
async fn evaluator_settles_through_a_facilitator() {
    let mut facilitator = example("facilitator").args(["--listen", "127.0.0.1:0", "--metrics"]).spawn().unwrap();
    let mut output = BufReader::new(facilitator.stdout.take().unwrap()).lines();
    let line = timeout(PATIENCE, output.next_line()).await.expect("it says that it is ready").unwrap().unwrap();
    let ready: Value = serde_json::from_str(&line).unwrap();
    let url = format!("http://{}", ready["listening"].as_str().unwrap());
    let rpc_url = ready["rpc_url"].as_str().unwrap();

    let evaluator = Evaluator::start(&["--facilitator-url", &url, "--rpc-url", rpc_url], None).await;
    let student = PrivateKeySigner::random();
    let mint = json!([student.address(), U256::from(100_000)]);
    let _: Value = evaluator.provider.raw_request("devnet_mint".into(), mint).await.unwrap();
    let purchases = evaluator.sell(&student, &["--count", "3"]).await;
    assert!(purchases.succeeded);
    assert_eq!(purchases.outcomes(), ["settled"; 3]);
    assert_eq!(evaluator.income().await, 3 * PRICE);
    let numbers = reqwest::get(format!("{url}/metrics")).await.unwrap().bytes().await.unwrap();
    let numbers = String::from_utf8(numbers.to_vec()).unwrap();
    let settled = "x402_facilitator_requests_total{endpoint=\"settle\",status=\"200\"} 3";
    assert!(numbers.lines().any(|line| line == settled), "{numbers}");
}

#[tokio::test]
async fn an_operator_with_the_token_sees_the_payments_and_anybody_whether_it_is_ready() {
    const TOKEN: &str = "an-admin-token-for-tests";
    let evaluator = Evaluator::start(&["--admin-token", TOKEN], None).await;
    let student = PrivateKeySigner::random();
    let mint = json!([student.address(), U256::from(100_000)]);
    let _: Value = evaluator.provider.raw_request("devnet_mint".into(), mint).await.unwrap();
    assert!(evaluator.sell(&student, &["--count", "2"]).await.succeeded);

    let client = reqwest::Client::new();
    let get = async |path: &str, token: Option<&str>| {
        let mut request = client.get(evaluator.url.replace("/evaluate", path));
        if let Some(token) = token {
            request = request.header("authorization", format!("Bearer {token}"));
        }
        let response = request.send().await.unwrap();
        (response.status().as_u16(), String::from_utf8(response.bytes().await.unwrap().to_vec()).unwrap())
    };
    assert_eq!(get("/healthz", None).await.0, 200);
    assert_eq!(get("/readyz", None).await, (200, json!({ "ready": true, "reasons": [] }).to_string()));
    let wrong = TOKEN.replace("tests", "guess");
    for token in [None, Some(""), Some(&wrong[..]), Some(&TOKEN[..TOKEN.len() - 1])] {
        for path in ["/admin/payments", "/admin/payments?find=0x00000000", "/admin/report", "/admin/channels"] {
            let (status, body) = get(path, token).await;
            assert_eq!(status, 401, "{token:?}");
            assert!(!body.contains("eip155"), "{body}");
        }
    }
    let (status, lines) = get("/admin/payments?state=all", Some(TOKEN)).await;
    assert_eq!((status, lines.lines().count()), (200, 2), "{lines}");
    let payer = format!("{:#x}", student.address());
    assert!(lines.lines().all(|line| line.contains(&payer)));
    let (_, csv) = get("/admin/payments?state=settled&format=csv", Some(TOKEN)).await;
    assert_eq!(csv.lines().count(), 3, "{csv}");
    assert_eq!(get("/admin/payments?state=owed", Some(TOKEN)).await, (200, String::new()));
    let (_, found) = get(&format!("/admin/payments?find={payer}"), Some(TOKEN)).await;
    assert_eq!(serde_json::from_str::<Value>(&found).unwrap().as_array().unwrap().len(), 2);
    let (_, report) = get("/admin/report", Some(TOKEN)).await;
    let report: Value = serde_json::from_str(&report).unwrap();
    assert_eq!(report["assets"][0]["paid"], json!({ "payments": 2, "units": (2 * PRICE).to_string() }));
    assert_eq!(get("/admin/payments?state=rich", Some(TOKEN)).await.0, 400);

    // After a third transfer, the student opens a channel.
    assert_eq!(get("/admin/channels", Some(TOKEN)).await, (200, String::new()));
    assert!(evaluator.sell(&student, &["--count", "4"]).await.succeeded);
    let (status, channels) = get("/admin/channels?state=unclaimed", Some(TOKEN)).await;
    assert_eq!((status, channels.lines().count()), (200, 1), "{channels}");
    let channel: Value = serde_json::from_str(&channels).unwrap();
    assert_eq!((&channel["unclaimed_units"], channel["payer"].as_str()), (&json!(PRICE.to_string()), Some(&payer[..])));
    let (_, csv) = get("/admin/channels?state=idle:0&format=csv", Some(TOKEN)).await;
    assert_eq!(csv.lines().count(), 2, "{csv}");
    for nothing in ["at-risk", "idle:3600"] {
        assert_eq!(get(&format!("/admin/channels?state={nothing}"), Some(TOKEN)).await, (200, String::new()));
    }
    for wrong in ["state=idle", "state=owed", "format=xml"] {
        assert_eq!(get(&format!("/admin/channels?{wrong}"), Some(TOKEN)).await.0, 400, "{wrong}");
    }

    let closed = Evaluator::start(&[], None).await;
    let response = client.get(closed.url.replace("/evaluate", "/admin/payments")).send().await.unwrap();
    assert_eq!(response.status(), 404, "without a token there is nothing to admit to");
}

#[tokio::test]
async fn an_evaluator_whose_key_cannot_pay_for_gas_says_so() {
    let evaluator = Evaluator::start(&[], None).await;
    let offers = demand(&ask(&evaluator, None).await)["accepts"].as_array().unwrap().clone();
    let by_voucher = offers.iter().find(|offer| offer["scheme"] == "batch-settlement").expect("on its own chain");
    // The key that signs claims sends them, too, and the payments of `exact`.
    let empty = (by_voucher["extra"]["receiverAuthorizer"].clone(), U256::ZERO);
    let _: () = evaluator.provider.raw_request("anvil_setBalance".into(), empty).await.unwrap();
    let detail = "the key that sends transactions cannot pay for gas: it holds 0 wei";
    let reasons = ["exact", "vouchers"].map(|scheme| json!({ "scheme": scheme, "code": "gas_tank", "detail": detail }));
    eventually("it is not ready", async || {
        let response = reqwest::get(evaluator.url.replace("/evaluate", "/readyz")).await.unwrap();
        let status = response.status().as_u16();
        let answer: Value = serde_json::from_slice(&response.bytes().await.unwrap()).unwrap();
        (status, answer) == (503, json!({ "ready": false, "reasons": reasons }))
    })
    .await;
}

#[tokio::test]
async fn evaluator_prints_its_payments_without_serving() {
    let directory = tempfile::tempdir().unwrap();
    let ledger = format!("sqlite:{}", directory.path().join("ledger.sqlite").display());
    let mut evaluator = Evaluator::start(&["--ledger", &ledger], None).await;
    let student = PrivateKeySigner::random();
    let mint = json!([student.address(), U256::from(100_000)]);
    let _: Value = evaluator.provider.raw_request("devnet_mint".into(), mint).await.unwrap();
    assert!(evaluator.sell(&student, &["--count", "2"]).await.succeeded);
    let print = async |arguments: &[&str]| {
        let mut command = example("evaluator");
        command.args(["--ledger", &ledger]).args(arguments);
        let output = timeout(PATIENCE, command.output()).await.unwrap().unwrap();
        (output.status.code(), String::from_utf8(output.stdout).unwrap())
    };
    assert_eq!(print(&["--payments", "all"]).await, (Some(2), String::new()), "the file is the running one's");
    evaluator.process.kill().await.unwrap();
    let (code, lines) = print(&["--payments", "all"]).await;
    assert_eq!((code, lines.lines().count()), (Some(0), 2), "{lines}");
    let (code, csv) = print(&["--export", "csv"]).await;
    assert_eq!((code, csv.lines().count()), (Some(0), 3));
    assert!(csv.starts_with("time,network,asset,payer,payee,nonce,amount_units,amount,") && csv.ends_with("\r\n"));
    assert_eq!(print(&["--payments", "due"]).await, (Some(0), String::new()));
    assert_eq!(print(&["--payments", "rich"]).await.0, Some(2));
}

/// A language model that prefers the first output.
async fn model() -> String {
    let chat = axum::routing::post(async |body: String| {
        let verdict = |score: f64| json!({ "score": score, "confidence": 0.8, "summary": "said the model" });
        let both = body.contains("CANDIDATE 2");
        let verdicts = if both { json!([verdict(0.9), verdict(0.2)]) } else { json!([verdict(0.7)]) };
        let content = json!({ "verdicts": verdicts }).to_string();
        json!({ "choices": [{ "message": { "role": "assistant", "content": content } }] }).to_string()
    });
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/v1", listener.local_addr().unwrap());
    let router = axum::Router::new().route("/v1/chat/completions", chat);
    tokio::spawn(async { axum::serve(listener, router).await });
    url
}

#[tokio::test]
async fn a_specialist_is_chosen_by_flag_and_found_by_its_card() {
    let model = model().await;
    let with_model = ["--llm-url", &model, "--specialty", "haiku"];
    let (settler, student) = (PrivateKeySigner::random(), PrivateKeySigner::random());
    for (judge, arguments, skill) in [
        ("arithmetic", &[][..], "arithmetic"),
        ("formal", &[], "algebra"),
        ("numeric", &[], "algebra"),
        ("prose", &[], "prose"),
        ("looks", &[], "code"),
        ("pairwise", &[], "comparison"),
        ("pairwise", &with_model, "comparison"),
        ("llm", &with_model, "general"),
    ] {
        let pay_to = settler.address().to_string();
        let arguments = [&["--judge", judge, "--pay-to", &pay_to], arguments].concat();
        let evaluator = Evaluator::start(&arguments, Some(&settler)).await;
        let mint = json!([student.address(), U256::from(100_000)]);
        let _: Value = evaluator.provider.raw_request("devnet_mint".into(), mint).await.unwrap();
        let card = CardFetcher::new().unwrap().fetch(&evaluator.url.parse::<Url>().unwrap().join(".").unwrap()).await;
        let card = card.expect("a card signed by the payee");
        assert!(card.card().has_skill(skill), "{judge}");
        let most = if matches!(judge, "pairwise" | "looks") { 8 } else { 64 };
        assert_eq!(card.pricing().max_outputs, most, "as many as its judge takes");
        let task = Task::new(skill, "What is 2 + 2?").unwrap();
        let pair = Submission::pair(task, "Two and two are four. Answer: 4", "Answer: 5").unwrap();
        let client = EvaluationClient::new(Payer::builder(student.clone()).build()).unwrap();
        let bought = client.evaluate(&card, &pair).await.unwrap();
        assert_eq!(bought.receipt.unwrap().amount.atomic(), 2 * PRICE);
        let [first, second] = [0, 1].map(|at| bought.evaluation.verdicts[at].score);
        match (judge, arguments.len()) {
            ("arithmetic", _) => assert!(first > second),
            ("llm", _) | ("pairwise", 8) => assert_eq!(first, second, "the model's bias cancels out"),
            _ => {}
        }
        assert_eq!(evaluator.income().await, 2 * PRICE);
        assert_eq!(evaluator.stats().await["skills"][skill]["outputs"], 2);
    }
}

#[tokio::test]
async fn unpaid_submission_is_not_evaluated() {
    let evaluator = Evaluator::start(&[], None).await;
    let response = reqwest::Client::new().post(&evaluator.url).send().await.unwrap();
    assert_eq!(response.status(), 402);
    assert!(response.headers().contains_key("payment-required"));

    let penniless = PrivateKeySigner::random();
    let purchases = evaluator.sell(&penniless, &["--count", "1"]).await;
    assert!(!purchases.succeeded);
    assert_eq!(purchases.lines.len(), 1);
    assert_ne!(purchases.lines[0]["outcome"], "settled");
    assert_eq!(evaluator.stats().await["handled"], 0);
}

/// More submissions at once than the evaluator judges at once, from a student with credit.
#[tokio::test]
async fn a_hundred_payments_at_once_are_all_answered_in_every_flow() {
    const COUNT: u64 = 100;
    for flow in ["authorization", "upfront", "deferred"] {
        let evaluator = Evaluator::start(&["--flow", flow, "--handler-delay-ms", "300"], None).await;
        let customer = customer();
        let mint = json!([customer.from, U256::from(1_000_000)]);
        let _: Value = evaluator.provider.raw_request("devnet_mint".into(), mint).await.unwrap();
        let offer = demand(&ask(&evaluator, None).await);
        for _ in 0..3 {
            assert_eq!(ask(&evaluator, Some(&customer.sign(&offer, 0))).await.status, 200, "{flow}");
        }
        let purchases: Vec<Purchase> = (0..COUNT).map(|_| customer.sign(&offer, 0)).collect();
        let answers = join_all(purchases.iter().map(|purchase| ask(&evaluator, Some(purchase)))).await;
        for answer in &answers {
            assert_eq!(answer.status, 200, "{flow}: {}", answer.text());
        }
        let later = answers.iter().filter(|answer| answer.settlement().unwrap()["transaction"] == "").count();
        assert_eq!(later > 0, flow == "deferred");
        let collected = async {
            while evaluator.income().await < (3 + COUNT) * PRICE {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        timeout(PATIENCE, collected).await.unwrap_or_else(|_| panic!("{flow}: all is paid"));
        let stats = evaluator.stats().await;
        assert_eq!((&stats["handled"], &stats["settled"]), (&json!(3 + COUNT), &json!(3 + COUNT)), "{flow}: {stats}");
        assert_eq!(evaluator.income().await, (3 + COUNT) * PRICE);
    }
}

#[tokio::test]
async fn student_stays_within_its_budget() {
    let evaluator = Evaluator::start(&[], None).await;
    let student = PrivateKeySigner::random();
    let mint = json!([student.address(), U256::from(100_000)]);
    let _: Value = evaluator.provider.raw_request("devnet_mint".into(), mint).await.unwrap();

    let purchases = evaluator.sell(&student, &["--count", "3", "--budget", "$0.002"]).await;
    assert!(!purchases.succeeded);
    assert_eq!(purchases.outcomes(), ["refused", "settled", "settled"]);
    assert_eq!(evaluator.income().await, 2 * PRICE);
}

#[tokio::test]
async fn rejected_submission_is_not_charged() {
    let evaluator = Evaluator::start(&[], None).await;
    let student = PrivateKeySigner::random();
    let mint = json!([student.address(), U256::from(100_000)]);
    let _: Value = evaluator.provider.raw_request("devnet_mint".into(), mint).await.unwrap();
    let payer = Payer::builder(student).build();
    let client = PaymentMiddleware::new(payer).client(reqwest::Client::builder()).unwrap();

    let poem = json!({ "task": { "id": "t1", "skill": "poetry", "prompt": "Rhyme" }, "output": "time" }).to_string();
    for (body, status) in [(poem, 422), ("{".to_owned(), 400), ("1".repeat(100_000), 413)] {
        let response = client.post(&evaluator.url).body(body).send().await.unwrap();
        assert_eq!(response.status(), status);
        let answer: Value = serde_json::from_slice(&response.bytes().await.unwrap()).unwrap();
        assert!(answer["error"].is_string(), "{answer}");
    }
    assert_eq!(evaluator.stats().await["settled"], 0);
    assert_eq!(evaluator.income().await, 0);
}

#[tokio::test]
async fn a_stopping_evaluator_finishes_what_it_has_begun() {
    let mut evaluator = Evaluator::start(&["--handler-delay-ms", "500"], None).await;
    let student = PrivateKeySigner::random();
    let mint = json!([student.address(), U256::from(100_000)]);
    let _: Value = evaluator.provider.raw_request("devnet_mint".into(), mint).await.unwrap();

    let mut command = example("student");
    command.args(["--url", &evaluator.url]).env("STUDENT_PRIVATE_KEY", student.to_bytes().to_string());
    let buying = command.spawn().unwrap();
    support::eventually::eventually("the evaluator works", async || evaluator.stats().await["handled"] != 0).await;
    let id = evaluator.process.id().unwrap().to_string();
    assert!(Command::new("kill").args(["-INT", &id]).status().await.unwrap().success());
    assert!(timeout(PATIENCE, buying.wait_with_output()).await.unwrap().unwrap().status.success());
    assert!(timeout(PATIENCE, evaluator.process.wait()).await.unwrap().unwrap().success());
}

/// The evaluator prices by the body, and a refund has none.
#[tokio::test]
async fn student_pays_by_vouchers_after_three_transfers_and_a_later_run_closes_its_channel() {
    let evaluator = Evaluator::start(&[], None).await;
    let student = PrivateKeySigner::random();
    let mint = json!([student.address(), U256::from(100_000)]);
    let _: Value = evaluator.provider.raw_request("devnet_mint".into(), mint).await.unwrap();
    let directory = tempfile::tempdir().unwrap();
    let run = async |arguments: &[&str]| {
        let mut command = example("student");
        command.args(["--url", &evaluator.url, "--rpc-url", &evaluator.rpc_url, "--journal"]);
        command.arg(directory.path().join("journal")).args(arguments);
        command.env("STUDENT_PRIVATE_KEY", student.to_bytes().to_string());
        let output = timeout(PATIENCE, command.output()).await.expect("the student ends").unwrap();
        assert!(output.status.success(), "{output:?}");
        let text = String::from_utf8(output.stdout).unwrap();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect::<Vec<Value>>()
    };
    let balance = async || {
        let balance = call(&evaluator.provider, evaluator.asset, Token::balanceOfCall { account: student.address() });
        u64::try_from(balance.await.unwrap()).unwrap()
    };

    let bought = run(&["--count", "5"]).await;
    let outcomes: Vec<_> = bought[..5].iter().map(|line| line["outcome"].as_str().unwrap()).collect();
    assert_eq!(outcomes, ["settled", "settled", "settled", "accepted", "accepted"]);
    assert_eq!((&bought[5]["summary"]["spent"], &bought[5]["summary"]["escrow"]), (&json!("5000"), &json!("8000")));
    assert_eq!(balance().await, 100_000 - 3 * PRICE - 10 * PRICE);

    let closed = run(&["--count", "0", "--close"]).await;
    assert_eq!((closed.len(), &closed[0]["refunded"]), (2, &json!("8000")), "{closed:?}");
    assert!(closed[0]["transaction"].is_string(), "{closed:?}");
    assert_eq!(closed[1]["summary"]["escrow"], "0");
    assert_eq!(balance().await, 100_000 - 5 * PRICE);
    assert_eq!(run(&["--count", "0", "--close"]).await.len(), 1, "nothing is left to close");
}

/// The first student is killed after it paid and before it was answered. The next one asks the evaluator for the status, without a node.
#[tokio::test]
async fn restarted_student_learns_its_payments_outcome_from_the_evaluator() {
    let evaluator = Evaluator::start(&["--flow", "upfront", "--handler-delay-ms", "30000"], None).await;
    let student = PrivateKeySigner::random();
    let mint = json!([student.address(), U256::from(100_000)]);
    let _: Value = evaluator.provider.raw_request("devnet_mint".into(), mint).await.unwrap();
    let directory = tempfile::tempdir().unwrap();
    let with_journal = |count: &str| {
        let mut command = example("student");
        command.args(["--url", &evaluator.url, "--count", count, "--journal"]).arg(directory.path().join("journal"));
        command.env("STUDENT_PRIVATE_KEY", student.to_bytes().to_string());
        command
    };
    let mut first = with_journal("1").spawn().unwrap();
    let settled = async {
        while evaluator.stats().await["settled"] == 0 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    timeout(PATIENCE, settled).await.unwrap();
    first.kill().await.unwrap();

    let output = timeout(PATIENCE, with_journal("0").output()).await.unwrap().unwrap();
    let line: Value = serde_json::from_slice(&output.stdout).unwrap();
    let summary = &line["summary"];
    assert_eq!(summary["reconciled"], json!({ "paid": 1, "void": 0, "open": 0 }), "{line}");
    assert_eq!((&summary["spent"], &summary["reserved"]), (&json!("1000"), &json!("0")), "{line}");
}

#[tokio::test]
async fn a_killed_evaluator_remembers_what_was_bought() {
    let directory = tempfile::tempdir().unwrap();
    remembers_what_was_bought(&format!("sqlite:{}", directory.path().join("ledger.sqlite").display())).await;
}

#[cfg(feature = "test-postgres")]
#[tokio::test]
async fn a_killed_evaluator_remembers_what_was_bought_postgres() {
    remembers_what_was_bought(support::postgres::Server::start().url()).await;
}

/// Two evaluators share one settlement key and one ledger.
#[cfg(feature = "test-postgres")]
#[tokio::test]
async fn two_evaluators_share_a_ledger_postgres() {
    const COUNT: u64 = 8;
    let chain = DevnetChain::start(None).await;
    let (customer, settler) = (Customer::with_funds(&chain, COUNT * PRICE).await, PrivateKeySigner::random());
    chain.fund(settler.address(), U256::from(10).pow(U256::from(18))).await;
    let server = support::postgres::Server::start();
    let rpc_url = chain.rpc_url();
    let arguments = [
        ["--rpc-url", &rpc_url, "--ledger", server.url(), "--public-url", "https://judge.example"].as_slice(),
        &["--pay-to", "0x00000000000000000000000000000000000000ee"],
    ]
    .concat();
    let evaluators =
        [Evaluator::start(&arguments, Some(&settler)).await, Evaluator::start(&arguments, Some(&settler)).await];
    let offer = demand(&ask(&evaluators[0], None).await);
    let purchases: Vec<Purchase> = (0..COUNT).map(|_| customer.sign(&offer, 0)).collect();
    let bought = |n: usize| ask(&evaluators[n % 2], Some(&purchases[n]));
    let answers = futures_util::future::join_all((0..purchases.len()).map(bought)).await;
    for (n, answer) in answers.iter().enumerate() {
        assert_eq!(answer.status, 200, "{}", answer.text());
        let again = ask(&evaluators[(n + 1) % 2], Some(&purchases[n])).await;
        assert_eq!((again.status, again.text()), (answer.status, answer.text()), "the other one has its answer");
        assert_eq!(again.transaction(), answer.transaction());
    }
    let [first, second] = [evaluators[0].stats().await, evaluators[1].stats().await];
    assert_eq!((&first["settled"], &second["settled"]), (&json!(COUNT), &json!(COUNT)), "both count the same ledger");
    let handled = |stats: &Value| stats["handled"].as_u64().unwrap();
    assert_eq!(handled(&first) + handled(&second), COUNT, "each was worked on once");
    assert_eq!(chain.balance(evaluators[0].pay_to).await, COUNT * PRICE);
}

/// Sends a sum for evaluation.
async fn ask(evaluator: &Evaluator, purchase: Option<&Purchase>) -> Answer {
    let body = r#"{"task":{"id":"t","skill":"arithmetic","prompt":"What is 1 + 1?"},"output":"Answer: 2"}"#;
    let mut request = reqwest::Client::new().post(&evaluator.url).header("content-type", "application/json");
    if let Some(purchase) = purchase {
        let paid = purchase.on(http::Request::new(axum::body::Body::empty()));
        request = request.header("payment-signature", &paid.headers()["payment-signature"]);
    }
    let response = request.body(body).send().await.unwrap();
    let (status, headers) = (response.status(), response.headers().clone());
    Answer { status, headers, body: response.bytes().await.unwrap() }
}

/// Kills the evaluator as soon as it answered. The next process has the answer, because it is stored before settlement.
async fn remembers_what_was_bought(ledger: &str) {
    let chain = DevnetChain::start(None).await;
    let (customer, settler) = (Customer::with_funds(&chain, 9 * PRICE).await, PrivateKeySigner::random());
    chain.fund(settler.address(), U256::from(10).pow(U256::from(18))).await;
    let rpc_url = chain.rpc_url();
    let arguments =
        ["--rpc-url", &rpc_url, "--ledger", ledger, "--pay-to", "0x00000000000000000000000000000000000000ee"];
    let mut evaluator = Evaluator::start(&arguments, Some(&settler)).await;
    let purchase = customer.sign(&demand(&ask(&evaluator, None).await), 0);
    let first = ask(&evaluator, Some(&purchase)).await;
    assert_eq!(first.status, 200, "{}", first.text());
    evaluator.process.kill().await.unwrap();

    let evaluator = Evaluator::start(&arguments, Some(&settler)).await;
    let again = ask(&evaluator, Some(&purchase)).await;
    assert_eq!((again.status, again.text()), (first.status, first.text()));
    assert_eq!(again.transaction(), first.transaction());
    let stats = evaluator.stats().await;
    assert_eq!((&stats["handled"], &stats["settled"]), (&json!(0), &json!(1)), "nothing was worked on again: {stats}");
    assert_eq!(chain.balance(evaluator.pay_to).await, PRICE);
}

async fn a_student_buys_in_the_default_flow(chain: &dyn Chain) {
    buy(chain, "authorization").await;
}

async fn a_student_buys_upfront(chain: &dyn Chain) {
    buy(chain, "upfront").await;
}

async fn a_student_that_has_paid_before_pays_later(chain: &dyn Chain) {
    let (student, settler) = (PrivateKeySigner::random(), PrivateKeySigner::random());
    chain.mint(student.address(), 100_000).await;
    chain.fund(settler.address(), U256::from(10).pow(U256::from(18))).await;
    let mut evaluator = Evaluator::start(&["--rpc-url", &chain.rpc_url(), "--flow", "deferred"], Some(&settler)).await;
    let first = evaluator.sell(&student, &["--count", "1"]).await;
    assert_eq!(first.outcomes(), ["settled"], "nobody owes before it has paid");
    let later = evaluator.sell(&student, &["--count", "1"]).await;
    assert_eq!(later.outcomes(), ["accepted"], "as much as it has paid");
    let more = evaluator.sell(&student, &["--count", "8", "--concurrency", "4"]).await;
    assert!(more.succeeded);
    // When it is asked to stop, it settles the open payments first.
    let id = evaluator.process.id().unwrap().to_string();
    assert!(Command::new("kill").args(["-TERM", &id]).status().await.unwrap().success());
    assert!(timeout(PATIENCE, evaluator.process.wait()).await.unwrap().unwrap().success());
    assert_eq!(evaluator.income().await, 10 * PRICE);
}

async fn buy(chain: &dyn Chain, flow: &str) {
    const COUNT: u64 = 8;
    let (student, settler) = (PrivateKeySigner::random(), PrivateKeySigner::random());
    chain.mint(student.address(), 100_000).await;
    chain.fund(settler.address(), U256::from(10).pow(U256::from(18))).await;

    let evaluator = Evaluator::start(&["--rpc-url", &chain.rpc_url(), "--flow", flow], Some(&settler)).await;
    let purchases = evaluator.sell(&student, &["--count", &COUNT.to_string(), "--concurrency", "4"]).await;
    assert!(purchases.succeeded);
    assert_eq!(purchases.outcomes(), ["settled"; COUNT as usize]);

    let told: BTreeSet<B256> =
        purchases.lines.iter().map(|line| line["transaction"].as_str().unwrap().parse().unwrap()).collect();
    let transfers = chain.token_transfers(evaluator.pay_to).await;
    assert_eq!(transfers.iter().map(|transfer| transfer.transaction).collect::<BTreeSet<_>>(), told);
    assert!(transfers.iter().all(|transfer| transfer.from == student.address() && transfer.units == PRICE));
    assert_eq!(transfers.len() as u64, COUNT);
    assert_eq!(evaluator.income().await, COUNT * PRICE);

    let stats = evaluator.stats().await;
    assert_eq!((&stats["handled"], &stats["settled"]), (&json!(COUNT), &json!(COUNT)), "{stats}");
    assert_eq!((&stats["pending"], &stats["unknown"], &stats["failed"]), (&json!(0), &json!(0), &json!(0)), "{stats}");
}

/// A running `evaluator`, killed when dropped.
struct Evaluator {
    url: String,
    asset: Address,
    pay_to: Address,
    rpc_url: String,
    provider: DynProvider,
    process: Child,
    // Closing the pipe would make the program's next line fail.
    _output: Lines<BufReader<ChildStdout>>,
}

impl Evaluator {
    async fn start(arguments: &[&str], settler: Option<&PrivateKeySigner>) -> Self {
        let mut command = example("evaluator");
        command.args(["--listen", "127.0.0.1:0", "--price", "$0.001"]);
        if !arguments.contains(&"--pay-to") {
            command.args(["--pay-to", &random_address().to_string()]);
        }
        command.args(arguments);
        if let Some(settler) = settler {
            command.env("SETTLEMENT_PRIVATE_KEY", settler.to_bytes().to_string());
        }
        let mut process = command.spawn().unwrap();
        let mut output = BufReader::new(process.stdout.take().unwrap()).lines();
        let line = timeout(PATIENCE, output.next_line()).await.expect("it says that it is ready").unwrap();
        let ready: Value = serde_json::from_str(&line.expect("it says that it is ready")).unwrap();
        let text = |name: &str| ready[name].as_str().unwrap_or_else(|| panic!("{name} in {ready}")).to_owned();
        assert_eq!(text("network"), "eip155:84532");
        let origin = match text("listening") {
            url if url.starts_with("http://") => url.trim_end_matches('/').to_owned(),
            address => format!("http://{address}"),
        };
        Self {
            url: format!("{origin}/evaluate"),
            asset: text("asset").parse().unwrap(),
            pay_to: text("pay_to").parse().unwrap(),
            rpc_url: text("rpc_url"),
            provider: ProviderBuilder::default().connect_http(text("rpc_url").parse().unwrap()).erased(),
            process,
            _output: output,
        }
    }

    /// Runs a `student` that buys here.
    async fn sell(&self, student: &PrivateKeySigner, arguments: &[&str]) -> Purchases {
        let mut command = example("student");
        command.args(["--url", &self.url, "--rpc-url", &self.rpc_url]).args(arguments);
        command.env("STUDENT_PRIVATE_KEY", student.to_bytes().to_string());
        let output = timeout(PATIENCE, command.output()).await.expect("the student ends").unwrap();
        let lines = String::from_utf8(output.stdout).unwrap();
        let mut lines: Vec<Value> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        lines.pop().expect("a summary");
        Purchases { succeeded: output.status.success(), lines }
    }

    async fn income(&self) -> u64 {
        let balance = call(&self.provider, self.asset, Token::balanceOfCall { account: self.pay_to }).await;
        balance.unwrap().try_into().unwrap()
    }

    async fn stats(&self) -> Value {
        let stats = reqwest::get(self.url.replace("/evaluate", "/stats")).await.unwrap();
        serde_json::from_slice(&stats.bytes().await.unwrap()).unwrap()
    }
}

/// The output of a `student`.
struct Purchases {
    succeeded: bool,
    /// A line per purchase, without the summary.
    lines: Vec<Value>,
}

impl Purchases {
    /// Returns the outcomes in alphabetical order.
    fn outcomes(&self) -> Vec<&str> {
        let mut outcomes: Vec<&str> = self.lines.iter().map(|line| line["outcome"].as_str().unwrap()).collect();
        outcomes.sort_unstable();
        outcomes
    }
}
