//! Who has shown no money holds nothing: no permit that payers need, and no memory for a body. Who has the price of one request holds little.

mod permits;
mod rooms;

use std::{
    convert::Infallible,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    task::{Context, Poll},
};

use alloy_primitives::B256;
use alloy_signer_local::PrivateKeySigner;
use axum::body::Body;
use bytes::Bytes;
use futures_util::{StreamExt as _, stream};
use http::{Request, StatusCode};
use http_body::Frame;
use serde_json::json;
use support::{
    escrow::Channel,
    eventually::eventually,
    scripted,
    shop::{Answer, App, Purchase, demand, evaluate, send},
    world::{COST, DEPOSIT, World, by_voucher, offer, payment},
};
use tokio::sync::Semaphore;
use tower::BoxError;
use tower_x402::{
    ledger::Settlement,
    protocol::PaymentFlow,
    server::{RequirePaymentLayerBuilder, VerifiedPayment},
    vouchers::ChannelConfig,
};

/// How many requests may be worked on at once.
const PLACES: usize = 64;

/// An eighth of the places.
const ROOM_OF_ONE: usize = 8;

/// A mebibyte of a body, for as long as somebody holds it.
struct Piece(Vec<u8>, Arc<Held>);

impl AsRef<[u8]> for Piece {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl Drop for Piece {
    fn drop(&mut self) {
        self.1.now.fetch_sub(1, Ordering::SeqCst);
    }
}

/// How many pieces are held now, and how many were at most.
#[derive(Default)]
struct Held {
    now: AtomicU64,
    most: AtomicU64,
}

/// A body that sends a mebibyte, and then nothing more.
struct Standing {
    held: Arc<Held>,
    begun: bool,
}

impl http_body::Body for Standing {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        if std::mem::replace(&mut self.begun, true) {
            return Poll::Pending;
        }
        let now = self.held.now.fetch_add(1, Ordering::SeqCst) + 1;
        self.held.most.fetch_max(now, Ordering::SeqCst);
        let piece = Piece(vec![7; (1 << 20) - 1], self.held.clone());
        Poll::Ready(Some(Ok(Frame::data(Bytes::from_owner(piece)))))
    }
}

fn stalled(held: &Arc<Held>) -> Request<Body> {
    let body = Standing { held: held.clone(), begun: false };
    Request::post("/evaluate?k=1").body(Body::new(body)).expect("a request")
}

/// A channel into which nothing was paid, of a payer that has nothing.
fn unfunded(world: &World, salt: u8) -> Channel {
    let (payer, voucher_key) = (PrivateKeySigner::random(), PrivateKeySigner::random());
    let config = ChannelConfig {
        payer: payer.address(),
        payer_authorizer: voucher_key.address(),
        receiver: world.shop.pay_to,
        receiver_authorizer: world.authorizer.address(),
        token: world.shop.asset.address,
        withdraw_delay: 900,
        salt: B256::repeat_byte(salt),
    };
    Channel { config, payer, voucher_key, authorizer: world.authorizer.clone() }
}

/// Payments of each kind by payers without money.
pub(super) async fn worthless(world: &World, app: &App, number: usize) -> serde_json::Value {
    let (channel, customer) = (unfunded(world, 1), scripted::customer());
    match number % 5 {
        0 => by_voucher(app, &channel, COST).await,
        1 => payment("refund", &offer(app, "a").await, &channel, 0).await,
        2 => {
            let mut payment = payment("deposit", &offer(app, "a").await, &channel, COST).await;
            payment["payload"]["deposit"] = json!(world.sign_deposit(&channel, DEPOSIT).await);
            payment
        }
        // The two flows of `exact`.
        flow => customer.sign(&demand(&send(app, evaluate("a")).await), flow - 3).payload(),
    }
}

fn both_flows(layer: RequirePaymentLayerBuilder) -> RequirePaymentLayerBuilder {
    layer.flow(PaymentFlow::Authorization).flow(PaymentFlow::Upfront).max_concurrent(PLACES)
}

/// How many requests one payer sends whose bodies stand still, to a seller that serves sixteen at once.
const STALLED: usize = 40;

async fn is_submitted(world: &World, purchase: &Purchase) {
    eventually("the first is submitted", async || {
        let record = world.shop.record(&purchase.authorization).await;
        record.is_some_and(|record| record.settlement == Settlement::Submitted)
    })
    .await;
}

/// Cannot do what is asked of it with "bad", or with a body of this file's pieces.
async fn failing_at_bad(_: VerifiedPayment, body: Bytes) -> Result<http::Response<Body>, BoxError> {
    let is_bad = body == "bad" || body.first() == Some(&7);
    let status = if is_bad { StatusCode::UNPROCESSABLE_ENTITY } else { StatusCode::OK };
    Ok(http::Response::builder().status(status).body(Body::from(if is_bad { Bytes::new() } else { body })).unwrap())
}

/// A seller whose handler holds requests for "held" until it is told to go on, and whose other answers stream without an end if asked so.
fn holding(world: &World) -> (App, Arc<Semaphore>) {
    holding_with(world, |layer| layer)
}

fn holding_with(
    world: &World,
    change: impl FnOnce(RequirePaymentLayerBuilder) -> RequirePaymentLayerBuilder,
) -> (App, Arc<Semaphore>) {
    let go_on = Arc::new(Semaphore::new(0));
    let waits = go_on.clone();
    let layer = change(world.shop.layer()).max_concurrent(PLACES).vouchers(world.channels.clone());
    let app = world.shop.app_with(layer, move |_, body| {
        let waits = waits.clone();
        async move {
            let pieces = stream::iter([Ok::<_, Infallible>(body.clone())]);
            Ok(http::Response::new(match &body[..] {
                b"stream" => Body::from_stream(pieces.chain(stream::pending())),
                b"held" => {
                    drop(waits.acquire().await);
                    Body::from(body)
                }
                _ => Body::from(body),
            }))
        }
    });
    (app, go_on)
}

/// How many of these requests are answered.
fn finished(requests: &[tokio::task::JoinHandle<Answer>]) -> usize {
    requests.iter().filter(|request| request.is_finished()).count()
}

/// How many small requests one payer or channel has places for where they are waited for, or wait for others: an eighth of 128.
const WAITING_OF_ONE: usize = 16;
