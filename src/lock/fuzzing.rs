//! Exposes the reader of environment variables to fuzz targets.

use std::ffi::OsString;

use crate::lock::config::RedlockConfig;
use crate::lock::error::BuildError;

/// Reads the settings from variables.
///
/// # Errors
///
/// Returns what [`RedlockConfig::from_env`] returns.
pub fn config_from_vars(
    var: impl Fn(&str) -> Option<OsString>,
) -> Result<RedlockConfig, BuildError> {
    RedlockConfig::from_vars(var)
}
