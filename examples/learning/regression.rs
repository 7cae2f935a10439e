//! A reward model: regression on the words of an output. It learns what outputs look like, not whether they are true.

/// The number of buckets that words are hashed into.
const PLACES: usize = 128;
/// The buckets, the length, and a constant.
const FEATURES: usize = PLACES + 2;
/// The ridge penalty.
const RIDGE: f64 = 1.0;

/// The weights of the features.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Regression(Vec<f64>);

/// The sums of the normal equations.
#[derive(Clone, Debug)]
pub(crate) struct Labels {
    squares: Vec<Vec<f64>>,
    products: Vec<f64>,
    pub(crate) count: usize,
}

impl Labels {
    pub(crate) fn new() -> Self {
        Self { squares: vec![vec![0.0; FEATURES]; FEATURES], products: vec![0.0; FEATURES], count: 0 }
    }

    /// Adds one output with its score.
    pub(crate) fn add(&mut self, output: &str, score: f64) {
        let features = features(output);
        for (row, one) in self.squares.iter_mut().zip(&features) {
            row.iter_mut().zip(&features).for_each(|(sum, other)| *sum += one * other);
        }
        self.products.iter_mut().zip(&features).for_each(|(sum, feature)| *sum += feature * score);
        self.count += 1;
    }

    /// Returns the weights of ridge regression.
    pub(crate) fn fit(&self) -> Regression {
        let mut matrix = self.squares.clone();
        (0..FEATURES).for_each(|at| matrix[at][at] += RIDGE);
        Regression(solve(matrix, self.products.clone()))
    }
}

impl Regression {
    /// Returns the expected score.
    pub(crate) fn score(&self, output: &str) -> f64 {
        self.0.iter().zip(features(output)).map(|(weight, feature)| weight * feature).sum()
    }
}

/// Returns the logarithmic counts of each word (all numbers are one word) and of all words.
fn features(output: &str) -> Vec<f64> {
    let mut counts = vec![0.0_f64; PLACES];
    let mut words = 0.0_f64;
    for word in output.split_whitespace() {
        let word: String = word.trim_matches([',', '.', ';', ':', '(', ')']).to_lowercase();
        let masked: String =
            word.chars().map(|character| if character.is_ascii_digit() { '0' } else { character }).collect();
        let masked = if masked.contains('0') { masked.replace(['.', '0'], "") + "0" } else { masked };
        counts[place(&masked)] += 1.0;
        words += 1.0;
    }
    counts.into_iter().chain([words]).map(|count| (1.0 + count).ln()).chain([1.0]).collect()
}

fn place(word: &str) -> usize {
    let hash = word
        .bytes()
        .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
    ((hash ^ (hash >> 32)) % PLACES as u64) as usize
}

/// Solves a symmetric positive definite system (Cholesky).
fn solve(mut matrix: Vec<Vec<f64>>, mut vector: Vec<f64>) -> Vec<f64> {
    let size = vector.len();
    for column in 0..size {
        for row in column..size {
            let known: f64 = (0..column).map(|at| matrix[row][at] * matrix[column][at]).sum();
            let rest = matrix[row][column] - known;
            matrix[row][column] = if row == column { rest.sqrt() } else { rest / matrix[column][column] };
        }
    }
    for row in 0..size {
        let known: f64 = (0..row).map(|at| matrix[row][at] * vector[at]).sum();
        vector[row] = (vector[row] - known) / matrix[row][row];
    }
    for row in (0..size).rev() {
        let known: f64 = (row + 1..size).map(|at| matrix[at][row] * vector[at]).sum();
        vector[row] = (vector[row] - known) / matrix[row][row];
    }
    vector
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_learns_what_words_are_worth_and_cannot_reckon() {
        let mut labels = Labels::new();
        for number in 0..100 {
            labels.add(&format!("Clearly the answer is {number} km"), 1.0);
            labels.add(&format!("Perhaps the answer is {number} km"), 0.0);
        }
        let model = labels.fit();
        let score = |text| model.score(text);
        assert!(score("Clearly the answer is 7 km") > 0.9 && score("Perhaps the answer is 7 km") < 0.1);
        assert_eq!(score("Clearly the answer is 8 km"), score("Clearly the answer is 7.25 km"));
    }

    #[test]
    fn a_system_is_solved() {
        let solution = solve(vec![vec![4.0, 2.0], vec![2.0, 3.0]], vec![10.0, 9.0]);
        assert!((solution[0] - 1.5).abs() < 1e-12 && (solution[1] - 2.0).abs() < 1e-12);
    }
}
