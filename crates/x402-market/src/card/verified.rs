//! A card that was checked: terms that can be read, and a signature by the key that is paid.
//!
//! Signatures are JWS (RFC 7515) with a detached payload: the canonical card (RFC 8785) without its signatures (A2A 1.0, section 8.4). The
//! algorithm is ES256K (RFC 8812), so that the payee's key can sign.

use alloy_primitives::{Address, B256, U256, uint};
use alloy_signer::Signer;
use base64_simd::URL_SAFE_NO_PAD;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use sha2::{Digest as _, Sha256};
use tower_x402::eip3009::PaymentSignature;
use url::Url;

use super::{AgentCard, CardError};
use crate::pricing::Pricing;

/// How many JSON values a card may have. Each takes many times the memory of its text, and cards are kept. The largest card of
/// [`AgentCard::builder`] has less than a thousand.
const MAX_VALUES: usize = 4_096;

/// An evaluator's card that was checked.
///
/// Its terms can be read, its endpoint is on its own origin, and it is signed with the payee's key. Its endpoint is absolute, so a copy of
/// it on another origin is refused.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use alloy_signer_local::PrivateKeySigner;
/// use tower_x402::Network;
/// use x402_market::{AgentCard, Score, VerifiedCard};
///
/// let key = PrivateKeySigner::random();
/// let card = AgentCard::builder("Reasons", "https://reasons.example")
///     .skill("reasoning", "Says whether an answer gives reasons", Score::new(0.8)?)
///     .price("$0.001")
///     .pay_to(Network::BASE, key.address())
///     .build()?
///     .sign(&key)
///     .await?;
/// let json = serde_json::to_vec(&card)?;
/// let verified = VerifiedCard::verify(&json, &"https://reasons.example/.well-known/agent-card.json".parse()?)?;
/// assert_eq!(verified.endpoint().as_str(), "https://reasons.example/evaluate");
/// assert!(VerifiedCard::verify(&json, &"https://copy.example/card.json".parse()?).is_err());
/// # Ok(()) }
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct VerifiedCard {
    card: AgentCard,
    pricing: Pricing,
    endpoint: Url,
}

impl VerifiedCard {
    /// Verifies a card that was fetched from `url`.
    ///
    /// # Errors
    /// [`CardError`] says what is wrong with it.
    pub fn verify(json: &[u8], url: &Url) -> Result<Self, CardError> {
        let raw: Value = serde_json::from_slice(json).map_err(|error| CardError::invalid(".", error))?;
        if count(&raw) > MAX_VALUES {
            return Err(CardError::invalid(".", format_args!("it has more than {MAX_VALUES} values")));
        }
        let card: AgentCard = serde_path_to_error::deserialize(&raw)
            .map_err(|error| CardError::invalid(error.path().to_string(), error.inner()))?;
        let pricing = card.pricing()?;
        let endpoint = url.join(&pricing.endpoint).map_err(|error| CardError::invalid("pricing.endpoint", error))?;
        if endpoint.origin() != url.origin() {
            return Err(CardError::ForeignEndpoint { endpoint: endpoint.into() });
        }
        let pay_to = pricing.pay_to;
        if card.signatures.is_empty() {
            return Err(CardError::Unsigned);
        }
        if !card.signatures.iter().take(MAX_SIGNATURES).any(|signature| signature.is_by(&raw, pay_to)) {
            return Err(CardError::BadSignature { pay_to });
        }
        // A signed card must mean the same wherever it is read.
        if Url::parse(&pricing.endpoint).is_err() {
            return Err(CardError::RelativeEndpoint);
        }
        Ok(Self { card, pricing, endpoint })
    }

    /// Returns the card.
    pub const fn card(&self) -> &AgentCard {
        &self.card
    }

    /// Returns the terms.
    pub const fn pricing(&self) -> &Pricing {
        &self.pricing
    }

    /// Returns the URL to which submissions are posted.
    pub const fn endpoint(&self) -> &Url {
        &self.endpoint
    }

    /// Returns the payee's address.
    pub const fn pay_to(&self) -> Address {
        self.pricing.pay_to
    }
}

/// Counts a value and those in it. The recursion is bounded, because `serde_json` limits the depth.
fn count(value: &Value) -> usize {
    let within = match value {
        Value::Array(items) => items.iter().map(count).sum::<usize>(),
        Value::Object(fields) => fields.values().map(count).sum::<usize>(),
        _ => 0,
    };
    1 + within
}

/// How many signatures are checked.
const MAX_SIGNATURES: usize = 8;
/// The order of secp256k1's group.
const ORDER: U256 = uint!(0xFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFEBAAEDCE6AF48A03BBFD25E8CD0364141_U256);

/// A signature of a card.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct CardSignature {
    /// The protected header, base64url.
    pub protected: String,
    /// The signature, base64url: `r ‖ s` for ES256K.
    pub signature: String,
    /// All other fields, such as the unprotected header.
    #[serde(flatten)]
    pub rest: Map<String, Value>,
}

#[derive(Serialize, Deserialize)]
struct Header {
    alg: String,
    kid: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    typ: Option<String>,
    /// Extensions that a verifier must understand. None is supported.
    #[serde(skip_serializing_if = "Option::is_none")]
    crit: Option<Value>,
}

/// Signs a card. Its signatures are not part of what is signed.
pub(super) async fn sign(card: &Value, signer: &(impl Signer + Sync)) -> Result<CardSignature, CardError> {
    let kid = signer.address().to_string();
    let header = Header { alg: "ES256K".to_owned(), kid, typ: Some("JOSE".to_owned()), crit: None };
    let header = serde_json::to_vec(&header).map_err(|error| CardError::invalid("signatures", error))?;
    let protected = URL_SAFE_NO_PAD.encode_to_string(header);
    let hash = signing_hash(&protected, card).ok_or_else(|| CardError::invalid(".", "the card is not an object"))?;
    let signature = signer.sign_hash(&hash).await.map_err(CardError::Sign)?.normalized_s();
    let signature = URL_SAFE_NO_PAD.encode_to_string(&signature.as_bytes()[..64]);
    Ok(CardSignature { protected, signature, rest: Map::new() })
}

impl CardSignature {
    /// Returns the signer that the signature names, unverified.
    pub(super) fn named_signer(&self) -> Option<Address> {
        self.header()?.kid.parse().ok()
    }

    fn header(&self) -> Option<Header> {
        let header = URL_SAFE_NO_PAD.decode_to_vec(&self.protected).ok()?;
        serde_json::from_slice(&header).ok().filter(|header: &Header| header.alg == "ES256K" && header.crit.is_none())
    }

    fn is_by(&self, card: &Value, payee: Address) -> bool {
        let recovered = || {
            self.header()?;
            let rs: [u8; 64] = URL_SAFE_NO_PAD.decode_to_vec(&self.signature).ok()?.try_into().ok()?;
            let hash = signing_hash(&self.protected, card)?;
            // ES256K has no recovery id, and RFC 8812 allows both forms of `s`.
            let s = U256::from_be_slice(&rs[32..]);
            let low = s.min(ORDER.checked_sub(s)?);
            [27, 28].into_iter().find_map(|v| {
                let signature = [&rs[..32], &low.to_be_bytes::<32>(), &[v]].concat();
                PaymentSignature::from(signature).recover(hash).ok().filter(|signer| *signer == payee)
            })
        };
        recovered().is_some()
    }
}

/// Returns the hash that is signed: of the header and the canonical card without its signatures.
fn signing_hash(protected: &str, card: &Value) -> Option<B256> {
    let mut card = card.as_object()?.clone();
    card.remove("signatures");
    let payload = URL_SAFE_NO_PAD.encode_to_string(serde_json_canonicalizer::to_vec(&card).ok()?);
    Some(B256::from_slice(&Sha256::digest(format!("{protected}.{payload}"))))
}
