//! Which cards are listed, for how long, and which hosts the directory does not ask.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use alloy_primitives::Address;
use alloy_signer_local::PrivateKeySigner;
use axum::{Router, response::Redirect, routing::get};
use http::StatusCode;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tower::ServiceExt as _;
use tower_x402::{ManualClock, Network, server::PeerAddress};
use url::Url;
use x402_directory::{
    CardQuery, DirectoryBuilder, DirectoryClient, DirectoryError, DirectoryService, DirectoryStore, FoundCards,
};
use x402_market::{AgentCard, CARD_PATH, CardError, CardFetcher, CardSource, Score, VerifiedCard};

use super::{
    evidence::evaluator,
    stage::{Booth, PRICE, Stage, checker, post, serve},
};
use support::{authorization::unix_now, devnet::DevnetChain};

const HOUR: Duration = Duration::from_secs(3_600);

async fn directory() -> (DirectoryService, Url) {
    let store = DirectoryStore::in_memory().await.unwrap();
    let service = DirectoryService::builder(store).private_hosts(true).rate(1e6, 1e6).build().unwrap();
    (service.clone(), serve(TcpListener::bind("127.0.0.1:0").await.unwrap(), service))
}

async fn list(directory: &Url, url: impl ToString) -> (u16, String) {
    post(directory, "cards", json!({ "url": url.to_string() }).to_string().into()).await
}

async fn found(directory: &Url, query: CardQuery) -> Vec<(Url, Address)> {
    let cards = DirectoryClient::new(directory).unwrap().cards(&query).await.unwrap();
    assert_eq!(cards.skipped, 0);
    cards.found.into_iter().map(|found| (found.url, found.card.pay_to())).collect()
}

#[tokio::test]
async fn cards_are_listed_as_signed_and_found_by_their_offers() {
    let (_, directory) = directory().await;
    let (one, other) = (Booth::open(&["prose"]).await, Booth::open(&["prose", "poetry"]).await);
    other.show(&["prose", "poetry"], &other.payee, 5 * PRICE).await;
    assert_eq!(list(&directory, &one.url).await, (201, String::new()));
    assert_eq!(list(&directory, &other.url).await, (201, String::new()));
    assert_eq!(
        list(&directory, one.url.join(CARD_PATH).unwrap()).await,
        (200, String::new()),
        "the same by another name"
    );

    let line = |booth: &Booth| (booth.url.join(CARD_PATH).unwrap(), booth.payee.address());
    assert_eq!(found(&directory, CardQuery::default()).await, [line(&one), line(&other)]);
    let poetry = CardQuery::default().skill("poetry");
    assert_eq!(found(&directory, poetry).await, [line(&other)]);

    // What a reader gets is what the evaluator signed, so it needs to believe nobody.
    let page = reqwest::get(directory.join("cards").unwrap()).await.unwrap();
    let page: Value = serde_json::from_slice(&page.bytes().await.unwrap()).unwrap();
    let (url, card) = (page["cards"][1]["url"].as_str().unwrap(), page["cards"][1]["card"].to_string());
    assert!(VerifiedCard::verify(card.as_bytes(), &url.parse().unwrap()).is_ok());
}

#[tokio::test]
async fn pages_continue_where_the_last_one_ended_and_have_an_etag() {
    let (_, directory) = directory().await;
    let mut booths = Vec::new();
    for _ in 0..5 {
        let booth = Booth::open(&["prose"]).await;
        list(&directory, &booth.url).await;
        booths.push(booth.payee.address());
    }
    let (mut after, mut payees) = (0, Vec::new());
    loop {
        let url = directory.join(&format!("cards?limit=2&after={after}")).unwrap();
        let page: Value = serde_json::from_slice(&reqwest::get(url).await.unwrap().bytes().await.unwrap()).unwrap();
        payees.extend(page["cards"].as_array().unwrap().iter().map(|card| card["payTo"].as_str().unwrap().to_owned()));
        after = page["after"].as_u64().unwrap();
        if page["more"] == false {
            break;
        }
    }
    let payees: Vec<Address> = payees.iter().map(|payee| payee.parse().unwrap()).collect();
    assert_eq!(payees, booths);

    let client = reqwest::Client::new();
    let url = directory.join("cards?limit=3").unwrap();
    let tag = client.get(url.clone()).send().await.unwrap().headers()["etag"].clone();
    let again = async || client.get(url.clone()).header("if-none-match", &tag).send().await.unwrap().status();
    assert_eq!(again().await, StatusCode::NOT_MODIFIED);
    let other = directory.join("cards?limit=2").unwrap();
    let other = client.get(other).header("if-none-match", &tag).send().await.unwrap();
    assert_eq!(other.status(), 200);
    for bad in ["cards?after=x", "cards?limit=many", "evidence?evaluator=me", "evidence?limit=-1"] {
        let answer = reqwest::get(directory.join(bad).unwrap()).await.unwrap();
        assert_eq!(answer.status(), 400, "{bad}");
    }
}

#[tokio::test]
async fn only_signed_cards_of_their_own_origin_are_listed() {
    let (_, directory) = directory().await;
    let booth = Booth::open(&["prose"]).await;
    let honest = reqwest::get(booth.url.join(CARD_PATH).unwrap()).await.unwrap().text().await.unwrap();
    let copy = Booth::open(&["prose"]).await;
    for text in [
        honest.clone(), // The card of somebody else.
        honest.replace("Marks it", "Marks all"),
        honest.replace("signatures", "signatures0"),
        "{}".into(),
        "hello".into(),
        " ".repeat(70_000),
    ] {
        copy.show_text(Some(&text));
        assert_eq!(list(&directory, &copy.url).await, (422, "bad_card".into()), "{text:.200}");
    }
    copy.show_text(None);
    assert_eq!(list(&directory, &copy.url).await, (502, "unreachable".into()));
    for (url, error) in [
        ("file:///etc/passwd", (422, "bad_card")),
        ("gopher://a.example/", (422, "bad_card")),
        ("http://user:password@a.example/", (400, "bad_request")),
        ("nonsense", (400, "bad_request")),
        (&format!("http://a.example/{}", "a".repeat(3_000)), (400, "bad_request")),
    ] {
        let (status, word) = list(&directory, url).await;
        assert_eq!((status, &*word), error, "{url}");
    }
    let skills: Vec<String> = (0..65).map(|number| format!("skill{number}")).collect();
    copy.show(&skills.iter().take(64).map(|skill| &**skill).collect::<Vec<_>>(), &copy.payee, PRICE).await;
    assert_eq!(list(&directory, &copy.url).await.0, 201);
    assert_eq!(found(&directory, CardQuery::default()).await.len(), 1);
    assert_eq!(post(&directory, "cards", vec![b' '; 17_000]).await, (413, "body_too_large".into()));
    assert_eq!(post(&directory, "evidence", vec![b' '; 17_000]).await, (413, "body_too_large".into()));
    assert_eq!(post(&directory, "elsewhere", vec![]).await, (404, "not_found".into()));
    let wrong = reqwest::Client::new().delete(directory.join("cards").unwrap()).send().await.unwrap();
    assert_eq!(wrong.status(), 405);
}

#[tokio::test]
async fn duplicate_field_is_listed_once() {
    let (_, directory) = directory().await;
    let booth = Booth::open(&["prose"]).await;
    let honest = reqwest::get(booth.url.join(CARD_PATH).unwrap()).await.unwrap().text().await.unwrap();
    let twice = honest.replacen('{', "{\"name\": \"The best judge\", ", 1);
    booth.show_text(Some(&twice));
    assert_eq!(list(&directory, &booth.url).await.0, 201);
    let page = reqwest::get(directory.join("cards").unwrap()).await.unwrap().text().await.unwrap();
    assert!(page.contains("The judge") && !page.contains("The best judge"));
}

/// Else whoever copies it to another origin would be this evaluator there, and be paid for nothing in its name.
#[tokio::test]
async fn signed_card_needs_an_absolute_endpoint() {
    let (_, directory) = directory().await;
    let (booth, copy) = (Booth::open(&["prose"]).await, Booth::open(&["prose"]).await);
    for endpoint in ["/evaluate", "evaluate", "", "?"] {
        booth.show_adjusted(|card| card.capabilities.extensions[0].params["endpoint"] = endpoint.into()).await;
        let url = booth.url.join(CARD_PATH).unwrap();
        let card = reqwest::get(url).await.unwrap().text().await.unwrap();
        copy.show_text(Some(&card));
        for url in [&booth.url, &copy.url] {
            assert_eq!(list(&directory, url).await, (422, "bad_card".into()), "{endpoint}");
            let read = VerifiedCard::verify(card.as_bytes(), &url.join(CARD_PATH).unwrap());
            assert!(matches!(read, Err(CardError::RelativeEndpoint)), "{endpoint}");
        }
    }
    let absolute = booth.url.join("evaluate").unwrap();
    booth.show_adjusted(|card| card.capabilities.extensions[0].params["endpoint"] = absolute.as_str().into()).await;
    assert_eq!(list(&directory, &booth.url).await.0, 201);
}

/// An evaluator that could have its skills forgotten would not be spoken of.
#[tokio::test]
async fn new_skills_replace_no_paid_skill() {
    let chain = DevnetChain::start(None).await;
    let clock = Arc::new(ManualClock::at(unix_now()));
    let stage =
        Stage::set_with(&chain, |directory| directory.payment_checker(checker(&chain)).clock(clock.clone())).await;
    let (booth, payer) = (stage.booth(&["prose"]).await, stage.payer().await);
    let evaluator = booth.payee.address();
    let report = stage.pay(&payer, evaluator, PRICE).await.report(evaluator, &payer).await;
    let mut answers = Vec::new();
    for round in 0..4 {
        let skills: Vec<String> = (0..64).map(|number| format!("skill{round}.{number}")).collect();
        booth.show(&skills.iter().map(|skill| &**skill).collect::<Vec<_>>(), &booth.payee, PRICE).await;
        clock.advance(61);
        answers.push(list(&stage.url, &booth.url).await);
    }
    assert_eq!(answers[2].0, 200);
    assert_eq!(answers[3], (422, "too_many_skills".into()));
    assert_eq!(stage.post(&report).await.0, 201);
    // What was refused changed nothing.
    let poetry = CardQuery::default().skill("skill3.0");
    assert_eq!(found(&stage.url, poetry).await, []);
    booth.show(&["prose", "skill0.0"], &booth.payee, PRICE).await;
    assert_eq!(list(&stage.url, &booth.url).await.0, 200);
}

#[tokio::test]
async fn payee_of_a_listed_card_cannot_change() {
    let (service, directory) = directory().await;
    let booth = Booth::open(&["prose"]).await;
    let clock = Arc::new(ManualClock::at(1_000_000));
    let store = DirectoryStore::in_memory().await.unwrap();
    let own = DirectoryService::builder(store).private_hosts(true).clock(clock.clone()).build().unwrap();
    let own_url = serve(TcpListener::bind("127.0.0.1:0").await.unwrap(), own.clone());
    for directory in [&directory, &own_url] {
        assert_eq!(list(directory, &booth.url).await.0, 201);
    }
    booth.show(&["prose"], &PrivateKeySigner::random(), PRICE).await;
    clock.advance(61);
    assert_eq!(list(&own_url, &booth.url).await, (409, "payee_changed".into()));
    // Nor when the directory looks by itself: it is as if there were no card, until it is not listed any more.
    clock.advance(2 * 3_600);
    own.upkeep_once().await.unwrap();
    assert_eq!(found(&own_url, CardQuery::default()).await[0].1, booth.payee.address());
    clock.advance(86_400);
    own.upkeep_once().await.unwrap();
    assert_eq!(found(&own_url, CardQuery::default()).await, []);
    assert_eq!(list(&own_url, &booth.url).await, (409, "payee_changed".into()));
    // Who was forgotten can be somebody else.
    clock.advance(31 * 86_400);
    own.upkeep_once().await.unwrap();
    assert_eq!(list(&own_url, &booth.url).await.0, 201);
    drop(service);
}

#[tokio::test]
async fn unreachable_card_is_unlisted_and_listed_again_when_it_returns() {
    let clock = Arc::new(ManualClock::at(1_000_000));
    let store = DirectoryStore::in_memory().await.unwrap();
    let service = DirectoryService::builder(store).private_hosts(true).clock(clock.clone());
    let service = service.card_ages(HOUR, 24 * HOUR, 30 * 24 * HOUR).build().unwrap();
    let directory = serve(TcpListener::bind("127.0.0.1:0").await.unwrap(), service.clone());
    let (steady, fickle) = (Booth::open(&["prose"]).await, Booth::open(&["prose"]).await);
    list(&directory, &steady.url).await;
    list(&directory, &fickle.url).await;
    fickle.show_text(None);
    let listed = async || found(&directory, CardQuery::default()).await.len();
    clock.advance(2 * 3_600);
    service.upkeep_once().await.unwrap();
    assert_eq!(listed().await, 2, "it may be down for a while");
    for _ in 0..23 {
        clock.advance(3_600);
        service.upkeep_once().await.unwrap();
    }
    assert_eq!(listed().await, 1);
    fickle.show(&["prose"], &fickle.payee, PRICE).await;
    clock.advance(3_600);
    service.upkeep_once().await.unwrap();
    assert_eq!(listed().await, 2, "it is still asked for");
}

#[tokio::test]
async fn evaluators_without_reports_make_room_for_others() {
    let chain = DevnetChain::start(None).await;
    let stage = Stage::set_with(&chain, |directory| directory.payment_checker(checker(&chain)).max_cards(3, 10)).await;
    let (first, second, third) =
        (stage.booth(&["prose"]).await, stage.booth(&["prose"]).await, stage.booth(&["prose"]).await);
    let payer = stage.payer().await;
    let send = async |booth: &Booth| {
        let paid = stage.pay(&payer, booth.payee.address(), PRICE).await;
        assert_eq!(stage.post(&paid.report(booth.payee.address(), &payer).await).await.0, 201);
    };
    send(&first).await;
    let fourth = stage.booth(&["prose"]).await;
    let listed = async || found(&stage.url, CardQuery::default()).await.into_iter().map(|(_, payee)| payee);
    let expected = [&first, &third, &fourth].map(|booth| booth.payee.address());
    assert!(listed().await.eq(expected), "{:?}", second.payee.address());
    send(&third).await;
    send(&fourth).await;
    assert_eq!(list(&stage.url, &second.url).await, (503, "full".into()));
    assert!(listed().await.eq(expected));
}

#[tokio::test]
async fn one_host_cannot_fill_the_directory() {
    let chain = DevnetChain::start(None).await;
    let stage = Stage::set_with(&chain, |directory| directory.max_cards(100, 2)).await;
    stage.booth(&["prose"]).await;
    stage.booth(&["prose"]).await;
    let third = Booth::open(&["prose"]).await;
    let answer = stage.client().list(&third.url).await;
    assert!(matches!(answer, Err(DirectoryError::Answered { status: 429, error, .. }) if error == "too_many_of_host"));
}

/// Else it would for as long as anybody has paid it once.
#[tokio::test]
async fn one_payee_cannot_fill_the_directory() {
    let chain = DevnetChain::start(None).await;
    let clock = Arc::new(ManualClock::at(1_000_000));
    let stage = Stage::set_with(&chain, |directory| directory.max_cards_per_payee(2).clock(clock.clone())).await;
    let first = stage.booth(&["prose"]).await;
    let (second, third) = (Booth::open(&["prose"]).await, Booth::open(&["prose"]).await);
    for booth in [&second, &third] {
        booth.show(&["prose"], &first.payee, PRICE).await;
    }
    assert_eq!(list(&stage.url, &second.url).await.0, 201);
    let answer = stage.client().list(&third.url).await;
    assert!(matches!(answer, Err(DirectoryError::Answered { status: 429, error, .. }) if error == "too_many_of_payee"));
    clock.advance(61);
    assert_eq!(list(&stage.url, &first.url).await.0, 200, "what is known may be renewed");
    // Of another payee there may be cards.
    third.show(&["prose"], &third.payee, PRICE).await;
    assert_eq!(list(&stage.url, &third.url).await.0, 201);
}

/// Else whoever lists many cards would be all that a student looks at.
#[tokio::test]
async fn each_payee_is_named_before_second_cards() {
    let (_, directory) = directory().await;
    let (first, second) = (Booth::open(&["prose"]).await, Booth::open(&["prose"]).await);
    let (third, other) = (Booth::open(&["prose"]).await, Booth::open(&["prose"]).await);
    for booth in [&second, &third] {
        booth.show(&["prose"], &first.payee, PRICE).await;
    }
    for booth in [&first, &second, &third, &other] {
        assert_eq!(list(&directory, &booth.url).await.0, 201);
    }
    let named = DirectoryClient::new(&directory).unwrap().evaluators().await.unwrap();
    assert_eq!(named, [&first, &other, &second, &third].map(|booth| booth.url.join(CARD_PATH).unwrap()));
}

#[tokio::test]
async fn one_card_cannot_be_listed_under_many_names() {
    let (_, directory) = directory().await;
    let booth = Booth::open(&["prose"]).await;
    let card = booth.url.join(CARD_PATH).unwrap();
    for another in ["?1", "?", "#1"] {
        assert_eq!(list(&directory, format!("{card}{another}")).await, (400, "bad_request".into()), "{another}");
    }
}

/// Servers show a card below any path, and anybody may list any URL. Otherwise anybody could use up the places of its payee and host.
#[tokio::test]
async fn one_evaluator_has_one_card_under_all_its_urls() {
    let chain = DevnetChain::start(None).await;
    let clock = Arc::new(ManualClock::at(1_000_000));
    let adjust = |directory: DirectoryBuilder| directory.max_cards_per_payee(2).max_cards(100, 2).clock(clock.clone());
    let stage = Stage::set_with(&chain, adjust).await;
    let (base, payee) = evaluator(&chain).await;
    let at = |path: &str| base.join(path).unwrap().join(&CARD_PATH[1..]).unwrap();
    let listed = async || found(&stage.url, CardQuery::default()).await;
    assert_eq!(list(&stage.url, at("/longer/1/")).await.0, 201);
    for (path, expected) in [("/longer/2/", "/longer/1/"), ("/1/", "/1/"), ("/2/", "/1/"), ("/", "/"), ("/1/", "/")] {
        assert_eq!(list(&stage.url, at(path)).await, (200, String::new()), "{path}");
        assert_eq!(listed().await, [(at(expected), payee)], "{path}");
    }
    // Nor when the directory looks by itself.
    clock.advance(2 * 3_600);
    stage.service.upkeep_once().await.unwrap();
    assert_eq!(list(&stage.url, at("/3/")).await.0, 200);
    assert_eq!(listed().await, [(at("/"), payee)]);
}

/// An evaluator whose card is elsewhere from now on, as a server with other paths has it.
#[tokio::test]
async fn another_url_replaces_one_that_is_gone() {
    let clock = Arc::new(ManualClock::at(1_000_000));
    let store = DirectoryStore::in_memory().await.unwrap();
    let service = DirectoryService::builder(store).private_hosts(true).clock(clock.clone()).rate(1e6, 1e6).build();
    let service = service.unwrap();
    let directory = serve(TcpListener::bind("127.0.0.1:0").await.unwrap(), service.clone());
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let base: Url = format!("http://{}", listener.local_addr().unwrap()).parse().unwrap();
    let key = PrivateKeySigner::random();
    let card = AgentCard::builder("The judge", base.clone()).skill("prose", "Marks style", Score::MAX).price("$0.001");
    let card = card.pay_to(Network::BASE_SEPOLIA, key.address()).build().unwrap().sign(&key).await.unwrap();
    let card = serde_json::to_string(&card).unwrap();
    let (other, is_gone) = (card.clone(), Arc::new(AtomicBool::new(false)));
    let gone = is_gone.clone();
    let first = async move || if gone.load(Ordering::SeqCst) { Err(StatusCode::NOT_FOUND) } else { Ok(card.clone()) };
    let router = Router::new().route(CARD_PATH, get(first)).route("/a/judge.json", get(async move || other.clone()));
    tokio::spawn(async { axum::serve(listener, router).await });

    let [first, other] = [CARD_PATH, "/a/judge.json"].map(|path| base.join(path).unwrap());
    let listed = async || found(&directory, CardQuery::default()).await;
    assert_eq!(list(&directory, &first).await.0, 201);
    assert_eq!(list(&directory, &other).await.0, 200);
    assert_eq!(listed().await, [(first.clone(), key.address())]);
    is_gone.store(true, Ordering::SeqCst);
    let later = async |hours: u64| {
        clock.advance(hours * 3_600);
        service.upkeep_once().await.unwrap();
        assert_eq!(list(&directory, &other).await.0, 200);
    };
    // Not at once: who is away for an hour would be listed with whatever somebody else has kept of its cards.
    later(2).await;
    assert_eq!(listed().await, [(first.clone(), key.address())]);
    later(24).await;
    assert_eq!(listed().await, [(other.clone(), key.address())]);
    // Nor for good.
    is_gone.store(false, Ordering::SeqCst);
    clock.advance(2 * 3_600);
    service.upkeep_once().await.unwrap();
    assert_eq!(listed().await, [(first, key.address())]);
}

#[tokio::test]
async fn private_hosts_are_not_asked() {
    let booth = Booth::open(&["prose"]).await;
    let store = DirectoryStore::in_memory().await.unwrap();
    let service = DirectoryService::builder(store).build().unwrap();
    let directory = serve(TcpListener::bind("127.0.0.1:0").await.unwrap(), service);
    let port = booth.url.port().unwrap();
    for host in
        ["127.0.0.1", "localhost", "127.1", "2130706433", "0x7f000001", "[::1]", "[::ffff:127.0.0.1]", "0.0.0.0"]
    {
        let answer = list(&directory, format!("http://{host}:{port}/")).await;
        assert_eq!(answer, (422, "not_public".into()), "{host}");
    }
    for host in ["10.0.0.1", "192.168.0.1", "169.254.169.254", "[fd00:ec2::254]"] {
        assert_eq!(list(&directory, format!("http://{host}/")).await, (422, "not_public".into()), "{host}");
    }
    // Whoever reads what a directory lists can protect itself in the same way.
    let fetcher = CardFetcher::new().unwrap().public_only();
    assert!(matches!(fetcher.fetch(&booth.url).await, Err(CardError::NotPublic)));
    let by_name: Url = format!("http://localhost:{port}").parse().unwrap();
    assert!(matches!(fetcher.fetch(&by_name).await, Err(CardError::NotPublic)));
}

#[tokio::test]
async fn redirect_to_another_host_is_not_followed() {
    let (_, directory) = directory().await;
    let router = Router::new().route(CARD_PATH, get(async || Redirect::temporary("http://169.254.169.254/latest")));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async { axum::serve(listener, router).await });
    assert_eq!(list(&directory, url).await, (422, "bad_card".into()));
}

/// Per address, as whoever accepts the connection says it is.
#[tokio::test]
async fn rate_limit_holds_for_each_caller_alone() {
    let store = DirectoryStore::in_memory().await.unwrap();
    let service = DirectoryService::builder(store).rate(0.01, 3.0).build().unwrap();
    let ask = async |peer: [u8; 4]| {
        let mut request = http::Request::get("/cards").body(axum::body::Body::empty()).unwrap();
        request.extensions_mut().insert(PeerAddress(peer.into()));
        let response = service.clone().oneshot(request).await.unwrap();
        assert!(response.status() == 200 || response.headers().contains_key("retry-after"));
        response.status().as_u16()
    };
    let mut answers = Vec::new();
    for _ in 0..5 {
        answers.push(ask([192, 0, 2, 1]).await);
    }
    assert_eq!(answers, [200, 200, 200, 429, 429]);
    assert_eq!(ask([192, 0, 2, 2]).await, 200);
}

/// A directory that changes what was signed, or names another place for it.
#[tokio::test]
async fn reader_verifies_each_card_itself() {
    let booth = Booth::open(&["prose"]).await;
    let card = reqwest::get(booth.url.join(CARD_PATH).unwrap()).await.unwrap().text().await.unwrap();
    let card: Value = serde_json::from_str(&card).unwrap();
    let url = booth.url.join(CARD_PATH).unwrap();
    let mut cheaper = card.clone();
    cheaper["capabilities"]["extensions"][0]["params"]["pricePerOutput"] = json!("1");
    let entry = |id: u64, url: &str, card: &Value| json!({ "id": id, "url": url, "payTo": booth.payee.address(), "firstSeen": 1, "lastSeen": 2, "card": card });
    let page = json!({
        "cards": [
            entry(1, url.as_str(), &card), entry(2, url.as_str(), &cheaper), entry(3, "http://thief.example/card.json", &card),
            entry(4, "nonsense", &card), entry(5, url.as_str(), &card), entry(6, url.as_str(), &json!("hello")),
        ],
        // And one that never ends.
        "after": 0, "more": true,
    });
    let body = page.to_string();
    let router = Router::new().route("/cards", get(async move || body.clone()));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let directory: Url = format!("http://{}", listener.local_addr().unwrap()).parse().unwrap();
    tokio::spawn(async { axum::serve(listener, router).await });
    let cards = DirectoryClient::new(&directory).unwrap().cards(&CardQuery::default()).await.unwrap();
    assert_eq!((cards.found.len(), cards.skipped), (1, 5));
    assert_eq!(cards.found[0].card.pricing().price_per_output().atomic(), PRICE);
    let cards = DirectoryClient::new(&directory).unwrap().cards(&CardQuery::default().skill("none")).await.unwrap();
    assert!(cards.found.is_empty(), "what was asked for is looked at here, too");
}

/// What a reader finds whose directory has these cards on each page, and says that there are more; and how often it was asked.
async fn read_without_end(cards: String) -> (FoundCards, usize) {
    let asked = Arc::new(AtomicUsize::new(0));
    let counted = asked.clone();
    let page = async move || {
        let after = counted.fetch_add(1, Ordering::SeqCst) + 1;
        format!("{{\"cards\":[{cards}],\"after\":{after},\"more\":true}}")
    };
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let directory: Url = format!("http://{}", listener.local_addr().unwrap()).parse().unwrap();
    tokio::spawn(async { axum::serve(listener, Router::new().route("/cards", get(page))).await });
    let reader = DirectoryClient::new(&directory).unwrap();
    let query = CardQuery::default();
    let found = tokio::time::timeout(Duration::from_secs(60), reader.cards(&query)).await.expect("it ends").unwrap();
    (found, asked.load(Ordering::SeqCst))
}

#[tokio::test]
async fn empty_pages_end_the_reading() {
    let (cards, asked) = read_without_end(String::new()).await;
    assert_eq!((cards.found.len(), cards.skipped, asked), (0, 0, 1));
}

#[tokio::test]
async fn reader_limits_the_bytes_of_cards() {
    let card = "a".repeat(1 << 20);
    let entry = json!({ "id": 1, "url": "http://a.example/card.json", "payTo": Address::ZERO, "firstSeen": 1, "lastSeen": 2, "card": card });
    let (cards, asked) = read_without_end(vec![entry.to_string(); 4].join(",")).await;
    assert_eq!((cards.found.len(), cards.skipped, asked), (0, 64, 16), "64 MiB, at four a page");
}
