//! The buyer: finds evaluators, hires a panel of them for each submission, pays, and makes one verdict of several.
//!
//! See [`Student`].

mod aggregate;
mod books;
mod builder;
mod call;
mod desk;
mod discovery;
mod episode;
mod failure;
mod feedback;
mod gold;
mod norms;
mod purse;
mod roster;
mod source;
mod truth;

use std::{
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use alloy_primitives::Address;
pub use books::{EvaluatorAccount, SpendingReport};
pub use builder::StudentBuilder;
use desk::Desk;
pub use discovery::{DiscoveryReport, FoundEvaluator, RefusedEvaluator, RefusedReason};
pub use failure::Failure;
pub use feedback::{AggregateVerdict, CallPayment, Feedback, Hire, OutputFeedback, PanelVerdict};
pub use gold::Gold;
pub use source::{CardSource, SourceError};
use tokio::sync::{Semaphore, watch};
use tower_x402::{
    Clock, Usdc,
    client::{Budget, Payer},
};
pub use truth::Truth;
use url::Url;

use super::{
    CardError, CardFetcher, EvaluationClient, Submission, VerifiedCard,
    evidence::{Evidence, EvidenceError, EvidenceLog},
};

/// Buys verdicts, within a budget, from whoever is worth it.
///
/// ```no_run
/// # async fn example(key: alloy_signer_local::PrivateKeySigner) -> Result<(), Box<dyn std::error::Error>> {
/// use tower_x402::client::{Budget, DiscoveryClient, Payer};
/// use x402_market::{Student, Submission, Task};
///
/// let budget = Budget::builder().per_payment("$0.01".parse()?).total("$1.00".parse()?).build();
/// let student = Student::builder(Payer::builder(key).budget(budget).build())
///     .source(DiscoveryClient::builder("https://x402.org/facilitator").build()?)
///     .tasks(500)
///     .panel_size(3)
///     .build()?;
/// student.discover().await;
/// let task = Task::new("reasoning", "Why is the sky blue?")?;
/// let answers = Submission::group(task, ["Because of Rayleigh scattering.", "It just is."])?;
/// let feedback = student.evaluate(&answers).await?;
/// for output in &feedback.outputs {
///     println!("{:?}", output.verdict);
/// }
/// # Ok(()) }
/// ```
///
/// # What happens to a submission
///
/// The selector chooses a panel; all members are asked at once. One that fails is observed to have failed, and somebody else is hired in
/// its place while there is money, time and somebody. What they say is put on a common scale (a harsh and a lenient judge mean
/// the same by different scores), weighed by how likely each is right, and is one verdict per output. Evaluators never see
/// what the student calls its task, but a name drawn anew for each of them.
///
/// A group of more outputs than an evaluator takes at once, or than the budget's limit per payment covers, is sent to it in
/// several parts at the same time, each of which is paid, noted and learned from by itself.
///
/// # The truth
///
/// From ordinary submissions nothing is learned but who answers. So that accuracy is, give the student [gold](StudentBuilder::gold), which it hides
/// among the others, or tell it what you know ([`evaluate_known`](Self::evaluate_known)). A hidden task is judged before the submission that
/// draws it and not at the same time, since of two that come at once one would be known to be hidden: that submission takes as much longer.
///
/// # Clones and tasks
///
/// Clones are the same student. It may be asked from many tasks at once. What is under way when the asking future is dropped goes on in the
/// background, so that the books are true: see [`wait_until_idle`](Self::wait_until_idle).
#[derive(Clone)]
pub struct Student(Arc<Inner>);

struct Inner {
    payer: Payer,
    client: EvaluationClient,
    /// For evaluators that strangers named.
    public_client: Option<EvaluationClient>,
    cards: CardFetcher,
    evidence: EvidenceLog,
    /// What others say.
    heard: EvidenceLog,
    /// Each with whether whom it names must be on public hosts.
    sources: Vec<(Arc<dyn CardSource>, bool)>,
    clock: Arc<dyn Clock>,
    seats: usize,
    replacements: usize,
    deadline: Duration,
    /// Seconds.
    card_ttl: u64,
    max_named: usize,
    permits: Semaphore,
    /// How many calls are under way.
    calls: Arc<watch::Sender<usize>>,
    desk: Mutex<Desk>,
}

impl Student {
    /// Settings to start from. What is bought is paid from `payer`'s budget.
    pub fn builder(payer: Payer) -> StudentBuilder {
        StudentBuilder::new(payer)
    }

    /// Asks the sources who there is, and whoever they name for its card. May be called again at any time, to hear of newcomers and
    /// of changed terms.
    pub async fn discover(&self) -> DiscoveryReport {
        discovery::discover(&self.0).await
    }

    /// Has a submission judged.
    ///
    /// Evaluators that fail are no errors: where nobody gave a verdict, the feedback says so, and why.
    ///
    /// # Errors
    /// [`StudentError`] if nobody could be asked at all; nothing was paid for this submission then. A hidden task may have been paid before
    /// it, and clones may have spent meanwhile what was left.
    pub async fn evaluate(&self, submission: &Submission) -> Result<Feedback, StudentError> {
        episode::run(&self.0, submission, None).await
    }

    /// Has a submission judged whose truth is known. Evaluators cannot know that; what they say is held against the truth. A few more
    /// may be examined with it, in the background.
    ///
    /// # Errors
    /// [`StudentError::TruthMismatch`] if the truth is not one about such outputs, and what [`evaluate`](Self::evaluate) returns.
    pub async fn evaluate_known(&self, submission: &Submission, truth: &Truth) -> Result<Feedback, StudentError> {
        if !truth.fits(submission) {
            return Err(StudentError::TruthMismatch);
        }
        episode::run(&self.0, submission, Some(truth.clone())).await
    }

    /// What was bought from whom.
    pub fn spending(&self) -> SpendingReport {
        let budget = self.budget();
        let mut desk = self.0.desk();
        let desk = &mut *desk;
        desk.ledger.reconcile(budget.journal());
        desk.ledger.books(desk.purse.promised(), budget.spent())
    }

    /// Waits until nothing is under way in the background: audits, and calls that nobody waited for to the end.
    pub async fn wait_until_idle(&self) {
        // The sender is in `self`, so that waiting cannot fail.
        let _ = self.0.calls.subscribe().wait_for(|calls| *calls == 0).await;
    }

    /// Takes in what another payer says it observed, and records it apart from what this student observes itself. That it paid for it must
    /// have been checked before: whoever makes up payments could say anything. The selector decides how far to believe it.
    ///
    /// Whether it was news: a payment speaks once, and not any more if it is older than what was forgotten.
    ///
    /// # Errors
    /// [`EvidenceError`] if the record is not taken; [`EvidenceError::NotAReport`] if it names no payment, one of this student's own, or one
    /// to the payer itself.
    pub fn add_report(&self, evidence: Evidence) -> Result<bool, EvidenceError> {
        let is_foreign = |payer: &Address| *payer != self.0.payer.address() && *payer != evidence.evaluator;
        let payer =
            evidence.payment.map(|payment| payment.payer).filter(is_foreign).ok_or(EvidenceError::NotAReport)?;
        let mut desk = self.0.desk();
        let skill = desk.skills.get(&evidence.skill);
        let observation = skill.map(|skill| evidence.observation(skill));
        match self.0.heard.record(evidence, self.0.clock.now()) {
            Ok(()) => {}
            Err(EvidenceError::Duplicate | EvidenceError::TooOld) => return Ok(false),
            Err(error) => return Err(error),
        }
        if let Some(observation) = observation {
            desk.selector.learn_report(payer, &observation);
        }
        Ok(true)
    }

    /// The probability, as far as the selector believes, that a verdict of this evaluator is right; `None` if it has no opinion.
    pub fn expected_accuracy(&self, evaluator: Address, skill: &str) -> Option<f64> {
        let desk = self.0.desk();
        desk.selector.expected_accuracy(evaluator, desk.skills.get(skill)?)
    }

    /// How many evaluators are known.
    pub fn known_evaluators(&self) -> usize {
        self.0.desk().roster.len()
    }

    /// What it is paid from.
    pub fn budget(&self) -> &Budget {
        self.0.payer.budget()
    }

    /// What others said.
    pub fn reports(&self) -> &EvidenceLog {
        &self.0.heard
    }

    /// What evaluators were seen to do.
    pub fn evidence(&self) -> &EvidenceLog {
        &self.0.evidence
    }
}

impl Inner {
    /// Nothing in there panics halfway through a change, so a poisoned lock guards sound data.
    fn desk(&self) -> MutexGuard<'_, Desk> {
        self.desk.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The card of somebody, whom perhaps only strangers named.
    async fn card(&self, url: &Url, is_strange: bool) -> Result<Arc<VerifiedCard>, CardError> {
        if is_strange { self.cards.fetch_public(url).await } else { self.cards.fetch(url).await }
    }

    /// The client to ask somebody with, whom perhaps only strangers named.
    fn client(&self, is_strange: bool) -> &EvaluationClient {
        self.public_client.as_ref().filter(|_| is_strange).unwrap_or(&self.client)
    }
}

impl fmt::Debug for Student {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Debug for Inner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Student").field("payer", &self.payer).field("seats", &self.seats).finish_non_exhaustive()
    }
}

/// Why nobody was asked. Nothing was paid for it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StudentError {
    /// Nobody who is known judges this. Discover evaluators, from other sources if need be.
    #[error("nobody is known who judges {skill:?}")]
    NoEvaluators {
        /// What is to be judged.
        skill: String,
    },
    /// The budget covers nobody any more.
    #[error("{remaining} remain, and whoever asks for the least asks for {least}")]
    BudgetExhausted {
        /// What is left, without what is promised.
        remaining: Usdc,
        /// What the cheapest would cost.
        least: Usdc,
    },
    /// A student cannot tell more skills apart.
    #[error("a student has work for at most {limit} skills")]
    TooManySkills {
        /// How many.
        limit: usize,
    },
    /// The truth is about other outputs.
    #[error("the truth is not one about these outputs")]
    TruthMismatch,
    /// The machine's TLS configuration cannot be used.
    #[error("no HTTP client could be made")]
    Http,
    /// The operating system gave no randomness.
    #[error("the operating system gave no randomness")]
    Randomness,
}
