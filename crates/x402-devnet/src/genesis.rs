//! The contracts that a devnet has from its first block, at their canonical addresses: USDC, the CREATE2 deployer, the escrow of
//! payment channels with its collector, Permit2 with the proxies of `exact` and `upto`, and Multicall3.

use alloy_primitives::{Address, Bytes, address, bytes};
use alloy_sol_types::{SolCall as _, sol};
use serde::Deserialize;
use tower_x402::{Asset, Network, permit2, upto, vouchers::Escrow};

use super::{DevnetError, chain::Chain};

sol! {
    /// The calls that the devnet makes to its token.
    interface DevnetUsdc {
        function initialize(string name, string version, address owner);
        function mint(address to, uint256 amount) returns (bool);
        function balanceOf(address account) returns (uint256);
    }
}

/// The owner of the token, who may mint, pause and blacklist. There is no key for it; the devnet sends its transactions.
pub(super) const OWNER: Address = address!("00000000000000000000000000000000DE7Ae70a");

/// The deterministic deployment proxy, at the address that it has on every chain.
const CREATE2_DEPLOYER: Address = address!("4e59b44847b379578588920cA78FbF26c0B4956C");
const CREATE2_DEPLOYER_CODE: Bytes = bytes!(
    "7fffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffe03601600081602082378035828234f58015156039578182fd5b8082525050506014600cf3"
);

/// Multicall3, at the address that it has on every chain. Other implementations read through it.
const MULTICALL3: Address = address!("cA11bde05977b3631167028862bE2a173976CA11");

/// Returns USDC as it is on `network`, or as on Base Sepolia if it is not known there.
pub(super) fn usdc_on(network: Network) -> Option<Asset> {
    network.usdc().or_else(|| {
        let asset = Network::BASE_SEPOLIA.usdc()?;
        Some(Asset::new(network, asset.address, asset.name, asset.version))
    })
}

/// Deploys the contracts before the first block.
pub(super) fn deploy(chain: &mut Chain, asset: &Asset) -> Result<(), DevnetError> {
    chain.state.set_code(CREATE2_DEPLOYER, CREATE2_DEPLOYER_CODE);
    for (address, artifact) in [
        (asset.address, include_str!("../contracts/artifacts/DevnetUsdc.json")),
        (Escrow::ADDRESS, include_str!("../contracts/artifacts/DevnetBatchSettlement.json")),
        (Escrow::ERC3009_COLLECTOR, include_str!("../contracts/artifacts/DevnetErc3009Collector.json")),
        (permit2::PERMIT2, include_str!("../contracts/artifacts/DevnetPermit2.json")),
        (permit2::PROXY, include_str!("../contracts/artifacts/DevnetExactProxy.json")),
        (upto::PROXY, include_str!("../contracts/artifacts/DevnetUptoProxy.json")),
        (MULTICALL3, include_str!("../contracts/artifacts/DevnetMulticall3.json")),
    ] {
        chain.state.set_code(address, runtime_code(artifact)?);
    }
    let initialize =
        DevnetUsdc::initializeCall { name: asset.name.clone(), version: asset.version.clone(), owner: OWNER };
    chain.execute_at_genesis(OWNER, asset.address, initialize.abi_encode().into())?;
    Ok(())
}

fn runtime_code(artifact: &str) -> Result<Bytes, DevnetError> {
    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct Artifact {
        deployed_bytecode: Bytes,
    }
    let artifact: Artifact = serde_json::from_str(artifact).map_err(|error| DevnetError::Genesis(error.to_string()))?;
    Ok(artifact.deployed_bytecode)
}
