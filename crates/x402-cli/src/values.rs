//! Values that flags and the configuration file share.

use std::{fmt, fs, net::SocketAddr, path::PathBuf, str::FromStr, sync::Arc};

use alloy_primitives::Address;
use serde::{Deserialize, Deserializer, de};
use tower_x402::{
    Usdc,
    ledger::{Ledger, MemoryLedger, PostgresLedger, SqliteLedger, channels::ChannelLedger},
};
use url::Url;

use crate::error::Error;

/// An http or https URL as it was given. It may hold a key or a password, so that only its origin is shown.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct HttpUrl(String);

impl HttpUrl {
    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }

    /// Returns it as a URL. `flag` is where it was given.
    pub(crate) fn to_url(&self, flag: &str) -> Result<Url, Error> {
        self.0.parse().map_err(|_| Error::setting(flag, "expected a URL"))
    }

    /// Returns the host, without brackets, and the port.
    pub(crate) fn host_and_port(&self) -> Option<(String, u16)> {
        let url: Url = self.0.parse().ok()?;
        let host = url.host_str()?.trim_matches(['[', ']']).to_owned();
        Some((host, url.port_or_known_default()?))
    }

    pub(crate) fn has_query_or_fragment(&self) -> bool {
        self.0.contains(['?', '#'])
    }

    pub(crate) fn has_user(&self) -> bool {
        self.0.parse::<Url>().is_ok_and(|url| !url.username().is_empty() || url.password().is_some())
    }

    /// Returns the scheme, host and port.
    pub(crate) fn origin(&self) -> String {
        self.0.parse::<Url>().map_or_else(|_| String::new(), |url| url.origin().ascii_serialization())
    }
}

impl FromStr for HttpUrl {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let is_http = text.parse::<Url>().is_ok_and(|url| matches!(url.scheme(), "http" | "https") && url.has_host());
        if is_http { Ok(Self(text.to_owned())) } else { Err("expected an http or https URL") }
    }
}

impl fmt::Debug for HttpUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/…", self.origin())
    }
}

/// The place of a ledger.
#[derive(Clone, PartialEq, Eq)]
pub(crate) enum LedgerAt {
    Memory,
    Sqlite(PathBuf),
    /// A URL that may hold a password.
    Postgres(String),
}

/// One ledger, as payments and as channels.
#[derive(Clone)]
pub(crate) struct Books {
    pub(crate) payments: Arc<dyn Ledger>,
    pub(crate) channels: Arc<dyn ChannelLedger>,
    /// The same ledger, if it is a file.
    file: Option<Arc<SqliteLedger>>,
}

impl Books {
    fn of(ledger: Arc<impl Ledger + ChannelLedger>) -> Self {
        Self { payments: ledger.clone(), channels: ledger, file: None }
    }

    /// Writes to the disk what is not there yet. A process that ends without it loses nothing, and the next one asks the chain again.
    pub(crate) async fn close(&self) {
        if let Some(file) = &self.file {
            file.close().await;
        }
    }
}

impl LedgerAt {
    /// Opens a ledger that is there: of a mistyped path, no new one is made.
    pub(crate) async fn open_existing(&self) -> Result<Books, Error> {
        match self {
            Self::Memory => {
                let problem = "a ledger in memory is another process's: give sqlite:PATH or postgres://…";
                Err(Error::setting("--ledger", problem))
            }
            Self::Sqlite(path) => {
                fs::metadata(path).map_err(|source| Error::Read { path: path.clone(), source })?;
                self.open().await
            }
            Self::Postgres(_) => self.open().await,
        }
    }

    /// Opens the ledger, or makes it.
    pub(crate) async fn open(&self) -> Result<Books, Error> {
        let failed = |source| Error::Ledger { at: self.to_string(), source };
        Ok(match self {
            Self::Memory => Books::of(Arc::new(MemoryLedger::new())),
            Self::Sqlite(path) => {
                #[cfg(unix)]
                keep_from_others(path);
                let file = Arc::new(SqliteLedger::open(path).await.map_err(failed)?);
                Books { file: Some(file.clone()), ..Books::of(file) }
            }
            Self::Postgres(url) => Books::of(Arc::new(PostgresLedger::connect(url).await.map_err(failed)?)),
        })
    }

    /// Returns `true` if it outlives the process.
    pub(crate) fn is_durable(&self) -> bool {
        *self != Self::Memory
    }
}

/// Takes from a ledger that was there, and from what SQLite keeps beside it, what everybody may do: it holds signatures and answers. A ledger that
/// somebody else owns still works, so that it is no error if this fails. The mode of a device must not change.
#[cfg(unix)]
fn keep_from_others(path: &std::path::Path) {
    use std::os::unix::fs::PermissionsExt as _;
    let mut log = path.as_os_str().to_owned();
    log.push("-wal");
    for file in [path, std::path::Path::new(&log)] {
        let Some(found) = fs::metadata(file).ok().filter(fs::Metadata::is_file) else { continue };
        let mode = found.permissions().mode();
        let kept = fs::Permissions::from_mode(mode & !0o007);
        if mode & 0o007 != 0 && fs::set_permissions(file, kept).is_err() {
            tracing::warn!("everybody may read {}, and only its owner can change that: chmod 600 it", file.display());
        }
    }
}

impl FromStr for LedgerAt {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text.split_once(':') {
            None if text == "memory" => Ok(Self::Memory),
            Some(("sqlite", path)) if !path.is_empty() => Ok(Self::Sqlite(path.into())),
            Some(("postgres" | "postgresql", rest)) if rest.starts_with("//") => Ok(Self::Postgres(text.to_owned())),
            _ => Err("expected memory, sqlite:PATH or postgres://…"),
        }
    }
}

impl fmt::Display for LedgerAt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Memory => f.write_str("memory"),
            Self::Sqlite(path) => write!(f, "sqlite:{}", path.display()),
            Self::Postgres(_) => f.write_str("postgres://…"),
        }
    }
}

impl fmt::Debug for LedgerAt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Reads a field of the configuration file as a flag is read.
pub(crate) fn as_text<'de, D, T>(deserializer: D) -> Result<Option<T>, D::Error>
where
    D: Deserializer<'de>,
    T: FromStr<Err: fmt::Display>,
{
    String::deserialize(deserializer)?.parse().map(Some).map_err(de::Error::custom)
}

/// Parses the address of an account. One with small and capital letters has a checksum (EIP-55), which must fit: what is paid to a
/// mistyped address is lost.
pub(crate) fn account(text: &str) -> Result<Address, &'static str> {
    let account: Address = text.parse().map_err(|_| "expected an address: 0x and 40 hexadecimal digits")?;
    let digits = text.trim_start_matches("0x");
    let has_checksum = digits.contains(|digit: char| digit.is_ascii_uppercase())
        && digits.contains(|digit: char| digit.is_ascii_lowercase());
    match has_checksum && account.to_checksum(None)[2..] != *digits {
        true => Err("a digit of this address is wrong, or the case of a letter: its checksum (EIP-55) does not fit"),
        false => Ok(account),
    }
}

/// Reads an address of the configuration file as a flag is read.
pub(crate) fn as_account<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Address>, D::Error> {
    account(&String::deserialize(deserializer)?).map(Some).map_err(de::Error::custom)
}

/// Reads an address and a port of the configuration file as a flag is read.
pub(crate) fn as_socket<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<SocketAddr>, D::Error> {
    socket(&String::deserialize(deserializer)?).map(Some).map_err(de::Error::custom)
}

/// Parses an address and a port.
pub(crate) fn socket(text: &str) -> Result<SocketAddr, &'static str> {
    text.parse().map_err(|_| "expected an address and a port, such as 127.0.0.1:4022")
}

/// Parses an amount above zero.
pub(crate) fn some_amount(text: &str) -> Result<Usdc, String> {
    match text.parse::<Usdc>() {
        Ok(Usdc::ZERO) => Err("must be more than zero".to_owned()),
        Ok(amount) => Ok(amount),
        Err(error) => Err(error.to_string()),
    }
}

/// Parses an address of this machine that no other machine reaches.
pub(crate) fn loopback(text: &str) -> Result<SocketAddr, &'static str> {
    let address = socket(text)?;
    match address.ip().is_loopback() {
        true => Ok(address),
        false => Err("is reachable from other machines: use 127.0.0.1 or [::1]"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_password_is_not_shown() {
        let ledger: LedgerAt = "postgres://user:secret@localhost/payments".parse().unwrap();
        let node: HttpUrl = "https://node.example/v2/secret".parse().unwrap();
        assert!(!format!("{ledger} {ledger:?} {node:?}").contains("secret"));
    }

    #[test]
    fn a_mistyped_address_is_noticed() {
        let payee = "0x70997970C51812dc3A010C7d01b50e0d17dc79C8";
        for good in [payee, &payee.to_lowercase(), &payee[2..], &format!("0x{}", payee[2..].to_uppercase())] {
            assert_eq!(account(good).unwrap().to_string(), payee);
        }
        for bad in
            ["", "0x", "abc", &payee[..41], "0x70997970C51812dc3A010C7d01b50e0d17dc79c8", &payee.replace("51", "52")]
        {
            assert!(account(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn only_this_machine_is_loopback() {
        assert!(loopback("127.0.0.1:0").is_ok() && loopback("[::1]:4030").is_ok());
        for other in ["0.0.0.0:4030", "10.0.0.1:4030", "[::]:4030", "localhost", ""] {
            assert!(loopback(other).is_err(), "{other:?}");
        }
    }
}
