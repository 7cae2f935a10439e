//! The payments of a transaction, and the call that makes them.

use alloy_primitives::{Address, B256};

use super::{
    load::{Call, Load},
    queue::QueuedPayment,
};
use crate::{
    chain::{
        batch::{self, GasLimit},
        batch_settler::BatchSettler,
        permit, transfer,
    },
    payment::{PaymentKey, SettlementOutcome},
};

/// Gas that a real transfer may use beyond a simulation: the simulation reads the token's storage first, which makes the transfer cheaper,
/// and the payee's balance may be zero by then. Unused gas is not paid for.
const GAS_MARGIN: u64 = 60_000;

/// The gas that the token may use.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GasCaps {
    /// For a payment that is settled alone.
    pub(crate) alone: u64,
    /// For a payment in a batch.
    pub(crate) in_batch: u32,
}

/// Payments that are settled in one transaction. Those that are left out of it have been answered.
pub(super) struct Transfers {
    pub(super) payments: Vec<QueuedPayment>,
    gas: GasCaps,
}

impl Transfers {
    pub(super) fn new(mut payments: Vec<QueuedPayment>, gas: GasCaps) -> Self {
        payments.iter_mut().for_each(|queued| queued.attempts += 1);
        Self { payments, gas }
    }

    fn gas_limit(&self, calldata: &[u8], simulated: Option<u64>) -> u64 {
        let call = simulated.map_or(self.gas.alone, |gas| gas.saturating_add(gas / 8).min(self.gas.alone));
        transfer::intrinsic_gas(calldata).saturating_add(call).saturating_add(GAS_MARGIN)
    }
}

impl Load for Transfers {
    // A payment brings in little.
    const MAX_REPLACEMENTS: usize = 5;
    // Its caller waits: the first replacement must be in time.
    const COUNTS_BROADCAST: bool = true;

    /// Returns the call that makes the payments: of the token for one payment, of the batch settler for several.
    fn call(&self) -> Call {
        if let [queued] = &self.payments[..]
            && let Some(permit) = queued.payment.terms().permit()
        {
            let input = permit::calldata(&queued.payment, &permit);
            return Call { to: permit.spender, gas_limit: self.gas_limit(&input, queued.verified.gas), input };
        }
        if let [queued] = &self.payments[..] {
            let input = transfer::calldata(queued.payment.authorization(), queued.payment.signature());
            return Call { to: queued.expected().token, gas_limit: self.gas_limit(&input, queued.verified.gas), input };
        }
        let mut gas = GasLimit::new(self.gas.in_batch);
        for queued in &self.payments {
            gas.admit(queued.verified.gas);
        }
        let entries: Vec<_> = self.payments.iter().filter_map(|queued| queued.batch_entry(self.gas.in_batch)).collect();
        let token = self.payments.first().map_or(Address::ZERO, |queued| queued.expected().token);
        Call {
            to: BatchSettler::ADDRESS,
            input: batch::encode(token, self.gas.in_batch, &entries),
            gas_limit: gas.get(),
        }
    }

    fn payments(&self) -> &[QueuedPayment] {
        &self.payments
    }

    fn leave_out(&mut self, keys: &[PaymentKey]) -> Vec<QueuedPayment> {
        let (others, kept) = self.payments.drain(..).partition(|queued| keys.contains(queued.key()));
        self.payments = kept;
        others
    }

    fn signed(&mut self, transaction: B256) {
        for queued in &mut self.payments {
            queued.journalled.push(transaction);
            tracing::debug!(parent: &queued.span, %transaction, "signed");
        }
    }

    fn refused(&mut self, transaction: B256, has_removed: bool) {
        if has_removed {
            self.payments.iter_mut().for_each(|queued| queued.ineffective.push(transaction));
        }
    }

    fn must_wait(&mut self) {
        // The queue bounds for how long.
        self.payments.iter_mut().for_each(|queued| queued.attempts = queued.attempts.saturating_sub(1));
    }

    fn must_be_alone(&mut self) -> bool {
        let are_several = self.payments.len() > 1;
        for queued in self.payments.iter_mut().filter(|_| are_several) {
            // As if it had not been tried: it may have to wait for a block that pays for it.
            (queued.is_alone, queued.attempts) = (true, 0);
        }
        are_several
    }

    fn lost_nonce(&mut self, is_late: bool) {
        self.payments.iter_mut().for_each(QueuedPayment::lost_nonce);
        if is_late {
            // Callers that were told `Unknown` ask again, or reconciliation does, and decide what happens next.
            self.payments.retain(QueuedPayment::is_awaited);
        }
    }

    fn is_awaited(&self) -> bool {
        self.payments.iter().any(QueuedPayment::is_awaited)
    }

    fn tell_unknown(&mut self, transaction: B256) {
        for queued in &mut self.payments {
            drop(queued.answer(Ok(SettlementOutcome::Unknown { transaction: Some(transaction) })));
        }
    }

    fn is_patient(&self) -> bool {
        !self.is_awaited()
    }
}
