//! A 402 in which only the resource's URL is missing.

use base64_simd::STANDARD;
use bytes::Bytes;

use super::offer::Demand;

/// The two forms of a 402 for a fixed price, to be filled in with the URL of what a request asks for.
#[derive(Clone, Debug)]
pub(super) struct Blank {
    header: Form,
    body: Form,
}

/// A JSON text around one string that occurs in it, perhaps several times.
#[derive(Clone, Debug)]
struct Form {
    first: Box<str>,
    /// Each after one more occurrence.
    others: Vec<Box<str>>,
}

impl Blank {
    /// Takes a demand apart in which the URL is `mark`, a text that needs no escapes in JSON. `None` if it is not in there.
    pub(super) fn of(demand: &Demand, mark: &str) -> Option<Self> {
        let header = STANDARD.decode_to_vec(demand.header.as_bytes()).ok()?;
        Some(Self { header: Form::of(&header, mark)?, body: Form::of(&demand.body, mark)? })
    }

    /// The demand for the resource at `url`.
    pub(super) fn fill(&self, url: &str) -> Option<Demand> {
        let url = serde_json::to_string(url).ok()?;
        let header = STANDARD.encode_to_string(self.header.fill(&url)).try_into().ok()?;
        Some(Demand { header, body: Bytes::from(self.body.fill(&url)) })
    }
}

impl Form {
    fn of(json: &[u8], mark: &str) -> Option<Self> {
        let json = std::str::from_utf8(json).ok()?;
        let mark = format!("\"{mark}\"");
        let mut parts = json.split(&mark).map(Box::from);
        let form = Self { first: parts.next()?, others: parts.collect() };
        (!form.others.is_empty()).then_some(form)
    }

    fn fill(&self, string: &str) -> String {
        let length: usize = self.others.iter().map(|part| string.len() + part.len()).sum();
        let mut text = String::with_capacity(self.first.len() + length);
        text.push_str(&self.first);
        for part in &self.others {
            text.push_str(string);
            text.push_str(part);
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    fn demand(url: &str) -> Demand {
        let json = |times| {
            let urls = vec![serde_json::json!({ "url": url, "n": 1 }); times];
            serde_json::to_vec(&serde_json::json!({ "a": urls, "description": "the mark, in other words" })).unwrap()
        };
        Demand { header: HeaderValue::try_from(STANDARD.encode_to_string(json(1))).unwrap(), body: json(3).into() }
    }

    #[test]
    fn what_is_filled_in_is_what_would_have_been_written() {
        let blank = Blank::of(&demand("the mark"), "the mark").unwrap();
        for url in ["", "/evaluate", "https://api.example/a%20b", "/\"}{\\", "/ü\u{1}"] {
            let (filled, written) = (blank.fill(url).unwrap(), demand(url));
            assert_eq!(filled.header, written.header, "{url}");
            assert_eq!(filled.body, written.body, "{url}");
        }
        assert!(Blank::of(&demand("another"), "the mark").is_none());
    }
}
