//! Refunds of channels that are not used any more, over HTTP.

use std::time::Duration;

use ::reqwest::{Client, ClientBuilder, Method, redirect};

use super::{ChannelEntry, Refund};
use crate::{client::Payer, usdc::Usdc, vouchers::ChannelId};

/// The timeout of one request. A refund is a transaction, which the seller waits for.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(60);

/// Asks sellers for refunds of what is left in the channels of this payer that were not used for `idle`. Returns one result for each.
///
/// A channel stays in the journal, and a later payment fills it again. In the budget a refund stays reserved until
/// `reconcile_channels` (feature `onchain`) has seen it on the chain, since the seller's word proves nothing.
///
/// Sellers are asked with the method and URL of the last payment, and without a body. One that refuses keeps the payer waiting for a
/// withdrawal (`initiate_withdrawal`, feature `onchain`).
///
/// Redirects are not followed. Channels are asked for one after the other, each with a timeout of a minute.
///
/// ```no_run
/// # async fn example(payer: tower_x402::client::Payer) -> Result<(), Box<dyn std::error::Error>> {
/// use std::time::Duration;
/// use tower_x402::client::refund_channels;
///
/// for refund in refund_channels(&payer, Duration::from_secs(600), reqwest::Client::builder()).await? {
///     println!("{} from {}", refund.amount, refund.channel);
/// }
/// # Ok(()) }
/// ```
///
/// # Errors
/// What [`ClientBuilder::build`] returns. The result of a channel whose seller refused or did not answer has a
/// [`reason`](Refund::reason).
pub async fn refund_channels(payer: &Payer, idle: Duration, client: ClientBuilder) -> ::reqwest::Result<Vec<Refund>> {
    let client = client.redirect(redirect::Policy::none()).timeout(REQUEST_TIMEOUT).build()?;
    let is_idle = |entry: &ChannelEntry| {
        let since = payer.now().saturating_sub(entry.used_at);
        entry.config.payer == payer.address() && entry.available() > Usdc::ZERO && since >= idle.as_secs()
    };
    let mut refunds = Vec::new();
    for entry in payer.budget().journal().channels().into_iter().filter(is_idle) {
        let refund = refund(payer, &client, &entry).await;
        refunds.extend(refund.unwrap_or_else(|reason| Some(Refund::failed(entry.id(), reason))));
    }
    Ok(refunds)
}

impl Refund {
    const fn failed(channel: ChannelId, reason: String) -> Self {
        Self { channel, amount: Usdc::ZERO, transaction: None, reason: Some(reason), finding: None }
    }
}

async fn refund(payer: &Payer, client: &Client, entry: &ChannelEntry) -> Result<Option<Refund>, String> {
    let method: Method = entry.method.parse().map_err(|_| "the journal names no method".to_owned())?;
    let request = || client.request(method.clone(), &entry.url);
    // The error of reqwest shows the URL, which may hold a token.
    let silent = |_: ::reqwest::Error| "the server did not answer".to_owned();
    let refund = payer.refund(entry.id(), None).await.map_err(|error| error.to_string())?;
    let Some(mut refund) = refund else { return Ok(None) };
    loop {
        let paid = request().header(refund.header_name(), refund.header()).send().await.map_err(silent)?;
        let again = refund.answered(paid.status(), paid.headers()).await.map_err(|error| error.to_string())?;
        if !again {
            return Ok(Some(refund.conclude().await));
        }
    }
}
