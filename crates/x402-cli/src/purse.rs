//! The key, tokens, limits and journal of a payer, for `pay`, `proxy` and `wallet`.

use std::{path::PathBuf, time::Duration};

use alloy_rpc_client::RpcClient;
use reqwest_middleware::ClientWithMiddleware;
use tower_x402::{
    Asset, Network, Usdc,
    client::{
        Budget, BudgetBuilder, ChannelPolicy, Journal, OfferRefusal, Payer, PaymentError, PaymentMiddleware,
        PermitPolicy, Receipt, Refusal, RetryPolicy,
    },
    signers::PrivateKeySigner,
};

use crate::{
    chain::ChainFlags,
    error::{Error, Sentence},
    keys::KeyFlags,
    node::{Node, NodeError},
    output,
};

/// For how many payments to a payee no channel is opened, if it can be paid by transfer, too: the deposit costs it about as much gas.
const EXACT_FIRST: u64 = 3;

/// The flags of a payer.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct PurseFlags {
    #[command(flatten)]
    pub(crate) key: KeyFlags,
    #[command(flatten)]
    pub(crate) chain: ChainFlags,
    /// Record what is signed in this file. With it, an unclear payment is found again, and sellers that take vouchers are paid by
    /// voucher after a few transfers
    #[arg(long, value_name = "FILE", env = "X402_JOURNAL")]
    pub(crate) journal: Option<PathBuf>,
    /// The most times that a payment is sent while its outcome is unclear; the pauses double, from 0.2 to 30 seconds
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=50))]
    pub(crate) attempts: u32,
    /// The seconds to wait for the head of each answer, and for each pause in its body
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) timeout: u64,
}

impl PurseFlags {
    /// Returns the tokens to pay with: USDC on Base and Base Sepolia, unless a network is given.
    pub(crate) fn assets(&self) -> Result<Vec<Asset>, Error> {
        match self.chain.network {
            Some(_) => Ok(vec![self.chain.asset()?]),
            None if self.chain.asset.is_some() => Err(Error::setting("--asset", "say on which --network, too")),
            None => Ok([Network::BASE, Network::BASE_SEPOLIA].into_iter().filter_map(Network::usdc).collect()),
        }
    }

    pub(crate) fn open_journal(&self) -> Result<Journal, Error> {
        match &self.journal {
            Some(path) => Journal::open(path).map_err(Error::Journal),
            None => Ok(Journal::in_memory()),
        }
    }

    /// Returns the token to pay with on the chain of this node.
    pub(crate) async fn asset_at(&self, node: &Node) -> Result<Asset, Error> {
        let id = node.chain_id().await.map_err(silent)?;
        self.assets()?.into_iter().find(|asset| asset.network.chain_id() == id).ok_or_else(|| {
            let problem = format!("is a node of eip155:{id}, and no token is known there: see --network and --asset");
            Error::setting("--rpc-url", problem)
        })
    }

    /// Returns how permits (scheme `upto`) are paid: with a node, which shows what is approved for them and what was charged. Without one, or
    /// one that does not answer, they are not: a transfer might be offered, too, which needs no approval.
    async fn permits(&self) -> Result<Option<PermitPolicy>, Error> {
        let Some(url) = &self.chain.rpc_url else { return Ok(None) };
        match self.asset_at(&Node::new(url)?).await {
            Ok(asset) => {
                Ok(Some(PermitPolicy::default().node(asset.network, RpcClient::new_http(url.to_url("--rpc-url")?))))
            }
            Err(error) => {
                output::warn(format_args!("x402: nothing is paid by permit (upto): {}", Sentence(&error)));
                Ok(None)
            }
        }
    }

    /// Returns a payer with these limits. It pays by voucher only if there is a journal, since money in channels would be forgotten. Without
    /// a key it is a stranger, whose payments are not to be sent.
    pub(crate) async fn payer(&self, key: Option<PrivateKeySigner>, budget: Budget) -> Result<Payer, Error> {
        let escrow = budget.total();
        let permits = match (self.permits().await?, &key) {
            // What a stranger has approved says nothing.
            (Some(_), None) => Some(PermitPolicy::default()),
            (permits, _) => permits,
        };
        let builder = Payer::builder(key.unwrap_or_else(PrivateKeySigner::random)).budget(budget);
        let mut builder = self.assets()?.into_iter().fold(builder, |payer, asset| payer.asset(asset));
        if let Some(permits) = permits {
            builder = builder.permits(permits.clone()).upto(permits);
        }
        Ok(match self.journal {
            Some(_) => {
                let channels = ChannelPolicy::new().escrow_per_payee(escrow).escrow_total(escrow);
                builder.vouchers(channels.exact_first(EXACT_FIRST)).build()
            }
            None => builder.build(),
        })
    }

    /// Returns a client that pays.
    pub(crate) fn client(&self, payer: Payer) -> Result<ClientWithMiddleware, Error> {
        let timeout = Duration::from_secs(self.timeout);
        let retry = RetryPolicy::default().max_attempts(self.attempts).attempt_timeout(timeout);
        PaymentMiddleware::new(payer).retry(retry).client(self.http()).map_err(Error::Http)
    }

    pub(crate) fn http(&self) -> reqwest::ClientBuilder {
        reqwest::Client::builder()
            .connect_timeout(Duration::from_secs(self.timeout.min(10)))
            .read_timeout(Duration::from_secs(self.timeout))
            .user_agent(concat!("x402/", env!("CARGO_PKG_VERSION")))
    }
}

/// Returns the error of a node that was asked for something.
pub(crate) fn silent(error: NodeError) -> Error {
    Error::Failed { what: Sentence(&error).to_string(), advice: "Check --rpc-url, its key and the network." }
}

/// Returns a budget of this much on top of what the journal already holds.
pub(crate) fn budget_of_run(journal: Journal, amount: Usdc) -> BudgetBuilder {
    let before = Budget::builder().journal(journal.clone()).build();
    let sum = [before.reserved(), amount]
        .into_iter()
        .fold(before.spent(), |sum, more| sum.checked_add(more).unwrap_or(Usdc::MAX));
    Budget::builder().per_payment(amount).total(sum).journal(journal)
}

/// Returns an error as a sentence, without the request's URL, which may hold a token.
pub(crate) fn sentence(error: &PaymentError) -> String {
    match error {
        // Its cause names the URL.
        PaymentError::Unanswered { .. } => error.to_string(),
        error => Sentence(error).to_string(),
    }
}

/// Returns one sentence on what to do after a payment error.
pub(crate) fn advice(error: &PaymentError) -> &'static str {
    match error {
        PaymentError::Refused(
            Refusal::AbovePaymentLimit { .. } | Refusal::AboveTotalLimit { .. } | Refusal::AboveEscrowLimit { .. },
        ) => "Nothing was paid. Allow more, if it is worth that.",
        PaymentError::Refused(Refusal::AboveHostLimit { .. } | Refusal::AbovePayeeLimit { .. }) => {
            "Nothing was paid. Raise the bound of this host, if it is worth that."
        }
        PaymentError::Refused(Refusal::NoPayableOffer { reasons }) if reasons.iter().any(is_of_approval) => {
            "Nothing was paid. x402 wallet approve lets Permit2 move as much as you say."
        }
        PaymentError::Refused(Refusal::NoPayableOffer { reasons })
            if reasons.iter().any(|why| matches!(why, OfferRefusal::Permit { .. })) =>
        {
            "Nothing was paid. Give a node with --rpc-url: with one, permits are paid, too (x402 wallet approve)."
        }
        PaymentError::Refused(Refusal::NoPayableOffer { .. }) => {
            "Nothing was paid. Say with --network which network to pay on, or with --journal that it may be paid by voucher."
        }
        PaymentError::Refused(Refusal::ClockAhead { .. } | Refusal::ClockBehind { .. }) => {
            "Nothing was paid. Set the clock of this machine."
        }
        PaymentError::Refused(_) => "Nothing was paid.",
        PaymentError::Journal(_) => "Nothing was paid. Check the disk, and who may write to the journal.",
        PaymentError::Unanswered { .. } => {
            "It may have been paid. With --journal and --purchase, the same command asks again and pays once; x402 wallet shows what is open."
        }
        _ => "Nothing was paid.",
    }
}

fn is_of_approval(reason: &OfferRefusal) -> bool {
    matches!(reason, OfferRefusal::NotApproved { .. })
}

/// The facts of a receipt, for programs.
pub(crate) fn facts(receipt: Option<&Receipt>) -> serde_json::Value {
    let Some(receipt) = receipt else { return serde_json::json!({ "outcome": null }) };
    serde_json::json!({
        "outcome": receipt.outcome.as_str(),
        "amount": receipt.amount,
        "price": receipt.amount.to_string(),
        "transaction": receipt.transaction,
        "payer": receipt.payer.to_string(),
        "pay_to": receipt.pay_to.to_string(),
        "network": receipt.network.to_string(),
        "asset": receipt.asset.to_string(),
        "nonce": receipt.nonce,
        "reason": receipt.reason,
        "voucher": receipt.is_by_voucher(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_budget_of_a_run_is_on_top_of_what_was_spent_before() {
        let budget = budget_of_run(Journal::in_memory(), Usdc::from_atomic(5)).build();
        assert_eq!((budget.total(), budget.per_payment()), (Usdc::from_atomic(5), Usdc::from_atomic(5)));
    }
}
