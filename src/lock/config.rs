//! Settings as data: from environment variables or, with the feature `serde`, from a configuration file.

use std::env;
use std::ffi::OsString;
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use crate::lock::builder::{RedlockBuilder, RestartGuard, without_credentials};
use crate::lock::error::BuildError;

/// Settings of a [`RedlockBuilder`] as data: from the environment ([`from_env`](Self::from_env)) or, with the feature
/// `serde`, from a configuration file.
///
/// A setting that is not named has the default of the builder, which checks all of them together in
/// [`build`](RedlockBuilder::build):
///
/// ```
/// use tower_redlock::{RedlockBuilder, RedlockConfig};
///
/// let config = RedlockConfig::from_env()?;
/// let has_servers = config.urls().len() > 0;
/// let mut builder = RedlockBuilder::from(config);
/// if !has_servers {
///     builder = builder.embedded(3); // for development
/// }
/// let redlock = builder.build()?;
/// # let _ = redlock;
/// # Ok::<(), tower_redlock::BuildError>(())
/// ```
///
/// Times are whole numbers with a unit: `500ms`, `10s`, `5m`, `1h` or `7d`. The settings are those of the builder but
/// for its [`retry`](RedlockBuilder::retry), its pools, and its embedded nodes.
///
/// # In a configuration file
///
/// With the feature `serde`, it can be deserialized, as a part of the program's own configuration. Names that are no
/// settings are errors:
///
#[cfg_attr(feature = "serde", doc = "```")]
#[cfg_attr(not(feature = "serde"), doc = "```ignore")]
/// # use tower_redlock::RedlockConfig;
/// let json = r#"{"urls": ["redis://10.0.0.1", "redis://10.0.0.2"], "ttl": "5s", "restart_guard": "off"}"#;
/// let config: RedlockConfig = serde_json::from_str(json)?;
/// # let _ = config;
/// # Ok::<(), serde_json::Error>(())
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Deserialize),
    serde(default, deny_unknown_fields)
)]
pub struct RedlockConfig {
    urls: Vec<ServerUrl>,
    namespace: Option<String>,
    ttl: Option<Time>,
    max_ttl: Option<Time>,
    node_timeout: Option<Time>,
    connect_timeout: Option<Time>,
    wait: Option<Time>,
    wake_ups: Option<bool>,
    poll_interval: Option<Time>,
    max_hold: Option<Time>,
    renew: Option<bool>,
    fencing: Option<bool>,
    fence_retention: Option<Time>,
    restart_guard: Option<GuardTime>,
    max_waiters: Option<usize>,
    log_keys: Option<bool>,
}

impl RedlockConfig {
    /// Reads the environment: `REDLOCK_URLS`, the URLs with commas between them, and for each other setting a variable
    /// with its name, such as `REDLOCK_NAMESPACE`, `REDLOCK_MAX_TTL=10s` or `REDLOCK_RESTART_GUARD=off`.
    ///
    /// Other variables that begin like these are ignored, because a container platform may set some.
    ///
    /// # Errors
    ///
    /// Returns a [`BuildError`] that names the variable if its value cannot be read, or is empty. An empty
    /// `REDLOCK_NAMESPACE` is the empty namespace.
    pub fn from_env() -> Result<Self, BuildError> {
        Self::from_vars(|name| env::var_os(name))
    }

    fn from_vars(var: impl Fn(&str) -> Option<OsString>) -> Result<Self, BuildError> {
        let vars = Vars(var);
        Ok(Self {
            urls: vars.urls("REDLOCK_URLS")?,
            namespace: vars.text("REDLOCK_NAMESPACE")?,
            ttl: vars.read("REDLOCK_TTL", TIME)?,
            max_ttl: vars.read("REDLOCK_MAX_TTL", TIME)?,
            node_timeout: vars.read("REDLOCK_NODE_TIMEOUT", TIME)?,
            connect_timeout: vars.read("REDLOCK_CONNECT_TIMEOUT", TIME)?,
            wait: vars.read("REDLOCK_WAIT", TIME)?,
            wake_ups: vars.read("REDLOCK_WAKE_UPS", BOOL)?,
            poll_interval: vars.read("REDLOCK_POLL_INTERVAL", TIME)?,
            max_hold: vars.read("REDLOCK_MAX_HOLD", TIME)?,
            renew: vars.read("REDLOCK_RENEW", BOOL)?,
            fencing: vars.read("REDLOCK_FENCING", BOOL)?,
            fence_retention: vars.read("REDLOCK_FENCE_RETENTION", TIME)?,
            restart_guard: vars.read("REDLOCK_RESTART_GUARD", GUARD)?,
            max_waiters: vars.read("REDLOCK_MAX_WAITERS", NUMBER)?,
            log_keys: vars.read("REDLOCK_LOG_KEYS", BOOL)?,
        })
    }

    /// Returns the URLs of the Redis servers, which may contain credentials.
    #[must_use]
    pub fn urls(&self) -> impl ExactSizeIterator<Item = &str> {
        self.urls.iter().map(|url| &*url.0)
    }
}

impl From<RedlockConfig> for RedlockBuilder {
    fn from(config: RedlockConfig) -> Self {
        let mut builder = Self::default().urls(config.urls());
        macro_rules! set {
            ($($setting:ident $(. $field:tt)?)+) => {$(
                if let Some(value) = config.$setting {
                    builder = builder.$setting(value$(.$field)?);
                }
            )+};
        }
        set! { namespace ttl.0 max_ttl.0 node_timeout.0 connect_timeout.0 wait.0 wake_ups poll_interval.0 }
        set! { max_hold.0 renew fencing fence_retention.0 restart_guard.0 max_waiters log_keys }
        builder
    }
}

/// The URL of a server, which may contain credentials.
#[derive(Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Deserialize), serde(transparent))]
struct ServerUrl(String);

/// Shows no credentials.
impl fmt::Debug for ServerUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&without_credentials(&self.0))
    }
}

/// A time with a unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Deserialize),
    serde(try_from = "String")
)]
struct Time(Duration);

impl FromStr for Time {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, &'static str> {
        let end = text.find(|c: char| !c.is_ascii_digit());
        let (number, unit) = text.split_at(end.unwrap_or(text.len()));
        let number: u64 = number.parse().map_err(|_| TIME)?;
        let unit = match unit {
            "ms" => 1,
            "s" => 1_000,
            "m" => 60 * 1_000,
            "h" => 60 * 60 * 1_000,
            "d" => 24 * 60 * 60 * 1_000,
            _ => return Err(TIME),
        };
        let millis = number.checked_mul(unit).ok_or(TIME)?;
        Ok(Self(Duration::from_millis(millis)))
    }
}

/// A [`RestartGuard`]: `auto`, `off` or a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Deserialize),
    serde(try_from = "String")
)]
struct GuardTime(RestartGuard);

impl FromStr for GuardTime {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, &'static str> {
        Ok(Self(match text {
            "auto" => RestartGuard::Auto,
            "off" => RestartGuard::Off,
            time => {
                let Time(time) = time.parse().map_err(|_| GUARD)?;
                RestartGuard::For(time)
            }
        }))
    }
}

macro_rules! try_from_string {
    ($($type:ty)+) => {$(
        #[cfg(feature = "serde")]
        impl TryFrom<String> for $type {
            type Error = String;

            fn try_from(text: String) -> Result<Self, String> {
                text.parse().map_err(|remedy| format!("{text:?}: {remedy}"))
            }
        }
    )+};
}

try_from_string! { Time GuardTime }

/// The variables of an environment.
struct Vars<F>(F);

impl<F: Fn(&str) -> Option<OsString>> Vars<F> {
    /// Returns the value of a variable; `None` if it is not set.
    fn text(&self, name: &'static str) -> Result<Option<String>, BuildError> {
        let value = self.0(name).map(OsString::into_string).transpose();
        value.map_err(|_| BuildError::new(name, "not UTF-8", "correct it or unset it"))
    }

    fn read<T: FromStr>(
        &self,
        name: &'static str,
        remedy: &'static str,
    ) -> Result<Option<T>, BuildError> {
        let Some(text) = self.text(name)? else {
            return Ok(None);
        };
        let value = text.trim().parse();
        let value = value.map_err(|_| BuildError::new(name, shown(&text), remedy));
        value.map(Some)
    }

    fn urls(&self, name: &'static str) -> Result<Vec<ServerUrl>, BuildError> {
        let Some(text) = self.text(name)? else {
            return Ok(Vec::new());
        };
        let urls = text.split(',').map(str::trim);
        let urls: Vec<&str> = urls.filter(|url| !url.is_empty()).collect();
        if urls.is_empty() {
            let remedy = "list the URLs of all servers with commas between them, or unset it";
            return Err(BuildError::new(name, shown(""), remedy));
        }
        Ok(urls.into_iter().map(|url| ServerUrl(url.into())).collect())
    }
}

fn shown(text: &str) -> &str {
    if text.is_empty() { "empty" } else { text }
}

const TIME: &str = "use a whole number with a unit, such as `500ms`, `10s`, `5m`, `1h` or `7d`";
const GUARD: &str = "use `auto`, `off`, or a time such as `30s`";
const BOOL: &str = "use `true` or `false`";
const NUMBER: &str = "use a whole number";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lock::redlock::Redlock;

    fn read(vars: &[(&str, &str)]) -> Result<RedlockConfig, BuildError> {
        RedlockConfig::from_vars(|name| {
            let found = vars.iter().find(|(known, _)| *known == name);
            found.map(|(_, value)| OsString::from(value))
        })
    }

    fn built(config: RedlockConfig) -> String {
        format!("{:?}", RedlockBuilder::from(config))
    }

    #[test]
    fn every_variable_is_the_setting_of_its_name() {
        let secs = Duration::from_secs;
        let cases: [(&str, &str, RedlockBuilder); 15] = [
            (
                "REDLOCK_NAMESPACE",
                "shop",
                Redlock::builder().namespace("shop"),
            ),
            ("REDLOCK_TTL", "5s", Redlock::builder().ttl(secs(5))),
            (
                "REDLOCK_MAX_TTL",
                "1m",
                Redlock::builder().max_ttl(secs(60)),
            ),
            (
                "REDLOCK_NODE_TIMEOUT",
                "80ms",
                Redlock::builder().node_timeout(Duration::from_millis(80)),
            ),
            (
                "REDLOCK_CONNECT_TIMEOUT",
                "2s",
                Redlock::builder().connect_timeout(secs(2)),
            ),
            ("REDLOCK_WAIT", "0s", Redlock::builder().wait(secs(0))),
            (
                "REDLOCK_WAKE_UPS",
                "false",
                Redlock::builder().wake_ups(false),
            ),
            (
                "REDLOCK_POLL_INTERVAL",
                "1s",
                Redlock::builder().poll_interval(secs(1)),
            ),
            (
                "REDLOCK_MAX_HOLD",
                "1h",
                Redlock::builder().max_hold(secs(3_600)),
            ),
            ("REDLOCK_RENEW", "false", Redlock::builder().renew(false)),
            (
                "REDLOCK_FENCING",
                "false",
                Redlock::builder().fencing(false),
            ),
            (
                "REDLOCK_FENCE_RETENTION",
                "7d",
                Redlock::builder().fence_retention(secs(7 * 24 * 3_600)),
            ),
            (
                "REDLOCK_RESTART_GUARD",
                "off",
                Redlock::builder().restart_guard(RestartGuard::Off),
            ),
            (
                "REDLOCK_MAX_WAITERS",
                "7",
                Redlock::builder().max_waiters(7),
            ),
            (
                "REDLOCK_LOG_KEYS",
                "true",
                Redlock::builder().log_keys(true),
            ),
        ];
        let default = built(RedlockConfig::default());
        for (name, value, expected) in cases {
            let config = built(read(&[(name, value)]).unwrap());
            assert_eq!(config, format!("{expected:?}"), "{name}");
            assert_ne!(config, default, "{name}");
        }
        let guard = |text| read(&[("REDLOCK_RESTART_GUARD", text)]).map(built);
        let for_30_s = Redlock::builder().restart_guard(RestartGuard::For(secs(30)));
        assert_eq!(guard("30s"), Ok(format!("{for_30_s:?}")));
        assert_eq!(guard("auto"), Ok(default));
    }

    #[test]
    fn redlock_urls_are_listed_with_commas_and_shown_without_credentials() {
        let urls = "redis://app:hunter2@10.0.0.1, redis://10.0.0.2,";
        let config = read(&[("REDLOCK_URLS", urls), ("REDLOCK_PORT", "tcp://x")]).unwrap();
        let listed: Vec<&str> = config.urls().collect();
        assert_eq!(listed, ["redis://app:hunter2@10.0.0.1", "redis://10.0.0.2"]);
        let shown = format!("{config:?} {}", built(config.clone()));
        assert!(
            shown.contains("10.0.0.1") && !shown.contains("hunter2"),
            "{shown}"
        );
        let expected = Redlock::builder().urls(listed);
        assert_eq!(built(config), format!("{expected:?}"));
    }

    #[test]
    fn error_names_the_variable_its_value_and_the_remedy() {
        let error = |name, value| read(&[(name, value)]).unwrap_err().to_string();
        assert_eq!(
            error("REDLOCK_TTL", "10"),
            format!("`REDLOCK_TTL` is 10: {TIME}")
        );
        for time in ["", "s", "-1s", "1.5s", "1 s", "18446744073709551615d", "1w"] {
            assert!(
                error("REDLOCK_WAIT", time).contains("REDLOCK_WAIT"),
                "{time}"
            );
        }
        assert!(error("REDLOCK_FENCING", "yes").ends_with(BOOL));
        assert!(error("REDLOCK_RESTART_GUARD", "of").ends_with(GUARD));
        assert!(error("REDLOCK_MAX_WAITERS", "-1").ends_with(NUMBER));
        assert!(error("REDLOCK_URLS", " , ").starts_with("`REDLOCK_URLS` is empty: "));
        assert_eq!(
            built(read(&[("REDLOCK_NAMESPACE", "")]).unwrap()),
            format!("{:?}", Redlock::builder().namespace(""))
        );
    }

    #[test]
    fn build_checks_the_settings_together() {
        let refused = |vars: &[(&str, &str)]| {
            let built = RedlockBuilder::from(read(vars).unwrap()).build();
            built.unwrap_err().to_string()
        };
        assert!(refused(&[]).contains("there is no node"));
        let urls = ("REDLOCK_URLS", "redis://10.0.0.1");
        assert!(refused(&[urls, ("REDLOCK_MAX_TTL", "1s")]).contains("`max_ttl`"));
        assert!(refused(&[("REDLOCK_URLS", "10.0.0.1")]).starts_with("`url` is"));
    }

    #[cfg(feature = "serde")]
    #[test]
    fn config_is_deserialized_from_the_names_of_the_settings() {
        let json = r#"{
            "urls": ["redis://10.0.0.1"], "namespace": "shop", "ttl": "5s", "wake_ups": false,
            "restart_guard": "30s", "max_waiters": 7
        }"#;
        let config: RedlockConfig = serde_json::from_str(json).unwrap();
        let expected = read(&[
            ("REDLOCK_URLS", "redis://10.0.0.1"),
            ("REDLOCK_NAMESPACE", "shop"),
            ("REDLOCK_TTL", "5s"),
            ("REDLOCK_WAKE_UPS", "false"),
            ("REDLOCK_RESTART_GUARD", "30s"),
            ("REDLOCK_MAX_WAITERS", "7"),
        ]);
        assert_eq!(Ok(config), expected);
        let error = |json| {
            let read: Result<RedlockConfig, _> = serde_json::from_str(json);
            read.unwrap_err().to_string()
        };
        assert!(error(r#"{"ttll": "5s"}"#).contains("ttll"));
        assert!(error(r#"{"ttl": "5"}"#).contains(TIME));
    }
}
