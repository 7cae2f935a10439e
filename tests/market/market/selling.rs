//! An evaluator, from the first request to the payment.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use futures_util::future::join_all;
use http::Method;
use serde_json::{Value, json};
use tower_x402::{
    client::{PaymentMiddleware, PaymentOutcome, ReceiptExt as _, RetryPolicy},
    protocol::{MAX_REQUIRED_HEADER, decode_header},
};
use x402_judges::ArithmeticJudge;
use x402_market::{
    Confidence, Critique, EvaluateError, EvaluatorBuilder, Issue, Place, Score, Severity, Submission, Task, Verdict,
    judge::{JudgeError, judge_fn, output_judge},
};

use super::stage::{PRICE, Stage};
use support::chain::Chain as _;

const QUESTION: &str = "What is 17 * 23 + 4?";

fn task() -> Task {
    Task::new("arithmetic", QUESTION).unwrap().with_id("t1").unwrap()
}

fn right() -> Verdict {
    Verdict::new(Score::MAX, Confidence::MAX, "right")
}

#[tokio::test]
async fn evaluation_costs_exactly_its_price() {
    let stage = Stage::set().await;
    let booth = stage.open(ArithmeticJudge).await;
    let student = stage.student(10 * PRICE).await;
    let card = booth.card().await;
    let submission = Submission::single(task(), "17 * 23 = 381, and 4 more is 385. Answer: 385").unwrap();
    let bought = student.evaluate(&card, &submission).await.unwrap();
    let receipt = bought.receipt.unwrap();
    assert_eq!((receipt.outcome, receipt.amount.atomic()), (PaymentOutcome::Settled, PRICE));
    assert_eq!(booth.income(&stage).await, PRICE);
    assert_eq!(stage.chain.balance(receipt.payer).await, 9 * PRICE);
    let verdict = &bought.evaluation.verdicts[0];
    assert_eq!((verdict.score.get(), verdict.reward.get()), (0.0, -1.0));
    assert_eq!(&*bought.evaluation.evaluator.id, "The judge");
    let quotes = verdict.critique.issues.iter().filter_map(|issue| issue.place.as_ref()?.quote());
    assert_eq!(quotes.collect::<Vec<_>>(), ["17 * 23 = 381", "385"]);
}

#[tokio::test]
async fn pairs_and_groups_are_priced_by_output() {
    let stage = Stage::set().await;
    let booth = stage.open(ArithmeticJudge).await;
    let student = stage.student(100 * PRICE).await;
    let card = booth.card().await;
    let pair = Submission::pair(task(), "Answer: 395", "Answer: 396").unwrap();
    let bought = student.evaluate(&card, &pair).await.unwrap();
    assert!(bought.evaluation.verdicts[0].score > bought.evaluation.verdicts[1].score);
    assert_eq!(bought.receipt.unwrap().amount.atomic(), 2 * PRICE);
    let group = Submission::group(task(), (0..7).map(|n| format!("Answer: {}", 392 + n))).unwrap();
    let bought = student.evaluate(&card, &group).await.unwrap();
    let scores: Vec<f64> = bought.evaluation.verdicts.iter().map(|verdict| verdict.score.get()).collect();
    assert_eq!(scores, [0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0]);
    assert_eq!(bought.receipt.unwrap().amount.atomic(), 7 * PRICE);
    assert_eq!(booth.income(&stage).await, 9 * PRICE);
    let stats = booth.stats();
    let skill = &stats.skills["arithmetic"];
    assert_eq!((stats.asked, skill.judged, skill.outputs), (2, 2, 9));
}

#[tokio::test]
async fn submissions_that_cannot_be_judged_are_refused_before_payment() {
    let stage = Stage::set().await;
    let booth =
        stage.open_with(ArithmeticJudge, |card| card.max_outputs(3), |evaluator| evaluator.max_body(40_000)).await;
    let payer = stage.payer(10 * PRICE).await;
    let budget = payer.budget().clone();
    let client = PaymentMiddleware::new(payer).client(reqwest::Client::builder()).unwrap();
    let task = json!({ "skill": "arithmetic", "prompt": QUESTION });
    let too_long = json!({ "task": { "skill": "arithmetic", "prompt": "1+".repeat(5_000) }, "output": "" });
    for (body, status, said) in [
        ("{".to_owned(), 400, "not JSON"),
        ("[]".to_owned(), 400, "expected"),
        (json!({ "task": task }).to_string(), 400, "output, pair or outputs is missing"),
        (json!({ "version": 9, "task": task, "output": "" }).to_string(), 400, "version: 9"),
        (json!({ "task": { "skill": "poetry", "prompt": "Rhyme" }, "output": "time" }).to_string(), 422, "arithmetic"),
        (json!({ "task": task, "outputs": ["", "", "", ""] }).to_string(), 422, "takes 3 at once"),
        (too_long.to_string(), 422, "shorten it"),
        ("1".repeat(50_000), 413, "larger"),
    ] {
        let response = client.post(booth.url.join("evaluate").unwrap()).body(body).send().await.unwrap();
        assert_eq!(response.status(), status, "{said}");
        assert!(response.receipt().is_none(), "nothing was signed");
        let answer: Value = serde_json::from_slice(&response.bytes().await.unwrap()).unwrap();
        assert!(answer["detail"].as_str().unwrap().contains(said), "{answer}");
    }
    assert_eq!((budget.spent().atomic(), budget.reserved().atomic(), booth.stats().asked), (0, 0, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn refused_uploads_get_their_answers() {
    let stage = Stage::set().await;
    let booth = stage.open(ArithmeticJudge).await;
    let client = reqwest::Client::builder().no_proxy().build().unwrap();
    for (method, path, status) in [
        (Method::POST, "evaluate", 413),
        (Method::PUT, "evaluate", 413),
        (Method::POST, "stats", 405),
        (Method::POST, "payments/status", 405),
        (Method::PUT, ".well-known/agent-card.json", 405),
        (Method::POST, "nowhere", 404),
    ] {
        for attempt in 0..3 {
            let request = client.request(method.clone(), booth.url.join(path).unwrap()).body("1".repeat(20_000_000));
            let response = request.send().await;
            let response = response.unwrap_or_else(|error| panic!("{method} {path}, {attempt}: {error:?}"));
            assert_eq!(response.status(), status, "{method} {path}");
            response.bytes().await.unwrap();
        }
    }
}

#[tokio::test]
async fn request_without_a_body_shows_the_price_of_one_output() {
    let stage = Stage::set().await;
    let booth = stage.open(ArithmeticJudge).await;
    let client = reqwest::Client::new();
    let response = client.post(booth.url.join("evaluate").unwrap()).send().await.unwrap();
    assert_eq!(response.status(), 402);
    let header = response.headers()["payment-required"].clone();
    let declared: Value = decode_header(header.as_bytes(), MAX_REQUIRED_HEADER).unwrap();
    let bazaar = &declared["extensions"]["bazaar"]["info"];
    assert_eq!(bazaar["input"]["body"]["task"]["skill"], "arithmetic", "it can be listed: {bazaar}");
    assert!(header.len() < 6 * 1024, "{}", header.len());
    let demand: Value = serde_json::from_slice(&response.bytes().await.unwrap()).unwrap();
    assert_eq!(demand["accepts"][0]["maxAmountRequired"], PRICE.to_string());
    assert_eq!(demand["accepts"][0]["resource"], booth.url.join("evaluate").unwrap().as_str());
    // With a payment, it must be the body that the payment is for.
    let paid = PaymentMiddleware::new(stage.payer(10 * PRICE).await).client(reqwest::Client::builder()).unwrap();
    let response = paid.post(booth.url.join("evaluate").unwrap()).send().await.unwrap();
    assert_eq!(response.status(), 400);
    assert_eq!(booth.income(&stage).await, 0);
    let browsing = client.get(booth.url.join("evaluate").unwrap());
    let browsing = browsing.header("accept", "text/html").header("user-agent", "Mozilla/5.0").send().await.unwrap();
    assert_eq!(
        (browsing.status().as_u16(), &browsing.headers()["content-type"]),
        (402, &"text/html; charset=utf-8".parse().unwrap())
    );
    let browser = PaymentMiddleware::new(stage.payer(10 * PRICE).await).client(reqwest::Client::builder()).unwrap();
    let body = json!({ "task": { "skill": "arithmetic", "prompt": QUESTION }, "output": "395" }).to_string();
    let paying = browser.get(booth.url.join("evaluate").unwrap()).header("accept", "text/html");
    assert_eq!(paying.header("user-agent", "Mozilla/5.0").body(body).send().await.unwrap().status(), 405);
    assert_eq!(booth.income(&stage).await, 0);
    for (method, path, status) in [("GET", "evaluate", 402), ("POST", "stats", 405), ("GET", "nothing", 404)] {
        let url = booth.url.join(path).unwrap();
        let response = client.request(method.parse().unwrap(), url).send().await.unwrap();
        assert_eq!(response.status(), status, "{method} {path}");
    }
}

fn bad_place() -> Issue {
    Issue::new(Severity::Minor, "").at(Place::quoting("elsewhere", "elsewhere"))
}

/// A critique of more than a mebibyte, every part of it as long as it may be.
fn ramble() -> Critique {
    let long = "世".repeat(2_048);
    (0..64).fold(Critique::new(""), |critique, _| critique.issue(Issue::new(Severity::Minor, &*long).suggest(&*long)))
}

#[tokio::test]
async fn failed_judge_is_not_paid() {
    let stage = Stage::set().await;
    let judge = output_judge(async |task: std::sync::Arc<Task>, _| match task.question() {
        "fail" => Err(JudgeError::failed("the model's password is hunter2")),
        "refuse" => Err(JudgeError::Rejected("not this one".to_owned())),
        "busy" => Err(JudgeError::Busy { retry_after: Duration::from_secs(7) }),
        "panic" => panic!("a bug"),
        "slow" => std::future::pending().await,
        "ramble" => Ok(Verdict::new(Score::MAX, Confidence::MAX, ramble())),
        "misquote" => Ok(Verdict::new(Score::MAX, Confidence::MAX, Critique::new("").issue(bad_place()))),
        _ => Ok(right()),
    });
    let booth = stage.open_with(judge, |card| card, |evaluator| evaluator.time_limit(Duration::from_millis(100))).await;
    let payments = PaymentMiddleware::new(stage.payer(100 * PRICE).await).retry(RetryPolicy::default().max_attempts(1));
    let student = x402_market::EvaluationClient::with(payments).unwrap();
    let card = booth.card().await;
    for (question, expected) in [
        ("fail", 500),
        ("refuse", 422),
        ("busy", 503),
        ("panic", 500),
        ("slow", 504),
        ("misquote", 500),
        ("ramble", 500),
    ] {
        let submission = Submission::single(Task::new("arithmetic", question).unwrap(), "").unwrap();
        match student.evaluate(&card, &submission).await {
            Err(EvaluateError::Answered { status, detail, receipt }) => {
                assert_eq!(status, expected, "{question}: {detail}");
                assert!(!detail.contains("hunter2"), "{detail}");
                assert!(!receipt.is_some_and(|receipt| receipt.outcome.is_paid()), "{question}");
            }
            other => panic!("{question}: {other:?}"),
        }
    }
    assert_eq!(booth.income(&stage).await, 0);
    let skill = booth.stats().skills["arithmetic"].clone();
    assert_eq!((skill.failed, skill.not_taken, skill.busy, skill.late, skill.judged), (4, 1, 1, 1, 0));
    let submission = Submission::single(Task::new("arithmetic", "judge").unwrap(), "").unwrap();
    student.evaluate(&card, &submission).await.unwrap();
    assert_eq!(booth.income(&stage).await, PRICE);
}

#[tokio::test]
async fn verdicts_for_other_outputs_are_not_sold() {
    let stage = Stage::set().await;
    let booth = stage.open(judge_fn(async |_| Ok(vec![right(), right()]))).await;
    let payments = PaymentMiddleware::new(stage.payer(100 * PRICE).await).retry(RetryPolicy::default().max_attempts(1));
    let student = x402_market::EvaluationClient::with(payments).unwrap();
    let card = booth.card().await;
    let one = student.evaluate(&card, &Submission::single(task(), "").unwrap()).await;
    assert!(matches!(one, Err(EvaluateError::Answered { status: 500, .. })), "{one:?}");
    student.evaluate(&card, &Submission::pair(task(), "", "").unwrap()).await.unwrap();
    assert_eq!(booth.income(&stage).await, 2 * PRICE);
}

#[tokio::test]
async fn longest_time_limit_works() {
    let stage = Stage::set().await;
    let limit = |evaluator: EvaluatorBuilder| evaluator.time_limit(Duration::MAX);
    let booth = stage.open_with(ArithmeticJudge, |card| card, limit).await;
    let asked = reqwest::Client::new().post(booth.url.join("evaluate").unwrap()).send().await.unwrap();
    assert_eq!(asked.status(), 402);
}

#[tokio::test]
async fn concurrent_judgements_are_limited() {
    const STUDENTS: u64 = 8;
    let stage = Stage::set().await;
    let (now, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let (judging, peak) = (now.clone(), most.clone());
    let judge = output_judge(move |_, _| {
        let (judging, peak) = (judging.clone(), peak.clone());
        async move {
            peak.fetch_max(judging.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
            tokio::time::sleep(Duration::from_millis(20)).await;
            judging.fetch_sub(1, Ordering::SeqCst);
            Ok(right())
        }
    });
    let booth = stage.open_with(judge, |card| card, |evaluator| evaluator.max_judgements(1)).await;
    let card = booth.card().await;
    let payments =
        PaymentMiddleware::new(stage.payer(STUDENTS * PRICE).await).retry(RetryPolicy::default().max_attempts(1));
    let students = x402_market::EvaluationClient::with(payments).unwrap();
    let submission = Submission::single(task(), "").unwrap();
    for bought in join_all((0..STUDENTS).map(|_| students.evaluate(&card, &submission))).await {
        bought.expect("the others wait for their turn");
    }
    assert_eq!((now.load(Ordering::SeqCst), most.load(Ordering::SeqCst)), (0, 1));
    assert_eq!(booth.income(&stage).await, STUDENTS * PRICE);
}

#[tokio::test]
async fn single_output_can_be_judged_with_curl() {
    let stage = Stage::set().await;
    let booth = stage.open(ArithmeticJudge).await;
    let client = PaymentMiddleware::new(stage.payer(PRICE).await).client(reqwest::Client::builder()).unwrap();
    let body = json!({ "task": { "skill": "arithmetic", "prompt": QUESTION }, "output": "Answer: 395" }).to_string();
    let response = client.post(booth.url.join("evaluate").unwrap()).body(body).send().await.unwrap();
    let answer: Value = serde_json::from_slice(&response.bytes().await.unwrap()).unwrap();
    assert_eq!((&answer["score"], &answer["critique"]), (&json!(1.0), &answer["verdicts"][0]["critique"]));
}
