//! Payments that wait for a transaction, and who shares one.

use std::{
    collections::VecDeque,
    sync::{Mutex, MutexGuard, PoisonError},
};

use tokio::{sync::Notify, time::Instant};

use super::member::Member;
use crate::chain::batch::GasLimit;

/// First come, first settled, as far as sharing a transaction allows.
#[derive(Default)]
pub(crate) struct Queue {
    waiting: Mutex<Waiting>,
    /// One more waits, or a transaction is done with.
    pub(super) changed: Notify,
}

#[derive(Default)]
struct Waiting {
    /// Boxed: what is empty in the line takes no room.
    members: VecDeque<Box<Member>>,
    /// Whether a task takes from the queue.
    is_served: bool,
}

impl Queue {
    /// Puts a payment in line. `true` if somebody has to begin to serve.
    pub(super) fn push(&self, member: Member) -> bool {
        let mut waiting = self.lock();
        waiting.members.push_back(Box::new(member));
        let begin = !std::mem::replace(&mut waiting.is_served, true);
        drop(waiting);
        self.changed.notify_one();
        begin
    }

    /// Puts payments that waited before at the head of the line. `true` if somebody has to begin to serve.
    pub(super) fn put_back(&self, members: Vec<Member>) -> bool {
        if members.is_empty() {
            return false;
        }
        let mut waiting = self.lock();
        for member in members.into_iter().rev() {
            waiting.members.push_front(Box::new(member));
        }
        let begin = !std::mem::replace(&mut waiting.is_served, true);
        drop(waiting);
        self.changed.notify_one();
        begin
    }

    pub(super) fn len(&self) -> usize {
        self.lock().members.len()
    }

    /// Those that have waited for too long.
    pub(super) fn expired(&self) -> Vec<Member> {
        let mut waiting = self.lock();
        let now = Instant::now();
        let (expired, kept): (VecDeque<_>, VecDeque<_>) =
            std::mem::take(&mut waiting.members).into_iter().partition(|member| member.patience <= now);
        waiting.members = kept;
        expired.into_iter().map(|member| *member).collect()
    }

    /// Whether nobody waits; serving has ended then.
    pub(super) fn is_served_out(&self) -> bool {
        let mut waiting = self.lock();
        waiting.is_served = !waiting.members.is_empty();
        !waiting.is_served
    }

    /// Those who get the next transaction: the first in line and, if it may share, up to `most` who may share with it, in
    /// order.
    pub(super) fn take(&self, most: usize, gas_cap: u32) -> Vec<Member> {
        let mut waiting = self.lock();
        let Some(first) = waiting.members.pop_front() else { return Vec::new() };
        if most <= 1 || first.packed(gas_cap).is_none() {
            return vec![*first];
        }
        let token = first.key().asset;
        let mut gas = GasLimit::new(gas_cap);
        gas.admit(first.verified.gas);
        let mut taken = vec![*first];
        let mut kept = VecDeque::new();
        while let Some(member) = waiting.members.pop_front() {
            let fits = taken.len() < most
                && member.key().asset == token
                && member.packed(gas_cap).is_some()
                && gas.admit(member.verified.gas);
            if fits {
                taken.push(*member);
            } else {
                kept.push_back(member);
            }
            if taken.len() == most {
                break;
            }
        }
        kept.append(&mut waiting.members);
        waiting.members = kept;
        taken
    }

    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl std::fmt::Debug for Queue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Queue").field("waiting", &self.len()).finish_non_exhaustive()
    }
}
