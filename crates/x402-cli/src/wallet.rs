//! `x402 wallet`: a payer's key, balance, approval for Permit2, open payments and channels.

use std::{
    ffi::OsStr,
    fs::{self, File, OpenOptions},
    io::{self, Write as _},
    path::{Path, PathBuf},
};

use alloy_primitives::{U256, hex, utils::format_ether};
use alloy_provider::{
    ProviderBuilder,
    network::{EthereumWallet, TransactionBuilder as _},
};
use rand::rngs::OsRng;
use serde_json::{Value, json};
use tower_x402::{
    Usdc,
    client::{Budget, Reconciliation, reconcile, reconcile_channels, reconcile_with_servers},
    permit2,
    signers::PrivateKeySigner,
};
use zeroize::Zeroizing;

use crate::{
    chain::{TransactionRequest, send},
    error::{Error, Sentence},
    keys::{self, Role},
    node::Node,
    output,
    purse::{PurseFlags, silent},
};

/// The ether that a devnet gives to a payer without any: one, in wei.
const GAS_OF_A_DEVNET: &str = "0xde0b6b3a7640000";

/// Shows what a payer has: its address, with --rpc-url its balance, and with --journal what it spent and what is open.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
EXAMPLES
  x402 wallet new payer.key
  PAYER_KEYSTORE_PASSWORD_FILE=password x402 wallet new --encrypted payer.json
  PAYER_PRIVATE_KEY_FILE=payer.key x402 wallet show --network base --rpc-url https://mainnet.base.org --journal ~/.x402.jsonl
  x402 wallet approve '$5' --network base --rpc-url https://mainnet.base.org     before offers of at most a price (upto) are paid
  x402 wallet reconcile --journal ~/.x402.jsonl --rpc-url https://…     finds out what became of payments without an answer")]
pub(crate) struct Command {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, clap::Subcommand)]
enum What {
    /// Make a key, and write it to a file that only its owner may read
    New {
        /// The file, which must not exist
        file: PathBuf,
        /// Write a keystore file (version 3), encrypted with the password in PAYER_KEYSTORE_PASSWORD or PAYER_KEYSTORE_PASSWORD_FILE
        #[arg(long)]
        encrypted: bool,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Show address, balance, what was spent and what is open
    Show {
        /// Print JSON
        #[arg(long)]
        json: bool,
        #[command(flatten)]
        purse: Box<PurseFlags>,
    },
    /// Let Permit2 move this much of the payer's USDC in all, from now on. Offers of at most a price (scheme upto) need it
    ///
    /// Whoever gets a signature for Permit2 out of the payer can take what is approved: so approve what it should spend for a while. $0 takes
    /// the approval back. A transaction of the payer's, which needs ETH for gas.
    Approve {
        /// The amount, such as '$5'
        amount: Usdc,
        /// Print one JSON line
        #[arg(long)]
        json: bool,
        #[command(flatten)]
        purse: Box<PurseFlags>,
    },
    /// Ask the chain (with --rpc-url) or the sellers what became of payments that are open
    Reconcile {
        /// Print one JSON line
        #[arg(long)]
        json: bool,
        #[command(flatten)]
        purse: Box<PurseFlags>,
    },
}

impl Command {
    pub(crate) async fn run(self) -> Result<(), Error> {
        match self.what {
            What::New { file, encrypted, json } => new(file, encrypted, json),
            What::Show { json, purse } => show(&purse, json).await,
            What::Approve { amount, json, purse } => approve(&purse, amount, json).await,
            What::Reconcile { json, purse } => look_back(&purse, json).await,
        }
    }
}

fn new(path: PathBuf, is_encrypted: bool, json: bool) -> Result<(), Error> {
    let password = if is_encrypted { Some(keys::keystore_password(Role::PAYER)?) } else { None };
    if password.as_ref().is_some_and(|password| password.is_empty()) {
        return Err(Error::setting("PAYER_KEYSTORE_PASSWORD", "is empty, and would protect nothing"));
    }
    let Some(shown) = path.to_str() else {
        return Err(Error::setting("FILE", "its name is not UTF-8: choose one that can be printed"));
    };
    let key = PrivateKeySigner::random();
    let mut options = OpenOptions::new();
    options.write(true).create_new(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    let refused = |source| Error::Write { path: path.clone(), source };
    let file = options.open(&path).map_err(refused)?;
    let written = match &password {
        Some(password) => write_keystore(&path, &key, password),
        None => write_key(&file, &key),
    };
    if let Err(source) = written.and_then(|()| file.sync_all()) {
        // It is ours, and has no key in it.
        let _ = fs::remove_file(&path);
        return Err(refused(source));
    }
    match json {
        true => output::line(json!({ "address": key.address().to_string(), "file": shown })),
        false => output::line(key.address()),
    }
    match password {
        Some(_) => {
            output::remark(format_args!("The key is in {shown}. It is of no use without the password: keep both."))
        }
        None => output::remark(format_args!(
            "The key is in {shown}. Whoever has it has the money: keep a copy where nobody else reads it."
        )),
    }
    Ok(())
}

fn write_key(mut file: &File, key: &PrivateKeySigner) -> io::Result<()> {
    let text = Zeroizing::new(hex::encode_prefixed(key.to_bytes()) + "\n");
    file.write_all(text.as_bytes())
}

/// Writes a keystore over a file, whose permissions stay.
fn write_keystore(path: &Path, key: &PrivateKeySigner, password: &str) -> io::Result<()> {
    let name = path.file_name().and_then(OsStr::to_str).ok_or(io::ErrorKind::InvalidFilename)?;
    let directory = path.parent().unwrap_or(Path::new(""));
    PrivateKeySigner::encrypt_keystore(directory, &mut OsRng, key.to_bytes(), password, Some(name))
        .map(drop)
        .map_err(io::Error::other)
}

async fn show(purse: &PurseFlags, json: bool) -> Result<(), Error> {
    let address = keys::require(Role::PAYER, &purse.key).await?.address();
    let mut facts = json!({ "address": address.to_string() });
    if let Some(url) = &purse.chain.rpc_url {
        let node = Node::new(url)?;
        let asset = purse.asset_at(&node).await?;
        let units = node.balance(asset.address, address).await.map_err(silent)?;
        let approved = node.approved(asset.address, address).await.map_err(silent)?;
        let ether = node.ether(address).await.map_err(silent)?;
        facts["network"] = asset.network.to_string().into();
        facts["units"] = units.to_string().into();
        facts["usdc"] = Usdc::try_from(units).map_or(Value::Null, |usdc| usdc.to_string().into());
        facts["ether"] = format_ether(ether).into();
        facts["approved"] = match Usdc::try_from(approved) {
            Ok(approved) => approved.to_string().into(),
            Err(_) => "everything".into(),
        };
    }
    if purse.journal.is_some() {
        let budget = Budget::builder().journal(purse.open_journal()?).build();
        let open: Vec<_> = budget.journal().unresolved();
        facts["spent"] = budget.spent().to_string().into();
        facts["reserved"] = budget.reserved().to_string().into();
        facts["in_escrow"] = budget.in_escrow().to_string().into();
        facts["channels"] = budget.journal().channels().len().into();
        let entry = |entry: &tower_x402::client::JournalEntry| {
            json!({
                "amount": entry.amount.to_string(), "pay_to": entry.pay_to.to_string(), "nonce": entry.nonce, "signed_at": entry.signed_at,
                "valid_before": entry.valid_before,
            })
        };
        facts["open"] = open.iter().map(entry).collect();
    }
    if json {
        output::line(facts);
        return Ok(());
    }
    for (name, value) in facts.as_object().into_iter().flatten() {
        match value {
            Value::String(text) => output::line(format_args!("{name:<10} {text}")),
            Value::Array(items) => {
                output::line(format_args!("{name:<10} {}", items.len()));
                items.iter().for_each(|item| output::line(format_args!("           {item}")));
            }
            other => output::line(format_args!("{name:<10} {other}")),
        }
    }
    Ok(())
}

/// Lets Permit2 move this much of the payer's money.
async fn approve(purse: &PurseFlags, amount: Usdc, json: bool) -> Result<(), Error> {
    let key = keys::require(Role::PAYER, &purse.key).await?;
    let (payer, url) = (key.address(), purse.chain.node()?);
    let node = Node::new(url)?;
    let asset = purse.asset_at(&node).await?;
    // A devnet gives gas to whoever asks; any other node refuses.
    if node.ether(payer).await.map_err(silent)?.is_zero()
        && node.call::<Value>("devnet_fund", json!([payer, GAS_OF_A_DEVNET])).await.is_err()
    {
        return Err(Error::Failed {
            what: format!("{payer} has no ETH for gas"),
            advice: "Send it a little ETH: an approval is a transaction of its own.",
        });
    }
    let provider = ProviderBuilder::new().wallet(EthereumWallet::from(key)).connect_http(url.to_url("--rpc-url")?);
    let approval =
        TransactionRequest::default().with_to(asset.address).with_input(permit2::approval(U256::from(amount.atomic())));
    let sending = send(&provider, approval, "Check --asset: the token may not have an approval.");
    let hash = output::progress("waiting for a block", sending).await?;
    match json {
        true => output::line(json!({
            "approved": amount.to_string(), "payer": payer.to_string(), "spender": permit2::PERMIT2.to_string(),
            "asset": asset.address.to_string(), "network": asset.network.to_string(), "transaction": hash,
        })),
        false => output::line(format_args!(
            "Permit2 may move {amount} of {payer} on {} from now on, since {hash}",
            asset.network
        )),
    }
    Ok(())
}

async fn look_back(purse: &PurseFlags, json: bool) -> Result<(), Error> {
    if purse.journal.is_none() {
        return Err(Error::setting("--journal", "give the journal that the payments were made with"));
    }
    let budget = Budget::builder().journal(purse.open_journal()?).build();
    let unclear = |what: String| Error::Failed { what, advice: "What is open stays reserved: try again later." };
    let looking = async {
        match &purse.chain.rpc_url {
            Some(url) => {
                let provider = ProviderBuilder::new().connect_http(url.to_url("--rpc-url")?);
                let channels = reconcile_channels(&budget, &provider)
                    .await
                    .map_err(|error| unclear(Sentence(&error).to_string()))?;
                for (channel, finding) in channels.findings {
                    output::warn(format_args!("{channel}: {finding}"));
                }
                reconcile(&budget, &provider).await.map_err(|error| unclear(Sentence(&error).to_string()))
            }
            None => reconcile_with_servers(&budget, purse.http()).await.map_err(Error::Http),
        }
    };
    let Reconciliation { paid, void, open, .. } = output::progress("asking what became of payments", looking).await?;
    match json {
        true => output::line(json!({ "paid": paid, "void": void, "open": open })),
        false => output::line(format_args!("{paid} were paid, {void} are void, {open} are still open")),
    }
    Ok(())
}
