//! Payers by permit (scheme `upto`), who pay by hand: what they sign and send is built without this crate.

use alloy_primitives::{Address, B256, Bytes, U256, address};
use alloy_signer::SignerSync as _;
use alloy_signer_local::PrivateKeySigner;
use alloy_sol_types::{SolCall as _, SolStruct as _, eip712_domain, sol};
use axum::body::Body;
use http::Request;
use serde_json::{Value, json};
use tower_x402::{Network, devnet::Devnet, payment::Prechecked};

use crate::{
    authorization::unix_now,
    shop::{App, demand, paid, send},
};

/// Permit2, at its address.
pub const PERMIT2: Address = address!("000000000022D473030F116dDEE9F6B43aC78BA3");
/// The scheme's proxy, at its address.
pub const PROXY: Address = address!("4020A4f3b7b90ccA423B9fabCc0CE57C6C240002");

sol! {
    #[derive(Debug)]
    struct TokenPermissions {
        address token;
        uint256 amount;
    }

    #[derive(Debug)]
    struct Witness {
        address to;
        address facilitator;
        uint256 validAfter;
    }

    #[derive(Debug)]
    struct PermitWitnessTransferFrom {
        TokenPermissions permitted;
        address spender;
        uint256 nonce;
        uint256 deadline;
        Witness witness;
    }

    struct PermitTransferFrom {
        TokenPermissions permitted;
        uint256 nonce;
        uint256 deadline;
    }

    function settle(PermitTransferFrom permit, uint256 amount, address owner, Witness witness, bytes signature);
    function approve(address spender, uint256 amount);
    function invalidateUnorderedNonces(uint256 wordPos, uint256 mask);
}

/// Lets Permit2 move this much of the payer's USDC.
pub fn approve(devnet: &Devnet, payer: Address, amount: U256) {
    let data = approveCall { spender: PERMIT2, amount }.abi_encode();
    devnet.execute(payer, devnet.asset().address, data).expect("the token takes approvals");
}

/// Settles a permit from the account that it names, without its facilitator. Returns the transaction.
///
/// # Panics
/// If the contracts revert.
pub fn settle(devnet: &Devnet, payment: &Prechecked, amount: u64) -> B256 {
    let (signed, permit) = (payment.authorization(), payment.terms().permit().expect("a permit"));
    let call = settleCall {
        permit: PermitTransferFrom {
            permitted: TokenPermissions { token: permit.token, amount: signed.value },
            nonce: signed.nonce.into(),
            deadline: signed.valid_before,
        },
        amount: U256::from(amount),
        owner: signed.from,
        witness: Witness { to: signed.to, facilitator: permit.facilitator, validAfter: signed.valid_after },
        signature: payment.signature().as_bytes().to_vec().into(),
    };
    devnet.execute(permit.facilitator, PROXY, call.abi_encode()).expect("the permit is good").transaction_hash
}

/// The payer invalidates a nonce of Permit2.
pub fn invalidate(devnet: &Devnet, payer: Address, nonce: U256) {
    let (word, bit) = (nonce >> 8, nonce & U256::from(0xff));
    let data = invalidateUnorderedNoncesCall { wordPos: word, mask: U256::ONE << bit.to::<usize>() };
    devnet.execute(payer, PERMIT2, data.abi_encode()).expect("the owner may invalidate");
}

/// A signed permit, open to every kind of abuse.
#[derive(Clone, Debug)]
pub struct Permit {
    pub signer: PrivateKeySigner,
    pub from: Address,
    pub network: Network,
    pub message: PermitWitnessTransferFrom,
    pub signature: Bytes,
    /// Echoed as `accepted`.
    pub offer: Value,
    pub resource: Value,
}

impl Permit {
    /// Asks, and signs the offer to pay at most the price.
    pub async fn pay(signer: &PrivateKeySigner, app: &App, request: Request<Body>) -> Self {
        Self::sign(signer, &demand(&send(app, request).await))
    }

    /// Signs the offer of a 402 to pay at most the price.
    pub fn sign(signer: &PrivateKeySigner, demand: &Value) -> Self {
        let offers = demand["accepts"].as_array().expect("offers");
        let offer = offers.iter().find(|offer| offer["scheme"] == "upto").expect("an offer of upto").clone();
        let text = |value: &Value| value.as_str().unwrap_or_else(|| panic!("{value} in {offer}")).to_owned();
        let address = |value: &Value| text(value).parse::<Address>().expect("an address");
        let mut permit = Self {
            signer: signer.clone(),
            from: signer.address(),
            network: text(&offer["network"]).parse().expect("an EVM network"),
            message: PermitWitnessTransferFrom {
                permitted: TokenPermissions {
                    token: address(&offer["asset"]),
                    amount: text(&offer["amount"]).parse().expect("an amount"),
                },
                spender: PROXY,
                nonce: U256::from_be_bytes(PrivateKeySigner::random().to_bytes().0),
                deadline: U256::from(unix_now() + offer["maxTimeoutSeconds"].as_u64().expect("seconds")),
                witness: Witness {
                    to: address(&offer["payTo"]),
                    facilitator: address(&offer["extra"]["facilitatorAddress"]),
                    validAfter: U256::ZERO,
                },
            },
            signature: Bytes::new(),
            offer,
            resource: demand["resource"].clone(),
        };
        permit.resign();
        permit
    }

    /// Signs whatever the message says now.
    pub fn resign(&mut self) {
        let domain = eip712_domain! {
            name: "Permit2",
            chain_id: self.network.chain_id(),
            verifying_contract: PERMIT2,
        };
        let signature = self.signer.sign_hash_sync(&self.message.eip712_signing_hash(&domain)).expect("a local key");
        self.signature = signature.as_bytes().to_vec().into();
    }

    /// Changes the message, and signs it.
    #[must_use]
    pub fn with(mut self, change: impl FnOnce(&mut PermitWitnessTransferFrom)) -> Self {
        change(&mut self.message);
        self.resign();
        self
    }

    pub fn payload(&self) -> Value {
        let PermitWitnessTransferFrom { permitted, spender, nonce, deadline, witness } = &self.message;
        json!({
            "x402Version": 2,
            "resource": self.resource,
            "accepted": self.offer,
            "payload": {
                "signature": self.signature,
                "permit2Authorization": {
                    "from": self.from,
                    "permitted": { "token": permitted.token, "amount": permitted.amount.to_string() },
                    "spender": spender,
                    "nonce": nonce.to_string(),
                    "deadline": deadline.to_string(),
                    "witness": {
                        "to": witness.to,
                        "facilitator": witness.facilitator,
                        "validAfter": witness.validAfter.to_string(),
                    },
                },
            },
        })
    }

    /// The request with this payment.
    pub fn on(&self, request: Request<Body>) -> Request<Body> {
        paid(request, &self.payload())
    }

    /// The payer invalidates the permit's nonce.
    pub fn invalidate(&self, devnet: &Devnet) {
        invalidate(devnet, self.from, self.message.nonce);
    }
}
