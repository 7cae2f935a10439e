//! What is left to say when work panics.

use std::sync::Arc;

use http::StatusCode;

use super::{answer::Answer, purchase::Purchase, receipt::settlement_of};
use crate::{facilitator::Facilitator, payment::PaymentKey, protocol::Version};

/// Which payment is worked on, for the case that everything else that knows of it is gone.
pub(super) struct Witness {
    facilitator: Arc<dyn Facilitator>,
    key: PaymentKey,
    version: Version,
    payer: String,
}

impl Witness {
    pub(super) fn of(purchase: &Purchase) -> Self {
        let Purchase { facilitator, key, sale, .. } = purchase;
        Self { facilitator: facilitator.clone(), key: *key, version: sale.version, payer: sale.payer.clone() }
    }

    /// Whoever paid before the work panicked is told so: to pay anew would be to pay twice.
    pub(super) async fn crashed(self) -> Answer {
        let (status, code) = (StatusCode::INTERNAL_SERVER_ERROR, "internal_error");
        // Without the ledger there is less to say, and nothing else to do.
        let record = self.facilitator.ledger().get(&self.key).await.ok().flatten();
        match record.and_then(|record| record.settlement.paid_by().map(|transaction| (record, transaction))) {
            Some((record, transaction)) => {
                let detail =
                    "the work failed; it is paid for, and presenting the same payment again charges nothing more";
                Answer::problem(status, code, detail, Some(transaction))
                    .with_settlement(&settlement_of(&record, &self.payer, Ok(transaction)), self.version)
            }
            None => {
                let detail = "the work failed; however often the same payment is presented, it is charged once at most";
                Answer::problem(status, code, detail, None)
            }
        }
    }
}
