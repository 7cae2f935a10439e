//! The configuration file of `x402 charge`.

use std::{
    fs,
    path::{Path, PathBuf},
};

use alloy_primitives::Address;
use http::Method;
use serde::{Deserialize, Deserializer, de};
use toml::Spanned;
use tower_x402::{Network, Usdc};

use super::{
    Flow,
    routes::{Pattern, Price, Route},
};
use crate::{
    error::Error,
    values::{HttpUrl, LedgerAt, as_account, as_socket, as_text},
};

/// A file with all fields, as `--print-config` prints it.
pub(crate) const EXAMPLE: &str = r#"# x402 charge --config x402.toml
# What is commented out is the default, or optional. A flag of the same name counts instead of a field here.

# The service that is charged for. Let it listen where only this proxy reaches it.
upstream = "http://127.0.0.1:8000"
listen = "127.0.0.1:4021"

# Who is paid, where. Without rpc_url, facilitator_url, network and keys everything runs on a chain in the process, and no real money moves.
pay_to = "0x70997970C51812dc3A010C7d01b50e0d17dc79C8"
# network = "base-sepolia"                # base, base-sepolia or eip155:N
# rpc_url = "https://sepolia.base.org"    # better in X402_RPC_URL, if it holds a key
# facilitator_url = "https://facilitator.example"
# asset = "0x…"                           # another EIP-3009 token with six decimals, with
# asset_name = "USD Coin"                 # its EIP-712 name
# asset_version = "2"                     # and version

# What is known of every payment: memory, sqlite:PATH, or postgres://…, which several processes may share.
# ledger = "sqlite:/var/lib/x402/payments.sqlite"

# The address that clients use, without a path. Clients of x402 v1 need it, or a Host header.
# public_url = "https://api.example"
# A proxy before this one says truthfully who the client is (X-Forwarded-For).
# behind_proxy = false
# timeout_seconds = 60                    # for the head of an answer, and each pause in its body
# flow = "authorization"                  # a transfer is settled after the work; upfront: before it
# upto = false                            # true: payers may also sign for at most the price, by Permit2 (scheme upto)
# max_body = 1048576                      # bytes
# admin = "127.0.0.1:4022"                # the operator's page, /readyz, /metrics; beyond this machine with X402_ADMIN_TOKEN

# What costs what. The first route that fits counts. Whatever fits none costs `price`; without it, it is answered 404.
# price = "$0.001"

[[route]]
path = "/evaluate"                        # or "/api/*" for all below it
methods = ["POST"]                        # all, if left out
price = "$0.001"
description = "Judges one answer"

[[route]]
path = "/health"
free = true

[[route]]
path = "/translate"
price_per_kilobyte = "$0.0001"            # of the request's body, each started 1000 bytes; `price` is added, if given

[[route]]
path = "/chat"
max_price = "$0.05"                       # the service says what it cost, in the header X402-Actual-Price: $0.0123; needs upto or vouchers
"#;

/// The fields of the file.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct File {
    #[serde(default, deserialize_with = "as_text")]
    pub(crate) upstream: Option<HttpUrl>,
    pub(crate) listen: Option<String>,
    #[serde(default, deserialize_with = "as_account")]
    pub(crate) pay_to: Option<Address>,
    pub(crate) network: Option<Network>,
    #[serde(default, deserialize_with = "as_text")]
    pub(crate) rpc_url: Option<HttpUrl>,
    #[serde(default, deserialize_with = "as_text")]
    pub(crate) facilitator_url: Option<HttpUrl>,
    #[serde(default, deserialize_with = "as_account")]
    pub(crate) asset: Option<Address>,
    pub(crate) asset_name: Option<String>,
    pub(crate) asset_version: Option<String>,
    #[serde(default, deserialize_with = "as_text")]
    pub(crate) ledger: Option<LedgerAt>,
    #[serde(default, deserialize_with = "as_text")]
    pub(crate) public_url: Option<HttpUrl>,
    #[serde(default)]
    pub(crate) behind_proxy: bool,
    #[serde(default, deserialize_with = "as_seconds")]
    pub(crate) timeout_seconds: Option<u64>,
    pub(crate) flow: Option<Flow>,
    #[serde(default)]
    pub(crate) upto: bool,
    pub(crate) max_body: Option<usize>,
    #[serde(default, deserialize_with = "as_socket")]
    pub(crate) admin: Option<std::net::SocketAddr>,
    #[serde(default, deserialize_with = "as_text")]
    pub(crate) price: Option<Usdc>,
    #[serde(default)]
    route: Vec<Spanned<RouteTable>>,
    /// For errors that are found later.
    #[serde(skip)]
    source: Source,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RouteTable {
    path: String,
    #[serde(default)]
    methods: Vec<String>,
    #[serde(default)]
    free: bool,
    #[serde(default, deserialize_with = "as_text")]
    price: Option<Usdc>,
    #[serde(default, deserialize_with = "as_text")]
    price_per_kilobyte: Option<Usdc>,
    #[serde(default, deserialize_with = "as_text")]
    max_price: Option<Usdc>,
    description: Option<String>,
}

fn as_seconds<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u64>, D::Error> {
    match u64::deserialize(deserializer)? {
        seconds @ 1..=240 => Ok(Some(seconds)),
        _ => Err(de::Error::custom("must be from 1 to 240")),
    }
}

/// The text of a file, to say where something is.
#[derive(Debug, Default)]
struct Source {
    path: PathBuf,
    text: String,
}

impl Source {
    /// Returns the file and the line of a place, for errors.
    fn line(&self, at: usize) -> String {
        let line = self.text.get(..at).unwrap_or_default().matches('\n').count() + 1;
        format!("{}, line {line}", self.path.display())
    }

    fn error(&self, at: usize, field: Option<&str>, problem: impl Into<String>) -> Error {
        let place = field.map_or_else(|| self.line(at), |field| format!("{}, field {field}", self.line(at)));
        Error::Config { place, problem: problem.into() }
    }

    /// Returns the name before the equals sign of the line that has this place.
    fn field_at(&self, at: usize) -> Option<&str> {
        let begin = self.text.get(..at)?.rfind('\n').map_or(0, |newline| newline + 1);
        let line = self.text.get(begin..)?.lines().next()?;
        line.split_once('=').map(|(name, _)| name.trim()).filter(|name| !name.starts_with('#'))
    }
}

impl File {
    pub(crate) fn read(path: &Path) -> Result<Self, Error> {
        let text = fs::read_to_string(path).map_err(|source| Error::Read { path: path.into(), source })?;
        Self::parse(path, text)
    }

    fn parse(path: &Path, text: String) -> Result<Self, Error> {
        let source = Source { path: path.into(), text };
        match toml::from_str::<Self>(&source.text) {
            Ok(file) => Ok(Self { source, ..file }),
            Err(error) => {
                let at = error.span().map_or(0, |span| span.start);
                Err(source.error(at, source.field_at(at), error.message()))
            }
        }
    }

    /// Returns the routes of the file.
    pub(crate) fn routes(&self) -> Result<Vec<Route>, Error> {
        let mut routes: Vec<Route> = Vec::new();
        for table in &self.route {
            let route = self.route(table)?;
            if let Some(earlier) = routes.iter().find(|earlier| earlier.covers(&route)) {
                let problem = format!(
                    "{} ({}) is for all of this, and counts: put this one before it",
                    earlier.path, earlier.place
                );
                return Err(self.source.error(table.span().start, Some("path"), problem));
            }
            routes.push(route);
        }
        Ok(routes)
    }

    fn route(&self, table: &Spanned<RouteTable>) -> Result<Route, Error> {
        let RouteTable { path, methods, free, price, price_per_kilobyte, max_price, description } = table.get_ref();
        let wrong = |field, problem: &str| self.source.error(table.span().start, Some(field), problem);
        let pattern = Pattern::parse(path).map_err(|problem| wrong("path", problem))?;
        let method = |name: &String| {
            let is_method = !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_uppercase());
            let parsed = Method::from_bytes(name.as_bytes()).ok().filter(|_| is_method);
            parsed.ok_or_else(|| wrong("methods", &format!("{name:?} is no method: expected GET, POST and the like")))
        };
        let price = match (free, price, price_per_kilobyte, max_price) {
            (true, None, None, None) => Price::Free,
            (false, Some(price), None, None) if *price > Usdc::ZERO => Price::Fixed(*price),
            (false, base, Some(per_kilobyte), None) if *per_kilobyte > Usdc::ZERO => {
                Price::BySize { base: base.unwrap_or(Usdc::ZERO), per_kilobyte: *per_kilobyte }
            }
            (false, None, None, Some(most)) if *most > Usdc::ZERO => Price::UpTo(*most),
            (false, None, None, None) => {
                return Err(wrong("price", "is missing: give price, price_per_kilobyte, max_price, or free = true"));
            }
            (true, ..) => return Err(wrong("free", "a free route has no price: leave one of them out")),
            (_, _, Some(_), Some(_)) | (_, Some(_), None, Some(_)) => {
                return Err(wrong("max_price", "the service says what it cost: leave the other price out"));
            }
            _ => return Err(wrong("price", "must be more than zero; say free = true for a free route")),
        };
        let methods = methods.iter().map(method).collect::<Result<_, _>>()?;
        let place = self.source.line(table.span().start);
        Ok(Route { path: pattern, methods, price, description: description.clone(), place })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Sentence;

    fn parse(text: &str) -> Result<Vec<Route>, String> {
        let file = File::parse(Path::new("x402.toml"), text.to_owned());
        file.and_then(|file| file.routes()).map_err(|error| Sentence(&error).to_string())
    }

    #[test]
    fn the_example_is_read_and_has_every_kind_of_price() {
        let routes = parse(EXAMPLE).unwrap();
        let shown: Vec<_> = routes.iter().map(|route| format!("{} {}", route.path, route.price)).collect();
        assert_eq!(shown, ["/evaluate $0.001", "/health free", "/translate $0.0001 per kilobyte", "/chat up to $0.05"]);
    }

    #[test]
    fn every_commented_field_of_the_example_is_read_too() {
        let uncommented: String = EXAMPLE
            .lines()
            .filter(|line| !line.contains('…'))
            .map(|line| line.strip_prefix("# ").filter(|rest| rest.contains(" = ")).unwrap_or(line))
            .fold(String::new(), |text, line| text + line + "\n");
        let file = File::parse(Path::new("x402.toml"), uncommented).unwrap();
        assert!(file.ledger.is_some() && file.admin.is_some() && file.price.is_some() && file.asset_name.is_some());
        assert!(!file.behind_proxy);
    }

    #[test]
    fn errors_name_file_line_and_field() {
        for (text, expected) in [
            ("listen = 1", "x402.toml, line 1, field listen: "),
            ("\npay_to = \"0x12\"", "x402.toml, line 2, field pay_to: "),
            ("price = \"cheap\"", "x402.toml, line 1, field price: "),
            ("prise = \"$1\"", "x402.toml, line 1, field prise: unknown field"),
            (
                "[[route]]\npath = \"/a\"\nfree = true\n[[route]]\npath = \"/b\"\nprice = \"$0\"",
                "x402.toml, line 4, field price: must be more",
            ),
            ("[[route]]\npath = \"a\"\nfree = true", "x402.toml, line 1, field path: expected a path"),
            ("[[route]]\npath = \"/a\"", "x402.toml, line 1, field price: is missing"),
            ("[[route]]\npath = \"/a\"\nfree = true\nprice = \"$1\"", "x402.toml, line 1, field free: a free route"),
            ("[[route]]\npath = \"/a\"\nmax_price = \"$1\"\nprice = \"$1\"", "x402.toml, line 1, field max_price: "),
            ("[[route]]\npath = \"/a\"\nmethods = [\"post\"]\nfree = true", "x402.toml, line 1, field methods: "),
            ("[[route]]\nfree = true", "x402.toml, line 1: missing field `path`"),
            ("timeout_seconds = 0", "x402.toml, line 1, field timeout_seconds: must be from 1 to 240"),
            ("admin = \"localhost:1\"", "x402.toml, line 1, field admin: expected an address and a port"),
            (
                "[[route]]\npath = \"/a/*\"\nfree = true\n[[route]]\npath = \"/a/b\"\nprice = \"$1\"",
                "x402.toml, line 4, field path: /a/* (x402.toml, line 1) is for all of this",
            ),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.starts_with(expected), "{text}\n{error}\n{expected}");
        }
    }
}
