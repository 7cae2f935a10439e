//! The same handler for the same price, sold by each.

use std::sync::Arc;

use axum::{Router, routing::MethodRouter};
use r402_evm::{Eip155Exact, USDC as R402_USDC};
use r402_http::{X402Middleware as R402Middleware, server::SettlementMode};
use tower_x402::{
    SystemClock,
    facilitator::Facilitator,
    ledger::MemoryLedger,
    server::{DeferredPolicy, RequirePaymentLayer},
};
use x402_axum::X402Middleware;
use x402_chain_eip155::{KnownNetworkEip155 as _, V2Eip155Exact};
use x402_types::networks::USDC;

use crate::{
    Result,
    at_once::{AtOnce, Checks},
    hot_path,
};

pub const NAMES: [&str; 3] = ["tower-x402", "r402 0.21.0", "x402-axum 2.0.2"];

const ORIGIN: &str = "https://api.example";

/// One of each, in the order of [`NAMES`].
pub fn all(handler: &MethodRouter, checks: Checks) -> Result<[Router; 3]> {
    let ours = hot_path::AtOnce::in_memory(Arc::new(SystemClock));
    Ok([ours_with(handler, ours)?, r402(handler, AtOnce::new(checks))?, x402_axum(handler, AtOnce::new(checks))])
}

pub fn ours_with(handler: &MethodRouter, facilitator: impl Facilitator) -> Result<Router> {
    let layer: RequirePaymentLayer = hot_path::layer(facilitator, Arc::new(SystemClock)).build()?;
    Ok(Router::new().route("/evaluate", handler.clone()).layer(layer))
}

/// Takes vouchers beside `exact`, of channels with more than enough in them, and has its ledger in memory.
pub fn ours_by_voucher(handler: &MethodRouter) -> Result<Router> {
    let clock = Arc::new(SystemClock);
    let channels = hot_path::rich_channels(Arc::new(MemoryLedger::new()), clock.clone());
    let layer = hot_path::layer(hot_path::AtOnce::in_memory(clock.clone()), clock).vouchers(channels).build()?;
    Ok(Router::new().route("/evaluate", handler.clone()).layer(layer))
}

/// Answers payers that are known before it is paid.
pub fn ours_deferred(handler: &MethodRouter, facilitator: impl Facilitator, policy: DeferredPolicy) -> Result<Router> {
    let layer = hot_path::layer(facilitator, Arc::new(SystemClock)).deferred(policy).build()?;
    Ok(Router::new().route("/evaluate", handler.clone()).layer(layer))
}

pub fn r402(handler: &MethodRouter, facilitator: impl r402_facilitator::Facilitator + 'static) -> Result<Router> {
    r402_in(handler, facilitator, SettlementMode::default())
}

pub fn r402_in(
    handler: &MethodRouter,
    facilitator: impl r402_facilitator::Facilitator + 'static,
    mode: SettlementMode,
) -> Result<Router> {
    let tag = Eip155Exact::price_tag(hot_path::pay_to(), R402_USDC::base_sepolia().amount(hot_path::PRICE), None);
    let layer = R402Middleware::from_facilitator(facilitator)
        .with_base_url(ORIGIN.parse()?)
        .with_scheme("eip155:*".parse()?, Eip155Exact)
        .with_price_tag(tag)?
        .with_settlement_mode(mode)?;
    Ok(Router::new().route("/evaluate", handler.clone().layer(layer)))
}

pub fn x402_axum<F>(handler: &MethodRouter, facilitator: F) -> Router
where
    F: x402_types::facilitator::Facilitator + Clone + Send + Sync + 'static,
{
    x402_axum_by(handler, X402Middleware::from_facilitator(facilitator))
}

pub fn x402_axum_that_settles_first<F>(handler: &MethodRouter, facilitator: F) -> Router
where
    F: x402_types::facilitator::Facilitator + Clone + Send + Sync + 'static,
{
    x402_axum_by(handler, X402Middleware::from_facilitator(facilitator).settle_before_execution())
}

fn x402_axum_by<F>(handler: &MethodRouter, middleware: X402Middleware<F>) -> Router
where
    F: x402_types::facilitator::Facilitator + Clone + Send + Sync + 'static,
{
    let tag = V2Eip155Exact::price_tag(hot_path::pay_to(), USDC::base_sepolia().amount(hot_path::PRICE));
    let layer = middleware.with_base_url(ORIGIN.parse().expect("a URL")).with_price_tag(tag);
    Router::new().route("/evaluate", handler.clone().layer(layer))
}
