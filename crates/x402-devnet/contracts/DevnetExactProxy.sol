// SPDX-License-Identifier: MIT OR Apache-2.0
pragma solidity ^0.8.28;

import {IPermit2} from "DevnetUptoProxy.sol";

/// @title A double of x402's proxy for the scheme `exact` by Permit2, for the devnet and for tests
/// @notice Moves what the payer signed for, to the payee that it signed for, whoever asks: with the errors and in the order of the
/// original. Its runtime code belongs at 0x402085c248EeA27D92E8b30b2C58ed07f9E20001.
contract DevnetExactProxy {
    struct Witness {
        address to;
        uint256 validAfter;
    }

    event Settled();

    error ReentrancyGuardReentrantCall();
    error InvalidAmount();
    error InvalidOwner();
    error InvalidDestination();
    error PaymentTooEarly();

    address public constant PERMIT2 = 0x000000000022D473030F116dDEE9F6B43aC78BA3;
    bytes32 public constant WITNESS_TYPEHASH = keccak256("Witness(address to,uint256 validAfter)");
    string public constant WITNESS_TYPE_STRING =
        "Witness witness)TokenPermissions(address token,uint256 amount)Witness(address to,uint256 validAfter)";

    bool private entered;

    function settle(
        IPermit2.PermitTransferFrom calldata permit,
        address owner,
        Witness calldata witness,
        bytes calldata signature
    ) external {
        if (entered) revert ReentrancyGuardReentrantCall();
        entered = true;
        if (permit.permitted.amount == 0) revert InvalidAmount();
        if (owner == address(0)) revert InvalidOwner();
        if (witness.to == address(0)) revert InvalidDestination();
        if (block.timestamp < witness.validAfter) revert PaymentTooEarly();
        IPermit2(PERMIT2).permitWitnessTransferFrom(
            permit,
            IPermit2.SignatureTransferDetails({to: witness.to, requestedAmount: permit.permitted.amount}),
            owner,
            keccak256(abi.encode(WITNESS_TYPEHASH, witness.to, witness.validAfter)),
            WITNESS_TYPE_STRING,
            signature
        );
        entered = false;
        emit Settled();
    }
}
