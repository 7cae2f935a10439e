// SPDX-License-Identifier: MIT OR Apache-2.0
pragma solidity ^0.8.28;

/// @title Many signed transfers of one token, in one transaction
/// @notice Forwards EIP-3009 authorizations to their token. It needs no trust: it has no owner, no storage, no funds and no
/// upgrade, and whoever calls it can only have done what the payers signed. What it can be made to call is one function, the
/// `transferWithAuthorization` of the EIP with its `v, r, s`; an allowance given to this contract is of no use to anybody.
///
/// **Calldata** has no selector and no padding. Numbers are big-endian.
///
///     call     token 20 | gas cap 4 | group...                                     at least one group
///     group    payee 20 | count 2 | payment * count                                at least one payment
///     payment  payer 20 | value 12 | validAfter 5 | validBefore 5 | nonce 32 | r 32 | yParityAndS 32      138 bytes
///
/// Payments to one payee share its address, which saves 20 of 158 bytes; several payees share the transaction. Twelve bytes of
/// value are 79 billion tokens of 18 decimals and fill a word with the payer; five bytes of time reach the year 36812. A low `s`
/// leaves its highest bit to the parity of `v` (EIP-2098), and a token that takes a high one is no USDC. What does not fit
/// is settled without this contract.
///
/// **Each payment stands alone.** A call that reverts, returns whatever, or burns its gas costs the batch at most the gas cap:
/// success is counted and nothing else, and no return data is copied. Payers with code are passed over, for 2,600 gas: USDC would
/// ask that code for its opinion (ERC-1271), and a payer that delegates to code after it was looked at (EIP-7702) could burn
/// the cap in each of a hundred payments.
///
/// **Gas.** A payment is tried only if its call is sure to get the whole gas cap, in spite of the 63/64 rule. When too little is
/// left the rest of the batch is not touched: no payment ever fails because the transaction was given too little. Hence
/// `eth_estimateGas`, which looks for the least gas that does not revert, tells what the first payment needs and
/// not what the batch needs; callers add it up themselves.
///
/// **Outcome.** `(uint256 reached, uint256 executed)`: how many payments were come to, and how many of their calls did not revert.
/// That is for simulations. What was paid is told by the token's own `AuthorizationUsed` and `Transfer`, one pair for each
/// payment, so this contract emits nothing. If no call succeeded it reverts, so that a batch that somebody else
/// executed first looks like what it is, and costs nothing with relays that drop what reverts. Nothing is lost by it: calls
/// that reverted have left nothing to undo.
///
/// **Deployment** is one call of the deterministic deployment proxy 0x4e59b44847b379578588920cA78FbF26c0B4956C by anybody, with
/// 32 zero bytes (the salt) and this contract's creation code. The address follows from these two alone, on every chain.
/// Base, Ethereum and anvil have the proxy. Elsewhere anybody can put it there: its deployment is a transaction that was signed
/// once for all chains (https://github.com/Arachnid/deterministic-deployment-proxy); a chain that refuses transactions without a
/// chain id needs it at genesis.
contract BatchSettler {
    /// @notice The length does not fit the counts, a count is zero, or the gas cap is.
    error Malformed();
    /// @notice There is no contract at the token's address; calls there would succeed and do nothing.
    error NoToken();
    /// @notice No call succeeded; none was tried if `reached` is zero, for want of gas.
    error NothingExecuted(uint256 reached);

    uint256 private constant HEADER = 24;
    uint256 private constant GROUP = 22;
    uint256 private constant PAYMENT = 138;

    /// @dev `transferWithAuthorization(address,address,uint256,uint256,uint256,bytes32,uint8,bytes32,bytes32)`, leftmost.
    uint256 private constant SELECTOR = 0xe3ee160e00000000000000000000000000000000000000000000000000000000;
    /// @dev The selector and nine words.
    uint256 private constant INPUT = 0x124;

    /// @dev What a payment may take beside its call, and then the end of the transaction: a cold account (2,600), a token that
    /// is a delegation to another cold account (2,600), and well under 1,000 for the rest. Twice that, since prices change.
    uint256 private constant RESERVE = 12_000;

    fallback() external {
        address token;
        uint256 gasCap;
        assembly ("memory-safe") {
            token := shr(96, calldataload(0))
            gasCap := shr(224, calldataload(20))
        }
        if (gasCap == 0 || !isWellFormed()) revert Malformed();
        if (token.code.length == 0) revert NoToken();

        (uint256 reached, uint256 executed) = execute(token, gasCap);
        if (executed == 0) revert NothingExecuted(reached);
        assembly ("memory-safe") {
            mstore(0x00, reached)
            mstore(0x20, executed)
            return(0x00, 0x40)
        }
    }

    /// @dev Whether the groups end exactly where the calldata does. Beyond its end it reads as zero, so a truncated group header
    /// has a count of zero or one that leads beyond the end.
    function isWellFormed() private pure returns (bool) {
        uint256 cursor = HEADER;
        do {
            uint256 count;
            assembly ("memory-safe") {
                count := and(shr(80, calldataload(cursor)), 0xffff)
            }
            if (count == 0) return false;
            // At most 65,535 payments a group: nothing here comes near an overflow.
            unchecked {
                cursor += GROUP + count * PAYMENT;
            }
        } while (cursor < msg.data.length);
        return cursor == msg.data.length;
    }

    /// @dev Expects what `isWellFormed` accepts.
    function execute(address token, uint256 gasCap) private returns (uint256 reached, uint256 executed) {
        assembly ("memory-safe") {
            // A call gets the gas it asks for if 63/64 of what is left are that much.
            let enough := add(add(gasCap, div(gasCap, 63)), RESERVE)
            // One call's input, overwritten by each payment; the payee's word by each group.
            let input := mload(0x40)
            mstore(input, SELECTOR)

            let groupEnd := HEADER
            for { let cursor := HEADER } lt(cursor, calldatasize()) { cursor := add(cursor, PAYMENT) } {
                if eq(cursor, groupEnd) {
                    let payeeAndCount := calldataload(cursor)
                    mstore(add(input, 0x24), shr(96, payeeAndCount))
                    cursor := add(cursor, GROUP)
                    groupEnd := add(cursor, mul(and(shr(80, payeeAndCount), 0xffff), PAYMENT))
                }
                if lt(gas(), enough) { break }
                reached := add(reached, 1)

                let payerAndValue := calldataload(cursor)
                let payer := shr(96, payerAndValue)
                if extcodesize(payer) { continue }

                let times := calldataload(add(cursor, 32))
                let yParityAndS := calldataload(add(cursor, 106))
                mstore(add(input, 0x04), payer)
                mstore(add(input, 0x44), and(payerAndValue, 0xffffffffffffffffffffffff))
                mstore(add(input, 0x64), shr(216, times)) // validAfter
                mstore(add(input, 0x84), and(shr(176, times), 0xffffffffff)) // validBefore
                mstore(add(input, 0xa4), calldataload(add(cursor, 42))) // nonce
                mstore(add(input, 0xc4), add(27, shr(255, yParityAndS))) // v
                mstore(add(input, 0xe4), calldataload(add(cursor, 74))) // r
                mstore(add(input, 0x104), shr(1, shl(1, yParityAndS))) // s
                executed := add(executed, call(gasCap, token, 0, input, INPUT, 0, 0))
            }
        }
    }
}
