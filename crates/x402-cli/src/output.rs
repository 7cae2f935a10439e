//! Prints facts on standard output, and everything else on standard error.

use std::{
    io::{self, IsTerminal as _, Write as _},
    pin::pin,
    time::{Duration, Instant},
};

use tokio::time::timeout;

/// The pause between two remarks on work that takes long.
const PAUSE: Duration = Duration::from_secs(3);

/// Prints a line of facts. A reader that closes the pipe early is no reason to fail.
pub(crate) fn line(text: impl std::fmt::Display) {
    let mut out = io::stdout().lock();
    let _ = writeln!(out, "{text}").and_then(|()| out.flush());
}

/// Prints bytes as they are.
pub(crate) fn bytes(bytes: &[u8]) {
    let mut out = io::stdout().lock();
    let _ = out.write_all(bytes).and_then(|()| out.flush());
}

/// Prints a remark for a person.
pub(crate) fn remark(text: impl std::fmt::Display) {
    let _ = writeln!(io::stderr().lock(), "{text}");
}

/// Prints a remark that nobody should overlook, in colour if a person sees it.
pub(crate) fn warn(text: impl std::fmt::Display) {
    let is_coloured = io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none();
    match is_coloured {
        true => remark(format_args!("\u{1b}[1;33m{text}\u{1b}[0m")),
        false => remark(text),
    }
}

/// Waits for work that may take long. If a person looks, it says every few seconds that it goes on.
pub(crate) async fn progress<T>(what: &str, work: impl Future<Output = T>) -> T {
    let (started, mut work) = (Instant::now(), pin!(work));
    loop {
        match timeout(PAUSE, work.as_mut()).await {
            Ok(done) => return done,
            Err(_) if io::stderr().is_terminal() => {
                remark(format_args!("{what}: {} s so far", started.elapsed().as_secs()));
            }
            Err(_) => {}
        }
    }
}
