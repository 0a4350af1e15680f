//! Settings as data: from environment variables or, with the feature `serde`, from a configuration file.

use std::env;
use std::ffi::OsString;
use std::time::Duration;

use serde_json::Value;

use crate::lock::builder::RedlockBuilder;
use crate::lock::error::BuildError;
use crate::lock::node_group::NodeGroup;
use crate::lock::settings::{RestartGuard, settings};

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
///     if config.urls().is_empty() {
///         return Ok(Redlock::in_memory(3));
///     }
///     RedlockBuilder::from(config).build()
/// }
/// # redlock()?;
/// # Ok::<(), BuildError>(())
/// ```
///
/// Times have a unit, as the crate `humantime` reads them: `500ms`, `10s`, `5m`, `1h 30m` or `7d`. The settings are those
/// of the builder but for its [`retry`](RedlockBuilder::retry), its pools, and its embedded nodes.
///
/// # In a configuration file
///
/// With the feature `serde`, it can be deserialized, as a part of the program's own configuration. `urls` is a list, or
/// text with commas as in the variable; of several groups, it is a list of lists, or of maps with the fields `name` and
/// `urls`. Names that are no settings are errors:
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
    serde(try_from = "Fields")
)]
pub struct RedlockConfig(RedlockBuilder);

impl RedlockConfig {
    /// Reads the environment: `REDLOCK_URLS`, the URLs with commas between them, and for each other setting a variable
    /// with its name, such as `REDLOCK_NAMESPACE`, `REDLOCK_MAX_TTL=10s` or `REDLOCK_RESTART_GUARD=off`.
    ///
    /// Several [groups](RedlockBuilder::group) have a semicolon between them, and a name with an equals sign before the
    /// URLs, if they have one: `north=redis://10.0.0.1,redis://10.0.0.2,redis://10.0.0.3;south=redis://10.0.1.1`.
    /// `REDLOCK_MOVING_TO` has the groups that the service [moves to](RedlockBuilder::moving_to) in the same form. An empty
    /// part of a list, also behind its last comma or semicolon, is an error: it is what an unset variable leaves behind.
    ///
    /// Other variables that begin like these are ignored, because a container platform may set some.
    ///
    /// # Errors
    ///
    /// Returns a [`BuildError`] that names the variable if its value cannot be read, or is empty. An empty
    /// `REDLOCK_NAMESPACE` is the empty namespace.
    pub fn from_env() -> Result<Self, BuildError> {
        config_from_vars(|name| env::var_os(name))
    }

    /// Returns the URLs of the Redis servers, which may contain credentials, without those of groups that the service
    /// moves to.
    #[must_use]
    pub fn urls(&self) -> Vec<&str> {
        let groups = [&self.0.nodes].into_iter().chain(&self.0.groups);
        groups.flat_map(NodeGroup::listed_urls).collect()
    }
}

/// Reads the settings from variables.
///
/// # Errors
///
/// As [`RedlockConfig::from_env`].
#[allow(unreachable_pub, reason = "a fuzz target calls it")]
pub fn config_from_vars(
    var: impl Fn(&str) -> Option<OsString>,
) -> Result<RedlockConfig, BuildError> {
    let mut config = RedlockConfig::default();
    for name in NAMES {
        let Some(text) = var(&format!("REDLOCK_{}", name.to_ascii_uppercase())) else {
            continue;
        };
        config.0.variables.push(name);
        let not_text = |_| BuildError::new(name, "not UTF-8", "correct it or unset it");
        let read = text.into_string().map_err(not_text).and_then(|text| {
            let value = match *name {
                "urls" | "moving_to" | "namespace" | "holder" => text.into(),
                _ => value_of(text.trim()),
            };
            config.set(name, value)
        });
        read.map_err(|error| error.name_variable(&[name]))?;
    }
    let names: &[_] = match config.0.variables.contains(&"urls") {
        true => &["url", "group"],
        false => &["nodes"],
    };
    config.0.variables.extend(names);
    Ok(config)
}

macro_rules! fields {
    ($($name:ident)+) => {
        /// The names of all settings that are data.
        const NAMES: &[&str] = &[$(stringify!($name)),+];

        /// A configuration file.
        #[cfg(feature = "serde")]
        #[derive(Default, serde::Deserialize)]
        #[serde(default, deny_unknown_fields)]
        struct Fields {
            $($name: Value,)+
        }

        #[cfg(feature = "serde")]
        impl TryFrom<Fields> for RedlockConfig {
            type Error = BuildError;

            fn try_from(fields: Fields) -> Result<Self, BuildError> {
                let mut config = Self::default();
                $(config.set(stringify!($name), fields.$name)?;)+
                Ok(config)
            }
        }
    };
}

macro_rules! read {
    ($($(#[$doc:meta])+ $name:ident: $type:ty $(as $optional:ty)? = $default:expr;)+) => {
        fields! { urls moving_to namespace holder $($name)+ }

        impl RedlockConfig {
            fn set(&mut self, name: &'static str, value: Value) -> Result<(), BuildError> {
                let Self(builder) = self;
                let refuse = |problem: String| BuildError::new(name, problem, URLS);
                match (name, value) {
                    (_, Value::Null) => {}
                    ("urls", value) => {
                        builder.groups = groups(value).map_err(refuse)?;
                        if let [NodeGroup { name: None, .. }] = &*builder.groups {
                            builder.nodes = builder.groups.remove(0);
                        }
                    }
                    ("moving_to", value) => {
                        let groups = groups(value).map_err(refuse)?;
                        builder.moving_to = Some(groups).filter(|groups| !groups.is_empty());
                    }
                    ("namespace", Value::String(namespace)) => builder.namespace = Some(namespace),
                    ("holder", Value::String(holder)) => {
                        builder.settings.holder = Some(holder.into());
                    }
                    $((stringify!($name), value) => {
                        let read = <$type>::from_value(&value).ok_or_else(|| {
                            BuildError::new(name, shown(&value), <$type>::FORM)
                        })?;
                        builder.settings.$name = read.into();
                    })+
                    (_, value) => return Err(BuildError::new(name, shown(&value), "use text")),
                }
                Ok(())
            }
        }
    };
}

settings!(read);

impl From<RedlockConfig> for RedlockBuilder {
    fn from(config: RedlockConfig) -> Self {
        config.0
    }
}

/// Reads the value of an environment variable.
fn value_of(text: &str) -> Value {
    match (text.parse::<bool>(), text.parse::<u64>()) {
        (Ok(value), _) => value.into(),
        (_, Ok(value)) => value.into(),
        _ => text.into(),
    }
}

/// Returns the text for an error about a value.
fn shown(value: &Value) -> String {
    match value {
        Value::String(text) if text.is_empty() => "empty".to_owned(),
        Value::String(text) => text.clone(),
        Value::Bool(_) | Value::Number(_) => value.to_string(),
        _ => "of another type".to_owned(),
    }
}

/// The type of a setting that is data.
trait FromValue: Sized {
    /// What its values look like.
    const FORM: &str;

    fn from_value(value: &Value) -> Option<Self>;
}

impl FromValue for Duration {
    const FORM: &str = "use a number with a unit, such as `500ms`, `10s`, `5m`, `1h` or `7d`";

    fn from_value(value: &Value) -> Option<Self> {
        humantime::parse_duration(value.as_str()?).ok()
    }
}

impl FromValue for RestartGuard {
    const FORM: &str = "use `auto`, `off`, or a time such as `30s`";

    fn from_value(value: &Value) -> Option<Self> {
        match value.as_str()? {
            "auto" => Some(Self::Auto),
            "off" => Some(Self::Off),
            _ => Duration::from_value(value).map(Self::For),
        }
    }
}

impl FromValue for bool {
    const FORM: &str = "use `true` or `false`";

    fn from_value(value: &Value) -> Option<Self> {
        value.as_bool()
    }
}

impl FromValue for usize {
    const FORM: &str = "use a whole number";

    fn from_value(value: &Value) -> Option<Self> {
        value.as_u64()?.try_into().ok()
    }
}

/// Reads a list of URLs, a list of groups, or text with both.
///
/// # Errors
///
/// Returns what is wrong with it, without its content, which may contain credentials.
fn groups(value: Value) -> Result<Vec<NodeGroup>, String> {
    let is_text = |entry: &Value| matches!(entry, Value::String(_));
    match value {
        Value::String(text) => parse_groups(&text),
        Value::Array(urls) if !urls.is_empty() && urls.iter().all(is_text) => {
            group(Value::Array(urls)).map(|group| vec![group])
        }
        Value::Array(entries) => entries.into_iter().map(group).collect(),
        _ => Err("not a list of URLs or groups, or text with commas between URLs".to_owned()),
    }
}

fn group(value: Value) -> Result<NodeGroup, String> {
    match value {
        Value::String(_) => Err("a URL beside groups; put it into one".to_owned()),
        Value::Array(urls) => {
            let urls = urls.into_iter().map(|url| match url {
                Value::String(url) => Ok(url),
                _ => Err(NO_URLS.to_owned()),
            });
            Ok(NodeGroup::new().urls(urls.collect::<Result<Vec<_>, _>>()?))
        }
        Value::Object(mut fields) => {
            let nodes = match fields.remove("urls") {
                Some(Value::String(urls)) => parse_urls(&urls)?,
                Some(urls @ Value::Array(_)) => group(urls)?,
                _ => return Err("a group without `urls`".to_owned()),
            };
            match (fields.remove("name"), fields.keys().next()) {
                (_, Some(field)) => Err(format!("a group with a field `{field}`")),
                (None | Some(Value::Null), None) => Ok(nodes),
                (Some(Value::String(name)), None) => Ok(nodes.name(name)),
                _ => Err("a group whose name is no text".to_owned()),
            }
        }
        _ => Err("not a URL, a list of URLs, or a map with `name` and `urls`".to_owned()),
    }
}

/// Splits the lists of URLs of several groups.
///
/// # Errors
///
/// Returns what is wrong with the text, without its content, which may contain credentials.
fn parse_groups(text: &str) -> Result<Vec<NodeGroup>, String> {
    let groups = parts(text, ';')?;
    let count = groups.len();
    let groups = groups.into_iter().enumerate();
    let groups = groups.map(|(part, group)| match parse_group(group) {
        Err(problem) if count > 1 => Err(format!(
            "{problem}, in part {} of {count} between `;`",
            part + 1
        )),
        parsed => parsed,
    });
    groups.collect()
}

fn parse_group(text: &str) -> Result<NodeGroup, String> {
    // A URL may have an equals sign too.
    let head = text.split_once(":/").map_or(text, |(head, _)| head);
    match head.split_once('=') {
        Some((name, _)) => Ok(parse_urls(&text[name.len() + 1..])?.name(name.trim())),
        None => parse_urls(text),
    }
}

/// Splits a list of URLs.
///
/// A comma in a password would split it, and an error of `build` would show a part of it.
fn parse_urls(text: &str) -> Result<NodeGroup, String> {
    let is_url = |part: &str| {
        let scheme = part.split_once(":/").map(|(scheme, _)| scheme);
        scheme.is_some_and(|scheme| scheme.chars().all(|c| c.is_ascii_alphabetic() || c == '+'))
    };
    let urls = parts(text, ',')?;
    match urls.iter().all(|url| is_url(url)) {
        true => Ok(NodeGroup::new().urls(urls)),
        false => Err(NO_URLS.to_owned()),
    }
}

/// Splits text at a separator. An empty part is an error: it is what an unset variable leaves of a template, and without it
/// the groups behind it would have other names, or a majority fewer nodes.
fn parts(text: &str, separator: char) -> Result<Vec<&str>, String> {
    let parts: Vec<&str> = text.split(separator).map(str::trim).collect();
    match parts.iter().position(|part| part.is_empty()) {
        None => Ok(parts),
        Some(_) if parts.len() == 1 => Err("empty".to_owned()),
        Some(empty) => Err(format!(
            "empty in part {} of {} between `{separator}`",
            empty + 1,
            parts.len()
        )),
    }
}

/// What is wrong with a list that has something else than URLs.
const NO_URLS: &str = "not a list of URLs";

const URLS: &str = "list the URLs of all servers, such as `redis://10.0.0.1,redis://10.0.0.2`, with a semicolon between groups, and write a comma or semicolon in a password as `%2C` or `%3B`; or unset it";

#[cfg(test)]
mod tests;
