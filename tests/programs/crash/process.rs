//! A seller's process as its parent sees it: started, commanded, killed.

use std::{
    os::unix::process::ExitStatusExt as _,
    process::{ExitStatus, Stdio},
    time::Duration,
};

use serde::Serialize;
use tokio::{
    io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader},
    process::{Child, ChildStdin, Command},
    sync::{mpsc, watch},
    time::timeout,
};

use super::{
    channels::DONE,
    points::{PASSED, STOPPED},
    server::{ARMED, COMMITS, LISTENING, SETUP, Setup},
};

/// A timeout that also a busy machine keeps.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);
const SIGKILL: i32 = 9;

/// The process that sells after one was killed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Next {
    /// The same one, started again.
    #[default]
    Restarted,
    /// Another one with a key of its own and the same ledger, that was there before.
    Another,
}

pub(crate) struct Process {
    child: Child,
    orders: ChildStdin,
    /// The URL at which it serves.
    pub(crate) url: String,
    replies: mpsc::UnboundedReceiver<String>,
    /// The point at which it stopped.
    stopped: watch::Receiver<Option<String>>,
    passed: mpsc::UnboundedReceiver<String>,
}

impl Process {
    /// Starts this test program as a server.
    pub(crate) async fn start(setup: &Setup) -> Self {
        Self::launch("crash::server_process", SETUP, setup).await
    }

    /// Starts this test program as one of its ignored tests, with the settings in an environment variable.
    pub(crate) async fn launch(test: &str, variable: &str, setup: &impl Serialize) -> Self {
        let mut command = Command::new(std::env::current_exe().expect("this program"));
        command.args(["--exact", test, "--ignored", "--nocapture", "--test-threads=1"]);
        command.env(variable, serde_json::to_string(setup).expect("JSON")).env("RUST_BACKTRACE", "0");
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).kill_on_drop(true);
        let mut child = command.spawn().expect("it starts");
        let orders = child.stdin.take().expect("piped");
        let mut lines = BufReader::new(child.stdout.take().expect("piped")).lines();
        let (reply, mut replies) = mpsc::unbounded_channel();
        let (pass, passed) = mpsc::unbounded_channel();
        let (stop, stopped) = watch::channel(None);
        tokio::spawn(async move {
            while let Ok(Some(line)) = lines.next_line().await {
                if let Some(name) = line.strip_prefix(PASSED) {
                    let _ = pass.send(name.to_owned());
                } else if let Some(name) = line.strip_prefix(STOPPED) {
                    stop.send_replace(Some(name.to_owned()));
                } else if [LISTENING, ARMED, COMMITS, DONE].iter().any(|reply| line.starts_with(reply)) {
                    let _ = reply.send(line);
                }
            }
        });
        // It may stop at a point before it listens.
        let mut early = stopped.clone();
        let url = tokio::select! {
            listening = timeout(PATIENCE, replies.recv()) => {
                let listening = listening.expect("the server starts in time").expect("the server starts");
                format!("http://{}", listening.strip_prefix(LISTENING).expect("it listens first"))
            }
            _ = early.wait_for(Option::is_some) => String::new(),
        };
        Self { child, orders, url, replies, stopped, passed }
    }

    async fn order(&mut self, order: &str) {
        self.orders.write_all(format!("{order}\n").as_bytes()).await.expect("the server takes orders");
    }

    async fn ask(&mut self, order: &str) -> String {
        self.order(order).await;
        timeout(PATIENCE, self.replies.recv()).await.expect("the server replies in time").expect("the server replies")
    }

    /// Starts counting points.
    pub(crate) async fn arm(&mut self) {
        assert_eq!(self.ask("arm").await, ARMED);
    }

    /// Puts its clock ahead by so many seconds. A stopped process does not react.
    pub(crate) async fn ahead(&mut self, seconds: u64) {
        self.order(&format!("ahead {seconds}")).await;
    }

    /// Returns the number of transactions that its ledger committed, if the process counts them.
    pub(crate) async fn commits(&mut self) -> u64 {
        let reply = self.ask("commits").await;
        reply.strip_prefix(COMMITS).and_then(|count| count.parse().ok()).expect("a number")
    }

    /// Waits until a buyer is done. Returns `false` if it ended without.
    pub(crate) async fn done(&mut self) -> bool {
        self.replies.recv().await.is_some_and(|reply| reply.starts_with(DONE))
    }

    /// Waits until it stops at a point, and returns the point.
    pub(crate) fn stopped(&self) -> watch::Receiver<Option<String>> {
        self.stopped.clone()
    }

    /// Returns the points that it has passed since the last call, in order.
    pub(crate) fn passed(&mut self) -> Vec<String> {
        std::iter::from_fn(|| self.passed.try_recv().ok()).collect()
    }

    /// Kills it with SIGKILL.
    pub(crate) async fn kill(mut self) {
        self.child.start_kill().expect("it runs");
        let status: ExitStatus = self.child.wait().await.expect("it ends");
        assert_eq!(status.signal(), Some(SIGKILL), "it died otherwise: {status}");
    }
}
