//! x
#[path = "../policy/mod.rs"]
mod policy;

fn main() {}
