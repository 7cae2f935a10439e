//! `Debug` for types with fields that are secret, or that say nothing in a log.

/// Implements `Debug` with these fields: those of this name, or `|this| { name: expression }`.
#[doc(hidden)]
#[macro_export]
macro_rules! debug_fields {
    ($type:ident { $($field:ident),* }) => {
        $crate::debug_fields!($type |_this| { $($field: _this.$field),* });
    };
    ($type:ident |$this:ident| { $($name:ident: $value:expr),* $(,)? }) => {
        impl std::fmt::Debug for $type {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                let $this = self;
                f.debug_struct(stringify!($type))$(.field(stringify!($name), &$value))*.finish_non_exhaustive()
            }
        }
    };
}
