//! What a seller says of its page.

use http::Method;

/// The page that a browser is shown in place of the 402's JSON when a person opens a paid address.
///
/// It says what is sold, for how much, to whom, and how a program pays; a button pays from a wallet in the browser (EIP-1193)
/// and shows the answer. It needs nothing from elsewhere: no framework, no font, no other host.
///
/// ```
/// use http::Method;
/// use tower_x402::server::{BrowserPage, RequirePaymentLayer};
///
/// let builder = RequirePaymentLayer::builder()
///     .price("$0.05")
///     .description("The full text of today's essay")
///     .browser_page(Some(BrowserPage::new().name("Essays").methods([Method::GET])));
/// ```
///
/// It is shown for a `GET` (or `HEAD`) without a payment whose `Accept` names `text/html`, not below `application/json` or `*/*`, whose
/// `User-Agent` begins with `Mozilla/`, as that of every browser does, and whose `Sec-Fetch-Mode`, where there is one, is
/// `navigate`. Every other request is answered as without it.
#[derive(Clone, Debug, Default)]
pub struct BrowserPage {
    pub(super) name: Option<String>,
    methods: Option<Vec<Method>>,
}

impl BrowserPage {
    /// Returns a page that uses the layer's description and service name.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the page's heading. Default: the layer's [`service_name`](crate::server::RequirePaymentLayerBuilder::service_name), if any.
    #[must_use]
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.name = Some(name.into());
        self
    }

    /// Sets the HTTP methods that the paid service answers, which the layer cannot see. Browsers send `GET`. If `GET` is not among the
    /// methods, the page has no button and names the method to use. If it is, offers of the flow `upfront` can be paid from the page, too.
    ///
    /// Default: not known. The button then pays in the `authorization` flow only, in which an answer `405` costs nothing.
    #[must_use]
    pub fn methods(mut self, methods: impl IntoIterator<Item = Method>) -> Self {
        self.methods = Some(methods.into_iter().collect());
        self
    }

    /// Returns whether a `GET` is answered, or `None` if that is not known.
    pub(super) fn answers_get(&self) -> Option<bool> {
        self.methods.as_ref().map(|methods| methods.contains(&Method::GET))
    }

    /// Returns the method that a program should use.
    pub(super) fn method(&self) -> &Method {
        match &self.methods {
            Some(methods) if !methods.contains(&Method::GET) => methods.first().unwrap_or(&Method::GET),
            _ => &Method::GET,
        }
    }
}
