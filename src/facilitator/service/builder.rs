//! Describes a facilitator service.

use std::{fmt, sync::Arc, time::Duration};

use alloy_primitives::Address;
use tokio::sync::Semaphore;

use super::{
    FacilitatorService, Shared,
    access::{Access, Rate},
};
use crate::{
    clock::{Clock, SystemClock},
    facilitator::{Facilitator, Window, flights::Flights},
    network::Asset,
};

/// Settings of a [`FacilitatorService`]; all have defaults.
#[must_use]
pub struct FacilitatorServiceBuilder {
    facilitators: Vec<Arc<dyn Facilitator>>,
    keys: Vec<String>,
    rate: Option<Rate>,
    assets: Vec<Asset>,
    payees: Vec<Address>,
    clock: Arc<dyn Clock>,
    window: Window,
    concurrent: usize,
}

impl FacilitatorServiceBuilder {
    pub(super) fn new(facilitator: Arc<dyn Facilitator>) -> Self {
        Self {
            facilitators: vec![facilitator],
            keys: Vec::new(),
            rate: None,
            assets: Vec::new(),
            payees: Vec::new(),
            clock: Arc::new(SystemClock),
            window: Window { remaining: 6, skew: 30 },
            concurrent: 1_024,
        }
    }

    /// Another facilitator, for another network.
    pub fn facilitator(mut self, facilitator: impl Facilitator) -> Self {
        self.facilitators.push(Arc::new(facilitator));
        self
    }

    /// A key that callers of `/verify` and `/settle` send as `Authorization: Bearer <key>`; further calls add further ones. Everybody
    /// may ask if none is set. Only its digest is kept.
    pub fn bearer_key(mut self, key: impl Into<String>) -> Self {
        self.keys.push(key.into());
        self
    }

    /// How many requests a caller may make: so many at once, and as many again, evenly, in every `period`. No bound if not set.
    pub fn rate(mut self, requests: u32, period: Duration) -> Self {
        let burst = f64::from(requests.max(1));
        self.rate = Some(Rate { per_second: burst / period.as_secs_f64().max(0.001), burst });
        self
    }

    /// A token that is served; further calls add further ones. Without any, USDC is, on every network where it is known: calling
    /// whatever contract a stranger names costs the settlement key's gas.
    pub fn asset(mut self, asset: Asset) -> Self {
        self.assets.push(asset);
        self
    }

    /// A payee that is served; further calls add further ones. Without any, all are.
    pub fn payee(mut self, payee: Address) -> Self {
        self.payees.push(payee);
        self
    }

    /// Where the time comes from; the machine's clock if not set.
    pub fn clock(mut self, clock: Arc<dyn Clock>) -> Self {
        self.clock = clock;
        self
    }

    /// In which window an authorization must be usable: 6 seconds must be left, and a clock may be 30 seconds ahead, if not set.
    pub fn window(mut self, window: Window) -> Self {
        self.window = window;
        self
    }

    /// How many requests are worked on at once; 1,024 if not set. More get 503.
    pub fn max_concurrent(mut self, requests: usize) -> Self {
        self.concurrent = requests;
        self
    }

    /// The service.
    pub fn build(self) -> FacilitatorService {
        let assets = self.assets.into_iter().map(|asset| (asset.network, asset.address)).collect();
        FacilitatorService {
            shared: Arc::new(Shared {
                facilitators: self.facilitators,
                access: Access::new(&self.keys, self.rate),
                clock: self.clock,
                window: self.window,
                assets,
                payees: self.payees,
                flights: Arc::new(Flights::default()),
                places: Semaphore::new(self.concurrent.min(Semaphore::MAX_PERMITS)),
                settle_patience: Duration::from_secs(15),
            }),
        }
    }
}

impl fmt::Debug for FacilitatorServiceBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FacilitatorServiceBuilder").field("keys", &self.keys.len()).finish_non_exhaustive()
    }
}
