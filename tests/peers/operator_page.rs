//! The operator of `x402 charge` looks at its page in Chromium.

use std::{convert::Infallible, net::SocketAddr, path::PathBuf};

use axum::{
    body::{Body, Bytes},
    http::Uri,
};
use futures_util::{StreamExt as _, stream};
use serde_json::{Value, json};
use support::{eventually::eventually, programs::x402};
use tempfile::TempDir;
use tokio::{
    io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader, Lines},
    process::{Child, ChildStdin, ChildStdout, Command},
    time::timeout,
};

use super::{browser_wallet::chromium, programs::script, stage::PATIENCE};

/// The key of the chain's payer, which everybody knows.
const PAYER_KEY: &str = "0xac0974bec39a17e36ba4a6b4d238ff944bacb478cbed5efcae784d7bf4f2ff80";
/// The account that settles on a chain in the process.
const SETTLEMENT_ACCOUNT: &str = "0x3C44CdDdB6a900fa2b585dd299e03d12FA4293BC";
/// A path that would be markup, if the page took it for that.
const HOSTILE: &str = "/<img src=x onerror=alert(1)><script>alert(2)<";

/// A program that answers with lines of JSON. It ends with the test.
struct Program {
    process: Child,
    output: Lines<BufReader<ChildStdout>>,
    ready: Value,
}

impl Program {
    async fn start(command: &mut Command) -> Self {
        let mut process = command.kill_on_drop(true).spawn().unwrap();
        let output = BufReader::new(process.stdout.take().unwrap()).lines();
        let mut program = Self { process, output, ready: Value::Null };
        program.ready = program.next().await;
        program
    }

    async fn next(&mut self) -> Value {
        let line = timeout(PATIENCE, self.output.next_line()).await.expect("it answers").unwrap();
        serde_json::from_str(&line.expect("it goes on")).unwrap()
    }
}

/// The page in a browser.
struct Page {
    browser: Program,
    input: ChildStdin,
    _profile: TempDir,
}

impl Page {
    async fn open(url: &str, password: Option<&str>) -> Self {
        let profile = TempDir::new().unwrap();
        let mut command = script(["node", "operator_page.mjs"]);
        command.arg(url).args(password).stdin(std::process::Stdio::piped()).stdout(std::process::Stdio::piped());
        command.env("BROWSER", chromium()).env("PROFILE", profile.path());
        let mut browser = Program::start(&mut command).await;
        let input = browser.process.stdin.take().unwrap();
        Self { browser, input, _profile: profile }
    }

    async fn act(&mut self, command: Value) -> Value {
        self.input.write_all(format!("{command}\n").as_bytes()).await.unwrap();
        let seen = self.browser.next().await;
        assert_eq!(seen["wrong"], json!([]), "{seen}");
        assert_eq!((&seen["images"], &seen["scripts"]), (&json!(0), &json!(1)), "nothing became markup: {seen}");
        seen
    }

    async fn shows(&mut self, id: &str, text: &str) -> String {
        self.act(json!({ "id": id, "text": text })).await["text"].as_str().unwrap().to_owned()
    }

    /// Checks the page in this width and theme, and takes a picture, which stays in the directory `TOWER_X402_PICTURES`, if that is set.
    async fn picture(&mut self, name: &str, width: u32, dark: bool) -> Value {
        let spare = TempDir::new().unwrap();
        let directory = std::env::var_os("TOWER_X402_PICTURES").map_or_else(|| spare.path().to_owned(), PathBuf::from);
        let seen = self.act(json!({ "picture": directory.join(name), "width": width, "dark": dark })).await;
        assert_eq!(seen["overflows"], false, "{name}: {seen}");
        seen
    }
}

#[tokio::test]
async fn the_operator_sees_a_payment_come_in_and_the_seller_go_away() {
    let directory = TempDir::new().unwrap();
    let upstream = TempDir::new().unwrap();
    std::fs::write(upstream.path().join("answer"), "well done").unwrap();
    let address = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let mut python = Command::new("python3");
    let port = address.port().to_string();
    python.args(["-m", "http.server", &port, "--bind", "127.0.0.1", "--directory"]).arg(upstream.path());
    let _service = python.kill_on_drop(true).stderr(std::process::Stdio::null()).spawn().unwrap();
    eventually("the service listens", async || tokio::net::TcpStream::connect(address).await.is_ok()).await;
    let config = directory.path().join("x402.toml");
    let routes = format!(
        "[[route]]\npath = '{HOSTILE}'\nprice = \"$0.002\"\n[[route]]\npath = \"/*\"\nmethods = [\"GET\"]\nprice = \"$0.001\""
    );
    std::fs::write(&config, format!("upstream = \"http://{address}\"\nadmin = \"127.0.0.1:0\"\n{routes}")).unwrap();
    let mut charge = x402();
    charge.args(["charge", "--json", "--listen", "127.0.0.1:0", "--config"]).arg(&config);
    let mut charge = Program::start(charge.stderr(std::process::Stdio::null())).await;
    let admin = admin_of(&charge);

    let mut page = Page::open(&admin, None).await;
    let text = page.shows("state", "Ready").await;
    assert!(text.contains("a chain in the process: no real money") && text.contains(HOSTILE), "{text}");
    page.shows("routes", "GET /*").await;
    page.shows("books-at", "The ledger as it was").await;
    let mut pay = x402();
    let url = format!("http://{}/answer", charge.ready["listening"].as_str().unwrap());
    pay.args(["pay", &url, "--budget", "$0.05", "--journal"]).arg(directory.path().join("journal"));
    pay.env("PAYER_PRIVATE_KEY", PAYER_KEY);
    for times in 1..=6 {
        let paid = timeout(PATIENCE, pay.output()).await.unwrap().unwrap();
        assert_eq!(String::from_utf8_lossy(&paid.stdout), "well done", "{}", String::from_utf8_lossy(&paid.stderr));
        page.shows("routes", &format!("$0.00{times}")).await;
    }
    // After some transfers, its payer pays by voucher; the ledger is gone through every few seconds.
    page.shows("money", "Settled\n$0.003").await;
    let text = page.shows("money", "Unclaimed\n$0.003").await;
    assert!(text.contains("At risk\n$0.00") && text.contains("Owed to payers\n$0.00 (0)"), "{text}");
    for (name, width, dark) in [("operator-page.png", 1100, false), ("operator-page-dark.png", 375, true)] {
        let seen = page.picture(name, width, dark).await;
        assert_eq!(seen["asked"], json!([admin]), "it asks nobody else");
    }
    charge.process.start_kill().unwrap();
    page.shows("state", "No answer since").await;
}

/// A service whose work costs less than its price. Its answer to `/endless` goes on.
async fn metered() -> SocketAddr {
    let answer = async |uri: Uri| {
        let first = stream::iter([Ok::<_, Infallible>(Bytes::from("done"))]);
        let body = match uri.path() {
            "/endless" => Body::from_stream(first.chain(stream::pending())),
            _ => Body::from_stream(first),
        };
        ([("x402-actual-price", "$0.0004")], body)
    };
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move { axum::serve(listener, axum::Router::new().fallback(answer)).await });
    address
}

const METERED: &str = r#"upto = true
[[route]]
path = "/both"
price = "$0.05"
[[route]]
path = "/*"
max_price = "$0.05"
"#;

#[tokio::test]
async fn the_operator_sees_what_was_charged_of_at_most_a_price_and_what_is_owed() {
    let service = metered().await;
    let mut devnet = x402();
    let devnet = Program::start(devnet.args(["devnet", "--json", "--listen", "127.0.0.1:0"])).await;
    let of_devnet = |name: &str| devnet.ready[name].as_str().unwrap();
    let directory = TempDir::new().unwrap();
    let path = |name: &str| directory.path().join(name);
    std::fs::write(path("x402.toml"), METERED).unwrap();
    let start = async || {
        let mut charge = x402();
        charge.args(["charge", "--json", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"]);
        charge.args(["--upstream", &format!("http://{service}"), "--pay-to", of_devnet("payee"), "--config"]);
        charge.arg(path("x402.toml")).args(["--ledger", &format!("sqlite:{}", path("payments.sqlite").display())]);
        charge.env("X402_RPC_URL", of_devnet("rpc_url"));
        charge.env("SETTLEMENT_PRIVATE_KEY", of_devnet("settlement_private_key"));
        Program::start(charge.stderr(std::process::Stdio::null())).await
    };
    let payer = |arguments: &[&str], by_permit: bool| {
        let mut command = x402();
        command.args(arguments).arg("--json").env("PAYER_PRIVATE_KEY", PAYER_KEY);
        if by_permit {
            command.args(["--rpc-url", of_devnet("rpc_url")]);
        }
        command
    };
    let run = async |mut command: Command| -> Value {
        let output = timeout(PATIENCE, command.output()).await.unwrap().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice(&output.stdout).unwrap()
    };
    let mut charge = start().await;
    let url = |path: &str| format!("http://{}/{path}", charge.ready["listening"].as_str().unwrap());
    run(payer(&["wallet", "approve", "$1"], true)).await;
    for (path, by_permit, amount) in [("both", false, "50000"), ("both", true, "400"), ("metered", true, "400")] {
        let paid = run(payer(&["pay", &url(path), "--budget", "$0.05"], by_permit)).await;
        assert_eq!((&paid["outcome"], &paid["amount"]), (&json!("settled"), &json!(amount)), "{path}: {paid}");
    }
    let mut page = Page::open(&admin_of(&charge), None).await;
    let text = page.shows("money", "Settled\n$0.0508").await;
    assert!(text.contains("Charged, 24 hours\n$0.0508") && text.contains("Owed to payers\n$0.00 (0)"), "{text}");
    let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
    for (row, charged) in [("/both $0.05 ", "$0.0504"), ("/* up to $0.05 ", "$0.0004")] {
        // What came in this hour, and in all.
        let sums = words.split(row).nth(1).unwrap_or_else(|| panic!("no {row}: {words}"));
        assert_eq!(sums.split(' ').nth(1), Some(charged), "{row}: {words}");
    }

    // Killed in the middle of an answer that was settled for and is kept nowhere.
    let mut pay = payer(&["pay", &url("endless"), "--budget", "$0.05", "--attempts", "1"], true);
    let _paying = pay.arg("-o").arg(path("answer")).kill_on_drop(true).spawn().unwrap();
    eventually("the answer begins", async || std::fs::read(path("answer")).is_ok_and(|text| text == b"done")).await;
    charge.process.kill().await.unwrap();
    let charge = start().await;
    let mut page = Page::open(&admin_of(&charge), None).await;
    // What was charged, and not the most.
    let text = page.shows("money", "Owed to payers\n$0.0004 (1)").await;
    assert!(text.contains("Settled\n$0.0512") && text.contains("Being settled\n$0.00\n"), "{text}");
}

/// Returns the address of the page of this seller.
fn admin_of(charge: &Program) -> String {
    format!("http://{}", charge.ready["admin"].as_str().unwrap())
}

/// Changes what an account has to pay for gas with, in wei in hex.
async fn set_tank(rpc_url: &str, account: &str, wei: &str) {
    let request = json!({ "jsonrpc": "2.0", "id": 1, "method": "anvil_setBalance", "params": [account, wei] });
    let client = reqwest::Client::builder().no_proxy().build().unwrap();
    let post = client.post(rpc_url).header("content-type", "application/json");
    assert_eq!(post.body(request.to_string()).send().await.unwrap().status(), 200);
}

#[tokio::test]
async fn the_operator_sees_why_it_is_not_ready_until_it_is() {
    let mut charge = x402();
    charge.args([
        "charge",
        "--json",
        "--upstream",
        "http://127.0.0.1:9",
        "--price",
        "$0.001",
        "--listen",
        "127.0.0.1:0",
    ]);
    charge.args(["--admin", "127.0.0.1:0"]);
    let charge = Program::start(charge.stderr(std::process::Stdio::null())).await;
    let rpc_url = charge.ready["rpc_url"].as_str().unwrap();
    let mut page = Page::open(&admin_of(&charge), None).await;
    let text = page.shows("state", "Ready").await;
    assert!(text.contains(SETTLEMENT_ACCOUNT) && !text.contains("Not ready"), "{text}");
    set_tank(rpc_url, SETTLEMENT_ACCOUNT, "0x0").await;
    page.shows("state", "Not ready").await;
    let text = page.shows("reasons-list", "gas_tank").await;
    assert!(text.contains("exact: the key that sends transactions cannot pay for gas: it holds 0 wei"), "{text}");
    page.shows("tanks", "(low)").await;
    set_tank(rpc_url, SETTLEMENT_ACCOUNT, "0xde0b6b3a7640000").await;
    page.shows("state", "Ready").await;
}

#[tokio::test]
async fn a_person_gives_the_token_as_a_password() {
    let mut charge = x402();
    charge.args([
        "charge",
        "--json",
        "--upstream",
        "http://127.0.0.1:9",
        "--price",
        "$0.001",
        "--listen",
        "127.0.0.1:0",
    ]);
    charge.args(["--admin", "0.0.0.0:0"]).env("X402_ADMIN_TOKEN", "0123456789abcdefghij");
    let charge = Program::start(charge.stderr(std::process::Stdio::null())).await;
    let port = charge.ready["admin"].as_str().unwrap().rsplit(':').next().unwrap().to_owned();
    let mut page = Page::open(&format!("http://127.0.0.1:{port}"), Some("0123456789abcdefghij")).await;
    page.shows("state", "Ready").await;
}
