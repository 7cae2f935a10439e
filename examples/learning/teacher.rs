//! The teachers, which score outputs.

use alloy_primitives::Address;
use anyhow::{Context as _, ensure};
use tower_x402::Usdc;
use x402_market::{
    Feedback, Student, StudentBuilder, StudentError, Submission, Truth, evidence::EvidenceLog, selection::Thompson,
};

use super::{
    arms::{Always, Arm},
    baselines::Random,
    judges::Method,
    regression::Regression,
    run::{Group, Settings, mean, task},
    stage::{Stage, introduce},
    world::{ASPECTS, Answer},
};

/// The source of scores.
pub(crate) enum Teacher {
    /// The market.
    Market(Box<Buyer>),
    /// One evaluator, asked without a payment; its verdicts are the same as paid ones.
    Rehearsal(Method),
    /// The share of the group that comes to the same answer.
    Itself,
    /// One regression for each aspect.
    Model(Box<[Regression; 3]>),
    /// The truth.
    Truth,
    /// The truth about audited groups only.
    Audits,
}

/// The scores of a group.
pub(crate) struct Taught {
    /// One score for each output, if there is one.
    pub(crate) scores: Vec<Option<f64>>,
    /// The evaluators that were hired, by position in the market.
    pub(crate) hired: Vec<usize>,
}

impl Teacher {
    pub(crate) async fn teach(&self, group: &Group<'_>) -> anyhow::Result<Taught> {
        let Group { assignment, outputs, good, .. } = group;
        let aspect = ASPECTS.iter().position(|aspect| *aspect == assignment.aspect).unwrap_or_default();
        let truth = || good.iter().map(|good| Some(f64::from(*good))).collect();
        let scores = match self {
            Self::Market(buyer) => return buyer.buy(group).await,
            Self::Rehearsal(method) => {
                let task = task(&assignment.problem, assignment.aspect, assignment.number)?;
                let mut scores = Vec::new();
                for output in outputs {
                    scores.push(Some(method.score(&task, aspect, output).await?));
                }
                scores
            }
            Self::Itself => {
                let answers: Vec<_> = outputs.iter().map(|output| Answer::of(output)).collect();
                let share =
                    |answer| answers.iter().filter(|other| *other == answer).count() as f64 / answers.len() as f64;
                answers.iter().map(|answer| Some(share(answer))).collect()
            }
            Self::Model(models) => outputs.iter().map(|output| Some(models[aspect].score(output))).collect(),
            Self::Truth => truth(),
            Self::Audits if assignment.audited => truth(),
            Self::Audits => vec![None; outputs.len()],
        };
        Ok(Taught { scores, hired: Vec::new() })
    }
}

/// A student, with what the experiment needs to know of it.
pub(crate) struct Buyer {
    student: Student,
    payer: Address,
    budget: u64,
    /// The evaluators' addresses, by position in the market.
    payees: Vec<Address>,
    /// `true` if it weighs verdicts by audits; otherwise they are averaged.
    learns: bool,
}

/// What a buyer spent, in µUSDC.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Spent {
    /// By its budget.
    pub(crate) books: u64,
    /// By its balance on the chain.
    pub(crate) chain: u64,
}

impl Buyer {
    /// Creates a student for an arm that buys. `name` selects its key. It records evidence in the first log and reads the reports of others
    /// from the second. `staff` are the evaluators that it hires if the arm does not choose.
    pub(crate) async fn new(
        arm: Arm,
        (stage, seed, settings): (&Stage, u64, &Settings),
        name: &str,
        (seen, heard): (EvidenceLog, EvidenceLog),
        staff: &[usize],
    ) -> anyhow::Result<Self> {
        let budget = settings.total();
        let (builder, payer, shown) = stage.student(name, Usdc::from_atomic(budget))?;
        let payees: Vec<_> = stage.booths.iter().map(|booth| booth.payee).collect();
        let learns = arm.is_market() || arm == Arm::RewardModel;
        let builder: StudentBuilder = match arm {
            Arm::Random => builder.selector(Random::any(seed)),
            Arm::CardClaims => builder.selector(Random::claimed(seed)),
            Arm::FixedBest | Arm::Mixture => builder.selector(Always(staff.iter().map(|at| payees[*at]).collect())),
            _ => builder.selector(Thompson::seeded(seed)),
        };
        let student = builder
            .evidence(seen)
            .reports(heard)
            .tasks(settings.groups as u64)
            .panel_size(arm.seats())
            .seed(seed)
            .build()?;
        introduce(&student, &shown, &stage.booths).await?;
        Ok(Self { student, payer, budget, payees, learns })
    }

    async fn buy(&self, group: &Group<'_>) -> anyhow::Result<Taught> {
        let assignment = group.assignment;
        let task = task(&assignment.problem, assignment.aspect, assignment.number)?;
        let submission = Submission::group(task, group.outputs.iter().cloned())?;
        let feedback = match self.student.evaluate(&submission).await {
            Ok(feedback) => feedback,
            Err(StudentError::BudgetExhausted { .. }) => {
                return Ok(Taught { scores: vec![None; group.outputs.len()], hired: Vec::new() });
            }
            Err(error) => return Err(error.into()),
        };
        if assignment.audited && self.learns {
            self.student.audit(&feedback, &Truth::good(group.good.iter().copied())).await?;
        }
        let Feedback { outputs, hires, .. } = feedback;
        if let Some(failure) = hires.iter().find_map(|hire| hire.failure.as_ref()) {
            anyhow::bail!("an evaluator failed, which none of them should: {failure}");
        }
        let score = |output: &x402_market::OutputFeedback| match self.learns {
            true => output.verdict.map(|judged| judged.reward.get()),
            false => {
                let scores = output.members.iter().map(|opinion| opinion.verdict.score.get());
                (!output.members.is_empty()).then(|| mean(scores))
            }
        };
        let position = |payee: &Address| self.payees.iter().position(|other| other == payee);
        let hired: Option<Vec<_>> = hires.iter().map(|hire| position(&hire.evaluator)).collect();
        Ok(Taught { scores: outputs.iter().map(score).collect(), hired: hired.context("a stranger was hired")? })
    }

    /// Returns what it spent, by its budget and by the chain. They must agree and be within the budget.
    pub(crate) fn spent(&self, stage: &Stage) -> anyhow::Result<Spent> {
        let books = self.student.spending();
        ensure!(books.held == Usdc::ZERO && books.promised == Usdc::ZERO, "payments are still open: {books:?}");
        let chain = self.budget.checked_sub(stage.balance(self.payer)?).context("the balance rose")?;
        ensure!(books.paid.atomic() == chain, "{chain} µUSDC left the payer's account, by its books: {books:?}");
        Ok(Spent { books: books.paid.atomic(), chain })
    }
}
