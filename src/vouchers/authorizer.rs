//! The key that claims and refunds in the receiver's name.

use std::{fmt, sync::Arc};

use alloy_primitives::{Address, B256, Bytes, U256};
use alloy_signer::Signer;

use super::{ChannelId, Claim, ClaimEntry, Escrow};

/// A channel's `receiverAuthorizer`: an alloy signer that signs digests, such as a local key or one in a KMS. A clone is the same key.
///
/// Whoever has its signatures can only claim what payers signed, and refund payers. `Debug` shows the address only.
#[derive(Clone)]
pub struct AuthorizerKey(Arc<dyn Signer + Send + Sync>);

impl AuthorizerKey {
    /// Uses this signer.
    pub fn new(signer: impl Signer + Send + Sync + 'static) -> Self {
        Self(Arc::new(signer))
    }

    /// Returns its address.
    pub fn address(&self) -> Address {
        self.0.address()
    }

    /// Signs a batch of claims, in this order.
    ///
    /// # Errors
    /// [`AuthorizerError`] if the signer refused or failed. Nothing was signed.
    pub async fn sign_claims(&self, escrow: &Escrow, claims: &[Claim]) -> Result<Bytes, AuthorizerError> {
        let entries: Vec<ClaimEntry> = claims.iter().map(|claim| claim.entry(escrow)).collect();
        self.sign(escrow.claim_batch_digest(&entries)).await
    }

    /// Signs a refund of at most `amount` atomic units. `nonce` is the contract's `refundNonce` of the channel.
    ///
    /// # Errors
    /// [`AuthorizerError`] if the signer refused or failed. Nothing was signed.
    pub async fn sign_refund(
        &self,
        escrow: &Escrow,
        channel: ChannelId,
        nonce: u128,
        amount: u128,
    ) -> Result<Bytes, AuthorizerError> {
        self.sign(escrow.refund_digest(channel, U256::from(nonce), amount)).await
    }

    async fn sign(&self, digest: B256) -> Result<Bytes, AuthorizerError> {
        // A signer's error may quote the address of its key service.
        let signature = self.0.sign_hash(&digest).await.map_err(|_| AuthorizerError)?;
        Ok(signature.normalized_s().as_bytes().to_vec().into())
    }
}

impl fmt::Debug for AuthorizerKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("AuthorizerKey").field(&self.address()).finish()
    }
}

/// The authorizer's signer refused or failed. Nothing was signed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the receiver authorizer's signer failed; nothing was signed")]
pub struct AuthorizerError;
