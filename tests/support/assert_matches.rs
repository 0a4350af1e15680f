//! An assertion that shows the value that it refuses.

/// Asserts that a value matches a pattern; panics with the value, and with what the caller has to add.
#[macro_export]
macro_rules! assert_matches {
    ($value:expr, $pattern:pat $(,)?) => {
        $crate::assert_matches!($value, $pattern, "a value")
    };
    ($value:expr, $pattern:pat, $($what:tt)+) => {
        match $value {
            $pattern => {}
            ref value => {
                let pattern = stringify!($pattern);
                panic!("{}: {value:?} is no {pattern}", format_args!($($what)+))
            }
        }
    };
}
