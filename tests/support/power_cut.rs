//! Power cuts on Linux: a process whose files lose what was written and not synced.
//!
//! A kill does not show what a power cut does, because the operating system writes what a dead process left. So the process runs with a
//! library (`power_cut.c`) that copies each of its files into a second directory when the file has been synced. A power cut leaves that
//! directory.

use std::{
    fs,
    os::unix::fs::{MetadataExt as _, chown},
    path::{Path, PathBuf},
    process::Command,
    sync::atomic::{AtomicUsize, Ordering},
};

const FILES: &str = "POWER_CUT_FILES";

/// The directory of a process, and what of it is on disk.
#[derive(Debug)]
pub struct Disk {
    files: PathBuf,
    cuts: AtomicUsize,
}

impl Disk {
    /// Takes what is in a directory for synced.
    pub fn of(files: &Path) -> Self {
        let disk = Self { files: files.canonicalize().expect("a directory"), cuts: AtomicUsize::new(0) };
        copy(&disk.files, &disk.beside("synced"));
        let mut compiler = Command::new("cc");
        compiler.args(["-shared", "-fPIC", "-O1", "-o"]).arg(disk.beside("so"));
        compiler.arg(crate::repository().join("tests/support/power_cut.c")).arg("-ldl");
        assert!(compiler.status().expect("a C compiler, as for SQLite").success());
        disk
    }

    /// Returns the directory of a process that [`run_on`](Self::run_on) prepared: this one.
    pub fn of_this_process() -> Self {
        Self { files: std::env::var_os(FILES).expect("started by a test").into(), cuts: AtomicUsize::new(0) }
    }

    /// Prepares a process that works in the directory. So do the processes that it starts.
    pub fn run_on<'a>(&self, process: &'a mut Command) -> &'a mut Command {
        let synced = self.beside("synced");
        process.env("LD_PRELOAD", self.beside("so")).env(FILES, &self.files).env("POWER_CUT_SYNCED", synced)
    }

    /// Returns where the process works.
    pub fn files(&self) -> &Path {
        &self.files
    }

    /// Keeps what a power cut would leave now.
    pub fn cut(&self) {
        let number = self.cuts.fetch_add(1, Ordering::Relaxed);
        copy(&self.beside("synced"), &self.beside(&format!("cut-{number}")));
    }

    /// Returns the directories that the power cuts left, in order.
    pub fn cuts(&self) -> impl Iterator<Item = PathBuf> {
        (0..self.cuts.load(Ordering::Relaxed)).map(|number| self.beside(&format!("cut-{number}")))
    }

    /// Returns the number of syncs of files so far.
    pub fn syncs(&self) -> u64 {
        fs::metadata(self.beside("synced.count")).map_or(0, |count| count.len())
    }

    fn beside(&self, extension: &str) -> PathBuf {
        self.files.with_extension(extension)
    }
}

/// Copies a directory, with owners and permissions.
pub(crate) fn copy(from: &Path, to: &Path) {
    let kind = fs::metadata(from).expect("it is there");
    if kind.is_dir() {
        fs::create_dir(to).expect("a new directory");
        fs::set_permissions(to, kind.permissions()).expect("it is ours");
        for entry in fs::read_dir(from).expect("it can be read") {
            let name = entry.expect("an entry").file_name();
            copy(&from.join(&name), &to.join(&name));
        }
    } else {
        fs::copy(from, to).expect("a copy");
    }
    chown(to, Some(kind.uid()), Some(kind.gid())).expect("only root copies what is not its own");
}
