// SPDX-License-Identifier: MIT OR Apache-2.0
pragma solidity ^0.8.28;

interface IToken {
    function balanceOf(address account) external view returns (uint256);
    function allowance(address owner, address spender) external view returns (uint256);
}

interface IPermit2 {
    function nonceBitmap(address owner, uint256 wordPos) external view returns (uint256);
}

/// @title What a chain shows of one permit, in one `eth_call`
/// @notice Never deployed: run it with `eth_call`, without `to`, with the creation code and its arguments as data. The
/// constructor answers with `abi.encode(uint256[8])`; `Fact` below names the words. A contract without one of the functions, or
/// one that burns gas in it, yields zero.
/// @dev The first byte of the answer is the top byte of a block number, hence never 0xEF, which EIP-3541 would refuse.
contract PermitProbe {
    enum Fact {
        BlockNumber,
        BlockTimestamp,
        PayerBalance,
        PayerCodeLength,
        NonceUsed,
        TokenCodeLength,
        Allowance,
        ProxyCodeLength
    }

    uint256 private constant READ_GAS = 100_000;

    constructor(address token, address payer, uint256 nonce, address permit2, address proxy) {
        uint256[8] memory facts;
        facts[uint256(Fact.BlockNumber)] = block.number;
        facts[uint256(Fact.BlockTimestamp)] = block.timestamp;
        facts[uint256(Fact.PayerBalance)] = read(token, abi.encodeCall(IToken.balanceOf, (payer)));
        facts[uint256(Fact.PayerCodeLength)] = payer.code.length;
        uint256 word = read(permit2, abi.encodeCall(IPermit2.nonceBitmap, (payer, nonce >> 8)));
        facts[uint256(Fact.NonceUsed)] = (word >> (nonce & 0xff)) & 1;
        facts[uint256(Fact.TokenCodeLength)] = token.code.length;
        facts[uint256(Fact.Allowance)] = read(token, abi.encodeCall(IToken.allowance, (payer, permit2)));
        facts[uint256(Fact.ProxyCodeLength)] = permit2.code.length == 0 ? 0 : proxy.code.length;
        bytes memory answer = abi.encode(facts);
        assembly ("memory-safe") {
            return(add(answer, 0x20), mload(answer))
        }
    }

    /// @dev Copies one word at most, whatever the contract returns.
    function read(address from, bytes memory input) private view returns (uint256 word) {
        assembly ("memory-safe") {
            let success := staticcall(READ_GAS, from, add(input, 0x20), mload(input), 0x00, 0x20)
            if and(success, gt(returndatasize(), 0x1f)) { word := mload(0x00) }
        }
    }
}
