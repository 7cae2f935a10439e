//! JSON-RPC requests with a timeout, and the few answers that settlement reads.
//!
//! Requests go to the transport directly, since alloy's client traces whole requests, and ours hold payers' signatures.

use std::{
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use alloy_json_rpc::{Request, RequestPacket, ResponsePacket, ResponsePayload, RpcError, SerializedRequest};
use alloy_primitives::{Address, B256, Bytes, U64, U256};
use alloy_rpc_client::RpcClient;
use alloy_transport::{BoxTransport, TransportErrorKind};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use serde_json::value::RawValue;
use tokio::time::{Instant, timeout};
use tower_service::Service;

use super::settle_calls::SettleCalls;

/// A client of a node.
#[derive(Clone)]
pub(crate) struct Rpc {
    client: RpcClient,
    transport: BoxTransport,
    timeout: Duration,
    receipts: Arc<Receipts>,
    settle_calls: Arc<SettleCalls>,
}

/// How often in succession a node refuses receipts before it counts as one that has none to give.
const REFUSALS: u32 = 3;
/// For how long the last receipt shows that there are others.
const RECEIPTS_FRESH: Duration = Duration::from_secs(30);

/// Whether the node answers requests for receipts. Some nodes answer all other requests and refuse these.
#[derive(Debug, Default)]
struct Receipts {
    /// The refusals since the last answer.
    refusals: AtomicU32,
    answered: Mutex<Option<Instant>>,
}

impl Receipts {
    fn note<T>(&self, answer: &Result<T, RpcFailure>) {
        match answer {
            Ok(_) => {
                self.refusals.store(0, Ordering::Relaxed);
                *self.answered.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
            }
            Err(RpcFailure::Refused { code, message }) if !is_passing(*code, message) => {
                self.refusals.fetch_add(1, Ordering::Relaxed);
            }
            // A node that is down or has too much to do gives no other answers either.
            Err(RpcFailure::Refused { .. } | RpcFailure::Silent) => {}
        }
    }

    fn are_refused(&self) -> bool {
        self.refusals.load(Ordering::Relaxed) >= REFUSALS
    }

    fn are_given(&self) -> bool {
        let answered = *self.answered.lock().unwrap_or_else(PoisonError::into_inner);
        self.refusals.load(Ordering::Relaxed) == 0 && answered.is_some_and(|at| at.elapsed() < RECEIPTS_FRESH)
    }
}

/// Returns `true` for refusals that strangers can bring about by their number, and those that end by themselves.
fn is_passing(code: i64, message: &str) -> bool {
    let message = message.to_ascii_lowercase();
    [429, -32_005, -32_016].contains(&code)
        || ["limit", "too many", "in progress"].iter().any(|word| message.contains(word))
}

/// Why a request has no result.
#[derive(Clone, Debug)]
pub(crate) enum RpcFailure {
    /// The node answered with an error.
    Refused {
        /// The JSON-RPC code.
        code: i64,
        /// The node's message, cut to 160 bytes.
        message: String,
    },
    /// The node did not answer, or its answer cannot be read. The request may have taken effect.
    Silent,
}

impl Rpc {
    pub(crate) fn new(client: RpcClient, timeout: Duration) -> Self {
        let transport = client.transport().clone();
        Self { client, transport, timeout, receipts: Arc::default(), settle_calls: Arc::default() }
    }

    /// Returns what is remembered of transactions that were looked at.
    pub(super) fn settle_calls(&self) -> &SettleCalls {
        &self.settle_calls
    }

    /// Sends a request and waits for its result, within the default timeout.
    pub(crate) async fn call<R: DeserializeOwned>(
        &self,
        method: &'static str,
        params: impl Serialize,
    ) -> Result<R, RpcFailure> {
        self.call_within(self.timeout, method, params).await
    }

    /// Sends a request and waits for its result, for at most `limit`.
    pub(crate) async fn call_within<R: DeserializeOwned>(
        &self,
        limit: Duration,
        method: &'static str,
        params: impl Serialize,
    ) -> Result<R, RpcFailure> {
        let request = self.request(method, params)?;
        self.ask(limit, request).await.and_then(|result| read(method, &result))
    }

    /// Makes a request with an id of its own.
    pub(super) fn request(
        &self,
        method: &'static str,
        params: impl Serialize,
    ) -> Result<SerializedRequest, RpcFailure> {
        let params = serde_json::value::to_raw_value(&params).map_err(|_| RpcFailure::Silent)?;
        Request::new(method, self.client.next_id(), params).serialize().map_err(|_| RpcFailure::Silent)
    }

    /// Sends one request and returns its result.
    pub(super) async fn ask(&self, limit: Duration, request: SerializedRequest) -> Result<Box<RawValue>, RpcFailure> {
        let method = request.method().to_owned();
        outcome(&method, self.answer(limit, request).await?)
    }

    /// Sends one request and returns what the node answered: a result, or an error.
    async fn answer(&self, limit: Duration, request: SerializedRequest) -> Result<ResponsePayload, RpcFailure> {
        let method = request.method().to_owned();
        match self.exchange(limit, request.into()).await {
            Ok(ResponsePacket::Single(response)) => Ok(response.payload),
            Ok(ResponsePacket::Batch(_)) => Err(RpcFailure::Silent),
            Err(Unanswered::Error(RpcError::ErrorResp(error))) => Ok(ResponsePayload::Failure(error)),
            Err(unanswered) => {
                tracing::debug!(method, why = unanswered.describe(), "the node did not answer");
                Err(match unanswered.refusing_status() {
                    Some(status) => {
                        RpcFailure::Refused { code: status.into(), message: format!("HTTP status {status}") }
                    }
                    None => RpcFailure::Silent,
                })
            }
        }
    }

    /// Sends a packet and waits for the answer, for at most `limit`.
    pub(super) async fn exchange(&self, limit: Duration, packet: RequestPacket) -> Result<ResponsePacket, Unanswered> {
        let mut transport = self.transport.clone();
        let exchange = async {
            std::future::poll_fn(|cx| transport.poll_ready(cx)).await?;
            transport.call(packet).await
        };
        match timeout(limit, exchange).await {
            Ok(answer) => answer.map_err(Unanswered::Error),
            Err(_) => Err(Unanswered::Late),
        }
    }

    /// Returns the default timeout.
    pub(super) const fn timeout(&self) -> Duration {
        self.timeout
    }

    pub(crate) async fn chain_id(&self) -> Result<u64, RpcFailure> {
        Ok(self.call::<U64>("eth_chainId", [(); 0]).await?.saturating_to())
    }

    pub(crate) async fn balance(&self, account: Address) -> Result<U256, RpcFailure> {
        self.call("eth_getBalance", (account, "latest")).await
    }

    /// Returns the code at an address, which is empty if there is none.
    pub(crate) async fn code(&self, address: Address) -> Result<Bytes, RpcFailure> {
        self.call("eth_getCode", (address, "latest")).await
    }

    /// Returns how many transactions of `account` are in blocks (`latest`), or in blocks and in the pool (`pending`).
    pub(crate) async fn nonce(&self, account: Address, at: &'static str) -> Result<u64, RpcFailure> {
        Ok(self.call::<U64>("eth_getTransactionCount", (account, at)).await?.saturating_to())
    }

    /// Simulates a call, with `most` gas if that is bounded. Returns the gas that its transaction needs, or how it would fail.
    pub(crate) async fn estimate_gas(
        &self,
        from: Address,
        to: Address,
        data: &Bytes,
        most: Option<u64>,
    ) -> Result<Result<u64, Revert>, RpcFailure> {
        const METHOD: &str = "eth_estimateGas";
        let mut call = serde_json::json!({ "from": from, "to": to, "data": data });
        if let Some(most) = most {
            call["gas"] = serde_json::json!(U64::from(most));
        }
        let payload = self.answer(self.timeout, self.request(METHOD, [call])?).await?;
        if let ResponsePayload::Failure(error) = &payload {
            let data = error.as_revert_data();
            let message = error.message.to_ascii_lowercase();
            // Nodes say that a call needs more gas than it may use in one of these ways.
            let needs_more = most.is_some()
                && ["gas required exceeds", "out of gas", "outofgas"].iter().any(|it| message.contains(it));
            if data.is_some() || error.code == 3 || message.contains("revert") || needs_more {
                return Ok(Err(Revert {
                    data: data.unwrap_or_default(),
                    message: printable(error.message.as_bytes()),
                }));
            }
        }
        Ok(Ok(read::<U64>(METHOD, &outcome(METHOD, payload)?)?.saturating_to()))
    }

    pub(crate) async fn receipt(&self, transaction: B256) -> Result<Option<Receipt>, RpcFailure> {
        let answer = self.call("eth_getTransactionReceipt", [transaction]).await;
        self.receipts.note(&answer);
        answer
    }

    /// Returns `true` if the node refused the last receipts that it was asked for. Does not ask it.
    pub(crate) fn refuses_receipts(&self) -> bool {
        self.receipts.are_refused()
    }

    /// Asks for a receipt, unless the node gave one a short while ago. Returns `false` if it refuses.
    pub(crate) async fn gives_receipts(&self) -> bool {
        self.receipts.are_given()
            || !matches!(self.any_receipt().await, Err(RpcFailure::Refused { code, message }) if !is_passing(code, &message))
    }

    /// Asks for the receipt of a transaction in the newest block: of one that does not exist, if there is none in it. Returns `false` if
    /// there is a transaction and no receipt of it, as where a node is behind another one.
    pub(crate) async fn any_receipt(&self) -> Result<bool, RpcFailure> {
        let newest = self.transactions("latest").await?.and_then(|transactions| transactions.first().copied());
        let receipt = self.receipt(newest.unwrap_or(B256::repeat_byte(0x42))).await?;
        Ok(receipt.is_some() || newest.is_none())
    }

    /// Returns the hashes of the transactions in a block, or `None` if the node does not have the block.
    pub(crate) async fn transactions(&self, block: impl Serialize) -> Result<Option<Vec<B256>>, RpcFailure> {
        #[derive(Deserialize)]
        struct Transactions {
            #[serde(default)]
            transactions: Vec<B256>,
        }
        let block: Option<Transactions> = self.call("eth_getBlockByNumber", (block, false)).await?;
        Ok(block.map(|block| block.transactions))
    }

    /// Returns the number of the newest block.
    pub(crate) async fn block_number(&self) -> Result<u64, RpcFailure> {
        Ok(self.call::<U64>("eth_blockNumber", [(); 0]).await?.saturating_to())
    }

    /// Returns how many transactions of `account` are in blocks up to this one.
    pub(crate) async fn nonce_in(&self, account: Address, block: u64) -> Result<u64, RpcFailure> {
        Ok(self.call::<U64>("eth_getTransactionCount", (account, U64::from(block))).await?.saturating_to())
    }

    /// Returns the block with this number, on the chain as the node sees it now.
    pub(crate) async fn block_at(&self, number: u64) -> Result<Option<Block>, RpcFailure> {
        self.call("eth_getBlockByNumber", (U64::from(number), false)).await
    }

    /// Returns the newest block (`latest`), or the newest final block (`finalized`).
    pub(crate) async fn block(&self, tag: &'static str) -> Result<Option<Block>, RpcFailure> {
        self.call("eth_getBlockByNumber", (tag, false)).await
    }

    /// Returns the newest final block, or `None` if the node does not support the tag or has no such block.
    pub(crate) async fn finalized(&self) -> Result<Option<Block>, RpcFailure> {
        match self.block("finalized").await {
            Err(RpcFailure::Refused { .. }) => Ok(None),
            answer => answer,
        }
    }
}

debug_fields!(Rpc { timeout });

/// How a simulated call reverts.
#[derive(Clone, Debug)]
pub(crate) struct Revert {
    /// The error as the contract encoded it; empty if the node does not say.
    pub(crate) data: Bytes,
    /// The node's message, cut to 160 bytes.
    pub(crate) message: String,
}

/// Why a request has no answer.
#[derive(Debug)]
pub(super) enum Unanswered {
    /// The timeout passed.
    Late,
    /// The transport failed, or the answer is no JSON-RPC.
    Error(RpcError<TransportErrorKind>),
}

impl Unanswered {
    /// Returns `true` if the node refused the request's form, rather than failed to receive it.
    pub(super) fn is_refusal(&self) -> bool {
        match self {
            // A timeout (408) or too many requests (429) say nothing about the form.
            Self::Error(RpcError::Transport(TransportErrorKind::HttpError(error))) => {
                (400..500).contains(&error.status) && !matches!(error.status, 408 | 429)
            }
            Self::Error(RpcError::ErrorResp(_) | RpcError::DeserError { .. }) => true,
            _ => false,
        }
    }

    /// Returns the HTTP status with which a node refuses the request.
    fn refusing_status(&self) -> Option<u16> {
        match self {
            Self::Error(RpcError::Transport(TransportErrorKind::HttpError(error))) if self.is_refusal() => {
                Some(error.status)
            }
            _ => None,
        }
    }

    /// Returns the kind of failure. The error's own text may hold a URL.
    pub(super) fn describe(&self) -> &'static str {
        match self {
            Self::Late => "not in time",
            Self::Error(RpcError::ErrorResp(_)) => "a JSON-RPC error",
            Self::Error(RpcError::Transport(TransportErrorKind::HttpError(_))) => "an HTTP status",
            Self::Error(RpcError::Transport(_)) => "the connection",
            Self::Error(RpcError::DeserError { .. }) => "not JSON-RPC",
            Self::Error(_) => "the transport",
        }
    }
}

/// Returns the result of a response.
pub(super) fn outcome(method: &str, payload: ResponsePayload) -> Result<Box<RawValue>, RpcFailure> {
    match payload {
        ResponsePayload::Success(result) => Ok(result),
        ResponsePayload::Failure(error) => {
            let message = printable(error.message.as_bytes());
            tracing::debug!(method, code = error.code, message, "the node answered with an error");
            Err(RpcFailure::Refused { code: error.code, message })
        }
    }
}

/// Reads a result as the expected type.
pub(super) fn read<R: DeserializeOwned>(method: &str, result: &RawValue) -> Result<R, RpcFailure> {
    serde_json::from_str(result.get()).map_err(|error| {
        tracing::debug!(method, %error, "the node's answer cannot be read");
        RpcFailure::Silent
    })
}

/// Returns the first 160 bytes of foreign text, without control characters, for a log or an error message.
pub(crate) fn printable(text: &[u8]) -> String {
    const MAX: usize = 160;
    let text = String::from_utf8_lossy(text.get(..MAX).unwrap_or(text));
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect::<String>().trim().to_owned()
}

impl RpcFailure {
    /// Returns `true` if the node does not offer the method.
    pub(crate) fn is_method_missing(&self) -> bool {
        let Self::Refused { code, message } = self else { return false };
        let message = message.to_ascii_lowercase();
        *code == -32601
            || *code == -32004
            || (message.contains("method")
                && ["not found", "not support", "unsupported", "not exist", "not available", "not whitelisted"]
                    .iter()
                    .any(|words| message.contains(words)))
    }
}

/// The receipt of a transaction. Only the fields that are needed are read, so that unknown transaction types can be read, too.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Receipt {
    pub(crate) transaction_hash: B256,
    pub(crate) block_number: U64,
    pub(crate) block_hash: B256,
    pub(crate) status: U64,
    #[serde(default)]
    pub(crate) to: Option<Address>,
    pub(crate) gas_used: U64,
    #[serde(default)]
    pub(crate) effective_gas_price: U256,
    /// The fee of an OP-stack chain for data availability, in addition to gas, in wei.
    #[serde(default)]
    pub(crate) l1_fee: Option<U256>,
    pub(crate) logs: Vec<Log>,
}

impl Receipt {
    pub(crate) fn succeeded(&self) -> bool {
        self.status == U64::from(1)
    }

    pub(crate) fn block(&self) -> u64 {
        self.block_number.saturating_to()
    }

    /// Returns the cost for the sender, in wei.
    pub(crate) fn cost(&self) -> U256 {
        let gas = U256::from(self.gas_used).saturating_mul(self.effective_gas_price);
        gas.saturating_add(self.l1_fee.unwrap_or_default())
    }
}

/// An event in a receipt.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Log {
    pub(crate) address: Address,
    pub(crate) topics: Vec<B256>,
    pub(crate) data: Bytes,
    #[serde(default)]
    pub(crate) block_number: Option<U64>,
    #[serde(default)]
    pub(crate) block_hash: Option<B256>,
    #[serde(default)]
    pub(crate) transaction_hash: Option<B256>,
    #[serde(default)]
    pub(crate) removed: bool,
}

/// The header fields of a block that are needed.
#[derive(Clone, Copy, Debug, Deserialize)]
pub(crate) struct Block {
    pub(crate) number: U64,
    pub(crate) hash: B256,
    pub(crate) timestamp: U64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_that_has_too_much_to_do_does_not_refuse_receipts() {
        let receipts = Receipts::default();
        let refused = |code, message: &str| Err::<(), _>(RpcFailure::Refused { code, message: message.to_owned() });
        for passing in
            [refused(429, "HTTP status 429"), refused(-32_005, "slow down"), refused(-32_000, "Over Rate Limit")]
        {
            (0..REFUSALS).for_each(|_| receipts.note(&passing));
            assert!(!receipts.are_refused(), "{passing:?}");
        }
        (0..REFUSALS).for_each(|_| receipts.note(&refused(-32_601, "archive requests need a paid plan")));
        assert!(receipts.are_refused());
    }

    #[test]
    fn foreign_text_is_bounded_and_without_control_characters() {
        assert_eq!(printable(b"boom\x1b[2J\n"), "boom [2J");
        assert!(printable(&[b'x'; 10_000]).len() <= 160);
    }

    #[test]
    fn receipt_of_an_unknown_transaction_type_is_read() {
        let text = r#"{"transactionHash":"0x1111111111111111111111111111111111111111111111111111111111111111",
            "blockHash":"0x2222222222222222222222222222222222222222222222222222222222222222","blockNumber":"0x10","status":"0x1","type":"0x7e","to":null,"gasUsed":"0x5208","logs":[],"depositNonce":"0x1"}"#;
        let receipt: Receipt = serde_json::from_str(text).unwrap();
        assert!(receipt.succeeded());
        assert_eq!(receipt.block(), 16);
        assert_eq!(receipt.cost(), U256::ZERO);
    }

    #[test]
    fn missing_methods_are_recognized() {
        let said = |code, message: &str| RpcFailure::Refused { code, message: message.into() }.is_method_missing();
        assert!(said(-32601, "Method not found") && said(-32601, "no") && said(-32004, "no"));
        assert!(said(-32000, "the method eth_sendRawTransactionSync does not exist/is not available"));
        assert!(said(-32600, "Unsupported method: eth_sendRawTransactionSync"));
        assert!(!said(-32000, "nonce too low"));
        assert!(!said(-32000, "header not found") && !said(-32000, "the method handler crashed"));
        assert!(!RpcFailure::Silent.is_method_missing());
    }
}
