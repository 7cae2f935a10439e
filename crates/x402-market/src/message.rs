//! Versioned JSON: reading it, and errors that name the place of the problem.

use std::io;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de::DeserializeOwned};

/// The version of the messages.
pub const MESSAGE_VERSION: u64 = 1;

/// A message could not be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MessageError {
    /// The message is not JSON.
    #[error("not JSON: {0}")]
    NotJson(String),
    /// The message has another version.
    #[error("version: {0} is not supported, only {MESSAGE_VERSION}")]
    Version(u64),
    /// A part of the message is not valid.
    #[error("{at}: {problem}")]
    Invalid {
        /// The place in the message, such as `task.prompt` or `outputs[3]`; `.` is the whole message.
        at: String,
        /// What is wrong there.
        problem: String,
    },
}

impl MessageError {
    pub(super) fn invalid(at: impl Into<String>, problem: impl ToString) -> Self {
        Self::Invalid { at: at.into(), problem: problem.to_string() }
    }
}

/// Reads a message. The version is checked first, because another version may have a different structure.
pub(super) fn read<T: DeserializeOwned>(json: &[u8]) -> Result<T, MessageError> {
    #[derive(Deserialize)]
    struct Versioned {
        version: Option<u64>,
        #[serde(flatten)]
        _rest: Unknown,
    }
    if let Ok(Versioned { version: Some(version), .. }) = serde_json::from_slice(json)
        && version != MESSAGE_VERSION
    {
        return Err(MessageError::Version(version));
    }
    let mut deserializer = serde_json::Deserializer::from_slice(json);
    let message = serde_path_to_error::deserialize(&mut deserializer).map_err(|error| {
        let at = error.path().to_string();
        let error = error.into_inner();
        if error.is_data() { MessageError::invalid(at, error) } else { MessageError::NotJson(error.to_string()) }
    })?;
    deserializer.end().map_err(|error| MessageError::NotJson(error.to_string()))?;
    Ok(message)
}

/// Returns a record as a line of a file.
pub fn json_line(record: &impl Serialize) -> io::Result<Vec<u8>> {
    let mut line = serde_json::to_vec(record)?;
    line.push(b'\n');
    Ok(line)
}

/// The version field. It is always written; a message without it has version 1.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Version;

impl Serialize for Version {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_u64(MESSAGE_VERSION)
    }
}

impl<'de> Deserialize<'de> for Version {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        match u64::deserialize(deserializer)? {
            MESSAGE_VERSION => Ok(Self),
            other => Err(serde::de::Error::custom(MessageError::Version(other))),
        }
    }
}

/// Ignores unknown fields, which a later minor version may add. Flattened into a struct, it also refuses arrays in place of objects.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(super) struct Unknown {}
