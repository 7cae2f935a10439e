//! The chain that is paid on: a node's, or one in this process.

use alloy_primitives::U256;
use alloy_signer_local::PrivateKeySigner;
use anyhow::{Context as _, bail};
use tower_x402::{
    Asset,
    devnet::{Devnet, DevnetPort},
    facilitator::OnchainFacilitator,
};

use crate::flags::Flags;

const KEY: &str = "SETTLEMENT_PRIVATE_KEY";
/// What a settlement key gets on a chain in this process: one ether.
const GAS_TANK: u64 = 1_000_000_000_000_000_000;

/// A connection to a chain, with somebody who settles there.
pub(crate) struct Chain {
    pub(crate) facilitator: OnchainFacilitator,
    pub(crate) asset: Asset,
    pub(crate) rpc_url: String,
    /// Answers on that URL, if it is ours.
    _port: Option<DevnetPort>,
}

impl Chain {
    pub(crate) async fn connect(flags: &Flags) -> anyhow::Result<Self> {
        match &flags.rpc_url {
            Some(url) => Self::of_node(flags, &url.0).await,
            None => Self::in_process(flags).await,
        }
    }

    async fn of_node(flags: &Flags, url: &str) -> anyhow::Result<Self> {
        let asset = flags.asset()?;
        let key = settlement_key()?.with_context(|| {
            format!("set {KEY} to the private key that pays for gas (32 bytes in hex), or leave out --rpc-url")
        })?;
        let settling = OnchainFacilitator::builder().network(flags.network).rpc_url(url).signer(key);
        let facilitator = settling.ledger(flags.open_ledger().await?).build().await.context("--rpc-url")?;
        Ok(Self { facilitator, asset, rpc_url: url.to_owned(), _port: None })
    }

    async fn in_process(flags: &Flags) -> anyhow::Result<Self> {
        let wanted = flags.asset()?;
        let devnet = Devnet::builder().chain_id(flags.network.chain_id()).start().await?;
        if wanted != devnet.asset() {
            bail!(
                "the chain in this process has no other token than {}'s USDC: --asset needs --rpc-url",
                flags.network
            );
        }
        let key = match settlement_key()? {
            Some(key) => key,
            None => PrivateKeySigner::random(),
        };
        devnet.fund(key.address(), U256::from(GAS_TANK));
        let port = devnet.serve("127.0.0.1:0").await.context("no port for the chain in this process")?;
        let settling = OnchainFacilitator::builder().network(flags.network).client(devnet.rpc_client()).signer(key);
        let facilitator = settling.ledger(flags.open_ledger().await?).build().await?;
        Ok(Self { facilitator, asset: wanted, rpc_url: port.url().to_string(), _port: Some(port) })
    }
}

/// The key, without ever repeating it.
fn settlement_key() -> anyhow::Result<Option<PrivateKeySigner>> {
    let text = match std::env::var(KEY) {
        Ok(text) if !text.trim().is_empty() => text,
        Ok(_) | Err(std::env::VarError::NotPresent) => return Ok(None),
        Err(std::env::VarError::NotUnicode(_)) => bail!("{KEY} is not a private key: expected 32 bytes in hex"),
    };
    match text.trim().parse() {
        Ok(key) => Ok(Some(key)),
        Err(_) => bail!("{KEY} is not a private key: expected 32 bytes in hex"),
    }
}
