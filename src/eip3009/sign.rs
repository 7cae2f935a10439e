//! Signing through any alloy signer.

use alloy_primitives::Address;
use alloy_signer::Signer;
use async_trait::async_trait;

use super::{Authorization, PaymentSignature, TokenDomain};

/// A key that signs authorizations. Every alloy [`Signer`] (local key, KMS, hardware) is one.
#[async_trait]
pub trait AuthorizationSigner: Send + Sync {
    /// Returns the payer's address.
    fn address(&self) -> Address;

    /// Signs the authorization as EIP-712 typed data, which a hardware wallet can display.
    ///
    /// # Errors
    /// [`SignError`] if the signer refused or failed.
    async fn sign(&self, authorization: &Authorization, domain: &TokenDomain) -> Result<PaymentSignature, SignError>;
}

#[async_trait]
impl<S: Signer + Send + Sync> AuthorizationSigner for S {
    fn address(&self) -> Address {
        Signer::address(self)
    }

    async fn sign(&self, authorization: &Authorization, domain: &TokenDomain) -> Result<PaymentSignature, SignError> {
        let signature = self.sign_typed_data(&authorization.typed(), domain.eip712()).await?;
        let signature = signature.normalized_s();
        Ok(PaymentSignature::from(signature.as_bytes()))
    }
}

/// The signer refused or failed. Nothing was signed.
#[derive(Debug, thiserror::Error)]
#[error("the signer failed; nothing was signed")]
pub struct SignError(#[from] alloy_signer::Error);
