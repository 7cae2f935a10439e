//! The least that a durable answer can wait for: bytes at the end of a plain file, synced for all who wait at a time.

use std::{
    fs::File,
    io,
    os::unix::fs::FileExt as _,
    path::Path,
    sync::mpsc::{self, Receiver, Sender},
    thread,
};

use rustix::fs::fdatasync;
use tokio::sync::oneshot;

/// What is kept of a request: as much as a ledger's record and the response.
const KEPT: usize = 1024;
/// The file is as long from the start, as a log that is used again is, and begun anew at its end.
const LENGTH: usize = 4 << 20;

pub struct PlainFile(Sender<oneshot::Sender<()>>);

impl PlainFile {
    pub fn create(path: &Path) -> io::Result<Self> {
        let file = File::create(path)?;
        file.write_all_at(&vec![0; LENGTH], 0)?;
        file.sync_all()?;
        let (sender, receiver) = mpsc::channel();
        thread::spawn(move || keep(&file, &receiver).expect("the disk has room"));
        Ok(Self(sender))
    }

    /// Returns when it is on disk.
    pub async fn keep(&self) {
        let (done, is_done) = oneshot::channel();
        self.0.send(done).expect("it writes");
        is_done.await.expect("it writes");
    }
}

fn keep(file: &File, receiver: &Receiver<oneshot::Sender<()>>) -> io::Result<()> {
    let mut at = 0;
    while let Ok(first) = receiver.recv() {
        let waiting: Vec<_> = std::iter::once(first).chain(receiver.try_iter()).collect();
        let length = waiting.len() * KEPT;
        if at + length > LENGTH {
            at = 0;
        }
        file.write_all_at(&vec![1; length], at as u64)?;
        at += length;
        fdatasync(file)?;
        // Whoever asked may be gone.
        for done in waiting {
            let _ = done.send(());
        }
    }
    Ok(())
}
