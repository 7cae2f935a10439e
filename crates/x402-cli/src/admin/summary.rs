//! What the operator's page shows. The ledger is gone through in the background and at its own pace: however often the page asks, nothing
//! more is read.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use metrics_exporter_prometheus::PrometheusHandle;
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};
use tower_x402::{
    channels::Channels,
    facilitator::{Facilitator, NotReady, Readiness},
    ledger::LedgerError,
    ops::{ChannelReport, Operator, PeriodReport},
};

use super::{
    About,
    income::{HOURS, Income, Sample, samples},
};
use crate::{chain::Settlement, error::Sentence, node::LOW_TANK};

/// The pause before each page of the ledger: a million payments take some three minutes.
const PAUSE: Duration = Duration::from_millis(50);
/// The shortest time between two passes over the ledger. A long pass is followed by a rest of four times its length.
const REST: Duration = Duration::from_secs(5);
/// How often income is put into its hour, and readiness asked for, so that the metrics of both are up to date.
const INTERVAL: Duration = Duration::from_secs(10);

/// What the page shows, without what it takes from the ledger.
pub(super) struct Summary {
    pub(super) facilitator: Arc<dyn Facilitator>,
    pub(super) channels: Option<Channels>,
    pub(super) metrics: PrometheusHandle,
    about: About,
    started: u64,
    income: Mutex<Income>,
    books: Mutex<Value>,
}

impl Summary {
    /// Begins to gather what the page shows, for as long as the process runs.
    pub(super) fn gather(
        settlement: &Settlement,
        operator: &Operator,
        metrics: PrometheusHandle,
        about: About,
    ) -> Arc<Self> {
        let summary = Arc::new(Self {
            facilitator: settlement.facilitator.clone(),
            channels: settlement.channels.clone(),
            metrics,
            about,
            started: now(),
            income: Mutex::default(),
            books: Mutex::default(),
        });
        tokio::spawn(go_through(summary.clone(), operator.clone().pause(PAUSE)));
        let asking = summary.clone();
        tokio::spawn(async move {
            loop {
                asking.note_income();
                asking.not_ready().await;
                sleep(INTERVAL).await;
            }
        });
        summary
    }

    /// Returns why payments could not be settled, or channels not filled and claimed from, by scheme.
    pub(super) async fn not_ready(&self) -> Vec<Value> {
        let mut reasons = Vec::new();
        let mut add = |scheme: &str, readiness: Readiness| {
            let named =
                |reason: &NotReady| json!({ "scheme": scheme, "code": reason.code(), "detail": reason.to_string() });
            reasons.extend(readiness.reasons.iter().map(named));
        };
        add("exact", self.facilitator.readiness().await);
        if let Some(channels) = &self.channels {
            add("vouchers", channels.readiness().await);
        }
        reasons
    }

    /// Returns everything that the page shows.
    pub(super) async fn facts(&self) -> Value {
        let reasons = self.not_ready().await;
        let numbers = self.note_income();
        let mut requests: BTreeMap<String, f64> = BTreeMap::new();
        let mut count = |name, by: &[&str]| {
            for (mut labels, value) in samples(&numbers, name) {
                let by: Vec<_> = by.iter().filter_map(|label| labels.remove(*label)).collect();
                *requests.entry(by.join(" ")).or_default() += value;
            }
        };
        // A seller has outcomes, and whoever settles for others has endpoints.
        count("x402_requests_total", &["outcome"]);
        count("x402_facilitator_requests_total", &["endpoint", "status"]);
        let mut tanks: Vec<Sample> = samples(&numbers, "x402_gas_tank_wei").collect();
        tanks.sort_by(|(one, _), (other, _)| one.cmp(other));
        let now = now();
        json!({
            "now": now,
            "started": self.started,
            "hours": HOURS,
            "about": self.about.facts,
            "ready": reasons.is_empty(),
            "reasons": reasons,
            "routes": self.income(now),
            "requests": requests,
            "settling": samples(&numbers, "x402_settlement_backlog").map(|(_, payments)| payments).sum::<f64>(),
            "tanks": tanks.into_iter().map(tank).collect::<Vec<_>>(),
            "books": lock(&self.books).clone(),
        })
    }

    /// Returns each route with its price and its income by hour. A route that was removed stays as long as it has income.
    fn income(&self, now: u64) -> Vec<Value> {
        let income = lock(&self.income);
        let mut routes = Vec::new();
        let mut known = BTreeSet::new();
        let mut add = |label: &str, price: Option<String>| {
            if known.insert(label.to_owned()) {
                let hours: Vec<String> = income.by_hour(now, label).iter().map(u64::to_string).collect();
                routes.push(json!({ "route": label, "price": price, "hours": hours }));
            }
        };
        for (label, price) in (self.about.prices)() {
            add(&label, Some(price));
        }
        income.routes().for_each(|label| add(label, None));
        routes
    }

    /// Puts what was charged since the last time into its hour, and returns the metrics.
    fn note_income(&self) -> String {
        let numbers = self.metrics.render();
        let mut totals = BTreeMap::new();
        for (mut labels, units) in samples(&numbers, "x402_charged_units_total") {
            // Exact up to 2⁵³ units, nine billion dollars.
            *totals.entry(labels.remove("route").unwrap_or_default()).or_default() += units as u64;
        }
        lock(&self.income).update(now(), totals);
        numbers
    }
}

/// Goes through the ledger again and again.
async fn go_through(summary: Arc<Summary>, operator: Operator) {
    loop {
        let began = Instant::now();
        let read = async { Ok((operator.report().await?, operator.channel_report().await?)) };
        let books = books(read.await, began.elapsed());
        *lock(&summary.books) = books;
        sleep(REST.max(4 * began.elapsed())).await;
    }
}

/// Returns the sums of the ledger, and when they were made. What changed while it was gone through is in them or not.
fn books(read: Result<(PeriodReport, Vec<ChannelReport>), LedgerError>, took: Duration) -> Value {
    let (at, took) = (now(), took.as_secs_f64());
    match read {
        Ok((payments, channels)) => {
            json!({ "at": at, "took": took, "payments": payments.assets, "channels": channels })
        }
        Err(error) => json!({ "at": at, "took": took, "error": Sentence(&error).to_string() }),
    }
}

/// Returns a settlement key's gas.
fn tank((labels, wei): Sample) -> Value {
    json!({
        "account": labels.get("account"),
        "network": labels.get("network"),
        "ether": format!("{:.6}", wei / 1e18),
        "is_low": wei < LOW_TANK as f64,
    })
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_secs())
}

/// Locks what is replaced as a whole, so that a panic leaves it sound.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tank_is_low_before_it_is_empty() {
        let labels = BTreeMap::from([("account".to_owned(), "0xa".to_owned())]);
        let shown = |wei| tank((labels.clone(), wei));
        assert_eq!(shown(2e18), json!({ "account": "0xa", "network": null, "ether": "2.000000", "is_low": false }));
        assert_eq!(shown(1e14)["is_low"], true);
    }
}
