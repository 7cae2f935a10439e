//! What the HTTP services here share: bodies within a limit, JSON, refusals, and documents that clients may keep.

use std::{pin::pin, time::Duration};

use bytes::{Bytes, BytesMut};
use http::{
    HeaderMap, HeaderValue, Method, Response, StatusCode,
    header::{ALLOW, CACHE_CONTROL, CONTENT_LENGTH, CONTENT_TYPE, ETAG, IF_NONE_MATCH, RETRY_AFTER},
    request::Parts,
};
use http_body::Body;
use http_body_util::{BodyExt as _, Full, LengthLimitError, Limited};
use serde::Serialize;
use serde_json::json;
use sha2::{Digest as _, Sha256};
use tokio::time::timeout;
use tower::BoxError;

/// The reason why a request is not served. In JSON it is `{"error", "detail"}`.
#[derive(Debug)]
pub struct Refusal {
    /// The status of the answer.
    pub status: StatusCode,
    code: &'static str,
    /// The explanation for the caller.
    pub detail: String,
    retry_after: Option<Duration>,
    allow: Option<&'static str>,
}

impl Refusal {
    /// Creates a refusal with this status, code and explanation.
    pub fn new(status: StatusCode, code: &'static str, detail: impl ToString) -> Self {
        Self { status, code, detail: detail.to_string(), retry_after: None, allow: None }
    }

    /// Creates the refusal of a method that is none of these.
    pub fn wrong_method(allow: &'static str) -> Self {
        Self { allow: Some(allow), ..Self::new(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", allow) }
    }

    /// Sets when the client should try again.
    pub fn later(self, delay: Duration) -> Self {
        Self { retry_after: Some(delay), ..self }
    }

    /// Returns the refusal as an answer.
    pub fn into_response(self) -> Response<Full<Bytes>> {
        let mut response = json_response(self.status, &json!({ "error": self.code, "detail": self.detail }));
        if let Some(delay) = self.retry_after {
            response.headers_mut().insert(RETRY_AFTER, delay.as_secs().max(1).into());
        }
        if let Some(methods) = self.allow {
            response.headers_mut().insert(ALLOW, HeaderValue::from_static(methods));
        }
        response
    }
}

/// Reads the body of a request: at most `limit` bytes, within this time.
pub async fn receive(body: impl Body<Data = Bytes>, limit: usize, time: Duration) -> Result<Bytes, Refusal> {
    let mut limited = pin!(Limited::new(body.map_err(|_| "the body broke off"), limit));
    // Copied together: kept as it comes, a byte takes as much memory as a frame.
    let mut whole = BytesMut::new();
    let reading = async {
        while let Some(frame) = limited.frame().await {
            whole.extend_from_slice(&frame?.into_data().unwrap_or_default());
        }
        Ok::<_, BoxError>(())
    };
    match timeout(time, reading).await {
        Ok(Ok(())) => Ok(whole.freeze()),
        Ok(Err(error)) if error.is::<LengthLimitError>() => {
            let detail = format!("a body may have {limit} bytes");
            Err(Refusal::new(StatusCode::PAYLOAD_TOO_LARGE, "body_too_large", detail))
        }
        Ok(Err(_)) => Err(Refusal::new(StatusCode::BAD_REQUEST, "body_broken", "the body broke off")),
        Err(_) => Err(Refusal::new(StatusCode::REQUEST_TIMEOUT, "body_too_slow", "the body took too long")),
    }
}

/// Returns a response with `body` as JSON.
pub fn json_response(status: StatusCode, body: &impl Serialize) -> Response<Full<Bytes>> {
    let (status, body) = match serde_json::to_vec(body) {
        Ok(body) => (status, body),
        Err(_) => (StatusCode::INTERNAL_SERVER_ERROR, Vec::new()),
    };
    let mut response = Response::new(Full::from(body));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

/// Answers GET or HEAD, conditional or not (RFC 9110, section 13), with a document that clients may keep.
pub fn document(
    request: &Parts,
    body: Bytes,
    media_type: &'static str,
    cache_control: &'static str,
) -> Response<Full<Bytes>> {
    let tag = etag(&body);
    let mut response = Response::new(Full::default());
    if is_known(&request.headers, &tag) {
        *response.status_mut() = StatusCode::NOT_MODIFIED;
    } else {
        response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(media_type));
        response.headers_mut().insert(CONTENT_LENGTH, body.len().into());
        if request.method == Method::GET {
            *response.body_mut() = Full::new(body);
        }
    }
    response.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static(cache_control));
    response.headers_mut().insert(ETAG, tag);
    response
}

/// Returns the ETag of a document: a hash of its bytes.
fn etag(body: &[u8]) -> HeaderValue {
    let digest = alloy_primitives::hex::encode(&Sha256::digest(body)[..16]);
    HeaderValue::try_from(format!("\"{digest}\"")).unwrap_or(HeaderValue::from_static("\"\""))
}

/// Returns `true` if the client has the document with this tag: any of its tags matches, compared weakly (RFC 9110, section 13.1.2).
fn is_known(headers: &HeaderMap, tag: &HeaderValue) -> bool {
    let tags = headers.get_all(IF_NONE_MATCH).iter().filter_map(|tags| tags.to_str().ok());
    tags.flat_map(|tags| tags.split(','))
        .map(str::trim)
        .any(|known| known == "*" || known.strip_prefix("W/").unwrap_or(known).as_bytes() == tag.as_bytes())
}

#[cfg(test)]
mod tests {
    use http::Request;

    use super::*;

    fn status(method: Method, known: Option<&'static str>) -> (u16, usize) {
        let mut request = Request::new(()).into_parts().0;
        request.method = method;
        request.headers.extend(known.map(|known| (IF_NONE_MATCH, HeaderValue::from_static(known))));
        let response = document(&request, Bytes::from_static(b"hello"), "text/plain", "public");
        assert_eq!(response.headers()[ETAG], TAG);
        let size = http_body::Body::size_hint(response.body()).exact().unwrap_or(0);
        (response.status().as_u16(), size as usize)
    }

    const TAG: &str = "\"2cf24dba5fb0a30e26e83b2ac5b9e29e\"";

    #[test]
    fn document_that_the_client_has_is_not_sent_again() {
        assert_eq!(status(Method::GET, None), (200, 5));
        assert_eq!(status(Method::HEAD, None), (200, 0));
        assert_eq!(status(Method::GET, Some("\"other\"")), (200, 5));
        for known in ["\"2cf24dba5fb0a30e26e83b2ac5b9e29e\"", "\"a\", W/\"2cf24dba5fb0a30e26e83b2ac5b9e29e\"", "*"] {
            assert_eq!(status(Method::GET, Some(known)), (304, 0), "{known}");
        }
    }
}
