//! The chain that is settled on: through a node, through a facilitator, or in this process.

use std::{sync::Arc, time::Duration};

use alloy_primitives::{Address, B256};
use alloy_provider::{
    Provider,
    network::{Ethereum, Network as Chain},
};
use tower_x402::{
    Asset, Network,
    channels::Channels,
    facilitator::{
        Facilitator, OnchainFacilitator, RemoteFacilitator,
        channels::{OnchainChannels, OnchainChannelsBuilder},
    },
    ledger::channels::ChannelLedger,
    signers::PrivateKeySigner,
    vouchers::AuthorizerKey,
};
use x402_devnet::Devnet;

use crate::{
    devnet::Local,
    error::Error,
    keys::{self, KeyFlags, Role},
    values::{Books, HttpUrl, LedgerAt, account},
};

/// The time that a payer's transaction has to get into a block.
const CONFIRM_TIMEOUT: Duration = Duration::from_secs(120);

/// A transaction that is not signed yet.
pub(crate) type TransactionRequest = <Ethereum as Chain>::TransactionRequest;

/// The bearer token for a facilitator.
const TOKEN: &str = "FACILITATOR_TOKEN";

/// Returns the bearer token for a facilitator, if there is one.
pub(crate) fn facilitator_token() -> Option<String> {
    let token = std::env::var(TOKEN).ok()?;
    Some(token.trim().to_owned()).filter(|token| !token.is_empty())
}

/// The chain and the token.
#[derive(Clone, Debug, Default, clap::Args)]
pub(crate) struct ChainFlags {
    /// The network: base, base-sepolia or eip155:N [default: base-sepolia; whoever pays does so on base, too]
    #[arg(long, value_name = "NETWORK")]
    pub(crate) network: Option<Network>,
    /// A node of the network. Its URL often holds a key, so prefer the variable
    #[arg(long, value_name = "URL", env = "X402_RPC_URL", hide_env_values = true)]
    pub(crate) rpc_url: Option<HttpUrl>,
    /// The EIP-3009 token, with six decimals [default: the network's USDC]
    #[arg(long, value_name = "ADDR", value_parser = account, requires_all = ["asset_name", "asset_version"])]
    pub(crate) asset: Option<Address>,
    /// The EIP-712 name of --asset
    #[arg(long, value_name = "NAME", requires = "asset")]
    pub(crate) asset_name: Option<String>,
    /// The EIP-712 version of --asset
    #[arg(long, value_name = "VERSION", requires = "asset")]
    pub(crate) asset_version: Option<String>,
}

impl ChainFlags {
    pub(crate) fn network(&self) -> Network {
        self.network.unwrap_or(Network::BASE_SEPOLIA)
    }

    /// Returns the token.
    pub(crate) fn asset(&self) -> Result<Asset, Error> {
        let network = self.network();
        match (self.asset, &self.asset_name, &self.asset_version) {
            (Some(address), Some(name), Some(version)) => {
                Ok(Asset::new(network, address, name.clone(), version.clone()))
            }
            _ => network.usdc().ok_or_else(|| {
                Error::setting(
                    "--network",
                    format!("no USDC is known on {network}: give --asset, --asset-name and --asset-version"),
                )
            }),
        }
    }

    /// Returns the node, which must be there.
    pub(crate) fn node(&self) -> Result<&HttpUrl, Error> {
        self.rpc_url
            .as_ref()
            .ok_or_else(|| Error::setting("--rpc-url", "give a node of the network, or set X402_RPC_URL"))
    }

    /// Makes a facilitator that settles through the node.
    pub(crate) async fn settle(&self, key: PrivateKeySigner, books: &Books) -> Result<OnchainFacilitator, Error> {
        let builder = OnchainFacilitator::builder().network(self.network()).rpc_url(self.node()?.as_str()).signer(key);
        builder.ledger(books.payments.clone()).build().await.map_err(Error::Node)
    }

    /// Opens the payment channels of this key for an operator, beside the books of the seller: as the seller sends with its key.
    pub(crate) async fn channels_of_seller(&self, key: PrivateKeySigner, books: &Books) -> Result<Channels, Error> {
        let (channels, _) = match keys::find(Role::SETTLEMENT, &KeyFlags::default()).await? {
            Some(settlement) if settlement.address() == key.address() => {
                let own = self.settle(settlement, books).await?;
                channels_of(&own, key, self.asset()?, books.channels.clone()).await?
            }
            _ => self.channels(key, books.channels.clone()).await?,
        };
        Ok(channels)
    }

    /// Opens the payment channels of this key.
    pub(crate) async fn channels(
        &self,
        key: PrivateKeySigner,
        ledger: Arc<dyn ChannelLedger>,
    ) -> Result<(Channels, OnchainChannels), Error> {
        let contract = OnchainChannels::builder().network(self.network()).rpc_url(self.node()?.as_str());
        open_channels(contract.signer(key.clone()), key, self.asset()?, ledger).await
    }
}

/// Sends a transaction of a payer's own, and waits until it is in a block. `reverted` says what to do if it reverts there.
pub(crate) async fn send(
    provider: &impl Provider,
    transaction: TransactionRequest,
    reverted: &'static str,
) -> Result<B256, Error> {
    let sent = provider.send_transaction(transaction).await.map_err(|_| Error::Failed {
        what: "the node does not answer, or refuses the transaction".to_owned(),
        advice: "Nothing is lost: check the node, and that the payer has ETH for gas, and run this again.",
    })?;
    let hash = *sent.tx_hash();
    let receipt = sent.with_timeout(Some(CONFIRM_TIMEOUT)).get_receipt().await.map_err(|_| Error::Failed {
        what: format!("transaction {hash} is not in a block yet"),
        advice: "Look it up later, and do not send it again before that.",
    })?;
    match receipt.status() {
        true => Ok(hash),
        false => Err(Error::Failed { what: format!("transaction {hash} reverted"), advice: reverted }),
    }
}

/// Opens the payment channels of this key. The facilitator's key pays for gas.
async fn channels_of(
    facilitator: &OnchainFacilitator,
    key: PrivateKeySigner,
    asset: Asset,
    ledger: Arc<dyn ChannelLedger>,
) -> Result<(Channels, OnchainChannels), Error> {
    open_channels(OnchainChannels::builder().facilitator(facilitator), key, asset, ledger).await
}

/// Returns the channels of a key, and the contract that has them.
async fn open_channels(
    contract: OnchainChannelsBuilder,
    key: PrivateKeySigner,
    asset: Asset,
    ledger: Arc<dyn ChannelLedger>,
) -> Result<(Channels, OnchainChannels), Error> {
    let contract = contract.asset(asset).build().await.map_err(Error::ChannelNode)?;
    let channels = Channels::builder(contract.clone(), AuthorizerKey::new(key)).ledger(ledger).build();
    Ok((channels.map_err(Error::Channels)?, contract))
}

/// The facilitator, the channels and the ledger of a seller.
pub(crate) struct Settlement {
    pub(crate) facilitator: Arc<dyn Facilitator>,
    /// The facilitator, if it is in this process.
    pub(crate) own: Option<OnchainFacilitator>,
    /// The channels whose vouchers are taken.
    pub(crate) channels: Option<Channels>,
    /// Their contract.
    pub(crate) contract: Option<OnchainChannels>,
    pub(crate) asset: Asset,
    pub(crate) books: Books,
    /// The chain, if it is in this process.
    pub(crate) local: Option<Local>,
}

impl Settlement {
    /// Settles through a node with the key in `SETTLEMENT_…`. Takes vouchers if there is a key in `CHANNELS_…`.
    pub(crate) async fn by_node(chain: &ChainFlags, books: Books) -> Result<Self, Error> {
        let asset = chain.asset()?;
        let key = keys::require(Role::SETTLEMENT, &KeyFlags::default()).await?;
        let claimer = keys::find(Role::CHANNELS, &KeyFlags::default()).await?;
        let address = key.address();
        let own = chain.settle(key, &books).await?;
        let (channels, contract) = match claimer {
            // One gas key for both.
            Some(claimer) if claimer.address() == address => {
                Some(channels_of(&own, claimer, asset.clone(), books.channels.clone()).await?)
            }
            Some(claimer) => Some(chain.channels(claimer, books.channels.clone()).await?),
            None => None,
        }
        .unzip();
        Ok(Self { facilitator: Arc::new(own.clone()), own: Some(own), channels, contract, asset, books, local: None })
    }

    /// Settles through a facilitator, whose answers a node confirms if there is one.
    pub(crate) async fn by_facilitator(url: &HttpUrl, chain: &ChainFlags, books: Books) -> Result<Self, Error> {
        let asset = chain.asset()?;
        let mut remote = RemoteFacilitator::builder(url.as_str()).ledger(books.payments.clone());
        if let Some(token) = facilitator_token() {
            remote = remote.bearer_token(&token);
        }
        // Whoever names the network can start before the facilitator does.
        if let Some(network) = chain.network {
            remote = remote.network(network);
        }
        if let Some(node) = &chain.rpc_url {
            remote = remote.confirm(chain.network(), node.as_str());
        }
        let facilitator = Arc::new(remote.build().await.map_err(Error::Remote)?);
        let (channels, contract) = match (keys::find(Role::CHANNELS, &KeyFlags::default()).await?, &chain.rpc_url) {
            (Some(claimer), Some(_)) => Some(chain.channels(claimer, books.channels.clone()).await?),
            (Some(_), None) => {
                return Err(Error::setting(
                    "CHANNELS_PRIVATE_KEY",
                    "vouchers need a node: give --rpc-url, too, or unset it",
                ));
            }
            (None, _) => None,
        }
        .unzip();
        Ok(Self { facilitator, own: None, channels, contract, asset, books, local: None })
    }

    /// Settles on a chain in this process. Refuses what is meant for another chain: whoever forgot its node would sell for play money. `ways`
    /// are the flags that lead to another chain.
    pub(crate) async fn in_process(chain: &ChainFlags, ledger: &LedgerAt, ways: &str) -> Result<Self, Error> {
        if ledger.is_durable() {
            let problem = format!("outlives the chain in this process: give {ways}, or leave it out");
            return Err(Error::setting("--ledger", problem));
        }
        if let Some(network) = chain.network {
            let problem = format!(
                "nothing says how to reach {network}: set X402_RPC_URL, give {ways}, or leave it out to try everything without real money"
            );
            return Err(Error::setting("--network", problem));
        }
        if let Some(variable) = [Role::SETTLEMENT, Role::CHANNELS].into_iter().find_map(keys::variable_with) {
            let problem = format!(
                "nothing says where to use it: set X402_RPC_URL, give {ways}, or unset it to try everything without real money"
            );
            return Err(Error::setting(variable, problem));
        }
        let books = ledger.open().await?;
        let devnet = Devnet::builder().chain_id(chain.network().chain_id()).start().await?;
        let asset = devnet.asset();
        if chain.asset.is_some_and(|wanted| wanted != asset.address) {
            return Err(Error::setting("--asset", "the chain in this process has USDC only: give --rpc-url, too"));
        }
        let local = Local::open(devnet, "127.0.0.1:0").await?;
        let builder = OnchainFacilitator::builder().network(asset.network).client(local.devnet.rpc_client());
        let builder = builder.signer(local.settlement_key.clone()).ledger(books.payments.clone());
        let own = builder.build().await.map_err(Error::Node)?;
        let (channels, contract) =
            channels_of(&own, local.channels_key.clone(), asset.clone(), books.channels.clone()).await?;
        let (facilitator, channels, contract) = (Arc::new(own.clone()), Some(channels), Some(contract));
        Ok(Self { facilitator, own: Some(own), channels, contract, asset, books, local: Some(local) })
    }
}
