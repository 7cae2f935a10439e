//! Reads private keys from text, environment variables and keystore files.
//!
//! Any alloy signer can pay, such as a KMS or a hardware wallet; these functions are for keys held in memory. Errors never show what was
//! read, and copies of it are wiped. An environment variable stays readable while the process lives; a keystore file avoids that.
//!
//! ```no_run
//! use tower_x402::client::{Payer, key};
//!
//! let payer = Payer::builder(key::from_env("STUDENT_PRIVATE_KEY")?).build();
//! # Ok::<(), key::KeyError>(())
//! ```

use std::env;
#[cfg(feature = "keystore")]
use std::path::{Path, PathBuf};

use alloy_primitives::{B256, hex};
use alloy_signer_local::PrivateKeySigner;
use zeroize::{Zeroize, Zeroizing};

/// Reads a private key of 32 bytes in hex, with or without `0x`. Whitespace around it is ignored.
///
/// ```
/// use tower_x402::client::key;
///
/// let key = key::from_hex("0x4646464646464646464646464646464646464646464646464646464646464646")?;
/// assert_eq!(key.address().to_string(), "0x9d8A62f656a8d1615C1294fd71e9CFb3E4855A4F");
/// assert!(key::from_hex("0x46").is_err());
/// # Ok::<(), key::KeyError>(())
/// ```
///
/// # Errors
/// [`KeyError::Malformed`], which does not show the text.
pub fn from_hex(text: &str) -> Result<PrivateKeySigner, KeyError> {
    read(text, "the text given")
}

/// Reads a private key from an environment variable, as [`from_hex`] does.
///
/// # Errors
/// [`KeyError::Missing`] and [`KeyError::Malformed`] name the variable.
pub fn from_env(variable: &str) -> Result<PrivateKeySigner, KeyError> {
    let text = env::var(variable).map_err(|_| KeyError::Missing { variable: variable.into() })?;
    read(&Zeroizing::new(text), variable)
}

/// Decrypts the private key in an Ethereum keystore file (version 3), as geth, Foundry's `cast wallet` and many wallets write it.
///
/// This takes about a second of computing, by design. In async code, use `spawn_blocking`.
///
/// # Errors
/// [`KeyError::Keystore`] names the file.
#[cfg(feature = "keystore")]
pub fn from_keystore(path: impl AsRef<Path>, password: impl AsRef<[u8]>) -> Result<PrivateKeySigner, KeyError> {
    let path = path.as_ref();
    PrivateKeySigner::decrypt_keystore(path, password)
        .map_err(|source| KeyError::Keystore { path: path.into(), source: Box::new(source) })
}

fn read(text: &str, origin: &str) -> Result<PrivateKeySigner, KeyError> {
    let malformed = || KeyError::Malformed { origin: origin.into() };
    let mut bytes = B256::ZERO;
    let read = hex::decode_to_slice(text.trim(), bytes.as_mut_slice());
    let key =
        read.map_err(|_| malformed()).and_then(|()| PrivateKeySigner::from_bytes(&bytes).map_err(|_| malformed()));
    bytes.0.zeroize();
    key
}

/// An error while a key was read. It never shows the key or the password.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KeyError {
    /// The environment variable is not set, or is not text.
    #[error("set {variable} to a private key (32 bytes in hex)")]
    Missing {
        /// The name of the variable.
        variable: String,
    },
    /// The text is not a private key.
    #[error("{origin} is not a private key: expected 32 bytes in hex, not zero and below the order of the curve")]
    Malformed {
        /// The source of the text, such as the name of the variable.
        origin: String,
    },
    /// The file cannot be read, or the password is wrong.
    #[cfg(feature = "keystore")]
    #[error("no key can be read from the keystore {} with this password", path.display())]
    Keystore {
        /// The file.
        path: PathBuf,
        /// The error of the keystore.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "ac0974bec39a17e36ba4a6b4d238ff944bacb478cbed5efcae784d7bf4f2ff80";

    #[test]
    fn key_is_read_with_and_without_prefix() {
        for text in [TEXT.to_owned(), format!("0x{TEXT}"), format!(" 0x{TEXT}\n")] {
            assert_eq!(from_hex(&text).unwrap().address().to_string(), "0xf39Fd6e51aad88F6F4ce6aB8827279cffFb92266");
        }
    }

    #[test]
    fn errors_and_debug_output_do_not_show_the_key() {
        let wrong = [format!("{TEXT}00"), TEXT.replace('a', "g"), "f".repeat(64), "0".repeat(64), String::new()];
        for text in wrong {
            let error = from_hex(&text).unwrap_err();
            let shown = format!("{error} {error:?}");
            assert!(text.is_empty() || !shown.contains(&text[..text.len().min(16)]), "{shown}");
        }
        let key = from_hex(TEXT).unwrap();
        assert!(!format!("{key:?}").contains(&TEXT[..16]));
    }

    #[test]
    fn error_names_the_missing_variable() {
        let error = from_env("X402_NO_SUCH_VARIABLE").unwrap_err();
        assert_eq!(error.to_string(), "set X402_NO_SUCH_VARIABLE to a private key (32 bytes in hex)");
    }

    #[cfg(feature = "keystore")]
    #[test]
    fn test_vector_of_web3_secret_storage_is_decrypted_with_its_password_only() {
        // https://ethereum.org/en/developers/docs/data-structures-and-encoding/web3-secret-storage/, PBKDF2.
        let text = r#"{"crypto":{"cipher":"aes-128-ctr","cipherparams":{"iv":"6087dab2f9fdbbfaddc31a909735c1e6"},
            "ciphertext":"5318b4d5bcd28de64ee5559e671353e16f075ecae9f99c7a79a38af5f869aa46","kdf":"pbkdf2",
            "kdfparams":{"c":262144,"dklen":32,"prf":"hmac-sha256",
            "salt":"ae3cd4e7013836a3df6bd7241b12db061dbe2c6785853cce422d148a624ce0bd"},
            "mac":"517ead924a9d0dc3124507e3393d175ce3ff7c1e96529c6c555ce9e51205e9b2"},
            "id":"3198bc9c-6672-5ab3-d995-4942343ae5b6","version":3}"#;
        let path = env::temp_dir().join(format!("x402-keystore-{}.json", std::process::id()));
        std::fs::write(&path, text).unwrap();
        let (right, wrong) = (from_keystore(&path, "testpassword"), from_keystore(&path, "a-wrong-password"));
        std::fs::remove_file(&path).unwrap();
        let expected = from_hex("7a28b5ba57c53603b0b07b56bba752f7784bf506fa95edc395f5cf6c7514fe9d").unwrap();
        assert_eq!(right.unwrap().address(), expected.address());
        let error = wrong.unwrap_err();
        assert!(!format!("{error} {error:?}").contains("a-wrong-password"));
        assert!(error.to_string().contains("x402-keystore"));
    }
}
