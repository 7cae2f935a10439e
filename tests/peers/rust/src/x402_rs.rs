//! x402-rs: a client, a server with a facilitator over HTTP, and a facilitator.

use std::{collections::HashMap, sync::Arc};

use alloy_primitives::Address;
use alloy_signer_local::PrivateKeySigner;
use axum::Router;
use reqwest_middleware::ClientWithMiddleware;
use serde_json::json;
use x402_axum::X402Middleware;
use x402_chain_eip155::{
    KnownNetworkEip155 as _, V1Eip155Exact, V1Eip155ExactClient, V2Eip155Exact, V2Eip155ExactClient,
    chain::{Eip155ChainProvider, Eip155ChainReference, config::Eip155ChainConfig},
};
use x402_facilitator_local::{FacilitatorLocal, handlers};
use x402_reqwest::{ReqwestWithPayments as _, ReqwestWithPaymentsBuild as _, X402Client};
use x402_types::{
    chain::{ChainRegistry, FromConfig as _},
    networks::USDC,
    scheme::{SchemeBlueprints, SchemeRegistry, X402SchemeFacilitator, X402SchemeFacilitatorBuilder, X402SchemeId},
};

use crate::{Result, seller, variable};

/// A client that knows this version of x402 only.
pub fn client(version: u8) -> Result<ClientWithMiddleware> {
    let signer: Arc<PrivateKeySigner> = Arc::new(variable("PRIVATE_KEY")?.parse()?);
    let client = match version {
        1 => X402Client::new().register(V1Eip155ExactClient::new(signer)),
        _ => X402Client::new().register(V2Eip155ExactClient::new(signer)),
    };
    Ok(reqwest::Client::new().with_payments(client).build())
}

/// A server that speaks this version of x402 only. It can settle before the handler, but not say so in its offer.
pub fn server(version: u8) -> Result<Router> {
    let mut middleware = X402Middleware::try_new(&variable("FACILITATOR_URL")?)?;
    if variable("FLOW")? == "upfront" {
        middleware = middleware.settle_before_execution();
    }
    let middleware = middleware.with_base_url("http://x402-axum.example".parse()?);
    let (pay_to, price) = (variable("PAY_TO")?.parse::<Address>()?, USDC::base_sepolia().amount(1_000_u64));
    let evaluation = match version {
        1 => seller::evaluation().layer(middleware.with_price_tag(V1Eip155Exact::price_tag(pay_to, price))),
        _ => seller::evaluation().layer(middleware.with_price_tag(V2Eip155Exact::price_tag(pay_to, price))),
    };
    Ok(Router::new().route("/evaluate", evaluation))
}

type Provider = Arc<Eip155ChainProvider>;

pub async fn facilitator() -> Result<Router> {
    let chain = Eip155ChainReference::new(84_532);
    let inner = json!({ "signers": [variable("PRIVATE_KEY")?], "rpc": [{ "http": variable("RPC_URL")? }] });
    let config = Eip155ChainConfig { chain_reference: chain, inner: serde_json::from_value(inner)? };
    let provider = Provider::new(Eip155ChainProvider::from_config(&config).await?);
    let chains = ChainRegistry::new(HashMap::from([(chain.as_chain_id(), provider)]));
    let blueprints = SchemeBlueprints::new().and_register(Shared(V1Eip155Exact)).and_register(Shared(V2Eip155Exact));
    let schemes = ["v1-eip155-exact", "v2-eip155-exact"].map(|id| json!({ "id": id, "chains": "eip155:84532" }));
    let schemes = serde_json::from_value(json!(schemes))?;
    let facilitator = FacilitatorLocal::new(SchemeRegistry::build(chains, blueprints, &schemes));
    Ok(handlers::routes().with_state(Arc::new(facilitator)))
}

/// A scheme whose providers are shared: the registry hands out references, of which no provider is made.
struct Shared<S>(S);

impl<S: X402SchemeId> X402SchemeId for Shared<S> {
    fn x402_version(&self) -> u8 {
        self.0.x402_version()
    }

    fn namespace(&self) -> &str {
        self.0.namespace()
    }

    fn scheme(&self) -> &str {
        self.0.scheme()
    }
}

impl<S: X402SchemeFacilitatorBuilder<Provider>> X402SchemeFacilitatorBuilder<&Provider> for Shared<S> {
    fn build(&self, provider: &Provider, config: Option<serde_json::Value>) -> Result<Box<dyn X402SchemeFacilitator>> {
        self.0.build(provider.clone(), config)
    }
}
