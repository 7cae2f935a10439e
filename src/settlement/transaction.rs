//! Transactions of the settlement key.

use std::time::Duration;

use alloy_consensus::{SignableTransaction, TxEip1559, TxEnvelope};
use alloy_eips::eip2718::Encodable2718;
use alloy_primitives::{Address, B256, Bytes, TxKind};
use tokio::time::timeout;

use super::{engine::Engine, nonce_manager::NonceManager};
use crate::{
    chain::{fees::Fees, transfer},
    settlement::FacilitatorError,
};

/// What a simulation may fall short of: it reads the token's storage before the transfer, which makes that cheaper, and the
/// payee's balance may be gone by the time of the real one. What is not used is not paid for.
const GAS_MARGIN: u64 = 60_000;
/// How long a signer may take. It may be a service, and while it is asked, a nonce and a place in the window wait with the caller.
const SIGN_LIMIT: Duration = Duration::from_secs(5);

/// A signed transaction.
pub(super) struct Signed {
    pub(super) raw: Bytes,
    pub(super) hash: B256,
}

impl Engine {
    pub(super) fn transaction(&self, nonce: u64, fees: Fees, gas_limit: u64, to: Address, input: Bytes) -> TxEip1559 {
        TxEip1559 {
            chain_id: self.network.chain_id(),
            nonce,
            gas_limit,
            max_fee_per_gas: fees.max_fee,
            max_priority_fee_per_gas: fees.tip,
            to: TxKind::Call(to),
            input,
            ..TxEip1559::default()
        }
    }

    pub(super) async fn sign(
        &self,
        lane: &NonceManager,
        mut transaction: TxEip1559,
    ) -> Result<Signed, FacilitatorError> {
        let signing = timeout(SIGN_LIMIT, lane.signer().sign_transaction(&mut transaction)).await;
        let is_late = signing.is_err();
        // A signer's error may quote what it was asked to sign, or where its key service is.
        let Ok(Ok(signature)) = signing else {
            tracing::error!(account = %lane.account(), is_late, "the settlement key's signer failed");
            return Err(FacilitatorError::Unreachable {
                what: "the settlement key's signer",
                retry_after: Duration::from_secs(5),
            });
        };
        let envelope = TxEnvelope::from(transaction.into_signed(signature));
        Ok(Signed { hash: *envelope.tx_hash(), raw: envelope.encoded_2718().into() })
    }

    pub(super) fn gas_limit(&self, calldata: &[u8], simulated: Option<u64>) -> u64 {
        let call = simulated.map_or(self.gas_cap, |gas| gas.saturating_add(gas / 8).min(self.gas_cap));
        transfer::intrinsic_gas(calldata).saturating_add(call).saturating_add(GAS_MARGIN)
    }
}
