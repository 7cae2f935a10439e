//! What payments leave in the memory of a server.

use std::process::Command;

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

const PAYMENTS: usize = 100_000;

/// Each in a process of its own.
pub fn run() -> Result {
    println!("| resident after {PAYMENTS} payments, MiB | before | after | bytes a payment |\n|---|---|---|---|");
    for name in sellers::NAMES {
        let status = Command::new(std::env::current_exe()?).args(["memory", name]).status()?;
        assert!(status.success());
    }
    Ok(())
}

/// All payments are still valid at the end: ours keeps every one of them, and the last 10,000 responses.
pub fn of(seller: &str) -> Result {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let handler = post(async |_: Bytes| hot_path::WORK);
    let index = sellers::NAMES.iter().position(|name| *name == seller).ok_or("no such seller")?;
    let mut app = sellers::all(&handler, Checks::Nothing)?[index].clone();
    runtime.block_on(async {
        let mut mint = Mint::of(&mut app, 200).await;
        let before = resident()?;
        for _ in 0..PAYMENTS {
            let response = hot_path::answer(&mut app, hot_path::paid(&mint.header(Signed::ByKey))).await;
            assert_eq!(response.status(), StatusCode::OK);
        }
        let after = resident()?;
        let each = (after - before) / PAYMENTS as u64;
        println!("| {seller} | {} | {} | {each} |", before >> 20, after >> 20);
        Ok(())
    })
}

/// Bytes, as Linux counts them.
fn resident() -> Result<u64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).ok_or("no VmRSS")?;
    let kilobytes: u64 = line.split_whitespace().nth(1).ok_or("no number")?.parse()?;
    Ok(kilobytes << 10)
}
