//! Recovery of the payer's address from a signature, on k256 or libsecp256k1.

use alloy_primitives::{Address, B256, U256, keccak256, uint};

use super::PaymentSignature;

/// Half the order of secp256k1's group. USDC refuses an `s` above it, so that a signature has one form only.
pub(crate) const HALF_ORDER: U256 = uint!(0x7FFFFFFFFFFFFFFFFFFFFFFFFFFFFFFF5D576E7357A4501DDFE92F46681B20A0_U256);

impl PaymentSignature {
    /// Recovers the address whose key signed `hash`, by the rules of USDC: 65 bytes, `v` 27 or 28, low `s`.
    ///
    /// # Errors
    /// See [`RecoverError`]. A contract wallet may accept a signature from which no address can be recovered.
    pub fn recover(&self, hash: B256) -> Result<Address, RecoverError> {
        self.recover_from(|| hash)
    }

    /// As [`recover`](Self::recover), with a hash that is computed only if the bytes may be a key's signature.
    pub(crate) fn recover_from(&self, hash: impl FnOnce() -> B256) -> Result<Address, RecoverError> {
        let (rs, v) = match self.as_bytes() {
            [rs @ .., v] if rs.len() == 64 => (rs, *v),
            other => return Err(RecoverError::Length(other.len())),
        };
        let is_odd = match v {
            27 => false,
            28 => true,
            other => return Err(RecoverError::RecoveryId(other)),
        };
        if U256::from_be_slice(&rs[32..]) > HALF_ORDER {
            return Err(RecoverError::HighS);
        }
        let point = backend::recover(hash(), rs, is_odd).ok_or(RecoverError::NotASignature)?;
        Ok(Address::from_slice(&keccak256(point)[12..]))
    }
}

#[cfg(not(feature = "secp256k1"))]
mod backend {
    use alloy_primitives::B256;
    use k256::ecdsa::{RecoveryId, Signature, VerifyingKey};

    /// Recovers the signer's public key, uncompressed and without its prefix.
    pub(super) fn recover(hash: B256, rs: &[u8], is_odd: bool) -> Option<[u8; 64]> {
        let signature = Signature::from_slice(rs).ok()?;
        let id = RecoveryId::new(is_odd, false);
        let key = VerifyingKey::recover_from_prehash(hash.as_slice(), &signature, id).ok()?;
        key.to_sec1_point(false).as_bytes().get(1..)?.try_into().ok()
    }
}

#[cfg(feature = "secp256k1")]
mod backend {
    use alloy_primitives::B256;
    use secp256k1::{
        Message,
        ecdsa::{RecoverableSignature, RecoveryId},
    };

    /// Recovers the signer's public key, uncompressed and without its prefix.
    pub(super) fn recover(hash: B256, rs: &[u8], is_odd: bool) -> Option<[u8; 64]> {
        let id = if is_odd { RecoveryId::One } else { RecoveryId::Zero };
        let signature = RecoverableSignature::from_compact(rs, id).ok()?;
        let key = signature.recover_ecdsa(Message::from_digest(hash.0)).ok()?;
        key.serialize_uncompressed().get(1..)?.try_into().ok()
    }
}

/// Why no address could be recovered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RecoverError {
    /// The signature has another length than that of a key, which is 65 bytes.
    #[error("the signature has {0} bytes, not 65")]
    Length(usize),
    /// USDC accepts only 27 and 28.
    #[error("the signature's v is {0}, not 27 or 28")]
    RecoveryId(u8),
    /// The malleable form of a valid signature, which USDC refuses.
    #[error("the signature's s is in the upper half of the order")]
    HighS,
    /// The bytes are not the signature of any key.
    #[error("no key made this signature")]
    NotASignature,
}
