//! The processes, and a service for them to charge for.

use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
    process::{Output, Stdio},
    sync::{Arc, Mutex},
    time::Duration,
};

use axum::{
    Json, Router,
    body::{Body, Bytes},
    extract::{Request, State},
    http::{HeaderMap, StatusCode, header::CONTENT_TYPE},
    response::{IntoResponse, Response},
    routing::{any, get, post},
};
use futures_util::{StreamExt as _, stream};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::{
    io::{AsyncBufReadExt as _, BufReader},
    net::TcpListener,
    process::{Child, Command},
    sync::Semaphore,
    time::timeout,
};

/// The timeout of everything here.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);
/// What everything costs here unless a test says otherwise, in atomic units.
pub(crate) const PRICE: u64 = 1_000;

/// The command, without anything from our own environment that it reads.
pub(crate) fn x402() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_x402"));
    for (name, _) in std::env::vars() {
        let is_read = ["X402_", "PAYER_", "SETTLEMENT_", "CHANNELS_", "FACILITATOR_"];
        if is_read.iter().any(|prefix| name.starts_with(prefix)) {
            command.env_remove(name);
        }
    }
    command.env_remove("RUST_LOG").stdin(Stdio::null()).stdout(Stdio::piped()).kill_on_drop(true);
    command
}

/// Runs the command to its end.
pub(crate) async fn run(command: &mut Command) -> Output {
    timeout(PATIENCE, command.stderr(Stdio::piped()).output()).await.unwrap().unwrap()
}

/// Returns the last line of standard output as JSON.
pub(crate) fn facts(output: &Output) -> Value {
    let text = String::from_utf8_lossy(&output.stdout);
    let line = text.lines().last().unwrap_or_else(|| panic!("no output: {}", String::from_utf8_lossy(&output.stderr)));
    serde_json::from_str(line)
        .unwrap_or_else(|error| panic!("{error}: {line}\n{}", String::from_utf8_lossy(&output.stderr)))
}

/// A client that asks the command itself, whatever proxy this machine has.
pub(crate) fn client() -> reqwest::Client {
    reqwest::Client::builder().no_proxy().build().unwrap()
}

/// A process that serves.
pub(crate) struct Running {
    child: Child,
    /// What it printed when it was ready.
    pub(crate) ready: Value,
}

impl Running {
    pub(crate) async fn start(command: &mut Command) -> Self {
        let mut child = command.arg("--json").spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let line = timeout(PATIENCE, lines.next_line()).await.unwrap().unwrap().expect("it says that it is ready");
        Self { child, ready: serde_json::from_str(&line).unwrap() }
    }

    pub(crate) fn text(&self, name: &str) -> &str {
        self.ready[name].as_str().unwrap_or_else(|| panic!("{name} in {}", self.ready))
    }

    /// Returns the address that it listens on, as a URL without a path.
    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.text("listening"))
    }

    /// Kills it without a warning.
    pub(crate) async fn kill(mut self) {
        self.child.start_kill().unwrap();
        self.child.wait().await.unwrap();
    }

    /// Has it stop, and waits until it has.
    pub(crate) async fn stop(mut self) {
        self.signal("TERM").await;
        let status = timeout(PATIENCE, self.child.wait()).await.unwrap().unwrap();
        assert!(status.success(), "{status}");
    }

    pub(crate) async fn signal(&self, name: &str) {
        let pid = self.child.id().unwrap().to_string();
        let sent = Command::new("sh").args(["-c", &format!("kill -{name} {pid}")]).status().await.unwrap();
        assert!(sent.success());
    }
}

/// A devnet in a process of its own, and what charges and pays there.
pub(crate) struct Stage {
    pub(crate) devnet: Running,
    pub(crate) upstream: Upstream,
    directory: TempDir,
}

impl Stage {
    pub(crate) async fn new() -> Self {
        let devnet = Running::start(x402().args(["devnet", "--listen", "127.0.0.1:0"])).await;
        Self { devnet, upstream: Upstream::start().await, directory: TempDir::new().unwrap() }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    pub(crate) fn ledger(&self) -> String {
        format!("sqlite:{}", self.path("payments.sqlite").display())
    }

    /// Returns the command that charges for the upstream, at `listen`.
    pub(crate) fn charge(&self, listen: &str) -> Command {
        let mut command = x402();
        command
            .args([
                "charge",
                "--upstream",
                &self.upstream.url,
                "--listen",
                listen,
                "--pay-to",
                self.devnet.text("payee"),
            ])
            .args(["--ledger", &self.ledger()])
            .env("X402_RPC_URL", self.devnet.text("rpc_url"))
            .env("SETTLEMENT_PRIVATE_KEY", self.devnet.text("settlement_private_key"))
            .env("CHANNELS_PRIVATE_KEY", self.devnet.text("channels_private_key"));
        command
    }

    /// Starts to charge the usual price for everything.
    pub(crate) async fn charging(&self) -> Running {
        Running::start(self.charge("127.0.0.1:0").args(["--price", "$0.001"])).await
    }

    /// Starts to charge as a file says.
    pub(crate) async fn charging_by_file(&self, content: &str) -> Running {
        let path = self.path("x402.toml");
        std::fs::write(&path, content).unwrap();
        Running::start(self.charge("127.0.0.1:0").arg("--config").arg(&path)).await
    }

    /// Has the file that it charges by read again, and waits until a GET of `path` is answered with this status.
    pub(crate) async fn reload(&self, charge: &Running, content: &str, (path, status): (&str, u16)) {
        std::fs::write(self.path("x402.toml"), content).unwrap();
        charge.signal("HUP").await;
        let (client, url) = (client(), format!("{}{path}", charge.url()));
        let is_read = async || client.get(&url).send().await.unwrap().status() == status;
        timeout(PATIENCE, async { while !is_read().await {} }).await.unwrap();
    }

    /// Returns the command that pays for a URL.
    pub(crate) fn pay(&self, url: &str) -> Command {
        let mut command = x402();
        command.args(["pay", url, "--json"]).env("PAYER_PRIVATE_KEY", self.devnet.text("payer_private_key"));
        command
    }

    /// Asks the devnet.
    pub(crate) async fn ask(&self, method: &str, params: Value) -> Value {
        let request = json!({ "jsonrpc": "2.0", "id": 1, "method": method, "params": params });
        let post = client().post(self.devnet.text("rpc_url")).header("content-type", "application/json");
        let answer = post.body(request.to_string()).send().await.unwrap().bytes().await.unwrap();
        let answer: Value = serde_json::from_slice(&answer).unwrap();
        answer["result"].clone()
    }

    /// Returns what the payee has, in atomic units.
    pub(crate) async fn income(&self) -> u64 {
        self.balance("payee").await
    }

    /// Returns what an account of the devnet has, in atomic units.
    pub(crate) async fn balance(&self, account: &str) -> u64 {
        let account = self.devnet.text(account).trim_start_matches("0x").to_ascii_lowercase();
        let call = json!({ "to": self.devnet.text("asset"), "data": format!("0x70a08231{account:0>64}") });
        let units = self.ask("eth_call", json!([call, "latest"])).await;
        u64::from_str_radix(&units.as_str().unwrap()[2..], 16).unwrap()
    }

    /// Lets Permit2 move this much of the payer's money.
    pub(crate) async fn approve(&self, amount: &str) -> Value {
        let mut approve = x402();
        approve.args(["wallet", "approve", amount, "--json", "--rpc-url", self.devnet.text("rpc_url")]);
        let output = run(approve.env("PAYER_PRIVATE_KEY", self.devnet.text("payer_private_key"))).await;
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        facts(&output)
    }

    /// Returns the command that pays for a URL by permit, if it is offered to.
    pub(crate) fn pay_by_permit(&self, url: &str) -> Command {
        let mut command = self.pay(url);
        command.args(["--rpc-url", self.devnet.text("rpc_url"), "--attempts", "1"]);
        command
    }

    /// Returns what the ledger says, once nobody has it open.
    pub(crate) async fn report(&self) -> Value {
        let output = run(x402().args(["books", "--ledger", &self.ledger(), "report"])).await;
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        facts(&output)
    }
}

/// A service that knows nothing of payments.
pub(crate) struct Upstream {
    pub(crate) url: String,
    pub(crate) state: Arc<Shared>,
}

/// What the service was asked, and what it waits for.
pub(crate) struct Shared {
    pub(crate) seen: Mutex<Vec<(String, HeaderMap)>>,
    /// Requests to /gated wait for a permit each.
    pub(crate) gate: Semaphore,
    /// Has a permit for each request to /gated that arrived, and for the first piece of each body to /upload.
    pub(crate) arrived: Semaphore,
}

impl Upstream {
    async fn start() -> Self {
        let state = Arc::new(Shared { seen: Mutex::default(), gate: Semaphore::new(0), arrived: Semaphore::new(0) });
        let app = Router::new()
            .route("/echo", any(echo))
            .route("/fail", any(async || (StatusCode::INTERNAL_SERVER_ERROR, "no luck")))
            .route("/created", post(async || (StatusCode::CREATED, [("location", "/report/7")], "made")))
            .route("/moved", any(async || (StatusCode::FOUND, [("location", "/elsewhere")])))
            .route("/cheap", post(async || [("x402-actual-price", "$0.0004")]))
            .route("/dear", post(async || [("x402-actual-price", "$1000")]))
            .route("/priced", any(priced))
            .route("/odd", post(async || [("x402-actual-price", "a lot")]))
            .route("/stream", get(events))
            .route("/gated", any(gated))
            .route("/upload", post(upload))
            .with_state(state.clone());
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address: SocketAddr = listener.local_addr().unwrap();
        tokio::spawn(async move { axum::serve(listener, app).await });
        Self { url: format!("http://{address}"), state }
    }

    /// Returns how often a path was asked for.
    pub(crate) fn count(&self, path: &str) -> usize {
        self.state.seen.lock().unwrap().iter().filter(|(seen, _)| seen == path).count()
    }
}

async fn echo(State(state): State<Arc<Shared>>, request: Request) -> Response {
    let (parts, body) = request.into_parts();
    let body = axum::body::to_bytes(body, usize::MAX).await.unwrap();
    let headers: serde_json::Map<String, Value> = parts
        .headers
        .iter()
        .map(|(name, value)| (name.to_string(), String::from_utf8_lossy(value.as_bytes()).into()))
        .collect();
    state.seen.lock().unwrap().push((parts.uri.path().to_owned(), parts.headers));
    Json(json!({ "method": parts.method.as_str(), "uri": parts.uri.to_string(), "headers": headers, "body": String::from_utf8_lossy(&body) }))
        .into_response()
}

/// Says the prices in the headers `x-price` of the request, and answers with the status in `x-status`.
async fn priced(State(state): State<Arc<Shared>>, request: Request) -> Response {
    let headers = request.headers();
    let mut response = "done".into_response();
    if let Some(status) = headers.get("x-status") {
        *response.status_mut() = status.to_str().unwrap().parse().unwrap();
    }
    for price in headers.get_all("x-price") {
        response.headers_mut().append("x402-actual-price", price.clone());
    }
    state.seen.lock().unwrap().push((request.uri().path().to_owned(), headers.clone()));
    response
}

async fn gated(State(state): State<Arc<Shared>>, request: Request) -> Response {
    state.seen.lock().unwrap().push((request.uri().path().to_owned(), request.headers().clone()));
    state.arrived.add_permits(1);
    state.gate.acquire().await.unwrap().forget();
    "done".into_response()
}

/// Notes when the first piece of the body is there, and returns the length of all.
async fn upload(State(state): State<Arc<Shared>>, request: Request) -> String {
    let mut pieces = request.into_body().into_data_stream();
    let mut length = 0;
    while let Some(piece) = pieces.next().await {
        if length == 0 {
            state.arrived.add_permits(1);
        }
        length += piece.unwrap().len();
    }
    length.to_string()
}

/// Two events, the second of which waits for the gate.
async fn events(State(state): State<Arc<Shared>>) -> Response {
    let events = stream::unfold((0, state), |(number, state)| async move {
        match number {
            0 => {}
            1 => state.gate.acquire().await.unwrap().forget(),
            _ => return None,
        }
        Some((Ok::<_, std::convert::Infallible>(Bytes::from(format!("data: {number}\n\n"))), (number + 1, state)))
    });
    ([(CONTENT_TYPE, "text/event-stream")], Body::from_stream(events)).into_response()
}

/// Returns the text of a file.
pub(crate) fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap()
}
