//! Spans follow a paid request from its header to its transaction.

use std::{
    collections::BTreeMap,
    fmt::Debug,
    sync::{Arc, Mutex},
};

use tracing::{
    Subscriber,
    field::{Field, Visit},
    span::{Attributes, Id, Record},
};
use tracing_subscriber::{Layer, layer::Context, layer::SubscriberExt as _, registry::LookupSpan};

use support::{
    chain::Chain,
    devnet::DevnetChain,
    hot_path::{self, AtOnce, VoucherMint, rich_channels},
    shop::{Customer, Shop, evaluate, send},
    world::{COST, DEPOSIT, World, pay, refund},
};
use tower_x402::ledger::MemoryLedger;

/// The spans that were opened, in order.
#[derive(Clone, Default)]
struct Spans(Arc<Mutex<Vec<Span>>>);

#[derive(Clone, Debug)]
struct Span {
    id: u64,
    parent: Option<u64>,
    name: &'static str,
    fields: BTreeMap<&'static str, String>,
}

impl Visit for Span {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.fields.insert(field.name(), format!("{value:?}"));
    }
}

impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for Spans {
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        let parent = context.span(id).and_then(|span| span.parent()).map(|parent| parent.id().into_u64());
        let name = attributes.metadata().name();
        let mut span = Span { id: id.into_u64(), parent, name, fields: BTreeMap::new() };
        attributes.record(&mut span);
        self.0.lock().unwrap().push(span);
    }

    fn on_record(&self, id: &Id, values: &Record<'_>, _: Context<'_, S>) {
        let mut spans = self.0.lock().unwrap();
        if let Some(span) = spans.iter_mut().rev().find(|span| span.id == id.into_u64()) {
            values.record(span);
        }
    }
}

impl Spans {
    fn named(&self, name: &str) -> Vec<Span> {
        self.0.lock().unwrap().iter().filter(|span| span.name == name).cloned().collect()
    }
}

#[tokio::test]
async fn paid_request_is_a_span_with_its_settlement_inside() {
    let spans = Spans::default();
    let _guard = tracing::subscriber::set_default(tracing_subscriber::registry().with(spans.clone()));
    let chain = DevnetChain::start(None).await;
    let shop = Shop::open(&chain).await;
    let app = shop.app(shop.layer());
    let customer = Customer::with_funds(&chain, 10_000).await;
    let purchase = customer.pay(&app, evaluate("work")).await;
    assert!(spans.named("payment").is_empty(), "asking for the price is no payment");
    let answer = send(&app, purchase.on(evaluate("work"))).await;

    let [payment] = &spans.named("payment")[..] else { panic!("{:?}", spans.named("payment")) };
    let [settle] = &spans.named("settle")[..] else { panic!("{:?}", spans.named("settle")) };
    let (authorization, transaction) = (&purchase.authorization, answer.transaction().to_string());
    for span in [payment, settle] {
        assert_eq!(span.fields["network"], "eip155:84532");
        assert_eq!(span.fields["payer"], authorization.from.to_string());
        assert_eq!(span.fields["nonce"], authorization.nonce.to_string());
        assert_eq!(span.fields["transaction"], transaction);
    }
    assert_eq!((&*payment.fields["amount"], &*payment.fields["status"]), ("1000", "200"));
    assert_eq!(payment.fields["asset"], chain.asset().address.to_string());
    assert_eq!(settle.parent, Some(payment.id));

    let everything = format!("{:?}", spans.0.lock().unwrap()).to_lowercase();
    let half = alloy_primitives::hex::encode(&purchase.signature[..32]);
    // The EVM in this process traces what it executes.
    let ours = format!("{payment:?} {settle:?}").to_lowercase();
    assert!(!ours.contains(&half) && everything.contains(&transaction));

    send(&app, purchase.on(evaluate("work"))).await;
    assert_eq!(spans.named("payment").len(), 2, "a replay is a request with a payment, too");
    assert_eq!(spans.named("settle").len(), 1);
}

#[tokio::test]
async fn request_paid_by_voucher_is_a_span_with_the_same_fields() {
    let spans = Spans::default();
    let _guard = tracing::subscriber::set_default(tracing_subscriber::registry().with(spans.clone()));
    let channels = rich_channels(Arc::new(MemoryLedger::new()), hot_path::clock());
    let layer = hot_path::layer(AtOnce::in_memory(hot_path::clock()), hot_path::clock());
    let mut app = hot_path::sold(layer.vouchers(channels).build().unwrap());
    let mut mint = VoucherMint::of(&mut app).await;
    for _ in 0..2 {
        let payment = hot_path::paid(&mint.header());
        assert_eq!(hot_path::answer(&mut app, payment).await.status(), 200);
    }
    let [first, second] = &spans.named("payment")[..] else { panic!("{:?}", spans.named("payment")) };
    for span in [first, second] {
        assert_eq!((&*span.fields["network"], &*span.fields["status"]), ("eip155:84532", "200"));
        assert_eq!(span.fields["asset"], hot_path::asset().address.to_string());
        assert_eq!(span.fields["payer"], alloy_primitives::Address::repeat_byte(0xca).to_string());
        assert_eq!((&*span.fields["amount"], span.fields["nonce"].len()), ("1000", 66));
    }
    assert_ne!(first.fields["nonce"], second.fields["nonce"]);
}

#[tokio::test]
async fn span_of_a_request_that_fills_or_empties_its_channel_has_the_transaction() {
    let spans = Spans::default();
    let _guard = tracing::subscriber::set_default(tracing_subscriber::registry().with(spans.clone()));
    let world = World::open().await;
    let channel = world.channel().await;
    let deposit = world.sign_deposit(&channel, DEPOSIT).await;
    let filled = send(&world.app, pay(&world.app, &channel, COST, Some(&deposit), "first").await).await;
    let charged = send(&world.app, pay(&world.app, &channel, 2 * COST, None, "second").await).await;
    let emptied = refund(&world.app, &channel, 2 * COST, None).await;
    assert_eq!([&filled, &charged, &emptied].map(|answer| answer.status.as_u16()), [200; 3]);
    let [first, second, last] = &spans.named("payment")[..] else { panic!("{:?}", spans.named("payment")) };
    for (span, answer) in [(first, &filled), (last, &emptied)] {
        assert_eq!(span.fields.get("transaction"), Some(&answer.transaction().to_string()), "{span:?}");
    }
    assert_eq!(second.fields.get("transaction"), None, "a charge is in the books alone");
}
