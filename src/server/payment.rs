//! What a handler learns of the payment.

use alloy_primitives::{Address, B256, U256};

use crate::{ledger::Record, network::Network, protocol::PaymentFlow};

/// The verified payment for a request, in the request's extensions.
///
/// ```
/// use tower_x402::server::Payment;
///
/// fn payer_of<B>(request: &http::Request<B>) -> Option<alloy_primitives::Address> {
///     request.extensions().get::<Payment>().map(|payment| payment.payer)
/// }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Payment {
    /// Who pays.
    pub payer: Address,
    /// Who is paid.
    pub pay_to: Address,
    /// Atomic units of the asset.
    pub amount: U256,
    /// The token.
    pub asset: Address,
    /// The chain.
    pub network: Network,
    /// The authorization's nonce: with network, asset and payer it identifies the payment.
    pub nonce: B256,
    /// When the money moves.
    pub flow: PaymentFlow,
    /// The transaction that paid, where the money moved before the work.
    pub transaction: Option<B256>,
    /// Which attempt at the work this is, from 1.
    pub attempt: u32,
}

impl Payment {
    pub(super) fn of(record: &Record) -> Self {
        let offer = record.terms.offer();
        Self {
            payer: record.key.payer,
            pay_to: offer.pay_to,
            amount: offer.amount,
            asset: record.key.asset,
            network: record.key.network,
            nonce: record.key.nonce,
            flow: offer.flow,
            transaction: record.settlement.paid_by(),
            attempt: record.attempts,
        }
    }
}
