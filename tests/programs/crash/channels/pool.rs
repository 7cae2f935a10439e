//! Transactions of the seller as its node gets them. One may stay in the pool: from then on no block is made.

use std::{
    collections::BTreeSet,
    sync::{Arc, Mutex},
    time::Duration,
};

use alloy_consensus::{Transaction as _, TxEnvelope, transaction::SignerRecoverable as _};
use alloy_eips::Decodable2718 as _;
use alloy_primitives::{Address, B256, Bytes};
use alloy_provider::Provider as _;
use alloy_sol_types::SolCall as _;
use tokio::{
    sync::watch,
    time::{Instant, sleep},
};
use tower_x402::vouchers::{Escrow, abi::BatchSettlement};
use x402_devnet::{Devnet, Fault, RpcCall};

use super::super::points::Point;

/// The start of the names of points at which a transaction is in the pool.
pub(crate) const POOL: &str = "pool: ";
/// For how long no block is made after the next process has started. Transactions that an earlier process left are waited for for 8 s.
pub(crate) const HOLDS: [Duration; 2] = [Duration::from_secs(2), Duration::from_secs(10)];

/// The pool of a node, as far as sellers fill it.
pub(crate) struct Pool {
    sellers: [Address; 2],
    sent: Arc<Mutex<Vec<Sent>>>,
    held: watch::Receiver<bool>,
    devnet: Devnet,
}

/// A transaction that the node was given.
#[derive(Clone, Debug)]
struct Sent {
    name: &'static str,
    hash: B256,
    by: Address,
    nonce: u64,
    input: Bytes,
}

impl Pool {
    /// Watches what sellers send. At the point `stop` their transaction stays in the pool.
    pub(crate) fn watch(devnet: &Devnet, sellers: [Address; 2], stop: Option<Point>) -> Self {
        let sent = Arc::new(Mutex::new(Vec::<Sent>::new()));
        let (hold, held) = watch::channel(false);
        let (all, chain) = (sent.clone(), devnet.clone());
        devnet.faults().set(move |call| {
            let Some(new) = read(call).filter(|new| sellers.contains(&new.by)) else { return Fault::None };
            let mut sent = all.lock().unwrap();
            if sent.iter().all(|old| old.hash != new.hash) {
                let name = format!("{POOL}{}", new.name);
                let earlier = sent.iter().filter(|old| old.name == new.name).count();
                sent.push(new);
                if stop.as_ref() == Some(&Point { name, occurrence: earlier as u32 + 1 }) {
                    chain.stall(true);
                    hold.send_replace(true);
                }
            }
            Fault::None
        });
        Self { sellers, sent, held, devnet: devnet.clone() }
    }

    /// Waits until the transaction is in the pool, if it is to stay there.
    pub(crate) async fn held(&self) {
        if self.held.clone().wait_for(|held| *held).await.is_err() {
            return std::future::pending().await;
        }
        let started = Instant::now();
        while started.elapsed() < Duration::from_secs(5) {
            for seller in self.sellers {
                let provider = self.devnet.provider();
                let mined = provider.get_transaction_count(seller).await.expect("the devnet answers");
                if provider.get_transaction_count(seller).pending().await.expect("the devnet answers") > mined {
                    return;
                }
            }
            sleep(Duration::from_millis(5)).await;
        }
    }

    /// Returns the points at which transactions were in the pool, in order.
    pub(crate) fn sent(&self) -> Vec<String> {
        self.sent.lock().unwrap().iter().map(|sent| format!("{POOL}{}", sent.name)).collect()
    }

    /// Returns the transactions that reverted, and those beyond the first that make one and the same deposit or refund. Replacements with
    /// the same account nonce are one transaction.
    pub(crate) async fn in_vain(&self, devnet: &Devnet) -> Vec<String> {
        let (mut found, mut calls) = (Vec::new(), BTreeSet::new());
        let mut nonces = BTreeSet::new();
        let sent = self.sent.lock().unwrap().clone();
        for sent in sent {
            let receipt = devnet.provider().get_transaction_receipt(sent.hash).await.expect("the devnet answers");
            if receipt.is_some_and(|receipt| !receipt.status()) {
                found.push(format!("{} reverted", sent.name));
            }
            let is_new = nonces.insert((sent.by, sent.nonce));
            if is_new && matches!(sent.name, "deposit" | "refund") && !calls.insert(sent.input) {
                found.push(format!("{} sent again", sent.name));
            }
        }
        found
    }
}

fn read(call: &RpcCall<'_>) -> Option<Sent> {
    if !call.method.starts_with("eth_sendRawTransaction") {
        return None;
    }
    let raw: Bytes = call.params.first()?.as_str()?.parse().ok()?;
    let transaction = TxEnvelope::decode_2718_exact(&raw).ok()?;
    let name = match *transaction.input().first_chunk::<4>()? {
        _ if transaction.to() != Some(Escrow::ADDRESS) => return None,
        BatchSettlement::depositCall::SELECTOR => "deposit",
        BatchSettlement::refundWithSignatureCall::SELECTOR | BatchSettlement::multicallCall::SELECTOR => "refund",
        BatchSettlement::claimCall::SELECTOR | BatchSettlement::claimWithSignatureCall::SELECTOR => "claim",
        BatchSettlement::settleCall::SELECTOR => "settle",
        _ => "other",
    };
    let (by, nonce) = (transaction.recover_signer().ok()?, transaction.nonce());
    Some(Sent { name, hash: *transaction.tx_hash(), by, nonce, input: transaction.input().clone() })
}
