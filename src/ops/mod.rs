//! Operating a service that charges: metrics, spans, readiness, and questions to the ledger.
//!
//! # Metrics
//!
//! With the feature `metrics`, the library reports to the recorder of the crate [`metrics`](https://docs.rs/metrics) that the program
//! installs. Install it for the whole process (`metrics::set_global_recorder`) before you build anything of this crate, because the
//! SQLite ledger reports from a thread of its own. `describe_metrics` gives the recorder units and descriptions.
//!
//! No label holds anything that a payer chooses: `account` is the address of a settlement key, `network` and `asset` are those you are
//! paid in, and `route` is the layer's [`route_label`](crate::server::RequirePaymentLayerBuilder::route_label), or the name of the
//! [`charge::Seller`](crate::charge::Seller).
//!
//! | name | type | unit | labels | meaning |
//! |---|---|---|---|---|
//! | `x402_requests_total` | counter | requests | outcome | requests to charged routes, and with a payment to a `charge::Seller`, by outcome |
//! | `x402_charged_units_total` | counter | atomic units | network, asset, route | what was charged for responses that left, by the route's label in its layer or the seller's name; what is settled later is in it |
//! | `x402_facilitator_requests_total` | counter | requests | endpoint, status | requests to a facilitator service: `verify`, `settle`, `supported`, `discovery`, `healthz` or `other`, by HTTP status |
//! | `x402_verification_duration_seconds` | histogram | seconds | network, result | verifications: `valid`, `invalid` or `unavailable` |
//! | `x402_settlement_duration_seconds` | histogram | seconds | network, result | settlements, from request to answer: `settled`, `credited`, `failed`, `unknown` or `unavailable` |
//! | `x402_transaction_duration_seconds` | histogram | seconds | network | transactions of the settlement keys, from broadcast to inclusion |
//! | `x402_transactions_total` | counter | transactions | network, result | transactions of the settlement keys in blocks: `succeeded` or `reverted` |
//! | `x402_payments_per_transaction` | histogram | payments | network | payments that a transaction was sent to settle |
//! | `x402_gas_used_total` | counter | gas | network | gas used by these transactions |
//! | `x402_fees_wei_total` | counter | wei | network | cost of these transactions, data availability included |
//! | `x402_losses_total` | counter | payments | network | payments whose fee exceeded their amount, if the native price is configured |
//! | `x402_transaction_replacements_total` | counter | transactions | network, cause | transactions replaced at a higher fee: because prices rose (`price`), or because no block included them (`stuck`) |
//! | `x402_nonce_gaps_filled_total` | counter | transactions | network | empty transfers that filled a gap in account nonces |
//! | `x402_settlements_undone_total` | counter | payments | network | settlements removed by a reorganization |
//! | `x402_transactions_in_flight` | gauge | transactions | | account nonces in use, of all settlement keys |
//! | `x402_settlement_backlog` | gauge | payments | | payments that are being settled or are queued |
//! | `x402_gas_tank_wei` | gauge | wei | network, account | gas balance of a settlement key, when last read |
//! | `x402_ready` | gauge | 1 or 0 | network | 1 if the facilitator was ready when last asked |
//! | `x402_ledger_operation_duration_seconds` | histogram | seconds | operation | calls of the ledger |
//! | `x402_ledger_errors_total` | counter | calls | operation | calls of the ledger that its store failed |
//! | `x402_ledger_commit_duration_seconds` | histogram | seconds | | transactions of the SQLite ledger, one `fsync` each |
//! | `x402_responses_stored_bytes` | gauge | bytes | | responses stored for idempotent retries, in memory or SQLite |
//! | `x402_owed_payments` | gauge | payments | network, asset | settled and not delivered whole, by the last report of an `Operator` |
//! | `x402_deferred_outstanding_units` | gauge | atomic units | network, asset | delivered and not settled, by the last report of an `Operator` |
//! | `x402_voucher_requests_total` | counter | requests | outcome | the requests among `x402_requests_total` that came with a payment by voucher, by outcome |
//! | `x402_channel_actions_total` | counter | actions | network, action, result | `deposit`, `claim`, `settle` (the transfer of what was claimed) and `refund`: `executed` (one per transaction), `rejected`, `pending` or `unavailable` |
//! | `x402_claims_total` | counter | claims | network, result | channels in claims: `claimed`, or `refused` because the contract would refuse them |
//! | `x402_channels_open` | gauge | channels | network, asset | payment channels in the ledger with something in escrow that is not claimed, when the ledger was last gone through |
//! | `x402_channels_unclaimed_units` | gauge | atomic units | network, asset | charged and not claimed, at that time |
//! | `x402_channels_at_risk_units` | gauge | atomic units | network, asset | the part of it that a withdrawal could take, or that the escrow does not hold |
//! | `x402_channels_oldest_unclaimed_seconds` | gauge | seconds | network, asset | the age of the oldest charge that is not claimed, at that time |
//! | `x402_channels_ready` | gauge | 1 or 0 | network | 1 if `Channels` were ready when last asked |
//!
//! The outcomes of a request:
//!
//! | outcome | answer |
//! |---|---|
//! | `free` | the response of the handler, which is free |
//! | `unpaid` | 402: the request has no payment |
//! | `rejected` | 402: the payment is invalid, matches no offer, or was not settled |
//! | `malformed` | 400, 408 or 413 |
//! | `conflict` | 409 |
//! | `pending` | 503: the outcome of the payment is not known yet |
//! | `unavailable` | 503: the payment could not be processed now |
//! | `failed` | 500 or 504: the handler failed or exceeded its deadline |
//! | `unsuccessful` | the response of the handler, which is no success |
//! | `paid`, `deferred` | the response of the handler, settled or to be settled later |
//! | `replayed` | the stored response, to an idempotent retry |
//!
//! # Spans
//!
//! A request with a payment has the span `payment`, with `network`, `asset`, `payer`, `nonce`,
//! `amount` (atomic units) and, once known, `transaction` and `status`. By voucher the transaction is that of a deposit, or of a refund; a
//! charge has none. The handler runs in it. So does the span `settle`
//! of its settlement, with `network`, `payer`, `nonce` and `transaction`. All payments of a batch have the same transaction.
//! No span holds signatures, keys or bodies.
//!
//! # Readiness
//!
//! [`Facilitator::readiness`](crate::facilitator::Facilitator::readiness) returns whether a payment could be settled now, and
//! if not, why. Use it for the health check of a load balancer. `Channels::readiness` does the same for payment channels: whether deposits
//! and claims could be made now.
//!
//! # Questions to the ledger
//!
//! An [`Operator`] lists and finds payments, reconciles one with the chain, sums them up, and exports them for accounting. `owed`
//! lists payments that settled but were not delivered whole, to be refunded. With [`Operator::channel_ledger`] it does the same for payment
//! channels: `at-risk` lists those of which a withdrawal could take what was charged. Claim them.
//!
//! The program decides who may ask. The answers hold no signatures and no bodies, but who paid whom.

mod channels;
mod export;
mod operator;
mod report;

pub use channels::{
    CHANNEL_COLUMNS, ChannelExport, ChannelFilter, ChannelPages, ChannelReport, ChannelSummary, ParseChannelFilterError,
};
pub use export::{COLUMNS, Export, ExportEntry, ExportFormat};
pub use operator::{
    Operator, OperatorError, ParsePaymentFilterError, ParsePaymentSearchError, PaymentFilter, PaymentPages,
    PaymentSearch,
};
pub use report::{AssetReport, PaymentSum, PeriodReport};

#[cfg(feature = "metrics")]
pub use crate::telemetry::names::describe_metrics;
pub use crate::{
    telemetry::names::{METRICS, Metric, MetricKind},
    usdc::in_usdc,
};
