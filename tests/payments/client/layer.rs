//! The tower layer around hyper's client.

use std::time::Duration;

use axum::{body::Bytes, response::IntoResponse};
use http::{HeaderValue, Request, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper_util::{
    client::legacy::{Client, connect::HttpConnector},
    rt::TokioExecutor,
};
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_x402::client::{
    AddPayment, AddPaymentError, AddPaymentLayer, Budget, PaymentError, PaymentOutcome, ReceiptExt, Refusal,
    RetryPolicy,
};

use support::script::*;

type Hyper = Client<HttpConnector, Full<Bytes>>;

fn client(budget: &Budget) -> AddPayment<Hyper> {
    AddPaymentLayer::new(payer(budget))
        .retry(RetryPolicy::default().attempt_timeout(Duration::from_millis(300)).first_pause(Duration::from_millis(5)))
        .layer(Client::builder(TokioExecutor::new()).build_http())
}

fn post(server: &Server) -> Request<Full<Bytes>> {
    Request::post(server.url()).body(Full::from("my answer")).unwrap()
}

#[tokio::test]
async fn a_402_is_paid_and_the_response_carries_the_receipt() {
    let server = Server::paid(required(&[offer(1_000)]), vec![settled()]).await;
    let budget = budget(10_000);
    let response = client(&budget).oneshot(post(&server)).await.unwrap();
    assert_eq!(response.status(), 200);
    let receipt = response.receipt().unwrap();
    assert_eq!((receipt.outcome, receipt.transaction), (PaymentOutcome::Settled, Some(transaction())));
    assert_eq!(response.into_body().collect().await.unwrap().to_bytes(), "the evaluation");
    assert_eq!((budget.spent().atomic(), budget.reserved().atomic()), (1_000, 0));
    let bodies: Vec<_> = server.seen().into_iter().map(|seen| seen.body).collect();
    assert_eq!(bodies, vec![b"my answer".to_vec(); 2]);
}

#[tokio::test]
async fn unclear_answers_are_retried_with_the_same_authorization() {
    for failure in [silence(), status(502), cut(), later(503, None), later(409, None)] {
        let server = Server::paid(required(&[offer(1_000)]), vec![failure, settled()]).await;
        let budget = budget(10_000);
        let response = client(&budget).oneshot(post(&server)).await.unwrap();
        assert_eq!(response.receipt().unwrap().outcome, PaymentOutcome::Settled);
        let payments = server.payments();
        assert_eq!(payments.len(), 2);
        assert_eq!(payments[0], payments[1]);
        assert_eq!((budget.spent().atomic(), budget.reserved().atomic()), (1_000, 0));
    }
}

#[tokio::test]
async fn error_of_a_server_that_never_answers_has_the_receipt() {
    let server = Server::paid(required(&[offer(1_000)]), (0..9).map(|_| cut()).collect()).await;
    let budget = budget(10_000);
    let error = client(&budget).oneshot(post(&server)).await.unwrap_err();
    match error.payment() {
        Some(PaymentError::Unanswered { receipt, attempts: 5, .. }) => {
            assert_eq!(receipt.outcome, PaymentOutcome::Unknown)
        }
        _ => panic!("{error:?}"),
    }
    assert_eq!(budget.reserved().atomic(), 1_000);
}

#[tokio::test]
async fn free_foreign_and_already_paid_requests_pass_through() {
    let budget = budget(10_000);
    let server = Server::start(|seen| match seen.method.as_str() {
        "GET" => Answer::Response(StatusCode::PAYMENT_REQUIRED.into_response()),
        _ => Answer::Response("free".into_response()),
    })
    .await;
    let free = client(&budget).oneshot(post(&server)).await.unwrap();
    assert_eq!((free.status(), free.receipt()), (StatusCode::OK, None));
    let call_us = Request::get(server.url()).body(Full::default()).unwrap();
    assert_eq!(client(&budget).oneshot(call_us).await.unwrap().status(), 402);

    let server = Server::paid(required(&[offer(1_000)]), vec![settled()]).await;
    let head = Request::head(server.url()).body(Full::default()).unwrap();
    let unpaid = client(&budget).oneshot(head).await.unwrap();
    assert_eq!((unpaid.status(), unpaid.receipt(), server.seen().len()), (StatusCode::PAYMENT_REQUIRED, None, 1));

    let server = Server::paid(required(&[offer(1_000)]), vec![status(402)]).await;
    let mut own = post(&server);
    own.headers_mut().insert("payment-signature", HeaderValue::from_static("mine"));
    assert_eq!(client(&budget).oneshot(own).await.unwrap().status(), 402);
    assert_eq!(server.payments(), ["mine"]);
    assert_eq!(budget.remaining(), budget.total());
}

#[tokio::test]
async fn redirect_of_the_paid_request_is_returned_and_not_followed() {
    let thief = Server::start(|_| Answer::Response("thanks".into_response())).await;
    for code in [302, 307, 308] {
        let server = Server::paid(required(&[offer(1_000)]), vec![redirect(code, thief.url())]).await;
        let response = client(&budget(10_000)).oneshot(post(&server)).await.unwrap();
        assert_eq!(response.status().as_u16(), code);
        assert_eq!(response.receipt().unwrap().outcome, PaymentOutcome::Failed);
    }
    assert!(thief.seen().is_empty());
}

#[tokio::test]
async fn refusals_and_errors_of_the_inner_service_are_different_errors() {
    let server = Server::paid(required(&[offer(10_001)]), vec![settled()]).await;
    let budget = budget(20_000);
    let error = client(&budget).oneshot(post(&server)).await.unwrap_err();
    assert!(matches!(error, AddPaymentError::Payment(PaymentError::Refused(Refusal::AbovePaymentLimit { .. }))));

    let nobody = Request::post("http://127.0.0.1:1/").body(Full::default()).unwrap();
    let error = client(&budget).oneshot(nobody).await.unwrap_err();
    assert!(matches!(error, AddPaymentError::Inner(_)), "{error:?}");
}

#[tokio::test]
async fn request_without_a_host_is_not_paid() {
    let header = required(&[offer(1_000)]);
    let inner = service_fn(move |_: Request<String>| {
        let header = header.clone();
        async move {
            let response = http::Response::builder().status(402).header("payment-required", header);
            Ok::<_, std::convert::Infallible>(response.body(String::new()).unwrap())
        }
    });
    let budget = budget(10_000);
    let mut client = AddPaymentLayer::new(payer(&budget)).layer(inner);
    let request = Request::post("/evaluate").body(String::new()).unwrap();
    let error = client.ready().await.unwrap().call(request).await.unwrap_err();
    assert!(matches!(error.payment(), Some(PaymentError::Refused(Refusal::NoHost))));
    assert_eq!(budget.reserved().atomic(), 0);
}
