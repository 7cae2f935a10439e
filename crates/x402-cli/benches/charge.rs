//! What `x402 charge` adds to a handler: beside the layer in the handler itself, and beside nginx.
//!
//! ```text
//! cargo bench -p x402-cli --profile release --bench charge
//! cargo bench -p x402-cli --profile release --bench charge -- short     a few requests, to see that it works
//! ```
//!
//! Needs nginx (`apt-get install nginx-light`). Over loopback: the client, the handlers and a facilitator that answers at once are in this
//! process; `x402 charge` and nginx are processes of their own. Everything keeps its connections. All that is paid goes through the same
//! facilitator, which is asked over HTTP to verify and to settle, with ledgers in memory. The ways take turns; medians are given.
#![allow(clippy::expect_used, clippy::print_stdout, reason = "a bench")]

use std::{
    net::SocketAddr,
    path::Path,
    process::Stdio,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use alloy_primitives::{Address, B256, U256};
use axum::{
    Json, Router,
    body::Bytes,
    routing::{get, post},
};
use futures_util::future::join_all;
use http::{HeaderValue, StatusCode, header};
use http_body_util::{BodyExt as _, Full};
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::{
    io::{AsyncBufReadExt as _, BufReader},
    net::{TcpListener, TcpStream},
    process::{Child, Command},
};
use tower_x402::{
    Network,
    eip3009::{Authorization, AuthorizationSigner as _, TokenDomain},
    facilitator::RemoteFacilitator,
    protocol::{MAX_REQUIRED_HEADER, decode_header, encode_header},
    server::RequirePaymentLayer,
    signers::PrivateKeySigner,
};

/// How much is asked for.
#[derive(Clone, Copy)]
struct Size {
    turns: usize,
    /// How many requests follow one another on one connection, in a turn.
    alone: usize,
    /// How many are sent over all connections together, in a turn.
    together: usize,
}

const FULL: Size = Size { turns: 7, alone: 300, together: 4_000 };
const SHORT: Size = Size { turns: 1, alone: 20, together: 128 };
const CONNECTIONS: usize = 64;
/// Authorizations must not be valid for longer than this, in seconds, as `x402 charge` asks by itself.
const WINDOW: Duration = Duration::from_secs(120);
const TASK: &str = r#"{"task":"17 * 23","answer":"391"}"#;

/// What is asked for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Ask {
    Free,
    Unpaid,
    Paid,
}

impl Ask {
    const fn path(self) -> &'static str {
        match self {
            Self::Free => "/free",
            Self::Unpaid | Self::Paid => "/evaluate",
        }
    }

    const fn status(self) -> StatusCode {
        match self {
            Self::Unpaid => StatusCode::PAYMENT_REQUIRED,
            Self::Free | Self::Paid => StatusCode::OK,
        }
    }
}

/// A way to the handler.
struct Way {
    name: &'static str,
    address: SocketAddr,
    ask: Ask,
    /// The time of a request on one connection, in microseconds, for each turn.
    micros: Vec<f64>,
    /// The requests a second over all connections, for each turn.
    rates: Vec<f64>,
}

impl Way {
    const fn new(name: &'static str, address: SocketAddr, ask: Ask) -> Self {
        Self { name, address, ask, micros: Vec::new(), rates: Vec::new() }
    }

    async fn turn(&mut self, size: Size, payers: &[PrivateKeySigner]) {
        let requests = self.requests(payers, size.alone + size.together).await;
        let (alone, together) = requests.split_at(size.alone);
        let mut connection = connect(self.address).await;
        let mut times = Vec::with_capacity(alone.len());
        for request in alone {
            let started = Instant::now();
            self.send(&mut connection, request.clone()).await;
            times.push(started.elapsed().as_secs_f64() * 1e6);
        }
        self.micros.push(median(&times));
        let mut connections = join_all((0..CONNECTIONS).map(|_| connect(self.address))).await;
        let started = Instant::now();
        let way = &*self;
        join_all(connections.iter_mut().zip(together.chunks(together.len().div_ceil(CONNECTIONS))).map(
            async |(connection, requests)| {
                for request in requests {
                    way.send(connection, request.clone()).await;
                }
            },
        ))
        .await;
        self.rates.push(together.len() as f64 / started.elapsed().as_secs_f64());
    }

    /// So many requests, each with a payment of its own if it is paid.
    async fn requests(&self, payers: &[PrivateKeySigner], count: usize) -> Vec<http::Request<Full<Bytes>>> {
        let request = || {
            http::Request::post(self.ask.path())
                .header(header::HOST, self.address.to_string())
                .header(header::CONTENT_TYPE, "application/json")
                .body(Full::from(TASK))
                .expect("a request")
        };
        if self.ask != Ask::Paid {
            return (0..count).map(|_| request()).collect();
        }
        let answer = connect(self.address).await.send_request(request()).await.expect("a 402");
        let demand: Value =
            decode_header(answer.headers()["payment-required"].as_bytes(), MAX_REQUIRED_HEADER).expect("a 402");
        let offer = &demand["accepts"][0];
        let mut requests = Vec::with_capacity(count);
        for number in 0..count {
            let value = HeaderValue::try_from(payment(&payers[number % payers.len()], offer).await).expect("base64");
            let mut request = request();
            request.headers_mut().insert("payment-signature", value);
            requests.push(request);
        }
        requests
    }

    async fn send(&self, connection: &mut SendRequest<Full<Bytes>>, request: http::Request<Full<Bytes>>) {
        connection.ready().await.expect("a connection");
        let answer = connection.send_request(request).await.expect("an answer");
        let status = answer.status();
        let body = answer.into_body().collect().await.expect("a whole answer").to_bytes();
        assert_eq!(status, self.ask.status(), "{}: {}", self.name, String::from_utf8_lossy(&body));
    }
}

/// Signs a payment for this offer, and returns its header.
async fn payment(payer: &PrivateKeySigner, offer: &Value) -> String {
    let mut nonce = B256::ZERO;
    getrandom::fill(nonce.as_mut_slice()).expect("randomness");
    let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970").as_secs();
    let authorization = Authorization {
        from: payer.address(),
        to: offer["payTo"].as_str().expect("text").parse().expect("an address"),
        value: offer["amount"].as_str().expect("text").parse().expect("a number"),
        valid_after: U256::ZERO,
        valid_before: U256::from(now + offer["maxTimeoutSeconds"].as_u64().expect("seconds")),
        nonce,
    };
    let domain = TokenDomain::of(&Network::BASE_SEPOLIA.usdc().expect("USDC is there"));
    let signature = payer.sign(&authorization, &domain).await.expect("a local key signs");
    let signature = format!("0x{}", alloy_primitives::hex::encode(signature.as_bytes()));
    let payload = json!({ "signature": signature, "authorization": authorization });
    encode_header(&json!({ "x402Version": 2, "accepted": offer, "payload": payload })).expect("JSON")
}

async fn connect(address: SocketAddr) -> SendRequest<Full<Bytes>> {
    let stream = TcpStream::connect(address).await.expect("a connection");
    stream.set_nodelay(true).expect("a socket");
    let (mut sender, connection) = handshake(TokioIo::new(stream)).await.expect("HTTP");
    tokio::spawn(connection);
    sender.ready().await.expect("a connection");
    sender
}

fn median(times: &[f64]) -> f64 {
    let mut times = times.to_vec();
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

async fn serve(app: Router) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let address = listener.local_addr().expect("bound");
    let listener = axum::serve::ListenerExt::tap_io(listener, |stream| drop(stream.set_nodelay(true)));
    tokio::spawn(async move { axum::serve(listener, app).await });
    address
}

fn handler() -> Router {
    let work = post(async |_: Bytes| r#"{"score":1}"#);
    Router::new().route("/free", work.clone()).route("/evaluate", work)
}

/// Says yes to everything.
fn facilitator() -> Router {
    let kinds = json!({
        "kinds": [{ "x402Version": 2, "scheme": "exact", "network": Network::BASE_SEPOLIA.to_string() }],
        "extensions": [],
        "signers": {},
    });
    let authorization = |body: &Value| body["paymentPayload"]["payload"]["authorization"].clone();
    let verify =
        async move |Json(body): Json<Value>| Json(json!({ "isValid": true, "payer": authorization(&body)["from"] }));
    let settle = async move |Json(body): Json<Value>| {
        let authorization = authorization(&body);
        let (transaction, payer) = (&authorization["nonce"], &authorization["from"]);
        let network = Network::BASE_SEPOLIA.to_string();
        Json(json!({ "success": true, "transaction": transaction, "payer": payer, "network": network }))
    };
    Router::new()
        .route("/supported", get(async move || Json(kinds)))
        .route("/verify", post(verify))
        .route("/settle", post(settle))
}

/// Starts nginx before a handler. It keeps its connections to both sides.
async fn behind_nginx(to: SocketAddr, directory: &Path) -> (Child, SocketAddr) {
    let address =
        TcpListener::bind("127.0.0.1:0").await.and_then(|listener| listener.local_addr()).expect("a free port");
    let prefix = directory.join(address.port().to_string());
    std::fs::create_dir(&prefix).expect("a new directory");
    let config = format!(
        "user root; daemon off; master_process off; pid nginx.pid; error_log stderr; events {{}}
        http {{ access_log off; client_body_temp_path body; proxy_temp_path proxy; fastcgi_temp_path fastcgi;
        uwsgi_temp_path uwsgi; scgi_temp_path scgi; keepalive_requests 1000000;
        upstream handler {{ server {to}; keepalive 128; keepalive_requests 1000000; }}
        server {{ listen {address}; large_client_header_buffers 4 16k; proxy_buffer_size 8k; location / {{
        proxy_pass http://handler; proxy_http_version 1.1; proxy_set_header Connection \"\"; }} }} }}"
    );
    std::fs::write(prefix.join("nginx.conf"), config).expect("a temporary file");
    // Outside the PATH of users that are not root.
    let program = ["/usr/sbin/nginx", "/usr/local/sbin/nginx"].into_iter().find(|path| Path::new(path).exists());
    let mut nginx = Command::new(program.unwrap_or("nginx"));
    nginx.arg("-p").arg(&prefix).args(["-c", "nginx.conf", "-e", "stderr"]).stdin(Stdio::null()).stderr(Stdio::null());
    let child = nginx.kill_on_drop(true).spawn().expect("nginx: run `apt-get install nginx-light`");
    while TcpStream::connect(address).await.is_err() {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    (child, address)
}

async fn behind_charge(to: SocketAddr, directory: &Path, facilitator: &str, pay_to: Address) -> (Child, SocketAddr) {
    let config = directory.join("x402.toml");
    let routes = "price = \"$0.001\"\n[[route]]\npath = \"/free\"\nfree = true\n";
    std::fs::write(&config, routes).expect("a temporary file");
    let mut charge = Command::new(env!("CARGO_BIN_EXE_x402"));
    charge
        .args(["charge", "--json", "--listen", "127.0.0.1:0", "--upstream", &format!("http://{to}")])
        .args(["--facilitator-url", facilitator, "--pay-to", &pay_to.to_string(), "--config"])
        .arg(config)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .kill_on_drop(true);
    let mut child = charge.spawn().expect("x402 starts");
    let mut lines = BufReader::new(child.stdout.take().expect("piped")).lines();
    let ready = lines.next_line().await.expect("a line").expect("it says that it is ready");
    let ready: Value = serde_json::from_str(&ready).expect("JSON");
    (child, ready["listening"].as_str().expect("an address").parse().expect("an address"))
}

#[tokio::main(worker_threads = 2)]
async fn main() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let directory = directory.path();
    let facilitator = format!("http://{}", serve(facilitator()).await);
    let pay_to = Address::repeat_byte(0xba);
    let remote = RemoteFacilitator::builder(&facilitator).build().await.expect("it answers");
    let layer = RequirePaymentLayer::builder().price("$0.001").pay_to(Network::BASE_SEPOLIA, pay_to);
    let layer = layer.facilitator(remote).max_timeout(WINDOW).build().expect("a complete layer");
    let bare = serve(handler()).await;
    let sold = serve(handler().layer(layer)).await;
    let (_bare_nginx, bare_nginx) = behind_nginx(bare, directory).await;
    let (_sold_nginx, sold_nginx) = behind_nginx(sold, directory).await;
    let (_charge, charge) = behind_charge(bare, directory, &facilitator, pay_to).await;
    let payers: Vec<_> = (0..50).map(|_| PrivateKeySigner::random()).collect();
    let mut groups = [
        [
            Way::new("free: the handler", bare, Ask::Free),
            Way::new("free: nginx, handler", bare_nginx, Ask::Free),
            Way::new("free: x402 charge, handler", charge, Ask::Free),
        ],
        [
            Way::new("unpaid: the layer in the handler", sold, Ask::Unpaid),
            Way::new("unpaid: nginx, the layer in the handler", sold_nginx, Ask::Unpaid),
            Way::new("unpaid: x402 charge", charge, Ask::Unpaid),
        ],
        [
            Way::new("paid: the layer in the handler", sold, Ask::Paid),
            Way::new("paid: nginx, the layer in the handler", sold_nginx, Ask::Paid),
            Way::new("paid: x402 charge, handler", charge, Ask::Paid),
        ],
    ];
    let size = if std::env::args().any(|argument| argument == "short") { SHORT } else { FULL };
    for turn in 0..=size.turns {
        for way in groups.iter_mut().flatten() {
            way.turn(size, &payers).await;
            if turn == 0 {
                // The first turn warms up.
                (way.micros, way.rates) = Default::default();
            }
        }
    }
    println!(
        "| | µs, one connection | more than the first | a second, {CONNECTIONS} connections | of the first |\n|---|---|---|---|---|"
    );
    for group in &groups {
        let [first, ..] = group;
        let (micros, rate) = (median(&first.micros), median(&first.rates));
        for way in group {
            let (its_micros, its_rate) = (median(&way.micros), median(&way.rates));
            let (more, of) = (its_micros - micros, its_rate / rate);
            println!("| {} | {its_micros:.0} | {more:.0} | {its_rate:.0} | {of:.2} × |", way.name);
        }
    }
    println!();
    for [_, nginx, charge] in &groups {
        let of = median(&charge.rates) / median(&nginx.rates);
        println!("{}: {of:.2} × what nginx in its place serves", charge.name);
    }
}
