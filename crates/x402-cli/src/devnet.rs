//! `x402 devnet`: a chain in this process, with USDC, accounts that hold some, and the contracts that settle.

use std::{fmt, time::Duration};

use alloy_primitives::{Address, B256, U256};
use serde::Serialize;
use tower_x402::{
    Asset, Usdc, client::key, facilitator::BatchSettler, permit2, signers::PrivateKeySigner, vouchers::Escrow,
};
use x402_devnet::{BlockTime, Devnet, DevnetPort};

use crate::{error::Error, output, signals::Signals, values};

/// The keys of the chain's accounts: those that Foundry's anvil has, too. Everybody knows them.
const PAYER_KEY: &str = "0xac0974bec39a17e36ba4a6b4d238ff944bacb478cbed5efcae784d7bf4f2ff80";
const PAYEE_KEY: &str = "0x59c6995e998f97a5a0044966f0945389dc9e86dae88c7a8412f4603b6b78690d";
const SETTLEMENT_KEY: &str = "0x5de4111afa1a4b94908f83103eb1f1706367c2e68ca870fc3fb9a804cdab365a";
const CHANNELS_KEY: &str = "0x7c852118294e51e653712a81e05800f419141751be58f605c371e15141b007a6";
const KEYS: [&str; 4] = [PAYER_KEY, PAYEE_KEY, SETTLEMENT_KEY, CHANNELS_KEY];
/// The ether of the keys that send transactions: a hundred, in wei.
const GAS_TANK: u128 = 100_000_000_000_000_000_000;
/// The payer's USDC: $1000.
const PURSE: Usdc = Usdc::from_atomic(1_000_000_000);

/// Starts a chain in this process, for trying things out: with USDC at its address on Base Sepolia, the contract that settles many
/// payments at once, and that of payment channels.
///
/// Prints the keys and addresses to copy, and serves JSON-RPC until it is stopped. Its money is worth nothing and its keys are
/// public: never send anything to these addresses on another chain.
#[derive(Debug, clap::Args)]
pub(crate) struct Command {
    /// The address to serve JSON-RPC on; port 0 for any free one. Whoever reaches it can mint its USDC
    #[arg(long, default_value = "127.0.0.1:8545")]
    listen: String,
    /// The chain id
    #[arg(long, value_name = "N", default_value_t = 84_532)]
    chain_id: u64,
    /// Make a block every N milliseconds, as Base does every 200 [default: a block for each transaction]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=600_000))]
    block_time_ms: Option<u64>,
    /// Give this account this much USDC, such as 0x…=$5; repeatable
    #[arg(long, value_name = "ADDR=AMOUNT", value_parser = gift)]
    fund: Vec<(Address, Usdc)>,
    /// Print one JSON line when ready, and nothing else on standard output
    #[arg(long)]
    json: bool,
}

fn gift(text: &str) -> Result<(Address, Usdc), String> {
    let (account, amount) = text.split_once('=').ok_or("expected an address, = and an amount, such as 0x…=$5")?;
    Ok((values::account(account)?, amount.parse().map_err(|error| format!("{error}"))?))
}

impl Command {
    pub(crate) async fn run(self) -> Result<(), Error> {
        let mut signals = Signals::catch()?;
        let mut builder = Devnet::builder().chain_id(self.chain_id);
        if let Some(period) = self.block_time_ms {
            builder = builder.block_time(BlockTime::Every(Duration::from_millis(period)));
        }
        let local = Local::open(builder.start().await?, &self.listen).await?;
        for (account, amount) in &self.fund {
            local.devnet.mint(*account, *amount)?;
        }
        match self.json {
            true => output::line(serde_json::to_string(&local.facts()).unwrap_or_default()),
            false => output::line(Shown(&local)),
        }
        signals.next().await;
        Ok(())
    }
}

/// A chain in this process, with accounts that hold what they need.
pub(crate) struct Local {
    pub(crate) devnet: Devnet,
    pub(crate) settlement_key: PrivateKeySigner,
    pub(crate) channels_key: PrivateKeySigner,
    pub(crate) payee: Address,
    payer: Address,
    port: DevnetPort,
}

/// The facts of the chain, for programs.
#[derive(Serialize)]
pub(crate) struct Facts {
    rpc_url: String,
    network: String,
    chain_id: u64,
    asset: String,
    asset_name: String,
    asset_version: String,
    batch_settler: String,
    channel_escrow: String,
    permit2: String,
    payer: String,
    payer_private_key: &'static str,
    payee: String,
    payee_private_key: &'static str,
    settlement_address: String,
    settlement_private_key: &'static str,
    channels_address: String,
    channels_private_key: &'static str,
}

impl Local {
    /// Gives the chain's accounts what they need, and serves the chain on a port.
    pub(crate) async fn open(devnet: Devnet, listen: &str) -> Result<Self, Error> {
        let [payer, payee, settlement_key, channels_key] = KEYS.map(key::from_hex);
        let of = |key: Result<PrivateKeySigner, _>| key.map_err(|source| Error::Key { role: "the devnet", source });
        let (settlement_key, channels_key) = (of(settlement_key)?, of(channels_key)?);
        let (payer, payee) = (of(payer)?.address(), of(payee)?.address());
        for account in [settlement_key.address(), channels_key.address()] {
            devnet.fund(account, U256::from(GAS_TANK));
        }
        devnet.mint(payer, PURSE)?;
        devnet.execute(Address::ZERO, BatchSettler::DEPLOYER, BatchSettler::deployment())?;
        let port = devnet.serve(listen).await.map_err(|source| Error::Listen {
            flag: "--listen",
            address: listen.into(),
            source,
        })?;
        Ok(Self { devnet, settlement_key, channels_key, payee, payer, port })
    }

    pub(crate) fn rpc_url(&self) -> String {
        self.port.url().to_string()
    }

    pub(crate) fn facts(&self) -> Facts {
        let Asset { network, address, name, version, .. } = self.devnet.asset();
        Facts {
            rpc_url: self.rpc_url(),
            network: network.to_string(),
            chain_id: network.chain_id(),
            asset: address.to_string(),
            asset_name: name,
            asset_version: version,
            batch_settler: BatchSettler::ADDRESS.to_string(),
            channel_escrow: Escrow::ADDRESS.to_string(),
            permit2: permit2::PERMIT2.to_string(),
            payer: self.payer.to_string(),
            payer_private_key: PAYER_KEY,
            payee: self.payee.to_string(),
            payee_private_key: PAYEE_KEY,
            settlement_address: self.settlement_key.address().to_string(),
            settlement_private_key: SETTLEMENT_KEY,
            channels_address: self.channels_key.address().to_string(),
            channels_private_key: CHANNELS_KEY,
        }
    }

    /// Returns the command that makes a payer of this chain out of a shell.
    pub(crate) const fn export_payer() -> (&'static str, &'static str) {
        ("PAYER_PRIVATE_KEY", PAYER_KEY)
    }
}

/// Returns `true` if everybody knows the key of this account, because a devnet has it.
pub(crate) fn is_public(account: Address) -> bool {
    KEYS.into_iter().filter_map(|text| key::from_hex(text).ok()).any(|key| key.address() == account)
}

/// The chain as a person reads it.
struct Shown<'a>(&'a Local);

impl fmt::Display for Shown<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let facts = self.0.facts();
        writeln!(
            f,
            "A chain in this process, for trying things out. Its money is worth nothing; its keys are public.\n"
        )?;
        writeln!(f, "  node              {}", facts.rpc_url)?;
        writeln!(f, "  chain             {} (chain id {})", facts.network, facts.chain_id)?;
        writeln!(f, "  USDC              {} ({}, version {})", facts.asset, facts.asset_name, facts.asset_version)?;
        writeln!(f, "  batch settler     {}", facts.batch_settler)?;
        writeln!(f, "  channel escrow    {}", facts.channel_escrow)?;
        writeln!(f, "  Permit2           {}", facts.permit2)?;
        writeln!(f, "  payer             {} with {PURSE}", facts.payer)?;
        writeln!(f, "  payee             {}", facts.payee)?;
        writeln!(f, "  settlement key of {}", facts.settlement_address)?;
        writeln!(f, "  channels key of   {}\n", facts.channels_address)?;
        writeln!(f, "To charge:\n")?;
        writeln!(f, "  export X402_RPC_URL={}", facts.rpc_url)?;
        writeln!(f, "  export SETTLEMENT_PRIVATE_KEY={}", facts.settlement_private_key)?;
        writeln!(f, "  export CHANNELS_PRIVATE_KEY={}", facts.channels_private_key)?;
        let network = match facts.chain_id {
            84_532 => String::new(),
            _ => format!(
                " --network {} \\\n    --asset {} --asset-name '{}' --asset-version {}",
                facts.network, facts.asset, facts.asset_name, facts.asset_version
            ),
        };
        writeln!(
            f,
            "  x402 charge --upstream http://127.0.0.1:8000 --price '$0.001' --pay-to {}{network}\n",
            facts.payee
        )?;
        writeln!(f, "To pay:\n")?;
        writeln!(f, "  export PAYER_PRIVATE_KEY={}", facts.payer_private_key)?;
        writeln!(f, "  x402 pay http://127.0.0.1:4021/{network}\n")?;
        writeln!(f, "To give somebody $1 (1000000 units):\n")?;
        writeln!(f, "  curl {} -H 'content-type: application/json' \\", facts.rpc_url)?;
        writeln!(
            f,
            "    -d '{{\"jsonrpc\": \"2.0\", \"id\": 1, \"method\": \"devnet_mint\", \"params\": [\"0x…\", \"0xf4240\"]}}'\n"
        )?;
        write!(f, "Ready. Stop it with Ctrl-C.")
    }
}

/// A transaction hash, an address or nothing, as it is shown.
pub(crate) fn or_none(hash: Option<B256>) -> String {
    hash.map_or_else(|| "none".to_owned(), |hash| hash.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_keys_are_those_that_anvil_prints() {
        let accounts = KEYS.map(|text| key::from_hex(text).unwrap().address().to_string());
        assert_eq!(
            accounts,
            [
                "0xf39Fd6e51aad88F6F4ce6aB8827279cffFb92266",
                "0x70997970C51812dc3A010C7d01b50e0d17dc79C8",
                "0x3C44CdDdB6a900fa2b585dd299e03d12FA4293BC",
                "0x90F79bf6EB2c4f870365E785982E1f101E93b906",
            ]
        );
        assert!(is_public(accounts[0].parse().unwrap()) && !is_public(Address::ZERO));
    }

    #[tokio::test]
    async fn the_chain_has_what_it_prints() {
        let local = Local::open(Devnet::start().await.unwrap(), "127.0.0.1:0").await.unwrap();
        assert_eq!(local.devnet.balance_of(local.payer).unwrap(), PURSE);
        let shown = Shown(&local).to_string();
        for text in [&local.rpc_url(), PAYER_KEY, SETTLEMENT_KEY, &BatchSettler::ADDRESS.to_string()] {
            assert!(shown.contains(text), "{text}");
        }
    }
}
