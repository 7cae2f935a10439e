//! EIP-3009 messages, hashed and signed with alloy alone, so that this crate's own hashing is never its own judge.

use std::time::{SystemTime, UNIX_EPOCH};

use alloy_primitives::{Address, B256, Bytes, U256, uint};
use alloy_signer::SignerSync;
use alloy_signer_local::PrivateKeySigner;
use alloy_sol_types::{Eip712Domain, SolStruct, eip712_domain, sol};
use tower_x402::Asset;

sol! {
    #[derive(Debug, PartialEq, Eq)]
    struct TransferWithAuthorization {
        address from;
        address to;
        uint256 value;
        uint256 validAfter;
        uint256 validBefore;
        bytes32 nonce;
    }

    #[derive(Debug, PartialEq, Eq)]
    struct CancelAuthorization {
        address authorizer;
        bytes32 nonce;
    }
}

/// An authorization valid from the beginning of time until an hour from now, with a random nonce.
pub fn authorization(from: Address, to: Address, units: u64) -> TransferWithAuthorization {
    TransferWithAuthorization {
        from,
        to,
        value: U256::from(units),
        validAfter: U256::ZERO,
        validBefore: U256::from(unix_now() + 3600),
        nonce: random_nonce(),
    }
}

/// The EIP-712 domain of a token.
pub fn domain(asset: &Asset) -> Eip712Domain {
    eip712_domain! {
        name: asset.name.clone(),
        version: asset.version.clone(),
        chain_id: asset.network.chain_id(),
        verifying_contract: asset.address,
    }
}

/// Signs a message for a token: 65 bytes, `r || s || v` with a low `s` and `v` 27 or 28.
pub fn sign(signer: &PrivateKeySigner, asset: &Asset, message: &impl SolStruct) -> Signature {
    let hash = message.eip712_signing_hash(&domain(asset));
    let signature = signer.sign_hash_sync(&hash).expect("a local key signs");
    Signature(signature.as_bytes())
}

/// A 65-byte signature and the ways to spoil it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Signature(pub [u8; 65]);

impl Signature {
    pub fn r(&self) -> B256 {
        B256::from_slice(&self.0[..32])
    }

    pub fn s(&self) -> B256 {
        B256::from_slice(&self.0[32..64])
    }

    pub fn v(&self) -> u8 {
        self.0[64]
    }

    /// The same signature with another `v`.
    pub fn with_v(mut self, v: u8) -> Self {
        self.0[64] = v;
        self
    }

    /// The other signature of the same message by the same key: `s` negated, `v` flipped.
    pub fn high_s(mut self) -> Self {
        const ORDER: U256 = uint!(0xfffffffffffffffffffffffffffffffebaaedce6af48a03bbfd25e8cd0364141_U256);
        let s = ORDER - U256::from_be_bytes(self.s().0);
        self.0[32..64].copy_from_slice(&s.to_be_bytes::<32>());
        self.0[64] = 55 - self.0[64];
        self
    }

    pub fn bytes(&self) -> Bytes {
        Bytes::copy_from_slice(&self.0)
    }
}

/// A nonce nobody used.
pub fn random_nonce() -> B256 {
    let mut nonce = B256::ZERO;
    getrandom::fill(nonce.as_mut_slice()).expect("the system has randomness");
    nonce
}

/// An address that has no history and no key.
pub fn random_address() -> Address {
    Address::from_slice(&random_nonce()[..20])
}

/// Seconds since 1970.
pub fn unix_now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).expect("the clock is past 1970").as_secs()
}
