//! Agent cards: served, signed, fetched within limits, and compared with the pinned payee.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use alloy_signer_local::PrivateKeySigner;
use axum::{Router, http::HeaderMap, response::Redirect, routing::get};
use base64::{Engine as _, prelude::BASE64_URL_SAFE_NO_PAD};
use http::StatusCode;
use proptest::prelude::*;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use url::Url;
use x402_judges::ArithmeticJudge;
use x402_market::{
    AgentCard, CARD_PATH, CardError, CardFetcher, EXTENSION_URI, Score, VerifiedCard,
    schema::{EVALUATION_SCHEMA, EVALUATION_SCHEMA_PATH, SUBMISSION_SCHEMA, SUBMISSION_SCHEMA_PATH},
};

use super::stage::{Stage, card, serve};

const ADDRESS: &str = "127.0.0.1:4021";
const URL: &str = "http://127.0.0.1:4021/.well-known/agent-card.json";

async fn signed() -> (AgentCard, PrivateKeySigner) {
    let key = PrivateKeySigner::random();
    let card = card(ADDRESS.parse().unwrap(), key.address()).build().unwrap();
    (card.sign(&key).await.unwrap(), key)
}

fn verify(card: &Value) -> Result<VerifiedCard, CardError> {
    VerifiedCard::verify(card.to_string().as_bytes(), &URL.parse().unwrap())
}

/// The card of whoever listens at `address`, signed.
async fn card_at(listener: &TcpListener, key: &PrivateKeySigner) -> AgentCard {
    card(listener.local_addr().unwrap(), key.address()).build().unwrap().sign(key).await.unwrap()
}

#[tokio::test]
async fn card_is_served_with_its_schemas_and_verified() {
    let stage = Stage::set().await;
    let booth = stage.open(ArithmeticJudge).await;
    let card = booth.card().await;
    assert_eq!((card.pay_to(), card.endpoint()), (booth.payee.address(), &booth.url.join("evaluate").unwrap()));
    assert_eq!(card.pricing().price_per_output().atomic(), 1_000);
    assert_eq!(card.pricing().claim("prose").unwrap().get(), 0.6);
    assert!(card.card().has_skill("arithmetic") && !card.card().has_skill("poetry"));

    let client = reqwest::Client::new();
    for (path, schema) in [(SUBMISSION_SCHEMA_PATH, SUBMISSION_SCHEMA), (EVALUATION_SCHEMA_PATH, EVALUATION_SCHEMA)] {
        let response = client.get(booth.url.join(path).unwrap()).send().await.unwrap();
        assert_eq!(response.headers()["content-type"], "application/schema+json");
        assert_eq!(response.text().await.unwrap(), schema);
    }
    let url = booth.url.join(CARD_PATH).unwrap();
    let head = client.head(url.clone()).send().await.unwrap();
    let tag = head.headers()["etag"].clone();
    assert!(head.headers()["cache-control"].to_str().unwrap().contains("max-age"));
    assert_ne!(head.headers()["content-length"], "0");
    let again = client.get(url.clone()).header("if-none-match", tag).send().await.unwrap();
    assert_eq!(again.status(), 304);
    let body: Value = serde_json::from_slice(&client.get(url).send().await.unwrap().bytes().await.unwrap()).unwrap();
    // What A2A 1.0 requires of a card.
    for field in
        ["name", "description", "version", "supportedInterfaces", "capabilities", "defaultInputModes", "skills"]
    {
        assert!(!body[field].is_null(), "{field}");
    }
    for field in ["url", "protocolBinding", "protocolVersion"] {
        assert!(body["supportedInterfaces"][0][field].is_string(), "{field}");
    }
    let extension = &body["capabilities"]["extensions"][0];
    assert_eq!((&extension["uri"], &extension["params"]["pricePerOutput"]), (&json!(EXTENSION_URI), &json!("1000")));
}

/// By the letter of RFC 7515 and RFC 8785, without this crate's own code for either.
#[tokio::test]
async fn signature_is_a_jws_by_the_payee() {
    let (card, key) = signed().await;
    let mut json = serde_json::to_value(&card).unwrap();
    json.as_object_mut().unwrap().remove("signatures");
    // Objects are sorted by key, and there is no number here that could be written in two ways.
    let payload = BASE64_URL_SAFE_NO_PAD.encode(sorted(&json));
    let [signature] = card.signatures.as_slice() else { panic!("one signature") };
    let header: Value = serde_json::from_slice(&BASE64_URL_SAFE_NO_PAD.decode(&signature.protected).unwrap()).unwrap();
    assert_eq!((&header["alg"], &header["kid"]), (&json!("ES256K"), &json!(key.address().to_string())));
    let input = format!("{}.{payload}", signature.protected);
    let bytes = BASE64_URL_SAFE_NO_PAD.decode(&signature.signature).unwrap();
    let signature = k256::ecdsa::Signature::from_slice(&bytes).unwrap();
    let point = key.credential().verifying_key().to_encoded_point(true);
    let verifying = k256::ecdsa::VerifyingKey::from_sec1_bytes(point.as_bytes()).unwrap();
    k256::ecdsa::signature::Verifier::verify(&verifying, input.as_bytes(), &signature).expect("a valid signature");
}

fn sorted(value: &Value) -> String {
    match value {
        Value::Object(fields) => {
            let mut fields: Vec<_> = fields.iter().collect();
            fields.sort_by(|one, other| one.0.encode_utf16().cmp(other.0.encode_utf16()));
            let fields = fields.iter().map(|(name, value)| format!("{}:{}", json!(name), sorted(value)));
            format!("{{{}}}", fields.collect::<Vec<_>>().join(","))
        }
        Value::Array(items) => format!("[{}]", items.iter().map(sorted).collect::<Vec<_>>().join(",")),
        Value::Number(number) => number.as_f64().unwrap().to_string(),
        other => other.to_string(),
    }
}

#[tokio::test]
async fn changed_card_is_refused() {
    let (card, _) = signed().await;
    let json = serde_json::to_value(&card).unwrap();
    assert!(verify(&json).is_ok());
    let pricing = "/capabilities/extensions/0/params";
    for (at, value) in [
        ("/name", json!("Another judge")),
        ("/skills/0/id", json!("poetry")),
        (&format!("{pricing}/pricePerOutput"), json!("1")),
        (&format!("{pricing}/expertise/1/claim"), json!(0.61)),
        ("/signatures/0/signature", json!("AAAA")),
        ("/signatures/0/protected", json!("e30")),
        (&format!("{pricing}/payTo"), json!("0x70997970C51812dc3A010C7d01b50e0d17dc79C8")),
    ] {
        let mut changed = json.clone();
        *changed.pointer_mut(at).unwrap() = value;
        assert!(matches!(verify(&changed), Err(CardError::BadSignature { .. })), "{at}: {:?}", verify(&changed));
    }
    let mut added = json.clone();
    added["unheardOf"] = json!({ "a": 1 });
    assert!(matches!(verify(&added), Err(CardError::BadSignature { .. })), "fields not known here are signed too");
    let mut unsigned = json.clone();
    unsigned["signatures"] = json!([]);
    assert!(matches!(verify(&unsigned), Err(CardError::Unsigned)));
    // Moved to another place, it would send its students' money back to the first: nobody's gain, but not the same card.
    let elsewhere: Url = "http://copy.example/.well-known/agent-card.json".parse().unwrap();
    let moved = VerifiedCard::verify(json.to_string().as_bytes(), &elsewhere);
    assert!(matches!(moved, Err(CardError::ForeignEndpoint { .. })));
}

#[tokio::test]
async fn unknown_fields_are_kept_and_signed() {
    let (card, key) = signed().await;
    let mut json = serde_json::to_value(&card).unwrap();
    json["provider"] = json!({ "organization": "É", "url": "https://e.example", "weight": 1e21 });
    json["skills"][0]["examples"] = json!(["2 + 2"]);
    let card: AgentCard = serde_json::from_value(json.clone()).unwrap();
    let card = card.sign(&key).await.unwrap();
    assert_eq!(card.signatures.len(), 1, "the old one is replaced: {:?}", card.signatures);
    let again = serde_json::to_value(&card).unwrap();
    assert_eq!(again["provider"], json["provider"]);
    verify(&again).unwrap();
    // Somebody else's signature stays, and is not taken for the payee's.
    let mut foreign: Value = again.clone();
    foreign["signatures"] =
        json!([{ "protected": BASE64_URL_SAFE_NO_PAD.encode(r#"{"alg":"ES256","kid":"k"}"#), "signature": "AA" }]);
    assert!(matches!(verify(&foreign), Err(CardError::BadSignature { .. })));
    let foreign: AgentCard = serde_json::from_value(foreign).unwrap();
    let both = foreign.sign(&key).await.unwrap();
    assert_eq!(both.signatures.len(), 2);
    assert!(verify(&serde_json::to_value(&both).unwrap()).is_ok());
}

/// Each of its values would take many times as much memory as text.
#[tokio::test]
async fn card_with_too_many_values_is_refused_and_the_largest_built_one_is_not() {
    let key = PrivateKeySigner::random();
    let mut largest = card(ADDRESS.parse().unwrap(), key.address());
    for number in 2..64 {
        largest = largest.skill(format!("skill{number}"), "Marks it", Score::MAX);
    }
    let largest = largest.build().unwrap().sign(&key).await.unwrap();
    let mut json = serde_json::to_value(&largest).unwrap();
    assert!(verify(&json).is_ok());
    for (values, is_good) in [(1_000, true), (4_096, false)] {
        json["more"] = json!([{ "numbers": vec![0; values] }]);
        let card: AgentCard = serde_json::from_value(json.clone()).unwrap();
        let card = serde_json::to_value(card.sign(&key).await.unwrap()).unwrap();
        match verify(&card) {
            Ok(_) => assert!(is_good, "{values}"),
            Err(CardError::Invalid { at, .. }) => assert!(!is_good && at == ".", "{values} {at}"),
            Err(error) => panic!("{values} {error}"),
        }
    }
}

#[tokio::test]
async fn only_the_payee_can_sign() {
    let (card, _) = signed().await;
    let other = PrivateKeySigner::random();
    assert!(matches!(card.sign(&other).await, Err(CardError::NotThePayee { .. })));
}

#[tokio::test]
async fn unchanged_card_is_transferred_once() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let key = PrivateKeySigner::random();
    let body = serde_json::to_vec(&card_at(&listener, &key).await).unwrap();
    let sent = Arc::new(AtomicU32::new(0));
    let counted = sent.clone();
    let router = Router::new().route(
        CARD_PATH,
        get(async move |headers: HeaderMap| match headers.get("if-none-match") {
            Some(tag) if tag == "\"one\"" => (StatusCode::NOT_MODIFIED, [("etag", "\"one\"")], Vec::new()),
            _ => {
                counted.fetch_add(1, Ordering::SeqCst);
                (StatusCode::OK, [("etag", "\"one\"")], body)
            }
        }),
    );
    let url = serve(listener, router);
    let cards = CardFetcher::new().unwrap();
    let first = cards.fetch(&url).await.unwrap();
    assert!(Arc::ptr_eq(&first, &cards.fetch(&url).await.unwrap()));
    assert_eq!(sent.load(Ordering::SeqCst), 1);
    assert_eq!(cards.pins(), [(url.join(CARD_PATH).unwrap(), key.address())]);
}

#[tokio::test]
async fn changed_payee_is_refused() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (honest, thief) = (PrivateKeySigner::random(), PrivateKeySigner::random());
    let of = async |key: &PrivateKeySigner| serde_json::to_vec(&card_at(&listener, key).await).unwrap();
    let (before, after) = (of(&honest).await, of(&thief).await);
    let body = Arc::new(Mutex::new(before));
    let shown = body.clone();
    let router = Router::new().route(CARD_PATH, get(async move || shown.lock().unwrap().clone()));
    let url = serve(listener, router);
    let cards = CardFetcher::new().unwrap();
    assert_eq!(cards.fetch(&url).await.unwrap().pay_to(), honest.address());
    *body.lock().unwrap() = after;
    match cards.fetch(&url).await {
        Err(CardError::PayeeChanged { pinned, found }) => {
            assert_eq!((pinned, found), (honest.address(), thief.address()));
        }
        other => panic!("{other:?}"),
    }
    let told = CardFetcher::new().unwrap();
    told.pin(&url, honest.address()).unwrap();
    assert!(matches!(told.fetch(&url).await, Err(CardError::PayeeChanged { .. })));
    assert!(matches!(told.pin(&url, thief.address()), Err(CardError::PayeeChanged { .. })));
    let full = CardFetcher::new().unwrap().max_evaluators(0);
    assert!(matches!(full.fetch(&url).await, Err(CardError::TooManyEvaluators { limit: 0 })));
}

#[tokio::test]
async fn card_has_limits_of_size_and_time() {
    let endless = async || {
        let chunks = futures_util::stream::repeat_with(|| Ok::<_, std::io::Error>(vec![b' '; 8192]));
        axum::body::Body::from_stream(chunks)
    };
    let router = Router::new()
        .route(&format!("/endless{CARD_PATH}"), get(endless))
        .route(&format!("/never{CARD_PATH}"), get(std::future::pending::<()>))
        .route(
            &format!("/away{CARD_PATH}"),
            get(async || Redirect::temporary("http://other.example/card.json?token=x")),
        )
        .route(&format!("/round{CARD_PATH}"), get(async || Redirect::temporary("/round/.well-known/agent-card.json")))
        .route(&format!("/text{CARD_PATH}"), get(async || "hello"));
    let url = serve(TcpListener::bind("127.0.0.1:0").await.unwrap(), router);
    let cards = CardFetcher::new().unwrap();
    let fetch = async |path: &str| cards.fetch(&url.join(path).unwrap()).await;
    assert!(matches!(fetch("endless").await, Err(CardError::TooLarge { limit: 65_536 })));
    assert!(matches!(fetch("text").await, Err(CardError::Invalid { .. })));
    assert!(matches!(fetch("nothing").await, Err(CardError::Status(404))));
    match fetch("away").await {
        Err(CardError::Redirected { to }) => assert_eq!(to, "http://other.example/card.json"),
        other => panic!("{other:?}"),
    }
    assert!(matches!(fetch("round").await, Err(CardError::Redirected { .. })));
    let hasty = CardFetcher::new().unwrap().timeout(Duration::from_millis(50));
    assert!(matches!(hasty.fetch(&url.join("never").unwrap()).await, Err(CardError::Timeout)));
    assert!(matches!(cards.fetch(&"file:///etc/passwd".parse().unwrap()).await, Err(CardError::Invalid { .. })));
}

#[tokio::test]
async fn redirect_on_the_same_origin_is_followed() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let body = serde_json::to_vec(&card_at(&listener, &PrivateKeySigner::random()).await).unwrap();
    let router = Router::new()
        .route(CARD_PATH, get(async || Redirect::permanent("/card")))
        .route("/card", get(async move || body.clone()));
    let url = serve(listener, router);
    CardFetcher::new().unwrap().fetch(&url).await.unwrap();
}

#[tokio::test]
async fn unsigned_card_is_refused() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let unsigned = card(listener.local_addr().unwrap(), PrivateKeySigner::random().address()).build().unwrap();
    let body = serde_json::to_vec(&unsigned).unwrap();
    let url = serve(listener, Router::new().route(CARD_PATH, get(async move || body.clone())));
    assert!(matches!(CardFetcher::new().unwrap().fetch(&url).await, Err(CardError::Unsigned)));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn no_card_makes_a_reader_panic(at: prop::sample::Index, byte: u8, cut: prop::sample::Index) {
        static CARD: std::sync::LazyLock<Vec<u8>> = std::sync::LazyLock::new(|| {
            let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
            serde_json::to_vec(&runtime.block_on(signed()).0).unwrap()
        });
        let mut json = CARD.clone();
        *at.get_mut(&mut json) = byte;
        let url = URL.parse().unwrap();
        let changed = VerifiedCard::verify(&json, &url);
        prop_assert!(json == *CARD || changed.is_err() || serde_json::from_slice::<Value>(&json).ok() == serde_json::from_slice(&CARD).ok());
        prop_assert!(VerifiedCard::verify(&json[..cut.index(json.len())], &url).is_err());
    }
}
