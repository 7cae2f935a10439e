//! The beta distribution: what is known of a probability.

use rand::{Rng, RngExt};
use rand_distr::{Distribution, StandardNormal};

/// The posterior of a probability.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Beta {
    pub(super) alpha: f32,
    pub(super) beta: f32,
}

impl Beta {
    pub(super) fn mean(self) -> f32 {
        self.alpha / (self.alpha + self.beta)
    }

    /// One draw, as the ratio of two gamma draws. Both parameters are at least 1/10.
    pub(super) fn draw(self, rng: &mut impl Rng) -> f32 {
        let (right, wrong) = (gamma(self.alpha, rng), gamma(self.beta, rng));
        right / (right + wrong)
    }
}

/// A draw from the gamma distribution with this shape and scale one, by the method of Marsaglia and Tsang (2000): a cubed normal,
/// which is refused in some per cent of the cases.
fn gamma(shape: f32, rng: &mut impl Rng) -> f32 {
    if shape < 1.0 {
        // Γ(a) is Γ(a + 1) · U^(1/a).
        let uniform: f32 = rng.random();
        return gamma(shape + 1.0, rng) * uniform.max(f32::MIN_POSITIVE).powf(1.0 / shape).max(f32::MIN_POSITIVE);
    }
    let d = shape - 1.0 / 3.0;
    let c = 1.0 / (9.0 * d).sqrt();
    loop {
        let normal: f32 = StandardNormal.sample(rng);
        let root = 1.0 + c * normal;
        if root <= 0.0 {
            continue;
        }
        let v = root * root * root;
        let uniform: f32 = rng.random();
        let square = normal * normal;
        // The first bound spares the logarithms nearly always.
        if uniform < 1.0 - 0.0331 * square * square || uniform.ln() < 0.5 * square + d * (1.0 - v + v.ln()) {
            return d * v;
        }
    }
}

/// ln B(a, b).
pub(super) fn ln_beta(a: f64, b: f64) -> f64 {
    ln_gamma(a) + ln_gamma(b) - ln_gamma(a + b)
}

/// ln Γ(x) for x > 0: Stirling's series where it is good to twelve digits, and the recurrence below that.
fn ln_gamma(x: f64) -> f64 {
    let (mut x, mut shift) = (x, 1.0);
    while x < 9.0 {
        shift *= x;
        x += 1.0;
    }
    let inverse = 1.0 / x;
    let square = inverse * inverse;
    let series = inverse
        * (1.0 / 12.0 - square * (1.0 / 360.0 - square * (1.0 / 1260.0 - square * (1.0 / 1680.0 - square / 1188.0))));
    (x - 0.5) * x.ln() - x + 0.5 * (2.0 * std::f64::consts::PI).ln() + series - shift.ln()
}

#[cfg(test)]
mod tests {
    use rand::{SeedableRng, rngs::Xoshiro256PlusPlus};

    use super::*;

    #[test]
    fn the_logarithm_of_the_beta_function_is_that_of_factorials() {
        let factorial = |n: u32| (1..=n).map(f64::from).product::<f64>();
        for (a, b) in [(1, 1), (2, 5), (7, 3), (20, 30), (1, 60)] {
            let exact = (factorial(a - 1) * factorial(b - 1) / factorial(a + b - 1)).ln();
            assert!((ln_beta(f64::from(a), f64::from(b)) - exact).abs() < 1e-9, "B({a}, {b})");
        }
        // B(1/2, 1/2) = π.
        assert!((ln_beta(0.5, 0.5) - std::f64::consts::PI.ln()).abs() < 1e-9);
    }

    #[test]
    fn draws_have_the_mean_and_the_variance_of_the_distribution() {
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(1);
        for (alpha, beta) in [(1.0, 1.0), (0.6, 2.4), (9.0, 2.0), (40.0, 3.0)] {
            let posterior = Beta { alpha, beta };
            let draws: Vec<_> = (0..40_000).map(|_| f64::from(posterior.draw(&mut rng))).collect();
            let mean = draws.iter().sum::<f64>() / draws.len() as f64;
            let variance = draws.iter().map(|draw| (draw - mean).powi(2)).sum::<f64>() / draws.len() as f64;
            let (a, b) = (f64::from(alpha), f64::from(beta));
            assert!((mean - a / (a + b)).abs() < 0.005, "{mean}");
            let exact = a * b / ((a + b).powi(2) * (a + b + 1.0));
            assert!((variance / exact - 1.0).abs() < 0.05, "{variance} {exact}");
        }
    }
}
