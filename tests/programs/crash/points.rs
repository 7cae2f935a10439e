//! The named points of a payment's life, at one of which the process stops for good.

use std::{
    collections::BTreeMap,
    fmt,
    future::{Future, poll_fn},
    io::Write as _,
    pin::pin,
    sync::{
        Mutex,
        atomic::{AtomicBool, Ordering},
    },
    task::Poll,
};

use serde::{Deserialize, Serialize};

/// The `occurrence`-th time, counted from 1, that a process passes the point `name`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct Point {
    pub(crate) name: String,
    pub(crate) occurrence: u32,
}

impl fmt::Display for Point {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} #{}", self.name, self.occurrence)
    }
}

/// The messages of the process to its parent, a line each.
pub(crate) const PASSED: &str = "passed ";
pub(crate) const STOPPED: &str = "stopped ";

/// Counts and reports the points that the process passes, and stops it at one of them.
///
/// The process runs on one thread. When that stops, only work that was handed to other threads and processes goes on: SQLite's thread,
/// the database server, the chain.
pub(crate) struct Points {
    stop: Option<Point>,
    armed: AtomicBool,
    passed: Mutex<BTreeMap<String, u32>>,
}

impl Points {
    pub(crate) fn new(stop: Option<Point>, armed: bool) -> Self {
        Self { stop, armed: AtomicBool::new(armed), passed: Mutex::default() }
    }

    /// Counts from now on.
    pub(crate) fn arm(&self) {
        self.armed.store(true, Ordering::SeqCst);
    }

    /// Passes a point, or stops the process there.
    pub(crate) fn pass(&self, name: &str) {
        if self.is_the_one(name) {
            stop();
        }
    }

    /// The points around a call of the ledger: before it, as soon as it has begun and waits for something, and when it has ended.
    pub(crate) async fn around<T>(&self, name: &str, call: impl Future<Output = T>) -> T {
        self.pass(&format!("{name}: before"));
        let mut call = pin!(call);
        let first = poll_fn(|cx| Poll::Ready(call.as_mut().poll(cx))).await;
        let output = match first {
            Poll::Ready(output) => output,
            Poll::Pending => {
                self.pass(&format!("{name}: begun"));
                call.await
            }
        };
        self.pass(&format!("{name}: after"));
        output
    }

    /// The same around a call of a node, except that what has begun goes on until it is in the node's hands: the process ends
    /// while the node works, or is stopped before it learns of the answer.
    pub(crate) async fn around_request<T>(&self, name: &str, call: impl Future<Output = T>) -> T {
        self.pass(&format!("{name}: before"));
        let is_the_one = self.is_the_one(&format!("{name}: begun"));
        let output = call.await;
        if is_the_one {
            stop();
        }
        self.pass(&format!("{name}: after"));
        output
    }

    /// Counts the point and reports it.
    fn is_the_one(&self, name: &str) -> bool {
        if !self.armed.load(Ordering::SeqCst) {
            return false;
        }
        let occurrence = {
            let mut passed = self.passed.lock().unwrap();
            let count = passed.entry(name.to_owned()).or_default();
            *count += 1;
            *count
        };
        match &self.stop {
            None => say(&format!("{PASSED}{name}")),
            Some(stop) if stop.name == name && stop.occurrence == occurrence => {
                say(&format!("{STOPPED}{name}"));
                return true;
            }
            Some(_) => {}
        }
        false
    }
}

/// Writes a line to the parent process.
pub(crate) fn say(line: &str) {
    let mut out = std::io::stdout().lock();
    // As one write, because the test harness writes there, too.
    if writeln!(out, "\n{line}").and_then(|()| out.flush()).is_err() {
        std::process::exit(1);
    }
}

fn stop() -> ! {
    loop {
        std::thread::park();
    }
}
