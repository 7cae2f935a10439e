//! The oracle: the most value that a student could get if it knew every accuracy.
//!
//! maximize Σ share(skill) · x(skill, evaluator) · value, subject to Σ share · x · price ≤ budget per task,
//! Σ over evaluators of x(skill, ·) ≤ 1, x ≥ 0.
//!
//! With one budget the linear program is solved exactly by spending on the steepest step of any skill's upper hull of (price, value)
//! first. The slope of the step at which the money ends is the dual, which proves the result optimal (see the test).

use std::iter;

use super::world::World;

/// One skill: its share of the tasks, and its offers as (price, value).
pub(crate) struct Group {
    pub(crate) share: f64,
    pub(crate) offers: Vec<(f64, f64)>,
}

pub(crate) struct Solution {
    /// The value per task.
    pub(crate) value: f64,
    /// The cost per task.
    pub(crate) cost: f64,
    /// The value of one more unit of money.
    pub(crate) lambda: f64,
}

/// Returns the upper hull from (0, 0): prices and values rise, slopes fall.
fn hull(offers: &[(f64, f64)]) -> Vec<(f64, f64)> {
    let mut sorted = offers.to_vec();
    sorted.sort_by(|a, b| a.0.total_cmp(&b.0).then(b.1.total_cmp(&a.1)));
    let mut hull = vec![(0.0, 0.0)];
    for (price, value) in sorted {
        if value <= hull[hull.len() - 1].1 {
            continue;
        }
        while let [.., (p0, v0), (p1, v1)] = hull[..]
            && (v1 - v0) * (price - p1) <= (value - v1) * (p1 - p0)
        {
            hull.pop();
        }
        hull.push((price, value));
    }
    hull
}

pub(crate) fn solve(groups: &[Group], budget: f64) -> Solution {
    let mut steps = Vec::new();
    for group in groups {
        for pair in hull(&group.offers).windows(2) {
            let (price, value) = (pair[1].0 - pair[0].0, pair[1].1 - pair[0].1);
            steps.push((value / price.max(1e-12), price * group.share, value * group.share));
        }
    }
    steps.sort_by(|a, b| b.0.total_cmp(&a.0));
    let mut solution = Solution { value: 0.0, cost: 0.0, lambda: 0.0 };
    for (slope, price, value) in steps {
        let part = if price > 0.0 { ((budget - solution.cost) / price).clamp(0.0, 1.0) } else { 1.0 };
        solution.value += part * value;
        solution.cost += part * price;
        if part < 1.0 {
            solution.lambda = slope;
            break;
        }
    }
    solution
}

/// Returns the linear program of a world at a task.
fn groups(world: &World, task: usize) -> Vec<Group> {
    let offers = |skill: usize| {
        let now = world.evaluators.iter().map(|evaluator| evaluator.at(task));
        now.map(|(accuracy, price)| (price as f64, 2.0 * accuracy[skill] - 1.0)).collect()
    };
    (0..world.skills).map(|skill| Group { share: 1.0 / world.skills as f64, offers: offers(skill) }).collect()
}

/// Returns the oracle's mean value, task by task. It knows the present and not the future: the program is solved again at each change, for
/// the remaining money and tasks.
pub(crate) fn by_task(world: &World) -> Vec<f64> {
    let changes = world.changes();
    let tasks = world.tasks_per_student;
    let mut left = world.budget_per_task_microusdc as f64 * tasks as f64;
    let mut values = Vec::with_capacity(tasks);
    for (index, start) in changes.iter().enumerate() {
        let end = changes.get(index + 1).copied().unwrap_or(tasks);
        let solution = solve(&groups(world, *start), left / (tasks - start) as f64);
        left -= solution.cost * (end - start) as f64;
        values.extend(iter::repeat_n(solution.value, end - start));
    }
    values
}

/// Returns cost and value per task of the optimum at the first task, for budgets up to `most`.
pub(crate) fn frontier(world: &World, most: f64) -> Vec<(f64, f64)> {
    let groups = groups(world, 0);
    (0..=100).map(|step| solve(&groups, most * f64::from(step) / 100.0)).map(|best| (best.cost, best.value)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A dual solution bounds every primal one from above; where they meet, both are optimal.
    #[test]
    fn the_solution_is_proven_optimal_by_its_dual() {
        let mut seed = 7_u64;
        let mut random = || {
            seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (seed >> 33) as f64 / (1_u64 << 31) as f64
        };
        for _ in 0..300 {
            let groups: Vec<_> = (0..3)
                .map(|_| Group {
                    share: 1.0 / 3.0,
                    offers: (0..8).map(|_| (3_000.0 * random(), 2.0 * random() - 1.0)).collect(),
                })
                .collect();
            let budget = 1_500.0 * random();
            let solution = solve(&groups, budget);
            let best = |group: &Group| group.offers.iter().map(|(p, v)| v - solution.lambda * p).fold(0.0, f64::max);
            let dual = solution.lambda * budget + groups.iter().map(|group| group.share * best(group)).sum::<f64>();
            assert!(solution.cost <= budget + 1e-9);
            assert!((solution.value - dual).abs() < 1e-9, "{} {dual}", solution.value);
        }
    }
}
