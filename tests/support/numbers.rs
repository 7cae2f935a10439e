//! What a recorder was told.

use std::collections::{BTreeMap, BTreeSet};

use metrics_util::debugging::{DebugValue, DebuggingRecorder, Snapshotter};

/// Counts what this thread does until it is read.
pub struct Recording {
    recorder: &'static DebuggingRecorder,
    _guard: metrics::LocalRecorderGuard<'static>,
}

impl Recording {
    pub fn begin() -> Self {
        // A recorder that outlives the guard; a test makes one.
        let recorder: &'static DebuggingRecorder = Box::leak(Box::new(DebuggingRecorder::new()));
        Self { recorder, _guard: metrics::set_default_local_recorder(recorder) }
    }

    /// What was counted since the last time.
    pub fn read(&self) -> Numbers {
        Numbers::of(&self.recorder.snapshotter())
    }
}

/// Counts what is done in threads of the library's own, of all tests.
pub struct OfThreads(Snapshotter);

impl OfThreads {
    /// Once in a process.
    pub fn begin() -> Self {
        let recorder = DebuggingRecorder::new();
        let snapshotter = recorder.snapshotter();
        recorder.install().expect("nobody else does");
        Self(snapshotter)
    }

    /// What was counted under this name since the last time.
    pub fn read(&self, name: &str) -> Numbers {
        let Numbers(mut numbers) = Numbers::of(&self.0);
        numbers.retain(|number| number.name == name);
        Numbers(numbers)
    }
}

#[derive(Debug)]
pub struct Numbers(pub Vec<Number>);

#[derive(Debug)]
pub struct Number {
    pub name: String,
    pub labels: BTreeMap<String, String>,
    pub value: DebugValue,
}

impl Numbers {
    fn of(snapshotter: &Snapshotter) -> Self {
        let numbers = snapshotter.snapshot().into_vec().into_iter().map(|(key, _, _, value)| {
            let (_, key) = key.into_parts();
            let labels = key.labels().map(|label| (label.key().to_owned(), label.value().to_owned())).collect();
            Number { name: key.name().to_owned(), labels, value }
        });
        Self(numbers.collect())
    }

    pub fn names(&self) -> BTreeSet<&str> {
        self.0.iter().map(|number| number.name.as_str()).collect()
    }

    /// The counters of this name by the value of one label; those at nothing are left out.
    pub fn counters(&self, name: &str, label: &str) -> BTreeMap<&str, u64> {
        let mut found = BTreeMap::new();
        for number in self.0.iter().filter(|number| number.name == name) {
            let DebugValue::Counter(count) = number.value else { panic!("{number:?}") };
            if count > 0 {
                *found.entry(number.labels[label].as_str()).or_default() += count;
            }
        }
        found
    }

    /// The sum of the counters of this name.
    pub fn total(&self, name: &str) -> u64 {
        let counts = self.0.iter().filter(|number| number.name == name).map(|number| match number.value {
            DebugValue::Counter(count) => count,
            _ => panic!("{number:?}"),
        });
        counts.sum()
    }

    pub fn gauge(&self, name: &str) -> Option<f64> {
        self.0.iter().find(|number| number.name == name).map(|number| match number.value {
            DebugValue::Gauge(value) => *value,
            _ => panic!("{number:?}"),
        })
    }

    /// What was observed under this name with this value of a label, in order.
    pub fn observed(&self, name: &str, label: Option<(&str, &str)>) -> Vec<f64> {
        let fits = |number: &&Number| {
            number.name == name && label.is_none_or(|(key, value)| number.labels.get(key).is_some_and(|is| is == value))
        };
        let mut observed = Vec::new();
        for number in self.0.iter().filter(fits) {
            let DebugValue::Histogram(values) = &number.value else { panic!("{number:?}") };
            observed.extend(values.iter().map(|value| **value));
        }
        observed
    }
}
