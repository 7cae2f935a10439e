//! Which payment a request is sent with: the one that was signed for it before, or a new one.

use alloy_primitives::B256;
use tokio::sync::OwnedMutexGuard;

use super::{
    Payer, PaymentError, Purchase, Refusal, SignedPayment,
    challenge::Challenge,
    purchase::{Identity, Kept, Kind},
    wallet::Asked,
};

/// The payment of a request that is under way. When this is dropped, also because the caller was cancelled, the payment goes to where the
/// next request of the same purchase finds it.
pub(super) struct HeldPayment<'a> {
    payer: &'a Payer,
    home: Home,
    kept: Option<Kept>,
    /// The seller is done with the request.
    is_answered: bool,
}

/// Where a payment is kept.
enum Home {
    /// Nowhere, unless its answer is lost.
    Lost,
    Purchase(OwnedMutexGuard<Option<Kept>>),
    Journal(B256, #[expect(dead_code, reason = "others wait for it")] OwnedMutexGuard<()>),
}

impl<'a> HeldPayment<'a> {
    /// Returns the place for a payment of a request without a purchase.
    pub(super) const fn none(payer: &'a Payer) -> Self {
        Self { payer, home: Home::Lost, kept: None, is_answered: false }
    }

    /// Waits until no other request uses the purchase, and returns its payment if there is one.
    pub(super) async fn of(payer: &'a Payer, purchase: Purchase, identity: Identity) -> Result<Self, PaymentError> {
        let journal = payer.budget().journal();
        let mut held = Self::none(payer);
        held.is_answered = true;
        match purchase.0 {
            Kind::Unnamed(slot) => {
                let mut slot = slot.lock_owned().await;
                held.kept = slot.take();
                held.home = Home::Purchase(slot);
            }
            Kind::Named(key) => {
                held.home = Home::Journal(key, journal.lock_purchase(key).await);
                held.kept = payer.purchases().take_voucher(key);
                if let Some((entry, is_paid)) = journal.purchase(key) {
                    let mut identity = identity;
                    identity.request = entry.request.unwrap_or(identity.request);
                    let payment = payer.present_again(entry, is_paid)?;
                    held.kept = Some(Kept { identity, payment });
                }
            }
        }
        let Some(kept) = &mut held.kept else { return Ok(held) };
        if kept.identity.request != identity.request {
            return Err(Refusal::OtherRequest.into());
        }
        if !held.payer.resume(&mut kept.payment) {
            held.kept = None;
        }
        Ok(held)
    }

    pub(super) fn payment(&mut self) -> Option<&mut SignedPayment> {
        self.kept.as_mut().map(|kept| &mut kept.payment)
    }

    /// Takes the payment of an identical request whose answer was lost, or signs one.
    pub(super) async fn find_or_sign(
        &mut self,
        challenge: Challenge,
        asked: Asked<'_>,
        identity: Identity,
    ) -> Result<(), PaymentError> {
        let key = match self.home {
            Home::Journal(key, _) => Some(key),
            Home::Lost | Home::Purchase(_) => None,
        };
        if matches!(self.home, Home::Lost)
            && let Some(mut kept) = self.payer.purchases().take_lost(&identity, self.payer.now())
            && self.payer.resume(&mut kept.payment)
        {
            self.kept = Some(kept);
            return Ok(());
        }
        let asked = Asked { purchase: key.map(|key| (key, identity.request)), ..asked };
        let payment = self.payer.sign(challenge, asked).await?;
        self.kept = Some(Kept { identity, payment });
        Ok(())
    }

    /// Notes how the request ended: with an answer, or so that it may be repeated.
    pub(super) const fn set_answered(&mut self, answered: bool) {
        self.is_answered = answered;
    }

    /// Forgets a payment that cannot be used any more, or that needs not be.
    pub(super) fn discard(&mut self) {
        self.kept = None;
    }
}

impl Drop for HeldPayment<'_> {
    fn drop(&mut self) {
        let Some(mut kept) = self.kept.take() else { return };
        kept.payment.pause();
        match &mut self.home {
            Home::Lost if self.is_answered || !kept.payment.was_sent() => {}
            Home::Lost => self.payer.purchases().remember(kept, self.payer.now()),
            Home::Purchase(slot) => **slot = Some(kept),
            Home::Journal(..) if kept.payment.is_in_journal() => {}
            Home::Journal(key, _) => self.payer.purchases().keep_voucher(*key, kept),
        }
    }
}
