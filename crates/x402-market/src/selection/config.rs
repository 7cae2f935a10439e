//! How a Thompson selector thinks.

/// What a [`Thompson`](super::Thompson) selector believes before it has seen anything, and how fast it changes its mind.
///
/// ```
/// use x402_market::selection::{Thompson, ThompsonConfig};
///
/// let mut config = ThompsonConfig::default();
/// config.newcomers = 0.02;
/// let selector = Thompson::new(config, 1);
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ThompsonConfig {
    /// The accuracy expected where a card claims the skill; 0.65.
    pub claimed: f32,
    /// The accuracy expected where it does not; 0.55.
    pub unclaimed: f32,
    /// How many well-known evaluators' performance these two are worth; 4.
    pub card: f32,
    /// How many verdicts in other skills say as much about an evaluator as its kind does; 4.
    pub overall: f32,
    /// How many verdicts in a skill say as much about an evaluator as all of the above; 3, at least 1.
    pub cell: f32,
    /// How many verdicts per evaluator and skill are remembered; the older fade. 40, at least 2.
    pub memory: f32,
    /// After how many verdicts on whomever one that is not renewed has faded to 37 %; 400, at least 2.
    pub memory_all: f32,
    /// How much a proper score (Brier) of the stated confidence moves the value; 0.25. An evaluator that is as sure as it is right
    /// gains nothing from it, one that is surer loses.
    pub calibration: f32,
    /// How far a payer is trusted of whom nothing is known, between 0 and 1; 0.4.
    pub trust: f32,
    /// How many verdicts on an evaluator and skill one payer is heard with; 10.
    pub voice: f32,
    /// How fast the price of money moves; 0.03.
    pub pace: f64,
    /// How many more than wanted are examined in an audit; 3.
    pub examinees: usize,
    /// What examining them may cost, as a share of the budget; 0.05. Half of it may be used up in the beginning.
    pub examinations: f64,
    /// The share of tasks without an audit in which evaluators are drawn as in an audit; 0.02.
    pub decoys: f64,
    /// What newcomers may cost, as a share of the budget; 0.1.
    pub newcomers: f64,
    /// How many audits of one's own make a newcomer an acquaintance; 5. What others say does not: it can be bought.
    pub acquaintance: f32,
    /// How many evaluators are remembered, those offered or seen at work last; 1,024, at most 65,535. Candidates beyond that number are
    /// not looked at, so it should be more than are ever offered at once.
    pub evaluators: usize,
    /// How many other payers are remembered, those trusted most; 1,024, at most 65,535.
    pub payers: usize,
    /// How many of their opinions (one payer on one evaluator's skill) are remembered; 8,192.
    pub opinions: usize,
}

impl Default for ThompsonConfig {
    fn default() -> Self {
        Self {
            claimed: 0.65,
            unclaimed: 0.55,
            card: 4.0,
            overall: 4.0,
            cell: 3.0,
            memory: 40.0,
            memory_all: 400.0,
            calibration: 0.25,
            trust: 0.4,
            voice: 10.0,
            pace: 0.03,
            examinees: 3,
            examinations: 0.05,
            decoys: 0.02,
            newcomers: 0.1,
            acquaintance: 5.0,
            evaluators: 1_024,
            payers: 1_024,
            opinions: 8_192,
        }
    }
}

impl ThompsonConfig {
    /// The nearest one that makes sense.
    pub(super) fn sound(mut self) -> Self {
        let probability = |p: f32| if p.is_nan() { 0.5 } else { p.clamp(0.05, 0.95) };
        let share = |p: f64| if p.is_nan() { 0.0 } else { p.clamp(0.0, 1.0) };
        let between = |value: f32, least: f32| if value.is_nan() { least } else { value.clamp(least, 1e6) };
        self.claimed = probability(self.claimed);
        self.unclaimed = probability(self.unclaimed);
        self.trust = probability(self.trust);
        self.card = between(self.card, 0.1);
        self.overall = between(self.overall, 0.1);
        self.cell = between(self.cell, 1.0);
        self.memory = between(self.memory, 2.0);
        self.memory_all = between(self.memory_all, 2.0);
        self.calibration = between(self.calibration, 0.0);
        self.voice = between(self.voice, 0.0);
        self.acquaintance = between(self.acquaintance, 0.0);
        self.pace = share(self.pace);
        self.examinations = share(self.examinations);
        self.decoys = share(self.decoys);
        self.newcomers = share(self.newcomers);
        self.evaluators = self.evaluators.clamp(1, usize::from(u16::MAX));
        self.payers = self.payers.clamp(1, usize::from(u16::MAX));
        self.opinions = self.opinions.max(1);
        self
    }
}
