//! The pricing extension of an agent card.

use alloy_primitives::Address;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use tower_x402::{Asset, Network, Usdc};

use super::{
    bounded::{LengthError, List, Text},
    card::{AgentExtension, CardError},
    measure::Score,
    message::Version,
    submission::MAX_OUTPUTS,
    task::SkillId,
};

/// The URI of the extension, under `capabilities.extensions` of an agent card. Its `params` are a [`Pricing`].
pub const EXTENSION_URI: &str =
    "https://docs.rs/tower-x402/latest/tower_x402/market/index.html#the-pricing-extension-version-1";

/// What judging costs, who is paid, and what the evaluator claims to be good at.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Pricing {
    pub(super) version: Version,
    /// Where submissions are posted: an absolute URL on the card's own origin. On a card that nobody signed it may be relative to the
    /// card's.
    pub endpoint: String,
    /// What judging one output costs, in atomic units of USDC.
    pub price_per_output: Usdc,
    /// Who is paid, on every network. The card is signed with this address's key.
    pub pay_to: Address,
    /// In what.
    pub accepts: List<AcceptedToken, 1, 16>,
    /// How many outputs one submission may hold.
    #[serde(deserialize_with = "outputs")]
    pub max_outputs: usize,
    /// What the evaluator claims of itself, by skill.
    #[serde(default)]
    pub expertise: List<Expertise, 0, 64>,
    /// Where the schemas of submission and evaluation are.
    pub schemas: Schemas,
    /// Everything else.
    #[serde(flatten)]
    pub rest: Map<String, Value>,
}

/// A token that is accepted: EIP-3009, six decimals, worth a dollar.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AcceptedToken {
    /// The chain.
    pub network: Network,
    /// The contract.
    pub asset: Address,
    /// The `name` of its EIP-712 domain.
    pub name: Text<1, 64>,
    /// The `version` of its EIP-712 domain.
    pub version: Text<1, 16>,
}

/// How good an evaluator says it is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Expertise {
    /// At what.
    pub skill: SkillId,
    /// How often its verdicts are right. Nobody has checked this: a weak hint.
    pub claim: Score,
}

/// URLs of JSON Schemas.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Schemas {
    /// Of a [`Submission`](super::Submission).
    pub submission: String,
    /// Of an [`Evaluation`](super::Evaluation).
    pub evaluation: String,
}

impl Pricing {
    /// What judging so many outputs costs; `None` if that is more than any amount of USDC.
    pub fn price_of(&self, outputs: usize) -> Option<Usdc> {
        self.price_per_output.checked_mul(outputs.try_into().ok()?)
    }

    /// What the evaluator claims about a skill.
    pub fn claim(&self, skill: &str) -> Option<Score> {
        self.expertise.iter().find(|expertise| &*expertise.skill == skill).map(|expertise| expertise.claim)
    }

    pub(super) fn into_extension(self) -> Result<AgentExtension, CardError> {
        let params = serde_json::to_value(&self).map_err(|error| CardError::invalid("pricing", &error))?;
        let description = json!("What an evaluation costs, paid over x402");
        let rest = Map::from_iter([("description".to_owned(), description), ("required".to_owned(), json!(true))]);
        Ok(AgentExtension { uri: EXTENSION_URI.to_owned(), params, rest })
    }
}

impl Expertise {
    pub(super) fn new(skill: &str, claim: Score) -> Result<Self, LengthError> {
        Ok(Self { skill: Text::new(skill)?, claim })
    }
}

impl TryFrom<Asset> for AcceptedToken {
    type Error = LengthError;

    fn try_from(asset: Asset) -> Result<Self, LengthError> {
        let Asset { network, address, name, version } = asset;
        Ok(Self { network, asset: address, name: Text::new(name)?, version: Text::new(version)? })
    }
}

impl From<&AcceptedToken> for Asset {
    fn from(token: &AcceptedToken) -> Self {
        let AcceptedToken { network, asset, name, version } = token;
        Self { network: *network, address: *asset, name: name.to_string(), version: version.to_string() }
    }
}

fn outputs<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<usize, D::Error> {
    let outputs = usize::deserialize(deserializer)?;
    let is_some = (1..=MAX_OUTPUTS).contains(&outputs);
    is_some.then_some(outputs).ok_or_else(|| serde::de::Error::custom(format!("it must be from 1 to {MAX_OUTPUTS}")))
}
