//! A proxy before the Atropos server that loses requests or answers.

use std::{
    ops::RangeInclusive,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use axum::{
    Router,
    body::{Body, to_bytes},
    extract::{Request, State},
    http::StatusCode,
    response::{IntoResponse, Response},
};
use tokio::{net::TcpListener, sync::Notify, time::timeout};

use super::server::{AtroposServer, PATIENCE};
use support::student_stage::serve;

/// The fault of a request.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Loss {
    /// The server gets it, and a gateway's error replaces the answer.
    Answer,
    /// The server does not get it, and a gateway answers an error.
    Request,
    /// The server gets it, and no answer arrives.
    Silence,
    /// The server does not get it, and no answer arrives.
    Void,
    /// The server does not get it, and another answer arrives.
    Garbage,
}

/// Pushes of groups.
pub const PUSH: &str = "/scored_data";
/// Requests for the status of the environment.
pub const STATUS: &str = "/status-env";

pub struct Proxy {
    pub url: String,
    pushes: Arc<AtomicU64>,
    silent: Arc<Notify>,
}

/// The requests that fail, by path and number, counted from 1.
pub type Losses = Vec<(&'static str, RangeInclusive<u64>, Loss)>;

#[derive(Clone)]
struct Route {
    to: String,
    losses: Arc<Losses>,
    pushes: Arc<AtomicU64>,
    looks: Arc<AtomicU64>,
    silent: Arc<Notify>,
    http: reqwest::Client,
}

impl Proxy {
    /// Loses these pushes, counted from 1.
    pub async fn before(server: &AtroposServer, losses: impl IntoIterator<Item = (u64, Loss)>) -> Self {
        let losses = losses.into_iter().map(|(at, loss)| (PUSH, at..=at, loss)).collect();
        Self::losing(server, losses).await
    }

    pub async fn losing(server: &AtroposServer, losses: Losses) -> Self {
        let pushes = Arc::new(AtomicU64::new(0));
        let silent = Arc::new(Notify::new());
        let (to, http, losses) = (server.url.clone(), reqwest::Client::new(), Arc::new(losses));
        let route = Route { to, losses, pushes: pushes.clone(), looks: Arc::default(), silent: silent.clone(), http };
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (url, _) = serve(listener, Router::new().fallback(forward).with_state(route));
        Self { url: url.to_string(), pushes, silent }
    }

    /// Waits until a request is left without an answer.
    pub async fn is_silent(&self) {
        timeout(PATIENCE, self.silent.notified()).await.expect("a push gets there");
    }

    pub fn pushes(&self) -> u64 {
        self.pushes.load(Ordering::SeqCst)
    }
}

async fn forward(State(route): State<Route>, request: Request) -> Response {
    let path = request.uri().path();
    let number = match path {
        PUSH => route.pushes.fetch_add(1, Ordering::SeqCst) + 1,
        STATUS => route.looks.fetch_add(1, Ordering::SeqCst) + 1,
        _ => 0,
    };
    let lost = route.losses.iter().find(|(what, at, _)| *what == path && at.contains(&number));
    let loss = lost.map(|(.., loss)| *loss);
    let (head, body) = request.into_parts();
    let body = to_bytes(body, usize::MAX).await.unwrap();
    if loss == Some(Loss::Request) {
        return StatusCode::GATEWAY_TIMEOUT.into_response();
    }
    if loss == Some(Loss::Garbage) {
        return "<html>".into_response();
    }
    if loss == Some(Loss::Void) {
        route.silent.notify_one();
        return std::future::pending().await;
    }
    let url = format!("{}{}", route.to, head.uri.path());
    let answer = route.http.request(head.method, url).header("content-type", "application/json").body(body);
    let answer = answer.send().await.unwrap();
    if loss == Some(Loss::Answer) {
        return StatusCode::BAD_GATEWAY.into_response();
    }
    if loss == Some(Loss::Silence) {
        route.silent.notify_one();
        return std::future::pending().await;
    }
    let status = answer.status();
    (status, Body::from(answer.bytes().await.unwrap())).into_response()
}
