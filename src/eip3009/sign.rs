//! Signing through any alloy signer.

use alloy_primitives::{Address, B256};
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

    /// Signs a transfer that only the payee may execute (`receiveWithAuthorization`): a deposit into a payment channel.
    ///
    /// Default: refuses.
    ///
    /// # Errors
    /// [`SignError`] if the signer refused or failed.
    async fn sign_receive(&self, _: &Authorization, _: &TokenDomain) -> Result<PaymentSignature, SignError> {
        Err(alloy_signer::Error::other("this signer signs no deposits of payment channels").into())
    }

    /// Signs an EIP-712 digest as it is: a voucher of a payment channel. Devices that show what they sign refuse this; give such a payer a
    /// voucher key.
    ///
    /// Default: refuses.
    ///
    /// # Errors
    /// [`SignError`] if the signer refused or failed.
    async fn sign_digest(&self, _: B256) -> Result<PaymentSignature, SignError> {
        Err(alloy_signer::Error::other("this signer signs no vouchers of payment channels").into())
    }
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

    async fn sign_receive(
        &self,
        authorization: &Authorization,
        domain: &TokenDomain,
    ) -> Result<PaymentSignature, SignError> {
        let signature = self.sign_typed_data(&authorization.typed_receive(), domain.eip712()).await?;
        Ok(PaymentSignature::from(signature.normalized_s().as_bytes()))
    }

    async fn sign_digest(&self, digest: B256) -> Result<PaymentSignature, SignError> {
        Ok(PaymentSignature::from(self.sign_hash(&digest).await?.normalized_s().as_bytes()))
    }
}

/// The signer refused or failed. Nothing was signed.
#[derive(Debug, thiserror::Error)]
#[error("the signer failed; nothing was signed")]
pub struct SignError(#[from] alloy_signer::Error);
