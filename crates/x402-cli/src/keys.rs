//! Private keys, from variables and files and never from the command line, which other users of a machine can read.

use std::{env, ffi::OsString, fs, path::PathBuf};

use tower_x402::{client::key, signers::PrivateKeySigner};
use zeroize::Zeroizing;

use crate::error::Error;

/// The purpose of a key, with which the names of its variables begin.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Role {
    /// For people.
    name: &'static str,
    prefix: &'static str,
}

impl Role {
    pub(crate) const PAYER: Self = Self { name: "the payer", prefix: "PAYER" };
    pub(crate) const SETTLEMENT: Self = Self { name: "settlement", prefix: "SETTLEMENT" };
    pub(crate) const CHANNELS: Self = Self { name: "the payment channels", prefix: "CHANNELS" };

    /// Returns `true` if the key sends transactions that settle.
    pub(crate) fn is_settlement(self) -> bool {
        self.prefix == Self::SETTLEMENT.prefix
    }

    fn variable(self, rest: &str) -> String {
        format!("{}_{rest}", self.prefix)
    }
}

/// The places of a key, besides the variables.
#[derive(Clone, Debug, Default, clap::Args)]
pub(crate) struct KeyFlags {
    /// Read the payer's key from this file (32 bytes in hex), which not everybody may read
    #[arg(long, value_name = "FILE", conflicts_with = "keystore")]
    pub(crate) key_file: Option<PathBuf>,
    /// Read the payer's key from this encrypted keystore file (version 3), with the password in PAYER_KEYSTORE_PASSWORD or
    /// PAYER_KEYSTORE_PASSWORD_FILE
    #[arg(long, value_name = "FILE")]
    pub(crate) keystore: Option<PathBuf>,
}

/// Reads the key of a role: of the flags, or of the one variable that is set. Returns `None` if there is none.
///
/// `X` is the role's prefix: `X_PRIVATE_KEY`, `X_PRIVATE_KEY_FILE`, or `X_KEYSTORE` with `X_KEYSTORE_PASSWORD` or
/// `X_KEYSTORE_PASSWORD_FILE`.
pub(crate) async fn find(role: Role, flags: &KeyFlags) -> Result<Option<PrivateKeySigner>, Error> {
    let broken = |source| Error::Key { role: role.name, source };
    if let Some(path) = &flags.keystore {
        return from_keystore(role, path.clone()).await.map(Some);
    }
    if let Some(path) = &flags.key_file {
        return from_file(role, path).map(Some);
    }
    match given(role).as_slice() {
        [] => Ok(None),
        [("PRIVATE_KEY", _)] => key::from_env(&role.variable("PRIVATE_KEY")).map(Some).map_err(broken),
        [("PRIVATE_KEY_FILE", path)] => from_file(role, &PathBuf::from(path)).map(Some),
        [(_, path)] => from_keystore(role, path.into()).await.map(Some),
        [(one, _), (other, _), ..] => {
            let problem = format!("{} is set, too: unset one of them", role.variable(other));
            Err(Error::setting(role.variable(one), problem))
        }
    }
}

/// Returns the variables that give the key of a role, by the rest of their names, and their values.
fn given(role: Role) -> Vec<(&'static str, OsString)> {
    let names = ["PRIVATE_KEY", "PRIVATE_KEY_FILE", "KEYSTORE"].into_iter();
    names.filter_map(|rest| Some((rest, env::var_os(role.variable(rest)).filter(|value| !value.is_empty())?))).collect()
}

/// Returns the name of a variable that gives the key of a role, if there is one.
pub(crate) fn variable_with(role: Role) -> Option<String> {
    given(role).first().map(|(rest, _)| role.variable(rest))
}

/// Reads the key of a role, which must be there.
pub(crate) async fn require(role: Role, flags: &KeyFlags) -> Result<PrivateKeySigner, Error> {
    find(role, flags).await?.ok_or_else(|| {
        let name = role.variable("PRIVATE_KEY");
        Error::setting(
            name,
            format!("set it to the key of {} (32 bytes in hex), or name a file: see --help", role.name),
        )
    })
}

fn from_file(role: Role, path: &PathBuf) -> Result<PrivateKeySigner, Error> {
    let text = Zeroizing::new(read_secret(path)?);
    // The error names the origin and never shows the text.
    key::from_hex(&text).map_err(|_| {
        Error::setting(path.display().to_string(), format!("is not the key of {}: expected 32 bytes in hex", role.name))
    })
}

async fn from_keystore(role: Role, path: PathBuf) -> Result<PrivateKeySigner, Error> {
    let password = keystore_password(role)?;
    let read = tokio::task::spawn_blocking(move || key::from_keystore(path, password.as_bytes())).await;
    let source = match read {
        Ok(Ok(key)) => return Ok(key),
        Ok(Err(source)) => source,
        // It panics on files that no keystore program writes.
        Err(_) => return Err(Error::setting(role.variable("KEYSTORE"), "is not a keystore file of version 3")),
    };
    Err(Error::Key { role: role.name, source })
}

/// Reads the password of a role's keystore from its variable, or from the file that is named there.
pub(crate) fn keystore_password(role: Role) -> Result<Zeroizing<String>, Error> {
    let (variable, file) = (role.variable("KEYSTORE_PASSWORD"), role.variable("KEYSTORE_PASSWORD_FILE"));
    match (env::var(&variable), env::var_os(&file)) {
        (Ok(password), _) => Ok(Zeroizing::new(password)),
        (Err(_), Some(path)) => {
            let text = Zeroizing::new(read_secret(&path.into())?);
            Ok(Zeroizing::new(text.trim_end_matches(['\r', '\n']).to_owned()))
        }
        (Err(_), None) => Err(Error::setting(variable, format!("set it, or {file}, to the keystore's password"))),
    }
}

/// Reads a file that not everybody may read. A group may: so do systemd and Kubernetes hand out secrets.
fn read_secret(path: &PathBuf) -> Result<String, Error> {
    let unreadable = |source| Error::Read { path: path.clone(), source };
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt as _;
        let mode = fs::metadata(path).map_err(unreadable)?.permissions().mode();
        if mode & 0o027 != 0 {
            let problem = "can be read by everybody, or changed by others: chmod 600 it";
            return Err(Error::setting(path.display().to_string(), problem));
        }
    }
    fs::read_to_string(path).map_err(unreadable)
}
