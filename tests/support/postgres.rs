//! A PostgreSQL server of the tests' own, from the programs that are installed.

use std::{
    ffi::OsStr,
    fs,
    io::Write as _,
    os::unix::{fs::chown, process::CommandExt},
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU32, Ordering},
    },
    thread,
    time::Duration,
};

use crate::power_cut::{self, Disk};

/// A server that listens on a socket in a directory of its own. It ends, and the directory with it, when it is dropped or when
/// the test process ends, however that ends.
pub struct Server {
    programs: PathBuf,
    directory: PathBuf,
    /// Root may not run a server.
    user: Option<(u32, u32)>,
    url: String,
    watchdog: Child,
    /// Of a server whose power can be cut.
    disk: Option<Arc<Disk>>,
}

impl Server {
    /// The server that the tests of this process share, each in a schema of its own.
    pub fn shared() -> &'static Self {
        static SERVER: OnceLock<Server> = OnceLock::new();
        SERVER.get_or_init(Self::start)
    }

    /// Starts a server with nothing in it.
    pub fn start() -> Self {
        let server = Self::create("");
        server.start_again();
        server
    }

    /// Starts a server whose power can be cut, with settings, one on each line.
    pub fn start_on_disk(settings: &str) -> Self {
        let mut server = Self::create(settings);
        server.disk = Some(Arc::new(Disk::of(&server.directory.join("data"))));
        server.start_again();
        server
    }

    fn create(settings: &str) -> Self {
        let programs = programs();
        let directory = tempfile::Builder::new().prefix("x402-pg-").tempdir().expect("a directory").keep();
        let user = is_root(&directory).then(unprivileged);
        if let Some((uid, gid)) = user {
            chown(&directory, Some(uid), Some(gid)).expect("root gives a directory away");
        }
        // The shell waits for the end of this process, at which the pipe breaks.
        let script = r#"read -r _; "$0" -D "$1/data" -m immediate -s stop; rm -rf "$1""#;
        let mut watchdog = Command::new("sh");
        watchdog.args(["-c", script]).arg(programs.join("pg_ctl")).arg(&directory).current_dir("/").process_group(0);
        watchdog.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        let watchdog = as_user(&mut watchdog, user).spawn().expect("sh");
        let url = format!("postgres://tests@localhost/postgres?host={}", directory.display());
        let server = Self { programs, directory, user, url, watchdog, disk: None };
        let data = server.directory.join("data");
        let options = ["-U", "tests", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync", "-D"];
        must(&server.run("initdb", options.map(OsStr::new).into_iter().chain([data.as_os_str()])), "initdb");
        let settings = format!(
            "listen_addresses = ''\nunix_socket_directories = '{}'\nmax_connections = 200\nshared_buffers = '32MB'\n{settings}\n",
            server.directory.display()
        );
        let file = data.join("postgresql.conf");
        let defaults = fs::read_to_string(&file).expect("initdb writes settings");
        fs::write(file, defaults + &settings).expect("settings");
        server
    }

    /// The disk of a server that was [started on one](Self::start_on_disk).
    pub fn disk(&self) -> &Arc<Disk> {
        self.disk.as_ref().expect("started on a disk")
    }

    /// Kills the server, and starts it again with the files that a power cut left.
    pub fn start_from(&mut self, cut: &Path) {
        self.kill();
        self.disk = None;
        let data = self.directory.join("data");
        fs::remove_dir_all(&data).expect("its files");
        power_cut::copy(cut, &data);
        // It would sync all of its files one by one.
        let mut settings = fs::OpenOptions::new().append(true).open(data.join("postgresql.conf")).expect("settings");
        settings.write_all(b"fsync = off\n").expect("settings");
        self.start_again();
    }

    /// Where it is.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// A name that no other test uses.
    pub fn new_schema(&self) -> String {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        format!("t{}", NEXT.fetch_add(1, Ordering::Relaxed))
    }

    /// Kills every process of the server at once, as a failing machine would.
    pub fn kill(&self) {
        let pid = fs::read_to_string(self.directory.join("data/postmaster.pid")).expect("it runs");
        let pid = pid.lines().next().expect("its process").to_owned();
        // The parent first, so that it does not mend what its children leave.
        must(&Command::new("kill").args(["-STOP", &pid]).output().expect("kill"), "kill");
        let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
        let all = children.split_whitespace().chain([pid.as_str()]);
        must(&Command::new("kill").arg("-KILL").args(all).output().expect("kill"), "kill");
        // Another one does not start before it is gone.
        let process = Path::new("/proc").join(&pid);
        for _ in 0..500 {
            if !process.exists() {
                return;
            }
            thread::sleep(Duration::from_millis(10));
        }
        panic!("process {pid} was killed and is still there");
    }

    /// Starts it after [`kill`](Self::kill), and returns when it can be connected to.
    pub fn start_again(&self) {
        let (data, log) = (self.directory.join("data"), self.directory.join("log"));
        let arguments = [OsStr::new("-D"), data.as_os_str(), OsStr::new("-l"), log.as_os_str(), OsStr::new("-w")];
        let output = self.run("pg_ctl", arguments.into_iter().chain([OsStr::new("start")]));
        if !output.status.success() {
            panic!("postgres does not start: {}", fs::read_to_string(log).unwrap_or_default());
        }
    }

    /// Stops it in the middle of whatever it does, and starts it again.
    pub fn restart(&self) {
        let data = self.directory.join("data");
        let log = self.directory.join("log");
        let arguments = ["-m", "immediate", "-w", "-l"].map(OsStr::new);
        let rest = [log.as_os_str(), OsStr::new("-D"), data.as_os_str(), OsStr::new("restart")];
        must(&self.run("pg_ctl", arguments.into_iter().chain(rest)), "pg_ctl restart");
    }

    /// Changes a setting of the server, and restarts it.
    pub fn set(&self, name: &str, value: &str) {
        let file = self.directory.join("data/postgresql.conf");
        let settings = fs::read_to_string(&file).expect("settings");
        fs::write(file, format!("{settings}{name} = {value}\n")).expect("settings");
        self.restart();
    }

    /// Makes it a standby of nobody, restarted, which can only be read.
    pub fn make_standby(&self) {
        fs::write(self.directory.join("data/standby.signal"), "").expect("a file");
        self.restart();
    }

    /// Lets a standby be written again.
    pub fn promote(&self) {
        let data = self.directory.join("data");
        let arguments = [OsStr::new("-w"), OsStr::new("-D"), data.as_os_str(), OsStr::new("promote")];
        must(&self.run("pg_ctl", arguments), "pg_ctl promote");
    }

    fn run<'a>(&self, program: &str, arguments: impl IntoIterator<Item = &'a OsStr>) -> Output {
        let mut command = Command::new(self.programs.join(program));
        // A server that inherits a pipe would keep it open.
        command.args(arguments).current_dir("/").stdin(Stdio::null()).stdout(Stdio::null()).process_group(0);
        command.stderr(fs::File::create(self.directory.join(format!("{program}.err"))).expect("a file"));
        if let Some(disk) = &self.disk {
            disk.run_on(&mut command);
        }
        as_user(&mut command, self.user).output().unwrap_or_else(|error| panic!("{program}: {error}"))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.watchdog.stdin.take());
        let _ = self.watchdog.wait();
    }
}

fn as_user(command: &mut Command, user: Option<(u32, u32)>) -> &mut Command {
    match user {
        Some((uid, gid)) => command.uid(uid).gid(gid),
        None => command,
    }
}

fn must(output: &Output, what: &str) {
    assert!(output.status.success(), "{what}: {}", String::from_utf8_lossy(&output.stderr));
}

/// Where `initdb`, `pg_ctl` and `postgres` are.
fn programs() -> PathBuf {
    let in_path =
        std::env::var_os("PATH").into_iter().flat_map(|path| std::env::split_paths(&path).collect::<Vec<_>>());
    let mut installed: Vec<PathBuf> = fs::read_dir("/usr/lib/postgresql")
        .map(|versions| versions.filter_map(|version| Some(version.ok()?.path().join("bin"))).collect())
        .unwrap_or_default();
    installed.sort();
    let is_complete = |path: &Path| path.join("initdb").exists() && path.join("pg_ctl").exists();
    in_path
        .chain(installed.into_iter().rev())
        .find(|path| is_complete(path))
        .expect("PostgreSQL's initdb and pg_ctl are neither in PATH nor in /usr/lib/postgresql: install `postgresql`")
}

fn is_root(own: &Path) -> bool {
    std::os::unix::fs::MetadataExt::uid(&fs::metadata(own).expect("just made")) == 0
}

/// A user to run a server as.
fn unprivileged() -> (u32, u32) {
    let id = |flag: &str, user: &str| {
        let output = Command::new("id").args([flag, user]).output().ok()?;
        String::from_utf8(output.stdout).ok()?.trim().parse().ok()
    };
    ["postgres", "nobody"]
        .into_iter()
        .find_map(|user| Some((id("-u", user)?, id("-g", user)?)))
        .expect("a user other than root")
}
