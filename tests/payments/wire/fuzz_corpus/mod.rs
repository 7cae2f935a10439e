//! The promises that the fuzz targets check, on stable Rust: every seed in `fuzz/corpus`, and mutations of the seeds, the same in
//! every run. `TOWER_X402_MUTATIONS` sets how many there are for each target, and `TOWER_X402_SEED` which.

mod mutator;
#[path = "../../../../fuzz/src/lib.rs"]
#[allow(unreachable_pub)]
mod properties;

use std::{env, fs, panic, path::Path};

use mutator::{Random, mutate, words};
use properties::{Depth, PROPERTIES};

/// Mutations for each target unless told otherwise: enough for a change to be caught, few enough to be run every time.
const MUTATIONS: u64 = 3_000;
/// The largest input; the largest seed has 64 KiB.
const MAX_INPUT: usize = 96 * 1024;

#[test]
fn payments_of_v1() {
    check("payment_v1");
}

#[test]
fn payments_of_v2() {
    check("payment_v2");
}

#[test]
fn demands_of_v1() {
    check("required_v1");
}

#[test]
fn demands_of_v2() {
    check("required_v2");
}

#[test]
fn answers_of_facilitators() {
    check("answers");
}

#[test]
fn cards() {
    check("card");
}

#[test]
fn payments_through_channels() {
    check("channel");
}

#[test]
fn every_property_has_a_target_and_every_corpus_a_property() {
    let fuzz = support::repository().join("fuzz");
    let names = |folder: &str| {
        let entries = fs::read_dir(fuzz.join(folder)).unwrap();
        let mut names: Vec<_> = entries.map(|entry| entry.unwrap().path().file_stem().unwrap().to_owned()).collect();
        names.sort();
        names
    };
    let mut properties = PROPERTIES.map(|(name, _)| name);
    properties.sort();
    assert_eq!(names("corpus"), properties);
    assert_eq!(names("fuzz_targets"), properties);
}

/// Holds the seeds of a target against what their names say, and then mutations of them against the property alone.
fn check(target: &str) {
    let (_, property) = PROPERTIES.into_iter().find(|(name, _)| *name == target).unwrap();
    let seeds = seeds(target);
    for (name, seed) in &seeds {
        let (word, _) = name.split_once('_').unwrap();
        let expected = match word {
            "unread" => Depth::Unread,
            "read" => Depth::Read,
            "judged" => Depth::Judged,
            "believed" => Depth::Believed,
            _ => panic!("{name}: the first word of a seed's name says how far it gets"),
        };
        assert_eq!(property(seed), expected, "{target}/{name}");
    }
    let words = words(include_str!("../../../../fuzz/x402.dict"));
    let seeds: Vec<_> = seeds.into_iter().map(|(_, seed)| seed).collect();
    let mut random = Random::new(number("TOWER_X402_SEED", 402));
    for count in 0..number("TOWER_X402_MUTATIONS", MUTATIONS) {
        let mut input = random.pick(&seeds).clone();
        mutate(&mut input, &seeds, &words, &mut random);
        input.truncate(MAX_INPUT);
        if let Err(broken) = panic::catch_unwind(|| property(&input)) {
            let kept = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{target}-{count}"));
            fs::write(&kept, &input).unwrap();
            eprintln!("mutation {count} is kept in {}", kept.display());
            panic::resume_unwind(broken);
        }
    }
}

/// In the order of their names, so that every machine mutates the same ones.
fn seeds(target: &str) -> Vec<(String, Vec<u8>)> {
    let folder = support::repository().join("fuzz/corpus").join(target);
    let files = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let read =
        |path: std::path::PathBuf| (path.file_name().unwrap().to_str().unwrap().to_owned(), fs::read(path).unwrap());
    let mut seeds: Vec<_> = files.map(read).collect();
    seeds.sort();
    seeds
}

fn number(variable: &str, otherwise: u64) -> u64 {
    env::var(variable).map_or(otherwise, |text| text.parse().unwrap())
}
