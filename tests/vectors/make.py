#!/usr/bin/env python3
"""Makes eip3009.json: EIP-3009 authorizations hashed and signed by an implementation that shares no code with ours.

    python3 -m venv venv && venv/bin/pip install -r requirements.txt && venv/bin/python make.py

eth-account (pinned in requirements.txt) encodes the typed data and signs with RFC 6979 nonces, so that the file is the
same on every run; CI runs this script and compares. Integers are decimal strings, everything else is lower-case hex.
With a path as argument the vectors are written there.
"""

import json
import sys
from pathlib import Path

from eth_account import Account
from eth_account.messages import encode_typed_data
from eth_utils import keccak, to_checksum_address

CURVE_ORDER = 0xFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFEBAAEDCE6AF48A03BBFD25E8CD0364141
U64_MAX = 2**64 - 1
U256_MAX = 2**256 - 1

TYPES = {
    "EIP712Domain": [
        {"name": "name", "type": "string"},
        {"name": "version", "type": "string"},
        {"name": "chainId", "type": "uint256"},
        {"name": "verifyingContract", "type": "address"},
    ],
    "TransferWithAuthorization": [
        {"name": "from", "type": "address"},
        {"name": "to", "type": "address"},
        {"name": "value", "type": "uint256"},
        {"name": "validAfter", "type": "uint256"},
        {"name": "validBefore", "type": "uint256"},
        {"name": "nonce", "type": "bytes32"},
    ],
}

BASE = ("USD Coin", "2", 8453, "0x833589fCD6eDb6E08f4c7C32D4f71b54bdA02913")
BASE_SEPOLIA = ("USDC", "2", 84532, "0x036CbD53842c5426634e7929541eC2318f3dCF7e")
# Not ASCII, an empty version, the largest chain id that fits 64 bits.
UNUSUAL = ("Münze ¤ “x402”", "", U64_MAX, "0xffFFFFffFFFFFFfFfFFFFFffFFfffffFFffffFFf")

# What both USDC contracts answer to DOMAIN_SEPARATOR(): if a library computes another, the script stops.
PINNED = {
    BASE: "0x02fa7265e7c5d81118673727957699e4d68f74cd74b7db77da710fe8a2c7834f",
    BASE_SEPOLIA: "0x71f17a3b2ff373b803d70a5a07c046c1a2bc8e89c09ef722fcb047abe94c9818",
}

ALICE = keccak(text="tower-x402 vectors: alice")
BOB = keccak(text="tower-x402 vectors: bob")
KEY_ONE = (1).to_bytes(32, "big")
KEY_LAST = (CURVE_ORDER - 1).to_bytes(32, "big")

PAYEE = to_checksum_address("0x209693bc6afc0c5328ba36faf03c514ef312287c")
ZERO = "0x" + "00" * 20
ONES = "0x" + "ff" * 20

NOW = 1_800_000_000


def hex0x(data):
    return "0x" + bytes(data).hex()


def message(key, to=PAYEE, value=1_000, after=NOW - 600, before=NOW + 60, nonce=None, label=""):
    nonce = keccak(text="nonce of " + label) if nonce is None else nonce
    return {
        "from": Account.from_key(key).address,
        "to": to,
        "value": value,
        "validAfter": after,
        "validBefore": before,
        "nonce": nonce,
    }


def typed(domain, body):
    name, version, chain_id, contract = domain
    return {
        "types": TYPES,
        "primaryType": "TransferWithAuthorization",
        "domain": {"name": name, "version": version, "chainId": chain_id, "verifyingContract": contract},
        "message": body,
    }


def domain_json(domain):
    name, version, chain_id, contract = domain
    return {"name": name, "version": version, "chainId": str(chain_id), "verifyingContract": contract.lower()}


def separator(domain):
    return hex0x(encode_typed_data(full_message=typed(domain, message(ALICE))).header)


def join(r, s, v):
    return hex0x(r.to_bytes(32, "big") + s.to_bytes(32, "big") + bytes([v]))


def case(label, domain, key, **fields):
    body = message(key, label=label, **fields)
    signable = encode_typed_data(full_message=typed(domain, body))
    signed = Account.sign_message(signable, key)
    return {
        "label": label,
        "domain": domain_json(domain),
        "privateKey": hex0x(key),
        "authorization": {
            "from": body["from"].lower(),
            "to": body["to"].lower(),
            "value": str(body["value"]),
            "validAfter": str(body["validAfter"]),
            "validBefore": str(body["validBefore"]),
            "nonce": hex0x(body["nonce"]),
        },
        "domainSeparator": hex0x(signable.header),
        "structHash": hex0x(signable.body),
        "digest": hex0x(signed.message_hash),
        "signature": join(signed.r, signed.s, signed.v),
        # Recovers to the same address, but every USDC refuses it: s is in the upper half of the group.
        "highS": join(signed.r, CURVE_ORDER - signed.s, 55 - signed.v),
    }


def first_nonce(found):
    """The first nonce 0, 1, 2… whose signature (of Alice, plain fields, Base) has the wanted property."""
    for number in range(100_000):
        nonce = number.to_bytes(32, "big")
        signed = Account.sign_message(encode_typed_data(full_message=typed(BASE, message(ALICE, nonce=nonce))), ALICE)
        if found(signed):
            return nonce
    raise SystemExit("no such nonce")


def cases():
    return [
        case("base: a tenth of a cent", BASE, ALICE),
        case("base: another payer", BASE, BOB),
        case("base: nothing", BASE, ALICE, value=0),
        case("base: one unit", BASE, ALICE, value=1),
        case("base: u64::MAX units", BASE, BOB, value=U64_MAX),
        case("base: one more than u64::MAX units", BASE, BOB, value=U64_MAX + 1),
        case("base: U256::MAX units", BASE, ALICE, value=U256_MAX),
        case("base: valid for ever", BASE, ALICE, after=0, before=U256_MAX),
        case("base: valid until u64::MAX", BASE, ALICE, after=0, before=U64_MAX),
        case("base: never valid", BASE, BOB, after=U256_MAX, before=0),
        case("base: v is 27", BASE, ALICE, nonce=first_nonce(lambda signed: signed.v == 27)),
        case("base: v is 28", BASE, ALICE, nonce=first_nonce(lambda signed: signed.v == 28)),
        case("base: r begins with a zero byte", BASE, ALICE, nonce=first_nonce(lambda signed: signed.r >> 248 == 0)),
        case("base: s begins with a zero byte", BASE, ALICE, nonce=first_nonce(lambda signed: signed.s >> 248 == 0)),
        case("base sepolia: a tenth of a cent", BASE_SEPOLIA, ALICE),
        case("base sepolia: another payer", BASE_SEPOLIA, BOB),
        case("base sepolia: u64::MAX units", BASE_SEPOLIA, ALICE, value=U64_MAX),
        case("base sepolia: every field at its largest", BASE_SEPOLIA, BOB, to=ONES, value=U256_MAX, after=U256_MAX,
             before=U256_MAX, nonce=b"\xff" * 32),
        case("base sepolia: every field zero", BASE_SEPOLIA, BOB, to=ZERO, value=0, after=0, before=0, nonce=bytes(32)),
        case("base sepolia: paying oneself", BASE_SEPOLIA, ALICE, to=Account.from_key(ALICE).address),
        case("base sepolia: the smallest private key", BASE_SEPOLIA, KEY_ONE),
        case("base sepolia: the largest private key", BASE_SEPOLIA, KEY_LAST),
        case("unusual domain: a tenth of a cent", UNUSUAL, ALICE),
        case("unusual domain: every field at its largest", UNUSUAL, BOB, to=ONES, value=U256_MAX, after=U256_MAX,
             before=U256_MAX, nonce=b"\xff" * 32),
    ]


def main():
    for domain, pinned in PINNED.items():
        if separator(domain) != pinned:
            raise SystemExit(f"domain separator of {domain} is {separator(domain)}, pinned is {pinned}")
    vectors = {
        "source": "tests/vectors/make.py with eth-account (see requirements.txt)",
        "domainSeparators": {f"eip155:{domain[2]}": pinned for domain, pinned in PINNED.items()},
        "cases": cases(),
    }
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("eip3009.json")
    target.write_text(json.dumps(vectors, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
