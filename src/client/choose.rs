//! Which of a server's offers to take.

use serde::Deserialize;
use serde_json::{Map, Value};

use super::{OfferRefusal, Refusal};
use crate::{
    network::Asset,
    protocol::{ExactOffer, PaymentFlow, PaymentRequirements, ResourceInfo, V2, Verbatim},
    usdc::Usdc,
};

/// How many offers of one 402 are looked at.
pub(super) const MAX_OFFERS: usize = 64;

/// A `PAYMENT-REQUIRED` as a payer needs it: what is to be echoed stays unread.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Asked {
    /// Read only to refuse other versions.
    #[serde(rename = "x402Version")]
    _version: V2,
    pub(super) error: Option<String>,
    pub(super) resource: Option<Verbatim<ResourceInfo>>,
    accepts: Vec<Verbatim<PaymentRequirements>>,
    pub(super) extensions: Option<Verbatim<Map<String, Value>>>,
}

/// The offer that will be paid.
#[derive(Debug)]
pub(super) struct Choice {
    /// As it came, to be echoed.
    pub(super) accepted: Verbatim<PaymentRequirements>,
    /// As it was understood.
    pub(super) offer: ExactOffer,
    pub(super) amount: Usdc,
}

/// The cheapest offer in a trusted asset; at the same price one that is settled after the work.
pub(super) fn choose(asked: &Asked, assets: &[Asset]) -> Result<Choice, Refusal> {
    let mut reasons = Vec::new();
    let mut best: Option<Choice> = None;
    for accepted in asked.accepts.iter().take(MAX_OFFERS) {
        match read(accepted, assets) {
            Ok(choice) if best.as_ref().is_none_or(|best| rank(&choice) < rank(best)) => best = Some(choice),
            Ok(_) => {}
            Err(reason) => reasons.push(reason),
        }
    }
    best.ok_or(Refusal::NoPayableOffer { reasons })
}

fn rank(choice: &Choice) -> (Usdc, bool) {
    (choice.amount, choice.offer.flow != PaymentFlow::Authorization)
}

fn read(accepted: &Verbatim<PaymentRequirements>, assets: &[Asset]) -> Result<Choice, OfferRefusal> {
    let offer = ExactOffer::try_from(&accepted.read().map_err(|_| OfferRefusal::Unreadable)?)?;
    let (network, asset) = (offer.network(), offer.asset.address);
    let trusted = assets
        .iter()
        .find(|trusted| trusted.network == network && trusted.address == asset)
        .ok_or(OfferRefusal::UnknownAsset { network, asset })?;
    if *trusted != offer.asset {
        return Err(OfferRefusal::WrongDomain { asset });
    }
    if offer.max_timeout_seconds == 0 {
        return Err(OfferRefusal::NoTime);
    }
    match Usdc::try_from(offer.amount) {
        Ok(Usdc::ZERO) | Err(_) => Err(OfferRefusal::Amount),
        Ok(amount) => Ok(Choice { accepted: accepted.clone(), offer, amount }),
    }
}

#[cfg(test)]
mod tests {
    use alloy_primitives::{Address, U256};
    use serde_json::json;

    use super::*;
    use crate::network::Network;

    fn offer(amount: u64) -> PaymentRequirements {
        ExactOffer {
            asset: Network::BASE.usdc().unwrap(),
            amount: U256::from(amount),
            pay_to: Address::repeat_byte(7),
            max_timeout_seconds: 60,
            flow: PaymentFlow::Authorization,
        }
        .to_requirements()
    }

    fn chosen(offers: &[PaymentRequirements]) -> Result<Choice, Refusal> {
        let asked = json!({ "x402Version": 2, "resource": { "url": "u" }, "accepts": offers }).to_string();
        choose(&serde_json::from_str(&asked).unwrap(), &[Network::BASE.usdc().unwrap()])
    }

    fn refused(change: impl FnOnce(&mut PaymentRequirements)) -> OfferRefusal {
        let mut offer = offer(1);
        change(&mut offer);
        match chosen(&[offer]) {
            Err(Refusal::NoPayableOffer { mut reasons }) if reasons.len() == 1 => reasons.remove(0),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_cheapest_payable_offer_is_taken() {
        let mut cheaper_elsewhere = offer(1);
        cheaper_elsewhere.network = "eip155:1".into();
        let offers = [offer(300), cheaper_elsewhere, offer(200), offer(400)];
        assert_eq!(chosen(&offers).unwrap().amount.atomic(), 200);
    }

    #[test]
    fn at_the_same_price_work_comes_before_payment() {
        let mut upfront = offer(5);
        upfront.extra.insert("paymentFlow".into(), "upfront".into());
        assert_eq!(chosen(&[upfront.clone(), offer(5)]).unwrap().offer.flow, PaymentFlow::Authorization);
        assert_eq!(chosen(&[upfront, offer(6)]).unwrap().offer.flow, PaymentFlow::Upfront);
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
    fn a_thousand_offers_cost_no_more_than_the_bound() {
        let mut offers = vec![offer(9); 1_000];
        offers[MAX_OFFERS] = offer(1);
        assert_eq!(chosen(&offers).unwrap().amount.atomic(), 9);
    }
}
