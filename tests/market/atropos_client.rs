//! The client of the Atropos API server where network and server fail. What it does where they do not, tests/atropos shows
//! against the server itself.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use atropos_client::{
    AtroposClient, AtroposError, ByteTokenizer, EnvRegistration, Environment, GroupError, GroupLimits, ScoredGroup,
    Sequence, SequenceMessage, TrainerRegistration,
};
use axum::{
    Json, Router,
    extract::Request,
    http::StatusCode,
    response::{IntoResponse, Redirect, Response},
    routing::{any, get, post},
};
use serde_json::json;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpListener,
    time::timeout,
};

const PATIENCE: Duration = Duration::from_secs(60);
const LIMITS: GroupLimits = GroupLimits::new(2, 64);

/// A server that answers `/scored_data` so, and otherwise plays along. Says how often it was asked that.
async fn server(push: impl Fn() -> Response + Clone + Send + Sync + 'static) -> (AtroposClient, Arc<AtomicUsize>) {
    let asked = Arc::new(AtomicUsize::new(0));
    let counter = asked.clone();
    let router = joinable()
        .route("/status-env", get(async || Json(json!({ "current_step": 0, "queue_size": 0, "env_weight": 1.0 }))))
        .route(
            "/scored_data",
            post(async move |_: Request| {
                counter.fetch_add(1, Ordering::SeqCst);
                push()
            }),
        )
        .route("/elsewhere", any(async || Json(json!({ "status": "received" }))));
    (serve(router).await, asked)
}

/// A server that takes environments into a run.
fn joinable() -> Router {
    registering().route("/info", get(async || Json(json!({ "batch_size": 8, "max_token_len": 64 }))))
}

fn registering() -> Router {
    let joined =
        json!({ "status": "success", "env_id": 3, "wandb_name": "sums_0", "starting_step": 0, "num_steps": 9 });
    Router::new().route("/register-env", post(async move || Json(joined.clone())))
}

async fn serve(router: Router) -> AtroposClient {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async { axum::serve(listener, router).await });
    AtroposClient::new(url).unwrap()
}

/// A server that reads one whole request, answers so, and is gone; what it had read.
async fn once(answer: &'static str) -> (AtroposClient, tokio::task::JoinHandle<String>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let reading = tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut read = Vec::new();
        while !read.ends_with(b"}") && !read.ends_with(b"\r\n\r\n") {
            assert_ne!(stream.read_buf(&mut read).await.unwrap(), 0, "the request comes to its end");
        }
        stream.write_all(answer.as_bytes()).await.unwrap();
        String::from_utf8(read).unwrap()
    });
    (AtroposClient::new(url).unwrap(), reading)
}

fn sequence(text: &str, score: f64) -> Sequence {
    Sequence::new(&ByteTokenizer::prompt("1 + 1?"), &ByteTokenizer::completion(text), score).unwrap()
}

fn group() -> ScoredGroup {
    ScoredGroup::new([sequence("2", 1.0), sequence("3", 0.0)], &LIMITS).unwrap().with_id("the group")
}

async fn joined(client: &AtroposClient) -> Environment {
    client.register_env(&EnvRegistration::new("sums", 2, 64), PATIENCE).await.unwrap()
}

#[tokio::test]
async fn a_patience_without_end_waits_until_the_run_begins() {
    let begun = Arc::new(AtomicUsize::new(0));
    let info = get(async move || match begun.fetch_add(1, Ordering::SeqCst) {
        0 => StatusCode::SERVICE_UNAVAILABLE.into_response(),
        _ => Json(json!({ "batch_size": 8, "max_token_len": 64 })).into_response(),
    });
    let client = serve(registering().route("/info", info)).await;
    client.register_env(&EnvRegistration::new("sums", 2, 64), Duration::MAX).await.unwrap();
}

#[tokio::test]
async fn a_push_that_fails_or_is_not_understood_is_unknown_and_not_sent_again() {
    let failures: [fn() -> Response; 5] = [
        || StatusCode::INTERNAL_SERVER_ERROR.into_response(),
        || StatusCode::BAD_GATEWAY.into_response(),
        || "<html>".into_response(),
        || Json(json!({ "status": "pondering" })).into_response(),
        || vec![b' '; 2_000].into_response(),
    ];
    for failure in failures {
        let (client, asked) = server(failure).await;
        let environment = joined(&client.max_answer(1_000)).await;
        let error = environment.push(&group()).await.unwrap_err();
        assert!(error.is_unknown(), "{error:?}");
        assert_eq!(asked.load(Ordering::SeqCst), 1, "{error}");
    }
}

#[tokio::test]
async fn a_group_is_not_sent_while_the_server_does_not_say_whether_it_knows_the_environment() {
    let failures: [fn() -> Response; 4] = [
        || StatusCode::BAD_GATEWAY.into_response(),
        || "<html>".into_response(),
        || vec![b' '; 2_000].into_response(),
        || {
            let silence = futures_util::stream::pending::<Result<Vec<u8>, std::io::Error>>();
            axum::body::Body::from_stream(silence).into_response()
        },
    ];
    for failure in failures {
        let asked = Arc::new(AtomicUsize::new(0));
        let (first, counter) = (asked.clone(), asked.clone());
        let status = async move || match first.fetch_add(1, Ordering::SeqCst) {
            0 => failure(),
            _ => Json(json!({ "current_step": 0, "queue_size": 0, "env_weight": 1.0 })).into_response(),
        };
        let pushed = Arc::new(AtomicUsize::new(0));
        let count = pushed.clone();
        let push = async move |_: Request| {
            count.fetch_add(1, Ordering::SeqCst);
            Json(json!({ "status": "received" }))
        };
        let client = serve(joinable().route("/status-env", get(status)).route("/scored_data", post(push))).await;
        let client = client.max_answer(1_000).timeout(Duration::from_millis(500));
        let environment = joined(&client).await;
        let error = environment.push(&group()).await.unwrap_err();
        assert!(error.is_not_sent() && !error.is_unknown(), "{error:?}");
        assert_eq!((counter.load(Ordering::SeqCst), pushed.load(Ordering::SeqCst)), (1, 0), "{error:?}");
        environment.push(&group()).await.unwrap();
        assert_eq!(pushed.load(Ordering::SeqCst), 1);
    }
}

#[tokio::test]
async fn a_server_that_fails_before_it_counts_the_environment_is_asked_again() {
    let asked = Arc::new(AtomicUsize::new(0));
    let info = async move || match asked.fetch_add(1, Ordering::SeqCst) {
        0 => StatusCode::BAD_GATEWAY.into_response(),
        1 => "<html>".into_response(),
        _ => Json(json!({ "batch_size": 8, "max_token_len": 64 })).into_response(),
    };
    let client = serve(registering().route("/info", get(info))).await;
    assert_eq!(joined(&client).await.id(), 3);
}

#[tokio::test]
async fn a_connection_that_breaks_after_the_request_leaves_it_unknown() {
    let run = TrainerRegistration::new("run", 8, 64, 1);
    for answer in ["", "HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{\"uuid\": 1"] {
        let (client, reading) = once(answer).await;
        let error = client.register(&run).await.unwrap_err();
        assert!(matches!(error, AtroposError::Unanswered { call: "register", .. }) && error.is_unknown(), "{error:?}");
        assert!(reading.await.unwrap().ends_with('}'), "all of it had arrived");
    }
}

#[tokio::test]
async fn a_silent_server_is_not_waited_for_forever() {
    let (client, _) = server(|| StatusCode::OK.into_response()).await;
    let slow = Router::new().route("/batch", get(std::future::pending::<()>));
    let slow = serve(slow).await.timeout(Duration::from_millis(50));
    let error = timeout(PATIENCE, slow.batch()).await.expect("it gives up").unwrap_err();
    assert!(matches!(error, AtroposError::Unanswered { call: "batch", .. }), "{error:?}");
    drop(client);
}

#[tokio::test]
async fn what_the_server_refuses_is_told_without_the_body_that_it_repeats() {
    let refusal = || {
        let detail =
            json!([{ "type": "missing", "loc": ["body", "masks"], "msg": "Field required", "input": "SECRET" }]);
        (StatusCode::UNPROCESSABLE_ENTITY, Json(json!({ "detail": detail }))).into_response()
    };
    let (client, asked) = server(refusal).await;
    let error = joined(&client).await.push(&group()).await.unwrap_err();
    assert!(!error.is_unknown(), "nothing was done");
    assert_eq!(error.to_string(), "the Atropos server refused scored_data with status 422: body.masks: Field required");
    assert_eq!(asked.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn a_redirect_is_not_followed() {
    let (client, _) = server(|| Redirect::temporary("/elsewhere").into_response()).await;
    let error = joined(&client).await.push(&group()).await.unwrap_err();
    assert!(matches!(error, AtroposError::Refused { status: 307, .. }), "{error:?}");
}

#[tokio::test]
async fn what_is_too_much_is_not_sent() {
    let (client, asked) = server(|| Json(json!({ "status": "received" })).into_response()).await;
    let environment = joined(&client.max_request(200)).await;
    let error = environment.push(&group()).await.unwrap_err();
    assert!(matches!(error, AtroposError::TooMuch { limit: 200, .. }) && !error.is_unknown(), "{error:?}");
    assert_eq!(asked.load(Ordering::SeqCst), 0);
}

#[tokio::test]
async fn nobody_there_is_waited_for_and_then_reported_as_such() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    drop(listener);
    let client = AtroposClient::new(url).unwrap();
    let sums = EnvRegistration::new("sums", 2, 64);
    let joining = client.register_env(&sums, Duration::from_millis(600));
    let error = joining.await.unwrap_err();
    assert!(matches!(error, AtroposError::Unreachable(_)) && !error.is_unknown(), "{error:?}");
}

#[tokio::test]
async fn a_trainers_number_keeps_all_its_bits() {
    const ANSWER: &str =
        "HTTP/1.1 200 OK\r\ncontent-length: 50\r\n\r\n{\"uuid\": 340282366920938463463374607431768211454} ";
    let (client, _) = once(ANSWER).await;
    let id = client.register(&TrainerRegistration::new("run", 8, 64, 1)).await.unwrap();
    assert_eq!(id.0, u128::MAX - 1);
}

#[test]
fn only_urls_of_http_are_taken_and_credentials_in_them_are_not_shown() {
    for url in ["", "127.0.0.1:8000", "ftp://example.org", "file:///tmp", "unix:/run/atropos"] {
        assert!(matches!(AtroposClient::new(url), Err(AtroposError::Url)), "{url}");
    }
    let client = AtroposClient::new("http://user:secret@example.org/base?key=secret").unwrap();
    assert!(!format!("{client:?}").contains("secret"));
}

#[test]
fn masks_hide_the_prompt_and_name_the_completion() {
    let sequence = Sequence::new(&[7, 8], &[9, 10], 1.0).unwrap().with_advantage(0.5).unwrap();
    let sequence = sequence.with_inference_logprobs(&[-0.25, -0.5]).unwrap();
    assert_eq!((sequence.tokens(), sequence.learned()), (4, 2));
    let other = Sequence::with_masks(vec![7, 8, 9, 11], vec![-100, -100, 9, 11], 0.0).unwrap();
    let other = other.with_advantage(-0.5).unwrap().with_inference_logprobs(&[-1.0, -1.0]).unwrap();
    let json = serde_json::to_value(ScoredGroup::new([sequence, other], &LIMITS).unwrap()).unwrap();
    assert_eq!(json["tokens"], json!([[7, 8, 9, 10], [7, 8, 9, 11]]));
    assert_eq!(json["masks"], json!([[-100, -100, 9, 10], [-100, -100, 9, 11]]));
    assert_eq!(json["advantages"], json!([[0.0, 0.0, 0.5, 0.5], [0.0, 0.0, -0.5, -0.5]]));
    assert_eq!(json["inference_logprobs"], json!([[1.0, 1.0, -0.25, -0.5], [1.0, 1.0, -1.0, -1.0]]));
    assert_eq!(json.get("messages"), None, "what there is not is not written");
}

#[test]
fn what_a_trainer_could_not_learn_from_cannot_be_made() {
    let two = || [sequence("2", 1.0), sequence("3", 0.0)];
    let refused = |sequences: Vec<Sequence>| ScoredGroup::new(sequences, &LIMITS).unwrap_err();

    assert_eq!(refused(vec![]), GroupError::Size { expected: 2, found: 0 });
    assert_eq!(refused(vec![sequence("2", 1.0)]), GroupError::Size { expected: 2, found: 1 });
    assert_eq!(refused(vec![sequence("2", 1.0), sequence("3", 1.0)]), GroupError::EqualScores);
    // A mark, the prompt's six bytes, a mark, the completion and a mark: 64 in all, and then 63.
    assert_eq!(
        refused(vec![sequence("2", 1.0), sequence(&"3".repeat(55), 0.0)]),
        GroupError::TooLong { at: 1, tokens: 64, limit: 64 }
    );
    assert!(ScoredGroup::new([sequence("2", 1.0), sequence(&"3".repeat(54), 0.0)], &LIMITS).is_ok());

    let [first, second] = two();
    let first = first.with_messages([SequenceMessage::new("user", "1 + 1?")]);
    assert_eq!(refused(vec![first, second]), GroupError::Incomplete("messages"));

    assert_eq!(Sequence::new(&[1], &[], 1.0), Err(GroupError::NothingToLearn));
    assert_eq!(Sequence::with_masks(vec![1, 2], vec![-100, -100], 1.0), Err(GroupError::NothingToLearn));
    assert_eq!(Sequence::with_masks(vec![1, 2], vec![-100, 3], 1.0), Err(GroupError::Masks));
    assert_eq!(Sequence::with_masks(vec![1, 2], vec![2], 1.0), Err(GroupError::Masks));
    for number in [f64::NAN, f64::INFINITY] {
        assert_eq!(Sequence::new(&[1], &[2], number), Err(GroupError::NotFinite("score")));
        assert!(sequence("2", 1.0).with_advantage(number).is_err());
        assert!(sequence("2", 1.0).with_inference_logprobs(&[0.0, number]).is_err());
    }
    assert!(sequence("2", 1.0).with_inference_logprobs(&[0.0]).is_err());
    let group = ScoredGroup::new(two(), &LIMITS).unwrap();
    assert!(group.check(&GroupLimits::new(4, 64)).is_err());
    assert!(group.check(&GroupLimits::new(2, 5)).is_err());
}
