//! One settlement at a time per payment, however many ask for it.

use std::{
    collections::HashMap,
    future::Future,
    hash::Hash,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use tokio::sync::watch;

/// How many payments may be settled at once.
const MAX_FLIGHTS: usize = 10_000;

/// The payments that a task of this process is settling, by whatever tells them apart, and what comes of it.
#[derive(Debug)]
pub(super) struct SingleFlight<K: Eq + Hash, T>(Mutex<Under<K, T>>);

type Under<K, T> = HashMap<K, watch::Receiver<Option<T>>>;

/// Why there is no result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NoResult {
    /// As many as allowed are under way; nothing was begun.
    Full,
    /// It panicked, and may have had any effect.
    Lost,
}

impl<K: Eq + Hash, T> Default for SingleFlight<K, T> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<K: Copy + Eq + Hash + Send + 'static, T: Clone + Send + Sync + 'static> SingleFlight<K, T> {
    /// What becomes of the payment: of the settlement that is under way, or of `settle`, which then runs whether anybody
    /// waits for it or not.
    pub(super) async fn join<F>(self: &Arc<Self>, key: K, settle: impl FnOnce() -> F) -> Result<T, NoResult>
    where
        F: Future<Output = T> + Send + 'static,
    {
        let mut landed = self.take_off(key, settle)?;
        match landed.wait_for(Option::is_some).await {
            Ok(result) => result.clone().ok_or(NoResult::Lost),
            Err(_) => Err(NoResult::Lost),
        }
    }

    fn take_off<F>(self: &Arc<Self>, key: K, settle: impl FnOnce() -> F) -> Result<watch::Receiver<Option<T>>, NoResult>
    where
        F: Future<Output = T> + Send + 'static,
    {
        let mut flights = self.lock();
        if let Some(landed) = flights.get(&key) {
            return Ok(landed.clone());
        }
        if flights.len() >= MAX_FLIGHTS {
            return Err(NoResult::Full);
        }
        let (sender, landed) = watch::channel(None);
        flights.insert(key, landed.clone());
        let (runway, settlement) = (Entry { flights: self.clone(), key }, settle());
        tokio::spawn(async move {
            let _runway = runway;
            let result = settlement.await;
            let _ = sender.send(Some(result));
        });
        Ok(landed)
    }
}

impl<K: Eq + Hash, T> SingleFlight<K, T> {
    fn lock(&self) -> MutexGuard<'_, Under<K, T>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Free again when the flight has ended, however it ended.
struct Entry<K: Eq + Hash, T> {
    flights: Arc<SingleFlight<K, T>>,
    key: K,
}

impl<K: Eq + Hash, T> Drop for Entry<K, T> {
    fn drop(&mut self) {
        self.flights.lock().remove(&self.key);
    }
}
