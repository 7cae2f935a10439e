//! Bodies of 402s that may have offers of v1 and have none: huge, slow, broken. The caller gets them unchanged.

use std::{future::poll_fn, pin::Pin, sync::Arc, time::Duration};

use axum::{
    body::{Body, Bytes},
    http::{HeaderMap, header},
    response::Response,
};
use http::Request;
use http_body::{Body as _, Frame};
use http_body_util::{BodyExt, StreamBody};
use tokio::sync::watch;
use tower::{Layer, ServiceExt, service_fn};
use tower_x402::client::{AddPaymentLayer, PaidResponseBody, PaymentOutcome, ReceiptExt, RetryPolicy};

use support::script::*;

use super::{
    hostile::{FLOOD, flood, stands_still},
    middleware::client,
};

const START: &str = r#"{"x402Version":1,"#;

#[tokio::test]
async fn huge_402_body_is_read_in_part_and_not_paid() {
    for chunked in [false, true] {
        let (address, sent) = flood("content-type: application/json".into(), START, chunked).await;
        let budget = budget(10_000);
        let response = client(&budget).post(format!("http://{address}/")).body("x").send().await.unwrap();
        assert_eq!((response.status().as_u16(), response.receipt(), budget.remaining()), (402, None, budget.total()));
        let before = stands_still(&sent).await;
        assert!(before < FLOOD / 2, "{before} bytes were taken");
        // The caller can have all of it.
        let mut body = http::Response::<reqwest::Body>::from(response).into_body();
        let (mut length, mut start) = (0, Vec::new());
        while let Some(Ok(frame)) = poll_fn(|cx| Pin::new(&mut body).poll_frame(cx)).await {
            let data = frame.into_data().unwrap();
            if start.len() < 64 {
                start.extend_from_slice(&data);
            }
            length += data.len() as u64;
        }
        assert!(start.starts_with(START.as_bytes()));
        assert_eq!(length, FLOOD);
    }
}

/// A 402 of v1 whose last byte is sent only when `go_on` becomes true.
fn slow_402(go_on: watch::Receiver<bool>) -> Response {
    let text = required_v1(&[offer(1_000)]).to_string();
    let (start, end) = text.split_at(text.len() - 1);
    let (start, end) = (Bytes::from(start.to_owned()), Bytes::from(end.to_owned()));
    let frames = futures_util::stream::unfold(0, move |step| {
        let (start, end, mut go_on) = (start.clone(), end.clone(), go_on.clone());
        async move {
            let frame = match step {
                0 => Frame::data(start),
                1 => {
                    go_on.wait_for(|go_on| *go_on).await.unwrap();
                    Frame::data(end)
                }
                2 => Frame::trailers(HeaderMap::from_iter([(header::ETAG, "7".parse().unwrap())])),
                _ => return None,
            };
            Some((Ok::<_, std::convert::Infallible>(frame), step + 1))
        }
    });
    Response::builder().status(402).body(Body::new(StreamBody::new(frames))).unwrap()
}

#[tokio::test]
async fn slow_402_body_is_returned_whole_and_not_paid() {
    let (tell, told) = watch::channel(false);
    let inner = service_fn(move |_: Request<String>| {
        let told = told.clone();
        async move { Ok::<_, std::convert::Infallible>(slow_402(told)) }
    });
    let budget = budget(10_000);
    let layer =
        AddPaymentLayer::new(payer(&budget)).retry(RetryPolicy::default().attempt_timeout(Duration::from_millis(100)));
    let request = || Request::post("http://evaluator.example/").body(String::new()).unwrap();
    let response: Response<PaidResponseBody<Body>> = layer.layer(inner.clone()).oneshot(request()).await.unwrap();
    assert_eq!((response.status().as_u16(), response.receipt(), budget.remaining()), (402, None, budget.total()));
    tell.send(true).unwrap();
    let body = response.into_body().collect().await.unwrap();
    assert_eq!(body.trailers().unwrap()[header::ETAG], "7");
    assert_eq!(body.to_bytes(), required_v1(&[offer(1_000)]).to_string());

    // The same in time is an offer; this server is never satisfied.
    let response = layer.layer(inner).oneshot(request()).await.unwrap();
    assert_eq!((response.status().as_u16(), response.receipt().unwrap().outcome), (402, PaymentOutcome::Unknown));
    assert_eq!(response.into_body().collect().await.unwrap().to_bytes(), required_v1(&[offer(1_000)]).to_string());
}

type Framed = Result<Frame<Bytes>, std::io::Error>;

/// Returns the body that the tower layer returns for a foreign 402 with these frames.
async fn through_the_layer(
    frames: impl futures_util::Stream<Item = Framed> + Send + 'static,
) -> PaidResponseBody<Body> {
    let answer = Response::builder().status(402).body(Body::new(StreamBody::new(frames))).unwrap();
    let answer = Arc::new(std::sync::Mutex::new(Some(answer)));
    let inner = service_fn(move |_: Request<String>| {
        let answer = answer.lock().unwrap().take().expect("it is asked once");
        async move { Ok::<_, std::convert::Infallible>(answer) }
    });
    let budget = budget(10_000);
    let request = Request::post("http://evaluator.example/").body(String::new()).unwrap();
    let response = AddPaymentLayer::new(payer(&budget)).layer(inner).oneshot(request).await.unwrap();
    assert_eq!((response.receipt(), budget.remaining()), (None, budget.total()));
    response.into_body()
}

#[tokio::test]
async fn broken_402_body_breaks_for_the_caller_at_the_same_place() {
    let text = required_v1(&[offer(1_000)]).to_string();
    let cut = std::io::Error::new(std::io::ErrorKind::ConnectionReset, "cut");
    let frames = [Ok(Frame::data(Bytes::from(text.clone()))), Err(cut)];
    let mut body = through_the_layer(futures_util::stream::iter(frames)).await;
    let frame = body.frame().await.unwrap().unwrap();
    assert_eq!(frame.into_data().unwrap(), text, "whole as it seems, it was not all");
    assert!(body.frame().await.unwrap().is_err());
    assert!(body.frame().await.is_none());
}

#[tokio::test]
async fn endless_empty_402_body_is_given_up() {
    let nothing = futures_util::stream::repeat_with(|| Ok(Frame::data(Bytes::new())));
    let mut body = through_the_layer(nothing).await;
    assert!(body.frame().await.unwrap().unwrap().into_data().unwrap().is_empty());
}
