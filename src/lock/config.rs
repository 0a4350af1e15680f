//! Settings as data: from environment variables or, with the feature `serde`, from a configuration file.

use std::env;
use std::ffi::OsString;
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use crate::lock::builder::{RedlockBuilder, RestartGuard};
use crate::lock::error::{BuildError, Variables, without_credentials};

/// Settings of a [`RedlockBuilder`] as data: from the environment ([`from_env`](Self::from_env)) or, with the feature
/// `serde`, from a configuration file.
///
/// A setting that is not named has the default of the builder. The builder takes further settings, and checks all of them
/// together in [`build`](RedlockBuilder::build), whose error names the variable if the value came from one:
///
/// ```
/// use tower_redlock::{BuildError, Redlock, RedlockBuilder, RedlockConfig};
///
/// /// Uses the Redis servers in `REDLOCK_URLS`; in development, nodes inside the process.
/// fn redlock() -> Result<Redlock, BuildError> {
///     let config = RedlockConfig::from_env()?;
///     if config.urls().len() == 0 {
///         return Ok(Redlock::in_memory(3));
///     }
///     RedlockBuilder::from(config).build()
/// }
/// # redlock()?;
/// # Ok::<(), BuildError>(())
/// ```
///
/// Times are whole numbers with a unit: `500ms`, `10s`, `5m`, `1h` or `7d`. The settings are those of the builder but
/// for its [`retry`](RedlockBuilder::retry), its pools, and its embedded nodes.
///
/// # In a configuration file
///
/// With the feature `serde`, it can be deserialized, as a part of the program's own configuration. `urls` is a list, or
/// text with commas as in the variable. Names that are no settings are errors:
///
#[cfg_attr(feature = "serde", doc = "```")]
#[cfg_attr(not(feature = "serde"), doc = "```ignore")]
/// use serde::Deserialize;
/// use tower_redlock::{Redlock, RedlockBuilder, RedlockConfig};
///
/// #[derive(Deserialize)]
/// struct Config {
///     listen: String,
///     locks: RedlockConfig,
/// }
///
/// let file = r#"{
///     "listen": "0.0.0.0:3000",
///     "locks": {
///         "urls": ["redis://10.0.0.1", "redis://10.0.0.2", "redis://10.0.0.3"],
///         "ttl": "5s",
///         "restart_guard": "off"
///     }
/// }"#;
/// let config: Config = serde_json::from_str(file)?;
/// let redlock: Redlock = RedlockBuilder::from(config.locks).build()?;
/// # let _ = config.listen;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Default)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Deserialize),
    serde(default, deny_unknown_fields)
)]
pub struct RedlockConfig {
    #[cfg_attr(
        feature = "serde",
        serde(deserialize_with = "deserialize::server_urls")
    )]
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
    #[cfg_attr(feature = "serde", serde(skip))]
    is_from_env: bool,
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
            is_from_env: true,
        })
    }

    /// Returns the URLs of the Redis servers, which may contain credentials.
    #[must_use]
    pub fn urls(&self) -> impl ExactSizeIterator<Item = &str> {
        self.urls.iter().map(|url| &*url.0)
    }

    /// Returns the settings that errors of the builder may name, with the values that they show.
    fn variables(&self) -> Variables {
        let guard = match self.restart_guard {
            Some(GuardTime(RestartGuard::For(time))) => Some(Time(time)),
            _ => None,
        };
        let times = [
            ("ttl", self.ttl),
            ("max_ttl", self.max_ttl),
            ("node_timeout", self.node_timeout),
            ("connect_timeout", self.connect_timeout),
            ("max_hold", self.max_hold),
            ("fence_retention", self.fence_retention),
            ("restart_guard", guard),
        ];
        let times = times.into_iter();
        let times = times.filter_map(|(name, time)| Some((name, Some(format!("{:?}", time?.0)))));
        let namespace = self.namespace.clone();
        let namespace = namespace.map(|namespace| ("namespace", Some(namespace)));
        let nodes = if self.urls.is_empty() { "nodes" } else { "url" };
        Variables(times.chain(namespace).chain([(nodes, None)]).collect())
    }
}

impl From<RedlockConfig> for RedlockBuilder {
    fn from(config: RedlockConfig) -> Self {
        let mut builder = Self::default().urls(config.urls());
        if config.is_from_env {
            builder.variables = config.variables();
        }
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
#[derive(Clone)]
struct ServerUrl(String);

/// Shows no credentials.
impl fmt::Debug for ServerUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&without_credentials(&self.0))
    }
}

/// A time with a unit.
#[derive(Debug, Clone, Copy)]
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
#[derive(Debug, Clone, Copy)]
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
        if text.trim().is_empty() {
            return Err(BuildError::new(name, "empty", URLS));
        }
        // The value may contain credentials, also in parts that are no URLs.
        parse_urls(&text).ok_or_else(|| BuildError::new(name, "not a list of URLs", URLS))
    }
}

/// Splits a list of URLs; `None` if a part of it is not a URL.
///
/// A comma in a password would split it, and an error of `build` would show a part of it.
fn parse_urls(text: &str) -> Option<Vec<ServerUrl>> {
    let parts = text.split(',').map(str::trim);
    let parts: Vec<&str> = parts.filter(|part| !part.is_empty()).collect();
    let is_url = |part: &&str| {
        let scheme = part.split_once(":/").map(|(scheme, _)| scheme);
        scheme.is_some_and(|scheme| scheme.chars().all(|c| c.is_ascii_alphabetic() || c == '+'))
    };
    let is_list = !parts.is_empty() && parts.iter().all(is_url);
    is_list.then(|| parts.into_iter().map(|url| ServerUrl(url.into())).collect())
}

fn shown(text: &str) -> &str {
    if text.is_empty() { "empty" } else { text }
}

const TIME: &str = "use a whole number with a unit, such as `500ms`, `10s`, `5m`, `1h` or `7d`";
const GUARD: &str = "use `auto`, `off`, or a time such as `30s`";
const BOOL: &str = "use `true` or `false`";
const NUMBER: &str = "use a whole number";
const URLS: &str = "list the URLs of all servers, such as `redis://10.0.0.1,redis://10.0.0.2`, and write a comma in a password as `%2C`; or unset it";

/// The forms of settings in a configuration file.
#[cfg(feature = "serde")]
mod deserialize {
    use std::fmt;
    use std::marker::PhantomData;
    use std::str::FromStr;

    use serde::de::{Deserialize, Deserializer, Error, SeqAccess, Visitor};

    use super::{GUARD, GuardTime, ServerUrl, TIME, Time, parse_urls};

    /// Parses text, and says what is expected also if there is a number.
    struct Parse<T>(&'static str, PhantomData<T>);

    impl<T: FromStr<Err = &'static str>> Visitor<'_> for Parse<T> {
        type Value = T;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            write!(f, "text; {}", self.0)
        }

        fn visit_str<E: Error>(self, text: &str) -> Result<T, E> {
            text.parse()
                .map_err(|remedy| E::custom(format_args!("{text:?}: {remedy}")))
        }
    }

    impl<'de> Deserialize<'de> for Time {
        fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
            from.deserialize_str(Parse(TIME, PhantomData))
        }
    }

    impl<'de> Deserialize<'de> for GuardTime {
        fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
            from.deserialize_str(Parse(GUARD, PhantomData))
        }
    }

    /// Reads a list, or text with commas. No error shows the text, which may contain credentials.
    pub(super) fn server_urls<'de, D: Deserializer<'de>>(
        from: D,
    ) -> Result<Vec<ServerUrl>, D::Error> {
        from.deserialize_any(Urls)
    }

    struct Urls;

    impl<'de> Visitor<'de> for Urls {
        type Value = Vec<ServerUrl>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a list of URLs, or text with commas between them")
        }

        fn visit_str<E: Error>(self, text: &str) -> Result<Self::Value, E> {
            parse_urls(text).ok_or_else(|| E::custom("`urls` is not a list of URLs"))
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Self::Value, A::Error> {
            let mut urls = Vec::new();
            while let Some(url) = list.next_element()? {
                urls.push(ServerUrl(url));
            }
            Ok(urls)
        }
    }
}

#[cfg(test)]
mod tests;
