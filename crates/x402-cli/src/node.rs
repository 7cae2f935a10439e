//! Questions to a node that move nothing. Its URL is in no error, since it may hold a key.

use std::time::Duration;

use alloy_primitives::{Address, Bytes, U64, U256, keccak256};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tower_x402::permit2;

use crate::{error::Error, values::HttpUrl};

/// The timeout of an answer.
const TIMEOUT: Duration = Duration::from_secs(10);

/// A settlement key with less is about to stop: a thousand transfers at a hundredth of a gwei, in wei.
pub(crate) const LOW_TANK: u64 = 860_000_000_000_000;

/// A node.
pub(crate) struct Node {
    client: reqwest::Client,
    url: String,
}

/// An error of a node.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NodeError {
    /// It cannot be reached, or takes too long, or answers with something else than JSON-RPC.
    #[error("the node does not answer")]
    Silent,
    #[error("the node refuses {method}: {message}")]
    Refused { method: &'static str, message: String },
}

impl Node {
    pub(crate) fn new(url: &HttpUrl) -> Result<Self, Error> {
        let client = reqwest::Client::builder().timeout(TIMEOUT).build().map_err(Error::Http)?;
        Ok(Self { client, url: url.as_str().to_owned() })
    }

    pub(crate) async fn call<T: DeserializeOwned>(&self, method: &'static str, params: Value) -> Result<T, NodeError> {
        let request = json!({ "jsonrpc": "2.0", "id": 1, "method": method, "params": params }).to_string();
        let request = self.client.post(&self.url).header("content-type", "application/json").body(request);
        let response = request.send().await.map_err(|_| NodeError::Silent)?;
        let bytes = response.bytes().await.map_err(|_| NodeError::Silent)?;
        let mut answer: Value = serde_json::from_slice(&bytes).map_err(|_| NodeError::Silent)?;
        if let Some(error) = answer.get("error") {
            let message = error["message"].as_str().unwrap_or("without a reason");
            return Err(NodeError::Refused { method, message: message.chars().take(160).collect() });
        }
        serde_json::from_value(answer["result"].take()).map_err(|_| NodeError::Silent)
    }

    pub(crate) async fn chain_id(&self) -> Result<u64, NodeError> {
        self.call::<U64>("eth_chainId", json!([])).await.map(|id| id.to())
    }

    /// Returns the ether of an account, in wei.
    pub(crate) async fn ether(&self, account: Address) -> Result<U256, NodeError> {
        self.call("eth_getBalance", json!([account, "latest"])).await
    }

    pub(crate) async fn code(&self, account: Address) -> Result<Bytes, NodeError> {
        self.call("eth_getCode", json!([account, "latest"])).await
    }

    /// Returns what a function without arguments of a contract returns.
    pub(crate) async fn read(&self, contract: Address, signature: &str) -> Result<Bytes, NodeError> {
        let data = Bytes::copy_from_slice(&keccak256(signature)[..4]);
        self.call("eth_call", json!([{ "to": contract, "data": data }, "latest"])).await
    }

    /// Returns the balance of an account, in atomic units of the token.
    pub(crate) async fn balance(&self, token: Address, account: Address) -> Result<U256, NodeError> {
        self.amount(token, "balanceOf(address)", &[account]).await
    }

    /// Returns how much of an account's tokens Permit2 may move, in atomic units.
    pub(crate) async fn approved(&self, token: Address, account: Address) -> Result<U256, NodeError> {
        self.amount(token, "allowance(address,address)", &[account, permit2::PERMIT2]).await
    }

    async fn amount(&self, token: Address, signature: &str, of: &[Address]) -> Result<U256, NodeError> {
        let mut data = keccak256(signature)[..4].to_vec();
        of.iter().for_each(|account| data.extend(account.into_word()));
        self.call("eth_call", json!([{ "to": token, "data": Bytes::from(data) }, "latest"])).await
    }
}
