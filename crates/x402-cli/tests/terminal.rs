//! What a person at a terminal gets: colours, remarks on work that takes long, and completions.

use std::process::Stdio;

use tokio::{
    io::AsyncReadExt as _,
    process::{Child, Command},
    time::timeout,
};

use crate::{
    stage::{PATIENCE, PRICE, Stage, facts, run, x402},
    what_can_go_wrong::{NOBODY, with_environment_of},
};

/// Starts the same command at a terminal of its own, which is `script` of util-linux. What it shows is on standard output.
fn at_a_terminal(command: &Command) -> Child {
    let command = command.as_std();
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    let line: Vec<_> = words.map(|word| format!("'{}'", word.to_str().unwrap())).collect();
    let mut terminal = Command::new("script");
    terminal.args(["--quiet", "--return", "--command", &line.join(" "), "/dev/null"]);
    with_environment_of(command, terminal).spawn().unwrap()
}

#[tokio::test]
async fn colours_are_for_terminals_only() {
    const PLAIN: &str = "x402: nothing is paid by permit";
    let pay = || {
        let mut command = x402();
        command.args(["pay", NOBODY, "--rpc-url", NOBODY, "--attempts", "1"]);
        command.env("PAYER_PRIVATE_KEY", format!("0x{}", "46".repeat(32))).env_remove("NO_COLOR");
        command
    };
    let shown = async |command: &Command| {
        let output = timeout(PATIENCE, at_a_terminal(command).wait_with_output()).await.unwrap().unwrap();
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    let coloured = shown(&pay()).await;
    assert!(coloured.contains(&format!("\u{1b}[1;33m{PLAIN}")), "{coloured}");
    let unwanted = shown(pay().env("NO_COLOR", "1")).await;
    let elsewhere = String::from_utf8_lossy(&run(&mut pay()).await.stderr).into_owned();
    for text in [unwanted, elsewhere] {
        assert!(text.contains(PLAIN) && !text.contains('\u{1b}'), "{text}");
    }
}

#[tokio::test]
async fn only_a_person_is_told_that_work_goes_on() {
    const SIGN: &str = "waiting for the answer: ";
    let stage = Stage::new().await;
    let charge = stage.charging().await;
    let pay = stage.pay(&format!("{}/gated", charge.url()));
    let mut unseen = with_environment_of(pay.as_std(), Command::new(pay.as_std().get_program()));
    let unseen = unseen.args(pay.as_std().get_args()).stderr(Stdio::piped()).spawn().unwrap();
    let mut seen = at_a_terminal(&pay);
    let (mut screen, mut text) = (seen.stdout.take().unwrap(), String::new());
    timeout(PATIENCE, async {
        while !text.contains(SIGN) {
            let mut piece = [0; 1024];
            let length = screen.read(&mut piece).await.unwrap();
            assert!(length > 0, "it ended: {text}");
            text += &String::from_utf8_lossy(&piece[..length]);
        }
    })
    .await
    .unwrap();
    stage.upstream.state.gate.add_permits(2);
    timeout(PATIENCE, screen.read_to_string(&mut text)).await.unwrap().unwrap();
    assert!(text.contains("\"outcome\":\"settled\""), "{text}");
    let unseen = timeout(PATIENCE, unseen.wait_with_output()).await.unwrap().unwrap();
    assert_eq!((&facts(&unseen)["outcome"], String::from_utf8_lossy(&unseen.stderr)), (&"settled".into(), "".into()));
    charge.stop().await;
    assert_eq!(stage.income().await, 2 * PRICE);
}

#[tokio::test]
async fn each_shell_gets_completions_of_every_flag() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let made = run(x402().args(["completions", shell])).await;
        let script = String::from_utf8(made.stdout).unwrap();
        assert!(made.status.success() && script.contains("print-config"), "{shell}");
        if shell == "bash" {
            assert!(Command::new("bash").args(["-n", "-c", &script]).status().await.unwrap().success());
        }
    }
}
