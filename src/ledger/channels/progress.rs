//! The part of a channel that its requests change, which the ledger in SQLite writes for each of them without the rest.

use std::collections::VecDeque;

use alloy_primitives::B256;
use serde::{Deserialize, Serialize};

use super::{Answer, ChannelRecord, ChannelStep, PendingRequest};
use crate::vouchers::{Voucher, VoucherSignature};

/// The fields of a [`ChannelRecord`] that `Begin`, `Charge` and `Release` change. It is written twice per request, so what is repeated in
/// it has no names.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Progress {
    charged: u128,
    voucher: Option<Signed>,
    /// The request, its voucher, its price, and until when it holds the channel.
    pending: Option<(B256, Signed, u128, u64)>,
    epoch: u64,
    /// Of each the request, its epoch, what it cost, the watermark after it, and when it was answered.
    answers: VecDeque<(B256, u64, u128, u128, u64)>,
    used_at: u64,
    unclaimed_since: Option<u64>,
    claimed_since: Option<u64>,
}

/// A voucher of this channel: its amount and signature.
#[derive(Serialize, Deserialize)]
struct Signed(u128, VoucherSignature);

impl Signed {
    fn of(voucher: &Voucher) -> Self {
        Self(voucher.max_claimable_amount, voucher.signature)
    }
}

impl ChannelStep {
    /// Returns `true` if the step changes nothing but the channel's [`progress`](ChannelRecord::progress).
    pub(in crate::ledger) fn is_progress(&self) -> bool {
        matches!(self, Self::Begin { .. } | Self::Charge { .. } | Self::Release { .. })
    }
}

impl ChannelRecord {
    /// Returns what requests change, as JSON.
    pub(in crate::ledger) fn progress(&self) -> Result<String, serde_json::Error> {
        let pending = self.pending.as_ref();
        let answers = self.answers.iter();
        serde_json::to_string(&Progress {
            charged: self.charged,
            voucher: self.voucher.as_ref().map(Signed::of),
            pending: pending.map(|it| (it.request, Signed::of(&it.voucher), it.price, it.until)),
            epoch: self.epoch,
            answers: answers.map(|it| (it.request, it.epoch, it.charged, it.total, it.at)).collect(),
            used_at: self.used_at,
            unclaimed_since: self.unclaimed_since,
            claimed_since: self.claimed_since,
        })
    }

    /// Sets the fields that [`progress`](Self::progress) returned.
    pub(in crate::ledger) fn set_progress(&mut self, json: &str) -> Result<(), serde_json::Error> {
        let progress: Progress = serde_json::from_str(json)?;
        let channel_id = self.id;
        let voucher = |Signed(max_claimable_amount, signature)| Voucher { channel_id, max_claimable_amount, signature };
        let pending =
            |(request, signed, price, until)| PendingRequest { request, voucher: voucher(signed), price, until };
        let answer = |(request, epoch, charged, total, at)| Answer { request, epoch, charged, total, at };
        self.charged = progress.charged;
        self.voucher = progress.voucher.map(voucher);
        self.pending = progress.pending.map(pending);
        self.epoch = progress.epoch;
        self.answers = progress.answers.into_iter().map(answer).collect();
        self.used_at = progress.used_at;
        self.unclaimed_since = progress.unclaimed_since;
        self.claimed_since = progress.claimed_since;
        Ok(())
    }
}
