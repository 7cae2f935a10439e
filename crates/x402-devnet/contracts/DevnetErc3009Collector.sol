// SPDX-License-Identifier: MIT OR Apache-2.0
pragma solidity ^0.8.28;

interface IReceiveWithAuthorization {
    function receiveWithAuthorization(
        address from,
        address to,
        uint256 value,
        uint256 validAfter,
        uint256 validBefore,
        bytes32 nonce,
        bytes calldata signature
    ) external;
    function transfer(address to, uint256 value) external returns (bool);
}

/// @title A double of x402's ERC-3009 deposit collector, for the devnet and for tests
/// @notice Pulls a deposit with the payer's `ReceiveWithAuthorization` and hands it to the escrow. Its runtime code belongs at
/// 0x4020806089470a89826cB9fB1f4059150b550004, which payers name as the authorization's `to`.
contract DevnetErc3009Collector {
    error OnlyX402BatchSettlement();

    address public constant x402BatchSettlement = 0x4020074e9dF2ce1deE5A9C1b5c3f541D02a10003;

    /// @param data `abi.encode(uint256 validAfter, uint256 validBefore, uint256 salt, bytes signature)`
    function collect(address payer, address token, uint256 amount, bytes32 channelId, bytes calldata data) external {
        if (msg.sender != x402BatchSettlement) revert OnlyX402BatchSettlement();
        (uint256 validAfter, uint256 validBefore, uint256 salt, bytes memory signature) =
            abi.decode(data, (uint256, uint256, uint256, bytes));
        // The nonce names the channel: an authorization signed for one cannot fill another.
        bytes32 nonce = keccak256(abi.encode(channelId, salt));
        IReceiveWithAuthorization(token).receiveWithAuthorization(
            payer, address(this), amount, validAfter, validBefore, nonce, signature
        );
        require(IReceiveWithAuthorization(token).transfer(msg.sender, amount));
    }
}
