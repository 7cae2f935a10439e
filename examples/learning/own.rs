//! A student's own reward model: logistic regression on the words of an output. It learns how outputs read, not whether they are right.

/// How many times it reads all labels, how far a step goes (AdaGrad), and how much a weight shrinks by a step.
const PASSES: usize = 10;
const RATE: f32 = 0.3;
const DECAY: f32 = 0.01;

/// The labels so far, and the weights that fit them.
#[derive(Clone, Debug)]
pub(crate) struct OwnModel {
    labels: Vec<(Vec<u32>, bool)>,
    weights: Vec<f32>,
    bias: f32,
}

impl OwnModel {
    pub(crate) fn new(vocabulary: usize) -> Self {
        Self { labels: Vec::new(), weights: vec![0.0; vocabulary], bias: 0.0 }
    }

    /// Returns the log-odds that an output is right.
    pub(crate) fn score(&self, words: &[u32]) -> f64 {
        f64::from(self.bias + words.iter().map(|word| self.weights[*word as usize]).sum::<f32>())
    }

    /// Adds labels, and fits all of them anew.
    pub(crate) fn learn(&mut self, labels: impl IntoIterator<Item = (Vec<u32>, bool)>) {
        self.labels.extend(labels);
        (self.weights, self.bias) = (vec![0.0; self.weights.len()], 0.0);
        let (mut squares, mut of_bias) = (vec![0.1_f32; self.weights.len()], 0.1_f32);
        for _ in 0..PASSES {
            for (words, is_right) in &self.labels {
                let sum = self.bias + words.iter().map(|word| self.weights[*word as usize]).sum::<f32>();
                let error = 1.0 / (1.0 + (-sum).exp()) - f32::from(u8::from(*is_right));
                for word in words.iter().map(|word| *word as usize) {
                    let gradient = error + DECAY * self.weights[word];
                    squares[word] += gradient * gradient;
                    self.weights[word] -= RATE * gradient / squares[word].sqrt();
                }
                of_bias += error * error;
                self.bias -= RATE * error / of_bias.sqrt();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_learns_which_words_are_of_right_outputs_and_nothing_where_the_words_are_the_same() {
        let mut model = OwnModel::new(30);
        assert_eq!(model.score(&[1, 2]), 0.0);
        model.learn((0..40).map(|number| (vec![number % 20, 20 + number % 2], number % 2 == 0)));
        assert!(model.score(&[3, 20]) > 0.5 && model.score(&[3, 21]) < -0.5);
        model.learn((0..40).map(|number| (vec![number % 20, 25], number % 4 < 2)));
        assert!(model.score(&[25]).abs() < 0.5, "{}", model.score(&[25]));
    }
}
