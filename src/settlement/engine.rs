//! The settlement engine: takes payments, begins their transactions, and reconciles them in the background.
//!
//! The engine composes the other parts of this folder. Each of them has one job and knows nothing of the engine.

use std::{pin::pin, sync::Arc, time::Duration};

use alloy_primitives::{Address, B256, U256};
use tokio::{
    sync::{Notify, oneshot, watch},
    task::JoinSet,
    time::{sleep, timeout},
};
use tracing::Instrument;

use super::{
    accounts::{Account, Accounts, SharedSigner},
    confirmation::{Confirmation, Depths},
    costs::{Costs, PayerBackoff, SettlementStats},
    deployment::Deployment,
    finality::FinalityTracker,
    gas::KEPT_GAS,
    journal::Journal,
    line::{Lane, Urgency},
    load::Load as _,
    queue::{Added, OutcomeSender, Queue, QueuedPayment},
    readiness::ReadinessCache,
    reconciler::{self, OPEN, Reconcile},
    recovery::Recovery,
    submitter::{Attempt, AttemptResult, Place, Submitter},
    transfers::{GasCaps, Transfers},
};
use crate::{
    chain::{node::Node, probe::ProbeResult, rpc::Receipt},
    clock::age,
    ledger::{Fulfilment, Listing, Record, Settlement, SettlementState},
    network::Network,
    payment::{PaymentKey, Prechecked, Rejection, SettlementOutcome, Verified},
    permit2::Permit,
    protocol::TransferMethod,
    settlement::{FacilitatorError, NotReady, Readiness},
    telemetry,
    usdc::Usdc,
};

/// A payment that was verified longer ago than this, in seconds, is verified again before its transaction is signed.
const FRESH: u64 = 5;
/// How often a transaction is signed for one payment, after its nonce was taken or its fees were too low.
const MAX_ATTEMPTS: usize = 4;
/// How long readiness is cached.
const READINESS_TTL: Duration = Duration::from_secs(1);
/// Gas that an account must be able to pay for: a transfer alone.
const MIN_GAS: u128 = 110_000;
/// Up to this age, in seconds, a payment with an unknown outcome is reconciled again with the next block.
const YOUNG: u64 = 60;
/// The longest pause between two reconciliations of one payment, in seconds.
const LONGEST_PAUSE: u64 = 30;
/// How long to wait before trying again what could not be settled.
const RETRY: Duration = Duration::from_secs(2);

/// Settings of an [`Engine`].
pub(crate) struct EngineSettings {
    pub(crate) signers: Vec<SharedSigner>,
    /// Transactions in flight per account, unless that is left to the engine.
    pub(crate) in_flight: Option<usize>,
    pub(crate) gas: GasCaps,
    /// After how long without a receipt callers are told that the outcome is unknown.
    pub(crate) confirm_timeout: Duration,
    /// Payments per transaction.
    pub(crate) batch_size: usize,
    pub(crate) depths: Depths,
    /// How many payments may be in progress.
    pub(crate) backlog: usize,
    pub(crate) native_price: Option<Usdc>,
    pub(crate) refuse_losses: bool,
    pub(crate) reconcile_interval: Duration,
}

/// Settles payments on one chain.
pub(crate) struct Engine {
    node: Arc<Node>,
    journal: Journal,
    accounts: Accounts,
    queue: Queue,
    submitter: Arc<Submitter>,
    confirmation: Arc<Confirmation>,
    recovery: Recovery,
    deployment: Deployment,
    finality: FinalityTracker,
    costs: Arc<Costs>,
    backoff: Arc<PayerBackoff>,
    readiness: ReadinessCache,
    batch_size: usize,
    gas: GasCaps,
    /// Payments of an earlier process have been reconciled. Before that, no transaction is signed.
    caught_up: watch::Sender<bool>,
    /// Wakes the reconciler.
    wake: Arc<Notify>,
}

impl Engine {
    /// Starts an engine, and its reconciliation in the background.
    pub(crate) async fn start(node: Arc<Node>, journal: Journal, settings: EngineSettings) -> Arc<Self> {
        let EngineSettings { signers, in_flight, gas, confirm_timeout, .. } = settings;
        let costs = Arc::new(Costs::new(node.network(), settings.native_price, settings.refuse_losses));
        let backoff = Arc::new(PayerBackoff::default());
        let submitter =
            Submitter::new(node.clone(), journal.clone(), signers, in_flight, costs.clone(), confirm_timeout);
        let accounts = submitter.accounts().clone();
        let confirmation = Confirmation::new(
            node.clone(),
            journal.clone(),
            costs.clone(),
            backoff.clone(),
            accounts.clone(),
            (settings.depths, confirm_timeout),
        );
        let engine = Arc::new(Self {
            queue: Queue::new(settings.backlog),
            confirmation: Arc::new(confirmation),
            recovery: Recovery::new(submitter.clone()),
            deployment: Deployment::new(submitter.clone()),
            finality: FinalityTracker::new(node.clone(), journal.clone(), node.poll_interval()),
            readiness: ReadinessCache::new(READINESS_TTL),
            batch_size: settings.batch_size,
            gas,
            caught_up: watch::Sender::new(false),
            wake: Arc::new(Notify::new()),
            node,
            journal,
            accounts,
            submitter,
            costs,
            backoff,
        });
        engine.deployment.look_up_early().await;
        // Those who offer permits ask what is known then.
        engine.permit_methods().await;
        reconciler::spawn(&engine, settings.reconcile_interval, engine.wake.clone());
        engine
    }

    pub(crate) fn network(&self) -> Network {
        self.node.network()
    }

    pub(crate) const fn journal(&self) -> &Journal {
        &self.journal
    }

    /// Returns the addresses of the settlement accounts.
    pub(crate) fn addresses(&self) -> impl Iterator<Item = Address> {
        self.accounts.iter().map(Account::address)
    }

    pub(crate) const fn node(&self) -> &Arc<Node> {
        &self.node
    }

    /// Returns the sender of all transactions.
    pub(crate) const fn submitter(&self) -> &Arc<Submitter> {
        &self.submitter
    }

    pub(crate) const fn costs(&self) -> &Arc<Costs> {
        &self.costs
    }

    /// Returns the kinds of permits that the chain has the contracts for.
    pub(crate) async fn permit_methods(&self) -> Vec<TransferMethod> {
        for permit in self.each_permit_method().filter_map(|method| method.permit(Address::ZERO)) {
            let _ = self.node.takes_permit(&permit).await;
        }
        self.known_permit_methods()
    }

    /// Returns those that it was seen to have the contracts for. Does not ask.
    pub(crate) fn known_permit_methods(&self) -> Vec<TransferMethod> {
        let is_known = |permit: Permit| self.node.is_known_to_take(&permit);
        self.each_permit_method().filter(|method| method.permit(Address::ZERO).is_some_and(is_known)).collect()
    }

    fn each_permit_method(&self) -> impl Iterator<Item = TransferMethod> {
        TransferMethod::by_permit(self.addresses().next().unwrap_or_default()).into_iter()
    }

    /// Returns the lowest balance of a settlement account, in wei.
    pub(crate) async fn lowest_balance(&self) -> Result<U256, FacilitatorError> {
        Ok(self.accounts.balances().await?.into_iter().min().unwrap_or_default())
    }

    /// Deploys the batch settler if it is not there. Returns the transaction that did.
    pub(crate) async fn deploy_batch_settler(&self) -> Result<Option<B256>, FacilitatorError> {
        self.deployment.deploy().await
    }

    /// Starts a pass of reconciliation now.
    pub(crate) fn reconcile_now(&self) {
        self.wake.notify_one();
    }

    /// Returns the totals since the start.
    pub(crate) fn stats(&self) -> SettlementStats {
        let (in_flight, pending) = (self.accounts.in_flight() as u64, self.queue.count() as u64);
        SettlementStats { in_flight, pending, ..self.costs.totals() }
    }

    /// Takes no further payments, and returns when all that were begun or are owed have ended. Returns `false` if the ledger did not say
    /// which are owed.
    pub(crate) async fn drain(self: &Arc<Self>) -> bool {
        self.queue.close();
        // Reconciliation may not have found the payments yet that were deferred a moment ago.
        let fulfilment = vec![Fulfilment::Produced, Fulfilment::Delivered];
        let owed = self.reconcile_all(Listing { fulfilment, ..Listing::of([SettlementState::Due]) }).await;
        if let Err(error) = &owed {
            tracing::warn!(%error, "owed payments could not be settled before the shutdown");
        }
        self.queue.drained().await;
        owed.is_ok()
    }

    /// Fails if a payment could not be settled now, as far as that is known without asking the node.
    pub(crate) fn check_open(&self) -> Result<(), FacilitatorError> {
        self.queue.check_open()?;
        self.queue.check_room()?;
        self.node.check_known_fees()?;
        self.node.check_known_receipts()?;
        self.accounts.check_known_balances(Lane::Payment)
    }

    /// Fails if this account, which alone may send a payment, could not pay for gas a moment ago. Does not ask the node.
    pub(crate) fn check_sender(&self, account: Address) -> Result<(), FacilitatorError> {
        let balance = self.accounts.get(account).and_then(|account| account.resting(Lane::Payment));
        balance.map_or(Ok(()), |balance| Err(FacilitatorError::InsufficientGas { balance }))
    }

    /// Fails if settling this amount is expected to cost more than it brings in, and losses are refused.
    pub(crate) async fn check_loss(&self, amount: U256) -> Result<(), FacilitatorError> {
        if !self.costs.refuses_losses() {
            return Ok(());
        }
        let gas_price = self.node.gas_price().await?;
        if self.costs.is_loss(gas_price, amount) {
            tracing::warn!(%gas_price, %amount, "a payment is refused: gas costs more");
            return Err(FacilitatorError::Busy {
                what: "gas costs more than the payment",
                retry_after: Duration::from_secs(10),
            });
        }
        Ok(())
    }

    /// Returns the reason if payments like this one of its payer are refused now, since earlier ones were sent and did not pay.
    pub(crate) fn check_payer(&self, payment: &Prechecked) -> Option<Rejection> {
        self.backoff.rejection(payment.authorization().from).or_else(|| self.confirmation.rejection(payment))
    }

    /// Simulates the payment in the newest block. Returns what the chain shows, and why the payment would fail, if it would.
    pub(crate) async fn verify(
        &self,
        payment: &Prechecked,
    ) -> Result<(ProbeResult, Option<Rejection>), FacilitatorError> {
        Ok(self.node.verify(payment).await?)
    }

    /// Settles a payment. The settlement does not end with the caller.
    pub(crate) async fn settle(
        self: &Arc<Self>,
        payment: Prechecked,
        verified: Verified,
    ) -> Result<SettlementOutcome, FacilitatorError> {
        let (sender, outcome) = oneshot::channel();
        if !self.enqueue(payment, verified, Some(sender))? {
            // Reconciliation was faster, and records the outcome in the ledger. It is not known whether the payment is charged.
            return Ok(SettlementOutcome::Unknown { transaction: None });
        }
        // The sender is dropped without an outcome only if the runtime shuts down. Then it is not known how far the settlement came.
        outcome.await.unwrap_or(Ok(SettlementOutcome::Unknown { transaction: None }))
    }

    /// Adds a payment to the queue. Returns `false` if it is in progress already.
    fn enqueue(
        self: &Arc<Self>,
        payment: Prechecked,
        verified: Verified,
        outcome: Option<OutcomeSender>,
    ) -> Result<bool, FacilitatorError> {
        let added = self.queue.add(payment, verified, outcome)?;
        if added == Added::MustServe {
            tokio::spawn(self.clone().serve());
        }
        Ok(added != Added::InProgress)
    }

    /// Adds a payment that nobody waits for. If the queue is full, reconciliation finds the payment again. If a failure is recorded
    /// meanwhile, by whatever process, the ledger refuses its transaction.
    fn enqueue_unasked(self: &Arc<Self>, record: &Record) -> Result<(), FacilitatorError> {
        match self.enqueue(record.payment(), Verified::default(), None) {
            Ok(_) | Err(FacilitatorError::Busy { .. }) => Ok(()),
            Err(error) => Err(error),
        }
    }

    fn put_back(self: &Arc<Self>, payments: Vec<QueuedPayment>) {
        if self.queue.put_back(payments) {
            tokio::spawn(self.clone().serve());
        }
    }

    /// Begins transactions for as long as payments wait.
    async fn serve(self: Arc<Self>) {
        // It is kept from one look at the queue to the next: whoever joins the line again is its last.
        let mut placing = pin!(self.place());
        while !self.queue.is_served_out() {
            let place = timeout(Duration::from_secs(1), placing.as_mut()).await.ok();
            for queued in self.queue.take_expired() {
                let journal = self.journal.clone();
                // Not here: a place that is given meanwhile would stay unused.
                tokio::spawn(async move {
                    let error = FacilitatorError::Busy { what: "the settlement key", retry_after: RETRY };
                    queued.give_up(&journal, error).await;
                });
            }
            let Some(place) = place else { continue };
            placing.set(self.place());
            let can_batch = self.batch_size > 1 && self.deployment.is_there().await;
            let most = if can_batch { self.batch_size } else { 1 };
            if most > 1 {
                self.queue.gather(most, self.node.block_time()).await;
            }
            let payments = self.queue.take(most, self.gas.in_batch);
            if !payments.is_empty() {
                tokio::spawn(self.clone().settle_together(payments, place));
            }
        }
    }

    /// Waits for a place in the window of an account, once the payments of an earlier process have been reconciled.
    async fn place(&self) -> Place {
        let mut caught_up = self.caught_up.subscribe();
        // The sender is in the engine, so it is not closed.
        let _ = caught_up.wait_for(|caught_up| *caught_up).await;
        loop {
            if let Ok(place) = self.submitter.enter(Urgency::payment()).await {
                return place;
            }
            sleep(self.node.poll_interval()).await;
        }
    }

    /// Settles payments in one transaction, after verifying those again that were verified long ago.
    async fn settle_together(self: Arc<Self>, payments: Vec<QueuedPayment>, place: Place) {
        let are_several = payments.len() > 1;
        let (mut fit, stale): (Vec<_>, Vec<_>) = payments.into_iter().partition(|queued| self.is_fresh(queued));
        let mut verifying = JoinSet::new();
        for queued in stale {
            let (engine, span) = (self.clone(), queued.span.clone());
            verifying.spawn(async move { engine.verify_again(queued).await }.instrument(span));
        }
        while let Some(verified) = verifying.join_next().await {
            fit.extend(verified.ok().flatten());
        }
        if are_several {
            // Some turned out to need a transaction of their own.
            let (shared, mut alone): (Vec<_>, Vec<_>) =
                fit.into_iter().partition(|queued| queued.batch_entry(self.gas.in_batch).is_some());
            fit = shared;
            if fit.is_empty() && !alone.is_empty() {
                fit.push(alone.remove(0));
            }
            self.put_back(alone);
        }
        if fit.is_empty() {
            return;
        }
        let Some((fit, place)) = self.enter_for(fit, place).await else { return };
        let mut transfers = Transfers::new(fit, self.gas);
        self.queue.transaction_begins();
        let Attempt { result, watched } = self.submitter.make(place, &mut transfers).await;
        if matches!(result, AttemptResult::Unpaid { .. })
            && transfers.payments.iter().any(|queued| queued.attempts >= MAX_ATTEMPTS)
        {
            // Others may always be in flight, and one payment may cost little enough beside them.
            transfers.must_be_alone();
        }
        let payments = transfers.payments;
        self.queue.transaction_ended();
        match result {
            AttemptResult::Included(receipt) => self.finish_included(payments, &receipt).await,
            AttemptResult::Retry | AttemptResult::Unpaid { .. } => self.retry(payments).await,
            AttemptResult::Failed(error) => {
                for queued in payments {
                    queued.give_up(&self.journal, error.clone()).await;
                }
            }
            AttemptResult::Unresolved => {}
        }
        // Until here the transactions count as followed.
        drop(watched);
    }

    /// Returns the payments with a place of the account that has to send them. A permit may name it, and is settled alone; the account may be
    /// busy for long, so the permit is verified again then. Returns `None` if the settlement has ended.
    async fn enter_for(&self, mut payments: Vec<QueuedPayment>, place: Place) -> Option<(Vec<QueuedPayment>, Place)> {
        let permit = payments.first().and_then(|queued| queued.payment.terms().permit());
        let Some(account) = permit.and_then(|permit| permit.facilitator) else { return Some((payments, place)) };
        let queued = payments.pop()?;
        match self.submitter.exchange(place, account, queued.deadline).await {
            Ok(place) if self.is_fresh(&queued) => Some((vec![queued], place)),
            Ok(place) => Some((vec![self.verify_again(queued).await?], place)),
            Err(error) => {
                queued.give_up(&self.journal, error).await;
                None
            }
        }
    }

    fn is_fresh(&self, queued: &QueuedPayment) -> bool {
        queued.left_out_of.is_none()
            && queued.verified.gas.is_some()
            && age(self.journal.now(), queued.verified.at) <= FRESH
            && self.backoff.rejection(queued.key().payer).is_none()
    }

    /// Returns the payment if a transaction may be signed for it. Otherwise its settlement has ended.
    async fn verify_again(&self, mut queued: QueuedPayment) -> Option<QueuedPayment> {
        let at = self.journal.now();
        let (result, rejection) = if let Some(batch) = queued.left_out_of {
            let Some(verified) = self.confirmation.verify_unpaid(&queued.payment, batch).await else {
                let unknown = queued.unknown();
                queued.finish(&self.journal, Ok(unknown)).await;
                return None;
            };
            verified
        } else {
            match self.node.verify(&queued.payment).await {
                Ok(verified) => verified,
                Err(failure) => {
                    queued.give_up(&self.journal, failure.into()).await;
                    return None;
                }
            }
        };
        if result.used {
            let found = self.confirmation.explain_use(&queued.payment, queued.seen_unused, &result, None).await;
            let outcome = found.unwrap_or_else(|error| {
                let key = queued.key();
                tracing::warn!(%error, payer = %key.payer, nonce = %key.nonce, "could not find the transaction that used the authorization");
                // The payment may have been made.
                queued.unknown()
            });
            queued.finish(&self.journal, Ok(outcome)).await;
            return None;
        }
        if queued.left_out_of.is_some() && rejection.is_some() {
            self.backoff.note_revert(queued.key().payer);
        }
        let outcome = match rejection.or_else(|| self.backoff.rejection(queued.key().payer)) {
            None => {
                queued.verified =
                    Verified { gas: Some(result.gas), at, contract_wallet: result.payer_has_code(), ..queued.verified };
                return Some(queued);
            }
            // A transaction of an earlier attempt may still be executed.
            Some(_) if !queued.has_no_live_transaction() => queued.unknown(),
            Some(Rejection { reason, detail }) => SettlementOutcome::Failed {
                reason,
                detail,
                transaction: queued.ineffective.last().copied(),
                dead: false,
            },
        };
        queued.finish(&self.journal, Ok(outcome)).await;
        None
    }

    /// Ends the settlement of the payments of an included transaction. Those that a batch did not pay are verified again, and get a
    /// transaction of their own.
    async fn finish_included(self: &Arc<Self>, payments: Vec<QueuedPayment>, receipt: &Receipt) {
        let are_several = payments.len() > 1;
        let (paid, unpaid): (Vec<_>, Vec<_>) =
            payments.into_iter().partition(|queued| queued.expected().is_paid_by(receipt));
        let fee = receipt.cost().checked_div(U256::from(paid.len()));
        telemetry::shared(self.network(), paid.len() + unpaid.len());
        let amounts: Vec<_> = paid.iter().map(|queued| queued.expected().value).collect();
        self.costs.count_settled(receipt, &amounts);
        // All at once, so that payments that nobody awaits share the ledger's commits.
        let mut finishing = JoinSet::new();
        for queued in paid {
            let (confirmation, receipt) = (self.confirmation.clone(), receipt.clone());
            finishing.spawn(async move { confirmation.finish_paid(queued, &receipt, fee).await });
        }
        finishing.join_all().await;
        if !are_several {
            for queued in unpaid {
                self.confirmation.finish_unpaid(queued, receipt).await;
            }
            return;
        }
        let mut alone = Vec::new();
        for mut queued in unpaid {
            let transaction = receipt.transaction_hash;
            tracing::info!(parent: &queued.span, %transaction, "in a batch that did not pay it");
            queued.left_out_of = Some(transaction);
            queued.ineffective.push(transaction);
            alone.push(queued);
        }
        self.retry(alone).await;
    }

    /// Returns payments to the queue, unless transactions were signed for them often enough.
    async fn retry(self: &Arc<Self>, payments: Vec<QueuedPayment>) {
        let (exhausted, again): (Vec<_>, Vec<_>) =
            payments.into_iter().partition(|queued| queued.attempts >= MAX_ATTEMPTS);
        self.put_back(again);
        for queued in exhausted {
            let error = FacilitatorError::Busy { what: "the settlement key or its fees", retry_after: RETRY };
            queued.give_up(&self.journal, error).await;
        }
    }

    /// Returns the outcome of a payment that an earlier call or process did not follow to its end.
    pub(crate) async fn reconcile(&self, record: &Record) -> Result<SettlementOutcome, FacilitatorError> {
        // This comes first: later, the transaction may be in a block after the one that is looked at.
        let will_be_resent = self.recovery.will_resend(record).await?;
        let found =
            self.confirmation.find_outcome(record, |transaction| self.submitter.is_watched(transaction)).await?;
        match found {
            // A transaction that no node has, and that is sent again, may pay yet.
            SettlementOutcome::Failed { dead: false, transaction, .. }
                if will_be_resent || self.is_being_settled(&record.key).await? =>
            {
                Ok(SettlementOutcome::Unknown { transaction })
            }
            outcome => Ok(outcome),
        }
    }

    /// Returns `true` if this process or another one settles the payment now. Transactions of another process may be unknown to the node.
    /// This comes last, so that settlements count that began during the look at the chain.
    async fn is_being_settled(&self, key: &PaymentKey) -> Result<bool, FacilitatorError> {
        if self.queue.is_in_progress(key) {
            return Ok(true);
        }
        let record = self.journal.get(key).await?;
        let (by, now) = (self.journal.process_id(), self.journal.now());
        Ok(record.is_some_and(|record| !record.may_be_settled_by(by, now)))
    }

    /// Returns whether payments could be settled now, and why not.
    pub(crate) async fn readiness(&self) -> Readiness {
        let check = async {
            let readiness = self.check_readiness().await;
            telemetry::ready(self.network(), readiness.is_ready());
            readiness
        };
        self.readiness.get_or_check(check).await
    }

    async fn check_readiness(&self) -> Readiness {
        let mut readiness = Readiness::of_ledger(&**self.journal.ledger()).await;
        let mut note = |reason| readiness.reasons.push(reason);
        if self.queue.is_closed() {
            note(NotReady::ShuttingDown);
        }
        if !*self.caught_up.borrow() {
            note(NotReady::CatchingUp);
        }
        if self.queue.check_room().is_err() {
            note(NotReady::Backlog { waiting: self.queue.count() });
        }
        let kept = if self.submitter.keeps_for_claims() { KEPT_GAS } else { 0 };
        readiness.reasons.extend(self.accounts.cannot_send(&self.node, MIN_GAS.saturating_add(kept.into())).await);
        readiness
    }

    /// Reconciles open payments. Those of an earlier process come first. One that cannot be reconciled now does not delay the others:
    /// a transaction that is signed for it later can pay no more than once.
    async fn reconcile_open(self: &Arc<Self>, has_caught_up: bool) -> Result<(), FacilitatorError> {
        if !has_caught_up {
            self.reconcile_all(Listing::of([SettlementState::Submitted, SettlementState::Unknown])).await?;
            self.caught_up.send_replace(true);
        }
        self.reconcile_all(Listing::of(OPEN)).await
    }

    async fn reconcile_all(self: &Arc<Self>, listing: Listing) -> Result<(), FacilitatorError> {
        reconciler::reconcile_listed(self, Listing { network: Some(self.network()), ..listing }).await
    }

    async fn try_follow_settled(self: &Arc<Self>) -> Result<(), FacilitatorError> {
        let Some(head) = self.finality.head(self.recovery.has_unfinal()).await? else { return Ok(()) };
        if head.is_reorged || self.recovery.has_lost_transactions().await? {
            tracing::warn!(head = head.number(), "the chain was reorganized");
            let failed = self.recovery.resend_after_reorg().await;
            if failed < self.accounts.len() {
                self.finality.check_settled(self, None).await?;
            }
            if failed > 0 {
                // The next pass sees the same reorganization, and does the rest.
                return Ok(());
            }
        }
        if self.finality.advance(self, head).await?.is_some() {
            self.recovery.forget_final().await?;
        }
        Ok(())
    }
}

impl Reconcile for Engine {
    const CONCURRENCY: usize = 16;

    fn journal(&self) -> &Journal {
        &self.journal
    }

    fn serves(&self, network: Network) -> bool {
        network == self.network()
    }

    fn has_room(&self) -> bool {
        self.queue.check_room().is_ok()
    }

    async fn run_pass(self: &Arc<Self>) {
        let has_caught_up = *self.caught_up.borrow();
        let failed = self.recovery.resend(!has_caught_up).await;
        // If the node answered for no account, it would not answer for the payments either.
        if failed < self.accounts.len()
            && let Err(error) = self.reconcile_open(has_caught_up).await
        {
            tracing::warn!(%error, "open payments could not be reconciled");
        }
        self.accounts.warn_of_low_balances(&self.costs.totals()).await;
        self.accounts.recheck_resting().await;
        if self.node.check_known_fees().is_err() {
            // Nothing is verified until the fees are looked up again.
            let _ = self.node.fees().await;
        }
        if self.node.check_known_receipts().is_err() {
            // Nor until a receipt is given.
            let _ = self.node.rpc().any_receipt().await;
        }
    }

    async fn reconcile_payment(self: &Arc<Self>, record: Record) -> Result<(), FacilitatorError> {
        if self.queue.is_in_progress(&record.key) {
            return Ok(());
        }
        let now = self.journal.now();
        let is_expired = record.terms.is_over(&record.authorization, now);
        let is_unsent = record.settlement == Settlement::Due && record.transactions.is_empty() && !is_expired;
        // A payment that was never tried takes no claim: if another process is as fast, the ledger takes one transaction.
        let needs_claim = !is_unsent || record.last_failure.is_some();
        if needs_claim && !self.journal.claim(&record, LONGEST_PAUSE).await? {
            return Ok(());
        }
        if is_unsent {
            return if self.journal.is_owed(&record).await? { self.enqueue_unasked(&record) } else { Ok(()) };
        }
        let outcome = self.reconcile(&record).await?;
        let is_due = matches!(outcome, SettlementOutcome::Failed { dead: false, .. }) && !is_expired;
        if is_due && self.journal.is_owed(&record).await? {
            // No failure is recorded, of which the payer could be told before it is charged.
            return self.enqueue_unasked(&record);
        }
        let has_failed_before = record.settlement == Settlement::Due && record.last_failure.is_some();
        if has_failed_before && matches!(outcome, SettlementOutcome::Failed { dead: false, .. }) {
            // One failure more would refuse the settlement of a payer who presents the payment again and knows of those on record.
            return Ok(());
        }
        self.journal.record_outcome(&record.key, &outcome, &record.transactions).await;
        if matches!(outcome, SettlementOutcome::Unknown { .. }) && now.saturating_sub(record.reserved_at) < YOUNG {
            // The transaction may be in the next block.
            self.journal.claim_briefly(&record.key).await;
        }
        Ok(())
    }

    async fn follow_settled(self: &Arc<Self>) {
        if let Err(error) = self.try_follow_settled().await {
            tracing::warn!(%error, "settled payments could not be followed");
        }
    }

    fn count_reorged(&self) {
        self.costs.count_reorged();
    }
}

debug_fields!(Engine |this| { network: this.network(), accounts: this.accounts });
