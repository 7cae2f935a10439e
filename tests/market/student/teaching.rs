//! Lessons for evaluators that learn. With `--nocapture`, the tests print the figures of docs/market.md.

use std::sync::Arc;

use alloy_signer_local::PrivateKeySigner;
use rand::{RngExt, SeedableRng, rngs::Xoshiro256PlusPlus, seq::IndexedRandom as _};
use tower_x402::client::Journal;
use x402_judges::LearningJudge;
use x402_market::{
    CardFetcher, EvaluateError, EvaluationClient, Lesson, Student, Submission, Task, Truth, VerifiedCard,
    evidence::Pairs, judge::Judge as _,
};

use support::student_stage::{Booth, PRICE, Stage, honest};

/// Outputs to judge: words, among them some that good ones have, and bad ones have seldom.
struct World(Xoshiro256PlusPlus);

impl World {
    fn seeded(seed: u64) -> Self {
        Self(Xoshiro256PlusPlus::seed_from_u64(seed))
    }

    fn output(&mut self, is_good: bool) -> String {
        const COMMON: [&str; 10] = ["it", "is", "blue", "the", "sky", "light", "air", "we", "see", "day"];
        const GOOD: [&str; 6] = ["because", "scatters", "shorter", "waves", "therefore", "measured"];
        const BAD: [&str; 6] = ["obviously", "magic", "just", "somehow", "everybody", "knows"];
        let (right, wrong) = if is_good { (GOOD, BAD) } else { (BAD, GOOD) };
        let mut word = |_| match self.0.random_range(0..10) {
            0..2 => *right.choose(&mut self.0).unwrap(),
            2 => *wrong.choose(&mut self.0).unwrap(),
            _ => *COMMON.choose(&mut self.0).unwrap(),
        };
        (0..16).map(&mut word).collect::<Vec<_>>().join(" ")
    }

    /// A group of eight outputs, of which four are good.
    fn group(&mut self) -> (Submission, Vec<bool>) {
        let good: Vec<bool> = (0..8).map(|number| number % 2 == 0).collect();
        let outputs: Vec<String> = good.iter().map(|good| self.output(*good)).collect();
        (Submission::group(Task::new("prose", "Why is the sky blue?").unwrap(), outputs).unwrap(), good)
    }
}

/// How well a judge orders outputs that it never saw. Whoever knows all about the words gets 0.72.
async fn worth(judge: &LearningJudge) -> f64 {
    let (mut world, mut sum) = (World::seeded(99), 0.0);
    for _ in 0..100 {
        let (submission, good) = world.group();
        let scores: Vec<f64> =
            judge.judge(&submission).await.unwrap().iter().map(|verdict| verdict.score.get()).collect();
        sum += Pairs::of(&scores, &good).unwrap().worth();
    }
    sum / 100.0
}

async fn open(stage: &Stage, judge: &LearningJudge) -> (Booth, Arc<VerifiedCard>) {
    let booth = stage.open_with(judge.clone(), |card| card.lessons()).await;
    let card = CardFetcher::new().unwrap().fetch(&booth.url).await.unwrap();
    (booth, card)
}

/// A payer, and its key.
async fn client(stage: &Stage) -> (EvaluationClient, PrivateKeySigner) {
    let key = PrivateKeySigner::random();
    let payer = stage.payer_with(10_000 * PRICE, key.clone(), Journal::in_memory()).await;
    (EvaluationClient::new(payer).unwrap(), key)
}

/// Posts a lesson. Returns the status, and the error if it is one.
async fn post(booth: &Booth, lesson: impl Into<reqwest::Body>) -> (u16, String) {
    let answer = reqwest::Client::new().post(booth.url.join("lessons").unwrap()).body(lesson).send().await.unwrap();
    let status = answer.status().as_u16();
    let body: serde_json::Value = serde_json::from_slice(&answer.bytes().await.unwrap()).unwrap();
    (status, body["error"].as_str().unwrap_or_default().to_owned())
}

#[tokio::test]
async fn audits_teach_an_evaluator_if_the_owner_allows_it_and_it_gets_better() {
    let stage = Stage::set().await;
    let judge = LearningJudge::builder().in_memory();
    let (booth, _) = open(&stage, &judge).await;
    let other = stage.open(honest()).await;
    let mut world = World::seeded(1);
    let before = worth(&judge).await;
    for allows in [false, true] {
        let key = PrivateKeySigner::random();
        let payer = stage.payer_with(10_000 * PRICE, key.clone(), Journal::in_memory()).await;
        let student = Student::builder(payer).source(vec![booth.url.clone(), other.url.clone()]).panel_size(2).seed(1);
        let student = if allows { student.teach(key) } else { student }.tasks(40).build().unwrap();
        student.discover().await;
        let mut taken = 0;
        for _ in 0..20 {
            let (submission, good) = world.group();
            let feedback = student.evaluate(&submission).await.unwrap();
            let report = student.audit(&feedback, &Truth::good(good)).await.unwrap();
            assert!(report.lessons <= 1, "the other one takes none: {report:?}");
            taken += report.lessons;
        }
        match allows {
            false => assert_eq!((taken, judge.stats().lessons), (0, 0)),
            true => assert!(taken >= 15 && judge.stats().lessons == taken as u64, "{taken} {:?}", judge.stats()),
        }
    }
    let after = worth(&judge).await;
    println!("20 lessons: {after:.3}");
    assert!(before.abs() < 0.1 && after > 0.4, "{before} {after}");
}

#[tokio::test]
async fn evaluation_names_the_version_and_a_lesson_changes_the_verdict_once_it_is_renewed() {
    let stage = Stage::set().await;
    let judge = LearningJudge::builder().in_memory();
    let (_booth, card) = open(&stage, &judge).await;
    let (client, key) = client(&stage).await;
    let mut world = World::seeded(1);
    let (first, _) = world.group();
    let before = client.evaluate(&card, &first).await.unwrap().evaluation;
    assert_eq!(&*before.evaluator.version, "1+0");
    for number in 0..8 {
        let (submission, good) = world.group();
        client.evaluate(&card, &submission).await.unwrap();
        let lesson = Lesson::sign(submission, good.into_iter().map(Some), card.pay_to(), &key).await.unwrap();
        assert_eq!(judge.stats().version, 0, "{number}");
        client.teach(&card, &lesson).await.unwrap();
    }
    let after = client.evaluate(&card, &first).await.unwrap().evaluation;
    assert_eq!(&*after.evaluator.version, "1+1");
    assert_ne!(before.verdicts, after.verdicts);
}

#[tokio::test]
async fn lesson_is_taken_once_and_only_from_the_payer_that_paid_for_the_verdict() {
    let stage = Stage::set().await;
    let judge = LearningJudge::builder().in_memory();
    let (booth, card) = open(&stage, &judge).await;
    let ((client, key), stranger) = (client(&stage).await, PrivateKeySigner::random());
    let (submission, good) = World::seeded(1).group();
    let truth = || good.iter().copied().map(Some);
    let signed =
        async |key: &PrivateKeySigner| Lesson::sign(submission.clone(), truth(), card.pay_to(), key).await.unwrap();
    let json = |lesson: &Lesson| serde_json::to_vec(lesson).unwrap();
    let lesson = signed(&key).await;
    assert_eq!(post(&booth, json(&lesson)).await, (404, "not_judged".into()), "before it is paid for");
    client.evaluate(&card, &submission).await.unwrap();

    assert_eq!(post(&booth, json(&signed(&stranger).await)).await, (404, "not_judged".into()), "of a stranger");
    let mut unsigned = lesson.clone();
    unsigned.signature = signed(&stranger).await.signature;
    assert_eq!(post(&booth, json(&unsigned)).await, (403, "not_signed".into()));
    let mut changed = lesson.clone();
    changed.good = x402_market::List::new(truth().map(|good| good.map(|good| !good))).unwrap();
    assert_eq!(post(&booth, json(&changed)).await, (403, "not_signed".into()), "of another truth");
    let elsewhere = Lesson::sign(submission.clone(), truth(), stranger.address(), &key).await.unwrap();
    assert_eq!(post(&booth, json(&elsewhere)).await, (403, "not_signed".into()), "for another evaluator");
    let mut cut = serde_json::to_value(&lesson).unwrap();
    cut["good"] = serde_json::json!([true]);
    assert_eq!(post(&booth, cut.to_string()).await, (400, "invalid_lesson".into()));
    assert_eq!(post(&booth, vec![b' '; 300 * 1024]).await, (413, "body_too_large".into()));
    assert_eq!(judge.stats().lessons, 0);

    assert_eq!(post(&booth, json(&lesson)).await, (200, String::new()));
    assert_eq!(post(&booth, json(&lesson)).await, (409, "already_taught".into()));
    assert_eq!(judge.stats().lessons, 1);
    let none = stage.open(honest()).await;
    assert_eq!(post(&none, json(&lesson)).await.0, 404, "its card says nothing of lessons");
    let refused = client.teach(&card, &lesson).await.unwrap_err();
    assert!(matches!(refused, EvaluateError::Answered { status: 409, .. }), "{refused}");
}

/// Teaches a judge by five payers in turn. Returns what it is worth then.
async fn taught(lessons: usize, of_liar: impl Fn(usize) -> bool, lies: bool) -> f64 {
    let stage = Stage::set().await;
    let judge = LearningJudge::builder().in_memory();
    let (_booth, card) = open(&stage, &judge).await;
    let (mut honest, liar) = (Vec::new(), client(&stage).await);
    for _ in 0..4 {
        honest.push(client(&stage).await);
    }
    let mut world = World::seeded(2);
    for number in 0..lessons {
        let (submission, good) = world.group();
        let is_liar = of_liar(number);
        let (client, key) = if is_liar { &liar } else { &honest[number % honest.len()] };
        client.evaluate(&card, &submission).await.unwrap();
        let truth = good.into_iter().map(|good| Some(good != (is_liar && lies)));
        let lesson = Lesson::sign(submission, truth, card.pay_to(), key).await.unwrap();
        client.teach(&card, &lesson).await.unwrap();
    }
    let trust = |(_, key): &(EvaluationClient, PrivateKeySigner)| judge.trust(key.address());
    if lies {
        assert!(
            trust(&liar) < 0.1 && honest.iter().all(|payer| trust(payer) > 0.5),
            "{} {}",
            trust(&liar),
            trust(&honest[0])
        );
    }
    worth(&judge).await
}

#[tokio::test]
async fn attacker_that_gives_a_fifth_of_the_lessons_falsely_costs_little() {
    let is_fifth = |number: usize| number.is_multiple_of(5);
    let honest = taught(80, is_fifth, false).await;
    let attacked = taught(80, is_fifth, true).await;
    println!("80 lessons: {honest:.3}, attacked: {attacked:.3}");
    assert!(honest > 0.6 && attacked > honest - 0.05, "{honest} {attacked}");
}
