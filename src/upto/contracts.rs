//! The contracts: Permit2, and the proxy through which the scheme uses it.

use alloy_primitives::{Address, B256, Bytes, U256};
use alloy_sol_types::{SolCall as _, SolInterface as _};

use super::{
    Permit,
    message::{TokenPermissions as SignedToken, Witness as SignedWitness},
};
use crate::eip3009::{Authorization, PaymentSignature};

alloy_sol_types::sol! {
    #[derive(Debug)]
    struct TokenPermissions {
        address token;
        uint256 amount;
    }

    #[derive(Debug)]
    struct PermitTransferFrom {
        TokenPermissions permitted;
        uint256 nonce;
        uint256 deadline;
    }

    #[derive(Debug)]
    struct Witness {
        address to;
        address facilitator;
        uint256 validAfter;
    }

    /// An approval by EIP-2612, which other facilitators submit together with the permit.
    #[derive(Debug)]
    struct EIP2612Permit {
        uint256 value;
        uint256 deadline;
        bytes32 r;
        bytes32 s;
        uint8 v;
    }

    /// The scheme's proxy.
    #[derive(Debug)]
    interface UptoProxy {
        event Settled();
        event SettledWithPermit();

        error ReentrancyGuardReentrantCall();
        error AmountExceedsPermitted();
        error UnauthorizedFacilitator();
        error InvalidAmount();
        error InvalidOwner();
        error InvalidDestination();
        error PaymentTooEarly();

        function PERMIT2() external view returns (address);
        function WITNESS_TYPEHASH() external view returns (bytes32);
        function settle(
            PermitTransferFrom permit, uint256 amount, address owner, Witness witness, bytes signature
        );
        function settleWithPermit(
            EIP2612Permit approval,
            PermitTransferFrom permit,
            uint256 amount,
            address owner,
            Witness witness,
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

/// Returns the calldata with which the facilitator has the proxy move `amount`.
pub(crate) fn calldata(maximum: &Authorization, permit: &Permit, amount: U256, signature: &PaymentSignature) -> Bytes {
    let typed = permit.typed(maximum);
    let SignedToken { token, amount: most } = typed.permitted;
    let SignedWitness { to, facilitator, validAfter } = typed.witness;
    let call = UptoProxy::settleCall {
        permit: PermitTransferFrom {
            permitted: TokenPermissions { token, amount: most },
            nonce: typed.nonce,
            deadline: typed.deadline,
        },
        amount,
        owner: maximum.from,
        witness: Witness { to, facilitator, validAfter },
        signature: signature.as_bytes().to_vec().into(),
    };
    call.abi_encode().into()
}

/// What a call of the proxy moves, if it succeeds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SettleCall {
    pub(crate) owner: Address,
    pub(crate) token: Address,
    pub(crate) payee: Address,
    pub(crate) facilitator: Address,
    pub(crate) nonce: B256,
    pub(crate) amount: U256,
}

impl SettleCall {
    /// Returns what this calldata of the proxy says, or `None` if it settles nothing.
    pub(crate) fn read(calldata: &[u8]) -> Option<Self> {
        let (permit, amount, owner, witness) = match UptoProxy::UptoProxyCalls::abi_decode(calldata).ok()? {
            UptoProxy::UptoProxyCalls::settle(call) => (call.permit, call.amount, call.owner, call.witness),
            UptoProxy::UptoProxyCalls::settleWithPermit(call) => (call.permit, call.amount, call.owner, call.witness),
            UptoProxy::UptoProxyCalls::PERMIT2(_) | UptoProxy::UptoProxyCalls::WITNESS_TYPEHASH(_) => return None,
        };
        Some(Self {
            owner,
            token: permit.permitted.token,
            payee: witness.to,
            facilitator: witness.facilitator,
            nonce: permit.nonce.into(),
            amount,
        })
    }
}

/// Returns the word of an owner's bitmap that has this nonce, and its bit there.
pub(crate) fn nonce_place(nonce: B256) -> (U256, U256) {
    let nonce = U256::from_be_bytes(nonce.0);
    (nonce >> 8, U256::ONE << (nonce & U256::from(0xff)).to::<usize>())
}

/// Returns the name of the error with which one of the contracts reverted.
pub(crate) fn revert_name(data: &[u8]) -> Option<&'static str> {
    use Permit2::Permit2Errors as OfPermit2;
    use UptoProxy::UptoProxyErrors as OfProxy;
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
        OfProxy::AmountExceedsPermitted(_) => "AmountExceedsPermitted",
        OfProxy::UnauthorizedFacilitator(_) => "UnauthorizedFacilitator",
        OfProxy::InvalidAmount(_) => "InvalidAmount",
        OfProxy::InvalidOwner(_) => "InvalidOwner",
        OfProxy::InvalidDestination(_) => "InvalidDestination",
        OfProxy::PaymentTooEarly(_) => "PaymentTooEarly",
    })
}
