//! The card by which students find an evaluator, and what can be wrong with it.
//!
//! An [`AgentCard`] is an A2A 1.0 card with the evaluator's pricing in an extension. A [`VerifiedCard`] was checked. A [`CardFetcher`]
//! fetches cards and pins their payees.

mod fetcher;
mod verified;

use alloy_primitives::Address;
use alloy_signer::Signer;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use tower_x402::{Asset, Network, ParseUsdcError, Usdc};
use url::Url;

pub use fetcher::CardFetcher;
pub(super) use fetcher::Fetched;
pub use fetcher::card_url;
pub use verified::{CardSignature, VerifiedCard};

use super::{
    bounded::{LengthError, List, Text},
    measure::Score,
    message::Version,
    net::below,
    pricing::{AcceptedToken, EXTENSION_URI, Expertise, Pricing, Schemas},
    schema::{EVALUATION_SCHEMA_PATH, SUBMISSION_SCHEMA_PATH},
    submission::MAX_OUTPUTS,
};

/// The path of a card, below an evaluator's base URL.
pub const CARD_PATH: &str = "/.well-known/agent-card.json";
/// The protocol binding of evaluators: POST a submission, pay over x402, get an evaluation.
pub const EVALUATION_BINDING: &str = "x402-evaluation";

/// An agent card (A2A 1.0, section 4.4). Create one with [`AgentCard::builder`] and sign it. Unknown fields are preserved.
///
/// ```
/// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
/// use alloy_signer_local::PrivateKeySigner;
/// use tower_x402::Network;
/// use x402_market::{AgentCard, Score};
///
/// let key = PrivateKeySigner::random();
/// let card = AgentCard::builder("Reasons", "https://reasons.example")
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
#[non_exhaustive]
pub struct AgentCard {
    /// The evaluator's name.
    pub name: String,
    /// A description for people and agents.
    pub description: String,
    /// The version of the evaluator's judgement.
    pub version: String,
    /// The interfaces of the agent.
    pub supported_interfaces: Vec<AgentInterface>,
    /// The capabilities. The pricing is among their extensions.
    pub capabilities: Capabilities,
    /// The media types of requests.
    pub default_input_modes: Vec<String>,
    /// The media types of responses.
    pub default_output_modes: Vec<String>,
    /// The skills.
    pub skills: Vec<AgentSkill>,
    /// The signatures of the card.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub signatures: Vec<CardSignature>,
    /// All other fields.
    #[serde(flatten)]
    pub rest: Map<String, Value>,
}

/// An interface of an agent.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[non_exhaustive]
pub struct AgentInterface {
    /// The URL.
    pub url: String,
    /// The protocol binding.
    pub protocol_binding: String,
    /// The version of the protocol.
    pub protocol_version: String,
    /// All other fields.
    #[serde(flatten)]
    pub rest: Map<String, Value>,
}

/// The capabilities of an agent.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Capabilities {
    /// The extensions of A2A.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub extensions: Vec<AgentExtension>,
    /// All other fields.
    #[serde(flatten)]
    pub rest: Map<String, Value>,
}

/// An extension of A2A.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct AgentExtension {
    /// The extension's URI.
    pub uri: String,
    /// The extension's parameters.
    #[serde(default)]
    pub params: Value,
    /// All other fields.
    #[serde(flatten)]
    pub rest: Map<String, Value>,
}

/// A skill of an agent.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct AgentSkill {
    /// The name that submissions use.
    pub id: String,
    /// The name for people.
    pub name: String,
    /// A description of the skill.
    pub description: String,
    /// Keywords.
    #[serde(default)]
    pub tags: Vec<String>,
    /// All other fields.
    #[serde(flatten)]
    pub rest: Map<String, Value>,
}

impl AgentCard {
    /// Starts a card of an evaluator whose service is mounted at `base`. A skill, a price and a payee are required.
    pub fn builder(name: impl Into<String>, base: impl AsRef<str>) -> AgentCardBuilder {
        AgentCardBuilder {
            name: name.into(),
            base: base.as_ref().to_owned(),
            description: None,
            version: "1".to_owned(),
            skills: Vec::new(),
            price: None,
            payees: Vec::new(),
            max_outputs: MAX_OUTPUTS,
            lessons: false,
        }
    }

    /// Returns the terms from the pricing extension.
    ///
    /// # Errors
    /// [`CardError::NoPricing`] if there are none, [`CardError::Invalid`] if they cannot be read.
    pub fn pricing(&self) -> Result<Pricing, CardError> {
        let extension = self.capabilities.extensions.iter().find(|extension| extension.uri == EXTENSION_URI);
        let params = &extension.ok_or(CardError::NoPricing)?.params;
        serde_path_to_error::deserialize(params)
            .map_err(|error| CardError::invalid(format!("pricing.{}", error.path()), error.inner()))
    }

    /// Returns `true` if the card has this skill.
    pub fn has_skill(&self, id: &str) -> bool {
        self.skills.iter().any(|skill| skill.id == id)
    }

    /// Signs the card with the key of its payee (JWS, ES256K). This replaces an earlier signature by the same key.
    ///
    /// # Errors
    /// [`CardError::NotThePayee`] if the signer is not the payee, [`CardError::Sign`] if the signer fails.
    pub async fn sign(mut self, signer: &(impl Signer + Sync)) -> Result<Self, CardError> {
        let pay_to = self.pricing()?.pay_to;
        if signer.address() != pay_to {
            return Err(CardError::NotThePayee { pay_to, signer: signer.address() });
        }
        let card = serde_json::to_value(&self).map_err(|error| CardError::invalid(".", error))?;
        let signature = verified::sign(&card, signer).await?;
        self.signatures.retain(|old| old.named_signer() != Some(pay_to));
        // First, because readers check only a few.
        self.signatures.insert(0, signature);
        Ok(self)
    }
}

/// The settings of an [`AgentCard`]. Create it with [`AgentCard::builder`].
#[derive(Clone, Debug)]
#[must_use]
pub struct AgentCardBuilder {
    name: String,
    base: String,
    description: Option<String>,
    version: String,
    skills: Vec<(AgentSkill, Score)>,
    price: Option<Result<Usdc, ParseUsdcError>>,
    payees: Vec<(Result<Asset, Network>, Address)>,
    max_outputs: usize,
    lessons: bool,
}

impl AgentCardBuilder {
    /// Sets the description for people and agents. Default: a list of the skills.
    pub fn description(self, description: impl Into<String>) -> Self {
        Self { description: Some(description.into()), ..self }
    }

    /// Sets the version of the evaluator's judgement. Default: `1`.
    pub fn version(self, version: impl Into<String>) -> Self {
        Self { version: version.into(), ..self }
    }

    /// Adds a skill. `expertise` is the [worth](crate::evidence::Pairs::worth) that the evaluator claims; 0 claims nothing.
    pub fn skill(mut self, id: impl Into<String>, description: impl Into<String>, expertise: impl Into<Score>) -> Self {
        let (id, description, expertise) = (id.into(), description.into(), expertise.into());
        let tags = vec!["evaluation".to_owned(), id.clone()];
        self.skills.push((AgentSkill { name: id.clone(), id, description, tags, rest: Map::new() }, expertise));
        self
    }

    /// Sets the price of judging one output: dollars as text (`"$0.001"`) or [`Usdc`].
    pub fn price(self, price: impl TryInto<Usdc, Error: Into<ParseUsdcError>>) -> Self {
        Self { price: Some(price.try_into().map_err(Into::into)), ..self }
    }

    /// Accepts USDC on `network`, paid to `payee`. Call it once for each network. The payee must be the same on all.
    pub fn pay_to(mut self, network: Network, payee: Address) -> Self {
        self.payees.push((network.usdc().ok_or(network), payee));
        self
    }

    /// Accepts another EIP-3009 token with six decimals, paid to `payee`.
    pub fn pay_to_in(mut self, asset: Asset, payee: Address) -> Self {
        self.payees.push((Ok(asset), payee));
        self
    }

    /// Sets how many outputs a submission may have. Default and maximum: 64.
    pub fn max_outputs(self, outputs: usize) -> Self {
        Self { max_outputs: outputs, ..self }
    }

    /// Says that the evaluator takes [lessons](crate::Lesson). Its judge must [learn](crate::judge::Judge::learn). Default: it does not.
    pub fn lessons(self) -> Self {
        Self { lessons: true, ..self }
    }

    /// Checks the settings and returns the unsigned card.
    ///
    /// # Errors
    /// [`CardError::Invalid`] names the setting that is missing or does not fit.
    pub fn build(self) -> Result<AgentCard, CardError> {
        let price = self.price.ok_or_else(|| CardError::invalid("price", "call .price(\"$0.001\")"))?;
        let price = price.map_err(|error| CardError::invalid("price", error))?;
        if price == Usdc::ZERO {
            return Err(CardError::invalid("price", "an evaluation must cost something"));
        }
        if self.skills.is_empty() {
            return Err(CardError::invalid("skills", "call .skill(…)"));
        }
        if self.max_outputs == 0 || self.max_outputs > MAX_OUTPUTS {
            return Err(CardError::invalid("max_outputs", "it must be from 1 to 64"));
        }
        let missing = || CardError::invalid("pay_to", "call .pay_to(network, address)");
        let pay_to = self.payees.first().ok_or_else(missing)?.1;
        if pay_to.is_zero() || self.payees.iter().any(|(_, payee)| *payee != pay_to) {
            return Err(CardError::invalid("pay_to", "there must be one payee, and not the zero address"));
        }
        let mut accepts = Vec::new();
        for (asset, _) in self.payees {
            let unknown = |network| CardError::invalid("pay_to", format!("no USDC is known on {network}"));
            let asset = asset.map_err(unknown)?;
            accepts.push(AcceptedToken::try_from(asset).map_err(|error| CardError::invalid("pay_to", error))?);
        }
        let base = Url::parse(&self.base).ok();
        let below = |path: &str| {
            let url = base.as_ref().and_then(|base| below(base, path));
            url.ok_or_else(|| CardError::invalid("base", "it is not an http or https URL"))
        };
        let expertise =
            |(skill, claim): &(AgentSkill, Score)| Ok(Expertise { skill: Text::new(&*skill.id)?, claim: *claim });
        let expertise: Result<Vec<_>, LengthError> = self.skills.iter().map(expertise).collect();
        let expertise = expertise.and_then(List::new).map_err(|error| CardError::invalid("skills", error))?;
        let pricing = Pricing {
            version: Version,
            endpoint: below("evaluate")?.into(),
            price_per_output: price,
            pay_to,
            accepts: List::new(accepts).map_err(|error| CardError::invalid("pay_to", error))?,
            max_outputs: self.max_outputs,
            lessons: self.lessons,
            expertise,
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
            capabilities: Capabilities { extensions: vec![extension(&pricing)?], rest: Map::new() },
            default_input_modes: vec!["application/json".to_owned()],
            default_output_modes: vec!["application/json".to_owned()],
            skills,
            signatures: Vec::new(),
            rest: Map::new(),
        })
    }
}

/// Returns the pricing as an extension of a card.
fn extension(pricing: &Pricing) -> Result<AgentExtension, CardError> {
    let params = serde_json::to_value(pricing).map_err(|error| CardError::invalid("pricing", error))?;
    let description = json!("What an evaluation costs, paid over x402");
    let rest = Map::from_iter([("description".to_owned(), description), ("required".to_owned(), json!(true))]);
    Ok(AgentExtension { uri: EXTENSION_URI.to_owned(), params, rest })
}

/// A card could not be created, or cannot be trusted.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CardError {
    /// The card could not be fetched, or the HTTP client could not be created.
    #[error("the card could not be fetched")]
    Unreachable(#[source] reqwest::Error),
    /// The card was not fetched within the [timeout](CardFetcher::timeout).
    #[error("the card was not fetched in time")]
    Timeout,
    /// The server answered with another status than 200.
    #[error("the server answered the request for the card with status {0}")]
    Status(u16),
    /// The card is larger than 64 KiB.
    #[error("the card has more than {limit} bytes")]
    TooLarge {
        /// The limit, in bytes.
        limit: usize,
    },
    /// The server redirects to another origin, or too often.
    #[error("the request for the card is redirected to {to}; a card must come from the origin that it is about")]
    Redirected {
        /// The target, without its query.
        to: String,
    },
    /// The document is not an agent card, or its terms are not valid.
    #[error("the card is not valid: {at}: {problem}")]
    Invalid {
        /// The place in the card, or the setting of the builder.
        at: String,
        /// What is wrong there.
        problem: String,
    },
    /// The card has no pricing extension, so it is not an evaluator's.
    #[error("the card has no pricing extension: it is not an evaluator's")]
    NoPricing,
    /// The card has no signature.
    #[error("the card is not signed")]
    Unsigned,
    /// No signature is by the payee's key.
    #[error("the card is not signed with the key of its payee {pay_to}, or was changed since")]
    BadSignature {
        /// The payee.
        pay_to: Address,
    },
    /// The endpoint is on another origin than the card.
    #[error("the card's endpoint {endpoint} is not on the card's origin")]
    ForeignEndpoint {
        /// The endpoint.
        endpoint: String,
    },
    /// The card is signed, but its endpoint is a relative URL. A copy on another origin would be as valid.
    #[error("the card's endpoint is relative: a signed card needs an absolute URL")]
    RelativeEndpoint,
    /// The card has another payee than when the evaluator was first seen.
    #[error("the card's payee is {found}, but this evaluator is pinned to {pinned}")]
    PayeeChanged {
        /// The pinned payee.
        pinned: Address,
        /// The payee of this card.
        found: Address,
    },
    /// The card's host is not public, and others are not asked. See [`CardFetcher::public_only`] and
    /// [`StudentBuilder::private_hosts`](super::StudentBuilder::private_hosts).
    #[error("the card's host is not public")]
    NotPublic,
    /// The limit of pinned evaluators is reached. See [`CardFetcher::max_evaluators`].
    #[error("the limit of {limit} evaluators is reached")]
    TooManyEvaluators {
        /// The limit.
        limit: usize,
    },
    /// The signer is not the payee. Sign with the key of the payee.
    #[error("the card must be signed with the key of its payee {pay_to}, not of {signer}")]
    NotThePayee {
        /// The payee.
        pay_to: Address,
        /// The signer's address.
        signer: Address,
    },
    /// The signer refused or failed.
    #[error("the signer failed")]
    Sign(#[source] alloy_signer::Error),
}

impl CardError {
    pub(super) fn invalid(at: impl Into<String>, problem: impl ToString) -> Self {
        Self::Invalid { at: at.into(), problem: problem.to_string() }
    }
}
