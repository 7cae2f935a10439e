//! Bounding the payments whose signature only the payer's contract can check.

use std::{
    collections::HashMap,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use alloy_primitives::Address;
use tokio::{
    sync::{Semaphore, SemaphorePermit},
    time::{Instant, timeout},
};

use crate::{
    facilitator::{FacilitatorError, VerifyError},
    payment::Rejection,
    protocol::Reason,
};

/// How long such a payment waits for its turn.
const WALLET_PATIENCE: Duration = Duration::from_secs(2);
/// How long a payer is remembered to have no code.
const CODELESS_TTL: Duration = Duration::from_secs(3);
/// How many payers without code are remembered.
const CODELESS_MAX: usize = 1_024;

/// Bounds the cost of checking signatures that only a contract can check. Anybody can make up false ones.
#[derive(Debug)]
pub(super) struct Wallets {
    checking: Semaphore,
    codeless: Mutex<HashMap<Address, Instant>>,
}

impl Wallets {
    /// Lets so many payments be checked at a time.
    pub(super) fn new(at_a_time: usize) -> Self {
        Self { checking: Semaphore::new(at_a_time.min(Semaphore::MAX_PERMITS)), codeless: Mutex::default() }
    }

    /// Waits two seconds at most for this payment's turn. Fails if the payer was seen without code a moment ago.
    pub(super) async fn enter(&self, payer: Address) -> Result<SemaphorePermit<'_>, VerifyError> {
        let seen = self.codeless.lock().unwrap_or_else(PoisonError::into_inner).get(&payer).copied();
        if seen.is_some_and(|at| at.elapsed() < CODELESS_TTL) {
            let detail = "the payer's key did not make the signature, and the payer has no contract code";
            return Err(Rejection::new(Reason::Signature, detail).into());
        }
        match timeout(WALLET_PATIENCE, self.checking.acquire()).await {
            Ok(Ok(permit)) => Ok(permit),
            _ => {
                Err(FacilitatorError::Busy { what: "signatures of contract wallets", retry_after: WALLET_PATIENCE }
                    .into())
            }
        }
    }

    /// Refuses signatures of this payer for a few seconds, since it has no code.
    pub(super) fn remember_codeless(&self, payer: Address) {
        let mut codeless = self.codeless.lock().unwrap_or_else(PoisonError::into_inner);
        if codeless.len() >= CODELESS_MAX {
            codeless.retain(|_, at| at.elapsed() < CODELESS_TTL);
        }
        if codeless.len() < CODELESS_MAX {
            codeless.insert(payer, Instant::now());
        }
    }
}
