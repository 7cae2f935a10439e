//! The experiments with a student that learns: their worlds, their arms, and what would refute them. docs/learning.md describes them.

use std::sync::Arc;

use super::{
    course::{Arm, Outcome, Teacher},
    report::{Claim, Sheet},
    world::{Method, Reading, Seller, Task, World},
};

/// One arm in one world.
pub(crate) struct Cell {
    pub(crate) setting: String,
    pub(crate) world: Arc<World>,
    pub(crate) arm: Arm,
}

/// How many students share audits, unless an arm says otherwise.
const STUDENTS: usize = 20;
/// The cheap sellers of M, by position: the biased ones first.
const CHEAP: usize = 4;

/// Returns the world of M: so many of the eight cheap sellers are biased, and there are further sellers.
pub(crate) fn majority(biased: usize, further: Vec<Seller>) -> World {
    let mut sellers: Vec<_> = (0..2).map(specialist).collect();
    sellers.extend((0..2).map(|_| liar([0, 1])));
    sellers.extend((0..8).map(|number| if number < biased { biased_judge(400, [0, 1]) } else { plain_judge([0, 1]) }));
    sellers.extend(further);
    World {
        groups: 600,
        contexts: 6,
        actions: 6,
        skills: 2,
        skill: |_, context, _| context / 3,
        is_good: |_, action| action == 0,
        opens_every: None,
        measured_from: 0,
        policy: (true, 0.2),
        reading: Reading::Actions,
        sellers,
        best: vec![0, 1],
    }
}

/// Returns one of three scores: for the right action, for bluff, which is the second, or for others.
fn of_three(action: usize, scores: [f64; 3]) -> f64 {
    scores[action.min(2)]
}

const KNOWS: [f64; 3] = [0.95, 0.05, 0.05];
const PLAIN: [f64; 3] = [0.8, 0.3, 0.3];
const BIASED: [f64; 3] = [0.7, 0.9, 0.2];

fn specialist(skill: usize) -> Seller {
    Seller::new(1_000, [skill], move |task, action, _| match task.skill == skill {
        true => (of_three(action, KNOWS), 0.1),
        false => (0.5, 0.3),
    })
}

fn liar(claims: impl IntoIterator<Item = usize>) -> Seller {
    Seller::new(1_000, claims, |_, _, _| (0.5, 0.3))
}

fn plain_judge(claims: impl IntoIterator<Item = usize>) -> Seller {
    Seller::new(400, claims, |_, action, _| (of_three(action, PLAIN), 0.2))
}

fn biased_judge(price: u64, claims: impl IntoIterator<Item = usize>) -> Seller {
    Seller::new(price, claims, |_, action, _| (of_three(action, BIASED), 0.1))
}

fn clones(count: usize) -> Vec<Seller> {
    (0..count).map(|_| biased_judge(400, [0, 1])).collect()
}

/// Returns the arms that most experiments have, without those that audit.
fn common() -> Vec<Arm> {
    vec![
        Arm::new("truth", Teacher::Truth),
        Arm::new("truth in budget", Teacher::TruthInBudget),
        Arm::new("audits only", Teacher::Audits),
        Arm::new("random", Teacher::Random),
        Arm::new("card claims", Teacher::Claims),
    ]
}

fn market() -> Vec<Arm> {
    vec![Arm::market("alone", 1), Arm::market("shared", STUDENTS)]
}

fn cells(setting: &str, world: &World, arms: impl IntoIterator<Item = Arm>) -> Vec<Cell> {
    let world = Arc::new(world.clone());
    arms.into_iter().map(|arm| Cell { setting: setting.to_owned(), world: world.clone(), arm }).collect()
}

/// The shares of biased sellers and the clones of M.
const MAJORITIES: [(&str, usize, usize); 8] = [
    ("0", 0, 0),
    ("¼", 2, 0),
    ("½", 4, 0),
    ("¾", 6, 0),
    ("1", 8, 0),
    ("¼ + 5", 2, 5),
    ("¼ + 10", 2, 10),
    ("¼ + 20", 2, 20),
];

pub(crate) fn m() -> Vec<Cell> {
    let mut all = Vec::new();
    for (setting, biased, cloned) in MAJORITIES {
        let world = majority(biased, clones(cloned));
        // As nearly a share of three as there can be.
        let of_three = (biased * 3 + 4) / 8;
        let three = (0..of_three).map(|at| CHEAP + at).chain((of_three..3).map(|at| CHEAP + 5 + at));
        let arms = [
            Arm::new("mixture of three", Teacher::Mixture(three.collect())),
            Arm::new("mixture of all", Teacher::Mixture((0..world.sellers.len()).collect())),
            Arm::new("own model, words", Teacher::Own { truth: false }),
        ];
        all.extend(cells(setting, &world, common().into_iter().chain(arms).chain(market())));
        let hidden = World { reading: Reading::Hidden, ..world.clone() };
        let models = [
            Arm::new("own model, hidden", Teacher::Own { truth: false }),
            Arm::new("own model + truth", Teacher::Own { truth: true }),
        ];
        all.extend(cells(setting, &hidden, models));
        if setting == "¾" {
            let scarce = |arm: Arm| Arm { audits: 0.01, name: format!("{}, 1 %", arm.name), ..arm };
            all.extend(cells(setting, &world, market().into_iter().map(scarce)));
        }
    }
    all
}

pub(crate) fn refute_m(sheet: &Sheet) -> Vec<Claim> {
    let at = |setting, arm| sheet.values(setting, arm, Outcome::quality);
    let rivals = ["random", "mixture of three", "mixture of all"].map(|arm| (arm, at("¾", arm)));
    let best = rivals.into_iter().max_by(|(_, a), (_, b)| a.iter().sum::<f64>().total_cmp(&b.iter().sum()));
    let (best, of_best) = best.unwrap_or_default();
    let mut claims = vec![Claim::at_least(format!("¾: shared − {best}"), &at("¾", "shared"), &of_best, 0.2)];
    for setting in ["0", "¼", "½"] {
        let (shared, random) = (at(setting, "shared"), at(setting, "random"));
        claims.push(Claim::at_least(format!("{setting}: shared − random"), &shared, &random, -0.02));
    }
    for arm in ["own model, hidden", "own model + truth"] {
        claims.push(Claim::at_least(format!("¾: shared − {arm}"), &at("¾", "shared"), &at("¾", arm), 0.05));
    }
    claims
}

pub(crate) fn h() -> Vec<Cell> {
    let mut arms = vec![Arm::new("truth", Teacher::Truth), Arm::new("random", Teacher::Random)];
    for arm in market() {
        arms.push(Arm { by_accuracy: true, name: format!("{}, by accuracy", arm.name), ..arm.clone() });
        arms.push(Arm { name: format!("{}, by D", arm.name), ..arm });
    }
    cells("¾, harsh", &harsh(), arms)
}

/// Returns the world of H: M at ¾, with specialists that never score above one half.
pub(crate) fn harsh() -> World {
    let mut world = majority(6, Vec::new());
    for (skill, seller) in world.sellers.iter_mut().take(2).enumerate() {
        *seller = Seller::new(1_000, [skill], move |task, action, _| match task.skill == skill {
            true => (of_three(action, KNOWS) / 2.0, 0.05),
            false => (0.25, 0.15),
        });
    }
    world
}

pub(crate) fn refute_h(sheet: &Sheet) -> Vec<Claim> {
    let at = |arm: String| sheet.values("¾, harsh", &arm, Outcome::quality);
    let claim = |who: &str| {
        Claim::above(
            format!("{who}: by D − by accuracy"),
            &at(format!("{who}, by D")),
            &at(format!("{who}, by accuracy")),
        )
    };
    vec![claim("alone"), claim("shared")]
}

/// Returns the world of S with further sellers.
pub(crate) fn shift(further: Vec<Seller>) -> World {
    let static_judge = |task: &Task, action, _| match task.context < 2 {
        true => (of_three(action, PLAIN), 0.2),
        false => (of_three(action, [0.6, 0.9, 0.2]), 0.1),
    };
    let mut sellers: Vec<_> = (0..4).map(|_| Seller::new(400, [0], static_judge)).collect();
    sellers.extend((0..2).map(|_| liar([0])));
    sellers.extend(further);
    World {
        groups: 840,
        contexts: 6,
        actions: 6,
        skills: 1,
        skill: |_, _, _| 0,
        is_good: |_, action| action == 0,
        opens_every: Some(120),
        measured_from: 2,
        policy: (false, 0.4),
        reading: Reading::Levels,
        sellers,
        best: Vec::new(),
    }
}

/// Returns a seller that learns.
pub(crate) fn learner() -> Seller {
    Seller { price: 600, claims: vec![0], method: Method::Learns, renames_every: None }
}

/// Returns sellers that each know one of the later levels.
pub(crate) fn niches() -> Vec<Seller> {
    let niche = |level: usize| {
        Seller::new(1_000, [0], move |task, action, _| match task.context == level {
            true => (of_three(action, KNOWS), 0.1),
            false => (0.5, 0.3),
        })
    };
    (2..6).map(niche).collect()
}

pub(crate) fn s() -> Vec<Cell> {
    let [stays, niche, learns] = [Vec::new(), niches(), vec![learner()]].map(shift);
    let mut all = Vec::new();
    for (setting, audits) in [("5 %", 0.05), ("2 %", 0.02)] {
        let at = |arm: Arm| Arm { audits, ..arm };
        let arms = [
            Arm::new("truth", Teacher::Truth),
            Arm::new("audits only", Teacher::Audits),
            Arm::new("random", Teacher::Random),
            Arm::new("trained once", Teacher::TrainedOnce),
            Arm::new("own model", Teacher::Own { truth: false }),
            Arm::market("static", 5),
        ];
        all.extend(cells(setting, &stays, arms.map(at)));
        let niche_arm = |name: &str| at(Arm::market(name, 5));
        let niches = [
            niche_arm("niche"),
            Arm { audits_equals: false, ..niche_arm("niche, equals not audited") },
            Arm { counts_copies: true, ..niche_arm("niche, copies counted") },
        ];
        all.extend(cells(setting, &niche, niches));
        let learning = |others: usize| at(Arm::market(format!("learning, {others} others"), 1 + others));
        let untaught = Arm { lessons: false, ..at(Arm::market("learning without lessons", 5)) };
        let first =
            Arm { audits_equals: false, name: "learning, 4 others, equals not audited".to_owned(), ..learning(4) };
        let copies = Arm { counts_copies: true, name: "learning, 4 others, copies counted".to_owned(), ..learning(4) };
        all.extend(cells(setting, &learns, [learning(0), learning(4), first, copies, learning(19), untaught]));
    }
    all
}

pub(crate) fn refute_s(sheet: &Sheet) -> Vec<Claim> {
    let at = |setting: &str, arm: &str| sheet.values(setting, arm, Outcome::quality);
    let above = |setting: &str, one: &str, other: &str| {
        Claim::above(format!("{setting}: {one} − {other}"), &at(setting, one), &at(setting, other))
    };
    let untaught = "learning without lessons";
    vec![
        above("2 %", "learning, 4 others", "own model"),
        Claim::not_above(format!("2 %: {untaught} − own model"), &at("2 %", untaught), &at("2 %", "own model")),
        above("5 %", "niche", "niche, equals not audited"),
        above("2 %", "niche", "niche, equals not audited"),
        above("5 %", "niche", "own model"),
    ]
}

/// Returns the world of T, with so many liars for each kind.
fn by_task(liars: usize) -> World {
    // What each specialist takes for good outside its own kind, too.
    let specialist = |kind: usize| {
        Seller::new(1_000, [kind], move |task, action, _| {
            let is_good = match kind {
                0 => action <= 1,
                _ => action == 0 || (task.context != kind && action == kind + 2),
            };
            (if is_good { 0.95 } else { 0.05 }, 0.1)
        })
    };
    let mut sellers: Vec<_> = (0..3).map(specialist).collect();
    for kind in 0..3 {
        sellers.extend((0..liars).map(|_| {
            Seller::new(1_000, [kind], |task: &Task, action, _| match action {
                2 => (BIASED[1], 0.1),
                _ if is_good_by_kind(task.context, action) => (BIASED[0], 0.1),
                _ => (BIASED[2], 0.1),
            })
        }));
    }
    World {
        contexts: 3,
        skills: 3,
        skill: |_, context, _| context,
        is_good: is_good_by_kind,
        sellers,
        best: vec![0, 1, 2],
        ..majority(0, Vec::new())
    }
}

/// Actions: good, correct only, bluff, fast and wrong, safe and wrong, wrong.
fn is_good_by_kind(kind: usize, action: usize) -> bool {
    action == 0 || (kind == 0 && action == 1)
}

const LIARS: [&str; 3] = ["0 liars", "1 liar", "2 liars"];

pub(crate) fn t() -> Vec<Cell> {
    let mut all = Vec::new();
    for (liars, setting) in LIARS.into_iter().enumerate() {
        let world = by_task(liars);
        let fixed = |seller| {
            Arm::new(format!("fixed: {}", ["tests", "growth", "safety"][seller]), Teacher::Mixture(vec![seller]))
        };
        let mut arms = vec![Arm::new("truth", Teacher::Truth), Arm::new("random", Teacher::Random)];
        arms.extend((0..3).map(fixed));
        arms.extend([Arm::new("by type", Teacher::ByType), Arm::new("by type, in turn", Teacher::Claims)]);
        all.extend(cells(setting, &world, arms.into_iter().chain(market())));
    }
    all
}

pub(crate) fn refute_t(sheet: &Sheet) -> Vec<Claim> {
    let mut claims = Vec::new();
    for setting in &LIARS[1..] {
        for arm in ["fixed: tests", "fixed: growth", "fixed: safety", "by type", "by type, in turn"] {
            let at = |arm| sheet.values(setting, arm, Outcome::quality);
            claims.push(Claim::above(format!("{setting}: shared − {arm}"), &at("shared"), &at(arm)));
        }
    }
    claims
}

/// Returns what a seller says that praises bluff.
fn for_bluff(action: usize) -> (f64, f64) {
    (of_three(action, [0.7, 1.0, 0.0]), 0.1)
}

fn honest(action: usize) -> (f64, f64) {
    (of_three(action, KNOWS), 0.1)
}

const EXPLOITS: [&str; 4] = ["bait and switch", "newcomers only", "renames", "paid"];

pub(crate) fn x() -> Vec<Cell> {
    let of = |exploit: &str| match exploit {
        "bait and switch" => {
            Seller::new(
                800,
                [0, 1],
                |task, action, _| if task.group < 200 { honest(action) } else { for_bluff(action) },
            )
        }
        "newcomers only" => {
            Seller::new(800, [0, 1], |_, action, sold| if sold < 40 { honest(action) } else { for_bluff(action) })
        }
        "renames" => Seller { renames_every: Some(2), ..Seller::new(800, [0, 1], |_, action, _| for_bluff(action)) },
        _ => Seller::new(200, [0, 1], |_, action, _| if action == 5 { (1.0, 0.0) } else { honest(action) }),
    };
    let mut all = Vec::new();
    for exploit in EXPLOITS {
        let world = majority(2, vec![of(exploit); 4]);
        all.extend(cells(exploit, &world, [Arm::new("random", Teacher::Random)].into_iter().chain(market())));
    }
    all
}

pub(crate) fn refute_x(sheet: &Sheet) -> Vec<Claim> {
    let mut claims = Vec::new();
    for exploit in EXPLOITS {
        for arm in ["alone", "shared"] {
            let quality = sheet.values(exploit, arm, Outcome::quality);
            let value = sheet.values(exploit, arm, Outcome::value);
            claims.push(Claim::of(format!("{exploit}, {arm}: quality"), &quality, 0.9));
            claims.push(Claim::of(format!("{exploit}, {arm}: value"), &value, 0.75));
        }
    }
    claims
}

/// Returns the world of D: three right ways, bluff, and five wrong ones. With criteria, each group is judged by one of three.
fn diverse(has_criteria: bool) -> World {
    let of_nine = |action: usize, scores: [f64; 3]| of_three(action.saturating_sub(2), scores);
    let base = majority(2, Vec::new());
    let mut sellers: Vec<_> = base.sellers[2..4].to_vec();
    for number in 0..8 {
        let (scores, noise) = if number < 2 { (BIASED, 0.1) } else { (PLAIN, 0.2) };
        sellers.push(Seller::new(400, 0..3, move |_, action, _| (of_nine(action, scores), noise)));
    }
    sellers.extend((0..if has_criteria { 3 } else { 2 }).map(|skill| {
        Seller::new(1_000, [skill], move |task, action, _| match task.skill == skill {
            false => (0.5, 0.3),
            true if has_criteria && action < 3 && action != skill => (0.75, 0.1),
            true => (of_nine(action, KNOWS), 0.1),
        })
    }));
    World {
        actions: 9,
        skills: if has_criteria { 3 } else { 2 },
        skill: |world, context, group| if world.skills == 3 { group % 3 } else { context / 3 },
        is_good: |_, action| action < 3,
        sellers,
        best: Vec::new(),
        ..base
    }
}

pub(crate) fn d() -> Vec<Cell> {
    let arms = [
        Arm::new("truth", Teacher::Truth),
        Arm::new("self-judge", Teacher::Itself),
        Arm::new("one judge", Teacher::Mixture(vec![9])),
        Arm::market("shared", STUDENTS),
    ];
    let mut all = cells("three right ways", &diverse(false), arms);
    all.extend(cells("three right ways", &diverse(true), [Arm::market("shared, three criteria", STUDENTS)]));
    all
}

#[cfg(test)]
mod tests {
    use super::{
        super::{
            course::run,
            report::{Refute, Row},
        },
        *,
    };

    fn quality(world: &World, arm: &Arm) -> f64 {
        let of = |seed| run(world, arm, seed).unwrap().quality();
        (0..2).map(of).sum::<f64>() / 2.0
    }

    /// The claim of M, in small.
    #[test]
    fn a_majority_that_is_wrong_teaches_who_hires_at_random_and_not_who_shares_audits() {
        let world = World { groups: 360, ..majority(6, Vec::new()) };
        let random = quality(&world, &Arm::new("random", Teacher::Random));
        let shared = quality(&world, &Arm { audits: 0.1, ..Arm::market("shared", 5) });
        assert!(random < 0.4 && shared > 0.75, "{random} {shared}");
        let right = World { groups: 360, ..majority(0, Vec::new()) };
        assert!(quality(&right, &Arm::new("random", Teacher::Random)) > 0.8);
    }

    #[test]
    fn truth_teaches_and_judging_oneself_does_not() {
        let world = World { groups: 360, ..majority(2, Vec::new()) };
        assert!(quality(&world, &Arm::new("truth", Teacher::Truth)) > 0.9);
        assert!(quality(&world, &Arm::new("self-judge", Teacher::Itself)) < 0.7);
    }

    #[test]
    fn nobody_spends_more_than_the_budget_and_the_same_seed_gives_the_same_course() {
        let world = World { groups: 60, opens_every: Some(10), ..shift(vec![learner()]) };
        let arms = [
            Arm::market("learning", 3),
            Arm::new("random", Teacher::Random),
            Arm::new("in budget", Teacher::TruthInBudget),
            Arm::new("own model", Teacher::Own { truth: true }),
        ];
        for arm in arms {
            let once = run(&world, &arm, 1).unwrap();
            let budget = 60.0 * 8.0 * 0.002;
            let spent = once.verdicts + 0.02 * once.truths;
            assert!(spent > 0.0 && spent <= budget + 1e-9, "{}: {spent} of {budget}", arm.name);
            assert_eq!(run(&world, &arm, 1).unwrap(), once, "{}", arm.name);
        }
    }

    #[test]
    fn every_claim_names_an_arm_that_is_run() {
        let experiments: [(Vec<Cell>, Refute); 5] =
            [(m(), refute_m), (h(), refute_h), (s(), refute_s), (t(), refute_t), (x(), refute_x)];
        for (cells, refute) in experiments {
            let outcome = Outcome { curve: vec![0.5], ordered: [1.0, 1.0], ..Outcome::default() };
            let row = |cell: Cell| Row { setting: cell.setting, arm: cell.arm.name, outcomes: vec![outcome.clone()] };
            let sheet = Sheet(cells.into_iter().map(row).collect());
            assert!(refute(&sheet).iter().all(Claim::is_known) && sheet.qualities().contains("0.50"));
        }
    }

    #[test]
    fn a_specialist_of_one_kind_praises_what_another_kind_does_not_want() {
        let world = by_task(1);
        let score = |seller: usize, context, action| {
            let Method::Rule(rule) = &world.sellers[seller].method else { panic!() };
            rule(&Task { group: 0, context, skill: context }, action, 0).0
        };
        assert!(score(0, 1, 1) > 0.9 && !is_good_by_kind(1, 1), "tests praise what is only correct");
        assert!(score(1, 1, 1) < 0.1 && score(1, 0, 3) > 0.9 && score(1, 1, 3) < 0.1);
        assert!(score(3, 0, 2) > score(3, 0, 0), "liars praise bluff");
    }
}
