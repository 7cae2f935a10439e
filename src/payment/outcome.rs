//! Results of verifying and settling a payment.

use alloy_primitives::{B256, U256};

use crate::protocol::Reason;

/// What a verifier found, good for a few seconds.
#[derive(Clone, Copy, Debug, Default)]
pub struct Verified {
    /// The payer's balance, where the verifier leaves it to the ledger to compare it with what is in flight.
    pub funds: Option<Funds>,
    /// Gas that the transfer took in simulation.
    pub gas: Option<u64>,
    /// When, in Unix seconds.
    pub at: u64,
    /// Whether the payer has code, which judges the signature and is run when the payment is settled: such a payment gets a
    /// transaction of its own.
    pub contract_wallet: bool,
}

/// The payer's balance as observed at a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Funds {
    /// Atomic units.
    pub balance: U256,
    /// The block at which it was read.
    pub block: u64,
}

/// What became of a settlement.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The payee was paid.
    Settled {
        /// The transaction that paid.
        transaction: B256,
        /// Its block, if known.
        block: Option<u64>,
        /// This payment's share of what the transaction cost, in wei, if the facilitator paid for it and says so.
        fee: Option<U256>,
    },
    /// Not executed.
    Failed {
        /// Why.
        reason: Reason,
        /// The same for people.
        detail: String,
        /// The transaction that was included and did not pay, if there is one.
        transaction: Option<B256>,
        /// Whether it is proven that the authorization can never be executed any more. Without the proof it is only not
        /// executed *yet*.
        dead: bool,
    },
    /// It cannot be told yet.
    Unknown {
        /// The transaction that may pay, if there is one.
        transaction: Option<B256>,
    },
}
