//! Reads the offers of a 402, in both versions of x402, and chooses the one to pay.

use std::{cmp::Ordering, collections::BTreeMap, sync::Arc, time::Duration};

use alloy_primitives::{Address, B256};
use http::{HeaderMap, HeaderValue, StatusCode, header::CONTENT_TYPE};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use url::Url;

use super::{OfferRefusal, Refusal};
use crate::{
    network::Asset,
    protocol::{
        DecodeError, ExactOffer, ExactPayload, MAX_REQUIRED_BODY, MAX_REQUIRED_HEADER, OfferError, PaymentFlow,
        PaymentId, PaymentPayload, PaymentRequirements, Reason, ResourceInfo, V1, V2, Verbatim, Version, decode_header,
        encode_header, extensions::only, header_name, payment_status, v1,
    },
    usdc::Usdc,
    vouchers::{ChannelConfig, ChannelOffer, ChannelPayload, SCHEME},
};

/// How many offers of one 402 are read.
const MAX_OFFERS: usize = 64;
/// The longest status URL that is kept in the journal, in bytes.
const MAX_STATUS_URL: usize = 512;

/// The part of a response that may have offers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum OfferLocation {
    /// The response is not a 402, or not one of x402.
    None,
    /// The header `PAYMENT-REQUIRED` has them, as in v2.
    Header,
    /// The body may have them, if it is one of v1.
    Body,
}

impl OfferLocation {
    /// A server that speaks both versions is paid in v2.
    pub(super) fn of(status: StatusCode, headers: &HeaderMap) -> Self {
        match status == StatusCode::PAYMENT_REQUIRED {
            true if headers.contains_key(header_name::PAYMENT_REQUIRED) => Self::Header,
            true if headers.get(CONTENT_TYPE).is_none_or(is_json) => Self::Body,
            _ => Self::None,
        }
    }
}

/// A 402 with offers. Its parts stay as the text that was received, because the payment returns them unchanged.
#[derive(Clone)]
pub(super) enum Challenge {
    V1(ChallengeV1),
    V2(ChallengeV2),
}

#[derive(Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct ChallengeV2 {
    /// Read only to refuse other versions.
    #[serde(rename = "x402Version")]
    _version: V2,
    error: Option<String>,
    resource: Option<Verbatim<ResourceInfo>>,
    accepts: Vec<Verbatim<PaymentRequirements>>,
    extensions: Option<Verbatim<Map<String, Value>>>,
}

#[derive(Clone, Deserialize)]
pub(super) struct ChallengeV1 {
    /// Some servers put an object here.
    #[serde(default)]
    error: Value,
    accepts: Vec<Verbatim<v1::PaymentRequirementsV1>>,
}

impl Challenge {
    /// Reads the headers or, if they have no offers, the body. Returns `None` if neither is of x402.
    pub(super) fn read(headers: &HeaderMap, body: Option<&[u8]>) -> Result<Option<Self>, DecodeError> {
        #[derive(Deserialize)]
        struct Versioned {
            #[serde(rename = "x402Version")]
            _version: V1,
        }
        if let Some(value) = headers.get(header_name::PAYMENT_REQUIRED) {
            return decode_header(value.as_bytes(), MAX_REQUIRED_HEADER).map(|challenge| Some(Self::V2(challenge)));
        }
        let Some(body) = body.filter(|body| body.len() <= MAX_REQUIRED_BODY) else { return Ok(None) };
        // serde would read an array as a struct, too.
        let is_object = body.trim_ascii_start().starts_with(b"{");
        if !is_object || serde_json::from_slice::<Versioned>(body).is_err() {
            return Ok(None);
        }
        serde_json::from_slice(body).map(|challenge| Some(Self::V1(challenge))).map_err(DecodeError::Json)
    }

    pub(super) fn version(&self) -> Version {
        match self {
            Self::V1(_) => Version::V1,
            Self::V2(_) => Version::V2,
        }
    }

    /// Returns the server's error message, if it has one.
    pub(super) fn error(&self) -> Option<&str> {
        let text = match self {
            Self::V1(challenge) => challenge.error.as_str(),
            Self::V2(challenge) => challenge.error.as_deref(),
        };
        text.filter(|text| !text.trim().is_empty())
    }

    /// Returns the reason code in the error message.
    ///
    /// Some servers put a sentence before or after the code. "Payment required", which most servers send with any 402, is no reason.
    pub(super) fn reason(&self) -> Option<Reason> {
        let is_letter = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_';
        // Every known code has several words, so a single word is prose.
        let is_code = |text: &&str| text.contains('_') && *text != "payment_required" && text.bytes().all(is_letter);
        self.error()?.split(':').map(str::trim).find(is_code).map(Reason::from)
    }

    /// Returns the first offers, in the server's order.
    fn offers(&self) -> Vec<Result<ExactOffer, OfferRefusal>> {
        match self {
            Self::V1(challenge) => challenge.accepts.iter().take(MAX_OFFERS).map(read_offer).collect(),
            Self::V2(challenge) => challenge.accepts.iter().take(MAX_OFFERS).map(read_offer).collect(),
        }
    }

    /// Returns the first offers as they are on the wire, in the server's order. v1 has no payment channels.
    fn requirements(&self) -> impl Iterator<Item = Option<PaymentRequirements>> {
        let accepts = match self {
            Self::V1(_) => &[],
            Self::V2(challenge) => challenge.accepts.as_slice(),
        };
        accepts.iter().take(MAX_OFFERS).map(|offer| offer.read().ok())
    }

    /// Returns the offer that a channel was opened for, as far as the payer's books have it. A request for a refund has no price.
    pub(super) fn of_channel(entry: &super::ChannelEntry) -> Result<Self, serde_json::Error> {
        let config = &entry.config;
        let offer = serde_json::json!({
            "scheme": "batch-settlement",
            "network": entry.network.to_string(),
            "amount": "0",
            "asset": config.token.to_string(),
            "payTo": config.receiver.to_string(),
            "maxTimeoutSeconds": 60,
            "extra": {
                "receiverAuthorizer": config.receiver_authorizer.to_string(),
                "withdrawDelay": config.withdraw_delay,
            },
        });
        let accepts = vec![Verbatim::of(&serde_json::from_value(offer)?)?];
        Ok(Self::V2(ChallengeV2 { _version: V2, error: None, resource: None, accepts, extensions: None }))
    }

    /// Returns the offer of this channel and its index, with the seller's books of it in a corrective 402.
    pub(super) fn channel_offer(&self, entry: &super::ChannelEntry) -> Option<(usize, ChannelOffer)> {
        self.requirements().enumerate().find_map(|(index, offer)| {
            let (exact, channel) = read_channel_offer(&offer?)?.ok()?;
            let config = &entry.config;
            let same = (exact.network(), exact.asset.address, exact.pay_to)
                == (entry.network, config.token, config.receiver)
                && (channel.receiver_authorizer, channel.withdraw_delay)
                    == (config.receiver_authorizer, config.withdraw_delay);
            same.then_some((index, channel))
        })
    }

    /// Gives the payment an id, if the server supports the extension `payment-identifier`.
    ///
    /// The id is a secret, so it is independent of the authorization's nonce, which the chain publishes.
    pub(super) fn add_payment_id(&mut self, secret: B256) -> bool {
        if let Self::V2(ChallengeV2 { extensions: Some(extensions), .. }) = self
            && let Some(with_id) = PaymentId::of_random(secret).add_to(extensions)
        {
            *extensions = with_id;
            return true;
        }
        false
    }

    /// Returns the URL where the server reports the status of a payment. Returns `None` if it is not on the origin of `paid`.
    pub(super) fn status_url(&self, paid: &Url) -> Option<Url> {
        let Self::V2(ChallengeV2 { extensions: Some(extensions), .. }) = self else { return None };
        status_url(payment_status::declared(&only(payment_status::NAME, extensions)?)?, paid)
    }

    /// Returns the value of the payment header for the offer at `index`.
    ///
    /// In v2 the offer, the resource and the extensions are returned as they came. v1 names scheme and network.
    pub(super) fn into_header(self, index: usize, payload: &ExactPayload) -> Result<String, serde_json::Error> {
        match self {
            Self::V1(challenge) => {
                let offer = challenge.accepts.get(index).ok_or_else(no_offer)?.read()?;
                let v1::PaymentRequirementsV1 { scheme, network, .. } = offer;
                let payload = Verbatim::of(payload)?;
                encode_header(&v1::PaymentPayloadV1 { x402_version: V1, scheme, network, payload })
            }
            Self::V2(challenge) => challenge.into_header(index, payload),
        }
    }

    /// The same for the offer of a payment channel, which only v2 has.
    pub(super) fn channel_header(&self, index: usize, payload: &ChannelPayload) -> Result<String, serde_json::Error> {
        match self {
            Self::V1(_) => Err(no_offer()),
            Self::V2(challenge) => challenge.clone().into_header(index, payload),
        }
    }
}

impl ChallengeV2 {
    fn into_header<P: Serialize>(self, index: usize, payload: &P) -> Result<String, serde_json::Error> {
        encode_header(&PaymentPayload {
            x402_version: V2,
            resource: self.resource,
            accepted: self.accepts.into_iter().nth(index).ok_or_else(no_offer)?,
            payload: Verbatim::of(payload)?,
            extensions: self.extensions,
        })
    }
}

fn no_offer() -> serde_json::Error {
    serde::de::Error::custom("the chosen offer is not one of the server's")
}

/// Resolves a declared status URL against the URL that is paid. Returns `None` unless both have one origin.
pub(super) fn status_url(declared: &str, paid: &Url) -> Option<Url> {
    if declared.len() > MAX_STATUS_URL {
        return None;
    }
    let url = paid.join(declared).ok()?;
    let is_same = url.origin() == paid.origin() && url.origin().is_tuple();
    (is_same && url.username().is_empty() && url.password().is_none()).then_some(url)
}

fn read_offer<'a, T>(offer: &'a Verbatim<T>) -> Result<ExactOffer, OfferRefusal>
where
    T: Deserialize<'a>,
    ExactOffer: for<'b> TryFrom<&'b T, Error = OfferError>,
{
    Ok(ExactOffer::try_from(&offer.read().map_err(|_| OfferRefusal::Unreadable)?)?)
}

/// Reads an offer of the scheme `batch-settlement`, and what of it an offer of `exact` has, too. Returns `None` for other schemes.
fn read_channel_offer(offer: &PaymentRequirements) -> Option<Result<(ExactOffer, ChannelOffer), OfferRefusal>> {
    (offer.scheme == SCHEME).then(|| {
        let channel = ChannelOffer::try_from(&offer.extra)?;
        let mut exact = offer.clone();
        exact.scheme = "exact".into();
        Ok((ExactOffer::try_from(&exact)?, channel))
    })
}

fn is_json(content_type: &HeaderValue) -> bool {
    let essence = content_type.to_str().ok().and_then(|text| text.split(';').next()).map(str::trim);
    essence.is_some_and(|essence| {
        let essence = essence.to_ascii_lowercase();
        essence == "application/json" || essence.ends_with("+json")
    })
}

type Comparison = Arc<dyn Fn(&ExactOffer, &ExactOffer) -> Ordering + Send + Sync>;

/// The offers that a payer accepts, and the order in which it prefers them.
#[derive(Clone, Default)]
pub(super) struct OfferPolicy {
    pub(super) assets: Vec<Asset>,
    /// `None` for all flows.
    pub(super) flows: Option<Vec<PaymentFlow>>,
    /// The first that distinguishes two offers decides.
    preferences: Vec<Comparison>,
    /// Whether the payer pays by permit.
    pub(super) permits: bool,
    /// The longest accepted withdraw delay, in seconds. `None` if the payer opens no channels.
    pub(super) withdraw_delay: Option<std::time::Duration>,
}

/// An offer that the payer accepts.
#[derive(Clone, Debug)]
pub(super) struct AcceptedOffer {
    /// Its index among the server's offers.
    pub(super) index: usize,
    pub(super) offer: ExactOffer,
    pub(super) amount: Usdc,
    /// `None` for an offer of `exact`. For a channel's, `offer` has the parts that both have.
    pub(super) channel: Option<ChannelOffer>,
}

impl OfferPolicy {
    /// Prefers lower ranks, where earlier preferences make no difference.
    pub(super) fn prefer<K: Ord>(&mut self, rank: impl Fn(&ExactOffer) -> K + Send + Sync + 'static) {
        self.preferences.push(Arc::new(move |one, other| rank(one).cmp(&rank(other))));
    }

    /// Returns the accepted offers, at least one, the best first: by preference, then by price, then `authorization` before `upfront`,
    /// then in the server's order.
    pub(super) fn choose(&self, challenge: &Challenge) -> Result<Vec<AcceptedOffer>, Refusal> {
        let (mut accepted, mut reasons) = (Vec::new(), Vec::new());
        let mut channels = self.channel_offers(challenge);
        for (index, offer) in challenge.offers().into_iter().enumerate() {
            if let Some(channel) = channels.remove(&index) {
                match channel {
                    Ok(offer) => accepted.push(offer),
                    Err(reason) => reasons.push(reason),
                }
                continue;
            }
            match offer.and_then(|offer| self.check_flow(&offer).and_then(|()| self.check(index, offer))) {
                Ok(offer) => accepted.push(offer),
                Err(reason) => reasons.push(reason),
            }
        }
        accepted.sort_by(|one, other| self.compare(one, other));
        if accepted.is_empty() { Err(Refusal::NoPayableOffer { reasons }) } else { Ok(accepted) }
    }

    fn compare(&self, one: &AcceptedOffer, other: &AcceptedOffer) -> Ordering {
        let preferred = self.preferences.iter().map(|compare| compare(&one.offer, &other.offer));
        let default = |offer: &AcceptedOffer| {
            let is_exact = offer.channel.is_none() && offer.offer.permit().is_none();
            (offer.amount, offer.channel.is_none(), is_exact, offer.offer.flow != PaymentFlow::Authorization)
        };
        preferred.fold(Ordering::Equal, Ordering::then).then_with(|| default(one).cmp(&default(other)))
    }

    /// Returns the offers of payment channels by their index, if the payer opens channels.
    fn channel_offers(&self, challenge: &Challenge) -> BTreeMap<usize, Result<AcceptedOffer, OfferRefusal>> {
        let Some(limit) = self.withdraw_delay else { return Default::default() };
        let offers = challenge.requirements().enumerate();
        let channels = offers.filter_map(|(index, offer)| Some((index, read_channel_offer(&offer?)?)));
        let check = |index, offer: Result<(ExactOffer, ChannelOffer), OfferRefusal>| {
            let (exact, channel) = offer?;
            let asked = Duration::from_secs(channel.withdraw_delay.into());
            if asked > limit {
                return Err(OfferRefusal::WithdrawDelay { asked, limit });
            }
            ChannelConfig {
                payer: Address::repeat_byte(1),
                payer_authorizer: Address::ZERO,
                receiver: exact.pay_to,
                receiver_authorizer: channel.receiver_authorizer,
                token: exact.asset.address,
                withdraw_delay: channel.withdraw_delay,
                salt: B256::ZERO,
            }
            .validate()?;
            let accepted = self.check(index, exact)?;
            Ok(AcceptedOffer { channel: Some(channel), ..accepted })
        };
        channels.map(|(index, offer)| (index, check(index, offer))).collect()
    }

    /// Flows are those of `exact`; a voucher has none.
    fn check_flow(&self, offer: &ExactOffer) -> Result<(), OfferRefusal> {
        match &self.flows {
            Some(flows) if !flows.contains(&offer.flow) => Err(OfferRefusal::Flow(offer.flow)),
            _ => Ok(()),
        }
    }

    fn check(&self, index: usize, offer: ExactOffer) -> Result<AcceptedOffer, OfferRefusal> {
        let (network, asset) = (offer.network(), offer.asset.address);
        let trusted = self
            .assets
            .iter()
            .find(|trusted| trusted.network == network && trusted.address == asset)
            .ok_or(OfferRefusal::UnknownAsset { network, asset })?;
        let is_permit = offer.permit().is_some();
        if is_permit && !self.permits {
            return Err(OfferRefusal::Permit);
        }
        // A permit is in Permit2's domain.
        if *trusted != offer.asset && !is_permit {
            return Err(OfferRefusal::WrongDomain { asset });
        }
        if offer.max_timeout_seconds == 0 {
            return Err(OfferRefusal::NoTime);
        }
        match Usdc::try_from(offer.amount) {
            Ok(Usdc::ZERO) | Err(_) => Err(OfferRefusal::Amount),
            Ok(amount) => Ok(AcceptedOffer { index, offer, amount, channel: None }),
        }
    }
}

debug_fields!(OfferPolicy |this| { assets: this.assets, flows: this.flows, preferences: this.preferences.len() });

#[cfg(test)]
mod tests {
    use std::cmp::Reverse;

    use alloy_primitives::{Address, U256};
    use serde_json::json;

    use super::*;
    use crate::network::Network;

    fn offer(amount: u64) -> ExactOffer {
        ExactOffer {
            asset: Network::BASE.usdc().unwrap(),
            amount: U256::from(amount),
            pay_to: Address::repeat_byte(7),
            max_timeout_seconds: 60,
            flow: PaymentFlow::Authorization,
            method: Default::default(),
        }
    }

    fn upfront(amount: u64) -> ExactOffer {
        ExactOffer { flow: PaymentFlow::Upfront, ..offer(amount) }
    }

    fn on_sepolia(amount: u64) -> ExactOffer {
        ExactOffer { asset: Network::BASE_SEPOLIA.usdc().unwrap(), ..offer(amount) }
    }

    fn within(seconds: u64, amount: u64) -> ExactOffer {
        ExactOffer { max_timeout_seconds: seconds, ..offer(amount) }
    }

    fn policy() -> OfferPolicy {
        let assets = [Network::BASE, Network::BASE_SEPOLIA].into_iter().filter_map(Network::usdc).collect();
        OfferPolicy { assets, ..OfferPolicy::default() }
    }

    fn in_v2(offers: &[PaymentRequirements]) -> Challenge {
        let asked = json!({ "x402Version": 2, "resource": { "url": "u" }, "accepts": offers });
        let header = encode_header(&asked).unwrap().try_into().unwrap();
        let headers = HeaderMap::from_iter([(header_name::PAYMENT_REQUIRED.try_into().unwrap(), header)]);
        Challenge::read(&headers, None).unwrap().unwrap()
    }

    fn in_v1(offers: &[ExactOffer]) -> Challenge {
        let spell = |offer: &ExactOffer| {
            let network = offer.network().v1_name().unwrap();
            let mut spelled = v1::PaymentRequirementsV1::of(&offer.to_requirements(), network, &Default::default());
            spelled.extra = Some(offer.to_requirements().extra);
            spelled
        };
        let accepts: Vec<_> = offers.iter().map(spell).collect();
        let body = json!({ "x402Version": 1, "error": "payment required", "accepts": accepts }).to_string();
        Challenge::read(&HeaderMap::new(), Some(body.as_bytes())).unwrap().unwrap()
    }

    /// Returns the accepted amounts, the best first, which are the same in both versions.
    fn chosen(policy: &OfferPolicy, offers: &[ExactOffer]) -> Vec<u64> {
        let amounts = |challenge| -> Vec<u64> {
            let choices = policy.choose(&challenge).unwrap_or_default();
            choices.into_iter().map(|choice| choice.amount.atomic()).collect()
        };
        let written: Vec<_> = offers.iter().map(ExactOffer::to_requirements).collect();
        let (v1, v2) = (amounts(in_v1(offers)), amounts(in_v2(&written)));
        assert_eq!(v1, v2);
        v2
    }

    fn refused_by(policy: &OfferPolicy, offer: PaymentRequirements) -> OfferRefusal {
        match policy.choose(&in_v2(&[offer])) {
            Err(Refusal::NoPayableOffer { mut reasons }) if reasons.len() == 1 => reasons.remove(0),
            other => panic!("{other:?}"),
        }
    }

    fn refused(change: impl FnOnce(&mut PaymentRequirements)) -> OfferRefusal {
        let mut offer = offer(1).to_requirements();
        change(&mut offer);
        refused_by(&policy(), offer)
    }

    #[test]
    fn cheapest_payable_offer_is_chosen() {
        let mut elsewhere = offer(1).to_requirements();
        elsewhere.network = "eip155:1".into();
        let offers = [offer(300).to_requirements(), elsewhere, offer(200).to_requirements()];
        let best = policy().choose(&in_v2(&offers)).unwrap().remove(0);
        assert_eq!((best.amount.atomic(), best.index), (200, 2), "its index is the server's");
        assert_eq!(chosen(&policy(), &[offer(300), on_sepolia(100), offer(200)]), [100, 200, 300]);
    }

    #[test]
    fn authorization_flow_is_chosen_at_the_same_price() {
        let best = |offers: &[ExactOffer]| {
            let written: Vec<_> = offers.iter().map(ExactOffer::to_requirements).collect();
            policy().choose(&in_v2(&written)).unwrap().remove(0).offer.flow
        };
        assert_eq!(best(&[upfront(5), offer(5)]), PaymentFlow::Authorization);
        assert_eq!(best(&[upfront(5), offer(6)]), PaymentFlow::Upfront);
    }

    #[test]
    fn preference_outranks_the_price() {
        let mut policy = policy();
        policy.prefer(|offer| offer.network() != Network::BASE_SEPOLIA);
        assert_eq!(chosen(&policy, &[offer(1), on_sepolia(9), on_sepolia(8)]), [8, 9, 1]);
        assert_eq!(chosen(&policy, &[offer(2), offer(1)]), [1, 2]);
    }

    #[test]
    fn first_preference_that_distinguishes_offers_decides() {
        let mut policy = policy();
        policy.prefer(|offer| Reverse(offer.max_timeout_seconds));
        policy.prefer(|offer| offer.flow != PaymentFlow::Upfront);
        let longer_upfront = ExactOffer { max_timeout_seconds: 90, ..upfront(4) };
        assert_eq!(chosen(&policy, &[within(60, 1), within(90, 3), longer_upfront, within(120, 9)]), [9, 4, 3, 1]);
        assert_eq!(chosen(&policy, &[offer(7), upfront(8), offer(6)]), [8, 6, 7]);
    }

    #[test]
    fn refused_flow_is_not_paid_at_any_price() {
        let mut policy = policy();
        policy.flows = Some(vec![PaymentFlow::Authorization]);
        assert_eq!(chosen(&policy, &[upfront(1), offer(4), offer(3)]), [3, 4]);
        let refusal = refused_by(&policy, upfront(1).to_requirements());
        assert_eq!(refusal, OfferRefusal::Flow(PaymentFlow::Upfront));
    }

    #[test]
    fn untrusted_or_invalid_offers_are_refused() {
        assert!(matches!(refused(|o| o.asset = Address::ZERO.to_string()), OfferRefusal::UnknownAsset { .. }));
        assert!(matches!(refused(|o| o.network = "eip155:1".into()), OfferRefusal::UnknownAsset { .. }));
        assert!(matches!(
            refused(|o| drop(o.extra.insert("name".into(), "USDC".into()))),
            OfferRefusal::WrongDomain { .. }
        ));
        assert!(matches!(
            refused(|o| drop(o.extra.insert("version".into(), "1".into()))),
            OfferRefusal::WrongDomain { .. }
        ));
        assert_eq!(refused(|o| o.max_timeout_seconds = 0), OfferRefusal::NoTime);
        assert_eq!(refused(|o| o.amount = "0".into()), OfferRefusal::Amount);
        assert_eq!(refused(|o| o.amount = "18446744073709551616".into()), OfferRefusal::Amount);
        assert!(matches!(refused(|o| o.scheme = "upto".into()), OfferRefusal::Unsupported(_)));
    }

    #[test]
    fn only_the_first_64_offers_are_read() {
        // So many do not fit in the header of v2.
        let mut offers = vec![offer(9); 150];
        offers[MAX_OFFERS] = offer(1);
        let choices = policy().choose(&in_v1(&offers)).unwrap();
        assert_eq!((choices.len(), choices[0].amount.atomic()), (MAX_OFFERS, 9));
    }

    fn location(status: u16, headers: &[(&'static str, &'static str)]) -> OfferLocation {
        let headers = headers.iter().map(|(name, value)| (name.parse().unwrap(), HeaderValue::from_static(value)));
        OfferLocation::of(StatusCode::from_u16(status).unwrap(), &headers.collect())
    }

    #[test]
    fn only_the_body_of_a_402_that_may_be_json_is_read() {
        assert_eq!(location(402, &[]), OfferLocation::Body);
        for json in ["application/json", "Application/JSON; charset=utf-8", "application/problem+json"] {
            assert_eq!(location(402, &[("content-type", json)]), OfferLocation::Body, "{json}");
        }
        for other in ["text/html", "application/jsonlines", "application/octet-stream", ""] {
            assert_eq!(location(402, &[("content-type", other)]), OfferLocation::None, "{other}");
        }
        assert_eq!(
            location(402, &[("content-type", "application/json"), ("payment-required", "x")]),
            OfferLocation::Header
        );
        assert_eq!(location(200, &[("payment-required", "x")]), OfferLocation::None);
        assert_eq!(location(403, &[]), OfferLocation::None);
    }

    #[test]
    fn body_is_of_v1_if_it_names_the_version() {
        let read = |body: &str| Challenge::read(&HeaderMap::new(), Some(body.as_bytes()));
        for foreign in ["", "call us", "{}", "[1]", r#"{"x402Version":2,"accepts":[]}"#, r#"{"x402Version":"1"}"#] {
            assert!(matches!(read(foreign), Ok(None)), "{foreign}");
        }
        assert!(read(r#"{"x402Version":1}"#).is_err(), "it names v1 and has no offers");
        assert!(read(r#"{"x402Version":1,"accepts":{}}"#).is_err());
        let long = format!(r#"{{"x402Version":1,"accepts":[],"padding":"{}"}}"#, "x".repeat(MAX_REQUIRED_BODY));
        assert!(matches!(read(&long), Ok(None)));
        for (error, reason) in [
            (json!("insufficient_funds"), Some(Reason::InsufficientFunds)),
            (json!("insufficient_funds: 7 of 8"), Some(Reason::InsufficientFunds)),
            (json!("Verification failed: insufficient_funds"), Some(Reason::InsufficientFunds)),
            (json!("a_code_of_2027"), Some(Reason::from("a_code_of_2027"))),
            (json!("Payment required"), None),
            (json!("X-PAYMENT header is required"), None),
            (json!("PAYMENT_REQUIRED"), None),
            (json!("payment_required"), None),
            (json!("Verification failed: the payer has 0 of 1000"), None),
            (json!("required"), None),
            (json!(""), None),
            (json!({}), None),
            (json!(null), None),
        ] {
            let body = json!({ "x402Version": 1, "error": error, "accepts": [] }).to_string();
            assert_eq!(read(&body).unwrap().unwrap().reason(), reason, "{error}");
        }
    }

    #[test]
    fn status_url_is_on_the_origin_that_is_paid() {
        let paid = "https://api.example/a/evaluate?q=1".parse().unwrap();
        for (declared, expected) in [
            ("https://api.example/payments/status", Some("https://api.example/payments/status")),
            ("https://API.example:443/s?a=b", Some("https://api.example/s?a=b")),
            ("/payments/status", Some("https://api.example/payments/status")),
            ("http://api.example/payments/status", None),
            ("https://api.example:8443/status", None),
            ("https://other.example/status", None),
            ("//other.example/status", None),
            ("https://me:secret@api.example/status", None),
            ("javascript:alert(1)", None),
            ("https://", None),
        ] {
            assert_eq!(status_url(declared, &paid).as_ref().map(Url::as_str), expected, "{declared}");
        }
        assert_eq!(status_url(&format!("/{}", "a".repeat(MAX_STATUS_URL)), &paid), None);
        let data: Url = "data:,x".parse().unwrap();
        assert_eq!(status_url("data:,x", &data), None, "an opaque origin equals no other");
    }
}
