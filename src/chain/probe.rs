//! Simulating a payment and reading all that decides about it, in one `eth_call`.
//!
//! `contracts/PaymentProbe.sol` is never deployed. Its creation code runs as the data of a call without a destination, reads
//! the token and simulates the transfer, all in the same block.

use alloy_primitives::{B256, Bytes, U256};
use alloy_sol_types::{SolType, SolValue, decode_revert_reason, sol_data};
use serde::Deserialize;
use serde_json::json;

use super::{
    rpc::{RpcFailure, printable},
    rpc_batcher::RpcBatcher,
};
use crate::{
    payment::{Authenticity, Prechecked, Rejection},
    protocol::Reason,
};

/// The probe's creation code.
#[derive(Clone, Debug)]
pub(crate) struct Probe {
    code: Bytes,
    gas_cap: u64,
}

/// What the probe found: the state before the simulated transfer, and the transfer's result.
#[derive(Clone, Debug, Default)]
pub(crate) struct ProbeResult {
    pub(crate) block: u64,
    pub(crate) timestamp: u64,
    pub(crate) balance: U256,
    payer_code: U256,
    /// The authorization is used or cancelled.
    pub(crate) used: bool,
    succeeded: bool,
    /// Gas that the simulated call used.
    pub(crate) gas: u64,
    token_code: U256,
    separator: B256,
    paused: bool,
    payer_blacklisted: bool,
    payee_blacklisted: bool,
    payee_gain: U256,
    revert: Bytes,
}

impl Probe {
    /// Creates a probe that lets a transfer use at most `gas_cap`. Returns `None` if the build is broken.
    pub(crate) fn new(gas_cap: u64) -> Option<Self> {
        #[derive(Deserialize)]
        struct Artifact {
            bytecode: Bytes,
        }
        let artifact = include_str!("../../contracts/artifacts/PaymentProbe.json");
        let Artifact { bytecode } = serde_json::from_str(artifact).ok()?;
        Some(Self { code: bytecode, gas_cap })
    }

    /// Simulates the payment in the newest block. Takes one request, or a part of one.
    pub(crate) async fn run(
        &self,
        node: &RpcBatcher,
        payment: &Prechecked,
        calldata: &Bytes,
    ) -> Result<ProbeResult, RpcFailure> {
        let authorization = payment.authorization();
        let arguments = (
            payment.terms().offer().asset.address,
            authorization.from,
            authorization.to,
            authorization.nonce,
            U256::from(self.gas_cap),
            calldata.clone(),
        );
        let mut data = self.code.to_vec();
        data.extend(arguments.abi_encode_params());
        let answer: Bytes = node.call("eth_call", (json!({ "data": Bytes::from(data) }), "latest")).await?;
        ProbeResult::decode(&answer).ok_or(RpcFailure::Silent)
    }

    /// Returns why the payment would fail, or `None` if it would be executed.
    pub(crate) fn diagnose(&self, result: &ProbeResult, payment: &Prechecked) -> Option<Rejection> {
        let authorization = payment.authorization();
        let asset = &payment.terms().offer().asset;
        let no = |reason, detail: String| Some(Rejection::new(reason, detail));
        if result.token_code.is_zero() {
            return no(
                Reason::AssetNotDeployed,
                format!("there is no contract at {} on {}", asset.address, asset.network),
            );
        }
        if result.used {
            return no(Reason::NonceAlreadyUsed, "the authorization was used or cancelled before".into());
        }
        if result.succeeded && result.payee_gain == authorization.value {
            return None;
        }
        let (now, block) = (result.timestamp, result.block);
        if authorization.valid_after >= U256::from(now) {
            return no(Reason::ValidAfter, format!("validAfter is not before the time of block {block}, {now}"));
        }
        if authorization.valid_before <= U256::from(now) {
            return no(Reason::ValidBefore, format!("validBefore is not after the time of block {block}, {now}"));
        }
        if result.balance < authorization.value {
            let (balance, value) = (result.balance, authorization.value);
            let detail = format!("the payer has {balance} atomic units at block {block}, the payment takes {value}");
            return no(Reason::InsufficientFunds, detail);
        }
        if result.separator.is_zero() {
            let detail = "the token has no DOMAIN_SEPARATOR: it does not implement EIP-3009 as this scheme needs it";
            return no(Reason::Eip3009NotSupported, detail.into());
        }
        if result.separator != payment.terms().domain().separator() {
            let detail = format!(
                "the token's EIP-712 domain is not name {:?}, version {:?} on {}",
                asset.name, asset.version, asset.network
            );
            return no(Reason::TokenNameMismatch, detail);
        }
        for (is, what) in [
            (result.paused, "the token is paused"),
            (result.payer_blacklisted, "the token has blacklisted the payer"),
            (result.payee_blacklisted, "the token has blacklisted the payee"),
        ] {
            if is {
                return no(Reason::SimulationFailed, what.into());
            }
        }
        if result.succeeded {
            let (gain, value) = (result.payee_gain, authorization.value);
            return no(Reason::SimulationFailed, format!("the payee would receive {gain} atomic units, not {value}"));
        }
        self.diagnose_revert(result, payment)
    }

    fn diagnose_revert(&self, result: &ProbeResult, payment: &Prechecked) -> Option<Rejection> {
        let said = revert_reason(&result.revert);
        let has_code = result.payer_has_code();
        let is_signature = match payment.authenticity() {
            Authenticity::ChainMustJudge(error) => {
                let why = error.map_or_else(|| "another key than the payer's signed".to_owned(), |e| e.to_string());
                Some(match has_code {
                    true => format!("the payer's contract does not accept the signature ({why})"),
                    false => format!("{why}, and the payer has no contract code that could accept it"),
                })
            }
            Authenticity::Proven if has_code && said.to_ascii_lowercase().contains("signature") => {
                Some(format!("the code at the payer's address does not accept the signature: {said}"))
            }
            Authenticity::Proven => None,
        };
        if let Some(detail) = is_signature {
            return Some(Rejection::new(Reason::Signature, detail));
        }
        let detail = match said.as_str() {
            "" if result.gas.saturating_mul(64) >= self.gas_cap.saturating_mul(62) => {
                format!("the transfer takes more than the {} gas allowed for it", self.gas_cap)
            }
            "" => "the token reverts without saying why".to_owned(),
            said => format!("the token reverts: {said}"),
        };
        Some(Rejection::new(Reason::SimulationFailed, detail))
    }
}

impl ProbeResult {
    /// Returns what another probe found of what is the same for every payment.
    pub(super) fn of([block, timestamp, balance, payer_code, used]: [U256; 5]) -> Option<Self> {
        Some(Self {
            block: block.try_into().ok()?,
            timestamp: timestamp.try_into().ok()?,
            balance,
            payer_code,
            used: !used.is_zero(),
            ..Self::default()
        })
    }

    /// Returns `true` if the payer is a contract, or an account that delegates to one (EIP-7702).
    pub(crate) fn payer_has_code(&self) -> bool {
        !self.payer_code.is_zero()
    }

    fn decode(answer: &[u8]) -> Option<Self> {
        type Answer = (sol_data::FixedArray<sol_data::Uint<256>, 13>, sol_data::Bytes);
        let (words, revert) = Answer::abi_decode_params(answer).ok()?;
        let [
            block,
            timestamp,
            balance,
            payer_code,
            used,
            succeeded,
            gas,
            token_code,
            separator,
            paused,
            payer_blacklisted,
            payee_blacklisted,
            payee_gain,
        ] = words;
        Some(Self {
            block: block.try_into().ok()?,
            timestamp: timestamp.try_into().ok()?,
            balance,
            payer_code,
            used: !used.is_zero(),
            succeeded: !succeeded.is_zero(),
            gas: gas.try_into().ok()?,
            token_code,
            separator: separator.into(),
            paused: !paused.is_zero(),
            payer_blacklisted: !payer_blacklisted.is_zero(),
            payee_blacklisted: !payee_blacklisted.is_zero(),
            payee_gain,
            revert,
        })
    }
}

/// Returns the reason in revert data. The text is not trusted.
fn revert_reason(data: &[u8]) -> String {
    if data.is_empty() {
        return String::new();
    }
    match decode_revert_reason(data) {
        Some(reason) => printable(reason.strip_prefix("revert: ").unwrap_or(&reason).as_bytes()),
        None => printable(format!("{}", Bytes::copy_from_slice(data.get(..36).unwrap_or(data))).as_bytes()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probe_is_in_the_build() {
        assert!(Probe::new(1).is_some());
    }

    #[test]
    fn malformed_answers_are_refused() {
        for length in [0, 31, 32 * 13, 32 * 14] {
            assert!(ProbeResult::decode(&vec![0xff; length]).is_none(), "{length}");
        }
    }
}
