//! Implementations and methods that several types share, written once.

/// Implements `Debug` with the name of the type and some of its fields, because the others have no `Debug` or say nothing
/// to a reader.
macro_rules! opaque_debug {
    (
        $name:ident $(<$($param:ident),+>)? $([$($field:ident = $($path:ident).+),+])? $(where $($bounds:tt)+)?
    ) => {
        impl $(<$($param),+>)? std::fmt::Debug for $name $(<$($param),+>)?
        $(where $($bounds)+)?
        {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.debug_struct(stringify!($name))
                    $($(.field(stringify!($field), &self.$($path).+))+)?
                    .finish_non_exhaustive()
            }
        }
    };
}

/// Defines what the services with a boxed future have in common: the types, and the readiness, which is that of the inner
/// service.
macro_rules! boxed_service {
    ($response:ty) => {
        type Response = $response;
        type Error = S::Error;
        /// Boxed: next to the task or the network that it waits for, an allocation costs nothing.
        type Future =
            std::pin::Pin<Box<dyn Future<Output = Result<Self::Response, S::Error>> + Send>>;

        fn poll_ready(
            &mut self,
            context: &mut std::task::Context<'_>,
        ) -> std::task::Poll<Result<(), S::Error>> {
            self.inner.poll_ready(context)
        }
    };
}

/// Calls a macro with the names of the parts of each tuple that a key may be.
macro_rules! for_tuples {
    ($macro:ident) => {
        $macro!(A);
        $macro!(A B);
        $macro!(A B C);
        $macro!(A B C D);
        $macro!(A B C D E);
        $macro!(A B C D E F);
        $macro!(A B C D E F G);
        $macro!(A B C D E F G H);
    };
}

/// Implements `IntoResponses` of utoipa with the refusals of some statuses.
#[cfg(feature = "utoipa")]
macro_rules! into_responses {
    ($($(#[$doc:meta])+ $name:ident: $statuses:pat),+ $(,)?) => {$(
        $(#[$doc])+
        impl utoipa::IntoResponses for $name {
            fn responses() -> crate::middleware::Responses {
                crate::middleware::responses(|status| matches!(status, $statuses))
            }
        }
    )+};
}

/// Defines setters, each with its documentation: name, argument, the field that it sets, and the value.
macro_rules! setters {
    ($($(#[$attribute:meta])+ $setter:ident($($argument:ident: $type:ty)?) => $($field:ident).+ = $value:expr;)+) => {$(
        $(#[$attribute])+
        pub fn $setter(mut self $(, $argument: $type)?) -> Self {
            self.$($field).+ = $value;
            self
        }
    )+};
}

/// Defines the setter of the ttl of a layer that locks, and others as above.
macro_rules! layer_setters {
    ($($setters:tt)+) => {
        /// Sets the ttl of the locks. Default: that of the [`Redlock`].
        ///
        /// # Errors
        ///
        /// [`BuildError`](crate::BuildError) if the ttl exceeds the `max_ttl` of the [`Redlock`], or is so
        /// short that clock drift uses it up.
        pub fn ttl(mut self, ttl: Duration) -> Result<Self, BuildError> {
            self.config.redlock.check_ttl(ttl)?;
            self.config.options.ttl = Some(ttl);
            Ok(self)
        }
        setters! { $($setters)+ }
    };
}
