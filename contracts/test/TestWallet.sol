// SPDX-License-Identifier: MIT OR Apache-2.0
pragma solidity ^0.8.28;

/// @title A contract wallet for tests
/// @notice Accepts what its one owner signed. Works as a contract of its own and as the target of an EIP-7702 delegation,
/// where the storage is empty and the owner is the delegating account itself. It can be told to change its mind between
/// verification and settlement, and to waste gas.
contract TestWallet {
    bytes4 private constant ACCEPTED = 0x1626ba7e;
    bytes4 private constant REFUSED = 0xffffffff;

    address private _owner;
    bool private _refusing;
    uint256 private _gasBurn;

    constructor(address owner_) {
        _owner = owner_;
    }

    receive() external payable {}

    function owner() public view returns (address) {
        return _owner == address(0) ? address(this) : _owner;
    }

    function setOwner(address owner_) external {
        _owner = owner_;
    }

    function setAccepting(bool accepting) external {
        _refusing = !accepting;
    }

    /// @param amount roughly how much gas every check wastes
    function setGasBurn(uint256 amount) external {
        _gasBurn = amount;
    }

    /// @notice Looks at the first 65 bytes only, so that longer signatures can be accepted too.
    function isValidSignature(bytes32 digest, bytes calldata signature) external view returns (bytes4) {
        uint256 burn = _gasBurn;
        uint256 start = gasleft();
        while (start - gasleft() < burn) {}
        if (_refusing || signature.length < 65) return REFUSED;
        bytes32 r = bytes32(signature[0:32]);
        bytes32 s = bytes32(signature[32:64]);
        address signer = ecrecover(digest, uint8(signature[64]), r, s);
        return signer != address(0) && signer == owner() ? ACCEPTED : REFUSED;
    }
}
