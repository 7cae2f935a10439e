//! A layer as it was built.

use std::sync::Arc;

use http::response;

use super::{offer::Catalogue, page::BrowserPage};
use crate::{
    channels::Channels,
    charge::{Rules, Seller},
    upload::EvictingSemaphore,
};

/// A layer as it was built, shared by all its services.
pub(super) struct Config {
    pub(super) catalogue: Catalogue,
    pub(super) settings: Settings,
    pub(super) seller: Arc<Seller>,
    /// Permits for requests that are read to be priced.
    pub(super) unpriced: Arc<EvictingSemaphore>,
}

debug_fields!(Config |this| {
    catalogue: this.catalogue,
    facilitators: this.seller.facilitators,
    limits: this.settings.rules.limits,
});

/// Settings that are used as they were set. A new one needs a field here, a default, and a setter in `builder.rs`.
pub(super) struct Settings {
    pub(super) rules: Rules,
    pub(super) success: Option<Classifier>,
    /// The name under which what is charged is counted.
    pub(super) route: Arc<str>,
    pub(super) answer_preflights: bool,
    /// The page for browsers; `None` if they get what programs get.
    pub(super) page: Option<BrowserPage>,
    /// The channels whose vouchers are taken beside `exact`.
    pub(super) channels: Option<Channels>,
    /// Whether `exact` is offered and taken.
    pub(super) takes_exact: bool,
}

pub(super) type Classifier = Box<dyn Fn(&response::Parts) -> bool + Send + Sync>;

impl Settings {
    /// Returns `true` if a response is charged for.
    pub(super) fn is_success(&self, response: &response::Parts) -> bool {
        match &self.success {
            Some(is_success) => is_success(response),
            None => response.status.is_success(),
        }
    }
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            rules: Rules::default(),
            success: None,
            route: Arc::default(),
            answer_preflights: false,
            page: Some(BrowserPage::new()),
            channels: None,
            takes_exact: true,
        }
    }
}
