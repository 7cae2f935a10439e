//! Guides, each of which starts with a task and code that runs. Read [`charge`] or [`pay`] first.
//!
//! They are the files in `docs/guide` of the repository. The guides on the market are in the package `x402-market`.

// A guide names its links to other guides at its end, as files. Here they are modules: the first definition of a link counts.

/// Puts a price on a route.
///
/// [production]: production
/// [upto]: upto
/// [vouchers]: vouchers
#[doc = include_str!("../docs/guide/charge.md")]
pub mod charge {}

/// Lets a program pay for what it requests.
///
/// [charge]: charge
/// [upto]: upto
/// [vouchers]: vouchers
#[doc = include_str!("../docs/guide/pay.md")]
pub mod pay {}

/// Charges what a request turned out to cost, up to a price.
#[doc = include_str!("../docs/guide/upto.md")]
pub mod upto {}

/// Takes many small payments for one deposit and one claim.
///
/// [charge]: charge
/// [pay]: pay
/// [what-happens-when]: what_happens_when
#[doc = include_str!("../docs/guide/vouchers.md")]
pub mod vouchers {}

/// Proxies, ledger, keys, gas, batches, credit, several processes, shutdown, and what to watch.
///
/// [cors]: charge#order-of-layers
/// [pay]: pay
/// [what-happens-when]: what_happens_when
/// [vouchers]: vouchers
#[doc = include_str!("../docs/guide/production.md")]
pub mod production {}

/// Lets somebody else verify and settle, or does it for others.
///
/// [charge]: charge
/// [production]: production
/// [vouchers]: vouchers
#[doc = include_str!("../docs/guide/remote.md")]
pub mod remote {}

/// Crashes, timeouts, reorganizations, double payments, refunds, lost answers and stolen headers.
///
/// [charge]: charge
/// [pay]: pay
/// [production]: production
/// [remote]: remote
/// [vouchers]: vouchers
#[doc = include_str!("../docs/guide/what-happens-when.md")]
pub mod what_happens_when {}
