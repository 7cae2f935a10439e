//! One run at a time per key: concurrent callers share its result.

use std::{
    collections::HashMap,
    future::Future,
    hash::Hash,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use tokio::sync::watch;

/// How many runs may be under way at once.
const MAX_RUNS: usize = 10_000;

/// The runs that are under way, by key.
#[derive(Debug)]
pub(crate) struct SingleFlight<K: Eq + Hash, T>(Mutex<Runs<K, T>>);

type Runs<K, T> = HashMap<K, watch::Receiver<Option<T>>>;

/// Why there is no result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NoResult {
    /// Too many runs are under way. Nothing was begun.
    Full,
    /// The run panicked, and may have had any effect.
    Lost,
}

impl<K: Eq + Hash, T> Default for SingleFlight<K, T> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<K: Copy + Eq + Hash + Send + 'static, T: Clone + Send + Sync + 'static> SingleFlight<K, T> {
    /// Returns the result of the run with this key that is under way, or else starts one. A run does not end with its callers.
    pub(crate) async fn run<F>(self: &Arc<Self>, key: K, start: impl FnOnce() -> F) -> Result<T, NoResult>
    where
        F: Future<Output = T> + Send + 'static,
    {
        let mut result = self.join_or_start(key, start)?;
        match result.wait_for(Option::is_some).await {
            Ok(result) => result.clone().ok_or(NoResult::Lost),
            Err(_) => Err(NoResult::Lost),
        }
    }

    fn join_or_start<F>(
        self: &Arc<Self>,
        key: K,
        start: impl FnOnce() -> F,
    ) -> Result<watch::Receiver<Option<T>>, NoResult>
    where
        F: Future<Output = T> + Send + 'static,
    {
        let mut runs = self.lock();
        if let Some(result) = runs.get(&key) {
            return Ok(result.clone());
        }
        if runs.len() >= MAX_RUNS {
            return Err(NoResult::Full);
        }
        let (sender, result) = watch::channel(None);
        runs.insert(key, result.clone());
        // A runtime that shuts down drops the run at once, and with it its entry.
        drop(runs);
        let (entry, run) = (Entry { all: self.clone(), key }, start());
        tokio::spawn(async move {
            let _entry = entry;
            let result = run.await;
            let _ = sender.send(Some(result));
        });
        Ok(result)
    }
}

impl<K: Eq + Hash, T> SingleFlight<K, T> {
    fn lock(&self) -> MutexGuard<'_, Runs<K, T>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A run under way, until this is dropped, however the run ends.
struct Entry<K: Eq + Hash, T> {
    all: Arc<SingleFlight<K, T>>,
    key: K,
}

impl<K: Eq + Hash, T> Drop for Entry<K, T> {
    fn drop(&mut self) {
        self.all.lock().remove(&self.key);
    }
}
