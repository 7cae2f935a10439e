//! The example's environment as a program, and what its payments come to.

use std::process::Stdio;

use alloy_primitives::{Address, B256, U256, keccak256};
use alloy_signer_local::PrivateKeySigner;
use async_trait::async_trait;
use serde_json::Value;
use tokio::{
    io::{AsyncBufReadExt, BufReader, Lines},
    process::{Child, ChildStderr, Command},
    time::timeout,
};
use tower_x402::{
    atropos::ReceivedGroup,
    market::{
        Submission, Verdict,
        judge::{ArithmeticJudge, Judge, JudgeError, ProseJudge},
    },
};
use url::Url;

use crate::{
    server::{AtroposServer, PATIENCE},
    stage::Stage,
    support::{chain::Chain, programs::example},
};

/// How many answers a group has here.
pub const GROUP: usize = 4;

/// Who pays, and what it had.
pub struct Student {
    pub key: PrivateKeySigner,
    pub had: u64,
}

impl Student {
    pub async fn rich(stage: &Stage) -> Self {
        let (key, had) = (PrivateKeySigner::random(), 10_000_000);
        stage.chain.mint(key.address(), had).await;
        Self { key, had }
    }

    pub async fn has_paid(&self, stage: &Stage) -> u64 {
        self.had - stage.chain.balance(self.key.address()).await
    }
}

/// The environment, which hires these evaluators on this stage.
pub fn environment(server_url: &str, stage: &Stage, evaluators: &[&Url], student: &Student) -> Command {
    let mut command = example("atropos_environment");
    command.args(["--atropos-url", server_url, "--rpc-url", &stage.chain.rpc_url()]);
    command.args(["--group-size", &GROUP.to_string(), "--patience", "60"]);
    for evaluator in evaluators {
        command.args(["--evaluator", evaluator.as_str()]);
    }
    command.env("STUDENT_PRIVATE_KEY", student.key.to_bytes().to_string()).stderr(Stdio::piped());
    command
}

/// A program at work.
pub struct Running {
    process: Child,
    said: Lines<BufReader<ChildStderr>>,
    log: Vec<String>,
}

impl Running {
    pub fn start(mut command: Command) -> Self {
        let mut process = command.spawn().unwrap();
        let said = BufReader::new(process.stderr.take().unwrap()).lines();
        Self { process, said, log: Vec::new() }
    }

    /// Waits until it says that so many groups are done.
    pub async fn has_done(&mut self, groups: u64) {
        let progress = async {
            while let Some(line) = self.said.next_line().await.unwrap() {
                let done = line.split_once(" of ").and_then(|(done, _)| done.parse::<u64>().ok());
                self.log.push(line);
                if done.is_some_and(|done| done >= groups) {
                    return;
                }
            }
            panic!("it ended: {}", self.log.join("\n"));
        };
        timeout(PATIENCE, progress).await.expect("it goes on");
    }

    /// Without a chance to say goodbye.
    pub async fn kill(mut self) {
        self.process.kill().await.unwrap();
    }

    /// Its document, after it ended well.
    pub async fn document(mut self) -> Value {
        let log = async {
            while let Some(line) = self.said.next_line().await.unwrap() {
                self.log.push(line);
            }
            self.log
        };
        let (output, log) =
            timeout(PATIENCE * 3, async { tokio::join!(self.process.wait_with_output(), log) }).await.expect("it ends");
        let output = output.unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(output.status.success(), "{text}\n{}", log.join("\n"));
        serde_json::from_str(&text).unwrap()
    }
}

/// An amount in a document.
pub fn units(value: &Value) -> u64 {
    value.as_str().unwrap_or_else(|| panic!("{value} is no amount")).parse().unwrap()
}

/// Checks that each sequence of the group names what was paid for judging it, and that the chain has those payments. Their nonces.
pub async fn payments(group: &ReceivedGroup, stage: &Stage, student: &Student) -> Vec<B256> {
    let about = group.overrides.as_ref().expect("there is something to say about each sequence");
    assert_eq!(about.len(), GROUP);
    assert!(about.iter().all(|one| one["payments"] == about[0]["payments"]), "the group was paid for as a whole");
    let mut nonces = Vec::new();
    for about in about {
        let critique = about["critique"].as_array().unwrap();
        assert!(
            !critique.is_empty() && about["confidence"].as_object().is_some_and(|all| !all.is_empty()),
            "{about:?}"
        );
        assert!(critique.iter().all(|one| one["critique"]["summary"].is_string() && one["score"].is_number()));
    }
    for payment in about[0]["payments"].as_array().unwrap() {
        if payment["outcome"] != "settled" {
            continue;
        }
        let read = |name: &str| payment[name].as_str().unwrap().to_owned();
        let (nonce, payee): (B256, Address) = (read("nonce").parse().unwrap(), read("evaluator").parse().unwrap());
        let payer: Address = read("payer").parse().unwrap();
        assert_eq!(payer, student.key.address());
        let receipt = stage.chain.receipt(read("transaction").parse().unwrap()).await;
        assert!(receipt.status());
        let used = [keccak256("AuthorizationUsed(address,bytes32)"), payer.into_word(), nonce];
        let moved = [keccak256("Transfer(address,address,uint256)"), payer.into_word(), payee.into_word()];
        let amount = B256::from(U256::from(units(&payment["amount"])));
        let has = |topics: &[B256], data: Option<B256>| {
            let same = |log: &alloy_rpc_types_eth::Log| {
                log.topics() == topics && data.is_none_or(|data| log.data().data.as_ref() == data.as_slice())
            };
            receipt.inner.logs().iter().any(same)
        };
        assert!(has(&used, None) && has(&moved, Some(amount)), "{payment}");
        nonces.push(nonce);
    }
    assert!(!nonces.is_empty(), "nobody was paid for {:?}", group.id());
    nonces
}

/// Judges arithmetic and prose, each as it should be.
pub struct Both;

#[async_trait]
impl Judge for Both {
    async fn judge(&self, submission: &Submission) -> Result<Vec<Verdict>, JudgeError> {
        match &*submission.task.skill {
            "prose" => ProseJudge.judge(submission).await,
            _ => ArithmeticJudge.judge(submission).await,
        }
    }
}

/// Gives everybody the evaluator of the examples, on this stage; the second is its payee.
pub async fn evaluator(stage: &Stage, price: &str) -> (Child, Url, Address) {
    let key = PrivateKeySigner::random();
    stage.chain.fund(key.address(), U256::from(10).pow(U256::from(18))).await;
    let mut command = example("evaluator");
    command.args(["--listen", "127.0.0.1:0", "--price", price, "--rpc-url", &stage.chain.rpc_url()]);
    command.env("SETTLEMENT_PRIVATE_KEY", key.to_bytes().to_string());
    let mut process = command.spawn().unwrap();
    let mut said = BufReader::new(process.stdout.take().unwrap()).lines();
    let line = timeout(PATIENCE, said.next_line()).await.expect("it says that it is ready").unwrap().unwrap();
    let ready: Value = serde_json::from_str(&line).unwrap();
    let url = format!("http://{}", ready["listening"].as_str().unwrap()).parse().unwrap();
    (process, url, key.address())
}

/// A server and nothing else.
pub async fn server() -> AtroposServer {
    // Compiling is not part of anybody's patience.
    crate::support::programs::directory();
    AtroposServer::start().await
}
