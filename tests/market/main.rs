//! The market: evaluators and their cards, students, selection, the directory, and the client of Atropos.

mod atropos_client;
mod directory;
mod learning;
mod market;
mod selection;
mod student;
