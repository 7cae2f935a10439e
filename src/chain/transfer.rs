//! The token's calls and events (EIP-3009, ERC-20).

use alloy_primitives::{B256, Bytes};
use alloy_sol_types::{SolCall, sol};

use crate::eip3009::{Authorization, PaymentSignature};

sol! {
    interface Token {
        event Transfer(address indexed from, address indexed to, uint256 value);
        event AuthorizationUsed(address indexed authorizer, bytes32 indexed nonce);
        event AuthorizationCanceled(address indexed authorizer, bytes32 indexed nonce);
        function authorizationState(address authorizer, bytes32 nonce) external view returns (bool);
    }

    /// The overload of EIP-3009.
    interface ByKey {
        function transferWithAuthorization(
            address from, address to, uint256 value, uint256 validAfter, uint256 validBefore, bytes32 nonce,
            uint8 v, bytes32 r, bytes32 s
        );
    }

    /// The overload that USDC 2.2 added for contract wallets.
    interface ByWallet {
        function transferWithAuthorization(
            address from, address to, uint256 value, uint256 validAfter, uint256 validBefore, bytes32 nonce,
            bytes signature
        );
    }
}

/// Returns the calldata that executes an authorization.
///
/// A signature of 65 bytes with `v` 27 or 28 uses the overload that every EIP-3009 token has. USDC 2.2 asks a payer with code there
/// too (ERC-1271). Any other signature can only be a contract wallet's.
pub(crate) fn calldata(authorization: &Authorization, signature: &PaymentSignature) -> Bytes {
    let Authorization { from, to, value, valid_after, valid_before, nonce } = authorization.clone();
    let bytes = signature.as_bytes();
    match bytes {
        [rs @ .., v @ (27 | 28)] if rs.len() == 64 => ByKey::transferWithAuthorizationCall {
            from,
            to,
            value,
            validAfter: valid_after,
            validBefore: valid_before,
            nonce,
            v: *v,
            r: B256::from_slice(&rs[..32]),
            s: B256::from_slice(&rs[32..]),
        }
        .abi_encode()
        .into(),
        _ => ByWallet::transferWithAuthorizationCall {
            from,
            to,
            value,
            validAfter: valid_after,
            validBefore: valid_before,
            nonce,
            signature: bytes.to_vec().into(),
        }
        .abi_encode()
        .into(),
    }
}

/// Returns the gas that a transaction uses before its first instruction (EIP-2028), or at least for its calldata (EIP-7623).
pub(crate) fn intrinsic_gas(calldata: &[u8]) -> u64 {
    let zeros = calldata.iter().filter(|byte| **byte == 0).count() as u64;
    let tokens = zeros + 4 * (calldata.len() as u64 - zeros);
    21_000 + 10 * tokens
}

#[cfg(test)]
mod tests {
    use alloy_primitives::{Address, U256};

    use super::*;

    #[test]
    fn intrinsic_gas_counts_a_zero_byte_as_a_quarter_of_another() {
        assert_eq!(intrinsic_gas(&[0, 0, 1, 1, 1]), 21_000 + 2 * 10 + 3 * 40);
    }

    #[test]
    fn only_signatures_of_keys_use_the_standard_overload() {
        let authorization = Authorization {
            from: Address::repeat_byte(1),
            to: Address::repeat_byte(2),
            value: U256::from(1),
            valid_after: U256::ZERO,
            valid_before: U256::from(2),
            nonce: B256::repeat_byte(3),
        };
        let selector = |signature: Vec<u8>| calldata(&authorization, &signature.into())[..4].to_vec();
        let with_v = |v| [vec![7; 64], vec![v]].concat();
        assert_eq!(selector(with_v(27)), [0xe3, 0xee, 0x16, 0x0e]);
        for other in [with_v(0), with_v(29), vec![7; 64], vec![7; 66], vec![27]] {
            assert_eq!(selector(other), [0xcf, 0x09, 0x29, 0x95]);
        }
    }
}
