//! Paying by permit: whether Permit2 may move so much of the payer's tokens.

#[cfg(feature = "onchain")]
use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use alloy_primitives::{Address, B256, U256};
#[cfg(feature = "onchain")]
use alloy_rpc_client::RpcClient;

#[cfg(feature = "onchain")]
use crate::{
    chain::{
        permit,
        receipt_check::ExpectedTransfer,
        rpc::{Rpc, RpcFailure},
    },
    network::Network,
};
use crate::{payment::PaymentKey, permit2::Permit, protocol::ExactOffer, usdc::Usdc};

/// How long a node is waited for.
#[cfg(feature = "onchain")]
const TIMEOUT: Duration = Duration::from_secs(10);
/// How long a node is waited for while an answer waits, which was paid for.
#[cfg(feature = "onchain")]
const LOOK: Duration = Duration::from_secs(3);

/// A chain, a token there, and who has approved it.
#[cfg(feature = "onchain")]
type Approval = (Network, Address, Address);

/// How a payer pays by permits of Permit2.
///
/// Permit2 moves the payer's tokens, as far as the payer has let it by the token's `approve(0x000000000022D473030F116dDEE9F6B43aC78BA3,
/// amount)`. Whoever gets a signature for Permit2 out of the payer can take what is approved, so approve no more than what it should spend
/// for a while.
///
/// With a [`node`](Self::node), the payer looks at what is approved, and does not sign where that is too little. Without one it signs, and
/// learns from the seller's answer (412).
///
/// The node also shows what was charged. What a seller says about that is no proof: until the chain shows it, the
/// [`Budget`](super::Budget) counts all that was signed for. So without a node, call `reconcile` now and then.
///
/// ```
/// # #[cfg(feature = "local-signer")] {
/// use alloy_signer_local::PrivateKeySigner;
/// use tower_x402::client::{Payer, PermitPolicy};
///
/// let payer = Payer::builder(PrivateKeySigner::random()).permits(PermitPolicy::default()).build();
/// # }
/// ```
#[derive(Clone, Default)]
pub struct PermitPolicy {
    #[cfg(feature = "onchain")]
    nodes: Vec<(Network, Rpc)>,
    /// What was approved when it was looked at last, without what was signed for since.
    #[cfg(feature = "onchain")]
    approved: Arc<Mutex<HashMap<Approval, U256>>>,
}

impl PermitPolicy {
    /// Looks at what is approved at this node of `network`, before a permit is signed there. It is asked once for as many permits as what is
    /// approved covers. After a seller has charged less than was signed for, its transaction is looked at there, for three seconds at most.
    #[cfg(feature = "onchain")]
    #[must_use]
    pub fn node(mut self, network: Network, client: RpcClient) -> Self {
        self.nodes.push((network, Rpc::new(client, TIMEOUT)));
        self
    }

    /// Returns what the payer has approved, if that is known to be less than an offer is for. It counts as used from now on, if it is not.
    #[cfg(feature = "onchain")]
    pub(super) async fn short_of(&self, payer: Address, offer: &ExactOffer) -> Option<U256> {
        let network = offer.network();
        let (_, rpc) = self.nodes.iter().find(|(of, _)| *of == network)?;
        let (token, needed) = (offer.asset.address, offer.amount);
        let approval = (network, token, payer);
        if self.take(approval, needed) {
            return None;
        }
        let approved = permit::allowance(rpc, token, payer).await.inspect_err(|error| {
            tracing::warn!(?error, %network, "what is approved for Permit2 could not be looked at");
        });
        let approved = approved.ok()?;
        self.approved().insert(approval, approved);
        if self.take(approval, needed) { None } else { Some(approved) }
    }

    #[cfg(not(feature = "onchain"))]
    pub(super) async fn short_of(&self, _: Address, _: &ExactOffer) -> Option<U256> {
        None
    }

    /// Returns what this transaction charged of a maximum for this payee, in a block that may not be final, if a node shows that it did.
    #[cfg(feature = "onchain")]
    pub(super) async fn charged_by(
        &self,
        transaction: B256,
        (key, permit, payee): (&PaymentKey, &Permit, Address),
    ) -> Option<Usdc> {
        let PaymentKey { network, payer, nonce, .. } = *key;
        let (_, rpc) = self.nodes.iter().find(|(of, _)| *of == network)?;
        let (token, permit) = (permit.token, Some(*permit));
        let expected = ExpectedTransfer { token, payer, payee, value: U256::ZERO, nonce, permit };
        let looking = permit::charged_by(rpc, &expected, transaction);
        let shown = tokio::time::timeout(LOOK, looking).await.unwrap_or(Err(RpcFailure::Silent));
        let shown = shown.inspect_err(|error| {
            tracing::warn!(?error, %nonce, "what was charged of a permit could not be looked at");
        });
        Usdc::try_from(shown.ok()??).ok()
    }

    #[cfg(not(feature = "onchain"))]
    pub(super) async fn charged_by(&self, _: B256, _: (&PaymentKey, &Permit, Address)) -> Option<Usdc> {
        None
    }

    /// Returns `true` if what is known to be approved covers this, and takes it off.
    #[cfg(feature = "onchain")]
    fn take(&self, approval: Approval, needed: U256) -> bool {
        let mut approved = self.approved();
        let Some(left) = approved.get_mut(&approval).filter(|left| **left >= needed) else { return false };
        *left -= needed;
        true
    }

    #[cfg(feature = "onchain")]
    fn approved(&self) -> MutexGuard<'_, HashMap<Approval, U256>> {
        self.approved.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

debug_fields!(PermitPolicy {});
