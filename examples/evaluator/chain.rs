//! The chain to be paid on: through a node, through a facilitator, or in this process.

use std::sync::Arc;

use alloy_primitives::{Address, U256};
use alloy_signer_local::PrivateKeySigner;
use anyhow::{Context as _, bail};
use tower_x402::{
    Asset,
    channels::Channels,
    facilitator::{
        Facilitator, OnchainFacilitator, RemoteFacilitator,
        channels::{OnchainChannels, OnchainChannelsBuilder},
    },
    ledger::channels::ChannelLedger,
    vouchers::AuthorizerKey,
};
use x402_devnet::{Devnet, DevnetPort};

use crate::{
    flags::Flags,
    settings::{Books, private_key},
};

const KEY: &str = "SETTLEMENT_PRIVATE_KEY";
/// Signs the agent card if the payee is not the settlement key.
const PAYEE_KEY: &str = "PAYEE_PRIVATE_KEY";
/// Claims what was charged by vouchers, and pays for the gas of it. It may be the settlement key.
const CHANNELS_KEY: &str = "CHANNELS_PRIVATE_KEY";
/// The bearer token for the facilitator.
const TOKEN: &str = "FACILITATOR_TOKEN";
/// What the settlement key gets on a chain in this process: one ether, in wei.
const GAS_TANK: u64 = 1_000_000_000_000_000_000;

/// A facilitator, with the chain that it settles on.
pub(crate) struct Chain {
    pub(crate) facilitator: Arc<dyn Facilitator>,
    /// The facilitator, if it is in this process.
    pub(crate) own: Option<OnchainFacilitator>,
    pub(crate) pay_to: Address,
    /// The payee's key, if it is known: `PAYEE_PRIVATE_KEY`, or the settlement key.
    pub(crate) key: Option<PrivateKeySigner>,
    pub(crate) asset: Asset,
    /// The channels whose vouchers are taken.
    pub(crate) channels: Option<Channels>,
    pub(crate) rpc_url: Option<String>,
    /// Keeps the port of the chain in this process open.
    _port: Option<DevnetPort>,
}

impl Chain {
    pub(crate) async fn connect(flags: &Flags) -> anyhow::Result<Self> {
        match (&flags.facilitator_url, &flags.rpc_url) {
            (Some(url), node) => Self::of_facilitator(flags, &url.0, node.as_ref().map(|node| node.0.as_str())).await,
            (None, Some(url)) => Self::of_node(flags, &url.0).await,
            (None, None) => Self::in_process(flags).await,
        }
    }

    /// Uses a remote facilitator, which a node confirms if there is one.
    async fn of_facilitator(flags: &Flags, url: &str, node: Option<&str>) -> anyhow::Result<Self> {
        let (asset, network) = (flags.asset()?, flags.network);
        let pay_to = flags.pay_to.context("--facilitator-url needs --pay-to: there is no settlement key to be paid")?;
        let Books { payments, channels } = flags.open_ledger().await?;
        let channels = match node {
            Some(node) => Self::channels(flags, channels, |builder| builder.rpc_url(node), None, None).await?,
            None => flags.takes_vouchers(false).map(|_| None)?,
        };
        let mut remote = RemoteFacilitator::builder(url).ledger(payments);
        if let Ok(token) = std::env::var(TOKEN) {
            remote = remote.bearer_token(token.trim());
        }
        if let Some(node) = node {
            remote = remote.confirm(network, node);
        }
        let facilitator = Arc::new(remote.build().await.context("--facilitator-url")?);
        let key = private_key(PAYEE_KEY)?;
        let rpc_url = node.map(str::to_owned);
        Ok(Self { facilitator, own: None, pay_to, key, asset, channels, rpc_url, _port: None })
    }

    /// Opens the channels, if there is a key that claims: that of the environment, or `spare`. The facilitator that settles here with the same
    /// key sends for it.
    async fn channels(
        flags: &Flags,
        ledger: Arc<dyn ChannelLedger>,
        node: impl FnOnce(OnchainChannelsBuilder) -> OnchainChannelsBuilder,
        own: Option<&OnchainFacilitator>,
        spare: Option<PrivateKeySigner>,
    ) -> anyhow::Result<Option<Channels>> {
        let key = private_key(CHANNELS_KEY)?.or(spare);
        if !flags.takes_vouchers(key.is_some())? {
            return Ok(None);
        }
        let Some(key) = key else { return Ok(None) };
        let contract = OnchainChannels::builder().network(flags.network).asset(flags.asset()?);
        let contract = match own.filter(|own| own.settlement_address() == key.address()) {
            Some(own) => contract.facilitator(own),
            None => node(contract).signer(key.clone()),
        };
        let contract = contract.build().await.context("the payment channels")?;
        let channels = Channels::builder(contract, AuthorizerKey::new(key)).ledger(ledger).claims(flags.claims());
        Ok(Some(channels.build()?))
    }

    fn settling_here(
        flags: &Flags,
        (own, key): (OnchainFacilitator, PrivateKeySigner),
        channels: Option<Channels>,
        asset: Asset,
        rpc_url: String,
        port: Option<DevnetPort>,
    ) -> anyhow::Result<Self> {
        Ok(Self {
            key: Some(private_key(PAYEE_KEY)?.unwrap_or(key)),
            pay_to: flags.pay_to.unwrap_or_else(|| own.settlement_address()),
            facilitator: Arc::new(own.clone()),
            own: Some(own),
            asset,
            channels,
            rpc_url: Some(rpc_url),
            _port: port,
        })
    }

    async fn of_node(flags: &Flags, url: &str) -> anyhow::Result<Self> {
        let asset = flags.asset()?;
        let key = private_key(KEY)?.with_context(|| {
            format!("set {KEY} to the private key that pays for gas (32 bytes in hex), or leave out --rpc-url")
        })?;
        let settling = OnchainFacilitator::builder().network(flags.network).rpc_url(url).signer(key.clone());
        let Books { payments, channels } = flags.open_ledger().await?;
        let facilitator = settling.ledger(payments).build().await.context("--rpc-url")?;
        let node = |builder: OnchainChannelsBuilder| builder.rpc_url(url);
        let channels = Self::channels(flags, channels, node, Some(&facilitator), None).await?;
        Self::settling_here(flags, (facilitator, key), channels, asset, url.to_owned(), None)
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
        let key = match private_key(KEY)? {
            Some(key) => key,
            None => PrivateKeySigner::random(),
        };
        devnet.fund(key.address(), U256::from(GAS_TANK));
        let port = devnet.serve("127.0.0.1:0").await.context("no port for the chain in this process")?;
        let settling =
            OnchainFacilitator::builder().network(flags.network).client(devnet.rpc_client()).signer(key.clone());
        let Books { payments, channels } = flags.open_ledger().await?;
        let facilitator = settling.ledger(payments).build().await?;
        let node = |builder: OnchainChannelsBuilder| builder.client(devnet.rpc_client());
        let channels = Self::channels(flags, channels, node, Some(&facilitator), Some(key.clone())).await?;
        let rpc_url = port.url().to_string();
        Self::settling_here(flags, (facilitator, key), channels, wanted, rpc_url, Some(port))
    }
}
