//! Batches that are encoded without the crate's own code.

use alloy_primitives::{Address, B256, Bytes, U256};
use alloy_provider::Provider;
use alloy_rpc_types_eth::{TransactionReceipt, TransactionRequest};
use alloy_signer_local::PrivateKeySigner;
use alloy_sol_types::{SolEvent, SolValue, sol};
use tower_x402::facilitator::BatchSettler;

use support::{
    authorization::{Signature, TransferWithAuthorization, authorization, sign},
    chain::{Chain, Relayer},
    token::Token,
};

sol! {
    #[derive(Debug, PartialEq, Eq)]
    interface Settler {
        error Malformed();
        error NoToken();
        error NothingExecuted(uint256 reached);
    }
}

/// More than USDC ever takes for a transfer.
pub const GAS_CAP: u32 = 120_000;
/// What a transaction may use on Base.
pub const MAX_GAS: u64 = 1 << 24;

/// A signed payment.
#[derive(Clone, Debug)]
pub struct Payment {
    pub message: TransferWithAuthorization,
    pub signature: Signature,
}

impl Payment {
    /// A payment of a hundred units.
    pub fn by(payer: &PrivateKeySigner, payee: Address, chain: &dyn Chain) -> Self {
        Self::signed(payer, authorization(payer.address(), payee, 100), chain)
    }

    pub fn signed(payer: &PrivateKeySigner, message: TransferWithAuthorization, chain: &dyn Chain) -> Self {
        Self { signature: sign(payer, &chain.asset(), &message), message }
    }

    /// 138 bytes.
    pub fn record(&self) -> Vec<u8> {
        fn low<const N: usize>(number: U256) -> [u8; N] {
            let bytes = number.to_be_bytes::<32>();
            assert!(bytes[..32 - N].iter().all(|byte| *byte == 0), "{number} fits {N} bytes");
            bytes[32 - N..].try_into().unwrap()
        }
        let TransferWithAuthorization { from, value, validAfter, validBefore, nonce, .. } = &self.message;
        let mut s = self.signature.s();
        assert!(s[0] < 0x80, "a low s");
        s[0] |= if self.signature.v() == 28 { 0x80 } else { 0 };
        let record = [
            from.as_slice(),
            &low::<12>(*value),
            &low::<5>(*validAfter),
            &low::<5>(*validBefore),
            nonce.as_slice(),
            self.signature.r().as_slice(),
            s.as_slice(),
        ]
        .concat();
        assert_eq!(record.len(), 138);
        record
    }

    /// Whether the receipt holds the payment's two events, one after the other.
    pub fn is_paid_by(&self, receipt: &TransactionReceipt) -> bool {
        let TransferWithAuthorization { from, to, value, nonce, .. } = &self.message;
        let used = vec![Token::AuthorizationUsed::SIGNATURE_HASH, from.into_word(), *nonce];
        let moved = vec![Token::Transfer::SIGNATURE_HASH, from.into_word(), to.into_word()];
        receipt.logs().windows(2).any(|pair| {
            pair[0].topics() == used
                && pair[1].topics() == moved
                && pair[1].data().data.as_ref() == value.to_be_bytes::<32>()
        })
    }
}

/// A header and groups, each with a payee.
pub fn pack(token: Address, gas_cap: u32, groups: &[(Address, &[Payment])]) -> Bytes {
    let mut calldata = [token.as_slice(), &gas_cap.to_be_bytes()].concat();
    for (payee, payments) in groups {
        calldata.extend([payee.as_slice(), &u16::try_from(payments.len()).unwrap().to_be_bytes()].concat());
        payments.iter().for_each(|payment| calldata.extend(payment.record()));
    }
    calldata.into()
}

/// Payments of the chain's own token to one payee.
pub fn batch(chain: &dyn Chain, payments: &[Payment]) -> Bytes {
    pack(chain.asset().address, GAS_CAP, &[(payments[0].message.to, payments)])
}

/// The settler on a chain, and somebody who pays for gas.
pub struct Stage<'a> {
    pub chain: &'a dyn Chain,
    pub relayer: Relayer,
}

impl<'a> Stage<'a> {
    pub async fn on(chain: &'a dyn Chain) -> Self {
        let relayer = chain.relayer().await;
        assert!(relayer.send_to(chain, BatchSettler::DEPLOYER, BatchSettler::deployment()).await.status());
        Self { chain, relayer }
    }

    pub async fn payer(&self) -> PrivateKeySigner {
        let payer = PrivateKeySigner::random();
        self.chain.mint(payer.address(), 100_000).await;
        payer
    }

    pub async fn payers(&self, count: usize) -> Vec<PrivateKeySigner> {
        let mut payers = Vec::new();
        for _ in 0..count {
            payers.push(self.payer().await);
        }
        payers
    }

    /// Sends calldata to the settler, with all the gas a transaction may use.
    pub async fn settle(&self, calldata: Bytes) -> TransactionReceipt {
        self.settle_with(calldata, MAX_GAS).await
    }

    pub async fn settle_with(&self, calldata: Bytes, gas_limit: u64) -> TransactionReceipt {
        self.relayer.send_with_gas(self.chain, BatchSettler::ADDRESS, calldata, gas_limit).await
    }

    /// What the settler would answer, `(reached, executed)`, or its revert data; `None` if the gas does not get as far.
    pub async fn simulate(&self, calldata: Bytes, gas_limit: u64) -> Option<Result<(u64, u64), Bytes>> {
        let request =
            TransactionRequest::default().to(BatchSettler::ADDRESS).input(calldata.into()).gas_limit(gas_limit);
        match self.chain.provider().call(request).await {
            Ok(answer) => {
                let (reached, executed) = <(U256, U256)>::abi_decode_params(&answer).expect("two numbers");
                Some(Ok((reached.to(), executed.to())))
            }
            Err(error) => {
                let response = error.as_error_resp().unwrap_or_else(|| panic!("eth_call: {error}"));
                response.as_revert_data().map(Err)
            }
        }
    }
}

/// Returns the payments that a receipt shows as paid.
pub fn paid(payments: &[Payment], receipt: &TransactionReceipt) -> Vec<bool> {
    payments.iter().map(|payment| payment.is_paid_by(receipt)).collect()
}

/// A payment whose signature nobody looks at, from nobody.
pub fn unsigned(from: Address, to: Address, value: u64) -> Payment {
    let mut signature = [0; 65];
    getrandom::fill(&mut signature).unwrap();
    signature[32] &= 0x7f;
    signature[64] = 27 + (signature[64] & 1);
    let message = TransferWithAuthorization { value: U256::from(value), ..authorization(from, to, 0) };
    Payment { message, signature: Signature(signature) }
}

/// The nonce of a payment, for messages.
pub fn nonce(payment: &Payment) -> B256 {
    payment.message.nonce
}
