//! A selling process: this test program, with environment variables that make it one.

use std::{
    collections::HashMap,
    env, fs,
    io::{BufRead as _, BufReader, Write as _},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{Arc, Mutex},
};

use tokio::net::TcpListener;

/// A replica's process.
pub(crate) struct Replica {
    process: Child,
    pub(crate) url: String,
    /// The file with a line for each order that was worked for.
    work: PathBuf,
}

impl Replica {
    /// Starts the test of this name with these variables, and waits until it listens.
    pub(crate) fn start<'a>(test: &str, variables: impl IntoIterator<Item = (&'a str, String)>, work: &Path) -> Self {
        let mut process = Command::new(env::current_exe().unwrap())
            .args(["--ignored", "--exact", "--nocapture", test])
            .envs(variables)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(log_file(work))
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(process.stdout.take().unwrap()).lines().map_while(Result::ok);
        let found = lines.find_map(|line| line.split_once("replica at ").map(|(_, url)| url.to_owned()));
        let url = found.expect("a replica says where it listens");
        std::thread::spawn(move || lines.for_each(drop));
        Self { process, url, work: work.to_owned() }
    }

    /// Ends the process at once.
    pub(crate) fn kill(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }

    /// Returns how often it worked for each order.
    pub(crate) fn worked(&self) -> HashMap<u64, u32> {
        let mut runs = HashMap::new();
        for line in fs::read_to_string(&self.work).unwrap_or_default().lines() {
            *runs.entry(line.parse().unwrap()).or_default() += 1;
        }
        runs
    }
}

impl Drop for Replica {
    fn drop(&mut self) {
        self.kill();
    }
}

/// The orders that a replica works for, in a file.
#[derive(Clone)]
pub(crate) struct Work(Arc<Mutex<fs::File>>);

impl Work {
    pub(crate) fn open(path: impl AsRef<Path>) -> Self {
        Self(Arc::new(Mutex::new(fs::OpenOptions::new().create(true).append(true).open(path).unwrap())))
    }

    pub(crate) fn note(&self, n: u64) {
        writeln!(self.0.lock().unwrap(), "{n}").unwrap();
    }
}

/// Where a process logs: a file in the directory that `SOAK_LOGS` names, with the name of its file of work.
fn log_file(work: &Path) -> Stdio {
    let Some(directory) = env::var_os("SOAK_LOGS") else { return Stdio::inherit() };
    let name = work.file_name().unwrap_or_default();
    fs::File::create(Path::new(&directory).join(name)).unwrap().into()
}

/// Logs what the environment says, on the standard error.
pub(crate) fn log() {
    tracing_subscriber::fmt()
        .with_env_filter(tracing_subscriber::EnvFilter::from_default_env())
        .with_writer(std::io::stderr)
        .init();
}

/// Serves on a free port, and tells the parent where. Returns when the parent ends.
pub(crate) async fn serve<S>(serve: impl FnOnce(TcpListener) -> S)
where
    S: IntoFuture<IntoFuture: Send + 'static, Output: Send + 'static>,
{
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    println!("replica at http://{}", listener.local_addr().unwrap());
    tokio::spawn(serve(listener).into_future());
    // The pipe is closed when the parent ends.
    tokio::task::spawn_blocking(|| std::io::stdin().read_line(&mut String::new())).await.unwrap().unwrap();
}
