//! Evaluators that sell verdicts over x402, and students that find, hire, pay and audit them.
//!
//! An **evaluator** can judge something: answers, proofs, code. It sells its verdicts per output, and is paid only for verdicts that it
//! gives. A **student** trains a model or runs an agent. It buys verdicts within a budget, learns from audits whom to trust, and
//! replaces evaluators that fail. [`tower_x402`] does the charging and paying.
//!
//! # Sell verdicts
//!
//! A function is enough. This evaluator charges $0.001 for each output:
//!
//! ```no_run
//! # #[cfg(feature = "serve")]
//! # async fn example(key: alloy_signer_local::PrivateKeySigner) -> Result<(), Box<dyn std::error::Error>> {
//! # use tower_x402::Network;
//! use x402_market::{Evaluator, Verdict, judge::output_judge};
//!
//! let judge = output_judge(async |_task, output| {
//!     let score = if output.contains("because") { 1.0 } else { 0.0 };
//!     Ok(Verdict::new(score, 0.7, "whether it gives reasons"))
//! });
//! Evaluator::new("Reasons", "https://reasons.example", judge)
//!     .skill("reasoning", "Says whether an answer gives reasons", 0.4)
//!     .price("$0.001")
//!     .key(key)
//!     .network(Network::BASE_SEPOLIA)
//!     .serve("0.0.0.0:4021")
//!     .await?;
//! # Ok(()) }
//! ```
//!
//! `Evaluator` needs the feature `serve`. [`EvaluatorService`] is the service below it, for servers of your own: it lists what is served and
//! when nothing is charged. The package [`x402-judges`](https://docs.rs/x402-judges) has judges for arithmetic, algebra, programs,
//! anything that a language model can judge, and one that learns from lessons.
//!
//! # Hire evaluators
//!
//! This student hires the three best evaluators for its money, and combines their verdicts. Its budget lasts for 500 submissions:
//!
//! ```no_run
//! # async fn example(key: alloy_signer_local::PrivateKeySigner) -> Result<(), Box<dyn std::error::Error>> {
//! # use tower_x402::client::{Budget, Payer};
//! # use x402_bazaar::DiscoveryClient;
//! # use x402_market::{Student, Submission, Task};
//! let payer = Payer::builder(key).budget(Budget::builder().total("$1.00".parse()?).build()).build();
//! let bazaar = DiscoveryClient::builder("https://www.x402.org/facilitator").build()?;
//! let student = Student::builder(payer).source(bazaar).tasks(500).panel_size(3).build()?;
//! student.discover().await;
//! let task = Task::new("reasoning", "Why is the sky blue?")?;
//! let answers = Submission::group(task, ["Because of Rayleigh scattering.", "It just is."])?;
//! let feedback = student.evaluate(&answers).await?;
//! println!("{:?} for {}", feedback.rewards(), feedback.paid);
//! # Ok(()) }
//! ```
//!
//! [`Student`] says what happens to evaluators that fail, misquote or time out. [Audits](Student::audit) show what they are worth.
//! [`EvaluationClient`] buys a single evaluation from one evaluator.
//!
//! # Be found
//!
//! Students find evaluators by their cards. Have yours listed by a directory (package
//! [`x402-directory`](https://docs.rs/x402-directory)), which also collects what payers report about evaluators. Facilitators list it,
//! too, because its 402 describes what it sells.
//!
//! # Teach and learn
//!
//! A student can tell an evaluator the truth about outputs that it judged: a [`Lesson`], signed by the key that paid
//! ([`StudentBuilder::teach`]). Evaluators that learn name the version of what they learned in each evaluation
//! ([`Judge::learn`](judge::Judge::learn)).
//!
//! # Train
//!
//! Each [`Verdict`] has a [`Reward`], and a group of outputs gets one evaluation, so verdicts can be the rewards of reinforcement learning.
//! The guide [`train_with_atropos`](guide::train_with_atropos) trains a policy on them.
//!
//! # Messages
//!
//! A [`Submission`] is a [`Task`] with one output, a pair or a group. An [`Evaluation`] has a [`Verdict`] for each output: a [`Score`], a
//! [`Reward`], a [`Confidence`] (the probability that the verdict is right) and a [`Critique`]. Both are JSON with a version and a
//! published [`schema`]. Unknown fields are ignored; other versions are refused. Numbers out of range and texts that are too long can
//! neither be read nor created.
//!
//! # Cards
//!
//! An [`AgentCard`] is an A2A 1.0 agent card at `/.well-known/agent-card.json`. It is signed with the payee's key (JWS, ES256K, over the
//! canonical JSON of RFC 8785), so whoever can change the server's answers cannot redirect the money. [`CardFetcher`] verifies it and pins
//! the payee. [`EvaluationClient`] compares each 402 with the card before it signs a payment.
//!
//! The pricing is an extension of the card, under `capabilities.extensions`, with the URI [`EXTENSION_URI`]. Its `params` are a [`Pricing`]:
//!
//! | field | meaning |
//! |---|---|
//! | `version` | 1 |
//! | `endpoint` | the URL to which submissions are posted, on the card's own origin |
//! | `pricePerOutput` | atomic units of USDC, as a decimal string |
//! | `payTo` | the payee on every network; its key signs the card |
//! | `accepts` | tokens: `{network, asset, name, version}`, the last two of their EIP-712 domain |
//! | `lessons` | `true` if the evaluator takes [lessons](Lesson), at `lessons` beside its endpoint |
//! | `maxOutputs` | how many outputs a submission may have, up to 64 |
//! | `expertise` | `{skill, claim}`: the worth that the evaluator claims, from 0 to 1 ([`Pairs::worth`](evidence::Pairs::worth)) |
//! | `schemas` | the URLs of the schemas of `submission` and `evaluation` |
//!
//! # Features
//!
//! | feature | what it adds | default |
//! |---|---|---|
//! | `serve` | [`Evaluator`], to sell verdicts in ten lines | no |
//!
//! The [guides](guide) start with complete programs.

// docs.rs shows the feature that each item needs.
#![cfg_attr(docsrs, feature(doc_cfg))]

use std::time::Duration;

mod bounded;
mod card;
mod client;
mod evaluation;
mod evaluator;
pub mod evidence;
pub mod guide;
pub mod judge;
mod lesson;
mod lock;
mod measure;
mod message;
mod net;
mod pricing;
mod respond;
pub mod schema;
pub mod selection;
#[doc(hidden)]
pub mod shared;
mod skills;
mod student;
mod submission;

/// The longest timeout. It is short enough to be added to any instant.
const LONGEST_WAIT: Duration = Duration::from_secs(86_400);

pub use bounded::{LengthError, List, Text};
pub use card::{
    AgentCard, AgentCardBuilder, AgentExtension, AgentInterface, AgentSkill, CARD_PATH, Capabilities, CardError,
    CardFetcher, CardSignature, EVALUATION_BINDING, VerifiedCard,
};
pub use client::{EvaluateError, EvaluationClient, PaidEvaluation};
pub use evaluation::{Critique, Evaluation, EvaluatorId, Issue, MAX_EVALUATION, Place, Severity, Span, Verdict};
#[cfg(feature = "serve")]
pub use evaluator::{Evaluator, ServeError};
pub use evaluator::{EvaluatorBuilder, EvaluatorError, EvaluatorService, EvaluatorStats, SkillStats};
pub use lesson::{Lesson, LessonError};
pub use measure::{Confidence, OutOfRange, Reward, Score};
pub use message::{MESSAGE_VERSION, MessageError};
pub use pricing::{AcceptedToken, EXTENSION_URI, Expertise, Pricing, Schemas};
pub use student::{
    AggregateVerdict, AuditReport, AuditedEvaluation, CallPayment, CardSource, DiscoveryReport, EvaluatorAccount,
    Failure, Feedback, FoundEvaluator, Hire, OutputFeedback, PanelVerdict, RefusedEvaluator, RefusedReason,
    SourceError, SpendingReport, Student, StudentBuilder, StudentError, Truth,
};
pub use submission::{Input, LongText, MAX_OUTPUTS, Message, Outputs, SkillId, Submission, Task, TaskId};
