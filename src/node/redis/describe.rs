//! Errors of servers and of redis-rs as one line of text with the remedy. No text has a URL or credentials.

use std::any::Any;
use std::sync::Arc;
use std::time::Duration;

use deadpool_redis::redis::{RedisError, Value};

/// Describes an error of redis-rs.
pub(super) fn describe(error: &RedisError) -> String {
    with_remedy(error.to_string())
}

/// Describes the refusal of `AUTH`, if it was refused. A server that does not know the command repeats its arguments.
pub(super) fn describe_auth(reply: &Value) -> Option<Arc<str>> {
    let (code, details) = refusal(reply)?;
    let has_no_arguments = ["WRONGPASS", "NOPERM", "NOAUTH"].contains(&code);
    match has_no_arguments || details.starts_with(TOO_MANY) {
        true => describe_refusal(reply),
        false => Some(format!("AUTH was refused ({code}); {WRONG_LOGIN}").into()),
    }
}

/// Returns whether a server refused credentials because they are wrong, or no longer right.
pub(super) fn is_wrong_login(reply: &Value) -> bool {
    refusal(reply).is_some_and(|(code, _)| ["WRONGPASS", "NOAUTH"].contains(&code))
}

/// Describes the error that a server replied with, if it did.
pub(super) fn describe_refusal(reply: &Value) -> Option<Arc<str>> {
    let (code, details) = refusal(reply)?;
    Some(with_remedy(format!("{code} {details}")).into())
}

/// Returns the code and the text of the error that a server replied with, if it did.
fn refusal(reply: &Value) -> Option<(&str, &str)> {
    match reply {
        Value::ServerError(error) => Some((error.code(), error.details().unwrap_or_default())),
        _ => None,
    }
}

/// Returns whether a server no longer is what was admitted on a connection: it wants another login, or has lost hash slots.
pub(super) fn ends_admission(reply: &Value) -> bool {
    let is_elsewhere = |(code, details)| says(&format!("{code} {details}"), &ELSEWHERE);
    is_wrong_login(reply) || refusal(reply).is_some_and(is_elsewhere)
}

/// Returns whether a server refused a request for a temporary reason, so that it may accept the same request later.
pub(super) fn is_temporary_refusal(value: &Value) -> bool {
    // While an operator changes the rights of a user, or its password. Keys that a user may not access are of another kind:
    // the server accepts the requests for all other keys meanwhile.
    let names_key = |(_, details)| says(details, &["access a key", "of the keys"]);
    let is_of_key = refusal(value).is_some_and(names_key);
    has_code(value, &TEMPORARY) || is_denial(value) && !is_of_key
}

/// Returns whether a server refused a call because of some of its keys or of the commands in its script, before it
/// executed anything, so that it may accept the requests of the call one by one.
pub(super) fn is_refusal_of_call(value: &Value) -> bool {
    is_denial(value) || has_code(value, &["CROSSSLOT"])
}

/// Returns whether a server replied with an error that has one of these codes.
pub(super) fn has_code(value: &Value, codes: &[&str]) -> bool {
    let Some((code, details)) = refusal(value) else {
        return false;
    };
    // Servers before 7.0 put the code of an error within a script into the text.
    let words = details.split([' ', ':']);
    let mut found = words.filter_map(|word| word.strip_prefix('-'));
    codes.contains(&code) || found.any(|code| codes.contains(&code))
}

/// The server runs a script, loads its data, cannot save them, has too little memory, is or was a replica, has too
/// few replicas, or belongs to an incomplete cluster.
const TEMPORARY: [&str; 9] = [
    "BUSY",
    "LOADING",
    "MISCONF",
    "OOM",
    "READONLY",
    "MASTERDOWN",
    "NOREPLICAS",
    "CLUSTERDOWN",
    "TRYAGAIN",
];

/// Returns whether a server refused a request because its user lacks a permission.
fn is_denial(reply: &Value) -> bool {
    refusal(reply).is_some_and(|(code, details)| says(code, &DENIED) || says(details, &DENIED))
}

/// Describes that a server was not connected to in time.
pub(super) fn describe_timeout(limit: Duration) -> Arc<str> {
    format!(
        "no connection within {limit:?}; check the address and the network, or raise connect_timeout"
    )
    .into()
}

/// Describes a panic; the messages of rustls have several lines.
pub(super) fn describe_panic(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
    let words: Vec<&str> = text.unwrap_or("no message").split_whitespace().collect();
    format!("connecting panicked: {}", words.join(" "))
}

/// Describes an error of a URL. Without the feature `tls-rustls`, redis-rs refuses `rediss://`.
pub(super) fn describe_url(error: &RedisError) -> String {
    let why = describe(error);
    if why.contains("can't connect with TLS") {
        return "TLS needs the feature `tls-rustls` of tower-redlock; add it to the dependency"
            .into();
    }
    format!("{why}; expected redis://[user:password@]host[:port][/db]")
}

/// Appends the remedy to an error of the server, if there is one.
///
/// Servers before 7.2 do not name the command that they refused within a script.
pub(super) fn with_remedy(why: String) -> String {
    match REMEDIES.iter().find(|(words, ..)| says(&why, words)) {
        None => why,
        Some((_, "", remedy)) => format!("{why}; {remedy}"),
        Some((_, what, remedy)) => format!("{what} ({}); {remedy}", why.trim_end_matches('.')),
    }
}

fn says(text: &str, words: &[&str]) -> bool {
    words.iter().any(|word| text.contains(word))
}

/// Words of errors, what they mean unless they say it, and the remedy. The first that fit count.
const REMEDIES: [(&[&str], &str, &str); 7] = [
    (&DENIED, "", RIGHTS),
    (&["WRONGPASS"], "AUTH was refused", WRONG_LOGIN),
    (&["NOAUTH"], "the server requires a login", MISSING_LOGIN),
    (
        &[TOO_MANY],
        "",
        "raise its maxclients, or close connections of others",
    ),
    (&["WRONGTYPE"], "", FOREIGN_DATA),
    (&ELSEWHERE, "", ALL_SLOTS),
    (
        &["SELECT is not allowed"],
        "",
        "leave the database out of the URL",
    ),
];

/// The messages by which servers, or redis-rs for them, report a missing permission; the last two within scripts.
const DENIED: [&str; 4] = [
    "NOPERM",
    "NoPerm",
    "The user executing the script can't",
    "ACL failure in script",
];

/// How servers in cluster mode refuse keys of slots that they have not, or no longer; the last two within scripts.
const ELSEWHERE: [&str; 4] = [
    "MOVED ",
    "ASK ",
    "access a non local key",
    "execute a command while the cluster is down",
];

/// The remedy for a server that has some of the hash slots. Requests never follow a key to another server, whose vote
/// is another one.
pub(super) const ALL_SLOTS: &str = "a node in cluster mode must have all of them: add them, or list a server that is not in cluster mode";

/// The remedy for foreign data under a key of this crate.
const FOREIGN_DATA: &str = "the lock key (NAMESPACE:{KEY}), or its fence (:fence), record (:done), intent \
    (:intent), readers (:readers) or writer (:writer), holds data of another application: delete it there, or choose another namespace";

/// The beginning of the message of a server that has too many connections.
const TOO_MANY: &str = "max number of clients";

/// The remedy for a wrong login.
const WRONG_LOGIN: &str =
    "check the user and the password in its URL, or what its CredentialsProvider returns";

/// The permissions for publishing releases and subscribing to them.
pub(super) const PUBLISH_PERMISSIONS: &str = "+publish +pubsub|numsub +subscribe +unsubscribe, on all channels of the namespace (&NAMESPACE:*)";

/// The remedy for a missing login.
const MISSING_LOGIN: &str = "add it to the URL: redis://user:password@host";

/// The permissions for all commands, those within scripts included.
const RIGHTS: &str = "its user needs +evalsha +script|load +info +ping +get +mget +set +del +strlen +getrange +pttl \
    +pexpire +pexpireat +time +zadd +zcount +zrem +zremrangebyscore +zrevrange +zscore +scan, on all keys of the \
    namespace, +select for a database other than 0, and +cluster|nodes in cluster mode";

#[cfg(test)]
mod tests {
    use deadpool_redis::redis::{ErrorKind, parse_redis_value};

    use super::*;

    fn reply(error: &str) -> Value {
        let reply = format!("-{error}\r\n");
        parse_redis_value(reply.as_bytes()).unwrap()
    }

    #[test]
    fn wrong_and_missing_logins_have_a_remedy() {
        let wrong = reply("WRONGPASS invalid username-password pair or user is disabled.");
        assert_eq!(
            &*describe_auth(&wrong).unwrap(),
            "AUTH was refused (WRONGPASS invalid username-password pair or user is disabled); check the \
             user and the password in its URL, or what its CredentialsProvider returns"
        );
        let unknown =
            reply("ERR unknown command 'AUTH', with args beginning with: 'locker' 'hunter2'");
        let why = describe_auth(&unknown).unwrap();
        assert!(
            why.starts_with("AUTH was refused (ERR);") && !why.contains("hunter2"),
            "{why}"
        );
        let none = reply("NOAUTH Authentication required.");
        assert_eq!(
            &*describe_refusal(&none).unwrap(),
            "the server requires a login (NOAUTH Authentication required); add it to the URL: \
             redis://user:password@host"
        );
    }

    #[test]
    fn server_with_too_many_connections_says_so_also_to_a_login() {
        let full = reply("ERR max number of clients reached");
        let why = "ERR max number of clients reached; raise its maxclients, or close connections of others";
        assert_eq!(&*describe_auth(&full).unwrap(), why);
        assert_eq!(&*describe_refusal(&full).unwrap(), why);
    }

    #[test]
    fn keys_of_another_server_have_a_remedy() {
        for refused in [
            "MOVED 3999 127.0.0.1:6381",
            "ASK 3999 127.0.0.1:6381",
            "ERR Script attempted to access a non local key in a cluster node script: 6f80, on @user_script:1.",
            "ERR Script attempted to execute a command while the cluster is down script: 6f80, on @user_script:1.",
        ] {
            let why = describe_refusal(&reply(refused)).unwrap();
            assert_eq!(*why, format!("{refused}; {ALL_SLOTS}"));
        }
    }

    #[test]
    fn tls_without_the_feature_names_the_feature() {
        let why = "can't connect with TLS, the feature is not enabled";
        let error = RedisError::from((ErrorKind::InvalidClientConfig, why));
        assert_eq!(
            describe_url(&error),
            "TLS needs the feature `tls-rustls` of tower-redlock; add it to the dependency"
        );
    }
}
