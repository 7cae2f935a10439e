//! `docs/peers.md` says what is true: the tests it names exist, and the versions it gives are those that are pinned.

use std::{collections::BTreeSet, fs, path::PathBuf};

use serde_json::Value;

#[test]
fn every_test_that_the_page_names_exists_and_every_test_is_on_the_page() {
    let page = read("docs/peers.md");
    let named: BTreeSet<&str> = in_backticks(&page).filter(|word| word.ends_with("_on_anvil")).collect();
    let mut sources = String::new();
    for entry in fs::read_dir(root().join("tests/peers")).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|extension| extension == "rs") {
            sources.push_str(&fs::read_to_string(path).unwrap());
        }
    }
    let tests = sources.split("#[tokio::test]\nasync fn ").skip(1);
    let tests: BTreeSet<&str> =
        tests.map(|rest| rest.split('(').next().unwrap()).filter(|name| name.ends_with("_on_anvil")).collect();
    assert!(tests.len() > 40, "{tests:?}");
    let unknown: Vec<_> = named.difference(&tests).collect();
    assert!(unknown.is_empty(), "the page names tests that do not exist: {unknown:?}");
    let missing: Vec<_> = tests.difference(&named).collect();
    assert!(missing.is_empty(), "the page does not name these tests: {missing:?}");
}

#[test]
fn every_test_that_a_rule_of_others_names_exists() {
    let page = read("docs/peers.md");
    let named: Vec<_> = in_backticks(&page).filter_map(|word| word.split_once("::")).collect();
    for (file, test) in &named {
        assert!(read(file).contains(&format!("fn {test}(")), "{file} has no {test}");
    }
    assert!(named.len() > 20, "{named:?}");
}

#[test]
fn every_rule_of_the_escrow_contract_is_on_the_page_and_is_a_test() {
    let page = read("docs/peers.md");
    let rules = page.split("### The rules of the escrow contract").nth(1).unwrap().split("\n## ").next().unwrap();
    let rows = rules.lines().filter(|line| line.starts_with("| ") && line.ends_with("` |"));
    let named: BTreeSet<&str> = rows.filter_map(|row| in_backticks(row).last()).collect();
    let source = read("tests/settlement/escrow.rs");
    let list = source.split("on_every_chain! {").nth(1).unwrap().split('}').next().unwrap();
    let tests: BTreeSet<&str> = list.split(',').map(str::trim).filter(|name| !name.is_empty()).collect();
    let others: BTreeSet<&str> = ["payments_by_voucher_cost_a_fraction_of_a_transfer"].into();
    assert_eq!(named, tests.difference(&others).copied().collect());
}

/// Each of the first columns of the table of versions.
#[test]
fn the_versions_on_the_page_are_the_pinned_ones() {
    let page = read("docs/peers.md");
    let rows: Vec<Vec<&str>> = page
        .lines()
        .map(|line| line.trim_matches('|').split('|').map(str::trim).collect())
        .filter(|row: &Vec<&str>| row.len() == 3 && row[2].starts_with("tests/peers/"))
        .collect();
    let mut seen = BTreeSet::new();
    for row in &rows {
        for package in in_backticks(row[0]) {
            assert_eq!(pinned(row[2], package).as_deref(), Some(row[1]), "{package} in {}", row[2]);
            seen.insert((row[2], package));
        }
    }
    let npm: Value = serde_json::from_str(&read("tests/peers/package.json")).unwrap();
    for package in npm["dependencies"].as_object().unwrap().keys().filter(|package| package.contains("x402")) {
        assert!(seen.contains(&("tests/peers/package.json", package)), "{package} is not on the page");
    }
    for package in ["x402", "fastapi", "flask", "hostile-facilitator", "httpx", "requests"] {
        assert!(seen.contains(&("tests/peers/requirements.txt", package)), "{package} is not on the page");
    }
    for package in ["r402-http", "x402-axum", "x402-reqwest", "x402-facilitator-local"] {
        assert!(seen.contains(&("tests/peers/rust/Cargo.lock", package)), "{package} is not on the page");
    }
}

/// What the exchanges were recorded with is what is pinned: a new version is recorded anew.
#[test]
fn the_exchanges_are_recorded_with_the_pinned_versions() {
    let mut count = 0;
    for entry in fs::read_dir(root().join("tests/exchanges")).unwrap() {
        let path = entry.unwrap().path();
        let file: Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
        let peer = file["peer"].as_str().unwrap();
        let (pins, package) = match peer {
            "x402-httpx" | "x402-requests" | "x402-fastapi" | "x402-python" => ("requirements.txt", "x402"),
            "r402-client" | "r402-server" => ("rust/Cargo.lock", "r402-http"),
            "x402-reqwest" | "x402-axum" | "x402-facilitator-local" => ("rust/Cargo.lock", peer),
            _ => ("package.json", peer),
        };
        let version = pinned(&format!("tests/peers/{pins}"), package);
        assert_eq!(file["version"].as_str(), version.as_deref(), "{}", path.display());
        count += 1;
    }
    assert!(count > 30, "{count}");
}

/// The version of a package in a file of pins.
fn pinned(file: &str, package: &str) -> Option<String> {
    let text = read(file);
    match std::path::Path::new(file).file_name().unwrap().to_str().unwrap() {
        "package.json" => {
            let json: Value = serde_json::from_str(&text).unwrap();
            json["dependencies"][package].as_str().map(str::to_owned)
        }
        "requirements.txt" => text.lines().find_map(|line| {
            let (name, version) = line.split_once("==")?;
            (name.split('[').next() == Some(package)).then(|| version.to_owned())
        }),
        _ => {
            let at = text.split(&format!("name = \"{package}\"\nversion = \"")).nth(1)?;
            at.split('"').next().map(str::to_owned)
        }
    }
}

fn in_backticks(text: &str) -> impl Iterator<Item = &str> {
    text.split('`').skip(1).step_by(2)
}

fn read(file: &str) -> String {
    fs::read_to_string(root().join(file)).unwrap_or_else(|error| panic!("{file}: {error}"))
}

fn root() -> PathBuf {
    support::repository()
}
