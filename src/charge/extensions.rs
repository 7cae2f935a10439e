//! The extensions of a payment: whether they are echoed as they were offered, and how the payer names its payment.

use alloy_primitives::B256;
use serde_json::{Map, Value};

use super::Refusal;
use crate::{
    payment::Rejection,
    protocol::{PaymentId, Reason, Verbatim, extensions::altered},
};

/// Extensions as they were written.
pub(crate) type Extensions<'a> = Option<&'a Verbatim<Map<String, Value>>>;

/// Returns the digest of the payment identifier in these extensions. Only a layer that offers identifiers refuses malformed ones: to others
/// they mean nothing.
pub(crate) fn payment_id(extensions: Extensions<'_>, asks_for_ids: bool) -> Result<Option<B256>, Refusal> {
    let Some(extensions) = extensions else { return Ok(None) };
    let extensions = extensions.read().map_err(|error| format!("the extensions cannot be read: {error}"));
    match extensions.and_then(|extensions| PaymentId::of(&extensions).map_err(|error| error.to_string())) {
        Ok(id) => Ok(id.map(|id| id.digest())),
        Err(detail) if asks_for_ids => Err(Refusal::malformed(Reason::InvalidPayload, detail)),
        Err(_) => Ok(None),
    }
}

/// Refuses extensions that are not echoed as they were offered.
pub(crate) fn check_extensions(echoed: Extensions<'_>, offered: Extensions<'_>) -> Result<(), Rejection> {
    if echoed == offered {
        return Ok(());
    }
    let (Some(echoed), Some(offers)) = (echoed, offered) else { return Ok(()) };
    let mismatch = |detail| Err(Rejection::new(Reason::ExtensionEchoMismatch, detail));
    let (Ok(echoed), Ok(offers)) = (echoed.read(), offers.read()) else {
        return mismatch("the extensions cannot be read".to_owned());
    };
    match altered(&offers, &echoed) {
        Some(name) => mismatch(format!("the extension {name:?} is not echoed as it was offered")),
        None => Ok(()),
    }
}
