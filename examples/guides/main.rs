//! The code of the guides, as it stands there: `cargo run -p examples --example guides -- charge`.
//!
//! The addresses in it are environment variables here: `build.rs`, which takes the code out of the documents, names them.

use std::{env, error::Error, sync::Arc};

use axum::{
    Router,
    routing::{get, post},
};
use tokio::signal::unix::{SignalKind, signal};
use tower_x402::{
    Network,
    client::{Budget, Journal, Payer, PaymentMiddleware, key},
    facilitator::RemoteFacilitator,
    ledger::SqliteLedger,
    primitives::{Address, address},
    server::{RequirePaymentLayer, RequirePaymentLayerBuilder},
    vouchers::AuthorizerKey,
};
use url::Url;
use x402_directory::{DirectoryClient, reputation::Reputation};
use x402_market::{
    AgentCard, Confidence, EvaluatorService, Score, Student, StudentBuilder, Submission, Task, Verdict,
    evidence::EvidenceLog,
    judge::{Judge as _, output_judge},
};

macro_rules! blocks {
    ($($name:ident),*) => {
        $(mod $name {
            include!(concat!(env!("OUT_DIR"), "/", stringify!($name), ".rs"));
        })*
    };
}

blocks!(
    audits,
    batches,
    catalogue,
    channels_elsewhere,
    charge,
    checked,
    cors,
    end_of_day,
    environment,
    facilitator,
    hire_evaluators,
    learning,
    lessons,
    named,
    on_base,
    pay,
    prices,
    production,
    refusals,
    remote,
    reopen,
    reports,
    sell_verdicts,
    upto,
    verdicts_by_voucher,
    vouchers,
    who_paid
);

/// The payee that the guides name.
const PAYEE: Address = address!("70997970C51812dc3A010C7d01b50e0d17dc79C8");

fn main() -> Result<(), Box<dyn Error>> {
    let name = env::args().nth(1).unwrap_or_default();
    match &*name {
        "charge" => charge::main(),
        "facilitator" => facilitator::main(),
        "hire_evaluators" => hire_evaluators::main(),
        "pay" => pay::main(),
        "production" => production::main(),
        "remote" => remote::main(),
        "sell_verdicts" => sell_verdicts::main(),
        "upto" => upto::main(),
        "vouchers" => vouchers::main(),
        part => run(part),
    }
}

/// Runs a part of a program, with what it needs.
#[tokio::main]
async fn run(part: &str) -> Result<(), Box<dyn Error>> {
    match part {
        "prices" => sell_at_the_prices_of_charge().await?,
        "refusals" => {
            let budget = Budget::builder().per_payment("$0.0001".parse()?).build();
            let payer = Payer::builder(key::from_env("STUDENT_PRIVATE_KEY")?).budget(budget).build();
            refusals::buy(&PaymentMiddleware::new(payer).client(reqwest::Client::builder())?).await;
        }
        "named" => {
            let budget = Budget::builder().journal(Journal::open("payments.journal")?).build();
            let payer = Payer::builder(key::from_env("STUDENT_PRIVATE_KEY")?).budget(budget.clone()).build();
            let report = named::report(&PaymentMiddleware::new(payer).client(reqwest::Client::builder())?).await?;
            println!("{report} for {} in all", budget.spent());
        }
        "reopen" => drop(reopen::reopen().await?),
        "catalogue" => catalogue::look().await?,
        "batches" => batches::deploy(&on_base::on_base().await?).await?,
        "end_of_day" => end_of_day::end_of_day(Arc::new(SqliteLedger::open("payments.sqlite").await?)).await?,
        "checked" => {
            let facilitator = checked::checked(&env::var("FACILITATOR_KEY")?).await?;
            let layer = RequirePaymentLayer::builder().price("$0.001").pay_to(Network::BASE, PAYEE);
            let paywall = layer.facilitator(facilitator).build()?;
            serve(Router::new().route("/evaluate", post(async || "well done")).layer(paywall)).await?;
        }
        "channels_elsewhere" => {
            let key = AuthorizerKey::new(key::from_env("SETTLEMENT_PRIVATE_KEY")?);
            let channels = channels_elsewhere::channels(key).await?;
            let layer = RequirePaymentLayer::builder().price("$0.001").pay_to(Network::BASE_SEPOLIA, PAYEE);
            let facilitator = RemoteFacilitator::builder(env::var("FACILITATOR_URL")?).build().await?;
            let paywall = layer.facilitator(facilitator).vouchers(channels.clone()).build()?;
            serve(Router::new().route("/evaluate", post(async || "well done")).layer(paywall)).await?;
            channels.claim_all().await?;
        }
        "verdicts_by_voucher" => {
            let key = key::from_env("SETTLEMENT_PRIVATE_KEY")?;
            let card = AgentCard::builder("Reasons", env::var("CARD_URL")?)
                .skill("reasoning", "Says whether an answer gives reasons", Score::MAX)
                .price("$0.001")
                .pay_to(Network::BASE_SEPOLIA, key.address());
            let card = card.build()?.sign(&key).await?;
            let judge =
                output_judge(async |_task, _output| Ok(Verdict::new(Score::MAX, Confidence::new(0.9)?, "it does")));
            let evaluator = EvaluatorService::builder(card, judge).facilitator(on_base::on_base().await?);
            let evaluator = verdicts_by_voucher::with_vouchers(evaluator).await?.build()?;
            serve(Router::new().fallback_service(evaluator)).await?;
        }
        "audits" => {
            let student = lessons::with_lessons(student()?, key::from_env("STUDENT_PRIVATE_KEY")?).build()?;
            student.discover().await;
            let task = Task::new("arithmetic", "What is 17 * 23?")?;
            let answers = Submission::group(task, ["391", "381"])?;
            audits::audit(&student, &student.evaluate(&answers).await?).await?;
            let spending = student.spending();
            println!(
                "{} audits, {} of {} pairs right",
                spending.audits, spending.accounts[0].right, spending.accounts[0].pairs
            );
        }
        "learning" => println!("version {:?}", learning::judge()?.version()),
        "reports" => {
            let student = student()?.reports(EvidenceLog::in_memory(100)).build()?;
            let mut reputation = Reputation::new(100, []);
            reports::read_reports(&student, &mut reputation, &DirectoryClient::new(env::var("DIRECTORY_URL")?)?)
                .await?;
            println!("{} reports", student.reports().len());
        }
        "environment" => {
            let student = student()?.build()?;
            student.discover().await;
            environment::environment(student).await?;
        }
        _ => return Err("name a program or a part of one; main.rs lists them".into()),
    }
    Ok(())
}

/// Serves the handler and the prices of the guide on charging.
async fn sell_at_the_prices_of_charge() -> Result<(), Box<dyn Error>> {
    let facilitator = Arc::new(on_base::on_base().await?);
    let paywall = |layer: RequirePaymentLayerBuilder| {
        layer.pay_to(Network::BASE_SEPOLIA, PAYEE).facilitator(facilitator.clone()).build()
    };
    let app = Router::new()
        .route("/evaluate", post(who_paid::evaluate).layer(paywall(RequirePaymentLayer::builder().price("$0.001"))?))
        .route("/by_path", get(async || "well done").layer(paywall(prices::by_path())?))
        .route("/by_body", post(async || "well done").layer(paywall(prices::by_body())?))
        .nest("/browsers", cors::for_browsers(paywall(RequirePaymentLayer::builder().price("$0.001"))?));
    serve(app).await
}

async fn serve(app: Router) -> Result<(), Box<dyn Error>> {
    let listener = tokio::net::TcpListener::bind(env::var("LISTEN")?).await?;
    let mut stop = signal(SignalKind::terminate())?;
    axum::serve(listener, app)
        .with_graceful_shutdown(async move {
            stop.recv().await;
        })
        .await?;
    Ok(())
}

/// Returns a student that knows the evaluator at this URL. It is seeded, since one with other random numbers may keep its money.
fn student() -> Result<StudentBuilder, Box<dyn Error>> {
    let payer = Payer::builder(key::from_env("STUDENT_PRIVATE_KEY")?).build();
    Ok(Student::builder(payer).source(vec![env::var("EVALUATOR_URL")?.parse::<Url>()?]).tasks(100).seed(1))
}
