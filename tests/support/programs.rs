//! The examples and the command `x402` as programs.

use std::{path::PathBuf, process::Stdio, sync::OnceLock};

use tokio::process::Command;

/// An example's program, compiled if need be, without keys from our own environment.
pub fn example(name: &str) -> Command {
    let mut command = Command::new(directory().join(name));
    command.env_remove("SETTLEMENT_PRIVATE_KEY").env_remove("STUDENT_PRIVATE_KEY");
    command.stdin(Stdio::null()).stdout(Stdio::piped()).kill_on_drop(true);
    command
}

/// The command `x402`, compiled if need be.
pub fn x402() -> Command {
    let mut command = Command::new(compiled().join("x402"));
    command.stdin(Stdio::null()).stdout(Stdio::piped()).kill_on_drop(true);
    command
}

/// Where the examples' programs are, compiled.
pub fn directory() -> &'static PathBuf {
    static DIRECTORY: OnceLock<PathBuf> = OnceLock::new();
    DIRECTORY.get_or_init(|| compiled().join("examples"))
}

/// Where the workspace's programs are, compiled.
fn compiled() -> &'static PathBuf {
    static DIRECTORY: OnceLock<PathBuf> = OnceLock::new();
    DIRECTORY.get_or_init(|| {
        let program = std::env::current_exe().unwrap();
        let profile = program.parent().unwrap().parent().unwrap();
        let mut cargo = std::process::Command::new(env!("CARGO"));
        // The same packages as `cargo test --workspace` compiles, and so the same features: then there is nothing left to do.
        cargo
            .args(["build", "--quiet", "--workspace", "--examples", "--bins"])
            .args((!cfg!(debug_assertions)).then_some("--release"));
        cargo.arg("--target-dir").arg(profile.parent().unwrap());
        assert!(cargo.current_dir(crate::repository()).status().unwrap().success(), "the examples compile");
        profile.to_owned()
    })
}
