//! The scheme's proxy, which has Permit2 move at most what was signed for.

use alloy_primitives::{Address, Bytes, U256};
use alloy_sol_types::{SolCall as _, SolInterface as _};

use super::permit;
use crate::{
    eip3009::{Authorization, PaymentSignature},
    permit2::{Permit, SettleCall, transfer_from},
};

alloy_sol_types::sol! {
    /// What it has beside the rest of a [`Proxy`](crate::permit2::Proxy).
    #[derive(Debug)]
    interface UptoProxy {
        error AmountExceedsPermitted();
        error UnauthorizedFacilitator();

        function settle(
            ((address, uint256), uint256, uint256) permit,
            uint256 amount,
            address owner,
            (address, address, uint256) witness,
            bytes signature
        );
        function settleWithPermit(
            (uint256, uint256, bytes32, bytes32, uint8) approval,
            ((address, uint256), uint256, uint256) permit,
            uint256 amount,
            address owner,
            (address, address, uint256) witness,
            bytes signature
        );
    }
}

/// Returns the calldata with which the account that a permit names has the proxy move `amount`.
pub(crate) fn calldata(
    maximum: &Authorization,
    (permit, account): (&Permit, Address),
    amount: U256,
    signature: &PaymentSignature,
) -> Bytes {
    let call = UptoProxy::settleCall {
        permit: transfer_from(maximum, permit),
        amount,
        owner: maximum.from,
        witness: (maximum.to, account, maximum.valid_after),
        signature: signature.as_bytes().to_vec().into(),
    };
    call.abi_encode().into()
}

/// Returns what this calldata of the proxy says, or `None` if it settles nothing.
pub(crate) fn read_call(calldata: &[u8]) -> Option<SettleCall> {
    let (permitted, amount, owner, witness) = match UptoProxy::UptoProxyCalls::abi_decode(calldata).ok()? {
        UptoProxy::UptoProxyCalls::settle(call) => (call.permit, call.amount, call.owner, call.witness),
        UptoProxy::UptoProxyCalls::settleWithPermit(call) => (call.permit, call.amount, call.owner, call.witness),
    };
    let (((token, _), nonce, _), (payee, account, _)) = (permitted, witness);
    Some(SettleCall { permit: permit(token, account), owner, payee, nonce: nonce.into(), amount })
}

/// Returns the name of the error with which the proxy reverted, if other proxies have no such error.
pub(crate) fn revert_name(data: &[u8]) -> Option<&'static str> {
    Some(match UptoProxy::UptoProxyErrors::abi_decode(data).ok()? {
        UptoProxy::UptoProxyErrors::AmountExceedsPermitted(_) => "AmountExceedsPermitted",
        UptoProxy::UptoProxyErrors::UnauthorizedFacilitator(_) => "UnauthorizedFacilitator",
    })
}
