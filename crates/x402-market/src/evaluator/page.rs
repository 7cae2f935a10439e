//! Documents that everybody may read, and keep for a while.

use bytes::Bytes;
use http::{
    HeaderMap, HeaderValue, Method, Response, StatusCode,
    header::{ACCESS_CONTROL_ALLOW_ORIGIN, ALLOW, CACHE_CONTROL, CONTENT_LENGTH, CONTENT_TYPE, ETAG, IF_NONE_MATCH},
};
use http_body_util::Full;
use sha2::{Digest as _, Sha256};

/// A document that does not change while the process runs.
#[derive(Clone, Debug)]
pub(super) struct Page {
    body: Bytes,
    tag: HeaderValue,
    media_type: &'static str,
    cache_control: &'static str,
}

impl Page {
    pub(super) fn new(body: impl Into<Bytes>, media_type: &'static str, cache_control: &'static str) -> Self {
        let body = body.into();
        let digest = alloy_primitives::hex::encode(&Sha256::digest(&body)[..16]);
        let tag = HeaderValue::try_from(format!("\"{digest}\"")).unwrap_or(HeaderValue::from_static("\"\""));
        Self { body, tag, media_type, cache_control }
    }

    /// Answers GET and HEAD, conditional or not (RFC 9110, section 13).
    pub(super) fn answer(&self, method: &Method, headers: &HeaderMap) -> Response<Full<Bytes>> {
        let mut response = Response::new(Full::default());
        if !matches!(*method, Method::GET | Method::HEAD) {
            *response.status_mut() = StatusCode::METHOD_NOT_ALLOWED;
            response.headers_mut().insert(ALLOW, HeaderValue::from_static("GET, HEAD"));
            return response;
        }
        let answer = response.headers_mut();
        answer.insert(ETAG, self.tag.clone());
        answer.insert(CACHE_CONTROL, HeaderValue::from_static(self.cache_control));
        answer.insert(ACCESS_CONTROL_ALLOW_ORIGIN, HeaderValue::from_static("*"));
        if self.is_known(headers) {
            *response.status_mut() = StatusCode::NOT_MODIFIED;
            return response;
        }
        answer.insert(CONTENT_TYPE, HeaderValue::from_static(self.media_type));
        answer.insert(CONTENT_LENGTH, self.body.len().into());
        if method == Method::GET {
            *response.body_mut() = Full::new(self.body.clone());
        }
        response
    }

    /// Whether the client has this very version: any of its tags, compared weakly.
    fn is_known(&self, headers: &HeaderMap) -> bool {
        let tags = headers.get_all(IF_NONE_MATCH).iter().filter_map(|tags| tags.to_str().ok());
        tags.flat_map(|tags| tags.split(','))
            .map(str::trim)
            .any(|tag| tag == "*" || tag.strip_prefix("W/").unwrap_or(tag).as_bytes() == self.tag.as_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(method: Method, known: Option<&'static str>) -> (u16, usize) {
        let page = Page::new("hello", "text/plain", "public");
        let mut headers = HeaderMap::new();
        headers.extend(known.map(|known| (IF_NONE_MATCH, HeaderValue::from_static(known))));
        let response = page.answer(&method, &headers);
        assert!(response.status() == 405 || response.headers()[ETAG] == TAG);
        let size = http_body::Body::size_hint(response.body()).exact().unwrap_or(0);
        (response.status().as_u16(), size as usize)
    }

    const TAG: &str = "\"2cf24dba5fb0a30e26e83b2ac5b9e29e\"";

    #[test]
    fn what_is_known_is_not_sent_again() {
        assert_eq!(status(Method::GET, None), (200, 5));
        assert_eq!(status(Method::HEAD, None), (200, 0));
        assert_eq!(status(Method::GET, Some("\"other\"")), (200, 5));
        for known in ["\"2cf24dba5fb0a30e26e83b2ac5b9e29e\"", "\"a\", W/\"2cf24dba5fb0a30e26e83b2ac5b9e29e\"", "*"] {
            assert_eq!(status(Method::GET, Some(known)), (304, 0), "{known}");
        }
        assert_eq!(status(Method::POST, None).0, 405);
    }
}
