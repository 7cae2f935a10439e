// SPDX-License-Identifier: MIT OR Apache-2.0
pragma solidity ^0.8.28;

interface IToken {
    function balanceOf(address account) external view returns (uint256);
    function authorizationState(address authorizer, bytes32 nonce) external view returns (bool);
    function DOMAIN_SEPARATOR() external view returns (bytes32);
    function paused() external view returns (bool);
    function isBlacklisted(address account) external view returns (bool);
}

/// @title Everything worth knowing about one payment, in one `eth_call`
/// @notice Never deployed: run it with `eth_call`, without `to`, with the creation code and its arguments as data. The
/// constructor answers with `abi.encode(uint256[13] facts, bytes reason)`; `Fact` below names the words. The facts are
/// those before the simulated transfer. A token without one of the functions, or one that burns gas in it, yields zero.
/// `TransferGas` is less than a transaction needs: here the reads have warmed the slots, and nothing is paid for calldata.
/// @dev The first byte of the answer is the top byte of a block number, hence never 0xEF, which EIP-3541 would refuse.
contract PaymentProbe {
    enum Fact {
        BlockNumber,
        BlockTimestamp,
        PayerBalance,
        PayerCodeLength,
        AuthorizationUsed,
        TransferSucceeded,
        TransferGas,
        TokenCodeLength,
        DomainSeparator,
        Paused,
        PayerBlacklisted,
        PayeeBlacklisted,
        PayeeGain
    }

    uint256 private constant READ_GAS = 100_000;
    uint256 private constant MAX_REASON = 256;

    /// @param transfer the calldata of the token's `transferWithAuthorization`
    /// @param gasCap how much gas that call may use
    constructor(
        address token,
        address payer,
        address payee,
        bytes32 nonce,
        uint256 gasCap,
        bytes memory transfer
    ) {
        uint256[13] memory facts;
        facts[uint256(Fact.BlockNumber)] = block.number;
        facts[uint256(Fact.BlockTimestamp)] = block.timestamp;
        facts[uint256(Fact.PayerBalance)] = read(token, abi.encodeCall(IToken.balanceOf, (payer)));
        facts[uint256(Fact.PayerCodeLength)] = payer.code.length;
        facts[uint256(Fact.AuthorizationUsed)] = read(token, abi.encodeCall(IToken.authorizationState, (payer, nonce)));
        facts[uint256(Fact.TokenCodeLength)] = token.code.length;
        facts[uint256(Fact.DomainSeparator)] = read(token, abi.encodeCall(IToken.DOMAIN_SEPARATOR, ()));
        facts[uint256(Fact.Paused)] = read(token, abi.encodeCall(IToken.paused, ()));
        facts[uint256(Fact.PayerBlacklisted)] = read(token, abi.encodeCall(IToken.isBlacklisted, (payer)));
        facts[uint256(Fact.PayeeBlacklisted)] = read(token, abi.encodeCall(IToken.isBlacklisted, (payee)));

        bytes memory reason;
        if (token.code.length != 0) {
            uint256 before = read(token, abi.encodeCall(IToken.balanceOf, (payee)));
            bool success;
            (success, facts[uint256(Fact.TransferGas)], reason) = simulate(token, gasCap, transfer);
            uint256 afterwards = read(token, abi.encodeCall(IToken.balanceOf, (payee)));
            facts[uint256(Fact.TransferSucceeded)] = success ? 1 : 0;
            facts[uint256(Fact.PayeeGain)] = afterwards > before ? afterwards - before : 0;
        }

        bytes memory answer = abi.encode(facts, reason);
        assembly ("memory-safe") {
            return(add(answer, 0x20), mload(answer))
        }
    }

    /// @dev Copies one word at most, whatever the token returns.
    function read(address token, bytes memory input) private view returns (uint256 word) {
        assembly ("memory-safe") {
            let success := staticcall(READ_GAS, token, add(input, 0x20), mload(input), 0x00, 0x20)
            if and(success, gt(returndatasize(), 0x1f)) { word := mload(0x00) }
        }
    }

    /// @dev Copies the beginning of the revert data only, whatever its length.
    function simulate(address token, uint256 gasCap, bytes memory transfer)
        private
        returns (bool success, uint256 used, bytes memory reason)
    {
        uint256 gasBefore = gasleft();
        assembly ("memory-safe") {
            success := call(gasCap, token, 0, add(transfer, 0x20), mload(transfer), 0x00, 0x00)
        }
        used = gasBefore - gasleft();
        if (!success) {
            uint256 length;
            assembly ("memory-safe") {
                length := returndatasize()
            }
            if (length > MAX_REASON) length = MAX_REASON;
            reason = new bytes(length);
            assembly ("memory-safe") {
                returndatacopy(add(reason, 0x20), 0x00, length)
            }
        }
    }
}
