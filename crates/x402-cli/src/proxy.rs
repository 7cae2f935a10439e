//! `x402 proxy`: an address of this machine that any program calls as if it were the paid service, and that pays.

use std::{
    collections::BTreeMap,
    convert::Infallible,
    future::Future,
    net::SocketAddr,
    pin::Pin,
    str::FromStr,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use axum::body::Body;
use http::{
    HeaderMap, HeaderName, HeaderValue, Request, Response, StatusCode, Version,
    header::{HOST, ORIGIN, REFERER},
};
use http_body_util::{BodyExt as _, Limited};
use reqwest_middleware::ClientWithMiddleware;
use serde_json::json;
use tokio::sync::watch;
use tower_service::Service;
use tower_x402::{
    Usdc,
    client::{PaymentError, Purchase, Receipt, ReceiptExt as _},
    server::drain,
};
use tracing::{info, warn};
use url::Url;

use crate::{
    error::Error,
    headers,
    keys::{self, Role},
    output, paths,
    problem::Problem,
    purse::{self, PurseFlags},
    serve::{self, is_loopback},
    signals::Signals,
    token::Token,
    values::{HttpUrl, loopback, some_amount},
};

/// The header for the token, if it is not in the path.
const TOKEN: &str = "x402-proxy-token";
/// The header in which a program names its purchase.
const PURCHASE: &str = "x402-purchase";
/// Where a browser says whose page asks (Fetch Metadata). It is `none` if a person typed the address.
const FETCH_SITE: &str = "sec-fetch-site";
const TOKEN_VARIABLE: &str = "X402_PROXY_TOKEN";
/// The largest body of a request, in bytes: it is sent again with the payment.
const MAX_BODY: usize = 8 << 20;
/// The time that a stopping proxy gives the requests in progress.
const LAST_REQUESTS: Duration = Duration::from_secs(90);

/// Serves an address of this machine that any program, in any language, calls as if it were the paid service. The proxy pays.
///
/// It pays within --budget, calls nothing but the services in --to, and listens on this machine only. Callers need a token, which is
/// a part of the address that it prints: without one, every program and web page on this machine could spend the money.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
HOW TO CALL IT
  http://127.0.0.1:4030/TOKEN/path is the path /path of the service. With several services, the host comes first:
  http://127.0.0.1:4030/TOKEN/judge.example/path. Or leave TOKEN out of the path, and send the header X402-Proxy-Token.
  X402-Purchase: NAME in a request names the purchase, with --journal: the same name is paid for once, also after a restart.

WHAT IT ADDS TO ANSWERS
  X402-Outcome: settled | accepted | failed | unknown, X402-Amount (atomic units), X402-Transaction, and X402-Left, what is left of the
  budget, in dollars. Its own answers are JSON, {\"error\", \"detail\"}:
    400 token_twice   the token is in the path or the query a second time, and would go to the service
    400 upgrade_not_payable   WebSockets are not passed on
    402 not_paid      a limit forbids it, or none of the offers can be paid; nothing was paid
    403 forbidden     the token is missing, or a web page asks
    502 unreachable   the service does not answer; nothing was paid
    504 unanswered    the payment was sent, and no answer came; the same request presents the same payment again

ENVIRONMENT
  PAYER_PRIVATE_KEY       the key that pays (32 bytes in hex). There are PAYER_PRIVATE_KEY_FILE and PAYER_KEYSTORE, too
  X402_PROXY_TOKEN        the token, of at least 16 letters and digits [default: a new one for each start]
  X402_RPC_URL            the same as --rpc-url. With a node, offers of at most a price (scheme upto) are paid, too, as far as x402 wallet
                          approve has allowed it

EXAMPLES
  x402 proxy --to https://judge.example --budget '$1'
  curl -K - -d '{…}' <<< 'url = http://127.0.0.1:4030/TOKEN/evaluate'    (other users see a command line, and could spend)
  x402 proxy --to 'https://judge.example=$0.50' --to https://search.example --budget '$2' --journal ~/.x402.jsonl")]
pub(crate) struct Command {
    /// A service that may be called and paid, with a bound of its own if it has one: https://judge.example=$0.50. Repeatable
    #[arg(long, value_name = "URL[=BOUND]", required = true)]
    to: Vec<Target>,
    /// The most to pay in all, for all services together; with --journal, over all runs
    #[arg(long, default_value = "$1.00", value_parser = some_amount)]
    budget: Usdc,
    /// The most to pay for one request
    #[arg(long, default_value = "$0.01", value_parser = some_amount)]
    max_payment: Usdc,
    /// The address to listen on, of this machine; port 0 for any free one
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:4030", value_parser = loopback)]
    listen: SocketAddr,
    /// Ask for no token: every program on this machine can spend the budget
    #[arg(long)]
    no_token: bool,
    /// Print one JSON line when ready, and nothing else on standard output
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    purse: PurseFlags,
}

/// A service that may be paid.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Target {
    base: Url,
    bound: Option<Usdc>,
}

impl FromStr for Target {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (url, bound) = match text.rsplit_once("=$") {
            Some((url, bound)) => (url, Some(some_amount(&format!("${bound}"))?)),
            None if text.contains('=') => {
                return Err(
                    "write a bound as '=$0.50', in single quotes: in double quotes a shell replaces $0".to_owned()
                );
            }
            None => (text, None),
        };
        let url: HttpUrl = url.parse()?;
        let base: Url = url.as_str().parse().map_err(|error| format!("{error}"))?;
        if base.query().is_some()
            || base.fragment().is_some()
            || !base.username().is_empty()
            || base.password().is_some()
        {
            return Err("expected a scheme, a host and a path only".to_owned());
        }
        if base.host_str().is_some_and(|host| host.contains([',', '='])) {
            return Err("expected one service: give --to for each".to_owned());
        }
        Ok(Self { base, bound })
    }
}

impl Target {
    /// Returns the host and the port as they stand in the URL, by which callers choose among several services.
    fn name(&self) -> String {
        let host = self.base.host_str().unwrap_or_default();
        self.base.port().map_or_else(|| host.to_owned(), |port| format!("{host}:{port}"))
    }
}

impl Command {
    pub(crate) async fn run(self) -> Result<(), Error> {
        let mut signals = Signals::catch()?;
        let key = keys::require(Role::PAYER, &self.purse.key).await?;
        let address = key.address();
        let token = self.token()?;
        let mut bounds = BTreeMap::new();
        let mut targets = BTreeMap::new();
        for target in self.to {
            let host = target.base.host_str().unwrap_or_default().to_owned();
            if targets.insert(target.name(), target.base.clone()).is_some() {
                return Err(Error::setting("--to", format!("{} is named twice", target.name())));
            }
            if let Some(bound) = target.bound
                && bounds.insert(host.clone(), bound).is_some_and(|other| other != bound)
            {
                return Err(Error::setting("--to", format!("{host} has two bounds, which count for all its ports")));
            }
        }
        let journal = self.purse.open_journal()?;
        let budget =
            tower_x402::client::Budget::builder().per_payment(self.max_payment).total(self.budget).journal(journal);
        let budget = bounds.iter().fold(budget, |budget, (host, bound)| budget.limit_host(host, *bound)).build();
        let client = self.purse.client(self.purse.payer(Some(key), budget.clone()).await?)?;
        let (listener, listening) = serve::listen("--listen", &self.listen.to_string()).await?;
        let shown: Vec<String> = targets
            .iter()
            .map(|(name, base)| {
                let bound = base.host_str().and_then(|host| bounds.get(host));
                bound.map_or_else(|| name.clone(), |bound| format!("{name} (at most {bound})"))
            })
            .collect();
        let prefix = token.as_ref().map(|token| format!("{}/", token.secret())).unwrap_or_default();
        let url = format!("http://{listening}/{prefix}");
        if self.json {
            output::line(json!({
                "listening": listening.to_string(),
                "url": url,
                "token": token.as_ref().map(Token::secret),
                "payer": address.to_string(),
                "to": targets.values().map(Url::as_str).collect::<Vec<_>>(),
            }));
        } else {
            output::line(format_args!(
                "Paying as {address}, at most {} in all and {} for a request",
                self.budget, self.max_payment
            ));
            output::line(format_args!("  for {}", shown.join(", ")));
            match targets.len() {
                1 => output::line(format_args!("Call {url} as if it were the service")),
                _ => output::line(format_args!("Call {url}HOST/ as if it were the service")),
            }
            if token.is_some() {
                output::line(
                    "Whoever sees this address can spend: give it in a variable or a file, not on a command line",
                );
            }
        }
        if token.is_none() {
            output::warn("Without a token, every program on this machine can spend the budget.");
        }
        let has_journal = self.purse.journal.is_some();
        let proxy = Proxy(Arc::new(Inner { client, budget, targets, token, has_journal }));
        let (stop, stopped) = watch::channel(false);
        let serving = tokio::spawn(serve::serve(listener, proxy.clone(), stopped, LAST_REQUESTS, false));
        signals.next().await;
        info!("stopping: answering the requests in progress");
        let _ = stop.send(true);
        tokio::select! {
            _ = serving => {}
            () = signals.next() => warn!("stopped at once"),
        }
        let budget = &proxy.0.budget;
        output::remark(format_args!(
            "x402: {} spent, {} reserved, {} left",
            budget.spent(),
            budget.reserved(),
            budget.remaining()
        ));
        Ok(())
    }

    fn token(&self) -> Result<Option<Token>, Error> {
        if self.no_token {
            return Ok(None);
        }
        Token::find(TOKEN_VARIABLE)?.map_or_else(|| Token::random(TOKEN_VARIABLE), Ok).map(Some)
    }
}

/// The proxy as a service. Clones share client and budget.
#[derive(Clone, Debug)]
struct Proxy(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    client: ClientWithMiddleware,
    budget: tower_x402::client::Budget,
    /// By the name that callers choose them by.
    targets: BTreeMap<String, Url>,
    token: Option<Token>,
    has_journal: bool,
}

impl Service<Request<Body>> for Proxy {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let inner = self.0.clone();
        Box::pin(async move {
            let url = match inner.target(&request) {
                Ok(url) => url,
                Err(problem) => {
                    drain(request);
                    return Ok(problem.into_response());
                }
            };
            Ok(inner.call(url, request).await.unwrap_or_else(Problem::into_response))
        })
    }
}

impl Inner {
    /// Finds out which service is called, if the caller may.
    fn target(&self, request: &Request<Body>) -> Result<Url, Problem> {
        let forbidden = |detail| Problem::new(StatusCode::FORBIDDEN, "forbidden", detail);
        let given = request.headers();
        // A web page can have a name of its own point to this machine.
        if !is_loopback(given.get(HOST).map(HeaderValue::as_bytes).unwrap_or_default()) {
            return Err(forbidden("call this proxy as 127.0.0.1 or localhost"));
        }
        if is_of_a_page(given) || self.token.is_none() && came_from_elsewhere(given) {
            return Err(forbidden("web pages may not spend: have a program call this proxy"));
        }
        let uri = request.uri();
        let mut path = uri.path();
        if let Some(token) = &self.token {
            let first = path.strip_prefix('/').unwrap_or_default().split('/').next().unwrap_or_default();
            if token.is(first.as_bytes()) {
                path = &path[1 + first.len()..];
            } else if !given.get(TOKEN).is_some_and(|given| token.is(given.as_bytes())) {
                return Err(forbidden(
                    "the token that the proxy printed must be the first part of the path, or in X402-Proxy-Token",
                ));
            }
            if path.contains(token.secret()) || uri.query().is_some_and(|query| query.contains(token.secret())) {
                let detail = "the token is in the path or the query a second time, and would go to the service";
                return Err(Problem::new(StatusCode::BAD_REQUEST, "token_twice", detail));
            }
        }
        if headers::wants_upgrade(request) {
            let detail = "WebSockets and other upgrades are not passed on, since one payment is for one answer";
            return Err(Problem::new(StatusCode::BAD_REQUEST, "upgrade_not_payable", detail));
        }
        let path = if path.is_empty() { "/" } else { path };
        if paths::plain(path).is_none() {
            let detail = "the path can be read in two ways; write it without dots, double slashes and encoded slashes";
            return Err(Problem::new(StatusCode::BAD_REQUEST, "ambiguous_path", detail));
        }
        let no_such = || {
            let known: Vec<_> = self.targets.keys().map(String::as_str).collect();
            let detail =
                format!("no such service; this proxy calls {}, whose name comes first in the path", known.join(", "));
            Problem::new(StatusCode::NOT_FOUND, "no_such_service", detail)
        };
        let (base, path) = match self.targets.first_key_value() {
            Some((_, base)) if self.targets.len() == 1 => (base, path),
            _ => {
                let (name, rest) = path[1..].split_at(path[1..].find('/').unwrap_or(path.len() - 1));
                (self.targets.get(name).ok_or_else(no_such)?, if rest.is_empty() { "/" } else { rest })
            }
        };
        let mut url = base.clone();
        url.set_path(&format!("{}{path}", base.path().trim_end_matches('/')));
        url.set_query(uri.query());
        Ok(url)
    }

    async fn call(&self, url: Url, request: Request<Body>) -> Result<Response<Body>, Problem> {
        let (parts, body) = request.into_parts();
        let body = Limited::new(body, MAX_BODY).collect().await.map_err(|error| {
            let detail = match error.is::<http_body_util::LengthLimitError>() {
                true => format!("the body is larger than {MAX_BODY} bytes"),
                false => "the body broke off".to_owned(),
            };
            Problem::new(StatusCode::PAYLOAD_TOO_LARGE, "body", detail)
        })?;
        let mut headers = parts.headers;
        let has_token_in_header = headers.contains_key(TOKEN);
        let purchase = headers.get(PURCHASE).map(|name| Purchase::named(name.as_bytes()));
        if purchase.is_some() && !self.has_journal {
            let detail = "purchases have names only if the proxy has a --journal";
            return Err(Problem::new(StatusCode::BAD_REQUEST, "no_journal", detail));
        }
        headers::remove_hop_by_hop(&mut headers);
        headers::remove_what_is_ours(&mut headers);
        headers::remove_of_connection(&mut headers);
        headers::remove_cookies(&mut headers);
        if let Some(token) = &self.token {
            // A browser names the address of the page before, and programs what they like. Whoever has the token can spend the budget.
            headers::remove_with_value(&mut headers, token.secret());
        }
        let mut asked = self.client.request(parts.method, url.clone()).headers(headers);
        let body = body.to_bytes();
        if !body.is_empty() {
            asked = asked.body(body);
        }
        if let Some(purchase) = purchase {
            asked = asked.with_extension(purchase);
        }
        let response = asked.send().await.map_err(|error| problem(&error, &url))?;
        let receipt = response.receipt().cloned();
        let mut response = Response::<reqwest::Body>::from(response).map(Body::new);
        *response.version_mut() = Version::HTTP_11;
        headers::remove_hop_by_hop(response.headers_mut());
        headers::remove_what_is_ours(response.headers_mut());
        headers::remove_cookies(response.headers_mut());
        headers::confine(response.headers_mut());
        if has_token_in_header {
            // Programs that follow a redirect take their headers along.
            headers::hold_redirect(response.headers_mut());
        }
        if let Some(receipt) = receipt {
            let host = url.host_str().unwrap_or_default();
            let said = if receipt.outcome.is_paid() { "paid" } else { "not known to be paid" };
            info!(host, outcome = %receipt.outcome, amount = %receipt.amount, left = %self.budget.remaining(), "{said}");
            self.add_receipt(response.headers_mut(), &receipt);
        }
        Ok(response)
    }

    fn add_receipt(&self, headers: &mut HeaderMap, receipt: &Receipt) {
        for (name, value) in [
            ("x402-outcome", Some(receipt.outcome.to_string())),
            ("x402-amount", Some(receipt.amount.atomic().to_string())),
            ("x402-transaction", receipt.transaction.map(|transaction| transaction.to_string())),
            ("x402-left", Some(self.budget.remaining().to_string())),
        ] {
            if let Some(value) = value.and_then(|value| HeaderValue::from_str(&value).ok()) {
                headers.insert(HeaderName::from_static(name), value);
            }
        }
    }
}

/// Returns `true` if a browser says that a page asks. It names no origin for an image, and Node's `fetch` sends a mode without a site.
fn is_of_a_page(headers: &HeaderMap) -> bool {
    headers.contains_key(ORIGIN) || headers.get(FETCH_SITE).is_some_and(|site| site != "none")
}

/// Returns `true` if the page before is of another machine. Older browsers say nothing else of who asks for an image.
fn came_from_elsewhere(headers: &HeaderMap) -> bool {
    let page = headers.get(REFERER).and_then(|page| page.to_str().ok()?.parse::<Url>().ok());
    page.is_some_and(|page| !is_loopback(page.host_str().unwrap_or_default().as_bytes()))
}

/// Says that the service did not answer, or that nothing was paid.
fn problem(error: &reqwest_middleware::Error, url: &Url) -> Problem {
    let Some(payment) = PaymentError::of(error) else {
        let detail = format!("{} does not answer; nothing was paid", url.origin().ascii_serialization());
        return Problem::new(StatusCode::BAD_GATEWAY, "unreachable", detail);
    };
    let detail = format!("{}. {}", purse::sentence(payment), purse::advice(payment));
    warn!(host = url.host_str().unwrap_or_default(), "{detail}");
    match payment {
        PaymentError::Unanswered { .. } => Problem::new(StatusCode::GATEWAY_TIMEOUT, "unanswered", detail),
        PaymentError::Refused(_) => Problem::new(StatusCode::PAYMENT_REQUIRED, "not_paid", detail),
        _ => Problem::new(StatusCode::BAD_GATEWAY, "not_paid", detail),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn proxy(to: &[&str], token: Option<&str>) -> Inner {
        let targets: Vec<Target> = to.iter().map(|text| text.parse().unwrap()).collect();
        Inner {
            client: reqwest_middleware::ClientBuilder::new(reqwest::Client::new()).build(),
            budget: tower_x402::client::Budget::default(),
            targets: targets.into_iter().map(|target| (target.name(), target.base)).collect(),
            token: token.map(Token::from),
            has_journal: false,
        }
    }

    fn ask(proxy: &Inner, path: &str, headers: &[(&'static str, &'static str)]) -> Option<String> {
        let mut request = Request::get(path);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        proxy.target(&request.body(Body::empty()).unwrap()).ok().map(String::from)
    }

    const HERE: (&str, &str) = ("host", "127.0.0.1:4030");

    #[test]
    fn nobody_without_the_token_is_let_through() {
        let proxy = proxy(&["https://judge.example/v1"], Some("secret"));
        assert_eq!(ask(&proxy, "/secret/a?b=c", &[HERE]).as_deref(), Some("https://judge.example/v1/a?b=c"));
        assert_eq!(ask(&proxy, "/secret", &[HERE]).as_deref(), Some("https://judge.example/v1/"));
        assert_eq!(ask(&proxy, "/a", &[HERE, (TOKEN, "secret")]).as_deref(), Some("https://judge.example/v1/a"));
        for (path, headers) in [
            ("/a", &[HERE][..]),
            ("/secre/a", &[HERE]),
            ("/secrets/a", &[HERE]),
            ("/a", &[HERE, (TOKEN, "other")]),
            ("/secret/a", &[("host", "evil.example")]),
            ("/secret/a", &[]),
        ] {
            assert_eq!(ask(&proxy, path, headers), None, "{path} {headers:?}");
        }
    }

    #[test]
    fn web_pages_are_kept_out() {
        for (token, path) in [(None, "/a"), (Some("secret"), "/secret/a")] {
            let proxy = proxy(&["https://judge.example"], token);
            assert!(ask(&proxy, path, &[HERE]).is_some());
            assert_eq!(ask(&proxy, path, &[HERE, ("origin", "https://evil.example")]), None);
            // An image in a page has no origin.
            for site in ["cross-site", "same-site", "same-origin"] {
                assert_eq!(ask(&proxy, path, &[HERE, ("sec-fetch-site", site)]), None, "{site}");
            }
            assert!(ask(&proxy, path, &[HERE, ("sec-fetch-site", "none")]).is_some(), "a person typed it");
            assert!(ask(&proxy, path, &[HERE, ("sec-fetch-mode", "cors")]).is_some(), "Node sends it");
            assert!(ask(&proxy, path, &[HERE, ("referer", "http://127.0.0.1:4030/b")]).is_some());
            let from_elsewhere = ask(&proxy, path, &[HERE, ("referer", "https://evil.example/")]);
            assert_eq!(from_elsewhere.is_some(), token.is_some(), "no other page has the token");
        }
    }

    #[test]
    fn the_token_is_nowhere_in_what_is_asked_for() {
        let proxy = proxy(&["https://judge.example"], Some("secret"));
        for path in ["/secret/a/secret/b", "/secret/a?back=http://127.0.0.1:4030/secret/", "/secret/secret"] {
            assert_eq!(ask(&proxy, path, &[HERE]), None, "{path}");
        }
        assert_eq!(ask(&proxy, "/a/secret", &[HERE, (TOKEN, "secret")]), None);
    }

    #[test]
    fn upgrades_are_not_passed_on() {
        let proxy = proxy(&["https://judge.example"], Some("secret"));
        assert_eq!(ask(&proxy, "/secret/a", &[HERE, ("connection", "upgrade"), ("upgrade", "websocket")]), None);
        assert!(ask(&proxy, "/secret/a", &[HERE, ("upgrade", "h2c")]).is_some(), "it can do without");
    }

    #[test]
    fn nothing_but_the_named_services_is_called() {
        let proxy = proxy(&["https://judge.example/v1", "http://127.0.0.1:4021"], Some("secret"));
        assert_eq!(ask(&proxy, "/secret/judge.example/a", &[HERE]).as_deref(), Some("https://judge.example/v1/a"));
        assert_eq!(ask(&proxy, "/secret/127.0.0.1:4021", &[HERE]).as_deref(), Some("http://127.0.0.1:4021/"));
        for path in [
            "/secret/evil.example/a",
            "/secret/",
            "/secret/judge.example/../../evil",
            "/secret/judge.example/%2e%2e/admin",
            "/secret//evil.example/",
            "/secret/judge.example@evil.example/",
        ] {
            assert_eq!(ask(&proxy, path, &[HERE]), None, "{path}");
        }
    }

    #[test]
    fn a_target_may_have_a_bound() {
        let target: Target = "https://judge.example/a=b=$0.50".parse().unwrap();
        assert_eq!(
            (target.base.as_str(), target.bound),
            ("https://judge.example/a=b", Some(Usdc::from_atomic(500_000)))
        );
        for text in [
            "judge.example",
            "ftp://judge.example",
            "https://judge.example=$0",
            "https://u:p@judge.example",
            "https://a.example?b",
            // In double quotes, a shell makes these of '=$0.50' and '=$1'.
            "https://judge.example/v1=bash.50",
            "https://judge.example=/bin/bash.50",
            "https://judge.example=",
            "https://judge.example=1",
            "https://judge.example=€1",
            "https://judge.example==$1",
            "https://judge.example,https://search.example",
            "https://judge.example,search.example=$1",
        ] {
            assert!(text.parse::<Target>().is_err(), "{text}");
        }
    }
}
