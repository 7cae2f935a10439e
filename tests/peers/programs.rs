//! The programs: clients, servers and facilitators.

use std::{path::Path, process::Stdio, sync::OnceLock};

use alloy_primitives::{Address, B256, address, b256, bytes};
use alloy_signer_local::PrivateKeySigner;
use serde_json::Value;
use tokio::{process::Command, time::timeout};

use super::stage::{PATIENCE, TASK};
use support::{anvil::AnvilChain, chain::Chain, programs::example};

/// Payer, settlement key and payee. They are accounts of anvil with public keys, because their signatures are recorded.
pub const BUYER: B256 = b256!("59c6995e998f97a5a0044966f0945389dc9e86dae88c7a8412f4603b6b78690d");
pub const SETTLER: &str = "0x5de4111afa1a4b94908f83103eb1f1706367c2e68ca870fc3fb9a804cdab365a";
pub const PAYEE: Address = address!("90F79bf6EB2c4f870365E785982E1f101E93b906");

/// The validator of ERC-6492, Permit2, and x402's proxy for Permit2.
const X402_RS_NEEDS: [Address; 3] = [
    address!("dAcD51A54883eb67D95FAEb2BBfdC4a9a6BD2a3B"),
    address!("000000000022D473030F116dDEE9F6B43aC78BA3"),
    address!("402085c248EeA27D92E8b30b2C58ed07f9E20001"),
];

/// A client of another project.
#[derive(Clone, Copy, Debug)]
pub enum Buyer {
    /// The official client for fetch.
    Fetch,
    /// The legacy one, which knows v1 only.
    FetchV1,
    /// The client of the Machine Payments Protocol, which pays x402 too.
    Mppx,
    /// The official Python client, over httpx.
    Httpx,
    /// The same, over requests.
    Requests,
    R402,
    /// The client of x402-rs, registered for this version of x402 only.
    X402Reqwest(u8),
}

impl Buyer {
    fn program(self) -> Command {
        match self {
            Self::Fetch => script(["node", "fetch_v2.mjs"]),
            Self::FetchV1 => script(["node", "fetch_v1.mjs"]),
            Self::Mppx => script(["node", "mppx.mjs"]),
            Self::Httpx => script([PYTHON, "pay_httpx.py"]),
            Self::Requests => script([PYTHON, "pay_requests.py"]),
            Self::R402 => script([RUST, "r402-client"]),
            Self::X402Reqwest(1) => script([RUST, "x402-reqwest-v1"]),
            Self::X402Reqwest(_) => script([RUST, "x402-reqwest-v2"]),
        }
    }

    /// Runs the client. Returns its output, or its error.
    pub async fn buy(self, url: &str, account: &PrivateKeySigner) -> Result<Value, String> {
        let mut program = self.program();
        program.arg(url).env("PRIVATE_KEY", account.to_bytes().to_string()).env("TASK", TASK).stderr(Stdio::piped());
        let output = timeout(PATIENCE, program.output()).await.expect("the peer ends").unwrap();
        let error = || String::from_utf8_lossy(&output.stderr).into_owned();
        if output.status.success() { Ok(serde_json::from_slice(&output.stdout).unwrap()) } else { Err(error()) }
    }

    /// Returns its package, and the version of x402 that it speaks here.
    pub const fn name(self) -> (&'static str, u8) {
        match self {
            Self::Fetch => ("@x402/fetch", 2),
            Self::FetchV1 => ("x402-fetch", 1),
            Self::Mppx => ("mppx", 2),
            Self::Httpx => ("x402-httpx", 2),
            Self::Requests => ("x402-requests", 2),
            Self::R402 => ("r402-client", 2),
            Self::X402Reqwest(version) => ("x402-reqwest", version),
        }
    }
}

/// A server, ours or another project's.
#[derive(Clone, Copy, Debug)]
pub enum Seller {
    Evaluator,
    /// Our evaluator without a configured URL.
    EvaluatorWithoutUrl,
    Express,
    Hono,
    FastApi,
    /// The legacy middleware, which speaks v1 only.
    ExpressV1,
    R402,
    /// The middleware of x402-rs, which speaks one version of x402 at a time.
    X402Axum(u8),
}

impl Seller {
    /// Returns its program, which sells for `PAYEE`, and settles at that URL or by itself.
    pub fn program(self, chain: &AnvilChain, facilitator_url: Option<&str>, flow: &str) -> Command {
        let mut program = match self {
            Self::Evaluator => {
                let mut program = evaluator(chain, facilitator_url, flow);
                program.args(["--public-url", "http://evaluator.example"]);
                program
            }
            Self::EvaluatorWithoutUrl => evaluator(chain, facilitator_url, flow),
            Self::Express => script(["node", "express_server.mjs"]),
            Self::Hono => script(["node", "hono_server.mjs"]),
            Self::ExpressV1 => script(["node", "express_v1_server.mjs"]),
            Self::FastApi => script([PYTHON, "fastapi_server.py"]),
            Self::R402 => script([RUST, "r402-server"]),
            Self::X402Axum(1) => script([RUST, "x402-axum-v1"]),
            Self::X402Axum(_) => script([RUST, "x402-axum-v2"]),
        };
        program.env("PAY_TO", PAYEE.to_string()).env("FLOW", flow);
        match facilitator_url {
            Some(url) => program.env("FACILITATOR_URL", url),
            None => program.env("PRIVATE_KEY", SETTLER).env("RPC_URL", chain.rpc_url()),
        };
        program
    }

    pub const fn name(self) -> (&'static str, u8) {
        match self {
            Self::Evaluator | Self::EvaluatorWithoutUrl => ("evaluator", 2),
            Self::Express => ("@x402/express", 2),
            Self::Hono => ("@x402/hono", 2),
            Self::FastApi => ("x402-fastapi", 2),
            Self::ExpressV1 => ("x402-express", 1),
            Self::R402 => ("r402-server", 2),
            Self::X402Axum(version) => ("x402-axum", version),
        }
    }
}

/// The facilitator of a seller.
#[derive(Clone, Copy, Debug)]
pub enum Bank {
    /// The seller's own, in its process.
    Own,
    /// Our facilitator service.
    Ours,
    /// The official one.
    Official,
    /// The official one in Python.
    Python,
    /// That of x402-rs.
    X402Rs,
}

impl Bank {
    /// Returns its program, if it runs in a process of its own.
    pub async fn program(self, chain: &AnvilChain) -> Option<Command> {
        let mut program = match self {
            Self::Own => return None,
            Self::Official => script(["node", "facilitator.mjs"]),
            Self::Python => script([PYTHON, "facilitator.py"]),
            Self::X402Rs => {
                // x402-rs does not start without these contracts, which Base has. No payment by a key calls them.
                for contract in X402_RS_NEEDS {
                    chain.set_code(contract, bytes!("00")).await;
                }
                script([RUST, "x402-facilitator"])
            }
            Self::Ours => {
                let mut program = example("facilitator");
                program.args(["--listen", "127.0.0.1:0", "--network", "base-sepolia", "--rpc-url", &chain.rpc_url()]);
                program.env("SETTLEMENT_PRIVATE_KEY", SETTLER);
                program
            }
        };
        program.env("PRIVATE_KEY", SETTLER).env("RPC_URL", chain.rpc_url());
        Some(program)
    }

    pub const fn name(self) -> &'static str {
        match self {
            Self::Own => "own",
            Self::Ours => "tower-x402",
            Self::Official => "@x402/core",
            Self::Python => "x402-python",
            Self::X402Rs => "x402-facilitator-local",
        }
    }
}

fn evaluator(chain: &AnvilChain, facilitator_url: Option<&str>, flow: &str) -> Command {
    let mut program = example("evaluator");
    program.args(["--listen", "127.0.0.1:0", "--price", "$0.001", "--network", "base-sepolia", "--flow", flow]);
    program.args(["--rpc-url", &chain.rpc_url()]);
    program.args(["--pay-to", &PAYEE.to_string(), "--handler-delay-ms", "50"]);
    match facilitator_url {
        Some(url) => program.args(["--facilitator-url", url]),
        None => program.env("SETTLEMENT_PRIVATE_KEY", SETTLER),
    };
    program
}

pub const PYTHON: &str = ".venv/bin/python";
const RUST: &str = "rust/target/debug/tower-x402-rust-peers";

/// Returns the command that runs a program of this directory.
pub fn script([interpreter, file]: [&str; 2]) -> Command {
    let directory = support::repository().join("tests/peers");
    if interpreter == RUST {
        compile_the_rust_peers(&directory.join("rust"));
    }
    // A path is relative to that directory, a bare name is looked up.
    let interpreter = if interpreter.contains('/') { directory.join(interpreter) } else { interpreter.into() };
    let mut command = Command::new(interpreter);
    command.arg(file).current_dir(directory).stdin(Stdio::null()).stdout(Stdio::piped());
    command.kill_on_drop(true);
    command
}

fn compile_the_rust_peers(directory: &Path) {
    static COMPILED: OnceLock<()> = OnceLock::new();
    COMPILED.get_or_init(|| {
        let mut cargo = std::process::Command::new(env!("CARGO"));
        cargo.args(["build", "--quiet", "--locked"]).current_dir(directory).env_remove("CARGO_TARGET_DIR");
        assert!(cargo.status().unwrap().success(), "the Rust peers compile");
    });
}
