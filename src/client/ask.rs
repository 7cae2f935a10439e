//! What servers say about payments that they did not answer for.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use ::reqwest::{Client, ClientBuilder, StatusCode, redirect};
use tokio::{task::JoinSet, time::timeout};
use url::Url;

use super::{
    Budget, JournalEntry,
    demand::status_url,
    reconciliation::{Proof, Reconciliation},
};
use crate::protocol::payment_status::Status;

/// How long one server may take for one answer, body included.
const PATIENCE: Duration = Duration::from_secs(10);
/// A status has about 120 bytes.
const MAX_STATUS: usize = 4 * 1024;
/// How many questions are under way at once.
const AT_ONCE: usize = 8;

/// Asks the servers that said where ([`payment_status`](crate::protocol::payment_status)) what became of the payments that are open in
/// the budget's journal. Needs no node; [`reconcile`](super::reconcile) (feature `onchain`) asks the chain.
///
/// A server is believed in what costs itself nothing to admit and the payer nothing to believe: one that says that it was paid,
/// and names the transaction, closes the payment as spent, as a receipt would have. Nothing that it says frees money: it
/// holds the signature, and who says "failed" today can settle tomorrow. Such a payment stays reserved until the chain
/// shows more.
///
/// A question goes to the origin that was paid and to no other; redirects are not followed. Of an answer 4 KiB are read, for ten
/// seconds at most. A server that cannot be reached is asked about one payment, or a few at once, and not about the
/// rest.
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
/// What [`ClientBuilder::build`] returns. A server that does not answer is none: its payments stay open.
pub async fn reconcile_with_servers(budget: &Budget, client: ClientBuilder) -> ::reqwest::Result<Reconciliation> {
    let client = client.redirect(redirect::Policy::none()).build()?;
    let mut found = Reconciliation::default();
    let mut entries = budget.journal().unresolved().into_iter().map(Arc::new);
    let (mut silent, mut asked) = (BTreeSet::new(), JoinSet::new());
    loop {
        while asked.len() < AT_ONCE {
            let Some(entry) = entries.next() else { break };
            match question(&entry).filter(|url| !silent.contains(&url.origin().ascii_serialization())) {
                Some(url) => {
                    let client = client.clone();
                    asked.spawn(async move {
                        let answer = timeout(PATIENCE, ask(&client, url.clone())).await;
                        (entry, url, answer.unwrap_or(Answer::Silence))
                    });
                }
                None => found.enter(budget, &entry, None).await,
            }
        }
        match asked.join_next().await {
            Some(Ok((entry, url, answer))) => {
                if answer == Answer::Silence {
                    silent.insert(url.origin().ascii_serialization());
                }
                found.enter(budget, &entry, answer.proof()).await;
            }
            // Nothing in there panics; a payment without an answer is open.
            Some(Err(_)) => found.open += 1,
            None => return Ok(found),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Answer {
    Says(Status),
    /// It answered, with nothing that helps.
    Nothing,
    /// It did not answer.
    Silence,
}

impl Answer {
    fn proof(self) -> Option<Proof> {
        match self {
            Self::Says(Status { state, transaction: Some(transaction), .. }) if state.is_paid() => {
                Some(Proof::Paid { transaction })
            }
            _ => None,
        }
    }
}

/// The URL that asks about a payment; `None` if its server has none.
fn question(entry: &JournalEntry) -> Option<Url> {
    // Checked when it was written, and again: a file may have been edited.
    let mut url = status_url(entry.status_url.as_deref()?, &entry.url.parse().ok()?)?;
    url.query_pairs_mut()
        .append_pair("network", &entry.network.to_string())
        .append_pair("asset", &entry.asset.to_string())
        .append_pair("payer", &entry.payer.to_string())
        .append_pair("nonce", &entry.nonce.to_string());
    Some(url)
}

async fn ask(client: &Client, url: Url) -> Answer {
    let Ok(mut response) = client.get(url).send().await else { return Answer::Silence };
    if response.status() != StatusCode::OK {
        return Answer::Nothing;
    }
    let mut text = Vec::new();
    loop {
        match response.chunk().await {
            Ok(Some(chunk)) if text.len() + chunk.len() <= MAX_STATUS => text.extend_from_slice(&chunk),
            Ok(Some(_)) => return Answer::Nothing,
            Ok(None) => return serde_json::from_slice(&text).map_or(Answer::Nothing, Answer::Says),
            Err(_) => return Answer::Silence,
        }
    }
}
