//! Tests of settings as data.

use super::*;
#[cfg(feature = "redis")]
use crate::lock::error::without_credentials;
use crate::lock::redlock::Redlock;

fn read(vars: &[(&str, &str)]) -> Result<RedlockConfig, BuildError> {
    config_from_vars(|name| {
        let found = vars.iter().find(|(known, _)| *known == name);
        found.map(|(_, value)| OsString::from(value))
    })
}

/// The settings of the builder, regardless of where they were read from.
fn built(config: RedlockConfig) -> String {
    let mut builder = RedlockBuilder::from(config);
    builder.variables.clear();
    format!("{builder:?}")
}

#[test]
fn every_variable_is_the_setting_of_its_name() {
    let secs = Duration::from_secs;
    let cases: [(&str, &str, RedlockBuilder); 13] = [
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
            "REDLOCK_MAX_HOLD",
            "1h 30m",
            Redlock::builder().max_hold(secs(5_400)),
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
    let urls = "redis://app:hunter2@10.0.0.1, redis://10.0.0.2";
    let config = read(&[("REDLOCK_URLS", urls), ("REDLOCK_PORT", "tcp://x")]).unwrap();
    let listed = config.urls();
    assert_eq!(listed, ["redis://app:hunter2@10.0.0.1", "redis://10.0.0.2"]);
    let shown = format!("{config:?} {}", built(config.clone()));
    assert!(
        shown.contains("10.0.0.1") && !shown.contains("hunter2"),
        "{shown}"
    );
    let expected = Redlock::builder().urls(listed);
    assert_eq!(built(config), format!("{expected:?}"));
}

#[cfg(feature = "redis")]
#[test]
fn text_that_is_no_url_is_shown_without_what_may_be_credentials() {
    for (url, shown) in [
        ("redis://u:p@host?db=1", "redis://***@host"),
        ("redis://u:p@host", "redis://***@host"),
        ("redis://host?password=p", "redis://host"),
        ("u:p@host", "***@host"),
        ("redis://u:p?q@host", "redis://***"),
        ("redis://u:p@q@host", "redis://***@host"),
    ] {
        assert_eq!(without_credentials(url), shown);
    }
}

#[test]
fn error_names_the_variable_its_value_and_the_remedy() {
    let error = |name, value| read(&[(name, value)]).unwrap_err().to_string();
    assert_eq!(
        error("REDLOCK_TTL", "10"),
        format!("`REDLOCK_TTL` is 10: {}", Duration::FORM)
    );
    for time in ["", "s", "-1s", "5 sheep", "18446744073709551615d"] {
        let shown = if time.is_empty() { "empty" } else { time };
        let expected = format!("`REDLOCK_WAIT` is {shown}: {}", Duration::FORM);
        assert_eq!(error("REDLOCK_WAIT", time), expected);
    }
    assert!(error("REDLOCK_FENCING", "yes").ends_with(bool::FORM));
    assert!(error("REDLOCK_RESTART_GUARD", "of").ends_with(RestartGuard::FORM));
    assert!(error("REDLOCK_MAX_WAITERS", "-1").ends_with(usize::FORM));
    assert!(error("REDLOCK_URLS", " ").starts_with("`REDLOCK_URLS` is empty: "));
    for (urls, part) in [
        (",", "part 1 of 2 between `,`"),
        ("redis://a,redis://b,", "part 3 of 3 between `,`"),
        ("redis://a,,redis://b", "part 2 of 3 between `,`"),
        ("redis://a; ;redis://c", "part 2 of 3 between `;`"),
        ("redis://a;redis://b;", "part 3 of 3 between `;`"),
        ("a=redis://a;b=", "part 2 of 2 between `;`"),
        (
            "a=redis://a;b=redis://b,",
            "part 2 of 2 between `,`, in part 2 of 2 between `;`",
        ),
    ] {
        for name in ["REDLOCK_URLS", "REDLOCK_MOVING_TO"] {
            let error = error(name, urls);
            let expected = format!("`{name}` is empty");
            assert!(
                error.starts_with(&expected) && error.ends_with(URLS),
                "{error}"
            );
            assert!(error.contains(part), "{error}");
        }
    }
    for urls in ["10.0.0.1", "redis://a:hunter,2@h", "redis://a,:2:/@h"] {
        let expected = format!("`REDLOCK_URLS` is not a list of URLs: {URLS}");
        assert_eq!(error("REDLOCK_URLS", urls), expected);
    }
    assert_eq!(
        built(read(&[("REDLOCK_NAMESPACE", "")]).unwrap()),
        format!("{:?}", Redlock::builder().namespace(""))
    );
}

#[test]
fn error_of_build_names_the_variable() {
    let error = |vars: &[(&str, &str)]| RedlockBuilder::from(read(vars).unwrap()).build();
    let error = |vars: &[(&str, &str)]| error(vars).unwrap_err().to_string();
    let missing = "`REDLOCK_URLS` is not set: there is no node; add `url`, ";
    assert!(error(&[]).starts_with(missing), "{}", error(&[]));
    let url = ("REDLOCK_URLS", "redis://10.0.0.1");
    for (name, value, shown) in [
        ("REDLOCK_NAMESPACE", "{", "{"),
        ("REDLOCK_TTL", "1ms", "1ms"),
        ("REDLOCK_MAX_TTL", "9s", "9s"),
        ("REDLOCK_NODE_TIMEOUT", "0s", "0ns"),
        ("REDLOCK_CONNECT_TIMEOUT", "0s", "0ns"),
        ("REDLOCK_MAX_HOLD", "0s", "0ns"),
        ("REDLOCK_FENCE_RETENTION", "1s", "1s"),
        ("REDLOCK_RESTART_GUARD", "10s", "10s"),
    ] {
        let error = error(&[url, (name, value)]);
        assert!(
            error.starts_with(&format!("`{name}` is {shown}: ")),
            "{error}"
        );
    }
    for urls in ["redis://a,redis://a", "http://a"] {
        let error = error(&[("REDLOCK_URLS", urls)]);
        assert!(error.starts_with("`REDLOCK_URLS` is "), "{error}");
    }
}

#[test]
fn error_of_build_names_the_setting_that_code_or_a_file_chose() {
    let config = read(&[("REDLOCK_URLS", "redis://a"), ("REDLOCK_MAX_TTL", "9s")]).unwrap();
    let error = |builder: RedlockBuilder| builder.build().unwrap_err().setting().to_owned();
    let overridden = RedlockBuilder::from(config.clone()).max_ttl(Duration::from_secs(8));
    assert_eq!(error(overridden), "max_ttl");
    let not_set = RedlockBuilder::from(config.clone()).node_timeout(Duration::ZERO);
    assert_eq!(
        error(not_set.max_ttl(Duration::from_secs(10))),
        "node_timeout"
    );
    let mut from_file = config;
    from_file.0.variables.clear();
    assert_eq!(error(from_file.into()), "max_ttl");
    assert_eq!(error(RedlockConfig::default().into()), "nodes");
}

#[cfg(feature = "serde")]
#[test]
fn config_is_deserialized_from_the_names_of_the_settings() {
    let json = r#"{
        "urls": ["redis://10.0.0.1"], "namespace": "shop", "ttl": "5s", "renew": false,
        "restart_guard": "30s", "max_waiters": 7
    }"#;
    let parse = |json: &str| serde_json::from_str::<RedlockConfig>(json);
    let expected = read(&[
        ("REDLOCK_URLS", "redis://10.0.0.1"),
        ("REDLOCK_NAMESPACE", "shop"),
        ("REDLOCK_TTL", "5s"),
        ("REDLOCK_RENEW", "false"),
        ("REDLOCK_RESTART_GUARD", "30s"),
        ("REDLOCK_MAX_WAITERS", "7"),
    ]);
    assert_eq!(built(parse(json).unwrap()), built(expected.unwrap()));
    let text = parse(r#"{"urls": "redis://10.0.0.1, redis://10.0.0.2"}"#).unwrap();
    let listed = text.urls();
    assert_eq!(listed, ["redis://10.0.0.1", "redis://10.0.0.2"]);

    let error = |json| parse(json).unwrap_err().to_string();
    assert!(error(r#"{"ttll": "5s"}"#).contains("ttll"));
    assert!(error(r#"{"is_from_env": true}"#).contains("is_from_env"));
    assert!(error(r#"{"ttl": "5"}"#).contains(Duration::FORM));
    assert!(error(r#"{"ttl": 5}"#).contains(Duration::FORM));
    assert!(error(r#"{"restart_guard": false}"#).contains(RestartGuard::FORM));
    assert!(error(r#"{"fencing": "true"}"#).contains(bool::FORM));
    assert!(error(r#"{"max_waiters": -1}"#).contains(usize::FORM));
    assert!(error(r#"{"ttl": "5s", "ttl": "6s"}"#).contains("duplicate"));
    assert_eq!(
        built(parse(r#"{"ttl": null}"#).unwrap()),
        built(RedlockConfig::default())
    );
    let error = error(r#"{"urls": "redis://app:hunter,2@10.0.0.1"}"#);
    assert!(
        error.contains("`urls`") && !error.contains("hunter"),
        "{error}"
    );
}

#[test]
fn groups_have_semicolons_between_them_and_perhaps_names() {
    let (first, second) = (["redis://a1", "redis://a2"], ["redis://b1"]);
    let text = "redis://a1,redis://a2;redis://b1";
    let config = read(&[("REDLOCK_URLS", text)]).unwrap();
    assert_eq!(config.urls(), ["redis://a1", "redis://a2", "redis://b1"]);
    let expected = Redlock::builder().group(first).group(second);
    assert_eq!(built(config), format!("{expected:?}"));

    let named = "north = redis://a1?x=1, redis://a2 ; south=redis://:p=w@b1";
    let config = read(&[
        ("REDLOCK_URLS", "redis://a1?x=1,redis://a2"),
        ("REDLOCK_MOVING_TO", named),
    ]);
    let expected = Redlock::builder()
        .urls(["redis://a1?x=1", "redis://a2"])
        .moving_to([
            NodeGroup::new()
                .name("north")
                .urls(["redis://a1?x=1", "redis://a2"]),
            NodeGroup::new().name("south").urls(["redis://:p=w@b1"]),
        ]);
    assert_eq!(built(config.unwrap()), format!("{expected:?}"));
    let one = read(&[("REDLOCK_URLS", "eu=redis://a1")]).unwrap();
    let expected = Redlock::builder().named_group("eu", ["redis://a1"]);
    assert_eq!(built(one), format!("{expected:?}"));

    for (text, part) in [
        ("redis://a;b", ", in part 2 of 2 between `;`"),
        ("eu=a=redis://b;x", ", in part 1 of 2 between `;`"),
        ("redis://a:hunter;2@h", ", in part 2 of 2 between `;`"),
        ("eu=a=redis://b", ""),
    ] {
        let error = read(&[("REDLOCK_MOVING_TO", text)])
            .unwrap_err()
            .to_string();
        assert_eq!(
            error,
            format!("`REDLOCK_MOVING_TO` is not a list of URLs{part}: {URLS}")
        );
    }
}

#[test]
fn error_of_build_names_the_variable_of_the_groups() {
    let error = |vars: &[(&str, &str)]| RedlockBuilder::from(read(vars).unwrap()).build();
    let error = |vars: &[(&str, &str)]| error(vars).unwrap_err().setting().to_owned();
    let urls = |text| ("REDLOCK_URLS", text);
    assert_eq!(error(&[urls("a=redis://a;a=redis://b")]), "REDLOCK_URLS");
    assert_eq!(error(&[urls("redis://a;redis://a")]), "REDLOCK_URLS");
    for moving_to in [
        "redis://b",
        "redis://a;redis://a",
        "redis://a;http://b",
        "x=redis://a",
    ] {
        let moving_to = ("REDLOCK_MOVING_TO", moving_to);
        assert_eq!(error(&[urls("redis://a"), moving_to]), "REDLOCK_MOVING_TO");
    }
}

#[cfg(feature = "serde")]
#[test]
fn groups_are_deserialized_as_lists_or_with_names() {
    let parse = |json: &str| serde_json::from_str::<RedlockConfig>(json);
    let json = r#"{
        "urls": [["redis://a1", "redis://a2"], ["redis://b1"]],
        "moving_to": [{"name": "0", "urls": ["redis://a1", "redis://a2"]}, {"urls": "redis://b1"}]
    }"#;
    let expected = Redlock::builder()
        .group(["redis://a1", "redis://a2"])
        .group(["redis://b1"])
        .moving_to([
            NodeGroup::new()
                .name("0")
                .urls(["redis://a1", "redis://a2"]),
            NodeGroup::new().urls(["redis://b1"]),
        ]);
    assert_eq!(built(parse(json).unwrap()), format!("{expected:?}"));
    for (json, part) in [
        (
            r#"{"urls": ["redis://a:hunter2@h", ["redis://b"]]}"#,
            "beside groups",
        ),
        (r#"{"urls": [{"name": "a", "urls": "hunter2"}]}"#, "`urls`"),
        (
            r#"{"urls": [{"names": "a", "urls": ["redis://hunter2"]}]}"#,
            "names",
        ),
        (r#"{"urls": [7]}"#, "a URL, a list of URLs"),
    ] {
        let error = parse(json).unwrap_err().to_string();
        assert!(
            error.contains(part) && !error.contains("hunter2"),
            "{error}"
        );
    }
}
