//! What chain, seller's books, buyers' journals and handled work must agree on in the end, to the atomic unit.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    fmt,
    sync::Arc,
    time::{Duration, Instant},
};

use alloy_primitives::{Address, B256};
use alloy_provider::Provider as _;
use alloy_rpc_types_eth::Filter;
use tower_x402::{
    Clock as _, SystemClock, Usdc,
    client::{Budget, Journal, reconcile_channels},
    ledger::{
        PostgresLedger,
        channels::{ChannelLedger as _, ChannelRecord},
    },
    vouchers::{ChannelId, Escrow, abi::BatchSettlement},
};

use super::{
    super::{FINALITY_DEPTH, process::Replica},
    buyers::{Buyers, MINTED},
    replica::{REPLICAS, VALID},
};
use support::{
    chain::{Chain, call},
    devnet::DevnetChain,
};

/// The time in which all must be claimed after the faults have stopped.
const CALM: Duration = Duration::from_secs(120);

/// What the chain has of a channel, or of all, in atomic units.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Sums {
    deposits: usize,
    claims: usize,
    refunds: usize,
    deposited: u128,
    claimed: u128,
    refunded: u128,
    left: u128,
}

impl fmt::Display for Sums {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { deposits, claims, refunds, deposited, claimed, refunded, left } = self;
        write!(
            f,
            "{deposited} deposited ({deposits}) = {claimed} claimed ({claims}) + {refunded} refunded ({refunds}) + {left} left"
        )
    }
}

/// Has all claimed that was charged, and returns the seller's books as they are then.
pub(super) async fn until_all_is_claimed(
    chain: &DevnetChain,
    buyers: &Buyers,
    ledger: &PostgresLedger,
    payee: Address,
) -> Vec<ChannelRecord> {
    let deadline = Instant::now() + CALM;
    for replica in (0..REPLICAS).cycle() {
        let said = buyers.tell(replica, "claim").await;
        let (records, mut open) = (all(ledger).await, Vec::new());
        for record in &records {
            let state = state(chain, record.id).await;
            if (record.charged(), record.unclaimed()) != (state.totalClaimed, 0) {
                open.push((record.id, record.charged(), state.totalClaimed, record.claiming_until));
            }
        }
        let of_payee = BatchSettlement::receiversCall { receiver: payee, token: chain.asset().address };
        let receiver = call(chain.provider(), Escrow::ADDRESS, of_payee).await.unwrap();
        if open.is_empty() && receiver.totalClaimed == receiver.totalSettled {
            return records;
        }
        assert!(Instant::now() < deadline, "not claimed: {open:?} ({said:?})");
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    unreachable!("there are replicas")
}

async fn state(chain: &DevnetChain, id: ChannelId) -> BatchSettlement::channelsReturn {
    let asked = BatchSettlement::channelsCall { channelId: id.digest() };
    call(chain.provider(), Escrow::ADDRESS, asked).await.unwrap()
}

async fn all(ledger: &PostgresLedger) -> Vec<ChannelRecord> {
    let mut records: Vec<ChannelRecord> = Vec::new();
    loop {
        let page = ledger.channels(records.last().map(|record| record.id), 200).await.unwrap();
        if page.is_empty() {
            return records;
        }
        records.extend(page);
    }
}

/// Checks that deposits are claims, refunds and what is left, per channel and in all, and that claims are what the seller charged.
pub(super) async fn balance(chain: &DevnetChain, records: &[ChannelRecord], payee: Address) -> Sums {
    let filter = Filter::new().from_block(0).address(Escrow::ADDRESS);
    let mut channels = BTreeMap::<B256, Sums>::new();
    let mut settled = 0;
    for log in chain.provider().get_logs(&filter).await.unwrap() {
        if let Ok(event) = log.log_decode::<BatchSettlement::Settled>() {
            settled += event.inner.amount;
            continue;
        }
        let sums = channels.entry(log.topics()[1]).or_default();
        if let Ok(event) = log.log_decode::<BatchSettlement::Deposited>() {
            (sums.deposits, sums.deposited) = (sums.deposits + 1, sums.deposited + event.inner.amount);
        } else if let Ok(event) = log.log_decode::<BatchSettlement::Claimed>() {
            (sums.claims, sums.claimed) = (sums.claims + 1, sums.claimed + event.inner.claimAmount);
        } else if let Ok(event) = log.log_decode::<BatchSettlement::Refunded>() {
            (sums.refunds, sums.refunded) = (sums.refunds + 1, sums.refunded + event.inner.amount);
        }
    }
    let known: BTreeSet<B256> = records.iter().map(|record| record.id.digest()).collect();
    assert_eq!(known, channels.keys().copied().collect(), "the seller's books have every channel, and no other");
    let mut sum = Sums::default();
    for record in records {
        let state = state(chain, record.id).await;
        let sums = channels.get_mut(&record.id.digest()).unwrap();
        sums.left = state.balance - state.totalClaimed;
        assert_eq!(sums.deposited, sums.claimed + sums.refunded + sums.left, "{}: {sums:?}", record.id);
        assert_eq!(sums.claimed, state.totalClaimed, "{}: {sums:?}", record.id);
        assert_eq!(record.charged(), sums.claimed, "{}: what was charged is claimed, and nothing else", record.id);
        sum = Sums {
            deposits: sum.deposits + sums.deposits,
            claims: sum.claims + sums.claims,
            refunds: sum.refunds + sums.refunds,
            deposited: sum.deposited + sums.deposited,
            claimed: sum.claimed + sums.claimed,
            refunded: sum.refunded + sums.refunded,
            left: sum.left + sums.left,
        };
    }
    assert_eq!(sum.deposited, sum.claimed + sum.refunded + sum.left);
    assert_eq!(
        u128::from(chain.balance(Escrow::ADDRESS).await),
        sum.left,
        "the contract has what is left, and no more"
    );
    assert_eq!(
        (settled, u128::from(chain.balance(payee).await)),
        (sum.claimed, sum.claimed),
        "the payee has the claims"
    );
    sum
}

/// Checks that each process worked for each order at most once, unless it was paid for again, and some process did.
pub(super) fn worked(dead: &Replica, alive: &[Replica], buyers: &Buyers) {
    let dead = dead.worked();
    let bought = buyers.bought.lock().unwrap();
    let mut by_others = HashMap::<u64, u32>::new();
    for (n, runs) in alive.iter().flat_map(Replica::worked) {
        *by_others.entry(n).or_default() += runs;
    }
    let mut by_both = 0;
    for n in 0..buyers.begun() {
        let (dead, others) = (dead.get(&n).copied().unwrap_or(0), by_others.get(&n).copied().unwrap_or(0));
        let again = bought.unknown.iter().filter(|(order, _)| *order == n).count() as u32;
        let is_right = dead <= 1 && others <= 1 + again && dead + others >= 1;
        assert!(is_right, "order {n} was worked for {dead} and {others} times, and paid for again {again} times");
        by_both += u32::from(dead > 0 && others > 0);
    }
    println!("{} orders were worked for by the killed process, {by_both} of them again by another one", dead.len());
}

/// Checks that the buyers' journals, as they are on disk, have the same sums as the seller and the chain.
pub(super) async fn bought(chain: &DevnetChain, records: &[ChannelRecord], buyers: Arc<Buyers>) -> String {
    let buyers = Arc::into_inner(buyers).expect("all buyers have ended");
    let bought = std::mem::take(&mut *buyers.bought.lock().unwrap());
    let sent = buyers.sent();
    let charged: HashMap<ChannelId, u128> = records.iter().map(|record| (record.id, record.charged())).collect();
    let unclear: BTreeSet<ChannelId> = bought.unknown.iter().map(|(_, channel)| *channel).collect();
    for (id, charged) in &charged {
        let receipts = u128::from(bought.charged.get(id).copied().unwrap_or(0));
        let is_told = if unclear.contains(id) { receipts <= *charged } else { receipts == *charged };
        assert!(is_told, "{id}: the seller charged {charged}, and told of {receipts}");
    }
    let opened: Vec<_> = buyers.buyers.iter().map(|buyer| (buyer.payer.address(), buyer.journal.clone())).collect();
    drop(buyers);
    // No deposit that was signed can be made any more, so that final blocks say all.
    chain.set_next_timestamp(SystemClock.now() + 2 * VALID).await;
    for _ in 0..=FINALITY_DEPTH {
        chain.mine().await;
    }
    let mut seen = 0;
    for (payer, path) in opened {
        let journal = Journal::open(path).unwrap();
        let (mut of_chain, mut deposited) = (0, 0);
        for entry in journal.channels() {
            assert_eq!(charged.get(&entry.id()), Some(&entry.charged.atomic().into()), "{entry:?}");
            let state = state(chain, entry.id()).await;
            of_chain += state.balance - state.totalClaimed;
            deposited += state.balance;
            seen += 1;
        }
        let held = u128::from(chain.balance(payer).await) + deposited;
        assert_eq!(held, u128::from(MINTED), "{payer} has all that is not in its channels");
        let budget = Budget::builder().total(Usdc::from_atomic(MINTED)).journal(journal).build();
        let found = reconcile_channels(&budget, chain.provider()).await.unwrap();
        assert_eq!((found.in_use, &found.findings[..]), (0, &[][..]), "{payer}");
        let told = [found.escrow, budget.reserved()].map(|sum| u128::from(sum.atomic()));
        let channels = budget.journal().channels();
        assert_eq!(told, [of_chain; 2], "{payer} knows what is left in its channels: {channels:#?}");
    }
    assert_eq!(seen, records.len());
    format!(
        "presented {sent} times, {} with deposits, {} refunds told, {} answers lost for good {:?}, {} paid for again, {} placed again {:?}",
        bought.deposits,
        bought.refunds,
        bought.lost.len(),
        bought.lost,
        bought.unknown.len(),
        bought.again.values().sum::<u64>(),
        bought.again,
    )
}
