//! The settlement accounts: their keys, their nonces, and their balances for gas.
//!
//! Nodes keep about 16 waiting transactions per account, and none of them is included before all lower nonces are. So an account has a
//! window of transactions in flight, and always hands out its lowest free nonce. It knows when a nonce in the middle was given back:
//! nothing above such a gap can be included until the gap is filled.

use std::{
    collections::BTreeSet,
    fmt,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use alloy_consensus::{SignableTransaction, TxEip1559, TxEnvelope};
use alloy_eips::eip2718::Encodable2718;
use alloy_network::TxSigner;
use alloy_primitives::{Address, B256, Bytes, Signature, U256};
use tokio::{
    sync::{Mutex as AsyncMutex, MutexGuard as AsyncMutexGuard, Notify, OwnedSemaphorePermit, Semaphore},
    time::{Instant, sleep, timeout},
};

use super::{
    costs::SettlementStats,
    gas::{Affords, Gas},
    line::Lane,
    readiness::NotReady,
};
use crate::{
    chain::{fees::FeeError, node::Node, rpc::RpcFailure},
    settlement::FacilitatorError,
    telemetry,
};

/// Gaps that are found at once. More are found when these are filled.
const MAX_GAPS: usize = 64;
/// How long after a failed request for the next nonce the node is not asked again.
const SYNC_PAUSE: Duration = Duration::from_secs(1);
/// How long a signer may take. It may be a remote service, and while it signs, a nonce and a place in the window are taken.
const SIGN_TIMEOUT: Duration = Duration::from_secs(5);
/// How long the node may take to tell a balance, while a place in the window is taken. Then what is known counts.
const BALANCE_TIMEOUT: Duration = Duration::from_secs(1);
/// After what time a window that was narrowed gets one of its places back.
const WIDENING: Duration = Duration::from_secs(60);
/// How often balances are checked while transactions are sent.
const BALANCE_INTERVAL: Duration = Duration::from_secs(60);
/// Gas for a transfer of nothing to the account itself.
pub(super) const FILLER_GAS: u64 = 21_000;
/// A balance is low if it does not pay for this many more transactions.
const LOW_BALANCE: u64 = 200;

/// Any signer of transactions.
pub(crate) type SharedSigner = Arc<dyn TxSigner<Signature> + Send + Sync>;

/// The settlement accounts of one chain. A clone is the same accounts.
#[derive(Clone, Debug)]
pub(crate) struct Accounts(Arc<AllAccounts>);

#[derive(Debug)]
struct AllAccounts {
    accounts: Vec<Account>,
    /// When balances were checked last, and how many transactions there had been.
    balances_checked: Mutex<Option<(Instant, u64)>>,
}

impl Accounts {
    /// One account per key, each with at most `window` transactions in flight. `freed` is notified whenever a place becomes free.
    pub(crate) fn new(signers: Vec<SharedSigner>, node: &Arc<Node>, window: usize, freed: &Arc<Notify>) -> Self {
        let account = |signer| Account::new(signer, node.clone(), window, freed.clone());
        let accounts = signers.into_iter().map(account).collect();
        Self(Arc::new(AllAccounts { accounts, balances_checked: Mutex::default() }))
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Account> {
        self.0.accounts.iter()
    }

    pub(super) fn len(&self) -> usize {
        self.0.accounts.len()
    }

    /// Returns how many transactions are in flight.
    pub(super) fn in_flight(&self) -> usize {
        self.iter().map(Account::in_flight).sum()
    }

    /// Takes a place for a call of this lane in the window of the account that has the most room, if more are free than are kept. One place of
    /// each window is always open to everybody. It takes no nonce yet.
    pub(super) fn try_enter_keeping(&self, kept: usize, lane: Lane) -> Option<(Account, WindowPermit)> {
        let rests = |account: &Account| account.resting(lane).is_some();
        let all_rest = self.iter().all(rests);
        let room = |account: &&Account| {
            let room = account.room(kept);
            // If all rest, the one that holds the most may pay for a smaller call.
            (room > 0, account.resting(Lane::Deposit).is_none(), account.resting(lane), room)
        };
        let account = self.iter().filter(|account| all_rest || !rests(account)).max_by_key(room)?;
        account.try_enter_keeping(kept)
    }

    /// Returns the account with this address, if it is one of these.
    pub(super) fn get(&self, address: Address) -> Option<&Account> {
        self.iter().find(|account| account.address() == address)
    }

    /// Fails if no account could pay for calls of this lane a moment ago. Does not ask the node.
    pub(super) fn check_known_balances(&self, lane: Lane) -> Result<(), FacilitatorError> {
        let balances: Option<Vec<U256>> = self.iter().map(|account| account.resting(lane)).collect();
        match balances.and_then(|balances| balances.into_iter().max()) {
            Some(balance) => Err(FacilitatorError::InsufficientGas { balance }),
            None => Ok(()),
        }
    }

    /// Asks the node for all balances, in wei.
    pub(crate) async fn balances(&self) -> Result<Vec<U256>, RpcFailure> {
        let mut balances = Vec::with_capacity(self.len());
        for account in self.iter() {
            balances.push(account.balance().await?);
        }
        Ok(balances)
    }

    /// Returns why no account could send a transaction with this gas limit now, if that is so.
    pub(super) async fn cannot_send(&self, node: &Node, gas_limit: u128) -> Option<NotReady> {
        let Ok(balances) = self.balances().await else { return Some(NotReady::Node) };
        let balance = balances.into_iter().max().unwrap_or_default();
        if !node.rpc().gives_receipts().await {
            return Some(NotReady::Receipts);
        }
        match node.fees().await {
            Ok(fees) => {
                let needed = U256::from(fees.max_fee.saturating_mul(gas_limit));
                (balance < needed).then_some(NotReady::InsufficientGas { balance })
            }
            Err(FeeError::TooHigh { .. }) => Some(NotReady::GasPrice),
            Err(FeeError::Rpc(_)) => Some(NotReady::Node),
        }
    }

    /// Uses an account that could not pay for gas again, as soon as it holds more.
    pub(super) async fn recheck_resting(&self) {
        for account in self.iter().filter(|account| account.resting(Lane::Deposit).is_some()) {
            let _ = account.balance().await;
        }
    }

    /// Warns before an account cannot pay for gas any more. Asks the node once a minute, and only while transactions are sent.
    pub(super) async fn warn_of_low_balances(&self, totals: &SettlementStats) {
        {
            let mut checked = self.0.balances_checked.lock().unwrap_or_else(PoisonError::into_inner);
            let is_due = checked.is_none_or(|(at, transactions)| {
                at.elapsed() >= BALANCE_INTERVAL && totals.transactions > transactions
            });
            if totals.transactions == 0 || !is_due {
                return;
            }
            *checked = Some((Instant::now(), totals.transactions));
        }
        let average = totals.spent / U256::from(totals.transactions);
        for account in self.iter() {
            let address = account.address();
            let Ok(balance) = account.balance().await else {
                tracing::warn!(account = %address, "the settlement key's balance could not be read");
                continue;
            };
            if balance < average.saturating_mul(U256::from(LOW_BALANCE)) {
                tracing::error!(account = %address, %balance, "the settlement key will soon be unable to pay for gas");
            }
        }
    }
}

/// One settlement account. A clone is the same account.
#[derive(Clone)]
pub(crate) struct Account(Arc<Inner>);

struct Inner {
    signer: SharedSigner,
    node: Arc<Node>,
    window: Arc<Window>,
    /// Notified whenever a place becomes free, here or in another account.
    freed: Arc<Notify>,
    /// Held by the one that waits in the line for a place of this account. Others wait for that one, so that the line has room.
    exchanging: AsyncMutex<()>,
    /// A task fills the account's gaps.
    filling: AtomicBool,
    nonces: Mutex<Nonces>,
    /// Held while the node is asked for the next nonce; when that failed last.
    syncing: AsyncMutex<Option<Instant>>,
    /// The nonce below which an earlier process with this key may have left transactions in the pool, and since when that is known.
    left_below: AsyncMutex<Option<(u64, Instant)>>,
}

#[derive(Debug, Default)]
struct Nonces {
    /// The lowest nonce never handed out, or `None` if the node must be asked.
    next: Option<u64>,
    /// Nonces below `next` that were given back.
    free: BTreeSet<u64>,
    /// The gas of the transactions in flight, which have the nonces in use.
    gas: Gas,
    /// All nonces below this one are in blocks.
    consumed: u64,
    /// All nonces below this one are in final blocks.
    finalized: u64,
}

/// The places for an account's transactions in flight. There are fewer for a while if nodes keep fewer of them.
#[derive(Debug)]
struct Window {
    places: Arc<Semaphore>,
    width: Mutex<Width>,
}

#[derive(Debug)]
struct Width {
    places: usize,
    /// How many there are to be.
    configured: usize,
    /// Places in use that end with their transaction.
    surplus: usize,
    changed: Instant,
}

impl Window {
    fn new(places: usize) -> Self {
        let places = places.clamp(1, Semaphore::MAX_PERMITS);
        let width = Mutex::new(Width { places, configured: places, surplus: 0, changed: Instant::now() });
        Self { places: Arc::new(Semaphore::new(places)), width }
    }

    fn width(&self) -> MutexGuard<'_, Width> {
        self.width.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the number of free places beyond those that are kept, of which one is open to everybody. A window that was narrowed is wider
    /// by one again from time to time.
    fn room(&self, kept: usize) -> usize {
        let mut width = self.width();
        if width.places < width.configured && width.changed.elapsed() >= WIDENING {
            (width.places, width.changed) = (width.places + 1, Instant::now());
            match width.surplus.checked_sub(1) {
                Some(fewer) => width.surplus = fewer,
                None => self.places.add_permits(1),
            }
        }
        self.places.available_permits().saturating_sub(kept.min(width.places.saturating_sub(1)))
    }

    /// Leaves at most so many places for good.
    fn limit(&self, most: usize) {
        let mut width = self.width();
        width.configured = width.configured.min(most);
        drop(width);
        self.narrow(most);
    }

    /// Leaves at most so many places, at least one.
    fn narrow(&self, most: usize) {
        let mut width = self.width();
        width.changed = Instant::now();
        let fewer = width.places.saturating_sub(most.max(1));
        width.places -= fewer;
        width.surplus += fewer - self.places.forget_permits(fewer);
    }

    /// Takes a place out of use if there are more than there should be.
    fn put_back(&self, permit: OwnedSemaphorePermit) {
        let mut width = self.width();
        match width.surplus.checked_sub(1) {
            Some(fewer) => {
                width.surplus = fewer;
                permit.forget();
            }
            None => drop(permit),
        }
    }
}

/// A place in an account's window of transactions in flight.
#[derive(Debug)]
pub(crate) struct WindowPermit {
    permit: Option<OwnedSemaphorePermit>,
    window: Arc<Window>,
    freed: Arc<Notify>,
}

impl Drop for WindowPermit {
    fn drop(&mut self) {
        // The place must be free before a waiter is woken.
        if let Some(permit) = self.permit.take() {
            self.window.put_back(permit);
        }
        self.freed.notify_one();
    }
}

/// Gas of a transaction that has no nonce yet, counted until this is dropped.
pub(super) struct Announced {
    account: Account,
    gas: u64,
}

impl Drop for Announced {
    fn drop(&mut self) {
        self.account.gas(|known| known.has_been_announced(self.gas));
    }
}

/// A signed transaction.
pub(super) struct Signed {
    pub(super) raw: Bytes,
    pub(super) hash: B256,
}

/// An account nonce in use. End it with [`consumed`](Self::consumed), [`release`](Self::release),
/// [`taken_by_other`](Self::taken_by_other) or [`abandon`](Self::abandon). Dropping it releases the nonce if no transaction was sent
/// with it, and abandons it otherwise.
#[derive(Debug)]
pub(crate) struct NonceLease {
    account: Account,
    nonce: u64,
    sent: bool,
    ended: bool,
    _permit: WindowPermit,
}

impl Account {
    fn new(signer: SharedSigner, node: Arc<Node>, window: usize, freed: Arc<Notify>) -> Self {
        Self(Arc::new(Inner {
            signer,
            node,
            freed,
            exchanging: AsyncMutex::default(),
            filling: AtomicBool::new(false),
            window: Arc::new(Window::new(window)),
            left_below: AsyncMutex::default(),
            nonces: Mutex::default(),
            syncing: AsyncMutex::default(),
        }))
    }

    pub(crate) fn address(&self) -> Address {
        self.0.signer.address()
    }

    /// Asks the node for the balance, in wei.
    pub(super) async fn balance(&self) -> Result<U256, RpcFailure> {
        let balance = self.0.node.rpc().balance(self.address()).await?;
        telemetry::gas_tank(self.0.node.network(), self.address(), balance);
        self.gas(|gas| gas.note_balance(balance));
        Ok(balance)
    }

    /// Returns whether the account can pay for so much `gas` at this price, beside what was in flight `before` and what is `kept`. If the node
    /// does not tell the balance, what is known of it counts.
    pub(super) async fn affords(&self, gas: u64, before: u64, kept: u64, max_fee: u128) -> Affords {
        let _ = timeout(BALANCE_TIMEOUT, self.balance()).await;
        self.gas(|known| known.affords(gas, before, kept, max_fee))
    }

    /// Returns how many of the account's transactions are in blocks up to this one.
    pub(super) async fn nonce_in(&self, block: u64) -> Result<u64, RpcFailure> {
        self.0.node.rpc().nonce_in(self.address(), block).await
    }

    /// Returns how many of the account's transactions are in blocks (`latest`), in final blocks (`finalized`), or in blocks and in the
    /// pool (`pending`).
    pub(super) async fn chain_nonce(&self, at: &'static str) -> Result<u64, RpcFailure> {
        self.0.node.rpc().nonce(self.address(), at).await
    }

    pub(super) async fn sign(&self, mut transaction: TxEip1559) -> Result<Signed, FacilitatorError> {
        let signing = timeout(SIGN_TIMEOUT, self.0.signer.sign_transaction(&mut transaction)).await;
        let is_late = signing.is_err();
        // A signer's error may quote what it was asked to sign, or the address of its key service, so it is not logged.
        let Ok(Ok(signature)) = signing else {
            tracing::error!(account = %self.address(), is_late, "the settlement key's signer failed");
            return Err(FacilitatorError::Unreachable {
                what: "the settlement key's signer",
                retry_after: Duration::from_secs(5),
            });
        };
        let envelope = TxEnvelope::from(transaction.into_signed(signature));
        Ok(Signed { hash: *envelope.tx_hash(), raw: envelope.encoded_2718().into() })
    }

    /// Returns how many places of the window are free beyond those that are kept.
    fn room(&self, kept: usize) -> usize {
        self.0.window.room(kept)
    }

    /// Waits until what an earlier process with this key left in the pool is in blocks, but no longer than `patience`: it may hang, and is
    /// replaced only when a transaction of this process waits behind it.
    pub(super) async fn outlive_predecessor(&self, patience: Duration) -> Result<(), RpcFailure> {
        let mut left_below = self.0.left_below.lock().await;
        let (next, since) = match *left_below {
            Some(known) => known,
            None => *left_below.insert((self.chain_nonce("pending").await?, Instant::now())),
        };
        while next > 0 && since.elapsed() < patience && self.chain_nonce("latest").await? < next {
            sleep(self.0.node.poll_interval()).await;
        }
        *left_below = Some((0, since));
        Ok(())
    }

    /// Takes a place in the window, if more are free than are kept. It takes no nonce yet.
    pub(super) fn try_enter_keeping(&self, kept: usize) -> Option<(Self, WindowPermit)> {
        if self.room(kept) == 0 {
            return None;
        }
        let permit = self.0.window.places.clone().try_acquire_owned().ok()?;
        Some((self.clone(), self.permit(Some(permit))))
    }

    /// Waits for a place in the window, before all who wait in the line. It takes no nonce yet.
    pub(super) async fn enter(&self) -> WindowPermit {
        // The semaphore is never closed; without a permit the window would only be wider.
        self.permit(self.0.window.places.clone().acquire_owned().await.ok())
    }

    fn permit(&self, permit: Option<OwnedSemaphorePermit>) -> WindowPermit {
        WindowPermit { permit, window: self.0.window.clone(), freed: self.0.freed.clone() }
    }

    /// Keeps fewer transactions in flight, since the node takes none beside those that it has: one, if the account `is_delegated`.
    pub(super) fn narrow(&self, is_delegated: bool) {
        // The transaction that was refused still has its nonce.
        let others = self.in_flight().saturating_sub(1);
        self.0.window.narrow(if is_delegated { 1 } else { others });
    }

    /// Keeps at most so many transactions in flight.
    pub(super) fn limit(&self, most: usize) {
        self.0.window.limit(most);
    }

    /// Asks for what the balance has to pay for, or notes it.
    pub(super) fn gas<T>(&self, ask: impl FnOnce(&mut Gas) -> T) -> T {
        ask(&mut self.nonces().gas)
    }

    /// Returns the balance, in wei, with which the account could not pay for calls of this lane a moment ago, if that happened.
    pub(super) fn resting(&self, lane: Lane) -> Option<U256> {
        self.gas(|gas| gas.resting(lane))
    }

    /// Waits until nobody else waits in the line for a place of this account.
    pub(super) async fn exchanging(&self) -> AsyncMutexGuard<'_, ()> {
        self.0.exchanging.lock().await
    }

    /// Returns `true` if the caller is to fill the gaps: there are some, and no task fills them.
    pub(super) fn begin_filling(&self) -> bool {
        self.has_gap() && !self.0.filling.swap(true, Ordering::AcqRel)
    }

    pub(super) fn end_filling(&self) {
        self.0.filling.store(false, Ordering::Release);
    }

    /// Takes the lowest free nonce, for a transaction that may use so much gas.
    pub(super) async fn take(&self, permit: WindowPermit, gas: u64) -> Result<NonceLease, FacilitatorError> {
        loop {
            if let Some(nonce) = self.nonces().take(gas) {
                return Ok(self.lease(nonce, permit));
            }
            self.sync().await?;
        }
    }

    /// Takes a free nonce that keeps others from being included, if there is one. After `patience` it does so without a place in the
    /// window: those that fill the window may all wait for this nonce.
    pub(super) async fn take_gap(&self, patience: Duration) -> Option<NonceLease> {
        let outside = |_| self.permit(None);
        let permit = timeout(patience, self.enter()).await.unwrap_or_else(outside);
        let nonce = {
            let mut nonces = self.nonces();
            if !nonces.has_gap() {
                return None;
            }
            let nonce = nonces.free.pop_first()?;
            nonces.gas.enter(nonce, FILLER_GAS);
            nonce
        };
        Some(self.lease(nonce, permit))
    }

    /// Returns `true` if a free nonce keeps others from being included.
    pub(super) fn has_gap(&self) -> bool {
        self.nonces().has_gap()
    }

    /// Returns the lowest nonce that is not known to be in a block.
    pub(super) fn consumed(&self) -> u64 {
        self.nonces().consumed
    }

    /// Notes that all nonces below `next` are in blocks.
    pub(super) fn consumed_below(&self, next: u64) {
        let mut nonces = self.nonces();
        if next > nonces.consumed {
            nonces.consumed = next;
            nonces.free = nonces.free.split_off(&next);
            nonces.next = nonces.next.map(|known| known.max(next));
        }
    }

    /// Returns `true` if transactions of the account are in blocks that may not be final.
    pub(super) fn has_unfinal(&self) -> bool {
        let nonces = self.nonces();
        nonces.consumed > nonces.finalized
    }

    /// Notes that all nonces below `next` are in final blocks.
    pub(super) fn finalized_below(&self, next: u64) {
        let mut nonces = self.nonces();
        nonces.finalized = nonces.finalized.max(next);
    }

    /// Returns `true` if no transaction in flight has a lower nonce.
    pub(super) fn is_lowest(&self, nonce: u64) -> bool {
        self.nonces().lowest() == Some(nonce)
    }

    /// Forgets which nonces are in blocks, since the chain was reorganized. The node is asked for the next nonce.
    pub(super) fn rewind(&self) {
        let mut nonces = self.nonces();
        nonces.consumed = 0;
        nonces.next = None;
    }

    pub(super) fn in_flight(&self) -> usize {
        self.gas(|gas| gas.nonces().len())
    }

    /// Counts so much gas as in flight until the result is dropped. Returns how much was before, too. To be called before the balance is asked
    /// for, so that no two transactions rely on the same ether.
    pub(super) fn announce(&self, gas: u64) -> (Announced, u64) {
        let before = self.gas(|known| known.announce(gas));
        (Announced { account: self.clone(), gas }, before)
    }

    fn lease(&self, nonce: u64, permit: WindowPermit) -> NonceLease {
        telemetry::in_flight(1);
        NonceLease { account: self.clone(), nonce, sent: false, ended: false, _permit: permit }
    }

    /// Asks the node for the next nonce. Of concurrent callers one asks.
    async fn sync(&self) -> Result<(), RpcFailure> {
        let mut failed = self.0.syncing.lock().await;
        if self.nonces().next.is_some() {
            return Ok(());
        }
        if failed.is_some_and(|at| at.elapsed() < SYNC_PAUSE) {
            return Err(RpcFailure::Silent);
        }
        match self.chain_nonce("pending").await {
            Ok(pending) => self.nonces().resume(pending),
            Err(failure) => {
                *failed = Some(Instant::now());
                return Err(failure);
            }
        }
        Ok(())
    }

    fn nonces(&self) -> MutexGuard<'_, Nonces> {
        self.0.nonces.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Account {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Account").field("address", &self.address()).field("nonces", &*self.nonces()).finish()
    }
}

impl Nonces {
    fn lowest(&self) -> Option<u64> {
        self.gas.nonces().next()
    }

    fn take(&mut self, gas: u64) -> Option<u64> {
        let next = self.next?;
        let nonce = self.free.pop_first().unwrap_or(next);
        if nonce == next {
            self.next = next.checked_add(1);
        }
        self.gas.enter(nonce, gas);
        Some(nonce)
    }

    fn has_gap(&self) -> bool {
        self.free.first().is_some_and(|free| self.gas.nonces().next_back().is_some_and(|last| *free < last))
    }

    /// Continues from the node's answer, without forgetting what is in flight.
    fn resume(&mut self, pending: u64) {
        // A node that lags behind the others may answer less than is known here.
        let pending = pending.max(self.consumed);
        let next = self.gas.nonces().next_back().map_or(pending, |last| pending.max(last.saturating_add(1)));
        self.free =
            (pending..next).filter(|nonce| self.gas.nonces().all(|taken| taken != *nonce)).take(MAX_GAPS).collect();
        self.next = Some(next);
    }

    fn consume(&mut self, nonce: u64) {
        self.gas.leave(nonce);
        self.consumed = self.consumed.max(nonce.saturating_add(1));
        self.free = self.free.split_off(&self.consumed);
        self.next = self.next.map(|next| next.max(self.consumed));
    }

    fn release(&mut self, nonce: u64) {
        self.gas.leave(nonce);
        if nonce < self.consumed {
            return;
        }
        match self.next {
            Some(next) if nonce.checked_add(1) == Some(next) => self.next = Some(nonce),
            _ => drop(self.free.insert(nonce)),
        }
    }
}

impl NonceLease {
    pub(super) const fn account(&self) -> &Account {
        &self.account
    }

    pub(super) const fn nonce(&self) -> u64 {
        self.nonce
    }

    /// Goes on to a nonce from `next` on, since another process uses this one.
    pub(super) fn skip_to(&mut self, next: u64) {
        let mut nonces = self.account.nonces();
        let moved = nonces.gas.leave(self.nonce);
        nonces.next = Some(nonces.next.map_or(next, |known| known.max(next)));
        // With `next` known, `take` returns a nonce.
        let nonce = nonces.take(moved.gas).unwrap_or(next);
        nonces.gas.hurry(nonce, moved.worth);
        self.nonce = nonce;
    }

    /// Notes that a transaction with the nonce was sent: from now on it may be included.
    pub(super) fn sent(&mut self) {
        self.sent = true;
    }

    /// Ends the lease: our transaction is in a block.
    pub(super) fn consumed(mut self) {
        self.ended = true;
        self.account.nonces().consume(self.nonce);
    }

    /// Ends the lease: no node took the transaction, and the nonce is free again.
    pub(super) fn release(mut self) {
        self.ended = true;
        self.account.nonces().release(self.nonce);
    }

    /// Ends the lease: a transaction of somebody else who uses the key is in a block with the nonce. The node is asked for the next nonce.
    pub(super) fn taken_by_other(mut self) {
        self.ended = true;
        self.resync();
        self.account.nonces().consume(self.nonce);
    }

    /// Ends the lease without knowing which transaction will be included with the nonce. The node is asked for the next nonce.
    pub(super) fn abandon(mut self) {
        self.ended = true;
        self.resync();
    }

    fn resync(&self) {
        let mut nonces = self.account.nonces();
        nonces.gas.leave(self.nonce);
        nonces.next = None;
    }
}

impl Drop for NonceLease {
    fn drop(&mut self) {
        telemetry::in_flight(-1);
        match (self.ended, self.sent) {
            (true, _) => {}
            (false, false) => self.account.nonces().release(self.nonce),
            (false, true) => self.resync(),
        }
    }
}

#[cfg(test)]
mod tests {
    use alloy_signer_local::PrivateKeySigner;
    use futures_util::FutureExt as _;

    use super::*;
    use crate::{
        chain::{endpoint, rpc::Rpc},
        network::Network,
    };

    /// The queue sleeps until it is told.
    #[tokio::test]
    async fn end_of_a_transaction_wakes_whoever_waits_for_its_place() {
        let rpc = Rpc::new(endpoint::client_at("http://127.0.0.1:1").unwrap(), Duration::from_secs(5));
        let node = Arc::new(Node::new(Network::BASE, rpc, 100_000, None, None).unwrap());
        let freed = Arc::new(Notify::new());
        let accounts = Accounts::new(vec![Arc::new(PrivateKeySigner::random())], &node, 1, &freed);
        let entered = || accounts.try_enter_keeping(0, Lane::Claim);
        let (account, permit) = entered().unwrap();
        assert!(entered().is_none());
        let mut waiting = Box::pin(freed.notified());
        assert!((&mut waiting).now_or_never().is_none());
        drop(permit);
        assert!(waiting.now_or_never().is_some() && entered().is_some());
        // The same for whoever waited for a place in this account.
        let permit = account.enter().await;
        drop(permit);
        assert!(freed.notified().now_or_never().is_some());
    }

    fn accounts(count: usize, window: usize) -> Accounts {
        let rpc = Rpc::new(endpoint::client_at("http://127.0.0.1:1").unwrap(), Duration::from_secs(5));
        let node = Arc::new(Node::new(Network::BASE, rpc, 100_000, None, None).unwrap());
        let signers = (0..count).map(|_| Arc::new(PrivateKeySigner::random()) as SharedSigner).collect();
        Accounts::new(signers, &node, window, &Arc::default())
    }

    #[tokio::test]
    async fn an_account_whose_gas_is_kept_for_claims_is_open_to_claims_at_risk() {
        let accounts = accounts(2, 2);
        let [low, rich] = [0, 1].map(|index| accounts.iter().nth(index).unwrap().clone());
        low.gas(|gas| gas.rest(Lane::Claim));
        let entered =
            |kept, lane| accounts.try_enter_keeping(kept, lane).map(|(account, permit)| (account.address(), permit));
        let payment = entered(1, Lane::Claim).unwrap();
        assert_eq!(payment.0, rich.address());
        assert!(entered(1, Lane::Claim).is_none(), "the other one rests");
        let claim = entered(0, Lane::AtRisk).unwrap();
        assert_eq!(claim.0, rich.address(), "one that does not rest comes first");
        let second = entered(0, Lane::AtRisk).unwrap();
        assert_eq!(second.0, low.address());
        // One that cannot pay for claims either is closed to them.
        drop(second);
        low.gas(|gas| gas.rest(Lane::AtRisk));
        low.gas(|gas| gas.rest(Lane::Claim));
        assert!(entered(0, Lane::AtRisk).is_none());
    }

    #[tokio::test]
    async fn gas_that_was_announced_counts_for_the_next_one_before_it_has_a_nonce() {
        let accounts = accounts(1, 2);
        let account = accounts.iter().next().unwrap();
        let (first, before) = account.announce(3);
        assert_eq!((before, account.announce(4).1), (0, 3));
        drop(first);
        assert_eq!(account.gas(|gas| gas.in_flight()), 0);
    }

    fn nonces(next: u64) -> Nonces {
        Nonces { next: Some(next), ..Nonces::default() }
    }

    #[test]
    fn lowest_free_nonce_is_taken_first() {
        let mut nonces = nonces(5);
        assert_eq!([nonces.take(1), nonces.take(1), nonces.take(1)], [Some(5), Some(6), Some(7)]);
        nonces.release(6);
        assert!(nonces.has_gap());
        assert_eq!(nonces.take(1), Some(6));
        assert!(!nonces.has_gap());
        assert_eq!(nonces.take(1), Some(8));
    }

    #[test]
    fn releasing_the_highest_nonce_leaves_no_gap() {
        let mut nonces = nonces(5);
        nonces.take(1);
        nonces.take(1);
        nonces.release(6);
        assert!(!nonces.has_gap());
        nonces.release(5);
        assert!(!nonces.has_gap());
        assert_eq!(nonces.take(1), Some(5));
    }

    #[test]
    fn nonces_used_by_others_are_skipped_and_gaps_found() {
        let mut nonces = nonces(5);
        for _ in 0..4 {
            nonces.take(1);
        }
        // 5 was taken by another, 8 is in flight; the node answers that 7 is next.
        nonces.gas.leave(5);
        nonces.gas.leave(7);
        nonces.next = None;
        nonces.resume(7);
        assert_eq!(nonces.take(1), Some(7));
        assert_eq!(nonces.take(1), Some(9));
    }

    #[test]
    fn lagging_node_does_not_bring_consumed_nonces_back() {
        let mut nonces = nonces(5);
        nonces.take(1);
        nonces.take(1);
        nonces.consume(6);
        nonces.next = None;
        nonces.resume(4);
        assert_eq!(nonces.take(1), Some(7));
    }

    #[test]
    fn lowest_of_many_gaps_are_found_first() {
        let mut nonces = Nonces::default();
        nonces.gas.enter(200, 1);
        nonces.resume(0);
        assert!(nonces.free.iter().copied().eq(0..MAX_GAPS as u64));
        for _ in 0..MAX_GAPS {
            nonces.take(1);
        }
        assert_eq!((nonces.has_gap(), nonces.next), (false, Some(201)));
        // When those are in blocks, the node is asked again.
        (0..200).for_each(|nonce| _ = nonces.gas.leave(nonce));
        nonces.next = None;
        nonces.resume(64);
        assert_eq!((nonces.free.first(), nonces.free.len()), (Some(&64), MAX_GAPS));
    }
}
