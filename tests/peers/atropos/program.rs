//! The example's environment as a program, and checks of its payments.

use std::process::Stdio;

use alloy_primitives::{Address, B256, U256, keccak256};
use alloy_signer_local::PrivateKeySigner;
use async_trait::async_trait;
use atropos_client::ReceivedGroup;
use serde_json::Value;
use tokio::{
    io::{AsyncBufReadExt, BufReader, Lines},
    process::{Child, ChildStderr, Command},
    time::timeout,
};
use url::Url;
use x402_judges::ArithmeticJudge;
use x402_market::{
    Submission, Verdict,
    judge::{Judge, JudgeError},
};

use super::server::{AtroposServer, PATIENCE};
use support::student_stage::Stage;
use support::{chain::Chain, programs::example};

/// The number of answers in a group.
pub const GROUP: usize = 4;

/// The payer, and its balance at the start.
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
    let mut command = impatient(server_url, stage, evaluators, student);
    command.args(["--patience", "60"]);
    command
}

/// Returns the environment's command without its timeouts.
pub fn impatient(server_url: &str, stage: &Stage, evaluators: &[&Url], student: &Student) -> Command {
    let mut command = blind(server_url, evaluators, student);
    command.args(["--rpc-url", &stage.chain.rpc_url()]);
    command
}

/// Returns the environment's command without access to the chain.
pub fn blind(server_url: &str, evaluators: &[&Url], student: &Student) -> Command {
    let mut command = example("atropos_environment");
    command.args(["--atropos-url", server_url, "--group-size", &GROUP.to_string()]);
    for evaluator in evaluators {
        command.args(["--evaluator", evaluator.as_str()]);
    }
    command.env("STUDENT_PRIVATE_KEY", student.key.to_bytes().to_string()).stderr(Stdio::piped());
    command
}

/// A running program.
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

    /// Waits until it reports this number of groups.
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

    /// Sends it a signal.
    pub async fn signal(&self, name: &str) {
        let id = self.process.id().unwrap().to_string();
        assert!(Command::new("kill").args(["-s", name, &id]).status().await.unwrap().success());
    }

    /// Waits until it says this. Returns the line.
    pub async fn says(&mut self, text: &str) -> String {
        let heard = async {
            while let Some(line) = self.said.next_line().await.unwrap() {
                self.log.push(line.clone());
                if line.contains(text) {
                    return line;
                }
            }
            panic!("it ended: {}", self.log.join("\n"));
        };
        let heard = timeout(PATIENCE, heard).await;
        heard.unwrap_or_else(|_| panic!("it does not say {text:?}: {}", self.log.join("\n")))
    }

    /// Kills it with SIGKILL.
    pub async fn kill(mut self) {
        self.process.kill().await.unwrap();
    }

    /// Returns its summary, after it ended successfully.
    pub async fn document(self) -> Value {
        let (success, text, log) = self.end().await;
        assert!(success, "{text}\n{log}");
        serde_json::from_str(&text).unwrap()
    }

    /// Returns its summary, if it wrote one, and its error output, after it failed.
    pub async fn failure(self) -> (Option<Value>, String) {
        let (success, text, log) = self.end().await;
        assert!(!success, "{text}\n{log}");
        (serde_json::from_str(&text).ok(), log)
    }

    async fn end(mut self) -> (bool, String, String) {
        let log = async {
            while let Some(line) = self.said.next_line().await.unwrap() {
                self.log.push(line);
            }
            self.log.join("\n")
        };
        let (output, log) =
            timeout(PATIENCE * 3, async { tokio::join!(self.process.wait_with_output(), log) }).await.expect("it ends");
        let output = output.unwrap();
        (output.status.success(), String::from_utf8(output.stdout).unwrap(), log)
    }
}

/// Reads an amount in a summary.
pub fn units(value: &Value) -> u64 {
    value.as_str().unwrap_or_else(|| panic!("{value} is no amount")).parse().unwrap()
}

/// Checks that each of these evaluators earned what the chain shows, and no other earned anything. Returns the sum.
pub async fn incomes(document: &Value, stage: &Stage, payees: &[Address]) -> u64 {
    let mut earned = 0;
    for one in document["evaluators"].as_array().unwrap() {
        let payee: Address = one["evaluator"].as_str().unwrap().parse().unwrap();
        assert!(payees.contains(&payee), "{one}");
        earned += units(&one["earned"]);
    }
    let mut income = 0;
    for payee in payees {
        let got: u64 = stage.chain.token_transfers(*payee).await.iter().map(|transfer| transfer.units).sum();
        let all = document["evaluators"].as_array().unwrap();
        let account = all.iter().find(|one| one["evaluator"].as_str().unwrap().parse() == Ok(*payee));
        assert_eq!(account.map_or(0, |account| units(&account["earned"])), got, "{payee}: {document:#}");
        income += got;
    }
    assert_eq!(earned, income);
    earned
}

/// Checks that each sequence of the group names the payments for judging it, and that the chain has those. Returns their nonces.
pub async fn payments(group: &ReceivedGroup, stage: &Stage, student: &Student) -> Vec<B256> {
    let about = group.overrides.as_ref().expect("there is something to say about each sequence");
    assert_eq!(about.len(), GROUP);
    assert!(about.iter().all(|one| one["payments"] == about[0]["payments"]), "the group was paid for as a whole");
    assert!(group.scores.iter().all(|score| (0.0..=1.0).contains(score)));
    let paid = about[0]["payments"].as_array().unwrap();
    let mut nonces = Vec::new();
    for about in about {
        let confidence = about["confidence"].as_object().unwrap();
        assert!(confidence.contains_key("arithmetic"), "without that there are no scores: {about:?}");
        for (skill, confidence) in confidence {
            assert!(matches!(&**skill, "arithmetic" | "prose") && is_probability(confidence), "{about:?}");
        }
        let critique = about["critique"].as_array().unwrap();
        for skill in confidence.keys() {
            let said = critique.iter().filter(|one| one["skill"] == **skill);
            let weights: f64 = said.map(|one| one["weight"].as_f64().unwrap()).sum();
            assert!((weights - 1.0).abs() < 1e-9, "{about:?}");
        }
        for one in critique {
            assert!(["score", "confidence", "weight"].iter().all(|name| is_probability(&one[name])), "{one}");
            assert!(one["by"]["id"].is_string() && one["by"]["version"].is_string(), "{one}");
            assert_parts(&one["critique"]);
            let same = |name: &str, payment: &Value| payment[name] == one[name];
            let is_paid = |payment: &&Value| same("skill", payment) && same("evaluator", payment);
            assert!(paid.iter().any(|payment| is_paid(&payment)), "nobody judges for nothing: {one}");
        }
    }
    for payment in paid {
        assert_eq!(payment["network"], stage.chain.asset().network.to_string());
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
                log.address() == stage.chain.asset().address
                    && log.topics() == topics
                    && data.is_none_or(|data| log.data().data.as_ref() == data.as_slice())
            };
            receipt.inner.logs().iter().any(same)
        };
        assert!(has(&used, None) && has(&moved, Some(amount)), "{payment}");
        nonces.push(nonce);
    }
    assert!(!nonces.is_empty(), "nobody was paid for {:?}", group.id());
    nonces
}

fn is_probability(value: &Value) -> bool {
    value.as_f64().is_some_and(|value| (0.0..=1.0).contains(&value))
}

/// A summary, what is good, and what is not: how bad, what, where and what would be better.
fn assert_parts(critique: &Value) {
    assert!(critique["summary"].as_str().is_some_and(|summary| !summary.is_empty()), "{critique}");
    assert!(critique["strengths"].as_array().unwrap().iter().all(Value::is_string), "{critique}");
    for issue in critique["issues"].as_array().unwrap() {
        assert!(matches!(issue["severity"].as_str(), Some("minor" | "major" | "critical")), "{issue}");
        assert!(issue["description"].as_str().is_some_and(|description| !description.is_empty()), "{issue}");
        let place = &issue["place"];
        assert!(place.is_null() || place["quote"].is_string() || place["start"].is_number(), "{issue}");
        assert!(issue["suggestion"].is_null() || issue["suggestion"].is_string(), "{issue}");
    }
}

/// A judge of arithmetic and prose.
pub struct Both;

#[async_trait]
impl Judge for Both {
    async fn judge(&self, submission: &Submission) -> Result<Vec<Verdict>, JudgeError> {
        match &*submission.task.skill {
            "prose" => Ok(submission.outputs().iter().map(|output| plain(output)).collect()),
            _ => ArithmeticJudge.judge(submission).await,
        }
    }
}

/// Judges a text by the number of words in its longest line.
fn plain(text: &str) -> Verdict {
    let longest = text.lines().map(|line| line.split_whitespace().count()).max().unwrap_or(0);
    Verdict::new(1.0 - longest as f64 / 100.0, 0.7, "By the length of its longest line.")
}

/// Starts the example's evaluator on this stage. Returns its process, URL and payee.
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

/// Starts an API server only.
pub async fn server() -> AtroposServer {
    // Compile before any timeout starts.
    support::programs::directory();
    AtroposServer::start().await
}
