//! Locking of what no method leaves halfway changed.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks a mutex. No change of what the mutexes here guard can panic halfway, so the data behind a poisoned lock is sound.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
