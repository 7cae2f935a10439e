//! The settings of the selector, and of what it believes.

/// The settings of a [`Thompson`](super::Thompson) selector. Nobody needs to change them; [docs/market.md] says what each is worth.
///
/// [docs/market.md]: https://github.com/tower-x402/tower-x402/blob/main/docs/market.md
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ThompsonConfig {
    /// How many comparisons the prior counts as, above 0. Default: 3.
    pub prior: f32,
    /// The worth expected where a card claims the skill, between -1 and 1. Default: 0.3.
    pub claimed_worth: f32,
    /// The worth expected where it does not, between -1 and 1. Default: 0.1.
    pub unclaimed_worth: f32,
    /// The trust in a payer of which nothing is known, between 0 and 1. Default: 0.4.
    pub initial_trust: f32,
    /// After how many further comparisons, of any evaluators, evidence has faded to 37 %. Default: 250.
    pub memory: f32,
    /// The number of evaluators explored in an audit at most. Default: 3.
    pub explored_per_audit: usize,
    /// The share of the budget that exploration may cost, from 0 to 1. Half of it may be used up in the beginning. Default: 0.05.
    pub exploration_share: f64,
    /// The speed at which the price of money moves, from 0 to 1. Default: 0.03.
    pub pace: f64,
}

impl Default for ThompsonConfig {
    fn default() -> Self {
        Self {
            prior: 3.0,
            claimed_worth: 0.3,
            unclaimed_worth: 0.1,
            initial_trust: 0.4,
            memory: 250.0,
            explored_per_audit: 3,
            exploration_share: 0.05,
            pace: 0.03,
        }
    }
}
