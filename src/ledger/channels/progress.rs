//! The part of a channel that its requests change, which the ledger in SQLite writes for each of them without the rest.

use std::collections::VecDeque;

use alloy_primitives::B256;
use serde::{Deserialize, Serialize};

use super::{Answer, Attempts, ChannelRecord, ChannelStep, PendingRequest, RequestName};
use crate::vouchers::{Voucher, VoucherSignature};

/// The fields of a [`ChannelRecord`] that `Begin`, `Charge`, `Replay` and `Release` change. It is written twice per request, so what is repeated in
/// it has no names.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Progress {
    charged: u128,
    voucher: Option<Signed>,
    /// The request, its voucher, its price, until when it holds the channel, and its name.
    pending: Option<(B256, Signed, u128, u64, Option<Name>)>,
    epoch: u64,
    answers: VecDeque<Answered>,
    attempts: Option<(B256, u32)>,
    used_at: u64,
    unclaimed_since: Option<u64>,
    claimed_since: Option<u64>,
}

/// The request, its epoch, what it cost, the watermark after it, when it was answered, its replays, its name, and whether it streamed.
type Answered = (B256, u64, u128, u128, u64, u32, Option<Name>, bool);

/// The payer's id of a request, and the digest of what it is for.
type Name = (B256, B256);

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
        matches!(self, Self::Begin { .. } | Self::Charge { .. } | Self::Replay { .. } | Self::Release { .. })
    }
}

impl ChannelRecord {
    /// Returns what requests change, as JSON.
    pub(in crate::ledger) fn progress(&self) -> Result<String, serde_json::Error> {
        let pending = self.pending.as_ref();
        let answers = self.answers.iter();
        let name = |name: Option<RequestName>| name.map(|RequestName { id, request }| (id, request));
        serde_json::to_string(&Progress {
            charged: self.charged,
            voucher: self.voucher.as_ref().map(Signed::of),
            pending: pending.map(|it| (it.request, Signed::of(&it.voucher), it.price, it.until, name(it.name))),
            epoch: self.epoch,
            answers: answers
                .map(|it| (it.request, it.epoch, it.charged, it.total, it.at, it.replays, name(it.name), it.streamed))
                .collect(),
            attempts: self.attempts.map(|Attempts { request, number }| (request, number)),
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
        let named = |name: Option<Name>| name.map(|(id, request)| RequestName { id, request });
        let pending = |(request, signed, price, until, name)| {
            let (name, voucher) = (named(name), voucher(signed));
            PendingRequest { request, name, voucher, price, until }
        };
        let answer = |(request, epoch, charged, total, at, replays, name, streamed)| Answer {
            request,
            epoch,
            charged,
            total,
            at,
            name: named(name),
            replays,
            streamed,
        };
        self.charged = progress.charged;
        self.voucher = progress.voucher.map(voucher);
        self.pending = progress.pending.map(pending);
        self.epoch = progress.epoch;
        self.answers = progress.answers.into_iter().map(answer).collect();
        self.attempts = progress.attempts.map(|(request, number)| Attempts { request, number });
        self.used_at = progress.used_at;
        self.unclaimed_since = progress.unclaimed_since;
        self.claimed_since = progress.claimed_since;
        Ok(())
    }
}
