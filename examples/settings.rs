//! Settings that the programs which charge and settle share: the ledger, the token, and keys of the environment.

use std::{fmt, path::PathBuf, str::FromStr, sync::Arc};

use alloy_primitives::Address;
use alloy_signer_local::PrivateKeySigner;
use anyhow::Context as _;
use tower_x402::{
    Asset, Network,
    client::key,
    ledger::{Ledger, MemoryLedger, PostgresLedger, SqliteLedger, channels::ChannelLedger},
};

/// Where a ledger is: `memory`, `sqlite:PATH`, or a URL of PostgreSQL, which may contain a password and is not shown.
#[derive(Clone, PartialEq, Eq)]
pub(crate) enum LedgerAt {
    Memory,
    Sqlite(PathBuf),
    Postgres(String),
}

/// One ledger, as payments and as channels.
pub(crate) struct Books {
    pub(crate) payments: Arc<dyn Ledger>,
    #[allow(dead_code, reason = "a facilitator keeps no books of channels")]
    pub(crate) channels: Arc<dyn ChannelLedger>,
}

impl Books {
    fn of(ledger: impl Ledger + ChannelLedger) -> Self {
        let ledger = Arc::new(ledger);
        Self { payments: ledger.clone(), channels: ledger }
    }
}

impl LedgerAt {
    pub(crate) async fn open(&self) -> anyhow::Result<Books> {
        Ok(match self {
            Self::Memory => Books::of(MemoryLedger::new()),
            Self::Sqlite(path) => {
                Books::of(SqliteLedger::open(path).await.with_context(|| format!("--ledger {self:?}"))?)
            }
            Self::Postgres(url) => {
                Books::of(PostgresLedger::connect(url).await.with_context(|| format!("--ledger {self:?}"))?)
            }
        })
    }
}

impl fmt::Debug for LedgerAt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Memory => f.write_str("memory"),
            Self::Sqlite(path) => write!(f, "sqlite:{}", path.display()),
            Self::Postgres(_) => f.write_str("postgres://…"),
        }
    }
}

impl FromStr for LedgerAt {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text.split_once(':') {
            None if text == "memory" => Ok(Self::Memory),
            Some(("sqlite", path)) if !path.is_empty() => Ok(Self::Sqlite(path.into())),
            Some(("postgres" | "postgresql", rest)) if rest.starts_with("//") => Ok(Self::Postgres(text.to_owned())),
            _ => Err("expected memory, sqlite:PATH or postgres://…"),
        }
    }
}

/// The token to be paid in.
#[derive(Debug, clap::Args)]
pub(crate) struct TokenFlags {
    /// The EIP-3009 token, with six decimals [default: the network's USDC]
    #[arg(long, value_name = "ADDR", requires_all = ["asset_name", "asset_version"])]
    asset: Option<Address>,
    /// The EIP-712 name of --asset
    #[arg(long, value_name = "NAME", requires = "asset")]
    asset_name: Option<String>,
    /// The EIP-712 version of --asset
    #[arg(long, value_name = "VERSION", requires = "asset")]
    asset_version: Option<String>,
}

impl TokenFlags {
    pub(crate) fn on(&self, network: Network) -> anyhow::Result<Asset> {
        match (self.asset, &self.asset_name, &self.asset_version) {
            (Some(address), Some(name), Some(version)) => {
                Ok(Asset::new(network, address, name.clone(), version.clone()))
            }
            _ => network.usdc().with_context(|| {
                format!("no USDC is known on {network}: give --asset, --asset-name and --asset-version")
            }),
        }
    }
}

/// Reads a private key from the environment, if there is one. Errors do not contain it.
pub(crate) fn private_key(name: &str) -> anyhow::Result<Option<PrivateKeySigner>> {
    match std::env::var_os(name) {
        Some(text) if !text.is_empty() => Ok(Some(key::from_env(name)?)),
        _ => Ok(None),
    }
}
