//! Discovery: which evaluators a student finds, and which it refuses.

use std::{
    error::Error as _,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use alloy_signer_local::PrivateKeySigner;
use axum::{
    Router,
    extract::{Path, Request},
    http::StatusCode,
    middleware::{Next, from_fn},
    response::IntoResponse as _,
    routing::get,
};
use tokio::net::TcpListener;
use tower_x402::{Network, client::PaymentMiddleware, facilitator::RemoteFacilitator};
use url::Url;
use x402_bazaar::DiscoveryClient;
use x402_facilitator::FacilitatorService;
use x402_market::{
    AgentCard, CARD_PATH, CardError, CardFetcher, CardSource, EvaluateError, EvaluationClient, EvaluatorService,
    RefusedReason, SourceError, Student,
};

use support::crowd::signed;
use support::student_stage::{Booth, Cheapest, PRICE, Stage, card, honest, serve, single};

#[tokio::test]
async fn evaluators_are_found_through_a_facilitator() {
    let stage = Stage::set().await;
    let bank = FacilitatorService::builder(stage.facilitator.clone()).catalogue(100, Duration::from_secs(86_400));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (bank, _) = serve(listener, Router::new().fallback_service(bank.catalogue_local_hosts(true).build()));
    let remote = RemoteFacilitator::builder(bank.as_str()).build().await.unwrap();

    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let key = PrivateKeySigner::random();
    let card = card(listener.local_addr().unwrap(), key.address()).build().unwrap().sign(&key).await.unwrap();
    let service = EvaluatorService::builder(card, honest()).facilitator(remote).build().unwrap();
    let (url, server) = serve(listener, Router::new().fallback_service(service));
    let booth = Booth { url, payee: key.address(), server };

    let facilitator = DiscoveryClient::builder(bank.as_str()).build().unwrap();
    let student = Student::builder(stage.payer(100 * PRICE).await).source(facilitator).tasks(10).seed(1);
    let student = student.private_hosts(true).build().unwrap();
    assert!(student.discover().await.found.is_empty(), "nothing was sold yet");

    let card = CardFetcher::new().unwrap().fetch(&booth.url).await.unwrap();
    let other = EvaluationClient::new(stage.payer(PRICE).await).unwrap();
    other.evaluate(&card, &single("a good one")).await.unwrap();

    let report = student.discover().await;
    assert_eq!(report.found.len(), 1, "{report:?}");
    assert_eq!((report.found[0].evaluator, report.found[0].is_new), (booth.payee, true));
    assert_eq!(student.evaluate(&single("a good one")).await.unwrap().judged_outputs(), 1);
    assert_eq!(stage.income(&booth).await, 2 * PRICE);
}

struct Broken;

#[async_trait::async_trait]
impl CardSource for Broken {
    async fn evaluators(&self) -> Result<Vec<Url>, SourceError> {
        Err(SourceError::new("closed today"))
    }
}

#[tokio::test]
async fn refused_evaluators_are_reported_with_the_reason() {
    let stage = Stage::set().await;
    let good = stage.open(honest()).await;
    let dead = stage.open(honest()).await;
    dead.server.abort();
    // Aborting is not waited for.
    let address = dead.url.socket_addrs(|| None).unwrap()[0];
    support::eventually::eventually("nobody listens", async || tokio::net::TcpStream::connect(address).await.is_err())
        .await;
    let key = PrivateKeySigner::random();
    let shown = async |json: Vec<u8>, listener: TcpListener| {
        serve(listener, Router::new().route(CARD_PATH, get(async move || json.clone()))).0
    };
    let bind = async || TcpListener::bind("127.0.0.1:0").await.unwrap();
    let at = |listener: &TcpListener| listener.local_addr().unwrap();
    let listener = bind().await;
    let unsigned = serde_json::to_vec(&card(at(&listener), key.address()).build().unwrap()).unwrap();
    let unsigned = shown(unsigned, listener).await;
    let listener = bind().await;
    let abroad = AgentCard::builder("Abroad", format!("http://{}", at(&listener)))
        .skill("prose", "Marks style", x402_market::Score::MAX)
        .price("$0.001")
        .pay_to(Network::BASE, key.address());
    let abroad = shown(signed(abroad, &key).await, listener).await;
    let listener = bind().await;
    let (other, _) = serve(listener, Router::new().fallback(async || StatusCode::NOT_FOUND));
    let named =
        vec![good.url.clone(), dead.url.clone(), unsigned.clone(), abroad.clone(), other.clone(), good.url.clone()];
    let payer = stage.payer(100 * PRICE).await;
    let student = Student::builder(payer).source(Broken).source(named).build().unwrap();

    let report = student.discover().await;
    assert_eq!((report.found.len(), report.refused.len(), report.failed.len()), (1, 4, 1), "{report:?}");
    assert_eq!(report.failed[0].source().unwrap().to_string(), "closed today");
    let reason = |url: &Url| &report.refused.iter().find(|refused| refused.url == *url).unwrap().reason;
    assert!(matches!(reason(&dead.url), RefusedReason::Card(CardError::Unreachable(_))));
    assert!(matches!(reason(&unsigned), RefusedReason::Card(CardError::Unsigned)));
    assert!(matches!(reason(&abroad), RefusedReason::Token));
    assert!(matches!(reason(&other), RefusedReason::Card(CardError::Status(404))));
    let again = student.discover().await;
    assert_eq!((again.found.len(), again.found[0].is_new, student.known_evaluators()), (1, false, 1));
}

/// A list that anybody can write to.
struct Wall(Vec<Url>);

#[async_trait::async_trait]
impl CardSource for Wall {
    async fn evaluators(&self) -> Result<Vec<Url>, SourceError> {
        Ok(self.0.clone())
    }
}

#[tokio::test]
async fn untrusted_sources_cannot_name_private_hosts() {
    let stage = Stage::set().await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let key = PrivateKeySigner::random();
    let shown = signed(card(address, key.address()), &key).await;
    let asked = Arc::new(AtomicUsize::new(0));
    let counted = asked.clone();
    let show = get(async move || {
        counted.fetch_add(1, Ordering::Relaxed);
        shown.clone()
    });
    let (url, _) = serve(listener, Router::new().route(CARD_PATH, show));
    let by_name: Url = format!("http://localhost:{}/", address.port()).parse().unwrap();
    let wall = || Wall(vec![url.clone(), by_name.clone(), "http://169.254.169.254/".parse().unwrap()]);

    let student = Student::builder(stage.payer(PRICE).await).source(wall()).build().unwrap();
    let report = student.discover().await;
    assert_eq!((report.found.len(), report.refused.len(), asked.load(Ordering::Relaxed)), (0, 3, 0), "{report:?}");
    for refused in &report.refused {
        assert!(matches!(refused.reason, RefusedReason::Card(CardError::NotPublic)), "{refused:?}");
    }

    // Whom the student's owner names as well is no stranger.
    let student = Student::builder(stage.payer(PRICE).await).source(wall()).source(url.clone()).build().unwrap();
    let report = student.discover().await;
    assert_eq!((report.found.len(), report.refused.len(), &report.found[0].url), (1, 2, &url), "{report:?}");
    let student = Student::builder(stage.payer(PRICE).await).source(Wall(vec![url])).private_hosts(true);
    assert_eq!(student.build().unwrap().discover().await.found.len(), 1);
}

#[tokio::test]
async fn public_only_client_sends_nothing_to_private_hosts() {
    let stage = Stage::set().await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let key = PrivateKeySigner::random();
    let by_name: Url = format!("http://localhost:{}/", address.port()).parse().unwrap();
    let named = AgentCard::builder("Named", by_name.clone())
        .skill("prose", "Marks style", x402_market::Score::MAX)
        .price("$0.001")
        .pay_to(Network::BASE_SEPOLIA, key.address());
    let (numbered, named) = (signed(card(address, key.address()), &key).await, signed(named, &key).await);
    let asked = Arc::new(AtomicUsize::new(0));
    let counted = asked.clone();
    let refuse = async move || {
        counted.fetch_add(1, Ordering::Relaxed);
        StatusCode::NOT_FOUND
    };
    let shows = Router::new()
        .route(CARD_PATH, get(async move || numbered.clone()))
        .route("/named.json", get(async move || named.clone()))
        .fallback(refuse);
    let (url, _) = serve(listener, shows);
    // The same cards as those that were shown when the names still meant something else.
    let cards = CardFetcher::new().unwrap();
    let numbered = cards.fetch(&url).await.unwrap();
    let named = cards.fetch(&by_name.join("named.json").unwrap()).await.unwrap();
    let payments = PaymentMiddleware::new(stage.payer(PRICE).await);
    let client = EvaluationClient::public_only(payments).unwrap();
    for card in [numbered, named] {
        let error = client.evaluate(&card, &single("a good one")).await.unwrap_err();
        assert!(matches!(error, EvaluateError::NotPublic) && error.receipt().is_none(), "{error:?}");
    }
    assert_eq!(asked.load(Ordering::Relaxed), 0);
}

#[tokio::test]
async fn evaluator_with_a_changed_payee_is_not_hired_any_more() {
    let stage = Stage::set().await;
    let (one, two) = (PrivateKeySigner::random(), PrivateKeySigner::random());
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let cards = [signed(card(address, one.address()), &one).await, signed(card(address, two.address()), &two).await];
    let asked = Arc::new(AtomicUsize::new(0));
    let show = get(async move || cards[asked.fetch_add(1, Ordering::Relaxed).min(1)].clone());
    let (url, _) = serve(listener, Router::new().route(CARD_PATH, show));
    let student = Student::builder(stage.payer(100 * PRICE).await).source(url).build().unwrap();
    assert_eq!(student.discover().await.found.len(), 1);
    let report = student.discover().await;
    assert!(matches!(report.refused[0].reason, RefusedReason::Card(CardError::PayeeChanged { .. })), "{report:?}");
    assert!(student.evaluate(&single("a good one")).await.unwrap().hires.is_empty());
}

/// A list that changes, of those whom the student's owner knows.
#[derive(Clone, Default)]
struct Names(Arc<Mutex<Vec<Url>>>);

impl Names {
    fn are(&self, urls: &[&Url]) {
        *self.0.lock().unwrap() = urls.iter().copied().cloned().collect();
    }
}

#[async_trait::async_trait]
impl CardSource for Names {
    async fn evaluators(&self) -> Result<Vec<Url>, SourceError> {
        Ok(self.0.lock().unwrap().clone())
    }

    fn is_untrusted(&self) -> bool {
        false
    }
}

/// What somebody answers in place of everything.
type Sign = Arc<Mutex<Option<(StatusCode, Vec<u8>)>>>;

/// An evaluator of prose with this key, and the sign that may be put up there.
async fn stall(stage: &Stage, key: &PrivateKeySigner) -> (Url, Sign) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let card = card(listener.local_addr().unwrap(), key.address()).build().unwrap().sign(key).await.unwrap();
    let service = EvaluatorService::builder(card, honest()).facilitator(stage.facilitator.clone()).build().unwrap();
    let sign = Sign::default();
    let read = sign.clone();
    let door = from_fn(move |request: Request, next: Next| {
        let answer = read.lock().unwrap().clone();
        async move {
            match answer {
                Some(answer) => answer.into_response(),
                None => next.run(request).await,
            }
        }
    });
    let (url, _) = serve(listener, Router::new().fallback_service(service).layer(door));
    (url, sign)
}

#[tokio::test]
async fn moved_evaluator_is_found_at_its_new_place() {
    let stage = Stage::set().await;
    for (gone, is_still_named) in [(404, true), (404, false), (503, true), (503, false)] {
        let key = PrivateKeySigner::random();
        let ((old, sign), (new, _)) = (stall(&stage, &key).await, stall(&stage, &key).await);
        let names = Names::default();
        let student = Student::builder(stage.payer(100 * PRICE).await).source(names.clone()).selector(Cheapest);
        let student = student.build().unwrap();
        names.are(&[&old]);
        assert_eq!(student.discover().await.found.len(), 1);
        // As long as it is where it was, it is nowhere else.
        names.are(&[&new, &old][..1 + usize::from(is_still_named)]);
        let report = student.discover().await;
        let refused = &report.refused[0];
        assert!(matches!(&refused.reason, RefusedReason::SamePayee(at) if *at == old), "{refused:?}");

        *sign.lock().unwrap() = Some((StatusCode::from_u16(gone).unwrap(), Vec::new()));
        if gone == 503 {
            // Whose server stumbles once has not left.
            for _ in 0..2 {
                let report = student.discover().await;
                assert!(report.found.is_empty(), "{report:?}");
            }
        }
        let report = student.discover().await;
        let found: Vec<_> = report.found.iter().map(|found| (&found.url, found.evaluator, found.is_new)).collect();
        assert_eq!(found, [(&new, key.address(), false)], "{gone} {report:?}");
        assert_eq!(student.known_evaluators(), 1);
        assert_eq!(student.evaluate(&single("a good one")).await.unwrap().hires[0].url, new);
    }
}

#[tokio::test]
async fn evaluator_without_valid_card_makes_room_for_a_new_one() {
    let stage = Stage::set().await;
    let keys = [PrivateKeySigner::random(), PrivateKeySigner::random()];
    let (first, sign) = stall(&stage, &keys[0]).await;
    let (second, _) = stall(&stage, &keys[1]).await;
    let names = Names::default();
    let student = Student::builder(stage.payer(100 * PRICE).await).source(names.clone()).selector(Cheapest);
    let student = student.max_evaluators(1).build().unwrap();
    names.are(&[&first]);
    assert_eq!(student.discover().await.found.len(), 1);
    assert_eq!(student.evaluate(&single("a good one")).await.unwrap().judged_outputs(), 1);
    names.are(&[&first, &second]);
    let report = student.discover().await;
    assert!(matches!(report.refused[0].reason, RefusedReason::Full(1)), "{report:?}");

    *sign.lock().unwrap() = Some((StatusCode::NOT_FOUND, Vec::new()));
    let report = student.discover().await;
    assert_eq!(report.found.iter().map(|found| &found.url).collect::<Vec<_>>(), [&second], "{report:?}");
    assert_eq!(student.known_evaluators(), 1);
    let feedback = student.evaluate(&single("a good one")).await.unwrap();
    assert_eq!((feedback.judged_outputs(), feedback.hires[0].evaluator), (1, keys[1].address()));
    let books = student.spending();
    let answered = keys.each_ref().map(|key| books.account(key.address(), "prose").unwrap().answered);
    assert_eq!(answered, [1, 1], "the account of the first one stays in the report");

    // Its place is taken, but who was paid at its URL is not forgotten.
    *sign.lock().unwrap() = None;
    assert!(matches!(student.discover().await.refused[0].reason, RefusedReason::Full(1)));
    let usurper = PrivateKeySigner::random();
    let usurping = signed(card(first.socket_addrs(|| None).unwrap()[0], usurper.address()), &usurper).await;
    *sign.lock().unwrap() = Some((StatusCode::OK, usurping));
    let refused = student.discover().await.refused;
    assert!(matches!(refused[0].reason, RefusedReason::Card(CardError::PayeeChanged { .. })), "{refused:?}");
}

#[tokio::test]
async fn many_urls_of_one_evaluator_take_no_places_of_others() {
    let stage = Stage::set().await;
    let (url, _) = stall(&stage, &PrivateKeySigner::random()).await;
    let (other, _) = stall(&stage, &PrivateKeySigner::random()).await;
    let names = Names::default();
    let cards = CardFetcher::new().unwrap().max_evaluators(3);
    let told = url.join("/told/").unwrap();
    cards.pin(&told, PrivateKeySigner::random().address()).unwrap();
    let student = Student::builder(stage.payer(PRICE).await).source(names.clone()).card_fetcher(cards).build().unwrap();
    let paths = ["/1/", "/2/", "/3/", "/4/"].map(|path| url.join(path).unwrap());
    names.are(&paths.each_ref());
    assert_eq!(student.discover().await.found.len(), 1);
    names.are(&[&other, &told]);
    let report = student.discover().await;
    assert_eq!((report.found.len(), &report.found[0].url), (1, &other), "{report:?}");
    // What the owner said of a URL is not forgotten.
    assert!(matches!(report.refused[0].reason, RefusedReason::Card(CardError::PayeeChanged { .. })), "{report:?}");
}

#[tokio::test]
async fn number_of_fetched_cards_is_limited() {
    let stage = Stage::set().await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let mut cards = Vec::new();
    for _ in 0..110 {
        let key = PrivateKeySigner::random();
        cards.push(signed(card(address, key.address()), &key).await);
    }
    let (now, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let peak = most.clone();
    let show = get(async move |Path(number): Path<usize>| {
        most.fetch_max(now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
        for _ in 0..100 {
            tokio::task::yield_now().await;
        }
        now.fetch_sub(1, Ordering::SeqCst);
        cards[number % cards.len()].clone()
    });
    let (url, _) = serve(listener, Router::new().route("/{number}/.well-known/agent-card.json", show));
    let urls: Vec<_> = (0..400).map(|number| url.join(&format!("{number}/")).unwrap()).collect();
    let student = Student::builder(stage.payer(100 * PRICE).await).source(urls).max_evaluators(60).build().unwrap();
    let report = student.discover().await;
    assert_eq!((report.found.len(), report.left_out, student.known_evaluators()), (60, 280, 60));
    let full = |refused: &&x402_market::RefusedEvaluator| matches!(refused.reason, RefusedReason::Full(60));
    let same = |refused: &&x402_market::RefusedEvaluator| matches!(refused.reason, RefusedReason::SamePayee(_));
    let (full, same) = (report.refused.iter().filter(full).count(), report.refused.iter().filter(same).count());
    assert_eq!((full + same, report.refused.len()), (60, 60), "{report:?}");
    let peak = peak.load(Ordering::SeqCst);
    assert!((2..=16).contains(&peak), "{peak}");
}
