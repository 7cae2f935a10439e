//! Two hundred programs whose quality is known.

use std::{collections::BTreeMap, fmt::Write as _, fs};

use x402_judges::{CodeJudge, LooksJudge};
use x402_market::{Submission, Task, evidence::Pairs, judge::Judge};

use super::{SECRET, workers};

/// The kinds of bad programs.
const BAD: [&str; 4] = ["wrong", "slow", "unsafe", "example"];

/// A task, and programs with their kinds.
struct Labelled {
    name: String,
    task: Task,
    programs: Vec<(String, String)>,
}

fn labelled() -> Vec<Labelled> {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/code/programs");
    let mut paths: Vec<_> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    let read = |path: &std::path::PathBuf| {
        let text = fs::read_to_string(path).unwrap();
        let mut parts = text.split("### ").skip(1).map(|part| part.split_once('\n').unwrap());
        let mut expect = |kind| parts.next().filter(|part| part.0 == kind).unwrap().1.to_owned();
        let (prompt, reference) = (expect("prompt"), expect("reference"));
        let task = Task::new("code", prompt).unwrap().with_reference(reference).unwrap();
        let programs = parts.map(|(kind, program)| (kind.to_owned(), program.to_owned())).collect();
        Labelled { name: path.file_stem().unwrap().to_string_lossy().into_owned(), task, programs }
    };
    paths.iter().map(read).collect()
}

/// Pairs ordered rightly, wrongly and in all; and verdicts that are right, of how many.
#[derive(Default)]
struct Count {
    pairs: [u32; 3],
    right: u32,
    all: u32,
}

impl Count {
    fn worth(&self) -> f64 {
        (f64::from(self.pairs[0]) - f64::from(self.pairs[1])) / f64::from(self.pairs[2])
    }

    fn accuracy(&self) -> f64 {
        f64::from(self.right) / f64::from(self.all)
    }
}

/// Returns what a judge is worth for each kind of program, beside right ones of the same task.
async fn count(judge: &dyn Judge, tasks: &[Labelled]) -> BTreeMap<&'static str, Count> {
    let mut counts: BTreeMap<_, Count> = BTreeMap::new();
    for Labelled { name, task, programs } in tasks {
        let group = Submission::group(task.clone(), programs.iter().map(|(_, program)| program.as_str())).unwrap();
        let verdicts = judge.judge(&group).await.unwrap_or_else(|error| panic!("{name}: {error:?}"));
        for (verdict, (kind, program)) in verdicts.iter().zip(programs) {
            if verdict
                .critique
                .issues
                .iter()
                .filter_map(|issue| issue.place.as_ref())
                .any(|place| !place.is_in(program))
            {
                panic!("{name}, {kind}: a place that the program does not have: {verdict:?}");
            }
        }
        let scores = |wanted: &str| {
            let of_kind = verdicts.iter().zip(programs).filter(move |(_, (kind, _))| *kind == wanted);
            of_kind.map(|(verdict, _)| verdict.score.get()).collect::<Vec<f64>>()
        };
        let good = scores("right");
        for kind in ["right"].into_iter().chain(BAD) {
            let (count, of_kind) = (counts.entry(kind).or_default(), scores(kind));
            count.all += of_kind.len() as u32;
            count.right += of_kind.iter().filter(|score| (**score > 0.5) == (kind == "right")).count() as u32;
            if kind != "right" {
                let truth: Vec<bool> = good.iter().map(|_| true).chain(of_kind.iter().map(|_| false)).collect();
                let pairs = Pairs::of(&[&good[..], &of_kind].concat(), &truth).unwrap();
                for (sum, more) in count.pairs.iter_mut().zip([pairs.right(), pairs.wrong(), pairs.all()]) {
                    *sum += more;
                }
            }
        }
    }
    counts
}

/// Prints the table that is in the documentation of `CodeJudge`.
#[tokio::test]
#[ignore = "takes minutes, and measures time: cargo test -p x402-judges --features code-worker -- --ignored"]
async fn each_judge_is_worth_what_its_documentation_says() {
    let tasks = labelled();
    let programs: Vec<_> = tasks.iter().flat_map(|task| &task.programs).collect();
    for kind in ["right"].into_iter().chain(BAD) {
        assert_eq!(programs.iter().filter(|(of, _)| of == kind).count(), 40, "{kind}");
    }
    let judges: [(&str, Box<dyn Judge>); 5] = [
        ("tests", Box::new(CodeJudge::tests(workers(), SECRET))),
        ("growth", Box::new(CodeJudge::growth(workers(), SECRET))),
        ("safety", Box::new(CodeJudge::safety(workers()))),
        ("example", Box::new(CodeJudge::example(workers()))),
        ("looks", Box::new(LooksJudge)),
    ];
    let mut table = String::new();
    let mut worths = BTreeMap::new();
    for (name, judge) in &judges {
        let counts = count(judge, &tasks).await;
        write!(table, "| {name} | {:.2} |", counts["right"].accuracy()).unwrap();
        for kind in BAD {
            let count = &counts[kind];
            write!(table, " {:+.2}, {:.2} |", count.worth(), count.accuracy()).unwrap();
            worths.insert((*name, kind), count.worth());
        }
        table.push('\n');
    }
    println!("{table}");
    let documented = include_str!("../../src/code/judges.md");
    // Time is measured for growth, so its row may differ a little.
    for row in table.lines().filter(|row| !row.starts_with("| growth")) {
        assert!(documented.contains(row), "{row} is not in the documentation");
    }
    for (judge, kind) in [("tests", "wrong"), ("tests", "example"), ("growth", "slow"), ("safety", "unsafe")] {
        assert!(worths[&(judge, kind)] > 0.8, "{judge} of {kind}");
    }
}
