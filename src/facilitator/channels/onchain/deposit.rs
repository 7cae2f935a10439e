//! Deposits: checked, executed once, and found on the chain if they were executed before.

use std::{sync::Arc, time::Duration};

use alloy_primitives::{Address, B256, Bytes, U256, keccak256};
use alloy_sol_types::SolCall;
use tokio::time::{Instant, sleep, timeout};

use super::{
    Attempts, Inner,
    checks::{Payer, Promise},
    sender::Turn,
    unavailable,
};
use crate::{
    chain::{
        authorization_use::{self, AuthorizationUse},
        escrow::{self, DepositState},
        receipt_check::ExpectedTransfer,
        rpc::Receipt,
    },
    eip3009::TokenDomain,
    facilitator::{
        FacilitatorError,
        channels::{ChannelError, Executed, gas},
        single_flight::NoResult,
    },
    settlement::line::Urgency,
    vouchers::{
        ChannelConfig, ChannelConfigError, ChannelId, ChannelObservation, ChannelPayload, Deposit,
        DepositAuthorization, Escrow, Voucher, abi::BatchSettlement, reason,
    },
};

/// How long, in seconds, a deposit must still be executable: time to be in a block.
const MIN_TIME_LEFT: u64 = 6;
/// How often the node is asked again if it does not answer when a deposit has its place.
const READS_IN_TURN: usize = 4;

/// How often a deposit is checked again that could not be sent at once.
const RECHECKS: usize = 3;

/// How far a deposit is.
#[derive(Default)]
struct Progress {
    attempts: Attempts,
    /// `None` until the deposit may be sent, and after it was.
    turn: Option<Turn>,
    /// Kept from the first check on that it passed.
    promise: Option<Promise>,
    /// How often it was checked again since it could not be sent at once.
    rechecks: usize,
}

/// Executes a deposit, or waits for the run of the same deposit that is under way. It may still be executed after the time to confirm it.
pub(super) async fn execute(
    inner: &Arc<Inner>,
    config: &ChannelConfig,
    voucher: &Voucher,
    deposit: &Deposit,
) -> Result<Executed, ChannelError> {
    // All that a run depends on: another amount or signature under the same nonce is another deposit.
    let input = call(config, deposit);
    let run = {
        let (inner, config, voucher, deposit) = (inner.clone(), *config, voucher.clone(), deposit.clone());
        move || async move {
            let (mut progress, mut failed) = (Progress::default(), 0);
            loop {
                match inner.execute_deposit(&config, voucher.clone(), &deposit, &mut progress).await {
                    Err(ChannelError::Unavailable(_)) if progress.turn.is_some() && failed < READS_IN_TURN => {
                        failed += 1
                    }
                    done => return done,
                }
                sleep(inner.node.poll_interval()).await;
            }
        }
    };
    // To send it, and to wait until it is deep enough.
    match timeout(2 * inner.rules.timeout, inner.deposits.run(keccak256(&input), run)).await {
        Ok(Ok(result)) => result,
        Ok(Err(NoResult::Full)) => {
            let retry_after = Duration::from_secs(2);
            Err(FacilitatorError::Busy { what: "deposits", retry_after }.into())
        }
        Ok(Err(NoResult::Lost)) | Err(_) => Err(ChannelError::Pending { transaction: None }),
    }
}

impl Inner {
    pub(super) async fn verify_deposit(
        &self,
        config: &ChannelConfig,
        deposit: &Deposit,
    ) -> Result<ChannelObservation, ChannelError> {
        let (channel, nonce) = self.check_config(config, deposit)?;
        let _check = self.checks.enter().await?;
        self.check_receipts().await?;
        let state = self.deposit_state(channel, config, nonce).await?;
        if state.is_used {
            return Err(ChannelError::rejected(
                reason::DEPOSIT_SIMULATION_FAILED,
                "the deposit's authorization is used or cancelled",
            ));
        }
        match self.check_deposit(config, deposit, &state, gas::DEPOSIT).await {
            Err(ChannelError::Rejected { .. }) if self.is_pending(config, nonce).await => {
                Err(ChannelError::Pending { transaction: None })
            }
            checked => checked.map(|_| state.channel),
        }
    }

    async fn execute_deposit(
        &self,
        config: &ChannelConfig,
        voucher: Voucher,
        deposit: &Deposit,
        Progress { attempts, turn, promise, rechecks }: &mut Progress,
    ) -> Result<Executed, ChannelError> {
        let (channel, nonce) = self.check_config(config, deposit)?;
        let payload = ChannelPayload::Deposit { channel_config: *config, voucher, deposit: deposit.clone() };
        self.sender.outlive_predecessors().await?;
        // An earlier request of the same may have left it under way. Copies that wait for that keep no place from others.
        let mut left = self.sender.join(nonce).await;
        loop {
            let joined = left.take();
            // In its turn it is one of few.
            let check = match (&turn, &joined) {
                (None, None) => Some(self.checks.enter().await?),
                _ => None,
            };
            let state = attempts.read(self.deposit_state(channel, config, nonce).await)?;
            if state.is_used && joined.is_none() {
                drop(check);
                return self.find_deposit(config, deposit, nonce, state.channel).await;
            }
            if turn.is_none() {
                // A contract wallet can make deposits look good and then fail.
                if attempts.has_reverted {
                    self.reverts.note_revert(config.payer);
                }
                let what = "deposits of a payer whose last ones reverted";
                attempts.next_for(config.payer, &self.deposit_backoff, what)?;
            }
            let joined = match joined {
                Some(sent) => Some(sent),
                None => self.sender.join(nonce).await,
            };
            let sent = match joined {
                Some(sent) => Ok(sent?),
                None => {
                    let most = attempts.gas_left(gas::DEPOSIT);
                    let limit = match self.check_deposit(config, deposit, &state, most).await {
                        // The deposit may have been made a moment ago, by another process.
                        Err(refused @ ChannelError::Rejected { .. }) => {
                            let now = self.deposit_state(channel, config, nonce).await?;
                            if now.is_used {
                                drop(check);
                                return self.find_deposit(config, deposit, nonce, now.channel).await;
                            }
                            // Or its transaction is in the pool, and the node simulates after that.
                            return match self.is_pending(config, nonce).await {
                                true => Err(ChannelError::Pending { transaction: None }),
                                false => Err(refused),
                            };
                        }
                        checked => checked?,
                    };
                    // In its turn, too: others may have reverted while it waited.
                    if let Err(refused) = self.check_payer(config.payer, &state.channel).await {
                        *turn = None;
                        return Err(refused);
                    }
                    // What is charged has to be claimed with what is left, and it must be seen that the deposit was made.
                    let ready = async || {
                        self.check_spare_gas().await?;
                        self.check_receipts().await
                    };
                    if let Err(kept) = ready().await {
                        *turn = None;
                        return Err(kept);
                    }
                    if promise.is_none() {
                        *promise = Some(self.promises.add(config.payer, deposit.amount, state.payer_balance)?);
                    }
                    drop(check);
                    if !self.enter(turn, Urgency::deposit(deposit.amount)).await? {
                        continue;
                    }
                    self.send(turn, nonce, (call(config, deposit), limit), payload.clone(), state.channel.block).await
                }
            };
            let is_busy = matches!(sent, Err(ChannelError::Unavailable(FacilitatorError::Busy { .. })));
            if is_busy && self.sender.may_send_soon() && *rechecks < RECHECKS {
                *rechecks += 1;
                continue;
            }
            let reverted = reason::DEPOSIT_TRANSACTION_FAILED;
            let Some(receipt) = attempts.succeeded(sent, reverted, gas::DEPOSIT) else { continue };
            self.reverts.note_executed(config.payer);
            let receipt = self.await_depth(receipt, deposit.amount).await?;
            let Some(event) = deposited(&receipt, channel, deposit.amount) else {
                return Err(ChannelError::Pending { transaction: Some(receipt.transaction_hash) });
            };
            let observed = self.observe_at(&[channel], receipt.block()).await.and_then(|mut all| all.pop());
            let observed = observed.unwrap_or_else(|| {
                let mut after = ChannelObservation { block: receipt.block(), ..state.channel };
                after.state.balance = event.newBalance;
                after
            });
            return Ok(Executed { transaction: receipt.transaction_hash, amount: deposit.amount, observed });
        }
    }

    /// Checks what needs no chain. Returns the channel and the authorization's nonce.
    fn check_config(&self, config: &ChannelConfig, deposit: &Deposit) -> Result<(ChannelId, B256), ChannelError> {
        self.asset(config.token)?;
        config.validate().map_err(|error| {
            let reason = match error {
                ChannelConfigError::WithdrawDelay(_) => reason::WITHDRAW_DELAY_OUT_OF_RANGE,
                ChannelConfigError::ZeroAddress("receiverAuthorizer") => reason::RECEIVER_AUTHORIZER_MISMATCH,
                ChannelConfigError::ZeroAddress(_) => reason::DEPOSIT_PAYLOAD,
            };
            ChannelError::rejected(reason, error.to_string())
        })?;
        if deposit.amount == 0 {
            return Err(ChannelError::rejected(reason::DEPOSIT_PAYLOAD, "a deposit of nothing"));
        }
        let DepositAuthorization::Erc3009 { salt, .. } = &deposit.authorization;
        let channel = self.escrow.channel_id(config);
        Ok((channel, Deposit::nonce(channel, *salt)))
    }

    async fn deposit_state(
        &self,
        channel: ChannelId,
        config: &ChannelConfig,
        nonce: B256,
    ) -> Result<DepositState, ChannelError> {
        let network = self.node.network();
        let state =
            escrow::deposit_state(self.node.rpc(), network, channel, config, nonce).await.map_err(unavailable)?;
        self.check_age(state.time)?;
        Ok(state)
    }

    /// Checks that a deposit whose authorization is unused would be executed now. Returns the gas limit of its transaction.
    async fn check_deposit(
        &self,
        config: &ChannelConfig,
        deposit: &Deposit,
        state: &DepositState,
        most_gas: u64,
    ) -> Result<u64, ChannelError> {
        let DepositAuthorization::Erc3009 { valid_after, valid_before, signature, .. } = &deposit.authorization;
        let now = self.clock.now();
        if *valid_before < U256::from(now.saturating_add(MIN_TIME_LEFT)) {
            return Err(ChannelError::rejected(
                reason::PAYLOAD_AUTHORIZATION_VALID_BEFORE,
                format!("the deposit's authorization is valid before {valid_before}, and it is {now}"),
            ));
        }
        if *valid_after > U256::from(now) {
            return Err(ChannelError::rejected(
                reason::PAYLOAD_AUTHORIZATION_VALID_AFTER,
                format!("the deposit's authorization is valid after {valid_after}, and it is {now}"),
            ));
        }
        if state.payer_balance < U256::from(deposit.amount) {
            return Err(ChannelError::rejected(
                reason::INSUFFICIENT_BALANCE,
                format!("the payer holds {} of the {} to deposit", state.payer_balance, deposit.amount),
            ));
        }
        match self.simulate(self.sender(), &call(config, deposit), most_gas).await? {
            Ok(limit) => Ok(limit),
            Err(why) => {
                let domain = TokenDomain::of(self.asset(config.token)?);
                let digest = deposit.digest(config.payer, state.channel.state.channel_id, &domain);
                let is_signed = signature.recover(digest).is_ok_and(|signer| signer == config.payer);
                let reason = match is_signed {
                    true => reason::DEPOSIT_SIMULATION_FAILED,
                    false => reason::RECEIVE_AUTHORIZATION_SIGNATURE,
                };
                Err(ChannelError::rejected(reason, why))
            }
        }
    }

    /// Fails if no deposit is sent for this payer, since so many of others reverted.
    async fn check_payer(&self, payer: Address, channel: &ChannelObservation) -> Result<(), ChannelError> {
        if !self.reverts.are_many() {
            return Ok(());
        }
        // What is in the channel was deposited by its payer, perhaps before this process began.
        let has_deposited = channel.state.balance > 0 && !self.deposit_backoff.is_known(payer);
        let payer = match self.reverts.is_proven(payer) || has_deposited {
            true => Payer::Proven,
            false if self.node.rpc().code(payer).await.map_err(unavailable)?.is_empty() => Payer::New,
            false => Payer::NewWithCode,
        };
        self.reverts.check(payer)
    }

    /// Fails if the node refuses receipts: no deposit could be confirmed. One that refused the last ones is asked again.
    async fn check_receipts(&self) -> Result<(), ChannelError> {
        if self.node.check_known_receipts().is_err() {
            let _ = self.node.rpc().any_receipt().await;
        }
        self.node.check_known_receipts().map_err(unavailable)
    }

    /// Returns `true` if the deposit's authorization is used by a transaction in the node's pool, as far as the node shows that.
    async fn is_pending(&self, config: &ChannelConfig, nonce: B256) -> bool {
        escrow::is_deposit_pending(self.node.rpc(), config, nonce).await
    }

    /// Waits until as many blocks are on top of a deposit's as its amount requires. Returns its receipt then, which may be of another block.
    async fn await_depth(&self, receipt: Receipt, amount: u128) -> Result<Receipt, ChannelError> {
        let depth = self.rules.depths.required(U256::from(amount));
        if depth == 0 {
            return Ok(receipt);
        }
        let (rpc, transaction) = (self.node.rpc(), receipt.transaction_hash);
        let deadline = Instant::now() + self.rules.timeout;
        while Instant::now() < deadline {
            let head =
                rpc.block("latest").await.map_or(0, |head| head.map_or(0, |head| head.number.saturating_to::<u64>()));
            // Asked for after the head: it was still there when the head was this high.
            if let Ok(Some(now)) = rpc.receipt(transaction).await
                && head >= now.block().saturating_add(depth)
            {
                return Ok(now);
            }
            sleep(self.node.poll_interval()).await;
        }
        Err(ChannelError::Pending { transaction: Some(transaction) })
    }

    /// Finds the transaction that used a deposit's authorization. Only the collector can use it, and only to fill this channel.
    async fn find_deposit(
        &self,
        config: &ChannelConfig,
        deposit: &Deposit,
        nonce: B256,
        now: ChannelObservation,
    ) -> Result<Executed, ChannelError> {
        let expected = ExpectedTransfer {
            token: config.token,
            payer: config.payer,
            payee: Escrow::ERC3009_COLLECTOR,
            value: U256::from(deposit.amount),
            nonce,
            permit: None,
        };
        let rpc = self.node.rpc();
        let found = authorization_use::find_newest(rpc, &expected, 0, now.block).await.map_err(unavailable)?;
        let transaction = match found {
            AuthorizationUse::Paid { transaction, .. } | AuthorizationUse::Otherwise { transaction, .. } => transaction,
            AuthorizationUse::NotFound { .. } => return Err(not_found()),
        };
        let receipt = rpc.receipt(transaction).await.map_err(unavailable)?.ok_or_else(not_found)?;
        let receipt = self.await_depth(receipt, deposit.amount).await?;
        match deposited(&receipt, now.state.channel_id, deposit.amount) {
            Some(_) => Ok(Executed { transaction, amount: deposit.amount, observed: now }),
            None => Err(ChannelError::rejected(
                reason::DEPOSIT_SIMULATION_FAILED,
                "the deposit's authorization was cancelled, or used for another amount",
            )),
        }
    }
}

fn not_found() -> ChannelError {
    FacilitatorError::Unreachable {
        what: "the transaction that used the deposit's authorization",
        retry_after: Duration::from_secs(2),
    }
    .into()
}

fn deposited(receipt: &Receipt, channel: ChannelId, amount: u128) -> Option<BatchSettlement::Deposited> {
    let is_expected =
        |event: &BatchSettlement::Deposited| event.channelId == channel.digest() && event.amount == amount;
    escrow::events(receipt).find(is_expected).filter(|_| receipt.succeeded())
}

fn call(config: &ChannelConfig, deposit: &Deposit) -> Bytes {
    let call = BatchSettlement::depositCall {
        config: config.into(),
        amount: deposit.amount,
        collector: Escrow::ERC3009_COLLECTOR,
        collectorData: deposit.collector_data(),
    };
    call.abi_encode().into()
}
