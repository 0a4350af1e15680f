//! Methods and implementations that several services and layers share, written once.

/// Defines the accessors of the inner service.
macro_rules! inner_accessors {
    () => {
        /// Returns a reference to the inner service.
        pub fn get_ref(&self) -> &S {
            &self.inner
        }

        /// Returns a mutable reference to the inner service.
        pub fn get_mut(&mut self) -> &mut S {
            &mut self.inner
        }

        /// Returns the inner service.
        pub fn into_inner(self) -> S {
            self.inner
        }
    };
}

/// Implements `Debug` with the name of the type alone, because its content has no `Debug` or says nothing to a reader.
macro_rules! opaque_debug {
    ($name:ident $(<$($param:ident),+>)? $(where $($bounds:tt)+)?) => {
        impl $(<$($param),+>)? std::fmt::Debug for $name $(<$($param),+>)?
        $(where $($bounds)+)?
        {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.debug_struct(stringify!($name)).finish_non_exhaustive()
            }
        }
    };
}

/// Defines setters of a layer, each with the documentation in front of its name.
///
/// The layer has a `config` with `redlock`, `options`, `waiters`, `retry_after` and `refusals`. A setter with a type
/// sets the field of its name.
macro_rules! layer_setters {
    ($($(#[$doc:meta])+ $setter:ident $(: $type:ty)?;)+) => {
        $($crate::middleware::macros::layer_setters! { @$setter $(#[$doc])+ $($type)? })+
    };
    (@$field:ident $(#[$doc:meta])+ $type:ty) => {
        $(#[$doc])+
        pub fn $field(mut self, $field: $type) -> Self {
            self.config.$field = $field;
            self
        }
    };
    (@ttl $(#[$doc:meta])+) => {
        $(#[$doc])+
        pub fn ttl(mut self, ttl: std::time::Duration) -> Result<Self, $crate::BuildError> {
            self.config.redlock.check_ttl(ttl)?;
            self.config.options.ttl = Some(ttl);
            Ok(self)
        }
    };
    (@wait $(#[$doc:meta])+) => {
        $(#[$doc])+
        pub fn wait(mut self, wait: std::time::Duration) -> Self {
            self.config.options.wait = Some(wait);
            self
        }
    };
    (@max_hold $(#[$doc:meta])+) => {
        $(#[$doc])+
        pub fn max_hold(mut self, max_hold: std::time::Duration) -> Self {
            self.config.options.max_hold = Some(max_hold);
            self
        }
    };
    (@max_waiters $(#[$doc:meta])+) => {
        $(#[$doc])+
        pub fn max_waiters(mut self, max_waiters: usize) -> Self {
            self.config.waiters = Some($crate::lock::WaiterCap::new(max_waiters));
            self
        }
    };
    (@retry_after $(#[$doc:meta])+) => {
        $(#[$doc])+
        pub fn retry_after(mut self, retry_after: std::time::Duration) -> Self {
            self.config.retry_after = Some(retry_after);
            self
        }
    };
    (@rejection $(#[$doc:meta])+) => {
        $(#[$doc])+
        pub fn rejection(mut self, rejection: impl RejectionResponse) -> Self {
            self.config.refusals.set_response(rejection);
            self
        }
    };
}

pub(crate) use {inner_accessors, layer_setters, opaque_debug};
