//! Chooses the offers of a 402 to pay.

use std::{cmp::Ordering, sync::Arc, time::Duration};

use alloy_primitives::{Address, B256};

use super::{
    OfferRefusal, Refusal,
    challenge::{Challenge, Offer},
};
use crate::{
    network::Asset,
    protocol::{ExactOffer, PaymentFlow, TransferMethod},
    usdc::Usdc,
    vouchers::{ChannelConfig, ChannelOffer},
};

type Comparison = Arc<dyn Fn(&ExactOffer, &ExactOffer) -> Ordering + Send + Sync>;

/// The offers that a payer accepts, and the order in which it prefers them.
#[derive(Clone, Default)]
pub(super) struct OfferPolicy {
    pub(super) assets: Vec<Asset>,
    /// `None` for all flows.
    pub(super) flows: Option<Vec<PaymentFlow>>,
    /// The first that distinguishes two offers decides.
    preferences: Vec<Comparison>,
    /// The kinds of permits that the payer pays by, whichever account they name.
    pub(super) permits: Vec<TransferMethod>,
    /// The longest accepted withdraw delay, in seconds. `None` if the payer opens no channels.
    pub(super) withdraw_delay: Option<Duration>,
}

/// An offer that the payer accepts.
#[derive(Clone, Debug)]
pub(super) struct AcceptedOffer {
    /// Its index among the server's offers.
    pub(super) index: usize,
    pub(super) offer: ExactOffer,
    pub(super) amount: Usdc,
    /// `None` for a transfer. For a channel's, `offer` has the parts that both have.
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
        for (index, offer) in challenge.offers(self.withdraw_delay.is_some()).into_iter().enumerate() {
            match offer.and_then(|offer| self.check(index, offer)) {
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
            let (is_transfer, common) = (offer.channel.is_none(), &offer.offer);
            let by_permit = common.permit().is_some();
            let costs_all = is_transfer && !common.is_maximum();
            (offer.amount, is_transfer, costs_all, by_permit, common.flow != PaymentFlow::Authorization)
        };
        preferred.fold(Ordering::Equal, Ordering::then).then_with(|| default(one).cmp(&default(other)))
    }

    fn check(&self, index: usize, Offer { common, channel }: Offer) -> Result<AcceptedOffer, OfferRefusal> {
        match &channel {
            Some(channel) => self.check_channel(&common, channel)?,
            None => self.check_transfer(&common)?,
        }
        let (network, asset) = (common.network(), common.asset.address);
        let trusted = self
            .assets
            .iter()
            .find(|trusted| trusted.network == network && trusted.address == asset)
            .ok_or(OfferRefusal::UnknownAsset { network, asset })?;
        let is_permit = common.permit().is_some();
        if is_permit && !self.permits.iter().any(|kind| kind.is_like(common.method)) {
            return Err(OfferRefusal::Permit { scheme: common.scheme() });
        }
        // A permit is in Permit2's domain.
        if *trusted != common.asset && !is_permit {
            return Err(OfferRefusal::WrongDomain { asset });
        }
        if common.max_timeout_seconds == 0 {
            return Err(OfferRefusal::NoTime);
        }
        match Usdc::try_from(common.amount) {
            Ok(Usdc::ZERO) | Err(_) => Err(OfferRefusal::Amount),
            Ok(amount) => Ok(AcceptedOffer { index, offer: common, amount, channel }),
        }
    }

    fn check_transfer(&self, offer: &ExactOffer) -> Result<(), OfferRefusal> {
        match &self.flows {
            Some(flows) if !flows.contains(&offer.flow) => Err(OfferRefusal::Flow(offer.flow)),
            _ => Ok(()),
        }
    }

    fn check_channel(&self, offer: &ExactOffer, channel: &ChannelOffer) -> Result<(), OfferRefusal> {
        let asked = Duration::from_secs(channel.withdraw_delay.into());
        if let Some(limit) = self.withdraw_delay.filter(|limit| asked > *limit) {
            return Err(OfferRefusal::WithdrawDelay { asked, limit });
        }
        // The payer's own fields are in order.
        let config = ChannelConfig {
            payer: Address::repeat_byte(1),
            payer_authorizer: Address::ZERO,
            receiver: offer.pay_to,
            receiver_authorizer: channel.receiver_authorizer,
            token: offer.asset.address,
            withdraw_delay: channel.withdraw_delay,
            salt: B256::ZERO,
        };
        Ok(config.validate()?)
    }
}

debug_fields!(OfferPolicy |this| { assets: this.assets, flows: this.flows, preferences: this.preferences.len() });

#[cfg(test)]
mod tests {
    use std::cmp::Reverse;

    use alloy_primitives::U256;
    use http::HeaderMap;
    use serde_json::json;

    use super::*;
    use crate::{
        client::challenge::MAX_OFFERS,
        network::Network,
        protocol::{PaymentRequirements, encode_header, header_name, v1},
    };

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
    fn permit_is_chosen_at_the_same_price_if_it_may_cost_less_or_alone_will_do() {
        let offers = [offer(5).by_permit(), offer(5), offer(5).up_to(Address::repeat_byte(9))];
        let written: Vec<_> = offers.iter().map(ExactOffer::to_requirements).collect();
        let methods = |policy: &OfferPolicy, offers: &[PaymentRequirements]| -> Vec<TransferMethod> {
            let choices = policy.choose(&in_v2(offers)).unwrap_or_default();
            choices.into_iter().map(|choice| choice.offer.method).collect()
        };
        let all = OfferPolicy { permits: TransferMethod::by_permit(Address::ZERO).to_vec(), ..policy() };
        assert_eq!(methods(&all, &written), [offers[2].method, offers[1].method, offers[0].method]);
        assert_eq!(methods(&policy(), &written), [offers[1].method]);
        let exact = OfferPolicy { permits: vec![TransferMethod::Permit], ..policy() };
        assert_eq!(methods(&exact, &written[..1]), [offers[0].method]);
        assert_eq!(refused_by(&policy(), written[0].clone()), OfferRefusal::Permit { scheme: "exact" });
        assert_eq!(refused_by(&exact, written[2].clone()), OfferRefusal::Permit { scheme: offers[2].scheme() });
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
        assert!(matches!(refused(|o| o.scheme = "escrow".into()), OfferRefusal::Unsupported(_)));
    }

    #[test]
    fn only_the_first_64_offers_are_read() {
        // So many do not fit in the header of v2.
        let mut offers = vec![offer(9); 150];
        offers[MAX_OFFERS] = offer(1);
        let choices = policy().choose(&in_v1(&offers)).unwrap();
        assert_eq!((choices.len(), choices[0].amount.atomic()), (MAX_OFFERS, 9));
    }
}
