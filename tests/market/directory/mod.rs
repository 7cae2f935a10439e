//! A directory: which cards are listed, which reports are accepted, and how far readers trust them.
mod cards;
mod charges;
mod evidence;
mod file;
mod forging;
mod nodes;
mod page;
mod process;
mod reorg;
mod reputation;
mod service;
mod stage;
