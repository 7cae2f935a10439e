//! The settlement accounts: their keys, their nonces, and their balances for gas.
//!
//! Nodes keep about 16 waiting transactions per account, and none of them is included before all lower nonces are. So an account has a
//! window of transactions in flight, and always hands out its lowest free nonce. It knows when a nonce in the middle was given back:
//! nothing above such a gap can be included until the gap is filled.

use std::{
    collections::{BTreeMap, BTreeSet},
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

use super::{costs::SettlementStats, readiness::NotReady};
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
/// How long an account that could not pay for gas is used only if there is no other.
const REST: Duration = Duration::from_secs(30);
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

    /// Takes a place in the window of the account that has the most room, if more are free than are kept. One place of each window is always
    /// open to everybody. It takes no nonce yet.
    /// Whoever `spends_kept` gas may have one that rests because gas is kept.
    pub(super) fn try_enter_keeping(&self, kept: usize, spends_kept: bool) -> Option<(Account, WindowPermit)> {
        let rests = |account: &Account| account.rests_for(spends_kept);
        let all_rest = self.iter().all(rests);
        let room = |account: &&Account| {
            let room = account.room(kept);
            (room > 0, account.resting().is_none(), room)
        };
        let account = self.iter().filter(|account| all_rest || !rests(account)).max_by_key(room)?;
        account.try_enter_keeping(kept)
    }

    /// Returns the account with this address, if it is one of these.
    pub(super) fn get(&self, address: Address) -> Option<&Account> {
        self.iter().find(|account| account.address() == address)
    }

    /// Fails if no account could pay for gas a moment ago. Does not ask the node.
    pub(super) fn check_known_balances(&self) -> Result<(), FacilitatorError> {
        let balances: Option<Vec<U256>> = self.iter().map(Account::resting).collect();
        match balances.and_then(|balances| balances.into_iter().max()) {
            Some(balance) => Err(FacilitatorError::InsufficientGas { balance }),
            None => Ok(()),
        }
    }

    /// Fails if this account could not pay for gas a moment ago. Does not ask the node.
    pub(super) fn check_known_balance(&self, of: Address) -> Result<(), FacilitatorError> {
        match self.get(of).and_then(Account::resting) {
            Some(balance) => Err(FacilitatorError::InsufficientGas { balance }),
            None => Ok(()),
        }
    }

    /// Asks the node for all balances and returns the highest, in wei.
    pub(super) async fn highest_balance(&self) -> Result<U256, RpcFailure> {
        let mut highest = U256::ZERO;
        for account in self.iter() {
            let balance = account.balance().await?;
            account.wake(balance);
            telemetry::gas_tank(account.0.node.network(), account.address(), balance);
            highest = highest.max(balance);
        }
        Ok(highest)
    }

    /// Returns why no account could send a transaction with this gas limit now, if that is so.
    pub(super) async fn cannot_send(&self, node: &Node, gas_limit: u128) -> Option<NotReady> {
        let Ok(balance) = self.highest_balance().await else { return Some(NotReady::Node) };
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

    /// Asks the node for all balances and returns the lowest, in wei.
    pub(crate) async fn lowest_balance(&self) -> Result<U256, RpcFailure> {
        let mut lowest = U256::MAX;
        for account in self.iter() {
            lowest = lowest.min(account.balance().await?);
        }
        Ok(lowest)
    }

    /// Uses an account that could not pay for gas again, as soon as it holds more.
    pub(super) async fn recheck_resting(&self) {
        for account in self.iter().filter(|account| account.resting().is_some()) {
            if let Ok(balance) = account.balance().await {
                account.wake(balance);
            }
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
            telemetry::gas_tank(account.0.node.network(), address, balance);
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
    /// The account is used only if there is no other.
    resting: Mutex<Option<Rest>>,
    /// Held by the one that waits in the line for a place of this account. Others wait for that one, so that the line has room.
    exchanging: AsyncMutex<()>,
    /// A task fills the account's gaps.
    filling: AtomicBool,
    nonces: Mutex<Nonces>,
    /// Held while the node is asked for the next nonce; when that failed last.
    syncing: AsyncMutex<Option<Instant>>,
    /// What an earlier process with this key may have left in the pool.
    predecessor: AsyncMutex<Predecessor>,
}

/// Why an account is used only if there is no other.
#[derive(Clone, Copy, Debug)]
struct Rest {
    until: Instant,
    /// Its balance when it could not pay for gas, in wei.
    balance: U256,
    /// It pays for what is kept for claims, and for nothing else.
    is_kept: bool,
}

/// The transactions of an earlier process with the same key.
#[derive(Clone, Copy, Debug, Default)]
enum Predecessor {
    /// The node was not asked.
    #[default]
    Unknown,
    /// Those below this nonce may still be in the pool; since when that is known.
    InPool(u64, Instant),
    /// All are in blocks, or were waited for long enough.
    Gone,
}

#[derive(Debug, Default)]
struct Nonces {
    /// The lowest nonce never handed out, or `None` if the node must be asked.
    next: Option<u64>,
    /// Nonces below `next` that were given back.
    free: BTreeSet<u64>,
    /// Nonces in use, and the gas that their transactions may use.
    taken: BTreeMap<u64, u64>,
    /// The gas of transactions that were announced and have no nonce yet.
    announced: u64,
    /// The gas of journalled transactions that are not of this process.
    others: u64,
    /// Nonces whose transactions must not wait for a ceiling.
    urgent: BTreeMap<u64, Hurry>,
    /// All nonces below this one are in blocks.
    consumed: u64,
    /// All nonces below this one are in final blocks.
    finalized: u64,
    /// A nonce for which those in use wait, while a transaction in the pool that is not ours has it; since when that is known.
    foreign: Option<(u64, Instant)>,
}

/// What a transaction may cost that must not wait for a ceiling, together with those that it waits for.
#[derive(Clone, Copy, Debug)]
struct Hurry {
    /// In wei.
    worth: u128,
    /// The gas that it and those in flight below it may use.
    gas: u64,
}

/// The places for an account's transactions in flight. There are fewer for a while if nodes keep fewer of them.
#[derive(Debug)]
struct Window {
    places: Arc<Semaphore>,
    configured: usize,
    width: Mutex<Width>,
}

#[derive(Debug)]
struct Width {
    places: usize,
    /// Places in use that end with their transaction.
    surplus: usize,
    changed: Instant,
}

impl Window {
    fn new(places: usize) -> Self {
        let places = places.clamp(1, Semaphore::MAX_PERMITS);
        let width = Mutex::new(Width { places, surplus: 0, changed: Instant::now() });
        Self { places: Arc::new(Semaphore::new(places)), configured: places, width }
    }

    fn width(&self) -> MutexGuard<'_, Width> {
        self.width.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the number of free places beyond those that are kept, of which one is open to everybody. A window that was narrowed is wider
    /// by one again from time to time.
    fn room(&self, kept: usize) -> usize {
        let mut width = self.width();
        if width.places < self.configured && width.changed.elapsed() >= WIDENING {
            (width.places, width.changed) = (width.places + 1, Instant::now());
            match width.surplus.checked_sub(1) {
                Some(fewer) => width.surplus = fewer,
                None => self.places.add_permits(1),
            }
        }
        self.places.available_permits().saturating_sub(kept.min(width.places.saturating_sub(1)))
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
    before: u64,
}

impl Announced {
    /// Returns how much gas was in flight before.
    pub(super) const fn before(&self) -> u64 {
        self.before
    }
}

impl Drop for Announced {
    fn drop(&mut self) {
        let mut nonces = self.account.nonces();
        nonces.announced = nonces.announced.saturating_sub(self.gas);
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
            resting: Mutex::default(),
            exchanging: AsyncMutex::default(),
            filling: AtomicBool::new(false),
            window: Arc::new(Window::new(window)),
            predecessor: AsyncMutex::default(),
            nonces: Mutex::default(),
            syncing: AsyncMutex::default(),
        }))
    }

    pub(crate) fn address(&self) -> Address {
        self.0.signer.address()
    }

    pub(super) async fn balance(&self) -> Result<U256, RpcFailure> {
        self.0.node.rpc().balance(self.address()).await
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
        let mut predecessor = self.0.predecessor.lock().await;
        loop {
            let (next, since) = match *predecessor {
                Predecessor::Gone => return Ok(()),
                Predecessor::InPool(next, since) => (next, since),
                Predecessor::Unknown => (self.chain_nonce("pending").await?, Instant::now()),
            };
            *predecessor = Predecessor::InPool(next, since);
            if self.chain_nonce("latest").await? >= next || since.elapsed() >= patience {
                *predecessor = Predecessor::Gone;
                return Ok(());
            }
            sleep(self.0.node.poll_interval()).await;
        }
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

    /// Prefers other accounts for half a minute, since this one could not pay for gas with this balance.
    pub(super) fn rest(&self, balance: U256) {
        *self.lock_resting() = Some(Rest { until: Instant::now() + REST, balance, is_kept: false });
    }

    /// The same, since it pays for what is kept for claims only. Claims at risk use it.
    pub(super) fn rest_for_claims(&self, balance: U256) {
        let mut resting = self.lock_resting();
        if resting.is_none_or(|rest| rest.is_kept || rest.until <= Instant::now()) {
            *resting = Some(Rest { until: Instant::now() + REST, balance, is_kept: true });
        }
    }

    fn lock_resting(&self) -> MutexGuard<'_, Option<Rest>> {
        self.0.resting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until nobody else waits in the line for a place of this account.
    pub(super) async fn exchanging(&self) -> AsyncMutexGuard<'_, ()> {
        self.0.exchanging.lock().await
    }

    /// Ends the rest if the balance is higher now.
    fn wake(&self, balance: U256) {
        let mut resting = self.lock_resting();
        *resting = resting.filter(|rest| balance <= rest.balance);
    }

    /// Returns the balance, in wei, with which the account could not pay for gas a moment ago, if that happened.
    fn resting(&self) -> Option<U256> {
        self.rest_now().map(|rest| rest.balance)
    }

    /// Returns `true` if the account rests for this kind of call: one that `spends_kept` gas, or another.
    fn rests_for(&self, spends_kept: bool) -> bool {
        self.rest_now().is_some_and(|rest| !(rest.is_kept && spends_kept))
    }

    fn rest_now(&self) -> Option<Rest> {
        let resting = *self.lock_resting();
        resting.filter(|rest| rest.until > Instant::now())
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
            nonces.enter(nonce, FILLER_GAS);
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

    /// Returns what may be offered for a unit of gas, in wei, with this nonce, since a transaction with a higher one must not wait for a
    /// ceiling. `more` is the gas of transactions that are not counted yet.
    pub(super) fn hurried_above(&self, nonce: u64, more: u64) -> u128 {
        let nonces = self.nonces();
        let others = nonces.others.saturating_add(more);
        let waits = |(urgent, _): &(&u64, &Hurry)| **urgent > nonce && nonces.taken.contains_key(*urgent);
        let most = |(_, hurry): (&u64, &Hurry)| hurry.worth / u128::from(hurry.gas.saturating_add(others).max(1));
        nonces.urgent.iter().filter(waits).map(most).max().unwrap_or(0)
    }

    /// Finds the gaps below the transactions in flight, given the account's next nonce on the chain: a reorganization leaves them, or another
    /// process with the key. A transaction in the pool that is not ours counts as a gap if it is in no block after `patience`.
    pub(super) async fn find_gaps(&self, next: u64, patience: Duration) -> Result<(), RpcFailure> {
        if !self.nonces().lacks(next) {
            return Ok(());
        }
        self.rewind();
        self.sync().await?;
        let mut nonces = self.nonces();
        if nonces.lacks(next) {
            let since =
                nonces.foreign.filter(|(nonce, _)| *nonce == next).map_or_else(Instant::now, |(_, since)| since);
            nonces.foreign = Some((next, since));
            if since.elapsed() < patience {
                return Ok(());
            }
            nonces.resume(next);
        }
        tracing::warn!(account = %self.address(), next, "the account's transactions wait for a nonce that nobody uses");
        Ok(())
    }

    /// Forgets which nonces are in blocks, since the chain was reorganized. The node is asked for the next nonce.
    pub(super) fn rewind(&self) {
        let mut nonces = self.nonces();
        nonces.consumed = 0;
        nonces.next = None;
    }

    pub(super) fn in_flight(&self) -> usize {
        self.nonces().taken.len()
    }

    /// Returns how much gas the transactions in flight may use.
    #[cfg(test)]
    fn gas_in_flight(&self) -> u64 {
        self.nonces().gas_in_flight()
    }

    /// Counts so much gas as in flight until the result is dropped. To be called before the balance is asked for, so that no two
    /// transactions rely on the same ether.
    pub(super) fn announce(&self, gas: u64) -> Announced {
        let mut nonces = self.nonces();
        let before = nonces.gas_in_flight();
        nonces.announced = nonces.announced.saturating_add(gas);
        Announced { account: self.clone(), gas, before }
    }

    /// Notes the gas of the journalled transactions, by nonce: those that are not of this process count as in flight, too.
    pub(super) fn note_others(&self, journalled: &BTreeMap<u64, u64>) {
        let mut nonces = self.nonces();
        let of_others = journalled.iter().filter(|(nonce, _)| !nonces.taken.contains_key(nonce));
        nonces.others = of_others.fold(0, |sum, (_, gas)| sum.saturating_add(*gas));
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
        self.taken.keys().next().copied()
    }

    fn take(&mut self, gas: u64) -> Option<u64> {
        let next = self.next?;
        let nonce = self.free.pop_first().unwrap_or(next);
        if nonce == next {
            self.next = next.checked_add(1);
        }
        self.enter(nonce, gas);
        Some(nonce)
    }

    /// Enters a nonce as taken. Those above that hurry wait for it, too.
    fn enter(&mut self, nonce: u64, gas: u64) {
        self.taken.insert(nonce, gas);
        for (urgent, hurry) in &mut self.urgent {
            if *urgent > nonce {
                hurry.gas = hurry.gas.saturating_add(gas);
            }
        }
    }

    fn gas_in_flight(&self) -> u64 {
        self.taken.values().fold(self.announced.saturating_add(self.others), |sum, gas| sum.saturating_add(*gas))
    }

    fn has_gap(&self) -> bool {
        match (self.free.first(), self.taken.last_key_value()) {
            (Some(free), Some((taken, _))) => free < taken,
            _ => false,
        }
    }

    /// Returns `true` if those in use wait for this nonce, and it is not known to be free.
    fn lacks(&self, nonce: u64) -> bool {
        self.lowest().is_some_and(|lowest| nonce < lowest) && !self.free.contains(&nonce)
    }

    /// Continues from the node's answer, without forgetting what is in flight.
    fn resume(&mut self, pending: u64) {
        // A node that lags behind the others may answer less than is known here.
        let pending = pending.max(self.consumed);
        let next = self.taken.last_key_value().map_or(pending, |(last, _)| pending.max(last.saturating_add(1)));
        self.free = (pending..next).filter(|nonce| !self.taken.contains_key(nonce)).take(MAX_GAPS).collect();
        self.next = Some(next);
    }

    fn consume(&mut self, nonce: u64) {
        self.taken.remove(&nonce);
        self.consumed = self.consumed.max(nonce.saturating_add(1));
        self.free = self.free.split_off(&self.consumed);
        self.next = self.next.map(|next| next.max(self.consumed));
    }

    fn release(&mut self, nonce: u64) {
        self.taken.remove(&nonce);
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
        let gas = nonces.taken.remove(&self.nonce).unwrap_or_default();
        nonces.next = Some(nonces.next.map_or(next, |known| known.max(next)));
        // With `next` known, `take` returns a nonce.
        let urgent = nonces.urgent.remove(&self.nonce);
        self.nonce = nonces.take(gas).unwrap_or(next);
        if let Some(hurry) = urgent {
            nonces.urgent.insert(self.nonce, hurry);
        }
    }

    /// Lets this transaction and those with lower nonces, for which it waits, cost so much in wei. They may use so much gas.
    pub(super) fn hurry(&self, worth: u128, gas: u64) {
        let nonces = &mut *self.account.nonces();
        nonces.urgent.retain(|nonce, _| nonces.taken.contains_key(nonce));
        // Some may have taken a lower nonce since the gas was added up.
        let below = nonces.taken.range(..=self.nonce).fold(0, |sum: u64, (_, gas)| sum.saturating_add(*gas));
        let gas = gas.max(below);
        nonces.urgent.insert(self.nonce, Hurry { worth, gas });
    }

    /// Returns what may be offered for a unit of gas since a transaction that must not wait for a ceiling waits for this one, in wei.
    pub(super) fn hurried(&self) -> u128 {
        self.account.hurried_above(self.nonce, 0)
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
        nonces.taken.remove(&self.nonce);
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
        let (account, permit) = accounts.try_enter_keeping(0, false).unwrap();
        assert!(accounts.try_enter_keeping(0, false).is_none());
        let mut waiting = Box::pin(freed.notified());
        assert!((&mut waiting).now_or_never().is_none());
        drop(permit);
        assert!(waiting.now_or_never().is_some() && accounts.try_enter_keeping(0, false).is_some());
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
        low.rest_for_claims(U256::from(7));
        let entered = |kept, spends_kept| {
            accounts.try_enter_keeping(kept, spends_kept).map(|(account, permit)| (account.address(), permit))
        };
        let payment = entered(1, false).unwrap();
        assert_eq!(payment.0, rich.address());
        assert!(entered(1, false).is_none(), "the other one rests");
        let claim = entered(0, true).unwrap();
        assert_eq!(claim.0, rich.address(), "one that does not rest comes first");
        let second = entered(0, true).unwrap();
        assert_eq!(second.0, low.address());
        // One that cannot pay for claims either is closed to them.
        low.rest(U256::from(7));
        low.rest_for_claims(U256::from(7));
        assert!(entered(0, true).is_none());
    }

    #[tokio::test]
    async fn gas_that_was_announced_counts_for_the_next_one_before_it_has_a_nonce() {
        let accounts = accounts(1, 2);
        let account = accounts.iter().next().unwrap();
        let first = account.announce(3);
        assert_eq!((first.before(), account.announce(4).before()), (0, 3));
        drop(first);
        assert_eq!(account.gas_in_flight(), 0);
    }

    /// A claim of 100 gas that is worth 1,000 wei, and what others have below it.
    #[tokio::test]
    async fn all_that_a_claim_waits_for_shares_what_it_is_worth() {
        let accounts = accounts(1, 8);
        let account = accounts.iter().next().unwrap();
        account.nonces().resume(7);
        let lease = async |gas| account.take(account.enter().await, gas).await.unwrap();
        let (lower, claim) = (lease(300).await, lease(100).await);
        claim.hurry(1_000, 100);
        assert_eq!(account.hurried_above(7, 0), 2, "the one below is counted");
        // The lower nonce was given back, and a large batch has it.
        lower.release();
        let _batch = lease(600).await;
        assert_eq!(account.hurried_above(7, 0), 1);
        // A dead process left others below.
        account.note_others(&BTreeMap::from([(5, 700), (6, 700), (8, 100)]));
        assert_eq!(account.hurried_above(5, 0), 0);
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
        nonces.taken.remove(&5);
        nonces.taken.remove(&7);
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
        nonces.taken.insert(200, 1);
        nonces.resume(0);
        assert!(nonces.free.iter().copied().eq(0..MAX_GAPS as u64));
        for _ in 0..MAX_GAPS {
            nonces.take(1);
        }
        assert_eq!((nonces.has_gap(), nonces.next), (false, Some(201)));
        // When those are in blocks, the node is asked again.
        nonces.taken.retain(|nonce, _| *nonce == 200);
        nonces.next = None;
        nonces.resume(64);
        assert_eq!((nonces.free.first(), nonces.free.len()), (Some(&64), MAX_GAPS));
    }
}
