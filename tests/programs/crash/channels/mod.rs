//! Payment channels: a seller's and a buyer's process are killed at every point of a channel's life, and started again.
//!
//! The life (`actors.rs`) has a deposit, vouchers, a price below the offer, a top-up, claims, a refund and a withdrawal. The processes are
//! killed alone and one after the other. A buyer's kill is also a power cut: its journal loses what was not on disk. The seller is killed
//! also while its transaction is in the node's pool (`pool.rs`), and is started again, or another process takes over.

mod actors;
mod pool;

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
    fs,
    sync::{Arc, Mutex},
    time::Duration,
};

use alloy_primitives::{Address, B256, U256};
use alloy_provider::Provider as _;
use alloy_rpc_types_eth::Filter;
use alloy_signer_local::PrivateKeySigner;
use alloy_sol_types::{SolCall as _, SolEvent};
use serde_json::Value;
use tempfile::TempDir;
use tokio::{
    net::{TcpListener, TcpStream},
    time::{Instant, interval, sleep},
};
use tower_x402::{
    Usdc,
    vouchers::{Escrow, abi::BatchSettlement},
};
use x402_devnet::{BlockTime, Devnet, DevnetPort};

use super::{
    case::{Report, Wrong},
    matrix::{self, Backend, Tally},
    points::Point,
    process::{Next, PATIENCE, Process},
    server::{Ahead, VALID},
    store::Store,
};
pub(crate) use actors::DONE;
use actors::{Answer, LIFE, Role, SETUP, Setup, Step, cost, done};
use pool::{HOLDS, POOL, Pool};
use support::authorization::{random_address, random_nonce};

const BLOCKS: Duration = Duration::from_millis(100);
/// Seconds after which a withdrawal can be made.
const WITHDRAW_DELAY: u64 = 901;
/// Seconds after which no deposit that was signed can still be made.
const EXPIRED: u64 = VALID + 300;
const MINTED: u64 = 100_000;
/// The number of occurrences of a point at which the full matrix kills.
const TIMES: u32 = 2;

#[test]
#[ignore = "the process that is killed; the other tests start it"]
fn actor_process() {
    if let Ok(setup) = std::env::var(SETUP) {
        let filter = tracing_subscriber::EnvFilter::from_default_env();
        tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).init();
        actors::run(serde_json::from_str(&setup).unwrap());
    }
}

/// Where processes are killed: each at most once.
#[derive(Clone, Debug, Default)]
struct Kills {
    /// A point of the process, or one at which its transaction is in the [`Pool`].
    seller: Option<Point>,
    buyer: Option<Point>,
    /// `true` if the buyer's journal loses what was not on disk.
    power_cut: bool,
    node: Node,
    next: Next,
    /// For how long no block is made after a kill with a transaction in the pool.
    hold: Duration,
}

/// The state as of which the node estimates gas, and answers what is asked as of `pending`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
enum Node {
    #[default]
    Latest,
    /// After the transactions in its pool.
    Pending,
}

impl Node {
    const ALL: [Self; 2] = [Self::Latest, Self::Pending];

    const fn name(self) -> &'static str {
        match self {
            Self::Latest => "latest",
            Self::Pending => "pending",
        }
    }
}

impl Kills {
    fn count(&self) -> usize {
        usize::from(self.seller.is_some()) + usize::from(self.buyer.is_some())
    }
}

/// Everything except the two processes.
struct Stage {
    devnet: Devnet,
    clock: Arc<Ahead>,
    setup: Setup,
    payer: Address,
    /// The gas key of another process.
    other_key: B256,
    pool: Pool,
    /// Where the seller listens now.
    target: Arc<Mutex<String>>,
    _port: DevnetPort,
    _directory: TempDir,
}

impl Stage {
    async fn open(store: Option<Store>, kills: &Kills) -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let clock = Arc::new(Ahead::default());
        let builder = Devnet::builder().block_time(BlockTime::Every(BLOCKS)).clock(clock.clone());
        let builder = builder.pending_state(kills.node == Node::Pending);
        let devnet = builder.start().await.expect("the devnet starts");
        let [gas, other, payer] = [(); 3].map(|()| PrivateKeySigner::random());
        for key in [&gas, &other, &payer] {
            devnet.fund(key.address(), U256::from(10).pow(U256::from(18)));
        }
        devnet.mint(payer.address(), Usdc::from_atomic(MINTED)).expect("the devnet mints");
        let pool = Pool::watch(&devnet, [gas.address(), other.address()], kills.seller.clone());
        let port = devnet.serve("127.0.0.1:0").await.expect("a free port");
        let target = Arc::default();
        // On PostgreSQL its channels have a gas key of their own.
        let has_one_key = matches!(store, None | Some(Store::Sqlite(_)));
        let setup = Setup {
            role: Role::Seller,
            node: port.url().to_string(),
            shop: relay(Arc::clone(&target)).await,
            store: store.unwrap_or_else(|| Store::Sqlite(directory.path().join("ledger.sqlite"))),
            directory: directory.path().to_owned(),
            gas_key: gas.to_bytes(),
            has_one_key,
            authorizer: random_nonce(),
            payer: payer.to_bytes(),
            pay_to: random_address(),
            ahead: 0,
            stop: None,
        };
        let (payer, other_key) = (payer.address(), other.to_bytes());
        Self { devnet, clock, setup, payer, other_key, pool, target, _port: port, _directory: directory }
    }

    async fn start(&self, role: Role, stop: Option<Point>) -> Process {
        let process = self.launch(Setup { role, stop, ..self.setup.clone() }).await;
        if role == Role::Seller {
            self.lead_to(&process);
        }
        process
    }

    async fn launch(&self, setup: Setup) -> Process {
        let setup = Setup { ahead: self.clock.get(), ..setup };
        Process::launch("crash::channels::actor_process", SETUP, &setup).await
    }

    /// Leads buyers to this seller from now on.
    fn lead_to(&self, seller: &Process) {
        *self.target.lock().unwrap() = seller.url.trim_start_matches("http://").to_owned();
    }

    /// Kills a process that has stopped at a point.
    async fn kill(&self, process: Process) {
        let at = process.stopped().borrow().clone().unwrap_or_default();
        if at.ends_with(": begun") {
            // The node or the seller takes what was sent.
            sleep(Duration::from_millis(20)).await;
        }
        process.kill().await;
    }
}

/// Opens a port that leads to the seller's, which changes with every life of it. Returns its URL.
async fn relay(target: Arc<Mutex<String>>) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let url = format!("http://{}", listener.local_addr().expect("it is bound"));
    tokio::spawn(async move {
        while let Ok((mut buyer, _)) = listener.accept().await {
            let target = target.lock().unwrap().clone();
            tokio::spawn(async move {
                if let Ok(mut seller) = TcpStream::connect(target).await {
                    let _ = tokio::io::copy_bidirectional(&mut buyer, &mut seller).await;
                }
            });
        }
    });
    url
}

/// The highest sums seen so far, which must not fall.
#[derive(Default)]
struct Marks {
    charged: u128,
    claimed: u128,
}

impl Marks {
    async fn look(&mut self, stage: &Stage, report: &mut Report) {
        let charged =
            stage.setup.store.channels(stage.clock.clone()).await.first().map_or(0, |record| record.charged());
        let claimed = Chain::read(stage).await.claimed;
        if charged < self.charged || claimed < self.claimed {
            report.wrong.lost += 1;
            report.note(format!(
                "charged {} and now {charged}, claimed {} and now {claimed}",
                self.charged, self.claimed
            ));
        }
        *self = Self { charged, claimed };
    }
}

/// Lets a channel live, with these kills, and checks the result.
async fn run(store: Option<Store>, kills: &Kills) -> (Report, Vec<(Role, String)>) {
    let stage = Stage::open(store, kills).await;
    let (mut report, mut marks) = (Report::default(), Marks::default());
    let stop = kills.seller.clone().filter(|point| !point_is_of_pool(Some(point)));
    let mut seller = stage.start(Role::Seller, stop).await;
    let mut other = match kills.next {
        Next::Restarted => None,
        Next::Another => Some(stage.launch(Setup { gas_key: stage.other_key, ..stage.setup.clone() }).await),
    };
    let mut buyer = stage.start(Role::Buyer, kills.buyer.clone()).await;
    let (mut progress, mut ticks) = ((Instant::now(), 0), interval(BLOCKS));
    let (mut jumped, mut killed, mut release) = (None, None, None);
    loop {
        let (mut seller_stopped, mut buyer_stopped) = (seller.stopped(), buyer.stopped());
        let is_stopped = async {
            tokio::select! {
                stopped = seller_stopped.wait_for(Option::is_some) => stopped.is_ok(),
                () = stage.pool.held() => true,
            }
        };
        tokio::select! {
            true = is_stopped, if killed.is_none() => {
                report.kills += 1;
                stage.kill(seller).await;
                killed = Some((Instant::now(), done(&stage.setup.progress())));
                seller = match other.take() {
                    Some(other) => other,
                    None => {
                        marks.look(&stage, &mut report).await;
                        stage.start(Role::Seller, None).await
                    }
                };
                stage.lead_to(&seller);
                release = Some(Instant::now() + kills.hold);
            }
            Ok(_) = buyer_stopped.wait_for(Option::is_some) => {
                report.kills += 1;
                stage.kill(buyer).await;
                if kills.power_cut && stage.setup.synced().exists() {
                    fs::copy(stage.setup.synced(), stage.setup.journal()).expect("a copy");
                }
                buyer = stage.start(Role::Buyer, None).await;
            }
            is_done = buyer.done() => {
                if !is_done {
                    report.wrong.open += 1;
                    report.note("the buyer ended");
                }
                break;
            }
            _ = ticks.tick() => {}
        }
        if release.is_some_and(|at| Instant::now() >= at) {
            stage.devnet.stall(false);
        }
        if let Some((at, steps)) = killed
            && report.waited.is_zero()
            && done(&stage.setup.progress()) > steps
        {
            report.waited = at.elapsed();
        }
        let steps = done(&stage.setup.progress());
        if steps > progress.1 {
            progress = (Instant::now(), steps);
        }
        let step = LIFE.get(steps);
        let ahead = match step {
            Some(Step::Withdraw) => WITHDRAW_DELAY,
            Some(Step::LookUp) => EXPIRED,
            _ => 0,
        };
        if ahead > 0 && jumped.replace(step) != Some(step) {
            stage.clock.set(stage.clock.get() + ahead);
            for seller in [&mut seller].into_iter().chain(&mut other) {
                seller.ahead(stage.clock.get()).await;
            }
        }
        if progress.0.elapsed() > PATIENCE {
            report.wrong.unanswered += 1;
            let refused = fs::read_to_string(stage.setup.refused()).unwrap_or_default();
            report.note(format!("it stays at {step:?}; last refused: {:?}", refused.lines().last()));
            break;
        }
    }
    stage.devnet.stall(false);
    let named = |role, process: &mut Process| process.passed().into_iter().map(move |name| (role, name)).collect();
    let pooled: Vec<_> = stage.pool.sent().into_iter().map(|name| (Role::Seller, name)).collect();
    let passed: [Vec<_>; 3] = [named(Role::Seller, &mut seller), pooled, named(Role::Buyer, &mut buyer)];
    if let Some(other) = other {
        other.kill().await;
    }
    seller.kill().await;
    buyer.kill().await;
    marks.look(&stage, &mut report).await;
    judge(&stage, kills, &mut report).await;
    stage.devnet.faults().clear();
    (report, passed.concat())
}

/// What the chain has of the channel, in atomic units.
#[derive(Clone, Debug, Default)]
struct Chain {
    deposits: Vec<(B256, u128)>,
    claimed: u128,
    refunded: u128,
    withdrawn: u128,
    balance: u128,
}

impl Chain {
    async fn read(stage: &Stage) -> Self {
        let filter = Filter::new().from_block(0).address(Escrow::ADDRESS);
        let logs = stage.devnet.provider().get_logs(&filter).await.expect("the devnet answers");
        let (mut chain, mut ids) = (Self::default(), BTreeSet::new());
        for log in logs {
            let transaction = log.transaction_hash.expect("it is in a block");
            ids.extend((log.topic0() != Some(&BatchSettlement::Settled::SIGNATURE_HASH)).then(|| log.topics()[1]));
            if let Ok(deposited) = log.log_decode::<BatchSettlement::Deposited>() {
                chain.deposits.push((transaction, deposited.inner.amount));
            } else if let Ok(claimed) = log.log_decode::<BatchSettlement::Claimed>() {
                chain.claimed += claimed.inner.claimAmount;
            } else if let Ok(refunded) = log.log_decode::<BatchSettlement::Refunded>() {
                chain.refunded += refunded.inner.amount;
            } else if let Ok(withdrawn) = log.log_decode::<BatchSettlement::WithdrawFinalized>() {
                chain.withdrawn += withdrawn.inner.amount;
            }
        }
        assert!(ids.len() <= 1, "the buyer has one channel: {ids:?}");
        if let Some(id) = ids.pop_first() {
            let asked = BatchSettlement::channelsCall { channelId: id }.abi_encode();
            let answer = stage.devnet.call(Escrow::ADDRESS, asked).expect("the contract answers");
            let state = BatchSettlement::channelsCall::abi_decode_returns(&answer).expect("its answer");
            assert_eq!(state.totalClaimed, chain.claimed);
            chain.balance = state.balance;
        }
        chain
    }

    fn left(&self) -> u128 {
        self.balance - self.claimed
    }
}

/// Compares the chain, the seller's books, the buyer's books and the answers.
async fn judge(stage: &Stage, kills: &Kills, report: &mut Report) {
    let chain = Chain::read(stage).await;
    let deposited: u128 = chain.deposits.iter().map(|(_, amount)| amount).sum();
    let balance = |account| u128::from(stage.devnet.balance_of(account).expect("the devnet answers").atomic());
    let mut wrong = Wrong::default();
    let mut again = stage.pool.in_vain(&stage.devnet).await;
    // A process does not know what others with their own keys have in a pool that the node does not show.
    if kills.next == Next::Another && kills.node == Node::Latest && !kills.hold.is_zero() {
        report.in_vain = std::mem::take(&mut again).len();
    }
    let mut check = |count: &mut usize, is_right: bool, detail: String| {
        if !is_right {
            *count += 1;
            report.note(detail);
        }
    };

    let sums = format!("{chain:?}");
    let is_even = deposited == chain.claimed + chain.refunded + chain.withdrawn + chain.left();
    check(&mut wrong.lost, is_even, format!("deposits are not claims, refunds, withdrawals and what is left: {sums}"));
    let payee = balance(stage.setup.pay_to);
    check(&mut wrong.lost, payee == chain.claimed, format!("the payee has {payee} of {sums}"));
    let payer = balance(stage.payer) + deposited - chain.refunded - chain.withdrawn;
    check(&mut wrong.lost, payer == u128::from(MINTED), format!("the payer had {MINTED} and now {payer} of {sums}"));
    let records = stage.setup.store.channels(stage.clock.clone()).await;
    let charged = records.first().map_or(0, |record| record.charged());
    check(&mut wrong.lost, charged == chain.claimed, format!("{charged} was charged, and claimed {sums}"));
    let is_few = chain.deposits.len() <= 4 + kills.count();
    check(&mut wrong.doubled, is_few, format!("more deposits than asked for: {sums}"));
    check(&mut wrong.doubled, again.is_empty(), format!("transactions of what was done or under way: {again:?}"));
    if kills.buyer.is_none() {
        let refused = fs::read_to_string(stage.setup.refused()).unwrap_or_default();
        // The buyer does not know yet that it has withdrawn, or is to repeat the request later.
        let is_right = |line: &&str| {
            let is_withdrawn = line.starts_with("after the withdrawal") && line.contains("exceeds_balance");
            is_withdrawn || line.contains("channel_busy")
        };
        let refused: Vec<_> = refused.lines().filter(|line| !is_right(line)).collect();
        check(&mut wrong.unanswered, refused.is_empty(), format!("refused: {refused:?}"));
    }

    let answers = fs::read_to_string(stage.setup.answers()).unwrap_or_default();
    let answers: Vec<Answer> = answers.lines().map(|line| serde_json::from_str(line).expect("an answer")).collect();
    let (mut bought, mut by_voucher) = (BTreeMap::new(), BTreeMap::new());
    for Answer { question, max, text, receipt } in answers.iter().filter(|answer| !answer.question.is_empty()) {
        let told = receipt["extra"]["chargedAmount"].as_str().and_then(|amount| amount.parse::<u64>().ok());
        let deposit = receipt["transaction"].as_str().and_then(|hash| hash.parse().ok());
        let is_true = receipt["success"] == Value::Bool(true)
            && told == Some(cost(question))
            && deposit.is_none_or(|hash: B256| chain.deposits.iter().any(|(known, _)| *known == hash));
        check(&mut wrong.untrue, is_true, format!("{question}: told {receipt}"));
        bought.insert(text.clone(), u128::from(cost(question)));
        let first = by_voucher.entry((question.clone(), *max)).or_insert_with(|| text.clone());
        check(
            &mut wrong.reworked,
            first == text,
            format!("{question}: two answers to one voucher, {first} and {text}"),
        );
    }
    let worth: u128 = bought.values().sum();
    check(&mut wrong.lost, charged >= worth, format!("answers for {worth} were charged {charged}"));
    check(&mut wrong.doubled, charged <= worth, format!("answers for {worth} were charged {charged}"));

    let found = fs::read_to_string(stage.setup.found()).unwrap_or_default();
    let found: Value = serde_json::from_str(&found).unwrap_or_default();
    let sums = [&found["escrow"], &found["reserved"]].map(|sum| sum.as_u64().map(u128::from));
    let is_known = sums == [Some(chain.left()); 2] && found["findings"] == "[]";
    check(&mut wrong.open, is_known, format!("the buyer found {found} of {chain:?}"));
    report.wrong.add(wrong);
}

/// One row of the matrix.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Place {
    backend: Backend,
    victims: Victims,
    node: Node,
    /// Places in the order they were first passed.
    order: usize,
    role: Role,
    name: String,
    /// `true` if a run that looked for places did not pass it.
    by_chance: bool,
}

/// Who is killed, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Victims {
    /// The seller, while its transaction is in the pool, and no block is made until some time after its restart.
    InPool,
    /// The same, and another process takes over.
    InPoolForAnother,
    Seller,
    /// The seller, and another process takes over.
    SellerForAnother,
    Buyer,
    BuyerByPowerCut,
    /// The buyer at some point, too.
    Both,
}

impl Victims {
    const fn name(self) -> &'static str {
        match self {
            Self::Seller => "seller",
            Self::SellerForAnother => "seller, another process takes over",
            Self::InPool => "seller, transaction in the pool",
            Self::InPoolForAnother => "seller, transaction in the pool, another process takes over",
            Self::Buyer => "buyer",
            Self::BuyerByPowerCut => "buyer, power cut",
            Self::Both => "seller and buyer",
        }
    }
}

/// Returns the points that the processes pass if nobody is killed, in order, and how often each is passed at least. A channel lives twice,
/// because no two lives are the same.
async fn explore(backend: Backend) -> Vec<(Role, Point, bool)> {
    let lives = matrix::each(vec![(); 2], move |()| async move {
        let (report, passed) = run(backend.store(), &Kills::default()).await;
        assert_eq!(report.wrong, Wrong::default(), "{report:#?}");
        passed
    });
    let lives = lives.await;
    let mut places: Vec<(Role, Point, bool)> = Vec::new();
    for place in lives.iter().flatten() {
        if places.iter().any(|(role, point, _)| (*role, &point.name) == (place.0, &place.1)) {
            continue;
        }
        let counts = lives.iter().map(|life| life.iter().filter(|passed| *passed == place).count() as u32);
        let occurrence = counts.clone().filter(|count| *count > 0).min().unwrap_or_default();
        places.push((place.0, Point { name: place.1.clone(), occurrence }, counts.clone().any(|count| count == 0)));
    }
    assert!(places.iter().any(|(role, ..)| *role == Role::Buyer));
    places
}

/// Every second place once, on each ledger others, the buyer's with or without a power cut. A deposit and a refund in the pool on each.
fn some(backend: Backend, passed: &[(Role, Point, bool)]) -> Vec<(Place, Kills)> {
    let first = usize::from(backend == Backend::Sqlite);
    let is_chosen = |(order, at): &(usize, &(Role, Point, bool))| order % 2 == first || at.1.name.starts_with(POOL);
    let places = passed.iter().enumerate().filter(is_chosen).map(|(order, (role, last, by_chance))| {
        let point = Point { occurrence: 1 + order as u32 % last.occurrence, name: last.name.clone() };
        let victims = match role {
            Role::Seller if last.name.starts_with(POOL) => Victims::InPool,
            Role::Seller => Victims::Seller,
            Role::Buyer if order % 4 < 2 => Victims::Buyer,
            Role::Buyer => Victims::BuyerByPowerCut,
        };
        let node = Node::ALL[(order / 2 + first) % 2];
        place((backend, victims, node), order, (*role, point, *by_chance), None)
    });
    places.collect()
}

/// Every place at several times, the buyer's with and without a power cut; and every place of the seller with one of the buyer. Each place of
/// the seller alone on both kinds of nodes, and each transaction in the pool, for a while and for longer.
fn all(backend: Backend, passed: &[(Role, Point, bool)]) -> Vec<(Place, Kills)> {
    let buyers: Vec<&Point> =
        passed.iter().filter(|(role, ..)| *role == Role::Buyer).map(|(_, point, _)| point).collect();
    let shares_ledger = backend != Backend::Sqlite;
    let mut kills = Vec::new();
    for (order, (role, last, by_chance)) in passed.iter().enumerate() {
        let at = |occurrence| (*role, Point { occurrence, name: last.name.clone() }, *by_chance);
        if last.name.starts_with(POOL) {
            let takers = [Some(Victims::InPool), shares_ledger.then_some(Victims::InPoolForAnother)];
            for (occurrence, victims) in (1..=last.occurrence).flat_map(|n| takers.map(|victims| (n, victims))) {
                let Some(victims) = victims else { continue };
                for (node, hold) in Node::ALL.into_iter().flat_map(|node| HOLDS.map(|hold| (node, hold))) {
                    let (place, of_place) = place((backend, victims, node), order, at(occurrence), None);
                    kills.push((place, Kills { hold, ..of_place }));
                }
            }
            continue;
        }
        let mut times = Vec::from_iter((1..=TIMES).map(|time| (last.occurrence * time).div_ceil(TIMES)));
        for (node, occurrence) in Node::ALL.into_iter().zip(times.clone()) {
            if *role == Role::Seller {
                kills.push(place((backend, Victims::Seller, node), order, at(occurrence), None));
            }
        }
        times.dedup();
        for (nth, occurrence) in times.into_iter().enumerate() {
            let node = Node::ALL[(order + nth) % 2];
            match role {
                Role::Seller if nth > 0 => {}
                Role::Seller => {
                    let other = buyers[kills.len() % buyers.len()];
                    let other = Point { occurrence: 1 + order as u32 % other.occurrence, name: other.name.clone() };
                    kills.push(place((backend, Victims::Both, node), order, at(occurrence), Some(other)));
                    if shares_ledger {
                        kills.push(place((backend, Victims::SellerForAnother, node), order, at(occurrence), None));
                    }
                }
                Role::Buyer => {
                    kills.push(place((backend, Victims::Buyer, node), order, at(occurrence), None));
                    kills.push(place((backend, Victims::BuyerByPowerCut, node), order, at(occurrence), None));
                }
            }
        }
    }
    kills
}

fn place(
    (backend, victims, node): (Backend, Victims, Node),
    order: usize,
    (role, point, by_chance): (Role, Point, bool),
    other: Option<Point>,
) -> (Place, Kills) {
    let by_chance = by_chance || other.is_some();
    let place = Place { backend, victims, node, order, role, name: point.name.clone(), by_chance };
    let (seller, buyer) = match role {
        Role::Seller => (Some(point), other),
        Role::Buyer => (None, Some(point)),
    };
    let next = match victims {
        Victims::SellerForAnother | Victims::InPoolForAnother => Next::Another,
        _ => Next::Restarted,
    };
    let hold = if point_is_of_pool(seller.as_ref()) { HOLDS[0] } else { Duration::ZERO };
    (place, Kills { seller, buyer, power_cut: victims == Victims::BuyerByPowerCut, node, next, hold })
}

fn point_is_of_pool(point: Option<&Point>) -> bool {
    point.is_some_and(|point| point.name.starts_with(POOL))
}

/// Kills the processes at all of these places, and checks the results.
async fn kill_at(kills: Vec<(Place, Kills)>) -> BTreeMap<Place, Tally> {
    let done = matrix::each(kills, |(place, mut kills)| async move {
        let mut again = matrix::AGAIN;
        loop {
            let (report, _) = run(place.backend.store(), &kills).await;
            let killed_at = format!("{kills:?}");
            let point = if place.role == Role::Seller { &mut kills.seller } else { &mut kills.buyer };
            let occurrence = point.as_mut().map(|point| &mut point.occurrence).expect("it has a point");
            if report.kills > 0 || report.wrong != Wrong::default() || (*occurrence == 1 && again == 0) {
                return (place, kills.count(), killed_at, report);
            }
            // Lives differ: transactions are looked for a varying number of times.
            match *occurrence {
                1 => again -= 1,
                _ => *occurrence /= 2,
            }
        }
    });
    let mut matrix = BTreeMap::<Place, Tally>::new();
    for (place, wanted, killed_at, report) in done.await {
        let tally = matrix.entry(place).or_default();
        tally.kills += report.kills;
        tally.missed += wanted - report.kills;
        tally.wrong.add(report.wrong);
        tally.waited = tally.waited.max(report.waited);
        tally.in_vain += report.in_vain;
        for detail in &report.details {
            eprintln!("{killed_at}: {detail}");
        }
        tally.details.extend(report.details.iter().map(|detail| format!("{killed_at}: {detail}")));
    }
    matrix
}

/// Checks that nothing went wrong, and that every place was reached again, except those that are reached by chance.
fn is_flawless(matrix: &BTreeMap<Place, Tally>) {
    let wrong: Vec<_> = matrix.iter().filter(|(_, tally)| tally.wrong != Wrong::default()).collect();
    assert!(wrong.is_empty(), "{wrong:#?}");
    let missed: Vec<_> = matrix.iter().filter(|(place, tally)| tally.missed > 0 && !place.by_chance).collect();
    assert!(missed.is_empty(), "not reached again: {missed:#?}");
}

/// The table of the published page.
fn table(matrix: &BTreeMap<Place, Tally>) -> String {
    let mut text =
        "| killed | seller's ledger | node | points | kills | by chance | violations | in vain | longest wait |\n|---|---|---|---|---|---|---|---|---|\n"
            .to_owned();
    let rows: BTreeSet<_> = matrix.keys().map(|place| (place.victims, place.backend, place.node)).collect();
    let mut row = |[name, ledger, node]: [&str; 3], is_of_row: &dyn Fn(&Place) -> bool| {
        let (mut points, mut kills, mut by_chance, mut violations, mut in_vain) = (0, 0, 0, 0, 0);
        let mut waited = Duration::ZERO;
        for (place, tally) in matrix.iter().filter(|(place, _)| is_of_row(place)) {
            points += 1;
            kills += tally.kills;
            *(if place.by_chance { &mut by_chance } else { &mut violations }) += tally.missed;
            violations += tally.wrong.sum();
            in_vain += tally.in_vain;
            waited = waited.max(tally.waited);
        }
        let waited = if waited.is_zero() { String::new() } else { format!("{:.1}", waited.as_secs_f64()) };
        let _ = writeln!(
            text,
            "| {name} | {ledger} | {node} | {points} | {kills} | {by_chance} | {violations} | {in_vain} | {waited} |"
        );
    };
    for of_row in rows {
        let (victims, backend, node) = of_row;
        row([victims.name(), backend.name(), node.name()], &|place| {
            (place.victims, place.backend, place.node) == of_row
        });
    }
    row(["all", "", ""], &|_| true);
    text
}

async fn small_matrix(backend: Backend) {
    let matrix = kill_at(some(backend, &explore(backend).await)).await;
    println!("{}", table(&matrix));
    is_flawless(&matrix);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_channel_survives_every_kill_on_sqlite() {
    small_matrix(Backend::Sqlite).await;
}

#[cfg(feature = "test-postgres")]
#[tokio::test(flavor = "multi_thread")]
async fn a_channel_survives_every_kill_on_postgres() {
    small_matrix(Backend::Postgres).await;
}

/// A control: the matrix finds the losses of a ledger in memory.
#[tokio::test(flavor = "multi_thread")]
async fn matrix_detects_a_seller_that_loses_its_channels() {
    let seller = Some(Point { name: "response: ready".into(), occurrence: 2 });
    let (report, _) = run(Some(Store::Nowhere), &Kills { seller, ..Kills::default() }).await;
    assert_eq!((report.kills, report.wrong.lost > 0), (1, true), "{report:#?}");
}

/// The full matrix. Writes its table to `docs/`.
#[cfg(feature = "test-postgres")]
#[tokio::test(flavor = "multi_thread")]
#[ignore = "takes many minutes"]
async fn full_channel_matrix() {
    use super::report;

    let mut planned = BTreeMap::<Victims, Vec<_>>::new();
    for backend in [Backend::Sqlite, Backend::Postgres] {
        for (place, kills) in all(backend, &explore(backend).await) {
            planned.entry(place.victims).or_default().push((place, kills));
        }
    }
    let mut matrix = BTreeMap::new();
    for kills in planned.into_values() {
        matrix.extend(kill_at(kills).await);
        let table = table(&matrix);
        println!("{table}");
        let page = fs::read_to_string(report::PATH).unwrap();
        let section = report::channels(&table);
        fs::write(report::PATH, page.split(report::CHANNELS).next().unwrap().to_owned() + &section).unwrap();
    }
    is_flawless(&matrix);
    assert!(matrix.values().map(|tally| tally.kills).sum::<usize>() >= 500);
}

/// A tool that runs one case and prints its result.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs CRASH_SELLER or CRASH_BUYER"]
async fn one_channel_case() {
    let point = |name| {
        let text = std::env::var(name).ok()?;
        let (name, occurrence) = text.rsplit_once('#').unwrap();
        Some(Point { name: name.to_owned(), occurrence: occurrence.parse().unwrap() })
    };
    let power_cut = std::env::var_os("CRASH_POWER_CUT").is_some();
    let is_set = |name| std::env::var_os(name).is_some();
    let node = if is_set("CRASH_PENDING") { Node::Pending } else { Node::Latest };
    let next = if is_set("CRASH_ANOTHER") { Next::Another } else { Next::Restarted };
    let hold = std::env::var("CRASH_HOLD").map_or(HOLDS[0], |seconds| Duration::from_secs(seconds.parse().unwrap()));
    let (seller, buyer) = (point("CRASH_SELLER"), point("CRASH_BUYER"));
    let kills = Kills { seller, buyer, power_cut, node, next, hold };
    #[cfg(feature = "test-postgres")]
    let backend = if is_set("CRASH_LEDGER") { Backend::Postgres } else { Backend::Sqlite };
    #[cfg(not(feature = "test-postgres"))]
    let backend = Backend::Sqlite;
    let (report, passed) = run(backend.store(), &kills).await;
    println!("waited {:.1} s", report.waited.as_secs_f64());
    for (role, name) in passed {
        println!("{role:?} {name}");
    }
    assert_eq!((report.kills, report.wrong), (kills.count(), Wrong::default()), "{report:#?}");
}
