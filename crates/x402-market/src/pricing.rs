//! The pricing extension of an agent card: what judging costs, who is paid, and what the evaluator claims to be good at.

use alloy_primitives::Address;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use tower_x402::{Asset, Network, Usdc};

use super::{
    bounded::{LengthError, List, Text},
    measure::Score,
    message::Version,
    submission::{MAX_OUTPUTS, SkillId},
};

/// The URI of the pricing extension under `capabilities.extensions` of an agent card. Its `params` are a [`Pricing`].
pub const EXTENSION_URI: &str =
    "https://docs.rs/tower-x402/latest/tower_x402/market/index.html#the-pricing-extension-version-1";

/// The price of judging, the payee, and the evaluator's claims.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Pricing {
    pub(super) version: Version,
    /// The URL that submissions are posted to: absolute, on the card's own origin. On an unsigned card it may be relative to the
    /// card's.
    pub endpoint: String,
    /// Everything else here asks for it by [`price_per_output`](Self::price_per_output) or [`price_of`](Self::price_of).
    pub(super) price_per_output: Usdc,
    /// The address that is paid, on every chain. Its key signs the card.
    pub pay_to: Address,
    /// The tokens accepted.
    pub accepts: List<AcceptedToken, 1, 16>,
    /// The number of outputs that a submission may hold.
    #[serde(deserialize_with = "outputs")]
    pub max_outputs: usize,
    /// Whether the evaluator takes [lessons](super::Lesson) at `lessons`, beside its endpoint.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub lessons: bool,
    /// The evaluator's claims, by skill.
    #[serde(default)]
    pub expertise: List<Expertise, 0, 64>,
    /// The schemas of submissions and evaluations.
    pub schemas: Schemas,
    /// Fields that this version does not know.
    #[serde(flatten)]
    pub rest: Map<String, Value>,
}

/// An accepted token: one with EIP-3009 and six decimals, worth a dollar.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct AcceptedToken {
    /// The chain.
    pub network: Network,
    /// The token contract.
    pub asset: Address,
    /// The `name` of its EIP-712 domain.
    pub name: Text<1, 64>,
    /// The `version` of its EIP-712 domain.
    pub version: Text<1, 16>,
}

/// An evaluator's claim to be good at a skill.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Expertise {
    /// The skill.
    pub skill: SkillId,
    /// The [worth](crate::evidence::Pairs::worth) that it claims: 0 for a coin, 1 if it never orders two outputs wrongly. Nobody has checked it.
    pub claim: Score,
}

/// URLs of JSON Schemas.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Schemas {
    /// The schema of a [`Submission`](super::Submission).
    pub submission: String,
    /// The schema of an [`Evaluation`](super::Evaluation).
    pub evaluation: String,
}

impl Pricing {
    /// Returns the price of judging one output.
    pub const fn price_per_output(&self) -> Usdc {
        self.price_per_output
    }

    /// Returns the price of judging this many outputs; `None` if it cannot be expressed.
    pub fn price_of(&self, outputs: usize) -> Option<Usdc> {
        self.price_per_output.checked_mul(outputs.try_into().ok()?)
    }

    /// Returns how many outputs one request may hold: as many as the evaluator takes, and as this amount pays for.
    pub(super) fn outputs_for(&self, amount: Usdc) -> usize {
        let payable = amount.atomic().checked_div(self.price_per_output.atomic()).unwrap_or(u64::MAX);
        self.max_outputs.min(usize::try_from(payable).unwrap_or(usize::MAX))
    }

    /// Returns the evaluator's claim about a skill.
    pub fn claim(&self, skill: &str) -> Option<Score> {
        self.expertise.iter().find(|expertise| &*expertise.skill == skill).map(|expertise| expertise.claim)
    }
}

impl TryFrom<Asset> for AcceptedToken {
    type Error = LengthError;

    fn try_from(asset: Asset) -> Result<Self, LengthError> {
        let Asset { network, address, name, version, .. } = asset;
        Ok(Self { network, asset: address, name: Text::new(name)?, version: Text::new(version)? })
    }
}

impl From<&AcceptedToken> for Asset {
    fn from(token: &AcceptedToken) -> Self {
        Self::new(token.network, token.asset, token.name.to_string(), token.version.to_string())
    }
}

fn outputs<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<usize, D::Error> {
    let outputs = usize::deserialize(deserializer)?;
    let is_in_range = (1..=MAX_OUTPUTS).contains(&outputs);
    is_in_range.then_some(outputs).ok_or_else(|| serde::de::Error::custom(format!("it is outside 1..={MAX_OUTPUTS}")))
}
