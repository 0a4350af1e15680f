//! Settings from the environment and from a configuration file. The first line is the URLs, the second those of
//! `REDLOCK_MOVING_TO`, the third the name of another setting and its value, and the rest is a file.
//!
//! Nothing panics. An error about a variable names it, and shows nothing of URLs, which may contain passwords. URLs mean the
//! same in both.

#![no_main]

use std::ffi::OsString;

use libfuzzer_sys::fuzz_target;
use serde_json::json;
use tower_redlock::fuzzing::config_from_vars;
use tower_redlock::{RedlockBuilder, RedlockConfig};
use tower_redlock_fuzz::first_line;

/// Stands in for each `$` of URLs.
const PASSWORD: &str = "Xyzzy-7-Plugh";

fuzz_target!(|data: &[u8]| {
    let (urls, rest) = first_line(data);
    let (moving_to, rest) = first_line(rest);
    let (setting, file) = first_line(rest);
    let [urls, moving_to] =
        [urls, moving_to].map(|urls| String::from_utf8_lossy(urls).replace('$', PASSWORD));
    let setting = String::from_utf8_lossy(setting);
    // Others may be shown.
    if setting.contains(PASSWORD) {
        return;
    }
    let (name, value) = setting.split_once('=').unwrap_or((&setting, ""));
    let other = format!("REDLOCK_{name}");

    let with_urls = config_from(&[("REDLOCK_URLS", &urls)]);
    let config: Result<RedlockConfig, _> = serde_json::from_value(json!({ "urls": urls }));
    match (&with_urls, &config) {
        (Some(var), Ok(file)) => assert_eq!(var.urls(), file.urls()),
        (None, Err(_)) => {}
        (var, file) => panic!("{var:?} but {file:?}"),
    }
    config_from(&[("REDLOCK_URLS", &urls), ("REDLOCK_MOVING_TO", &moving_to)]);
    config_from(&[("REDLOCK_URLS", &urls), (&other, value)]);
    config_from(&[(&other, value)]);
    if let Ok(config) = serde_json::from_slice::<RedlockConfig>(file) {
        build(config);
    }
});

/// Reads the settings in variables, and builds a lock service with them.
fn config_from(vars: &[(&str, &str)]) -> Option<RedlockConfig> {
    let var = |name: &str| vars.iter().find(|(var, _)| *var == name);
    let read = config_from_vars(|name| var(name).map(|(_, value)| OsString::from(value)));
    match read {
        Ok(config) => {
            build(config.clone());
            Some(config)
        }
        Err(error) => {
            let shown = format!("{error} {error:?}");
            assert!(vars.iter().any(|(name, _)| shown.contains(name)), "{shown}");
            assert!(!shown.contains(PASSWORD), "{shown}");
            None
        }
    }
}

/// Builds a lock service, and shows what is wrong with its settings.
fn build(config: RedlockConfig) {
    let _ = format!("{config:?}");
    if let Err(error) = RedlockBuilder::from(config).build() {
        let _ = format!("{error} {error:?}");
    }
}
