//! The API server of Atropos itself, in a process of its own.

use std::{process::Stdio, time::Duration};

use atropos_client::{AtroposClient, TrainerRegistration};
use tokio::{
    io::{AsyncBufReadExt, BufReader},
    process::{Child, Command},
    time::timeout,
};

/// The timeout of everything that the server does here.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

pub(crate) struct AtroposServer {
    process: Child,
    pub(crate) url: String,
}

impl AtroposServer {
    /// Starts a server on a free port.
    pub(crate) async fn start() -> Self {
        Self::start_on(0).await
    }

    /// Starts a server on this port.
    pub(crate) async fn start_on(port: u16) -> Self {
        let program = support::repository().join("tests/peers/atropos/.venv/bin/run-api");
        assert!(program.exists(), "{} is not there: .ci/run says how it is installed", program.display());
        let mut command = Command::new(program);
        command.args(["--host", "127.0.0.1", "--port", &port.to_string()]).stdin(Stdio::null()).stdout(Stdio::null());
        let mut process = command.stderr(Stdio::piped()).kill_on_drop(true).spawn().unwrap();
        let mut log = BufReader::new(process.stderr.take().unwrap()).lines();
        let url = timeout(PATIENCE, async {
            while let Some(line) = log.next_line().await.unwrap() {
                if let Some((_, rest)) = line.split_once("running on ") {
                    return rest.split_whitespace().next().unwrap().to_owned();
                }
            }
            panic!("the server ended");
        });
        let url = url.await.expect("the server starts");
        // The server blocks if its output is not read.
        tokio::spawn(async move { while let Ok(Some(_)) = log.next_line().await {} });
        Self { process, url }
    }

    pub(crate) fn port(&self) -> u16 {
        self.url.rsplit_once(':').unwrap().1.parse().unwrap()
    }

    pub(crate) fn client(&self) -> AtroposClient {
        AtroposClient::new(&self.url).unwrap()
    }

    /// Starts a server with a trainer that has begun.
    pub(crate) async fn with_trainer(batch_size: u64) -> (Self, AtroposClient) {
        let server = Self::start().await;
        let trainer = server.client();
        trainer.register(&run(batch_size)).await.unwrap();
        assert_eq!(trainer.batch().await.unwrap(), None, "there is nothing yet");
        (server, trainer)
    }

    pub(crate) async fn kill(mut self) {
        self.process.kill().await.unwrap();
    }
}

/// Returns the registration of a run with this batch size.
pub(crate) fn run(batch_size: u64) -> TrainerRegistration {
    TrainerRegistration::new("tests", batch_size, 4_096, 100)
}
