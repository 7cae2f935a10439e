//! The signals that stop a process.

use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::error::Error;

/// SIGINT and SIGTERM.
pub(crate) struct Signals {
    interrupt: Signal,
    terminate: Signal,
}

impl Signals {
    pub(crate) fn catch() -> Result<Self, Error> {
        let catch = |kind| signal(kind).map_err(Error::Signals);
        Ok(Self { interrupt: catch(SignalKind::interrupt())?, terminate: catch(SignalKind::terminate())? })
    }

    /// Waits for a signal that stops the process.
    pub(crate) async fn next(&mut self) {
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
        }
    }
}

/// Catches SIGHUP, with which a configuration is read again.
pub(crate) fn hangups() -> Result<Signal, Error> {
    signal(SignalKind::hangup()).map_err(Error::Signals)
}
