//! What the judges of programs say.

use x402_judges::CodeJudge;
use x402_market::{
    Submission, Task,
    judge::{Judge as _, JudgeError},
};

use super::{SECRET, issues, judge, submission, workers};

#[tokio::test]
async fn wrong_result_is_named_with_its_input() {
    let tests = CodeJudge::tests(workers(), SECRET);
    let right = judge(&tests, "def double(n):\n    return n + n\n").await;
    assert_eq!((right.score.get(), right.critique.issues.len()), (1.0, 0), "{right:?}");
    let wrong = judge(&tests, "def double(n):\n    return n * n\n").await;
    assert!(wrong.score.get() < 0.1, "{wrong:?}");
    assert!(issues(&wrong)[0].0.starts_with("double("), "{wrong:?}");
    assert!(issues(&wrong)[0].0.contains(" gives "), "{wrong:?}");
}

#[tokio::test]
async fn failing_line_is_named() {
    let program = "Here it is:\n```python\ndef double(n):\n    if n > 1:\n        return [n][1]\n    return 0\n```\nI hope that it helps.";
    let verdict = judge(&CodeJudge::tests(workers(), SECRET), program).await;
    assert_eq!(issues(&verdict)[0].1, "return [n][1]", "{verdict:?}");
    let unreadable = judge(&CodeJudge::tests(workers(), SECRET), "def double(n):\n    return (n\n").await;
    assert_eq!((unreadable.score.get(), &*unreadable.critique.summary), (0.0, "It does not run."));
}

#[tokio::test]
async fn line_that_takes_the_most_time_is_named() {
    let task = Task::new("code", "Write total(numbers).").unwrap();
    let reference = "def total(numbers):\n    sum = 0\n    for n in numbers:\n        sum += n\n    return sum\n\
        def inputs(size, random):\n    return [random[:size]]\n";
    let slow = "def total(numbers):\n    sum = 0\n    for i in range(len(numbers)):\n        copies = numbers[:i] + numbers[:i] + [numbers[i]]\n        \
        sum += copies[-1]\n    return sum\n";
    let group =
        Submission::group(task.with_reference(reference).unwrap(), [slow, "def total(numbers):\n    return 0\n"])
            .unwrap();
    let verdicts = CodeJudge::growth(workers(), SECRET).judge(&group).await.unwrap();
    assert!(verdicts[0].score.get() < 0.5, "{verdicts:?}");
    assert_eq!(issues(&verdicts[0])[0].1, "copies = numbers[:i] + numbers[:i] + [numbers[i]]", "{verdicts:?}");
    assert_eq!(verdicts[1].score.get(), 1.0, "it does not look at results: {verdicts:?}");
}

#[tokio::test]
async fn unsafe_lines_are_named() {
    let safety = CodeJudge::safety(workers());
    let program = "def same(token, guess):\n    for i in range(len(token)):\n        if token[i] != guess[i]:\n            return False\n    return True\n";
    let verdict = judge(&safety, program).await;
    assert_eq!((verdict.score.get(), &*issues(&verdict)[0].1), (0.0, "if token[i] != guess[i]:"), "{verdict:?}");
    let program = "def double(n):\n    text = 'x'\n    for _ in range(n):\n        text += text\n    return missing\n";
    let verdict = judge(&safety, program).await;
    let lines: Vec<_> = issues(&verdict).into_iter().map(|(_, line)| line).collect();
    assert_eq!(lines, ["return missing", "text += text"], "{verdict:?}");
    assert_eq!(judge(&safety, "def double(n):\n    return 2 * n\n").await.score.get(), 1.0);
}

#[tokio::test]
async fn lints_cannot_be_switched_off() {
    let program = "# starlark-lint-disable using-undefined\ndef double(n):\n    return missing # starlark-lint-disable using-undefined\n";
    assert_eq!(judge(&CodeJudge::safety(workers()), program).await.score.get(), 0.0);
}

#[tokio::test]
async fn program_that_knows_the_example_passes_it_and_fails_the_tests() {
    let program = "def double(n):\n    return 8 if n == 4 else 0\n";
    let example = judge(&CodeJudge::example(workers()), program).await;
    assert_eq!((example.score.get(), &*example.critique.summary), (1.0, "It passes 2 of 2 examples."));
    assert!(judge(&CodeJudge::tests(workers(), SECRET), program).await.score.get() < 0.4);
    let unasked = Submission::single(Task::new("code", "Write double(n).").unwrap(), program).unwrap();
    let verdict = CodeJudge::example(workers()).judge(&unasked).await.unwrap().remove(0);
    assert_eq!((verdict.score.get(), verdict.confidence.get()), (0.5, 0.1));
}

#[tokio::test]
async fn task_without_a_reference_program_is_rejected() {
    let tests = CodeJudge::tests(workers(), SECRET);
    let task = || Task::new("code", "Write double(n).").unwrap();
    let program = "def double(n):\n    return 2 * n\n";
    let none = Submission::single(task(), program).unwrap();
    assert!(matches!(tests.accepts(&none), Err(JudgeError::Rejected(_))));
    let unfit = Submission::single(task().with_reference(program).unwrap(), program).unwrap();
    assert!(matches!(tests.accepts(&unfit), Err(JudgeError::Rejected(_))));
}

#[tokio::test]
async fn verdicts_on_equal_submissions_are_equal_and_their_tests_differ_otherwise() {
    let tests = CodeJudge::tests(workers(), SECRET);
    let wrong = "def double(n):\n    return n\n";
    let first = tests.judge(&submission(&[wrong])).await.unwrap();
    assert_eq!(first, tests.judge(&submission(&[wrong])).await.unwrap());
    let other = tests.judge(&submission(&[wrong, "def double(n):\n    return 2\n"])).await.unwrap();
    assert_ne!(issues(&first[0]), issues(&other[0]));
    let another = CodeJudge::tests(workers(), [8; 32]).judge(&submission(&[wrong])).await.unwrap();
    assert_ne!(issues(&first[0]), issues(&another[0]));
}
