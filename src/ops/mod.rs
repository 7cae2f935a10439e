//! Running a service that charges: what to watch, what to ask, what to hand to accounting.
//!
//! # Numbers
//!
//! With the feature `metrics` the library reports to whatever recorder of the facade [`metrics`](https://docs.rs/metrics) the
//! program installs, before it builds anything of this crate; `describe_metrics` explains the numbers to it. Install it for the
//! whole process (`metrics::set_global_recorder`): the SQLite ledger reports its commits from a thread of its own, and a recorder
//! that is installed for a single thread does not hear of them. Without the feature, or without a recorder, nothing is counted. No
//! label holds anything that a payer chooses: `account` is the address of a settlement key, `network` and `asset` are those you are
//! paid in.
//!
//! | name | type | unit | labels | meaning |
//! |---|---|---|---|---|
//! | `x402_requests_total` | counter | requests | outcome | requests to what is charged for, by how they ended |
//! | `x402_facilitator_requests_total` | counter | requests | endpoint, status | requests to a facilitator service: `verify`, `settle`, `supported`, `discovery`, `healthz` or `other`, by HTTP status |
//! | `x402_verification_duration_seconds` | histogram | seconds | network, result | verifications: `valid`, `invalid` or `unavailable` |
//! | `x402_settlement_duration_seconds` | histogram | seconds | network, result | settlements, from accepted to told: `settled`, `credited`, `failed`, `unknown` or `unavailable` |
//! | `x402_transaction_duration_seconds` | histogram | seconds | network | transactions of the settlement keys, from sent to included |
//! | `x402_transactions_total` | counter | transactions | network, result | transactions of the settlement keys in blocks: `succeeded` or `reverted` |
//! | `x402_payments_per_transaction` | histogram | payments | network | how many payments a transaction was to settle |
//! | `x402_gas_used_total` | counter | gas | network | gas that these transactions used |
//! | `x402_fees_wei_total` | counter | wei | network | what they cost, data availability included |
//! | `x402_losses_total` | counter | payments | network | payments whose fee exceeded their amount, where the native price is known |
//! | `x402_transaction_replacements_total` | counter | transactions | network, cause | transactions sent anew at their nonce for a better price: since prices rose (`price`), or since no block took them (`stuck`) |
//! | `x402_nonce_gaps_filled_total` | counter | transactions | network | transfers of nothing that filled a gap in the nonces |
//! | `x402_settlements_undone_total` | counter | payments | network | settlements that a reorganization undid |
//! | `x402_transactions_in_flight` | gauge | transactions | | nonces in use, of all settlement keys |
//! | `x402_settlement_backlog` | gauge | payments | | payments that are being settled or wait for it |
//! | `x402_gas_tank_wei` | gauge | wei | network, account | what a settlement key had for gas when last looked |
//! | `x402_ready` | gauge | 1 or 0 | network | whether the facilitator was ready when last asked |
//! | `x402_ledger_operation_duration_seconds` | histogram | seconds | operation | calls of the ledger |
//! | `x402_ledger_errors_total` | counter | calls | operation | calls that the store behind the ledger failed |
//! | `x402_ledger_commit_duration_seconds` | histogram | seconds | | transactions of the SQLite ledger, each an `fsync` |
//! | `x402_responses_stored_bytes` | gauge | bytes | | responses kept for replays, in memory or SQLite |
//! | `x402_owed_payments` | gauge | payments | network, asset | paid and not answered, by the last report of an `Operator` |
//! | `x402_deferred_outstanding_units` | gauge | atomic units | network, asset | answered and not paid, by the last report of an `Operator` |
//!
//! The outcomes of a request:
//!
//! | outcome | what was answered |
//! |---|---|
//! | `free` | what the handler says, without a price |
//! | `unpaid` | 402, without a payment |
//! | `rejected` | 402: the payment is not good, not on offer, or was not settled |
//! | `malformed` | 400, 408 or 413 |
//! | `conflict` | 409 |
//! | `pending` | 503: whether the money moved is not known yet |
//! | `unavailable` | 503: nothing could be done now |
//! | `failed` | 500 or 504: the handler failed or was too slow |
//! | `unsuccessful` | what the handler says, which is not a success |
//! | `paid`, `deferred` | the handler's success, settled or left to be settled later |
//! | `replayed` | the same again |
//!
//! # Spans
//!
//! A request with a payment has a span `payment`, with `network`, `asset`, `payer`, `nonce`,
//! `amount` (atomic units) and, once known, `transaction` and `status`. The handler runs in it, and so does the span `settle`
//! of its settlement, with `network`, `payer`, `nonce` and `transaction`: what a payment in a batch has in common with the others is
//! the transaction. Signatures, keys and bodies are in neither.
//!
//! # Readiness
//!
//! [`Facilitator::readiness`](crate::facilitator::Facilitator::readiness) says whether a payment could be settled now, and if
//! not, why: for a load balancer's check.
//!
//! # Questions
//!
//! An [`Operator`] lists and finds payments, asks the chain about one at once, sums them up, and exports them. It says what is
//! **owed**: paid for, and neither answered nor to be had by presenting the payment again. Who may ask is for the program to
//! decide: what is told holds no signatures and no bodies, but who paid whom.

mod export;
mod operator;
mod report;
mod search;

pub use export::{COLUMNS, Entry, Export, ExportFormat};
pub use operator::{Operator, OperatorError, ParseWhichError, Payments, Which};
pub use report::{AssetReport, Report, Sum};
pub use search::{ParseSearchError, Search};

#[cfg(feature = "metrics")]
pub use crate::telemetry::names::describe_metrics;
pub use crate::{
    telemetry::names::{METRICS, Metric, MetricKind},
    usdc::in_usdc,
};
