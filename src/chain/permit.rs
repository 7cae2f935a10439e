//! What a chain shows of permits: whether one would be executed, and which transaction used it.
//!
//! The account that a permit names may be the only one that may have it executed, so the simulation is a call of that account's. Everything
//! else is read by `contracts/PermitProbe.sol`, which is never deployed.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use alloy_primitives::{Address, B256, Bytes, U64, U256, address, hex};
use alloy_sol_types::{SolCall as _, SolEvent as _, SolType as _, SolValue as _, sol_data};
use serde::Deserialize;
use serde_json::{Value, json};

use super::{
    log_search::{self, LogSearch},
    probe::ProbeResult,
    receipt_check::ExpectedTransfer,
    rpc::{Log, Receipt, Revert, Rpc, RpcFailure},
    rpc_batcher::RpcBatcher,
    settle_calls::Called,
    transfer::{Token, intrinsic_gas},
};
use crate::{
    payment::{Authenticity, Prechecked, Rejection},
    permit2::{self, PERMIT2, Permit, Permit2, Proxy},
    protocol::Reason,
    upto,
};

/// How many transactions that settled something between payer and payee are looked at, to find the one that used a permit.
const MAX_CANDIDATES: usize = 256;

/// Gas for reading a balance twice beside a settlement, and for 1/64 that a call keeps.
const READING_GAS: u64 = 200_000;

/// The account that calls a proxy in a simulation, where anybody may call it. It is nobody's.
const ANYBODY: Address = address!("00000000000000000000000000000000deadbeef");

/// The probe's creation code, and the gas that a settlement may use beside its calldata.
#[derive(Clone, Debug)]
pub(super) struct PermitProbe {
    code: Bytes,
    gas_cap: u64,
}

/// What the probe found.
struct Facts {
    shown: ProbeResult,
    has_token: bool,
    allowance: U256,
    has_proxy: bool,
    /// What the payee would have more, if the settlement succeeded and the node said so.
    payee_gain: Option<U256>,
}

impl PermitProbe {
    /// Creates a probe that lets a settlement use at most `gas_cap`. Returns `None` if the build is broken.
    pub(super) fn new(gas_cap: u64) -> Option<Self> {
        #[derive(Deserialize)]
        struct Artifact {
            bytecode: Bytes,
        }
        let artifact = include_str!("../../contracts/artifacts/PermitProbe.json");
        let Artifact { bytecode } = serde_json::from_str(artifact).ok()?;
        Some(Self { code: bytecode, gas_cap })
    }

    /// Simulates the settlement of a permit in the newest block. Returns what the chain shows, and why it would fail, if it would. A call of
    /// what is no contract succeeds, so it is asked first whether the chain `has_contracts`.
    pub(super) async fn run(
        &self,
        (rpc, batcher): (&Rpc, &RpcBatcher),
        payment: &Prechecked,
        permit: &Permit,
        has_contracts: bool,
    ) -> Result<(ProbeResult, Option<Rejection>), RpcFailure> {
        let authorization = payment.authorization();
        let arguments =
            (permit.token, authorization.from, U256::from_be_bytes(authorization.nonce.0), PERMIT2, permit.spender);
        let mut data = self.code.to_vec();
        data.extend(arguments.abi_encode_params());
        let calldata = calldata(payment, permit);
        // The payer may be a contract, and have its signature checked with any amount of gas. The transaction has no more than this.
        let most = intrinsic_gas(&calldata).saturating_add(self.gas_cap);
        let (answer, simulated, gained) = tokio::join!(
            batcher.call::<Bytes>("eth_call", (json!({ "data": Bytes::from(data) }), "latest")),
            rpc.estimate_gas(caller_of(permit), permit.spender, &calldata, Some(most)),
            gained(batcher, permit, authorization.to, &calldata, most),
        );
        let Facts { mut shown, has_token, allowance, has_proxy, .. } =
            Facts::decode(&answer?).ok_or(RpcFailure::Silent)?;
        let simulated = simulated?;
        if let Ok(gas) = &simulated {
            shown.gas = gas.saturating_sub(intrinsic_gas(&calldata));
        }
        let mut facts =
            Facts { shown, has_token, allowance, has_proxy: has_proxy && has_contracts, payee_gain: gained? };
        let rejection = facts.diagnose(payment, permit, simulated.err());
        // What is in flight has to be covered by both.
        facts.shown.balance = facts.shown.balance.min(allowance);
        Ok((facts.shown, rejection))
    }
}

impl Facts {
    /// Returns why the payment would fail, or `None` if it would be executed.
    fn diagnose(&self, payment: &Prechecked, permit: &Permit, revert: Option<Revert>) -> Option<Rejection> {
        let (authorization, amount, terms) = (payment.authorization(), payment.amount(), payment.terms());
        let ProbeResult { block, timestamp: now, balance, used, .. } = self.shown;
        let no = |reason: Reason, detail: String| Some(Rejection::new(reason, detail));
        if !self.has_token {
            return no(Reason::AssetNotDeployed, format!("there is no contract at {}", permit.token));
        }
        if !self.has_proxy {
            return no(permit2::PROXY_NOT_DEPLOYED.into(), "the chain lacks Permit2 or the scheme's proxy".into());
        }
        if used {
            return no(Reason::NonceAlreadyUsed, "the permit was used or invalidated before".into());
        }
        // Permit2 accepts the second form of a key's signature, too. Here a signature has one form.
        let is_signed = payment.authenticity() == Authenticity::Proven || self.shown.payer_has_code();
        let revert = match revert {
            None if is_signed => {
                let short = self.payee_gain.filter(|gain| *gain != amount)?;
                let detail = format!("the payee would receive {short} atomic units, not {amount}");
                return no(Reason::SimulationFailed, detail);
            }
            revert => revert.unwrap_or(Revert { data: Bytes::new(), message: String::new() }),
        };
        if terms.is_early(authorization, now) {
            return no(Reason::ValidAfter, format!("validAfter is after the time of block {block}, {now}"));
        }
        if terms.is_over(authorization, now) {
            return no(Reason::ValidBefore, format!("the deadline is before the time of block {block}, {now}"));
        }
        if !is_signed {
            return no(
                Reason::Signature,
                "the payer's key did not make the signature, and the payer has no code".into(),
            );
        }
        if balance < amount {
            let detail = format!("the payer has {balance} atomic units at block {block}, the payment takes {amount}");
            return no(Reason::InsufficientFunds, detail);
        }
        let allowance = self.allowance;
        if allowance < amount {
            let detail = format!(
                "the payer lets Permit2 ({PERMIT2}) move {allowance} atomic units, and needs {amount}: approve more"
            );
            return no(permit2::ALLOWANCE_REQUIRED.into(), detail);
        }
        match permit2::revert_name(&revert.data).or_else(|| upto::revert_name(&revert.data)) {
            Some("InvalidNonce") => no(Reason::NonceAlreadyUsed, "the permit was used or invalidated before".into()),
            Some(
                name @ ("InvalidSigner" | "InvalidSignature" | "InvalidSignatureLength" | "InvalidContractSignature"),
            ) => no(Reason::Signature, format!("Permit2 does not accept the signature: {name}")),
            Some("UnauthorizedFacilitator") => {
                no(permit2::ACCOUNT_MISMATCH.into(), "the permit is for another facilitator".into())
            }
            Some(name) => no(Reason::SimulationFailed, format!("the contracts revert: {name}")),
            None => {
                // What the node says may be long, and about the node. The payer is told none of it.
                tracing::debug!(message = revert.message, nonce = %authorization.nonce, "the settlement of a permit reverts");
                no(Reason::SimulationFailed, "the settlement reverts".to_owned())
            }
        }
    }

    fn decode(answer: &[u8]) -> Option<Self> {
        type Answer = sol_data::FixedArray<sol_data::Uint<256>, 8>;
        let [block, timestamp, balance, payer_code, used, token_code, allowance, proxy_code] =
            Answer::abi_decode(answer).ok()?;
        let shown = ProbeResult::of([block, timestamp, balance, payer_code, used])?;
        Some(Self {
            shown,
            has_token: !token_code.is_zero(),
            allowance,
            has_proxy: !proxy_code.is_zero(),
            payee_gain: None,
        })
    }
}

/// Simulates the settlement once more, and returns what the payee has more then. `None` if it fails, or if the node does not let a call see
/// other code than there is.
///
/// No log tells what a token keeps for itself. The account that may settle the permit does so, so the call shows code at its address that reads
/// the payee's balance, settles, and reads it again.
async fn gained(
    batcher: &RpcBatcher,
    permit: &Permit,
    payee: Address,
    calldata: &[u8],
    most: u64,
) -> Result<Option<U256>, RpcFailure> {
    alloy_sol_types::sol! {
        function balanceOf(address account) external view returns (uint256);
    }
    let data = [&balanceOfCall { account: payee }.abi_encode()[..], calldata].concat();
    let caller = caller_of(permit);
    let call = json!({
        "to": caller, "data": Bytes::from(data), "gas": U64::from(most.saturating_add(READING_GAS)),
    });
    let account = json!({ "code": Bytes::from(gain_probe(permit.token, permit.spender)) });
    let overrides = BTreeMap::from([(caller, account)]);
    match batcher.call::<Bytes>("eth_call", (call, "latest", overrides)).await {
        // A node that overlooks the code answers nothing.
        Ok(answer) => Ok(match <(U256, U256)>::abi_decode(&answer) {
            Ok((succeeded, gain)) if !succeeded.is_zero() => Some(gain),
            _ => None,
        }),
        Err(RpcFailure::Refused { .. }) => Ok(None),
        Err(failure) => Err(failure),
    }
}

/// Returns code that takes the calldata of `balanceOf` and after it that of a settlement. It returns whether the settlement succeeded, and how
/// much the balance grew.
fn gain_probe(token: Address, proxy: Address) -> Vec<u8> {
    // staticcall(gas, token, 0, 36, to, 32), whose result is not looked at.
    let read_balance =
        |to: u8| [&[0x60, 32, 0x60, to, 0x60, 36, 0x60, 0, 0x73], token.as_slice(), &[0x5a, 0xfa, 0x50]].concat();
    [
        &hex!("60246000600037")[..], // calldatacopy(0, 0, 36)
        &read_balance(0x40),
        &hex!("60243603"),             // the length of the settlement's calldata
        &hex!("806024608037"),         // calldatacopy(0x80, 36, length)
        &hex!("60006000826080600073"), // call(gas, proxy, 0, 0x80, length, 0, 0)
        proxy.as_slice(),
        &hex!("5af1"),
        &read_balance(0x60),
        &hex!("600052"),               // its success is the first word
        &hex!("60405160605103602052"), // what the balance grew by is the second
        &hex!("60406000f3"),
    ]
    .concat()
}

/// Returns the call of the permit's spender that settles a payment.
pub(crate) fn calldata(payment: &Prechecked, permit: &Permit) -> Bytes {
    let (signed, signature) = (payment.authorization(), payment.signature());
    match permit.facilitator {
        None => permit2::calldata(signed, permit, signature),
        Some(account) => upto::calldata(signed, (permit, account), payment.amount(), signature),
    }
}

/// Returns what a transaction called, if it was a proxy.
fn read_call(to: Option<Address>, input: &[u8]) -> Called {
    match to {
        Some(to) if to == permit2::PROXY => Called::Proxy(to, permit2::read_call(input)),
        Some(to) if to == upto::PROXY => Called::Proxy(to, upto::read_call(input)),
        _ => Called::Another,
    }
}

fn caller_of(permit: &Permit) -> Address {
    permit.facilitator.unwrap_or(ANYBODY)
}

/// Returns `true` if the permit is used or invalidated as of that block, or `None` if there is no Permit2 to say.
pub(super) async fn is_used(
    rpc: &Rpc,
    payer: Address,
    nonce: B256,
    block: impl serde::Serialize,
) -> Result<Option<bool>, RpcFailure> {
    let (contract, call, bit) = use_call(payer, nonce);
    let request = json!({ "to": contract, "data": Bytes::from(call) });
    let answer: Bytes = rpc.call("eth_call", (request, block)).await?;
    Ok(Permit2::nonceBitmapCall::abi_decode_returns(&answer).ok().map(|bitmap| !(bitmap & bit).is_zero()))
}

/// Returns the contract that knows whether the permit is used, the call that asks it, and which bits of the answer say that it is.
pub(super) fn use_call(payer: Address, nonce: B256) -> (Address, Vec<u8>, U256) {
    let (word, bit) = permit2::nonce_place(nonce);
    (PERMIT2, Permit2::nonceBitmapCall { owner: payer, wordPos: word }.abi_encode(), bit)
}

/// Returns `true` if the chain has the permit's proxy, of the version whose messages are signed here, and the Permit2 that it uses.
pub(super) async fn is_deployed(rpc: &Rpc, permit: &Permit) -> Result<bool, RpcFailure> {
    let ask = async |call: Vec<u8>| -> Result<Bytes, RpcFailure> {
        rpc.call("eth_call", (json!({ "to": permit.spender, "data": Bytes::from(call) }), "latest")).await
    };
    let type_hash = ask(Proxy::WITNESS_TYPEHASHCall {}.abi_encode()).await?;
    if Proxy::WITNESS_TYPEHASHCall::abi_decode_returns(&type_hash) != Ok(permit.witness_type_hash()) {
        return Ok(false);
    }
    let permit2 = ask(Proxy::PERMIT2Call {}.abi_encode()).await?;
    let is_ours = Proxy::PERMIT2Call::abi_decode_returns(&permit2) == Ok(PERMIT2);
    Ok(is_ours && !rpc.code(PERMIT2).await?.is_empty())
}

/// Returns how much of a token the payer lets Permit2 move.
#[cfg(feature = "client")]
pub(crate) async fn allowance(rpc: &Rpc, token: Address, payer: Address) -> Result<U256, RpcFailure> {
    alloy_sol_types::sol! {
        function allowance(address owner, address spender) external view returns (uint256);
    }
    let call = allowanceCall { owner: payer, spender: PERMIT2 };
    let request = json!({ "to": token, "data": Bytes::from(call.abi_encode()) });
    let answer: Bytes = rpc.call("eth_call", (request, "latest")).await?;
    allowanceCall::abi_decode_returns(&answer).map_err(|_| RpcFailure::Silent)
}

/// What a transaction that settled something settled.
enum Settled {
    /// The permit, for this amount.
    This(U256),
    Another,
    /// It called another contract than the proxy, which called the proxy, and its calldata does not say with what.
    Unclear,
}

/// Returns what a transaction in a block settled, if it succeeded.
async fn settled_by(rpc: &Rpc, expected: &ExpectedTransfer, transaction: B256) -> Result<Settled, RpcFailure> {
    let called = match rpc.settle_calls().get(&transaction) {
        Some(called) => called,
        None => {
            let called = called_by(rpc, transaction).await?;
            rpc.settle_calls().insert(transaction, called);
            called
        }
    };
    Ok(match called {
        // A proxy settles one permit in a call, so that whoever it calls meanwhile can have it settle no other. Another proxy can.
        Called::Proxy(proxy, call) if expected.permit.is_some_and(|permit| permit.spender == proxy) => {
            call.and_then(|call| expected.amount_settled_by(&call)).map_or(Settled::Another, Settled::This)
        }
        Called::Proxy(..) | Called::Another => Settled::Unclear,
    })
}

async fn called_by(rpc: &Rpc, transaction: B256) -> Result<Called, RpcFailure> {
    #[derive(Deserialize)]
    struct Transaction {
        to: Option<Address>,
        input: Bytes,
    }
    // The node just showed that it is in a block. What it does not show now proves nothing.
    let found: Option<Transaction> = rpc.call("eth_getTransactionByHash", [transaction]).await?;
    let found = found.ok_or(RpcFailure::Silent)?;
    Ok(read_call(found.to, &found.input))
}

/// Returns `true` if this transaction, whoever sent it, made the payment.
pub(super) async fn is_paid_by(rpc: &Rpc, expected: &ExpectedTransfer, receipt: &Receipt) -> Result<bool, RpcFailure> {
    if !expected.is_paid_by(receipt) {
        return Ok(false);
    }
    let settled = settled_by(rpc, expected, receipt.transaction_hash).await?;
    Ok(matches!(settled, Settled::This(amount) if amount == expected.value))
}

/// Returns what a transaction, whoever sent it, charged of this permit, whatever its amount. `None` if it did not, or is in no block.
#[cfg(feature = "client")]
pub(crate) async fn charged_by(
    rpc: &Rpc,
    expected: &ExpectedTransfer,
    transaction: B256,
) -> Result<Option<U256>, RpcFailure> {
    let Some(receipt) = rpc.receipt(transaction).await? else { return Ok(None) };
    let Settled::This(value) = settled_by(rpc, expected, transaction).await? else { return Ok(None) };
    Ok(ExpectedTransfer { value, ..*expected }.is_paid_by(&receipt).then_some(value))
}

/// The transaction that a permit was used by, for its payee.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PermitUse {
    pub(crate) transaction: B256,
    pub(crate) block: u64,
    /// What the payer was charged, in atomic units.
    pub(crate) amount: U256,
    /// The token shows that the payee was sent as much.
    pub(crate) is_received: bool,
}

/// The end of a search.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Searched<T> {
    Found(T),
    /// It is in none of the blocks, if all were searched and it is clear what each transaction did.
    NotFound {
        is_complete: bool,
    },
}

/// Finds the transfer that a permit was used for, whatever its amount.
///
/// Anybody can make transfers of nothing from payer to payee, and the payer any others. So only transactions are looked at that also have an
/// event of the proxy, each once.
pub(crate) async fn find_use(
    rpc: &Rpc,
    expected: &ExpectedTransfer,
    blocks: [u64; 2],
    for_the_oldest: usize,
) -> Result<Searched<PermitUse>, RpcFailure> {
    let topics = json!([Token::Transfer::SIGNATURE_HASH, expected.payer.into_word(), expected.payee.into_word()]);
    let mut search = LogSearch::new(expected.token, &topics, blocks, for_the_oldest);
    let (mut looked_at, mut is_clear) = (0, true);
    while let Some(mut logs) = search.next(rpc).await? {
        let amount = |log: &Log| U256::try_from_be_slice(&log.data).unwrap_or_default();
        logs.retain(|log| !amount(log).is_zero());
        let settled = settled_among(rpc, expected, &logs).await?;
        for (block, transaction) in settled {
            looked_at += 1;
            if looked_at > MAX_CANDIDATES {
                return Ok(Searched::NotFound { is_complete: false });
            }
            match settled_by(rpc, expected, transaction).await? {
                Settled::This(charged) => {
                    let mut own = logs.iter().filter(|log| log.transaction_hash == Some(transaction));
                    let is_received = own.any(|log| amount(log) == charged);
                    return Ok(Searched::Found(PermitUse { transaction, block, amount: charged, is_received }));
                }
                Settled::Another => {}
                Settled::Unclear => is_clear = false,
            }
        }
    }
    Ok(Searched::NotFound { is_complete: is_clear && search.is_complete() })
}

/// Returns the transactions of these logs, with their blocks, in which the proxy settled something.
async fn settled_among(
    rpc: &Rpc,
    expected: &ExpectedTransfer,
    logs: &[Log],
) -> Result<BTreeSet<(u64, B256)>, RpcFailure> {
    let place = |log: &Log| Some((log.block_number?.saturating_to::<u64>(), log.transaction_hash?));
    let mut found: BTreeSet<_> = logs.iter().filter_map(place).collect();
    if let (Some((first, _)), Some((last, _)), Some(permit)) = (found.first(), found.last(), expected.permit) {
        let topics = json!([[Proxy::Settled::SIGNATURE_HASH, Proxy::SettledWithPermit::SIGNATURE_HASH]]);
        match log_search::between(rpc, permit.spender, &topics, [*first, *last]).await {
            Ok(settled) => {
                let settled: HashSet<_> = settled.iter().filter_map(|log| log.transaction_hash).collect();
                found.retain(|(_, transaction)| settled.contains(transaction));
            }
            // There are too many for one answer: all are looked at.
            Err(RpcFailure::Refused { .. }) => {}
            Err(failure) => return Err(failure),
        }
    }
    Ok(found)
}

/// Finds the transaction, with its block, in which the payer invalidated a permit that was not used before.
///
/// Permit2 logs the invalidation of a nonce that was used, too. So an invalidation counts only if `is_unused`, as far as all blocks were
/// searched, or if the nonce was unused in the block before and nothing in its own block used it.
pub(crate) async fn find_invalidation(
    rpc: &Rpc,
    expected: &ExpectedTransfer,
    blocks: [u64; 2],
    for_the_oldest: usize,
    is_unused: bool,
) -> Result<Searched<(B256, u64)>, RpcFailure> {
    let (word, bit) = permit2::nonce_place(expected.nonce);
    let topics: Value = json!([Permit2::UnorderedNonceInvalidation::SIGNATURE_HASH, expected.payer.into_word()]);
    let mut search = LogSearch::new(PERMIT2, &topics, blocks, for_the_oldest);
    while let Some(logs) = search.next(rpc).await? {
        let invalidates = |log: &&Log| {
            let invalidated = <(U256, U256)>::abi_decode(&log.data).ok();
            invalidated.is_some_and(|(of, mask)| of == word && !(mask & bit).is_zero())
        };
        let place = |log: &Log| Some((log.transaction_hash?, log.block_number?.saturating_to()));
        if let Some((transaction, block)) = logs.iter().find(invalidates).and_then(place) {
            return Ok(match is_unused || is_unused_before(rpc, expected, block).await? {
                true => Searched::Found((transaction, block)),
                false => Searched::NotFound { is_complete: false },
            });
        }
    }
    Ok(Searched::NotFound { is_complete: search.is_complete() })
}

/// Returns `true` if a permit was unused in the block before this one, and nothing in this one used it. A node that keeps few states does not
/// tell; then that is not shown.
async fn is_unused_before(rpc: &Rpc, expected: &ExpectedTransfer, block: u64) -> Result<bool, RpcFailure> {
    let before = U64::from(block.saturating_sub(1));
    match is_used(rpc, expected.payer, expected.nonce, before).await {
        Ok(Some(false)) => {}
        Ok(_) | Err(RpcFailure::Refused { .. }) => return Ok(false),
        Err(failure) => return Err(failure),
    }
    let used = find_use(rpc, expected, [block, block], 0).await?;
    Ok(matches!(used, Searched::NotFound { is_complete: true }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probe_is_in_the_build_and_malformed_answers_are_refused() {
        assert!(PermitProbe::new(1).is_some());
        for length in [0, 31, 32 * 7] {
            assert!(Facts::decode(&vec![0xff; length]).is_none(), "{length}");
        }
    }
}
