// SPDX-License-Identifier: MIT OR Apache-2.0
pragma solidity ^0.8.28;

/// @title A token that does what the value of an authorization says
/// @notice For tests of the batch settler: one batch can mix members that pay with members that misbehave. Signatures and
/// balances are not looked at.
contract HostileToken {
    event AuthorizationUsed(address indexed authorizer, bytes32 indexed nonce);
    event Transfer(address indexed from, address indexed to, uint256 value);
    /// @notice Every argument as it arrived, and the gas that came with them.
    event Called(
        address from,
        address to,
        uint256 value,
        uint256 validAfter,
        uint256 validBefore,
        bytes32 nonce,
        uint8 v,
        bytes32 r,
        bytes32 s,
        uint256 gas
    );

    /// @dev In the order of their numbers; larger values pay.
    enum Way {
        Pays,
        Reverts,
        RevertsWithALongReason,
        ReturnsFalse,
        ReturnsNothing,
        ReturnsALot,
        BurnsAllGas,
        FailsAtOnce,
        TakesAllButTheLast,
        CallsBack
    }

    /// @notice What `CallsBack` calls with `data`, whoever that is.
    address public target;
    bytes public data;

    /// @notice How much gas a payment must come with.
    uint256 public least;

    mapping(address => mapping(bytes32 => bool)) public authorizationState;

    function setCallback(address target_, bytes calldata data_) external {
        (target, data) = (target_, data_);
    }

    function setLeast(uint256 least_) external {
        least = least_;
    }

    function transferWithAuthorization(
        address from,
        address to,
        uint256 value,
        uint256 validAfter,
        uint256 validBefore,
        bytes32 nonce,
        uint8 v,
        bytes32 r,
        bytes32 s
    ) external {
        uint256 gas = gasleft();
        Way way = value > uint256(type(Way).max) ? Way.Pays : Way(value);
        if (way == Way.Reverts) revert("no");
        if (way == Way.FailsAtOnce) assembly ("memory-safe") { invalid() }
        if (way == Way.BurnsAllGas) while (true) {}
        if (way == Way.ReturnsNothing) return;
        if (way == Way.ReturnsFalse) assembly ("memory-safe") { mstore(0, 0) return(0, 32) }
        if (way == Way.ReturnsALot) assembly { return(0, 200000) }
        if (way == Way.RevertsWithALongReason) assembly { revert(0, 200000) }
        if (way == Way.CallsBack) {
            (bool success,) = target.call(data);
            require(success, "the call back failed");
        }
        require(gas >= least, "too little gas");
        require(!authorizationState[from][nonce], "used");
        authorizationState[from][nonce] = true;
        emit AuthorizationUsed(from, nonce);
        emit Transfer(from, to, value);
        emit Called(from, to, value, validAfter, validBefore, nonce, v, r, s, gas);
        if (way == Way.TakesAllButTheLast) while (gasleft() > 500) {}
    }
}
