//! Starts a process for each program, and ends it if it does not end by itself.

use std::{
    os::unix::process::ExitStatusExt as _,
    path::{Path, PathBuf},
    process::Stdio,
    sync::Arc,
    time::Duration,
};

use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    process::Command,
    sync::{Semaphore, SemaphorePermit},
    time::timeout,
};
use x402_market::judge::JudgeError;

use super::job::{ARGUMENT, MAX_REPORT, NO_REQUEST, READY, Report, Request};

/// How long a submission waits for a worker.
const MAX_WAIT: Duration = Duration::from_secs(15);
/// How long a worker may take, by the clock on the wall. A program cannot wait for anything, so one that is late without having used its
/// processor time shows that the machine is overloaded.
const PATIENCE: Duration = Duration::from_secs(60);
/// SIGXCPU, of Linux and macOS.
const OUT_OF_TIME: i32 = 24;
/// SIGKILL and SIGTERM. A program cannot send them: they come from the operator, or from a machine without memory.
const ENDED_BY_OTHERS: [i32; 2] = [9, 15];

/// Starts the processes that run the programs of a [`CodeJudge`](super::CodeJudge).
///
/// Each program has a process of its own. It has no environment and opens no file and no socket, and it is ended once it has used 4 s of
/// processor time, or 256 MiB of memory. The process is either another copy of the evaluator
/// ([`of_this_program`](Self::of_this_program)), or the program `x402-code-worker` of this package ([`new`](Self::new)), so that the
/// evaluator does not hold the interpreter.
///
/// Clones share the limit of processes.
#[derive(Clone)]
pub struct CodeWorkers(Arc<Inner>);

struct Inner {
    program: PathBuf,
    free: Semaphore,
}

/// What came of a program: a report, or the reason why there is none.
pub(super) type Outcome = Result<Report, &'static str>;

impl CodeWorkers {
    /// Runs the program `x402-code-worker`, which is at this path, and at most this many of them at once (at least one).
    ///
    /// `cargo install x402-judges --features code-worker` installs it.
    pub fn new(program: impl Into<PathBuf>, at_once: usize) -> Self {
        Self(Arc::new(Inner {
            program: program.into(),
            free: Semaphore::new(at_once.clamp(1, Semaphore::MAX_PERMITS)),
        }))
    }

    /// Runs copies of this program, at most this many at once. Call it first in `main`, before anything is read, started or opened: **in
    /// such a copy it runs the judged program, and ends the process instead of returning.**
    ///
    /// # Errors
    /// The path of this program is not known.
    #[cfg(feature = "code-worker")]
    pub fn of_this_program(at_once: usize) -> std::io::Result<Self> {
        if std::env::args_os().nth(1).is_some_and(|argument| argument == ARGUMENT) {
            std::process::exit(super::worker::work());
        }
        Ok(Self::new(std::env::current_exe()?, at_once))
    }

    /// Returns the path of the program that is run.
    pub fn program(&self) -> &Path {
        &self.0.program
    }

    /// Waits for the permit to run the programs of a submission, one after the other.
    pub(super) async fn permit(&self) -> Result<SemaphorePermit<'_>, JudgeError> {
        let busy = |_| JudgeError::Busy { retry_after: MAX_WAIT };
        timeout(MAX_WAIT, self.0.free.acquire()).await.map_err(busy)?.map_err(JudgeError::failed)
    }

    /// Runs a program in a process of its own. The caller has a [permit](Self::permit).
    pub(super) async fn run(&self, request: &Request) -> Result<Outcome, JudgeError> {
        let request = serde_json::to_vec(request).map_err(JudgeError::failed)?;
        let problem = |what: String| JudgeError::failed(format!("the worker {} {what}", self.0.program.display()));
        let mut child = Command::new(&self.0.program)
            .arg(ARGUMENT)
            .env_clear()
            .current_dir("/")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .kill_on_drop(true)
            .spawn()
            .map_err(|error| problem(format!("cannot be started: {error}")))?;
        let (Some(mut stdin), Some(mut stdout)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(problem("has no pipes".to_owned()));
        };
        let (mut ready, mut answer) = ([0], Vec::new());
        let talk = async {
            stdout.read_exact(&mut ready).await?;
            let send = async {
                // It fails if the worker has ended. Then its status says why.
                let _ = stdin.write_all(&request).await;
                drop(stdin);
            };
            let mut limited = (&mut stdout).take(MAX_REPORT as u64 + 1);
            let ((), read) = tokio::join!(send, limited.read_to_end(&mut answer));
            drop(stdout);
            read?;
            child.wait().await
        };
        let status = timeout(PATIENCE, talk).await;
        if ready != [READY] {
            return Err(problem("did not say that its limits hold".to_owned()));
        }
        // The end of this function kills it.
        let status = status.map_err(|_| problem("did not end in a minute: the machine is overloaded".to_owned()))?;
        let status = status.map_err(JudgeError::failed)?;
        match status.code() {
            _ if answer.len() > MAX_REPORT => Ok(Err("it gave too long an answer")),
            Some(0) => Ok(Ok(serde_json::from_slice(&answer).map_err(JudgeError::failed)?)),
            Some(NO_REQUEST) => Err(problem("could not read its request".to_owned())),
            _ if ENDED_BY_OTHERS.map(Some).contains(&status.signal()) => Err(problem("was killed".to_owned())),
            _ if status.signal() == Some(OUT_OF_TIME) => Ok(Err("it used more than 4 s of processor time")),
            _ => Ok(Err("it ran out of memory, or is nested too deeply")),
        }
    }
}

tower_x402::debug_fields!(CodeWorkers |this| { program: this.program() });
