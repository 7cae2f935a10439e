//! The facilitators that each brings for a chain.

use std::{collections::HashMap, sync::Arc};

use alloy_network::EthereumWallet;
use alloy_signer_local::PrivateKeySigner;
use r402_evm::{
    Eip155ExactFacilitator,
    chain::{Eip155ChainProvider as R402Provider, Eip155ChainReference as R402Chain},
};
use serde_json::json;
use tower_x402::{
    Network,
    facilitator::OnchainFacilitator,
    ledger::{Ledger, MemoryLedger},
};
use x402_chain_eip155::{
    V2Eip155Exact,
    chain::{Eip155ChainProvider, Eip155ChainReference, config::Eip155ChainConfig},
};
use x402_facilitator_local::FacilitatorLocal;
use x402_types::{
    chain::{ChainRegistry, FromConfig as _},
    scheme::{SchemeBlueprints, SchemeRegistry, X402SchemeFacilitator, X402SchemeFacilitatorBuilder, X402SchemeId},
};

use crate::Result;

pub async fn ours(rpc_url: &str, key: PrivateKeySigner) -> Result<OnchainFacilitator> {
    ours_with(rpc_url, key, Arc::new(MemoryLedger::new())).await
}

pub async fn ours_with(rpc_url: &str, key: PrivateKeySigner, ledger: Arc<dyn Ledger>) -> Result<OnchainFacilitator> {
    let builder = OnchainFacilitator::builder().rpc_url(rpc_url).network(Network::BASE_SEPOLIA).ledger(ledger);
    Ok(builder.signer(key).build().await?)
}

pub fn r402(rpc_url: &str, key: PrivateKeySigner) -> Result<Eip155ExactFacilitator<R402Provider>> {
    let nodes = [(rpc_url.parse()?, None)];
    let provider = R402Provider::new(R402Chain::new(84_532), EthereumWallet::from(key), &nodes, true, false, 30)?;
    Ok(Eip155ExactFacilitator::try_new(provider)?)
}

type Provider = Arc<Eip155ChainProvider>;

pub async fn x402_rs(rpc_url: &str, key: PrivateKeySigner) -> Result<Arc<FacilitatorLocal<SchemeRegistry>>> {
    let chain = Eip155ChainReference::new(84_532);
    let key = format!("0x{}", alloy_primitives::hex::encode(key.to_bytes()));
    let inner = json!({ "signers": [key], "rpc": [{ "http": rpc_url }] });
    let config = Eip155ChainConfig { chain_reference: chain, inner: serde_json::from_value(inner)? };
    let provider = Provider::new(Eip155ChainProvider::from_config(&config).await?);
    let chains = ChainRegistry::new(HashMap::from([(chain.as_chain_id(), provider)]));
    let schemes = serde_json::from_value(json!([{ "id": "v2-eip155-exact", "chains": "eip155:84532" }]))?;
    let blueprints = SchemeBlueprints::new().and_register(Shared(V2Eip155Exact));
    Ok(Arc::new(FacilitatorLocal::new(SchemeRegistry::build(chains, blueprints, &schemes))))
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
