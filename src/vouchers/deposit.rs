//! The payer's ERC-3009 authorization that fills a channel's escrow.

use alloy_primitives::{Address, B256, Bytes, U256, keccak256};
use alloy_sol_types::{SolStruct as _, SolValue as _};
use serde::{Deserialize, Serialize};

use super::{ChannelId, Escrow, amount};
use crate::eip3009::{Authorization, PaymentSignature, TokenDomain};
#[cfg(feature = "client")]
use crate::eip3009::{AuthorizationSigner, SignError};

/// Money on its way into a channel: the first deposit, or one that tops it up.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Deposit {
    /// Atomic units of the channel's token.
    #[serde(with = "amount")]
    pub amount: u128,
    /// What lets the collector pull them.
    pub authorization: DepositAuthorization,
}

/// What lets a collector pull a deposit. Exactly one way to move the token; this crate knows ERC-3009.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum DepositAuthorization {
    /// A signed `ReceiveWithAuthorization` of the token.
    #[serde(rename = "erc3009Authorization", rename_all = "camelCase")]
    Erc3009 {
        /// Before this time it cannot be executed, in Unix seconds.
        #[serde(with = "crate::decimal")]
        valid_after: U256,
        /// From this time on it cannot be executed, in Unix seconds.
        #[serde(with = "crate::decimal")]
        valid_before: U256,
        /// A random number of this deposit's. With the channel it makes the authorization's nonce; it is not the channel's salt.
        salt: B256,
        /// The payer's signature: a key's, or whatever a contract wallet accepts (ERC-1271).
        signature: PaymentSignature,
    },
}

impl Deposit {
    /// Returns the nonce of the token's authorization. It names the channel, so an authorization for one channel cannot fill another.
    pub fn nonce(channel: ChannelId, salt: B256) -> B256 {
        keccak256((channel.digest(), salt).abi_encode())
    }

    /// Returns the digest that the payer signs.
    pub fn digest(&self, payer: Address, channel: ChannelId, token: &TokenDomain) -> B256 {
        let DepositAuthorization::Erc3009 { valid_after, valid_before, salt, .. } = &self.authorization;
        let authorization = authorization(payer, channel, self.amount, *valid_after, *valid_before, *salt);
        authorization.typed_receive().eip712_signing_hash(token.eip712())
    }

    /// Returns `collectorData`, for the contract's `deposit`.
    pub fn collector_data(&self) -> Bytes {
        let DepositAuthorization::Erc3009 { valid_after, valid_before, salt, signature } = &self.authorization;
        let salt = U256::from_be_bytes(salt.0);
        (*valid_after, *valid_before, salt, Bytes::copy_from_slice(signature.as_bytes())).abi_encode_params().into()
    }

    /// Signs a deposit of `amount` atomic units that can be executed until `valid_before` (Unix seconds). `salt` must be random and new.
    ///
    /// # Errors
    /// [`SignError`] if the device or service refused or failed.
    #[cfg(feature = "client")]
    pub async fn sign(
        channel: ChannelId,
        amount: u128,
        valid_before: u64,
        salt: B256,
        token: &TokenDomain,
        payer: &(impl AuthorizationSigner + ?Sized),
    ) -> Result<Self, SignError> {
        let (valid_after, valid_before) = (U256::ZERO, U256::from(valid_before));
        let authorization = authorization(payer.address(), channel, amount, valid_after, valid_before, salt);
        let signature = payer.sign_receive(&authorization, token).await?;
        Ok(Self { amount, authorization: DepositAuthorization::Erc3009 { valid_after, valid_before, salt, signature } })
    }
}

fn authorization(
    payer: Address,
    channel: ChannelId,
    amount: u128,
    valid_after: U256,
    valid_before: U256,
    salt: B256,
) -> Authorization {
    Authorization {
        from: payer,
        to: Escrow::ERC3009_COLLECTOR,
        value: U256::from(amount),
        valid_after,
        valid_before,
        nonce: Deposit::nonce(channel, salt),
    }
}
