//! A channel that a request holds: what is charged for the work, and how the channel stands then.

use std::future::Future;

use alloy_primitives::U256;

use super::{
    channel::{HeldChannel, receipt},
    request::{BatchRequest, Next},
};
use crate::{
    charge::{
        Beginning, Held, Presented, Refusal, Seller, Uncharged, Unfinished, VerifiedPayment, Why, common, detached,
        lease::pauses_after_work,
        recording::{Recording, Work},
    },
    facilitator::channels::Executed,
    ledger::{
        BodyDigest, LedgerError, StoredResponse,
        channels::{ChannelLedgerError, ChannelRecord, ChannelStep},
    },
    protocol::{PaymentFlow, Reason, SettlementResponse},
    telemetry::{self, RequestOutcome},
};

/// A request with the channel that it holds.
pub(crate) struct BatchHeld {
    request: Box<BatchRequest>,
    channel: Box<HeldChannel>,
    /// What was charged.
    charged: u128,
}

impl BatchHeld {
    /// Holds a channel for work or refunds it, or finds the answer that the request got before.
    pub(crate) async fn begin(
        mut request: BatchRequest,
        presented: &mut impl Presented,
    ) -> Result<Beginning<Self>, Refusal> {
        let begun = match request.begin(presented).await {
            Ok(begun) => begun,
            Err(refusal) => return Err(Box::pin(request.withhold(refusal)).await),
        };
        let channel = match begun {
            Next::Replay(response, receipt) => return Ok(Beginning::Replay(response, receipt)),
            Next::Refunded(record, executed) => return Ok(Self::refunded(&record, &executed)),
            Next::Hold(channel) => channel,
        };
        let is_refund = request.payment.refund.is_some();
        let held = Self { request: Box::new(request), channel, charged: 0 };
        match is_refund {
            // Like work, it goes on if its payer goes away.
            true => detached(Box::pin(held.refund())).await.unwrap_or_else(|| Err(Unfinished::Panicked.into())),
            false => Ok(Beginning::Work(held)),
        }
    }

    /// Refunds what is left, or as much of it as was asked for.
    async fn refund(mut self) -> Result<Beginning<Self>, Refusal> {
        let BatchRequest { channels, request_key, payment, .. } = &*self.request;
        let asked = payment.refund.flatten();
        let refunded = channels.refund(&self.channel.lease.record, *request_key, &payment.voucher, asked).await;
        self.channel.lease.release().await;
        let (executed, record) = refunded.map_err(|error| self.request.not_moved(&error))?;
        Ok(Self::refunded(&record, &executed))
    }

    fn refunded(record: &ChannelRecord, executed: &Executed) -> Beginning<Self> {
        common::moved(executed.transaction);
        Beginning::Refunded(record.id, receipt(None, record, record.charged(), Some(executed)))
    }

    /// Charges for work that is done. If the ledger fails it is asked again for a while.
    async fn take(&self, held: &ChannelRecord, step: &ChannelStep) -> Result<ChannelRecord, ChannelLedgerError> {
        let mut pauses = pauses_after_work();
        loop {
            let mut error = match self.request.channels.advance(&held.id, step).await {
                Ok(record) => return Ok(record),
                Err(error) => error,
            };
            match &error {
                ChannelLedgerError::Ledger(LedgerError::Backend(_)) => {}
                // It may have been charged before, and the answer was lost.
                ChannelLedgerError::LeaseLost => match self.request.channels.record(&held.id).await {
                    Ok(Some(record)) if record.answer_to(self.request.request_key).is_some() => return Ok(record),
                    Ok(_) => return Err(error),
                    Err(unknown) => error = unknown.into(),
                },
                _ => return Err(error),
            }
            if !pauses.wait().await {
                return Err(error);
            }
        }
    }

    /// The work is done, and the books did not take the charge for it, or did not say.
    fn not_charged(&self, error: ChannelLedgerError) -> Refusal {
        match error {
            ChannelLedgerError::Ledger(error @ LedgerError::Backend(_)) => {
                let record = &self.channel.lease.record;
                tracing::error!(%error, channel = %record.id, "it is not known whether work was charged for");
                let failed = SettlementResponse::failed(Reason::SettlementPending, record.network.to_string());
                let payer = Some(record.config.payer.to_string());
                Refusal::new(Why::Pending).with_receipt(Some(SettlementResponse { payer, ..failed }))
            }
            ChannelLedgerError::Ledger(error) => error.into(),
            error => {
                tracing::error!(%error, channel = %self.channel.lease.record.id, "work could not be charged for");
                self.request.busy()
            }
        }
    }
}

impl Held for BatchHeld {
    const COUNT: fn(RequestOutcome) = telemetry::voucher_request;

    async fn start(&mut self) -> Result<(), Refusal> {
        Ok(())
    }

    fn payment(&self) -> VerifiedPayment {
        let record = &self.channel.lease.record;
        VerifiedPayment {
            payer: record.config.payer,
            pay_to: record.config.receiver,
            amount: U256::from(self.request.payment.price),
            asset: record.config.token,
            network: record.network,
            nonce: self.request.request_key,
            flow: PaymentFlow::Authorization,
            transaction: self.channel.deposit.map(|deposit| deposit.transaction),
            attempt: record.attempts_of(self.request.request_key),
        }
    }

    fn most(&self) -> Option<u128> {
        Some(self.request.payment.price)
    }

    fn response_limit(&self) -> usize {
        self.request.channels.ledger().response_limit()
    }

    fn recording(&mut self) -> Recording {
        let (request, record) = (&self.request, &self.channel.lease.record);
        let (channels, channel, epoch) = (request.channels.clone(), record.id, record.epoch);
        Recording {
            responses: request.channels.ledger().clone(),
            key: record.response_key(request.request_key),
            work: Work::Request { channels, channel, request: request.request_key, epoch },
            in_progress: request.seller.in_progress.enter(request.key()),
            now: request.seller.now(),
        }
    }

    async fn charge(
        &mut self,
        amount: Option<u128>,
        response: Option<StoredResponse>,
        _: BodyDigest,
    ) -> Result<(), Uncharged> {
        let amount = amount.unwrap_or(self.request.payment.price);
        let lease = &self.channel.lease;
        let step = ChannelStep::Charge { epoch: lease.record.epoch, amount, response, now: self.request.seller.now() };
        // If it fails the response is not given, and the channel is freed.
        let record = self.take(&lease.record, &step).await.map_err(|error| {
            let refusal = self.not_charged(error);
            Uncharged { is_open: matches!(refusal.why(), Why::Pending), refusal }
        })?;
        self.channel.lease.charged(record);
        self.charged = amount;
        Ok(())
    }

    async fn settle(&mut self, _: bool) -> Result<(), Refusal> {
        Ok(())
    }

    /// Frees the channel. Returns a receipt if a deposit was made: the payer learns of it although nothing was charged.
    async fn release(&mut self, _: BodyDigest) -> Option<SettlementResponse> {
        let record = self.channel.lease.release().await;
        let deposit = self.channel.deposit.as_ref()?;
        Some(receipt(Some(0), record, record.charged(), Some(deposit)))
    }

    fn unfinished(&self, why: Unfinished) -> Refusal {
        why.into()
    }

    fn seller(&self) -> &Seller {
        &self.request.seller
    }

    fn receipt(&self) -> (Option<SettlementResponse>, RequestOutcome) {
        let record = &self.channel.lease.record;
        let receipt = receipt(Some(self.charged), record, record.charged(), self.channel.deposit.as_ref());
        (Some(receipt), RequestOutcome::Paid)
    }

    fn deliver(self) -> impl Future<Output = ()> + Send + 'static {
        drop(self);
        async {}
    }

    fn if_panicked(&self) -> impl Future<Output = Refusal> + Send + 'static {
        std::future::ready(Unfinished::Panicked.into())
    }
}
