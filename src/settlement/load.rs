//! What a transaction is sent for: payments, a call, or nothing but its nonce.

use alloy_consensus::{Transaction as _, TxEip1559, TxEnvelope};
use alloy_primitives::{Address, B256, Bytes, TxKind};
use tokio::sync::watch;

use super::{
    FacilitatorError,
    accounts::{Account, FILLER_GAS},
    line::Urgency,
    queue::QueuedPayment,
};
use crate::{
    chain::{fees::Fees, node::Node, rpc::Receipt},
    payment::PaymentKey,
};

/// How often the transaction of one nonce is replaced. All later ones wait for it, so this is only to bound what is followed.
pub(super) const MAX_REPLACEMENTS: usize = 20;

/// What a transaction calls.
#[derive(Clone)]
pub(crate) struct Call {
    pub(crate) to: Address,
    pub(crate) input: Bytes,
    pub(crate) gas_limit: u64,
}

impl Call {
    /// A transfer of nothing to the account itself, which uses up a nonce.
    pub(super) fn filler(account: &Account) -> Self {
        Self { to: account.address(), input: Bytes::new(), gas_limit: FILLER_GAS }
    }

    /// Returns the call that a transaction makes, if it calls anybody.
    pub(super) fn of(transaction: &TxEnvelope) -> Option<Self> {
        let to = transaction.to()?;
        Some(Self { to, input: transaction.input().clone(), gas_limit: transaction.gas_limit() })
    }

    /// Returns a transaction that makes the call.
    pub(super) fn into_transaction(self, node: &Node, nonce: u64, fees: Fees) -> TxEip1559 {
        TxEip1559 {
            chain_id: node.network().chain_id(),
            nonce,
            gas_limit: self.gas_limit,
            max_fee_per_gas: fees.max_fee,
            max_priority_fee_per_gas: fees.tip,
            to: TxKind::Call(self.to),
            input: self.input,
            ..TxEip1559::default()
        }
    }
}

/// What the task that makes a call tells its callers.
#[derive(Clone, Debug)]
pub(super) enum Progress {
    Sending(Option<B256>),
    Included(Receipt),
    Failed(FacilitatorError),
}

/// A call under way, as those see it who ask for the same.
pub(super) struct SharedCall {
    pub(super) progress: watch::Receiver<Progress>,
    /// As urgent as the most urgent of them.
    pub(super) urgency: watch::Sender<Urgency>,
}

impl SharedCall {
    /// Lets the call be as urgent as this.
    pub(super) fn join(&self, urgency: Urgency) {
        self.urgency.send_if_modified(|known| {
            let is_more = urgency > *known;
            *known = urgency.max(*known);
            is_more
        });
    }
}

/// What a transaction is sent for: payments, or a call.
pub(super) trait Load: Send {
    /// It only uses up a nonce: this one, or none.
    const IS_FILLER: bool = false;
    /// It is a call, and no payments.
    const IS_CALL: bool = false;
    /// How often its transaction is replaced while no claim at risk waits for it.
    const MAX_REPLACEMENTS: usize = MAX_REPLACEMENTS;
    /// The time for which a node holds the broadcast counts towards the first check.
    const COUNTS_BROADCAST: bool = false;

    /// Returns the call to make.
    fn call(&self) -> Call;

    /// Returns what may be spent on it, in wei, even if gas costs more than the ceiling.
    fn worth(&self) -> u128 {
        0
    }

    /// Returns the payments that the call settles. They are journalled with it.
    fn payments(&self) -> &[QueuedPayment] {
        &[]
    }

    /// Removes and returns these payments.
    fn leave_out(&mut self, _: &[PaymentKey]) -> Vec<QueuedPayment> {
        Vec::new()
    }

    /// Notes that a transaction was signed and journalled, and is about to be sent.
    fn signed(&mut self, _transaction: B256) {}

    /// Notes that no node took the transaction. It may be sent again unless the journal `has_removed` it.
    fn refused(&mut self, _transaction: B256, _has_removed: bool) {}

    /// Notes that the ledger may keep a transaction of it that was not sent, even if that was never answered, and that is sent again then.
    fn may_be_kept(&mut self) {}

    /// Notes that it has to wait for the account's other transactions, which is no failed attempt.
    fn must_wait(&mut self) {}

    /// Notes that the account pays only for less. Returns `false` if it is one payment or call already, which cannot be divided.
    fn must_be_alone(&mut self) -> bool {
        false
    }

    /// Notes that another transaction took the nonce; `is_late` if that was found out while the transaction was followed.
    fn lost_nonce(&mut self, _is_late: bool) {}

    /// Returns `true` if somebody has to be told in time that the outcome is unknown.
    fn is_awaited(&self) -> bool {
        false
    }

    /// Tells those who wait that the outcome of this transaction is unknown.
    fn tell_unknown(&mut self, _transaction: B256) {}

    /// Returns `true` if the fees need not be compared at each check.
    fn is_patient(&self) -> bool {
        false
    }
}

/// Uses up a nonce that later transactions wait for.
pub(super) struct Filler(pub(super) Call);

impl Load for Filler {
    const IS_FILLER: bool = true;

    fn call(&self) -> Call {
        self.0.clone()
    }
}
