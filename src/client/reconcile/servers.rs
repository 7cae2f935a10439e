//! Reconciliation with the servers that were paid.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use ::reqwest::{Client, ClientBuilder, StatusCode, redirect};
use tokio::{task::JoinSet, time::timeout};
use url::Url;

use super::{Budget, JournalEntry, Proof, Reconciliation};
use crate::{
    body::{ReadBodyError, read_body},
    client::challenge::status_url,
    permit2::PERMIT2,
    protocol::payment_status::Status,
};

/// The timeout of one request, body included.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
/// The largest answer that is read, in bytes. A status has about 120.
const MAX_STATUS: usize = 4 * 1024;
/// How many requests are under way at once.
const MAX_CONCURRENT: usize = 8;

/// Asks servers what became of the open payments of the budget's journal.
///
/// It needs no node. A server is asked if its 402 declared a status URL
/// ([`payment_status`](crate::protocol::payment_status)) on the origin that was paid. [`reconcile`](super::reconcile) (feature `onchain`)
/// asks the chain.
///
/// A payment becomes spent if its server reports it as paid and names the transaction, as in a receipt. No answer releases an amount,
/// because a server that reports a failure holds the signature and can still settle it. Such a payment stays reserved until the
/// chain proves more.
///
/// Redirects are not followed. Each answer may have 4 KiB and take 10 seconds. A server that cannot be reached is not asked about its
/// other payments.
///
/// ```no_run
/// # async fn example(budget: tower_x402::client::Budget) -> Result<(), Box<dyn std::error::Error>> {
/// use tower_x402::client::reconcile_with_servers;
///
/// let found = reconcile_with_servers(&budget, reqwest::Client::builder()).await?;
/// println!("{} were paid, {} are still open", found.paid, found.open);
/// # Ok(()) }
/// ```
///
/// # Errors
/// What [`ClientBuilder::build`] returns. The payments of a server that does not answer stay open.
pub async fn reconcile_with_servers(budget: &Budget, client: ClientBuilder) -> ::reqwest::Result<Reconciliation> {
    let client = client.redirect(redirect::Policy::none()).build()?;
    let mut found = Reconciliation::default();
    let mut entries = budget.journal().unresolved().into_iter().map(Arc::new);
    let (mut unreachable, mut requests) = (BTreeSet::new(), JoinSet::new());
    loop {
        while requests.len() < MAX_CONCURRENT {
            let Some(entry) = entries.next() else { break };
            match request_url(&entry).filter(|url| !unreachable.contains(&url.origin().ascii_serialization())) {
                Some(url) => {
                    let client = client.clone();
                    requests.spawn(async move {
                        let answer = timeout(REQUEST_TIMEOUT, ask(&client, url.clone())).await;
                        (entry, url, answer.unwrap_or(Answer::Unreachable))
                    });
                }
                None => found.record(budget, &entry, None).await,
            }
        }
        match requests.join_next().await {
            Some(Ok((entry, url, answer))) => {
                if answer == Answer::Unreachable {
                    unreachable.insert(url.origin().ascii_serialization());
                }
                found.record(budget, &entry, answer.proof()).await;
            }
            // The task did not finish, so its payment stays open.
            Some(Err(_)) => found.open += 1,
            None => return Ok(found),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Answer {
    Status(Status),
    /// The server answered without a status.
    NoStatus,
    Unreachable,
}

impl Answer {
    fn proof(self) -> Option<Proof> {
        match self {
            Self::Status(Status { state, transaction: Some(transaction), .. }) if state.is_paid() => {
                Some(Proof::Paid { transaction, charged: None })
            }
            _ => None,
        }
    }
}

/// Returns the URL that reports the status of a payment, if its server declared one.
fn request_url(entry: &JournalEntry) -> Option<Url> {
    // It was checked when the payment was signed, but the file may have been edited since.
    let mut url = status_url(entry.status_url.as_deref()?, &entry.url.parse().ok()?)?;
    // What keeps the nonces names the payment.
    let asset = if entry.permit.is_some() { PERMIT2 } else { entry.asset };
    url.query_pairs_mut()
        .append_pair("network", &entry.network.to_string())
        .append_pair("asset", &asset.to_string())
        .append_pair("payer", &entry.payer.to_string())
        .append_pair("nonce", &entry.nonce.to_string());
    Some(url)
}

async fn ask(client: &Client, url: Url) -> Answer {
    let Ok(response) = client.get(url).send().await else { return Answer::Unreachable };
    if response.status() != StatusCode::OK {
        return Answer::NoStatus;
    }
    match read_body(response, MAX_STATUS).await {
        Ok(body) => serde_json::from_slice(&body).map_or(Answer::NoStatus, Answer::Status),
        Err(ReadBodyError::TooLarge) => Answer::NoStatus,
        Err(ReadBodyError::Broken) => Answer::Unreachable,
    }
}
