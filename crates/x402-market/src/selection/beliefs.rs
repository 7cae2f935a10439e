//! What is known of evaluators.

use alloy_primitives::Address;

use super::{
    CallOutcome, Candidate, Skill, SkillSet, ThompsonConfig,
    beta::Beta,
    book::{Book, grow},
    conduct::Conduct,
    pool::{Counts, Pool, PoolConfig},
};

/// For every verdict of one's own, so many of others', weighted by trust, make one forget. Whoever would wipe out what one has seen
/// oneself, with any number of voices under any number of names, gets no further than that.
const PATIENCE: f32 = 32.0;

/// Posteriors per evaluator and skill (a cell), as arrays by skill, then evaluator.
///
/// Each is a beta distribution. Its prior counts as `cell` verdicts; its mean is what cells of its kind (claimed or not) have
/// proved worth, moved by what the evaluator did in its other cells. There are two sets of them: one from one's own audits
/// alone, one with what others say. The expectation lies between the two as far as the others are trusted.
#[derive(Clone, Debug)]
pub(super) struct Beliefs {
    config: ThompsonConfig,
    book: Book,
    claims: Vec<SkillSet>,
    conduct: Vec<Conduct>,
    /// How many verdicts of each evaluator were audited by oneself. They do not fade.
    audited: Vec<u16>,
    columns: Vec<Column>,
    /// Without and with the pool.
    views: [View; 2],
    pool: Pool,
    /// The trust in the most trusted payer.
    most: f32,
    /// How many verdicts of others may make one forget before the next own one.
    patience: f32,
    /// Counts are stored in units that grow with time, so that nothing has to be touched to fade: this times a stored count is
    /// verdicts.
    scale: f32,
}

/// One skill, by evaluator.
#[derive(Clone, Debug, Default)]
struct Column {
    own: Vec<Counts>,
    said: Vec<Said>,
    /// By view and kind: the sum of the cells' accuracies, each as loud as it is known, and how loud they are together.
    voices: [[(f32, f32); 2]; 2],
}

/// What others say, and how far the most trusted of them is trusted.
#[derive(Clone, Copy, Debug, Default)]
struct Said {
    counts: Counts,
    trust: f32,
}

/// Evidence over all skills.
#[derive(Clone, Debug, Default)]
struct View {
    /// By evaluator and kind: right and wrong verdicts, as stored.
    totals: Vec<[Counts; 2]>,
    /// The accuracy expected of unclaimed and of claimed cells.
    kinds: [f32; 2],
}

impl Beliefs {
    pub(super) fn new(config: ThompsonConfig) -> Self {
        let view = View { kinds: [config.unclaimed, config.claimed], ..View::default() };
        let pool =
            PoolConfig { entries: config.opinions, payers: config.payers, trust: config.trust, voice: config.voice };
        Self {
            book: Book::new(config.evaluators),
            claims: Vec::new(),
            conduct: Vec::new(),
            audited: Vec::new(),
            columns: Vec::new(),
            views: [view.clone(), view],
            pool: Pool::new(pool),
            most: 0.0,
            patience: 4.0 * PATIENCE,
            scale: 1.0,
            config,
        }
    }

    /// Finds everyone's number; those who are new get one.
    pub(super) fn look(&mut self, market: &[Candidate], numbers: &mut Vec<u32>) {
        self.book.turn(market);
        numbers.clear();
        let mut is_moved = false;
        for (position, candidate) in market.iter().enumerate() {
            let (number, new) = self.book.at(position, candidate);
            if new {
                self.vacate(number);
            }
            if self.claims[number] != candidate.claims {
                self.claims[number] = candidate.claims;
                is_moved |= self.views[1].totals[number] != <[Counts; 2]>::default();
                self.sum_up(number);
            }
            numbers.push(number as u32);
        }
        // What was seen before the card was, or the card changed, counted as of the other kind.
        if is_moved {
            (0..self.columns.len()).filter_map(Skill::new).for_each(|skill| self.judge_kinds(skill));
        }
    }

    pub(super) fn number(&self, evaluator: Address) -> Option<usize> {
        self.book.find(evaluator)
    }

    /// The posterior of an evaluator's accuracy in a skill, if what others say is true, or if it is nothing but talk.
    pub(super) fn posterior(&self, number: usize, skill: Skill, pooled: bool) -> Beta {
        let view = &self.views[usize::from(pooled)];
        let expected = view.kinds[usize::from(self.claims[number].contains(skill))];
        let (own, said) = self.cell(number, skill);
        let part = if pooled { said.trust } else { 0.0 };
        let [right, wrong] = [own[0] + part * said.counts[0], own[1] + part * said.counts[1]];
        // Verdicts in its other skills, and how many more of them were right than was to be expected.
        let (mut elsewhere, mut beyond) = (-right - wrong, (right + wrong) * expected - right);
        for ([right, wrong], kind) in view.totals[number].iter().zip(view.kinds) {
            elsewhere += (right + wrong) * self.scale;
            beyond += (right - (right + wrong) * kind) * self.scale;
        }
        let elsewhere = elsewhere.max(0.0);
        let mean = (expected + beyond / (self.config.overall + elsewhere)).clamp(0.1, 0.9);
        let whole = if pooled { 1.0 } else { 0.0 };
        Beta {
            alpha: self.config.cell * mean + own[0] + whole * said.counts[0],
            beta: self.config.cell * (1.0 - mean) + own[1] + whole * said.counts[1],
        }
    }

    /// The expected accuracy.
    pub(super) fn mean(&self, number: usize, skill: Skill) -> f32 {
        let own = self.posterior(number, skill, false).mean();
        let trust = self.trusted(number, skill);
        if trust == 0.0 { own } else { own + trust * (self.posterior(number, skill, true).mean() - own) }
    }

    /// How far what others say about a cell is trusted.
    pub(super) fn trusted(&self, number: usize, skill: Skill) -> f32 {
        let (_, said) = self.cell(number, skill);
        if said.counts == [0.0; 2] { self.most } else { said.trust }
    }

    /// How many verdicts of this evaluator were seen, of all skills, faded and weighted.
    pub(super) fn seen(&self, number: usize) -> f32 {
        self.views[1].totals[number].as_flattened().iter().sum::<f32>() * self.scale
    }

    /// How many verdicts of this evaluator one has audited oneself, of all skills. What others say can be bought, and so can their making
    /// one forget; neither changes this.
    pub(super) fn audited(&self, number: usize) -> f32 {
        f32::from(self.audited[number])
    }

    pub(super) fn conduct(&self, number: usize) -> &Conduct {
        &self.conduct[number]
    }

    pub(super) fn trust_in(&self, payer: &Address) -> f32 {
        self.pool.trust_in(payer)
    }

    /// Takes in what an evaluator did for oneself.
    pub(super) fn learn(&mut self, evaluator: Address, skill: Skill, outcome: &CallOutcome) {
        let number = self.enter(evaluator);
        self.book.keep(number);
        self.conduct[number].learn(outcome, self.config.memory);
        let CallOutcome::Answered { right: Some(right), .. } = *outcome else { return };
        self.audited[number] = self.audited[number].saturating_add(1);
        self.scale *= 1.0 - 1.0 / self.config.memory_all;
        self.patience = (self.patience + PATIENCE).min(4.0 * PATIENCE);
        let keep = 1.0 - 1.0 / self.config.memory;
        let amount = 1.0 / self.scale;
        let own = &mut self.column(skill).own[number];
        *own = own.map(|count| count * keep);
        own[usize::from(!right)] += amount;
        let own = *own;
        // Whoever spoke of this cell was right or wrong about it; that changes what all they said is worth.
        self.pool.weigh(cell(skill.number(), number), own, self.scale);
        let columns = &mut self.columns;
        // Of some cells nobody says anything any more, since others' evidence took the room.
        columns.iter_mut().for_each(|column| column.said.fill(Said::default()));
        self.pool.sums(self.scale, |cell, (counts, trust)| {
            columns[cell as usize >> 16].said[cell as usize & 0xFFFF] = Said { counts, trust };
        });
        self.most = self.pool.most();
        (0..self.book.len()).for_each(|number| self.sum_up(number));
        self.judge_kinds(skill);
        self.rescale();
    }

    /// Takes in a verdict that another payer says was right or wrong.
    pub(super) fn hear(&mut self, evaluator: Address, skill: Skill, right: bool, payer: Address) {
        let number = self.enter(evaluator);
        let payer = self.pool.payer(payer);
        let at = cell(skill.number(), number);
        // What one is not trusted to add, one is not trusted to wipe out; and all of them together wipe out no more for being many.
        let fades = self.pool.trust(payer).min(self.patience);
        self.patience -= fades;
        self.scale *= 1.0 - fades / self.config.memory_all;
        self.pool.fade(at, 1.0 - self.pool.earned(payer) / self.config.memory);
        self.pool.add(at, payer, right, 1.0 / self.scale);
        let scale = self.scale;
        let own = self.column(skill).own[number];
        self.pool.weigh(at, own, scale);
        let (counts, trust) = self.pool.sum(at, scale);
        self.column(skill).said[number] = Said { counts, trust };
        self.most = self.pool.most();
        self.sum_up(number);
        self.judge_kinds(skill);
        self.rescale();
    }

    fn enter(&mut self, evaluator: Address) -> usize {
        let (number, new) = self.book.enter(evaluator);
        if new {
            self.vacate(number);
        }
        number
    }

    /// Makes room for an evaluator, and forgets who had its number before.
    fn vacate(&mut self, number: usize) {
        let (count, limit) = (self.book.len(), self.config.evaluators);
        extend(&mut self.claims, count, limit);
        extend(&mut self.conduct, count, limit);
        extend(&mut self.audited, count, limit);
        (self.claims[number], self.conduct[number], self.audited[number]) = Default::default();
        for view in &mut self.views {
            extend(&mut view.totals, count, limit);
            view.totals[number] = Default::default();
        }
        for (skill, column) in self.columns.iter_mut().enumerate() {
            extend(&mut column.own, count, limit);
            extend(&mut column.said, count, limit);
            (column.own[number], column.said[number]) = Default::default();
            self.pool.clear(cell(skill, number));
        }
    }

    /// The column of a skill, which may be new.
    fn column(&mut self, skill: Skill) -> &mut Column {
        let (count, limit) = (self.book.len(), self.config.evaluators);
        while self.columns.len() <= skill.number() {
            let mut column = Column::default();
            extend(&mut column.own, count, limit);
            extend(&mut column.said, count, limit);
            self.columns.push(column);
        }
        &mut self.columns[skill.number()]
    }

    /// Own and others' evidence, in verdicts.
    fn cell(&self, number: usize, skill: Skill) -> (Counts, Said) {
        let Some(column) = self.columns.get(skill.number()) else { return Default::default() };
        let said = column.said[number];
        let verdicts = |counts: Counts| counts.map(|count| count * self.scale);
        (verdicts(column.own[number]), Said { counts: verdicts(said.counts), ..said })
    }

    /// Evidence on a cell in a view, in verdicts.
    fn counts(&self, number: usize, skill: Skill, pooled: bool) -> Counts {
        let (own, said) = self.cell(number, skill);
        let part = if pooled { said.trust } else { 0.0 };
        [own[0] + part * said.counts[0], own[1] + part * said.counts[1]]
    }

    /// Sums up what is known of an evaluator over all skills.
    fn sum_up(&mut self, number: usize) {
        for pooled in [false, true] {
            let mut totals = [[0.0; 2]; 2];
            for skill in (0..self.columns.len()).filter_map(Skill::new) {
                let counts = self.counts(number, skill, pooled);
                let total = &mut totals[usize::from(self.claims[number].contains(skill))];
                *total = [total[0] + counts[0] / self.scale, total[1] + counts[1] / self.scale];
            }
            self.views[usize::from(pooled)].totals[number] = totals;
        }
    }

    /// What claims have proved worth, in all skills, after something was seen in one.
    fn judge_kinds(&mut self, changed: Skill) {
        for pooled in [false, true] {
            let mut voices = [(0.0, 0.0); 2];
            for number in 0..self.book.len() {
                let [right, wrong] = self.counts(number, changed, pooled);
                let seen = right + wrong;
                if seen > 0.0 {
                    let sum = &mut voices[usize::from(self.claims[number].contains(changed))];
                    let voice = seen / (seen + self.config.cell);
                    *sum = (sum.0 + voice * right / seen, sum.1 + voice);
                }
            }
            self.columns[changed.number()].voices[usize::from(pooled)] = voices;
            let prior = self.config.card;
            for (kind, expected) in [self.config.unclaimed, self.config.claimed].into_iter().enumerate() {
                let (mut sum, mut weight) = (expected * prior, prior);
                for column in &self.columns {
                    let voice = column.voices[usize::from(pooled)][kind];
                    (sum, weight) = (sum + voice.0, weight + voice.1);
                }
                self.views[usize::from(pooled)].kinds[kind] = (sum / weight).clamp(0.35, 0.85);
            }
        }
    }

    /// Makes stored units verdicts again, before they grow too large.
    fn rescale(&mut self) {
        if self.scale > 1e-3 {
            return;
        }
        let scale = std::mem::replace(&mut self.scale, 1.0);
        for column in &mut self.columns {
            for counts in column.own.iter_mut().chain(column.said.iter_mut().map(|said| &mut said.counts)) {
                *counts = counts.map(|count| count * scale);
            }
        }
        self.pool.fade_all(scale);
        (0..self.book.len()).for_each(|number| self.sum_up(number));
    }

    /// Bytes of memory, by capacity.
    pub(super) fn bytes(&self) -> usize {
        fn of<T>(items: &Vec<T>) -> usize {
            items.capacity() * size_of::<T>()
        }
        let columns: usize = self.columns.iter().map(|column| of(&column.own) + of(&column.said)).sum();
        let views: usize = self.views.iter().map(|view| of(&view.totals)).sum();
        size_of::<Self>()
            + of(&self.columns)
            + columns
            + views
            + of(&self.claims)
            + of(&self.conduct)
            + of(&self.audited)
            + self.book.bytes()
            + self.pool.bytes()
    }
}

const fn cell(skill: usize, number: usize) -> u32 {
    (skill << 16 | number) as u32
}

fn extend<T: Clone + Default>(items: &mut Vec<T>, count: usize, limit: usize) {
    while items.len() < count {
        grow(items, limit);
        items.push(T::default());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tower_x402::Usdc;

    const A: Address = Address::repeat_byte(1);
    const B: Address = Address::repeat_byte(2);

    /// Forgets nothing, and does not generalize from one cell to another.
    fn plain() -> ThompsonConfig {
        ThompsonConfig { memory: 1e6, memory_all: 1e6, card: 1e6, overall: 1e6, ..ThompsonConfig::default() }
    }

    /// Two evaluators, of which the first claims skill 0.
    fn beliefs(config: ThompsonConfig) -> Beliefs {
        let mut beliefs = Beliefs::new(config.sound());
        let candidate = |evaluator, claims| Candidate { evaluator, claims, price: Usdc::ZERO, first_seen: 0 };
        let market = [candidate(A, SkillSet::from_iter([skill(0)])), candidate(B, SkillSet::default())];
        beliefs.look(&market, &mut Vec::new());
        beliefs
    }

    fn skill(number: usize) -> Skill {
        Skill::new(number).unwrap()
    }

    fn audit(right: bool) -> CallOutcome {
        CallOutcome::answered(1.0, None, Some(right))
    }

    fn near(a: f32, b: f32) {
        assert!((a - b).abs() < 2e-3 * b.abs().max(1.0), "{a} is not {b}");
    }

    #[test]
    fn verdicts_are_added_to_what_the_card_claims() {
        let mut beliefs = beliefs(plain());
        near(beliefs.mean(0, skill(0)), 0.65);
        near(beliefs.mean(0, skill(1)), 0.55);
        for right in [true, true, false, true, true] {
            beliefs.learn(A, skill(0), &audit(right));
        }
        let Beta { alpha, beta } = beliefs.posterior(0, skill(0), false);
        near(alpha, 3.0 * 0.65 + 4.0);
        near(beta, 3.0 * 0.35 + 1.0);
        near(beliefs.mean(0, skill(0)), (3.0 * 0.65 + 4.0) / 8.0);
    }

    #[test]
    fn what_an_evaluator_does_elsewhere_moves_what_is_expected_of_it() {
        let mut beliefs = beliefs(ThompsonConfig { overall: 4.0, ..plain() });
        for _ in 0..4 {
            beliefs.learn(A, skill(1), &audit(true));
        }
        // Four of four, where 0.55 was expected: 1.8 beyond, against a weight of 4.
        near(beliefs.mean(0, skill(0)), 0.65 + 4.0 * 0.45 / (4.0 + 4.0));
        near(beliefs.mean(1, skill(0)), 0.55);
        near(beliefs.mean(0, skill(1)), (3.0 * 0.55 + 4.0) / 7.0);
    }

    #[test]
    fn claims_are_worth_what_claims_have_proved_worth() {
        let mut beliefs = beliefs(ThompsonConfig { card: 4.0, ..plain() });
        for _ in 0..3 {
            beliefs.learn(A, skill(0), &audit(false));
        }
        // One voice of 3 / (3 + 3) for zero, against four for 0.65.
        near(beliefs.views[0].kinds[1], 4.0 * 0.65 / 4.5);
        near(beliefs.views[0].kinds[0], 0.55);
    }

    #[test]
    fn others_are_believed_as_far_as_they_are_trusted() {
        let mut beliefs = beliefs(ThompsonConfig { trust: 0.4, ..plain() });
        for _ in 0..4 {
            beliefs.hear(A, skill(0), true, B);
        }
        let (own, said) = (0.65, (3.0 * 0.65 + 4.0) / 7.0);
        near(beliefs.mean(0, skill(0)), own + 0.4 * (said - own));
        near(beliefs.trust_in(&B), 0.4);
        beliefs.learn(A, skill(0), &audit(true));
        // One right against four right: B(6, 1) / (B(2, 1) · B(5, 1)) = 10/6.
        near(beliefs.trust_in(&B), 1.0 / (1.0 + 0.6 / 0.4 * 0.6));
        beliefs.learn(A, skill(0), &audit(false));
        beliefs.learn(A, skill(0), &audit(false));
        assert!(beliefs.trust_in(&B) < 0.4);
    }

    #[test]
    fn what_was_said_goes_with_those_who_said_it() {
        let mut beliefs = beliefs(ThompsonConfig { opinions: 2, ..plain() });
        for _ in 0..4 {
            beliefs.hear(A, skill(0), true, Address::repeat_byte(7));
        }
        assert!(beliefs.mean(0, skill(0)) > 0.7);
        // Others have more to say about somebody else, and there is room for two.
        for payer in [8, 9] {
            (0..10).for_each(|_| beliefs.hear(B, skill(1), true, Address::repeat_byte(payer)));
        }
        beliefs.learn(B, skill(2), &audit(true));
        near(beliefs.mean(0, skill(0)), 0.65);
    }

    #[test]
    fn no_more_is_remembered_than_the_memory_holds() {
        let config = ThompsonConfig { memory: 20.0, ..plain() };
        let mut beliefs = beliefs(config);
        for _ in 0..500 {
            beliefs.learn(A, skill(0), &audit(true));
        }
        let Beta { alpha, beta } = beliefs.posterior(0, skill(0), false);
        near(alpha + beta, 3.0 + 20.0);
        // A change is seen after as many verdicts as are remembered.
        for _ in 0..20 {
            beliefs.learn(A, skill(0), &audit(false));
        }
        assert!(beliefs.mean(0, skill(0)) < 0.45);
    }

    #[test]
    fn who_is_not_seen_any_more_is_forgotten_as_others_are_seen() {
        let config = ThompsonConfig { memory_all: 50.0, ..plain() };
        let mut beliefs = beliefs(config);
        for _ in 0..10 {
            beliefs.learn(A, skill(0), &audit(false));
        }
        let before = beliefs.mean(0, skill(0));
        for _ in 0..1_000 {
            beliefs.learn(B, skill(1), &audit(true));
        }
        assert!(before < 0.25);
        near(beliefs.mean(0, skill(0)), 0.65);
        assert!(beliefs.seen(0) < 0.01 && beliefs.seen(1) < 51.0 && beliefs.scale > 1e-4);
        assert_eq!((beliefs.audited(0), beliefs.audited(1)), (10.0, 1_000.0), "it is no stranger again");
    }

    #[test]
    fn what_one_has_audited_is_not_forgotten_for_strangers_after_a_restart() {
        let [c, d, e] = [3, 4, 5].map(Address::repeat_byte);
        let mut beliefs = Beliefs::new(ThompsonConfig { evaluators: 3, ..plain() }.sound());
        beliefs.learn(A, skill(0), &audit(false));
        beliefs.learn(B, skill(0), &audit(false));
        [c, d].into_iter().for_each(|stranger| beliefs.hear(stranger, skill(0), true, e));
        let stranger =
            |evaluator| Candidate { evaluator, claims: SkillSet::default(), price: Usdc::ZERO, first_seen: 0 };
        beliefs.look(&[e, A, B].map(stranger), &mut Vec::new());
        let audited = |evaluator| beliefs.number(evaluator).map(|number| beliefs.audited(number));
        assert_eq!([A, B, c, d, e].map(audited), [Some(1.0), Some(1.0), None, None, Some(0.0)]);
    }

    #[test]
    fn what_claims_are_worth_is_the_same_whether_the_cards_or_the_verdicts_were_seen_first() {
        let claimants: Vec<_> = (1..11)
            .map(|byte| Candidate {
                evaluator: Address::repeat_byte(byte),
                claims: SkillSet::from_iter([skill(0)]),
                price: Usdc::ZERO,
                first_seen: 0,
            })
            .collect();
        let config = ThompsonConfig { card: 4.0, ..plain() }.sound();
        let [mut told, mut rebuilt] = [(); 2].map(|()| Beliefs::new(config.clone()));
        let learn = |beliefs: &mut Beliefs| {
            for claimant in &claimants {
                (0..40).for_each(|_| beliefs.learn(claimant.evaluator, skill(0), &audit(true)));
            }
        };
        told.look(&claimants, &mut Vec::new());
        learn(&mut told);
        learn(&mut rebuilt);
        rebuilt.look(&claimants, &mut Vec::new());
        for (told, rebuilt) in told.views.iter().zip(&rebuilt.views) {
            near(rebuilt.kinds[0], told.kinds[0]);
            near(rebuilt.kinds[1], told.kinds[1]);
        }
    }

    #[test]
    fn a_number_that_changes_hands_takes_nothing_along() {
        let mut beliefs = beliefs(ThompsonConfig { evaluators: 2, ..plain() });
        beliefs.learn(A, skill(0), &audit(false));
        beliefs.hear(A, skill(1), false, B);
        let newcomers = [3, 4].map(|byte| Candidate {
            evaluator: Address::repeat_byte(byte),
            claims: SkillSet::from_iter([skill(0)]),
            price: Usdc::ZERO,
            first_seen: 0,
        });
        let mut numbers = Vec::new();
        beliefs.look(&newcomers, &mut numbers);
        assert_eq!(beliefs.number(A), None);
        for number in [0, 1] {
            near(beliefs.mean(number, skill(0)), 0.65);
            near(beliefs.mean(number, skill(1)), 0.55);
            assert_eq!((beliefs.seen(number), beliefs.audited(number)), (0.0, 0.0));
        }
    }
}
