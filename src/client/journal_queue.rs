//! Group commit of a journal's file: records that come while the disk is written share the next write, and its `fsync`.

use std::{
    io,
    sync::{Arc, Mutex, PoisonError},
};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// The number of records that may wait or be written at one time. Others wait for room before they are queued.
const MAX_WAITING: usize = 1 << 10;

/// The records that wait to be written.
pub(super) struct WriteQueue {
    queue: Mutex<Queue>,
    room: Arc<Semaphore>,
}

#[derive(Default)]
struct Queue {
    waiting: Vec<Write>,
    /// Whether there is a writer, which will look again before it ends.
    is_writing: bool,
}

/// A record that waits to be written.
pub(super) struct Write {
    pub(super) line: Vec<u8>,
    /// Whether it must be on disk before `finish` is called.
    pub(super) durable: bool,
    /// Called once, on the thread that writes.
    pub(super) finish: Box<dyn FnOnce(io::Result<()>) + Send>,
    #[expect(dead_code, reason = "given back when dropped")]
    pub(super) room: OwnedSemaphorePermit,
}

/// The only one who writes; `None` once it has ended. Dropped before that, as when its runtime shuts down, it fails what waits.
pub(super) struct Writer(Option<Arc<WriteQueue>>);

impl Default for WriteQueue {
    fn default() -> Self {
        Self { queue: Mutex::default(), room: Arc::new(Semaphore::new(MAX_WAITING)) }
    }
}

impl WriteQueue {
    /// Waits for room for a record. First come, first served.
    pub(super) async fn room(&self) -> io::Result<OwnedSemaphorePermit> {
        self.room.clone().acquire_owned().await.map_err(io::Error::other)
    }

    /// Queues a record. Returns the writer if none is at work: the caller has to run it.
    #[must_use]
    pub(super) fn add(self: &Arc<Self>, write: Write) -> Option<Writer> {
        let mut queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        queue.waiting.push(write);
        (!std::mem::replace(&mut queue.is_writing, true)).then(|| Writer(Some(self.clone())))
    }

    /// Takes all that waits, for the writer. If nothing does, the writer has ended.
    fn take(&self) -> Vec<Write> {
        let mut queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        queue.is_writing = !queue.waiting.is_empty();
        std::mem::take(&mut queue.waiting)
    }
}

impl Writer {
    /// Writes until nothing waits. `append` writes lines, and has them on disk when it returns if it is told so.
    pub(super) fn run(&mut self, mut append: impl FnMut(&[u8], bool) -> io::Result<()>) {
        while let Some(batch) = self.next() {
            let lines: Vec<u8> = batch.iter().flat_map(|write| &write.line).copied().collect();
            let written = append(&lines, batch.iter().any(|write| write.durable));
            batch.into_iter().for_each(|write| (write.finish)(copy(&written)));
        }
    }

    /// Takes all that waits. Once nothing does, the next record has a writer of its own, whose records this one must not touch.
    fn next(&mut self) -> Option<Vec<Write>> {
        let batch = self.0.as_ref()?.take();
        if batch.is_empty() {
            self.0 = None;
            return None;
        }
        Some(batch)
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        while let Some(batch) = self.next() {
            batch.into_iter().for_each(|write| (write.finish)(Err(io::Error::other("the runtime has shut down"))));
        }
    }
}

/// Returns the result for another one who waited for the same write.
fn copy(written: &io::Result<()>) -> io::Result<()> {
    written.as_ref().copied().map_err(|error| match error.raw_os_error() {
        Some(code) => io::Error::from_raw_os_error(code),
        None => io::Error::new(error.kind(), error.to_string()),
    })
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;

    type Finished = Arc<Mutex<Vec<(&'static str, Result<(), io::ErrorKind>)>>>;

    /// A queue, and what became of its records.
    #[derive(Default)]
    struct Queued {
        queue: Arc<WriteQueue>,
        finished: Finished,
    }

    impl Queued {
        fn add(&self, line: &'static str, durable: bool) -> Option<Writer> {
            let room = self.queue.room().now_or_never().expect("there is room").unwrap();
            let finished = self.finished.clone();
            let finish = move |written: io::Result<()>| {
                finished.lock().unwrap().push((line, written.map_err(|error| error.kind())));
            };
            self.queue.add(Write { line: line.into(), durable, finish: Box::new(finish), room })
        }

        fn finished(&self) -> Vec<(&'static str, Result<(), io::ErrorKind>)> {
            std::mem::take(&mut *self.finished.lock().unwrap())
        }
    }

    #[test]
    fn records_that_come_during_a_write_share_the_next_one() {
        let queued = Queued::default();
        let mut writer = queued.add("a", false).expect("nobody writes");
        let mut written = Vec::new();
        writer.run(|lines, durable| {
            if written.is_empty() {
                for (line, durable) in [("b", false), ("c", true)] {
                    assert!(queued.add(line, durable).is_none(), "this thread writes");
                }
            }
            written.push((lines.to_vec(), durable));
            Ok(())
        });
        assert_eq!(written, [(b"a".to_vec(), false), (b"bc".to_vec(), true)]);
        assert_eq!(queued.finished(), [("a", Ok(())), ("b", Ok(())), ("c", Ok(()))]);
    }

    #[test]
    fn failed_write_fails_all_records_in_it() {
        let queued = Queued::default();
        let mut writer = queued.add("a", true).unwrap();
        assert!(queued.add("b", false).is_none());
        writer.run(|_, _| Err(io::ErrorKind::StorageFull.into()));
        let failed = Err(io::ErrorKind::StorageFull);
        assert_eq!(queued.finished(), [("a", failed), ("b", failed)]);
    }

    #[test]
    fn writer_that_never_ran_fails_its_records_and_lets_another_write() {
        let queued = Queued::default();
        drop(queued.add("a", true));
        assert_eq!(queued.finished(), [("a", Err(io::ErrorKind::Other))]);
        assert!(queued.add("b", true).is_some());
    }

    #[test]
    fn writer_that_has_ended_leaves_later_records_to_the_next() {
        let queued = Queued::default();
        let mut ended = queued.add("a", true).unwrap();
        ended.run(|_, _| Ok(()));
        let mut next = queued.add("b", true).expect("nobody writes");
        drop(ended);
        next.run(|_, _| Ok(()));
        assert_eq!(queued.finished(), [("a", Ok(())), ("b", Ok(()))]);
    }

    #[test]
    fn records_beyond_the_bound_wait_until_others_are_written() {
        let queued = Queued::default();
        let mut writer = queued.add("a", true).unwrap();
        for _ in 1..MAX_WAITING {
            assert!(queued.add("b", false).is_none());
        }
        let mut late = Box::pin(queued.queue.room());
        assert!((&mut late).now_or_never().is_none());
        writer.run(|_, _| Ok(()));
        assert!(matches!(late.now_or_never(), Some(Ok(_))));
        assert_eq!(queued.finished().len(), MAX_WAITING);
    }
}
