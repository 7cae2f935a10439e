//! Payment channels: a seller's and a buyer's process are killed at every point of a channel's life, and started again.
//!
//! The life (`actors.rs`) has a deposit, vouchers, a price below the offer, a top-up, claims, a refund and a withdrawal. The processes are
//! killed alone and one after the other. A buyer's kill is also a power cut: its journal loses what was not on disk.

mod actors;

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
    devnet::{BlockTime, Devnet, DevnetPort},
    vouchers::{Escrow, abi::BatchSettlement},
};

use super::{
    case::{Report, Wrong},
    matrix::{self, Backend, Tally},
    points::Point,
    process::{PATIENCE, Process},
    server::{Ahead, VALID},
    store::Store,
};
pub(crate) use actors::DONE;
use actors::{Answer, LIFE, Role, SETUP, Setup, Step, cost, done};
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
    seller: Option<Point>,
    buyer: Option<Point>,
    /// `true` if the buyer's journal loses what was not on disk.
    power_cut: bool,
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
    /// Where the seller listens now.
    target: Arc<Mutex<String>>,
    _port: DevnetPort,
    _directory: TempDir,
}

impl Stage {
    async fn open(store: Option<Store>) -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let clock = Arc::new(Ahead::default());
        let builder = Devnet::builder().block_time(BlockTime::Every(BLOCKS)).clock(clock.clone());
        let devnet = builder.start().await.expect("the devnet starts");
        let (gas, payer) = (PrivateKeySigner::random(), PrivateKeySigner::random());
        for key in [&gas, &payer] {
            devnet.fund(key.address(), U256::from(10).pow(U256::from(18)));
        }
        devnet.mint(payer.address(), Usdc::from_atomic(MINTED)).expect("the devnet mints");
        let port = devnet.serve("127.0.0.1:0").await.expect("a free port");
        let target = Arc::default();
        let setup = Setup {
            role: Role::Seller,
            node: port.url().to_string(),
            shop: relay(Arc::clone(&target)).await,
            store: store.unwrap_or_else(|| Store::Sqlite(directory.path().join("ledger.sqlite"))),
            directory: directory.path().to_owned(),
            gas_key: gas.to_bytes(),
            authorizer: random_nonce(),
            payer: payer.to_bytes(),
            pay_to: random_address(),
            ahead: 0,
            stop: None,
        };
        Self { devnet, clock, setup, payer: payer.address(), target, _port: port, _directory: directory }
    }

    async fn start(&self, role: Role, stop: Option<Point>) -> Process {
        let setup = Setup { role, stop, ahead: self.clock.get(), ..self.setup.clone() };
        let process = Process::launch("crash::channels::actor_process", SETUP, &setup).await;
        if role == Role::Seller {
            *self.target.lock().unwrap() = process.url.trim_start_matches("http://").to_owned();
        }
        process
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
    let stage = Stage::open(store).await;
    let (mut report, mut marks) = (Report::default(), Marks::default());
    let mut seller = stage.start(Role::Seller, kills.seller.clone()).await;
    let mut buyer = stage.start(Role::Buyer, kills.buyer.clone()).await;
    let (started, mut ticks) = (Instant::now(), interval(BLOCKS));
    let mut jumped = None;
    loop {
        let (mut seller_stopped, mut buyer_stopped) = (seller.stopped(), buyer.stopped());
        tokio::select! {
            Ok(_) = seller_stopped.wait_for(Option::is_some) => {
                report.kills += 1;
                stage.kill(seller).await;
                marks.look(&stage, &mut report).await;
                seller = stage.start(Role::Seller, None).await;
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
        let step = LIFE.get(done(&stage.setup.progress()));
        let ahead = match step {
            Some(Step::Withdraw) => WITHDRAW_DELAY,
            Some(Step::LookUp) => EXPIRED,
            _ => 0,
        };
        if ahead > 0 && jumped.replace(step) != Some(step) {
            stage.clock.set(stage.clock.get() + ahead);
            seller.ahead(stage.clock.get()).await;
        }
        if started.elapsed() > PATIENCE {
            report.wrong.unanswered += 1;
            report.note(format!("it stays at {step:?}"));
            break;
        }
    }
    let named = |role, process: &mut Process| process.passed().into_iter().map(move |name| (role, name)).collect();
    let passed: [Vec<_>; 2] = [named(Role::Seller, &mut seller), named(Role::Buyer, &mut buyer)];
    seller.kill().await;
    buyer.kill().await;
    marks.look(&stage, &mut report).await;
    judge(&stage, kills, &mut report).await;
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
    Seller,
    Buyer,
    BuyerByPowerCut,
    /// The buyer at some point, too.
    Both,
}

impl Victims {
    const fn name(self) -> &'static str {
        match self {
            Self::Seller => "seller",
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

/// Every second place once, on each ledger others, the buyer's with or without a power cut.
fn some(backend: Backend, passed: &[(Role, Point, bool)]) -> Vec<(Place, Kills)> {
    let first = usize::from(backend == Backend::Sqlite);
    let places = passed.iter().enumerate().skip(first).step_by(2).map(|(order, (role, last, by_chance))| {
        let point = Point { occurrence: 1 + order as u32 % last.occurrence, name: last.name.clone() };
        let victims = match role {
            Role::Seller => Victims::Seller,
            Role::Buyer if order % 4 < 2 => Victims::Buyer,
            Role::Buyer => Victims::BuyerByPowerCut,
        };
        place(backend, victims, order, (*role, point, *by_chance), None)
    });
    places.collect()
}

/// Every place at several times, the buyer's with and without a power cut; and every place of the seller with one of the buyer.
fn all(backend: Backend, passed: &[(Role, Point, bool)]) -> Vec<(Place, Kills)> {
    let buyers: Vec<&Point> =
        passed.iter().filter(|(role, ..)| *role == Role::Buyer).map(|(_, point, _)| point).collect();
    let mut kills = Vec::new();
    for (order, (role, last, by_chance)) in passed.iter().enumerate() {
        let times = BTreeSet::from_iter((1..=TIMES).map(|time| (last.occurrence * time).div_ceil(TIMES)));
        for occurrence in times {
            let at = (*role, Point { occurrence, name: last.name.clone() }, *by_chance);
            match role {
                Role::Seller => {
                    let other = buyers[kills.len() % buyers.len()];
                    let other = Point { occurrence: 1 + order as u32 % other.occurrence, name: other.name.clone() };
                    kills.push(place(backend, Victims::Seller, order, at.clone(), None));
                    kills.push(place(backend, Victims::Both, order, at, Some(other)));
                }
                Role::Buyer => {
                    kills.push(place(backend, Victims::Buyer, order, at.clone(), None));
                    kills.push(place(backend, Victims::BuyerByPowerCut, order, at, None));
                }
            }
        }
    }
    kills
}

fn place(
    backend: Backend,
    victims: Victims,
    order: usize,
    (role, point, by_chance): (Role, Point, bool),
    other: Option<Point>,
) -> (Place, Kills) {
    let by_chance = by_chance || other.is_some();
    let place = Place { backend, victims, order, role, name: point.name.clone(), by_chance };
    let power_cut = victims == Victims::BuyerByPowerCut;
    let kills = match role {
        Role::Seller => Kills { seller: Some(point), buyer: other, power_cut },
        Role::Buyer => Kills { seller: None, buyer: Some(point), power_cut },
    };
    (place, kills)
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
        "| killed | seller's ledger | points | kills | by chance | violations |\n|---|---|---|---|---|---|\n"
            .to_owned();
    let rows: BTreeSet<_> = matrix.keys().map(|place| (place.victims, place.backend)).collect();
    let mut row = |name: &str, ledger: &str, is_of_row: &dyn Fn(&Place) -> bool| {
        let (mut points, mut kills, mut by_chance, mut violations) = (0, 0, 0, 0);
        for (place, tally) in matrix.iter().filter(|(place, _)| is_of_row(place)) {
            points += 1;
            kills += tally.kills;
            *(if place.by_chance { &mut by_chance } else { &mut violations }) += tally.missed;
            violations += tally.wrong.sum();
        }
        let _ = writeln!(text, "| {name} | {ledger} | {points} | {kills} | {by_chance} | {violations} |");
    };
    for (victims, backend) in rows {
        row(victims.name(), backend.name(), &|place| (place.victims, place.backend) == (victims, backend));
    }
    row("all", "", &|_| true);
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

    let mut matrix = BTreeMap::new();
    for backend in [Backend::Sqlite, Backend::Postgres] {
        matrix.extend(kill_at(all(backend, &explore(backend).await)).await);
    }
    let table = table(&matrix);
    println!("{table}");
    let page = fs::read_to_string(report::PATH).unwrap();
    let section = report::channels(&table);
    fs::write(report::PATH, page.split(report::CHANNELS).next().unwrap().to_owned() + &section).unwrap();
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
    let kills = Kills { seller: point("CRASH_SELLER"), buyer: point("CRASH_BUYER"), power_cut };
    let (report, passed) = run(None, &kills).await;
    for (role, name) in passed {
        println!("{role:?} {name}");
    }
    assert_eq!((report.kills, report.wrong), (kills.count(), Wrong::default()), "{report:#?}");
}
