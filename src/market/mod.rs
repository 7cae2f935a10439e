//! The market: whom to hire, and what is known of them.

pub mod evidence;
pub mod selection;
