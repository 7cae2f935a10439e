//! Payers by permit, who pay by hand: what they sign and send is built without this crate.

use alloy_consensus::{SignableTransaction as _, TxEip1559, TxEnvelope};
use alloy_eips::Encodable2718 as _;
use alloy_network::TxSignerSync as _;
use alloy_primitives::{Address, B256, Bytes, TxKind, U256, address};
use alloy_signer::SignerSync as _;
use alloy_signer_local::PrivateKeySigner;
use alloy_sol_types::{SolCall as _, SolStruct as _, eip712_domain, sol};
use axum::body::Body;
use http::Request;
use serde_json::{Value, json};
use tower_x402::{
    Network,
    payment::{PaymentKey, Prechecked},
};
use x402_devnet::Devnet;

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
    function transferFrom(address from, address to, uint256 amount);
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
    let facilitator = permit.facilitator.expect("a maximum");
    let call = settleCall {
        permit: PermitTransferFrom {
            permitted: TokenPermissions { token: permit.token, amount: signed.value },
            nonce: signed.nonce.into(),
            deadline: signed.valid_before,
        },
        amount: U256::from(amount),
        owner: signed.from,
        witness: Witness { to: signed.to, facilitator, validAfter: signed.valid_after },
        signature: payment.signature().as_bytes().to_vec().into(),
    };
    devnet.execute(facilitator, PROXY, call.abi_encode()).expect("the permit is good").transaction_hash
}

/// Settles a permit, as it was presented, by a contract at the account that it names: no calldata of a transaction says so.
///
/// # Panics
/// If it is no payment by permit.
pub fn settle_by_contract(devnet: &Devnet, payment: &Value, amount: u64) {
    let (payload, signed) = (&payment["payload"], &payment["payload"]["permit2Authorization"]);
    let text = |value: &Value| value.as_str().unwrap_or_else(|| panic!("{value} in {payment}")).to_owned();
    let address = |value: &Value| text(value).parse::<Address>().expect("an address");
    let number = |value: &Value| text(value).parse::<U256>().expect("a number");
    let witness = &signed["witness"];
    let facilitator = address(&witness["facilitator"]);
    let call = settleCall {
        permit: PermitTransferFrom {
            permitted: TokenPermissions {
                token: address(&signed["permitted"]["token"]),
                amount: number(&signed["permitted"]["amount"]),
            },
            nonce: number(&signed["nonce"]),
            deadline: number(&signed["deadline"]),
        },
        amount: U256::from(amount),
        owner: address(&signed["from"]),
        witness: Witness { to: address(&witness["to"]), facilitator, validAfter: number(&witness["validAfter"]) },
        signature: text(&payload["signature"]).parse().expect("a signature"),
    };
    devnet.set_code(facilitator, calling(PROXY, &call.abi_encode()));
    devnet.execute(PrivateKeySigner::random().address(), facilitator, Vec::new()).expect("it calls the proxy");
    devnet.set_code(facilitator, Bytes::new());
}

/// Another account uses the nonce that a payment has, for a token of its own that calls another contract when it is moved. Returns the
/// transaction, which calls the proxy like a settlement of the payment.
pub fn decoy(devnet: &Devnet, payment: &Prechecked, target: Address, data: &[u8]) -> B256 {
    let (stranger, token) = (PrivateKeySigner::random(), PrivateKeySigner::random().address());
    devnet.set_code(token, calling(target, data));
    use_nonce(devnet, &stranger, payment.authorization().nonce.into(), token, payment.authorization().to)
}

/// The payer uses a nonce for something that leaves no trace: a transfer to somebody else, by another facilitator.
pub fn burn(devnet: &Devnet, payer: &PrivateKeySigner, nonce: U256) {
    use_nonce(devnet, payer, nonce, devnet.asset().address, PrivateKeySigner::random().address());
}

/// Signs for a transfer of one unit with this nonce, and settles it from the same account.
///
/// # Panics
/// If the contracts revert.
fn use_nonce(devnet: &Devnet, signer: &PrivateKeySigner, nonce: U256, token: Address, to: Address) -> B256 {
    let owner = signer.address();
    let permitted = TokenPermissions { token, amount: U256::ONE };
    let witness = Witness { to, facilitator: owner, validAfter: U256::ZERO };
    let permit = PermitTransferFrom { permitted, nonce, deadline: U256::MAX };
    let message = PermitWitnessTransferFrom {
        permitted: permit.permitted.clone(),
        spender: PROXY,
        nonce,
        deadline: permit.deadline,
        witness: witness.clone(),
    };
    let domain = eip712_domain! {
        name: "Permit2",
        chain_id: devnet.chain_id(),
        verifying_contract: PERMIT2,
    };
    let signature = signer.sign_hash_sync(&message.eip712_signing_hash(&domain)).expect("a local key");
    let signature = signature.as_bytes().to_vec().into();
    let call = settleCall { permit, amount: U256::ONE, owner, witness, signature };
    devnet.execute(owner, PROXY, call.abi_encode()).expect("the permit is good").transaction_hash
}

/// The calldata of a transfer that anybody may make, of nothing.
pub fn transfer_of_nothing(from: Address, to: Address) -> Vec<u8> {
    transferFromCall { from, to, amount: U256::ZERO }.abi_encode()
}

/// The code of a contract that makes one call whatever it is asked, and answers `true`.
fn calling(target: Address, data: &[u8]) -> Vec<u8> {
    let length = u16::try_from(data.len()).expect("a short call").to_be_bytes();
    let mut code = vec![0x61, length[0], length[1], 0x61, 0, 0, 0x5f, 0x39]; // codecopy(0, data, length)
    code.extend([0x5f, 0x5f, 0x61, length[0], length[1], 0x5f, 0x5f, 0x73]); // call(gas, target, 0, 0, length, 0, 0)
    code.extend(target);
    code.extend([0x5a, 0xf1, 0x5f, 0x52, 0x60, 0x20, 0x5f, 0xf3]); // return its success
    let offset = u16::try_from(code.len()).expect("short").to_be_bytes();
    code[4..6].copy_from_slice(&offset);
    code.extend(data);
    code
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

    /// The key of its record.
    pub fn key(&self) -> PaymentKey {
        PaymentKey { network: self.network, asset: PERMIT2, payer: self.from, nonce: self.message.nonce.into() }
    }

    /// The payer invalidates the permit's nonce.
    pub fn invalidate(&self, devnet: &Devnet) {
        invalidate(devnet, self.from, self.message.nonce);
    }
}

/// The proxy of `exact`, at its address.
pub const EXACT_PROXY: Address = address!("402085c248EeA27D92E8b30b2C58ed07f9E20001");

/// What is signed and sent where exactly the price is paid by permit.
pub mod exact {
    use alloy_sol_types::sol;

    sol! {
        #[derive(Debug)]
        struct TokenPermissions {
            address token;
            uint256 amount;
        }

        #[derive(Debug)]
        struct Witness {
            address to;
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

        function settle(PermitTransferFrom permit, address owner, Witness witness, bytes signature);
    }
}

/// A transaction of a stranger that settles a permit for exactly a price, signed.
///
/// # Panics
/// If it is no permit.
pub fn transaction_of_a_stranger(devnet: &Devnet, payment: &Prechecked) -> Vec<u8> {
    let signed = payment.authorization();
    let token = payment.terms().permit().expect("a permit").token;
    let call = exact::settleCall {
        permit: exact::PermitTransferFrom {
            permitted: exact::TokenPermissions { token, amount: signed.value },
            nonce: signed.nonce.into(),
            deadline: signed.valid_before,
        },
        owner: signed.from,
        witness: exact::Witness { to: signed.to, validAfter: signed.valid_after },
        signature: payment.signature().as_bytes().to_vec().into(),
    };
    let stranger = PrivateKeySigner::random();
    devnet.fund(stranger.address(), U256::from(10).pow(U256::from(18)));
    let mut transaction = TxEip1559 {
        chain_id: devnet.chain_id(),
        gas_limit: 400_000,
        max_fee_per_gas: 1_000_000_000,
        max_priority_fee_per_gas: 2_000_000,
        to: TxKind::Call(EXACT_PROXY),
        input: call.abi_encode().into(),
        ..TxEip1559::default()
    };
    let signature = stranger.sign_transaction_sync(&mut transaction).expect("a local key");
    TxEnvelope::from(transaction.into_signed(signature)).encoded_2718()
}

/// A signed permit for exactly a price, open to every kind of abuse.
#[derive(Clone, Debug)]
pub struct ExactPermit {
    pub signer: PrivateKeySigner,
    pub from: Address,
    pub network: Network,
    pub message: exact::PermitWitnessTransferFrom,
    pub signature: Bytes,
    /// Echoed as `accepted`.
    pub offer: Value,
    pub resource: Value,
}

impl ExactPermit {
    /// Asks, and signs the first offer to pay the price by permit.
    pub async fn pay(signer: &PrivateKeySigner, app: &App, request: Request<Body>) -> Self {
        Self::sign(signer, &demand(&send(app, request).await))
    }

    /// Signs the first offer of a 402 to pay the price by permit.
    pub fn sign(signer: &PrivateKeySigner, demand: &Value) -> Self {
        let offers = demand["accepts"].as_array().expect("offers");
        let is_it = |offer: &&Value| offer["scheme"] == "exact" && offer["extra"]["assetTransferMethod"] == "permit2";
        let offer = offers.iter().find(is_it).expect("an offer of exact by permit").clone();
        let text = |value: &Value| value.as_str().unwrap_or_else(|| panic!("{value} in {offer}")).to_owned();
        let mut permit = Self {
            signer: signer.clone(),
            from: signer.address(),
            network: text(&offer["network"]).parse().expect("an EVM network"),
            message: exact::PermitWitnessTransferFrom {
                permitted: exact::TokenPermissions {
                    token: text(&offer["asset"]).parse().expect("an address"),
                    amount: text(&offer["amount"]).parse().expect("an amount"),
                },
                spender: EXACT_PROXY,
                nonce: U256::from_be_bytes(PrivateKeySigner::random().to_bytes().0),
                deadline: U256::from(unix_now() + offer["maxTimeoutSeconds"].as_u64().expect("seconds")),
                witness: exact::Witness {
                    to: text(&offer["payTo"]).parse().expect("an address"),
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
    pub fn with(mut self, change: impl FnOnce(&mut exact::PermitWitnessTransferFrom)) -> Self {
        change(&mut self.message);
        self.resign();
        self
    }

    pub fn payload(&self) -> Value {
        let exact::PermitWitnessTransferFrom { permitted, spender, nonce, deadline, witness } = &self.message;
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
                    "witness": { "to": witness.to, "validAfter": witness.validAfter.to_string() },
                },
            },
        })
    }

    /// The request with this payment.
    pub fn on(&self, request: Request<Body>) -> Request<Body> {
        paid(request, &self.payload())
    }

    /// The key of its record.
    pub fn key(&self) -> PaymentKey {
        PaymentKey { network: self.network, asset: PERMIT2, payer: self.from, nonce: self.message.nonce.into() }
    }

    /// The calldata with which anybody settles it.
    pub fn calldata(&self) -> Vec<u8> {
        let exact::PermitWitnessTransferFrom { permitted, nonce, deadline, witness, .. } = self.message.clone();
        let permit = exact::PermitTransferFrom { permitted, nonce, deadline };
        exact::settleCall { permit, owner: self.from, witness, signature: self.signature.clone() }.abi_encode()
    }

    /// A stranger settles it. Returns the transaction.
    ///
    /// # Panics
    /// If the contracts revert.
    pub fn settle(&self, devnet: &Devnet) -> B256 {
        let stranger = PrivateKeySigner::random().address();
        devnet.execute(stranger, EXACT_PROXY, self.calldata()).expect("the permit is good").transaction_hash
    }

    /// A stranger's contract settles it: no calldata of a transaction says so.
    ///
    /// # Panics
    /// If the contracts revert.
    pub fn settle_by_contract(&self, devnet: &Devnet) {
        let contract = PrivateKeySigner::random().address();
        devnet.set_code(contract, calling(EXACT_PROXY, &self.calldata()));
        devnet.execute(PrivateKeySigner::random().address(), contract, Vec::new()).expect("it calls the proxy");
    }

    /// A stranger settles it in a call of the proxy of another scheme, by a token of its own.
    pub fn settle_within_another_permit(&self, devnet: &Devnet) {
        let (stranger, token) = (PrivateKeySigner::random(), PrivateKeySigner::random().address());
        devnet.set_code(token, calling(EXACT_PROXY, &self.calldata()));
        use_nonce(devnet, &stranger, self.message.nonce, token, self.message.witness.to);
    }
}
