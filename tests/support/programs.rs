//! The examples as programs.

use std::{path::PathBuf, process::Stdio, sync::OnceLock};

use tokio::process::Command;

/// An example's program, compiled if need be, without keys from our own environment.
pub fn example(name: &str) -> Command {
    let mut command = Command::new(directory().join(name));
    command.env_remove("SETTLEMENT_PRIVATE_KEY").env_remove("STUDENT_PRIVATE_KEY");
    command.stdin(Stdio::null()).stdout(Stdio::piped()).kill_on_drop(true);
    command
}

/// Where the examples' programs are, compiled.
pub fn directory() -> &'static PathBuf {
    static DIRECTORY: OnceLock<PathBuf> = OnceLock::new();
    DIRECTORY.get_or_init(|| {
        let mut cargo = std::process::Command::new(env!("CARGO"));
        cargo.args(["build", "--quiet", "--examples"]).args((!cfg!(debug_assertions)).then_some("--release"));
        assert!(cargo.current_dir(env!("CARGO_MANIFEST_DIR")).status().unwrap().success(), "the examples compile");
        let test = std::env::current_exe().unwrap();
        test.parent().unwrap().parent().unwrap().join("examples")
    })
}
