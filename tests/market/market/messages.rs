//! Submissions and evaluations: the types and the published schemas accept the same JSON.

use std::sync::LazyLock;

use jsonschema::Validator;
use proptest::{collection::vec, option, prelude::*};
use serde_json::{Value, json};
use x402_market::{
    Confidence, Critique, Evaluation, EvaluatorId, Issue, List, Message, MessageError, Outputs, Place, Reward, Score,
    Severity, Submission, Task, Text, Verdict,
    schema::{EVALUATION_SCHEMA, SUBMISSION_SCHEMA},
};

static SUBMISSION: LazyLock<Validator> = LazyLock::new(|| validator(SUBMISSION_SCHEMA));
static EVALUATION: LazyLock<Validator> = LazyLock::new(|| validator(EVALUATION_SCHEMA));

fn validator(schema: &str) -> Validator {
    let schema = serde_json::from_str(schema).unwrap();
    jsonschema::draft202012::meta::validate(&schema).unwrap();
    jsonschema::validator_for(&schema).unwrap()
}

fn read_submission(json: &Value) -> Result<Submission, MessageError> {
    Submission::from_json(json.to_string().as_bytes())
}

fn read_evaluation(json: &Value) -> Result<Evaluation, MessageError> {
    Evaluation::from_json(json.to_string().as_bytes())
}

fn text() -> impl Strategy<Value = String> {
    prop_oneof!["\\PC{0,40}", Just("𝄞".repeat(65_536)), Just("\u{0}\n\"\\".to_owned())]
}

fn submission() -> impl Strategy<Value = Submission> {
    let message = (text(), "[a-z]{1,64}").prop_map(|(content, role)| Message::new(role, content).unwrap());
    let prompt = text().prop_map(|prompt| Task::new("prose", prompt).unwrap());
    let chat = vec(message, 1..4).prop_map(|messages| Task::chat("prose", messages).unwrap());
    let task = (prop_oneof![prompt, chat], "\\PC{0,256}", "\\PC{1,64}", option::of(text()), option::of(text()));
    let task = task.prop_map(|(mut task, id, skill, context, reference)| {
        task.id = Text::new(id).unwrap();
        task.skill = Text::new(skill).unwrap();
        task.context = context.map(|text| Text::new(text).unwrap());
        task.reference = reference.map(|text| Text::new(text).unwrap());
        task
    });
    let long = || text().prop_map(|text| Text::new(text).unwrap());
    let outputs = prop_oneof![
        long().prop_map(Outputs::Single),
        [long(), long()].prop_map(Outputs::Pair),
        vec(long(), 1..5).prop_map(|group| Outputs::Group(List::new(group).unwrap())),
    ];
    (task, outputs).prop_map(|(task, outputs)| Submission::new(task, outputs))
}

fn verdict() -> impl Strategy<Value = Verdict> {
    let severity = prop_oneof![Just(Severity::Minor), Just(Severity::Major), Just(Severity::Critical)];
    let issue = (severity, text(), text(), any::<bool>()).prop_map(|(severity, text, output, suggests)| {
        let place = Place::of(&output, 0..output.len());
        let issue = Issue::new(severity, text.clone()).at(place);
        if suggests { issue.suggest(text) } else { issue }
    });
    let critique = (text(), vec(text(), 0..3), vec(issue, 0..3)).prop_map(|(summary, strengths, issues)| {
        let critique = strengths.into_iter().fold(Critique::new(summary), Critique::strength);
        issues.into_iter().fold(critique, Critique::issue)
    });
    (0.0..=1.0, 0.0..=1.0, -1e6..=1e6, critique).prop_map(|(score, confidence, reward, critique)| {
        let mut verdict = Verdict::new(Score::new(score).unwrap(), Confidence::new(confidence).unwrap(), critique);
        verdict.reward = Reward::new(reward).unwrap();
        verdict
    })
}

fn evaluator() -> EvaluatorId {
    EvaluatorId::new("judge", "1.0").unwrap()
}

fn empty_task() -> Submission {
    Submission::single(Task::new("prose", "Write.").unwrap(), "Written.").unwrap()
}

/// A value of the wrong kind or out of range, for whatever is at `at`; and what `at` must name.
fn wrongs(at: &str) -> Vec<Value> {
    let long = |length: usize| json!("x".repeat(length));
    let mut wrong = vec![json!([]), json!({}), json!(true)];
    wrong.extend(match at.rsplit('/').next().unwrap() {
        "version" => vec![json!(0), json!(2), json!("1"), json!(null)],
        "skill" => vec![json!(""), long(65), json!(null)],
        "id" => vec![long(257), json!(7)],
        "role" => vec![json!(""), long(65)],
        "prompt" | "content" | "output" | "context" | "rubric" | "reference" => vec![long(65_537), json!(1)],
        "score" | "confidence" => vec![json!(-0.001), json!(1.001), json!(7), json!("0.5"), json!(null)],
        "reward" => vec![json!(1_000_000.5), json!(-2_000_000), json!(null)],
        "summary" => vec![long(4_097), json!(null)],
        "severity" => vec![json!("fatal"), json!("Minor"), json!(null)],
        "description" | "suggestion" => vec![long(2_049), json!(3)],
        "start" | "length" => vec![json!(-1), json!(0.5), json!(4_294_967_296_u64), json!("1")],
        "quote" => vec![long(1_025), json!(0)],
        other => panic!("{other}"),
    });
    wrong
}

/// Every leaf of a message that holds one of each kind.
fn leaves(value: &Value, at: &str, found: &mut Vec<String>) {
    match value {
        Value::Object(fields) => fields.iter().for_each(|(name, value)| leaves(value, &format!("{at}/{name}"), found)),
        Value::Array(items) => {
            items.iter().enumerate().for_each(|(n, value)| leaves(value, &format!("{at}/{n}"), found))
        }
        _ => found.push(at.to_owned()),
    }
}

fn whole_submission() -> Value {
    json!({
        "version": 1,
        "task": { "id": "t", "skill": "s", "prompt": "p", "context": "c", "rubric": "r", "reference": "a" },
        "output": "o",
    })
}

fn whole_evaluation() -> Value {
    let place = json!({ "start": 0, "length": 1, "quote": "o" });
    let issue = json!({ "severity": "minor", "description": "d", "place": place, "suggestion": "s" });
    let critique = json!({ "summary": "s", "strengths": [], "issues": [issue] });
    let verdict = json!({ "score": 0.5, "reward": 0, "confidence": 1, "critique": critique });
    json!({ "version": 1, "evaluator": { "id": "e", "version": "v" }, "task": "t", "verdicts": [verdict] })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn every_submission_validates_and_is_read_back(submission in submission()) {
        let json = serde_json::to_value(&submission).unwrap();
        prop_assert!(SUBMISSION.is_valid(&json), "{:?}", SUBMISSION.validate(&json));
        prop_assert_eq!(read_submission(&json).unwrap(), submission);
    }

    #[test]
    fn every_evaluation_validates_and_is_read_back(verdicts in vec(verdict(), 1..4)) {
        let mut json = json!({ "version": 1, "evaluator": evaluator(), "task": "t" });
        json["verdicts"] = serde_json::to_value(&verdicts).unwrap();
        prop_assert!(EVALUATION.is_valid(&json), "{:?}", EVALUATION.validate(&json));
        let evaluation = read_evaluation(&json).unwrap();
        prop_assert_eq!(&*evaluation.verdicts, &*verdicts);
        prop_assert_eq!(serde_json::to_value(&evaluation).unwrap(), json);
    }

    #[test]
    fn what_one_refuses_the_other_refuses(
        at in any::<prop::sample::Index>(), with in any::<prop::sample::Index>(), of_evaluation: bool,
    ) {
        let mut json = if of_evaluation { whole_evaluation() } else { whole_submission() };
        let mut found = Vec::new();
        leaves(&json, "", &mut found);
        let at = at.get(&found).clone();
        // "id" and "version" of an evaluator have bounds of their own.
        prop_assume!(!at.starts_with("/evaluator") && at != "/task");
        let wrongs = wrongs(&at);
        *json.pointer_mut(&at).unwrap() = with.get(&wrongs).clone();
        let (by_schema, by_type) = match of_evaluation {
            true => (EVALUATION.is_valid(&json), read_evaluation(&json).is_ok()),
            false => (SUBMISSION.is_valid(&json), read_submission(&json).is_ok()),
        };
        prop_assert_eq!((by_schema, by_type), (false, false), "{} {}", at, json);
    }
}

#[test]
fn types_and_schemas_have_the_same_bounds() {
    let group = |length: usize| {
        let mut json = whole_submission();
        json.as_object_mut().unwrap().remove("output");
        json["outputs"] = json!(vec!["o"; length]);
        json
    };
    let pair = |length: usize| {
        let mut json = whole_submission();
        json.as_object_mut().unwrap().remove("output");
        json["pair"] = json!(vec!["o"; length]);
        json
    };
    let messages = |length: usize| {
        let mut json = whole_submission();
        json["task"].as_object_mut().unwrap().remove("prompt");
        json["task"]["messages"] = json!(vec![json!({ "role": "user", "content": "" }); length]);
        json
    };
    let both = |name: &str, value: Value| {
        let mut json = whole_submission();
        json[name] = value;
        json
    };
    let neither = |name: &str| {
        let mut json = whole_submission();
        json.as_object_mut().unwrap().remove(name);
        json
    };
    for (json, is_one) in [
        (group(0), false),
        (group(1), true),
        (group(64), true),
        (group(65), false),
        (pair(1), false),
        (pair(2), true),
        (pair(3), false),
        (messages(0), false),
        (messages(256), true),
        (messages(257), false),
        (both("outputs", json!(["o"])), false),
        (both("outputs", json!(null)), true),
        (both("of_the_future", json!({ "a": [1] })), true),
        (neither("output"), false),
        (neither("task"), false),
        (neither("version"), true),
        (json!([]), false),
        (json!([1, whole_submission()["task"], "o"]), false),
        (json!(null), false),
    ] {
        assert_eq!(SUBMISSION.is_valid(&json), is_one, "{json:.200}");
        assert_eq!(read_submission(&json).is_ok(), is_one, "{json:.200}");
    }
    let verdicts = |length: usize| {
        let mut json = whole_evaluation();
        json["verdicts"] = json!(vec![whole_evaluation()["verdicts"][0].clone(); length]);
        json
    };
    let with_place = |place: Value| {
        let mut json = whole_evaluation();
        json["verdicts"][0]["critique"]["issues"][0]["place"] = place;
        json
    };
    for (json, is_one) in [
        (verdicts(0), false),
        (verdicts(64), true),
        (verdicts(65), false),
        (with_place(json!({ "start": 1 })), false),
        (with_place(json!({ "length": 1 })), false),
        (with_place(json!({})), false),
        (with_place(json!({ "quote": "q" })), true),
        (with_place(json!({ "start": 0, "length": 4_294_967_295_u64 })), true),
        (with_place(json!([0, 1, "q"])), false),
        (with_place(json!(null)), true),
    ] {
        assert_eq!(EVALUATION.is_valid(&json), is_one, "{json:.300}");
        assert_eq!(read_evaluation(&json).is_ok(), is_one, "{json:.300}");
    }
}

#[test]
fn error_of_a_bad_message_names_problem_and_place() {
    let error = |json: Value| read_submission(&json).unwrap_err().to_string();
    let mut json = whole_submission();
    json["task"]["skill"] = json!("x".repeat(65));
    assert!(error(json).starts_with("task.skill: length 65 is outside 1..=64 at line 1"));
    assert_eq!(error(json!({ "version": 2, "all": "new" })), "version: 2 is not supported, only 1");
    let mut json = whole_submission();
    json["task"]["messages"] = json!([]);
    assert!(error(json).starts_with("task.messages: length 0 is outside 1..=256"));
    let mut json = whole_evaluation();
    json["verdicts"][0]["score"] = json!(1.5);
    let error = read_evaluation(&json).unwrap_err();
    let expected = "verdicts[0].score: 1.5 is not a score: it is outside 0..=1";
    assert!(error.to_string().starts_with(expected), "{error}");
    for text in ["{", "", "{} {}", "nan"] {
        assert!(matches!(
            Submission::from_json(text.as_bytes()),
            Err(MessageError::NotJson(_) | MessageError::Invalid { .. })
        ));
    }
}

#[test]
fn evaluation_must_fit_its_submission() {
    let verdict = |issue: Option<Issue>| {
        let critique = issue.into_iter().fold(Critique::new("s"), Critique::issue);
        Verdict::new(Score::MAX, Confidence::MAX, critique)
    };
    let submission = empty_task();
    assert!(Evaluation::new(evaluator(), &submission, [verdict(None)]).is_ok());
    for verdicts in [vec![], vec![verdict(None), verdict(None)]] {
        assert!(matches!(Evaluation::new(evaluator(), &submission, verdicts), Err(MessageError::Invalid { .. })));
    }
    let place_in = |output: &str| Issue::new(Severity::Minor, "").at(Place::of(output, 0..output.len()));
    assert!(Evaluation::new(evaluator(), &submission, [verdict(Some(place_in("Writ")))]).is_ok());
    let elsewhere = Evaluation::new(evaluator(), &submission, [verdict(Some(place_in("Drawn")))]).unwrap_err();
    assert!(elsewhere.to_string().starts_with("verdicts[0].critique.issues[0].place: "), "{elsewhere}");
    let other = Submission::single(Task::new("prose", "").unwrap().with_id("other").unwrap(), "").unwrap();
    let evaluation = Evaluation::new(evaluator(), &submission, [verdict(None)]).unwrap();
    assert!(evaluation.check(&other).is_err());
}

#[test]
fn numbers_out_of_range_are_refused() {
    for bad in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, -0.1, 1.1] {
        assert!(Score::new(bad).is_err() && Confidence::new(bad).is_err(), "{bad}");
        assert!((0.0..=1.0).contains(&Score::clamped(bad).get()));
    }
    assert!(Reward::new(f64::NAN).is_err() && Reward::new(f64::INFINITY).is_err());
    assert_eq!(Reward::from(Score::MIN).get(), -1.0);
}
