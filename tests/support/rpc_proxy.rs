//! A JSON-RPC proxy that counts what passes, delays it and makes it fail.

use std::{
    collections::BTreeMap,
    io,
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};

use bytes::Bytes;
use http::{Request, Response, StatusCode, header::CONTENT_TYPE};
use http_body_util::{BodyExt, Full};
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::Semaphore,
    task::JoinHandle,
};

/// A proxy in front of a JSON-RPC server, gone when dropped.
pub struct RpcProxy {
    url: String,
    shared: Arc<Shared>,
    listening: JoinHandle<()>,
}

/// What passed the proxy.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// HTTP requests: round trips. A batch is one.
    pub requests: u64,
    /// JSON-RPC calls. A batch is as many as it holds.
    pub calls: u64,
    /// JSON-RPC calls by method.
    pub methods: BTreeMap<String, u64>,
}

impl Counts {
    /// How often `method` was called.
    pub fn of(&self, method: &str) -> u64 {
        self.methods.get(method).copied().unwrap_or_default()
    }
}

/// What becomes of one HTTP request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// It is forwarded and answered.
    Pass,
    /// The connection closes, nothing was forwarded.
    DropBefore,
    /// It is forwarded and takes effect, then the connection closes without an answer.
    DropAfter,
    /// It is forwarded only after this time.
    Delay(Duration),
    /// It is forwarded when the test [lets it go on](RpcProxy::release).
    Hold,
    /// Every call in it is answered with this JSON-RPC error code, nothing was forwarded.
    Error(i64),
    /// Every call in it has this result, in JSON; nothing was forwarded.
    Result(&'static str),
    /// It is answered with this HTTP status, nothing was forwarded.
    Status(u16),
    /// It is forwarded, and the first text is replaced by the second in its answer.
    Replace(&'static str, &'static str),
    /// It is forwarded twice, and the second answer is given.
    Twice,
    /// It is forwarded, and every second answer of a batch is left out.
    Half,
    /// A lone call is answered as the same call was answered first, as by a node that has fallen behind. Any other is forwarded.
    Stale,
}

type Judge = dyn Fn(&[String]) -> Fate + Send + Sync;

struct Shared {
    upstream: String,
    client: reqwest::Client,
    state: Mutex<State>,
    /// Closed when held requests may go on.
    released: Semaphore,
}

struct State {
    latency: Duration,
    counts: Counts,
    judge: Arc<Judge>,
    /// The first result of each call that came alone, by its method and parameters.
    first: BTreeMap<String, Value>,
}

impl RpcProxy {
    /// Starts a proxy in front of `upstream` that only counts.
    pub async fn start(upstream: impl Into<String>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let url = format!("http://{}", listener.local_addr().expect("a bound socket has an address"));
        let state = State {
            latency: Duration::ZERO,
            counts: Counts::default(),
            judge: Arc::new(|_| Fate::Pass),
            first: BTreeMap::new(),
        };
        let shared = Arc::new(Shared {
            upstream: upstream.into(),
            client: reqwest::Client::builder().no_proxy().build().expect("an HTTP client"),
            state: Mutex::new(state),
            released: Semaphore::new(0),
        });
        let listening = tokio::spawn(accept(listener, Arc::clone(&shared)));
        Self { url, shared, listening }
    }

    /// Where the proxy listens.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Adds this time to every HTTP request, as a network round trip would.
    pub fn set_latency(&self, latency: Duration) {
        self.shared.state().latency = latency;
    }

    /// Decides the fate of each HTTP request by the methods it calls.
    pub fn judge(&self, judge: impl Fn(&[String]) -> Fate + Send + Sync + 'static) {
        self.shared.state().judge = Arc::new(judge);
    }

    /// Lets all held requests go on, those to come too.
    pub fn release(&self) {
        self.shared.released.close();
    }

    /// What passed since the start or the last [`Self::reset`], the failed requests included.
    pub fn counts(&self) -> Counts {
        self.shared.state().counts.clone()
    }

    /// Starts counting anew and returns what was counted.
    pub fn reset(&self) -> Counts {
        std::mem::take(&mut self.shared.state().counts)
    }
}

impl Drop for RpcProxy {
    fn drop(&mut self) {
        self.listening.abort();
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no holder panics")
    }

    async fn answer(&self, request: Request<Incoming>) -> io::Result<Response<Full<Bytes>>> {
        let body = request.into_body().collect().await.map_err(io::Error::other)?.to_bytes();
        let message: Value = serde_json::from_slice(&body).map_err(io::Error::other)?;
        let methods = methods(&message);
        let (latency, fate) = self.count(&methods);
        tokio::time::sleep(latency).await;
        match fate {
            Fate::Pass => self.forward_noting(&message, body).await,
            Fate::Stale => {
                let first = self.state().first.get(&subject(&message)).cloned();
                match first {
                    Some(result) => {
                        Ok(respond(StatusCode::OK, answers(&message, "result", &result).to_string().into()))
                    }
                    None => self.forward_noting(&message, body).await,
                }
            }
            Fate::DropBefore => Err(closed()),
            Fate::DropAfter => self.forward(body).await.and(Err(closed())),
            Fate::Delay(time) => {
                tokio::time::sleep(time).await;
                self.forward(body).await
            }
            Fate::Hold => {
                let _ = self.released.acquire().await;
                self.forward(body).await
            }
            Fate::Replace(from, to) => {
                let (parts, body) = self.forward(body).await?.into_parts();
                let bytes = body.collect().await.map_err(io::Error::other)?.to_bytes();
                let text = String::from_utf8_lossy(&bytes).replace(from, to);
                Ok(Response::from_parts(parts, Full::new(text.into())))
            }
            Fate::Twice => {
                self.forward(body.clone()).await?;
                self.forward(body).await
            }
            Fate::Half => {
                let answer = self.forward(body).await?.into_body().collect().await.map_err(io::Error::other)?;
                let answers: Vec<Value> = serde_json::from_slice(&answer.to_bytes()).map_err(io::Error::other)?;
                let half: Value = answers.into_iter().step_by(2).collect();
                Ok(respond(StatusCode::OK, half.to_string().into()))
            }
            Fate::Error(code) => {
                let error = json!({ "code": code, "message": "refused by the proxy" });
                Ok(respond(StatusCode::OK, answers(&message, "error", &error).to_string().into()))
            }
            Fate::Result(result) => {
                let result = serde_json::from_str(result).expect("a result in a test is JSON");
                Ok(respond(StatusCode::OK, answers(&message, "result", &result).to_string().into()))
            }
            Fate::Status(status) => {
                Ok(respond(StatusCode::from_u16(status).expect("a status in a test is valid"), Bytes::new()))
            }
        }
    }

    fn count(&self, methods: &[String]) -> (Duration, Fate) {
        let mut state = self.state();
        state.counts.requests += 1;
        state.counts.calls += methods.len() as u64;
        for method in methods {
            *state.counts.methods.entry(method.clone()).or_default() += 1;
        }
        let (latency, judge) = (state.latency, Arc::clone(&state.judge));
        drop(state);
        (latency, judge(methods))
    }

    /// Forwards it, and keeps the result of a lone call if it is the first.
    async fn forward_noting(&self, message: &Value, body: Bytes) -> io::Result<Response<Full<Bytes>>> {
        let (parts, body) = self.forward(body).await?.into_parts();
        let bytes = body.collect().await.map_err(io::Error::other)?.to_bytes();
        let answer = serde_json::from_slice::<Value>(&bytes).ok();
        if let Some(result) = answer.and_then(|answer| answer.get("result").cloned()) {
            self.state().first.entry(subject(message)).or_insert(result);
        }
        Ok(Response::from_parts(parts, Full::new(bytes)))
    }

    async fn forward(&self, body: Bytes) -> io::Result<Response<Full<Bytes>>> {
        let request = self.client.post(&self.upstream).header(CONTENT_TYPE, "application/json").body(body);
        let response = request.send().await.map_err(io::Error::other)?;
        let status = response.status();
        Ok(respond(status, response.bytes().await.map_err(io::Error::other)?))
    }
}

async fn accept(listener: TcpListener, shared: Arc<Shared>) {
    let mut connections = tokio::task::JoinSet::new();
    while let Ok((stream, _)) = listener.accept().await {
        connections.spawn(serve(stream, Arc::clone(&shared)));
        while connections.try_join_next().is_some() {}
    }
}

async fn serve(stream: TcpStream, shared: Arc<Shared>) {
    // Without this a small answer may wait 40 ms for an acknowledgement.
    let _ = stream.set_nodelay(true);
    let service = service_fn(|request| shared.answer(request));
    // An error is a client that went away, or a connection that we were told to drop.
    let _ = http1::Builder::new().serve_connection(TokioIo::new(stream), service).await;
}

/// What a lone call asks for.
fn subject(message: &Value) -> String {
    format!("{} {}", message["method"], message["params"])
}

fn methods(message: &Value) -> Vec<String> {
    calls(message).iter().map(|call| call["method"].as_str().unwrap_or_default().to_owned()).collect()
}

fn calls(message: &Value) -> &[Value] {
    message.as_array().map_or(std::slice::from_ref(message), Vec::as_slice)
}

/// The same answer to every call.
fn answers(message: &Value, kind: &str, answer: &Value) -> Value {
    let answers = calls(message).iter().map(|call| json!({ "jsonrpc": "2.0", "id": call["id"], kind: answer }));
    let answers: Vec<Value> = answers.collect();
    if message.is_array() { answers.into() } else { answers.into_iter().next().unwrap_or_default() }
}

fn respond(status: StatusCode, body: Bytes) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(body));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, http::HeaderValue::from_static("application/json"));
    response
}

fn closed() -> io::Error {
    io::Error::from(io::ErrorKind::ConnectionAborted)
}
