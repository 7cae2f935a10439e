//! Names, units and meanings of all metrics.

/// A metric that the library reports if the feature `metrics` is enabled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Metric {
    /// The name, by the conventions of Prometheus.
    pub name: &'static str,
    /// The kind.
    pub kind: MetricKind,
    /// The unit.
    pub unit: &'static str,
    /// The labels, each of which has few values.
    pub labels: &'static [&'static str],
    /// The meaning.
    pub meaning: &'static str,
}

/// The kind of a [`Metric`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum MetricKind {
    /// A number that only increases.
    Counter,
    /// A number that increases and decreases.
    Gauge,
    /// A distribution, with count and sum.
    Histogram,
}

/// Declares each metric once: a constant with its name, and its entry in [`METRICS`].
macro_rules! metrics {
    ($($name:ident = $kind:ident $text:literal $unit:literal $labels:tt $meaning:literal;)*) => {
        $(#[allow(dead_code, reason = "some are reported with other features")] pub(crate) const $name: &str = $text;)*

        /// All metrics. The [module](crate::ops) has them as a table.
        pub const METRICS: &[Metric] = &[$(Metric {
            name: $text, kind: MetricKind::$kind, unit: $unit, labels: &$labels, meaning: $meaning,
        }),*];
    };
}

metrics! {
    REQUESTS = Counter "x402_requests_total" "requests" ["outcome"]
        "requests to charged routes, and with a payment to a `charge::Seller`, by outcome";
    CHARGED = Counter "x402_charged_units_total" "atomic units" ["network", "asset", "route"]
        "what was charged for responses that left, by the route's label in its layer or the seller's name; what is settled later is in it";
    SERVED = Counter "x402_facilitator_requests_total" "requests" ["endpoint", "status"]
        "requests to a facilitator service: `verify`, `settle`, `supported`, `discovery`, `healthz` or `other`, by HTTP status";
    VERIFICATION = Histogram "x402_verification_duration_seconds" "seconds" ["network", "result"]
        "verifications: `valid`, `invalid` or `unavailable`";
    SETTLEMENT = Histogram "x402_settlement_duration_seconds" "seconds" ["network", "result"]
        "settlements, from request to answer: `settled`, `credited`, `failed`, `unknown` or `unavailable`";
    TRANSACTION = Histogram "x402_transaction_duration_seconds" "seconds" ["network"]
        "transactions of the settlement keys, from broadcast to inclusion";
    TRANSACTIONS = Counter "x402_transactions_total" "transactions" ["network", "result"]
        "transactions of the settlement keys in blocks: `succeeded` or `reverted`";
    PAYMENTS = Histogram "x402_payments_per_transaction" "payments" ["network"]
        "payments that a transaction was sent to settle";
    GAS = Counter "x402_gas_used_total" "gas" ["network"] "gas used by these transactions";
    FEES = Counter "x402_fees_wei_total" "wei" ["network"] "cost of these transactions, data availability included";
    LOSSES = Counter "x402_losses_total" "payments" ["network"]
        "payments whose fee exceeded their amount, if the native price is configured";
    REPLACEMENTS = Counter "x402_transaction_replacements_total" "transactions" ["network", "cause"]
        "transactions replaced at a higher fee: because prices rose (`price`), or because no block included them (`stuck`)";
    GAPS = Counter "x402_nonce_gaps_filled_total" "transactions" ["network"] "empty transfers that filled a gap in account nonces";
    UNDONE = Counter "x402_settlements_undone_total" "payments" ["network"] "settlements removed by a reorganization";
    IN_FLIGHT = Gauge "x402_transactions_in_flight" "transactions" [] "account nonces in use, of all settlement keys";
    BACKLOG = Gauge "x402_settlement_backlog" "payments" [] "payments that are being settled or are queued";
    TANK = Gauge "x402_gas_tank_wei" "wei" ["network", "account"] "gas balance of a settlement key, when last read";
    READY = Gauge "x402_ready" "1 or 0" ["network"] "1 if the facilitator was ready when last asked";
    LEDGER = Histogram "x402_ledger_operation_duration_seconds" "seconds" ["operation"] "calls of the ledger";
    LEDGER_ERRORS = Counter "x402_ledger_errors_total" "calls" ["operation"] "calls of the ledger that its store failed";
    COMMITS = Histogram "x402_ledger_commit_duration_seconds" "seconds" [] "transactions of the SQLite ledger, one `fsync` each";
    RESPONSES = Gauge "x402_responses_stored_bytes" "bytes" [] "responses stored for idempotent retries, in memory or SQLite";
    OWED = Gauge "x402_owed_payments" "payments" ["network", "asset"] "settled and not delivered whole, by the last report of an `Operator`";
    DEFERRED = Gauge "x402_deferred_outstanding_units" "atomic units" ["network", "asset"]
        "delivered and not settled, by the last report of an `Operator`";
    VOUCHER_REQUESTS = Counter "x402_voucher_requests_total" "requests" ["outcome"]
        "the requests among `x402_requests_total` that came with a payment by voucher, by outcome";
    CHANNEL_ACTIONS = Counter "x402_channel_actions_total" "actions" ["network", "action", "result"]
        "`deposit`, `claim`, `settle` (the transfer of what was claimed) and `refund`: `executed` (one per transaction), `rejected`, `pending` or `unavailable`";
    CLAIMS = Counter "x402_claims_total" "claims" ["network", "result"]
        "channels in claims: `claimed`, or `refused` because the contract would refuse them";
    CHANNELS_OPEN = Gauge "x402_channels_open" "channels" ["network", "asset"]
        "payment channels in the ledger with something in escrow that is not claimed, when the ledger was last gone through";
    CHANNELS_UNCLAIMED = Gauge "x402_channels_unclaimed_units" "atomic units" ["network", "asset"] "charged and not claimed, at that time";
    CHANNELS_AT_RISK = Gauge "x402_channels_at_risk_units" "atomic units" ["network", "asset"]
        "the part of it that a withdrawal could take, or that the escrow does not hold";
    CHANNELS_OLDEST = Gauge "x402_channels_oldest_unclaimed_seconds" "seconds" ["network", "asset"]
        "the age of the oldest charge that is not claimed, at that time";
    CHANNELS_READY = Gauge "x402_channels_ready" "1 or 0" ["network"] "1 if `Channels` were ready when last asked";
}

/// Gives the recorder the meaning and unit of every metric. Call it once, after the recorder was installed.
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
