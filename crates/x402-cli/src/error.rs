//! Errors of commands: what happened, and one sentence on what to do.

use std::{error::Error as StdError, fmt, io, path::PathBuf};

use tower_x402::{
    channels::ChannelsBuildError,
    client::{JournalError, key::KeyError},
    facilitator::{OnchainBuildError, RemoteBuildError},
    ledger::LedgerError,
    server::BuildError,
};
use x402_devnet::DevnetError;

/// An error of a command. Shows what happened; [`advice`](Self::advice) says what to do.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// A flag or a variable has a value that cannot be used, or is missing.
    #[error("{name}: {problem}")]
    Setting { name: String, problem: String },
    /// A field of the configuration file has a value that cannot be used.
    #[error("{place}: {problem}")]
    Config { place: String, problem: String },
    #[error("cannot read {}", path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("cannot write {}", path.display())]
    Write { path: PathBuf, source: io::Error },
    #[error("cannot listen on {address}")]
    Listen { flag: &'static str, address: String, source: io::Error },
    #[error("cannot open the ledger {at}")]
    Ledger { at: String, source: LedgerError },
    #[error("cannot open the journal")]
    Journal(#[source] JournalError),
    #[error("cannot use the key of {role}")]
    Key { role: &'static str, source: KeyError },
    #[error("cannot use the node")]
    Node(#[source] OnchainBuildError),
    #[error("cannot use the node for payment channels")]
    ChannelNode(#[source] OnchainBuildError),
    #[error("cannot use the facilitator")]
    Remote(#[source] RemoteBuildError),
    #[error("cannot set up the charge for {route}")]
    Paywall { route: String, source: BuildError },
    #[error("cannot take vouchers")]
    Channels(#[source] ChannelsBuildError),
    #[error("the chain in this process does not start")]
    Devnet(#[from] DevnetError),
    #[error("the HTTP client cannot be set up")]
    Http(#[source] reqwest::Error),
    #[error("signals cannot be caught")]
    Signals(#[source] io::Error),
    #[error("metrics cannot be set up")]
    Metrics(#[source] Box<dyn StdError + Send + Sync>),
    /// The command ran, and its work failed.
    #[error("{what}")]
    Failed { what: String, advice: &'static str },
}

impl Error {
    pub(crate) fn setting(name: impl Into<String>, problem: impl Into<String>) -> Self {
        Self::Setting { name: name.into(), problem: problem.into() }
    }

    /// Returns one sentence on what to do, if the error itself does not say so.
    pub(crate) fn advice(&self) -> Option<&'static str> {
        use io::ErrorKind::{AddrInUse, AddrNotAvailable, AlreadyExists, NotFound, PermissionDenied, StorageFull};
        match self {
            Self::Listen { flag, source, .. } => Some(match (source.kind(), *flag) {
                (AddrInUse, "--admin") => "Choose another port with --admin, or stop the program that has this one.",
                (AddrInUse, _) => "Choose another port with --listen, or stop the program that has this one.",
                (PermissionDenied, _) => {
                    "Choose a port from 1024 on, or allow the program to use lower ones (CAP_NET_BIND_SERVICE)."
                }
                (AddrNotAvailable, _) => "This machine does not have that address: use 127.0.0.1, or 0.0.0.0 for all.",
                _ => "Give an address and a port, such as 127.0.0.1:4021.",
            }),
            Self::Read { source, .. } | Self::Write { source, .. } => Some(match source.kind() {
                NotFound => "Check the path.",
                PermissionDenied => "Give the user that runs this command access to the file.",
                AlreadyExists => "Nothing was changed: choose another name.",
                StorageFull => "Make room on the disk.",
                _ => "Check the file and the disk.",
            }),
            Self::Ledger { at, .. } if at.starts_with("postgres") => {
                Some("Check that the database runs and exists, and who may use it: user, PGPASSWORD, pg_hba.conf.")
            }
            Self::Ledger { .. } => Some(
                "Check that no other process has it open, that its directory can be written to, and that the disk has room.",
            ),
            Self::Journal(_) => {
                Some("Check that no other process has it open, and that its directory can be written to.")
            }
            Self::Http(_) => Some("Check the certificates of this machine."),
            Self::Failed { advice, .. } => Some(advice),
            _ => None,
        }
    }

    /// Returns 1 if the command's work failed, and 2 if it could not begin.
    pub(crate) const fn exit_code(&self) -> u8 {
        match self {
            Self::Failed { .. } => 1,
            _ => 2,
        }
    }
}

/// An error with all its causes, in one sentence.
pub(crate) struct Sentence<'a>(pub(crate) &'a dyn StdError);

impl fmt::Display for Sentence<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = self.0.to_string();
        let mut cause = self.0.source();
        while let Some(error) = cause {
            let next = error.to_string();
            // Some errors repeat their cause.
            if !text.ends_with(&next) {
                text = format!("{text}: {next}");
            }
            cause = error.source();
        }
        f.write_str(&text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_taken_port_is_explained() {
        for flag in ["--listen", "--admin"] {
            let source = io::ErrorKind::AddrInUse.into();
            let error = Error::Listen { flag, address: "127.0.0.1:1".into(), source };
            assert!(Sentence(&error).to_string().starts_with("cannot listen on 127.0.0.1:1: "));
            assert!(error.advice().unwrap().contains(flag));
            assert_eq!(error.exit_code(), 2);
        }
    }
}
