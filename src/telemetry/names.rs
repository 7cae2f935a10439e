//! The names of everything that is counted, and what they mean.

/// A number that the library reports while the feature `metrics` is on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Metric {
    /// Its name, as Prometheus would have it.
    pub name: &'static str,
    /// How it behaves.
    pub kind: MetricKind,
    /// What it counts in.
    pub unit: &'static str,
    /// The labels it has, all of which take few values.
    pub labels: &'static [&'static str],
    /// What it means.
    pub meaning: &'static str,
}

/// How a [`Metric`] behaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MetricKind {
    /// Only grows.
    Counter,
    /// Goes up and down.
    Gauge,
    /// A distribution; how many there were and their sum come with it.
    Histogram,
}

/// Declares each metric once: its name for those who report it, and its entry in the list.
macro_rules! metrics {
    ($($name:ident = $kind:ident $text:literal $unit:literal $labels:tt $meaning:literal;)*) => {
        $(#[allow(dead_code, reason = "who reports it depends on the features")] pub(crate) const $name: &str = $text;)*

        /// Everything that is reported. The [module](crate::ops) has it as a table.
        pub const METRICS: &[Metric] = &[$(Metric {
            name: $text, kind: MetricKind::$kind, unit: $unit, labels: &$labels, meaning: $meaning,
        }),*];
    };
}

metrics! {
    REQUESTS = Counter "x402_requests_total" "requests" ["outcome"] "requests to what is charged for, by how they ended";
    SERVED = Counter "x402_facilitator_requests_total" "requests" ["endpoint", "status"]
        "requests to a facilitator service: `verify`, `settle`, `supported`, `discovery`, `healthz` or `other`, by HTTP status";
    VERIFICATION = Histogram "x402_verification_duration_seconds" "seconds" ["network", "result"]
        "verifications: `valid`, `invalid` or `unavailable`";
    SETTLEMENT = Histogram "x402_settlement_duration_seconds" "seconds" ["network", "result"]
        "settlements, from accepted to told: `settled`, `credited`, `failed`, `unknown` or `unavailable`";
    TRANSACTION = Histogram "x402_transaction_duration_seconds" "seconds" ["network"]
        "transactions of the settlement keys, from sent to included";
    TRANSACTIONS = Counter "x402_transactions_total" "transactions" ["network", "result"]
        "transactions of the settlement keys in blocks: `succeeded` or `reverted`";
    PAYMENTS = Histogram "x402_payments_per_transaction" "payments" ["network"]
        "how many payments a transaction was to settle";
    GAS = Counter "x402_gas_used_total" "gas" ["network"] "gas that these transactions used";
    FEES = Counter "x402_fees_wei_total" "wei" ["network"] "what they cost, data availability included";
    LOSSES = Counter "x402_losses_total" "payments" ["network"]
        "payments whose fee exceeded their amount, where the native price is known";
    REPLACEMENTS = Counter "x402_transaction_replacements_total" "transactions" ["network", "cause"]
        "transactions sent anew at their nonce for a better price: since prices rose (`price`), or since no block took them (`stuck`)";
    GAPS = Counter "x402_nonce_gaps_filled_total" "transactions" ["network"] "transfers of nothing that filled a gap in the nonces";
    UNDONE = Counter "x402_settlements_undone_total" "payments" ["network"] "settlements that a reorganization undid";
    IN_FLIGHT = Gauge "x402_transactions_in_flight" "transactions" [] "nonces in use, of all settlement keys";
    BACKLOG = Gauge "x402_settlement_backlog" "payments" [] "payments that are being settled or wait for it";
    TANK = Gauge "x402_gas_tank_wei" "wei" ["network", "account"] "what a settlement key had for gas when last looked";
    READY = Gauge "x402_ready" "1 or 0" ["network"] "whether the facilitator was ready when last asked";
    LEDGER = Histogram "x402_ledger_operation_duration_seconds" "seconds" ["operation"] "calls of the ledger";
    LEDGER_ERRORS = Counter "x402_ledger_errors_total" "calls" ["operation"] "calls that the store behind the ledger failed";
    COMMITS = Histogram "x402_ledger_commit_duration_seconds" "seconds" [] "transactions of the SQLite ledger, each an `fsync`";
    RESPONSES = Gauge "x402_responses_stored_bytes" "bytes" [] "responses kept for replays, in memory or SQLite";
    OWED = Gauge "x402_owed_payments" "payments" ["network", "asset"] "paid and not answered, by the last report of an `Operator`";
    DEFERRED = Gauge "x402_deferred_outstanding_units" "atomic units" ["network", "asset"]
        "answered and not paid, by the last report of an `Operator`";
}

/// Tells the recorder what everything means, for those that show it. Call it once, after the recorder was installed.
#[cfg(feature = "metrics")]
pub fn describe_metrics() {
    for metric in METRICS {
        let meaning = format!("{} ({})", metric.meaning, metric.unit);
        match metric.kind {
            MetricKind::Counter => ::metrics::describe_counter!(metric.name, meaning),
            MetricKind::Gauge => ::metrics::describe_gauge!(metric.name, meaning),
            MetricKind::Histogram => ::metrics::describe_histogram!(metric.name, meaning),
        }
    }
}
