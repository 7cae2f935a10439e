//! What each mechanism of the selection brings: with all of them, and without one.

use std::{fmt::Write as _, path::Path, sync::Arc};

use x402_market::selection::ThompsonConfig;

use super::{
    course::{self, Arm},
    experiments::{Cell, harsh, learner, majority, shift},
    market::{
        run::{self, Mechanism, Policy},
        world::World,
    },
    parallel,
    report::Estimate,
};

const WORLDS: [&str; 5] = ["reference", "drift", "collusion", "infiltration", "reentry"];

/// Returns a table: percent of the oracle, or final quality in percent.
pub(crate) fn ablation(seeds: usize, size: &dyn Fn(&mut Cell), tasks: Option<usize>) -> anyhow::Result<String> {
    let names = WORLDS.iter().copied().chain(["M ¾ alone", "M ¾ shared", "H shared", "S learning"]);
    let mut text = format!("| without | {} |\n|{}\n", names.collect::<Vec<_>>().join(" | "), "---|".repeat(10));
    let mut all: Vec<(&str, Option<Mechanism>, bool)> = vec![("nothing", None, true)];
    all.extend([
        ("trust", Some(Mechanism::Trust), true),
        ("claims", Some(Mechanism::Claims), true),
        ("limit for each payer", Some(Mechanism::Limit), true),
        ("exploration", Some(Mechanism::Exploration), true),
        ("forgetting", Some(Mechanism::Forgetting), true),
        ("price of money", Some(Mechanism::Price), true),
        ("anchors", None, false),
    ]);
    for (name, mechanism, has_anchors) in all {
        let mut config = ThompsonConfig::default();
        mechanism.iter().for_each(|mechanism| mechanism.remove(&mut config));
        let _ = write!(text, "| {name} |");
        for world in WORLDS {
            if !has_anchors {
                text.push_str(" – |");
                continue;
            }
            let path = format!("{}/market/worlds/{world}.json", env!("CARGO_MANIFEST_DIR"));
            let mut world = World::read(Path::new(&path))?;
            world.tasks_per_student = tasks.unwrap_or(world.tasks_per_student);
            let share = |seed| Ok(100.0 * run::run(&world, Policy::Thompson, &config, seed as u64).share(&world));
            let _ = write!(text, " {} |", Estimate::of(&parallel(seeds, share)?).show(1));
        }
        let learning = shift(vec![learner()]);
        for (world, students) in
            [(majority(6, Vec::new()), 1), (majority(6, Vec::new()), 20), (harsh(), 20), (learning, 5)]
        {
            let arm = Arm { config: config.clone(), has_anchors, ..Arm::market("market", students) };
            let mut cell = Cell { setting: String::new(), world: Arc::new(world), arm };
            size(&mut cell);
            let quality = |seed| Ok(100.0 * course::run(&cell.world, &cell.arm, seed as u64)?.quality());
            let _ = write!(text, " {} |", Estimate::of(&parallel(seeds, quality)?).show(1));
        }
        text.push('\n');
        eprintln!("without {name}: done");
    }
    Ok(text)
}
