//! The example program as a process that is killed.

use serde_json::Value;
use tokio::{
    io::{AsyncBufReadExt as _, BufReader},
    process::{Child, Command},
};
use url::Url;
use x402_directory::{CardQuery, DirectoryClient, ReportQuery};

use super::stage::{Booth, PRICE, Stage, post};
use support::{chain::Chain as _, devnet::DevnetChain, programs::example};

/// A program, and the line that it prints when it is ready.
async fn run(program: &mut Command) -> (Child, Value) {
    let mut process = program.spawn().unwrap();
    let line = BufReader::new(process.stdout.take().unwrap()).lines().next_line().await.unwrap();
    (process, serde_json::from_str(&line.expect("it says that it is ready")).unwrap())
}

async fn start(arguments: &[&str]) -> (Child, Url) {
    let (process, line) = run(example("directory").args(["--listen", "127.0.0.1:0"]).args(arguments)).await;
    let url = format!("http://{}", line["listening"].as_str().unwrap()).parse().unwrap();
    (process, url)
}

#[tokio::test]
async fn killed_directory_loses_nothing_that_it_acknowledged() {
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
        let report = stage.pay(&payer, evaluator, PRICE).await.report(evaluator, &payer).await;
        assert_eq!(post(&url, "evidence", serde_json::to_vec(&report).unwrap()).await.0, 201);
        all.push(report);
    }
    // SIGKILL.
    process.kill().await.unwrap();
    let (_process, url) = start(&arguments).await;
    let directory = DirectoryClient::new(&url).unwrap();
    let reports = directory.reports(&ReportQuery::default()).await.unwrap().reports;
    assert_eq!(reports.into_iter().map(|accepted| accepted.report).collect::<Vec<_>>(), all);
    assert_eq!(directory.cards(&CardQuery::default()).await.unwrap().found.len(), 1);
    assert_eq!(post(&url, "evidence", serde_json::to_vec(&all[0]).unwrap()).await.0, 200);
}

#[tokio::test]
async fn example_runs_by_one_command_with_its_own_chain() {
    let (_process, url) = start(&[]).await;
    let booth = Booth::open(&["prose"]).await;
    DirectoryClient::new(&url).unwrap().list(&booth.url).await.unwrap();
    let wrong = example("directory").args(["--rpc-url", "nonsense"]).output().await.unwrap();
    assert_eq!(wrong.status.code(), Some(2));
}

#[tokio::test]
async fn commands_in_its_help_work() {
    let help = String::from_utf8(example("directory").arg("--help").output().await.unwrap().stdout).unwrap();
    let (_, steps) = help.split_once("TRY IT\n").unwrap();
    // A command goes on where the next line is indented further.
    let steps = steps.replace("\n      ", " ");
    // Any free ports in place of those that are printed.
    let (directory, evaluator, node) = ("127.0.0.1:4023", "127.0.0.1:4021", "http://127.0.0.1:(port)/");
    let any = "127.0.0.1:0".to_owned();
    let mut places = vec![(directory, any.clone()), (evaluator, any)];
    let (mut variables, mut running, mut answers) = (Vec::new(), Vec::new(), Vec::new());
    for step in steps.lines().map(str::trim).filter(|step| !step.starts_with('#')) {
        let step = places.iter().fold(step.to_owned(), |step, (printed, actual)| step.replace(printed, actual));
        let (program, rest) = step.split_once(' ').unwrap();
        match program {
            "export" => variables.push(rest.split_once('=').map(|(name, value)| (name.to_owned(), value.to_owned()))),
            "curl" => {
                let url = rest.rsplit(' ').next().unwrap();
                let body = rest.split_once("-d '").map(|(_, body)| body.split_once('\'').unwrap().0.to_owned());
                let client = reqwest::Client::new();
                let request = body.map_or_else(|| client.get(url), |body| client.post(url).body(body));
                let response = request.header("content-type", "application/json").send().await.unwrap();
                assert!(response.status().is_success(), "{step}");
                answers.push(serde_json::from_slice::<Value>(&response.bytes().await.unwrap()).unwrap());
            }
            program => {
                let mut command = example(program);
                command.args(rest.split(' ')).envs(variables.iter().flatten().cloned());
                let (process, line) = run(&mut command).await;
                running.push(process);
                let text = |name: &str| line[name].as_str().unwrap().to_owned();
                let printed = if program == "directory" { directory } else { evaluator };
                places.retain(|place| place.0 != printed);
                places.extend([(printed, text("listening")), (node, text("rpc_url"))]);
            }
        }
    }
    assert_eq!((running.len(), answers.len()), (2, 3));
    assert!(answers[0]["error"].is_null(), "{answers:?}");
    assert_eq!(answers[2]["cards"][0]["url"], answers[1]["url"]);
}
