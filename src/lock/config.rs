//! Settings as data: from environment variables or, with the feature `serde`, from a configuration file.

use std::env;
use std::ffi::OsString;
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use crate::lock::builder::{RedlockBuilder, RestartGuard};
use crate::lock::error::{BuildError, Variables, without_credentials};
use crate::lock::node_group::NodeGroup;

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
    serde(default, deny_unknown_fields)
)]
pub struct RedlockConfig {
    #[cfg_attr(feature = "serde", serde(deserialize_with = "deserialize::groups"))]
    urls: Vec<ServerGroup>,
    #[cfg_attr(feature = "serde", serde(deserialize_with = "deserialize::groups"))]
    moving_to: Vec<ServerGroup>,
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
        Self::from_vars(|name| env::var_os(name))
    }

    fn from_vars(var: impl Fn(&str) -> Option<OsString>) -> Result<Self, BuildError> {
        let vars = Vars(var);
        Ok(Self {
            urls: vars.groups("REDLOCK_URLS")?,
            moving_to: vars.groups("REDLOCK_MOVING_TO")?,
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

    /// Returns the URLs of the Redis servers, which may contain credentials, without those of groups that the service
    /// moves to.
    #[must_use]
    pub fn urls(&self) -> impl ExactSizeIterator<Item = &str> {
        let urls = self.urls.iter().flat_map(ServerGroup::urls);
        urls.collect::<Vec<_>>().into_iter()
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
        let nodes: &[&str] = match *self.urls {
            [] => &["nodes", "moving_to"],
            _ => &["url", "group", "moving_to"],
        };
        let nodes = nodes.iter().map(|name| (*name, None));
        Variables(times.chain(namespace).chain(nodes).collect())
    }
}

impl From<RedlockConfig> for RedlockBuilder {
    fn from(config: RedlockConfig) -> Self {
        let mut builder = match &*config.urls {
            [ServerGroup { name: None, .. }] => Self::default().urls(config.urls()),
            groups => groups
                .iter()
                .map(NodeGroup::from)
                .fold(Self::default(), Self::node_group),
        };
        if !config.moving_to.is_empty() {
            builder = builder.moving_to(&config.moving_to);
        }
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

/// The servers of a group, with its name if it is given.
#[derive(Debug, Clone)]
struct ServerGroup {
    name: Option<String>,
    urls: Vec<ServerUrl>,
}

impl ServerGroup {
    fn urls(&self) -> impl Iterator<Item = &str> {
        self.urls.iter().map(|url| &*url.0)
    }
}

impl From<&ServerGroup> for NodeGroup {
    fn from(group: &ServerGroup) -> Self {
        let nodes = Self::new().urls(group.urls());
        match &group.name {
            Some(name) => nodes.name(name),
            None => nodes,
        }
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

    fn groups(&self, name: &'static str) -> Result<Vec<ServerGroup>, BuildError> {
        let Some(text) = self.text(name)? else {
            return Ok(Vec::new());
        };
        parse_groups(&text).map_err(|problem| BuildError::new(name, problem, URLS))
    }
}

/// Splits the lists of URLs of several groups.
///
/// # Errors
///
/// Returns what is wrong with the text, without its content, which may contain credentials.
fn parse_groups(text: &str) -> Result<Vec<ServerGroup>, String> {
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

fn parse_group(text: &str) -> Result<ServerGroup, String> {
    // A URL may have an equals sign too.
    let head = text.split_once(":/").map_or(text, |(head, _)| head);
    let (name, urls) = match head.split_once('=') {
        Some((name, _)) => (Some(name.trim().to_owned()), &text[name.len() + 1..]),
        None => (None, text),
    };
    let urls = parse_urls(urls)?;
    Ok(ServerGroup { name, urls })
}

/// Splits a list of URLs.
///
/// A comma in a password would split it, and an error of `build` would show a part of it.
fn parse_urls(text: &str) -> Result<Vec<ServerUrl>, String> {
    let is_url = |part: &str| {
        let scheme = part.split_once(":/").map(|(scheme, _)| scheme);
        scheme.is_some_and(|scheme| scheme.chars().all(|c| c.is_ascii_alphabetic() || c == '+'))
    };
    let urls = parts(text, ',')?.into_iter().map(|url| match is_url(url) {
        true => Ok(ServerUrl(url.into())),
        false => Err(NO_URLS.to_owned()),
    });
    urls.collect()
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

fn shown(text: &str) -> &str {
    if text.is_empty() { "empty" } else { text }
}

const TIME: &str = "use a whole number with a unit, such as `500ms`, `10s`, `5m`, `1h` or `7d`";
const GUARD: &str = "use `auto`, `off`, or a time such as `30s`";
const BOOL: &str = "use `true` or `false`";
const NUMBER: &str = "use a whole number";
const URLS: &str = "list the URLs of all servers, such as `redis://10.0.0.1,redis://10.0.0.2`, with a semicolon between groups, and write a comma or semicolon in a password as `%2C` or `%3B`; or unset it";

/// The forms of settings in a configuration file.
#[cfg(feature = "serde")]
mod deserialize {
    use std::fmt;
    use std::marker::PhantomData;
    use std::str::FromStr;

    use serde::Deserialize;
    use serde::de::value::MapAccessDeserializer;
    use serde::de::{Deserializer, Error, MapAccess, SeqAccess, Visitor};

    use super::{GUARD, GuardTime, ServerGroup, ServerUrl, TIME, Time, parse_groups, parse_urls};

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

    /// Reads a list of URLs, a list of groups, or text as in the variable. No error shows the text, which may contain
    /// credentials.
    pub(super) fn groups<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<ServerGroup>, D::Error> {
        from.deserialize_any(Groups)
    }

    struct Groups;

    impl<'de> Visitor<'de> for Groups {
        type Value = Vec<ServerGroup>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a list of URLs or groups, or text with commas between URLs")
        }

        fn visit_str<E: Error>(self, text: &str) -> Result<Self::Value, E> {
            parse_groups(text).map_err(|problem| refused(&problem))
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Self::Value, A::Error> {
            let (mut urls, mut groups) = (Vec::new(), Vec::new());
            while let Some(entry) = list.next_element()? {
                match entry {
                    Entry::Url(url) => urls.push(url),
                    Entry::Group(group) => groups.push(group),
                }
            }
            match (urls.is_empty(), groups.is_empty()) {
                (true, _) => Ok(groups),
                (false, true) => Ok(vec![ServerGroup { name: None, urls }]),
                (false, false) => Err(A::Error::custom(
                    "a URL stands beside groups; put it into one",
                )),
            }
        }
    }

    /// An entry of a list of URLs or groups.
    enum Entry {
        Url(ServerUrl),
        Group(ServerGroup),
    }

    impl<'de> Deserialize<'de> for Entry {
        fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
            from.deserialize_any(EntryVisitor)
        }
    }

    struct EntryVisitor;

    impl<'de> Visitor<'de> for EntryVisitor {
        type Value = Entry;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a URL, a list of URLs, or a map with `name` and `urls`")
        }

        fn visit_str<E: Error>(self, text: &str) -> Result<Entry, E> {
            Ok(Entry::Url(ServerUrl(text.into())))
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Entry, A::Error> {
            let mut urls = Vec::new();
            while let Some(url) = list.next_element::<String>()? {
                urls.push(ServerUrl(url));
            }
            Ok(Entry::Group(ServerGroup { name: None, urls }))
        }

        fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Entry, A::Error> {
            let NamedUrls { name, urls } = NamedUrls::deserialize(MapAccessDeserializer::new(map))?;
            let urls = match urls {
                UrlList::List(urls) => urls.into_iter().map(ServerUrl).collect(),
                UrlList::Text(text) => parse_urls(&text).map_err(|problem| refused(&problem))?,
            };
            Ok(Entry::Group(ServerGroup { name, urls }))
        }
    }

    /// A group with its name.
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct NamedUrls {
        name: Option<String>,
        urls: UrlList,
    }

    #[derive(Deserialize)]
    #[serde(untagged)]
    enum UrlList {
        List(Vec<String>),
        Text(String),
    }

    fn refused<E: Error>(problem: &str) -> E {
        E::custom(format_args!("`urls` is {problem}"))
    }
}

#[cfg(test)]
mod tests;
