//! Who could be hired.

use std::{collections::HashMap, sync::Arc};

use alloy_primitives::Address;
use tower_x402::Usdc;
use url::Url;

use crate::{
    Outputs, Submission, VerifiedCard,
    selection::{Candidate, Skill, SkillSet, Skills},
};

/// Evaluators with their cards, in the order in which they were found.
#[derive(Debug)]
pub(super) struct Roster {
    limit: usize,
    entries: Vec<Entry>,
    by_payee: HashMap<Address, usize>,
}

#[derive(Debug)]
pub(super) struct Entry {
    pub(super) url: Url,
    /// Only strangers have named it: it must be on a public host.
    pub(super) is_strange: bool,
    pub(super) card: Arc<VerifiedCard>,
    pub(super) first_seen: u64,
    /// When its card was last asked for on suspicion.
    pub(super) suspected: Option<u64>,
    /// Requests that nobody waits for any more.
    pub(super) overdue: usize,
    /// Its card is no longer to be believed.
    pub(super) banned: bool,
    /// How many times in a row its card could not be had.
    pub(super) missed: u32,
    claims: SkillSet,
    offers: SkillSet,
}

/// Why a card is not entered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum NotEntered {
    Full(usize),
    SamePayee(Url),
}

/// The shape of what is to be judged.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    pub(super) outputs: usize,
    /// It cannot be split.
    pub(super) whole: bool,
}

impl Shape {
    pub(super) fn of(submission: &Submission) -> Self {
        Self { outputs: submission.outputs().len(), whole: !matches!(submission.outputs, Outputs::Group(_)) }
    }
}

impl Roster {
    pub(super) fn new(limit: usize) -> Self {
        Self { limit, entries: Vec::new(), by_payee: HashMap::new() }
    }

    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    pub(super) fn get(&self, position: usize) -> &Entry {
        &self.entries[position]
    }

    pub(super) fn find(&mut self, evaluator: Address) -> Option<&mut Entry> {
        self.by_payee.get(&evaluator).map(|position| &mut self.entries[*position])
    }

    pub(super) fn at(&mut self, url: &Url) -> Option<&mut Entry> {
        self.entries.iter_mut().find(|entry| entry.url == *url)
    }

    /// Where a payee is known, if that is not at `url`.
    pub(super) fn elsewhere(&self, evaluator: Address, url: &Url) -> Option<&Entry> {
        self.by_payee.get(&evaluator).map(|position| &self.entries[*position]).filter(|entry| entry.url != *url)
    }

    /// Whose place a newcomer gets, if it is somebody's.
    ///
    /// # Errors
    /// [`NotEntered::Full`] if there is no place for it.
    pub(super) fn next_place(&self) -> Result<Option<&Entry>, NotEntered> {
        if self.entries.len() < self.limit {
            return Ok(None);
        }
        // Calls that nobody waits for are counted in the entry.
        let may_go = |entry: &&Entry| entry.banned && entry.overdue == 0;
        self.entries.iter().find(may_go).map(Some).ok_or(NotEntered::Full(self.limit))
    }

    /// A payee is at another place from now on.
    pub(super) fn relocate(&mut self, evaluator: Address, (url, is_strange): (Url, bool)) {
        if let Some(entry) = self.find(evaluator) {
            (entry.url, entry.is_strange, entry.suspected, entry.missed) = (url, is_strange, None, 0);
        }
    }

    /// Enters a card, or replaces the one that its payee had; `true` if it is a new one's. If there is no room, somebody whose card is no
    /// longer to be believed makes it.
    pub(super) fn enter(
        &mut self,
        (url, is_strange): (Url, bool),
        card: Arc<VerifiedCard>,
        skills: &Skills,
        first_seen: impl FnOnce() -> u64,
    ) -> Result<bool, NotEntered> {
        let payee = card.pay_to();
        if let Some(entry) = self.find(payee) {
            if entry.url != url {
                return Err(NotEntered::SamePayee(entry.url.clone()));
            }
            entry.is_strange &= is_strange;
            entry.card = card;
            (entry.banned, entry.missed) = (false, 0);
            entry.number_skills(skills);
            return Ok(false);
        }
        let leaving = self.next_place()?.map(|entry| entry.card.pay_to());
        let (claims, offers) = (SkillSet::default(), SkillSet::default());
        let first_seen = first_seen();
        let mut entry = Entry {
            url,
            is_strange,
            card,
            first_seen,
            suspected: None,
            overdue: 0,
            banned: false,
            missed: 0,
            claims,
            offers,
        };
        entry.number_skills(skills);
        let free = leaving.and_then(|leaving| self.by_payee.remove(&leaving));
        match free.and_then(|position| Some((position, self.entries.get_mut(position)?))) {
            Some((position, place)) => {
                *place = entry;
                self.by_payee.insert(payee, position);
            }
            None => {
                self.by_payee.insert(payee, self.entries.len());
                self.entries.push(entry);
            }
        }
        Ok(true)
    }

    /// Looks at the cards anew after a skill was added.
    pub(super) fn number_skills(&mut self, skills: &Skills) {
        self.entries.iter_mut().for_each(|entry| entry.number_skills(skills));
    }

    /// Whether anybody's card has this skill.
    pub(super) fn judges(&self, skill: &str) -> bool {
        self.entries.iter().any(|entry| entry.card.card().has_skill(skill))
    }

    /// Lists who can be sent such a submission now, with their positions here.
    pub(super) fn candidates(
        &self,
        skill: Skill,
        shape: Shape,
        per_payment: Usdc,
        excluded: &[Address],
        into: (&mut Vec<Candidate>, &mut Vec<usize>),
    ) {
        let (candidates, positions) = into;
        candidates.clear();
        positions.clear();
        for (position, entry) in self.entries.iter().enumerate() {
            let can = entry.offers.contains(skill) && !entry.banned && entry.overdue == 0;
            let evaluator = entry.card.pay_to();
            if !can || excluded.contains(&evaluator) {
                continue;
            }
            let most = entry.most(per_payment);
            if most == 0 || (shape.whole && most < shape.outputs) {
                continue;
            }
            let price = entry.card.pricing().price_per_output;
            candidates.push(Candidate { evaluator, claims: entry.claims, price, first_seen: entry.first_seen });
            positions.push(position);
        }
    }
}

impl Entry {
    /// How many outputs it can be sent at once: as many as it takes, and as one payment may pay for.
    pub(super) fn most(&self, per_payment: Usdc) -> usize {
        let pricing = self.card.pricing();
        let payable = per_payment.atomic().checked_div(pricing.price_per_output.atomic()).unwrap_or(u64::MAX);
        pricing.max_outputs.min(usize::try_from(payable).unwrap_or(usize::MAX))
    }

    fn number_skills(&mut self, skills: &Skills) {
        let card = &self.card;
        self.offers = skills.set(card.card().skills.iter().map(|skill| skill.id.as_str()));
        let claimed = card.pricing().expertise.iter().filter(|expertise| expertise.claim.get() > 0.5);
        self.claims = skills.set(claimed.map(|expertise| &*expertise.skill));
    }
}
