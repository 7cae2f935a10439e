//! What evaluators cost: the public report, the records behind it, and the part of the budget that may still be promised.

use std::collections::BTreeMap;

use alloy_primitives::{Address, B256};
use serde::{Deserialize, Serialize};
use tower_x402::{
    Usdc,
    client::{Budget, Journal, Receipt},
};

use crate::{
    evidence::{CallOutcome, Evidence, Pairs},
    selection::Skill,
};

/// A student's purchases by evaluator, and their cost.
///
/// When no call is under way, `paid` plus `elsewhere` is what the [budget](super::Student::budget) calls spent, and `paid` is the sum over
/// the accounts. Accounts start with what the evidence log holds of earlier runs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[non_exhaustive]
pub struct SpendingReport {
    /// The number of submissions.
    pub tasks: u64,
    /// The number of submissions for which no evaluator was worth its price.
    pub kept: u64,
    /// The number of submissions whose outputs were all the same, without anchors, so that nothing was bought.
    pub uniform: u64,
    /// The number of submissions that were audited. While it is 0, evaluators are chosen by their prices and claims, and by reports that the
    /// student cannot check.
    pub audits: u64,
    /// One account for each evaluator and skill, in this order.
    pub accounts: Vec<EvaluatorAccount>,
    /// The amount paid to evaluators.
    pub paid: Usdc,
    /// The sum of the signed payments whose outcome is unknown.
    pub held: Usdc,
    /// The amount set aside for calls under way.
    pub promised: Usdc,
    /// The amount spent from the same budget that is in no account: before the log begins, or by others who share the budget.
    pub elsewhere: Usdc,
    /// The number of records that the evidence log did not take.
    pub unrecorded: u64,
}

/// The calls to one evaluator in one skill.
///
/// Counts are of requests: one for a submission, more if it was split.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[non_exhaustive]
pub struct EvaluatorAccount {
    /// The address that is paid.
    pub evaluator: Address,
    /// The skill that was asked for.
    pub skill: String,
    /// Valid evaluations.
    pub answered: u64,
    /// The valid evaluations that were audited.
    pub audited: u64,
    /// The pairs of a good and a bad output in audits.
    pub pairs: u64,
    /// The pairs in which the good output has the higher score.
    pub right: u64,
    /// The pairs in which the bad output has the higher score.
    pub wrong: u64,
    /// Invalid answers.
    #[serde(rename = "garbage")]
    pub invalid: u64,
    /// Missing or late answers.
    pub timeouts: u64,
    /// Demands for another price, payee or token than on the card.
    #[serde(rename = "lies")]
    pub mismatches: u64,
    /// The amount paid.
    pub paid: Usdc,
    /// The sum of the signed payments whose outcome is unknown.
    pub held: Usdc,
}

impl SpendingReport {
    /// Returns the account of an evaluator in a skill.
    pub fn account(&self, evaluator: Address, skill: &str) -> Option<&EvaluatorAccount> {
        self.accounts.iter().find(|account| account.evaluator == evaluator && account.skill == skill)
    }
}

impl EvaluatorAccount {
    fn audit(&mut self, pairs: Pairs) {
        self.audited += 1;
        self.pairs += u64::from(pairs.all());
        self.right += u64::from(pairs.right());
        self.wrong += u64::from(pairs.wrong());
    }

    fn count(&mut self, outcome: &CallOutcome) {
        match outcome {
            CallOutcome::Answered { pairs, .. } => {
                self.answered += 1;
                if let Some(pairs) = pairs {
                    self.audit(*pairs);
                }
            }
            CallOutcome::InvalidAnswer => self.invalid += 1,
            CallOutcome::Timeout => self.timeouts += 1,
            CallOutcome::PriceMismatch | CallOutcome::PayeeMismatch | CallOutcome::TokenMismatch => {
                self.mismatches += 1;
            }
        }
    }
}

/// The records behind a [`SpendingReport`].
#[derive(Debug, Default)]
pub(super) struct SpendingRecords {
    /// The report's counts. Its accounts and sums are added when it is asked for.
    pub(super) counts: SpendingReport,
    accounts: BTreeMap<(Address, Skill), EvaluatorAccount>,
    /// Payments with an unknown outcome, by nonce of the authorization.
    held: BTreeMap<B256, (Address, Skill, Usdc)>,
}

impl SpendingRecords {
    /// Creates records of which an earlier process has counted `tasks` submissions.
    pub(super) fn new(tasks: u64) -> Self {
        Self { counts: SpendingReport { tasks, ..SpendingReport::default() }, ..Self::default() }
    }

    /// Adds what became of one request.
    pub(super) fn add(
        &mut self,
        evaluator: Address,
        skill: (Skill, &str),
        outcome: Option<&CallOutcome>,
        receipt: Option<&Receipt>,
    ) {
        if outcome.is_none() && receipt.is_none() {
            return;
        }
        let account = self.account(evaluator, skill);
        if let Some(outcome) = outcome {
            account.count(outcome);
        }
        let Some(receipt) = receipt else { return };
        if receipt.outcome.is_paid() {
            account.paid = sum([account.paid, receipt.amount]);
        } else if !receipt.is_by_voucher() {
            // What a voucher was signed for stays in escrow, which the budget reserves.
            account.held = sum([account.held, receipt.amount]);
            self.held.insert(receipt.nonce, (evaluator, skill.0, receipt.amount));
        }
    }

    /// Adds the result of a late audit.
    pub(super) fn audit(&mut self, evaluator: Address, skill: (Skill, &str), pairs: Pairs) {
        self.account(evaluator, skill).audit(pairs);
    }

    /// Returns how many evaluations in a skill were audited.
    pub(super) fn audited(&self, skill: Skill) -> u64 {
        self.accounts.iter().filter(|((_, of), _)| *of == skill).map(|(_, account)| account.audited).sum()
    }

    /// Adds a record of an earlier run.
    pub(super) fn restore(&mut self, evidence: &Evidence, skill: Skill) {
        let account = self.account(evidence.evaluator, (skill, &evidence.skill));
        account.count(&evidence.outcome);
        account.paid = sum([account.paid, evidence.paid]);
    }

    /// Returns `true` if this evaluator was ever asked.
    pub(super) fn has(&self, evaluator: Address) -> bool {
        self.accounts.keys().any(|(known, _)| *known == evaluator)
    }

    /// Moves held payments whose outcome the journal knows by now.
    pub(super) fn reconcile(&mut self, journal: &Journal) {
        let accounts = &mut self.accounts;
        self.held.retain(|nonce, (evaluator, skill, amount)| {
            let Some(is_paid) = journal.was_paid(*nonce) else { return true };
            if let Some(account) = accounts.get_mut(&(*evaluator, *skill)) {
                account.held = less(account.held, *amount);
                if is_paid {
                    account.paid = sum([account.paid, *amount]);
                }
            }
            false
        });
    }

    pub(super) fn report(&self, promised: Usdc, spent: Usdc) -> SpendingReport {
        let accounts: Vec<_> = self.accounts.values().cloned().collect();
        let paid = sum(accounts.iter().map(|account| account.paid));
        let held = sum(accounts.iter().map(|account| account.held));
        SpendingReport { paid, held, promised, elsewhere: less(spent, paid), accounts, ..self.counts.clone() }
    }

    fn account(&mut self, evaluator: Address, (skill, name): (Skill, &str)) -> &mut EvaluatorAccount {
        let new = || EvaluatorAccount { evaluator, skill: name.to_owned(), ..EvaluatorAccount::default() };
        self.accounts.entry((evaluator, skill)).or_insert_with(new)
    }
}

/// The budget's remainder without what is promised to calls that have not signed yet.
///
/// An amount is promised when an evaluator is hired, reserved by the budget when the call signs, and released here when the call ends. In
/// between it would count twice, so the remainder is computed from the last time at which no call was under way.
#[derive(Debug)]
pub(super) struct AvailableBudget {
    budget: Budget,
    /// What remained when no call was under way.
    baseline: Usdc,
    /// What calls since then have signed.
    signed: Usdc,
    promised: Usdc,
}

impl AvailableBudget {
    pub(super) fn new(budget: Budget) -> Self {
        Self { baseline: unspent(&budget), budget, signed: Usdc::ZERO, promised: Usdc::ZERO }
    }

    pub(super) const fn budget(&self) -> &Budget {
        &self.budget
    }

    pub(super) const fn promised(&self) -> Usdc {
        self.promised
    }

    pub(super) fn remaining(&mut self) -> Usdc {
        let actual = unspent(&self.budget);
        if self.promised == Usdc::ZERO {
            (self.baseline, self.signed) = (actual, Usdc::ZERO);
        }
        less(less(self.baseline, self.signed), self.promised).min(actual)
    }

    pub(super) fn promise(&mut self, amount: Usdc) {
        self.promised = sum([self.promised, amount]);
    }

    /// Releases what was promised to a call that has ended, having signed payments of `signed`.
    pub(super) fn release(&mut self, promised: Usdc, signed: Usdc) {
        self.promised = less(self.promised, promised);
        self.signed = sum([self.signed, signed]);
    }
}

/// Returns what can be spent. What is in payment channels can be spent at their payees only.
fn unspent(budget: &Budget) -> Usdc {
    sum([budget.remaining(), budget.in_escrow()])
}

/// Adds amounts; stops at the largest.
pub(super) fn sum(amounts: impl IntoIterator<Item = Usdc>) -> Usdc {
    amounts.into_iter().fold(Usdc::ZERO, |sum, amount| sum.checked_add(amount).unwrap_or(Usdc::MAX))
}

/// Subtracts an amount; stops at zero.
fn less(amount: Usdc, part: Usdc) -> Usdc {
    amount.checked_sub(part).unwrap_or(Usdc::ZERO)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signed_amount_counts_once_whether_or_not_the_budget_knows_it() {
        let usdc = Usdc::from_atomic;
        let mut available = AvailableBudget::new(Budget::builder().total(usdc(100)).build());
        available.promise(usdc(30));
        available.promise(usdc(20));
        assert_eq!(available.remaining(), usdc(50));
        // One has signed all it was promised, the other has yet to.
        available.release(usdc(30), usdc(30));
        assert_eq!((available.remaining(), available.promised()), (usdc(50), usdc(20)));
        // It signed nothing; and from then on the budget alone knows.
        available.release(usdc(20), Usdc::ZERO);
        assert_eq!(available.remaining(), usdc(100));
    }
}
