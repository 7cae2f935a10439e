//! Sellers that listen on loopback: ours and the other Rust ones in this process, the official TypeScript one in node.

use std::{net::SocketAddr, path::Path, process::Stdio, time::Duration};

use alloy_signer_local::PrivateKeySigner;
use axum::Router;
use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Request};
use http_body_util::Full;
use hyper::client::conn::http1::{self, SendRequest};
use hyper_util::rt::TokioIo;
use tokio::{
    io::{AsyncBufReadExt as _, BufReader},
    net::{TcpListener, TcpStream},
    process::{Child, Command},
    task::JoinHandle,
};

use crate::{Result, hot_path, own::processor_time};

/// A seller and its address; gone when dropped.
pub struct Listening {
    pub address: SocketAddr,
    server: Server,
}

enum Server {
    Here(JoinHandle<()>),
    /// Killed when dropped.
    Elsewhere(Child),
}

impl Listening {
    pub async fn here(app: Router) -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let serve = async move { axum::serve(listener, app).await.expect("it listens") };
        Ok(Self { address, server: Server::Here(tokio::spawn(serve)) })
    }

    /// The official express middleware; `None` where nobody has installed it (`npm install` in tests/peers).
    pub async fn express() -> Result<Option<Self>> {
        Self::node("express_at_once.mjs", &[]).await
    }

    /// The same with payment channels, and the official facilitator on a chain.
    pub async fn express_with_channels(rpc_url: &str, key: &PrivateKeySigner) -> Result<Option<Self>> {
        let key = alloy_primitives::hex::encode_prefixed(key.to_bytes());
        Self::node("channels_server.mjs", &[("RPC_URL", rpc_url), ("PRIVATE_KEY", &key)]).await
    }

    async fn node(script: &str, environment: &[(&str, &str)]) -> Result<Option<Self>> {
        let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/peers");
        if !directory.join("node_modules/@x402/express").exists() {
            return Ok(None);
        }
        let mut child = Command::new("node")
            .arg(script)
            .current_dir(directory)
            .env("PAY_TO", hot_path::pay_to().to_string())
            .envs(environment.iter().copied())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()?;
        let mut line = String::new();
        BufReader::new(child.stdout.take().ok_or("no output")?).read_line(&mut line).await?;
        let ready: serde_json::Value = serde_json::from_str(&line)?;
        let address = ready["listening"].as_str().ok_or("no address")?.parse()?;
        Ok(Some(Self { address, server: Server::Elsewhere(child) }))
    }

    /// What its process has had of the processors, if it is not this one.
    pub fn elsewhere(&self) -> Option<Duration> {
        match &self.server {
            Server::Here(_) => None,
            Server::Elsewhere(child) => child.id().map(|id| processor_time(&id.to_string())),
        }
    }

    pub async fn connect(&self) -> Result<SendRequest<Full<Bytes>>> {
        let stream = TcpStream::connect(self.address).await?;
        stream.set_nodelay(true)?;
        let (sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
        tokio::spawn(connection);
        Ok(sender)
    }

    /// What it demands.
    pub async fn demand(&self) -> Result<HeaderMap> {
        let response = self.connect().await?.send_request(request(hot_path::unpaid())).await?;
        Ok(response.headers().clone())
    }
}

impl Drop for Listening {
    fn drop(&mut self) {
        if let Server::Here(task) = &self.server {
            task.abort();
        }
    }
}

/// A request as it is sent over a connection.
pub fn request(request: Request<axum::body::Body>) -> Request<Full<Bytes>> {
    let mut request = request.map(|_| Full::from(hot_path::TASK));
    request.headers_mut().insert("host", HeaderValue::from_static("api.example"));
    request
}
