//! Reads the bodies of HTTP responses within a bound.

#[cfg(feature = "onchain")]
use alloy_transport_http::reqwest;

/// An error while a body was read.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ReadBodyError {
    /// The body is longer than the bound.
    #[error("the answer is too large")]
    TooLarge,
    /// The connection failed.
    #[error("the answer broke off")]
    Broken,
}

/// Reads a whole body of at most `limit` bytes. Wrap it in a timeout.
pub(crate) async fn read_body(mut response: reqwest::Response, limit: usize) -> Result<Vec<u8>, ReadBodyError> {
    let mut body = Vec::new();
    while let Some(chunk) = response.chunk().await.map_err(|_| ReadBodyError::Broken)? {
        if body.len() + chunk.len() > limit {
            return Err(ReadBodyError::TooLarge);
        }
        body.extend_from_slice(&chunk);
    }
    Ok(body)
}
