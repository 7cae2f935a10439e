//! The example as a process that is killed.

use serde_json::Value;
use tokio::{
    io::{AsyncBufReadExt as _, BufReader},
    process::Child,
};
use tower_x402::market::directory::{CardQuery, DirectoryClient, VoiceQuery};
use url::Url;

use crate::{
    stage::{Booth, PRICE, Stage, post},
    support::{chain::Chain as _, devnet::DevnetChain, programs::example},
};

async fn start(arguments: &[&str]) -> (Child, Url) {
    let mut process = example("directory").args(["--listen", "127.0.0.1:0"]).args(arguments).spawn().unwrap();
    let line = BufReader::new(process.stdout.take().unwrap()).lines().next_line().await.unwrap().unwrap();
    let line: Value = serde_json::from_str(&line).unwrap();
    let url = format!("http://{}", line["listening"].as_str().unwrap()).parse().unwrap();
    (process, url)
}

#[tokio::test]
async fn a_directory_that_is_killed_loses_nothing_that_it_has_answered() {
    let chain = DevnetChain::start(None).await;
    let folder = tempfile::tempdir().unwrap();
    let (rpc, db) = (chain.rpc_url(), folder.path().join("directory.sqlite").display().to_string());
    let arguments = ["--rpc-url", &rpc, "--depth", "0", "--db", &db, "--private-hosts"];
    let (mut process, url) = start(&arguments).await;
    let (booth, stage) = (Booth::open(&["prose"]).await, Stage::set(&chain).await);
    DirectoryClient::new(&url).unwrap().list(&booth.url).await.unwrap();
    let (payer, evaluator) = (stage.payer().await, booth.payee.address());
    let mut all = Vec::new();
    for _ in 0..5 {
        let said = stage.pay(&payer, evaluator, PRICE).await.said(evaluator, &payer).await;
        assert_eq!(post(&url, "evidence", serde_json::to_vec(&said).unwrap()).await.0, 201);
        all.push(said);
    }
    // SIGKILL.
    process.kill().await.unwrap();
    let (_process, url) = start(&arguments).await;
    let directory = DirectoryClient::new(&url).unwrap();
    let voices = directory.voices(&VoiceQuery::default()).await.unwrap().voices;
    assert_eq!(voices.into_iter().map(|voice| voice.said).collect::<Vec<_>>(), all);
    assert_eq!(directory.cards(&CardQuery::default()).await.unwrap().found.len(), 1);
    assert_eq!(post(&url, "evidence", serde_json::to_vec(&all[0]).unwrap()).await.0, 200);
}

#[tokio::test]
async fn one_is_run_by_one_command_with_a_chain_of_its_own() {
    let (_process, url) = start(&[]).await;
    let booth = Booth::open(&["prose"]).await;
    DirectoryClient::new(&url).unwrap().list(&booth.url).await.unwrap();
    let wrong = example("directory").args(["--rpc-url", "nonsense"]).output().await.unwrap();
    assert_eq!(wrong.status.code(), Some(2));
}
