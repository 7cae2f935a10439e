//! Answers that stream and are paid by voucher: when they are charged, and who gets them again.

use std::{io, sync::Arc, time::Duration};

use axum::body::Body;
use bytes::Bytes;
use futures_util::{StreamExt as _, stream};
use http::{Request, Response, StatusCode};
use http_body_util::BodyExt as _;
use support::{
    eventually::in_time,
    shop::{Answer, App, ask, send, try_send},
    world::{COST, DEPOSIT, World, pay, told},
};
use tokio::sync::Notify;

/// A seller whose handler streams three pieces, the second when notified.
fn streaming_app(world: &World) -> (App, Arc<Notify>) {
    let go_on = Arc::new(Notify::new());
    let signal = go_on.clone();
    let app = world.shop.app_with(world.layer(), move |_, body| {
        let go_on = signal.clone();
        async move {
            let pieces: Vec<io::Result<Bytes>> = match &body[..] {
                b"fails at once" => vec![Err(io::Error::other("on purpose"))],
                b"breaks off" => vec![Ok("one".into()), Err(io::Error::other("on purpose"))],
                b"endless" => (0..200).map(|_| Ok(vec![b'x'; 1 << 16].into())).collect(),
                b"nothing" => vec![],
                _ => vec![Ok("one, ".into()), Ok("two, ".into()), Ok("three".into())],
            };
            let waits = &body[..] == b"slow";
            let pieces = stream::iter(pieces).enumerate().then(move |(number, piece)| {
                let go_on = go_on.clone();
                async move {
                    if waits && number == 1 {
                        go_on.notified().await;
                    }
                    piece
                }
            });
            Ok(Response::new(Body::from_stream(pieces)))
        }
    });
    (app, go_on)
}

#[tokio::test]
async fn a_stream_whose_client_went_away_is_answered_again_and_charged_once() {
    let world = World::open().await;
    let (app, go_on) = streaming_app(&world);
    let channel = world.filled(&app).await;
    let request = || pay(&app, &channel, 2 * COST, None, "slow");
    let mut response = try_send(&app, request().await).await.unwrap();
    assert_eq!(response.status(), StatusCode::OK);
    let first = response.body_mut().frame().await.expect("a piece").expect("of the stream").into_data();
    assert_eq!(first.unwrap(), "one, ");
    drop(response);
    // Other requests of the channel need not wait for the end of the stream; a copy of this one does.
    let next = send(&app, pay(&app, &channel, 3 * COST, None, "next").await).await;
    assert_eq!((next.text(), told(&next)), ("one, two, three", ("1000".into(), "3000".into())));
    let copy = ask(&app, request().await);
    tokio::task::yield_now().await;
    assert!(!copy.is_finished());
    go_on.notify_one();
    for answer in [copy.await.unwrap(), send(&app, request().await).await] {
        assert_eq!((answer.status, answer.text()), (StatusCode::OK, "one, two, three"), "{answer:?}");
        assert_eq!(told(&answer), ("1000".into(), "2000".into()));
    }
    assert_eq!((world.shop.handled(), world.charged(&channel).await), (3, 3 * COST));
}

#[tokio::test]
async fn a_stream_that_fails_before_its_first_piece_costs_nothing() {
    let world = World::open().await;
    let (app, _) = streaming_app(&world);
    let channel = world.filled(&app).await;
    let answer = send(&app, pay(&app, &channel, 2 * COST, None, "fails at once").await).await;
    assert_eq!(answer.status, StatusCode::INTERNAL_SERVER_ERROR, "{answer:?}");
    assert_eq!(world.charged(&channel).await, COST);
    // One without any piece is complete.
    let answer = send(&app, pay(&app, &channel, 2 * COST, None, "nothing").await).await;
    assert_eq!((answer.text(), told(&answer)), ("", ("1000".into(), "2000".into())));
    assert_eq!(send(&app, pay(&app, &channel, 2 * COST, None, "nothing").await).await.status, StatusCode::OK);
    assert_eq!(world.charged(&channel).await, 2 * COST);
}

#[tokio::test]
async fn a_stream_that_is_not_kept_is_charged_once_and_not_produced_again() {
    let world = World::open().await;
    let (app, _) = streaming_app(&world);
    let channel = world.filled(&app).await;
    for (number, body) in [(2, "breaks off"), (3, "endless")] {
        let response = try_send(&app, pay(&app, &channel, number * COST, None, body).await).await.unwrap();
        assert_eq!(response.status(), StatusCode::OK);
        let whole = response.into_body().collect().await;
        assert_eq!(whole.is_ok(), body == "endless");
        let handled = world.shop.handled();
        let again = send(&app, pay(&app, &channel, number * COST, None, body).await).await;
        assert_eq!(
            (again.status, again.json()["error"].as_str()),
            (StatusCode::CONFLICT, Some("payment_already_used"))
        );
        assert_eq!(told(&again), ("1000".into(), (number * COST).to_string()), "it says what was charged");
        assert_eq!((world.shop.handled(), world.charged(&channel).await), (handled, number * COST));
    }
}

/// Two replicas share their books, and only one of them knows of the stream.
#[tokio::test]
async fn an_answer_that_streams_at_another_replica_is_in_progress_and_not_gone() {
    let world = World::open().await;
    let go_on = Arc::new(Notify::new());
    let replica = || {
        let go_on = go_on.clone();
        world.shop.app_with(world.layer(), move |_, body| {
            let go_on = go_on.clone();
            async move {
                let rest = match &body[..] {
                    b"streams" => stream::once(async move {
                        go_on.notified().await;
                        Ok(Bytes::from_static(b" on"))
                    })
                    .left_stream(),
                    _ => stream::iter([Err(io::Error::other("it broke off"))]).right_stream(),
                };
                Ok(Response::new(Body::from_stream(stream::iter([Ok(body)]).chain(rest))))
            }
        })
    };
    let (here, there) = (replica(), replica());
    let channel = world.channel().await;
    let deposit = world.sign_deposit(&channel, DEPOSIT).await;
    let first = pay(&here, &channel, COST, Some(&deposit), "streams").await;
    let streaming = try_send(&here, first).await.unwrap();
    assert_eq!(streaming.status(), StatusCode::OK);
    // Its client goes away.
    drop(streaming);
    let answer = send(&there, pay(&there, &channel, COST, Some(&deposit), "streams").await).await;
    assert_eq!((answer.status, answer.reason().as_str()), (StatusCode::CONFLICT, "payment_in_progress"), "{answer:?}");
    assert!(answer.headers.contains_key("retry-after") && answer.settlement().is_none(), "{answer:?}");
    go_on.notify_one();
    let answer = eventually_ok(&there, async || pay(&there, &channel, COST, Some(&deposit), "streams").await).await;
    assert_eq!(answer.text(), "streams on");
    // Where it streamed, nobody waits for what has ended and is not kept.
    let broken = try_send(&here, pay(&here, &channel, 2 * COST, None, "breaks").await).await.unwrap();
    assert_eq!(broken.status(), StatusCode::OK);
    drop(broken);
    let answer = send(&here, pay(&here, &channel, 2 * COST, None, "breaks").await).await;
    assert_eq!((answer.status, answer.reason().as_str()), (StatusCode::CONFLICT, "payment_already_used"), "{answer:?}");
}

/// Repeats a request until it is served.
pub(super) async fn eventually_ok(app: &App, request: impl AsyncFn() -> Request<Body>) -> Answer {
    in_time("it is served", async {
        loop {
            let answer = send(app, request().await).await;
            if answer.status == StatusCode::OK {
                return answer;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    })
    .await
}
