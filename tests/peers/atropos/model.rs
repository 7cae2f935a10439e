//! A language model as the policy, behind an endpoint that is compatible with OpenAI's.

use std::sync::{
    Arc, Mutex,
    atomic::{AtomicUsize, Ordering},
};

use atropos_client::ByteTokenizer;
use axum::{
    Json, Router,
    http::{HeaderMap, StatusCode},
    routing::post,
};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use x402_market::{Score, judge::output_judge};

use super::{
    program::{Both, GROUP, Running, Student, environment, payments, server, units},
    trainer::{Trainer, groups_of},
};
use support::student_stage::{Stage, serve, verdict};

#[tokio::test(flavor = "multi_thread")]
async fn answers_of_a_model_behind_an_endpoint_are_judged_and_handed_over() {
    const CLEAR: &str = "We look at the numbers one by one. That is all we have to do.\nAnswer: 42";
    const MURKY: &str =
        "Well, it is basically really just that, you know, and so on, and so on, and really so on.\nAnswer: 43 kg";
    let (server, stage) = (server().await, Stage::set().await);
    let booth = stage.open(Both).await;
    let student = Student::rich(&stage).await;
    let trainer = Trainer::start(&server, GROUP as u64).await;
    let (asked, seen) = (Arc::new(AtomicUsize::new(0)), Arc::new(Mutex::new(Vec::new())));
    let (count, log) = (asked.clone(), seen.clone());
    let speak = async move |headers: HeaderMap, Json(request): Json<Value>| {
        let number = count.fetch_add(1, Ordering::SeqCst);
        log.lock().unwrap().push((headers["authorization"].to_str().unwrap().to_owned(), request));
        let content = if number.is_multiple_of(2) { CLEAR } else { MURKY };
        Json(json!({ "choices": [{ "message": { "role": "assistant", "content": content } }] }))
    };
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (model, _) = serve(listener, Router::new().route("/v1/chat/completions", post(speak)));

    let mut command = environment(&server.url, &stage, &[&booth.url], &student);
    command.args(["--groups", "3", "--policy-model", "tiny", "--policy-url", model.join("v1").unwrap().as_str()]);
    command.env("POLICY_API_KEY", "sesame");
    let document = Running::start(command).document().await;
    let (batches, _) = trainer.finish().await;
    assert_eq!((&document["groups"]["pushed"], asked.load(Ordering::SeqCst)), (&3.into(), 3 * GROUP), "{document:#}");
    assert_eq!(units(&document["spent"]), student.has_paid(&stage).await);
    assert!(document["learning"]["end"]["policy"].is_null(), "who learns is the trainer");
    for (authorization, request) in seen.lock().unwrap().iter() {
        assert_eq!(
            (&**authorization, &request["model"], &request["temperature"]),
            ("Bearer sesame", &json!("tiny"), &json!(1.0))
        );
    }
    for group in groups_of(batches, GROUP) {
        payments(&group, &stage, &student).await;
        let messages = &group.messages.as_ref().unwrap();
        for (at, said) in messages.iter().enumerate() {
            let content = said.last().unwrap()["content"].as_str().unwrap();
            assert!(content == CLEAR || content == MURKY);
            assert_eq!(
                said.iter().map(|message| &message["role"]).collect::<Vec<_>>(),
                ["system", "user", "assistant"]
            );
            let learned: Vec<u32> = group.masks[at].iter().filter_map(|mask| u32::try_from(*mask).ok()).collect();
            assert_eq!(learned, ByteTokenizer::completion(content), "tokens are the bytes of the text");
        }
        assert_eq!(group.inference_logprobs, None, "nobody knows them");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn programs_of_a_model_are_trained_on_by_the_tokens_that_it_told() {
    const PROMPT: [i64; 2] = [7, 1];
    const ANSWERS: [(&str, [i64; 3]); 2] =
        [("def f(xs):\n    return xs", [5, 9, 2]), ("def f(xs):\n    return [xs]", [5, 8, 2])];
    const LOGPROBS: [f64; 3] = [-0.5, -1.5, -0.25];
    let (server, stage) = (server().await, Stage::set().await);
    let judge = output_judge(async |_, output: String| Ok(verdict(if output == ANSWERS[0].0 { 1.0 } else { 0.0 })));
    let booth = stage.open_with(judge, |card| card.skill("code", "Marks programs", Score::new(0.9).unwrap())).await;
    let student = Student::rich(&stage).await;
    let trainer = Trainer::start(&server, GROUP as u64).await;
    let asked = Arc::new(AtomicUsize::new(0));
    let count = asked.clone();
    let speak = async move |Json(request): Json<Value>| {
        // A model that is being restarted.
        if count.fetch_add(1, Ordering::SeqCst) == 0 {
            return Err(StatusCode::SERVICE_UNAVAILABLE);
        }
        let choices = (0..request["n"].as_u64().unwrap()).map(|number| {
            let (text, tokens) = ANSWERS[number as usize % 2];
            let each = LOGPROBS.map(|logprob| json!({ "token": "", "logprob": logprob }));
            json!({ "message": { "content": text }, "token_ids": tokens, "logprobs": { "content": each } })
        });
        Ok(Json(json!({ "prompt_token_ids": PROMPT, "choices": choices.collect::<Vec<_>>() })))
    };
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (model, _) = serve(listener, Router::new().route("/v1/chat/completions", post(speak)));

    let mut command = environment(&server.url, &stage, &[&booth.url], &student);
    command.args(["--tasks", "code", "--groups", "3", "--policy-url", model.join("v1").unwrap().as_str()]);
    let document = Running::start(command).document().await;
    let (batches, _) = trainer.finish().await;
    assert_eq!((&document["groups"]["pushed"], asked.load(Ordering::SeqCst)), (&3.into(), 1 + 3), "{document:#}");
    assert_eq!(
        (units(&document["spent"]), &document["on_chain"]["agrees"]),
        (student.has_paid(&stage).await, &true.into())
    );
    for group in groups_of(batches, GROUP) {
        for at in 0..GROUP {
            let (text, tokens) = ANSWERS[at % 2];
            assert_eq!(group.messages.as_ref().unwrap()[at].last().unwrap()["content"], text);
            assert_eq!(group.tokens[at], [&PROMPT[..], &tokens].concat());
            let learned: Vec<i64> = [-100; 2].into_iter().chain(tokens).collect();
            assert_eq!((&group.masks[at], group.scores[at]), (&learned, 1.0 - (at % 2) as f64));
            assert_eq!(group.inference_logprobs.as_ref().unwrap()[at][PROMPT.len()..], LOGPROBS);
        }
    }
}
