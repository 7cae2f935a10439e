//! The JSON Schemas of submissions and evaluations.

/// The schema of a [`Submission`](super::Submission) (JSON Schema 2020-12).
pub const SUBMISSION_SCHEMA: &str = include_str!("../schema/submission.v1.schema.json");
/// The schema of an [`Evaluation`](super::Evaluation) (JSON Schema 2020-12).
pub const EVALUATION_SCHEMA: &str = include_str!("../schema/evaluation.v1.schema.json");
/// The path at which evaluators serve [`SUBMISSION_SCHEMA`].
pub const SUBMISSION_SCHEMA_PATH: &str = "/.well-known/submission.v1.schema.json";
/// The path at which evaluators serve [`EVALUATION_SCHEMA`].
pub const EVALUATION_SCHEMA_PATH: &str = "/.well-known/evaluation.v1.schema.json";
