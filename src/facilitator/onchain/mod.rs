//! The facilitator that settles on a chain itself, over JSON-RPC.

mod builder;
mod chain_settings;
mod preflight;
mod wallets;

use std::{sync::Arc, time::Duration};

use alloy_primitives::{Address, B256, U256};
use async_trait::async_trait;
use tokio::time::{Instant, timeout};

#[cfg(feature = "remote")]
pub(super) use self::chain_settings::MAX_TRANSFER_GAS;
pub(super) use self::chain_settings::{ChainSettings, LONGEST, chain_setters};
use self::wallets::Wallets;
pub use self::{builder::OnchainFacilitatorBuilder, preflight::OnchainBuildError};
pub use crate::{chain::batch_settler::BatchSettler, settlement::costs::SettlementStats};
use crate::{
    facilitator::{Facilitator, FacilitatorError, Readiness, VerifyError, verification_label},
    ledger::{Ledger, Record},
    network::Network,
    payment::{Authenticity, Funds, PaymentKey, Prechecked, Rejection, SettlementOutcome, Terms, Verified},
    permit2::ACCOUNT_MISMATCH,
    protocol::{Reason, SupportedKind, SupportedResponse, TransferMethod},
    settlement::engine::Engine,
    telemetry,
    usdc::Usdc,
};

/// Verifies and settles EIP-3009 payments on one chain, with one or more settlement keys.
///
/// A settlement key pays for gas and holds no customer's money: a payment moves from payer to payee directly. Any alloy transaction
/// signer can be used, also a key in a KMS.
///
/// - **Verifying** takes one `eth_call`, which reads balance, nonce, pause, blacklist and domain, and simulates the transfer.
///   Payments verified within a millisecond of each other share a JSON-RPC batch. A node that refuses batches is asked one by one.
///   Behind one address there may be several nodes. A payment is refused only by a block as new as any that was seen; before it is
///   refused for lack of funds, the newest block is asked for twice.
/// - **Chains.** The chain's opcode `NUMBER` must return its own block number, since the block of a simulation is compared with those
///   of receipts. On other chains, such as Arbitrum, payments whose transaction reverted stay unknown and others are refused.
/// - **Settling** takes one more request if the node has `eth_sendRawTransactionSync` ([EIP-7966]). Otherwise it polls for the
///   receipt. Fees and nonces are cached.
/// - **Many payments per key.** Up to [`in_flight`](OnchainFacilitatorBuilder::in_flight) transactions wait for a block at
///   once; further ones queue. A nonce that was given back is used by the next payment, or else by a transfer of nothing to the account
///   itself, so that no transaction waits behind a gap. Other programs should not use the key; if one does, the nonces are
///   read from the chain again.
/// - **Nothing is verified that could not be settled**: while the queue is full, no key can pay for gas, gas is known to cost more than
///   the maximum, or the facilitator shuts down.
/// - **Payers that waste gas have to wait.** After two payments of a payer that were sent and did not pay, nothing is verified or sent
///   for it for 30 seconds, and twice as long after each further one. A permit that anybody may have executed counts only against others of
///   its payer like it, if somebody had it executed first, where nobody can see it.
/// - **Outcomes** come from the logs of receipts only: [`SettlementOutcome::Settled`] means `AuthorizationUsed` and exactly the
///   matching `Transfer` ([EIP-3009]). A transfer that somebody else sent counts if the payment was reserved here, and its authorization
///   seen unused, before its block.
/// - **Contract wallets** ([ERC-1271]) and accounts with delegated code ([EIP-7702]) can pay if the token asks the payer's
///   code, as USDC 2.2 does. Only the chain can check such signatures, and anybody can make up false ones. So few are checked at
///   a time, and payers seen without code are refused for a few seconds without a request.
///
/// ```no_run
/// # async fn example(key: impl alloy_network::TxSigner<alloy_primitives::Signature> + Send + Sync + 'static)
/// # -> Result<(), tower_x402::facilitator::OnchainBuildError> {
/// use tower_x402::{Network, facilitator::OnchainFacilitator};
///
/// let facilitator = OnchainFacilitator::builder()
///     .network(Network::BASE)
///     .rpc_url("https://mainnet.base.org")
///     .signer(key)
///     .build()
///     .await?;
/// println!("fund {} with a little ETH", facilitator.settlement_address());
/// # Ok(())
/// # }
/// ```
///
/// [EIP-3009]: https://eips.ethereum.org/EIPS/eip-3009
/// [ERC-1271]: https://eips.ethereum.org/EIPS/eip-1271
/// [EIP-7702]: https://eips.ethereum.org/EIPS/eip-7702
/// [EIP-7966]: https://eips.ethereum.org/EIPS/eip-7966
#[derive(Clone, Debug)]
pub struct OnchainFacilitator {
    engine: Arc<Engine>,
    wallets: Arc<Wallets>,
}

impl OnchainFacilitator {
    /// Returns a builder with the default settings.
    pub fn builder() -> OnchainFacilitatorBuilder {
        OnchainFacilitatorBuilder::default()
    }

    pub(super) const fn engine(&self) -> &Arc<Engine> {
        &self.engine
    }

    /// Returns the address of the first settlement key, which pays for gas.
    pub fn settlement_address(&self) -> Address {
        self.engine.addresses().next().unwrap_or_default()
    }

    /// Returns the addresses of all settlement keys.
    pub fn settlement_addresses(&self) -> Vec<Address> {
        self.engine.addresses().collect()
    }

    /// Returns the chain on which it settles.
    pub fn network(&self) -> Network {
        self.engine.network()
    }

    /// Returns the balance of the settlement key for gas, in wei. Of several keys it is the lowest. Takes one request per key.
    ///
    /// # Errors
    /// [`FacilitatorError::Unreachable`] if the node does not answer.
    pub async fn gas_balance(&self) -> Result<U256, FacilitatorError> {
        self.engine.lowest_balance().await
    }

    /// Deploys the [`BatchSettler`] with the first settlement key, unless the chain has it already. Returns the transaction, if one was
    /// needed. Costs about 190,000 gas, once per chain: a deployment by anybody serves everybody.
    ///
    /// # Errors
    /// [`FacilitatorError::Misconfigured`] if the chain lacks the [`DEPLOYER`](BatchSettler::DEPLOYER).
    /// [`FacilitatorError::Busy`] if the transaction is not in a block within
    /// [`confirm_timeout`](OnchainFacilitatorBuilder::confirm_timeout): call again. Others as when settling.
    pub async fn deploy_batch_settler(&self) -> Result<Option<B256>, FacilitatorError> {
        self.engine.deploy_batch_settler().await
    }

    /// Reconciles open payments now, instead of at the next [interval](OnchainFacilitatorBuilder::reconcile_interval). Returns at once.
    pub fn reconcile_now(&self) {
        self.engine.reconcile_now();
    }

    /// Shuts down: refuses new payments, settles those that are owed, and returns when all have ended, or after `limit` (at most an
    /// hour).
    ///
    /// Returns `true` if all have ended. The others are in the ledger, and the next process continues with them.
    pub async fn drain(&self, limit: Duration) -> bool {
        timeout(limit.min(LONGEST), self.engine.drain()).await.unwrap_or(false)
    }

    /// Sets the price of an ether; see [`native_price`](OnchainFacilitatorBuilder::native_price). $0 means that it is not known.
    pub fn set_native_price(&self, usdc_per_ether: Usdc) {
        self.engine.costs().set_native_price(usdc_per_ether);
    }

    /// Returns the cost of this process's transactions in USDC, at the current price and rounded up, or `None` if the
    /// [`native_price`](OnchainFacilitatorBuilder::native_price) is not known.
    pub fn spent_in_usdc(&self) -> Option<Usdc> {
        crate::usdc::in_usdc(self.stats().spent, self.engine.costs().native_price()?)
    }

    /// Returns the totals since the facilitator was built.
    pub fn stats(&self) -> SettlementStats {
        self.engine.stats()
    }
}

#[async_trait]
impl Facilitator for OnchainFacilitator {
    fn ledger(&self) -> &Arc<dyn Ledger> {
        self.engine.journal().ledger()
    }

    fn serves(&self, terms: &Terms) -> bool {
        terms.offer().network() == self.engine.network()
            && terms.permit().is_none_or(|permit| self.is_for(permit.facilitator))
    }

    /// A permit may be for an account whose key was taken away since.
    fn knows(&self, terms: &Terms) -> bool {
        terms.offer().network() == self.engine.network()
    }

    fn permit_methods(&self, network: Network) -> Vec<TransferMethod> {
        if network == self.engine.network() { self.engine.known_permit_methods() } else { Vec::new() }
    }

    async fn supported(&self) -> Result<SupportedResponse, FacilitatorError> {
        let network = self.engine.network().to_string();
        let mut kinds = vec![SupportedKind::new(2, "exact", network.as_str())];
        for method in self.engine.permit_methods().await {
            if let Some(extra) = method.extra() {
                let kind = SupportedKind::new(2, method.scheme(), network.as_str());
                kinds.push(SupportedKind { extra: Some(extra), ..kind });
            }
        }
        let signers = [("eip155:*".to_owned(), self.settlement_addresses().iter().map(Address::to_string).collect())];
        Ok(SupportedResponse { kinds, extensions: Vec::new(), signers: signers.into() })
    }

    async fn verify(&self, payment: &Prechecked) -> Result<Verified, VerifyError> {
        let started = Instant::now();
        let verified = self.check(payment).await;
        telemetry::verified(self.engine.network(), verification_label(&verified), started.elapsed());
        verified
    }

    async fn settle(&self, payment: &Prechecked, verified: &Verified) -> Result<SettlementOutcome, FacilitatorError> {
        self.engine.settle(payment.clone(), *verified).await
    }

    fn process_id(&self) -> u64 {
        self.engine.journal().process_id()
    }

    /// What calls on payment channels used is counted by whoever makes them.
    fn gas_used(&self) -> u64 {
        let stats = self.stats();
        stats.gas_used.saturating_sub(stats.gas_of_calls)
    }

    async fn reconcile(&self, record: &Record) -> Result<SettlementOutcome, FacilitatorError> {
        self.engine.reconcile(record).await
    }

    async fn readiness(&self) -> Readiness {
        self.engine.readiness().await
    }

    fn settles_in_background(&self) -> bool {
        true
    }

    fn settle_soon(&self, _payment: &PaymentKey) {
        self.engine.reconcile_now();
    }
}

impl OnchainFacilitator {
    /// Returns `true` if a permit that only this account may have executed, or anybody, can be settled here.
    fn is_for(&self, account: Option<Address>) -> bool {
        account.is_none_or(|account| self.engine.addresses().any(|ours| ours == account))
    }

    async fn check(&self, payment: &Prechecked) -> Result<Verified, VerifyError> {
        let authorization = payment.authorization();
        self.engine.check_open()?;
        if let Some(account) = payment.terms().permit().and_then(|permit| permit.facilitator) {
            if !self.is_for(Some(account)) {
                let detail = format!("the permit is for {account}, which is none of the accounts here");
                return Err(Rejection::new(ACCOUNT_MISMATCH.into(), detail).into());
            }
            self.engine.check_sender(account)?;
        }
        if payment.amount().is_zero() {
            return Err(Rejection::new(Reason::Value, "an authorization of nothing pays nothing").into());
        }
        if let Some(rejection) = self.engine.check_payer(payment) {
            return Err(rejection.into());
        }
        self.engine.check_loss(payment.amount()).await?;
        let check_permit = match payment.authenticity() {
            Authenticity::Proven => None,
            Authenticity::ChainMustJudge(_) => Some(self.wallets.enter(authorization.from).await?),
        };
        let at = self.engine.journal().now();
        let (result, rejection) = self.engine.verify(payment).await?;
        if check_permit.is_some() && !result.payer_has_code() {
            self.wallets.remember_codeless(authorization.from);
        }
        match rejection {
            Some(rejection) => Err(rejection.into()),
            None => Ok(Verified {
                funds: Some(Funds { balance: result.balance, block: result.block }),
                gas: Some(result.gas),
                at,
                contract_wallet: result.payer_has_code(),
            }),
        }
    }
}
