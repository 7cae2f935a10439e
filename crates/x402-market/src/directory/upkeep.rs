//! What a directory does without being asked.

use std::{sync::Arc, time::Duration};

use url::Url;

use super::{
    service::{DirectoryService, Shared},
    store::StoreError,
    witness::{Witness, WitnessError},
};

/// How often there is something to do, at the most.
const ROUND: Duration = Duration::from_secs(60);
/// How many cards are asked for in one round, and how many at once.
const CARDS: u64 = 1_000;
const AT_ONCE: usize = 8;
/// How many payments are looked at again at once.
const VOICES: u64 = 200;

impl DirectoryService {
    /// Keeps the directory true, until it is dropped: asks for cards again and unlists those that do not answer, looks again at
    /// payments that were not final, and forgets what is old. Spawn it beside the server.
    pub async fn upkeep(self) {
        let weak = Arc::downgrade(&self.shared);
        drop(self);
        loop {
            let Some(shared) = weak.upgrade() else { return };
            if let Err(error) = shared.tidy().await {
                tracing::error!(error = &error as &dyn std::error::Error, "the directory cannot be kept in order");
            }
            drop(shared);
            tokio::time::sleep(ROUND).await;
        }
    }

    /// One round of [`upkeep`](Self::upkeep), now.
    ///
    /// # Errors
    /// If the directory's file cannot be used.
    pub async fn tidy(&self) -> Result<(), StoreError> {
        self.shared.tidy().await
    }
}

impl Shared {
    async fn tidy(self: &Arc<Self>) -> Result<(), StoreError> {
        let now = self.clock.now();
        self.store.forget_voices(now.saturating_sub(self.limits.voices_for.as_secs())).await?;
        self.look_again().await?;
        // Last, since evaluators decide how long it takes.
        self.refresh_cards(now).await?;
        self.store.forget_cards(now.saturating_sub(self.ages.forget.as_secs())).await
    }

    /// Asks for every card whose time has come.
    async fn refresh_cards(self: &Arc<Self>, now: u64) -> Result<(), StoreError> {
        let due = self.store.due(now.saturating_sub(self.ages.refresh.as_secs()), CARDS).await?;
        let mut due = due.into_iter();
        let mut asking = tokio::task::JoinSet::new();
        loop {
            while asking.len() < AT_ONCE
                && let Some(url) = due.next()
            {
                let shared = self.clone();
                asking.spawn(async move {
                    let fetched = match url.parse::<Url>() {
                        Ok(parsed) => shared.fetch(&parsed).await.is_ok(),
                        Err(_) => false,
                    };
                    if fetched { Ok(()) } else { shared.store.missed(&url, now, shared.ages.unlist).await }
                });
            }
            match asking.join_next().await {
                Some(Ok(done)) => done?,
                Some(Err(_)) => {}
                None => return Ok(()),
            }
        }
    }

    /// Looks again at payments that could have been undone. A voice whose payment was is removed; while not all nodes say so, it stays.
    async fn look_again(&self) -> Result<(), StoreError> {
        for witness in &self.witnesses {
            if let Some(is_final) = witness.finalized().await {
                self.look_again_with(witness, is_final).await?;
            }
        }
        Ok(())
    }

    async fn look_again_with(&self, witness: &Witness, is_final: u64) -> Result<(), StoreError> {
        let mut after = 0;
        loop {
            let open = self.store.not_final(after, VOICES).await?;
            let Some(last) = open.last() else { return Ok(()) };
            after = last.id;
            for voice in open {
                if voice.block > is_final || !witness.serves(voice.said.network, voice.said.asset) {
                    continue;
                }
                match witness.stands(&voice.said, voice.block).await {
                    Ok(Some(stands)) => {
                        if !stands {
                            tracing::warn!(id = voice.id, "a payment was undone, and has no voice any more");
                        }
                        self.store.close_voice(voice.id, stands).await?;
                    }
                    Ok(None) | Err(WitnessError::Voice(_)) => {}
                    // It would be asked for all others in vain.
                    Err(_) => return Ok(()),
                }
            }
        }
    }
}
