//! What a reader makes of what others say.
//!
//! Votes could be bought: an evaluator that pays itself a thousand times, from accounts of its own, has a thousand voices, each of
//! which is about a payment that took place. So nobody's voice has a weight of its own. A payer is believed as far as what it says of
//! evaluators agrees with what the reader's **own audits** say of the same ones in the same skills (the Bayes factor of "the same
//! accuracies" over "nothing to do with each other"); however many say the same, they are believed together no more than the most trusted of
//! them; and one payer is heard no louder for saying it again. That is what [`Thompson`](super::selection::Thompson) does, and this module
//! brings it what directories have: verified, once each, and as much as can be kept.
//!
//! What a payer says of itself is not heard at all.
//!
//! ```no_run
//! # async fn example(me: alloy_primitives::Address) -> Result<(), Box<dyn std::error::Error>> {
//! use x402_market::{directory::DirectoryClient, evidence::EvidenceLog, reputation::Reputation};
//! use x402_market::selection::{Selector as _, Skills, Thompson};
//!
//! let skills: Skills = ["prose"].into_iter().collect();
//! let audits = EvidenceLog::open("audits.jsonl", 100_000)?;
//! let mut selector = Thompson::seeded(7);
//! selector.restore(&audits, &[me], &skills);
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
//! **What this cannot do.** Whoever agrees with the reader's audits is believed about evaluators that the reader has not audited yet, and
//! agreement can be bought: by paying those evaluators their price and saying of them what others have published. It can then praise a
//! friend, and is believed until the reader has looked at the friend itself. The more it agreed before, the more looks that takes (some
//! sixteen, against twenty such payers that agreed with 120 audits, where the friend is right in one case of four); each of them also
//! costs them trust in everything else they say. What is lost is what was spent on the friend meanwhile.

mod report;

use std::{
    collections::{HashMap, VecDeque},
    fmt, mem,
    sync::Arc,
};

use alloy_primitives::Address;
pub use report::{Opinion, Report, Standing, Tally, Why};
use tower_x402::{Clock, SystemClock};

#[cfg(feature = "onchain")]
use super::directory::{Witness, WitnessError};
use super::{
    directory::{DirectoryClient, DirectoryError, SignedEvidence, VoiceQuery},
    evidence::{Evidence, EvidenceError, EvidenceLog},
    selection::{Selector, Skills},
};

/// How many pages are read of a directory at a time, of up to a thousand voices each: as many as a directory keeps.
const MAX_PAGES: usize = 1_000;
/// How many directories are kept in mind.
const MAX_DIRECTORIES: usize = 64;
/// How many voices of a directory are looked at again, and for how many seconds.
const MAX_LATER: usize = 1_000;
const LATER_FOR: u64 = 3_600;

/// Brings the voices of directories to a [`Selector`], once each.
pub struct Reputation {
    /// What others said.
    log: EvidenceLog,
    own: Vec<Address>,
    /// What was taken into the log, and nobody was told yet.
    untold: Vec<Evidence>,
    read: HashMap<String, Reading>,
    clock: Arc<dyn Clock>,
    #[cfg(feature = "onchain")]
    witnesses: Vec<Arc<Witness>>,
}

/// How far a directory was read.
#[derive(Default)]
struct Reading {
    after: u64,
    /// Whose payments were not deep enough, and since when.
    later: VecDeque<(u64, SignedEvidence)>,
}

/// What came of reading a directory.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Pulled {
    /// What is new, in the directory's order; first what was read when reading ended with an error.
    pub heard: Vec<Evidence>,
    /// How many voices were not believed: not signed by the payer, without a payment, about the payer itself.
    pub refused: usize,
    /// How many were heard before, were one's own, or are older than what was forgotten.
    pub known: usize,
    /// How many payments were not deep enough yet, or not known to one's own node. They are looked at again at the next fetch, for an
    /// hour; after that they are refused.
    pub later: usize,
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
            untold: Vec::new(),
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

    /// Reads what is new in a directory, to the end or as much as is kept here, and lets the selector hear it.
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
        pulled.heard = mem::take(&mut self.untold);
        pulled.heard.iter().for_each(|evidence| tell(selector, skills, evidence));
        done.map(|()| pulled)
    }

    /// Reads what is new in a directory, to the end or as much as is kept here, without telling anybody: for a selector that cannot be
    /// held meanwhile, and is told by [`tell`] afterwards.
    ///
    /// # Errors
    /// [`PullError`]. What was read before it is in the [log](Self::log), is not read again, and comes with the next fetch.
    pub async fn fetch(&mut self, directory: &DirectoryClient) -> Result<Pulled, PullError> {
        let mut pulled = Pulled::default();
        self.fetch_into(directory, &mut pulled).await?;
        pulled.heard = mem::take(&mut self.untold);
        Ok(pulled)
    }

    async fn fetch_into(&mut self, directory: &DirectoryClient, pulled: &mut Pulled) -> Result<(), PullError> {
        // Of what no fetch handed over, as much as the log keeps.
        let forgotten = self.untold.len().saturating_sub(self.log.capacity());
        self.untold.drain(..forgotten);
        let name = directory.url().to_string();
        if self.read.len() < MAX_DIRECTORIES {
            self.read.entry(name.clone()).or_default();
        }
        self.look_again(&name, pulled).await?;
        let mut after = self.read.get(&name).map_or(0, |reading| reading.after);
        for _ in 0..MAX_PAGES {
            let page = directory.voices(&VoiceQuery { after, ..VoiceQuery::default() }).await?;
            pulled.refused += page.skipped;
            for voice in page.voices {
                let is_done = self.take(&voice.said, pulled).await?;
                match self.read.get_mut(&name) {
                    Some(reading) => {
                        if !is_done {
                            reading.later.push_back((self.clock.now(), voice.said));
                        }
                        reading.after = voice.id;
                    }
                    // It is read from the beginning next time.
                    None if !is_done => pulled.later += 1,
                    None => {}
                }
            }
            after = page.after;
            if let Some(reading) = self.read.get_mut(&name) {
                reading.after = after;
                let too_many = reading.later.len().saturating_sub(MAX_LATER);
                reading.later.drain(..too_many);
                pulled.refused += too_many;
            }
            pulled.more = page.more;
            if !page.more || self.untold.len() >= self.log.capacity() {
                break;
            }
        }
        pulled.later += self.read.get(&name).map_or(0, |reading| reading.later.len());
        Ok(())
    }

    /// Looks at the payments again that were not deep enough.
    async fn look_again(&mut self, name: &str, pulled: &mut Pulled) -> Result<(), PullError> {
        let mut place = 0;
        while let Some((since, said)) = self.read.get(name).and_then(|reading| reading.later.get(place)).cloned() {
            let is_done = self.take(&said, pulled).await?;
            let is_too_late = self.clock.now() >= since.saturating_add(LATER_FOR);
            if !is_done && !is_too_late {
                place += 1;
                continue;
            }
            pulled.refused += usize::from(!is_done);
            if let Some(reading) = self.read.get_mut(name) {
                reading.later.remove(place);
            }
        }
        Ok(())
    }

    /// Hears a voice; `false` if it is to be looked at again.
    async fn take(&mut self, said: &SignedEvidence, pulled: &mut Pulled) -> Result<bool, PullError> {
        let Ok(of) = said.verify() else {
            pulled.refused += 1;
            return Ok(true);
        };
        if self.own.contains(&of.voice.payer) {
            pulled.known += 1;
            return Ok(true);
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
                Err(WitnessError::NotYet(_)) => return Ok(false),
                Err(_) => {
                    pulled.refused += 1;
                    return Ok(true);
                }
            }
        }
        match self.log.record(said.evidence.clone(), self.clock.now()) {
            Ok(()) => self.untold.push(said.evidence.clone()),
            Err(EvidenceError::Duplicate | EvidenceError::TooOld) => pulled.known += 1,
            Err(EvidenceError::Future | EvidenceError::OutOfRange) => pulled.refused += 1,
            Err(error) => return Err(error.into()),
        }
        Ok(true)
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
    selector.learn_report(voice.payer, &evidence.observation(skill));
}
