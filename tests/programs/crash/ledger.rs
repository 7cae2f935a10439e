//! A ledger with a point before, within and after every call.

use std::{future::Future, sync::Arc};

use support::around_ledger::{Around, Call};
use tower_x402::ledger::LedgerError;

use super::points::Points;

/// Names each point after the method, and those of steps after the variant.
pub(crate) struct Watched(pub(crate) Arc<Points>);

impl Around for Watched {
    async fn around<T: Send>(
        &self,
        call: Call<'_>,
        work: impl Future<Output = Result<T, LedgerError>> + Send,
    ) -> Result<T, LedgerError> {
        self.0.around(&format!("ledger {}", call.name()), work).await
    }
}
