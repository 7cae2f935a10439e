//! A leased payment: what is done before and after the work for it.

use std::{future::Future, time::Duration};

use alloy_primitives::U256;
use tokio::time::Instant;

use super::{
    receipt::Known,
    request::{ExactRequest, Next},
};
use crate::{
    charge::{
        Beginning, Held, Presented, Refusal, Seller, Uncharged, Unfinished, VerifiedPayment, Why,
        lease::HeldLease,
        recording::{Recording, Work, record_delivery},
        rooms::{PayerRoom, owner_of},
    },
    facilitator::Facilitator,
    ledger::{BodyDigest, FulfilmentStep, LedgerError, Record, Settlement, StoredResponse},
    payment::{Prechecked, Verified},
    protocol::SettlementResponse,
    telemetry::{self, RequestOutcome},
};

/// How often it is looked whether a payer's other payments are settled.
const ADMISSION_POLL: Duration = Duration::from_millis(20);
/// How often the balance of a payer is read again that pays others all the time.
const MAX_BALANCE_READS: u32 = 5;

/// A payment that is leased, with the request that it is for.
pub(crate) struct ExactHeld {
    request: Box<ExactRequest>,
    lease: HeldLease,
    /// How much of the request's body was read before the work, in bytes.
    read: u64,
}

/// Counts a payment as in flight. Where it depends on what the payer's other payments are doing just now whether the balance covers it, looks
/// again until `deadline`, in a place of the room with so many bytes: one payer can sign any number of payments. Returns the verification that
/// covers it.
pub(crate) async fn admit(
    facilitator: &dyn Facilitator,
    payment: &Prechecked,
    lease: &mut HeldLease,
    mut verified: Verified,
    is_due: bool,
    (room, held, deadline): (&PayerRoom, u64, Instant),
) -> Result<Verified, Refusal> {
    let mut balance_reads = 0;
    if try_admit(facilitator, payment, lease, &mut verified, is_due, &mut balance_reads).await? {
        return Ok(verified);
    }
    let waiting = async {
        while Instant::now() < deadline {
            tokio::time::sleep(ADMISSION_POLL).await;
            if try_admit(facilitator, payment, lease, &mut verified, is_due, &mut balance_reads).await? {
                return Ok(verified);
            }
        }
        Err(Refusal::not_covered())
    };
    Box::pin(room.wait(owner_of(&payment.key(), false), held, waiting)).await.ok_or(Why::Busy)?
}

/// Returns `false` if it depends on the payer's other payments.
async fn try_admit(
    facilitator: &dyn Facilitator,
    payment: &Prechecked,
    lease: &mut HeldLease,
    verified: &mut Verified,
    is_due: bool,
    balance_reads: &mut u32,
) -> Result<bool, Refusal> {
    loop {
        match lease.admit(*verified, is_due).await {
            Ok(()) => return Ok(true),
            Err(LedgerError::Stale) if *balance_reads < MAX_BALANCE_READS => {
                *balance_reads += 1;
                *verified = Box::pin(facilitator.verify(payment)).await?;
            }
            Err(LedgerError::BalancePending) => return Ok(false),
            Err(LedgerError::InsufficientFunds | LedgerError::Stale) => return Err(Refusal::not_covered()),
            Err(error) => return Err(error.into()),
        }
    }
}

impl ExactHeld {
    /// Holds a payment for work, or finds the answer that its request got before.
    pub(crate) async fn begin(
        request: Box<ExactRequest>,
        presented: &mut impl Presented,
    ) -> Result<Beginning<Self>, Refusal> {
        let method = request.method();
        Ok(match request.begin(presented).await.map_err(|refusal| refusal.under(method))? {
            (request, Next::Work(lease)) => Beginning::Work(Self { request, lease, read: presented.held() }),
            (_, Next::Replay(response, receipt)) => Beginning::Replay(response, receipt),
        })
    }

    /// Returns the time of the seller's clock, in Unix seconds.
    pub(crate) fn now(&self) -> u64 {
        self.request.seller.now()
    }

    /// Verifies and admits the payment and, where the flow wants it, settles it.
    async fn before_work(&mut self) -> Result<(), Refusal> {
        if self.lease.record().settlement == Settlement::None
            && let Err(refusal) = self.show_money().await
            && !Box::pin(self.request.is_executed(self.lease.record_mut(), &refusal)).await?
        {
            return Err(refusal);
        }
        let Self { request, lease, .. } = self;
        // From here on it is work for a payer that has the money.
        request.take_permit()?;
        if request.is_upfront() && lease.record().settlement.paid_by().is_none() {
            Box::pin(request.settle(lease.record_mut())).await?;
        }
        Ok(())
    }

    /// Verifies the payment, and counts it as in flight.
    async fn show_money(&mut self) -> Result<(), Refusal> {
        let Self { request, lease, read } = self;
        let verified = match request.verified {
            Some(verified) => verified,
            None => request.facilitator.verify(&request.payment).await?,
        };
        request.leave_place();
        let deadline = Instant::now() + request.seller.rules.limits.settlement_margin;
        let room = (&request.seller.arriving, *read, deadline);
        let facilitator = request.facilitator.as_ref();
        let is_upfront = request.is_upfront();
        request.verified = Some(admit(facilitator, &request.payment, lease, verified, is_upfront, room).await?);
        Ok(())
    }

    /// Leaves the payment to the facilitator to settle later, if the seller trusts its payer that far. Returns `false` if it must be settled
    /// now like any other. Fails if the ledger does not say: what it deferred is charged, whatever is tried now.
    async fn defer(&mut self) -> Result<bool, Refusal> {
        let Self { request, lease, .. } = self;
        let Some(policy) = request.seller.rules.deferred.filter(|_| request.may_defer) else { return Ok(false) };
        let (step, key) = (FulfilmentStep::Defer { limit: policy.limit() }, request.key);
        match lease.step_after_work(request.facilitator.ledger().as_ref(), step).await {
            Ok(()) => {
                request.facilitator.settle_soon(&key);
                Ok(true)
            }
            Err(LedgerError::NoCredit) => Ok(false),
            Err(error) => {
                tracing::warn!(%error, payer = %key.payer, nonce = %key.nonce, "a payment was not deferred");
                if matches!(error, LedgerError::Backend(_)) {
                    return Err(request.pending(lease.record(), None));
                }
                Ok(false)
            }
        }
    }
}

impl Held for ExactHeld {
    const COUNT: fn(RequestOutcome) = telemetry::request;

    async fn start(&mut self) -> Result<(), Refusal> {
        if let Err(refusal) = self.before_work().await {
            self.lease.give_back().await;
            return Err(refusal.under(self.request.method()));
        }
        let until = self.request.lease_until(self.request.seller.now());
        if let Err(error) = self.lease.step(FulfilmentStep::Start { until }).await {
            // Work that was not begun is not charged, whether the ledger takes the payment back or not.
            let refusal = self.request.unrecorded(error, self.lease.record(), true);
            self.lease.give_back().await;
            return Err(refusal);
        }
        Ok(())
    }

    fn payment(&self) -> VerifiedPayment {
        VerifiedPayment::of(self.lease.record())
    }

    fn most(&self) -> Option<u128> {
        let most = || self.request.payment.authorization().value.saturating_to();
        self.request.payment.terms().offer().is_maximum().then(most)
    }

    fn response_limit(&self) -> usize {
        self.request.facilitator.ledger().response_limit()
    }

    fn recording(&mut self) -> Recording {
        let (ledger, lease) = (self.request.facilitator.ledger().clone(), self.lease.lease());
        Recording {
            responses: ledger.clone(),
            key: lease.key,
            work: Work::Payment(ledger, lease),
            in_progress: self.lease.take_in_progress(),
            now: self.request.seller.now(),
        }
    }

    async fn charge(
        &mut self,
        amount: Option<u128>,
        response: Option<StoredResponse>,
        read: BodyDigest,
    ) -> Result<(), Uncharged> {
        let Self { request, lease, .. } = self;
        let charged = amount.map(U256::from);
        if let Some(amount) = charged {
            request.payment = request.payment.clone().charging(amount);
        }
        let step = FulfilmentStep::Produce { charged, body: Some(read), at: request.seller.now(), response };
        let taken = lease.step_after_work(request.facilitator.ledger().as_ref(), step).await;
        if let Err(error) = taken {
            let is_given_back = lease.give_back().await;
            // Whoever took the payment over charges for work of its own.
            let is_open = !is_given_back && matches!(error, LedgerError::Backend(_));
            return Err(Uncharged { refusal: request.unrecorded(error, lease.record(), is_given_back), is_open });
        }
        lease.disarm();
        Ok(())
    }

    async fn settle(&mut self, is_whole: bool) -> Result<(), Refusal> {
        if self.lease.record().settlement.paid_by().is_some() || (is_whole && self.defer().await?) {
            return Ok(());
        }
        let method = self.request.method();
        self.request.settle(self.lease.record_mut()).await.map_err(|refusal| refusal.under(method))
    }

    async fn release(&mut self, read: BodyDigest) -> Option<SettlementResponse> {
        self.lease.release(read).await;
        // Charged only if the money moved before the work.
        self.request.receipt(self.lease.record())
    }

    fn unfinished(&self, why: Unfinished) -> Refusal {
        self.request.unfinished(why, self.lease.record())
    }

    fn seller(&self) -> &Seller {
        &self.request.seller
    }

    fn receipt(&self) -> (Option<SettlementResponse>, RequestOutcome) {
        let record = self.lease.record();
        let is_paid = record.settlement.paid_by().is_some();
        (self.request.receipt(record), if is_paid { RequestOutcome::Paid } else { RequestOutcome::Deferred })
    }

    fn deliver(mut self) -> impl Future<Output = ()> + Send + 'static {
        // Copies of the payment are answered as soon as there is something to answer them with.
        drop(self.lease.take_in_progress());
        let (ledger, lease) = (self.request.facilitator.ledger().clone(), self.lease.lease());
        async move { record_delivery(ledger.as_ref(), &lease).await }
    }

    fn if_panicked(&self) -> impl Future<Output = Refusal> + Send + 'static {
        Known::of(&self.request).panicked()
    }
}

impl VerifiedPayment {
    fn of(record: &Record) -> Self {
        let offer = record.terms.offer();
        Self {
            payer: record.key.payer,
            pay_to: offer.pay_to,
            amount: offer.amount,
            asset: offer.asset.address,
            network: record.key.network,
            nonce: record.key.nonce,
            flow: offer.flow,
            transaction: record.transaction(),
            attempt: record.attempts,
        }
    }
}
