//! A directory: who is listed, whose voice is admitted, and what readers make of it.
mod cards;
mod evidence;
mod file;
mod forging;
mod nodes;
mod process;
mod reorg;
mod reputation;
mod service;
mod stage;
