//! Payment channels for tests of a ledger. `ledger_conformance!` makes the tests of their
//! [contract](crate::ledger::channels#contract).

use super::*;
use crate::{
    ledger::channels::{ChannelLedger, ChannelRecord, ChannelStep},
    vouchers::{ChannelConfig, ChannelId, ChannelObservation, ChannelState, Escrow, Voucher, VoucherSignature},
};

/// Returns the configuration of a channel on [`Network::BASE`]. The salt tells channels apart.
pub fn config(salt: u8) -> ChannelConfig {
    ChannelConfig {
        payer: Address::repeat_byte(1),
        payer_authorizer: Address::repeat_byte(2),
        receiver: Address::repeat_byte(3),
        receiver_authorizer: Address::repeat_byte(4),
        token: Network::BASE.usdc().unwrap().address,
        withdraw_delay: 900,
        salt: hash(salt),
    }
}

/// Returns the channel's id.
pub fn id(salt: u8) -> ChannelId {
    Escrow::on(Network::BASE).channel_id(&config(salt))
}

/// Returns a channel as the chain has it.
pub fn observation(salt: u8, balance: u128, total_claimed: u128, block: u64) -> ChannelObservation {
    let state = ChannelState {
        channel_id: id(salt),
        balance,
        total_claimed,
        withdraw_requested_at: 0,
        refund_nonce: 0,
        charged_cumulative_amount: None,
    };
    ChannelObservation { state, withdrawal: 0, block, time: START + block }
}

/// Opens a channel with this balance, as of block 1.
///
/// # Panics
/// If the ledger refuses it.
pub async fn open(ledger: &dyn ChannelLedger, salt: u8, balance: u128) -> ChannelRecord {
    let observation = observation(salt, balance, 0, 1);
    let step = ChannelStep::Open { network: Network::BASE, config: config(salt), observation, now: START };
    ledger.advance(&id(salt), &step).await.unwrap()
}

/// Returns a voucher. Its signature is no payer's: ledgers do not verify it.
pub fn voucher(salt: u8, max_claimable_amount: u128) -> Voucher {
    let mut signature = [1; 65];
    signature[64] = 27;
    Voucher { channel_id: id(salt), max_claimable_amount, signature: VoucherSignature::try_from(signature).unwrap() }
}

/// Returns the step with which a request takes a channel for 30 seconds from [`START`].
pub fn begin(salt: u8, request: B256, max: u128, price: u128) -> ChannelStep {
    ChannelStep::Begin { request, name: None, voucher: voucher(salt, max), price, now: START, until: START + 30 }
}

/// Returns the step that charges, without a response.
pub fn charge(epoch: u64, amount: u128) -> ChannelStep {
    ChannelStep::Charge { epoch, amount, response: None, now: START }
}

/// Returns the step that signs a refund, which counts as under way for three minutes from [`START`].
pub fn refund(request: B256, amount: u128) -> ChannelStep {
    ChannelStep::Refund { request, amount, now: START, until: START + 180 }
}

/// Charges a request for its whole price. Returns the channel after it.
///
/// # Panics
/// If the ledger refuses a step.
pub async fn sell(ledger: &dyn ChannelLedger, salt: u8, request: B256, price: u128) -> ChannelRecord {
    let charged = get(ledger, salt).await.charged();
    let held = ledger.advance(&id(salt), &begin(salt, request, charged + price, price)).await.unwrap();
    ledger.advance(&id(salt), &charge(held.epoch, price)).await.unwrap()
}

/// Returns a channel.
///
/// # Panics
/// If it is not in the ledger.
pub async fn get(ledger: &dyn ChannelLedger, salt: u8) -> ChannelRecord {
    ledger.channel(&id(salt)).await.unwrap().expect("a channel")
}
