//! Who was asked, what came of it, and what it cost.

use std::collections::BTreeMap;

use alloy_primitives::{Address, B256};
use serde::{Deserialize, Serialize};
use tower_x402::{
    Usdc,
    client::{Journal, Receipt},
};

use crate::{
    evidence::{CallOutcome, Evidence},
    selection::Skill,
};

/// Where the money went, and for what.
///
/// When nothing is under way, `paid` and `elsewhere` together are what the budget calls spent, and the accounts' `paid` sum up to
/// `paid`. Accounts begin with what the log of evidence holds of earlier runs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[non_exhaustive]
pub struct SpendingReport {
    /// How many submissions were to be judged.
    pub tasks: u64,
    /// For how many of them the student kept its money.
    pub kept: u64,
    /// How many hidden tasks were sent to audit evaluators, and how many submissions whose truth was known.
    pub audits: u64,
    /// By evaluator, then skill.
    pub accounts: Vec<EvaluatorAccount>,
    /// What evaluators were paid.
    pub paid: Usdc,
    /// What was signed without a proof so far that it was paid or never will be.
    pub held: Usdc,
    /// What is promised to calls under way.
    pub promised: Usdc,
    /// What was spent from the same budget and is in no account: before the log begins, or by others who share the budget.
    pub elsewhere: Usdc,
    /// How many records the log of evidence did not take.
    pub unrecorded: u64,
}

/// One evaluator in one skill. What is counted are requests: one for a submission, more if it was split.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[non_exhaustive]
pub struct EvaluatorAccount {
    /// Who is paid.
    pub evaluator: Address,
    /// For judging what.
    pub skill: String,
    /// Valid evaluations.
    pub answered: u64,
    /// Of those, how many the student knew the truth about.
    pub audited: u64,
    /// Of those, how many were right.
    pub right: u64,
    /// Answers that were none.
    pub garbage: u64,
    /// No answer, or none in time.
    pub timeouts: u64,
    /// Demands of another price, or for another payee, than the card has.
    pub lies: u64,
    /// What it was paid.
    pub paid: Usdc,
    /// What was signed for it without a proof so far.
    pub held: Usdc,
}

/// The books as they are kept.
#[derive(Debug, Default)]
pub(super) struct Ledger {
    pub(super) tasks: u64,
    pub(super) kept: u64,
    pub(super) audits: u64,
    pub(super) unrecorded: u64,
    accounts: BTreeMap<(Address, Skill), EvaluatorAccount>,
    /// What is not proven, and on whose account it is.
    held: BTreeMap<B256, (Address, Skill, Usdc)>,
}

impl Ledger {
    /// Enters what came of one request.
    pub(super) fn enter(
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
            add(&mut account.paid, receipt.amount);
        } else {
            add(&mut account.held, receipt.amount);
            self.held.insert(receipt.nonce, (evaluator, skill.0, receipt.amount));
        }
    }

    /// Enters what is on record from earlier.
    pub(super) fn recall(&mut self, evidence: &Evidence, skill: Skill) {
        let account = self.account(evidence.evaluator, (skill, &evidence.skill));
        account.count(&evidence.outcome);
        add(&mut account.paid, evidence.paid);
    }

    /// Whether this evaluator was ever asked for a verdict.
    pub(super) fn knows(&self, evaluator: Address) -> bool {
        self.accounts.keys().any(|(known, _)| *known == evaluator)
    }

    /// Moves what was proven in the meantime, by whoever looked at the chain.
    pub(super) fn reconcile(&mut self, journal: &Journal) {
        let accounts = &mut self.accounts;
        self.held.retain(|nonce, (evaluator, skill, amount)| {
            let Some(paid) = journal.was_paid(*nonce) else { return true };
            if let Some(account) = accounts.get_mut(&(*evaluator, *skill)) {
                account.held = account.held.checked_sub(*amount).unwrap_or(Usdc::ZERO);
                if paid {
                    add(&mut account.paid, *amount);
                }
            }
            false
        });
    }

    pub(super) fn books(&self, promised: Usdc, spent: Usdc) -> SpendingReport {
        let accounts: Vec<_> = self.accounts.values().cloned().collect();
        let sum = |of: fn(&EvaluatorAccount) -> Usdc| {
            accounts.iter().fold(Usdc::ZERO, |sum, account| sum.checked_add(of(account)).unwrap_or(Usdc::MAX))
        };
        let (paid, held) = (sum(|account| account.paid), sum(|account| account.held));
        SpendingReport {
            tasks: self.tasks,
            kept: self.kept,
            audits: self.audits,
            paid,
            held,
            promised,
            elsewhere: spent.checked_sub(paid).unwrap_or(Usdc::ZERO),
            unrecorded: self.unrecorded,
            accounts,
        }
    }

    fn account(&mut self, evaluator: Address, (skill, name): (Skill, &str)) -> &mut EvaluatorAccount {
        let new = || EvaluatorAccount { evaluator, skill: name.to_owned(), ..EvaluatorAccount::default() };
        self.accounts.entry((evaluator, skill)).or_insert_with(new)
    }
}

impl EvaluatorAccount {
    fn count(&mut self, outcome: &CallOutcome) {
        match outcome {
            CallOutcome::Answered { right, .. } => {
                self.answered += 1;
                self.audited += u64::from(right.is_some());
                self.right += u64::from(*right == Some(true));
            }
            CallOutcome::InvalidAnswer => self.garbage += 1,
            CallOutcome::Timeout => self.timeouts += 1,
            CallOutcome::PriceMismatch | CallOutcome::PayeeMismatch | CallOutcome::TokenMismatch => self.lies += 1,
        }
    }
}

impl SpendingReport {
    /// The account of an evaluator in a skill.
    pub fn account(&self, evaluator: Address, skill: &str) -> Option<&EvaluatorAccount> {
        self.accounts.iter().find(|account| account.evaluator == evaluator && account.skill == skill)
    }

    /// What an evaluator was paid for all skills.
    pub fn paid_to(&self, evaluator: Address) -> Usdc {
        let of = self.accounts.iter().filter(|account| account.evaluator == evaluator);
        of.fold(Usdc::ZERO, |sum, account| sum.checked_add(account.paid).unwrap_or(Usdc::MAX))
    }
}

pub(super) fn add(sum: &mut Usdc, amount: Usdc) {
    *sum = sum.checked_add(amount).unwrap_or(Usdc::MAX);
}
