//! Tests of the layer that charges, over HTTP.

mod bad_clients;
mod bad_payments;
mod browser_page;
mod burst;
mod cannot_settle;
mod composition;
mod deferred;
mod deferred_on_chain;
mod exposure;
mod host;
mod http_semantics;
mod ledger_answers;
mod paid_request;
mod payment_identifier;
mod presented_again;
mod produced;
mod proxies;
mod same_nonce;
mod scripted;
mod status;
mod strangers;
mod v1;
mod voucher_attacks;
mod voucher_faults;
mod vouchers;
