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
pub(super) fn refusal(reply: &Value) -> Option<(&str, &str)> {
    match reply {
        Value::ServerError(error) => Some((error.code(), error.details().unwrap_or_default())),
        _ => None,
    }
}

/// Returns whether a server no longer is what was admitted on a connection: it wants another login, or has lost hash slots.
pub(super) fn ends_admission(reply: &Value) -> bool {
    let is_elsewhere = |(code, details)| is_elsewhere(&format!("{code} {details}"));
    is_wrong_login(reply) || refusal(reply).is_some_and(is_elsewhere)
}

/// Returns whether a server refused a request because its user lacks a permission.
pub(super) fn is_denial(reply: &Value) -> bool {
    refusal(reply).is_some_and(|(code, details)| is_denied(code) || is_denied(details))
}

/// Returns whether a request that was denied is one for keys that its user may not access.
pub(super) fn is_denial_of_key(reply: &Value) -> bool {
    let names_key = |text: &str| text.contains("access a key") || text.contains("of the keys");
    refusal(reply).is_some_and(|(_, details)| names_key(details))
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

/// Appends the remedy to an error of the server if the login is wrong or missing, if its user lacks a permission, if it has too
/// many connections, or if a key of this crate holds foreign data.
///
/// Servers before 7.2 do not name the command that they refused within a script.
pub(super) fn with_remedy(why: String) -> String {
    let sentence = why.trim_end_matches('.');
    if is_denied(&why) {
        format!(
            "{why}; its user needs {PERMISSIONS}, on all keys of the namespace, +select for a database other than 0, and \
             +cluster|nodes in cluster mode"
        )
    } else if why.contains("WRONGPASS") {
        format!("AUTH was refused ({sentence}); {WRONG_LOGIN}")
    } else if why.contains("NOAUTH") {
        format!(
            "the server requires a login ({sentence}); add it to the URL: redis://user:password@host"
        )
    } else if why.contains(TOO_MANY) {
        format!("{why}; raise its maxclients, or close connections of others")
    } else if why.contains("WRONGTYPE") {
        format!("{why}; {FOREIGN_DATA}")
    } else if is_elsewhere(&why) {
        format!("{why}; {ALL_SLOTS}")
    } else if why.contains("SELECT is not allowed") {
        format!("{why}; leave the database out of the URL")
    } else {
        why
    }
}

fn is_denied(text: &str) -> bool {
    DENIED.iter().any(|denied| text.contains(denied))
}

fn is_elsewhere(text: &str) -> bool {
    ELSEWHERE.iter().any(|elsewhere| text.contains(elsewhere))
}

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

/// The permissions for all commands, those within scripts included.
const PERMISSIONS: &str = "+evalsha +script|load +info +ping +get +mget +set +del +strlen +getrange +pttl \
    +pexpire +pexpireat +time +zadd +zcount +zrem +zremrangebyscore +zrevrange +zscore +scan";

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
