//! What `docs/guide/what-can-go-wrong.md` says is what the command says: the rows of its tables are read from the document, what is wrong is
//! made true, the binary is run, and its words are compared with those of the row.
//!
//! In the document, `…` stands for anything. What is said is the whole line, without the name of the command before it. If the command
//! says what to do in a line of its own, the last column begins with that line.

use std::{
    collections::BTreeSet,
    fs,
    os::unix::fs::{MetadataExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use axum::{
    Json, Router,
    body::Bytes,
    http::{HeaderMap, StatusCode},
    response::{IntoResponse as _, Redirect},
    routing::{get, post},
};
use serde_json::{Value, json};
use tokio::{net::TcpListener, process::Command, time::timeout};
use tower_x402::permit2;

use crate::{
    removed::transfer,
    stage::{PATIENCE, Running, Stage, client, read, run, x402},
    upto::{facilitator_at, waiting},
};

/// A row of a table: what is wrong, what is asked, what is said, and what to do.
#[derive(Debug)]
struct Row {
    wrong: String,
    asked: Vec<String>,
    says: String,
    to_do: String,
}

/// Returns the rows of a section.
fn rows(section: &str) -> Vec<Row> {
    let page = read(&Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/guide/what-can-go-wrong.md"));
    let section = page.split(&format!("## {section}\n")).nth(1).expect("the document has the section");
    let table = section.split("\n## ").next().unwrap().lines().filter(|line| line.starts_with("| "));
    let cells = |line: &str| line.trim_matches('|').split(" | ").map(|cell| cell.trim().to_owned()).collect::<Vec<_>>();
    let row = |line: &str| {
        let [wrong, asked, says, to_do] =
            cells(line).try_into().unwrap_or_else(|cells| panic!("four cells: {cells:?}"));
        let asked = asked.split(", ").map(|name| name.trim_matches('`').to_owned()).collect();
        Row { wrong, asked, says: says.trim_matches('`').to_owned(), to_do }
    };
    // The first line is the head of the table.
    table.skip(1).map(row).collect()
}

/// Returns `true` if the text is the pattern with something in place of each `…`.
fn fits(pattern: &str, text: &str) -> bool {
    let mut parts = pattern.split('…');
    let first = parts.next().unwrap_or_default();
    let Some(mut rest) = text.strip_prefix(first) else { return false };
    let parts: Vec<&str> = parts.collect();
    let Some((last, middle)) = parts.split_last() else { return rest.is_empty() };
    for part in middle {
        match rest.split_once(part) {
            Some((_, after)) => rest = after,
            None => return false,
        }
    }
    rest.ends_with(last)
}

/// What a command said: sentences, each with what to do if the next line says that, and how it ended.
#[derive(Debug, Default)]
struct Said {
    sentences: Vec<(String, Option<String>)>,
    code: Option<i32>,
}

impl Said {
    /// Reads what a command wrote until it ended.
    fn by(output: &std::process::Output) -> Self {
        let text = [output.stderr.as_slice(), b"\n", &output.stdout].concat();
        Self { code: output.status.code(), ..Self::in_text(&String::from_utf8_lossy(&text)) }
    }

    fn in_text(text: &str) -> Self {
        let mut said = Self::default();
        let begins = |line: &str| {
            ["x402 ", "error: ", "ok ", "warning ", "wrong ", "{"].iter().any(|word| line.starts_with(word))
                || line.starts_with(|first: char| first.is_ascii_digit())
        };
        for line in text.lines().filter(|line| !line.trim().is_empty()) {
            let words = line.split_whitespace().collect::<Vec<_>>().join(" ");
            match said.sentences.last_mut() {
                Some((_, to_do @ None)) if !begins(line) => *to_do = Some(words),
                _ => {
                    let name_of_command =
                        |text: &str| text.strip_prefix("x402 ")?.split_once(": ").map(|(_, rest)| rest.to_owned());
                    said.sentences.push((name_of_command(&words).unwrap_or(words), None));
                }
            }
        }
        said
    }

    /// Reads an answer of ours over HTTP, as `status code: detail`.
    async fn answer(sent: reqwest::RequestBuilder) -> Self {
        let answer = sent.send().await.unwrap();
        let status = answer.status().as_u16();
        let body: Value = serde_json::from_slice(&answer.bytes().await.unwrap()).unwrap();
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let of =
            |body: &Value, code: &str| (format!("{status} {}: {}", text(&body[code]), text(&body["detail"])), None);
        let sentences = match body["reasons"].as_array() {
            Some(reasons) => reasons.iter().map(|reason| of(reason, "code")).collect(),
            None => vec![of(&body, "error")],
        };
        Self { sentences, code: None }
    }

    fn compare(&self, row: &Row) -> Result<(), String> {
        let found = self.sentences.iter().find(|(sentence, _)| fits(&row.says, sentence));
        let (_, to_do) = found.ok_or_else(|| format!("{:?} is not said", row.says))?;
        match to_do {
            Some(to_do) if !row.to_do.starts_with(to_do.as_str()) => Err(format!("what to do is said to be: {to_do}")),
            _ if row.to_do.is_empty() => Err("what to do is missing".to_owned()),
            _ => Ok(()),
        }
    }
}

/// Checks that a section has these faults, and that all of its rows are true. What ends by itself ends with this code.
async fn is_true(section: &str, code: i32, faults: &[&str], said: impl AsyncFn(&Stage, &str, &str) -> Said) {
    let rows = rows(section);
    let named: BTreeSet<&str> = rows.iter().map(|row| row.wrong.as_str()).collect();
    assert_eq!(named, faults.iter().copied().collect(), "the faults of {section:?}");
    let mut false_rows = Vec::new();
    for row in &rows {
        for asked in &row.asked {
            // Each on a machine of its own: what one leaves behind is nothing to the next.
            let stage = Stage::new().await;
            // What goes on has said nothing.
            let said = timeout(PATIENCE / 3, said(&stage, &row.wrong, asked)).await.unwrap_or_default();
            let ended = said.code.is_none_or(|ended| ended == code);
            if let Err(why) =
                said.compare(row).and_then(|()| ended.then_some(()).ok_or("it ended otherwise".to_owned()))
            {
                false_rows.push(format!("{} | {asked}: {why}\n{said:#?}", row.wrong));
            }
        }
    }
    assert!(false_rows.is_empty(), "the document says otherwise:\n\n{}", false_rows.join("\n\n"));
}

#[tokio::test]
async fn each_reason_why_it_does_not_begin_is_said_as_documented() {
    let faults = [
        "no price",
        "no service",
        "a service without `http://`",
        "a service with a query",
        "a public address with a password",
        "no payee",
        "a price of nothing",
        "a field that does not exist",
        "a field with a bad value",
        "a file that is not there",
        "a file without permission",
        "no settlement key",
        "no payer's key",
        "a settlement key that is none",
        "a payer's key that is none",
        "a key file that others can read",
        "a key file without permission",
        "a wrong password",
        "a key for channels that is none",
        "no key for channels",
        "a `max_price`, and no key for channels",
        "permits where nobody settles them",
        "no node to approve at",
        "a key for channels, and no node",
        "a network, and no node",
        "a settlement key, and no node",
        "only commas in `FACILITATOR_KEYS`",
        "two keys for one purpose",
        "the node does not answer",
        "a network without a known USDC",
        "the node is of another chain",
        "the node gives no receipts",
        "the facilitator does not answer",
        "the port is taken",
        "the operator's port is taken",
        "the operator's page is open to all",
        "a token that is too short",
        "an address of another machine",
        "a bound in double quotes",
        "a name that cannot be printed",
        "no permission for the ledger",
        "no room for the ledger",
        "the ledger is in use",
        "the database does not answer",
        "a ledger that is not there",
        "a ledger that outlives the chain",
        "no permission for the journal",
        "no permission for the answer",
    ];
    is_true("It does not begin", 2, &faults, async |stage, wrong, asked| said_at_once(stage, wrong, asked).await).await;
}

#[tokio::test]
async fn each_finding_of_the_doctor_is_said_as_documented() {
    let faults = [
        "a settlement key that is none",
        "an empty tank",
        "a key of devnets",
        "the node does not answer",
        "the node is of another chain",
        "the node gives no receipts",
        "the node gives no logs",
        "the node has no history",
        "a token that is none",
        "a token of another name",
        "a key that has delegated its account",
        "permits where nobody settles them",
        "the clock is off by an hour",
        "a payee of devnets",
        "the facilitator does not answer",
        "the facilitator wants a token",
        "the service does not run",
        "no permission for the ledger",
        "no room for the ledger",
        "the ledger is in use",
        "the database does not answer",
        "the seller does not run",
        "a proxy that refuses long answers",
        "a proxy that refuses long requests",
        "a proxy that redirects",
    ];
    is_true("What the doctor finds", 1, &faults, async |stage, wrong, asked| said_at_once(stage, wrong, asked).await)
        .await;
}

#[tokio::test]
async fn each_failure_while_it_runs_is_said_as_documented() {
    let faults = [
        "an empty tank",
        "the node is gone",
        "the node does not answer",
        "the clock is off by an hour",
        "the disk is full",
        "the service does not answer",
        "the service does not answer, with `--flow upfront`",
        "the service is too slow",
        "the service gives a price that cannot be read",
        "a WebSocket",
        "a method in small letters",
        "a compressed body that is paid for by its size",
        "a web page",
        "the token twice",
        "no path that is charged for",
        "the facilitator of `--upto` does not answer yet",
        "the facilitator of `--upto` answers, and settles no permits",
        "no room for the answer",
        "no room for the journal",
        "above the budget",
        "nothing is approved for Permit2",
        "an offer of at most a price, and no node",
        "no ETH to approve with",
        "a payer without USDC",
        "nobody answers",
        "the payment is not answered",
    ];
    is_true("While it runs", 1, &faults, async |stage, wrong, asked| said_later(stage, wrong, asked).await).await;
}

/// The command as it works when nothing is wrong.
fn command(stage: &Stage, asked: &str) -> Command {
    let mut command = x402();
    let payer = stage.devnet.text("payer_private_key");
    match asked {
        "charge" => {
            command = stage.charge("127.0.0.1:0");
            command.args(["--price", "$0.001"]);
        }
        "facilitator" => {
            command.args(["facilitator", "--listen", "127.0.0.1:0", "--ledger", &stage.ledger()]);
            command.env("X402_RPC_URL", stage.devnet.text("rpc_url"));
            command.env("SETTLEMENT_PRIVATE_KEY", stage.devnet.text("settlement_private_key"));
        }
        "devnet" => {
            command.args(["devnet", "--listen", "127.0.0.1:0"]);
        }
        "pay" => {
            command.args(["pay", "http://127.0.0.1:9/"]).env("PAYER_PRIVATE_KEY", payer);
        }
        "proxy" => {
            command.args(["proxy", "--to", "http://127.0.0.1:9", "--listen", "127.0.0.1:0"]);
            command.env("PAYER_PRIVATE_KEY", payer);
        }
        "books list" => {
            fs::write(stage.path("payments.sqlite"), "").unwrap();
            command.args(["books", "--ledger", &stage.ledger(), "list"]);
        }
        "channels claim" => {
            fs::write(stage.path("payments.sqlite"), "").unwrap();
            command.args(["channels", "claim", "--ledger", &stage.ledger()]);
            command.env("X402_RPC_URL", stage.devnet.text("rpc_url"));
            command.env("CHANNELS_PRIVATE_KEY", stage.devnet.text("channels_private_key"));
        }
        "wallet new" => {
            command.args(["wallet", "new"]);
        }
        "wallet approve" => {
            command.args(["wallet", "approve", "$1"]).env("PAYER_PRIVATE_KEY", payer);
            command.env("X402_RPC_URL", stage.devnet.text("rpc_url"));
        }
        "wallet show" => {
            command.args(["wallet", "show"]).env("PAYER_PRIVATE_KEY", payer);
            command.env("X402_RPC_URL", stage.devnet.text("rpc_url"));
        }
        "doctor" => {
            command.args(["doctor", "--ledger", &stage.ledger()]);
            command.env("X402_RPC_URL", stage.devnet.text("rpc_url"));
            command.env("SETTLEMENT_PRIVATE_KEY", stage.devnet.text("settlement_private_key"));
            command.env("CHANNELS_PRIVATE_KEY", stage.devnet.text("channels_private_key"));
        }
        _ => panic!("no command {asked}"),
    }
    command
}

/// Makes true what is wrong, and returns what the command says then.
async fn said_at_once(stage: &Stage, wrong: &str, asked: &str) -> Said {
    let mut command = command(stage, asked);
    match wrong {
        "no price" => command = stage.charge("127.0.0.1:0"),
        "no service" => {
            command = x402();
            command.args(["charge", "--price", "$0.001"]);
        }
        "a service without `http://`" => command = with_argument(&command, &stage.upstream.url, "localhost:8000"),
        "a service with a query" => {
            command = with_argument(&command, &stage.upstream.url, "http://127.0.0.1:8000/run?script=");
        }
        "a public address with a password" => {
            command.args(["--public-url", "https://user:secret@api.example"]);
        }
        "no payee" => {
            command = x402();
            command.args(["charge", "--price", "$0.001", "--upstream", NOBODY, "--listen", "127.0.0.1:0"]);
            command.env("X402_RPC_URL", stage.devnet.text("rpc_url"));
            command.env("SETTLEMENT_PRIVATE_KEY", stage.devnet.text("settlement_private_key"));
        }
        "a price of nothing" => {
            command = stage.charge("127.0.0.1:0");
            command.args(["--price", "$0"]);
        }
        "a field that does not exist" => configure(&mut command, stage, "listen = \"127.0.0.1:0\"\nprise = \"$1\"\n"),
        "a field with a bad value" => configure(&mut command, stage, "price = \"$1\"\npay_to = \"0x12\"\n"),
        "a file that is not there" => {
            command.args(["--config", "/nowhere/x402.toml"]);
        }
        "a file without permission" => {
            configure(&mut command, stage, "price = \"$1\"\n");
            fs::set_permissions(stage.path("x402.toml"), fs::Permissions::from_mode(0o000)).unwrap();
            command = without_privileges(&command);
        }
        "no settlement key" => {
            command.env_remove("SETTLEMENT_PRIVATE_KEY");
        }
        "no payer's key" => {
            command.env_remove("PAYER_PRIVATE_KEY");
        }
        "a settlement key that is none" => {
            command.env("SETTLEMENT_PRIVATE_KEY", "0x1234");
        }
        "a payer's key that is none" => {
            command.env("PAYER_PRIVATE_KEY", "0x1234");
        }
        "a key file that others can read" => key_file(&mut command, stage, 0o644),
        "a key file without permission" => {
            key_file(&mut command, stage, 0o000);
            command = without_privileges(&command);
        }
        "a wrong password" => {
            fs::write(stage.path("settlement.json"), KEYSTORE).unwrap();
            command.env_remove("SETTLEMENT_PRIVATE_KEY").env("SETTLEMENT_KEYSTORE", stage.path("settlement.json"));
            command.env("SETTLEMENT_KEYSTORE_PASSWORD", "not this one");
        }
        "a key for channels that is none" => {
            command.env("CHANNELS_PRIVATE_KEY", "0x1234");
        }
        "no key for channels" => {
            command.env_remove("CHANNELS_PRIVATE_KEY");
        }
        "a `max_price`, and no key for channels" => {
            configure(&mut command, stage, "[[route]]\npath = \"/cheap\"\nmax_price = \"$0.001\"\n");
            command.env_remove("CHANNELS_PRIVATE_KEY");
        }
        "permits where nobody settles them" => {
            stage.ask("anvil_setCode", json!([permit2::PERMIT2, "0x"])).await;
            command.arg("--upto");
        }
        "no node to approve at" => {
            command.env_remove("X402_RPC_URL");
        }
        "no ETH to approve with" => {
            command.env("X402_RPC_URL", node_without(stage, "devnet_fund").await);
        }
        "a key for channels, and no node" => {
            // It settles through a facilitator that answers.
            let facilitator = Running::start(&mut self::command(stage, "facilitator")).await;
            command.env_remove("X402_RPC_URL").args(["--facilitator-url", &facilitator.url()]);
            let command = with_argument(&command, &stage.ledger(), "memory");
            let said = Said::by(&run(&mut { command }).await);
            facilitator.stop().await;
            return said;
        }
        "a network, and no node" => {
            command.env_remove("X402_RPC_URL").env_remove("SETTLEMENT_PRIVATE_KEY").env_remove("CHANNELS_PRIVATE_KEY");
            command = with_argument(command.args(["--network", "base"]), &stage.ledger(), "memory");
        }
        "a settlement key, and no node" => {
            command = with_argument(command.env_remove("X402_RPC_URL"), &stage.ledger(), "memory");
        }
        "only commas in `FACILITATOR_KEYS`" => {
            command.env("FACILITATOR_KEYS", " , ");
        }
        "two keys for one purpose" => {
            command.env("SETTLEMENT_PRIVATE_KEY_FILE", stage.path("other.key"));
        }
        "the node does not answer" => {
            command.env("X402_RPC_URL", NOBODY);
        }
        "a network without a known USDC" => {
            command.args(["--network", "eip155:1"]);
        }
        "the node is of another chain" => {
            command.args(["--network", "base"]);
        }
        "the node gives no receipts" => {
            command.env("X402_RPC_URL", node_without(stage, "eth_getTransactionReceipt").await);
        }
        "the node gives no logs" => {
            command.env("X402_RPC_URL", node_without(stage, "eth_getLogs").await);
        }
        "the node has no history" => {
            command.env("X402_RPC_URL", node_without(stage, "eth_getBalance").await);
        }
        "a token that is none" => {
            let nothing = "0x000000000000000000000000000000000000dEaD";
            command.args(["--asset", nothing, "--asset-name", "USDC", "--asset-version", "2"]);
        }
        "a token of another name" => {
            command.args(["--asset", stage.devnet.text("asset"), "--asset-name", "Dollars", "--asset-version", "2"]);
        }
        "a key that has delegated its account" => {
            let code = format!("0xef0100{}", stage.devnet.text("asset").trim_start_matches("0x"));
            stage.ask("anvil_setCode", json!([stage.devnet.text("settlement_address"), code])).await;
        }
        "a payee of devnets" => {
            command.env("X402_RPC_URL", node_without(stage, "devnet_fund").await);
            command.args(["--pay-to", stage.devnet.text("payee")]);
        }
        "the facilitator wants a token" => {
            let facilitator = facilitator_at(stage, "127.0.0.1:0", "a-key-of-the-seller").await;
            let said = Said::by(&run(command.args(["--facilitator-url", &facilitator.url()])).await);
            facilitator.stop().await;
            return said;
        }
        "the service does not run" => {
            command.args(["--upstream", NOBODY]);
        }
        "the clock is off by an hour" => an_hour_ahead(stage, &mut command),
        "the facilitator does not answer" => {
            command.args(["--facilitator-url", NOBODY]).env_remove("X402_RPC_URL");
        }
        "the port is taken" => {
            let taken = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let address = taken.local_addr().unwrap().to_string();
            return Said::by(&run(&mut with_argument(&command, "127.0.0.1:0", &address)).await);
        }
        "the operator's port is taken" => {
            let taken = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let address = taken.local_addr().unwrap().to_string();
            return Said::by(&run(command.args(["--admin", &address])).await);
        }
        "the operator's page is open to all" => {
            command.args(["--admin", "0.0.0.0:0"]);
        }
        "a token that is too short" => {
            command.args(["--admin", "0.0.0.0:0"]).env("X402_ADMIN_TOKEN", "short");
        }
        "an address of another machine" => {
            command = x402();
            command.args(["proxy", "--to", NOBODY, "--listen", "0.0.0.0:4030"]);
        }
        "a bound in double quotes" => {
            command.args(["--to", "https://judge.example=bash.50"]);
        }
        "a name that cannot be printed" => {
            let name = <std::ffi::OsStr as std::os::unix::ffi::OsStrExt>::from_bytes(b"payer\xff.key");
            command.arg(stage.path("").join(name));
        }
        "no permission for the ledger" => return in_a_closed_directory(stage, &command).await,
        "no room for the ledger" => {
            let small = SmallDisk::new(stage, "64k");
            let ledger = format!("sqlite:{}", small.directory.join("payments.sqlite").display());
            command = with_argument(&command, &stage.ledger(), &ledger);
            return Said::by(&run(&mut small.filled(&command)).await);
        }
        "the ledger is in use" => {
            let other = stage.charging().await;
            let said = Said::by(&run(&mut command).await);
            other.stop().await;
            return said;
        }
        "the database does not answer" => {
            command = with_argument(&command, &stage.ledger(), "postgres://x402@127.0.0.1:9/x402");
        }
        "a ledger that is not there" => fs::remove_file(stage.path("payments.sqlite")).unwrap(),
        "a ledger that outlives the chain" => {
            command.env_remove("X402_RPC_URL");
        }
        "no permission for the journal" => {
            return in_a_closed_directory(stage, command.arg("--journal").arg(stage.path("journal"))).await;
        }
        "no permission for the answer" => {
            return in_a_closed_directory(stage, command.arg("-o").arg(stage.path("answer"))).await;
        }
        "an empty tank" => {
            command.env("SETTLEMENT_PRIVATE_KEY", EMPTY);
        }
        "a key of devnets" => {
            command.env("X402_RPC_URL", node_without(stage, "devnet_fund").await);
        }
        "the seller does not run" => {
            command.args(["--public-url", "http://127.0.0.1:9/evaluate"]);
        }
        "a proxy that refuses long answers" | "a proxy that refuses long requests" | "a proxy that redirects" => {
            let mut seller = with_argument(&stage.charge("127.0.0.1:0"), &stage.ledger(), "memory");
            let seller = Running::start(seller.args(["--price", "$0.001"])).await;
            command.args(["--public-url", &proxied(&seller, wrong).await]);
            let said = Said::by(&run(&mut command).await);
            seller.stop().await;
            return said;
        }
        _ => panic!("nobody knows how to make true: {wrong}"),
    }
    Said::by(&run(&mut command).await)
}

/// What is said while everything was well at the start.
async fn said_later(stage: &Stage, wrong: &str, asked: &str) -> Said {
    if asked.starts_with("wallet ") {
        return said_at_once(stage, wrong, asked).await;
    }
    if wrong.starts_with("the facilitator of `--upto` ") {
        return said_without_permits(stage, wrong, asked).await;
    }
    let admin = free_port().await;
    let mut charge = stage.charge("127.0.0.1:0");
    charge.args(["--admin", &admin]);
    let small = SmallDisk::new(stage, "4m");
    let ledger = format!("sqlite:{}", small.directory.join("payments.sqlite").display());
    match wrong {
        "an empty tank" => {
            charge.args(["--price", "$0.001"]).env("SETTLEMENT_PRIVATE_KEY", EMPTY);
        }
        "the clock is off by an hour" if asked == "/readyz" => {
            an_hour_ahead(stage, charge.args(["--price", "$0.001"]));
        }
        "the disk is full" => {
            charge = small.mounted(&with_argument(charge.args(["--price", "$0.001"]), &stage.ledger(), &ledger));
        }
        "the service does not answer" => {
            charge = with_argument(&charge, &stage.upstream.url, NOBODY);
            configure(&mut charge, stage, FREE);
        }
        "the service does not answer, with `--flow upfront`" => {
            charge = with_argument(&charge, &stage.upstream.url, NOBODY);
            charge.args(["--price", "$0.001", "--flow", "upfront"]);
        }
        "a compressed body that is paid for by its size" => {
            configure(&mut charge, stage, "[[route]]\npath = \"/echo\"\nprice_per_kilobyte = \"$0.0001\"\n");
        }
        "nothing is approved for Permit2" | "an offer of at most a price, and no node" => {
            configure(&mut charge, stage, "upto = true\n[[route]]\npath = \"/echo\"\nmax_price = \"$0.001\"\n");
            charge.env_remove("CHANNELS_PRIVATE_KEY");
        }
        "the service is too slow" => configure(&mut charge, stage, &format!("timeout_seconds = 1\n{FREE}")),
        "the service gives a price that cannot be read" => {
            configure(&mut charge, stage, "upto = true\n[[route]]\npath = \"/odd\"\nprice = \"$0.001\"\n");
        }
        "no path that is charged for" => {
            configure(&mut charge, stage, "[[route]]\npath = \"/sold\"\nprice = \"$0.001\"\n");
        }
        _ => {
            charge.args(["--price", "$0.001"]);
        }
    }
    let charge = Running::start(&mut charge).await;
    match wrong {
        "the node is gone" => stage.devnet.signal("KILL").await,
        "the disk is full" => small.fill().await,
        _ => {}
    }
    let client = reqwest::Client::builder().no_proxy().build().unwrap();
    let url = match (wrong, asked) {
        ("nobody answers", _) => NOBODY.to_owned(),
        _ => charge.url(),
    };
    let payer = stage.devnet.text("payer_private_key");
    let said = match asked {
        "/readyz" => loop {
            if wrong == "the disk is full" {
                // Nobody notices before something is to be written.
                let mut pay = x402();
                pay.args(["pay", &format!("{url}/echo"), "--attempts", "1"]);
                run(pay.env("PAYER_PRIVATE_KEY", payer)).await;
            }
            // It looks once in a while.
            let said = Said::answer(client.get(format!("http://{admin}/readyz"))).await;
            if !said.sentences.is_empty() {
                break said;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        },
        "a request" => {
            let path = match wrong {
                "the service is too slow" => "gated",
                "no path that is charged for" => "nowhere",
                _ => "echo",
            };
            let request = client.post(format!("{url}/{path}"));
            Said::answer(match wrong {
                "a WebSocket" => upgrading(request),
                "a method in small letters" => client.request("post".parse().unwrap(), format!("{url}/{path}")),
                "a compressed body that is paid for by its size" => request.header("content-encoding", "gzip"),
                _ => request,
            })
            .await
        }
        "a paid request" => {
            let (sold, path) = match wrong {
                "no path that is charged for" => ("sold", "nowhere"),
                "the service gives a price that cannot be read" => ("odd", "odd"),
                _ => ("echo", "echo"),
            };
            let payment = transfer(stage, &format!("{url}/{sold}")).await;
            Said::answer(client.post(format!("{url}/{path}")).header("payment-signature", payment)).await
        }
        "proxy" => {
            let mut proxy = x402();
            proxy.args(["proxy", "--listen", "127.0.0.1:0", "--to", &url]).env("PAYER_PRIVATE_KEY", payer);
            if wrong == "above the budget" {
                proxy.args(["--max-payment", "$0.0009"]);
            }
            if wrong == "no room for the journal" {
                proxy.arg("--journal").arg(small.directory.join("journal"));
                proxy = small.filled(&proxy);
            }
            if wrong == "the clock is off by an hour" {
                an_hour_ahead(stage, &mut proxy);
            }
            if wrong == "nothing is approved for Permit2" {
                proxy.args(["--rpc-url", stage.devnet.text("rpc_url")]);
            }
            let proxy = Running::start(&mut proxy).await;
            let again = if wrong == "the token twice" { proxy.text("token") } else { "" };
            let mut request = client.get(format!("{}echo?{again}", proxy.text("url")));
            request = match wrong {
                "a WebSocket" => upgrading(request),
                "a web page" => request.header("sec-fetch-site", "cross-site"),
                _ => request,
            };
            let said = Said::answer(request).await;
            proxy.kill().await;
            said
        }
        "pay" | "pay --dry-run" => {
            let mut pay = x402();
            pay.args(["pay", &format!("{url}/echo"), "--attempts", "1"]).env("PAYER_PRIVATE_KEY", payer);
            if asked == "pay --dry-run" {
                pay.arg("--dry-run");
            }
            match wrong {
                "above the budget" => pay.args(["--budget", "$0.0009"]),
                "the clock is off by an hour" => {
                    an_hour_ahead(stage, &mut pay);
                    &mut pay
                }
                "no room for the journal" => {
                    pay.arg("--journal").arg(small.directory.join("journal"));
                    pay = small.filled(&pay);
                    &mut pay
                }
                "nothing is approved for Permit2" => pay.args(["--rpc-url", stage.devnet.text("rpc_url")]),
                "no room for the answer" => pay.args(["-o", "/dev/full"]),
                "a payer without USDC" => pay.env("PAYER_PRIVATE_KEY", EMPTY),
                "the payment is not answered" => {
                    // It is killed in the middle of the work.
                    let mut pay = with_argument(&pay, &format!("{url}/echo"), &format!("{url}/gated"));
                    let paying = pay.stderr(Stdio::piped()).spawn().unwrap();
                    stage.upstream.state.arrived.acquire().await.unwrap().forget();
                    charge.kill().await;
                    return Said::by(&paying.wait_with_output().await.unwrap());
                }
                _ => &mut pay,
            };
            Said::by(&run(&mut pay).await)
        }
        _ => panic!("nobody asks {asked} then"),
    };
    charge.kill().await;
    said
}

/// What is said while `--upto` waits for a facilitator, and after one came that settles no permits.
async fn said_without_permits(stage: &Stage, wrong: &str, asked: &str) -> Said {
    let (charge, address) = waiting(stage, &[]).await;
    let metered = format!("{}/priced", charge.url());
    let said = match asked {
        "/readyz" => Said::answer(client().get(format!("http://{}/readyz", charge.text("admin")))).await,
        "a request" => Said::answer(client().get(&metered)).await,
        "pay" => {
            let mut pay = x402();
            pay.args(["pay", &metered, "--attempts", "1"]);
            Said::by(&run(pay.env("PAYER_PRIVATE_KEY", stage.devnet.text("payer_private_key"))).await)
        }
        "charge" => {
            let answers = wrong.ends_with("settles no permits");
            // Without keys for its callers, it settles no permits.
            let _facilitator = if answers { Some(facilitator_at(stage, &address, "").await) } else { None };
            let sign = if answers { "no permits are taken" } else { "permits (--upto)" };
            loop {
                let text = read(&stage.path("errors"));
                if text.contains(sign) {
                    break Said::in_text(&text);
                }
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
        _ => panic!("nobody asks {asked} then"),
    };
    charge.kill().await;
    said
}

/// A key that nobody gave anything.
const EMPTY: &str = "0x4646464646464646464646464646464646464646464646464646464646464646";
/// A keystore file of version 3, whose password nobody knows.
const KEYSTORE: &str = r#"{"version":3,"id":"3198bc9c-6672-5ab3-d995-4942343ae5b6","crypto":{"cipher":"aes-128-ctr",
"cipherparams":{"iv":"6087dab2f9fdbbfaddc31a909735c1e6"},"kdf":"pbkdf2",
"kdfparams":{"c":1,"dklen":32,"prf":"hmac-sha256","salt":"ae3cd4e7013836a3df6bd7241b12db061dbe2c6785853cce422d148a624ce0bd"},
"ciphertext":"5318b4d5bcd28de64ee5559e671353e16f075ecae9f99c7a79a38af5f869aa46",
"mac":"517ead924a9d0dc3124507e3393d175ce3ff7c1e96529c6c555ce9e51205e9b2"}}"#;
pub(crate) const NOBODY: &str = "http://127.0.0.1:9";
const FREE: &str = "[[route]]\npath = \"/echo\"\nfree = true\n[[route]]\npath = \"/gated\"\nfree = true\n";

/// The same request, as a browser asks for a WebSocket.
fn upgrading(request: reqwest::RequestBuilder) -> reqwest::RequestBuilder {
    let request = request.header("connection", "upgrade").header("upgrade", "websocket");
    request.header("sec-websocket-version", "13").header("sec-websocket-key", "dGhlIHNhbXBsZSBub25jZQ==")
}

async fn free_port() -> String {
    TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap().to_string()
}

/// Gives the command this file.
fn configure(command: &mut Command, stage: &Stage, content: &str) {
    fs::write(stage.path("x402.toml"), content).unwrap();
    command.arg("--config").arg(stage.path("x402.toml"));
}

/// Gives the command a settlement key in a file of this mode.
fn key_file(command: &mut Command, stage: &Stage, mode: u32) {
    let path = stage.path("settlement.key");
    fs::write(&path, stage.devnet.text("settlement_private_key")).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
    command.env_remove("SETTLEMENT_PRIVATE_KEY").env("SETTLEMENT_PRIVATE_KEY_FILE", path);
}

/// Answers as the devnet does, and refuses one method.
async fn node_without(stage: &Stage, refused: &'static str) -> String {
    let (node, client) =
        (stage.devnet.text("rpc_url").to_owned(), reqwest::Client::builder().no_proxy().build().unwrap());
    let answer = async move |body: Bytes| {
        let asked: Value = serde_json::from_slice(&body).unwrap();
        let sent = client.post(&node).header("content-type", "application/json").body(body).send().await.unwrap();
        let mut answer: Value = serde_json::from_slice(&sent.bytes().await.unwrap()).unwrap();
        let refuse = |asked: &Value, answer: &mut Value| {
            if asked["method"] == refused {
                let error = json!({ "code": -32601, "message": "not in your plan" });
                *answer = json!({ "jsonrpc": "2.0", "id": answer["id"], "error": error });
            }
        };
        match (asked.as_array(), answer.as_array_mut()) {
            (Some(asked), Some(answers)) => asked.iter().zip(answers).for_each(|(asked, answer)| refuse(asked, answer)),
            _ => refuse(&asked, &mut answer),
        }
        Json(answer)
    };
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/", listener.local_addr().unwrap());
    tokio::spawn(async move { axum::serve(listener, Router::new().route("/", post(answer))).await });
    url
}

/// Passes requests on to a seller, but for what the fault refuses. Returns the address of a paid route there.
async fn proxied(seller: &Running, fault: &str) -> String {
    let (to, client, fault) = (format!("{}/echo", seller.url()), client(), fault.to_owned());
    let answer = async move |headers: HeaderMap| {
        let is_long = headers.values().any(|value| value.len() > 4096);
        match fault.as_str() {
            "a proxy that refuses long answers" => return StatusCode::BAD_GATEWAY.into_response(),
            "a proxy that refuses long requests" if is_long => return StatusCode::BAD_REQUEST.into_response(),
            "a proxy that redirects" => return Redirect::permanent("https://api.example/").into_response(),
            _ => {}
        }
        let answer = client.get(&to).send().await.unwrap();
        (answer.status(), [("payment-required", answer.headers()["payment-required"].clone())]).into_response()
    };
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/echo", listener.local_addr().unwrap());
    tokio::spawn(async move { axum::serve(listener, Router::new().route("/echo", get(answer))).await });
    url
}

/// Sets the clock of the command an hour ahead.
fn an_hour_ahead(stage: &Stage, command: &mut Command) {
    let library = stage.path("clock.so");
    let mut compiler = std::process::Command::new("cc");
    compiler.args(["-shared", "-fPIC", "-o"]).arg(&library);
    compiler.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/clock.c")).arg("-ldl");
    assert!(compiler.status().expect("a C compiler, as for SQLite").success());
    command.env("LD_PRELOAD", library);
}

/// The same command below another program.
pub(crate) fn below(program: &[&str], command: &Command) -> Command {
    let command = command.as_std();
    let mut all = Command::new(program[0]);
    all.args(&program[1..]).arg(command.get_program()).args(command.get_args());
    with_environment_of(command, all)
}

/// The same command with another value for an argument.
pub(crate) fn with_argument(command: &Command, argument: &str, value: &str) -> Command {
    let command = command.as_std();
    let mut other = Command::new(command.get_program());
    other.args(command.get_args().map(|given| if given == argument { value.as_ref() } else { given }));
    with_environment_of(command, other)
}

pub(crate) fn with_environment_of(command: &std::process::Command, mut other: Command) -> Command {
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => other.env(name, value),
            None => other.env_remove(name),
        };
    }
    other.stdin(Stdio::null()).stdout(Stdio::piped()).kill_on_drop(true);
    other
}

fn is_root() -> bool {
    fs::metadata("/proc/self").unwrap().uid() == 0
}

/// The same command, which may not do what the owner of a file forbids. Root may, unless it gives that up.
fn without_privileges(command: &Command) -> Command {
    match is_root() {
        true => below(&["setpriv", "--bounding-set=-dac_override,-dac_read_search"], command),
        false => below(&["env"], command),
    }
}

/// Runs the command while nobody may write to the directory of the stage.
async fn in_a_closed_directory(stage: &Stage, command: &Command) -> Said {
    let directory = stage.path("");
    fs::set_permissions(&directory, fs::Permissions::from_mode(0o555)).unwrap();
    let output = run(&mut without_privileges(command)).await;
    fs::set_permissions(&directory, fs::Permissions::from_mode(0o755)).unwrap();
    Said::by(&output)
}

/// A disk in memory of so many bytes, which only one process sees.
struct SmallDisk {
    directory: PathBuf,
    size: &'static str,
}

impl SmallDisk {
    fn new(stage: &Stage, size: &'static str) -> Self {
        let directory = stage.path("disk");
        fs::create_dir_all(&directory).unwrap();
        Self { directory, size }
    }

    /// The same command, with the disk and nothing more on it than what fills it.
    fn filled(&self, command: &Command) -> Command {
        self.with("cat /dev/zero > \"$disk/rest\" 2> /dev/null;", command)
    }

    /// The same command, with the disk.
    fn mounted(&self, command: &Command) -> Command {
        let filling = "(until [ -e \"$disk.fill\" ]; do sleep 0.05; done
            cat /dev/zero > \"$disk/rest\"; : > \"$disk.full\") > /dev/null 2>&1 &";
        self.with(filling, command)
    }

    /// Fills the disk of a command that runs.
    async fn fill(&self) {
        fs::write(self.directory.with_extension("fill"), "").unwrap();
        while !self.directory.with_extension("full").exists() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    fn with(&self, first: &str, command: &Command) -> Command {
        let script = format!(
            "disk=$1; shift; mount -t tmpfs -o size={} none \"$disk\" || exit; : > \"$disk/payments.sqlite\"; {first} exec \"$@\"",
            self.size
        );
        let mut program = vec!["unshare", "--mount"];
        if !is_root() {
            program.push("--map-root-user");
        }
        program.extend(["sh", "-c", &script, "sh", self.directory.to_str().unwrap()]);
        below(&program, command)
    }
}
