//! A devnet, a facilitator on it and payers.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use alloy_primitives::{Address, B256, Bytes, U256, address, keccak256};
use alloy_provider::{Provider, RootProvider};
use alloy_signer::SignerSync as _;
use alloy_signer_local::PrivateKeySigner;
use alloy_sol_types::{SolCall, SolValue, sol};
use tower_x402::{
    Clock, ManualClock, Usdc,
    eip3009::{Authorization, PaymentSignature},
    facilitator::{Facilitator, FacilitatorError, OnchainFacilitator, OnchainFacilitatorBuilder, VerifyError},
    ledger::{
        Fingerprint, FulfilmentStep, Ledger, MemoryLedger, Record, Reservation, ResponseLimits, SettlementStep,
        StoredResponse,
    },
    payment::{Authenticity, Prechecked, Rejection, SettlementOutcome, Terms, Verified, Window, precheck},
    protocol::{ExactOffer, ExactPayload},
};
use x402_devnet::{BlockTime, Devnet, DevnetBuilder};

use crate::eventually::eventually;

pub const PAYEE: Address = address!("00000000000000000000000000000000000bacc0");
pub const PRICE: u64 = 1_000;
/// How long payments are valid, in seconds.
pub const VALID: u64 = 120;
pub const ETHER: u64 = 1_000_000_000_000_000_000;

sol! {
    interface Token {
        function transfer(address to, uint256 value);
        function pause();
        function blacklist(address account);
        function transferWithAuthorization(
            address from, address to, uint256 value, uint256 validAfter, uint256 validBefore, bytes32 nonce,
            uint8 v, bytes32 r, bytes32 s
        );
        function cancelAuthorization(address authorizer, bytes32 nonce, uint8 v, bytes32 r, bytes32 s);
    }
    interface Wallet {
        function setAccepting(bool accepting);
        function setGasBurn(uint256 amount);
    }
    struct CancelAuthorization {
        address authorizer;
        bytes32 nonce;
    }
}

pub struct Stage {
    pub devnet: Devnet,
    pub clock: Arc<ManualClock>,
    pub ledger: Arc<dyn Ledger>,
    pub facilitator: OnchainFacilitator,
    pub terms: Arc<Terms>,
}

/// A facilitator with a full tank on a devnet with instant blocks.
pub async fn stage() -> Stage {
    Stage::with(|devnet| devnet, |builder| builder).await
}

impl Stage {
    pub async fn with(
        devnet: impl FnOnce(DevnetBuilder) -> DevnetBuilder,
        facilitator: impl FnOnce(OnchainFacilitatorBuilder) -> OnchainFacilitatorBuilder,
    ) -> Self {
        Self::with_keys(devnet, |builder| facilitator(builder.signer(settlement_key()))).await
    }

    /// Without a settlement key but those that `facilitator` gives.
    pub async fn with_keys(
        devnet: impl FnOnce(DevnetBuilder) -> DevnetBuilder,
        facilitator: impl FnOnce(OnchainFacilitatorBuilder) -> OnchainFacilitatorBuilder,
    ) -> Self {
        let clock = Arc::new(ManualClock::at(1_800_000_000));
        let ledger: Arc<dyn Ledger> = Arc::new(MemoryLedger::with(ResponseLimits::default(), 10_000, clock.clone()));
        Self::build(clock, ledger, devnet, facilitator).await
    }

    pub async fn build(
        clock: Arc<ManualClock>,
        ledger: Arc<dyn Ledger>,
        devnet: impl FnOnce(DevnetBuilder) -> DevnetBuilder,
        facilitator: impl FnOnce(OnchainFacilitatorBuilder) -> OnchainFacilitatorBuilder,
    ) -> Self {
        let devnet = devnet(Devnet::builder().clock(clock.clone())).start().await.unwrap();
        devnet.fund(settlement_key().address(), U256::from(ETHER));
        let builder = OnchainFacilitator::builder()
            .network(devnet.network())
            .client(devnet.rpc_client())
            .ledger(ledger.clone())
            .clock(clock.clone())
            .block_time(std::time::Duration::from_millis(200));
        let facilitator = facilitator(builder).build().await.unwrap();
        // The upkeep's first pass, which finds nothing, is over before anything is there to be found.
        tokio::task::yield_now().await;
        devnet.faults().reset();
        let terms = Arc::new(Terms::new(ExactOffer::new(devnet.asset(), U256::from(PRICE), PAYEE, VALID)));
        Self { devnet, clock, ledger, facilitator, terms }
    }

    /// A payer with this many payments' worth of money.
    pub fn payer(&self, payments: u64) -> PrivateKeySigner {
        let key = new_key();
        self.devnet.mint(key.address(), Usdc::from_atomic(payments * PRICE)).unwrap();
        key
    }

    pub fn authorization(&self, from: Address) -> Authorization {
        let now = self.clock.now();
        Authorization {
            from,
            to: PAYEE,
            value: U256::from(PRICE),
            valid_after: U256::from(now - 60),
            valid_before: U256::from(now + VALID),
            nonce: keccak256(new_key().address()),
        }
    }

    /// A payment from the key's own address.
    pub fn payment(&self, key: &PrivateKeySigner) -> Prechecked {
        self.payment_from(key, key.address())
    }

    /// A payment from `from`, signed by `key`.
    pub fn payment_from(&self, key: &PrivateKeySigner, from: Address) -> Prechecked {
        let authorization = self.authorization(from);
        let signature = sign(key, &authorization, &self.terms);
        self.precheck(authorization, signature)
    }

    pub fn precheck(&self, authorization: Authorization, signature: PaymentSignature) -> Prechecked {
        precheck(
            self.terms.clone(),
            ExactPayload { signature, authorization, permit: self.terms.permit() },
            Window::default().skew(5),
            self.clock.now(),
        )
        .unwrap()
    }

    pub async fn verify(&self, payment: &Prechecked) -> Result<Verified, VerifyError> {
        self.facilitator.verify(payment).await
    }

    /// Why the payment is refused.
    pub async fn rejection(&self, payment: &Prechecked) -> Rejection {
        match self.verify(payment).await {
            Err(VerifyError::Invalid(rejection)) => rejection,
            other => panic!("{other:?}"),
        }
    }

    /// Verifies the payment and enters it into the ledger, as due.
    pub async fn admit(&self, payment: &Prechecked) -> Verified {
        let verified = self.verify(payment).await.unwrap();
        let request = Fingerprint { digest: B256::ZERO, names_caller: false };
        let record = Record::new(payment, request, self.clock.now(), u64::MAX);
        let Reservation::New(lease) = self.ledger.reserve(&record).await.unwrap() else { panic!("known") };
        self.ledger.fulfil(&lease, &FulfilmentStep::Admit { funds: verified.funds, due: true }).await.unwrap();
        verified
    }

    /// Enters a payment into the ledger whose work is done and whose answer is kept, by a process that is gone.
    pub async fn produced(&self, payment: &Prechecked) {
        let response = StoredResponse {
            status: http::StatusCode::OK,
            headers: http::HeaderMap::new(),
            body: bytes::Bytes::from_static(b"answer"),
            trailers: None,
            varied_by: Vec::new(),
            stored_at: self.clock.now(),
        };
        self.produced_with(payment, Some(response)).await;
    }

    /// Enters a payment whose work is done, with the response that was kept of it, if one was.
    pub async fn produced_with(&self, payment: &Prechecked, response: Option<StoredResponse>) {
        let funds = self.verify(payment).await.unwrap().funds;
        let request = Fingerprint { digest: B256::ZERO, names_caller: false };
        let now = self.clock.now();
        let record = Record::new(payment, request, now, now - 1);
        let Reservation::New(lease) = self.ledger.reserve(&record).await.unwrap() else { panic!("known") };
        for step in [
            FulfilmentStep::Admit { funds, due: false },
            FulfilmentStep::Start { until: 0 },
            FulfilmentStep::Produce { charged: None, body: None, at: now, response: response.map(Arc::new) },
        ] {
            self.ledger.fulfil(&lease, &step).await.unwrap();
        }
    }

    /// Settles the payment, as for somebody who presents it now, and enters the outcome into the ledger.
    pub async fn settle(
        &self,
        payment: &Prechecked,
        verified: &Verified,
    ) -> Result<SettlementOutcome, FacilitatorError> {
        let known = self.record(payment).await;
        let again = payment.clone().again(known.failures);
        let outcome = self.facilitator.settle(&again, verified).await?;
        let step = SettlementStep::of(&outcome, self.facilitator.process_id(), &known.transactions);
        self.ledger.settle(&payment.key(), &step).await.unwrap();
        Ok(outcome)
    }

    pub async fn admit_and_settle(&self, payment: &Prechecked) -> Result<SettlementOutcome, FacilitatorError> {
        let verified = self.admit(payment).await;
        self.settle(payment, &verified).await
    }

    pub async fn record(&self, payment: &Prechecked) -> Record {
        self.ledger.get(&payment.key()).await.unwrap().unwrap()
    }

    pub async fn reconcile(&self, payment: &Prechecked) -> Result<SettlementOutcome, FacilitatorError> {
        self.facilitator.reconcile(&self.record(payment).await).await
    }

    /// How many payments the payee received.
    pub fn received(&self) -> u64 {
        let balance = self.devnet.balance_of(PAYEE).unwrap().atomic();
        assert_eq!(balance % PRICE, 0);
        balance / PRICE
    }

    /// How many requests were made since the start, or the last reset.
    pub fn requests(&self) -> u64 {
        self.devnet.faults().calls().values().sum()
    }

    /// How often a method was called.
    pub fn calls(&self, method: &str) -> u64 {
        self.devnet.faults().calls().get(method).copied().unwrap_or_default()
    }

    /// Somebody else executes the authorization.
    pub fn front_run(&self, payment: &Prechecked) -> B256 {
        let data = execution(payment.authorization(), payment.signature());
        let stranger = new_key().address();
        self.devnet.execute(stranger, self.terms.offer().asset.address, data).unwrap().transaction_hash
    }

    /// The payer cancels the authorization.
    pub fn cancel(&self, key: &PrivateKeySigner, payment: &Prechecked) {
        let message = CancelAuthorization { authorizer: key.address(), nonce: payment.authorization().nonce };
        let hash = alloy_sol_types::SolStruct::eip712_signing_hash(&message, self.terms.domain().eip712());
        let signature = key.sign_hash_sync(&hash).unwrap();
        let data = Token::cancelAuthorizationCall {
            authorizer: message.authorizer,
            nonce: message.nonce,
            v: 27 + u8::from(signature.v()),
            r: signature.r().into(),
            s: signature.s().into(),
        };
        self.devnet.execute(key.address(), self.terms.offer().asset.address, data.abi_encode()).unwrap();
    }

    /// The payer's money goes elsewhere.
    pub fn drain(&self, payer: Address) {
        let value = U256::from(self.devnet.balance_of(payer).unwrap().atomic());
        let data = Token::transferCall { to: new_key().address(), value }.abi_encode();
        self.devnet.execute(payer, self.terms.offer().asset.address, data).unwrap();
    }

    /// Deploys a contract wallet that belongs to `owner`.
    pub fn wallet(&self, owner: Address) -> Address {
        let artifact: serde_json::Value =
            serde_json::from_str(include_str!("../../contracts/artifacts/TestWallet.json")).unwrap();
        let mut code: Vec<u8> = artifact["bytecode"].as_str().unwrap().parse::<Bytes>().unwrap().to_vec();
        code.extend(owner.abi_encode());
        self.devnet.deploy(code).unwrap()
    }

    pub fn provider(&self) -> RootProvider {
        self.devnet.provider()
    }

    pub async fn next_nonce(&self) -> u64 {
        self.provider().get_transaction_count(settlement_key().address()).await.unwrap()
    }
}

pub fn settlement_key() -> PrivateKeySigner {
    PrivateKeySigner::from_bytes(&B256::repeat_byte(0x5e)).unwrap()
}

/// A key that no other test has.
pub fn new_key() -> PrivateKeySigner {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let seed = keccak256(NEXT.fetch_add(1, Ordering::Relaxed).to_be_bytes());
    PrivateKeySigner::from_bytes(&seed).unwrap()
}

pub fn sign(key: &PrivateKeySigner, authorization: &Authorization, terms: &Terms) -> PaymentSignature {
    let signature = key.sign_hash_sync(&terms.signing_hash(authorization)).unwrap();
    PaymentSignature::from(signature.as_bytes().to_vec())
}

/// The calldata with which anybody can execute an authorization.
pub fn execution(authorization: &Authorization, signature: &PaymentSignature) -> Vec<u8> {
    let bytes = signature.as_bytes();
    Token::transferWithAuthorizationCall {
        from: authorization.from,
        to: authorization.to,
        value: authorization.value,
        validAfter: authorization.valid_after,
        validBefore: authorization.valid_before,
        nonce: authorization.nonce,
        v: bytes[64],
        r: B256::from_slice(&bytes[..32]),
        s: B256::from_slice(&bytes[32..64]),
    }
    .abi_encode()
}

/// Returns when the condition holds.
///
/// # Panics
/// If that takes longer than half a minute.
#[track_caller]
pub fn until(condition: impl AsyncFnMut() -> bool) -> impl Future<Output = ()> {
    eventually("the condition holds", condition)
}

pub fn paid_by(outcome: &Result<SettlementOutcome, FacilitatorError>) -> B256 {
    match outcome {
        Ok(SettlementOutcome::Settled { transaction, .. }) => *transaction,
        other => panic!("{other:?}"),
    }
}

pub fn needs_chain(payment: &Prechecked) -> bool {
    payment.authenticity() != Authenticity::Proven
}

pub fn every(millis: u64) -> impl FnOnce(DevnetBuilder) -> DevnetBuilder {
    move |builder| builder.block_time(BlockTime::Every(std::time::Duration::from_millis(millis)))
}
