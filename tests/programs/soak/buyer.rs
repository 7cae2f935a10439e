//! A buyer with a bad connection: it signs once, and presents the payment until it has the answer.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use alloy_primitives::{Address, B256};
use axum::body::Body;
use futures_util::future::join_all;
use http::Request;

use super::dice::Dice;
use support::shop::{Answer, App, Customer, Purchase, demand, try_send};

/// The time after which an order counts as never answered.
const PATIENCE: Duration = Duration::from_secs(240);

/// The results of all buyers.
#[derive(Debug, Default)]
pub(crate) struct Bought {
    /// Payer and nonce of each order that was answered.
    pub(crate) paid: Vec<(u64, Address, B256)>,
    /// Orders without an answer, each with the last response.
    pub(crate) unanswered: Vec<(u64, String)>,
    /// The number of requests with a payment.
    pub(crate) presented: u64,
    pub(crate) disconnected: u64,
    pub(crate) answers: BTreeMap<String, u64>,
    pub(crate) time: Duration,
}

impl Bought {
    pub(crate) fn add(&mut self, other: Self) {
        self.paid.extend(other.paid);
        self.unanswered.extend(other.unanswered);
        self.presented += other.presented;
        self.disconnected += other.disconnected;
        for (status, count) in other.answers {
            *self.answers.entry(status).or_default() += count;
        }
    }
}

pub(crate) fn answer_to(n: u64) -> String {
    format!("answer to {n}")
}

fn order(n: u64) -> Request<Body> {
    Request::post(format!("/work?n={n}")).body(Body::from(n.to_string())).unwrap()
}

/// Places the n-th order.
pub(crate) async fn buy(app: &App, customer: &Customer, n: u64, dice: &mut Dice, bought: &mut Bought) {
    let deadline = Instant::now() + PATIENCE;
    let purchase = customer.sign(&demand(&send(app, order(n)).await.unwrap()), 0);
    let mut said = String::new();
    while Instant::now() < deadline {
        let copies = if dice.one_in(12) { dice.of(2..6) } else { 1 };
        bought.presented += copies;
        let sent = join_all((0..copies).map(|_| send(app, purchase.on(order(n)))));
        let answers = if dice.one_in(8) {
            let Ok(answers) = tokio::time::timeout(dice.millis(0..400), sent).await else {
                bought.disconnected += 1;
                continue;
            };
            answers
        } else {
            sent.await
        };
        let mut is_answered = false;
        for answer in answers {
            // The connection broke.
            let Ok(answer) = answer else { continue };
            *bought.answers.entry(kind(&answer)).or_default() += 1;
            match answer.status.as_u16() {
                200 => {
                    check(&answer, n, &purchase);
                    is_answered = true;
                }
                _ => said = kind(&answer),
            }
        }
        if is_answered {
            bought.paid.push((n, purchase.authorization.from, purchase.authorization.nonce));
            return;
        }
        tokio::time::sleep(dice.millis(20..600)).await;
    }
    bought.unanswered.push((n, said));
}

/// The status, and the reason where there is one.
fn kind(answer: &Answer) -> String {
    match answer.status.as_u16() {
        status @ (200 | 500) => status.to_string(),
        status => format!("{status} {}", answer.reason()),
    }
}

fn check(answer: &Answer, n: u64, purchase: &Purchase) {
    assert_eq!(answer.text(), answer_to(n), "everybody gets the answer to the own question");
    let settlement = answer.settlement().unwrap();
    assert_eq!(settlement["success"], true, "{settlement}");
    let payer: Address = settlement["payer"].as_str().unwrap().parse().unwrap();
    assert_eq!(payer, purchase.authorization.from);
}

async fn send(app: &App, request: Request<Body>) -> Result<Answer, tower::BoxError> {
    use http_body_util::BodyExt as _;
    let (parts, body) = try_send(app, request).await?.into_parts();
    Ok(Answer { status: parts.status, headers: parts.headers, body: body.collect().await?.to_bytes() })
}
