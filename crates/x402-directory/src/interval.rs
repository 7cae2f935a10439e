//! Intervals of what is believed of an evaluator.

/// Into how many cells [0, 1] is divided.
const CELLS: usize = 2_000;

/// Returns the 90 % interval of a probability that follows the beta distribution with this alpha and beta.
pub(crate) fn ninety_percent(beta: [f32; 2]) -> [f64; 2] {
    let [alpha, beta] = beta.map(f64::from);
    let log = |cell| (alpha - 1.0) * middle(cell).ln() + (beta - 1.0) * (1.0 - middle(cell)).ln();
    let highest = (0..CELLS).map(log).fold(f64::NEG_INFINITY, f64::max);
    let add = |sum: &mut f64, cell| {
        *sum += (log(cell) - highest).exp();
        Some(*sum)
    };
    let sums: Vec<f64> = (0..CELLS).scan(0.0, add).collect();
    let all = sums.last().copied().unwrap_or_default();
    [0.05, 0.95].map(|share| middle(sums.partition_point(|sum| *sum < share * all)))
}

fn middle(cell: usize) -> f64 {
    (cell as f64 + 0.5) / CELLS as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn near([low, high]: [f64; 2], expected: [f64; 2]) -> bool {
        (low - expected[0]).abs() < 2e-3 && (high - expected[1]).abs() < 2e-3
    }

    /// Against the quantiles of scipy.stats.beta.
    #[test]
    fn interval_is_that_of_the_distribution() {
        assert!(near(ninety_percent([1.0, 1.0]), [0.05, 0.95]));
        assert!(near(ninety_percent([9.0, 3.0]), [0.5299, 0.9212]));
    }
}
