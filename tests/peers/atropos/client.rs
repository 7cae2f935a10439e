//! The client against the API server of Atropos.

use std::time::Duration;

use atropos_client::{
    AtroposError, ByteTokenizer, EnvRegistration, Environment, Pushed, RunInfo, ScoredGroup, Sequence, SequenceMessage,
    WandbInfo,
};
use serde_json::{Map, Value, json};

use super::server::{AtroposServer, PATIENCE, run};

const PROMPT: &str = "What is 17 * 23?";

fn sums(group_size: usize) -> EnvRegistration {
    EnvRegistration::new("sums", group_size, 512)
}

fn object(value: Value) -> Map<String, Value> {
    value.as_object().unwrap().clone()
}

/// Returns a group with every optional field.
fn group(id: &str, environment: &Environment) -> ScoredGroup {
    let sequences = (0..environment.limits().group_size).map(|number| {
        let (text, score) = (format!("Answer: {}", 391 - number), 1.0 - number as f64 / 10.0);
        let completion = ByteTokenizer::completion(&text);
        let logprobs = vec![-0.5; completion.len()];
        let sequence = Sequence::new(&ByteTokenizer::prompt(PROMPT), &completion, score).unwrap();
        let sequence = sequence.with_advantage(score - 0.9).unwrap().with_inference_logprobs(&logprobs).unwrap();
        sequence
            .with_messages([SequenceMessage::new("user", PROMPT), SequenceMessage::new("assistant", text)])
            .with_overrides(object(json!({ "critique": "fine", "payments": [{ "amount": "1000" }] })))
    });
    let group = ScoredGroup::new(sequences, environment.limits()).unwrap().with_id(id);
    group
        .with_overrides(object(json!({ "skill": "arithmetic" })))
        .with_generation_params(object(json!({ "temperature": 1.0 })))
}

#[tokio::test]
async fn an_environment_joins_as_soon_as_the_trainer_begins() {
    let server = AtroposServer::start().await;
    let trainer = server.client();
    assert_eq!(trainer.info().await.unwrap(), None);
    assert!(matches!(trainer.batch().await, Err(AtroposError::NoTrainer)));
    let WandbInfo { group, project, .. } = trainer.wandb_info().await.unwrap();
    assert_eq!((group, project), (None, None));

    let client = server.client();
    let joining = tokio::spawn(async move { client.register_env(&sums(2), PATIENCE).await });
    assert!(server.client().try_register_env(&sums(2)).await.unwrap().is_none());
    let first = trainer.register(&run(8)).await.unwrap();
    let second = trainer.register(&run(8)).await.unwrap();
    assert_ne!(first, second);
    assert!(first.0 > u128::from(u64::MAX) && second.0 > u128::from(u64::MAX), "all 128 bits arrive");
    assert!(server.client().try_register_env(&sums(2)).await.unwrap().is_none(), "the trainer has not begun");

    assert_eq!(trainer.batch().await.unwrap(), None);
    let environment = joining.await.unwrap().unwrap();
    assert_eq!((environment.id(), environment.name()), (0, "sums_0"));
    let RunInfo { batch_size, max_token_len, .. } = *environment.info();
    assert_eq!((batch_size, max_token_len), (8, 4_096));
    assert_eq!(environment.limits().max_token_len, 512, "the smaller of the two");
    assert_eq!((environment.starting_step(), environment.num_steps()), (0, 100));
    let status = environment.status().await.unwrap();
    assert_eq!((status.queue_size, status.self_queue_size, status.env_weight), (0, 0, 1.0));
}

#[tokio::test]
async fn waiting_for_the_trainer_times_out() {
    let server = AtroposServer::start().await;
    let late = server.client().register_env(&sums(2), Duration::from_millis(600)).await;
    assert!(matches!(late, Err(AtroposError::NotStarted(_))), "{late:?}");
}

#[tokio::test]
async fn a_trainer_gets_full_batches_of_exactly_what_was_pushed() {
    let (server, trainer) = AtroposServer::with_trainer(8).await;
    let environment = server.client().register_env(&sums(4), PATIENCE).await.unwrap();
    let groups = ["first", "second", "third"].map(|id| group(id, &environment));
    assert!(!environment.is_latest("first").await.unwrap(), "nothing was pushed");

    assert_eq!(environment.push(&groups[0]).await.unwrap(), Pushed::Received);
    assert!(environment.is_latest("first").await.unwrap());
    assert_eq!(trainer.batch().await.unwrap(), None, "half a batch");
    environment.push_all(&groups[1..]).await.unwrap();
    assert!(!environment.is_latest("first").await.unwrap() && environment.is_latest("third").await.unwrap());
    assert_eq!(trainer.status().await.unwrap().queue_size, 3);
    assert_eq!(environment.status().await.unwrap().self_queue_size, 3);

    let batch = trainer.batch().await.unwrap().expect("a full batch");
    assert_eq!(batch.iter().map(|group| group.len()).sum::<usize>(), 8);
    assert_eq!(trainer.batch().await.unwrap(), None, "the rest is half a batch");
    assert_eq!(trainer.status().await.unwrap().current_step, 1);
    for (pushed, received) in groups.iter().zip(&batch) {
        assert_eq!((received.id(), received.env_id), (pushed.id(), Some(environment.id())));
        let pushed = serde_json::to_value(pushed).unwrap();
        assert_eq!(json!(received.tokens), pushed["tokens"]);
        assert_eq!(json!(received.masks), pushed["masks"]);
        assert_eq!(json!(received.scores), pushed["scores"]);
        assert_eq!(json!(received.advantages), pushed["advantages"]);
        assert_eq!(json!(received.inference_logprobs), pushed["inference_logprobs"]);
        assert_eq!(json!(received.messages), pushed["messages"]);
        assert_eq!(json!(received.overrides), pushed["overrides"]);
        assert_eq!(json!(received.group_overrides), pushed["group_overrides"]);
        assert_eq!(json!(received.generation_params), pushed["generation_params"]);
        assert_eq!(received.group_overrides.as_ref().unwrap()["skill"], "arithmetic");
    }
    environment.disconnect().await.unwrap();
    environment.disconnect().await.unwrap();
}

#[tokio::test]
async fn a_group_size_that_fills_no_batch_is_refused_before_the_server_counts_the_environment() {
    let (server, _) = AtroposServer::with_trainer(8).await;
    let refused = server.client().register_env(&sums(3), PATIENCE).await.unwrap_err();
    assert!(matches!(refused, AtroposError::GroupSize { group_size: 3, batch_size: 8 }), "{refused}");
    let environment = server.client().register_env(&sums(4), PATIENCE).await.unwrap();
    assert_eq!(environment.id(), 0, "it is the first");
}

#[tokio::test]
async fn an_environment_pauses_until_the_trainer_has_taken_something() {
    let (server, trainer) = AtroposServer::with_trainer(4).await;
    let environment = server.client().register_env(&sums(2), PATIENCE).await.unwrap();
    for id in ["a", "b"] {
        environment.wait_for_room(2, Duration::ZERO).await.expect("there is room for two");
        environment.push(&group(id, &environment)).await.unwrap();
    }
    let full = environment.wait_for_room(2, Duration::from_millis(100)).await;
    assert!(matches!(full, Err(AtroposError::QueueFull { queued: 2, .. })), "{full:?}");

    let waiting = tokio::spawn(async move { environment.wait_for_room(2, PATIENCE).await });
    assert!(trainer.batch().await.unwrap().is_some());
    assert_eq!(waiting.await.unwrap().unwrap().queue_size, 0);
}

#[tokio::test]
async fn a_server_that_has_restarted_gets_no_group_and_can_be_registered_with_anew() {
    let (server, _) = AtroposServer::with_trainer(4).await;
    let environment = server.client().register_env(&sums(2), PATIENCE).await.unwrap();
    let port = server.port();
    server.kill().await;
    let gone = environment.push(&group("a", &environment)).await.unwrap_err();
    assert!(matches!(gone, AtroposError::Unreachable(_)) && !gone.is_unknown(), "{gone:?}");

    let server = AtroposServer::start_on(port).await;
    let forgotten = environment.push(&group("a", &environment)).await.unwrap_err();
    assert!(matches!(forgotten, AtroposError::UnknownEnvironment), "{forgotten:?}");
    // After a failure the server closes the connection, perhaps while it is reused; the request may be repeated.
    let mut goodbye = environment.disconnect().await;
    while matches!(goodbye, Err(AtroposError::Unanswered { .. })) {
        goodbye = environment.disconnect().await;
    }
    assert!(matches!(goodbye, Err(AtroposError::UnknownEnvironment)), "{goodbye:?}");
    // If the server had received the group, it would refuse a trainer.
    let trainer = server.client();
    trainer.register(&run(4)).await.unwrap();
    assert_eq!(trainer.batch().await.unwrap(), None);
    server.client().register_env(&sums(2), PATIENCE).await.unwrap();
}
