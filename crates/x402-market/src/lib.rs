//! Evaluators that sell their verdicts, and students that buy them.
//!
//! This is for those who can judge something (answers, proofs, code) and want to be paid for it, and for those who train a model or run
//! agents and want to buy judgement within a budget. It builds on [`tower_x402`], which charges and pays.
//!
//! A student has outputs to be judged: the answers of a model in training, a draft, a proof. An evaluator has a skill and sells
//! its verdicts, per output, over x402. It says on a signed card what it can do and what that costs; what it answers has a form that
//! programs can rely on.
//!
//! # Become an evaluator
//!
//! A function is enough. This charges $0.001 an output, is found by its card, and is paid only for verdicts that it gives:
//!
//! ```no_run
//! # #[cfg(feature = "onchain")]
//! # async fn example(facilitator: tower_x402::facilitator::OnchainFacilitator) -> Result<(), Box<dyn std::error::Error>> {
//! # use axum::Router;
//! # use tower_x402::Network;
//! # use x402_market::{AgentCard, Confidence, Evaluator, Score, Verdict, judge::output_judge};
//! # let key = alloy_signer_local::PrivateKeySigner::random();
//! # let listener = tokio::net::TcpListener::bind("0.0.0.0:4021").await?;
//! let judge = output_judge(async |_task, output| {
//!     let score = if output.contains("because") { Score::MAX } else { Score::MIN };
//!     Ok(Verdict::new(score, Confidence::new(0.7)?, "whether it gives reasons"))
//! });
//! let card = AgentCard::builder("Reasons", "https://reasons.example".parse()?)
//!     .skill("reasoning", "Says whether an answer gives reasons", Score::new(0.7)?)
//!     .price("$0.001").pay_to(Network::BASE_SEPOLIA, key.address()).build()?.sign(&key).await?;
//! let evaluator = Evaluator::new(card, judge).facilitator(facilitator).build()?;
//! axum::serve(listener, Router::new().fallback_service(evaluator)).await?;
//! # Ok(()) }
//! ```
//!
//! What cannot be judged is refused before it is paid for: a body that is no [`Submission`], a skill that is not on the card, too many
//! outputs, and whatever [`Judge::takes`](judge::Judge::takes) refuses. What the judge fails on, takes too long for, or judges in
//! a form that students would refuse, is not charged. [`EvaluatorService`] lists what is served; [`judge`] has judges to start from.
//!
//! # Hire evaluators
//!
//! This finds them, hires the best for the money, three at a time, and makes one verdict of theirs; the budget lasts for 500 submissions:
//!
//! ```no_run
//! # async fn example(key: alloy_signer_local::PrivateKeySigner) -> Result<(), Box<dyn std::error::Error>> {
//! # use tower_x402::client::{Budget, DiscoveryClient, Payer};
//! # use x402_market::{Student, Submission, Task};
//! let payer = Payer::builder(key).budget(Budget::builder().total("$1.00".parse()?).build()).build();
//! let bazaar = DiscoveryClient::builder("https://x402.org/facilitator").build()?;
//! let student = Student::builder(payer).source(bazaar).tasks(500).panel_size(3).build()?;
//! student.discover().await;
//! let task = Task::new("reasoning", "Why is the sky blue?")?;
//! let answers = Submission::group(task, ["Because of Rayleigh scattering.", "It just is."])?;
//! let feedback = student.evaluate(&answers).await?;
//! println!("{:?} for {}", feedback.outputs[0].verdict, feedback.paid);
//! # Ok(()) }
//! ```
//!
//! [`Student`] says what happens to those that fail, lie or are late, and how hidden tasks ([`Gold`]) show who is right.
//!
//! # What is said
//!
//! A [`Submission`] is a [`Task`] with one output, a pair or a group; an [`Evaluation`] has a [`Verdict`] for each: a [`Score`], a
//! [`Reward`], a [`Confidence`] (the probability that the verdict is right, by which students learn whom to believe) and a [`Critique`] in
//! parts. Both are JSON with a version and a published [`schema`]. Fields that are not known are ignored, other versions
//! refused. Numbers out of range and texts that are too long cannot be read, and cannot be made.
//!
//! # The card
//!
//! An [`AgentCard`] is one of A2A 1.0 at `/.well-known/agent-card.json`, signed (JWS, ES256K, over the canonical JSON of RFC 8785) with
//! the key that is paid: whoever can change what a server says cannot have the money sent elsewhere. [`CardFetcher`] verifies it and
//! holds the evaluator to the payee that was first seen; [`EvaluationClient`] holds it to its price: a 402 that demands anything else
//! than the card says is refused before anything is signed.
//!
//! # Whom to hire
//!
//! [`selection`] chooses by what evaluators proved, within a budget; [`evidence`] is the log of it. [`Student`] uses both.
//!
//! [`directory`] is where students find evaluators, and what other students saw of them: evidence about payments that took place.
//! [`reputation`] is what a reader makes of it, as far as the others agree with its own audits.
//!
//! # Features
//!
//! | feature | what it adds | default |
//! |---|---|---|
//! | `onchain` | `directory::Witness`: checks on a chain that reported payments took place | yes |
//! | `directory` | `directory::DirectoryService`: a directory of evaluators and of evidence, for others | |
//!
//! # The pricing extension, version 1
//!
//! Under `capabilities.extensions` with the URI [`EXTENSION_URI`]; its `params` are a [`Pricing`]:
//!
//! | field | what it is |
//! |---|---|
//! | `version` | 1 |
//! | `endpoint` | where submissions are posted; on the card's own origin |
//! | `pricePerOutput` | atomic units of USDC, as a decimal string |
//! | `payTo` | who is paid, on every network; the card is signed with this address's key |
//! | `accepts` | tokens: `{network, asset, name, version}`, the last two of their EIP-712 domain |
//! | `maxOutputs` | how many outputs a submission may hold, up to 64 |
//! | `expertise` | `{skill, claim}`: how often verdicts are right, by the evaluator's own account |
//! | `schemas` | URLs of the schemas of `submission` and `evaluation` |

// docs.rs shows the feature that each item needs.
#![cfg_attr(docsrs, feature(doc_cfg))]

use std::time::Duration;

mod bounded;
mod card;
mod chat;
mod client;
pub mod directory;
mod evaluation;
mod evaluator;
pub mod evidence;
#[cfg(feature = "onchain")]
pub mod guide;
pub mod judge;
mod measure;
mod message;
mod net;
mod pricing;
pub mod reputation;
mod respond;
pub mod schema;
pub mod selection;
mod student;
mod submission;
mod task;

/// The longest that anything is waited for: longer than anybody has patience, and short enough to be added to any time.
const LONGEST_WAIT: Duration = Duration::from_secs(86_400);

pub use bounded::{LengthError, List, Text};
pub use card::{
    AgentCard, AgentCardBuilder, AgentExtension, AgentInterface, AgentSkill, CARD_PATH, Capabilities, CardError,
    CardFetcher, CardSignature, EVALUATION_BINDING, VerifiedCard,
};
pub use chat::{ChatClient, ChatError, ChatMessage};
pub use client::{EvaluateError, EvaluationClient, PaidEvaluation};
pub use evaluation::{
    Critique, Evaluation, EvaluatorId, Issue, MAX_EVALUATION, Place, Preference, Severity, Span, Verdict,
};
pub use evaluator::{Earned, Evaluator, EvaluatorError, EvaluatorFuture, EvaluatorService, SkillStats, Stats};
pub use measure::{Confidence, OutOfRange, Reward, Score};
pub use message::{MESSAGE_VERSION, MessageError};
pub use pricing::{AcceptedToken, EXTENSION_URI, Expertise, Pricing, Schemas};
pub use student::{
    AggregateVerdict, CallPayment, CardSource, DiscoveryReport, EvaluatorAccount, Failure, Feedback, FoundEvaluator,
    Gold, Hire, OutputFeedback, PanelVerdict, RefusedEvaluator, RefusedReason, SourceError, SpendingReport, Student,
    StudentBuilder, StudentError, Truth,
};
pub use submission::{MAX_OUTPUTS, Outputs, Submission};
pub use task::{Input, LongText, Message, SkillId, Task, TaskId};
