//! What each mechanism of the selection brings: with all of them, and without one.

use std::{fmt::Write as _, path::Path, sync::Arc};

use clap::ValueEnum as _;
use x402_market::selection::ThompsonConfig;

use super::{
    course::{self, Arm},
    experiments::{Cell, harsh, learner, majority, niches, shift},
    market::{
        run::{self, Mechanism, Policy},
        world::World,
    },
    parallel,
    report::Estimate,
};

const WORLDS: [&str; 5] = ["reference", "drift", "collusion", "infiltration", "reentry"];

/// The courses.
const COURSES: [&str; 5] = ["M ¾ alone", "M ¾ shared", "H shared", "S niche", "S learning"];

/// Returns a table: percent of the oracle, or final quality in percent. `only`: the columns whose names begin so.
pub(crate) fn ablation(
    seeds: usize,
    size: &dyn Fn(&mut Cell),
    tasks: Option<usize>,
    only: &str,
) -> anyhow::Result<String> {
    let columns: Vec<_> = WORLDS.into_iter().chain(COURSES).filter(|column| column.starts_with(only)).collect();
    let mut text = format!("| without | {} |\n|{}\n", columns.join(" | "), "---|".repeat(columns.len() + 1));
    let mechanisms = Mechanism::value_variants().iter().map(|mechanism| Some(*mechanism));
    let all = [(None, true)].into_iter().chain(mechanisms.map(|mechanism| (mechanism, true))).chain([(None, false)]);
    for (mechanism, has_anchors) in all {
        let mut config = ThompsonConfig::default();
        mechanism.iter().for_each(|mechanism| mechanism.remove(&mut config));
        let name = match mechanism {
            Some(mechanism) => format!("{mechanism:?}").to_lowercase(),
            None if has_anchors => "nothing".to_owned(),
            None => "anchors".to_owned(),
        };
        let _ = write!(text, "| {name} |");
        for column in &columns {
            let values = if WORLDS.contains(column) {
                if !has_anchors {
                    text.push_str(" – |");
                    continue;
                }
                let path = format!("{}/market/worlds/{column}.json", env!("CARGO_MANIFEST_DIR"));
                let mut world = World::read(Path::new(&path))?;
                world.tasks_per_student = tasks.unwrap_or(world.tasks_per_student);
                parallel(seeds, |seed| Ok(run::run(&world, Policy::Thompson, &config, seed as u64).share(&world)))?
            } else {
                let (world, students) = match *column {
                    "M ¾ alone" => (majority(6, Vec::new()), 1),
                    "M ¾ shared" => (majority(6, Vec::new()), 20),
                    "H shared" => (harsh(), 20),
                    "S niche" => (shift(niches()), 5),
                    _ => (shift(vec![learner()]), 5),
                };
                let arm = Arm { config: config.clone(), has_anchors, ..Arm::market("market", students) };
                let mut cell = Cell { setting: String::new(), world: Arc::new(world), arm };
                size(&mut cell);
                parallel(seeds, |seed| Ok(course::run(&cell.world, &cell.arm, seed as u64)?.quality()))?
            };
            let percent: Vec<_> = values.into_iter().map(|value| 100.0 * value).collect();
            let _ = write!(text, " {} |", Estimate::of(&percent).show(1));
        }
        text.push('\n');
        eprintln!("without {name}: done");
    }
    Ok(text)
}
