//! Lessons: the truth about outputs, told to the evaluator that judged them.

use alloy_primitives::{Address, B256};
use alloy_signer::Signer;
use alloy_sol_types::{SolStruct as _, eip712_domain};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use tower_x402::eip3009::PaymentSignature;

use super::{
    bounded::List,
    message::{self, MessageError, Unknown, Version},
    submission::{MAX_OUTPUTS, Submission},
};

mod typed {
    alloy_sol_types::sol! {
        /// The message that is signed.
        struct Lesson {
            address evaluator;
            address payer;
            bytes32 submission;
            string good;
        }
    }
}

/// The truth about the outputs of a submission, for the evaluator that judged them.
///
/// It is signed by the payer, as EIP-712 typed data in the domain `{name: "tower-x402 lesson", version: "1"}`:
///
/// `Lesson(address evaluator,address payer,bytes32 submission,string good)`
///
/// `submission` is the SHA-256 of the canonical JSON (RFC 8785) of the submission as it was sent. `good` has a character for each output:
/// `1` if it is good, `0` if it is not, `?` if that is not told. An evaluator accepts one lesson for each submission that it judged, from
/// the payer that paid for it.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let evaluator = alloy_primitives::Address::repeat_byte(7);
/// use alloy_signer_local::PrivateKeySigner;
/// use x402_market::{Lesson, Submission, Task};
///
/// let sent = Submission::group(Task::new("reasoning", "Why is the sky blue?")?, ["Rayleigh scattering.", "It just is."])?;
/// let payer = PrivateKeySigner::random();
/// let lesson = Lesson::sign(sent, [Some(true), Some(false)], evaluator, &payer).await?;
/// assert!(lesson.is_signed());
/// # Ok(()) }
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Lesson {
    #[serde(default)]
    version: Version,
    /// The evaluator's payee.
    pub evaluator: Address,
    /// The address that paid for the evaluation.
    pub payer: Address,
    /// What was judged, as it was sent.
    pub submission: Submission,
    /// For each output, in order, whether it is good, as far as that is told.
    pub good: List<Option<bool>, 1, MAX_OUTPUTS>,
    /// The payer's signature.
    pub signature: PaymentSignature,
    #[serde(flatten)]
    rest: Unknown,
}

/// A lesson could not be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LessonError {
    /// There is not one truth for each output.
    #[error("a lesson says of each output whether it is good, or nothing")]
    Length,
    /// The signer refused or failed.
    #[error("the signer failed")]
    Sign(#[source] alloy_signer::Error),
}

impl Lesson {
    /// Makes a lesson about a submission that the signer's address paid for, and signs it.
    ///
    /// # Errors
    /// [`LessonError::Length`] if there is not one truth for each output, [`LessonError::Sign`] if the signer fails.
    pub async fn sign(
        submission: Submission,
        good: impl IntoIterator<Item = Option<bool>>,
        evaluator: Address,
        signer: &(impl Signer + Sync + ?Sized),
    ) -> Result<Self, LessonError> {
        let good = List::new(good).ok().filter(|good| good.len() == submission.outputs().len());
        let good = good.ok_or(LessonError::Length)?;
        let signature = PaymentSignature::from(Vec::new());
        let payer = signer.address();
        let lesson = Self { version: Version, evaluator, payer, submission, good, signature, rest: Unknown {} };
        let signature = signer.sign_hash(&lesson.signing_hash()).await.map_err(LessonError::Sign)?;
        Ok(Self { signature: PaymentSignature::from(signature.normalized_s().as_bytes().to_vec()), ..lesson })
    }

    /// Reads a lesson from JSON.
    ///
    /// # Errors
    /// [`MessageError`] says what is wrong, and where.
    pub fn from_json(json: &[u8]) -> Result<Self, MessageError> {
        let lesson: Self = message::read(json)?;
        match lesson.good.len() == lesson.submission.outputs().len() {
            true => Ok(lesson),
            false => Err(MessageError::invalid("good", "there is not one for each output")),
        }
    }

    /// Returns `true` if the payer signed the lesson.
    pub fn is_signed(&self) -> bool {
        self.signature.recover(self.signing_hash()).is_ok_and(|signer| signer == self.payer)
    }

    fn signing_hash(&self) -> B256 {
        let good = self.good.iter().map(|good| match good {
            Some(true) => '1',
            Some(false) => '0',
            None => '?',
        });
        let (evaluator, payer, submission) = (self.evaluator, self.payer, digest(&self.submission));
        let typed = typed::Lesson { evaluator, payer, submission, good: good.collect() };
        typed.eip712_signing_hash(&eip712_domain! { name: "tower-x402 lesson", version: "1", })
    }
}

/// Returns the SHA-256 of the canonical JSON of a submission.
pub(super) fn digest(submission: &Submission) -> B256 {
    // Texts and lists of texts can always be written.
    B256::from_slice(&Sha256::digest(serde_json_canonicalizer::to_vec(submission).unwrap_or_default()))
}
