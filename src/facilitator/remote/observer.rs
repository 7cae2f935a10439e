//! What a node of the seller's choice shows about payments that a remote facilitator settles.

#[cfg(feature = "onchain")]
pub(super) use confirming::ChainObserver;
#[cfg(feature = "onchain")]
pub(super) use confirming::receipt;
#[cfg(not(feature = "onchain"))]
pub(super) use missing::ChainObserver;

use alloy_primitives::B256;

use crate::payment::{Funds, Rejection, SettlementOutcome};

/// A payment as the node sees it before it is settled.
#[cfg_attr(not(feature = "onchain"), allow(dead_code))]
pub(super) struct Observation {
    pub(super) funds: Funds,
    pub(super) contract_wallet: bool,
    pub(super) rejection: Option<Rejection>,
}

/// What became of a payment.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(not(feature = "onchain"), allow(dead_code))]
pub(super) enum Fate {
    /// It was settled, or failed: the authorization was cancelled, used for something else, or expired.
    Known(SettlementOutcome),
    /// It was not executed, and still can be.
    Open,
    /// The authorization is used, and it is not known by which transaction.
    Unclear,
}

impl Fate {
    /// Returns the outcome; `claimed` is the transaction that the facilitator names, if the chain shows none.
    pub(super) fn outcome(self, claimed: Option<B256>) -> SettlementOutcome {
        match self {
            Self::Known(outcome) => outcome,
            Self::Open | Self::Unclear => SettlementOutcome::Unknown { transaction: claimed },
        }
    }
}

#[cfg(feature = "onchain")]
mod confirming {
    use std::{
        sync::{Arc, OnceLock},
        time::Duration,
    };

    use alloy_primitives::{Address, B256};
    use tokio::time::{Instant, sleep};

    use super::{Fate, Observation};
    use crate::{
        chain::{
            authorization_use::AuthorizationUse,
            endpoint::{EndpointError, client_at},
            node::{AuthorizationState, Node},
            receipt_check::ExpectedTransfer,
            rpc::{Receipt, Rpc, RpcFailure},
        },
        facilitator::{FacilitatorError, onchain::MAX_TRANSFER_GAS, remote::RemoteBuildError},
        network::Network,
        payment::{Funds, Prechecked, SettlementOutcome},
        permit2::Permit,
        protocol::TransferMethod,
        settlement::{finality::FinalityTracker, journal::Journal, reconciler::Reconcile},
    };

    /// The longest that one request to the node may take.
    const MAX_TIMEOUT: Duration = Duration::from_secs(5);
    /// How long to wait for a transaction that the facilitator names: the node may lag behind the facilitator's.
    const PATIENCE: Duration = Duration::from_secs(5);
    /// Between two requests for a receipt, at first. After each refusal it is twice as long.
    const POLL: Duration = Duration::from_millis(100);
    /// The absence of a receipt is believed after this pause: the node may lag behind another one.
    const SECOND_LOOK: Duration = Duration::from_millis(500);

    /// Returns the receipt of a transaction that the facilitator names, after waiting for it for a few seconds.
    pub(in super::super) async fn receipt(node: &Node, transaction: B256) -> Result<Option<Receipt>, RpcFailure> {
        let deadline = Instant::now() + PATIENCE;
        let mut pause = POLL;
        loop {
            let answer = node.rpc().receipt(transaction).await;
            if Instant::now() >= deadline || matches!(answer, Ok(Some(_))) {
                return answer;
            }
            if answer.is_err() {
                pause *= 2;
            }
            sleep(pause).await;
        }
    }

    /// A node that confirms what the facilitator says.
    pub(in super::super) struct ChainObserver {
        node: Arc<Node>,
        finality: FinalityTracker,
        /// The methods by permit for which the chain can show which permit was used.
        permit_methods: OnceLock<Vec<TransferMethod>>,
    }

    impl ChainObserver {
        /// Connects to the node at this URL, and checks that it is on this network.
        pub(in super::super) async fn connect(
            network: Network,
            url: &str,
            timeout: Duration,
            journal: &Journal,
        ) -> Result<Self, RemoteBuildError> {
            let client = client_at(url).map_err(|error| match error {
                EndpointError::Url => RemoteBuildError::Url("a node's URL"),
                EndpointError::Tls => RemoteBuildError::Tls,
            })?;
            let rpc = Rpc::new(client, timeout.min(MAX_TIMEOUT));
            let found = rpc.chain_id().await.map_err(|_| RemoteBuildError::Node(network))?;
            if found != network.chain_id() {
                return Err(RemoteBuildError::WrongChain { expected: network, found: Network::eip155(found) });
            }
            match rpc.any_receipt().await {
                Ok(_) => {}
                Err(RpcFailure::Refused { .. }) => return Err(RemoteBuildError::Receipts(network)),
                Err(RpcFailure::Silent) => return Err(RemoteBuildError::Node(network)),
            }
            let node = Node::new(network, rpc, MAX_TRANSFER_GAS, None, None).ok_or(RemoteBuildError::Probe)?;
            let node = Arc::new(node);
            let finality = FinalityTracker::new(node.clone(), journal.clone(), SECOND_LOOK);
            Ok(Self { finality, node, permit_methods: OnceLock::new() })
        }

        /// Looks which of these methods by permit can be confirmed, until the node has answered once for all of them. `settlers` are the accounts
        /// that the facilitator sends transactions from.
        pub(in super::super) async fn look_at(
            &self,
            methods: &[TransferMethod],
            settlers: &[Address],
        ) -> Result<(), FacilitatorError> {
            if self.permit_methods.get().is_some() {
                return Ok(());
            }
            let mut confirmable = Vec::new();
            for method in methods {
                let found = match method.permit(Address::ZERO) {
                    Some(permit) => self.is_confirmable(&permit, settlers).await?,
                    None => Err("they are no permits"),
                };
                match found {
                    Ok(()) => confirmable.push(*method),
                    Err(why) => {
                        tracing::warn!(network = %self.network(), ?method, "no permits like this are offered: {why}");
                    }
                }
            }
            if !methods.is_empty() {
                let _ = self.permit_methods.set(confirmable);
            }
            Ok(())
        }

        /// Returns why it could not be seen which of the permits like this was settled: the chain lacks the contracts, or a contract settles
        /// them, or an account that delegates to one. It may settle many in a transaction whose calldata does not say which.
        async fn is_confirmable(
            &self,
            permit: &Permit,
            settlers: &[Address],
        ) -> Result<Result<(), &'static str>, RpcFailure> {
            if !self.node.takes_permit(permit).await? {
                return Ok(Err("the chain lacks the contracts"));
            }
            let named = permit.facilitator.as_slice();
            for account in if named.is_empty() { settlers } else { named } {
                if !self.node.rpc().code(*account).await?.is_empty() {
                    return Ok(Err(
                        "a contract settles them, which no receipt shows; leave out the node, or the permits",
                    ));
                }
            }
            Ok(Ok(()))
        }

        /// Returns `true` if settlements by this method can be confirmed.
        pub(in super::super) fn can_confirm(&self, method: TransferMethod) -> bool {
            self.permit_methods.get().is_some_and(|methods| methods.contains(&method))
        }

        pub(in super::super) fn network(&self) -> Network {
            self.node.network()
        }

        pub(in super::super) fn node(&self) -> &Arc<Node> {
            &self.node
        }

        /// Returns `true` if the node answers.
        pub(in super::super) async fn answers(&self) -> bool {
            self.node.rpc().block("latest").await.is_ok()
        }

        /// Returns `true` if the node gives receipts, without which nothing can be confirmed.
        pub(in super::super) async fn gives_receipts(&self) -> bool {
            self.node.rpc().gives_receipts().await
        }

        /// Asks for a receipt again, if the last ones were refused.
        pub(in super::super) async fn recheck(&self) {
            if self.node.check_known_receipts().is_err() {
                let _ = self.node.rpc().any_receipt().await;
            }
        }

        /// Simulates a payment that is to be verified.
        pub(in super::super) async fn observe(&self, payment: &Prechecked) -> Result<Observation, FacilitatorError> {
            self.node.check_known_receipts()?;
            let (result, rejection) = self.node.verify(payment).await?;
            let funds = Funds { balance: result.balance, block: result.block };
            Ok(Observation { funds, contract_wallet: result.payer_has_code(), rejection })
        }

        /// Returns the block in which this transaction made the payment, after waiting for it for a few seconds. `None` if it did not,
        /// or is in no block.
        pub(in super::super) async fn paid_in(
            &self,
            payment: &Prechecked,
            transaction: B256,
        ) -> Result<Option<u64>, FacilitatorError> {
            let expected = ExpectedTransfer::of_payment(payment);
            let receipt = receipt(&self.node, transaction).await?;
            match receipt {
                Some(receipt) if self.node.is_paid_by(&expected, &receipt).await? => Ok(Some(receipt.block())),
                _ => Ok(None),
            }
        }

        /// Returns what became of a payment whose authorization was unused in the block `seen_unused`. `claimed` are the transactions that
        /// the facilitator named.
        pub(in super::super) async fn fate(
            &self,
            payment: &Prechecked,
            seen_unused: Option<u64>,
            claimed: &[B256],
        ) -> Result<Fate, FacilitatorError> {
            let expected = ExpectedTransfer::of_payment(payment);
            for transaction in claimed {
                if let Some(receipt) = self.node.rpc().receipt(*transaction).await?
                    && self.node.is_paid_by(&expected, &receipt).await?
                    // Before the authorization was seen unused, it cannot have been used for this payment (invariant I8).
                    && seen_unused.is_none_or(|seen| seen < receipt.block())
                {
                    return Ok(paid(*transaction, receipt.block()));
                }
            }
            let used = match self.node.authorization_state(payment).await? {
                AuthorizationState::Used(result) => result,
                AuthorizationState::Expired => {
                    let valid_before = payment.authorization().valid_before;
                    return Ok(Fate::Known(SettlementOutcome::expired(valid_before, None)));
                }
                AuthorizationState::Unused(..) => return Ok(Fate::Open),
                AuthorizationState::Behind => return Ok(Fate::Unclear),
            };
            // It may have been used before it was seen unused, for something else.
            let Some(seen_unused) = seen_unused else { return Ok(Fate::Unclear) };
            Ok(match self.node.find_use(payment, seen_unused, used.block).await? {
                AuthorizationUse::Paid { transaction, block } => paid(transaction, block),
                AuthorizationUse::Otherwise { transaction, block } => {
                    Fate::Known(SettlementOutcome::used_otherwise(Some(transaction), self.node.is_final(block).await))
                }
                // Permit2 tells nobody of a use. It was for something else if no final block shows a transfer; a newer one may not be searchable.
                AuthorizationUse::NotFound { is_complete: true }
                    if expected.is_by_permit() && self.node.is_use_final(payment).await? =>
                {
                    Fate::Known(SettlementOutcome::used_otherwise(None, true))
                }
                AuthorizationUse::NotFound { .. } => Fate::Unclear,
            })
        }

        /// Records which settled payments have become final, and finds those that were reorged: at once if the newest block that was seen is
        /// gone, otherwise when the payment should be final.
        pub(in super::super) async fn follow_settled<R: Reconcile>(
            &self,
            facilitator: &Arc<R>,
        ) -> Result<(), FacilitatorError> {
            let Some(head) = self.finality.head(false).await? else { return Ok(()) };
            if head.is_reorged {
                tracing::warn!(network = %self.network(), head = head.number(), "the chain was reorganized");
                self.finality.check_settled(facilitator, None).await?;
            }
            self.finality.advance(facilitator, head).await?;
            Ok(())
        }
    }

    fn paid(transaction: B256, block: u64) -> Fate {
        Fate::Known(SettlementOutcome::Settled { transaction, block: Some(block), fee: None })
    }
}

/// Without the feature `onchain` there are no observers.
#[cfg(not(feature = "onchain"))]
mod missing {
    use std::sync::Arc;

    use alloy_primitives::{Address, B256};

    use super::{Fate, Observation};
    use crate::{
        facilitator::FacilitatorError, network::Network, payment::Prechecked, protocol::TransferMethod,
        settlement::reconciler::Reconcile,
    };

    pub(in super::super) enum ChainObserver {}

    impl ChainObserver {
        pub(in super::super) fn network(&self) -> Network {
            match *self {}
        }

        pub(in super::super) async fn look_at(
            &self,
            _: &[TransferMethod],
            _: &[Address],
        ) -> Result<(), FacilitatorError> {
            match *self {}
        }

        pub(in super::super) fn can_confirm(&self, _: TransferMethod) -> bool {
            match *self {}
        }

        pub(in super::super) async fn answers(&self) -> bool {
            match *self {}
        }

        pub(in super::super) async fn gives_receipts(&self) -> bool {
            match *self {}
        }

        pub(in super::super) async fn recheck(&self) {
            match *self {}
        }

        pub(in super::super) async fn observe(&self, _: &Prechecked) -> Result<Observation, FacilitatorError> {
            match *self {}
        }

        pub(in super::super) async fn paid_in(&self, _: &Prechecked, _: B256) -> Result<Option<u64>, FacilitatorError> {
            match *self {}
        }

        pub(in super::super) async fn fate(
            &self,
            _: &Prechecked,
            _: Option<u64>,
            _: &[B256],
        ) -> Result<Fate, FacilitatorError> {
            match *self {}
        }

        pub(in super::super) async fn follow_settled<R: Reconcile>(&self, _: &Arc<R>) -> Result<(), FacilitatorError> {
            match *self {}
        }
    }
}
