//! The command line.

use std::{path::PathBuf, str::FromStr, time::Duration};

use alloy_primitives::Address;
use anyhow::bail;
use clap::{Parser, ValueEnum};
use tower_x402::{
    Asset, Network, ParseUsdcError, Usdc, channels::ClaimPolicy, ops::PaymentFilter, protocol::PaymentFlow,
    server::DeferredPolicy,
};
use url::Url;

use crate::{
    admin::{Format, Token},
    judge::Kind,
    settings::{Books, LedgerAt, TokenFlags},
};

/// An evaluator that charges per request over x402. Judges worked arithmetic by default; see --judge.
///
/// POST /evaluate costs the price per output, in USDC. The judge of arithmetic computes the expression in the prompt exactly (or
/// takes the reference answer), checks every equality in the answer, and compares the final result and its unit. A request that
/// cannot be evaluated is answered 4xx before anything is paid. The agent card, its schemas and GET /stats are free.
///
/// Without --rpc-url, a chain with its own USDC is started in the process, so that nothing else is needed to try it.
#[derive(Debug, Parser)]
#[command(
    version,
    after_help = "\
OUTPUT
  One JSON line on standard output when ready, and nothing else; logs go to standard error:
    {\"listening\", \"rpc_url\", \"asset\", \"pay_to\", \"network\"}
  listening is the address with the actual port; rpc_url is a node of the chain, or null if none is known.

REQUEST AND ANSWER
  POST /evaluate
    {\"task\": {\"id\": \"t1\", \"skill\": \"arithmetic\", \"prompt\": \"What is 17 * 23 + 4?\"},
     \"output\": \"17 * 23 = 391, and 4 more is 395. Answer: 395\"}
    {\"evaluator\": {\"id\", \"version\"}, \"task\": \"t1\", \"verdicts\": [{\"score\": 0..1, \"reward\": -1..1, \"confidence\": 0..1,
     \"critique\": {\"summary\", \"strengths\": [], \"issues\": [{\"severity\", \"description\", \"place\"?, \"suggestion\"?}]}}]}
    For one output, the fields of its verdict are also beside \"verdicts\". Instead of \"output\", give \"pair\": [a, b] or
    \"outputs\": [up to 64, or 2 to 8 with --judge pairwise]; each output costs the price
  GET /.well-known/agent-card.json, /.well-known/submission.v1.schema.json, /.well-known/evaluation.v1.schema.json
  GET /stats
    {\"handled\", \"settled\", \"pending\", \"unknown\", \"failed\", \"gas_used\", \"asked\", \"skills\": {…}}
  GET /payments/status?network=eip155:84532&asset=0x…&payer=0x…&nonce=0x…
    {\"state\": pending | submitted | unknown | settled | final | failed | dead, \"transaction\"?, \"block\"?}
  GET /healthz, GET /readyz
    200, or 503 {\"ready\": false, \"reasons\": [{\"scheme\": exact | vouchers, \"code\", \"detail\"}]} while payments cannot be
    settled, or vouchers not claimed

OPERATOR
  With --admin-token, and Authorization: Bearer TOKEN:
  GET /admin/payments?state=due|owed|all|…&format=jsonl|csv
  GET /admin/payments?find=0x…   by payer, nonce or transaction (at least 8 digits), or payer:nonce
  GET /admin/report              totals by token: paid, owed, deferred, fees
  GET /admin/channels?state=all|unclaimed|at-risk|idle:SECONDS&format=jsonl|csv
                                 payment channels: all, with unclaimed charges, with charges that a withdrawal could take,
                                 or with money in them that no request used for so long
  While no evaluator runs: --ledger sqlite:PATH --payments owed, or --export csv

ENVIRONMENT
  SETTLEMENT_PRIVATE_KEY  the key that sends the transactions and pays their gas (32 bytes in hex); required with --rpc-url,
                          unless --facilitator-url is given. Its account needs a little ETH and no USDC. Without --rpc-url
                          it is optional and gets its ether from the chain in the process
  CHANNELS_PRIVATE_KEY    the key that claims what was charged by vouchers, and pays the gas of that. It may be the settlement
                          key, so that one key needs ether. Another key makes other channels, so keep it
  PAYEE_PRIVATE_KEY       the key of --pay-to, to sign the agent card [default: the settlement key]
  LLM_API_KEY             sent to --llm-url as Authorization: Bearer …, if set
  FACILITATOR_TOKEN       sent to --facilitator-url as Authorization: Bearer …, if set
  ADMIN_TOKEN             the same as --admin-token, but not visible in the list of processes
  PGPASSWORD              the password for --ledger postgres://…, if the URL has none
  RUST_LOG                the log filter [default: warn,evaluator=info]; tower_x402=info logs every transaction

EXIT STATUS
  0  stopped by SIGINT or SIGTERM after the requests in progress were answered; a second signal stops at once
  1  serving failed
  2  the evaluator could not start: a flag, the environment or the node

TRY IT
  evaluator
  # In another terminal, with the rpc_url that the first one printed: give a student $1 (1000000 units), then let it buy.
  curl -H 'content-type: application/json' -d '{\"jsonrpc\": \"2.0\", \"id\": 1, \"method\": \"devnet_mint\",
      \"params\": [\"0x(student's address)\", \"0xf4240\"]}' http://127.0.0.1:(port)/
  STUDENT_PRIVATE_KEY=0x… student --url http://127.0.0.1:4021 --count 3

EXAMPLES
  evaluator --judge prose
  LLM_API_KEY=… evaluator --judge llm --llm-url https://api.openai.com/v1 --llm-model gpt-4o-mini --skill law --specialty 'legal arguments'
  evaluator --listen 127.0.0.1:0 --price '$0.002' --flow upfront --ledger sqlite:payments.sqlite
  SETTLEMENT_PRIVATE_KEY=0x… evaluator --rpc-url https://sepolia.base.org --pay-to 0x… --public-url https://judge.example
  evaluator --network eip155:31337 --rpc-url http://127.0.0.1:8545 --asset 0x5FbDB2315678afecb367f032d93F642f64180aa3 \\
      --asset-name 'USD Coin' --asset-version 2"
)]
pub(crate) struct Flags {
    /// The address to listen on; port 0 for any free one
    #[arg(long, default_value = "127.0.0.1:4021")]
    pub(crate) listen: String,
    /// The judge: exact arithmetic; derivations; clarity of English prose; programs (--code-worker); a language model (--llm-url); or
    /// pairwise comparison of outputs in both orders, by the language model if --llm-url is given and by their prose otherwise
    #[arg(long, value_enum, default_value = "arithmetic")]
    pub(crate) judge: Kind,
    /// The program x402-code-worker of the package x402-judges, in which judged programs run
    #[arg(long, value_name = "PATH")]
    pub(crate) code_worker: Option<PathBuf>,
    /// The OpenAI-compatible endpoint of a language model, such as http://127.0.0.1:11434/v1
    #[arg(long, value_name = "URL", required_if_eq("judge", "llm"))]
    pub(crate) llm_url: Option<HttpUrl>,
    /// The name of the model
    #[arg(long, value_name = "NAME", default_value = "default")]
    pub(crate) llm_model: String,
    /// What the model is told to judge
    #[arg(long, value_name = "TEXT", default_value = "the quality of answers")]
    pub(crate) specialty: String,
    /// The skill's name in submissions [default: arithmetic, algebra, prose, code, comparison or general, by --judge]
    #[arg(long, value_name = "NAME")]
    pub(crate) skill: Option<String>,
    /// The price of one evaluated output
    #[arg(long, default_value = "$0.001", value_parser = some_price)]
    pub(crate) price: Usdc,
    /// The network to be paid on: base, base-sepolia or eip155:N
    #[arg(long, default_value = "base-sepolia")]
    pub(crate) network: Network,
    /// The address to be paid [default: that of the settlement key]
    #[arg(long, value_name = "ADDR")]
    pub(crate) pay_to: Option<Address>,
    #[command(flatten)]
    token: TokenFlags,
    /// A node of the network [default: a chain in this process]
    #[arg(long, value_name = "URL")]
    pub(crate) rpc_url: Option<HttpUrl>,
    /// A facilitator that verifies and settles; needs --pay-to. With --rpc-url too, its answers are checked on the chain
    #[arg(long, value_name = "URL", requires = "pay_to")]
    pub(crate) facilitator_url: Option<HttpUrl>,
    /// When the money moves: after the work, before it, or (deferred) after the answer, in batches. Deferred applies to students
    /// that have paid three times, up to 20 answers each and 500 in total; others pay as in authorization
    #[arg(long, value_enum, default_value = "authorization")]
    flow: Flow,
    /// What students may pay with: a transfer for each evaluation (exact), vouchers of payment channels, or both [default: both on a
    /// chain in this process, and wherever CHANNELS_PRIVATE_KEY is set; otherwise exact]
    #[arg(long, value_enum)]
    scheme: Option<Scheme>,
    /// Refund payment channels that no request used for N seconds, if at least $0.05 is left in them [default: only when their
    /// students ask]
    #[arg(long, value_name = "N")]
    refund_idle: Option<u64>,
    /// The ledger: memory, sqlite:PATH, or postgres://USER@HOST/DATABASE, which several evaluators may share
    #[arg(long, default_value = "memory")]
    ledger: LedgerAt,
    /// The public origin of this service (https://judge.example), or the whole URL of its /evaluate [default: the Host of each
    /// request]
    #[arg(long, value_name = "URL")]
    pub(crate) public_url: Option<HttpUrl>,
    /// Print payments from --ledger and exit: all, due, owed (settled, not delivered whole), open, deferred, or the name of a
    /// settlement state
    #[arg(long, value_name = "WHICH", requires = "ledger")]
    payments: Option<PaymentFilter>,
    /// The format to print payments in: csv for accounting, jsonl for programs; prints all without --payments [default: jsonl]
    #[arg(long, value_enum, requires = "ledger")]
    export: Option<Format>,
    /// Serve /admin to requests with this token
    #[arg(long, value_name = "TOKEN", env = "ADMIN_TOKEN", hide_env_values = true)]
    pub(crate) admin_token: Option<Token>,
    /// Wait N milliseconds before each evaluation, to simulate a slow handler
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(u64).range(..=50_000))]
    handler_delay_ms: u64,
}

/// What must be left in an idle channel to be refunded: $0.05.
const LEAST_REFUND: Usdc = Usdc::from_atomic(50_000);
/// Where payers ask what became of their payments.
const STATUS_PATH: &str = "/payments/status";

/// An HTTP URL as it was given. Parsing could add a slash.
#[derive(Clone, Debug)]
pub(crate) struct HttpUrl(pub(crate) String);

impl FromStr for HttpUrl {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let is_http = text.parse::<Url>().is_ok_and(|url| matches!(url.scheme(), "http" | "https") && url.has_host());
        if is_http { Ok(Self(text.to_owned())) } else { Err("expected an http or https URL") }
    }
}

impl HttpUrl {
    /// Returns `true` if the URL has a path.
    pub(crate) fn has_path(&self) -> bool {
        self.0.parse::<Url>().is_ok_and(|url| url.path() != "/")
    }
}

/// Parses a price above zero.
fn some_price(text: &str) -> Result<Usdc, String> {
    let price: Usdc = text.parse().map_err(|error: ParseUsdcError| error.to_string())?;
    if price == Usdc::ZERO { Err("an evaluation must cost something".to_owned()) } else { Ok(price) }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Scheme {
    Exact,
    Vouchers,
    Both,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Flow {
    Authorization,
    Upfront,
    Deferred,
}

impl Flags {
    /// Returns what to print instead of serving.
    pub(crate) fn printing(&self) -> Option<(PaymentFilter, Format)> {
        let is_asked = self.payments.is_some() || self.export.is_some();
        is_asked.then(|| (self.payments.unwrap_or(PaymentFilter::All), self.export.unwrap_or(Format::Jsonl)))
    }

    /// Opens the ledger.
    pub(crate) async fn open_ledger(&self) -> anyhow::Result<Books> {
        self.ledger.open().await
    }

    /// Returns `true` if vouchers are to be taken, if that is possible: `may`.
    pub(crate) fn takes_vouchers(&self, may: bool) -> anyhow::Result<bool> {
        let takes = match self.scheme {
            Some(Scheme::Exact) => false,
            Some(Scheme::Vouchers | Scheme::Both) if !may => {
                bail!(
                    "--scheme with vouchers needs --rpc-url and CHANNELS_PRIVATE_KEY, the key that claims what was charged"
                )
            }
            Some(Scheme::Vouchers | Scheme::Both) => true,
            None => may,
        };
        if self.refund_idle.is_some() && !takes {
            bail!("--refund-idle refunds payment channels, and no vouchers are taken: see --scheme");
        }
        Ok(takes)
    }

    /// Returns `true` if nothing but vouchers is taken.
    pub(crate) fn takes_vouchers_only(&self) -> bool {
        self.scheme == Some(Scheme::Vouchers)
    }

    /// Returns when channels are claimed from and refunded.
    pub(crate) fn claims(&self) -> ClaimPolicy {
        let policy = ClaimPolicy::default();
        match self.refund_idle {
            Some(seconds) => policy.refund_idle(Duration::from_secs(seconds), LEAST_REFUND),
            None => policy,
        }
    }

    /// Returns the URL where students ask what became of a payment, beside /evaluate.
    pub(crate) fn status_url(&self) -> String {
        let beside = |url: &HttpUrl| url.0.parse::<Url>().ok()?.join(&STATUS_PATH[1..]).ok();
        self.public_url.as_ref().and_then(beside).map_or_else(|| STATUS_PATH.to_owned(), String::from)
    }

    /// Returns the token to be paid in.
    pub(crate) fn asset(&self) -> anyhow::Result<Asset> {
        self.token.on(self.network)
    }

    /// Returns the credit limits of the flow `deferred`.
    pub(crate) fn credit(&self) -> Option<DeferredPolicy> {
        let answers = |n| self.price.checked_mul(n).unwrap_or(Usdc::MAX);
        let policy = DeferredPolicy::default().per_payer(answers(20));
        (self.flow == Flow::Deferred).then_some(policy)
    }

    /// Returns the flow to offer.
    pub(crate) const fn payment_flow(&self) -> PaymentFlow {
        match self.flow {
            Flow::Upfront => PaymentFlow::Upfront,
            Flow::Authorization | Flow::Deferred => PaymentFlow::Authorization,
        }
    }

    pub(crate) const fn handler_delay(&self) -> Duration {
        Duration::from_millis(self.handler_delay_ms)
    }
}

#[cfg(test)]
mod tests {
    use clap::{CommandFactory as _, Parser as _};

    use super::{ClaimPolicy, Duration, Flags, Usdc};

    #[test]
    fn the_flags_are_consistent() {
        Flags::command().debug_assert();
    }

    #[test]
    fn a_facilitator_needs_to_know_who_is_paid() {
        let arguments = ["evaluator", "--facilitator-url", "http://127.0.0.1:1"];
        assert!(Flags::try_parse_from(arguments).is_err());
        let pay_to = ["--pay-to", "0x5FbDB2315678afecb367f032d93F642f64180aa3"];
        assert!(Flags::try_parse_from(arguments.into_iter().chain(pay_to)).is_ok());
    }

    #[test]
    fn a_model_needs_an_endpoint() {
        assert!(Flags::try_parse_from(["evaluator", "--judge", "llm"]).is_err());
        let at = ["evaluator", "--judge", "llm", "--llm-url", "http://127.0.0.1:1/v1"];
        assert!(Flags::try_parse_from(at).is_ok());
    }

    #[test]
    fn idle_channels_are_refunded_if_it_is_said_after_how_long() {
        let flags = |arguments: &[&str]| Flags::try_parse_from(["evaluator"].iter().chain(arguments)).unwrap();
        assert_eq!(flags(&[]).claims(), ClaimPolicy::default());
        let after = flags(&["--refund-idle", "86400"]);
        let expected = ClaimPolicy::default().refund_idle(Duration::from_secs(86_400), Usdc::from_atomic(50_000));
        assert_eq!(after.claims(), expected);
        assert!(after.takes_vouchers(true).unwrap());
        assert!(after.takes_vouchers(false).is_err(), "there are no channels");
        assert!(flags(&["--refund-idle", "1", "--scheme", "exact"]).takes_vouchers(true).is_err());
    }

    #[test]
    fn a_password_is_not_shown() {
        let ledger = "postgres://user:secret@localhost/payments";
        let flags = Flags::try_parse_from(["evaluator", "--ledger", ledger]).unwrap();
        assert!(!format!("{flags:?}").contains("secret"));
    }

    #[test]
    fn the_status_of_a_payment_is_found_beside_what_was_paid() {
        for (arguments, expected) in [
            (&[][..], "/payments/status"),
            (&["--public-url", "https://judge.example"], "https://judge.example/payments/status"),
            (&["--public-url", "https://judge.example/a/evaluate"], "https://judge.example/a/payments/status"),
        ] {
            let flags = Flags::try_parse_from(["evaluator"].iter().chain(arguments)).unwrap();
            assert_eq!(flags.status_url(), expected);
        }
    }

    #[test]
    fn a_token_needs_its_domain() {
        let address = "0x5FbDB2315678afecb367f032d93F642f64180aa3";
        assert!(Flags::try_parse_from(["evaluator", "--asset", address]).is_err());
        assert!(Flags::try_parse_from(["evaluator", "--network", "eip155:1"]).unwrap().asset().is_err());
    }
}
