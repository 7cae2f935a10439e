//! A facilitator that has moved, or that is none.

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use axum::{
    Router,
    body::Body,
    http::{HeaderMap, HeaderName, HeaderValue, Request, Response, StatusCode, header::LOCATION},
};
use tower_x402::{
    Network,
    facilitator::{Facilitator as _, NotReady, RemoteBuildError, RemoteFacilitator, RemoteFacilitatorBuilder},
    protocol::PaymentFlow,
};

use super::stage::Stage;
use support::shop::evaluate;

/// A server that answers everything so, and counts.
async fn server(
    answer: impl Fn(&Request<Body>) -> Response<Body> + Clone + Send + Sync + 'static,
) -> (SocketAddr, Arc<AtomicU64>) {
    let listener = tokio::net::TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
    let address = listener.local_addr().unwrap();
    let asked = Arc::<AtomicU64>::default();
    let count = asked.clone();
    let app = Router::new().fallback(move |request: Request<Body>| {
        count.fetch_add(1, Ordering::SeqCst);
        let response = answer(&request);
        async move { response }
    });
    tokio::spawn(async move { axum::serve(listener, app).await });
    (address, asked)
}

fn plain(status: u16, body: &str) -> Response<Body> {
    Response::builder().status(status).body(Body::from(body.to_owned())).unwrap()
}

/// A server that redirects to the same path below this base.
async fn redirecting(status: u16, base: String) -> (SocketAddr, Arc<AtomicU64>) {
    server(move |request| {
        let path = request.uri().path().strip_prefix("/facilitator").unwrap();
        let mut response = Response::new(Body::empty());
        *response.status_mut() = StatusCode::from_u16(status).unwrap();
        response.headers_mut().insert(LOCATION, HeaderValue::try_from(format!("{base}{path}")).unwrap());
        response
    })
    .await
}

fn at(address: SocketAddr) -> RemoteFacilitatorBuilder {
    RemoteFacilitator::builder(format!("http://{address}/facilitator"))
}

#[tokio::test]
async fn redirect_is_followed_once_when_the_facilitator_is_built() {
    let stage = Stage::open().await;
    for (status, is_named) in [(307, false), (308, false), (308, true)] {
        let (front, asked) = redirecting(status, format!("http://{}", stage.address)).await;
        let remote = if is_named { at(front).network(Network::BASE_SEPOLIA) } else { at(front) };
        let facilitator = remote.build().await.unwrap();
        assert_eq!(asked.load(Ordering::SeqCst), 1);
        assert!(facilitator.readiness().await.is_ready());
        let remote = if is_named { at(front).network(Network::BASE_SEPOLIA) } else { at(front) };
        let seller = stage.seller(remote, PaymentFlow::Upfront).await;
        let purchase = stage.customer().await.pay(&seller.app, evaluate("2 + 2 = 4")).await;
        assert_eq!(seller.ask(&purchase).await.status, 200);
        assert_eq!(asked.load(Ordering::SeqCst), 2, "all else goes to the new address");
    }
}

#[tokio::test]
async fn redirect_that_is_not_followed_is_an_error_with_the_new_address() {
    let stage = Stage::open().await;
    let moved = |to: String| RemoteBuildError::Moved { to };
    for status in [301, 302, 303] {
        let (front, _) = redirecting(status, format!("http://{}", stage.address)).await;
        for remote in [at(front), at(front).network(Network::BASE_SEPOLIA)] {
            let error = remote.build().await.unwrap_err();
            assert_eq!(error, moved(format!("http://{}/", stage.address)), "{status}");
        }
    }
    // Credentials are for one host.
    let elsewhere = format!("http://localhost:{}/x?key=secret&path=", stage.address.port());
    let (front, _) = redirecting(308, elsewhere).await;
    let error = at(front).bearer_token("secret").build().await.unwrap_err();
    assert!(error.to_string().contains(&format!("http://localhost:{}/x", stage.address.port())), "{error}");
    assert!(!error.to_string().contains("secret"), "{error}");
    // A second redirect is not followed.
    let (second, _) = redirecting(308, format!("http://{}", stage.address)).await;
    let (first, _) = redirecting(308, format!("http://{second}/facilitator")).await;
    assert_eq!(at(first).build().await.unwrap_err(), moved(format!("http://{}/", stage.address)));
}

#[tokio::test]
async fn default_headers_of_a_callers_client_go_to_no_other_origin() {
    let client = || {
        let headers =
            HeaderMap::from_iter([(HeaderName::from_static("x-api-key"), HeaderValue::from_static("secret"))]);
        reqwest::Client::builder().default_headers(headers)
    };
    let seen = Arc::new(AtomicU64::new(0));
    let keys = seen.clone();
    let (other, asked) = server(move |request| {
        keys.fetch_add(request.headers().contains_key("x-api-key").into(), Ordering::SeqCst);
        plain(200, r#"{ "kinds": [], "extensions": [], "signers": {} }"#)
    })
    .await;
    let (front, _) = redirecting(308, format!("http://{other}")).await;
    let moved = RemoteBuildError::Moved { to: format!("http://{other}/") };
    assert_eq!(at(front).client(client()).build().await.unwrap_err(), moved);
    assert_eq!(at(front).client(client()).network(Network::BASE_SEPOLIA).build().await.unwrap_err(), moved);
    assert_eq!(at(front).bearer_token("secret").build().await.unwrap_err(), moved, "another port is another service");
    assert_eq!((asked.load(Ordering::SeqCst), seen.load(Ordering::SeqCst)), (0, 0));
    at(front).build().await.expect("there is nothing to keep secret");
    // Within the origin, a redirect is followed with them.
    let with_key = |request: &Request<Body>| match (request.headers().get("x-api-key"), request.uri().path()) {
        (Some(_), "/v2/supported") => plain(200, r#"{ "kinds": [], "extensions": [], "signers": {} }"#),
        (Some(_), _) => {
            let mut response = plain(308, "");
            response.headers_mut().insert(LOCATION, HeaderValue::from_static("/v2/supported"));
            response
        }
        (None, _) => plain(401, "{}"),
    };
    let (within, asked) = server(with_key).await;
    at(within).client(client()).build().await.unwrap();
    assert_eq!(asked.load(Ordering::SeqCst), 2);
}

#[tokio::test]
async fn what_is_no_facilitator_is_not_built_and_says_why() {
    for (status, body, part) in [
        (401, "{}", "credentials"),
        (403, "", "credentials"),
        (404, "<html>", "check its URL"),
        (429, "", "fewer requests"),
        (500, "", "out of order"),
        (200, "<html>", "none of a facilitator"),
        (200, "[]", "none of a facilitator"),
    ] {
        let (address, _) = server(move |_| plain(status, body)).await;
        let error = at(address).build().await.unwrap_err().to_string();
        assert!(error.contains(part), "{status}: {error}");
        assert!(status == 200 || error.contains(&status.to_string()), "{error}");
    }
}

/// With its networks set, a facilitator is built whatever it answers. Payments would be signed for it, and refused.
#[tokio::test]
async fn what_is_no_facilitator_is_not_ready() {
    let supported = r#"{ "kinds": [], "extensions": [], "signers": {} }"#;
    let refusal = r#"{ "isValid": false, "invalidReason": "invalid_payload" }"#;
    for (supported, verify, is_ready) in [
        ((200, supported), (404, ""), true),
        // Not all say what they support.
        ((404, ""), (400, refusal), true),
        ((404, ""), (200, refusal), true),
        ((405, ""), (422, "{}"), true),
        ((429, ""), (429, ""), true),
        ((404, "not found"), (404, "not found"), false),
        ((404, "{}"), (404, "{}"), false),
        ((200, "<html>"), (200, "<html>"), false),
        ((404, ""), (200, "<html>"), false),
        ((404, ""), (401, "{}"), false),
        ((401, "{}"), (400, refusal), false),
        ((500, ""), (400, refusal), false),
    ] {
        let (address, _) = server(move |request| match request.uri().path() {
            "/facilitator/supported" => plain(supported.0, supported.1),
            _ => plain(verify.0, verify.1),
        })
        .await;
        let facilitator = at(address).network(Network::BASE_SEPOLIA).build().await.unwrap();
        let readiness = facilitator.readiness().await;
        let reasons: &[NotReady] = if is_ready { &[] } else { &[NotReady::Facilitator] };
        assert_eq!(readiness.reasons, reasons, "{supported:?} {verify:?}");
    }
}

/// It began to redirect after it was built.
#[tokio::test]
async fn facilitator_that_redirects_is_not_ready() {
    let supported = r#"{ "kinds": [], "extensions": [], "signers": {} }"#;
    let turn = Arc::<AtomicU64>::default();
    let turns = turn.clone();
    let (address, _) = server(move |_| {
        let mut response = plain(200, supported);
        if turns.fetch_add(1, Ordering::SeqCst) > 0 {
            *response.status_mut() = StatusCode::PERMANENT_REDIRECT;
            response.headers_mut().insert(LOCATION, HeaderValue::from_static("https://a.example/supported"));
        }
        response
    })
    .await;
    let facilitator = at(address).network(Network::BASE_SEPOLIA).build().await.unwrap();
    assert_eq!(facilitator.readiness().await.reasons, [NotReady::Facilitator]);
}
