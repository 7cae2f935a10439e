//! How long a choice among 1,000 evaluators of 20 skills takes, and how much memory a student's beliefs take.
//!
//! ```text
//! cargo bench -p tower-x402-tests --bench selection
//! ```
//!
//! The market is well known: each cell has own evidence, and many have that of others.

use std::{
    alloc::System,
    hint::black_box,
    time::{Duration, Instant},
};

use alloy_primitives::Address;
use rand::{RngExt, SeedableRng, rngs::Xoshiro256PlusPlus};
use stats_alloc::{INSTRUMENTED_SYSTEM, StatsAlloc};
use tower_x402::Usdc;
use x402_market::{
    evidence::{CallOutcome, Pairs},
    selection::{Candidate, Job, Observation, Selector, Skill, SkillSet, Thompson},
};

#[global_allocator]
static HEAP: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

const EVALUATORS: usize = 1_000;
const SKILLS: usize = 20;
const PAYERS: u64 = 100;
const HEARD: usize = 50_000;
const CHOICES: u64 = 20_000;

fn address(kind: u8, number: u64) -> Address {
    let mut bytes = [kind; 20];
    bytes[12..].copy_from_slice(&number.to_be_bytes());
    Address::from(bytes)
}

fn market(rng: &mut Xoshiro256PlusPlus) -> Vec<Candidate> {
    let candidate = |number| {
        Candidate::new(
            address(1, number),
            (0..3).filter_map(|_| Skill::new(rng.random_range(0..SKILLS))).collect::<SkillSet>(),
            Usdc::from_atomic(rng.random_range(300..3_000)),
        )
    };
    (0..EVALUATORS as u64).map(candidate).collect()
}

fn informed(market: &[Candidate], rng: &mut Xoshiro256PlusPlus) -> Thompson {
    let mut selector = Thompson::seeded(1);
    selector.select(&job(0), market);
    let mut verdict =
        |evaluator, skill| Observation::new(evaluator, Skill::new(skill).unwrap(), Usdc::ZERO, audit(rng));
    for skill in 0..SKILLS {
        for candidate in market {
            selector.learn(&verdict(candidate.evaluator, skill));
        }
    }
    for turn in 0..HEARD {
        let observation = verdict(market[turn * 7 % EVALUATORS].evaluator, turn * 3 % SKILLS);
        selector.learn_report(address(2, turn as u64 % PAYERS), &observation);
    }
    selector
}

/// An audit of one pair, which seven evaluators of ten order rightly.
fn audit(rng: &mut Xoshiro256PlusPlus) -> CallOutcome {
    let is_right = rng.random_bool(0.7);
    CallOutcome::answered(Pairs::new(is_right.into(), (!is_right).into(), 1))
}

fn job(turn: u64) -> Job {
    let skill = Skill::new(turn as usize % SKILLS).unwrap();
    Job::new(skill, Usdc::from_atomic(900_000_000), 1_000_000)
}

fn choices(selector: &mut Thompson, market: &[Candidate], explores: bool) -> Vec<Duration> {
    let mut times = Vec::new();
    for turn in 0..CHOICES {
        let started = Instant::now();
        let chosen = match explores {
            true => selector.explore(black_box(&job(turn)), market),
            false => selector.select(black_box(&job(turn)), market),
        };
        times.push(started.elapsed());
        black_box(chosen);
    }
    times.sort();
    times
}

fn print(name: &str, times: &[Duration]) {
    let micros = |percent: usize| times[(times.len() - 1) * percent / 100].as_secs_f64() * 1e6;
    println!("{name:<38}{:>9.1}{:>9.1}{:>9.1}", micros(50), micros(95), micros(99));
}

fn main() {
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(7);
    let market = market(&mut rng);
    println!("{EVALUATORS} evaluators, {SKILLS} skills; microseconds      p50      p95      p99");
    let mut stranger = Thompson::seeded(1);
    print("choose, nothing known", &choices(&mut stranger, &market, false));
    print("explore in an audit, nothing known", &choices(&mut stranger, &market, true));
    let before = held();
    let mut selector = informed(&market, &mut rng);
    print("choose", &choices(&mut selector, &market, false));
    print("explore in an audit", &choices(&mut selector, &market, true));

    let mut own = Vec::new();
    let mut heard = Vec::new();
    for turn in 0..2_000_usize {
        let outcome = audit(&mut rng);
        let (evaluator, skill) = (market[turn * 11 % EVALUATORS].evaluator, Skill::new(turn % SKILLS).unwrap());
        let observation = Observation::new(evaluator, skill, Usdc::ZERO, outcome);
        let started = Instant::now();
        selector.learn_report(address(2, turn as u64 % PAYERS), &observation);
        heard.push(started.elapsed());
        let started = Instant::now();
        selector.learn(&observation);
        own.push(started.elapsed());
    }
    own.sort();
    heard.sort();
    print("learn from an audit of one's own", &own);
    print("hear of another's", &heard);
    drop((own, heard));
    println!("\nstate of a student: {} bytes", held() - before);
}

/// Bytes that are allocated and not freed.
fn held() -> usize {
    let stats = HEAP.stats();
    stats.bytes_allocated - stats.bytes_deallocated
}
