//! The table of the evaluators that are known, in the order in which they were found.

use std::sync::Arc;

use alloy_primitives::Address;
use tower_x402::Usdc;
use url::Url;

use crate::{
    CardError, Outputs, Score, Submission, Text, VerifiedCard,
    selection::{Candidate, Skill, SkillSet, Skills},
};

/// After how many missed fetches in a row an evaluator counts as gone.
pub(super) const MAX_MISSES: u32 = 3;

/// A URL, and whether only untrusted sources named it.
pub(super) type Place = (Url, bool);

/// The reason why an evaluator cannot be hired.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RefusedReason {
    /// Its card could not be fetched or verified.
    #[error(transparent)]
    Card(#[from] CardError),
    /// It accepts none of the payer's tokens. Add one to the payer if you want to hire it.
    #[error("the evaluator accepts none of the payer's tokens")]
    Token,
    /// Its payee is known at another URL, where the card still is.
    #[error("the payee is already known at {0}")]
    SamePayee(Url),
    /// The table of evaluators is full; see [`max_evaluators`](super::StudentBuilder::max_evaluators).
    #[error("{0} evaluators are known, which is the limit")]
    Full(usize),
}

/// The evaluators that are known, in the order in which they were found.
#[derive(Debug)]
pub(super) struct KnownEvaluators {
    limit: usize,
    entries: Vec<KnownEvaluator>,
}

#[derive(Debug)]
pub(super) struct KnownEvaluator {
    pub(super) url: Url,
    /// Only untrusted sources have named it: it must be on a public host.
    pub(super) is_untrusted: bool,
    pub(super) card: Arc<VerifiedCard>,
    /// When its card was last fetched because of a failure.
    pub(super) rechecked_at: Option<u64>,
    /// How many calls to it were given up and have not ended.
    pub(super) overdue: usize,
    /// It showed no valid card.
    pub(super) is_banned: bool,
    /// How many times in a row its card could not be fetched.
    pub(super) misses: u32,
    claims: SkillSet,
    offers: SkillSet,
    /// The version that its last evaluation named.
    version: Option<Text<1, 64>>,
}

impl KnownEvaluators {
    pub(super) fn new(limit: usize) -> Self {
        Self { limit, entries: Vec::new() }
    }

    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    pub(super) fn find(&mut self, evaluator: Address) -> Option<&mut KnownEvaluator> {
        self.entries.iter_mut().find(|known| known.card.pay_to() == evaluator)
    }

    /// Returns `true` if an evaluation names another version than the one before.
    pub(super) fn is_new_version(&mut self, evaluator: Address, version: &Text<1, 64>) -> bool {
        let before = self.find(evaluator).and_then(|known| known.version.replace(version.clone()));
        before.is_some_and(|before| before != *version)
    }

    /// Returns `true` if the card of a known evaluator has this skill.
    pub(super) fn have_skill(&self, skill: &str) -> bool {
        self.entries.iter().any(|known| known.card.card().has_skill(skill))
    }

    /// Updates the skills of all cards after a skill got a number.
    pub(super) fn number_skills(&mut self, skills: &Skills) {
        self.entries.iter_mut().for_each(|known| known.number_skills(skills));
    }

    /// Returns the evaluators that can be sent such a submission now.
    pub(super) fn candidates(
        &self,
        skill: Skill,
        submission: &Submission,
        per_payment: Usdc,
        excluded: &[Address],
    ) -> impl Iterator<Item = (&KnownEvaluator, Candidate)> {
        // A group is sent in parts if an evaluator takes less.
        let least = if matches!(submission.outputs, Outputs::Group(_)) { 1 } else { submission.outputs().len() };
        self.entries.iter().filter_map(move |known| {
            let evaluator = known.card.pay_to();
            let can_be_hired = known.offers.contains(skill) && !known.is_banned && known.overdue == 0;
            if !can_be_hired || excluded.contains(&evaluator) {
                return None;
            }
            if known.card.pricing().outputs_for(per_payment) < least {
                return None;
            }
            let price = known.card.pricing().price_per_output();
            let candidate = Candidate { evaluator, claims: known.claims, price };
            Some((known, candidate))
        })
    }

    /// Adds a card, or replaces the one that its payee had. Returns `true` if the payee is new.
    pub(super) fn insert(
        &mut self,
        (url, is_untrusted): &Place,
        card: Arc<VerifiedCard>,
        skills: &Skills,
    ) -> Result<bool, RefusedReason> {
        let payee = card.pay_to();
        if let Some(known) = self.find(payee) {
            if known.url != *url {
                return Err(RefusedReason::SamePayee(known.url.clone()));
            }
            known.is_untrusted &= is_untrusted;
            known.card = card;
            (known.is_banned, known.misses) = (false, 0);
            known.number_skills(skills);
            return Ok(false);
        }
        let replaced = self.next_replaced()?.map(|known| known.card.pay_to());
        let replaced = replaced.and_then(|replaced| self.find(replaced));
        let mut new = KnownEvaluator {
            url: url.clone(),
            is_untrusted: *is_untrusted,
            card,
            rechecked_at: None,
            overdue: 0,
            is_banned: false,
            misses: 0,
            claims: SkillSet::default(),
            offers: SkillSet::default(),
            version: None,
        };
        new.number_skills(skills);
        match replaced {
            Some(replaced) => *replaced = new,
            None => self.entries.push(new),
        }
        Ok(true)
    }

    /// Returns the evaluator that the next new one replaces; `None` if there is room.
    pub(super) fn next_replaced(&self) -> Result<Option<&KnownEvaluator>, RefusedReason> {
        if self.entries.len() < self.limit {
            return Ok(None);
        }
        // The entry counts the calls that were given up, so it must stay until they have ended.
        let may_go = |known: &&KnownEvaluator| known.is_banned && known.overdue == 0;
        self.entries.iter().find(may_go).map(Some).ok_or(RefusedReason::Full(self.limit))
    }

    pub(super) fn at(&mut self, url: &Url) -> Option<&mut KnownEvaluator> {
        self.entries.iter_mut().find(|known| known.url == *url)
    }

    /// Returns the entry of a payee that is known at another URL.
    pub(super) fn elsewhere(&self, evaluator: Address, url: &Url) -> Option<&KnownEvaluator> {
        self.entries.iter().find(|known| known.card.pay_to() == evaluator).filter(|known| known.url != *url)
    }

    pub(super) fn relocate(&mut self, evaluator: Address, (url, is_untrusted): Place) {
        if let Some(known) = self.find(evaluator) {
            (known.url, known.is_untrusted, known.rechecked_at, known.misses) = (url, is_untrusted, None, 0);
        }
    }
}

impl KnownEvaluator {
    fn number_skills(&mut self, skills: &Skills) {
        let card = &self.card;
        self.offers = skills.set(card.card().skills.iter().map(|skill| skill.id.as_str()));
        let claimed = card.pricing().expertise.iter().filter(|expertise| expertise.claim > Score::MIN);
        self.claims = skills.set(claimed.map(|expertise| &*expertise.skill));
    }
}
