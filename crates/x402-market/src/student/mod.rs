//! The buyer of verdicts: [`Student`] finds evaluators, hires a panel of them for each submission, pays them, and aggregates their
//! verdicts.
//!
//! | file | question it answers |
//! |---|---|
//! | `builder.rs` | which settings are there? |
//! | `panel.rs` | what happens to one submission? |
//! | `state.rs` | what does the student know, and what does its lock guard? |
//! | `discovery.rs` | where are evaluators found, and is what they show in order? |
//! | `known.rs` | which evaluators are known and can be hired? |
//! | `aggregate.rs` | how do several verdicts become one? |
//! | `sent.rs` | what is sent of a submission? |
//! | `audit.rs`, `truth.rs` | what does the truth show about those who judged? |
//! | `teaching.rs` | what is an evaluator told afterwards? |
//! | `feedback.rs` | what does the caller get, and why do evaluators fail? |
//! | `spending.rs` | what did it cost, and what may still be promised? |

mod aggregate;
mod audit;
mod builder;
mod discovery;
mod feedback;
mod known;
mod panel;
mod sent;
mod spending;
mod state;
mod teaching;
mod truth;

use std::{
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};

use alloy_primitives::Address;
use alloy_signer::Signer;
pub use builder::StudentBuilder;
pub use discovery::{CardSource, DiscoveryReport, FoundEvaluator, RefusedEvaluator, SourceError};
pub use feedback::{AggregateVerdict, CallPayment, Failure, Feedback, Hire, OutputFeedback, PanelVerdict};
pub use known::RefusedReason;
pub use spending::{EvaluatorAccount, SpendingReport};
use state::State;
use tokio::sync::{Semaphore, watch};
use tower_x402::{
    Clock, Usdc,
    client::{Budget, Payer},
};
pub use truth::{AuditReport, AuditedEvaluation, Truth};

use super::{
    CardFetcher, EvaluationClient, Submission,
    evidence::{Evidence, EvidenceError, EvidenceLog},
    lock::lock,
};

/// A buyer of verdicts with a budget.
///
/// ```no_run
/// # async fn example(key: alloy_signer_local::PrivateKeySigner) -> Result<(), Box<dyn std::error::Error>> {
/// use tower_x402::client::{Budget, Payer};
/// use x402_bazaar::DiscoveryClient;
/// use x402_market::{Student, Submission, Task, Truth};
///
/// let budget = Budget::builder().per_payment("$0.01".parse()?).total("$1.00".parse()?).build();
/// let student = Student::builder(Payer::builder(key).budget(budget).build())
///     .source(DiscoveryClient::builder("https://www.x402.org/facilitator").build()?)
///     .tasks(500)
///     .panel_size(3)
///     .build()?;
/// student.discover().await;
///
/// let task = Task::new("reasoning", "Why is the sky blue?")?;
/// let answers = Submission::group(task, ["Because of Rayleigh scattering.", "It just is."])?;
/// let feedback = student.evaluate(&answers).await?;
/// match feedback.rewards() {
///     Some(rewards) => println!("{rewards:?} for {}", feedback.paid),
///     None => println!("nothing to learn: {:?}", feedback.hires),
/// }
/// // Of one group in twenty, find out the truth.
/// student.audit(&feedback, &Truth::good([true, false])).await?;
/// println!("{} paid in all", student.spending().paid);
/// # Ok(()) }
/// ```
///
/// # How evaluators are hired
///
/// [`discover`](Self::discover) asks the [sources](StudentBuilder::source) for evaluators and verifies their signed cards. For each
/// submission, the [selector](StudentBuilder::selector) chooses up to [`panel_size`](StudentBuilder::panel_size) of them, by worth and
/// price, or none if keeping the money is worth more. They are asked at the same time. Each sees a random id in place of the task's own.
///
/// # What you get
///
/// [`Feedback`] has one [verdict](OutputFeedback::verdict) for each output: the members' scores, standardized within the group, since a
/// harsh and a lenient judge mean the same by different numbers, and averaged with the squares of their expected worth as weights. It also has
/// every member's own verdict.
///
/// # What it costs
///
/// Each member is paid the price on its card for each output. Identical outputs are paid for once. If all outputs are the same, no verdict
/// could tell them apart, and nothing is bought, unless there are [anchors](Submission::with_anchor) to compare them with. A group that exceeds an evaluator's limit, or the budget's limit per payment,
/// is sent in several parts, and each part is paid by itself. Spending never exceeds the payer's [`Budget`], and is paced so that the budget
/// lasts for [`tasks`](StudentBuilder::tasks) submissions. [`spending`](Self::spending) reports what was paid to whom.
///
/// # What happens if evaluators fail
///
/// A member that cannot be reached, misquotes its price, answers late or answers no valid evaluation is recorded, and replaced while
/// replacements, money and time last. [`Hire::failure`] says what happened. A member that demands more than on its card is not paid.
///
/// # How it learns whom to hire
///
/// Submissions show only who answers. What an evaluator is worth is learned from [audits](Self::audit): you find out the truth about outputs
/// that were judged, in whatever way and as late as you like. A student without audits chooses by prices and claims; [`Feedback::audits`]
/// and [`SpendingReport::audits`] say so. [Anchors](Submission::with_anchor) make audits of groups count in which all outputs are equally
/// good.
///
/// # Clones and cancellation
///
/// Clones are the same student, and may be used from many tasks at once. If the future of an evaluation is dropped, calls that have signed
/// a payment go on in the background, so that the spending report is right; see [`wait_until_idle`](Self::wait_until_idle).
#[derive(Clone)]
pub struct Student(Arc<Inner>);

struct Inner {
    payer: Payer,
    /// The key that signs lessons, if they are allowed.
    teacher: Option<Arc<dyn Signer + Send + Sync>>,
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
    max_named: usize,
    permits: Semaphore,
    /// The number of calls under way.
    calls: Arc<watch::Sender<usize>>,
    state: Mutex<State>,
}

impl Student {
    /// Asks the sources for evaluators, and fetches their cards. Call it again at any time to find new evaluators and changed terms.
    pub async fn discover(&self) -> DiscoveryReport {
        discovery::discover(&self.0).await
    }

    /// Buys verdicts on a submission.
    ///
    /// Evaluators that fail are no error: the feedback says for which outputs there is no verdict, and why.
    ///
    /// # Errors
    /// [`StudentError`] if no evaluator could be asked. Nothing was paid then.
    pub async fn evaluate(&self, submission: &Submission) -> Result<Feedback, StudentError> {
        panel::evaluate(&self.0, submission).await
    }

    /// Compares the verdicts of a feedback with the truth, and learns from it what their evaluators are worth.
    ///
    /// It can be called at any time, also after a restart. It counts for everyone who judged. Then it asks up to three further evaluators about
    /// the same outputs, within a share of the budget, and waits for them. Nobody can recognize an audit that is decided on after the answer.
    /// Another audit of the same feedback changes nothing. Where [`teach`](StudentBuilder::teach) allows it, evaluators that take lessons are
    /// then told the truth about what they judged.
    ///
    /// # Errors
    /// [`StudentError::TruthMismatch`] if the truth is about another number of outputs.
    pub async fn audit(&self, feedback: &Feedback, truth: &Truth) -> Result<AuditReport, StudentError> {
        audit::audit(&self.0, feedback, truth).await
    }

    /// Returns what was bought from which evaluator, and what it cost.
    pub fn spending(&self) -> SpendingReport {
        let budget = self.budget();
        let mut state = self.0.state();
        state.spending.reconcile(budget.journal());
        state.spending.report(state.available.promised(), budget.spent())
    }

    /// Waits until no call is under way, not even one that was given up.
    pub async fn wait_until_idle(&self) {
        // The sender is in `self`, so that waiting cannot fail.
        let _ = self.0.calls.subscribe().wait_for(|calls| *calls == 0).await;
    }

    /// Adds a report: evidence of another payer, for example from a directory (crate `x402-directory`).
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

    /// Returns what this evaluator is expected to be worth, by the selector's current estimate: the
    /// [ordering advantage](crate::evidence::Pairs::worth) D, from -1 to 1.
    pub fn expected_worth(&self, evaluator: Address, skill: &str) -> Option<f64> {
        let state = self.0.state();
        state.selector.expected_worth(evaluator, state.skills.get(skill)?)
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
    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    fn client(&self, is_untrusted: bool) -> &EvaluationClient {
        self.public_client.as_ref().filter(|_| is_untrusted).unwrap_or(&self.client)
    }
}

tower_x402::debug_fields!(Student |this| { payer: this.0.payer, panel_size: this.0.panel_size });

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
