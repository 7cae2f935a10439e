//! Reports: what a payer signs about an evaluation that it paid for, and what directories answer, as JSON.

use alloy_primitives::{Address, B256, U256};
use alloy_signer::Signer;
use alloy_sol_types::{Eip712Domain, SolStruct as _};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use tower_x402::{Network, Usdc, eip3009::PaymentSignature, payment::PaymentKey};

use x402_market::evidence::{CallOutcome, ChannelCharge, Evidence, EvidencePayment, MAX_SKILL_BYTES};

mod typed {
    alloy_sol_types::sol! {
        /// The message that is signed.
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

/// A report: evidence about a paid evaluation, signed with the payer's key.
///
/// The signature is over EIP-712 typed data in the domain `{name: "tower-x402 evidence", version: "1", chainId}`:
///
/// `Evidence(address asset,address payer,bytes32 nonce,address evaluator,uint256 paid,string skill,uint64 at,string outcome)`
///
/// `outcome` is the canonical JSON (RFC 8785) of the evidence's outcome. If the evaluation was paid by voucher, `nonce` is that of the
/// [charge](x402_market::evidence::ChannelCharge), which covers the channel and what was charged in it in all. The signature must be a key's. Contract wallets are not
/// supported: what they accept as a signature (ERC-1271) can change later, and a report must stay valid for every reader.
///
/// The transaction is not signed. It says where to look for the payment, and is no part of the report. For a payment by voucher, that is
/// the transaction with which the evaluator claimed the charge.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # use alloy_primitives::{Address, B256};
/// use alloy_signer_local::PrivateKeySigner;
/// use tower_x402::Network;
/// use x402_directory::SignedEvidence;
/// use x402_market::evidence::{CallOutcome, Evidence, EvidencePayment, Pairs};
///
/// let payer = PrivateKeySigner::random();
/// let outcome = CallOutcome::answered(Pairs::new(12, 3, 16));
/// let evidence = Evidence::new(Address::repeat_byte(2), "prose", "$0.001".parse()?, 1_760_000_000, outcome)
///     .with_payment(EvidencePayment { payer: payer.address(), nonce: B256::repeat_byte(1) });
/// let usdc = Network::BASE.usdc().ok_or("USDC is known on Base")?.address;
/// let report = SignedEvidence::sign(evidence, Network::BASE, usdc, None, &payer).await?;
/// assert_eq!(report.verify()?.payer, payer.address());
/// # Ok(()) }
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[non_exhaustive]
pub struct SignedEvidence {
    /// The chain of the payment.
    pub network: Network,
    /// The token of the payment.
    pub asset: Address,
    /// The evidence. It is about a payment of more than zero to somebody else, and its outcome is one that follows a payment.
    pub evidence: Evidence,
    /// The transaction that settled the payment or claimed the charge, if it is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub transaction: Option<B256>,
    /// The payer's signature.
    pub signature: PaymentSignature,
}

/// A report could not be signed, or its signature does not hold.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReportError {
    /// The evidence names no payment, or one of zero. Only paid evaluations can be reported.
    #[error("the evidence names no payment of more than zero")]
    NoPayment,
    /// The outcome is one that is found before anything is paid, such as a wrong price.
    #[error("the outcome is one that no payment can have")]
    Outcome,
    /// The name of the skill is empty or longer than 128 bytes.
    #[error("the skill's name is not 1 to 128 bytes long")]
    Skill,
    /// The evidence names a charge on a payment channel that is of another payer, evaluator, token, chain or amount than the report.
    #[error("the payment channel contradicts the report: {0}")]
    Channel(&'static str),
    /// The payer is the evaluator itself.
    #[error("the payer is the evaluator itself")]
    PaidItself,
    /// The signature is not by the payer's key. Contract wallets (ERC-1271) cannot report.
    #[error("the signature is not by the key of the payer {0}; contract wallets (ERC-1271) cannot report")]
    NotThePayer(Address),
    /// The signer is not the payer. Sign with the key that paid.
    #[error("the payment is by {payer}, but the signer is {signer}")]
    WrongSigner {
        /// The payer.
        payer: Address,
        /// The signer's address.
        signer: Address,
    },
    /// The signer refused or failed.
    #[error("the signer failed")]
    Sign(#[source] alloy_signer::Error),
}

impl SignedEvidence {
    /// Signs evidence with the key that paid.
    ///
    /// # Errors
    /// [`ReportError`] if the evidence is not about a payment by this key, or if the signer fails.
    pub async fn sign(
        evidence: Evidence,
        network: Network,
        asset: Address,
        transaction: Option<B256>,
        signer: &(impl Signer + Sync),
    ) -> Result<Self, ReportError> {
        let payment = reportable(&evidence, network, asset)?;
        if payment.payer != signer.address() {
            return Err(ReportError::WrongSigner { payer: payment.payer, signer: signer.address() });
        }
        let typed = typed(&evidence, asset, payment)?;
        let signature = signer.sign_typed_data(&typed, &domain(network)).await.map_err(ReportError::Sign)?;
        let signature = PaymentSignature::from(signature.normalized_s().as_bytes().to_vec());
        Ok(Self { network, asset, evidence, transaction, signature })
    }

    /// Checks the evidence and the payer's signature, and returns the payment that it is about. Whether that payment took place is
    /// for a [`PaymentChecker`](super::PaymentChecker) to find out.
    ///
    /// # Errors
    /// [`ReportError`] says what is wrong.
    pub fn verify(&self) -> Result<PaymentKey, ReportError> {
        let payment = reportable(&self.evidence, self.network, self.asset)?;
        let (EvidencePayment { payer, nonce }, typed) = (payment, typed(&self.evidence, self.asset, payment)?);
        match self.signature.recover(typed.eip712_signing_hash(&domain(self.network))) {
            Ok(signer) if signer == payer => Ok(PaymentKey { network: self.network, asset: self.asset, payer, nonce }),
            _ => Err(ReportError::NotThePayer(payer)),
        }
    }

    /// Returns `true` if both report the same, whatever their signatures and transactions are.
    #[cfg(feature = "service")]
    pub(super) fn reports_the_same(&self, other: &Self) -> bool {
        (self.network, self.asset, &self.evidence) == (other.network, other.asset, &other.evidence)
    }
}

fn domain(network: Network) -> Eip712Domain {
    let chain_id = Some(U256::from(network.chain_id()));
    Eip712Domain::new(Some("tower-x402 evidence".into()), Some("1".into()), chain_id, None, None)
}

/// Checks that the evidence can be reported, and returns its payment.
fn reportable(evidence: &Evidence, network: Network, asset: Address) -> Result<EvidencePayment, ReportError> {
    let payment = evidence.payment.filter(|_| evidence.paid > Usdc::ZERO).ok_or(ReportError::NoPayment)?;
    if payment.payer == evidence.evaluator {
        return Err(ReportError::PaidItself);
    }
    if let Some(charge) = &evidence.charge {
        let ChannelCharge { channel, charged } = charge;
        let contradiction = [
            (channel.receiver == evidence.evaluator, "its receiver is not the evaluator"),
            (channel.token == asset, "its token is not the report's"),
            (evidence.paid <= *charged, "less was charged in all than was paid"),
            (charge.payment(network) == payment, "payer and nonce are not those of the charge"),
        ];
        if let Some((_, why)) = contradiction.into_iter().find(|(holds, _)| !holds) {
            return Err(ReportError::Channel(why));
        }
    }
    // Other outcomes are found before anything is paid, such as a wrong price.
    if !matches!(evidence.outcome, CallOutcome::Answered { .. } | CallOutcome::InvalidAnswer | CallOutcome::Timeout) {
        return Err(ReportError::Outcome);
    }
    if evidence.skill.is_empty() || evidence.skill.len() > MAX_SKILL_BYTES {
        return Err(ReportError::Skill);
    }
    Ok(payment)
}

fn typed(evidence: &Evidence, asset: Address, payment: EvidencePayment) -> Result<typed::Evidence, ReportError> {
    let outcome = serde_json_canonicalizer::to_string(&evidence.outcome).map_err(|_| ReportError::Outcome)?;
    Ok(typed::Evidence {
        asset,
        payer: payment.payer,
        nonce: payment.nonce,
        evaluator: evidence.evaluator,
        paid: evidence.paid.into(),
        skill: evidence.skill.clone(),
        at: evidence.at,
        outcome,
    })
}

/// A report that a directory accepted, with the block of its payment. Readers can check both: the signature in `report`, and the
/// transaction that `report` names.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[non_exhaustive]
pub struct AcceptedReport {
    /// The report's number in the directory. Later reports have larger numbers.
    pub id: u64,
    /// The report, with the transaction of the payment.
    #[serde(flatten)]
    pub report: SignedEvidence,
    /// The number of the payment's block.
    pub block: u64,
    /// The time of that block, in seconds since the Unix epoch.
    pub block_time: u64,
}

/// A page of reports.
#[derive(Serialize, Deserialize)]
pub(super) struct ReportsBody {
    pub(super) reports: Vec<AcceptedReport>,
    /// Where the next page begins: the last report's number, or what was asked for.
    pub(super) after: u64,
    /// Whether there are further reports now.
    pub(super) more: bool,
}

/// An evaluator's card in a page of cards.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct CardEntry {
    pub(super) id: u64,
    /// The URL of the card.
    pub(super) url: String,
    pub(super) pay_to: Address,
    /// Seconds since the Unix epoch.
    pub(super) first_seen: u64,
    pub(super) last_seen: u64,
    /// The card as the evaluator signed it.
    pub(super) card: Box<RawValue>,
}

/// A page of cards.
#[derive(Serialize, Deserialize)]
pub(super) struct CardsBody {
    pub(super) cards: Vec<CardEntry>,
    pub(super) after: u64,
    pub(super) more: bool,
}

/// A request to list an evaluator.
#[derive(Serialize, Deserialize)]
pub(super) struct ListRequest {
    pub(super) url: String,
}

/// A refusal.
#[derive(Deserialize)]
pub(super) struct Problem {
    pub(super) error: String,
    #[serde(default)]
    pub(super) detail: String,
}
