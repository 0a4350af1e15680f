//! Methods and implementations that several services and layers share, written once.

/// Implements `Debug` with the name of the type and some of its fields, because the others have no `Debug` or say nothing
/// to a reader.
macro_rules! opaque_debug {
    (
        $name:ident $(<$($param:ident),+>)? $([$field:ident = $($path:ident).+])? $(where $($bounds:tt)+)?
    ) => {
        impl $(<$($param),+>)? std::fmt::Debug for $name $(<$($param),+>)?
        $(where $($bounds)+)?
        {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.debug_struct(stringify!($name))
                    $(.field(stringify!($field), &self.$($path).+))?
                    .finish_non_exhaustive()
            }
        }
    };
}

/// Defines the setter of the ttl of a layer, and others, each with its documentation: name, argument, the field of `config`
/// that it sets, and the value.
macro_rules! layer_setters {
    ($($(#[$attribute:meta])+ $setter:ident($argument:ident: $type:ty) => $($field:ident).+ = $value:expr;)+) => {
        /// Sets the ttl of the locks. Default: that of the [`Redlock`].
        ///
        /// # Errors
        ///
        /// [`BuildError`](crate::BuildError) if the ttl exceeds the `max_ttl` of the [`Redlock`], or is so
        /// short that clock drift uses it up.
        pub fn ttl(mut self, ttl: Duration) -> Result<Self, BuildError> {
            self.config.redlock.check_ttl(ttl)?;
            Arc::make_mut(&mut self.config).options.ttl = Some(ttl);
            Ok(self)
        }
        $(
            $(#[$attribute])+
            pub fn $setter(mut self, $argument: $type) -> Self {
                Arc::make_mut(&mut self.config).$($field).+ = $value;
                self
            }
        )+
    };
}

pub(crate) use {layer_setters, opaque_debug};
