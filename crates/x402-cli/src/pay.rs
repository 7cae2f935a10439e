//! `x402 pay`: one request, paid for within a budget.

use std::{
    fs,
    io::{self, Read as _},
    path::PathBuf,
};

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, header::CONTENT_TYPE};
use serde_json::{Value, json};
use tokio::{fs::File, io::AsyncWriteExt as _};
use tower_x402::{
    Usdc,
    client::{PaymentError, PaymentOutcome, Purchase, ReceiptExt as _},
    protocol::{
        MAX_REQUIRED_BODY, MAX_REQUIRED_HEADER, PaymentRequired, PaymentRequirements, decode_header, header_name,
    },
    upto,
};
use url::Url;

use crate::{
    error::{Error, Sentence},
    keys::{self, Role},
    output,
    purse::{self, PurseFlags},
    values::some_amount,
};

/// The most that is paid unless a flag says otherwise: a cent.
pub(crate) const DEFAULT_BUDGET: Usdc = Usdc::from_atomic(10_000);
/// The most of a body that is printed within JSON, in bytes.
const MAX_SHOWN: usize = 64 << 20;

/// Sends a request, and pays for it if it is asked to.
///
/// The request is sent without a payment first, so that what is free costs nothing. Redirects are not followed.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
OUTPUT
  The answer's body on standard output, and on standard error what was paid. With --json, one JSON line on standard output instead:
    {\"status\", \"outcome\", \"amount\", \"price\", \"transaction\", \"payer\", \"pay_to\", \"network\", \"asset\", \"nonce\", \"reason\",
     \"voucher\", \"body\"}
  outcome is settled (paid; the transaction is named), accepted (paid; the server settles later, claims the voucher, or charged nothing),
  failed (the server says that it was not paid), unknown (it may have been paid), refused (nothing was signed), or null (nothing was asked
  for). amount is what was charged, in atomic units (millionths of a USDC). With --dry-run:
    {\"status\", \"offers\": [{\"scheme\", \"network\", \"asset\", \"amount\", \"price\", \"pay_to\"}], \"would_pay\", \"reason\"}

EXIT STATUS
  0  the answer is a success (2xx or 3xx); with --dry-run, it is free or would be paid for
  1  it is not, or nothing was paid because of a limit, or no answer came
  2  a flag, the key or the journal cannot be used

ENVIRONMENT
  PAYER_PRIVATE_KEY       the key that pays (32 bytes in hex). Its account needs USDC and no ETH. There are PAYER_PRIVATE_KEY_FILE and
                          PAYER_KEYSTORE, too
  X402_JOURNAL            the same as --journal
  X402_RPC_URL            the same as --rpc-url. With a node, offers of at most a price (scheme upto) are paid, too, as far as x402 wallet
                          approve has allowed it

EXAMPLES
  x402 pay https://judge.example/evaluate -d @answer.json -H 'content-type: application/json' --budget '$0.002'
  x402 pay https://judge.example/evaluate -d @answer.json --dry-run
  x402 pay https://api.example/report -o report.pdf --journal ~/.x402.jsonl --purchase 'report of monday'")]
pub(crate) struct Command {
    /// The URL to request
    url: Url,
    /// The method [default: GET, or POST with -d]
    #[arg(short = 'X', long = "request", value_name = "METHOD")]
    method: Option<Method>,
    /// A header, as name: value; @FILE for a file of them, where a token is not seen by other users. Repeatable
    #[arg(short = 'H', long = "header", value_name = "HEADER")]
    headers: Vec<String>,
    /// The body; @FILE for that of a file, @- for standard input
    #[arg(short = 'd', long, value_name = "DATA")]
    data: Option<String>,
    /// Write the body to this file
    #[arg(short = 'o', long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Print status and headers before the body
    #[arg(short = 'i', long, conflicts_with = "json")]
    include: bool,
    /// The most to pay
    #[arg(long, default_value_t = DEFAULT_BUDGET, value_parser = some_amount)]
    budget: Usdc,
    /// Say what it would cost, and pay nothing. The request is sent without a payment
    #[arg(long)]
    dry_run: bool,
    /// A name for this purchase, unique in the journal. The same name is the same purchase: it is paid for once, whatever became of earlier
    /// commands
    #[arg(long, value_name = "NAME", requires = "journal")]
    purchase: Option<String>,
    /// Print facts as one JSON line
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    purse: PurseFlags,
}

/// The place of a body.
enum Sink {
    File(File),
    Memory(Vec<u8>),
    Output,
}

impl Sink {
    async fn copy(&mut self, response: &mut reqwest::Response) -> Result<(), Error> {
        let mut next = response.chunk().await.map_err(broke_off)?;
        if let Self::File(file) = self {
            empty(file).await.map_err(|error| unwritten(&error))?;
        }
        while let Some(piece) = next {
            match self {
                Self::File(file) => file.write_all(&piece).await.map_err(|error| unwritten(&error))?,
                Self::Memory(bytes) => {
                    let room = MAX_SHOWN.saturating_sub(bytes.len());
                    bytes.extend_from_slice(&piece[..piece.len().min(room)]);
                }
                Self::Output => output::bytes(&piece),
            }
            next = response.chunk().await.map_err(broke_off)?;
        }
        match self {
            Self::File(file) => file.flush().await.map_err(|error| unwritten(&error)),
            Self::Memory(_) | Self::Output => Ok(()),
        }
    }
}

/// Removes what is in a file of the disk.
async fn empty(file: &File) -> io::Result<()> {
    match file.metadata().await?.is_file() {
        true => file.set_len(0).await,
        false => Ok(()),
    }
}

/// A request, ready to be sent.
struct Request {
    method: Method,
    headers: HeaderMap,
    body: Option<Bytes>,
}

impl Command {
    pub(crate) async fn run(self) -> Result<(), Error> {
        let request = self.request()?;
        match self.dry_run {
            true => self.look(request).await,
            false => self.pay(request).await,
        }
    }

    fn request(&self) -> Result<Request, Error> {
        if !matches!(self.url.scheme(), "http" | "https") || !self.url.has_host() {
            return Err(Error::setting("URL", "expected an http or https URL"));
        }
        let mut headers = HeaderMap::new();
        for text in &self.headers {
            let lines = match text.strip_prefix('@') {
                Some(path) => String::from_utf8_lossy(&read(path)?).into_owned(),
                None => text.clone(),
            };
            for line in lines.lines().filter(|line| !line.trim().is_empty()) {
                let (name, value) = header(line).ok_or_else(|| Error::setting("--header", "expected name: value"))?;
                headers.append(name, value);
            }
        }
        let body = match self.data.as_deref().map(|data| data.strip_prefix('@').ok_or(data)) {
            None => None,
            Some(Ok(path)) => Some(Bytes::from(read(path)?)),
            Some(Err(data)) => Some(Bytes::from(data.to_owned())),
        };
        if body.is_some() && !headers.contains_key(CONTENT_TYPE) {
            // As curl does.
            headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/x-www-form-urlencoded"));
        }
        let default = if body.is_some() { Method::POST } else { Method::GET };
        Ok(Request { method: self.method.clone().unwrap_or(default), headers, body })
    }

    async fn pay(self, request: Request) -> Result<(), Error> {
        let key = keys::require(Role::PAYER, &self.purse.key).await?;
        let budget = purse::budget_of_run(self.purse.open_journal()?, self.budget).build();
        let client = self.purse.client(self.purse.payer(Some(key), budget).await?)?;
        // Before anything is paid for that could not be written. What is in the file stays until there is an answer.
        let is_new = self.output.as_ref().is_some_and(|path| !path.exists());
        let sink = match &self.output {
            Some(path) => {
                let opened = File::options().write(true).create(true).truncate(false).open(path).await;
                Sink::File(opened.map_err(|source| Error::Write { path: path.clone(), source })?)
            }
            None if self.json => Sink::Memory(Vec::new()),
            None => Sink::Output,
        };
        let mut asked = client.request(request.method, self.url.clone()).headers(request.headers);
        if let Some(body) = request.body {
            asked = asked.body(body);
        }
        if let Some(name) = &self.purchase {
            asked = asked.with_extension(Purchase::named(name));
        }
        match output::progress("waiting for the answer", asked.send()).await {
            Ok(response) => self.show(response, sink).await,
            Err(error) => {
                let is_empty =
                    |path: &&PathBuf| fs::symlink_metadata(path).is_ok_and(|file| file.is_file() && file.len() == 0);
                if let Some(path) = self.output.as_ref().filter(|_| is_new).filter(is_empty) {
                    // It is ours, and nobody wrote to it.
                    let _ = fs::remove_file(path);
                }
                Err(self.failed(error))
            }
        }
    }

    /// Prints an answer, and what was paid for it, also if the answer breaks off or cannot be written.
    async fn show(&self, mut response: reqwest::Response, mut sink: Sink) -> Result<(), Error> {
        let receipt = response.receipt().cloned();
        let status = response.status();
        if self.include {
            output::line(format_args!("{:?} {status}", response.version()));
            for (name, value) in response.headers() {
                output::line(format_args!("{name}: {}", String::from_utf8_lossy(value.as_bytes())));
            }
            output::line("");
        }
        let copied = sink.copy(&mut response).await;
        if self.json {
            let mut facts = purse::facts(receipt.as_ref());
            facts["status"] = status.as_u16().into();
            facts["body"] = match &sink {
                Sink::Memory(bytes) => String::from_utf8_lossy(bytes).into(),
                Sink::File(_) | Sink::Output => Value::Null,
            };
            output::line(facts);
        } else if let Some(receipt) = &receipt {
            let transaction = receipt.transaction.map(|transaction| format!(" in {transaction}")).unwrap_or_default();
            let by = if receipt.is_by_voucher() { " by voucher" } else { "" };
            let reason =
                receipt.reason.as_ref().map(|reason| format!(" ({})", reason.escape_debug())).unwrap_or_default();
            let (outcome, amount, pay_to) = (receipt.outcome, receipt.amount, receipt.pay_to);
            output::remark(format_args!("x402: {outcome}: {amount}{by} to {pay_to}{transaction}{reason}"));
        }
        copied?;
        let is_paid = receipt.is_some_and(|receipt| receipt.outcome == PaymentOutcome::Settled);
        match status.as_u16() {
            ..400 => Ok(()),
            400.. if is_paid => Err(Error::Failed {
                what: format!("the answer is {status}"),
                advice: "It was paid. With --journal and --purchase, the same command presents the same payment again, which charges nothing more.",
            }),
            _ => Err(Error::Failed { what: format!("the answer is {status}"), advice: advice_for(status) }),
        }
    }

    /// Says that no answer came, or that nothing was paid.
    fn failed(&self, error: reqwest_middleware::Error) -> Error {
        const NO_ANSWER: &str = "Nothing was paid. Check the address, and whether the service runs.";
        let payment = PaymentError::of(&error);
        let mut facts = purse::facts(payment.and_then(PaymentError::receipt));
        let outcome = payment.map(|error| error.outcome().as_str());
        let known = payment.map(|payment| (purse::sentence(payment), purse::advice(payment)));
        let (what, advice) = known.unwrap_or_else(|| match error {
            reqwest_middleware::Error::Reqwest(error) => (unanswered(error), NO_ANSWER),
            error => (error.to_string(), NO_ANSWER),
        });
        if self.json {
            (facts["status"], facts["outcome"], facts["reason"]) = (Value::Null, outcome.into(), what.clone().into());
            output::line(facts);
        }
        Error::Failed { what, advice }
    }

    /// Asks without a payment, and says what it would cost.
    async fn look(self, request: Request) -> Result<(), Error> {
        let client = self.purse.http().redirect(reqwest::redirect::Policy::none()).build().map_err(Error::Http)?;
        let mut asked = client.request(request.method.clone(), self.url.clone()).headers(request.headers);
        if let Some(body) = request.body {
            asked = asked.body(body);
        }
        let mut response = asked.send().await.map_err(|error| self.failed(error.into()))?;
        let (status, headers) = (response.status(), response.headers().clone());
        if status.as_u16() >= 400 && status != StatusCode::PAYMENT_REQUIRED {
            let what = format!("no price is known: the answer is {status}");
            if self.json {
                output::line(json!({ "status": status.as_u16(), "offers": [], "would_pay": false, "reason": what }));
            }
            return Err(Error::Failed { what, advice: advice_for(status) });
        }
        if status != StatusCode::PAYMENT_REQUIRED {
            match self.json {
                true => {
                    output::line(json!({ "status": status.as_u16(), "offers": [], "would_pay": false, "reason": null }))
                }
                false => output::line(format_args!("It costs nothing: the answer is {status}")),
            }
            return Ok(());
        }
        let mut body = Vec::new();
        while let Some(piece) = response.chunk().await.map_err(broke_off)? {
            body.extend_from_slice(&piece);
            if body.len() > MAX_REQUIRED_BODY {
                break;
            }
        }
        let offers = offers(&headers);
        // Without a key a stranger will do: what is signed is not sent, and the price does not depend on who signs.
        let key = keys::find(Role::PAYER, &self.purse.key).await?;
        let budget = tower_x402::client::Budget::builder().per_payment(self.budget).total(self.budget).build();
        let payer = self.purse.payer(key, budget).await?;
        let refused = match payer.pay(&request.method, &self.url, &headers, Some(&body)).await {
            Ok(Some(_unsent)) => None,
            Ok(None) => Some((
                "the answer is a 402, but not one of x402".to_owned(),
                "Ask whoever runs the service how to pay.",
            )),
            Err(error) => Some((purse::sentence(&error), purse::advice(&error))),
        };
        if self.json {
            output::line(json!({
                "status": status.as_u16(),
                "offers": offers.iter().map(offer_facts).collect::<Vec<_>>(),
                "would_pay": refused.is_none(),
                "reason": refused.as_ref().map(|(reason, _)| reason),
            }));
        } else {
            for offer in &offers {
                // A stranger's text may hold what a terminal obeys.
                let [scheme, network, pay_to] =
                    [&offer.scheme, &offer.network, &offer.pay_to].map(|text| text.escape_debug());
                let most = if offer.scheme == upto::SCHEME { "at most " } else { "" };
                output::line(format_args!(
                    "{most}{} to {pay_to} on {network} ({scheme})",
                    price_of(offer).escape_debug()
                ));
            }
        }
        match refused {
            Some((reason, advice)) => Err(Error::Failed { what: format!("it would not be paid: {reason}"), advice }),
            None => {
                if !self.json {
                    output::line(format_args!("It would be paid, within {}", self.budget));
                }
                Ok(())
            }
        }
    }
}

/// Returns the offers in the header of a 402, those that can be read.
fn offers(headers: &HeaderMap) -> Vec<PaymentRequirements> {
    let Some(header) = headers.get(header_name::PAYMENT_REQUIRED) else { return Vec::new() };
    let required = decode_header::<PaymentRequired>(header.as_bytes(), MAX_REQUIRED_HEADER);
    let accepts = required.map(|required| required.accepts).unwrap_or_default();
    accepts.iter().filter_map(|offer| offer.read().ok()).collect()
}

fn price_of(offer: &PaymentRequirements) -> String {
    // The amount is one of USDC only if the token is.
    offer.amount.parse().map_or_else(|_| offer.amount.clone(), |units| Usdc::from_atomic(units).to_string())
}

fn offer_facts(offer: &PaymentRequirements) -> Value {
    let PaymentRequirements { scheme, network, amount, asset, pay_to, .. } = offer;
    json!({ "scheme": scheme, "network": network, "asset": asset, "amount": amount, "price": price_of(offer), "pay_to": pay_to })
}

/// Returns an error as a sentence, without the URL, which may hold a token.
fn unanswered(error: reqwest::Error) -> String {
    Sentence(&error.without_url()).to_string()
}

fn broke_off(error: reqwest::Error) -> Error {
    Error::Failed {
        what: format!("the answer broke off: {}", unanswered(error)),
        advice: "With --journal and --purchase, the same command asks for it again and pays once.",
    }
}

fn unwritten(error: &io::Error) -> Error {
    Error::Failed {
        what: format!("the answer cannot be written: {error}"),
        advice: "Make room on the disk. With --journal and --purchase, the same command asks for it again and pays once.",
    }
}

const fn advice_for(status: StatusCode) -> &'static str {
    match status.as_u16() {
        412 => "If it names permit2_allowance_required: x402 wallet approve lets Permit2 move as much as you say.",
        402 => "Its outcome says why it was not accepted; --dry-run shows what is asked for.",
        400..500 => "Correct the request.",
        _ => "Try again later; a request that failed is not charged for by a seller that keeps to the rules.",
    }
}

fn header(line: &str) -> Option<(HeaderName, HeaderValue)> {
    let (name, value) = line.split_once(':')?;
    Some((name.trim().parse().ok()?, HeaderValue::from_str(value.trim()).ok()?))
}

/// Reads a file, or standard input.
fn read(path: &str) -> Result<Vec<u8>, Error> {
    let read = match path {
        "-" => {
            let mut bytes = Vec::new();
            io::stdin().lock().read_to_end(&mut bytes).map(|_| bytes)
        }
        path => fs::read(path),
    };
    read.map_err(|source| Error::Read { path: path.into(), source })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_has_a_name_and_a_value() {
        assert_eq!(header("X-A:  b c ").unwrap(), (HeaderName::from_static("x-a"), HeaderValue::from_static("b c")));
        for text in ["", "X-A", ": b", "X A: b", "X-A: \u{7f}"] {
            assert!(header(text).is_none(), "{text:?}");
        }
    }
}
