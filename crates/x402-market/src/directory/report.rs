//! Evidence that its payer stands by.

use alloy_primitives::{Address, B256, U256};
use alloy_signer::Signer;
use alloy_sol_types::{Eip712Domain, SolStruct as _};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use tower_x402::{Network, Usdc, eip3009::PaymentSignature};

use crate::evidence::{CallOutcome, Evidence, PaymentId};

/// The longest name of a skill, in bytes.
const SKILL_BYTES: usize = 128;

mod typed {
    alloy_sol_types::sol! {
        /// What is signed.
        struct Evidence {
            address asset;
            address payer;
            bytes32 nonce;
            address evaluator;
            uint256 paid;
            string skill;
            uint64 at;
            string outcome;
        }
    }
}

/// A record about a paid evaluation, signed with the payer's key.
///
/// What is signed is EIP-712 typed data in the domain `{name: "tower-x402 evidence", version: "1", chainId}`:
///
/// `Evidence(address asset,address payer,bytes32 nonce,address evaluator,uint256 paid,string skill,uint64 at,string outcome)`
///
/// where `outcome` is the canonical JSON (RFC 8785) of the record's outcome. The signature is a key's: what a contract wallet
/// accepts (ERC-1271) can change later, and a voice must mean the same to whoever reads it, whenever.
///
/// The transaction is not signed: it is where to look for the proof, no part of what is said.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SignedEvidence {
    /// The chain of the payment.
    pub network: Network,
    /// The token that was paid with.
    pub asset: Address,
    /// The record. It is about a payment of more than nothing to somebody else, and not about a lie about the price.
    pub evidence: Evidence,
    /// The transaction that settled the payment, if it is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub transaction: Option<B256>,
    /// By the payer.
    pub signature: PaymentSignature,
}

/// What makes a payment one: with this key there is one voice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PaymentOf {
    /// The chain.
    pub network: Network,
    /// The token.
    pub asset: Address,
    /// Who paid, and the nonce of the authorization.
    pub voice: PaymentId,
}

/// Why a record is not signed, or a signature not believed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum VoiceError {
    /// Nothing was paid, or zero: it is nobody else's business.
    #[error("the record is about no payment")]
    NoPayment,
    /// A lie about the price or the payee is found before anything is paid.
    #[error("an outcome that no payment has")]
    Outcome,
    /// A score or a confidence outside [0, 1], or a skill with a name of over 128 bytes or none.
    #[error("a score or a confidence outside [0, 1], or a skill with too long a name or none")]
    OutOfRange,
    /// What an evaluator says of itself.
    #[error("the payer is the evaluator itself")]
    PaidItself,
    /// The payer's key did not make the signature. Contract wallets (ERC-1271) have no voice.
    #[error("the key of the payer {0} did not make the signature; contract wallets (ERC-1271) have no voice")]
    NotThePayer(Address),
    /// The signer is not the payer.
    #[error("the record is of a payment by {payer}, and the signer is {signer}")]
    WrongSigner {
        /// Who paid.
        payer: Address,
        /// Who would sign.
        signer: Address,
    },
    /// The key refused or failed.
    #[error("the signer failed")]
    Sign(#[source] alloy_signer::Error),
}

impl SignedEvidence {
    /// Signs a record with the key that paid.
    ///
    /// # Errors
    /// If the record is not about a payment of this key's, or the signer fails.
    pub async fn sign(
        evidence: Evidence,
        network: Network,
        asset: Address,
        transaction: Option<B256>,
        signer: &(impl Signer + Sync),
    ) -> Result<Self, VoiceError> {
        let voice = sound(&evidence)?;
        if voice.payer != signer.address() {
            return Err(VoiceError::WrongSigner { payer: voice.payer, signer: signer.address() });
        }
        let typed = typed(&evidence, asset, voice)?;
        let signature = signer.sign_typed_data(&typed, &domain(network)).await.map_err(VoiceError::Sign)?;
        let signature = PaymentSignature::from(signature.normalized_s().as_bytes().to_vec());
        Ok(Self { network, asset, evidence, transaction, signature })
    }

    /// Checks that the record is sound and that the payer signed every word of it. Whether the payment took place is another question.
    ///
    /// # Errors
    /// [`VoiceError`].
    pub fn verify(&self) -> Result<PaymentOf, VoiceError> {
        let voice = sound(&self.evidence)?;
        let hash = typed(&self.evidence, self.asset, voice)?.eip712_signing_hash(&domain(self.network));
        match self.signature.recover(hash) {
            Ok(signer) if signer == voice.payer => Ok(PaymentOf { network: self.network, asset: self.asset, voice }),
            _ => Err(VoiceError::NotThePayer(voice.payer)),
        }
    }

    /// Whether two say the same, whatever their signatures look like.
    #[cfg(feature = "directory")]
    pub(super) fn says_the_same(&self, other: &Self) -> bool {
        (self.network, self.asset, &self.evidence) == (other.network, other.asset, &other.evidence)
    }
}

fn domain(network: Network) -> Eip712Domain {
    let chain_id = Some(U256::from(network.chain_id()));
    Eip712Domain::new(Some("tower-x402 evidence".into()), Some("1".into()), chain_id, None, None)
}

fn sound(evidence: &Evidence) -> Result<PaymentId, VoiceError> {
    let voice = evidence.payment.filter(|_| evidence.paid > Usdc::ZERO).ok_or(VoiceError::NoPayment)?;
    if voice.payer == evidence.evaluator {
        return Err(VoiceError::PaidItself);
    }
    let probability = |p: f64| (0.0..=1.0).contains(&p);
    let is_in_range = match evidence.outcome {
        CallOutcome::Answered { score, confidence, .. } => probability(score) && confidence.is_none_or(probability),
        CallOutcome::InvalidAnswer | CallOutcome::Timeout => true,
        CallOutcome::PriceMismatch | CallOutcome::PayeeMismatch | CallOutcome::TokenMismatch => {
            return Err(VoiceError::Outcome);
        }
    };
    if !is_in_range || evidence.skill.is_empty() || evidence.skill.len() > SKILL_BYTES {
        return Err(VoiceError::OutOfRange);
    }
    Ok(voice)
}

fn typed(evidence: &Evidence, asset: Address, voice: PaymentId) -> Result<typed::Evidence, VoiceError> {
    let outcome = serde_json_canonicalizer::to_string(&evidence.outcome).map_err(|_| VoiceError::OutOfRange)?;
    Ok(typed::Evidence {
        asset,
        payer: voice.payer,
        nonce: voice.nonce,
        evaluator: evidence.evaluator,
        paid: evidence.paid.into(),
        skill: evidence.skill.clone(),
        at: evidence.at,
        outcome,
    })
}

/// A voice that a directory admitted, with where it found the payment. Whoever reads it can check both: the signature in `said`, and
/// the transaction that `said` names.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Admitted {
    /// Its number in the directory; later ones are larger.
    pub id: u64,
    /// What was said, with the transaction that proves the payment.
    #[serde(flatten)]
    pub said: SignedEvidence,
    /// The block of the payment.
    pub block: u64,
    /// When that was, in seconds since the Unix epoch.
    pub block_time: u64,
}

/// Some of the voices.
#[derive(Serialize, Deserialize)]
pub(super) struct VoicePage {
    pub(super) voices: Vec<Admitted>,
    /// What to ask for next; the last voice's number, or what was asked for.
    pub(super) after: u64,
    /// Whether there are further ones now.
    pub(super) more: bool,
}

/// An evaluator's card.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct CardEntry {
    pub(super) id: u64,
    /// Where it was fetched.
    pub(super) url: String,
    pub(super) pay_to: Address,
    /// Seconds since the Unix epoch.
    pub(super) first_seen: u64,
    pub(super) last_seen: u64,
    /// As the evaluator signed it.
    pub(super) card: Box<RawValue>,
}

/// Some of the cards.
#[derive(Serialize, Deserialize)]
pub(super) struct CardPage {
    pub(super) cards: Vec<CardEntry>,
    pub(super) after: u64,
    pub(super) more: bool,
}

/// A request to list an evaluator.
#[derive(Serialize, Deserialize)]
pub(super) struct ListMe {
    pub(super) url: String,
}

/// Why something was not done.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Problem {
    pub(super) error: String,
    #[serde(default)]
    pub(super) detail: String,
}
