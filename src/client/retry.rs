//! How often and how fast a payment is presented again.

use std::time::Duration;

use super::{Next, Payer, Payment};

/// Attempts and pauses.
#[derive(Clone, Copy, Debug)]
pub(super) struct Retry {
    pub(super) max_attempts: u32,
    pub(super) attempt_timeout: Duration,
    pub(super) first_pause: Duration,
}

impl Retry {
    pub(super) const DEFAULT: Self =
        Self { max_attempts: 5, attempt_timeout: Duration::from_secs(30), first_pause: Duration::from_millis(200) };

    /// No pause is longer, whatever a server asks for.
    const LONGEST_PAUSE: Duration = Duration::from_secs(30);

    /// No body of a 402 is waited for any longer.
    const LONGEST_BODY: Duration = Duration::from_secs(10);

    /// How long the body of a 402 may take.
    pub(super) fn patience(&self) -> Duration {
        self.attempt_timeout.min(Self::LONGEST_BODY)
    }

    /// How long to wait before presenting `payment` again after `attempts` attempts; `None` to let it be.
    pub(super) fn pause(&self, next: Next, attempts: u32, payer: &Payer, payment: &Payment) -> Option<Duration> {
        let Next::Again { after } = next else { return None };
        if attempts >= self.max_attempts {
            return None;
        }
        let backoff = self.first_pause.saturating_mul(1 << (attempts - 1).min(16));
        let pause = after.unwrap_or(backoff).min(Self::LONGEST_PAUSE);
        let in_time = payer.now().saturating_add(pause.as_secs()) < payment.valid_before();
        in_time.then_some(pause)
    }
}
