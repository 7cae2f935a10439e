//! Verifying and settling on a chain, over JSON-RPC.

use std::{
    collections::HashMap,
    fmt,
    sync::{Arc, Mutex, PoisonError, atomic::AtomicBool},
    time::Duration,
};

use alloy_network::TxSigner;
use alloy_primitives::{Address, B256, Signature, U256};
use alloy_provider::Provider;
use alloy_rpc_client::RpcClient;
use async_trait::async_trait;
use tokio::{
    sync::{Notify, Semaphore, watch},
    time::{Instant, timeout},
};
use url::Url;

pub use crate::settlement::{deploy::BatchSettler, engine::SettlementStats};
use crate::{
    clock::{Clock, SystemClock},
    facilitator::{
        Authenticity, Facilitator, FacilitatorError, Outcome, Prechecked, Readiness, Rejection, Terms, Verified,
        VerifyError,
    },
    ledger::{Funds, Ledger, MemoryLedger, PaymentKey, Record},
    metrics,
    network::Network,
    protocol::{Reason, SupportedKind, SupportedResponse},
    settlement::{
        broadcast::Broadcaster,
        costs::Costs,
        deploy::Deployment,
        depth::Depths,
        engine::{Engine, SharedSigner},
        fees::FeeCache,
        http::Endpoint,
        lane::Lane,
        member::Active,
        pace::Pace,
        probe::Probe,
        queue::Queue,
        readiness::LastLook,
        reverts::Reverts,
        rpc::Rpc,
    },
    usdc::Usdc,
};

/// How long a payment that only a contract can judge waits for its turn.
const WALLET_PATIENCE: Duration = Duration::from_secs(2);
/// How long a payer is remembered to have no code.
const CODELESS_TTL: Duration = Duration::from_secs(3);
/// How many such payers are remembered.
const CODELESS_MAX: usize = 1_024;
/// Longer times than this are mistakes.
const LONGEST: Duration = Duration::from_secs(3_600);
/// A clock this far from the chain's accepts or refuses windows wrongly; reported.
const SKEW_WARNING: u64 = 30;
/// A clock this far off cannot be worked with.
const SKEW_LIMIT: u64 = 86_400;

/// Verifies and settles EIP-3009 payments on one chain, with one settlement key.
///
/// The key pays for gas and holds no customer's money: a payment moves from payer to payee directly. Every alloy transaction
/// signer will do, a key in a KMS included.
///
/// - **Verifying** is one `eth_call`: balance, nonce, pause, blacklist, domain and a simulation of the transfer together.
/// - **Settling** takes one more request where the node has `eth_sendRawTransactionSync` ([EIP-7966]), and polls for the
///   receipt otherwise. Fees and nonces are remembered, not asked for each time.
/// - **One key, many payments.** Up to [`in_flight`](OnchainFacilitatorBuilder::in_flight) transactions wait for a block at
///   once; more queue. A nonce that was given back is used by the next payment, or by a transfer of nothing to the key itself
///   if none comes, so that nothing waits behind a gap. Other processes should not use the key; if one does, the nonces are
///   read from the chain again.
/// - **Gas is spent once on a payer's trick.** A payer two of whose payments were sent and did not pay has to wait, ever
///   longer, before anything is verified or sent for it again.
/// - **Outcomes** come from the logs of receipts only: [`Outcome::Settled`] means `AuthorizationUsed` and exactly the
///   matching `Transfer` ([EIP-3009]). A transfer that somebody else sent is credited if the payment was seen unused, and
///   reserved here, before its block.
/// - **Contract wallets** ([ERC-1271]) and accounts with delegated code ([EIP-7702]) can pay where the token asks the payer's
///   code, as USDC 2.2 does. Signatures that only such code can judge cost a request to tell from garbage, so few of them
///   are judged at a time, and payers seen without code are refused without asking for a few seconds.
///
/// ```no_run
/// # async fn example(key: impl alloy_network::TxSigner<alloy_primitives::Signature> + Send + Sync + 'static)
/// # -> Result<(), tower_x402::facilitator::OnchainBuildError> {
/// use tower_x402::{Network, facilitator::OnchainFacilitator};
///
/// let facilitator = OnchainFacilitator::builder()
///     .network(Network::BASE)
///     .rpc_url("https://mainnet.base.org")
///     .signer(key)
///     .build()
///     .await?;
/// println!("fund {} with a little ETH", facilitator.settlement_address());
/// # Ok(())
/// # }
/// ```
///
/// [EIP-3009]: https://eips.ethereum.org/EIPS/eip-3009
/// [ERC-1271]: https://eips.ethereum.org/EIPS/eip-1271
/// [EIP-7702]: https://eips.ethereum.org/EIPS/eip-7702
/// [EIP-7966]: https://eips.ethereum.org/EIPS/eip-7966
#[derive(Clone, Debug)]
pub struct OnchainFacilitator {
    engine: Arc<Engine>,
    wallets: Arc<Wallets>,
}

impl OnchainFacilitator {
    /// Settings to start from.
    pub fn builder() -> OnchainFacilitatorBuilder {
        OnchainFacilitatorBuilder::default()
    }

    /// The address of the first settlement key, which pays for gas.
    pub fn settlement_address(&self) -> Address {
        self.engine.lanes.first().map_or(Address::ZERO, Lane::account)
    }

    /// The addresses of all settlement keys.
    pub fn settlement_addresses(&self) -> Vec<Address> {
        self.engine.lanes.iter().map(Lane::account).collect()
    }

    /// The chain it settles on.
    pub fn network(&self) -> Network {
        self.engine.network
    }

    /// What the settlement key has for gas, in wei; of several keys, the one that has least. One request per key.
    ///
    /// # Errors
    /// [`FacilitatorError::Unreachable`] if the node does not say.
    pub async fn gas_tank(&self) -> Result<U256, FacilitatorError> {
        let mut least = U256::MAX;
        for lane in &self.engine.lanes {
            least = least.min(self.engine.rpc.balance(lane.account()).await?);
        }
        Ok(least)
    }

    /// Deploys the [`BatchSettler`] with the settlement key, unless the chain has it already. Returns the transaction, if it took
    /// one. Costs about 190,000 gas, once per chain; anybody's deployment serves everybody.
    ///
    /// # Errors
    /// [`FacilitatorError::Misconfigured`] if the chain lacks the [`DEPLOYER`](BatchSettler::DEPLOYER);
    /// [`FacilitatorError::Busy`] if the transaction is not in a block within
    /// [`confirm_timeout`](OnchainFacilitatorBuilder::confirm_timeout): calling again finds out. Others as when settling.
    pub async fn deploy_batch_settler(&self) -> Result<Option<B256>, FacilitatorError> {
        self.engine.deploy_batch_settler().await
    }

    /// Looks at once for open payments that nobody looks after, instead of at the next
    /// [interval](OnchainFacilitatorBuilder::upkeep_interval).
    pub fn look_after_soon(&self) {
        self.engine.hint.notify_one();
    }

    /// Shuts down: takes nothing new to settle, and returns when everything begun has come to an end, at the latest after
    /// `patience`. Whether nothing is left; what is left is in the ledger, and the next process goes on with it.
    pub async fn drain(&self, patience: Duration) -> bool {
        timeout(patience.min(LONGEST), self.engine.drain()).await.is_ok()
    }

    /// Says anew what an ether is worth; see [`native_price`](OnchainFacilitatorBuilder::native_price). $0 forgets it.
    pub fn set_native_price(&self, usdc_per_ether: Usdc) {
        self.engine.costs.set_native_price(usdc_per_ether);
    }

    /// What the transactions of this process cost, in USDC at the price now, rounded up; `None` if the
    /// [`native_price`](OnchainFacilitatorBuilder::native_price) is not known.
    pub fn spent_in_usdc(&self) -> Option<Usdc> {
        crate::ops::in_usdc(self.stats().spent, self.engine.costs.native_price()?)
    }

    /// Totals since the start.
    pub fn stats(&self) -> SettlementStats {
        self.engine.stats()
    }
}

#[async_trait]
impl Facilitator for OnchainFacilitator {
    fn ledger(&self) -> &Arc<dyn Ledger> {
        &self.engine.ledger
    }

    fn serves(&self, terms: &Terms) -> bool {
        terms.offer().network() == self.engine.network
    }

    async fn supported(&self) -> Result<SupportedResponse, FacilitatorError> {
        let kind = SupportedKind {
            x402_version: 2,
            scheme: "exact".into(),
            network: self.engine.network.to_string(),
            extra: None,
        };
        let signers = [("eip155:*".to_owned(), self.settlement_addresses().iter().map(Address::to_string).collect())];
        Ok(SupportedResponse { kinds: vec![kind], extensions: Vec::new(), signers: signers.into() })
    }

    async fn verify(&self, payment: &Prechecked) -> Result<Verified, VerifyError> {
        let started = Instant::now();
        let verified = self.look_at(payment).await;
        let result = match &verified {
            Ok(_) => "valid",
            Err(VerifyError::Invalid(_)) => "invalid",
            Err(VerifyError::Unavailable(_)) => "unavailable",
        };
        metrics::verified(self.engine.network, result, started.elapsed());
        verified
    }

    async fn settle(&self, payment: &Prechecked, verified: &Verified) -> Result<Outcome, FacilitatorError> {
        self.engine.settle(payment.clone(), *verified).await
    }

    async fn reconcile(&self, record: &Record) -> Result<Outcome, FacilitatorError> {
        self.engine.reconcile(record).await
    }

    async fn readiness(&self) -> Readiness {
        self.engine.readiness().await
    }

    fn settles_due(&self) -> bool {
        true
    }

    fn settle_soon(&self, _payment: &PaymentKey) {
        self.look_after_soon();
    }
}

impl OnchainFacilitator {
    async fn look_at(&self, payment: &Prechecked) -> Result<Verified, VerifyError> {
        let authorization = payment.authorization();
        self.engine.check_backlog()?;
        if authorization.value.is_zero() {
            return Err(Rejection::new(Reason::Value, "an authorization of nothing pays nothing").into());
        }
        if let Some(rejection) = self.engine.reverts.bars(authorization.from) {
            return Err(rejection.into());
        }
        self.engine.refuse_a_loss(authorization.value).await?;
        let judged = match payment.authenticity() {
            Authenticity::Proven => None,
            Authenticity::ChainMustJudge(_) => Some(self.wallets.enter(authorization.from).await?),
        };
        let at = self.engine.clock.now();
        let (facts, rejection) = self.engine.verify(payment).await.map_err(FacilitatorError::from)?;
        if judged.is_some() && !facts.payer_has_code() {
            self.wallets.remember_codeless(authorization.from);
        }
        match rejection {
            Some(rejection) => Err(rejection.into()),
            None => Ok(Verified {
                funds: Some(Funds { balance: facts.balance, block: facts.block }),
                gas: Some(facts.gas),
                at,
                contract_wallet: facts.payer_has_code(),
            }),
        }
    }
}

/// Bounds what payments cost whose signature only a contract can judge: anybody can make these up.
#[derive(Debug)]
struct Wallets {
    judging: Semaphore,
    codeless: Mutex<HashMap<Address, Instant>>,
}

impl Wallets {
    async fn enter(&self, payer: Address) -> Result<tokio::sync::SemaphorePermit<'_>, VerifyError> {
        let seen = self.codeless.lock().unwrap_or_else(PoisonError::into_inner).get(&payer).copied();
        if seen.is_some_and(|at| at.elapsed() < CODELESS_TTL) {
            let detail = "the payer's key did not make the signature, and the payer has no contract code";
            return Err(Rejection::new(Reason::Signature, detail).into());
        }
        match timeout(WALLET_PATIENCE, self.judging.acquire()).await {
            Ok(Ok(permit)) => Ok(permit),
            _ => {
                Err(FacilitatorError::Busy { what: "signatures of contract wallets", retry_after: WALLET_PATIENCE }
                    .into())
            }
        }
    }

    fn remember_codeless(&self, payer: Address) {
        let mut codeless = self.codeless.lock().unwrap_or_else(PoisonError::into_inner);
        if codeless.len() >= CODELESS_MAX {
            codeless.retain(|_, at| at.elapsed() < CODELESS_TTL);
        }
        if codeless.len() < CODELESS_MAX {
            codeless.insert(payer, Instant::now());
        }
    }
}

/// Settings of an [`OnchainFacilitator`]. Network, node and signer are needed; the rest has defaults.
#[must_use]
pub struct OnchainFacilitatorBuilder {
    network: Option<Network>,
    url: Option<String>,
    client: Option<RpcClient>,
    signers: Vec<SharedSigner>,
    ledger: Option<Arc<dyn Ledger>>,
    clock: Arc<dyn Clock>,
    max_gas_price: Option<u128>,
    in_flight: usize,
    contract_wallets: usize,
    confirm_timeout: Duration,
    block_time: Option<Duration>,
    rpc_timeout: Duration,
    max_transfer_gas: u64,
    batch_size: usize,
    batch_gas_cap: u32,
    depths: Depths,
    backlog: usize,
    upkeep_interval: Duration,
    native_price: Option<Usdc>,
    refuse_losses: bool,
}

impl Default for OnchainFacilitatorBuilder {
    fn default() -> Self {
        Self {
            network: None,
            url: None,
            client: None,
            signers: Vec::new(),
            ledger: None,
            clock: Arc::new(SystemClock),
            max_gas_price: None,
            in_flight: 16,
            contract_wallets: 8,
            confirm_timeout: Duration::from_secs(15),
            block_time: None,
            rpc_timeout: Duration::from_secs(5),
            max_transfer_gas: 400_000,
            batch_size: 100,
            batch_gas_cap: 120_000,
            depths: Depths::default(),
            backlog: 10_000,
            upkeep_interval: Duration::from_secs(5),
            native_price: None,
            refuse_losses: false,
        }
    }
}

impl OnchainFacilitatorBuilder {
    /// The chain to settle on. [`build`](Self::build) makes sure that the node is on it.
    pub fn network(mut self, network: Network) -> Self {
        self.network = Some(network);
        self
    }

    /// The node, over HTTP. The URL may hold a key: it appears in no error, span or `Debug` output.
    pub fn rpc_url(mut self, url: impl AsRef<str>) -> Self {
        self.url = Some(url.as_ref().to_owned());
        self
    }

    /// The node, as an alloy client with a transport of your choice.
    pub fn client(mut self, client: RpcClient) -> Self {
        self.client = Some(client);
        self
    }

    /// The node, as an alloy provider. Only its transport is used: its fillers, wallet and poll interval are not.
    pub fn provider<P: Provider<N>, N: alloy_network::Network>(self, provider: P) -> Self {
        let client = provider.client();
        let client = RpcClient::new(client.transport().clone(), client.is_local());
        self.client(client)
    }

    /// A settlement key, which pays for gas: any alloy transaction signer. Further calls add further keys: each has its own
    /// nonces, and so its own [window](Self::in_flight) of transactions. Processes on one
    /// ledger may share keys.
    pub fn signer(mut self, signer: impl TxSigner<Signature> + Send + Sync + 'static) -> Self {
        self.signers.push(Arc::new(signer));
        self
    }

    /// The ledger in which transactions are journalled; a [`MemoryLedger`] if not set.
    pub fn ledger(mut self, ledger: Arc<dyn Ledger>) -> Self {
        self.ledger = Some(ledger);
        self
    }

    /// Where the time comes from; the machine's clock if not set.
    pub fn clock(mut self, clock: Arc<dyn Clock>) -> Self {
        self.clock = clock;
        self
    }

    /// The most that is offered for a unit of gas, in wei. While the chain asks for more, payments are not settled and
    /// [`FacilitatorError::Busy`] says so. No bound if not set.
    pub fn max_gas_price(mut self, wei: u128) -> Self {
        self.max_gas_price = Some(wei);
        self
    }

    /// How many transactions may wait for a block at once; 16 if not set, which is about what nodes keep per sender.
    pub fn in_flight(mut self, transactions: usize) -> Self {
        self.in_flight = transactions;
        self
    }

    /// How many signatures that only a contract can judge are looked at at a time; 8 if not set.
    pub fn contract_wallets(mut self, at_a_time: usize) -> Self {
        self.contract_wallets = at_a_time;
        self
    }

    /// After how long without a receipt an outcome is [`Outcome::Unknown`]; 15 seconds if not set. The transaction is watched
    /// on, and [`Facilitator::reconcile`] tells later.
    pub fn confirm_timeout(mut self, timeout: Duration) -> Self {
        self.confirm_timeout = timeout.min(LONGEST);
        self
    }

    /// Payments of at least `from` atomic units are settled only once this many further blocks are on top of theirs, so that a
    /// reorganization cannot undo them soon; of several bounds the highest that a payment reaches counts. None if not set: a
    /// payment is settled when it is in a block, and watched until that is final. Blocks must come within
    /// [`confirm_timeout`](Self::confirm_timeout), or the outcome is [`Outcome::Unknown`] until they do.
    ///
    /// ```
    /// # use tower_x402::facilitator::OnchainFacilitator;
    /// use alloy_primitives::U256;
    ///
    /// // From one dollar on, ten blocks: two seconds on Base.
    /// let builder = OnchainFacilitator::builder().confirmations(U256::from(1_000_000), 10);
    /// ```
    pub fn confirmations(mut self, from: U256, blocks: u64) -> Self {
        self.depths.add(from, blocks);
        self
    }

    /// How long a block takes; measured if not set.
    pub fn block_time(mut self, block_time: Duration) -> Self {
        self.block_time = Some(block_time.min(LONGEST));
        self
    }

    /// How long a single request may take; 5 seconds if not set.
    pub fn rpc_timeout(mut self, timeout: Duration) -> Self {
        self.rpc_timeout = timeout.min(LONGEST);
        self
    }

    /// How much gas the token may use for one transfer; 400,000 if not set, which leaves room for a contract wallet's check of
    /// its signature. A plain transfer takes about 60,000.
    pub fn max_transfer_gas(mut self, gas: u64) -> Self {
        self.max_transfer_gas = gas;
        self
    }

    /// How many payments share a transaction at most, where the chain has the [`BatchSettler`]; 100 if not set. One transaction has
    /// room for about 300. With 1, payments are settled one by one.
    pub fn batch_size(mut self, payments: usize) -> Self {
        self.batch_size = payments;
        self
    }

    /// How much gas the token's call for one payment in a batch may use; 120,000 if not set. A plain transfer takes about 60,000;
    /// what takes more is settled alone.
    pub fn batch_gas_cap(mut self, gas: u32) -> Self {
        self.batch_gas_cap = gas;
        self
    }

    /// How many payments may wait for their settlement; 10,000 if not set. While there are as many, nothing new is verified, so
    /// that no work is done that cannot be paid for in time: [`FacilitatorError::Busy`].
    pub fn backlog(mut self, payments: usize) -> Self {
        self.backlog = payments;
        self
    }

    /// How often open payments that nobody looks after are looked for in the ledger; 5 seconds if not set. The node is asked only
    /// if there are any, or while settled payments are not final.
    pub fn upkeep_interval(mut self, interval: Duration) -> Self {
        self.upkeep_interval = interval.clamp(Duration::from_millis(10), LONGEST);
        self
    }

    /// What an ether (10¹⁸ wei of what gas is paid in) is worth. With it, a payment whose share of its transaction's cost exceeds its
    /// amount is warned of and counted ([`SettlementStats::losses`]), and [`spent_in_usdc`](OnchainFacilitator::spent_in_usdc)
    /// says what settling costs. Nobody is asked for it: [`set_native_price`](OnchainFacilitator::set_native_price) keeps it
    /// true. Not known if not set.
    pub fn native_price(mut self, usdc_per_ether: Usdc) -> Self {
        self.native_price = Some(usdc_per_ether);
        self
    }

    /// Whether payments are refused while settling them is expected to cost more than they bring in: before any work is
    /// done, with [`FacilitatorError::Busy`]. Expected is what gas costs now, times what recent payments took on average, in
    /// batches or alone. What is refused is not settled, so that the average stays where it is until others are. Needs the
    /// [`native_price`](Self::native_price). No if not set.
    pub fn refuse_losses(mut self, refuse: bool) -> Self {
        self.refuse_losses = refuse;
        self
    }

    /// Looks at the node (its chain, its clock, the key's balance) and builds the facilitator.
    ///
    /// # Errors
    /// [`OnchainBuildError`] says what to change.
    pub async fn build(self) -> Result<OnchainFacilitator, OnchainBuildError> {
        let network = self.network.ok_or(OnchainBuildError::Missing("network"))?;
        if self.signers.is_empty() {
            return Err(OnchainBuildError::Missing("signer"));
        }
        let accounts: Vec<Address> = self.signers.iter().map(|signer| signer.address()).collect();
        if let Some(twice) = accounts.iter().enumerate().find(|(index, account)| accounts[..*index].contains(account)) {
            return Err(OnchainBuildError::SameKey(*twice.1));
        }
        let client = match (self.client, self.url) {
            (Some(client), _) => client,
            (None, Some(url)) => {
                let url = Url::parse(&url).ok().filter(|url| matches!(url.scheme(), "http" | "https"));
                let endpoint = Endpoint::new(url.ok_or(OnchainBuildError::Url)?).ok_or(OnchainBuildError::Tls)?;
                RpcClient::new(endpoint, false)
            }
            (None, None) => return Err(OnchainBuildError::Missing("rpc_url, client or provider")),
        };
        if self.refuse_losses && self.native_price.is_none() {
            return Err(OnchainBuildError::Missing("native_price, without which refuse_losses cannot tell a loss"));
        }
        let rpc = Rpc::new(client, self.rpc_timeout);
        let pace = Pace::new(self.block_time);
        preflight(&rpc, network, &*self.clock, &accounts, &pace).await?;
        let freed = Arc::<Notify>::default();
        let engine = Engine {
            network,
            probe: Probe::new(self.max_transfer_gas).ok_or(OnchainBuildError::Probe)?,
            pace,
            fees: FeeCache::new(self.max_gas_price),
            lanes: self
                .signers
                .into_iter()
                .map(|signer| Lane::new(signer, rpc.clone(), self.in_flight, freed.clone()))
                .collect(),
            freed,
            node: Broadcaster::new(),
            ledger: measured(self.ledger.unwrap_or_else(|| Arc::new(MemoryLedger::new()))),
            clock: self.clock,
            gas_cap: self.max_transfer_gas,
            confirm_timeout: self.confirm_timeout,
            totals: Mutex::default(),
            watched: Mutex::default(),
            reverts: Reverts::default(),
            batch_size: self.batch_size,
            batch_gas_cap: self.batch_gas_cap,
            deployment: Deployment::default(),
            depths: self.depths,
            backlog: self.backlog,
            process: getrandom::u64().map_err(|_| OnchainBuildError::Randomness)?,
            queue: Queue::default(),
            active: Active::default(),
            caught_up: watch::Sender::new(false),
            closing: AtomicBool::new(false),
            hint: Arc::default(),
            costs: Costs::new(self.native_price, self.refuse_losses),
            last_look: LastLook::default(),
            rpc,
        };
        let wallets = Wallets {
            judging: Semaphore::new(self.contract_wallets.min(Semaphore::MAX_PERMITS)),
            codeless: Mutex::default(),
        };
        let engine = Arc::new(engine);
        if let Ok(is_there) = engine.has_batch_settler().await {
            engine.deployment.note(is_there);
        }
        engine.keep_up(self.upkeep_interval);
        Ok(OnchainFacilitator { engine, wallets: Arc::new(wallets) })
    }
}

impl fmt::Debug for OnchainFacilitatorBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OnchainFacilitatorBuilder").field("network", &self.network).finish_non_exhaustive()
    }
}

/// The same ledger, with its calls timed if anything is counted.
fn measured(ledger: Arc<dyn Ledger>) -> Arc<dyn Ledger> {
    #[cfg(feature = "metrics")]
    return crate::ledger::Measured::over(ledger);
    #[cfg(not(feature = "metrics"))]
    ledger
}

/// Three requests that find most mistakes before they cost a payment.
async fn preflight(
    rpc: &Rpc,
    network: Network,
    clock: &dyn Clock,
    accounts: &[Address],
    pace: &Pace,
) -> Result<(), OnchainBuildError> {
    let found = rpc.chain_id().await.map_err(|_| OnchainBuildError::Node)?;
    if found != network.chain_id() {
        return Err(OnchainBuildError::WrongChain { expected: network, found: Network::eip155(found) });
    }
    let block = rpc.block("latest").await;
    let block = block.ok().flatten().ok_or(OnchainBuildError::Node)?;
    pace.observe(block.number.saturating_to());
    let timestamp = block.timestamp.saturating_to::<u64>();
    let skew = clock.now().abs_diff(timestamp);
    if skew > SKEW_LIMIT {
        return Err(OnchainBuildError::Clock { seconds: skew });
    }
    if skew > SKEW_WARNING {
        tracing::warn!(seconds = skew, "this machine's clock and the newest block are apart");
    }
    for account in accounts {
        let balance = rpc.balance(*account).await.map_err(|_| OnchainBuildError::Node)?;
        metrics::gas_tank(network, *account, balance);
        if balance.is_zero() {
            tracing::warn!(%account, "the settlement key has nothing to pay for gas with");
        }
        let nonces = (rpc.nonce(*account, "latest").await, rpc.nonce(*account, "pending").await);
        if let (Ok(in_blocks), Ok(with_pool)) = nonces
            && with_pool > in_blocks
        {
            let waiting = with_pool - in_blocks;
            tracing::warn!(%account, waiting, "transactions of the settlement key are on their way already");
        }
        tracing::info!(%network, %account, %balance, "settling on chain");
    }
    Ok(())
}

/// Why an [`OnchainFacilitator`] was not built.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum OnchainBuildError {
    /// Something has no default.
    #[error("set {0} on the builder")]
    Missing(&'static str),
    /// The node's URL cannot be read. It is not shown, since it may hold a key.
    #[error("rpc_url is not an http or https URL (not shown: it may hold a key)")]
    Url,
    /// No TLS configuration could be made.
    #[error("the machine's TLS configuration cannot be used")]
    Tls,
    /// The node did not answer, or answered nonsense.
    #[error("the node does not answer: check rpc_url, its key and the network, or raise rpc_timeout")]
    Node,
    /// The node is on another chain.
    #[error("the node is on {found}, not on {expected}: change rpc_url or network")]
    WrongChain {
        /// What was configured.
        expected: Network,
        /// What the node says.
        found: Network,
    },
    /// The machine's clock is absurd, or the node has stopped following its chain.
    #[error("the clock and the newest block are {seconds} seconds apart: set the clock, or use a node that is in sync")]
    Clock {
        /// How far apart they are.
        seconds: u64,
    },
    /// One key was given twice.
    #[error("the settlement key of {0} was given twice")]
    SameKey(Address),
    /// The operating system has no randomness.
    #[error("the operating system's source of randomness failed")]
    Randomness,
    /// The crate was built from damaged sources.
    #[error("the probe's bytecode cannot be read: the crate's sources are damaged")]
    Probe,
}
