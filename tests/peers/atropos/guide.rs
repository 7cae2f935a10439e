//! The environment of the guide on training runs as it stands there, with an evaluator that is paid.

use support::{
    programs::example,
    student_stage::{PRICE, Stage, verdict},
};
use tokio::time::timeout;
use tower_x402::{client::Journal, signers::PrivateKeySigner};
use x402_market::judge::output_judge;

use super::server::{AtroposServer, PATIENCE};

#[tokio::test]
async fn environment_of_the_guide_pushes_a_group_with_verdicts_that_it_paid_for() {
    let (server, trainer) = AtroposServer::with_trainer(2).await;
    let stage = Stage::set().await;
    let judge = output_judge(async |_, output: String| Ok(verdict(if output == "391" { 1.0 } else { 0.0 })));
    let booth = stage.open(judge).await;
    let key = PrivateKeySigner::random();
    stage.payer_with(10 * PRICE, key.clone(), Journal::in_memory()).await;

    let mut command = example("guides");
    command.arg("environment").env("ATROPOS_URL", &server.url).env("EVALUATOR_URL", booth.url.as_str());
    command.env("STUDENT_PRIVATE_KEY", key.to_bytes().to_string());
    let output = timeout(PATIENCE, command.output()).await.unwrap().unwrap();
    assert!(output.status.success(), "{output:?}");
    let batch = trainer.batch().await.unwrap().expect("a batch");
    let scores: Vec<_> = batch.iter().flat_map(|group| group.scores.clone()).collect();
    // Rewards are standardized within the group.
    assert_eq!((scores, stage.income(&booth).await), (vec![1.0, -1.0], 2 * PRICE));
}
