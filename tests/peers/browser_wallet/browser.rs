//! A person with a browser and a wallet: Chromium, driven by `tests/peers/browser.mjs`.

use std::{env, path::PathBuf, process::Stdio, time::Duration};

use alloy_signer_local::PrivateKeySigner;
use serde::Deserialize;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines},
    process::{Child, ChildStdin, ChildStdout, Command},
    time::timeout,
};

/// The timeout of one action, which may include a settlement.
const PATIENCE: Duration = Duration::from_secs(60);

/// The browser's process, which ends with the test.
pub struct Browser {
    input: ChildStdin,
    output: Lines<BufReader<ChildStdout>>,
    _process: Child,
    _profile: TempDir,
}

/// The visible contents of the page; `None` for an element that is missing or hidden.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Seen {
    pub title: String,
    /// All text, where it was asked for.
    text: Option<String>,
    pub address: Option<String>,
    pub offers: Vec<String>,
    pub button: Option<String>,
    pub mood: Option<String>,
    pub status: Option<String>,
    pub answer: Option<String>,
    pub receipt: Option<String>,
    pub frame: Option<Value>,
    /// The width of a shown image.
    pub image: Option<u32>,
    pub focused: Option<String>,
    /// The number of payments that the page keeps.
    pub kept: usize,
    pub is_secure: bool,
    pub overflows: bool,
    /// The requests to the wallet since the last look, as `{method, params}`.
    pub asked: Vec<Value>,
    wrong: Vec<String>,
}

impl Seen {
    /// The message to the person.
    pub fn told(&self) -> &str {
        self.status.as_deref().unwrap_or_default()
    }

    /// Returns what the wallet was asked to sign.
    pub fn signed(&self) -> Vec<Value> {
        let params = self.asked.iter().filter(|asked| asked["method"] == "eth_signTypedData_v4");
        params.map(|asked| serde_json::from_str(asked["params"][1].as_str().unwrap()).unwrap()).collect()
    }

    /// Returns the wallet's methods that were called.
    pub fn methods(&self) -> Vec<&str> {
        self.asked.iter().map(|asked| asked["method"].as_str().unwrap()).collect()
    }
}

impl Browser {
    pub async fn start(key: &PrivateKeySigner, rpc_url: &str) -> Self {
        let profile = TempDir::new().unwrap();
        let mut command = Command::new("node");
        command.arg("browser.mjs").current_dir(support::repository().join("tests/peers"));
        command.env("BROWSER", chromium()).env("PROFILE", profile.path()).env("RPC_URL", rpc_url);
        command.env("PRIVATE_KEY", key.to_bytes().to_string());
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).kill_on_drop(true);
        let mut process = command.spawn().expect("node starts");
        let input = process.stdin.take().unwrap();
        let mut output = BufReader::new(process.stdout.take().unwrap()).lines();
        let ready = timeout(PATIENCE, output.next_line()).await.expect("the browser starts").unwrap();
        ready.expect("the browser starts: is puppeteer-core installed in tests/peers?");
        Self { input, output, _process: process, _profile: profile }
    }

    pub async fn open(&mut self, url: &str) -> Seen {
        self.act(json!({ "do": "open", "url": url })).await
    }

    pub async fn reload(&mut self) -> Seen {
        self.act(json!({ "do": "reload" })).await
    }

    /// Presses the button with the keyboard, and waits for the result.
    pub async fn press(&mut self) -> Seen {
        self.act(json!({ "do": "press" })).await
    }

    /// Chooses one of several offers.
    pub async fn choose(&mut self, offer: usize) -> Seen {
        self.act(json!({ "do": "choose", "offer": offer })).await
    }

    /// Changes the wallet's behaviour: `isThere`, `chain`, `knows`, `declines`.
    pub async fn wallet(&mut self, set: Value) -> Seen {
        self.act(json!({ "do": "wallet", "set": set })).await
    }

    /// Sets the browser's clock ahead.
    pub async fn ahead(&mut self, seconds: u64) -> Seen {
        self.act(json!({ "do": "ahead", "seconds": seconds })).await
    }

    /// Checks the page in this width and theme for accessibility problems (axe). Writes a picture of the whole page into the directory
    /// `TOWER_X402_PICTURES`, if that is set.
    pub async fn picture(&mut self, name: &str, width: u32, dark: bool) -> Seen {
        let directory = env::var_os("TOWER_X402_PICTURES").map(PathBuf::from);
        let spare = env::temp_dir().join(format!("tower-x402-{}-{name}", std::process::id()));
        let file = directory.as_ref().map_or_else(|| spare.clone(), |directory| directory.join(name));
        let seen =
            self.act(json!({ "do": "picture", "file": file, "width": width, "height": 800, "dark": dark })).await;
        assert!(std::fs::metadata(&file).unwrap().len() > 1_000, "a picture");
        let _ = std::fs::remove_file(spare);
        seen
    }

    /// Returns all text of the page.
    pub async fn text(&mut self) -> String {
        self.act(json!({ "do": "read" })).await.text.unwrap_or_default()
    }

    async fn act(&mut self, command: Value) -> Seen {
        self.input.write_all(format!("{command}\n").as_bytes()).await.unwrap();
        let line =
            timeout(PATIENCE, self.output.next_line()).await.unwrap_or_else(|_| panic!("{command} ends")).unwrap();
        let seen: Seen = serde_json::from_str(&line.unwrap_or_else(|| panic!("{command} ends"))).unwrap();
        assert!(
            seen.wrong.is_empty(),
            "nothing is refused by the page's policy, fails in it, or keeps people out: {seen:?}"
        );
        assert!(!seen.title.is_empty(), "{seen:?}");
        seen
    }
}

/// Finds Chromium; fails without it.
pub fn chromium() -> PathBuf {
    if let Some(path) = env::var_os("TOWER_X402_CHROMIUM") {
        return path.into();
    }
    let places = env::var_os("PATH").unwrap_or_default();
    let names = ["chromium", "chromium-browser", "google-chrome"];
    let found =
        env::split_paths(&places).flat_map(|place| names.map(|name| place.join(name))).find(|path| path.is_file());
    found.expect("Chromium: run `apt-get install chromium`, or set TOWER_X402_CHROMIUM")
}
