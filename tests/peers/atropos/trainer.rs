//! A trainer that pulls batches and keeps them for the tests.

use std::{collections::BTreeSet, time::Duration};

use atropos_client::{AtroposClient, ReceivedGroup};
use tokio::{
    sync::{mpsc, watch},
    task::JoinHandle,
    time::{sleep, timeout},
};

use super::server::{AtroposServer, PATIENCE, run};

pub struct Trainer {
    client: AtroposClient,
    work: JoinHandle<Vec<Vec<ReceivedGroup>>>,
    taken: watch::Receiver<usize>,
    stop: mpsc::Sender<()>,
}

impl Trainer {
    /// Registers a trainer that pulls batches of this many sequences.
    pub async fn start(server: &AtroposServer, batch_size: u64) -> Self {
        let client = server.client();
        client.register(&run(batch_size)).await.unwrap();
        let (count, taken) = watch::channel(0);
        let (stop, mut stopped) = mpsc::channel(1);
        let trainer = client.clone();
        let work = tokio::spawn(async move {
            let mut batches = Vec::new();
            loop {
                let over = stopped.try_recv().is_ok();
                while let Some(batch) = trainer.batch().await.unwrap() {
                    batches.push(batch);
                    count.send_replace(batches.len());
                }
                if over {
                    return batches;
                }
                sleep(Duration::from_millis(20)).await;
            }
        });
        Self { client, work, taken, stop }
    }

    /// Waits until it has pulled this many batches.
    pub async fn has_taken(&mut self, batches: usize) {
        let taken = timeout(PATIENCE, self.taken.wait_for(|taken| *taken >= batches)).await;
        taken.expect("the batches come").unwrap();
    }

    /// Returns all batches, once no more come, and the number of groups that are left over.
    pub async fn finish(self) -> (Vec<Vec<ReceivedGroup>>, u64) {
        self.stop.send(()).await.unwrap();
        let batches = timeout(PATIENCE, self.work).await.unwrap().unwrap();
        (batches, self.client.status().await.unwrap().queue_size)
    }
}

/// Checks that the batches are full and that every group has its own id. Returns the groups.
pub fn groups_of(batches: Vec<Vec<ReceivedGroup>>, batch_size: usize) -> Vec<ReceivedGroup> {
    for batch in &batches {
        assert_eq!(batch.iter().map(ReceivedGroup::len).sum::<usize>(), batch_size);
    }
    let groups: Vec<_> = batches.into_iter().flatten().collect();
    let names: BTreeSet<_> = groups.iter().map(|group| group.id().expect("it has a name").to_owned()).collect();
    assert_eq!(names.len(), groups.len(), "no group came twice");
    groups
}
