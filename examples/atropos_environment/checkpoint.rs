//! The state that lets an interrupted run continue.

use std::{
    fs::{self, File},
    io::{ErrorKind, Write as _},
    path::{Path, PathBuf},
};

use anyhow::{Context as _, bail};
use serde::{Deserialize, Serialize};

use crate::{
    chain::Opening,
    policy::{Policy, Rng},
    report::Tally,
    scoring::Scored,
    tasks::Levels,
};

/// The version of the file format; others are refused.
const VERSION: u32 = 3;

/// The state of a run. Payments are in the journal beside it, each before it is sent.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Checkpoint {
    version: u32,
    pub(crate) policy: Policy,
    pub(crate) rng: Rng,
    pub(crate) tally: Tally,
    /// The levels of programs that are open.
    pub(crate) levels: Levels,
    /// A group that was judged and paid for, and not yet known to be delivered.
    pub(crate) pending: Option<Pending>,
    /// The state of budget and chain at the start, if the chain was asked.
    pub(crate) opening: Option<Opening>,
    /// The prefix of the names of this run's groups.
    pub(crate) run: String,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Pending {
    pub(crate) scored: Scored,
    /// `true` if the group may have been sent.
    pub(crate) sent: bool,
}

impl Checkpoint {
    pub(crate) fn new(policy: Policy, rng: Rng, run: String) -> Self {
        let tally = Tally::new(&policy);
        Self { version: VERSION, policy, rng, tally, levels: Levels::new(), pending: None, opening: None, run }
    }

    /// Reads a checkpoint, if the file exists.
    pub(crate) fn read(path: &Path) -> anyhow::Result<Option<Self>> {
        let json = match fs::read(path) {
            Ok(json) => json,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error).with_context(|| format!("{} cannot be read", path.display())),
        };
        let read: Self =
            serde_json::from_slice(&json).with_context(|| format!("{} is no checkpoint", path.display()))?;
        if read.version != VERSION || !read.policy.is_sound() {
            bail!("{} is a checkpoint of another version of this program", path.display());
        }
        Ok(Some(read))
    }

    /// Replaces the file atomically: after a crash it has this state or the previous one.
    pub(crate) fn write(&self, path: &Path) -> anyhow::Result<()> {
        let cannot = || format!("{} cannot be written", path.display());
        let mut beside = path.as_os_str().to_owned();
        beside.push(".new");
        let beside = PathBuf::from(beside);
        let mut file = File::create(&beside).with_context(cannot)?;
        file.write_all(&serde_json::to_vec(self)?).with_context(cannot)?;
        file.sync_all().with_context(cannot)?;
        fs::rename(&beside, path).with_context(cannot)?;
        // The rename is durable once the directory is synced.
        let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        File::open(directory).and_then(|directory| directory.sync_all()).with_context(cannot)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_goes_on_exactly_where_it_was() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("run.json");
        assert_eq!(Checkpoint::read(&path).unwrap(), None);
        let mut rng = Rng::seeded(3);
        rng.next();
        let mut checkpoint = Checkpoint::new(Policy::new(), rng, "run".to_owned());
        checkpoint.tally.rolled_out = 7;
        checkpoint.write(&path).unwrap();
        checkpoint.tally.pushed = 3;
        checkpoint.write(&path).unwrap();
        assert_eq!(Checkpoint::read(&path).unwrap(), Some(checkpoint));
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1, "nothing is left behind");
    }

    #[test]
    fn what_is_no_checkpoint_is_not_taken_for_a_new_run() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("run.json");
        let other =
            Checkpoint { version: VERSION + 1, ..Checkpoint::new(Policy::new(), Rng::seeded(1), "run".to_owned()) };
        for json in [b"{}".to_vec(), b"{".to_vec(), serde_json::to_vec(&other).unwrap()] {
            fs::write(&path, json).unwrap();
            assert!(Checkpoint::read(&path).is_err());
        }
    }
}
