//! Waiting for what must happen, and no longer than it may take.
//!
//! By the runtime's time: where that is paused, half a minute is over as soon as there is nothing left to do, so that what does not
//! happen fails at once. But what comes over a socket is nothing that a runtime knows of: wait for it in real time.

use std::{future::Future, panic::Location, time::Duration};

use tokio::time::{Instant, advance, pause, resume, sleep, timeout};

/// How long anything may take that a test waits for.
const PATIENCE: Duration = Duration::from_secs(30);
/// The pause between two looks.
const PAUSE: Duration = Duration::from_millis(5);

/// Waits until `condition` holds.
///
/// # Panics
/// Says `what` did not happen, and where it was waited for, if it takes longer than half a minute.
#[track_caller]
pub fn eventually(what: &str, mut condition: impl AsyncFnMut() -> bool) -> impl Future<Output = ()> {
    let (caller, deadline) = (Location::caller(), Instant::now() + PATIENCE);
    async move {
        // A condition that never ends must not keep the test either.
        let looking = async {
            while !condition().await {
                sleep(PAUSE).await;
            }
        };
        let is_in_time = tokio::time::timeout_at(deadline, looking).await.is_ok();
        assert!(is_in_time, "waited in vain until {what}, at {caller}");
    }
}

/// Waits for the end of `future`, and returns what came of it.
///
/// # Panics
/// Says `what` did not happen, and where it was waited for, if it takes longer than half a minute.
#[track_caller]
pub fn in_time<F: Future>(what: &str, future: F) -> impl Future<Output = F::Output> {
    let caller = Location::caller();
    async move {
        match timeout(PATIENCE, future).await {
            Ok(output) => output,
            Err(_) => panic!("waited in vain until {what}, at {caller}"),
        }
    }
}

/// Lets so much of the runtime's time pass at once, in small steps, so that what comes over a socket meanwhile is not late.
///
/// # Panics
/// If the runtime has several threads, or its time is paused.
pub async fn skip(time: Duration) {
    let step = Duration::from_millis(50);
    for _ in 0..time.as_millis() / step.as_millis() {
        pause();
        advance(step).await;
        resume();
        sleep(Duration::from_millis(1)).await;
    }
}
