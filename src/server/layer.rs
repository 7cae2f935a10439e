//! The layer that makes services charge.

use std::sync::Arc;

use tower_layer::Layer;

use super::{builder::RequirePaymentLayerBuilder, config::Config, service::RequirePayment};

/// Makes a service charge for every request; see the [module](super) for an example.
///
/// Cheap to clone. Services made by one layer share its limits and know of each other's payments.
#[derive(Clone, Debug)]
pub struct RequirePaymentLayer {
    config: Arc<Config>,
}

impl RequirePaymentLayer {
    /// Starts to describe what is sold, for how much, and to whom the money goes.
    pub fn builder() -> RequirePaymentLayerBuilder {
        RequirePaymentLayerBuilder::default()
    }

    pub(super) fn new(config: Config) -> Self {
        Self { config: Arc::new(config) }
    }
}

impl<S> Layer<S> for RequirePaymentLayer {
    type Service = RequirePayment<S>;

    fn layer(&self, inner: S) -> Self::Service {
        RequirePayment::new(inner, self.config.clone())
    }
}
