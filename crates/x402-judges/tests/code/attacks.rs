//! Programs that try to take more than they are given. Each gets a verdict, and names the limit that it met.

use x402_judges::CodeJudge;
use x402_market::{LongText, MAX_EVALUATION, judge::Judge as _};

use super::{SECRET, issues, judge, submission, submission_with, workers};

/// Expects a verdict of zero on this body of a function, for one of these reasons.
async fn stopped(body: &str, reasons: &[&str]) {
    let program = format!("def double(n):\n    {}\n", body.replace('\n', "\n    "));
    let verdict = judge(&CodeJudge::tests(workers(), SECRET), &program).await;
    let issues = issues(&verdict);
    let is_expected = issues.first().is_some_and(|(what, _)| reasons.iter().any(|reason| what.contains(reason)));
    assert!(verdict.score.get() == 0.0 && is_expected, "{body}: {verdict:?}");
}

const MEMORY: &str = "ran out of memory";
const HEAP: &str = "heap";
const TICKS: &str = "tick";
const TIME: &str = "processor time";

#[tokio::test]
async fn memory_at_once() {
    stopped("return [0] * 2000000000", &[MEMORY, HEAP]).await;
    stopped("return len('x' * 2000000000)", &[MEMORY, HEAP]).await;
    stopped("return len(list(range(1000000000)))", &[MEMORY, HEAP]).await;
}

#[tokio::test]
async fn memory_by_and_by() {
    stopped("text = 'x'\nfor _ in range(60):\n    text += text\nreturn text", &[MEMORY, HEAP]).await;
    stopped("items = {}\nfor i in range(900000):\n    items[str(i) * 1000] = i\nreturn items", &[MEMORY, HEAP, TIME])
        .await;
}

#[tokio::test]
async fn endless_loop() {
    stopped("for _ in range(1000000000):\n    pass\nreturn 1", &[TICKS, TIME]).await;
    stopped("for _ in range(1000000000):\n    print('output without end')\nreturn 1", &[TICKS, TIME]).await;
    stopped("return [i for i in range(1000) for j in range(10000)]", &[TICKS, TIME, HEAP]).await;
}

#[tokio::test]
async fn work_that_ticks_do_not_see() {
    stopped("items = list(range(100000))\nfor _ in range(500000):\n    sorted(items)\nreturn 1", &[TIME]).await;
}

#[tokio::test]
async fn huge_integers() {
    stopped("x = 7\nfor _ in range(60):\n    x = x * x\nreturn x", &[TIME, MEMORY, HEAP]).await;
    stopped("return str(1 << 100000000)", &[TIME, MEMORY, HEAP, "shift"]).await;
}

#[tokio::test]
async fn deep_nesting() {
    let nested = |depth: usize| format!("return {}1{}", "(".repeat(depth), ")".repeat(depth));
    stopped(&nested(15_000), &["nested too deeply"]).await;
    let text = format!("return {}1", "-".repeat(30_000));
    stopped(&text, &["nested too deeply"]).await;
}

#[tokio::test]
async fn recursion() {
    stopped("return double(n)", &["recurs", "stack"]).await;
}

/// A value that is long as text is cut, and so is what is said of it.
#[tokio::test]
async fn endless_answer() {
    let verdict = judge(&CodeJudge::tests(workers(), SECRET), "def double(n):\n    return 'long' * 5000000\n").await;
    assert_eq!(verdict.score.get(), 0.0);
    assert!(issues(&verdict).iter().all(|(what, _)| what.len() < 1_000), "{verdict:?}");
}

#[tokio::test]
async fn files_and_other_modules() {
    for program in
        ["load('/etc/passwd', 'x')\ndef double(n):\n    return x\n", "def double(n):\n    return open('/etc/passwd')\n"]
    {
        let verdict = judge(&CodeJudge::tests(workers(), SECRET), program).await;
        assert_eq!((verdict.score.get(), &*verdict.critique.summary), (0.0, "It does not run."), "{verdict:?}");
    }
}

/// What one run told of the tests does not help in another.
#[tokio::test]
async fn program_that_detects_tests() {
    let tests = CodeJudge::tests(workers(), SECRET);
    let told = judge(&tests, "def double(n):\n    return 'told'\n").await;
    let known: Vec<String> = issues(&told)
        .iter()
        .filter_map(|(what, _)| Some(what.split_once('(')?.1.split_once(')')?.0.to_owned()))
        .collect();
    assert!(known.len() > 5, "{told:?}");
    let known: Vec<String> = known.iter().map(|n| format!("{n}: {}", 2 * n.parse::<i64>().unwrap())).collect();
    let program = format!("def double(n):\n    return {{{}}}.get(n, 0)\n", known.join(", "));
    assert!(judge(&tests, &program).await.score.get() < 0.3);
}

#[tokio::test]
async fn source_of_a_megabyte() {
    assert!(LongText::new("#".repeat(1 << 20)).is_err());
    // The longest output that can be submitted.
    let long = format!("def double(n):\n    return 2 * n\n{}", "#".repeat(65_000));
    let verdict = judge(&CodeJudge::tests(workers(), SECRET), &long).await;
    assert_eq!(issues(&verdict)[0].0, "it is longer than 32 KiB");
}

/// What is rejected is not paid for, and the evaluator has run the program.
#[tokio::test]
async fn hostile_reference_gets_verdicts_and_so_is_paid_for() {
    let inputs = "def inputs(size, random):\n    return [size]\n";
    let nested = format!("def double(n):\n    return {}1\n", "-".repeat(30_000));
    for (double, reason) in [
        ("def double(n):\n    for _ in range(500000):\n        sorted(range(100000))\n", TIME),
        ("def double(n):\n    return [0] * 2000000000\n", ""),
        ("def double(n):\n    return 1 // 0\n", "division by zero"),
        ("", "no function beside"),
        (&nested, "nested too deeply"),
    ] {
        let submission = submission_with(&format!("{double}{inputs}"), &["def double(n):\n    return 2 * n\n"; 2]);
        for judge in [CodeJudge::tests(workers(), SECRET), CodeJudge::growth(workers(), SECRET)] {
            let verdicts = judge.judge(&submission).await.unwrap();
            assert_eq!(verdicts.len(), 2);
            for verdict in verdicts {
                let summary = &*verdict.critique.summary;
                let is_neutral = (verdict.score.get(), verdict.confidence.get()) == (0.5, 0.1);
                let is_told = summary.starts_with("Not judged: task.reference: ") && summary.contains(reason);
                assert!(is_neutral && is_told, "{double:.60}: {verdict:?}");
            }
        }
    }
}

/// The examples of the longest report fit into a request, beside the program of a student.
#[tokio::test]
async fn examples_of_any_length_that_is_reported_are_run() {
    for length in [130_900, 174_000] {
        let reference =
            format!("def double(n):\n    return 'x' * {length}\ndef inputs(size, random):\n    return [size]\n");
        let submission =
            submission_with(&reference, &[&format!("def double(n):\n    return n\n{}", "#".repeat(32_000))]);
        let verdicts = CodeJudge::tests(workers(), SECRET).judge(&submission).await;
        assert!(verdicts.is_ok(), "{length}: {verdicts:?}");
    }
}

/// An evaluation that is longer is not sold.
#[tokio::test]
async fn evaluation_of_outputs_with_long_faulty_lines_is_short_enough_to_be_sold() {
    let program = format!("def double(n):\n    fail(n) # {}\n", "𝄞".repeat(900));
    let submission = submission(&[&*program; 32]);
    assert!(serde_json::to_vec(&submission).unwrap().len() < 256 << 10);
    let verdicts = CodeJudge::tests(workers(), SECRET).judge(&submission).await.unwrap();
    let length = serde_json::to_vec(&verdicts).unwrap().len();
    assert!(length < MAX_EVALUATION * 9 / 10 && !issues(&verdicts[0])[0].1.is_empty(), "{length}");
}

#[tokio::test]
async fn good_neighbour_of_an_attack_is_judged_as_ever() {
    let group = submission(&["def double(n):\n    return [0] * 2000000000\n", "def double(n):\n    return 2 * n\n"]);
    let verdicts = CodeJudge::tests(workers(), SECRET).judge(&group).await.unwrap();
    assert_eq!([verdicts[0].score.get(), verdicts[1].score.get()], [0.0, 1.0], "{verdicts:?}");
}
