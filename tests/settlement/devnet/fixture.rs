//! Shared by the tests: keys, signed authorizations, signed transactions, contract interfaces.

use std::sync::Arc;

use alloy_consensus::{SignableTransaction as _, TxEip1559, TxEnvelope};
use alloy_eips::Encodable2718 as _;
use alloy_primitives::{Address, B256, Bytes, Signature, TxKind, U256, uint};
use alloy_signer::SignerSync as _;
use alloy_signer_local::PrivateKeySigner;
use alloy_sol_types::{SolCall as _, SolStruct, SolValue as _, eip712_domain, sol};
use tower_x402::{Asset, ManualClock};
use x402_devnet::Devnet;

sol! {
    #[derive(Debug)]
    struct TransferWithAuthorization {
        address from;
        address to;
        uint256 value;
        uint256 validAfter;
        uint256 validBefore;
        bytes32 nonce;
    }

    struct CancelAuthorization {
        address authorizer;
        bytes32 nonce;
    }

    interface Usdc {
        event AuthorizationUsed(address indexed authorizer, bytes32 indexed nonce);
        event Transfer(address indexed from, address indexed to, uint256 value);
        function transferWithAuthorization(address from, address to, uint256 value, uint256 validAfter, uint256 validBefore, bytes32 nonce, uint8 v, bytes32 r, bytes32 s);
        function transferWithAuthorization(address from, address to, uint256 value, uint256 validAfter, uint256 validBefore, bytes32 nonce, bytes signature);
        function cancelAuthorization(address authorizer, bytes32 nonce, bytes signature);
        function authorizationState(address authorizer, bytes32 nonce) returns (bool);
        function transfer(address to, uint256 value) returns (bool);
        function owner() returns (address);
        function pause();
        function unpause();
        function blacklist(address account);
        function DOMAIN_SEPARATOR() returns (bytes32);
    }

    interface TestWallet {
        function setOwner(address owner);
        function setAccepting(bool accepting);
        function setGasBurn(uint256 amount);
    }
}

/// The order of the curve secp256k1.
pub(crate) const CURVE_ORDER: U256 = uint!(0xFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFEBAAEDCE6AF48A03BBFD25E8CD0364141_U256);
pub(crate) const NOW: u64 = 1_700_000_000;
pub(crate) const PAYEE: Address = Address::repeat_byte(0x9a);
/// Anybody may send an authorization.
pub(crate) const RELAYER: Address = Address::repeat_byte(0x7e);

pub(crate) async fn devnet() -> (Devnet, Arc<ManualClock>) {
    let clock = Arc::new(ManualClock::at(NOW));
    (Devnet::builder().clock(clock.clone()).start().await.unwrap(), clock)
}

pub(crate) fn key(seed: u8) -> PrivateKeySigner {
    PrivateKeySigner::from_bytes(&B256::repeat_byte(seed)).unwrap()
}

/// A payer with one dollar.
pub(crate) fn payer(devnet: &Devnet) -> PrivateKeySigner {
    let payer = key(0x11);
    devnet.mint(payer.address(), "$1".parse().unwrap()).unwrap();
    payer
}

/// A sender of transactions with one ether.
pub(crate) fn sender(devnet: &Devnet) -> PrivateKeySigner {
    let sender = key(0x22);
    devnet.fund(sender.address(), U256::from(10).pow(U256::from(18)));
    sender
}

pub(crate) fn authorization(from: Address, value: u64) -> TransferWithAuthorization {
    TransferWithAuthorization {
        from,
        to: PAYEE,
        value: U256::from(value),
        validAfter: U256::ZERO,
        validBefore: U256::from(NOW + 60),
        nonce: B256::repeat_byte(0x55),
    }
}

pub(crate) fn digest(asset: &Asset, message: &impl SolStruct) -> B256 {
    message.eip712_signing_hash(&eip712_domain! {
        name: asset.name.clone(),
        version: asset.version.clone(),
        chain_id: asset.network.chain_id(),
        verifying_contract: asset.address,
    })
}

impl TransferWithAuthorization {
    pub(crate) fn sign(&self, asset: &Asset, key: &PrivateKeySigner) -> Signature {
        key.sign_hash_sync(&digest(asset, self)).unwrap()
    }

    /// Calldata of the overload with `v`, `r` and `s`.
    pub(crate) fn with_vrs(&self, v: u8, r: U256, s: U256) -> Bytes {
        Usdc::transferWithAuthorization_0Call {
            from: self.from,
            to: self.to,
            value: self.value,
            validAfter: self.validAfter,
            validBefore: self.validBefore,
            nonce: self.nonce,
            v,
            r: r.into(),
            s: s.into(),
        }
        .abi_encode()
        .into()
    }

    /// Calldata of the overload with a signature of any length.
    pub(crate) fn with_bytes(&self, signature: impl Into<Bytes>) -> Bytes {
        Usdc::transferWithAuthorization_1Call {
            from: self.from,
            to: self.to,
            value: self.value,
            validAfter: self.validAfter,
            validBefore: self.validBefore,
            nonce: self.nonce,
            signature: signature.into(),
        }
        .abi_encode()
        .into()
    }

    /// Calldata with the payer's own signature.
    pub(crate) fn signed(&self, asset: &Asset, key: &PrivateKeySigner) -> Bytes {
        self.with_bytes(self.sign(asset, key).as_bytes())
    }
}

/// Sends calldata to the token and returns the reason if it reverts.
pub(crate) fn send(devnet: &Devnet, calldata: Bytes) -> Result<alloy_rpc_types_eth::TransactionReceipt, String> {
    devnet.execute(RELAYER, devnet.asset().address, calldata).map_err(|error| error.to_string())
}

pub(crate) fn bytecode(artifact: &str) -> Bytes {
    let artifact: serde_json::Value = serde_json::from_str(artifact).unwrap();
    artifact["bytecode"].as_str().unwrap().parse().unwrap()
}

pub(crate) fn deploy_wallet(devnet: &Devnet, owner: Address) -> Address {
    let code = bytecode(include_str!("../../../contracts/artifacts/TestWallet.json"));
    devnet.deploy([code.as_ref(), &owner.abi_encode()].concat()).unwrap()
}

/// A simple transfer of no ether, which takes 21,000 gas.
pub(crate) fn transaction(devnet: &Devnet, nonce: u64) -> TxEip1559 {
    TxEip1559 {
        chain_id: devnet.chain_id(),
        nonce,
        gas_limit: 21_000,
        max_fee_per_gas: 10_000_000,
        max_priority_fee_per_gas: 1_000_000,
        to: TxKind::Call(PAYEE),
        ..TxEip1559::default()
    }
}

pub(crate) fn raw(tx: TxEip1559, key: &PrivateKeySigner) -> (B256, Bytes) {
    let signature = key.sign_hash_sync(&tx.signature_hash()).unwrap();
    let envelope = TxEnvelope::from(tx.into_signed(signature));
    (*envelope.tx_hash(), envelope.encoded_2718().into())
}
