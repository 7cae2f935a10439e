//! The extension `bazaar`.
/// Its name among the extensions.
pub const NAME: &str = "bazaar";
