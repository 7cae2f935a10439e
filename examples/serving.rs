//! What the programs that serve do besides their work: logs, one line when ready, and an end by signal that answers the requests in
//! progress.

use std::{
    io::{self, IsTerminal as _, Write as _},
    net::SocketAddr,
    process::ExitCode,
    time::Duration,
};

use anyhow::Context as _;
use axum::{
    Router,
    extract::{ConnectInfo, Request},
};
use serde::Serialize;
use tokio::{
    net::TcpListener,
    signal::unix::{Signal, SignalKind, signal},
    sync::oneshot,
    task::JoinHandle,
    time::timeout,
};
use tower::util::MapRequestLayer;
use tower_x402::server::PeerAddress;
use tracing_subscriber::EnvFilter;

/// Writes the logs of this program to standard error.
pub(crate) fn log_of(program: &str) {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| format!("warn,{program}=info").into());
    let logs = tracing_subscriber::fmt().with_writer(io::stderr).with_ansi(io::stderr().is_terminal());
    logs.with_env_filter(filter).init();
}

/// Says on standard error why this program could not start, if so, and returns its exit status.
pub(crate) fn exit_of(program: &str, ended: anyhow::Result<()>) -> ExitCode {
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{program}: {error:#}");
            ExitCode::from(2)
        }
    }
}

/// Opens the port of `--listen`.
pub(crate) async fn listen(address: &str) -> anyhow::Result<TcpListener> {
    TcpListener::bind(address).await.with_context(|| format!("--listen {address}"))
}

/// Prints the line that says that the program is ready.
pub(crate) fn announce(ready: &impl Serialize) -> anyhow::Result<()> {
    let ready = serde_json::to_string(ready)?;
    // A closed standard output is no reason to fail.
    let _ = writeln!(io::stdout().lock(), "{ready}");
    Ok(())
}

/// The signals that stop the process.
pub(crate) struct Signals {
    interrupt: Signal,
    terminate: Signal,
}

impl Signals {
    pub(crate) fn catch() -> anyhow::Result<Self> {
        let catch = |kind| signal(kind).context("signals cannot be caught");
        Ok(Self { interrupt: catch(SignalKind::interrupt())?, terminate: catch(SignalKind::terminate())? })
    }

    pub(crate) async fn next(&mut self) {
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
        }
    }
}

/// A port on which requests are answered.
pub(crate) struct Serving {
    stop: oneshot::Sender<()>,
    task: JoinHandle<io::Result<()>>,
}

impl Serving {
    /// Begins to answer. Each request is told its peer, whose requests are limited.
    pub(crate) fn begin(listener: TcpListener, app: Router) -> Self {
        // Behind a proxy the peer is the proxy: insert the address that the proxy reports instead.
        let app = app.layer(MapRequestLayer::new(|mut request: Request| {
            if let Some(ConnectInfo(peer)) = request.extensions().get::<ConnectInfo<SocketAddr>>().copied() {
                request.extensions_mut().insert(PeerAddress(peer.ip()));
            }
            request
        }));
        let (stop, stopped) = oneshot::channel();
        let serving = axum::serve(listener, app.into_make_service_with_connect_info::<SocketAddr>());
        let serving = serving.with_graceful_shutdown(async {
            let _ = stopped.await;
        });
        Self { stop, task: tokio::spawn(async { serving.await }) }
    }

    /// Takes no more requests, and waits for those in progress.
    pub(crate) async fn finish(self, patience: Duration) -> anyhow::Result<()> {
        let _ = self.stop.send(());
        timeout(patience, self.task).await.context("a client kept its request open")???;
        Ok(())
    }
}
