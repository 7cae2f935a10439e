//! What a reader makes of what others say.
//!
//! Votes could be bought: an evaluator that pays itself a thousand times has a thousand voices, each of which is about a payment
//! that took place. So nobody's voice has a weight of its own. A payer is believed as far as what it says of evaluators agrees with
//! what the reader's **own audits** say of the same ones in the same skills (the Bayes factor of "the same accuracies" over "nothing to
//! do with each other"); however many say the same, they are believed together no more than the most trusted of them; and one
//! payer is heard no louder for saying it again. That is what [`Thompson`](super::selection::Thompson) does, and this module brings it what
//! directories have: verified, once each, and as much as can be kept.
//!
//! What a payer says of itself has no weight at all.
//!
//! ```no_run
//! # async fn example(me: alloy_primitives::Address) -> Result<(), Box<dyn std::error::Error>> {
//! use tower_x402::market::{directory::DirectoryClient, evidence::EvidenceLog, reputation::Reputation};
//! use tower_x402::market::selection::{Selector as _, Skills, Thompson};
//!
//! let skills: Skills = ["prose"].into_iter().collect();
//! let audits = EvidenceLog::open("audits.jsonl", 100_000)?;
//! let mut selector = Thompson::seeded(7);
//! selector.recall(&audits, &[me], &skills);
//!
//! let mut reputation = Reputation::new(100_000, [me]);
//! let directory = DirectoryClient::new(&"https://directory.example".parse()?)?;
//! reputation.pull(&directory, &skills, &mut selector).await?;
//! println!("{}", reputation.report(&audits, &skills));
//! # Ok(()) }
//! ```
//!
//! A [`Student`](super::Student) is told by [`hear`](super::Student::hear) each record that [`Reputation::fetch`] brought.
//!
//! **What this cannot do.** Somebody who buys honestly and tells the truth for a long time is believed, and can then lie about an evaluator
//! that the reader has not audited yet. It lasts until the reader's first audits of that one.

mod interval;
mod report;

use std::{collections::HashMap, fmt, sync::Arc};

use alloy_primitives::Address;
pub use report::{Opinion, Report, Standing, Tally, Why};

#[cfg(feature = "onchain")]
use super::directory::{Witness, WitnessError};
use super::{
    directory::{DirectoryClient, DirectoryError, SignedEvidence, VoiceQuery},
    evidence::{Evidence, EvidenceError, EvidenceLog},
    selection::{Selector, Skills},
};
use crate::clock::{Clock, SystemClock};

/// How many pages are read of a directory at a time, of up to a thousand voices each.
const MAX_PAGES: usize = 20;
/// How many directories are kept in mind.
const MAX_DIRECTORIES: usize = 64;

/// Brings the voices of directories to a [`Selector`], once each.
pub struct Reputation {
    /// What others said.
    log: EvidenceLog,
    own: Vec<Address>,
    /// How far each directory was read.
    read: HashMap<String, u64>,
    clock: Arc<dyn Clock>,
    #[cfg(feature = "onchain")]
    witnesses: Vec<Arc<Witness>>,
}

/// What came of reading a directory.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Pulled {
    /// What is new, in the directory's order.
    pub heard: Vec<Evidence>,
    /// How many voices were not believed: not signed by the payer, without a payment, about the payer itself.
    pub refused: usize,
    /// How many were heard before, were one's own, or are older than what was forgotten.
    pub known: usize,
    /// Whether there is more to read.
    pub more: bool,
}

/// Why a directory was not read to the end.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PullError {
    /// The directory could not be asked.
    #[error(transparent)]
    Directory(#[from] DirectoryError),
    /// What was heard could not be written.
    #[error("what was heard could not be kept")]
    Log(#[from] EvidenceError),
    /// The chain could not be asked; the voices that were not checked are read again next time.
    #[cfg(feature = "onchain")]
    #[error("the payments cannot be checked")]
    Chain(#[source] WitnessError),
}

impl Reputation {
    /// Keeps the last `capacity` voices of others in memory. `own` are the addresses that one pays from: what they say is known already.
    pub fn new(capacity: usize, own: impl IntoIterator<Item = Address>) -> Self {
        Self::with_log(EvidenceLog::in_memory(capacity), own)
    }

    /// The same, in a log that may last. It is for what others say only, and not the one of one's own evidence.
    pub fn with_log(log: EvidenceLog, own: impl IntoIterator<Item = Address>) -> Self {
        Self {
            log,
            own: own.into_iter().collect(),
            read: HashMap::new(),
            clock: Arc::new(SystemClock),
            #[cfg(feature = "onchain")]
            witnesses: Vec::new(),
        }
    }

    /// Where the time comes from; the machine's clock unless set.
    pub fn clock(mut self, clock: Arc<dyn Clock>) -> Self {
        self.clock = clock;
        self
    }

    /// Believes no directory that a payment took place, but asks this witness. Voices about payments that none of the witnesses looks
    /// at are refused then.
    #[cfg(feature = "onchain")]
    pub fn verify(mut self, witness: Arc<Witness>) -> Self {
        self.witnesses.push(witness);
        self
    }

    /// What others said, as far as it is kept.
    pub fn log(&self) -> &EvidenceLog {
        &self.log
    }

    /// Reads what is new in a directory, up to 20,000 voices, and lets the selector hear it.
    ///
    /// # Errors
    /// [`PullError`]. What was heard before it counts, and is not heard again.
    pub async fn pull(
        &mut self,
        directory: &DirectoryClient,
        skills: &Skills,
        selector: &mut (impl Selector + ?Sized),
    ) -> Result<Pulled, PullError> {
        let mut pulled = Pulled::default();
        let done = self.fetch_into(directory, &mut pulled).await;
        pulled.heard.iter().for_each(|evidence| tell(selector, skills, evidence));
        done.map(|()| pulled)
    }

    /// Reads what is new in a directory without telling anybody: for a selector that cannot be held meanwhile, and is told by
    /// [`tell`] afterwards.
    ///
    /// # Errors
    /// [`PullError`]. What was read before it is in the [log](Self::log), and is not read again.
    pub async fn fetch(&mut self, directory: &DirectoryClient) -> Result<Pulled, PullError> {
        let mut pulled = Pulled::default();
        self.fetch_into(directory, &mut pulled).await.map(|()| pulled)
    }

    async fn fetch_into(&mut self, directory: &DirectoryClient, pulled: &mut Pulled) -> Result<(), PullError> {
        let name = directory.url().to_string();
        for _ in 0..MAX_PAGES {
            let after = self.read.get(&name).copied().unwrap_or_default();
            let page = directory.voices(&VoiceQuery { after, ..VoiceQuery::default() }).await?;
            pulled.refused += page.skipped;
            for voice in page.voices {
                self.take(&voice.said, pulled).await?;
                self.remember(&name, voice.id);
            }
            self.remember(&name, page.after);
            pulled.more = page.more;
            if !page.more {
                break;
            }
        }
        Ok(())
    }

    fn remember(&mut self, name: &str, after: u64) {
        if self.read.len() < MAX_DIRECTORIES || self.read.contains_key(name) {
            self.read.insert(name.to_owned(), after);
        }
    }

    async fn take(&mut self, said: &SignedEvidence, pulled: &mut Pulled) -> Result<(), PullError> {
        let Ok(of) = said.verify() else {
            pulled.refused += 1;
            return Ok(());
        };
        if of.voice.payer == said.evidence.evaluator {
            pulled.refused += 1;
            return Ok(());
        }
        if self.own.contains(&of.voice.payer) {
            pulled.known += 1;
            return Ok(());
        }
        #[cfg(feature = "onchain")]
        if !self.witnesses.is_empty() {
            let witness = self.witnesses.iter().find(|witness| witness.serves(said.network, said.asset));
            let found = match witness {
                Some(witness) => witness.check(said).await.map(drop),
                None => Err(WitnessError::NotServed { network: said.network, asset: said.asset }),
            };
            match found {
                Ok(()) => {}
                Err(error @ (WitnessError::Unavailable(_) | WitnessError::Url)) => return Err(PullError::Chain(error)),
                Err(_) => {
                    pulled.refused += 1;
                    return Ok(());
                }
            }
        }
        match self.log.record(said.evidence.clone(), self.clock.now()) {
            Ok(()) => pulled.heard.push(said.evidence.clone()),
            Err(EvidenceError::Spoken | EvidenceError::TooOld) => pulled.known += 1,
            Err(EvidenceError::Future | EvidenceError::OutOfRange) => pulled.refused += 1,
            Err(error) => return Err(error.into()),
        }
        Ok(())
    }

    /// What is to be thought of every evaluator in every skill, computed anew from one's own log and what others said.
    pub fn report(&self, own: &EvidenceLog, skills: &Skills) -> Report {
        Report::of(own, &self.log, &self.own, skills)
    }
}

impl fmt::Debug for Reputation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reputation").field("log", &self.log).field("own", &self.own).finish_non_exhaustive()
    }
}

/// Lets a selector hear what another payer says. What a payer says of itself, or of skills that are not among these, is not told.
pub fn tell(selector: &mut (impl Selector + ?Sized), skills: &Skills, evidence: &Evidence) {
    let (Some(voice), Some(skill)) = (evidence.payment, skills.get(&evidence.skill)) else { return };
    if voice.payer == evidence.evaluator {
        return;
    }
    selector.hear(voice.payer, &evidence.observation(skill));
}
