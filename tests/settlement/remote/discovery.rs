//! Resources sold through our facilitator are listed there, and nothing else.

use std::{sync::Arc, time::Duration};

use alloy_primitives::Address;
use serde_json::{Value, json};
use tower_x402::{ManualClock, Network, server::RequirePaymentLayerBuilder};
use x402_bazaar::{BodyType, Discovery, DiscoveryClient, DiscoveryFilter, ListedResource};
use x402_facilitator::FacilitatorServiceBuilder;

use super::{
    service::{get, post, purchase, request},
    stage::{Reply, Seller, Stage, Turn},
};
use support::{
    authorization::{random_address, unix_now},
    shop::{self, Purchase, evaluate, paid, send},
};

const DAY: Duration = Duration::from_secs(86_400);

fn listing(service: FacilitatorServiceBuilder) -> FacilitatorServiceBuilder {
    service.catalogue(100, DAY)
}

fn discoverable(layer: RequirePaymentLayerBuilder) -> RequirePaymentLayerBuilder {
    let discovery = Discovery::post(BodyType::Json)
        .body(json!({ "output": "2 + 2 = 4" }))
        .body_schema(json!({ "properties": { "output": { "type": "string" } }, "required": ["output"] }))
        .output(json!({ "score": 1.0 }));
    layer
        .public_origin("https://judge.example")
        .description("Evaluates arithmetic")
        .mime_type("application/json")
        .service_name("Judge")
        .tags(["math", "judge"])
        .payment_identifier(true)
        .extension(discovery.extension().unwrap())
}

/// Buys from the seller, and returns the 402 as clients do.
async fn buy(stage: &Stage, seller: &Seller) -> (Purchase, shop::Answer) {
    let demand = shop::demand(&send(&seller.app, evaluate("2 + 2 = 4")).await);
    let purchase = stage.customer().await.sign(&demand, 0);
    let mut payload = purchase.payload();
    payload["extensions"] = demand["extensions"].clone();
    payload["extensions"]["payment-identifier"]["info"]["id"] = "a-secret-of-the-payers".into();
    let answer = send(&seller.app, paid(evaluate("2 + 2 = 4"), &payload)).await;
    (purchase, answer)
}

async fn listed(stage: &Stage, filter: DiscoveryFilter) -> Vec<ListedResource> {
    let client = DiscoveryClient::builder(format!("http://{}", stage.address)).build().unwrap();
    let found = client.list(&filter).await.unwrap();
    assert_eq!(found.skipped, 0);
    found.resources
}

async fn all(stage: &Stage) -> Vec<ListedResource> {
    listed(stage, DiscoveryFilter::default()).await
}

#[tokio::test]
async fn sold_resource_is_listed_with_the_sellers_description() {
    let stage = Stage::open_with(listing).await;
    let seller = stage.seller_with(stage.remote(), discoverable).await;
    assert!(all(&stage).await.is_empty());
    let before = unix_now();
    for _ in 0..2 {
        assert_eq!(buy(&stage, &seller).await.1.status, 200);
    }
    let dear = stage.seller_with(stage.remote(), |layer| discoverable(layer).price("$0.002")).await;
    assert_eq!(buy(&stage, &dear).await.1.status, 200);

    let found = all(&stage).await;
    let [resource] = found.as_slice() else { panic!("{found:?}") };
    assert_eq!(resource.url.as_str(), "https://judge.example/evaluate", "without the query");
    assert_eq!((resource.kind.as_str(), resource.x402_version), ("http", 2));
    assert_eq!(resource.description.as_deref(), Some("Evaluates arithmetic"));
    assert_eq!(resource.mime_type.as_deref(), Some("application/json"));
    assert_eq!((resource.service_name.as_deref(), resource.tags.len()), (Some("Judge"), 2));
    assert!(resource.last_updated.unwrap() >= before);
    let offers: Vec<_> = resource.offers().into_iter().map(Result::unwrap).collect();
    let payees: Vec<_> = offers.iter().map(|offer| (offer.pay_to, offer.amount.to::<u64>())).collect();
    assert_eq!(payees, [(dear.pay_to, 2_000), (seller.pay_to, 1_000)], "the newest first, each once");
    assert_eq!(resource.info().unwrap()["input"]["method"], "POST");
    assert!(!resource.raw.text().contains("a-secret-of-the-payers"), "other extensions are not for everybody");
    assert_eq!(get(&stage, "supported").await.1["extensions"], json!(["bazaar"]));

    let all = DiscoveryFilter::default;
    for (found, filter) in [
        (1, all().kind("http")),
        (0, all().kind("mcp")),
        (1, all().network(Network::BASE_SEPOLIA.to_string())),
        (0, all().network(Network::BASE.to_string())),
        (1, all().scheme("exact")),
        (0, all().scheme("upto")),
        (1, all().extension("bazaar")),
        (0, all().extension("other")),
        (1, all().pay_to(seller.pay_to.to_string().to_lowercase())),
        (0, all().pay_to(random_address().to_string())),
    ] {
        assert_eq!(listed(&stage, filter.clone()).await.len(), found, "{filter:?}");
    }
    for query in ["limit=x", "offset=-1", "limit=1e3", "offset="] {
        assert_eq!(get(&stage, &format!("discovery/resources?{query}")).await.0, 400, "{query}");
    }
    let (status, page) = get(&stage, "discovery/resources?limit=100000&offset=7&new=1").await;
    assert_eq!((status, &page["items"]), (200, &json!([])));
    assert_eq!(page["pagination"], json!({ "limit": 100, "offset": 7, "total": 1 }));
}

/// A settlement that is asked for directly, with whatever a payer would have one believe.
async fn settle(stage: &Stage, resource: Value, extensions: Value) -> Value {
    let customer = stage.customer().await;
    let mut asked = request(&purchase(&customer, random_address()));
    asked["paymentPayload"]["resource"] = resource;
    asked["paymentPayload"]["extensions"] = extensions;
    let (status, said) = post(stage, "settle", &asked).await;
    assert_eq!((status, &said["success"]), (200, &json!(true)), "{said}");
    asked
}

fn extension() -> Value {
    Value::Object(Discovery::get().extension().unwrap().declared())
}

#[tokio::test]
async fn unsuitable_resource_is_settled_and_not_listed() {
    let stage = Stage::open_with(listing).await;
    let url = |url: &str| json!({ "url": url });
    let good = url("https://judge.example/");
    let changed = |pointer: &str, value: Value| {
        let mut extension = extension();
        *extension["bazaar"].pointer_mut(pointer).unwrap() = value;
        extension
    };
    for (what, resource, extensions) in [
        ("no resource", Value::Null, extension()),
        ("no extensions", good.clone(), Value::Null),
        ("no bazaar", good.clone(), json!({ "other": {} })),
        ("a path", url("/evaluate"), extension()),
        ("this machine", url("http://127.0.0.1:8080/admin"), extension()),
        ("this network", url("http://metadata.google.internal/"), extension()),
        ("credentials", url("https://me:secret@judge.example/"), extension()),
        ("a script", url("javascript:alert(1)"), extension()),
        ("not as described", good.clone(), changed("/info/input/method", json!("POST"))),
        ("of no kind", good.clone(), changed("/info/input/type", json!("ftp"))),
        (
            "a schema elsewhere",
            good.clone(),
            changed("/schema/properties/input", json!({ "$ref": "http://127.0.0.1/" })),
        ),
        ("a schema that does not end", good.clone(), changed("/schema/properties/input", json!({ "$ref": "#" }))),
        (
            "more than anybody reads",
            good.clone(),
            changed("/info/input/queryParams", json!({ "a": "x".repeat(20_000) })),
        ),
    ] {
        settle(&stage, resource, extensions).await;
        assert!(all(&stage).await.is_empty(), "{what}");
    }
    settle(&stage, good, extension()).await;
    assert_eq!(all(&stage).await.len(), 1);
}

#[tokio::test]
async fn only_new_settlements_are_listed() {
    let stage = Stage::open_with(listing).await;
    let customer = stage.customer().await;
    let mut asked = request(&purchase(&customer, random_address()));
    asked["paymentPayload"]["resource"] = json!({ "url": "https://judge.example/", "description": "first" });
    asked["paymentPayload"]["extensions"] = extension();
    post(&stage, "verify", &asked).await;
    assert!(all(&stage).await.is_empty(), "verifying commits nothing");

    let poor = support::scripted::customer();
    let mut refused = request(&purchase(&poor, random_address()));
    refused["paymentPayload"]["resource"] = json!({ "url": "https://judge.example/" });
    refused["paymentPayload"]["extensions"] = extension();
    assert_eq!(post(&stage, "settle", &refused).await.1["success"], false);
    assert!(all(&stage).await.is_empty(), "not paid");

    assert_eq!(post(&stage, "settle", &asked).await.1["success"], true);
    for (field, value) in [("url", "https://another.example/"), ("description", "second")] {
        asked["paymentPayload"]["resource"][field] = value.into();
        assert_eq!(post(&stage, "settle", &asked).await.1["success"], true, "paid already");
        let found = all(&stage).await;
        assert_eq!((found.len(), found[0].url.as_str()), (1, "https://judge.example/"));
        assert_eq!(found[0].description.as_deref(), Some("first"));
    }
}

#[tokio::test]
async fn catalogue_is_bounded_and_forgets() {
    let clock = Arc::new(ManualClock::at(unix_now()));
    let service_clock = clock.clone();
    let stage = Stage::open_with(|service| service.catalogue(2, Duration::from_secs(20)).clock(service_clock)).await;
    let urls = async || {
        let found = all(&stage).await;
        found.iter().map(|resource| resource.url.path().to_owned()).collect::<Vec<_>>()
    };
    let sell = async |path: &str| {
        clock.advance(1);
        settle(&stage, json!({ "url": format!("https://judge.example{path}") }), extension()).await;
    };
    for path in ["/a", "/b", "/a", "/c"] {
        sell(path).await;
    }
    assert_eq!(urls().await, ["/a", "/c"], "the one that was not paid for longest made room");
    clock.advance(19);
    sell("/c?query#fragment").await;
    assert_eq!(urls().await, ["/c"], "nothing was paid for the other for too long");
}

#[tokio::test]
async fn routes_with_a_template_are_one_resource_and_methods_are_several() {
    let stage = Stage::open_with(listing).await;
    for (path, template) in [("/users/7", "/users/:id"), ("/users/8", "/users/:id"), ("/users/9", "/../admin")] {
        let mut extension = extension();
        extension["bazaar"]["routeTemplate"] = template.into();
        settle(&stage, json!({ "url": format!("https://judge.example{path}") }), extension).await;
    }
    let delete = Value::Object(Discovery::delete().extension().unwrap().declared());
    settle(&stage, json!({ "url": "https://judge.example/users/9" }), delete).await;
    let found = all(&stage).await;
    let paths: Vec<_> = found.iter().map(|resource| resource.url.path()).collect();
    assert_eq!(paths, ["/users/:id", "/users/9", "/users/9"]);
}

#[tokio::test]
async fn without_a_catalogue_nothing_is_listed() {
    let stage = Stage::open().await;
    settle(&stage, json!({ "url": "https://judge.example/" }), extension()).await;
    assert_eq!(get(&stage, "discovery/resources").await.0, 404);
    assert_eq!(get(&stage, "supported").await.1["extensions"], json!([]));
    let local = Stage::open_with(|service| listing(service).catalogue_local_hosts(true)).await;
    settle(&local, json!({ "url": "http://127.0.0.1:8080/evaluate?k=1" }), extension()).await;
    assert_eq!(all(&local).await[0].url.as_str(), "http://127.0.0.1:8080/evaluate");
}

#[tokio::test]
async fn late_settlement_is_listed() {
    let stage = Stage::open_with(listing).await;
    let seller = stage.seller_with(stage.remote(), discoverable).await;
    stage.script([Turn::Without(Reply::Status(502, "")), Turn::Instead(Reply::Cut)], Turn::Honest);
    let (_, answer) = buy(&stage, &seller).await;
    assert_eq!(answer.status, 200);
    assert_eq!(all(&stage).await.len(), 1);
    assert_ne!(seller.pay_to, Address::ZERO);
}
