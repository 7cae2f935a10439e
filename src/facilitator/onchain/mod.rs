//! Verifying and settling on a chain, over JSON-RPC.

mod builder;
mod preflight;
mod wallets;

use std::{sync::Arc, time::Duration};

use alloy_primitives::{Address, B256, U256};
use async_trait::async_trait;
use tokio::time::{Instant, timeout};

use self::wallets::Wallets;
pub use self::{builder::OnchainFacilitatorBuilder, preflight::OnchainBuildError};
pub use crate::{chain::batch_settler::BatchSettler, settlement::engine::SettlementStats};
use crate::{
    facilitator::{Facilitator, FacilitatorError, Readiness, VerifyError},
    ledger::{Ledger, Record},
    network::Network,
    payment::{Authenticity, Funds, Outcome, PaymentKey, Prechecked, Rejection, Terms, Verified},
    protocol::{Reason, SupportedKind, SupportedResponse},
    settlement::{engine::Engine, nonce_manager::NonceManager},
    telemetry,
    usdc::Usdc,
};

/// Longer times than this are mistakes.
const LONGEST: Duration = Duration::from_secs(3_600);

/// Verifies and settles EIP-3009 payments on one chain, with one settlement key.
///
/// The key pays for gas and holds no customer's money: a payment moves from payer to payee directly. Every alloy transaction
/// signer will do, a key in a KMS included.
///
/// - **Verifying** is one `eth_call`: balance, nonce, pause, blacklist, domain and a simulation of the transfer together.
///   Payments verified within a millisecond of each other share a JSON-RPC batch; a node that takes none is asked one by one.
/// - **Chains.** One will do whose opcode `NUMBER` gives its own block: the block that verifying looks at is compared with those of
///   receipts. On others, such as Arbitrum, where contracts read a block number of the chain below, payments whose transaction reverted
///   stay unknown and others are refused.
/// - **Settling** takes one more request where the node has `eth_sendRawTransactionSync` ([EIP-7966]), and polls for the
///   receipt otherwise. Fees and nonces are remembered, not asked for each time.
/// - **One key, many payments.** Up to [`in_flight`](OnchainFacilitatorBuilder::in_flight) transactions wait for a block at
///   once; more queue. A nonce that was given back is used by the next payment, or by a transfer of nothing to the key itself
///   if none comes, so that nothing waits behind a gap. Other processes should not use the key; if one does, the nonces are
///   read from the chain again.
/// - **No work in vain.** While as many payments wait as may, no key can pay for gas, gas is known to cost more than is allowed, or
///   the facilitator shuts down, nothing new is verified.
/// - **Gas is spent once on a payer's trick.** A payer two of whose payments were sent and did not pay has to wait, ever
///   longer, before anything is verified or sent for it again.
/// - **Outcomes** come from the logs of receipts only: [`Outcome::Settled`] means `AuthorizationUsed` and exactly the
///   matching `Transfer` ([EIP-3009]). A transfer that somebody else sent is credited if the payment was seen unused, and
///   reserved here, before its block.
/// - **Contract wallets** ([ERC-1271]) and accounts with delegated code ([EIP-7702]) can pay where the token asks the payer's
///   code, as USDC 2.2 does. Signatures that only such code can judge cost a request to tell from garbage, so few of them
///   are judged at a time, and payers seen without code are refused without asking for a few seconds.
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
    /// Settings to start from.
    pub fn builder() -> OnchainFacilitatorBuilder {
        OnchainFacilitatorBuilder::default()
    }

    /// The address of the first settlement key, which pays for gas.
    pub fn settlement_address(&self) -> Address {
        self.engine.lanes.first().map_or(Address::ZERO, NonceManager::account)
    }

    /// The addresses of all settlement keys.
    pub fn settlement_addresses(&self) -> Vec<Address> {
        self.engine.lanes.iter().map(NonceManager::account).collect()
    }

    /// The chain it settles on.
    pub fn network(&self) -> Network {
        self.engine.network
    }

    /// What the settlement key has for gas, in wei; of several keys, the one that has least. One request per key.
    ///
    /// # Errors
    /// [`FacilitatorError::Unreachable`] if the node does not say.
    pub async fn gas_tank(&self) -> Result<U256, FacilitatorError> {
        let mut least = U256::MAX;
        for lane in &self.engine.lanes {
            least = least.min(self.engine.rpc.balance(lane.account()).await?);
        }
        Ok(least)
    }

    /// Deploys the [`BatchSettler`] with the settlement key, unless the chain has it already. Returns the transaction, if it took
    /// one. Costs about 190,000 gas, once per chain; anybody's deployment serves everybody.
    ///
    /// # Errors
    /// [`FacilitatorError::Misconfigured`] if the chain lacks the [`DEPLOYER`](BatchSettler::DEPLOYER);
    /// [`FacilitatorError::Busy`] if the transaction is not in a block within
    /// [`confirm_timeout`](OnchainFacilitatorBuilder::confirm_timeout): calling again finds out. Others as when settling.
    pub async fn deploy_batch_settler(&self) -> Result<Option<B256>, FacilitatorError> {
        self.engine.deploy_batch_settler().await
    }

    /// Looks at once for open payments that nobody looks after, instead of at the next
    /// [interval](OnchainFacilitatorBuilder::upkeep_interval).
    pub fn look_after_soon(&self) {
        self.engine.hint.notify_one();
    }

    /// Shuts down: takes nothing new to settle, begins what is owed for answers that were handed over, and returns when everything
    /// begun has come to an end, at the latest after `patience`. Whether nothing is left; what is left is in the ledger, and the next
    /// process goes on with it.
    pub async fn drain(&self, patience: Duration) -> bool {
        timeout(patience.min(LONGEST), self.engine.drain()).await.unwrap_or(false)
    }

    /// Says anew what an ether is worth; see [`native_price`](OnchainFacilitatorBuilder::native_price). $0 forgets it.
    pub fn set_native_price(&self, usdc_per_ether: Usdc) {
        self.engine.costs.set_native_price(usdc_per_ether);
    }

    /// What the transactions of this process cost, in USDC at the price now, rounded up; `None` if the
    /// [`native_price`](OnchainFacilitatorBuilder::native_price) is not known.
    pub fn spent_in_usdc(&self) -> Option<Usdc> {
        crate::usdc::in_usdc(self.stats().spent, self.engine.costs.native_price()?)
    }

    /// Totals since the start.
    pub fn stats(&self) -> SettlementStats {
        self.engine.stats()
    }
}

#[async_trait]
impl Facilitator for OnchainFacilitator {
    fn ledger(&self) -> &Arc<dyn Ledger> {
        &self.engine.ledger
    }

    fn serves(&self, terms: &Terms) -> bool {
        terms.offer().network() == self.engine.network
    }

    async fn supported(&self) -> Result<SupportedResponse, FacilitatorError> {
        let kind = SupportedKind {
            x402_version: 2,
            scheme: "exact".into(),
            network: self.engine.network.to_string(),
            extra: None,
        };
        let signers = [("eip155:*".to_owned(), self.settlement_addresses().iter().map(Address::to_string).collect())];
        Ok(SupportedResponse { kinds: vec![kind], extensions: Vec::new(), signers: signers.into() })
    }

    async fn verify(&self, payment: &Prechecked) -> Result<Verified, VerifyError> {
        let started = Instant::now();
        let verified = self.look_at(payment).await;
        let result = match &verified {
            Ok(_) => "valid",
            Err(VerifyError::Invalid(_)) => "invalid",
            Err(VerifyError::Unavailable(_)) => "unavailable",
        };
        telemetry::verified(self.engine.network, result, started.elapsed());
        verified
    }

    async fn settle(&self, payment: &Prechecked, verified: &Verified) -> Result<Outcome, FacilitatorError> {
        self.engine.settle(payment.clone(), *verified).await
    }

    fn process(&self) -> u64 {
        self.engine.process
    }

    async fn reconcile(&self, record: &Record) -> Result<Outcome, FacilitatorError> {
        self.engine.reconcile(record).await
    }

    async fn readiness(&self) -> Readiness {
        self.engine.readiness().await
    }

    fn settles_due(&self) -> bool {
        true
    }

    fn settle_soon(&self, _payment: &PaymentKey) {
        self.look_after_soon();
    }
}

impl OnchainFacilitator {
    async fn look_at(&self, payment: &Prechecked) -> Result<Verified, VerifyError> {
        let authorization = payment.authorization();
        self.engine.check_open()?;
        if authorization.value.is_zero() {
            return Err(Rejection::new(Reason::Value, "an authorization of nothing pays nothing").into());
        }
        if let Some(rejection) = self.engine.reverts.bars(authorization.from) {
            return Err(rejection.into());
        }
        self.engine.refuse_a_loss(authorization.value).await?;
        let judged = match payment.authenticity() {
            Authenticity::Proven => None,
            Authenticity::ChainMustJudge(_) => Some(self.wallets.enter(authorization.from).await?),
        };
        let at = self.engine.clock.now();
        let (facts, rejection) = self.engine.verify(payment).await.map_err(FacilitatorError::from)?;
        if judged.is_some() && !facts.payer_has_code() {
            self.wallets.remember_codeless(authorization.from);
        }
        match rejection {
            Some(rejection) => Err(rejection.into()),
            None => Ok(Verified {
                funds: Some(Funds { balance: facts.balance, block: facts.block }),
                gas: Some(facts.gas),
                at,
                contract_wallet: facts.payer_has_code(),
            }),
        }
    }
}
