//! Which of a server's offers to take.

use std::{cmp::Ordering, fmt, sync::Arc};

use super::{OfferRefusal, Refusal, demand::Demand};
use crate::{
    network::{Asset, Network},
    protocol::{ExactOffer, PaymentFlow},
    usdc::Usdc,
};

type Comparison = Arc<dyn Fn(&ExactOffer, &ExactOffer) -> Ordering + Send + Sync>;

/// What a payer pays with, what it refuses, and what it likes better.
#[derive(Clone)]
pub(super) struct Taste {
    pub(super) assets: Vec<Asset>,
    /// `None` for any.
    pub(super) flows: Option<Vec<PaymentFlow>>,
    /// The shortest window that is accepted, in seconds.
    pub(super) min_window: u64,
    /// The first that tells two offers apart decides.
    preferences: Vec<Comparison>,
}

/// An offer that may be paid.
#[derive(Clone, Debug)]
pub(super) struct Choice {
    /// Its place among the server's offers.
    pub(super) index: usize,
    pub(super) offer: ExactOffer,
    pub(super) amount: Usdc,
}

impl Taste {
    pub(super) fn new(assets: Vec<Asset>) -> Self {
        Self { assets, flows: None, min_window: 1, preferences: Vec::new() }
    }

    /// Prefers what ranks lower, where the preferences so far make no difference.
    pub(super) fn prefer<K: Ord>(&mut self, rank: impl Fn(&ExactOffer) -> K + Send + Sync + 'static) {
        self.preferences.push(Arc::new(move |one, other| rank(one).cmp(&rank(other))));
    }

    /// Prefers earlier networks to later ones, and those to all others.
    pub(super) fn prefer_networks(&mut self, networks: Vec<Network>) {
        self.prefer(move |offer| {
            let place = networks.iter().position(|network| *network == offer.network());
            place.unwrap_or(networks.len())
        });
    }

    /// The offers that may be paid, the best first and at least one: by preference, then the cheapest, at the same price one
    /// that is settled after the work, and then the server's own order.
    pub(super) fn choose(&self, demand: &Demand) -> Result<Vec<Choice>, Refusal> {
        let (mut choices, mut reasons) = (Vec::new(), Vec::new());
        for (index, offer) in demand.offers().into_iter().enumerate() {
            match offer.and_then(|offer| self.judge(index, offer)) {
                Ok(choice) => choices.push(choice),
                Err(reason) => reasons.push(reason),
            }
        }
        choices.sort_by(|one, other| self.compare(one, other));
        if choices.is_empty() { Err(Refusal::NoPayableOffer { reasons }) } else { Ok(choices) }
    }

    fn compare(&self, one: &Choice, other: &Choice) -> Ordering {
        let preferred = self.preferences.iter().map(|compare| compare(&one.offer, &other.offer));
        let usual = |choice: &Choice| (choice.amount, choice.offer.flow != PaymentFlow::Authorization);
        preferred.fold(Ordering::Equal, Ordering::then).then_with(|| usual(one).cmp(&usual(other)))
    }

    fn judge(&self, index: usize, offer: ExactOffer) -> Result<Choice, OfferRefusal> {
        let (network, asset) = (offer.network(), offer.asset.address);
        let trusted = self
            .assets
            .iter()
            .find(|trusted| trusted.network == network && trusted.address == asset)
            .ok_or(OfferRefusal::UnknownAsset { network, asset })?;
        if *trusted != offer.asset {
            return Err(OfferRefusal::WrongDomain { asset });
        }
        let window = offer.max_timeout_seconds;
        if window == 0 {
            return Err(OfferRefusal::NoTime);
        }
        if window < self.min_window {
            return Err(OfferRefusal::Window { offered: window, least: self.min_window });
        }
        if self.flows.as_ref().is_some_and(|flows| !flows.contains(&offer.flow)) {
            return Err(OfferRefusal::Flow(offer.flow));
        }
        match Usdc::try_from(offer.amount) {
            Ok(Usdc::ZERO) | Err(_) => Err(OfferRefusal::Amount),
            Ok(amount) => Ok(Choice { index, offer, amount }),
        }
    }
}

impl fmt::Debug for Taste {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Taste")
            .field("assets", &self.assets)
            .field("flows", &self.flows)
            .field("min_window", &self.min_window)
            .field("preferences", &self.preferences.len())
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use std::cmp::Reverse;

    use alloy_primitives::{Address, U256};
    use http::HeaderMap;
    use serde_json::json;

    use super::*;
    use crate::{
        client::demand::MAX_OFFERS,
        protocol::{PaymentRequirements, encode_header, header_name, v1},
    };

    fn offer(amount: u64) -> ExactOffer {
        ExactOffer {
            asset: Network::BASE.usdc().unwrap(),
            amount: U256::from(amount),
            pay_to: Address::repeat_byte(7),
            max_timeout_seconds: 60,
            flow: PaymentFlow::Authorization,
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

    fn taste() -> Taste {
        Taste::new([Network::BASE, Network::BASE_SEPOLIA].into_iter().filter_map(Network::usdc).collect())
    }

    fn in_v2(offers: &[PaymentRequirements]) -> Demand {
        let asked = json!({ "x402Version": 2, "resource": { "url": "u" }, "accepts": offers });
        let header = encode_header(&asked).unwrap().try_into().unwrap();
        let headers = HeaderMap::from_iter([(header_name::PAYMENT_REQUIRED.try_into().unwrap(), header)]);
        Demand::read(&headers, None).unwrap().unwrap()
    }

    fn in_v1(offers: &[ExactOffer]) -> Demand {
        let spell = |offer: &ExactOffer| {
            let network = offer.network().v1_name().unwrap();
            let mut spelled = v1::PaymentRequirements::of(&offer.to_requirements(), network, &Default::default());
            spelled.extra = Some(offer.to_requirements().extra);
            spelled
        };
        let accepts: Vec<_> = offers.iter().map(spell).collect();
        let body = json!({ "x402Version": 1, "error": "payment required", "accepts": accepts }).to_string();
        Demand::read(&HeaderMap::new(), Some(body.as_bytes())).unwrap().unwrap()
    }

    /// The amounts that are chosen, the best first: the same in both versions.
    fn chosen(taste: &Taste, offers: &[ExactOffer]) -> Vec<u64> {
        let amounts = |demand| -> Vec<u64> {
            let choices = taste.choose(&demand).unwrap_or_default();
            choices.into_iter().map(|choice| choice.amount.atomic()).collect()
        };
        let written: Vec<_> = offers.iter().map(ExactOffer::to_requirements).collect();
        let (v1, v2) = (amounts(in_v1(offers)), amounts(in_v2(&written)));
        assert_eq!(v1, v2);
        v2
    }

    fn refused_by(taste: &Taste, offer: PaymentRequirements) -> OfferRefusal {
        match taste.choose(&in_v2(&[offer])) {
            Err(Refusal::NoPayableOffer { mut reasons }) if reasons.len() == 1 => reasons.remove(0),
            other => panic!("{other:?}"),
        }
    }

    fn refused(change: impl FnOnce(&mut PaymentRequirements)) -> OfferRefusal {
        let mut offer = offer(1).to_requirements();
        change(&mut offer);
        refused_by(&taste(), offer)
    }

    #[test]
    fn the_cheapest_payable_offer_is_the_best() {
        let mut elsewhere = offer(1).to_requirements();
        elsewhere.network = "eip155:1".into();
        let offers = [offer(300).to_requirements(), elsewhere, offer(200).to_requirements()];
        let best = taste().choose(&in_v2(&offers)).unwrap().remove(0);
        assert_eq!((best.amount.atomic(), best.index), (200, 2), "as the server counts them");
        assert_eq!(chosen(&taste(), &[offer(300), on_sepolia(100), offer(200)]), [100, 200, 300]);
    }

    #[test]
    fn at_the_same_price_work_comes_before_payment() {
        let best = |offers: &[ExactOffer]| {
            let written: Vec<_> = offers.iter().map(ExactOffer::to_requirements).collect();
            taste().choose(&in_v2(&written)).unwrap().remove(0).offer.flow
        };
        assert_eq!(best(&[upfront(5), offer(5)]), PaymentFlow::Authorization);
        assert_eq!(best(&[upfront(5), offer(6)]), PaymentFlow::Upfront);
    }

    #[test]
    fn networks_are_preferred_in_order_and_before_the_price() {
        let mut taste = taste();
        taste.prefer_networks(vec![Network::BASE_SEPOLIA]);
        assert_eq!(chosen(&taste, &[offer(1), on_sepolia(9), on_sepolia(8)]), [8, 9, 1]);
        assert_eq!(chosen(&taste, &[offer(2), offer(1)]), [1, 2]);
    }

    #[test]
    fn the_first_preference_that_tells_offers_apart_decides() {
        let mut taste = taste();
        taste.prefer(|offer| Reverse(offer.max_timeout_seconds));
        taste.prefer(|offer| offer.flow != PaymentFlow::Upfront);
        let longer_upfront = ExactOffer { max_timeout_seconds: 90, ..upfront(4) };
        assert_eq!(chosen(&taste, &[within(60, 1), within(90, 3), longer_upfront, within(120, 9)]), [9, 4, 3, 1]);
        assert_eq!(chosen(&taste, &[offer(7), upfront(8), offer(6)]), [8, 6, 7]);
    }

    #[test]
    fn a_flow_or_a_window_that_is_refused_is_not_paid_at_any_price() {
        let mut taste = taste();
        taste.flows = Some(vec![PaymentFlow::Authorization]);
        taste.min_window = 30;
        assert_eq!(chosen(&taste, &[upfront(1), within(29, 2), within(30, 4), offer(3)]), [3, 4]);
        let refusal = refused_by(&taste, upfront(1).to_requirements());
        assert_eq!(refusal, OfferRefusal::Flow(PaymentFlow::Upfront));
        let refusal = refused_by(&taste, within(29, 1).to_requirements());
        assert_eq!(refusal, OfferRefusal::Window { offered: 29, least: 30 });
    }

    #[test]
    fn what_is_not_trusted_is_not_paid() {
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
    fn more_offers_cost_no_more_than_the_bound() {
        // In v2 so many do not fit in the header.
        let mut offers = vec![offer(9); 150];
        offers[MAX_OFFERS] = offer(1);
        let choices = taste().choose(&in_v1(&offers)).unwrap();
        assert_eq!((choices.len(), choices[0].amount.atomic()), (MAX_OFFERS, 9));
    }
}
