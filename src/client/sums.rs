//! Sums of amounts, which end at their bounds. They reach the upper one only in hostile numbers, or if journals of several lives are added up:
//! then nothing remains of any limit, which is the safe side.

use crate::usdc::Usdc;

pub(super) fn plus(one: Usdc, other: Usdc) -> Usdc {
    one.checked_add(other).unwrap_or(Usdc::MAX)
}

pub(super) fn less(from: Usdc, amount: Usdc) -> Usdc {
    from.checked_sub(amount).unwrap_or(Usdc::ZERO)
}

pub(super) fn sum(amounts: impl Iterator<Item = Usdc>) -> Usdc {
    amounts.fold(Usdc::ZERO, plus)
}

pub(super) fn add_to(sum: &mut Usdc, amount: Usdc) {
    *sum = plus(*sum, amount);
}
