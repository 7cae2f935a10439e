//! What is kept of a response for replays, as the ledger stores it, and for which requests it is right.

use bytes::Bytes;
use http::{
    HeaderMap, HeaderName, StatusCode,
    header::{
        ACCEPT_ENCODING, CONNECTION, CONTENT_ENCODING, CONTENT_RANGE, DATE, HeaderValue, RANGE, TE, TRANSFER_ENCODING,
        UPGRADE, VARY,
    },
    response::Parts,
};

use super::{
    fingerprint,
    header_names::{PAYMENT_SIGNATURE, X_PAYMENT},
};
use crate::ledger::StoredResponse;

/// The first byte of a stored head: how the rest is written.
const FORMAT: u8 = b'1';

/// A handler's response, complete.
pub(super) struct KeptResponse {
    pub(super) status: StatusCode,
    pub(super) headers: HeaderMap,
    pub(super) body: Bytes,
    pub(super) trailers: Option<HeaderMap>,
    /// The request's headers that the response depends on, such as `Accept-Encoding`, with the values they had, joined by commas.
    pub(super) varied_by: Vec<(HeaderName, Option<HeaderValue>)>,
    pub(super) stored_at: u64,
}

impl KeptResponse {
    /// Returns what is kept of a response, without its body. `asked` are the request's headers.
    pub(super) fn of(parts: &Parts, asked: &HeaderMap, stored_at: u64) -> Self {
        Self {
            status: parts.status,
            headers: kept_headers(&parts.headers),
            body: Bytes::new(),
            trailers: None,
            varied_by: varied_by(&parts.headers, asked),
            stored_at,
        }
    }

    /// Returns it as the ledger keeps it. The head has a line for the status and for each field: `>` a header, `.` a trailer, `?` a header of
    /// the request, with or without a value. No name has a colon, and no value the end of a line.
    pub(super) fn to_stored(&self) -> StoredResponse {
        let mut head = vec![FORMAT];
        head.extend_from_slice(self.status.as_str().as_bytes());
        let mut line = |kind: u8, name: &HeaderName, value: Option<&HeaderValue>| {
            head.extend_from_slice(&[b'\n', kind]);
            head.extend_from_slice(name.as_str().as_bytes());
            if let Some(value) = value {
                head.push(b':');
                head.extend_from_slice(value.as_bytes());
            }
        };
        self.headers.iter().for_each(|(name, value)| line(b'>', name, Some(value)));
        self.trailers.iter().flatten().for_each(|(name, value)| line(b'.', name, Some(value)));
        self.varied_by.iter().for_each(|(name, value)| line(b'?', name, value.as_ref()));
        StoredResponse { head: head.into(), body: self.body.clone(), stored_at: self.stored_at }
    }

    /// Reads what the ledger keeps. Returns `None` if another version wrote it.
    pub(super) fn read(stored: &StoredResponse) -> Option<Self> {
        let mut lines = stored.head.strip_prefix(&[FORMAT])?.split(|byte| *byte == b'\n');
        let status = StatusCode::from_bytes(lines.next()?).ok()?;
        let (mut headers, mut trailers, mut varied_by) = (HeaderMap::new(), None::<HeaderMap>, Vec::new());
        for line in lines {
            let (kind, field) = line.split_first()?;
            let mut parts = field.splitn(2, |byte| *byte == b':');
            let name = HeaderName::from_bytes(parts.next()?).ok()?;
            let value = parts.next().map(HeaderValue::from_bytes).transpose().ok()?;
            // A name may occur several times.
            match (kind, value) {
                (b'>', Some(value)) => drop(headers.append(name, value)),
                (b'.', Some(value)) => drop(trailers.get_or_insert_default().append(name, value)),
                (b'?', value) => varied_by.push((name, value)),
                _ => return None,
            }
        }
        Some(Self { status, headers, body: stored.body.clone(), trailers, varied_by, stored_at: stored.stored_at })
    }

    /// Returns the names of the headers that a request must have as the one had that was answered, or `None` if the response is right for it,
    /// too. `asked` are its headers.
    pub(super) fn misfit(&self, asked: &HeaderMap) -> Option<String> {
        let fits = |(name, before): &(HeaderName, Option<HeaderValue>)| {
            let now = joined(asked, name);
            now == *before || (*name == ACCEPT_ENCODING && accepts(now.as_ref(), &self.headers))
        };
        if self.varied_by.iter().all(fits) {
            return None;
        }
        let names: Vec<&str> = self.varied_by.iter().map(|(name, _)| name.as_str()).collect();
        Some(names.join(", "))
    }
}

/// Returns the request's headers that a response says it depends on (`Vary`), or shows it by its encoding or range.
fn varied_by(response: &HeaderMap, asked: &HeaderMap) -> Vec<(HeaderName, Option<HeaderValue>)> {
    let mut varied_by: Vec<(HeaderName, Option<HeaderValue>)> = Vec::new();
    let named =
        response.get_all(VARY).iter().filter_map(|value| value.to_str().ok()).flat_map(|value| value.split(','));
    let named = named.map(str::trim).filter(|name| *name != "*").filter_map(|name| name.parse().ok());
    let shown = [(CONTENT_ENCODING, ACCEPT_ENCODING), (CONTENT_RANGE, RANGE)];
    let shown = shown.into_iter().filter(|(shows, _)| response.contains_key(shows)).map(|(_, asked)| asked);
    for name in named.chain(shown) {
        let is_known = varied_by.iter().any(|(known, _)| *known == name);
        // A payment may come again in another header, or in other words. Who calls is in the fingerprint, as a hash.
        let is_stored = name != PAYMENT_SIGNATURE && name != X_PAYMENT && !fingerprint::HEADERS.contains(&name);
        if !is_known && is_stored {
            let value = joined(asked, &name);
            varied_by.push((name, value));
        }
    }
    varied_by
}

/// Returns all values of a header as one (RFC 9110, section 5.2).
fn joined(headers: &HeaderMap, name: &HeaderName) -> Option<HeaderValue> {
    let mut values = headers.get_all(name).iter();
    let first = values.next()?;
    let mut rest = values.peekable();
    if rest.peek().is_none() {
        return Some(first.clone());
    }
    let mut all = first.as_bytes().to_vec();
    rest.for_each(|value| all.extend([b", ", value.as_bytes()].concat()));
    HeaderValue::from_bytes(&all).ok()
}

/// Returns `true` if a client that sends this `Accept-Encoding` can decode a response with these headers. One that sends none is expected to
/// decode nothing.
fn accepts(accepted: Option<&HeaderValue>, response: &HeaderMap) -> bool {
    let accepted = accepted.and_then(|accepted| accepted.to_str().ok()).unwrap_or_default();
    let weight = |wanted: &str| {
        let mut entries = accepted.split(',').map(|entry| entry.split(';').map(str::trim));
        let mut entry = entries.find_map(|mut entry| entry.next()?.eq_ignore_ascii_case(wanted).then_some(entry))?;
        let weight = entry.find_map(|parameter| parameter.strip_prefix("q=").or(parameter.strip_prefix("Q=")));
        Some(weight.is_none_or(|weight| weight.parse().is_ok_and(|weight: f32| weight > 0.0)))
    };
    let is_accepted = |coding: &str| {
        coding.eq_ignore_ascii_case("identity") || weight(coding).or_else(|| weight("*")).unwrap_or(false)
    };
    let mut codings =
        response.get_all(CONTENT_ENCODING).iter().flat_map(|value| value.as_bytes().split(|byte| *byte == b','));
    codings.all(|coding| std::str::from_utf8(coding).is_ok_and(|coding| is_accepted(coding.trim())))
}

/// Returns the headers without what belongs to the connection (RFC 9110, section 7.6.1) or the moment of the first answer.
fn kept_headers(headers: &HeaderMap) -> HeaderMap {
    let mut kept = headers.clone();
    let leaves = |name: &HeaderName| {
        [CONNECTION, TRANSFER_ENCODING, UPGRADE, TE, DATE].contains(name)
            || ["keep-alive", "proxy-connection"].contains(&name.as_str())
    };
    // Of most handlers' headers there is none.
    if headers.keys().any(leaves) {
        let named = headers.get_all(CONNECTION).iter().filter_map(|value| value.to_str().ok());
        let named = named.flat_map(|value| value.split(',')).filter_map(|name| name.trim().parse().ok());
        for name in headers.keys().filter(|name| leaves(name)).cloned().chain(named) {
            kept.remove(name);
        }
    }
    kept
}

#[cfg(test)]
mod tests {
    use http::Response;

    use super::*;

    type Fields<'a> = &'a [(&'static str, &'static str)];

    fn headers(fields: Fields<'_>) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in fields {
            headers.append(HeaderName::from_static(name), HeaderValue::from_static(value));
        }
        headers
    }

    /// What is read of a response that was stored.
    fn stored(response: Fields<'_>, asked: Fields<'_>) -> KeptResponse {
        let (mut parts, ()) = Response::new(()).into_parts();
        parts.headers = headers(response);
        KeptResponse::read(&KeptResponse::of(&parts, &headers(asked), 0).to_stored()).unwrap()
    }

    #[test]
    fn response_is_read_as_it_was_stored() {
        let mut fields =
            headers(&[("set-cookie", "a=1"), ("set-cookie", "b=2"), ("location", "http://a:1/?b"), ("x", "")]);
        fields.append("x-bytes", HeaderValue::from_bytes(b"\xff\t\xfe").unwrap());
        let varied_by = vec![(RANGE, None), (ACCEPT_ENCODING, Some(HeaderValue::from_static("gzip, br")))];
        let (status, body, trailers) =
            (StatusCode::CREATED, Bytes::from_static(b"a\nb"), Some(headers(&[("sum", "1")])));
        let kept = KeptResponse { status, headers: fields, body, trailers, varied_by, stored_at: 7 };
        let read = KeptResponse::read(&kept.to_stored()).unwrap();
        assert_eq!((read.status, read.headers, read.body), (kept.status, kept.headers, kept.body));
        assert_eq!((read.trailers, read.varied_by, read.stored_at), (kept.trailers, kept.varied_by, 7));
    }

    #[test]
    fn response_of_another_version_is_not_read() {
        for head in ["", "2200", "1", "1x", "1200\n", "1200\nx", "1200\n>a", "1200\n>a b:1", "1200\n#a:1"] {
            let stored = StoredResponse { head: head.into(), body: Bytes::new(), stored_at: 0 };
            assert!(KeptResponse::read(&stored).is_none(), "{head:?}");
        }
    }

    #[test]
    fn response_fits_requests_with_the_headers_that_it_varied_by() {
        let varied = [("vary", "Accept, accept-language"), ("vary", "*"), ("vary", "payment-signature")];
        let stored = stored(&varied, &[("accept", "text/csv"), ("accept", "text/plain"), ("payment-signature", "a")]);
        assert_eq!(stored.misfit(&headers(&[("accept", "text/csv, text/plain"), ("user-agent", "b")])), None);
        let others: [Fields<'_>; 3] =
            [&[], &[("accept", "text/csv")], &[("accept", "text/csv, text/plain"), ("accept-language", "de")]];
        for other in others {
            assert_eq!(stored.misfit(&headers(other)).as_deref(), Some("accept, accept-language"), "{other:?}");
        }
    }

    #[test]
    fn what_a_response_varied_by_is_stored_without_the_callers_secrets() {
        let asked: Fields<'_> = &[("cookie", "a secret"), ("authorization", "another"), ("accept", "text/csv")];
        let stored = stored(&[("vary", "Cookie, Authorization, Accept")], asked);
        assert_eq!(stored.varied_by, [(http::header::ACCEPT, Some(HeaderValue::from_static("text/csv")))]);
    }

    #[test]
    fn encoded_response_fits_requests_that_accept_its_encoding() {
        let stored = stored(&[("content-encoding", "gzip")], &[("accept-encoding", "gzip, br")]);
        for (accepted, fits) in [
            ("gzip, br", true),
            ("GZIP", true),
            ("br;q=1.0, gzip;q=0.5", true),
            ("*", true),
            ("*;q=0, gzip", true),
            ("identity", false),
            ("br", false),
            ("gzip;q=0", false),
            ("gzip; q=0.000, *", false),
            ("", false),
        ] {
            assert_eq!(stored.misfit(&headers(&[("accept-encoding", accepted)])).is_none(), fits, "{accepted}");
        }
        assert!(stored.misfit(&headers(&[])).is_some());
    }

    #[test]
    fn response_without_an_encoding_can_be_decoded_by_anybody() {
        let stored = stored(&[("vary", "accept-encoding")], &[("accept-encoding", "br;q=0")]);
        assert_eq!(stored.misfit(&headers(&[("accept-encoding", "gzip")])), None);
        assert_eq!(stored.misfit(&headers(&[])), None);
    }

    #[test]
    fn part_of_a_response_fits_requests_for_that_part() {
        let stored = stored(&[("content-range", "bytes 0-9/100")], &[("range", "bytes=0-9")]);
        assert_eq!(stored.misfit(&headers(&[("range", "bytes=0-9")])), None);
        assert_eq!(stored.misfit(&headers(&[])).as_deref(), Some("range"));
    }
}
