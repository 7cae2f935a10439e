//! The reqwest middleware against scripted servers.

use std::{
    io,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use alloy_primitives::{Address, B256, U256};
use alloy_signer_local::PrivateKeySigner;
use axum::{
    body::Body,
    http::{Method, StatusCode, header},
    response::{IntoResponse, Response},
};
use reqwest_middleware::ClientWithMiddleware;
use serde_json::json;
use tower_x402::{
    ManualClock, Network, Nonces, RandomnessError, Usdc,
    client::{
        Budget, Journal, OfferRefusal, Payer, PayerBuilder, PaymentError, PaymentMiddleware, PaymentOutcome, Receipt,
        ReceiptExt, Refusal, RetryPolicy,
    },
    eip3009::{Authorization, AuthorizationSigner, PaymentSignature, SignError, TokenDomain},
    protocol::DecodeError,
};

use support::script::*;

pub fn middleware(budget: &Budget) -> PaymentMiddleware {
    PaymentMiddleware::new(payer(budget))
        .retry(RetryPolicy::default().attempt_timeout(Duration::from_millis(300)).first_pause(Duration::from_millis(5)))
}

pub fn client(budget: &Budget) -> ClientWithMiddleware {
    middleware(budget).client(reqwest::Client::builder().no_proxy()).unwrap()
}

pub async fn buy(server: &Server, budget: &Budget) -> Result<(u16, Receipt), reqwest_middleware::Error> {
    let response = client(budget).post(server.url()).body("my answer").send().await?;
    Ok((response.status().as_u16(), response.receipt().expect("it was paid for").clone()))
}

/// Pays 1,000 units to a server with this reply.
pub async fn outcome(replies: Vec<Reply>) -> (u16, Receipt, Budget, Server) {
    let server = Server::paid(required(&[offer(1_000)]), replies).await;
    let budget = budget(10_000);
    let (status, receipt) = buy(&server, &budget).await.unwrap();
    (status, receipt, budget, server)
}

pub fn refusal(error: &reqwest_middleware::Error) -> &Refusal {
    match PaymentError::of(error) {
        Some(error @ PaymentError::Refused(refusal)) => {
            assert_eq!(error.outcome(), PaymentOutcome::Refused);
            refusal
        }
        _ => panic!("{error:?}"),
    }
}

/// Returns the refusal of these offers, and asserts that no payment arrived.
async fn refused(required: String) -> Refusal {
    let server = Server::paid(required, vec![settled()]).await;
    let budget = budget(10_000);
    let error = buy(&server, &budget).await.unwrap_err();
    assert_eq!(server.seen().len(), 1);
    assert_eq!((budget.reserved(), budget.spent()), (Usdc::ZERO, Usdc::ZERO));
    refusal(&error).clone()
}

#[tokio::test]
async fn a_402_is_paid_and_the_response_carries_the_receipt() {
    let (status, receipt, budget, server) = outcome(vec![settled()]).await;
    assert_eq!(status, 200);
    assert_eq!(receipt.outcome, PaymentOutcome::Settled);
    assert_eq!(receipt.transaction, Some(transaction()));
    assert_eq!(receipt.amount.atomic(), 1_000);
    assert_eq!(receipt.payer.to_string(), PAYER);
    assert_eq!((budget.spent().atomic(), budget.reserved().atomic()), (1_000, 0));

    let seen = server.seen();
    assert_eq!(seen.len(), 2);
    for request in &seen {
        assert_eq!((request.method.as_str(), request.path.as_str()), ("POST", "/evaluate?q=1"));
        assert_eq!(request.body, b"my answer");
    }
    let payload = decode(seen[1].payment.as_ref().unwrap());
    let exact = payload.payload.read().unwrap();
    let authorization = &exact.authorization;
    assert_eq!(authorization.to, Address::repeat_byte(7));
    assert_eq!(authorization.value, U256::from(1_000));
    assert_eq!(authorization.valid_after, U256::from(NOW - 600));
    assert_eq!(authorization.valid_before, U256::from(NOW + 60));
    assert_eq!(authorization.nonce, receipt.nonce);
    let domain = TokenDomain::of(&Network::BASE_SEPOLIA.usdc().unwrap());
    assert_eq!(exact.signature.recover(authorization.signing_hash(&domain)).unwrap(), authorization.from);
    assert_eq!(authorization.from.to_string(), PAYER);
}

#[tokio::test]
async fn offer_resource_and_extensions_return_byte_for_byte() {
    let usdc = Network::BASE_SEPOLIA.usdc().unwrap().address.to_string().to_lowercase();
    let offer = format!(
        "{{ \"payTo\":\t\"0x0707070707070707070707070707070707070707\", \"amount\" :\"1000\",\"scheme\":\"exact\",\r\n\
         \"network\":\"eip155:84532\",\"asset\":\"{usdc}\",\"maxTimeoutSeconds\":60,\"tomorrow\":[1.0, 1e2,\"\\u00e9\"],\
         \"extra\":{{\"version\":\"2\" , \"name\":\"USDC\",\"more\":{{}} }} }}"
    );
    let resource = "{\"url\" : \"u\",\"unknown\": 1.50}";
    let extensions = "{\"payment-identifier\":{ \"required\" :false}}";
    let required = format!(
        "{{\"x402Version\":2,\"resource\":{resource},\"accepts\":[{{\"scheme\":\"other\"}},{offer}],\"extensions\":{extensions}}}"
    );
    let server = Server::paid(encode(required), vec![settled()]).await;
    buy(&server, &budget(10_000)).await.unwrap();
    let payload = decode(&server.payments()[0]);
    assert_eq!(payload.accepted.text(), offer);
    assert_eq!(payload.resource.unwrap().text(), resource);
    assert_eq!(payload.extensions.unwrap().text(), extensions);
}

#[tokio::test]
async fn a_free_resource_costs_one_request() {
    let server = Server::start(|_| Answer::Response("free".into_response())).await;
    let response = client(&budget(0)).get(server.url()).send().await.unwrap();
    assert!(response.receipt().is_none());
    assert_eq!(response.text().await.unwrap(), "free");
    assert_eq!(server.seen().len(), 1);
}

#[tokio::test]
async fn failed_signer_or_randomness_leaves_nothing_reserved() {
    struct Locked;
    #[async_trait::async_trait]
    impl AuthorizationSigner for Locked {
        fn address(&self) -> Address {
            PAYER.parse().unwrap()
        }
        async fn sign(&self, _: &Authorization, _: &TokenDomain) -> Result<PaymentSignature, SignError> {
            Err(alloy_signer::Error::other("the device is locked").into())
        }
    }
    #[derive(Debug)]
    struct Dry;
    impl Nonces for Dry {
        fn next(&self) -> Result<B256, RandomnessError> {
            Err(RandomnessError)
        }
    }
    let budget = budget(10_000);
    let key: PrivateKeySigner = KEY.parse().unwrap();
    let locked = Payer::builder(Locked).budget(budget.clone()).build();
    let dry = Payer::builder(key).nonces(Dry).budget(budget.clone()).build();
    let server = Server::paid(required(&[offer(1_000)]), vec![settled()]).await;
    for payer in [locked, dry] {
        let client = PaymentMiddleware::new(payer).client(reqwest::Client::builder().no_proxy()).unwrap();
        let error = client.post(server.url()).send().await.unwrap_err();
        assert!(matches!(PaymentError::of(&error), Some(PaymentError::Sign(_) | PaymentError::Randomness(_))));
        assert_eq!(budget.reserved(), Usdc::ZERO);
    }
    assert!(server.payments().is_empty());
}

#[tokio::test]
#[cfg(unix)]
async fn payment_that_cannot_be_recorded_is_not_sent_and_not_reserved() {
    let directory = std::env::temp_dir().join(format!("x402-gone-{}", std::process::id()));
    std::fs::create_dir_all(&directory).unwrap();
    let path = directory.join("journal.jsonl");
    let budget = Budget::builder().journal(Journal::open(&path).unwrap()).total(Usdc::from_atomic(1_500)).build();
    let server = Server::paid(required(&[offer(1_000)]), vec![settled(), settled()]).await;
    std::fs::remove_dir_all(&directory).unwrap();
    for _ in 0..3 {
        let error = buy(&server, &budget).await.unwrap_err();
        match PaymentError::of(&error) {
            Some(error @ PaymentError::Journal(_)) => assert_eq!(error.outcome(), PaymentOutcome::Refused),
            _ => panic!("{error:?}"),
        }
        assert_eq!((budget.spent(), budget.reserved()), (Usdc::ZERO, Usdc::ZERO));
        assert!(budget.journal().unresolved().is_empty());
    }
    assert!(server.payments().is_empty());
    drop(budget);

    std::fs::create_dir_all(&directory).unwrap();
    let budget = Budget::builder().journal(Journal::open(&path).unwrap()).total(Usdc::from_atomic(1_500)).build();
    let (_, receipt) = buy(&server, &budget).await.unwrap();
    assert_eq!((receipt.outcome, budget.spent().atomic()), (PaymentOutcome::Settled, 1_000));
    std::fs::remove_dir_all(&directory).unwrap();
}

#[tokio::test]
async fn foreign_402_and_payment_of_the_caller_pass_through() {
    let server = Server::start(|_| Answer::Response((StatusCode::PAYMENT_REQUIRED, "call us").into_response())).await;
    let response = client(&budget(10_000)).get(server.url()).send().await.unwrap();
    assert_eq!(response.text().await.unwrap(), "call us");

    let server = Server::paid(required(&[offer(1_000)]), vec![status(402)]).await;
    let response = client(&budget(10_000)).get(server.url()).header("payment-signature", "mine").send().await.unwrap();
    assert_eq!(response.status(), 402);
    assert_eq!(server.payments(), ["mine"]);
}

#[tokio::test]
async fn head_request_is_not_paid() {
    let server = Server::paid(required(&[offer(1_000)]), vec![settled()]).await;
    let budget = budget(10_000);
    let response = client(&budget).head(server.url()).send().await.unwrap();
    assert_eq!((response.status().as_u16(), response.receipt()), (402, None));
    let (url, headers) = (server.url().parse().unwrap(), response.headers());
    assert!(payer(&budget).pay(&Method::HEAD, &url, headers, None).await.unwrap().is_none());
    assert_eq!((server.seen().len(), budget.remaining()), (1, budget.total()));
    assert!(budget.journal().unresolved().is_empty());
    assert!(payer(&budget).pay(&Method::GET, &url, headers, None).await.unwrap().is_some(), "what it costs is said");
}

#[tokio::test]
async fn refusals_name_the_limit() {
    assert_eq!(
        refused(required(&[offer(10_001)])).await,
        Refusal::AbovePaymentLimit { asked: Usdc::from_atomic(10_001), limit: Usdc::from_atomic(10_000) }
    );
    let server = Server::paid(required(&[offer(1_000)]), vec![settled()]).await;
    let budget = budget(1_999);
    buy(&server, &budget).await.unwrap();
    let error = buy(&server, &budget).await.unwrap_err();
    assert_eq!(error.to_string(), "the price is $0.001, but $0.000999 remains of the total limit of $0.001999");
    assert!(matches!(refusal(&error), Refusal::AboveTotalLimit { .. }));
    assert_eq!(server.payments().len(), 1);
}

#[tokio::test]
async fn best_offer_that_the_budget_covers_is_paid() {
    let priced =
        |network: Network, amount| support::changed(offer(amount), |offer| offer.asset = network.usdc().unwrap());
    let (base, sepolia) = (Network::BASE, Network::BASE_SEPOLIA);
    let buyer = |budget: &Budget| {
        let key: PrivateKeySigner = KEY.parse().unwrap();
        let payer = Payer::builder(key).budget(budget.clone()).clock(Arc::new(ManualClock::at(NOW)));
        let payer = payer.prefer(move |offer| offer.network() != base).build();
        PaymentMiddleware::new(payer).client(reqwest::Client::builder().no_proxy()).unwrap()
    };
    for (on_base, on_sepolia, network) in
        [(9_000, 1_000, Some(base)), (10_001, 1_000, Some(sepolia)), (10_001, 10_002, None)]
    {
        let offers = required(&[priced(sepolia, on_sepolia), priced(base, on_base)]);
        // The server settles nothing; the test is about the network of the payment.
        let server = Server::paid(offers, vec![status(400)]).await;
        let budget = budget(100_000);
        match (buyer(&budget).post(server.url()).send().await, network) {
            (Ok(response), Some(network)) => assert_eq!(response.receipt().unwrap().network, network),
            (Err(error), None) => {
                let asked = Usdc::from_atomic(on_base);
                assert!(matches!(refusal(&error), Refusal::AbovePaymentLimit { asked: best, .. } if *best == asked));
                assert_eq!((budget.remaining(), server.payments().len()), (budget.total(), 0));
            }
            other => panic!("{other:?}"),
        }
        let payment = server.payments().first().map(|payment| decode(payment).accepted.read().unwrap().network);
        assert_eq!(payment, network.map(|network| network.to_string()), "the offer that was echoed");
    }
}

#[tokio::test]
async fn sixty_four_concurrent_payments_do_not_overspend() {
    let server = Server::paid(required(&[offer(1_000)]), (0..64).map(|_| settled()).collect()).await;
    let budget = budget(10_500);
    let client = client(&budget);
    let purchases: Vec<_> = (0..64)
        .map(|_| {
            let request = client.post(server.url()).body("x").send();
            tokio::spawn(async move { request.await.is_ok() })
        })
        .collect();
    let mut paid = 0;
    for purchase in purchases {
        paid += usize::from(purchase.await.unwrap());
    }
    assert_eq!(paid, 10);
    // On a busy machine one may have been presented twice.
    let distinct: std::collections::BTreeSet<_> = server.payments().into_iter().collect();
    assert_eq!(distinct.len(), 10);
    assert_eq!((budget.spent().atomic(), budget.reserved().atomic()), (10_000, 0));
}

#[tokio::test]
async fn redirect_never_carries_the_payment_to_another_origin() {
    let thief = Server::start_at("127.0.0.2", |_| Answer::Response("thanks".into_response())).await;
    let neighbour = Server::start(|_| Answer::Response("thanks".into_response())).await;
    let namesake = format!("http://localhost:{}/", neighbour.address.port());
    for code in [301, 302, 303, 307, 308] {
        for location in [thief.url(), neighbour.url(), namesake.clone()] {
            let (status, receipt, budget, server) = outcome(vec![redirect(code, location)]).await;
            assert_eq!((status, receipt.outcome), (code, PaymentOutcome::Failed));
            assert_eq!((budget.reserved().atomic(), server.payments().len()), (1_000, 1));
        }
    }
    assert!(thief.seen().is_empty() && neighbour.seen().is_empty());
}

#[tokio::test]
async fn a_402_behind_a_redirect_is_not_paid() {
    let seller = Server::paid(required(&[offer(1_000)]), vec![settled()]).await;
    let location = seller.url();
    let front = Server::start(move |_| {
        let response = Response::builder().status(307).header(header::LOCATION, &location);
        Answer::Response(response.body(Body::empty()).unwrap())
    })
    .await;
    // A client that follows redirects, against the advice.
    let budget = budget(10_000);
    let inner = reqwest::Client::builder().no_proxy().build().unwrap();
    let client = reqwest_middleware::ClientBuilder::new(inner).with(middleware(&budget)).build();
    let error = client.post(front.url()).body("x").send().await.unwrap_err();
    assert!(matches!(refusal(&error), Refusal::Redirected { to } if !to.contains('?')));
    assert!(front.payments().is_empty() && seller.payments().is_empty());
    assert_eq!(budget.reserved(), Usdc::ZERO);
}

#[tokio::test]
async fn long_streaming_body_is_refused_before_anything_is_signed() {
    let server = Server::paid(required(&[offer(1_000)]), vec![settled()]).await;
    let budget = budget(10_000);
    let stream = futures_util::stream::iter([Ok::<_, io::Error>("part")]);
    let client = middleware(&budget).max_buffered_body(3).client(reqwest::Client::builder().no_proxy()).unwrap();
    let error = client.post(server.url()).body(reqwest::Body::wrap_stream(stream)).send().await.unwrap_err();
    assert_eq!(refusal(&error), &Refusal::BodyNotReplayable);
    assert_eq!(server.seen().len(), 1);
    assert_eq!(budget.reserved(), Usdc::ZERO);
}

#[tokio::test]
async fn an_unreadable_402_is_an_error_and_signs_nothing() {
    let huge = format!("{{\"x402Version\":2,\"resource\":{{\"url\":\"{}\"}},\"accepts\":[]}}", "u".repeat(20_000));
    let unreadable = [
        ("%%%".to_owned(), "NotBase64"),
        (encode("[]"), "Json"),
        (encode("{\"x402Version\":1,\"accepts\":[]}"), "Json"),
        (encode(huge), "TooLarge"),
    ];
    for (header, expected) in unreadable {
        let server = Server::paid(header, vec![settled()]).await;
        let error = buy(&server, &budget(10_000)).await.unwrap_err();
        let kind = match PaymentError::of(&error) {
            Some(PaymentError::Unreadable(DecodeError::NotBase64)) => "NotBase64",
            Some(PaymentError::Unreadable(DecodeError::Json(_))) => "Json",
            Some(PaymentError::Unreadable(DecodeError::TooLarge { .. })) => "TooLarge",
            _ => panic!("{error:?}"),
        };
        assert_eq!(kind, expected);
        assert_eq!(server.seen().len(), 1);
    }
}

#[tokio::test]
async fn offers_that_cannot_be_paid_are_named() {
    let reasons = |refusal| match refusal {
        Refusal::NoPayableOffer { reasons } => reasons,
        other => panic!("{other:?}"),
    };
    let unknown = support::changed(offer(1), |offer| offer.asset.address = Address::repeat_byte(9));
    let renamed = support::changed(offer(1), |offer| offer.asset.name = "USD Coin".into());
    let untimed = support::changed(offer(1), |offer| offer.max_timeout_seconds = 0);
    let reasons_given = reasons(refused(required(&[unknown, renamed, untimed, offer(0)])).await);
    assert!(matches!(
        reasons_given[..],
        [
            OfferRefusal::UnknownAsset { .. },
            OfferRefusal::WrongDomain { .. },
            OfferRefusal::NoTime,
            OfferRefusal::Amount
        ]
    ));
    assert!(reasons(refused(required(&[])).await).is_empty());

    let thousand = json!({ "x402Version": 2, "resource": { "url": "u" }, "accepts": vec![json!({}); 1_000] });
    assert_eq!(reasons(refused(encode(thousand)).await).len(), 64);
}

#[tokio::test]
async fn the_window_is_capped_by_the_client() {
    let year = support::changed(offer(1_000), |offer| offer.max_timeout_seconds = 31_536_000);
    let server = Server::paid(required(&[year]), vec![settled()]).await;
    buy(&server, &budget(10_000)).await.unwrap();
    let payment = decode(&server.payments()[0]).payload;
    assert_eq!(payment.read().unwrap().authorization.valid_before, U256::from(NOW + 3_600));
}

#[tokio::test]
async fn authorization_is_not_sent_after_it_has_expired() {
    let short = support::changed(offer(1_000), |offer| offer.max_timeout_seconds = 1);
    let reply: Reply = Box::new(|_| {
        let response = Response::builder().status(503).header(header::RETRY_AFTER, "2");
        Answer::Response(response.body(Body::empty()).unwrap())
    });
    let server = Server::paid(required(&[short]), vec![reply, settled()]).await;
    let (status, receipt) = buy(&server, &budget(10_000)).await.unwrap();
    assert_eq!((status, receipt.outcome, server.payments().len()), (503, PaymentOutcome::Unknown, 1));
}

#[tokio::test]
async fn cancelled_request_keeps_its_amount_reserved() {
    let server = Server::paid(required(&[offer(1_000)]), vec![silence()]).await;
    let budget = budget(10_000);
    let purchase = client(&budget).post(server.url()).send();
    assert!(tokio::time::timeout(Duration::from_millis(150), purchase).await.is_err());
    assert_eq!(server.payments().len(), 1);
    assert_eq!(budget.reserved().atomic(), 1_000);
    assert_eq!(budget.journal().unresolved().len(), 1);
}

fn journalled(path: &Path) -> Budget {
    Budget::builder().total(Usdc::from_atomic(3_000)).journal(Journal::open(path).unwrap()).build()
}

#[tokio::test]
async fn a_payment_is_in_the_journal_before_it_is_sent_and_survives_a_restart() {
    let path = TempPath::new("restart");
    let reads = |path: PathBuf, reply: Reply| -> Reply {
        Box::new(move |seen| {
            let journal = std::fs::read_to_string(&path).unwrap();
            assert!(journal.contains(seen.payment.as_ref().unwrap()), "sent before it was recorded");
            reply(seen)
        })
    };
    let replies = vec![
        reads(path.0.clone(), settled()),
        reads(path.0.clone(), Box::new(|_| Answer::Response("no receipt".into_response()))),
        settled(),
    ];
    let server = Server::paid(required(&[offer(1_000)]), replies).await;
    {
        let budget = journalled(&path.0);
        assert_eq!(buy(&server, &budget).await.unwrap().1.outcome, PaymentOutcome::Settled);
        assert_eq!(buy(&server, &budget).await.unwrap().1.outcome, PaymentOutcome::Unknown);
    }
    let budget = journalled(&path.0);
    assert_eq!((budget.spent().atomic(), budget.reserved().atomic()), (1_000, 1_000));
    let open = budget.journal().unresolved();
    assert_eq!(open.len(), 1);
    assert_eq!(open[0].payment, server.payments()[1]);
    assert_eq!(open[0].url, server.url());
    buy(&server, &budget).await.unwrap();
    let error = buy(&server, &budget).await.unwrap_err();
    assert!(matches!(refusal(&error), Refusal::AboveTotalLimit { .. }));
}

#[tokio::test]
async fn errors_and_debug_output_show_no_secrets() {
    let server = Server::paid(required(&[offer(1_000)]), (0..5).map(|_| cut()).collect()).await;
    let budget = budget(10_000);
    let middleware = middleware(&budget);
    let error = buy(&server, &budget).await.unwrap_err();
    let payment = server.payments().remove(0);
    let signature = serde_json::to_value(decode(&payment)).unwrap()["payload"]["signature"].to_string();
    let mut shown = format!("{error} {error:?} {middleware:?} {budget:?} {:?}", budget.journal().unresolved());
    let url = server.url().parse().unwrap();
    let mut headers = http::HeaderMap::new();
    headers.insert("payment-required", required(&[offer(1_000)]).parse().unwrap());
    let signed = payer(&budget).pay(&http::Method::POST, &url, &headers, None).await.unwrap().unwrap();
    shown += &format!("{signed:?}");
    assert!(signed.header().is_sensitive());
    for secret in [payment.as_str(), signature.trim_matches('"'), signed.header().to_str().unwrap(), &KEY[2..]] {
        assert!(!shown.contains(secret), "{shown}");
    }
}

#[tokio::test]
async fn payer_pays_on_the_networks_and_for_the_time_that_it_was_told() {
    let pay = async |settings: fn(PayerBuilder) -> PayerBuilder| {
        let server = Server::paid(required(&[offer(1_000)]), vec![settled()]).await;
        let payer = Payer::builder(KEY.parse::<PrivateKeySigner>().unwrap()).clock(Arc::new(ManualClock::at(NOW)));
        let client = PaymentMiddleware::new(settings(payer).build()).client(reqwest::Client::builder().no_proxy());
        let paid = client.unwrap().post(server.url()).send().await;
        paid.map(|_| payload(&server.payments()[0]).authorization.valid_before)
    };
    // The offer is for Base Sepolia, and for a minute.
    let elsewhere = pay(|payer| payer.networks([Network::BASE])).await.unwrap_err();
    assert!(matches!(refusal(&elsewhere), Refusal::NoPayableOffer { .. }));
    for (window, seconds) in [(30, 30), (90, 60)] {
        let valid_before = match window {
            30 => pay(|payer| payer.networks([Network::BASE_SEPOLIA]).max_window(Duration::from_secs(30))).await,
            _ => pay(|payer| payer.max_window(Duration::from_secs(90))).await,
        };
        assert_eq!(valid_before.unwrap(), U256::from(NOW + seconds), "{window}");
    }
}
