//! HTTP answers that the services here share: JSON, and documents that clients may keep.

use bytes::Bytes;
use http::{
    HeaderMap, HeaderValue, Response, StatusCode,
    header::{CONTENT_TYPE, IF_NONE_MATCH},
};
use http_body_util::Full;
use serde::Serialize;
use sha2::{Digest as _, Sha256};

/// Returns a response with `body` as JSON.
pub(crate) fn json_response(status: StatusCode, body: &impl Serialize) -> Response<Full<Bytes>> {
    let (status, body) = match serde_json::to_vec(body) {
        Ok(body) => (status, body),
        Err(_) => (StatusCode::INTERNAL_SERVER_ERROR, Vec::new()),
    };
    let mut response = Response::new(Full::from(body));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

/// Returns the ETag of a document: a hash of its bytes.
pub fn etag(body: &[u8]) -> HeaderValue {
    let digest = alloy_primitives::hex::encode(&Sha256::digest(body)[..16]);
    HeaderValue::try_from(format!("\"{digest}\"")).unwrap_or(HeaderValue::from_static("\"\""))
}

/// Returns `true` if the client has the document with this tag: any of its tags matches, compared weakly (RFC 9110, section 13.1.2).
pub fn is_known(headers: &HeaderMap, tag: &HeaderValue) -> bool {
    let tags = headers.get_all(IF_NONE_MATCH).iter().filter_map(|tags| tags.to_str().ok());
    tags.flat_map(|tags| tags.split(','))
        .map(str::trim)
        .any(|known| known == "*" || known.strip_prefix("W/").unwrap_or(known).as_bytes() == tag.as_bytes())
}
