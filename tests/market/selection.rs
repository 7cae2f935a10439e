//! The simulated market, in small: the promises of `docs/market.md` hold with a margin for few seeds.

#[path = "../../examples/baselines.rs"]
mod baselines;
#[allow(dead_code)]
#[path = "../../examples/market/oracle.rs"]
mod oracle;
#[allow(dead_code)]
#[path = "../../examples/market/run.rs"]
mod run;
#[allow(dead_code)]
#[path = "../../examples/market/world.rs"]
mod world;

use std::{path::PathBuf, thread};

use run::{Outcomes, Policy};
use world::World;
use x402_market::selection::ThompsonConfig;

const SEEDS: [u64; 3] = [101, 102, 103];

fn path(name: &str) -> PathBuf {
    support::repository().join(format!("examples/market/worlds/{name}.json"))
}

fn world(name: &str) -> World {
    World::read(&path(name)).unwrap()
}

fn runs(world: &World, policy: Policy) -> Vec<Outcomes> {
    thread::scope(|scope| {
        let runs: Vec<_> = SEEDS
            .iter()
            .map(|seed| scope.spawn(|| run::run(world, policy, &ThompsonConfig::default(), *seed)))
            .collect();
        runs.into_iter().map(|run| run.join().unwrap()).collect()
    })
}

/// The mean share of the oracle's value.
fn share(world: &World, policy: Policy) -> f64 {
    let runs = runs(world, policy);
    runs.iter().map(|run| run.share(world)).sum::<f64>() / runs.len() as f64
}

#[test]
fn sharing_audits_earns_most_of_the_oracles_value() {
    let world = world("reference");
    let runs = runs(&world, Policy::Thompson);
    let budget = world.budget_per_task_microusdc as f64 * (world.students * world.tasks_per_student) as f64;
    for run in &runs {
        assert!(run.share(&world) > 0.85, "{}", run.share(&world));
        assert!((0.9 * budget..=budget).contains(&run.spent()), "{} of {budget}", run.spent());
        assert!((run.late.poor as f64) < 0.03 * run.late.bought as f64, "{:?}", run.late);
    }
}

#[test]
fn baselines_stay_far_below_the_oracle() {
    let world = world("reference");
    let alone = share(&world, Policy::Alone);
    assert!((0.5..0.75).contains(&alone), "{alone}");
    for policy in [Policy::Random, Policy::Cheapest, Policy::CardClaims] {
        let share = share(&world, policy);
        assert!((0.25..0.55).contains(&share), "{policy:?} {share}");
    }
}

#[test]
fn lies_about_few_evaluators_gain_little() {
    let world = world("infiltration");
    for run in runs(&world, Policy::Thompson) {
        assert!(run.share(&world) > 0.8, "{}", run.share(&world));
        assert!((run.late.poor as f64) < 0.06 * run.late.bought as f64, "{:?}", run.late);
    }
}

#[test]
fn changed_evaluators_are_noticed() {
    let share = share(&world("drift"), Policy::Thompson);
    assert!(share > 0.7, "{share}");
}

#[test]
fn colluding_payers_lose_trust() {
    let world = world("collusion");
    for run in runs(&world, Policy::Thompson) {
        let (students, shams) = (run.trust.unwrap(), run.trust_in_shams.unwrap());
        assert!(students > 0.5 && shams < 0.1, "{students} {shams}");
        assert!(run.share(&world) > 0.7, "{}", run.share(&world));
    }
}

#[test]
fn new_identities_gain_little() {
    let world = world("reentry");
    for run in runs(&world, Policy::Thompson) {
        assert!(run.share(&world) > 0.7, "{}", run.share(&world));
        assert!((run.late.poor as f64) < 0.05 * run.late.bought as f64, "{:?}", run.late);
    }
}

#[test]
fn same_seed_gives_the_same_run() {
    let world = World { tasks_per_student: 60, ..world("collusion") };
    let of = |seed| {
        let run = run::run(&world, Policy::Thompson, &ThompsonConfig::default(), seed);
        (run.value, run.paid, run.trust)
    };
    assert_eq!(of(7), of(7));
    assert_ne!(of(7), of(8));
}

#[tokio::test]
async fn market_example_prints_one_document_and_draws_plots() {
    let out = tempfile::tempdir().unwrap();
    let small = out.path().join("small.json");
    let text = std::fs::read_to_string(path("reference")).unwrap();
    std::fs::write(&small, text.replace("\"tasks_per_student\": 500", "\"tasks_per_student\": 40")).unwrap();
    let run = || {
        let mut program = support::programs::example("market");
        program.args(["--policy", "cheapest", "--policy", "thompson", "--seeds", "2", "--world"]).arg(&small);
        program.arg("--out").arg(out.path());
        program
    };
    let output = run().output().await.unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let document: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let cheapest = &document["policies"][0];
    assert_eq!(cheapest["policy"], "cheapest");
    let percent = cheapest["value_percent_of_oracle"]["mean"].as_f64().unwrap();
    // Always the one of 0.66 for 300, where the oracle mixes 0.92 for 1,000 and 0.70 for 400 within 900.
    assert!((percent - 100.0 * 0.32 / (5.0 / 6.0 * 0.84 + 1.0 / 6.0 * 0.4)).abs() < 1e-6, "{percent}");
    assert!(document["policies"][1]["late_share_below_60_percent"]["high"].is_f64());
    assert!(String::from_utf8_lossy(&output.stderr).contains("thompson: 2 of 2 seeds"), "progress is shown");
    for name in ["regret", "quality-cost", "spend-share"] {
        let svg = std::fs::read_to_string(out.path().join(format!("{name}.svg"))).unwrap();
        assert!(svg.contains("<svg") && svg.contains("task"), "{name}");
        let png = std::fs::read(out.path().join(format!("{name}.png"))).unwrap();
        assert!(png.starts_with(b"\x89PNG") && png.len() > 4_000, "{name}");
    }
    assert_eq!(run().output().await.unwrap().stdout, output.stdout, "the same arguments give the same result");
    let nowhere = support::programs::example("market").args(["--world", "/nowhere.json"]).output().await.unwrap();
    assert!(!nowhere.status.success() && String::from_utf8_lossy(&nowhere.stderr).contains("/nowhere.json"));
}
