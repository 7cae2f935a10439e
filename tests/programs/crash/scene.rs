//! A chain, a seller on it and its buyers, over several lives of the seller's process.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
    time::Duration,
};

use alloy_primitives::{Address, B256, U256};
use alloy_signer_local::PrivateKeySigner;
use alloy_sol_types::SolCall as _;
use reqwest::{Client, StatusCode};
use tempfile::TempDir;
use tokio::{
    sync::watch,
    task::JoinSet,
    time::{Instant, interval, timeout},
};
use tower_x402::{
    Usdc,
    facilitator::{FacilitatorError, OnchainFacilitator},
    protocol::payment_status::{State, Status},
};
use x402_devnet::{BlockTime, Devnet, DevnetPort};

use super::{
    buyers::{Buyer, Said, client},
    facilitator_server::FacilitatorServer,
    points::Point,
    process::{PATIENCE, Process},
    server::{Ahead, Flow, PRICE, Setup, VALID, Via},
    store::Store,
};
use support::{
    authorization::{random_address, random_nonce},
    permit::approve,
    shop::Customer,
    token::Token,
};

/// The block time: short, so that runs are, and long enough that transactions wait for a block.
const BLOCKS: Duration = Duration::from_millis(100);
/// The interval at which a scene is polled.
const TICK: Duration = Duration::from_millis(150);
/// The seconds by which clocks are put ahead at a time, so that payments become final or expire.
const JUMP: u64 = 120;
/// The most by which clocks are put ahead before the payments would expire.
const FURTHEST: u64 = 2_500;
/// The time at which all payments have expired.
const EXPIRED: u64 = VALID + 300;

/// Everything except the seller's process.
pub(crate) struct Scene {
    pub(crate) devnet: Devnet,
    pub(crate) setup: Setup,
    /// The remote facilitator, if there is one.
    pub(crate) facilitator: Option<FacilitatorServer>,
    pub(crate) buyers: Vec<Arc<Buyer>>,
    pub(crate) clock: Arc<Ahead>,
    /// Payments before points are counted, which give payers credit.
    pub(crate) earlier: Vec<Arc<Buyer>>,
    payers: Vec<Address>,
    client: Client,
    /// The number of requests to the node so far.
    asked: watch::Receiver<u64>,
    /// When the last buyer of the current life got its first answer.
    pub(crate) answered: Mutex<Option<Instant>>,
    _port: DevnetPort,
    _directory: TempDir,
}

/// One life of the process.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Life {
    /// The number of lives before it.
    pub(crate) number: u64,
    /// The number of buyers that present their payments to it.
    pub(crate) buyers: usize,
    /// `true` if it is the last life, which finishes every payment.
    pub(crate) is_last: bool,
}

/// The end of a life of the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ended {
    /// It stopped at its point.
    Stopped,
    /// Every buyer is answered, and every payment is final.
    Quiet,
    /// Something was left after the timeout.
    Stuck,
}

impl Scene {
    pub(crate) async fn new(via: Via, flow: Flow, store: Option<Store>) -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let clock = Arc::new(Ahead::default());
        let builder = Devnet::builder().block_time(BlockTime::Every(BLOCKS)).clock(clock.clone());
        let devnet = builder.start().await.expect("the devnet starts");
        let key = PrivateKeySigner::random();
        devnet.fund(key.address(), U256::from(10).pow(U256::from(18)));
        deploy(&devnet).await;
        let (ask, asked) = watch::channel(0);
        devnet.faults().set(move |_| {
            ask.send_modify(|count| *count += 1);
            x402_devnet::Fault::None
        });
        let port = devnet.serve("127.0.0.1:0").await.expect("a free port");
        let facilitator = match via {
            Via::Chain => None,
            Via::Remote | Via::Confirmed => Some(FacilitatorServer::open(&devnet, clock.clone()).await),
        };
        let setup = Setup {
            via,
            facilitator_url: facilitator.as_ref().map(|facilitator| facilitator.url.clone()),
            node: port.url().to_string(),
            store: store.unwrap_or_else(|| Store::Sqlite(directory.path().join("ledger.sqlite"))),
            flow,
            settlement_key: key.to_bytes(),
            pay_to: random_address(),
            runs: directory.path().join("runs"),
            ahead: 0,
            armed: false,
            stop: None,
        };
        Self {
            devnet,
            setup,
            facilitator,
            buyers: Vec::new(),
            earlier: Vec::new(),
            payers: Vec::new(),
            clock,
            client: client(),
            asked,
            answered: Mutex::default(),
            _port: port,
            _directory: directory,
        }
    }

    /// Starts the process for the first time, and has `payments` signed for, every two by one payer.
    pub(crate) async fn open(&mut self, payments: usize, stop: Option<Point>) -> Process {
        let mut process = Process::start(&Setup { stop, ..self.setup.clone() }).await;
        let customers: Vec<_> = (0..payments.div_ceil(2)).map(|_| self.customer()).collect();
        self.payers = customers.iter().map(|customer| customer.from).collect();
        for number in 0..payments {
            let customer = &customers[number / 2];
            self.buyers.push(Buyer::new(&self.client, &process.url, customer, number).await);
        }
        if matches!(self.setup.flow, Flow::Deferred | Flow::Spent) {
            // Nobody owes more than it has paid.
            for number in 0..payments {
                let customer = &customers[number / 2];
                self.earlier.push(Buyer::new(&self.client, &process.url, customer, 1_000 + number).await);
            }
            let mut known = JoinSet::new();
            for buyer in &self.earlier {
                let (buyer, client, url) = (buyer.clone(), self.client.clone(), process.url.clone());
                known.spawn(async move { buyer.persist(&client, &url).await });
            }
            let known = timeout(PATIENCE, known.join_all()).await.expect("payers become known");
            assert!(known.iter().all(|said| *said == Said::Served));
            self.wait_until_final(&process.url).await;
        }
        process.arm().await;
        process
    }

    /// Starts the process again on its ledger.
    pub(crate) async fn reopen(&self, stop: Option<Point>) -> Process {
        Process::start(&Setup { stop, armed: true, ahead: self.clock.get(), ..self.setup.clone() }).await
    }

    /// Starts another process on the ledger, beside the first one.
    pub(crate) async fn another(&self) -> Process {
        let key = PrivateKeySigner::random();
        self.devnet.fund(key.address(), U256::from(10).pow(U256::from(18)));
        Process::start(&Setup { settlement_key: key.to_bytes(), ..self.setup.clone() }).await
    }

    fn customer(&self) -> Customer {
        let signer = PrivateKeySigner::random();
        let price = if self.setup.flow == Flow::UpTo { 2 * PRICE } else { PRICE };
        self.devnet.mint(signer.address(), Usdc::from_atomic(4 * price)).expect("the devnet mints");
        if self.setup.flow == Flow::UpTo {
            approve(&self.devnet, signer.address(), U256::from(3 * price));
        }
        Customer { from: signer.address(), signer }
    }

    /// Lets half of the payers transfer their balances away.
    pub(crate) fn spend_elsewhere(&self) {
        for payer in self.payers.iter().filter(|payer| self.spends_elsewhere(**payer)) {
            let value = self.devnet.balance_of(*payer).expect("the devnet answers").into();
            let all = Token::transferCall { to: random_address(), value }.abi_encode();
            self.devnet.execute(*payer, self.devnet.asset().address, all).expect("a transfer");
        }
    }

    /// Returns `true` if the payer is one that transfers its balance away.
    pub(crate) fn spends_elsewhere(&self, payer: Address) -> bool {
        let half = self.payers.iter().take(self.payers.len() / 2);
        self.setup.flow == Flow::Spent && half.into_iter().any(|other| *other == payer)
    }

    async fn wait_until_final(&self, url: &str) {
        let paid = async {
            while !self.are_final(&self.earlier, url).await {
                tokio::time::sleep(TICK).await;
            }
        };
        timeout(PATIENCE, paid).await.expect("payments become final");
    }

    /// Everybody presents their payments until all are answered and paid for good, or the process stops. The clocks are put ahead only once
    /// everybody is answered: an answer that waits for the end of a lease is late.
    pub(crate) async fn live(&self, process: &mut Process, life: Life) -> Ended {
        let restart = life.number > 0;
        let mut presenting = JoinSet::new();
        let present = &self.buyers[..life.buyers];
        for buyer in present {
            let (buyer, client, url) = (buyer.clone(), self.client.clone(), process.url.clone());
            presenting.spawn(async move {
                let said = buyer.persist(&client, &url).await;
                let at = Instant::now();
                if said == Said::Served && restart {
                    // A buyer that has its answer gets the same one again.
                    buyer.persist(&client, &url).await;
                }
                at
            });
        }
        *self.answered.lock().unwrap() = None;
        let (mut stopped, started) = (process.stopped(), Instant::now());
        let mut ticks = interval(TICK);
        let (mut left_until_jump, mut quiet_ticks) = (3, 4);
        loop {
            let is_stopped = stopped.wait_for(Option::is_some);
            tokio::select! {
                _ = is_stopped => return Ended::Stopped,
                Some(at) = presenting.join_next(), if !presenting.is_empty() => {
                    let at = at.expect("a buyer does not panic");
                    let mut last = self.answered.lock().unwrap();
                    *last = (*last).max(Some(at));
                    continue;
                }
                _ = ticks.tick() => {}
            }
            let answered = presenting.is_empty();
            if answered && self.are_final(present, &process.url).await {
                // Time in which a wrong charge after "nothing is charged" would happen.
                if quiet_ticks == 0 || !present.iter().any(|buyer| is_refused(buyer)) {
                    return Ended::Quiet;
                }
                quiet_ticks -= 1;
            }
            if started.elapsed() > PATIENCE {
                return Ended::Stuck;
            }
            left_until_jump -= 1;
            if left_until_jump <= 0 && answered {
                left_until_jump = 8;
                let ahead = match life.is_last && self.setup.flow == Flow::Spent {
                    // Payments that are open until then are proven dead afterwards.
                    true if self.others_have_paid(&process.url).await => EXPIRED.max(self.clock.get() + 3 * JUMP),
                    // Kept responses must not age out (after 600 s) before they are asked for.
                    _ => (self.clock.get() + JUMP).min(if life.is_last { FURTHEST } else { JUMP * (life.number + 1) }),
                };
                self.clock.set(ahead);
                process.ahead(ahead).await;
            }
        }
    }

    /// Lets the node or the facilitator take what the process may have sent it just now, then ends the process.
    pub(crate) async fn kill(&self, process: Process) {
        let at = process.stopped().borrow().clone().unwrap_or_default();
        if at.ends_with(": begun") && (at.starts_with("node ") || at.starts_with("facilitator ")) {
            let mut asked = match &self.facilitator {
                Some(facilitator) if at.starts_with("facilitator ") => facilitator.asked(),
                _ => self.asked.clone(),
            };
            asked.mark_unchanged();
            // If it was asked before this looked, nothing more comes.
            let _ = timeout(Duration::from_millis(20), asked.changed()).await;
        }
        process.kill().await;
    }

    /// Returns `true` if every payment that the shop served is final or dead. A payment that was refused and not served may stay open, but must
    /// not be in flight.
    async fn are_final(&self, buyers: &[Arc<Buyer>], url: &str) -> bool {
        for buyer in buyers {
            let is_final = match self.state(buyer, url).await {
                Some(State::Final | State::Dead) => true,
                // The seller knows no more without a node; the facilitator does.
                Some(State::Settled) if self.setup.via == Via::Remote => match &self.facilitator {
                    Some(facilitator) => facilitator.is_final(&buyer.key()).await,
                    None => false,
                },
                Some(State::Settled | State::Submitted | State::Unknown) => false,
                Some(State::Pending | State::Failed) | None => is_refused(buyer),
                other => panic!("{other:?} is new"),
            };
            if !is_final {
                return false;
            }
        }
        true
    }

    async fn others_have_paid(&self, url: &str) -> bool {
        let others = self.buyers.iter().filter(|buyer| !self.spends_elsewhere(buyer.key().payer));
        self.are_final(&others.cloned().collect::<Vec<_>>(), url).await
    }

    /// Returns the seller's status of the payment; `None` if it has no record.
    async fn state(&self, buyer: &Buyer, url: &str) -> Option<State> {
        let key = buyer.key();
        let (network, asset, payer, nonce) = (key.network, key.asset, key.payer, key.nonce);
        let url = format!("{url}/status?network={network}&asset={asset}&payer={payer}&nonce={nonce}");
        let answer = self.client.get(url).timeout(Duration::from_secs(1)).send().await;
        let Ok(answer) = answer else { return Some(State::Unknown) };
        if answer.status() == StatusCode::NOT_FOUND {
            return None;
        }
        let body = answer.bytes().await.unwrap_or_default();
        Some(serde_json::from_slice::<Status>(&body).map_or(State::Unknown, |status| status.state))
    }

    /// Returns the number of times that the handler ran, for each payment.
    pub(crate) fn runs(&self) -> BTreeMap<B256, usize> {
        let mut runs = BTreeMap::new();
        for line in std::fs::read_to_string(&self.setup.runs).unwrap_or_default().lines() {
            *runs.entry(line.parse().expect("a nonce")).or_default() += 1;
        }
        runs
    }
}

fn is_refused(buyer: &Buyer) -> bool {
    buyer.refusal().is_some() && buyer.answers().is_empty()
}

/// Deploys the batch settler.
async fn deploy(devnet: &Devnet) {
    let anybody = PrivateKeySigner::from_bytes(&random_nonce()).expect("a key");
    devnet.fund(anybody.address(), U256::from(10).pow(U256::from(18)));
    let builder = OnchainFacilitator::builder().network(devnet.network()).client(devnet.rpc_client()).signer(anybody);
    let facilitator = builder.build().await.expect("the devnet answers");
    let deployed = async {
        // On a busy machine this may time out; then it is tried again.
        while let Err(error) = facilitator.deploy_batch_settler().await {
            assert!(matches!(error, FacilitatorError::Busy { .. }), "{error}");
            tokio::time::sleep(TICK).await;
        }
    };
    timeout(PATIENCE, deployed).await.expect("it is deployed");
}
