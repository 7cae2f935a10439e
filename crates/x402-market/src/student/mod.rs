//! The buyer of verdicts: [`Student`] finds evaluators, hires a panel of them for each submission, pays them, and aggregates their
//! verdicts.
//!
//! | file | question it answers |
//! |---|---|
//! | `builder.rs` | which settings are there? |
//! | `panel.rs` | what happens to one submission? |
//! | `state.rs` | what does the student know, and what does its lock guard? |
//! | `discovery.rs` | which evaluators are known and can be hired? |
//! | `aggregate.rs` | how do several verdicts become one? |
//! | `audit.rs` | how is a known truth used without evaluators noticing? |
//! | `feedback.rs` | what does the caller get, and why do evaluators fail? |
//! | `spending.rs` | what did it cost, and what may still be promised? |

mod aggregate;
mod audit;
mod builder;
mod discovery;
mod feedback;
mod panel;
mod spending;
mod state;

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use alloy_primitives::Address;
pub use audit::{Gold, Truth};
pub use builder::StudentBuilder;
pub use discovery::{CardSource, DiscoveryReport, FoundEvaluator, RefusedEvaluator, RefusedReason, SourceError};
pub use feedback::{AggregateVerdict, CallPayment, Failure, Feedback, Hire, OutputFeedback, PanelVerdict};
pub use spending::{EvaluatorAccount, SpendingReport};
use state::State;
use tokio::sync::{Semaphore, watch};
use tower_x402::{
    Clock, Usdc,
    client::{Budget, Payer},
};

use super::{
    CardFetcher, EvaluationClient, Submission,
    evidence::{Evidence, EvidenceError, EvidenceLog},
};

/// A buyer of verdicts with a budget.
///
/// ```no_run
/// # async fn example(key: alloy_signer_local::PrivateKeySigner) -> Result<(), Box<dyn std::error::Error>> {
/// use tower_x402::client::{Budget, DiscoveryClient, Payer};
/// use x402_market::{Gold, Student, Submission, Task};
///
/// let budget = Budget::builder().per_payment("$0.01".parse()?).total("$1.00".parse()?).build();
/// let gold = Gold::new(Task::new("reasoning", "Why do we have seasons?")?)
///     .good("Because the Earth's axis is tilted.")?
///     .bad("Because the Earth is nearer to the Sun in summer.")?;
/// let student = Student::builder(Payer::builder(key).budget(budget).build())
///     .source(DiscoveryClient::builder("https://www.x402.org/facilitator").build()?)
///     .gold(gold)
///     .tasks(500)
///     .panel_size(3)
///     .build()?;
/// student.discover().await;
///
/// let task = Task::new("reasoning", "Why is the sky blue?")?;
/// let answers = Submission::group(task, ["Because of Rayleigh scattering.", "It just is."])?;
/// let feedback = student.evaluate(&answers).await?;
/// for output in &feedback.outputs {
///     match output.verdict {
///         Some(verdict) => println!("{} with confidence {}", verdict.score, verdict.confidence),
///         None => println!("no verdict: {:?}", feedback.hires),
///     }
/// }
/// println!("{} paid for this submission, {} in all", feedback.paid, student.spending().paid);
/// # Ok(()) }
/// ```
///
/// # How evaluators are hired
///
/// [`discover`](Self::discover) asks the [sources](StudentBuilder::source) for evaluators and verifies their signed cards. For each
/// submission, the [selector](StudentBuilder::selector) chooses up to [`panel_size`](StudentBuilder::panel_size) of them, by accuracy and
/// price, or none if keeping the money is worth more. They are asked at the same time. Each sees a random id in place of the task's own.
///
/// # What you get
///
/// [`Feedback`] has one [verdict](OutputFeedback::verdict) for each output: the members' scores, calibrated to a common scale and weighted
/// by how likely each member is right. It also has every member's own verdict.
///
/// # What it costs
///
/// Each member is paid the price on its card for each output. A group that exceeds an evaluator's limit, or the budget's limit per payment,
/// is sent in several parts, and each part is paid by itself. Spending never exceeds the payer's [`Budget`], and is paced so that the budget
/// lasts for [`tasks`](StudentBuilder::tasks) submissions. [`spending`](Self::spending) reports what was paid to whom.
///
/// # What happens if evaluators fail
///
/// A member that cannot be reached, misquotes its price, answers late or answers no valid evaluation is recorded, and replaced while
/// replacements, money and time last. [`Hire::failure`] says what happened. A member that demands more than on its card is not paid.
///
/// # How it learns who is right
///
/// Ordinary submissions show only who answers. Accuracy is learned from audits: [gold tasks](Gold) that are hidden among the submissions,
/// and submissions whose truth you know ([`evaluate_known`](Self::evaluate_known)). A gold task is judged before the submission that draws
/// it, which takes that much longer.
///
/// # Clones and cancellation
///
/// Clones are the same student, and may be used from many tasks at once. If the future of an evaluation is dropped, calls that have signed
/// a payment go on in the background, so that the spending report is right; see [`wait_until_idle`](Self::wait_until_idle).
#[derive(Clone)]
pub struct Student(Arc<Inner>);

struct Inner {
    payer: Payer,
    client: EvaluationClient,
    /// For evaluators that only untrusted sources named.
    public_client: Option<EvaluationClient>,
    cards: CardFetcher,
    evidence: EvidenceLog,
    reports: EvidenceLog,
    /// Each with whether its evaluators must be on public hosts.
    sources: Vec<(Arc<dyn CardSource>, bool)>,
    clock: Arc<dyn Clock>,
    panel_size: usize,
    max_replacements: usize,
    deadline: Duration,
    /// Seconds.
    card_recheck_interval: u64,
    max_named: usize,
    permits: Semaphore,
    /// The number of calls under way.
    calls: Arc<watch::Sender<usize>>,
    state: Mutex<State>,
}

impl Student {
    /// Creates a builder. Evaluators are paid from `payer`'s budget.
    pub fn builder(payer: Payer) -> StudentBuilder {
        StudentBuilder::new(payer)
    }

    /// Asks the sources for evaluators, and fetches their cards. Call it again at any time to find new evaluators and changed terms.
    pub async fn discover(&self) -> DiscoveryReport {
        discovery::discover(&self.0).await
    }

    /// Buys verdicts on a submission.
    ///
    /// Evaluators that fail are no error: the feedback says for which outputs there is no verdict, and why.
    ///
    /// # Errors
    /// [`StudentError`] if no evaluator could be asked. Nothing was paid for this submission then, though a gold task before it may have
    /// been.
    pub async fn evaluate(&self, submission: &Submission) -> Result<Feedback, StudentError> {
        panel::evaluate(&self.0, submission, None).await
    }

    /// Buys verdicts on a submission whose truth is known, and learns which evaluators are right.
    ///
    /// Evaluators cannot tell it from others. A few more than the panel may be asked in the background, to learn about them too.
    ///
    /// # Errors
    /// [`StudentError::TruthMismatch`] if the truth is about other outputs, and what [`evaluate`](Self::evaluate) returns.
    pub async fn evaluate_known(&self, submission: &Submission, truth: &Truth) -> Result<Feedback, StudentError> {
        if !truth.fits(submission) {
            return Err(StudentError::TruthMismatch);
        }
        panel::evaluate(&self.0, submission, Some(truth.clone())).await
    }

    /// Returns what was bought from which evaluator, and what it cost.
    pub fn spending(&self) -> SpendingReport {
        let budget = self.budget();
        let mut state = self.0.state();
        state.spending.reconcile(budget.journal());
        state.spending.report(state.available.promised(), budget.spent())
    }

    /// Waits until no call is under way: neither audits in the background nor calls that were given up.
    pub async fn wait_until_idle(&self) {
        // The sender is in `self`, so that waiting cannot fail.
        let _ = self.0.calls.subscribe().wait_for(|calls| *calls == 0).await;
    }

    /// Adds a report: evidence of another payer, for example from a [directory](crate::directory).
    ///
    /// Check first that the reported payment took place: anybody can make up payments. The selector decides how far it trusts the payer.
    /// Reports are recorded apart from the student's own evidence.
    ///
    /// Returns `true` if the report is new. Each payment supports one report; reports older than those that the log has dropped are not new.
    ///
    /// # Errors
    /// [`EvidenceError::NotAReport`] if the evidence names no payment, a payment of this student, or a payment by the evaluator itself;
    /// otherwise why the log did not take it.
    pub fn add_report(&self, evidence: Evidence) -> Result<bool, EvidenceError> {
        let is_foreign = |payer: &Address| *payer != self.0.payer.address() && *payer != evidence.evaluator;
        let payer = evidence.payment.map(|payment| payment.payer).filter(is_foreign);
        let payer = payer.ok_or(EvidenceError::NotAReport)?;
        let mut state = self.0.state();
        let skill = state.skills.get(&evidence.skill);
        let observation = skill.map(|skill| evidence.observation(skill));
        match self.0.reports.record(evidence, self.0.clock.now()) {
            Ok(()) => {}
            Err(EvidenceError::Duplicate | EvidenceError::TooOld) => return Ok(false),
            Err(error) => return Err(error),
        }
        if let Some(observation) = observation {
            state.selector.learn_report(payer, &observation);
        }
        Ok(true)
    }

    /// Returns the probability that a verdict of this evaluator is right, by the selector's current estimate.
    pub fn expected_accuracy(&self, evaluator: Address, skill: &str) -> Option<f64> {
        let state = self.0.state();
        state.selector.expected_accuracy(evaluator, state.skills.get(skill)?)
    }

    /// Returns the number of known evaluators.
    pub fn known_evaluators(&self) -> usize {
        self.0.state().evaluators.len()
    }

    /// Returns the budget that evaluators are paid from.
    pub fn budget(&self) -> &Budget {
        self.0.payer.budget()
    }

    /// Returns the log of other payers' reports.
    pub fn reports(&self) -> &EvidenceLog {
        &self.0.reports
    }

    /// Returns the log of the student's own evidence.
    pub fn evidence(&self) -> &EvidenceLog {
        &self.0.evidence
    }
}

impl Inner {
    /// No method of the state panics halfway through a change, so the data behind a poisoned lock is sound.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn client(&self, is_untrusted: bool) -> &EvaluationClient {
        self.public_client.as_ref().filter(|_| is_untrusted).unwrap_or(&self.client)
    }
}

debug_fields!(Student |this| { payer: this.0.payer, panel_size: this.0.panel_size });

/// The reason why no evaluator was asked, or why a student could not be built.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StudentError {
    /// No known evaluator has the skill. Discover evaluators, if need be from other sources.
    #[error("no known evaluator has the skill {skill:?}")]
    NoEvaluators {
        /// The skill of the task.
        skill: String,
    },
    /// The budget does not cover the cheapest evaluator. Raise the budget's total.
    #[error("budget exhausted: {remaining} remain, and the cheapest evaluator costs {least}")]
    BudgetExhausted {
        /// What remains, without what is promised to calls under way.
        remaining: Usdc,
        /// The least that the submission would cost.
        least: Usdc,
    },
    /// The student has had work for as many skills as it can tell apart. Use another student.
    #[error("a student can have work for at most {limit} skills")]
    TooManySkills {
        /// The limit.
        limit: usize,
    },
    /// The truth is about other outputs than those of the submission.
    #[error("the truth does not fit the submission's outputs")]
    TruthMismatch,
    /// No HTTP client could be created: the machine's TLS configuration cannot be used.
    #[error("could not create an HTTP client")]
    Http,
    /// The operating system gave no randomness.
    #[error("the operating system gave no randomness")]
    Randomness,
}
