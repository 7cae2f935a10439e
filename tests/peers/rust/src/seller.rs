//! What the sellers share.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use axum::{
    Json, Router,
    routing::{MethodRouter, get, post},
};
use serde_json::{Value, json};
use tokio::net::TcpListener;

static HANDLED: AtomicU64 = AtomicU64::new(0);

/// The work that is sold.
pub fn evaluation() -> MethodRouter {
    post(async || {
        HANDLED.fetch_add(1, Ordering::SeqCst);
        tokio::time::sleep(Duration::from_millis(50)).await;
        Json(json!({ "score": 1 }))
    })
}

/// Serves on any free port, and says which.
pub async fn serve(router: Router) -> crate::Result {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    println!("{}", json!({ "listening": listener.local_addr()? }));
    Ok(axum::serve(listener, router.route("/stats", get(stats))).await?)
}

async fn stats() -> Json<Value> {
    Json(json!({ "handled": HANDLED.load(Ordering::SeqCst) }))
}
