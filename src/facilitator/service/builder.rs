//! Describes a facilitator service.

use std::{fmt, sync::Arc, time::Duration};

use alloy_primitives::Address;
use tokio::sync::Semaphore;

use super::{
    FacilitatorService, Shared,
    access::Access,
    catalogue::{Catalogue, Limits},
    rate::RateLimit,
};
use crate::{
    clock::{Clock, SystemClock},
    facilitator::{Facilitator, single_flight::SingleFlight},
    network::Asset,
    payment::Window,
};

/// Settings of a [`FacilitatorService`]; all have defaults.
#[must_use]
pub struct FacilitatorServiceBuilder {
    facilitators: Vec<Arc<dyn Facilitator>>,
    keys: Vec<String>,
    rate: Option<RateLimit>,
    assets: Vec<Asset>,
    payees: Vec<Address>,
    clock: Arc<dyn Clock>,
    window: Window,
    concurrent: usize,
    catalogue: Option<Limits>,
    local_hosts: bool,
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
            catalogue: None,
            local_hosts: false,
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
        self.rate = Some(RateLimit::new(burst / period.as_secs_f64().max(0.001), burst));
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

    /// Lists at `GET /discovery/resources` what was paid for here, if the payment came with the extension
    /// [`bazaar`](crate::protocol::bazaar), in the form of the specification: so many resources at most, each until nothing was paid
    /// for it for `max_age`; the one that was not paid for longest makes room. It is off if not set, and kept in memory only.
    ///
    /// A resource is entered when its payment is settled, by whoever pays: URL and description come through the payer's hands, and
    /// who pays itself can enter what it likes. So nothing is fetched, and nothing is shown but `http` and `https` URLs of public host
    /// names, without query, and a description within bounds that is as its schema has it. Readers should believe the 402 of
    /// the resource and not the list. The query takes `type`, `payTo`, `scheme`, `network`, `extensions`, `limit` (20, at most 100)
    /// and `offset`.
    pub fn catalogue(mut self, resources: usize, max_age: Duration) -> Self {
        self.catalogue = Some(Limits { resources, max_age, local_hosts: false });
        self
    }

    /// Lists resources on addresses and local names, too: for networks of one's own.
    pub fn catalogue_local_hosts(mut self, list: bool) -> Self {
        self.local_hosts = list;
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
                flights: Arc::new(SingleFlight::default()),
                places: Semaphore::new(self.concurrent.min(Semaphore::MAX_PERMITS)),
                settle_patience: Duration::from_secs(15),
                catalogue: self
                    .catalogue
                    .map(|limits| Catalogue::new(Limits { local_hosts: self.local_hosts, ..limits })),
            }),
        }
    }
}

impl fmt::Debug for FacilitatorServiceBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FacilitatorServiceBuilder").field("keys", &self.keys.len()).finish_non_exhaustive()
    }
}
