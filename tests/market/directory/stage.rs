//! A directory on a port, evaluators that it lists, and payers that report.

use std::sync::{Arc, Mutex};

use alloy_network::EthereumWallet;
use alloy_primitives::{Address, B256, Bytes, U256, hex};
use alloy_provider::{Provider as _, ProviderBuilder};
use alloy_rpc_types_eth::{TransactionReceipt, TransactionRequest};
use alloy_signer::Signer as _;
use alloy_signer_local::PrivateKeySigner;
use alloy_sol_types::{Eip712Domain, SolEvent as _};
use axum::{Router, routing::get};
use serde_json::{Value, json};
use tokio::{net::TcpListener, sync::Notify};
use tower_x402::{Network, Usdc};
use url::Url;
use x402_directory::{
    DirectoryBuilder, DirectoryClient, DirectoryService, DirectoryStore, PaymentChecker, SignedEvidence,
};
use x402_market::{
    AgentCard, CARD_PATH, Score,
    evidence::{CallOutcome, Evidence, EvidencePayment, Pairs},
};

use support::{
    authorization::{TransferWithAuthorization, authorization, sign},
    chain::{Chain, Relayer},
    token::{Token, transfer_vrs},
};

/// The price of an evaluation, in units.
pub const PRICE: u64 = 1_000;

/// A directory that checks payments on a chain.
pub struct Stage<'a> {
    pub chain: &'a dyn Chain,
    pub service: DirectoryService,
    pub url: Url,
    pub relayer: Relayer,
}

/// An evaluator as a directory sees it: a card and a payee.
pub struct Booth {
    pub url: Url,
    pub payee: PrivateKeySigner,
    address: String,
    shown: Arc<Mutex<Option<String>>>,
    hangs: Arc<Mutex<Option<Arc<Notify>>>>,
}

/// A payment, which may have failed.
#[derive(Clone, Debug)]
pub struct Paid {
    pub message: TransferWithAuthorization,
    pub transaction: B256,
    pub at: u64,
}

/// A payment checker of this chain that accepts every block.
pub fn checker(chain: &dyn Chain) -> PaymentChecker {
    PaymentChecker::new(Network::BASE_SEPOLIA).rpc_url(chain.rpc_url()).unwrap().depth(0)
}

impl<'a> Stage<'a> {
    pub async fn set(chain: &'a dyn Chain) -> Self {
        Self::set_with(chain, |directory| directory.payment_checker(checker(chain))).await
    }

    pub async fn set_with(chain: &'a dyn Chain, adjust: impl FnOnce(DirectoryBuilder) -> DirectoryBuilder) -> Self {
        Self::open(chain, DirectoryStore::in_memory().await.unwrap(), adjust).await
    }

    pub async fn open(
        chain: &'a dyn Chain,
        store: DirectoryStore,
        adjust: impl FnOnce(DirectoryBuilder) -> DirectoryBuilder,
    ) -> Self {
        let service = DirectoryService::builder(store).private_hosts(true).rate(1e6, 1e6).payer_rate(1e6, 1e6);
        let service = adjust(service).build().unwrap();
        let url = serve(TcpListener::bind("127.0.0.1:0").await.unwrap(), service.clone());
        Self { chain, service, url, relayer: chain.relayer().await }
    }

    pub fn client(&self) -> DirectoryClient {
        DirectoryClient::new(&self.url).unwrap()
    }

    /// A listed evaluator.
    pub async fn booth(&self, skills: &[&str]) -> Booth {
        let booth = Booth::open(skills).await;
        self.client().list(&booth.url).await.unwrap();
        booth
    }

    /// A payer with money.
    pub async fn payer(&self) -> PrivateKeySigner {
        let key = PrivateKeySigner::random();
        self.chain.mint(key.address(), 1_000_000).await;
        key
    }

    /// Pays, through a relayer's transaction.
    pub async fn pay(&self, payer: &PrivateKeySigner, to: Address, units: u64) -> Paid {
        let message = authorization(payer.address(), to, units);
        let signature = sign(payer, &self.chain.asset(), &message);
        let receipt = self.relayer.send(self.chain, transfer_vrs(&message, &signature)).await;
        self.paid(message, &receipt).await
    }

    pub async fn paid(&self, message: TransferWithAuthorization, receipt: &TransactionReceipt) -> Paid {
        Paid { message, transaction: receipt.transaction_hash, at: self.chain.timestamp().await }
    }

    /// Has the code at `to` emit these events, in one transaction.
    pub async fn emit(&self, to: Address, logs: &[[B256; 5]]) -> TransactionReceipt {
        self.chain.set_code(to, Bytes::from_static(&EMITTER)).await;
        let calldata: Vec<u8> = logs.iter().flatten().flat_map(|word| word.0).collect();
        self.relayer.send_to(self.chain, to, calldata.into()).await
    }

    /// Sends a report to the directory. Returns the status, and the error code if there is one.
    pub async fn post(&self, report: &impl serde::Serialize) -> (u16, String) {
        post(&self.url, "evidence", serde_json::to_vec(report).unwrap()).await
    }

    /// Returns the error code with which the directory refuses a report.
    pub async fn refusal(&self, report: &impl serde::Serialize) -> String {
        let (status, error) = self.post(report).await;
        assert!((400..500).contains(&status), "{status} {error}");
        error
    }

    /// Counts the reports.
    pub async fn count(&self) -> usize {
        let body = reqwest::get(self.url.join("evidence").unwrap()).await.unwrap().bytes().await.unwrap();
        serde_json::from_slice::<Value>(&body).unwrap()["reports"].as_array().unwrap().len()
    }
}

impl Booth {
    /// Opens an evaluator that is not listed.
    pub async fn open(skills: &[&str]) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let shown = Arc::new(Mutex::new(None::<String>));
        let hangs = Arc::new(Mutex::new(None::<Arc<Notify>>));
        let (page, hang) = (shown.clone(), hangs.clone());
        let answer = async move || {
            let asked = hang.lock().unwrap().clone();
            if let Some(asked) = asked {
                asked.notify_one();
                std::future::pending::<()>().await;
            }
            page.lock().unwrap().clone().ok_or(http::StatusCode::INTERNAL_SERVER_ERROR)
        };
        let router = Router::new().route(CARD_PATH, get(answer));
        let url = format!("http://{address}").parse().unwrap();
        tokio::spawn(async { axum::serve(listener, router).await });
        let booth = Self { url, payee: PrivateKeySigner::random(), address, shown, hangs };
        booth.show(skills, &booth.payee, PRICE).await;
        booth
    }

    /// Shows another card.
    pub async fn show(&self, skills: &[&str], payee: &PrivateKeySigner, price: u64) {
        let mut card = AgentCard::builder("The judge", format!("http://{}", self.address))
            .price(Usdc::from_atomic(price))
            .pay_to(Network::BASE_SEPOLIA, payee.address());
        for skill in skills {
            card = card.skill(*skill, "Marks it", Score::MAX);
        }
        let card = card.build().unwrap().sign(payee).await.unwrap();
        *self.shown.lock().unwrap() = Some(serde_json::to_string(&card).unwrap());
    }

    /// Changes the card, and has its payee sign it again.
    pub async fn show_adjusted(&self, adjust: impl FnOnce(&mut AgentCard)) {
        let shown = self.shown.lock().unwrap().clone().unwrap();
        let mut card: AgentCard = serde_json::from_str(&shown).unwrap();
        adjust(&mut card);
        let card = card.sign(&self.payee).await.unwrap();
        self.show_text(Some(&serde_json::to_string(&card).unwrap()));
    }

    /// Stops answering. The returned `Notify` tells when the card was requested.
    pub fn hang(&self) -> Arc<Notify> {
        let asked = Arc::new(Notify::new());
        *self.hangs.lock().unwrap() = Some(asked.clone());
        asked
    }

    /// Serves this text instead of a card, or an error.
    pub fn show_text(&self, text: Option<&str>) {
        *self.shown.lock().unwrap() = text.map(str::to_owned);
    }
}

impl Paid {
    /// The evidence of a right verdict in prose.
    pub fn record(&self, evaluator: Address) -> Evidence {
        Evidence::new(
            evaluator,
            "prose",
            Usdc::try_from(self.message.value).unwrap(),
            self.at,
            CallOutcome::answered(Pairs::new(1, 0, 1)),
        )
        .with_payment(EvidencePayment { payer: self.message.from, nonce: self.message.nonce })
    }

    /// The report of it: signed by the payer, with the transaction.
    pub async fn report(&self, evaluator: Address, payer: &PrivateKeySigner) -> SignedEvidence {
        sign_report(self.record(evaluator), Some(self.transaction), payer).await
    }
}

pub async fn sign_report(record: Evidence, transaction: Option<B256>, payer: &PrivateKeySigner) -> SignedEvidence {
    let network = Network::BASE_SEPOLIA;
    let asset = network.usdc().unwrap().address;
    SignedEvidence::sign(record, network, asset, transaction, payer).await.unwrap()
}

mod typed {
    alloy_sol_types::sol! {
        /// The signed message, as documented.
        struct Evidence {
            address asset;
            address payer;
            bytes32 nonce;
            address evaluator;
            uint256 paid;
            string skill;
            uint64 at;
            string outcome;
        }
    }
}

/// Signs a report as documented with any key, whether it may be reported or not.
pub async fn forge(record: Evidence, transaction: Option<B256>, key: &PrivateKeySigner) -> SignedEvidence {
    let network = Network::BASE_SEPOLIA;
    let (asset, payment) = (network.usdc().unwrap().address, record.payment.unwrap());
    let typed = typed::Evidence {
        asset,
        payer: payment.payer,
        nonce: payment.nonce,
        evaluator: record.evaluator,
        paid: record.paid.into(),
        skill: record.skill.clone(),
        at: record.at,
        outcome: serde_json_canonicalizer::to_string(&record.outcome).unwrap(),
    };
    let chain_id = Some(U256::from(network.chain_id()));
    let domain = Eip712Domain::new(Some("tower-x402 evidence".into()), Some("1".into()), chain_id, None, None);
    let signature = key.sign_typed_data(&typed, &domain).await.unwrap().as_bytes();
    let signature = Bytes::copy_from_slice(&signature);
    let mut report = json!({ "network": network, "asset": asset, "evidence": record, "signature": signature });
    if let Some(transaction) = transaction {
        report["transaction"] = json!(transaction);
    }
    serde_json::from_value(report).unwrap()
}

/// Posts a body. Returns the status, and the error code if there is one.
pub async fn post(url: &Url, path: &str, body: Vec<u8>) -> (u16, String) {
    let response = reqwest::Client::new().post(url.join(path).unwrap()).body(body).send().await.unwrap();
    let status = response.status().as_u16();
    if matches!(status, 429 | 503) {
        assert!(response.headers().contains_key("retry-after"));
    }
    let body: Value = serde_json::from_slice(&response.bytes().await.unwrap()).unwrap();
    (status, body["error"].as_str().unwrap_or_default().to_owned())
}

/// Serves a directory for as long as the test runs.
pub fn serve(listener: TcpListener, service: DirectoryService) -> Url {
    let url = format!("http://{}", listener.local_addr().unwrap()).parse().unwrap();
    tokio::spawn(async { axum::serve(listener, Router::new().fallback_service(service)).await });
    url
}

/// Sends a transaction from this account.
pub async fn send_as(chain: &dyn Chain, key: &PrivateKeySigner, to: Address, calldata: Bytes) -> TransactionReceipt {
    chain.fund(key.address(), U256::from(10).pow(U256::from(18))).await;
    let wallet = EthereumWallet::from(key.clone());
    let provider = ProviderBuilder::new().wallet(wallet).connect_http(chain.rpc_url().parse().unwrap());
    let request = TransactionRequest::default().to(to).input(calldata.into()).gas_limit(500_000);
    let request = request.max_fee_per_gas(100_000_000_000).max_priority_fee_per_gas(0);
    let pending = provider.send_transaction(request).await.unwrap();
    chain.receipt(*pending.tx_hash()).await
}

/// `AuthorizationUsed`, for [`Stage::emit`].
pub fn used(payer: Address, nonce: B256) -> [B256; 5] {
    [Token::AuthorizationUsed::SIGNATURE_HASH, payer.into_word(), nonce, B256::ZERO, B256::ZERO]
}

/// `Transfer`, for [`Stage::emit`].
pub fn moved(payer: Address, to: Address, units: u64) -> [B256; 5] {
    let word = |number| B256::from(U256::from(number));
    [Token::Transfer::SIGNATURE_HASH, payer.into_word(), to.into_word(), word(32), word(units)]
}

/// Emits an event for every five words of its calldata: three topics, the length of the data (0 or 32), the data.
pub const EMITTER: [u8; 46] = hex!(
    "6000" "5b" "3681101560" "2c" "57" "8060800135600052" "8060400135" "8160200135" "8235" "8360600135" "6000" "a3" "60a001"
    "600256" "5b00"
);

/// Calls the address in the first word of its calldata with every 292 bytes that follow, whatever comes of it.
pub const FORWARDER: [u8; 43] = hex!(
    "6020" "5b" "3681101560" "29" "57" "61012481600037" "60006000" "610124" "60006000" "600035" "5af150" "61012401" "600256"
    "5b00"
);
