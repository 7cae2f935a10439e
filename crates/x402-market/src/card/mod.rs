//! The card by which students find an evaluator, and what can be wrong with it.
//!
//! An [`AgentCard`] is one of A2A 1.0 with our pricing in an extension; [`VerifiedCard`] is one that was checked, and [`CardFetcher`] fetches
//! and pins it.

mod fetcher;
mod verified;

use std::fmt;

use alloy_primitives::Address;
use alloy_signer::Signer;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use tower_x402::{Asset, Network, ParseUsdcError, Usdc};
use url::Url;

pub use fetcher::CardFetcher;
pub(super) use fetcher::Fetched;
#[cfg(feature = "directory")]
pub(super) use fetcher::card_url;
pub use verified::{CardSignature, VerifiedCard};

use super::{
    bounded::List,
    measure::Score,
    message::Version,
    net::below,
    pricing::{AcceptedToken, EXTENSION_URI, Expertise, Pricing, Schemas},
    schema::{EVALUATION_SCHEMA_PATH, SUBMISSION_SCHEMA_PATH},
    submission::MAX_OUTPUTS,
};

/// Where a card is served, below an evaluator's base URL.
pub const CARD_PATH: &str = "/.well-known/agent-card.json";
/// What evaluators speak at their endpoint: POST a submission, pay over x402, get an evaluation.
pub const EVALUATION_BINDING: &str = "x402-evaluation";

/// An agent card (A2A 1.0, section 4.4). Fields that are not known here are kept as they came.
///
/// ```
/// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
/// use alloy_signer_local::PrivateKeySigner;
/// use tower_x402::Network;
/// use x402_market::{AgentCard, Score};
///
/// let key = PrivateKeySigner::random();
/// let card = AgentCard::builder("Reasons", "https://reasons.example".parse()?)
///     .skill("reasoning", "Says whether an answer gives reasons", Score::new(0.8)?)
///     .price("$0.001")
///     .pay_to(Network::BASE_SEPOLIA, key.address())
///     .build()?
///     .sign(&key)
///     .await?;
/// # Ok(()) }
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct AgentCard {
    /// The evaluator's name.
    pub name: String,
    /// What it does, for people and agents.
    pub description: String,
    /// The version of its judgement.
    pub version: String,
    /// Where it is reached.
    pub supported_interfaces: Vec<AgentInterface>,
    /// What it can do besides; the pricing is in here.
    pub capabilities: Capabilities,
    /// Media types it reads.
    pub default_input_modes: Vec<String>,
    /// Media types it writes.
    pub default_output_modes: Vec<String>,
    /// What it is good at.
    pub skills: Vec<AgentSkill>,
    /// Who vouches for the card.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub signatures: Vec<CardSignature>,
    /// Everything else.
    #[serde(flatten)]
    pub rest: Map<String, Value>,
}

/// One way to reach an agent.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct AgentInterface {
    /// Where.
    pub url: String,
    /// What is spoken there.
    pub protocol_binding: String,
    /// In which version.
    pub protocol_version: String,
    /// Everything else.
    #[serde(flatten)]
    pub rest: Map<String, Value>,
}

/// What an agent can do besides its skills.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Capabilities {
    /// Extensions of A2A.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub extensions: Vec<AgentExtension>,
    /// Everything else.
    #[serde(flatten)]
    pub rest: Map<String, Value>,
}

/// An extension of A2A.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AgentExtension {
    /// Which one.
    pub uri: String,
    /// What it says.
    #[serde(default)]
    pub params: Value,
    /// Everything else.
    #[serde(flatten)]
    pub rest: Map<String, Value>,
}

/// Something that an agent is good at.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AgentSkill {
    /// What submissions call it.
    pub id: String,
    /// What people call it.
    pub name: String,
    /// What it is.
    pub description: String,
    /// Words to find it by.
    #[serde(default)]
    pub tags: Vec<String>,
    /// Everything else.
    #[serde(flatten)]
    pub rest: Map<String, Value>,
}

impl AgentCard {
    /// Starts a card for an evaluator that is reached below `base`. It needs a skill, a price and a payee.
    pub fn builder(name: impl Into<String>, base: Url) -> AgentCardBuilder {
        AgentCardBuilder {
            name: name.into(),
            base,
            description: None,
            version: "1".to_owned(),
            skills: Vec::new(),
            price: None,
            payees: Vec::new(),
            max_outputs: MAX_OUTPUTS,
        }
    }

    /// The terms in the pricing extension.
    ///
    /// # Errors
    /// [`CardError::NoPricing`], or [`CardError::Invalid`] if they cannot be read.
    pub fn pricing(&self) -> Result<Pricing, CardError> {
        let extension = self.capabilities.extensions.iter().find(|extension| extension.uri == EXTENSION_URI);
        let params = &extension.ok_or(CardError::NoPricing)?.params;
        serde_path_to_error::deserialize(params).map_err(|error| CardError::Invalid {
            at: format!("pricing.{}", error.path()),
            problem: error.into_inner().to_string(),
        })
    }

    /// Whether it names a skill.
    pub fn has_skill(&self, id: &str) -> bool {
        self.skills.iter().any(|skill| skill.id == id)
    }

    /// Signs the card with the key that is paid (JWS, ES256K). It replaces earlier signatures of the same key.
    ///
    /// # Errors
    /// [`CardError::NotThePayee`] if it is another key, and [`CardError::Sign`] if the signer fails.
    pub async fn sign(mut self, signer: &(impl Signer + Sync)) -> Result<Self, CardError> {
        let pay_to = self.pricing()?.pay_to;
        if signer.address() != pay_to {
            return Err(CardError::NotThePayee { pay_to, signer: signer.address() });
        }
        let card = serde_json::to_value(&self).map_err(|error| CardError::invalid(".", &error))?;
        let signature = verified::sign(&card, signer).await?;
        self.signatures.retain(|old| old.named_signer() != Some(pay_to));
        // First, since readers look at a few only.
        self.signatures.insert(0, signature);
        Ok(self)
    }
}

/// Describes an [`AgentCard`].
#[derive(Clone, Debug)]
pub struct AgentCardBuilder {
    name: String,
    base: Url,
    description: Option<String>,
    version: String,
    skills: Vec<(AgentSkill, Score)>,
    price: Option<Result<Usdc, ParseUsdcError>>,
    payees: Vec<(Result<Asset, Network>, Address)>,
    max_outputs: usize,
}

impl AgentCardBuilder {
    /// What the evaluator does, for people and agents.
    pub fn description(mut self, description: impl Into<String>) -> Self {
        self.description = Some(description.into());
        self
    }

    /// The version of its judgement; `1` unless set.
    pub fn version(mut self, version: impl Into<String>) -> Self {
        self.version = version.into();
        self
    }

    /// A skill that submissions may ask for, and how often its verdicts are right by the evaluator's own account.
    pub fn skill(mut self, id: impl Into<String>, description: impl Into<String>, expertise: Score) -> Self {
        let (id, description) = (id.into(), description.into());
        let tags = vec!["evaluation".to_owned(), id.clone()];
        self.skills.push((AgentSkill { name: id.clone(), id, description, tags, rest: Map::new() }, expertise));
        self
    }

    /// What judging one output costs: dollars as text (`"$0.001"`) or [`Usdc`].
    pub fn price(mut self, price: impl TryInto<Usdc, Error: Into<ParseUsdcError>>) -> Self {
        self.price = Some(price.try_into().map_err(Into::into));
        self
    }

    /// Accepts USDC on `network`, paid to `payee`. Call it again for other networks; the payee is the same on all.
    pub fn pay_to(mut self, network: Network, payee: Address) -> Self {
        self.payees.push((network.usdc().ok_or(network), payee));
        self
    }

    /// Accepts another EIP-3009 token with six decimals, paid to `payee`.
    pub fn pay_to_in(mut self, asset: Asset, payee: Address) -> Self {
        self.payees.push((Ok(asset), payee));
        self
    }

    /// How many outputs a submission may hold; 64 unless set, and no more.
    pub fn max_outputs(mut self, outputs: usize) -> Self {
        self.max_outputs = outputs;
        self
    }

    /// Checks the description and makes the card, unsigned.
    ///
    /// # Errors
    /// [`CardError::Invalid`] names what is missing or does not fit.
    pub fn build(self) -> Result<AgentCard, CardError> {
        let invalid = |at: &str, problem: &str| CardError::invalid(at, &problem);
        let price = self.price.ok_or_else(|| invalid("price", "call .price(\"$0.001\")"))?;
        let price = price.map_err(|error| CardError::invalid("price", &error))?;
        if price == Usdc::ZERO {
            return Err(invalid("price", "an evaluation must cost something"));
        }
        if self.skills.is_empty() {
            return Err(invalid("skills", "call .skill(…)"));
        }
        if self.max_outputs == 0 || self.max_outputs > MAX_OUTPUTS {
            return Err(invalid("max_outputs", "it must be from 1 to 64"));
        }
        let pay_to = self.payees.first().ok_or_else(|| invalid("pay_to", "call .pay_to(network, address)"))?.1;
        if pay_to.is_zero() || self.payees.iter().any(|(_, payee)| *payee != pay_to) {
            return Err(invalid("pay_to", "there must be one payee, and not the zero address"));
        }
        let mut accepts = Vec::new();
        for (asset, _) in self.payees {
            let unknown = |network| CardError::invalid("pay_to", &format!("no USDC is known on {network}"));
            let asset = asset.map_err(unknown)?;
            accepts.push(AcceptedToken::try_from(asset).map_err(|error| CardError::invalid("pay_to", &error))?);
        }
        let below =
            |path: &str| below(&self.base, path).ok_or_else(|| invalid("base", "it is not an http or https URL"));
        let expertise = self.skills.iter().map(|(skill, claim)| Expertise::new(&skill.id, *claim));
        let expertise =
            expertise.collect::<Result<Vec<_>, _>>().map_err(|error| CardError::invalid("skills", &error))?;
        let pricing = Pricing {
            version: Version,
            endpoint: below("evaluate")?.into(),
            price_per_output: price,
            pay_to,
            accepts: List::new(accepts).map_err(|error| CardError::invalid("pay_to", &error))?,
            max_outputs: self.max_outputs,
            expertise: List::new(expertise).map_err(|error| CardError::invalid("skills", &error))?,
            schemas: Schemas {
                submission: below(SUBMISSION_SCHEMA_PATH)?.into(),
                evaluation: below(EVALUATION_SCHEMA_PATH)?.into(),
            },
            rest: Map::new(),
        };
        let skills: Vec<AgentSkill> = self.skills.into_iter().map(|(skill, _)| skill).collect();
        let named = || format!("Evaluates: {}", skills.iter().map(|skill| &*skill.id).collect::<Vec<_>>().join(", "));
        Ok(AgentCard {
            description: self.description.unwrap_or_else(named),
            name: self.name,
            version: self.version,
            supported_interfaces: vec![AgentInterface {
                url: pricing.endpoint.clone(),
                protocol_binding: EVALUATION_BINDING.to_owned(),
                protocol_version: "1".to_owned(),
                rest: Map::new(),
            }],
            capabilities: Capabilities { extensions: vec![pricing.into_extension()?], rest: Map::new() },
            default_input_modes: vec!["application/json".to_owned()],
            default_output_modes: vec!["application/json".to_owned()],
            skills,
            signatures: Vec::new(),
            rest: Map::new(),
        })
    }
}

/// Why a card is not made, or not trusted.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CardError {
    /// The card could not be fetched.
    #[error("the card could not be fetched")]
    Unreachable(#[source] reqwest::Error),
    /// It did not come in time.
    #[error("the card did not come in time")]
    Late,
    /// There is none.
    #[error("asked for the card, the server answered with status {0}")]
    Status(u16),
    /// It is larger than a reader is willing to look at.
    #[error("the card has more than {limit} bytes")]
    TooLarge {
        /// The limit in bytes.
        limit: usize,
    },
    /// The server sends whoever asks elsewhere.
    #[error("asked for the card, the server redirects to {to}; a card must come from the origin that it is about")]
    Redirected {
        /// Where to, without its query.
        to: String,
    },
    /// Not an agent card, or not one with good terms.
    #[error("the card is not valid: {at}: {problem}")]
    Invalid {
        /// Where in the card.
        at: String,
        /// What is wrong there.
        problem: String,
    },
    /// Not the card of an evaluator.
    #[error("the card has no pricing extension: it is not an evaluator's")]
    NoPricing,
    /// Nobody vouches for it.
    #[error("the card is not signed")]
    Unsigned,
    /// None of its signatures is the payee's.
    #[error("the card is not signed with the key of {pay_to}, who would be paid, or was changed since")]
    BadSignature {
        /// Who would be paid.
        pay_to: Address,
    },
    /// The endpoint is on another origin than the card.
    #[error("the card's endpoint {endpoint} is not on the origin that the card comes from")]
    ForeignEndpoint {
        /// The endpoint.
        endpoint: String,
    },
    /// The card is signed, but does not say by itself where its evaluator is: a copy on another origin would be as good.
    #[error("the card's endpoint is relative: a signed card names it with its origin")]
    RelativeEndpoint,
    /// Somebody else is to be paid than when the evaluator was first seen.
    #[error("the card wants {found} to be paid, but this evaluator was known by {pinned}")]
    PayeeChanged {
        /// Who was to be paid.
        pinned: Address,
        /// Who is now.
        found: Address,
    },
    /// The card is at an address that is not everybody's, of this machine or its network, and only public ones are asked:
    /// [`CardFetcher::public_only`](super::CardFetcher::public_only),
    /// [`StudentBuilder::private_hosts`](super::StudentBuilder::private_hosts).
    #[error("the host of the card is not a public one, and others are not asked")]
    NotPublic,
    /// No more evaluators can be remembered.
    #[error("{limit} evaluators are known; no more are remembered")]
    TooManyEvaluators {
        /// How many can be.
        limit: usize,
    },
    /// A card is signed by whoever is paid.
    #[error("the card must be signed with the key of {pay_to}, who is paid, not of {signer}")]
    NotThePayee {
        /// Who is paid.
        pay_to: Address,
        /// Whose key it is.
        signer: Address,
    },
    /// The key refused or failed.
    #[error("the signer failed")]
    Sign(#[source] alloy_signer::Error),
}

impl CardError {
    pub(super) fn invalid(at: impl Into<String>, problem: &(impl fmt::Display + ?Sized)) -> Self {
        Self::Invalid { at: at.into(), problem: problem.to_string() }
    }
}
