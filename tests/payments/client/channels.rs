//! Payments by voucher, and sellers that answer them in every wrong way.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use alloy_primitives::{Address, B256};
use alloy_signer_local::PrivateKeySigner;
use axum::{
    body::Body,
    http::{HeaderMap, Method, StatusCode},
    response::Response,
};
use serde_json::{Value, json};
use tower_x402::{
    Clock as _, ManualClock, Network, Usdc,
    client::{
        Budget, ChannelEntry, ChannelFinding, ChannelPolicy, Journal, OfferRefusal, Payer, PaymentError,
        PaymentMiddleware, PaymentOutcome, Purchase, Receipt, ReceiptExt as _, Refusal, RetryPolicy, refund_channels,
    },
    protocol::{PaymentId, PaymentPayload, decode_header},
    vouchers::{ChannelPayload, Escrow, Voucher},
};

use super::middleware::refusal;
use support::{authorization::unix_now, script::*};

const PRICE: u64 = 1_000;

fn usdc(units: u64) -> Usdc {
    Usdc::from_atomic(units)
}

/// An offer of a channel, with `extra` changed.
fn channel_offer(change: &Value) -> Value {
    let mut offer = json!({
        "scheme": "batch-settlement", "network": "eip155:84532", "amount": PRICE.to_string(),
        "asset": Network::BASE_SEPOLIA.usdc().unwrap().address, "payTo": Address::repeat_byte(7),
        "maxTimeoutSeconds": 300,
        "extra": {
            "name": "USDC", "version": "2", "receiverAuthorizer": Address::repeat_byte(8), "withdrawDelay": 900,
            "minDeposit": "5000",
        },
    });
    for (field, value) in change.as_object().unwrap() {
        offer["extra"][field] = value.clone();
    }
    offer
}

fn demand(error: &str, offers: &[Value]) -> String {
    let resource = json!({ "url": "http://evaluator.example" });
    encode(json!({ "x402Version": 2, "error": error, "resource": resource, "accepts": offers }))
}

/// The same, of a seller that takes payment identifiers.
fn demand_naming(offers: &[Value]) -> String {
    let resource = json!({ "url": "http://evaluator.example" });
    let extensions: Value = PaymentId::extension().declared().into();
    encode(json!({ "x402Version": 2, "resource": resource, "accepts": offers, "extensions": extensions }))
}

/// A seller that has this clock.
async fn selling_by(clock: &Arc<ManualClock>, replies: Vec<Reply>) -> Server {
    let (clock, offers) = (clock.clone(), demand("Payment required", &[channel_offer(&json!({}))]));
    let required = move || {
        let date = std::time::UNIX_EPOCH + Duration::from_secs(clock.now());
        let mut response = required_402(&offers);
        response.headers_mut().insert("date", httpdate::fmt_http_date(date).parse().unwrap());
        response
    };
    Server::selling(required, replies).await
}

/// A 402 that refuses a payment with this code of the scheme.
fn refused(code: &str, change: Value) -> Reply {
    let header = demand(&format!("invalid_batch_settlement_evm_{code}"), &[channel_offer(&change)]);
    Box::new(move |_| Answer::Response(required_402(&header)))
}

fn report(status: u16, extra: Value) -> Reply {
    let report = json!({
        "success": true, "payer": PAYER.to_lowercase(), "transaction": "", "network": "eip155:84532", "amount": "",
        "extra": extra,
    });
    with_settlement(status, report)
}

fn charged(units: u64) -> Reply {
    report(200, json!({ "chargedAmount": units.to_string() }))
}

/// The same charge, after some milliseconds.
fn charged_late(units: u64, milliseconds: u64) -> Reply {
    let header = encode(json!({
        "success": true, "transaction": "", "network": "eip155:84532", "extra": { "chargedAmount": units.to_string() },
    }));
    Box::new(move |_| {
        let response = Response::builder().status(200).header("payment-response", header);
        Answer::Late(Duration::from_millis(milliseconds), response.body(Body::empty()).unwrap())
    })
}

/// The state of the channel of a payment that was seen, and the seller's newest voucher.
fn correction(seen: &Seen, charged: u64, voucher: &Voucher) -> Answer {
    let state = json!({
        "channelId": voucher.channel_id, "balance": "1000000", "totalClaimed": "0", "withdrawRequestedAt": 0,
        "refundNonce": "0", "chargedCumulativeAmount": charged.to_string(),
    });
    let proof = json!({
        "signedMaxClaimable": voucher.max_claimable_amount.to_string(), "signature": voucher.signature,
    });
    refused("cumulative_amount_mismatch", json!({ "channelState": state, "voucherState": proof }))(seen)
}

/// Says that this was charged, and shows the payer's own voucher.
fn corrected(charged: u64) -> Reply {
    Box::new(move |seen| {
        let voucher = voucher_of(&sent(seen.payment.as_ref().unwrap())).clone();
        correction(seen, charged, &voucher)
    })
}

/// A voucher of the channel of a payment that was seen, for this much, as the payer signs it.
fn signed(seen: &Seen, max: u64) -> Voucher {
    let payload = sent(seen.payment.as_ref().unwrap());
    let (escrow, channel_id) = (Escrow::on(Network::BASE_SEPOLIA), voucher_of(&payload).channel_id);
    let key: PrivateKeySigner = KEY.parse().unwrap();
    let signing = Voucher::sign(&escrow, channel_id, max.into(), &key);
    futures_util::FutureExt::now_or_never(signing).expect("a local key signs at once").unwrap()
}

fn sent(payment: &str) -> ChannelPayload {
    let payment: PaymentPayload<ChannelPayload> = decode_header(payment.as_bytes(), usize::MAX).unwrap();
    payment.payload.read().unwrap()
}

fn voucher_of(payload: &ChannelPayload) -> &Voucher {
    match payload {
        ChannelPayload::Deposit { voucher, .. } | ChannelPayload::Voucher { voucher, .. } => voucher,
        ChannelPayload::Refund(refund) => &refund.voucher,
        other => panic!("{other:?}"),
    }
}

/// What was paid, in order: the vouchers' ceilings, and the deposits.
fn paid(server: &Server) -> Vec<(u128, Option<u128>)> {
    let payments = server.payments();
    let payments = payments.iter().map(|payment| match sent(payment) {
        ChannelPayload::Deposit { voucher, deposit, .. } => (voucher.max_claimable_amount, Some(deposit.amount)),
        other => (voucher_of(&other).max_claimable_amount, None),
    });
    payments.collect()
}

/// How many deposits were signed.
fn deposits(server: &Server) -> usize {
    let payments = server.payments();
    let signed = payments.iter().filter_map(|payment| match sent(payment) {
        ChannelPayload::Deposit { deposit, .. } => Some(serde_json::to_string(&deposit).unwrap()),
        _ => None,
    });
    signed.collect::<BTreeSet<_>>().len()
}

struct Buyer {
    payer: Payer,
    server: Server,
}

impl Buyer {
    async fn at(offers: &[Value], replies: Vec<Reply>) -> Self {
        Self::with(ChannelPolicy::new(), offers, replies).await
    }

    async fn with(policy: ChannelPolicy, offers: &[Value], replies: Vec<Reply>) -> Self {
        let key: PrivateKeySigner = KEY.parse().unwrap();
        let budget = Budget::builder().total(usdc(1_000_000)).build();
        let payer = Payer::builder(key).budget(budget).vouchers(policy).build();
        Self { payer, server: Server::paid(demand("Payment required", offers), replies).await }
    }

    async fn of(replies: Vec<Reply>) -> Self {
        Self::at(&[channel_offer(&json!({}))], replies).await
    }

    /// A buyer with this limit per payment.
    async fn within(per_payment: u64, replies: Vec<Reply>) -> Self {
        let key: PrivateKeySigner = KEY.parse().unwrap();
        let budget = Budget::builder().per_payment(usdc(per_payment)).build();
        let payer = Payer::builder(key).budget(budget).vouchers(ChannelPolicy::new()).build();
        let offers = demand("Payment required", &[channel_offer(&json!({}))]);
        Self { payer, server: Server::paid(offers, replies).await }
    }

    /// The same, of a seller that takes payment identifiers and asks for this price.
    async fn naming(per_payment: u64, price: impl Fn() -> u64 + Send + Sync + 'static, replies: Vec<Reply>) -> Self {
        let Self { payer, .. } = Self::within(per_payment, Vec::new()).await;
        let required = move || {
            let mut offer = channel_offer(&json!({}));
            offer["amount"] = price().to_string().into();
            required_402(&demand_naming(&[offer]))
        };
        Self { payer, server: Server::selling(required, replies).await }
    }

    /// A buyer with a limit, with as many open lanes, in each of which one request was charged.
    async fn with_lanes(lanes: usize, per_payment: u64, replies: Vec<Reply>) -> Self {
        let mut all: Vec<_> = (0..lanes).map(|_| charged_late(1_000, 200)).collect();
        all.extend(replies);
        let buyer = Self::within(per_payment, all).await;
        for bought in futures_util::future::join_all((0..lanes).map(|_| buyer.buy())).await {
            assert_eq!(bought, (200, ACCEPTED, 1_000));
        }
        assert_eq!(buyer.payer.budget().journal().channels().len(), lanes);
        buyer
    }

    /// What the seller could claim by the vouchers of all payments but the first few, in all channels, in each of which so much was charged
    /// before.
    fn claimable(&self, skipped: usize, charged: u128) -> u128 {
        let mut ceilings = BTreeMap::new();
        for payment in &self.server.payments()[skipped..] {
            let payload = sent(payment);
            let Voucher { channel_id, max_claimable_amount, .. } = *voucher_of(&payload);
            let ceiling = ceilings.entry(channel_id).or_insert(charged);
            *ceiling = max_claimable_amount.max(*ceiling);
        }
        ceilings.values().map(|ceiling| ceiling - charged).sum()
    }

    async fn try_buy(&self) -> Result<(u16, Receipt), PaymentError> {
        self.try_buy_for("my answer").await
    }

    async fn try_buy_for(&self, body: &'static str) -> Result<(u16, Receipt), PaymentError> {
        let retry = RetryPolicy::default().attempt_timeout(Duration::from_millis(500));
        self.try_buy_with(retry.first_pause(Duration::from_millis(5)), body).await
    }

    async fn try_buy_with(&self, retry: RetryPolicy, body: &'static str) -> Result<(u16, Receipt), PaymentError> {
        let client = PaymentMiddleware::new(self.payer.clone()).retry(retry);
        let client = client.client(reqwest::Client::builder().no_proxy()).unwrap();
        match client.post(self.server.url()).body(body).send().await {
            Ok(response) => Ok((response.status().as_u16(), response.receipt().unwrap().clone())),
            Err(reqwest_middleware::Error::Middleware(error)) => Err(error.downcast().unwrap()),
            Err(error) => panic!("{error}"),
        }
    }

    async fn buy(&self) -> (u16, PaymentOutcome, u64) {
        let (status, receipt) = self.try_buy().await.unwrap();
        (status, receipt.outcome, receipt.amount.atomic())
    }

    async fn refusal(&self) -> Refusal {
        match self.try_buy().await {
            Err(PaymentError::Refused(refusal)) => refusal,
            other => panic!("{other:?}"),
        }
    }

    /// The channel's charges, doubt and escrow.
    fn books(&self) -> (u64, u64, u64) {
        let ChannelEntry { charged, doubt, escrow, .. } = self.payer.budget().journal().channels().remove(0);
        (charged.atomic(), doubt.atomic(), escrow.atomic())
    }
}

const ACCEPTED: PaymentOutcome = PaymentOutcome::Accepted;

/// A refusal after which the same voucher is sent again does not say that it is not charged then.
#[tokio::test]
async fn named_purchase_that_was_refused_at_first_is_paid_by_nothing_else() {
    for replies in [
        vec![refused("channel_busy", json!({})), cut()],
        vec![cut(), refused("channel_busy", json!({}))],
        vec![refused("rpc_read_failed", json!({})), charged(1_000)],
    ] {
        let attempts = replies.len() as u32;
        let path = TempPath::new("refused");
        let open = || {
            let budget = Budget::builder().journal(Journal::open(&path.0).unwrap()).build();
            let policy = ChannelPolicy::new().lanes(1);
            let payer =
                Payer::builder(KEY.parse::<PrivateKeySigner>().unwrap()).budget(budget).vouchers(policy).build();
            let retry = RetryPolicy::default().first_pause(Duration::from_millis(5)).max_attempts(attempts);
            PaymentMiddleware::new(payer).retry(retry).client(reqwest::Client::builder().no_proxy()).unwrap()
        };
        let server = Server::paid(demand("Payment required", &[channel_offer(&json!({}))]), replies).await;
        let order = || Purchase::named("order 17");
        let _ = open().post(server.url()).body("x").with_extension(order()).send().await;
        assert_eq!(server.payments().len(), attempts as usize);

        let server = Server::paid(required(&[offer(PRICE)]), vec![settled()]).await;
        let error = open().post(server.url()).body("x").with_extension(order()).send().await.unwrap_err();
        assert!(matches!(refusal(&error), Refusal::PurchaseOfChannel { .. }), "{error:?}");
        assert!(server.payments().is_empty());
    }
}

/// What was refused to its end is bought like anything else.
#[tokio::test]
async fn named_purchase_that_was_refused_may_be_paid_by_another_scheme() {
    let path = TempPath::new("refused-all");
    let open = || {
        let budget = Budget::builder().journal(Journal::open(&path.0).unwrap()).build();
        let payer = Payer::builder(KEY.parse::<PrivateKeySigner>().unwrap()).budget(budget);
        PaymentMiddleware::new(payer.vouchers(ChannelPolicy::new()).build())
            .client(reqwest::Client::builder().no_proxy())
            .unwrap()
    };
    let replies = vec![refused("withdraw_delay_out_of_range", json!({}))];
    let server = Server::paid(demand("Payment required", &[channel_offer(&json!({}))]), replies).await;
    let buy = async |server: &Server| {
        let request = open().post(server.url()).body("x").with_extension(Purchase::named("order 17"));
        request.send().await.unwrap().status()
    };
    assert_eq!(buy(&server).await, 402);
    let server = Server::paid(required(&[offer(PRICE)]), vec![settled()]).await;
    assert_eq!(buy(&server).await, 200);
}

#[tokio::test]
async fn vouchers_are_cumulative_and_start_from_what_was_charged() {
    let buyer = Buyer::of(vec![charged(1_000), charged(300), charged(0), report(200, json!({}))]).await;
    for cost in [1_000, 300, 0, 0] {
        assert_eq!(buyer.buy().await, (200, ACCEPTED, cost));
    }
    assert_eq!(paid(&buyer.server), [(1_000, Some(5_000)), (2_000, None), (2_300, None), (2_300, None)]);
    assert_eq!(buyer.books(), (1_300, 0, 5_000));
    let budget = buyer.payer.budget();
    assert_eq!((budget.spent(), budget.reserved()), (usdc(1_300), usdc(3_700)));
}

#[tokio::test]
async fn same_voucher_is_sent_again_while_no_answer_comes() {
    for failure in [silence(), cut(), status(502), later(503, None)] {
        let buyer = Buyer::of(vec![charged(1_000), failure, charged(1_000)]).await;
        for _ in 0..2 {
            assert_eq!(buyer.buy().await, (200, ACCEPTED, 1_000));
        }
        let payments = buyer.server.payments();
        assert_eq!((payments.len(), &payments[1]), (3, &payments[2]));
        assert_eq!(buyer.books(), (2_000, 0, 5_000));
    }
}

#[tokio::test]
async fn request_on_a_busy_channel_is_sent_again_there_if_it_may_be_worked_on_or_there_is_no_other_channel() {
    let busy = || refused("channel_busy", json!({}));
    for (lanes, failures) in [(8, vec![cut(), busy()]), (1, vec![busy(), busy()])] {
        let mut replies = vec![charged(1_000)];
        replies.extend(failures);
        replies.push(charged(1_000));
        let buyer = Buyer::with(ChannelPolicy::new().lanes(lanes), &[channel_offer(&json!({}))], replies).await;
        for _ in 0..2 {
            assert_eq!(buyer.buy().await, (200, ACCEPTED, 1_000));
        }
        assert_eq!(paid(&buyer.server), [(1_000, Some(5_000)), (2_000, None), (2_000, None), (2_000, None)]);
        assert_eq!(buyer.books(), (2_000, 0, 5_000));
    }
}

#[tokio::test]
async fn voucher_on_a_busy_channel_stays_in_the_books_and_the_budget_may_leave_no_other_channel() {
    let busy = || refused("channel_busy", json!({}));
    let buyer = Buyer::of(vec![charged(1_000), busy(), charged(1_000)]).await;
    for _ in 0..2 {
        assert_eq!(buyer.buy().await, (200, ACCEPTED, 1_000));
    }
    assert_eq!(paid(&buyer.server), [(1_000, Some(5_000)), (2_000, None), (1_000, Some(5_000))]);
    let channels = buyer.payer.budget().journal().channels();
    let mut books: Vec<_> = channels.iter().map(|entry| (entry.charged, entry.doubt, entry.left)).collect();
    books.sort_unstable();
    assert_eq!(books, [(usdc(1_000), usdc(0), usdc(0)), (usdc(1_000), usdc(0), usdc(1_000))]);

    let key: PrivateKeySigner = KEY.parse().unwrap();
    let budget = Budget::builder().total(usdc(5_500)).build();
    let payer = Payer::builder(key).budget(budget).vouchers(ChannelPolicy::new()).build();
    let offers = demand("Payment required", &[channel_offer(&json!({}))]);
    let replies = vec![charged(1_000), busy(), busy(), charged(1_000)];
    let buyer = Buyer { payer, server: Server::paid(offers, replies).await };
    for _ in 0..2 {
        assert_eq!(buyer.buy().await, (200, ACCEPTED, 1_000));
    }
    assert_eq!(paid(&buyer.server), [(1_000, Some(5_000)), (2_000, None), (2_000, None), (2_000, None)]);
    assert_eq!(buyer.books(), (2_000, 0, 5_000));
}

/// The seller answers nothing but that the channel is busy, and could claim each voucher that it was sent.
#[tokio::test]
async fn lanes_that_a_seller_calls_busy_cost_no_more_than_one_request_may() {
    for (per_payment, lanes) in [(PRICE, 1), (3 * PRICE, 3), (8 * PRICE, 5)] {
        let busy = (0..30).map(|_| refused("channel_busy", json!({}))).collect();
        let buyer = Buyer::with_lanes(8, per_payment, busy).await;
        assert_eq!(buyer.buy().await, (402, PaymentOutcome::Failed, 1_000));
        assert_eq!(buyer.claimable(8, 1_000), u128::from(PRICE) * lanes, "limit {per_payment}");
        assert_eq!(buyer.server.payments().len(), 8 + 5, "as often as the payment may be sent");
    }
}

/// Whatever the limit per payment and the retry policy allow.
#[tokio::test]
async fn busy_channels_are_left_four_times_at_most() {
    let busy = (0..10).map(|_| refused("channel_busy", json!({}))).collect();
    let buyer = Buyer::with_lanes(8, 100 * PRICE, busy).await;
    let retry = RetryPolicy::default().max_attempts(10).first_pause(Duration::from_millis(1));
    let (status, receipt) = buyer.try_buy_with(retry, "my answer").await.unwrap();
    assert_eq!((status, receipt.outcome), (402, PaymentOutcome::Failed));
    assert_eq!(buyer.claimable(8, 1_000), u128::from(5 * PRICE));
}

/// The seller calls the channel busy, is paid on another one, and later shows that it charged in both.
#[tokio::test]
async fn charge_of_a_request_that_was_refused_as_busy_is_a_finding_and_counts_as_spent() {
    let clock = Arc::new(ManualClock::at(unix_now()));
    let payer = Payer::builder(KEY.parse::<PrivateKeySigner>().unwrap()).clock(clock.clone());
    let payer = payer.vouchers(ChannelPolicy::new()).build();
    let busy = refused("channel_busy", json!({}));
    let replies =
        vec![charged(1_000), busy, charged(1_000), corrected(2_000), charged(1_000), charged(1_000), charged(1_000)];
    let server = Server::paid(demand("Payment required", &[channel_offer(&json!({}))]), replies).await;
    let buyer = Buyer { payer, server };
    buyer.buy().await;
    let receipt = buyer.try_buy().await.unwrap().1.channel.unwrap();
    assert_eq!((receipt.price, receipt.left, receipt.finding), (usdc(1_000), usdc(1_000), None));
    clock.advance(30);
    let (status, receipt) = buyer.try_buy().await.unwrap();
    assert_eq!((status, receipt.outcome, receipt.amount), (200, ACCEPTED, usdc(1_000)));
    assert_eq!(receipt.channel.unwrap().finding, Some(ChannelFinding::ChargedRefused { charged: usdc(1_000) }));
    assert_eq!(buyer.payer.budget().spent(), usdc(4_000), "three answers and what was charged without one");
    let receipt = buyer.try_buy().await.unwrap().1;
    assert_eq!((receipt.channel.unwrap().finding, buyer.payer.budget().spent()), (None, usdc(5_000)));
}

#[tokio::test]
async fn request_without_an_answer_is_in_doubt_although_an_earlier_attempt_was_refused() {
    let mut replies = vec![charged(1_000), refused("channel_busy", json!({}))];
    replies.extend((0..4).map(|_| cut()));
    replies.extend([corrected(2_000), charged(1_000)]);
    let buyer = Buyer::with(ChannelPolicy::new().lanes(1), &[channel_offer(&json!({}))], replies).await;
    buyer.buy().await;
    assert_eq!(buyer.try_buy().await.unwrap_err().outcome(), PaymentOutcome::Unknown);
    assert_eq!(buyer.books(), (1_000, 1_000, 5_000));
    let (status, receipt) = buyer.try_buy_for("another answer").await.unwrap();
    assert_eq!((status, receipt.outcome, receipt.channel.unwrap().finding), (200, ACCEPTED, None));
    assert_eq!(buyer.books(), (3_000, 0, 5_000));
}

#[tokio::test]
async fn request_is_signed_again_no_more_often_than_it_may_be_sent() {
    let retry = RetryPolicy::default().max_attempts(1);
    let buyer = Buyer::of(vec![charged(1_000), corrected(400), charged(1_000), charged(1_000)]).await;
    buyer.buy().await;
    let (status, receipt) = buyer.try_buy_with(retry, "my answer").await.unwrap();
    assert_eq!((status, receipt.outcome), (402, PaymentOutcome::Failed));
    assert_eq!((buyer.server.payments().len(), buyer.books().0), (2, 400), "what it learned is kept");
    let (status, receipt) = buyer.try_buy_with(retry, "my answer").await.unwrap();
    assert_eq!((status, receipt.outcome), (200, ACCEPTED));
    assert_eq!(paid(&buyer.server), [(1_000, Some(5_000)), (2_000, None), (1_400, None)]);
}

/// The voucher that it shows is that of this very request. After the loss of a journal it may look the same.
#[tokio::test]
async fn first_voucher_that_a_seller_refuses_proves_no_earlier_charge() {
    for (per_payment, expected) in [(PRICE, vec![1_000]), (2 * PRICE, vec![1_000, 2_000])] {
        let buyer = Buyer::within(per_payment, vec![corrected(1_000), charged(1_000)]).await;
        buyer.try_buy().await.unwrap();
        let ceilings: Vec<_> = paid(&buyer.server).iter().map(|(ceiling, _)| *ceiling).collect();
        assert_eq!(ceilings, expected);
        let spent = buyer.payer.budget().spent().atomic();
        assert_eq!(buyer.claimable(0, 0), u128::from(spent), "it counts as spent");
    }
}

/// Gives the answer of an earlier voucher again, after which so much was charged in all.
fn given_again(charged: u64) -> Reply {
    let state = json!({ "chargedCumulativeAmount": charged.to_string() });
    report(200, json!({ "chargedAmount": "1000", "channelState": state }))
}

/// However the seller explains what it charged: if no earlier request did cost it, this one may have.
#[tokio::test]
async fn request_with_a_lost_answer_costs_no_more_than_the_limit_per_payment() {
    let no_deposit = || refused("receive_authorization_signature", json!({}));
    for (per_payment, replies, expected) in [
        (PRICE, vec![status(503), corrected(1_000), given_again(1_000)], vec![1_000; 3]),
        (PRICE, vec![status(503), no_deposit(), corrected(1_000), given_again(1_000)], vec![1_000; 4]),
        (2 * PRICE, vec![status(503), corrected(1_000), charged(1_000)], vec![1_000, 1_000, 2_000]),
    ] {
        let buyer = Buyer::naming(per_payment, || PRICE, replies).await;
        assert_eq!(buyer.buy().await, (200, ACCEPTED, 1_000));
        let ceilings: Vec<_> = paid(&buyer.server).iter().map(|(ceiling, _)| *ceiling).collect();
        assert_eq!(ceilings, expected);
        assert_eq!(buyer.payer.budget().spent().atomic(), u64::try_from(expected[expected.len() - 1]).unwrap());
    }
}

#[tokio::test]
async fn cheap_request_without_an_answer_does_not_explain_the_charge_of_a_dear_one() {
    let price = Arc::new(AtomicU64::new(PRICE));
    let mut replies = vec![charged(1_000)];
    replies.extend((0..5).map(|_| cut()));
    replies.extend([status(503), corrected(2_000), given_again(2_000)]);
    let asked = price.clone();
    let buyer = Buyer::naming(PRICE, move || asked.load(Ordering::SeqCst), replies).await;
    buyer.buy().await;
    price.store(1, Ordering::SeqCst);
    assert_eq!(buyer.try_buy().await.unwrap_err().outcome(), PaymentOutcome::Unknown);
    assert_eq!(buyer.books(), (1_000, 1, 5_000));
    price.store(PRICE, Ordering::SeqCst);
    let (status, receipt) = buyer.try_buy_for("another answer").await.unwrap();
    assert_eq!((status, receipt.outcome, receipt.amount), (200, ACCEPTED, usdc(1_000)));
    assert_eq!(buyer.claimable(0, 0), 2_000, "what was charged");
    assert_eq!(buyer.books(), (2_000, 0, 5_000));
}

#[tokio::test]
async fn named_purchase_that_was_charged_before_a_restart_costs_no_more_than_the_limit_per_payment() {
    let path = TempPath::new("charged-before");
    let server = {
        let replies = vec![cut(), corrected(1_000), given_again(1_000)];
        let required = demand_naming(&[channel_offer(&json!({}))]);
        Server::paid(required, replies).await
    };
    for (attempts, expected) in [(1, None), (5, Some(200))] {
        let journal = Journal::open(&path.0).unwrap();
        let budget = Budget::builder().per_payment(usdc(PRICE)).journal(journal).build();
        let payer = Payer::builder(KEY.parse::<PrivateKeySigner>().unwrap()).budget(budget);
        let client = PaymentMiddleware::new(payer.vouchers(ChannelPolicy::new()).build())
            .retry(RetryPolicy::default().first_pause(Duration::from_millis(5)).max_attempts(attempts))
            .client(reqwest::Client::builder().no_proxy())
            .unwrap();
        let request = client.post(server.url()).body("x").with_extension(Purchase::named("order 17"));
        assert_eq!(request.send().await.ok().map(|response| response.status().as_u16()), expected);
    }
    let ceilings: Vec<_> = paid(&server).iter().map(|(ceiling, _)| *ceiling).collect();
    assert_eq!(ceilings, [1_000; 3]);
}

#[tokio::test]
async fn report_counts_whatever_the_status() {
    let buyer = Buyer::of(vec![report(500, json!({ "chargedAmount": "0" })), charged(1_000)]).await;
    assert_eq!(buyer.buy().await, (500, ACCEPTED, 0), "the deposit arrived and the handler failed");
    assert_eq!(buyer.books(), (0, 0, 5_000));
    assert_eq!(buyer.buy().await, (200, ACCEPTED, 1_000));
    assert_eq!(paid(&buyer.server), [(1_000, Some(5_000)), (1_000, None)]);
}

#[tokio::test]
async fn report_that_contradicts_the_books_changes_nothing() {
    let state =
        |charged: &str| json!({ "chargedAmount": "1000", "channelState": { "chargedCumulativeAmount": charged } });
    for extra in [
        json!({ "chargedAmount": "1001" }),
        json!({ "chargedAmount": "-1" }),
        json!({ "chargedAmount": "1e3" }),
        json!({ "chargedAmount": 1_000 }),
        json!({ "chargedAmount": "340282366920938463463374607431768211457" }),
        state("1999"),
        state("3000"),
        json!({ "chargedAmount": "1000", "channelState": { "channelId": B256::ZERO } }),
    ] {
        let buyer = Buyer::of(vec![charged(1_000), report(200, extra.clone()), charged(1_000)]).await;
        buyer.buy().await;
        let (status, receipt) = buyer.try_buy().await.unwrap();
        assert_eq!((status, receipt.outcome), (200, PaymentOutcome::Unknown), "{extra}");
        let finding = receipt.channel.unwrap().finding.expect("it says what is wrong");
        let is_price = matches!(finding, ChannelFinding::ChargedAbovePrice { .. });
        assert_eq!(is_price, extra.get("channelState").is_none(), "{extra}: {finding}");
        assert_eq!(buyer.books(), (1_000, 1_000, 5_000), "{extra}");
        assert_eq!(buyer.buy().await, (200, ACCEPTED, 1_000));
        assert_eq!(buyer.books(), (2_000, 0, 5_000));
    }
}

#[tokio::test]
async fn sellers_numbers_are_not_copied() {
    let state = json!({ "balance": "999999999", "totalClaimed": "5", "chargedCumulativeAmount": "1000" });
    let first = report(200, json!({ "chargedAmount": "1000", "channelState": state }));
    let buyer = Buyer::of(vec![first]).await;
    buyer.buy().await;
    assert_eq!(buyer.books(), (1_000, 0, 5_000));
}

#[tokio::test]
async fn earlier_request_that_was_charged_is_learned_from_the_seller() {
    let lost = || -> Vec<Reply> { (0..5).map(|_| cut()).collect() };
    let mut replies = vec![charged(1_000)];
    replies.extend(lost());
    replies.extend([corrected(1_700), charged(1_000)]);
    let buyer = Buyer::of(replies).await;
    buyer.buy().await;
    assert_eq!(buyer.try_buy().await.unwrap_err().outcome(), PaymentOutcome::Unknown);
    assert_eq!(buyer.books(), (1_000, 1_000, 5_000));
    let (status, receipt) = buyer.try_buy_for("another answer").await.unwrap();
    assert_eq!((status, receipt.outcome, receipt.amount), (200, ACCEPTED, usdc(1_000)));
    assert_eq!(buyer.books(), (2_700, 0, 5_000));
    assert_eq!(paid(&buyer.server).last(), Some(&(2_700, None)));
}

#[tokio::test]
async fn request_whose_answer_is_lost_is_not_paid_for_twice() {
    let buyer = Buyer::of(vec![charged(1_000), cut(), corrected(2_000)]).await;
    buyer.buy().await;
    let (status, receipt) = buyer.try_buy().await.unwrap();
    assert_eq!((status, receipt.outcome, receipt.amount), (402, ACCEPTED, usdc(1_000)));
    assert!(receipt.reason.unwrap().contains("lost"));
    assert_eq!((buyer.server.payments().len(), buyer.books()), (3, (2_000, 0, 5_000)));
    // A seller that did not charge it gets it paid.
    let buyer = Buyer::of(vec![charged(1_000), cut(), corrected(1_000), charged(1_000)]).await;
    buyer.buy().await;
    assert_eq!(buyer.buy().await, (200, ACCEPTED, 1_000));
    assert_eq!((buyer.server.payments().len(), buyer.books()), (4, (2_000, 0, 5_000)));
}

#[tokio::test]
async fn status_without_a_report_leaves_doubt_unless_it_refuses_the_request() {
    let failed = PaymentOutcome::Failed;
    for (code, outcome, doubt) in [
        (301, failed, 0),
        (404, failed, 0),
        (408, PaymentOutcome::Unknown, 1_000),
        (409, PaymentOutcome::Unknown, 1_000),
        (200, PaymentOutcome::Unknown, 1_000),
    ] {
        let buyer = Buyer::of(vec![charged(1_000), status(code), charged(1_000)]).await;
        buyer.buy().await;
        assert_eq!(buyer.buy().await, (code, outcome, 1_000));
        assert_eq!((buyer.server.payments().len(), buyer.books()), (2, (1_000, doubt, 5_000)), "{code}");
    }
}

#[tokio::test]
async fn deposit_that_a_facilitator_failed_to_make_is_sent_again() {
    let failed = |code: &str| {
        let reason = format!("invalid_batch_settlement_evm_{code}");
        with_settlement(
            402,
            json!({ "success": false, "errorReason": reason, "transaction": "", "network": "eip155:84532" }),
        )
    };
    let buyer = Buyer::of(vec![failed("deposit_transaction_failed"), charged(1_000)]).await;
    assert_eq!(buyer.buy().await, (200, ACCEPTED, 1_000));
    assert_eq!(paid(&buyer.server), [(1_000, Some(5_000)); 2]);
    assert_eq!(buyer.server.payments()[0], buyer.server.payments()[1], "the same deposit");
    let buyer = Buyer::of(vec![failed("receiver_mismatch"), charged(1_000)]).await;
    assert_eq!(buyer.buy().await.1, PaymentOutcome::Failed);
    assert_eq!(buyer.server.payments().len(), 1);
}

#[tokio::test]
async fn exact_is_paid_first_and_then_channels_at_every_price() {
    let offers = |price: u64| {
        let mut channel = channel_offer(&json!({}));
        channel["amount"] = price.to_string().into();
        [channel, serde_json::to_value(offer(price).to_requirements()).unwrap()]
    };
    let schemes = |server: &Server| -> Vec<String> {
        server.payments().iter().map(|payment| decode(payment).accepted.read().unwrap().scheme).collect()
    };
    let replies = vec![settled(), settled(), charged(1_000), charged(1_000)];
    let buyer = Buyer::with(ChannelPolicy::default().exact_first(2), &offers(PRICE), replies).await;
    for _ in 0..4 {
        buyer.try_buy().await.unwrap();
    }
    assert_eq!(schemes(&buyer.server), ["exact", "exact", "batch-settlement", "batch-settlement"]);
    // Two payments at this price would be more than what was paid to the payee, but there is a channel.
    let server = Server::paid(demand("Payment required", &offers(9_000)), vec![charged(9_000)]).await;
    let dearer = Buyer { payer: buyer.payer.clone(), server };
    dearer.try_buy().await.unwrap();
    assert_eq!(schemes(&dearer.server), ["batch-settlement"]);
}

#[tokio::test]
async fn voucher_key_and_salt_of_the_policy_make_the_channel() {
    let key = PrivateKeySigner::random();
    let salt = B256::repeat_byte(5);
    let policy = ChannelPolicy::new().voucher_key(key.clone()).salt(salt);
    let buyer = Buyer::with(policy, &[channel_offer(&json!({}))], vec![charged(1_000)]).await;
    assert_eq!(buyer.buy().await, (200, ACCEPTED, 1_000));
    let ChannelPayload::Deposit { channel_config, voucher, .. } = sent(&buyer.server.payments()[0]) else { panic!() };
    let config = (channel_config.payer.to_string(), channel_config.payer_authorizer, channel_config.salt);
    assert_eq!(config, (PAYER.to_owned(), key.address(), salt));
    assert_eq!(voucher.signer(&Escrow::on(Network::BASE_SEPOLIA)), Some(key.address()));
}

#[tokio::test]
async fn payment_that_no_seller_would_read_is_not_sent() {
    // With its payload the offer is longer than a payment header may be.
    let buyer = Buyer::at(&[channel_offer(&json!({ "note": "x".repeat(11_500) }))], vec![charged(1_000)]).await;
    let error = buyer.try_buy().await.unwrap_err();
    assert!(matches!(error, PaymentError::Encode(_)), "{error:?}");
    assert_eq!((buyer.server.payments().len(), buyer.payer.budget().reserved()), (0, Usdc::ZERO));
}

/// Each request that waits for its answer holds one.
#[tokio::test]
async fn future_of_a_payment_has_no_room_for_what_only_vouchers_need() {
    let buyer = Buyer::of(Vec::new()).await;
    let (url, headers) = (buyer.server.url().parse().unwrap(), HeaderMap::new());
    let size = std::mem::size_of_val(&buyer.payer.pay(&Method::POST, &url, &headers, None));
    assert!(size <= 4_096, "{size} bytes");
}

#[tokio::test]
async fn refund_request_that_no_seller_would_read_is_not_signed() {
    let buyer = Buyer::of(vec![charged(1_000)]).await;
    buyer.buy().await;
    let id = buyer.payer.budget().journal().channels()[0].id();
    let mut refund = buyer.payer.refund(id, None).await.unwrap().expect("something is left");
    let signed = refund.header().clone();
    // The seller wants its present offer accepted, which leaves no room for a payload.
    let present = demand("invalid_payment_requirements", &[channel_offer(&json!({ "note": "x".repeat(11_500) }))]);
    let error = refund.answered(StatusCode::PAYMENT_REQUIRED, required_402(&present).headers()).await.unwrap_err();
    assert!(matches!(error, PaymentError::Encode(_)), "{error:?}");
    assert_eq!(refund.header(), &signed, "the one that was sent before");
}

#[tokio::test]
async fn request_waits_for_a_lane_for_a_minute() {
    let policy = ChannelPolicy::new().lanes(1);
    let buyer = Buyer::with(policy, &[channel_offer(&json!({}))], vec![charged(1_000)]).await;
    buyer.buy().await;
    let id = buyer.payer.budget().journal().channels()[0].id();
    // A request for a refund has the lane.
    let refund = buyer.payer.refund(id, None).await.unwrap().expect("something is left");
    tokio::time::pause();
    let started = tokio::time::Instant::now();
    assert!(matches!(buyer.refusal().await, Refusal::LanesBusy { .. }));
    assert_eq!(started.elapsed().as_secs(), 60);
    drop(refund);
    assert_eq!(buyer.server.payments().len(), 1);
}

#[tokio::test]
async fn idle_channels_of_the_payer_are_refunded() {
    let clock = Arc::new(ManualClock::at(unix_now()));
    let budget = Budget::builder().total(usdc(1_000_000)).build();
    let payer = |key: PrivateKeySigner| {
        Payer::builder(key).budget(budget.clone()).clock(clock.clone()).vouchers(ChannelPolicy::new()).build()
    };
    let refunded = with_settlement(
        200,
        json!({ "success": true, "transaction": "", "network": "eip155:84532", "amount": "4600", "extra": {} }),
    );
    // The seller has nothing to give at first. Then it wants its present offer accepted, and has charged less than the buyer knows.
    let changed = demand("invalid_payment_requirements", &[channel_offer(&json!({}))]);
    let changed: Reply = Box::new(move |_| Answer::Response(required_402(&changed)));
    let replies = vec![charged(1_000), refused("refund_no_balance", json!({})), changed, corrected(400), refunded];
    let server = Server::paid(demand("Payment required", &[channel_offer(&json!({}))]), replies).await;
    let buyer = Buyer { payer: payer(KEY.parse().unwrap()), server };
    buyer.buy().await;
    let refunds = async |payer: &Payer| {
        let client = reqwest::Client::builder().no_proxy();
        refund_channels(payer, Duration::from_secs(600), client).await.unwrap()
    };
    clock.advance(599);
    assert_eq!(refunds(&buyer.payer).await, []);
    clock.advance(1);
    assert_eq!(refunds(&payer(PrivateKeySigner::random())).await, [], "it is the money of another payer");
    let nothing = refunds(&buyer.payer).await.remove(0);
    assert_eq!((nothing.amount, nothing.finding), (Usdc::ZERO, None));
    assert_eq!(nothing.reason.as_deref(), Some("invalid_batch_settlement_evm_refund_no_balance"));
    assert_eq!(buyer.server.payments().len(), 2);
    let all = refunds(&buyer.payer).await.remove(0);
    assert_eq!((all.amount, all.reason, all.finding), (usdc(4_600), None, None));
    let ceilings: Vec<_> = paid(&buyer.server).iter().map(|(max, _)| *max).collect();
    assert_eq!(ceilings, [1_000, 1_000, 1_000, 1_000, 400]);
    assert_eq!(refunds(&buyer.payer).await, [], "nothing is left");
}

#[tokio::test]
async fn charge_that_the_books_exclude_is_a_dispute() {
    // The voucher that it shows does not cover it, so it is no proof.
    let buyer = Buyer::of(vec![charged(1_000), corrected(2_001)]).await;
    buyer.buy().await;
    let (status, receipt) = buyer.try_buy().await.unwrap();
    assert_eq!((status, receipt.outcome), (402, PaymentOutcome::Failed));
    assert_eq!(receipt.channel.unwrap().finding, Some(ChannelFinding::Unproven));

    // It refuses the request and says that it charged for it.
    let buyer = Buyer::of(vec![charged(1_000), corrected(1_500)]).await;
    buyer.buy().await;
    let (status, receipt) = buyer.try_buy().await.unwrap();
    let expected = ChannelFinding::ChargeNotInBooks { asserted: 1_500, limit: usdc(1_000) };
    assert_eq!((status, receipt.outcome), (402, PaymentOutcome::Failed));
    assert_eq!(receipt.channel.unwrap().finding, Some(expected.clone()));
    assert_eq!(buyer.books(), (1_000, 0, 5_000));
    assert!(matches!(buyer.refusal().await, Refusal::ChannelDisputed { finding, .. } if finding == expected));
    assert_eq!(buyer.server.payments().len(), 2, "nothing more is signed");
}

/// A claim publishes the voucher of a request that cost less than its price, and a stranger pays with the rest of it.
#[tokio::test]
async fn rest_of_a_voucher_that_a_stranger_used_counts_as_spent_and_the_channel_is_used_on() {
    let first = |units: u64| -> Reply {
        Box::new(move |seen: &Seen| {
            let voucher = signed(seen, units);
            correction(seen, units, &voucher)
        })
    };
    let buyer = Buyer::of(vec![charged(300), first(1_000), charged(1_000), charged(1_000)]).await;
    buyer.buy().await;
    let (status, receipt) = buyer.try_buy().await.unwrap();
    assert_eq!((status, receipt.outcome, receipt.amount), (200, ACCEPTED, usdc(1_000)), "{receipt:?}");
    let finding = receipt.channel.unwrap().finding;
    assert_eq!(format!("{finding:?}"), format!("Some(ChargedTheRest {{ charged: {:?} }})", usdc(700)));
    assert_eq!((buyer.books(), buyer.payer.budget().spent()), ((2_000, 0, 5_000), usdc(2_000)));
    assert_eq!(buyer.buy().await, (200, ACCEPTED, 1_000));
    let ceilings: Vec<_> = paid(&buyer.server).iter().map(|(ceiling, _)| *ceiling).collect();
    assert_eq!(ceilings, [1_000, 1_300, 2_000, 3_000]);

    // Not one unit more than was signed for it.
    let buyer = Buyer::of(vec![charged(300), corrected(1_001)]).await;
    buyer.buy().await;
    let finding = buyer.try_buy().await.unwrap().1.channel.unwrap().finding;
    let expected = ChannelFinding::ChargeNotInBooks { asserted: 1_001, limit: usdc(1_000) };
    assert_eq!(finding, Some(expected));
}

/// The seller charged less than the price of a request whose answer is lost, so that its voucher has a rest, too.
#[tokio::test]
async fn rest_of_a_voucher_whose_answer_was_lost_is_no_dispute_when_a_stranger_uses_it() {
    let mut replies = vec![charged(1_000)];
    replies.extend((0..5).map(|_| cut()));
    let used_up: Reply = Box::new(|seen: &Seen| correction(seen, 2_000, &signed(seen, 2_000)));
    replies.extend([corrected(1_300), used_up, charged(1_000)]);
    let buyer = Buyer::of(replies).await;
    buyer.buy().await;
    assert!(buyer.try_buy().await.is_err());
    assert_eq!(buyer.try_buy().await.unwrap().1.amount, usdc(300), "what the lost answer cost");
    let (status, receipt) = buyer.try_buy().await.unwrap();
    assert_eq!((status, receipt.amount), (200, usdc(1_000)), "{receipt:?}");
    assert_eq!(receipt.channel.unwrap().finding, Some(ChannelFinding::ChargedTheRest { charged: usdc(700) }));
    assert_eq!((buyer.books(), buyer.payer.budget().spent()), ((3_000, 0, 5_000), usdc(3_000)));
}

#[tokio::test]
async fn second_correction_ends_the_request() {
    let buyer = Buyer::of(vec![charged(1_000), corrected(400), corrected(300), charged(1_000)]).await;
    buyer.buy().await;
    let (status, receipt) = buyer.try_buy().await.unwrap();
    assert_eq!((status, receipt.outcome, buyer.server.payments().len()), (402, PaymentOutcome::Failed, 3));
}

#[tokio::test]
async fn deposit_without_an_answer_is_sent_again_and_never_a_second_one() {
    let mut replies: Vec<Reply> = (0..5).map(|_| cut()).collect();
    replies.extend([refused("deposit_simulation_failed", json!({})), charged(1_000), charged(1_000)]);
    let buyer = Buyer::of(replies).await;
    assert!(buyer.try_buy().await.is_err());
    assert_eq!(buyer.payer.budget().reserved(), usdc(5_000));
    // It was made, so it cannot be made again: the voucher alone is enough.
    assert_eq!(buyer.buy().await, (200, ACCEPTED, 1_000));
    let sent = paid(&buyer.server);
    assert!(sent[..6].iter().all(|payment| *payment == (1_000, Some(5_000))), "{sent:?}");
    assert_eq!((sent.len(), sent[6]), (7, (1_000, None)));
    assert_eq!(deposits(&buyer.server), 1);
    assert_eq!(buyer.books(), (1_000, 0, 5_000));
}

/// The seller was stopped while the first deposit was on its way into a block, and its node estimates gas with what it has not mined.
#[tokio::test]
async fn no_second_deposit_is_signed_while_the_first_may_still_be_executed() {
    let (used, none) = (|| refused("deposit_simulation_failed", json!({})), || refused("channel_not_found", json!({})));
    let clock = Arc::new(ManualClock::at(unix_now()));
    let payer = Payer::builder(KEY.parse::<PrivateKeySigner>().unwrap()).clock(clock.clone());
    let payer = payer.vouchers(ChannelPolicy::new()).build();
    let mut replies = vec![cut(), used()];
    replies.extend((0..3).map(|_| none()));
    // The next request finds the same, and the one after it a block with the deposit.
    replies.push(used());
    replies.extend((0..4).map(|_| none()));
    replies.extend([used(), none(), charged(1_000), charged(1_000)]);
    let server = Server::paid(demand("Payment required", &[channel_offer(&json!({}))]), replies).await;
    let buyer = Buyer { payer, server };
    for (body, outcome) in [("one answer", PaymentOutcome::Unknown), ("another answer", PaymentOutcome::Failed)] {
        let (status, receipt) = buyer.try_buy_for(body).await.unwrap();
        assert_eq!((status, receipt.outcome, receipt.amount), (402, outcome, usdc(1_000)));
        clock.advance(30);
    }
    for _ in 0..2 {
        assert_eq!(buyer.buy().await, (200, ACCEPTED, 1_000));
    }
    assert_eq!(deposits(&buyer.server), 1, "{:?}", paid(&buyer.server));
    assert_eq!((buyer.books(), buyer.payer.budget().reserved()), ((2_000, 0, 5_000), usdc(3_000)));
}

/// A deposit that expires too soon to be sent again may still be executed.
#[tokio::test]
async fn no_other_lane_is_filled_while_a_deposit_is_too_old_to_be_sent_and_too_young_to_be_void() {
    let clock = Arc::new(ManualClock::at(unix_now()));
    let payer = Payer::builder(KEY.parse::<PrivateKeySigner>().unwrap()).clock(clock.clone());
    let payer = payer.vouchers(ChannelPolicy::new()).build();
    let replies = vec![refused("insufficient_balance", json!({})), charged(1_000)];
    let server = selling_by(&clock, replies).await;
    let buyer = Buyer { payer, server };
    assert_eq!(buyer.buy().await.1, PaymentOutcome::Failed);
    for seconds in [290, 69] {
        clock.advance(seconds);
        assert_eq!(buyer.refusal().await, Refusal::DepositPending);
    }
    clock.advance(1);
    assert_eq!(buyer.buy().await, (200, ACCEPTED, 1_000));
    assert_eq!(deposits(&buyer.server), 2);
}

#[tokio::test]
async fn seller_that_finds_no_escrow_gets_one_more_deposit_within_the_limits() {
    let gone = || refused("cumulative_exceeds_balance", json!({}));
    let policy = ChannelPolicy::new().escrow_per_payee(usdc(9_000));
    let offers = [channel_offer(&json!({}))];
    let buyer = Buyer::with(policy, &offers, vec![charged(1_000), gone(), charged(300), gone()]).await;
    buyer.buy().await;
    assert_eq!(buyer.buy().await, (200, ACCEPTED, 300));
    assert_eq!(paid(&buyer.server), [(1_000, Some(5_000)), (2_000, None), (2_000, Some(5_000))]);
    assert_eq!(buyer.payer.budget().reserved(), usdc(8_700), "only the chain can release the first deposit");
    assert!(matches!(buyer.refusal().await, Refusal::AboveEscrowLimit { .. }));
}

/// The last attempt of the first request was refused, and what would have been signed then is signed for the next.
#[tokio::test]
async fn purchase_that_ran_out_of_attempts_gets_its_deposit_with_the_next_request() {
    for attempts in [2, 3] {
        let gone = || refused("cumulative_exceeds_balance", json!({}));
        let mut replies = vec![charged(1_000)];
        for _ in 0..4 {
            replies.extend((1..attempts).map(|_| cut()));
            replies.push(gone());
        }
        replies.extend([gone(), charged(1_000)]);
        let buyer = Buyer::of(replies).await;
        buyer.buy().await;
        let order = Purchase::named("order 17");
        let buy = async |attempts| {
            let retry = RetryPolicy::default().first_pause(Duration::from_millis(5)).max_attempts(attempts);
            let client = PaymentMiddleware::new(buyer.payer.clone()).retry(retry);
            let client = client.client(reqwest::Client::builder().no_proxy()).unwrap();
            let request = client.post(buyer.server.url()).body("x").with_extension(order.clone());
            request.send().await.map(|response| response.status().as_u16())
        };
        for _ in 0..4 {
            assert_eq!(buy(attempts).await.unwrap(), 402);
        }
        assert_eq!(buy(attempts + 1).await.unwrap(), 200, "{attempts} attempts");
        let payments = paid(&buyer.server);
        assert_eq!(payments.last(), Some(&(2_000, Some(5_000))), "{payments:?}");
        assert_eq!(payments[1..payments.len() - 1].iter().filter(|payment| **payment != (2_000, None)).count(), 0);
    }
}

#[tokio::test]
async fn deposit_that_a_seller_does_not_find_is_not_followed_by_another() {
    for code in ["channel_not_found", "cumulative_exceeds_balance"] {
        let buyer = Buyer::of(vec![refused(code, json!({})), charged(1_000)]).await;
        assert_eq!(buyer.buy().await.1, PaymentOutcome::Failed, "{code}");
        assert_eq!(paid(&buyer.server), [(1_000, Some(5_000))], "{code}");
        assert_eq!(buyer.payer.budget().reserved(), usdc(5_000), "{code}");
    }
}

/// Each deposit that was signed is money until it expires, and afterwards only the chain can tell that it was never made.
#[tokio::test]
async fn deposits_of_a_seller_that_refuses_them_stay_locked_and_within_the_limit() {
    let clock = Arc::new(ManualClock::at(unix_now()));
    let budget = Budget::builder().total(usdc(1_000_000)).build();
    let payer = Payer::builder(KEY.parse::<PrivateKeySigner>().unwrap()).budget(budget.clone()).clock(clock.clone());
    let payer = payer.vouchers(ChannelPolicy::new().escrow_per_payee(usdc(12_000))).build();
    let refusals = (0..6).map(|_| refused("insufficient_balance", json!({})));
    let server = selling_by(&clock, refusals.collect()).await;
    let buyer = Buyer { payer, server };
    for deposits in [5_000, 10_000, 12_000] {
        for _ in 0..2 {
            assert_eq!(buyer.buy().await.1, PaymentOutcome::Failed);
            assert_eq!((budget.reserved(), budget.spent()), (usdc(deposits), Usdc::ZERO));
        }
        clock.advance(400);
    }
    assert!(matches!(buyer.refusal().await, Refusal::AboveEscrowLimit { .. }));
    let [first, second, third] = [5_000, 5_000, 2_000].map(|units| (1_000, Some(units)));
    assert_eq!(
        paid(&buyer.server),
        [first, first, second, second, third, third],
        "each is sent again while it is valid"
    );
    assert_eq!((budget.reserved(), buyer.books()), (usdc(12_000), (0, 0, 0)));
}

#[tokio::test]
async fn other_terms_are_refused_while_the_channel_holds_money() {
    let buyer = Buyer::of(vec![charged(1_000)]).await;
    buyer.buy().await;
    for change in [json!({ "receiverAuthorizer": Address::repeat_byte(9) }), json!({ "withdrawDelay": 1_000 })] {
        let server = Server::paid(demand("Payment required", &[channel_offer(&change)]), vec![charged(1_000)]).await;
        let buyer = Buyer { payer: buyer.payer.clone(), server };
        let refusal = buyer.refusal().await;
        assert!(matches!(refusal, Refusal::ChannelTermsChanged { .. }), "{refusal}");
        assert!(buyer.server.payments().is_empty());
    }
    // `exact` beside it is taken.
    let exact = serde_json::to_value(offer(2_000).to_requirements()).unwrap();
    let offers = [channel_offer(&json!({ "withdrawDelay": 1_000 })), exact];
    let server = Server::paid(demand("Payment required", &offers), vec![settled()]).await;
    let buyer = Buyer { payer: buyer.payer.clone(), server };
    buyer.try_buy().await.unwrap();
    assert_eq!(decode(&buyer.server.payments()[0]).accepted.read().unwrap().scheme, "exact");
}

#[tokio::test]
async fn offers_that_are_not_payable_by_voucher_are_refused() {
    type Check = fn(&OfferRefusal) -> bool;
    let cases: [(Value, Check); 5] = [
        (json!({ "withdrawDelay": 86_401 }), |reason| matches!(reason, OfferRefusal::WithdrawDelay { .. })),
        (json!({ "withdrawDelay": 899 }), |reason| matches!(reason, OfferRefusal::ChannelConfig(_))),
        (json!({ "receiverAuthorizer": Address::ZERO }), |reason| matches!(reason, OfferRefusal::ChannelConfig(_))),
        (json!({ "voucherManager": "facilitator" }), |reason| matches!(reason, OfferRefusal::Channel(_))),
        (json!({ "name": "USD Coin" }), |reason| matches!(reason, OfferRefusal::WrongDomain { .. })),
    ];
    for (change, is_expected) in cases {
        let buyer = Buyer::at(&[channel_offer(&change)], vec![]).await;
        match buyer.refusal().await {
            Refusal::NoPayableOffer { reasons } => assert!(is_expected(&reasons[0]), "{change}: {reasons:?}"),
            other => panic!("{change}: {other}"),
        }
    }
    let buyer = Buyer::at(&[channel_offer(&json!({ "withdrawDelay": 86_400 }))], vec![charged(1_000)]).await;
    assert_eq!(buyer.buy().await, (200, ACCEPTED, 1_000), "the longest that is accepted");
}

#[tokio::test]
async fn payer_without_the_setting_pays_by_exact_only() {
    let exact = serde_json::to_value(offer(2_000).to_requirements()).unwrap();
    let server = Server::paid(demand("Payment required", &[channel_offer(&json!({})), exact]), vec![settled()]).await;
    let payer = Payer::builder(KEY.parse::<PrivateKeySigner>().unwrap()).build();
    let buyer = Buyer { payer, server };
    buyer.try_buy().await.unwrap();
    assert_eq!(decode(&buyer.server.payments()[0]).accepted.read().unwrap().scheme, "exact");
    assert_eq!(buyer.payer.budget().journal().channels(), []);
}

#[tokio::test]
async fn deposit_shrinks_to_what_the_budget_leaves() {
    let key: PrivateKeySigner = KEY.parse().unwrap();
    let budget = Budget::builder().total(usdc(2_500)).build();
    let payer = Payer::builder(key).budget(budget.clone()).vouchers(ChannelPolicy::new()).build();
    let offers = demand("Payment required", &[channel_offer(&json!({}))]);
    let server = Server::paid(offers, vec![charged(1_000), charged(1_000), charged(1_000)]).await;
    let buyer = Buyer { payer, server };
    for _ in 0..2 {
        assert_eq!(buyer.buy().await, (200, ACCEPTED, 1_000));
    }
    assert!(matches!(buyer.refusal().await, Refusal::AboveTotalLimit { .. }));
    assert_eq!(paid(&buyer.server), [(1_000, Some(2_500)), (2_000, None)]);
    assert_eq!((budget.spent(), budget.reserved(), budget.remaining()), (usdc(2_000), usdc(500), Usdc::ZERO));
}

#[tokio::test]
async fn concurrent_requests_each_have_their_lane() {
    let replies = (0..8).map(|_| charged_late(1_000, 100));
    let offers = [channel_offer(&json!({}))];
    let buyer = Buyer::with(ChannelPolicy::new().lanes(4), &offers, replies.collect()).await;
    let requests = (0..8).map(|_| buyer.buy());
    for bought in futures_util::future::join_all(requests).await {
        assert_eq!(bought, (200, ACCEPTED, 1_000));
    }
    let channels = buyer.payer.budget().journal().channels();
    let charged: Vec<_> = channels.iter().map(|channel| channel.charged.atomic()).collect();
    assert_eq!(charged, [2_000; 4], "each lane carries its part");
}

#[tokio::test]
async fn request_waits_for_a_lane_if_the_budget_has_no_room_for_another() {
    let slow = |_| charged_late(1_000, 50);
    let key: PrivateKeySigner = KEY.parse().unwrap();
    let budget = Budget::builder().total(usdc(5_500)).build();
    let payer = Payer::builder(key).budget(budget).vouchers(ChannelPolicy::new()).build();
    let offers = demand("Payment required", &[channel_offer(&json!({}))]);
    let buyer = Buyer { payer, server: Server::paid(offers, (0..5).map(slow).collect()).await };
    let requests = (0..5).map(|_| buyer.buy());
    for bought in futures_util::future::join_all(requests).await {
        assert_eq!(bought, (200, ACCEPTED, 1_000));
    }
    assert_eq!(buyer.payer.budget().journal().channels().len(), 1);
}

/// The seller would find its authorization expired, and its money would be locked until the chain shows that.
#[tokio::test]
async fn clock_that_is_behind_the_sellers_is_named_before_a_deposit_is_signed() {
    for (behind, refused) in [(280, None), (281, Some(Refusal::ClockBehind { by: Duration::from_secs(281) }))] {
        let now = unix_now();
        let server = selling_by(&Arc::new(ManualClock::at(now + behind)), vec![charged(PRICE)]).await;
        let budget = Budget::builder().total(usdc(1_000_000)).build();
        let payer = Payer::builder(KEY.parse::<PrivateKeySigner>().unwrap()).budget(budget.clone());
        let payer = payer.clock(Arc::new(ManualClock::at(now))).vouchers(ChannelPolicy::new()).build();
        let buyer = Buyer { payer, server };
        match refused {
            None => assert_eq!(buyer.buy().await, (200, ACCEPTED, PRICE)),
            Some(expected) => {
                assert_eq!(buyer.refusal().await, expected);
                assert_eq!((budget.remaining(), buyer.server.payments().len()), (budget.total(), 0));
            }
        }
    }
}
