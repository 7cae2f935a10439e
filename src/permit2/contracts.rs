//! The contracts: Permit2, and the proxy through which the scheme `exact` uses it.

use alloy_primitives::{Address, B256, Bytes, U256};
use alloy_sol_types::{SolCall as _, SolInterface as _};

use super::Permit;
use crate::eip3009::{Authorization, PaymentSignature};

/// `PermitTransferFrom` of Permit2: the token and the most of it, nonce, and deadline.
pub(crate) type PermitTransferFrom = ((Address, U256), U256, U256);

alloy_sol_types::sol! {
    /// The proxy of `exact`. Others have all of this but the functions that settle, which say more.
    ///
    /// `approval` is one by EIP-2612 (value, deadline, r, s, v), which other facilitators submit together with a permit.
    #[derive(Debug)]
    interface Proxy {
        event Settled();
        event SettledWithPermit();

        error ReentrancyGuardReentrantCall();
        error InvalidAmount();
        error InvalidOwner();
        error InvalidDestination();
        error PaymentTooEarly();

        function PERMIT2() external view returns (address);
        function WITNESS_TYPEHASH() external view returns (bytes32);
        function settle(
            ((address, uint256), uint256, uint256) permit, address owner, (address, uint256) witness, bytes signature
        );
        function settleWithPermit(
            (uint256, uint256, bytes32, bytes32, uint8) approval,
            ((address, uint256), uint256, uint256) permit,
            address owner,
            (address, uint256) witness,
            bytes signature
        );
    }

    /// The part of Permit2 that moves tokens by signature.
    #[derive(Debug)]
    interface Permit2 {
        event UnorderedNonceInvalidation(address indexed owner, uint256 word, uint256 mask);

        error InvalidNonce();
        error SignatureExpired(uint256 signatureDeadline);
        error InvalidAmount(uint256 maxAmount);
        error InvalidSigner();
        error InvalidSignature();
        error InvalidSignatureLength();
        error InvalidContractSignature();

        function nonceBitmap(address owner, uint256 wordPos) external view returns (uint256);
    }
}

/// Returns the part of a call that Permit2 takes.
pub(crate) fn transfer_from(signed: &Authorization, permit: &Permit) -> PermitTransferFrom {
    ((permit.token, signed.value), signed.nonce.into(), signed.valid_before)
}

/// Returns the calldata with which anybody has the proxy move what was signed for.
pub(crate) fn calldata(signed: &Authorization, permit: &Permit, signature: &PaymentSignature) -> Bytes {
    let call = Proxy::settleCall {
        permit: transfer_from(signed, permit),
        owner: signed.from,
        witness: (signed.to, signed.valid_after),
        signature: signature.as_bytes().to_vec().into(),
    };
    call.abi_encode().into()
}

/// What a call of a proxy moves, if it succeeds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SettleCall {
    pub(crate) permit: Permit,
    pub(crate) owner: Address,
    pub(crate) payee: Address,
    pub(crate) nonce: B256,
    pub(crate) amount: U256,
}

/// Returns what this calldata of the proxy says, or `None` if it settles nothing.
pub(crate) fn read_call(calldata: &[u8]) -> Option<SettleCall> {
    let (((token, amount), nonce, _), owner, (payee, _)) = match Proxy::ProxyCalls::abi_decode(calldata).ok()? {
        Proxy::ProxyCalls::settle(call) => (call.permit, call.owner, call.witness),
        Proxy::ProxyCalls::settleWithPermit(call) => (call.permit, call.owner, call.witness),
        Proxy::ProxyCalls::PERMIT2(_) | Proxy::ProxyCalls::WITNESS_TYPEHASH(_) => return None,
    };
    Some(SettleCall { permit: Permit::new(token), owner, payee, nonce: nonce.into(), amount })
}

/// Returns the word of an owner's bitmap that has this nonce, and its bit there.
pub(crate) fn nonce_place(nonce: B256) -> (U256, U256) {
    let nonce = U256::from_be_bytes(nonce.0);
    (nonce >> 8, U256::ONE << (nonce & U256::from(0xff)).to::<usize>())
}

/// Returns the name of the error with which Permit2 or a proxy reverted.
pub(crate) fn revert_name(data: &[u8]) -> Option<&'static str> {
    use Permit2::Permit2Errors as OfPermit2;
    use Proxy::ProxyErrors as OfProxy;
    if let Ok(error) = OfPermit2::abi_decode(data) {
        return Some(match error {
            OfPermit2::InvalidNonce(_) => "InvalidNonce",
            OfPermit2::SignatureExpired(_) => "SignatureExpired",
            OfPermit2::InvalidAmount(_) => "InvalidAmount",
            OfPermit2::InvalidSigner(_) => "InvalidSigner",
            OfPermit2::InvalidSignature(_) => "InvalidSignature",
            OfPermit2::InvalidSignatureLength(_) => "InvalidSignatureLength",
            OfPermit2::InvalidContractSignature(_) => "InvalidContractSignature",
        });
    }
    Some(match OfProxy::abi_decode(data).ok()? {
        OfProxy::ReentrancyGuardReentrantCall(_) => "ReentrancyGuardReentrantCall",
        OfProxy::InvalidAmount(_) => "InvalidAmount",
        OfProxy::InvalidOwner(_) => "InvalidOwner",
        OfProxy::InvalidDestination(_) => "InvalidDestination",
        OfProxy::PaymentTooEarly(_) => "PaymentTooEarly",
    })
}
