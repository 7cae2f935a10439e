//! x402 v1 at the edge: its offers beside those of v2, its payments turned into payments of v2, and receipts turned back.
//!
//! Nothing else in the server knows of v1. A payment of v1 names only scheme and network; what was signed tells which offer it is for.

use bytes::Bytes;
use http::HeaderMap;

use super::{
    header_names::{PAYMENT_RESPONSE, X_PAYMENT_RESPONSE},
    payment_header::RawHeader,
};
use crate::{
    charge::{Offer, Refusal},
    eip3009::Authorization,
    protocol::{
        ExactOffer, ExactPayload, MAX_PAYMENT_HEADER, PaymentFlow, PaymentPayload, PaymentRequirements, Reason,
        ResourceInfo, SettlementResponse, TransferMethod, V1, V2, Verbatim, decode_header, encode_header, v1,
    },
};

/// What is offered in v1, and what may have been.
#[derive(Clone, Debug)]
pub(super) struct OffersV1 {
    /// Each offer as v1 has it, without what depends on the request: amount, payee and URL. `None` where it is not made in v1.
    made: Vec<Option<v1::PaymentRequirementsV1>>,
    /// A transfer of each token, with the name of its network: the route may have taken transfers before, and what they bought is still owed.
    transfers: Vec<(&'static str, Verbatim<PaymentRequirements>)>,
}

impl OffersV1 {
    /// `offers` have no amount yet; none of them is made unless `is_taken`.
    pub(super) fn of(offers: &[ExactOffer], is_taken: bool, resource: &ResourceInfo) -> Self {
        let write = |offer: &ExactOffer| {
            let network = offer.network().v1_name().filter(|_| is_taken && is_made(offer, offers))?;
            Some(v1::PaymentRequirementsV1::of(&offer.to_requirements(), network, resource))
        };
        let transfer = |(index, offer): (usize, &ExactOffer)| {
            let is_known = offers[..index].iter().any(|other| other.asset == offer.asset);
            let network = offer.network().v1_name().filter(|_| !is_known)?;
            let (method, flow) = (TransferMethod::Authorization, PaymentFlow::Authorization);
            let transfer = ExactOffer { method, flow, ..offer.clone() };
            Some((network, Verbatim::of(&transfer.to_requirements()).ok()?))
        };
        Self {
            made: offers.iter().map(write).collect(),
            transfers: offers.iter().enumerate().filter_map(transfer).collect(),
        }
    }

    /// Writes the body of a 402. Returns `None` if nothing is offered in v1. `offers` are those of [`of`](Self::of), in their order.
    pub(super) fn body(&self, offers: &[Offer], url: &str, error: &str) -> Option<Bytes> {
        let written = self.made.iter().zip(offers).filter_map(|(written, offer)| {
            let written = v1::PaymentRequirementsV1 {
                max_amount_required: offer.terms.offer().amount.to_string(),
                pay_to: offer.terms.offer().pay_to.to_string(),
                resource: url.to_owned(),
                ..written.clone()?
            };
            Verbatim::of(&written).ok()
        });
        let accepts: Vec<_> = written.collect();
        if accepts.is_empty() {
            return None;
        }
        let required = v1::PaymentRequiredV1 { x402_version: V1, error: Some(error.to_owned()), accepts };
        serde_json::to_vec(&required).ok().map(Bytes::from)
    }

    /// Reads `X-PAYMENT` as a payment of v2, for one of these offers: those of [`of`](Self::of), in their order, or none. Returns also what it may
    /// be for otherwise, if it was accepted before.
    pub(super) fn read(
        &self,
        header: RawHeader<'_>,
        offers: &[Offer],
    ) -> Result<(PaymentPayload, Vec<Verbatim<PaymentRequirements>>), Refusal> {
        let payment: v1::PaymentPayloadV1 = header.decode(1)?;
        if payment.scheme != "exact" {
            let detail = format!("scheme {:?} is not on offer", payment.scheme);
            return Err(Refusal::rejected(Reason::UnsupportedScheme, detail));
        }
        let on_network = self.made.iter().zip(offers).filter_map(|(written, offer)| {
            written.as_ref().is_some_and(|written| written.network == payment.network).then_some(offer)
        });
        let on_network: Vec<_> = on_network.collect();
        let (accepted, others) = match accepted(&on_network, &payment.payload) {
            Some((accepted, true)) => (accepted, Vec::new()),
            Some((accepted, false)) => (accepted, on_network.iter().map(|offer| offer.terms.text().clone()).collect()),
            None => {
                let on_network = self.transfers.iter().filter(|(network, _)| *network == payment.network);
                let mut before = on_network.map(|(_, transfer)| transfer.clone());
                let first = before.next().ok_or_else(|| {
                    let detail = format!("network {:?} is not on offer", payment.network);
                    Refusal::rejected(Reason::InvalidNetwork, detail)
                })?;
                (first, before.collect())
            }
        };
        let payload = payment.payload;
        Ok((PaymentPayload { x402_version: V2, resource: None, accepted, payload, extensions: None }, others))
    }
}

/// Returns the offer that a payment is for: the one that asks for what was signed, in the token that it was signed for. Where only the
/// chain can judge the signature, the first offer of the right amount is taken. Returns `None` if there are no offers. The second value is
/// whether no other offer can be meant.
fn accepted(offers: &[&Offer], payload: &Verbatim<ExactPayload>) -> Option<(Verbatim<PaymentRequirements>, bool)> {
    let payload = payload.read().ok();
    let asks = |offer: &Offer, signed: &Authorization| {
        let offer = offer.terms.offer();
        (offer.pay_to, offer.amount) == (signed.to, signed.value)
    };
    let is_signed = |offer: &&&Offer| {
        payload.as_ref().is_some_and(|ExactPayload { authorization, signature, .. }| {
            signature.recover_from(|| offer.terms.signing_hash(authorization)) == Ok(authorization.from)
        })
    };
    let asked: Vec<&Offer> = match &payload {
        Some(payload) => offers.iter().copied().filter(|offer| asks(offer, &payload.authorization)).collect(),
        None => Vec::new(),
    };
    let candidates = if asked.is_empty() { offers } else { asked.as_slice() };
    let (chosen, is_certain) = match (candidates, offers) {
        ([], _) => return None,
        ([only], [_]) => (*only, true),
        ([first, ..], _) => candidates.iter().find(is_signed).map_or((*first, false), |signed| (*signed, true)),
    };
    Some((chosen.terms.text().clone(), is_certain))
}

/// Returns `true` if the offer is made in v1, too.
///
/// v1 cannot tell flows apart, and its clients expect the money to move after the work: another flow is offered only where
/// that one is not. It has authorizations only.
fn is_made(offer: &ExactOffer, offers: &[ExactOffer]) -> bool {
    if offer.method != TransferMethod::Authorization {
        return false;
    }
    let is_usual = |other: &ExactOffer| {
        other.flow == PaymentFlow::Authorization && other.asset == offer.asset && other.pay_to == offer.pay_to
    };
    offer.flow == PaymentFlow::Authorization || !offers.iter().any(is_usual)
}

/// Turns the receipt of a response, if it has one, into what v1 calls so.
pub(super) fn turn_back(headers: &mut HeaderMap) {
    let Some(receipt) = headers.remove(&PAYMENT_RESPONSE) else { return };
    let read = decode_header::<SettlementResponse>(receipt.as_bytes(), MAX_PAYMENT_HEADER);
    let written = read.ok().and_then(|receipt| encode_header(&v1::SettlementResponseV1::from(&receipt)).ok());
    if let Some(written) = written.and_then(|written| written.try_into().ok()) {
        headers.insert(X_PAYMENT_RESPONSE, written);
    }
}
