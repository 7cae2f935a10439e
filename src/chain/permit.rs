//! What a chain shows of permits (scheme `upto`): whether one would be executed, and which transaction used it.
//!
//! Only the permit's facilitator may have it executed, so the simulation is a call of that account's. Everything else is read by
//! `contracts/PermitProbe.sol`, which is never deployed.

use alloy_primitives::{Address, B256, Bytes, U256};
use alloy_sol_types::{SolCall as _, SolEvent as _, SolType as _, SolValue as _, sol_data};
use serde::Deserialize;
use serde_json::{Value, json};

use super::{
    log_search::LogSearch,
    probe::ProbeResult,
    receipt_check::ExpectedTransfer,
    rpc::{Log, Revert, Rpc, RpcFailure},
    rpc_batcher::RpcBatcher,
    transfer::{Token, intrinsic_gas},
};
use crate::{
    payment::{Authenticity, Prechecked, Rejection},
    protocol::Reason,
    upto::{self, PERMIT2, PROXY, Permit, Permit2, UptoProxy},
};

/// How many transfers between payer and payee are looked at, to find the one that used a permit.
const MAX_CANDIDATES: usize = 256;

/// The probe's creation code.
#[derive(Clone, Debug)]
pub(super) struct PermitProbe(Bytes);

/// What the probe found.
struct Facts {
    shown: ProbeResult,
    has_token: bool,
    allowance: U256,
    has_proxy: bool,
}

impl PermitProbe {
    /// Returns `None` if the build is broken.
    pub(super) fn new() -> Option<Self> {
        #[derive(Deserialize)]
        struct Artifact {
            bytecode: Bytes,
        }
        let artifact = include_str!("../../contracts/artifacts/PermitProbe.json");
        let Artifact { bytecode } = serde_json::from_str(artifact).ok()?;
        Some(Self(bytecode))
    }

    /// Simulates the settlement of a permit in the newest block. Returns what the chain shows, and why it would fail, if it would.
    pub(super) async fn run(
        &self,
        (rpc, batcher): (&Rpc, &RpcBatcher),
        payment: &Prechecked,
        permit: &Permit,
    ) -> Result<(ProbeResult, Option<Rejection>), RpcFailure> {
        let authorization = payment.authorization();
        let arguments = (permit.token, authorization.from, U256::from_be_bytes(authorization.nonce.0), PERMIT2, PROXY);
        let mut data = self.0.to_vec();
        data.extend(arguments.abi_encode_params());
        let calldata = calldata(payment, permit);
        let (answer, simulated) = tokio::join!(
            batcher.call::<Bytes>("eth_call", (json!({ "data": Bytes::from(data) }), "latest")),
            rpc.estimate_gas(permit.facilitator, PROXY, &calldata),
        );
        let Facts { mut shown, has_token, allowance, has_proxy } = Facts::decode(&answer?).ok_or(RpcFailure::Silent)?;
        let simulated = simulated?;
        if let Ok(gas) = &simulated {
            shown.gas = gas.saturating_sub(intrinsic_gas(&calldata));
        }
        let mut facts = Facts { shown, has_token, allowance, has_proxy };
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
        if used {
            return no(Reason::NonceAlreadyUsed, "the permit was used or invalidated before".into());
        }
        // Permit2 accepts the second form of a key's signature, too. Here a signature has one form.
        let is_signed = payment.authenticity() == Authenticity::Proven || self.shown.payer_has_code();
        let revert = match revert {
            None if is_signed => return None,
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
        if !self.has_proxy {
            return no(upto::PROXY_NOT_DEPLOYED.into(), "the chain lacks Permit2 or the scheme's proxy".into());
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
            return no(upto::ALLOWANCE_REQUIRED.into(), detail);
        }
        match upto::revert_name(&revert.data) {
            Some("InvalidNonce") => no(Reason::NonceAlreadyUsed, "the permit was used or invalidated before".into()),
            Some(
                name @ ("InvalidSigner" | "InvalidSignature" | "InvalidSignatureLength" | "InvalidContractSignature"),
            ) => no(Reason::Signature, format!("Permit2 does not accept the signature: {name}")),
            Some("UnauthorizedFacilitator") => {
                no(upto::FACILITATOR_MISMATCH.into(), "the permit is for another facilitator".into())
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
        Some(Self { shown, has_token: !token_code.is_zero(), allowance, has_proxy: !proxy_code.is_zero() })
    }
}

/// Returns the call of the [`PROXY`] that settles a payment.
pub(crate) fn calldata(payment: &Prechecked, permit: &Permit) -> Bytes {
    upto::calldata(payment.authorization(), permit, payment.amount(), payment.signature())
}

/// Returns `true` if the permit is used or invalidated as of that block, or `None` if there is no Permit2 to say.
pub(super) async fn is_used(
    rpc: &Rpc,
    payer: Address,
    nonce: B256,
    block: impl serde::Serialize,
) -> Result<Option<bool>, RpcFailure> {
    let (word, bit) = upto::nonce_place(nonce);
    let call = Permit2::nonceBitmapCall { owner: payer, wordPos: word };
    let request = json!({ "to": PERMIT2, "data": Bytes::from(call.abi_encode()) });
    let answer: Bytes = rpc.call("eth_call", (request, block)).await?;
    Ok(Permit2::nonceBitmapCall::abi_decode_returns(&answer).ok().map(|bitmap| !(bitmap & bit).is_zero()))
}

/// Returns `true` if the chain has the scheme's proxy, of the version whose messages are signed here, and Permit2.
pub(super) async fn is_deployed(rpc: &Rpc) -> Result<bool, RpcFailure> {
    let request = json!({ "to": PROXY, "data": Bytes::from(UptoProxy::WITNESS_TYPEHASHCall {}.abi_encode()) });
    let answer: Bytes = rpc.call("eth_call", (request, "latest")).await?;
    let is_it = UptoProxy::WITNESS_TYPEHASHCall::abi_decode_returns(&answer) == Ok(upto::witness_type_hash());
    Ok(is_it && !rpc.code(PERMIT2).await?.is_empty())
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

/// Returns `true` if a transaction calls the [`PROXY`] with this permit.
pub(super) async fn uses(rpc: &Rpc, transaction: B256, nonce: B256) -> Result<bool, RpcFailure> {
    #[derive(Deserialize)]
    struct Transaction {
        to: Option<Address>,
        input: Bytes,
    }
    let found: Option<Transaction> = rpc.call("eth_getTransactionByHash", [transaction]).await?;
    Ok(found.is_some_and(|found| found.to == Some(PROXY) && upto::nonce_of(&found.input) == Some(nonce)))
}

/// A transfer that a permit was used for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PermitUse {
    pub(crate) transaction: B256,
    pub(crate) block: u64,
    /// What moved, in atomic units.
    pub(crate) amount: U256,
}

/// Finds the transfer that a permit was used for, whatever its amount.
pub(crate) async fn find_use(
    rpc: &Rpc,
    expected: &ExpectedTransfer,
    blocks: [u64; 2],
    for_the_oldest: usize,
) -> Result<Option<PermitUse>, RpcFailure> {
    let topics = json!([Token::Transfer::SIGNATURE_HASH, expected.payer.into_word(), expected.payee.into_word()]);
    let mut search = LogSearch::new(expected.token, &topics, blocks, for_the_oldest);
    let mut candidates = 0;
    while let Some(logs) = search.next(rpc).await? {
        for log in logs {
            let (Some(transaction), Some(block)) = (log.transaction_hash, log.block_number) else { continue };
            candidates += 1;
            if candidates > MAX_CANDIDATES {
                return Ok(None);
            }
            if uses(rpc, transaction, expected.nonce).await? {
                let amount = U256::try_from_be_slice(&log.data).unwrap_or_default();
                return Ok(Some(PermitUse { transaction, block: block.saturating_to(), amount }));
            }
        }
    }
    Ok(None)
}

/// Finds the transaction in which the payer invalidated a permit.
pub(crate) async fn find_invalidation(
    rpc: &Rpc,
    expected: &ExpectedTransfer,
    blocks: [u64; 2],
    for_the_oldest: usize,
) -> Result<Option<(B256, u64)>, RpcFailure> {
    let (word, bit) = upto::nonce_place(expected.nonce);
    let topics: Value = json!([Permit2::UnorderedNonceInvalidation::SIGNATURE_HASH, expected.payer.into_word()]);
    let mut search = LogSearch::new(PERMIT2, &topics, blocks, for_the_oldest);
    while let Some(logs) = search.next(rpc).await? {
        let invalidates = |log: &Log| {
            let invalidated = <(U256, U256)>::abi_decode(&log.data).ok();
            invalidated.is_some_and(|(of, mask)| of == word && !(mask & bit).is_zero())
        };
        if let Some(log) = logs.iter().find(|log| invalidates(log)) {
            return Ok(log.transaction_hash.zip(log.block_number.map(|block| block.saturating_to())));
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probe_is_in_the_build_and_malformed_answers_are_refused() {
        assert!(PermitProbe::new().is_some());
        for length in [0, 31, 32 * 7] {
            assert!(Facts::decode(&vec![0xff; length]).is_none(), "{length}");
        }
    }
}
