//! What is known of one payment by voucher, and what comes after a refusal: two tables, without I/O.

use crate::{client::PaymentOutcome, protocol::Reason};

/// The prefix of the scheme's reason codes.
const PREFIX: &str = "invalid_batch_settlement_evm_";

/// What is known of a payment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// The voucher is signed and may be on its way. Nothing was heard of it.
    Signed,
    /// An attempt had no clear answer: the seller may have charged it, whatever it says of a later one.
    Unclear,
    /// By its word, the seller charged nothing for any attempt.
    Refused,
    /// The present voucher was charged: the seller has the answer, and needs no channel for it.
    Charged,
    /// The purchase was charged before, by another voucher, and this was its answer. The channel is as it was.
    Repeated,
    /// The work failed and the voucher was charged with nothing: what comes next is bought anew.
    Unused,
}

/// What happens to a payment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Event {
    /// The voucher is sent, for the first time or again; or another one was signed in its place.
    Sent,
    /// It is presented again by a later request, after it may have been sent.
    Resumed,
    /// No answer came, or one that says nothing clear.
    Unclear,
    /// The seller says that it charged nothing.
    Refused,
    /// The seller charged the voucher.
    Charged,
    /// The seller gave the answer of an earlier voucher.
    Repeated,
    /// The seller's work failed, and it charged nothing.
    Unused,
}

impl State {
    /// Returns the state after an event.
    ///
    /// | | `Signed` | `Unclear` | `Refused` | `Repeated` | `Charged`, `Unused` |
    /// |---|---|---|---|---|---|
    /// | `Sent` | `Signed` | `Unclear` | `Signed` | unchanged | unchanged |
    /// | `Resumed` | `Unclear` | `Unclear` | `Unclear` | `Unclear` | unchanged |
    /// | `Unclear` | `Unclear` | `Unclear` | `Unclear` | `Unclear` | unchanged |
    /// | `Refused` | `Refused` | `Unclear` | `Refused` | `Unclear` | unchanged |
    /// | `Charged` | `Charged` | `Charged` | `Charged` | `Charged` | unchanged |
    /// | `Repeated` | `Repeated` | `Repeated` | `Repeated` | `Repeated` | unchanged |
    /// | `Unused` | `Unused` | `Unused` | `Unused` | `Unused` | unchanged |
    ///
    /// A refusal says nothing about an earlier attempt that was unclear.
    #[must_use]
    pub(super) const fn after(self, event: Event) -> Self {
        match (self, event) {
            (Self::Charged | Self::Unused, _) => self,
            (_, Event::Charged) => Self::Charged,
            (_, Event::Repeated) => Self::Repeated,
            (_, Event::Unused) => Self::Unused,
            (_, Event::Resumed | Event::Unclear) => Self::Unclear,
            (Self::Signed | Self::Refused, Event::Sent) => Self::Signed,
            (Self::Signed | Self::Refused, Event::Refused) => Self::Refused,
            (Self::Unclear | Self::Repeated, Event::Refused) => Self::Unclear,
            (Self::Unclear | Self::Repeated, Event::Sent) => self,
        }
    }

    /// Returns the outcome that the payer is told.
    pub(super) const fn outcome(self) -> PaymentOutcome {
        match self {
            Self::Signed | Self::Unclear => PaymentOutcome::Unknown,
            Self::Refused => PaymentOutcome::Failed,
            Self::Charged | Self::Repeated | Self::Unused => PaymentOutcome::Accepted,
        }
    }
}

/// What was sent as payment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sent {
    /// A new voucher alone.
    Voucher,
    /// A new voucher, and the pending deposit, which expires then, in seconds since the Unix epoch.
    Deposit { expires: u64 },
    /// The last voucher that was signed before, which asks for the answer to a purchase that may be paid already.
    Last,
}

/// Why a seller refuses a voucher, as far as it makes a difference.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Code {
    /// It works on another request of the channel.
    Busy,
    /// It cannot look at the channel now.
    Unavailable,
    /// It has other books.
    Mismatch,
    /// It does not find the money.
    NoMoney,
    /// The deposit cannot be made.
    NoDeposit,
    Other,
}

impl Code {
    pub(super) fn of(reason: &Reason) -> Self {
        match code_of(reason) {
            "channel_busy" => Self::Busy,
            "verification_state_unavailable" | "rpc_read_failed" => Self::Unavailable,
            "cumulative_amount_mismatch" | "cumulative_below_claimed" => Self::Mismatch,
            "channel_not_found" | "cumulative_exceeds_balance" => Self::NoMoney,
            "deposit_simulation_failed"
            | DEPOSIT_FAILED
            | "receive_authorization_signature"
            | "insufficient_balance" => Self::NoDeposit,
            _ => Self::Other,
        }
    }
}

/// The code of a deposit whose transaction failed.
pub(super) const DEPOSIT_FAILED: &str = "deposit_transaction_failed";

/// Returns a reason code without the scheme's prefix.
pub(super) fn code_of(reason: &Reason) -> &str {
    reason.as_str().strip_prefix(PREFIX).unwrap_or(reason.as_str())
}

/// What was tried in the present channel. Each is tried once for a payment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Tried {
    /// To start from what the seller says it charged.
    pub(super) correction: bool,
    /// To count on another deposit than before.
    pub(super) deposit: bool,
    /// To leave the channel, for which the budget had no room.
    pub(super) leaving: bool,
}

/// What comes after a refusal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Remedy {
    /// Send the request on another channel if there is one; or else the same again.
    Leave,
    /// Send the same again.
    Repeat,
    /// Compare the books with the seller's, and sign again if that leaves something to sign.
    Correct,
    /// Sign a new voucher.
    SignAgain,
    /// Send the same again, since the pending deposit may be on its way into a block. The next request sends the same deposit, and no other one.
    AwaitDeposit,
    /// Sign again, with another deposit for the money that the seller does not find.
    DepositAnew,
    /// Sign again without the deposit, which an earlier attempt may have made.
    CountOnDeposit,
    /// None.
    GiveUp,
}

/// Returns what comes after a refusal. The first row that fits counts.
///
/// | code | sent | if | remedy |
/// |---|---|---|---|
/// | `Busy` | a voucher alone | the payment may leave the channel | `Leave` |
/// | `Busy`, `Unavailable` | | | `Repeat` |
/// | `Mismatch` | | not yet tried | `Correct` |
/// | | the last voucher | | `SignAgain`: the seller does not know the purchase, and it is paid for now |
/// | `NoMoney` | a voucher alone | the pending deposit may still be executed | `AwaitDeposit` |
/// | `NoMoney` | a voucher alone | not yet tried | `DepositAnew` |
/// | `NoDeposit` | with the deposit | it may have arrived before, and not yet tried | `CountOnDeposit` |
/// | | | | `GiveUp` |
///
/// `may_leave` says that the seller may charge the request in another channel, too; `deposit_is_open` that the pending deposit may have
/// arrived, or may yet.
pub(super) const fn remedy(code: Code, sent: Sent, tried: Tried, may_leave: bool, deposit_is_open: bool) -> Remedy {
    match (code, sent) {
        (Code::Busy, Sent::Voucher) if may_leave && !tried.leaving => Remedy::Leave,
        (Code::Busy | Code::Unavailable, _) => Remedy::Repeat,
        (Code::Mismatch, _) if !tried.correction => Remedy::Correct,
        (_, Sent::Last) => Remedy::SignAgain,
        (Code::NoMoney, Sent::Voucher) if deposit_is_open => Remedy::AwaitDeposit,
        (Code::NoMoney, Sent::Voucher) if !tried.deposit => Remedy::DepositAnew,
        (Code::NoDeposit, Sent::Deposit { .. }) if deposit_is_open && !tried.deposit => Remedy::CountOnDeposit,
        _ => Remedy::GiveUp,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STATES: [State; 6] =
        [State::Signed, State::Unclear, State::Refused, State::Charged, State::Repeated, State::Unused];
    const EVENTS: [Event; 7] =
        [Event::Sent, Event::Resumed, Event::Unclear, Event::Refused, Event::Charged, Event::Repeated, Event::Unused];

    #[test]
    fn payment_that_may_have_been_charged_is_never_called_failed() {
        for event in EVENTS {
            for state in [State::Unclear, State::Repeated] {
                assert_ne!(state.after(event), State::Refused, "{state:?} {event:?}");
            }
        }
        for (state, event) in STATES.into_iter().flat_map(|state| EVENTS.map(|event| (state, event))) {
            if state.after(event) == State::Refused {
                assert!(matches!(state, State::Signed | State::Refused), "{state:?} {event:?}");
            }
        }
    }

    #[test]
    fn charge_is_the_last_word_on_a_voucher() {
        for (state, event) in
            [State::Charged, State::Unused].into_iter().flat_map(|state| EVENTS.map(|event| (state, event)))
        {
            assert_eq!(state.after(event), state, "{event:?}");
        }
    }

    #[test]
    fn voucher_that_is_sent_again_after_a_refusal_may_be_charged() {
        assert_eq!(State::Refused.after(Event::Sent).after(Event::Unclear), State::Unclear);
        assert_eq!(State::Refused.after(Event::Sent).after(Event::Refused), State::Refused);
        assert_eq!(State::Refused.after(Event::Sent).outcome(), PaymentOutcome::Unknown);
    }

    #[test]
    fn refusal_has_one_remedy_and_each_remedy_that_signs_is_tried_once() {
        const NOT: Tried = Tried { correction: false, deposit: false, leaving: false };
        const ALL: Tried = Tried { correction: true, deposit: true, leaving: true };
        const DEPOSIT: Sent = Sent::Deposit { expires: 1 };
        // May leave, the deposit is open.
        for (code, sent, tried, (leave, open), expected) in [
            (Code::Busy, Sent::Voucher, NOT, (true, false), Remedy::Leave),
            (Code::Busy, Sent::Voucher, NOT, (false, false), Remedy::Repeat),
            (Code::Busy, Sent::Voucher, ALL, (true, false), Remedy::Repeat),
            (Code::Busy, DEPOSIT, NOT, (true, false), Remedy::Repeat),
            (Code::Busy, Sent::Last, NOT, (true, false), Remedy::Repeat),
            (Code::Unavailable, Sent::Last, ALL, (true, true), Remedy::Repeat),
            (Code::Mismatch, Sent::Voucher, NOT, (true, true), Remedy::Correct),
            (Code::Mismatch, Sent::Last, NOT, (false, false), Remedy::Correct),
            (Code::Mismatch, Sent::Last, ALL, (false, false), Remedy::SignAgain),
            (Code::Mismatch, Sent::Voucher, ALL, (true, true), Remedy::GiveUp),
            (Code::NoMoney, Sent::Last, NOT, (true, true), Remedy::SignAgain),
            (Code::NoMoney, Sent::Voucher, NOT, (true, true), Remedy::AwaitDeposit),
            (Code::NoMoney, Sent::Voucher, ALL, (true, true), Remedy::AwaitDeposit),
            (Code::NoMoney, Sent::Voucher, NOT, (true, false), Remedy::DepositAnew),
            (Code::NoMoney, Sent::Voucher, ALL, (true, false), Remedy::GiveUp),
            (Code::NoMoney, DEPOSIT, NOT, (true, true), Remedy::GiveUp),
            (Code::NoDeposit, DEPOSIT, NOT, (false, true), Remedy::CountOnDeposit),
            (Code::NoDeposit, DEPOSIT, NOT, (false, false), Remedy::GiveUp),
            (Code::NoDeposit, DEPOSIT, ALL, (false, true), Remedy::GiveUp),
            (Code::NoDeposit, Sent::Voucher, NOT, (false, true), Remedy::GiveUp),
            (Code::Other, Sent::Last, ALL, (false, false), Remedy::SignAgain),
            (Code::Other, DEPOSIT, NOT, (true, true), Remedy::GiveUp),
        ] {
            assert_eq!(remedy(code, sent, tried, leave, open), expected, "{code:?} {sent:?} {tried:?} {leave} {open}");
        }
    }
}
