//! The same offers for clients of x402 v1.

use bytes::Bytes;

use super::offer::{OnOffer, Way};
use crate::protocol::{PaymentFlow, ResourceInfo, V1, Verbatim, v1};

/// How each way to be paid is spelled in v1: all but the amount and the URL, which depend on the request. `None` for what
/// v1 is not offered.
#[derive(Clone, Debug)]
pub(super) struct InV1(Vec<Option<v1::PaymentRequirements>>);

impl InV1 {
    pub(super) fn of(ways: &[Way], max_timeout_seconds: u64, resource: &ResourceInfo) -> Self {
        let spell = |way: &Way| {
            let network = way.asset.network.v1_name()?;
            let offer = way.offer(Default::default(), max_timeout_seconds).to_requirements();
            is_expected(way, ways).then(|| v1::PaymentRequirements::of(&offer, network, resource))
        };
        Self(ways.iter().map(spell).collect())
    }

    /// Whether the way at `index` is offered.
    pub(super) fn includes(&self, index: usize) -> bool {
        self.0.get(index).is_some_and(Option::is_some)
    }

    /// The body of a 402; `None` if v1 is offered nothing. `offers` are in the order of the ways.
    pub(super) fn body(&self, offers: &[OnOffer], url: &str, error: &str) -> Option<Bytes> {
        let spelled = self.0.iter().zip(offers).filter_map(|(spelled, offer)| {
            let spelled = v1::PaymentRequirements {
                max_amount_required: offer.terms.offer().amount.to_string(),
                resource: url.to_owned(),
                ..spelled.clone()?
            };
            Verbatim::of(&spelled).ok()
        });
        let accepts: Vec<_> = spelled.collect();
        if accepts.is_empty() {
            return None;
        }
        let required = v1::PaymentRequired { x402_version: V1, error: Some(error.to_owned()), accepts };
        serde_json::to_vec(&required).ok().map(Bytes::from)
    }
}

/// v1 cannot tell flows apart, and its clients expect the money to move after the work: another flow is offered only where
/// that one is not.
fn is_expected(way: &Way, ways: &[Way]) -> bool {
    let is_usual = |other: &Way| {
        other.flow == PaymentFlow::Authorization && other.asset == way.asset && other.pay_to == way.pay_to
    };
    way.flow == PaymentFlow::Authorization || !ways.iter().any(is_usual)
}
