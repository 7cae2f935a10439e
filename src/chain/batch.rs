//! Many payments in one transaction: the calldata for `contracts/BatchSettler.sol`, and its gas limit.

use alloy_primitives::{Address, Bytes, U256};

use crate::{
    eip3009::{Authorization, PaymentSignature},
    payment::{Authenticity, Prechecked},
};

/// Gas that one transaction may use, on Base and by EIP-7825.
pub(crate) const MAX_TRANSACTION_GAS: u64 = 1 << 24;

/// The size of one payment, in bytes.
const PAYMENT: usize = 138;
/// The most payments in one group.
const MAX_GROUP: usize = u16::MAX as usize;

/// Gas that the contract requires to be left, in addition to the gas cap, before it tries a payment.
const RESERVE: u64 = 12_000;
/// Gas of a batch without payments: the transaction, its header, the token's account. It includes what the first transfer uses more
/// than the others, for the token's own storage, and for a payee whose balance is zero by then.
const FIXED: u64 = 21_000 + 400 + 4_000 + 40_000;
/// Gas of a payment beside the token's call: its calldata with a group header of its own, the payer's account, the loop.
const BESIDE_CALL: u64 = 16 * (PAYMENT as u64 + 22) + 2_600 + 600;
/// Gas that a transfer in a batch may use beyond its simulation: the probe reads the payer's balance, the nonce and the payee's balance
/// first, which makes the simulated transfer cheaper by 2,100 gas for each.
const COLD: u64 = 3 * 2_100;

/// A payment as it is encoded in a batch. It holds a signature: until it is settled, anybody who has it can execute it.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Entry {
    payee: Address,
    record: [u8; PAYMENT],
}

/// Why a payment cannot be in a batch. It can be settled alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Unbatchable {
    /// Only a key's signature fits: 65 bytes, `v` 27 or 28, `s` below 2^255.
    #[error("the signature is not a key's")]
    Signature,
    /// The contract executes EIP-3009 authorizations only.
    #[error("a permit is executed for its facilitator only")]
    Permit,
    /// Twelve bytes.
    #[error("the value is 2^96 atomic units or more")]
    Value,
    /// Five bytes.
    #[error("a time is 2^40 seconds or more after 1970")]
    Time,
}

impl Entry {
    /// Encodes a payment.
    ///
    /// The caller must leave payers with code out: the contract skips them.
    pub(crate) fn new(authorization: &Authorization, signature: &PaymentSignature) -> Result<Self, Unbatchable> {
        let (rs, v) = match signature.as_bytes() {
            [rs @ .., v @ (27 | 28)] if rs.len() == 64 && rs[32] < 0x80 => (rs, *v),
            _ => return Err(Unbatchable::Signature),
        };
        let value: [u8; 12] = low_bytes(authorization.value).ok_or(Unbatchable::Value)?;
        let [after, before] = [authorization.valid_after, authorization.valid_before].map(low_bytes::<5>);
        let (after, before) = (after.ok_or(Unbatchable::Time)?, before.ok_or(Unbatchable::Time)?);
        let mut record = [0; PAYMENT];
        record[..20].copy_from_slice(authorization.from.as_slice());
        record[20..32].copy_from_slice(&value);
        record[32..37].copy_from_slice(&after);
        record[37..42].copy_from_slice(&before);
        record[42..74].copy_from_slice(authorization.nonce.as_slice());
        record[74..].copy_from_slice(rs);
        // The highest bit of a low s is free (EIP-2098).
        record[106] |= (v - 27) << 7;
        Ok(Self { payee: authorization.to, record })
    }

    /// Encodes a payment whose signature the payer's key made.
    pub(crate) fn of(payment: &Prechecked) -> Result<Self, Unbatchable> {
        if payment.terms().permit().is_some() {
            return Err(Unbatchable::Permit);
        }
        match payment.authenticity() {
            Authenticity::Proven => Self::new(payment.authorization(), payment.signature()),
            Authenticity::ChainMustJudge(_) => Err(Unbatchable::Signature),
        }
    }
}

/// Returns the gas that a payment's call may use in a batch, if its simulation used so much.
pub(crate) const fn needed(simulated: u64) -> u64 {
    simulated.saturating_add(simulated / 16).saturating_add(COLD)
}

/// Returns the calldata of a batch of payments in one token, in which each payment's call may use `gas_cap`. Payments are grouped by payee,
/// in order; payees come in the order of their first payment.
pub(crate) fn encode(token: Address, gas_cap: u32, entries: &[Entry]) -> Bytes {
    let mut payees: Vec<(Address, Vec<&Entry>)> = Vec::new();
    for entry in entries {
        match payees.iter_mut().find(|(payee, _)| *payee == entry.payee) {
            Some((_, group)) => group.push(entry),
            None => payees.push((entry.payee, vec![entry])),
        }
    }
    let mut calldata = Vec::with_capacity(24 + payees.len() * 22 + entries.len() * PAYMENT);
    calldata.extend_from_slice(token.as_slice());
    calldata.extend_from_slice(&gas_cap.to_be_bytes());
    for (payee, payments) in &payees {
        for group in payments.chunks(MAX_GROUP) {
            calldata.extend_from_slice(payee.as_slice());
            calldata.extend_from_slice(&(group.len() as u16).to_be_bytes());
            group.iter().for_each(|entry| calldata.extend_from_slice(&entry.record));
        }
    }
    calldata.into()
}

/// Returns the calldata and the gas limit of a batch of payments in one token, for benchmarks. `None` if one of the payments cannot be in
/// a batch, or if they are too many.
#[doc(hidden)]
pub fn batch_calldata(payments: &[Prechecked]) -> Option<(Bytes, u64)> {
    const GAS: u32 = 90_000;
    let token = payments.first()?.key().asset;
    let entries = payments.iter().map(Entry::of).collect::<Result<Vec<_>, _>>().ok()?;
    let mut limit = GasLimit::new(GAS);
    entries.iter().all(|_| limit.admit(Some(u64::from(GAS / 2)))).then(|| (encode(token, GAS, &entries), limit.get()))
}

/// The gas limit of a batch, added up payment by payment.
///
/// `eth_estimateGas` does not help here: a batch succeeds as soon as one payment does. The limit covers all payments if each uses what its
/// simulation used and a margin. If one uses more, the last payments are left out. Unused gas is not paid for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GasLimit {
    gas_cap: u64,
    limit: u64,
}

impl GasLimit {
    /// Returns the limit of a batch without payments.
    pub(crate) fn new(gas_cap: u32) -> Self {
        let gas_cap = u64::from(gas_cap);
        // The last payment is tried only if a whole gas cap is left, of which a call gets 63/64.
        Self { gas_cap, limit: FIXED + gas_cap + gas_cap / 63 + RESERVE }
    }

    /// Adds a payment whose simulated call used `simulated` gas, or else the whole gas cap. Returns `false` if no transaction may use so
    /// much: then the batch is full without the payment.
    pub(crate) fn admit(&mut self, simulated: Option<u64>) -> bool {
        let call = simulated.map_or(self.gas_cap, needed);
        let limit = self.limit + call.min(self.gas_cap) + BESIDE_CALL;
        if limit > MAX_TRANSACTION_GAS {
            return false;
        }
        self.limit = limit;
        true
    }

    /// Returns the limit, in gas.
    pub(crate) const fn get(self) -> u64 {
        self.limit
    }
}

/// Returns the last `N` bytes of a number, if all bytes before them are zero.
fn low_bytes<const N: usize>(number: U256) -> Option<[u8; N]> {
    let bytes = number.to_be_bytes::<32>();
    let (high, low) = bytes.split_at(32 - N);
    high.iter().all(|byte| *byte == 0).then(|| low.try_into().ok())?
}

#[cfg(test)]
mod tests {
    use alloy_primitives::{B256, hex, uint};

    use super::*;

    fn authorization() -> Authorization {
        Authorization {
            from: Address::repeat_byte(0x11),
            to: Address::repeat_byte(0x22),
            value: U256::from(0x0102_0304_u64),
            valid_after: U256::from(5),
            valid_before: U256::from(0x6900_0000_u64),
            nonce: B256::repeat_byte(0x33),
        }
    }

    fn signature(v: u8) -> PaymentSignature {
        [vec![0x44; 32], vec![0x55; 32], vec![v]].concat().into()
    }

    fn entry(payee: u8, nonce: u8) -> Entry {
        let authorization =
            Authorization { to: Address::repeat_byte(payee), nonce: B256::repeat_byte(nonce), ..authorization() };
        Entry::new(&authorization, &signature(27)).unwrap()
    }

    #[test]
    fn batch_has_the_layout_of_the_contract() {
        let first = Entry::new(&authorization(), &signature(28)).unwrap();
        let calldata = encode(Address::repeat_byte(0xaa), 0x0001_86a0, &[first, entry(0x77, 0x88)]);
        let expected = [
            "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa 000186a0",
            "2222222222222222222222222222222222222222 0001",
            "1111111111111111111111111111111111111111 000000000000000001020304 0000000005 0069000000",
            "3333333333333333333333333333333333333333333333333333333333333333",
            "4444444444444444444444444444444444444444444444444444444444444444",
            "d555555555555555555555555555555555555555555555555555555555555555",
            "7777777777777777777777777777777777777777 0001",
            "1111111111111111111111111111111111111111 000000000000000001020304 0000000005 0069000000",
            "8888888888888888888888888888888888888888888888888888888888888888",
            "4444444444444444444444444444444444444444444444444444444444444444",
            "5555555555555555555555555555555555555555555555555555555555555555",
        ];
        assert_eq!(calldata, hex::decode(expected.concat().replace(' ', "")).unwrap());
    }

    #[test]
    fn payments_to_one_payee_share_its_address_in_order() {
        let token = Address::repeat_byte(0xaa);
        let mixed = encode(token, 1, &[entry(1, 1), entry(2, 2), entry(1, 3), entry(2, 4)]);
        assert_eq!(mixed, encode(token, 1, &[entry(1, 1), entry(1, 3), entry(2, 2), entry(2, 4)]));
        assert_eq!(mixed.len(), 24 + 2 * 22 + 4 * 138);
        assert_eq!(mixed[24 + 20..24 + 22], [0, 2]);
    }

    #[test]
    fn payments_that_do_not_fit_the_layout_are_refused() {
        let with = |change: fn(&mut Authorization)| {
            let mut authorization = authorization();
            change(&mut authorization);
            Entry::new(&authorization, &signature(27)).err()
        };
        const VALUE: U256 = uint!(0x1_000000000000000000000000_U256);
        const TIME: U256 = uint!(0x1_0000000000_U256);
        const ONE: U256 = U256::ONE;
        assert_eq!(with(|a| a.value = VALUE - ONE), None);
        assert_eq!(with(|a| a.value = VALUE), Some(Unbatchable::Value));
        assert_eq!(with(|a| (a.valid_after, a.valid_before) = (TIME - ONE, TIME - ONE)), None);
        assert_eq!(with(|a| a.valid_before = TIME), Some(Unbatchable::Time));
        assert_eq!(with(|a| a.valid_after = U256::MAX), Some(Unbatchable::Time));

        let high_s = [vec![0x44; 32], vec![0x80; 32], vec![27]].concat();
        for bad in [signature(0), signature(1), signature(29), vec![7; 64].into(), vec![27; 66].into(), high_s.into()] {
            assert_eq!(Entry::new(&authorization(), &bad).err(), Some(Unbatchable::Signature), "{bad:?}");
        }
    }

    #[test]
    fn batch_is_full_before_the_chain_refuses_it() {
        let mut limit = GasLimit::new(120_000);
        let entries = (0..1_000).take_while(|_| limit.admit(Some(45_000))).count();
        assert!((250..345).contains(&entries), "{entries}");
        assert!(limit.get() <= MAX_TRANSACTION_GAS);
        assert!(limit.get() + 60_000 > MAX_TRANSACTION_GAS);

        // No more than the cap is set aside, however much a simulation took, or if there was none.
        let one = |simulated| {
            let mut limit = GasLimit::new(120_000);
            assert!(limit.admit(simulated));
            limit.get()
        };
        assert_eq!(one(None), one(Some(u64::MAX)));
        assert!(one(Some(45_000)) < one(None));
        assert!(!GasLimit::new(u32::MAX).admit(Some(1)));
    }
}

#[cfg(all(test, feature = "local-signer"))]
#[allow(clippy::unwrap_used)]
mod on_devnet {
    use std::{sync::Arc, time::Duration};

    use alloy_provider::Provider as _;
    use alloy_rpc_types_eth::TransactionRequest;
    use alloy_signer::SignerSync as _;
    use alloy_signer_local::PrivateKeySigner;
    use alloy_sol_types::SolValue as _;
    use x402_devnet::Devnet;

    use super::*;
    use crate::{
        Asset, Clock as _, Network, SystemClock,
        chain::{batch_settler::BatchSettler, probe::Probe, rpc::Rpc, rpc_batcher::RpcBatcher, transfer},
        payment::{Terms, Window, precheck},
        protocol::{ExactOffer, ExactPayload},
    };

    const GAS_CAP: u32 = 400_000;

    fn usdc() -> Asset {
        Network::BASE_SEPOLIA.usdc().unwrap()
    }

    /// A payment of 1,000 units from `from`, signed by `key`.
    fn payment(key: &PrivateKeySigner, from: Address, pay_to: Address) -> Prechecked {
        let (amount, now) = (U256::from(1_000), SystemClock.now());
        let offer = ExactOffer::new(usdc(), amount, pay_to, 60);
        let terms = Arc::new(Terms::new(offer));
        let authorization = Authorization {
            from,
            to: pay_to,
            value: amount,
            valid_after: U256::from(now - 600),
            valid_before: U256::from(now + 60),
            nonce: PrivateKeySigner::random().address().into_word(),
        };
        let signature = key.sign_hash_sync(&authorization.signing_hash(terms.domain())).unwrap();
        let signature = PaymentSignature::from(signature.as_bytes().to_vec());
        let payload = ExactPayload::new(signature, authorization);
        precheck(terms, payload, Window::default().skew(5), now).unwrap()
    }

    #[tokio::test]
    async fn batch_with_its_gas_limit_makes_all_payments() {
        let devnet = Devnet::start().await.unwrap();
        devnet.execute(Address::ZERO, BatchSettler::DEPLOYER, BatchSettler::deployment()).unwrap();
        let rpc = Rpc::new(devnet.rpc_client(), Duration::from_secs(5));
        let (probe, node) = (Probe::new(GAS_CAP.into()).unwrap(), RpcBatcher::new(rpc));
        let (mut entries, mut limit) = (Vec::new(), GasLimit::new(GAS_CAP));
        for n in 0..30 {
            let key = PrivateKeySigner::random();
            devnet.mint(key.address(), "$0.001".parse().unwrap()).unwrap();
            // None of the payees was paid before; the last twenty are new only once.
            let payment = payment(&key, key.address(), Address::repeat_byte(n % 11 + 1));
            let calldata = transfer::calldata(payment.authorization(), payment.signature());
            assert!(limit.admit(Some(probe.run(&node, &payment, &calldata).await.unwrap().gas)));
            entries.push(Entry::of(&payment).unwrap());
        }
        let calldata = encode(usdc().address, GAS_CAP, &entries);
        let request = TransactionRequest::default().to(BatchSettler::ADDRESS).input(calldata.clone().into());
        let answer = devnet.provider().call(request.gas_limit(limit.get())).await.unwrap();
        assert_eq!(<(U256, U256)>::abi_decode_params(&answer).unwrap(), (U256::from(30), U256::from(30)));

        // Little more is set aside than needed, but for one gas cap.
        let receipt = devnet.execute(Address::ZERO, BatchSettler::ADDRESS, calldata).unwrap();
        let spare = limit.get() - receipt.gas_used - u64::from(GAS_CAP);
        assert!(spare < receipt.gas_used * 2 / 3, "{spare} beside {}", receipt.gas_used);
    }

    #[test]
    fn unproven_signature_stays_out_of_batches() {
        let (payer, other) = (PrivateKeySigner::random(), PrivateKeySigner::random());
        let payee = Address::repeat_byte(1);
        assert!(Entry::of(&payment(&payer, payer.address(), payee)).is_ok());
        let by_wallet = payment(&other, payer.address(), payee);
        assert_eq!(Entry::of(&by_wallet).err(), Some(Unbatchable::Signature));
    }
}
