//! Foundry's anvil as a chain, with Circle's own USDC where Base Sepolia has it.

use std::{
    env,
    io::{BufRead, BufReader},
    path::PathBuf,
    process::{Child, Command, Stdio},
    thread,
    time::Duration,
};

use alloy_primitives::{Address, Bytes, U256};
use alloy_provider::{DynProvider, Provider, ProviderBuilder};
use async_trait::async_trait;
use serde_json::{Value, json};
use tower_x402::Network;

use crate::{
    chain::Chain,
    circle::{self, Circle},
};

/// An anvil process, killed when dropped.
pub struct Anvil {
    process: Child,
    url: String,
}

impl Anvil {
    /// Starts anvil on a free port: a block per transaction (`None`), or one every `block_time`.
    pub fn start(block_time: Option<Duration>) -> Self {
        let mut command = Command::new(binary());
        command.args(["--port", "0", "--chain-id"]).arg(Network::BASE_SEPOLIA.chain_id().to_string());
        if let Some(time) = block_time {
            command.arg("--block-time").arg(time.as_secs_f64().to_string());
        }
        let mut process =
            command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::inherit()).spawn().unwrap_or_else(
                |error| {
                    panic!("anvil does not start ({error}): run `npm install` in tests/peers or set TOWER_X402_ANVIL")
                },
            );
        let mut lines = BufReader::new(process.stdout.take().expect("stdout is piped")).lines().map_while(Result::ok);
        let address = lines
            .find_map(|line| line.strip_prefix("Listening on ").map(str::to_owned))
            .expect("anvil says where it listens");
        // A full pipe would block anvil.
        thread::spawn(move || lines.for_each(drop));
        Self { process, url: format!("http://{address}") }
    }

    /// Where it serves JSON-RPC.
    pub fn url(&self) -> &str {
        &self.url
    }
}

impl Drop for Anvil {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn binary() -> PathBuf {
    if let Some(path) = env::var_os("TOWER_X402_ANVIL") {
        return path.into();
    }
    let os = if cfg!(target_os = "macos") { "darwin" } else { "linux" };
    let arch = if cfg!(target_arch = "aarch64") { "arm64" } else { "amd64" };
    let modules = crate::repository().join("tests/peers/node_modules");
    modules.join(format!("@foundry-rs/anvil-{os}-{arch}/bin/anvil"))
}

/// anvil with USDC on it.
pub struct AnvilChain {
    anvil: Anvil,
    provider: DynProvider,
    circle: Circle,
    miner: Option<tokio::task::JoinHandle<()>>,
}

impl Drop for AnvilChain {
    fn drop(&mut self) {
        if let Some(miner) = &self.miner {
            miner.abort();
        }
    }
}

/// Wakes anvil's instant miner, which now and then overlooks transactions whose nonces arrived out of order and leaves them in
/// the pool until somebody sends another one. No node on a real chain does that. What does not move at all is reported.
async fn wake_the_miner(provider: DynProvider) {
    let (mut before, mut still) = (Value::Null, 0);
    loop {
        tokio::time::sleep(Duration::from_millis(250)).await;
        let pool: Result<Value, _> = provider.raw_request("txpool_status".into(), ()).await;
        let Ok(pool) = pool else { continue };
        if pool["pending"] != "0x0" {
            let _: Result<Value, _> = provider.raw_request("evm_mine".into(), ()).await;
        }
        still = if pool == before && (pool["pending"] != "0x0" || pool["queued"] != "0x0") { still + 1 } else { 0 };
        if still == 12 {
            let waiting: Result<Value, _> = provider.raw_request("txpool_inspect".into(), ()).await;
            let block: Result<Value, _> = provider.raw_request("eth_blockNumber".into(), ()).await;
            let mut waiting = format!("{waiting:?}");
            waiting.truncate(600);
            eprintln!("anvil's pool has not moved for three seconds: {pool}, block {block:?}, {waiting}");
        }
        before = pool;
    }
}

impl AnvilChain {
    /// Starts anvil and puts Circle's contracts on it.
    pub async fn start(block_time: Option<Duration>) -> Self {
        let anvil = Anvil::start(block_time);
        let url = anvil.url().parse().expect("anvil's address is a URL");
        let provider = ProviderBuilder::default().connect_http(url).erased();
        let circle = circle::install(&provider, Network::BASE_SEPOLIA.usdc().expect("known").address).await;
        let miner = block_time.is_none().then(|| tokio::spawn(wake_the_miner(provider.clone())));
        Self { anvil, provider, circle, miner }
    }

    /// One of anvil's own requests.
    async fn request(&self, method: &'static str, params: Value) -> Value {
        self.provider.raw_request(method.into(), params).await.unwrap_or_else(|error| panic!("{method}: {error}"))
    }
}

#[async_trait]
impl Chain for AnvilChain {
    fn rpc_url(&self) -> String {
        self.anvil.url().to_owned()
    }

    fn provider(&self) -> &DynProvider {
        &self.provider
    }

    async fn mint(&self, to: Address, units: u64) {
        self.circle.mint(&self.provider, to, units).await;
    }

    async fn fund(&self, account: Address, wei: U256) {
        let before = self.provider.get_balance(account).await.expect("eth_getBalance");
        self.request("anvil_setBalance", json!([account, before + wei])).await;
    }

    async fn set_code(&self, account: Address, code: Bytes) {
        self.request("anvil_setCode", json!([account, code])).await;
    }

    async fn deploy(&self, init_code: Bytes) -> Address {
        circle::deploy(&self.provider, init_code).await
    }

    async fn mine(&self) {
        self.request("evm_mine", json!([])).await;
    }

    async fn set_next_timestamp(&self, seconds: u64) {
        self.request("evm_setNextBlockTimestamp", json!([seconds])).await;
    }

    async fn blacklist(&self, account: Address) {
        self.circle.blacklist(&self.provider, account).await;
    }

    async fn pause(&self) {
        self.circle.pause(&self.provider).await;
    }
}
