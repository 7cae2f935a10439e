//! The token's ABI, and its EIP-3009 calls made from a message and a signature.

use alloy_sol_types::sol;

use super::authorization::{CancelAuthorization, Signature, TransferWithAuthorization};

sol! {
    /// What the tests call of USDC; every token here answers to it.
    #[derive(Debug)]
    interface Token {
        event Transfer(address indexed from, address indexed to, uint256 value);
        event AuthorizationUsed(address indexed authorizer, bytes32 indexed nonce);
        event AuthorizationCanceled(address indexed authorizer, bytes32 indexed nonce);

        function name() external view returns (string);
        function symbol() external view returns (string);
        function version() external view returns (string);
        function decimals() external view returns (uint8);
        function balanceOf(address account) external view returns (uint256);
        function authorizationState(address authorizer, bytes32 nonce) external view returns (bool);
        #[allow(non_snake_case)]
        function DOMAIN_SEPARATOR() external view returns (bytes32);

        function transfer(address to, uint256 value) external returns (bool);
        function transferWithAuthorization(address from, address to, uint256 value, uint256 validAfter,
            uint256 validBefore, bytes32 nonce, uint8 v, bytes32 r, bytes32 s) external;
        function transferWithAuthorization(address from, address to, uint256 value, uint256 validAfter,
            uint256 validBefore, bytes32 nonce, bytes signature) external;
        function cancelAuthorization(address authorizer, bytes32 nonce, uint8 v, bytes32 r, bytes32 s) external;
        function cancelAuthorization(address authorizer, bytes32 nonce, bytes signature) external;
    }
}

/// `transferWithAuthorization(…, uint8 v, bytes32 r, bytes32 s)`.
pub fn transfer_vrs(
    message: &TransferWithAuthorization,
    signature: &Signature,
) -> Token::transferWithAuthorization_0Call {
    Token::transferWithAuthorization_0Call {
        from: message.from,
        to: message.to,
        value: message.value,
        validAfter: message.validAfter,
        validBefore: message.validBefore,
        nonce: message.nonce,
        v: signature.v(),
        r: signature.r(),
        s: signature.s(),
    }
}

/// `transferWithAuthorization(…, bytes signature)`.
pub fn transfer_bytes(
    message: &TransferWithAuthorization,
    signature: &Signature,
) -> Token::transferWithAuthorization_1Call {
    Token::transferWithAuthorization_1Call {
        from: message.from,
        to: message.to,
        value: message.value,
        validAfter: message.validAfter,
        validBefore: message.validBefore,
        nonce: message.nonce,
        signature: signature.bytes(),
    }
}

/// `cancelAuthorization(…, uint8 v, bytes32 r, bytes32 s)`.
pub fn cancel_vrs(message: &CancelAuthorization, signature: &Signature) -> Token::cancelAuthorization_0Call {
    Token::cancelAuthorization_0Call {
        authorizer: message.authorizer,
        nonce: message.nonce,
        v: signature.v(),
        r: signature.r(),
        s: signature.s(),
    }
}
