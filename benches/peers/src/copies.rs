//! Twenty copies of one payment at once.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use axum::routing::post;
use bytes::Bytes;
use http::StatusCode;

use crate::{
    Result,
    at_once::Checks,
    hot_path,
    payments::{Mint, Signed},
    sellers,
};

const COPIES: usize = 20;

pub fn run() -> Result {
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(all())
}

async fn all() -> Result {
    let handled = Arc::new(AtomicUsize::new(0));
    let counter = handled.clone();
    let handler = post(move |_: Bytes| {
        counter.fetch_add(1, Ordering::Relaxed);
        async {
            tokio::time::sleep(Duration::from_millis(20)).await;
            hot_path::WORK
        }
    });
    println!("| {COPIES} copies of one payment at once | handler ran | answered 200 |\n|---|---|---|");
    for (name, mut app) in sellers::NAMES.iter().zip(sellers::all(&handler, Checks::Reuse)?) {
        handled.store(0, Ordering::Relaxed);
        let payment = Mint::of(&mut app, 1).await.header(Signed::ByKey);
        let mut copies = tokio::task::JoinSet::new();
        for _ in 0..COPIES {
            let (mut app, request) = (app.clone(), hot_path::paid(&payment));
            copies.spawn(async move { hot_path::answer(&mut app, request).await.status() });
        }
        let statuses = copies.join_all().await;
        let paid = statuses.iter().filter(|status| **status == StatusCode::OK).count();
        println!("| {name} | {} | {paid} |", handled.load(Ordering::Relaxed));
    }
    println!("\ntower-x402 answers all copies of the same request with the one answer; the money moved once.");
    Ok(())
}
