//! What a payer returned of a 402 besides the offer.

use serde_json::{Map, Value};

use crate::protocol::{ResourceInfo, Verbatim};

/// The largest echo that is passed on, in bytes of JSON; one in an ordinary payment has less than 4 KB.
pub const MAX_ECHO: usize = 16 * 1024;

/// What a payer returned of a 402 besides the offer (`resource` and `extensions` of a payment in x402 v2), byte for byte as it
/// came.
///
/// It buys nothing and is not kept in the ledger. A facilitator elsewhere is given it together with the payment, since some
/// extensions are meant for the facilitator: one that catalogues what it settles learns from it what was sold.
#[derive(Clone, Debug, PartialEq)]
pub struct Echo {
    resource: Option<Verbatim<ResourceInfo>>,
    extensions: Option<Verbatim<Map<String, Value>>>,
}

impl Echo {
    /// `None` if there is nothing, or more than [`MAX_ECHO`].
    pub fn new(
        resource: Option<Verbatim<ResourceInfo>>,
        extensions: Option<Verbatim<Map<String, Value>>>,
    ) -> Option<Self> {
        let echo = Self { resource, extensions };
        (1..=MAX_ECHO).contains(&echo.size()).then_some(echo)
    }

    /// The resource that the payer says it pays for.
    pub const fn resource(&self) -> Option<&Verbatim<ResourceInfo>> {
        self.resource.as_ref()
    }

    /// The extensions that it returned or added.
    pub const fn extensions(&self) -> Option<&Verbatim<Map<String, Value>>> {
        self.extensions.as_ref()
    }

    /// Bytes of JSON.
    pub fn size(&self) -> usize {
        let resource = self.resource.as_ref().map_or(0, |resource| resource.text().len());
        resource + self.extensions.as_ref().map_or(0, |extensions| extensions.text().len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_echo_is_bounded_and_never_empty() {
        let url =
            |length: usize| Verbatim::of(&ResourceInfo { url: "u".repeat(length), ..ResourceInfo::default() }).ok();
        assert!(Echo::new(None, None).is_none());
        let overhead = Echo::new(url(0), None).unwrap().size();
        assert_eq!(Echo::new(url(MAX_ECHO - overhead), None).unwrap().size(), MAX_ECHO);
        assert!(Echo::new(url(MAX_ECHO - overhead + 1), None).is_none());
    }
}
